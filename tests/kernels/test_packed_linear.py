"""Packed weights: the same products, for every number of rows, and never those of weights that have changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nanovllm.kernels.packed_linear import MAX_PACKED_ROWS, can_pack, linear, pack
from nanovllm.layers.embedding import Embedding, LMHead
from nanovllm.layers.linear import Linear
from nanovllm.layers.parallel import SINGLE
from nanovllm.worker import weights

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def skip_where_not_packed(dtype: torch.dtype) -> None:
    if not can_pack(torch.empty(8, 8, dtype=dtype)):
        pytest.skip(f"this processor has no fast packed products in {dtype}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (33, 20), (1000, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_equal_the_plain_ones(dtype: torch.dtype, shape: tuple[int, int], has_bias: bool) -> None:
    skip_where_not_packed(dtype)
    weight = torch.randn(shape, dtype=dtype)
    bias = torch.randn(shape[0], dtype=dtype) if has_bias else None
    packed = pack(weight)
    for num_rows in (0, 1, 2, 7, 32, 33, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1, 300):
        x = torch.randn(num_rows, 2 * shape[1], dtype=dtype)[:, : shape[1]]
        expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        product = linear(x, weight, bias, packed)
        assert product.dtype == dtype and product.shape == expected.shape
        torch.testing.assert_close(product.double(), expected, atol=TOLERANCE[dtype] * 4 * shape[1] ** 0.5, rtol=0.0)


@pytest.mark.parametrize("num_rows", [1, 5, 32, MAX_PACKED_ROWS])
def test_a_row_alone_is_a_row_among_others(num_rows: int) -> None:
    """Up to the rounding that a plain product has as well."""
    skip_where_not_packed(torch.float32)
    weight, x = torch.randn(960, 576), torch.randn(num_rows, 576)
    packed = pack(weight)
    alone = torch.cat([linear(row[None], weight, None, packed) for row in x])
    torch.testing.assert_close(linear(x, weight, None, packed), alone, atol=1e-4, rtol=1e-5)


def test_what_is_not_packed() -> None:
    assert not can_pack(torch.empty(8, 8, dtype=torch.float16))
    assert not can_pack(torch.empty(8, 8, device="meta"))


def make_model() -> nn.ModuleList:
    """An embedding, a layer and the output layer, tied to the former."""
    embedding = Embedding(50, 16, torch.float32, CPU, SINGLE)
    layers = [
        Linear(16, 16, False, torch.float32, CPU, "output", SINGLE),
        LMHead(50, 16, torch.float32, CPU, SINGLE, embedding),
    ]
    model = nn.ModuleList([embedding, *layers])
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def outputs(model: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, layer, head = model
    out = torch.empty(len(x), 50)
    assert head(x, out) is out
    return layer(x), head(x), out


def test_a_model_is_packed_and_packed_again() -> None:
    skip_where_not_packed(torch.float32)
    model, x = make_model(), torch.randn(3, 16)
    manager = weights.Weights(model, None)  # type: ignore[arg-type]
    plain = outputs(model, x)
    manager.pack()
    assert model[1].packed is not None and model[2].packed is not None
    torch.testing.assert_close(outputs(model, x), plain)
    for parameter in model.parameters():
        parameter.data.neg_()
    manager.pack()
    torch.testing.assert_close(outputs(model, x), tuple(-output for output in plain))
    manager.release(keep=True)
    assert model[1].packed is None and model[2].packed is None
    manager.restore()
    assert model[1].packed is not None and model[2].packed is not None
    torch.testing.assert_close(outputs(model, x), tuple(-output for output in plain))
    manager.release(keep=False)
    assert model[1].packed is None and model[2].packed is None


def test_copies_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_where_not_packed(torch.float32)
    monkeypatch.setattr(weights, "MAX_PACKED_BYTES", 16 * 16 * 4)
    model = make_model()
    weights.Weights(model, None).pack()  # type: ignore[arg-type]
    assert model[1].packed is not None and model[2].packed is None
