"""Log probabilities and ranks of tokens: the kernel against the reference, the reference against log_softmax."""

from __future__ import annotations

import pytest
import torch

from nanovllm.kernels.logprobs import token_logprobs_reference, token_logprobs_triton


def problem(num_rows: int, vocab_size: int, dtype: torch.dtype, device: str):
    generator = torch.Generator().manual_seed(num_rows)
    logits = (5 * torch.randn(num_rows + 2, vocab_size, generator=generator)).to(dtype)
    logits[:, ::7] = logits[:, 1].clone()[:, None]  # equals
    logits[1, : vocab_size // 2] = float("-inf")
    index = torch.randint(num_rows + 2, (num_rows,), generator=generator)
    tokens = torch.randint(vocab_size, (num_rows,), generator=generator, dtype=torch.int32)
    tokens[0] = 1
    return logits.to(device), index.to(device), tokens.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_is_log_softmax(dtype):
    logits, index, tokens = problem(70, 320, dtype, "cpu")
    logprobs, ranks, log_sums = token_logprobs_reference(logits, index, tokens)
    exact = logits.double().log_softmax(1)[index]  # [n, V]
    assert torch.allclose(logprobs.double(), exact.gather(1, tokens[:, None].long())[:, 0], atol=1e-5)
    assert torch.allclose(log_sums.double(), logits.double().logsumexp(1)[index], atol=1e-5)
    order = logits[index].float().sort(dim=1, descending=True, stable=True).indices
    assert torch.equal((order == tokens[:, None]).int().argmax(1) + 1, ranks.long())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [320, 5000, 9001])
def test_kernel_equals_reference(kernel_device, vocab_size, dtype):
    logits, index, tokens = problem(5, vocab_size, dtype, kernel_device)
    tokens[1] = -1
    expected = token_logprobs_reference(logits, index, tokens)
    actual = token_logprobs_triton(logits, index, tokens)
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[0], expected[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(actual[2], expected[2], atol=2e-5, rtol=0)


def test_no_rows(kernel_device):
    logits, index, tokens = problem(1, 320, torch.float32, kernel_device)
    assert [len(result) for result in token_logprobs_triton(logits, index[:0], tokens[:0])] == [0, 0, 0]


@pytest.mark.gpu(seconds=3)
def test_kernel_at_a_real_size():
    logits, index, tokens = problem(64, 151936, torch.bfloat16, "cuda")
    expected = token_logprobs_reference(logits, index, tokens)
    actual = token_logprobs_triton(logits, index, tokens)
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[0], expected[0], atol=1e-4, rtol=0)
