"""The least time that a chip needs for a workload: arithmetic on bytes and FLOPs, nothing measured but two rates.

Owns: the floor. Invariant: a floor depends on the model's shape, the workload and the chip alone, never on an engine or
its options. It deliberately leaves out activations, launches, sampling and the host: they are what an engine can hide.

floor = prompt FLOPs / flops
        + sum over decode steps of (KV bytes / bandwidth + max(weight bytes / bandwidth, FLOPs / flops))

What is assumed, each needed to come out at the published table (0.6B and 8B on an H200, within 4 %):
- A request's first output token comes from its prompt, so it decodes output - 1 times; decode number t reads the KV of
  prompt + t tokens. Prompts add FLOPs only: nothing is read for them.
- FLOPs are 2 for each weight of the layers and token, plus 2 for each weight of the output layer and sampled token,
  plus, in prompts, attention over the causal half: 2 * heads * head_dim * prompt^2 a layer. Decode attention costs
  bytes, not FLOPs. The last layer counts like the others, though of a prompt it owes little but K and V.
- Weights read in a step are the layers' and the output layer's; of the embedding, only the rows of the batch (not
  counted).
- At most MAX_RUNNING = 512 requests a GPU decode at once, admitted in order, the next as soon as one ends; memory for
  KV is never the limit. (All 1,024 at once would need 172 GB of KV in 8B mixed1024 and lower that floor from 41.0 to
  40.2 s.)
- Weights and KV in bf16; n GPUs divide everything by n, and what they send each other is free (8B mixed1024 on two:
  20.1).
- Shared prompts: a run of tokens that several requests hold is computed once and read once a step for all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from nanovllm.entrypoints.bench.workloads import Workload

MAX_RUNNING = 512  # requests a GPU


@dataclass(frozen=True)
class Chip:
    """Measured rates: a device-to-device copy in bytes/s, a large bf16 matrix product in FLOP/s."""

    bandwidth: float
    flops: float


H200 = Chip(bandwidth=4.3e12, flops=790e12)
KNOWN_CHIPS = {"H200": H200}  # by a part of the device's name


@dataclass(frozen=True)
class Shape:
    """What of a model the floor needs; counts are numbers of weights."""

    layer_weights: int  # all layers' matrices together
    head_weights: int  # the output layer
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_values_per_token(self) -> int:
        """K and V values that a token leaves behind, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Floor:
    """Seconds, by what takes them; they do not overlap. `bytes_read` is the weights' and KV's over the decode steps."""

    prompt_seconds: float
    matmul_seconds: float
    kv_seconds: float
    bytes_read: float
    num_steps: int

    @property
    def seconds(self) -> float:
        """The floor."""
        return self.prompt_seconds + self.matmul_seconds + self.kv_seconds


def chip_of(device_name: str, bandwidth: float | None = None, flops: float | None = None) -> Chip | None:
    """Rates of a device by its name, or those given (bytes/s, FLOP/s); None where neither is known."""
    known = next((chip for name, chip in KNOWN_CHIPS.items() if name in device_name), None)
    if bandwidth is None and flops is None:
        return known
    if known is not None:
        return Chip(bandwidth or known.bandwidth, flops or known.flops)
    return Chip(bandwidth, flops) if bandwidth and flops else None


def shape_of(config: dict[str, Any]) -> Shape:
    """Read the shape off a config.json (a dense decoder with a gated MLP)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    layers = config["num_hidden_layers"]
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * config["intermediate_size"]
    return Shape(layers * (attention + mlp), config["vocab_size"] * hidden, layers, heads, kv_heads, head_dim)


def compute_floor(
    shape: Shape, workload: Workload, chip: Chip, num_gpus: int = 1, weight_bytes: float = 2, kv_bytes: float = 2
) -> Floor:
    """The floor of a workload. `weight_bytes` and `kv_bytes` are bytes a value (1 for fp8)."""
    prompt_seconds = _prompt_flops(shape, workload) / chip.flops
    all_weights = shape.layer_weights + shape.head_weights
    read_seconds = all_weights * weight_bytes / chip.bandwidth
    matmul_seconds = 0.0
    batches = _decode_batches(workload, MAX_RUNNING * num_gpus)
    for num_running, num_steps in batches.items():
        matmul_seconds += num_steps * max(read_seconds, 2 * all_weights * num_running / chip.flops)
    kv_read = _kv_tokens_read(workload) * shape.kv_values_per_token * kv_bytes
    num_steps = sum(batches.values())
    return Floor(
        prompt_seconds / num_gpus,
        matmul_seconds / num_gpus,
        kv_read / chip.bandwidth / num_gpus,
        kv_read + num_steps * all_weights * weight_bytes,
        num_steps,
    )


def _prompt_flops(shape: Shape, workload: Workload) -> float:
    """Of all prompts; a run of tokens in common is computed once, at its own place in the prompt."""

    def attention(start: int, end: int) -> int:
        return end * end - start * start  # causal half of tokens [start, end) over [0, end), times two

    if workload.groups is None:
        num_tokens = workload.num_input_tokens
        pairs = sum(attention(0, length) for length in workload.prompt_lens)
    else:  # nested runs: the one in common to all, then each prompt's own
        num_tokens = sum(tokens for tokens, _ in workload.groups)
        common = workload.groups[0][0]
        pairs = attention(0, common) + sum(attention(common, common + own) for own, _ in workload.groups[1:])
    matmuls = 2 * shape.layer_weights * num_tokens + 2 * shape.head_weights * len(workload.prompts)
    return matmuls + 2 * shape.num_layers * shape.num_heads * shape.head_dim * pairs


def _decode_batches(workload: Workload, max_running: int) -> Counter[int]:
    """{requests in a decode step: number of such steps}, with at most `max_running` at once, admitted in order."""
    batches: Counter[int] = Counter()
    waiting = [length - 1 for length in reversed(workload.output_lens) if length > 1]  # decodes, the next one last
    running: list[int] = []
    while waiting or running:
        while waiting and len(running) < max_running:
            running.append(waiting.pop())
        num_steps = min(running)
        batches[len(running)] += num_steps
        running = [left - num_steps for left in running if left > num_steps]
    return batches


def _kv_tokens_read(workload: Workload) -> int:
    """Tokens whose KV is read, over all decodes of all requests; what a group holds in common counts once a step."""
    requests = list(zip(workload.prompt_lens, workload.output_lens, strict=True))
    total = sum((length - 1) * prompt + (length - 1) * length // 2 for prompt, length in requests)
    if workload.groups is None:
        return total
    num_decodes = max(workload.output_lens) - 1  # groups run together, all outputs being of one length
    return total - sum(num_decodes * tokens * (members - 1) for tokens, members in workload.groups)
