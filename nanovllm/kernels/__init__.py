"""GPU kernels, each beside its torch reference.

Owns: everything that this library launches through Triton. Invariant: a kernel module offers `name` (dispatches on the
device of its tensors), `name_triton` (the launcher) and `name_reference` (plain torch: the specification, and what runs
on the CPU). This package deliberately holds no state and no layers: workspaces belong to the callers, weights to
`nanovllm.layers`.
"""
