"""What is built on `LLM`: commands, benchmarks, the demonstration model.

Owns nothing itself. Invariant: nothing outside this package imports it, so each part can be deleted and the rest still
works. It deliberately re-exports nothing: what a user imports from the library is in `nanovllm`.
"""
