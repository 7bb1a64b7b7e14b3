"""How rows take up sampled tokens, kernel against reference and both against the rule written as a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.advance import advance, advance_reference, advance_triton


def make_step(num_rows: int, seed: int = 0) -> dict[str, Any]:
    """A batch of `num_rows` distinct rows: decodes, then chunks of which some sample; two rows are full."""
    generator = torch.Generator().manual_seed(seed)
    total = num_rows + 40
    max_model_len = 50
    lengths = torch.ones(num_rows, dtype=torch.int32)
    lengths[num_rows // 2 :] = torch.randint(1, 20, (num_rows - num_rows // 2,), generator=generator).int()
    cu_seqlens_q = torch.zeros(num_rows + 1, dtype=torch.int32)
    cu_seqlens_q[1:] = lengths.cumsum(0)
    num_tokens = torch.randint(1, max_model_len, (total,), generator=generator).int()
    num_tokens[[3, 5]] = max_model_len
    num_sampled = num_rows - num_rows // 4
    return {
        "rows": (torch.randperm(total - 1, generator=generator)[:num_rows] + 1).int(),
        "cu_seqlens_q": cu_seqlens_q,
        "num_sampled": num_sampled,
        "sampled": torch.randint(-1, 1000, (num_sampled,), generator=generator).int(),
        "token_ids": torch.full((total, max_model_len), 7, dtype=torch.int32),
        "num_tokens": num_tokens,
        "num_computed": torch.randint(0, 30, (total,), generator=generator).int(),
    }


def advance_by_hand(step: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    token_ids, num_tokens, num_computed = (step[k].clone() for k in ("token_ids", "num_tokens", "num_computed"))
    for b, r in enumerate(step["rows"].tolist()):
        if r == 0:
            continue
        num_computed[r] += int(step["cu_seqlens_q"][b + 1] - step["cu_seqlens_q"][b])
        if b < step["num_sampled"]:
            if num_tokens[r] < token_ids.shape[1]:
                token_ids[r, int(num_tokens[r])] = step["sampled"][b]
            num_tokens[r] += 1
    return token_ids, num_tokens, num_computed


@pytest.mark.parametrize("run", [advance_reference, advance_triton, advance])
@pytest.mark.parametrize("num_rows", [1, 2, 100, 300])
def test_against_the_rule(kernel_device: str, run: Any, num_rows: int) -> None:
    step = make_step(num_rows, seed=num_rows)
    step["rows"][num_rows // 2 :: 3] = 0  # padding, many times over
    expected = advance_by_hand(step)
    step = {k: v.to(kernel_device) if isinstance(v, Tensor) else v for k, v in step.items()}
    run(**step)
    for name, value in zip(("token_ids", "num_tokens", "num_computed"), expected, strict=True):
        assert torch.equal(step[name].cpu(), value), name


@pytest.mark.parametrize("run", [advance_reference, advance_triton])
def test_nothing_to_do(kernel_device: str, run: Any) -> None:
    step = make_step(4)
    step = {k: v.to(kernel_device) if isinstance(v, Tensor) else v for k, v in step.items()}
    before = [step[name].clone() for name in ("token_ids", "num_tokens")]
    step["num_sampled"] = 0
    run(**step)
    run(**{**step, "rows": step["rows"][:0], "cu_seqlens_q": step["cu_seqlens_q"][:1]})
    assert torch.equal(step["token_ids"], before[0]) and torch.equal(step["num_tokens"], before[1])


@pytest.mark.gpu(seconds=2)
def test_real_step() -> None:
    for num_rows in (1, 100, 512):
        test_against_the_rule("cuda", advance, num_rows)
