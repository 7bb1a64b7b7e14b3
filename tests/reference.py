"""What transformers says: greedy tokens and logits in float32, one prompt at a time, the simplest way."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch


@lru_cache(maxsize=16)
def load_reference(folder: str, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.to(device).eval()


@torch.no_grad()
def reference_logits(
    folder: Path | str, token_ids: list[int], dtype=torch.float32, device: str = "cpu"
) -> torch.Tensor:
    """Logits [len(token_ids), vocab_size], float32, on the CPU."""
    model = load_reference(str(folder), dtype, device)
    return model(torch.tensor([token_ids], device=device)).logits[0].float().cpu()


@torch.no_grad()
def reference_greedy(
    folder: Path | str, prompt: list[int], num_tokens: int, end_ids: tuple[int, ...] = (), device: str = "cpu"
) -> list[int]:
    """Greedy continuation, at most `num_tokens` long, an end id included."""
    model = load_reference(str(folder), torch.float32, device)
    cache, inputs, output = None, torch.tensor([prompt], device=device), []
    for _ in range(num_tokens):
        result = model(inputs, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        token_id = int(result.logits[0, -1].argmax())
        output.append(token_id)
        if token_id in end_ids:
            break
        inputs = torch.tensor([[token_id]], device=device)
    return output
