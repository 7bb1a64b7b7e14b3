"""Every family's logits against transformers', in float32, through a real paged KV cache and the torch backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanovllm.attention import AttentionMetadata, AttentionSpec, choose_backend
from nanovllm.layers.rotary import build_cos_sin, inverse_frequencies
from nanovllm.model_config import ARCHITECTURES, ModelConfig, read_model_config
from nanovllm.models import MODELS, build_model
from nanovllm.rope_config import read_rope_config
from nanovllm.worker.loader import initialize_dummy_weights, load_weights
from tests.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_model

CPU = torch.device("cpu")
TOLERANCE = 1e-4


class Runner:
    """One sequence through a model, its blocks scattered over a small cache."""

    def __init__(self, folder: Path, max_model_len: int, dtype: torch.dtype = torch.float32) -> None:
        self.config = read_model_config(folder)
        spec = AttentionSpec(
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=dtype,
            device=CPU,
            max_num_seqs=4,
            max_model_len=max_model_len,
            block_size=16,
            windows=frozenset(self.config.layer_windows),
        )
        self.backend = choose_backend("torch", spec)
        self.model = build_model(self.config, self.backend, dtype, CPU, max_model_len)
        load_weights(self.model, folder, self.config)
        num_blocks = -(-max_model_len // 16)
        shape = (num_blocks + 1, 16, self.config.num_kv_heads, self.config.head_dim)
        self.kv_caches = [
            (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in self.config.layer_windows
        ]
        self.block_table = torch.arange(num_blocks, 0, -1, dtype=torch.int32)[None]  # [1, M]

    @torch.inference_mode()
    def step(self, token_ids: Tensor, start: int) -> Tensor:
        """Logits [n, vocab] of int [n] tokens at positions start, start + 1, ...; earlier ones are in the cache."""
        num_tokens, end = len(token_ids), start + len(token_ids)
        positions = torch.arange(start, end, dtype=torch.int32)
        slots = self.block_table[0].long()[positions // 16] * 16 + positions % 16
        metadata = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_table=self.block_table,
            slot_mapping=slots,
            max_seqlen_q=num_tokens,
            max_seqlen_k=end,
            num_decode_tokens=int(num_tokens == 1),
            has_cached_prefix=start > 0 and num_tokens > 1,
        )
        hidden = self.model(token_ids.int(), positions, self.kv_caches, metadata)
        return self.model.compute_logits(hidden)


def reference_logits(folder: Path, token_ids: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(token_ids[None]).logits[0]


def random_ids(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "options"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_logits_equal_transformers(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A prompt, a chunk behind it, then decodes: beyond every window (8) and every original rope length (32 or 64)."""
    folder = make_tiny_model(tmp_path, **options)
    token_ids = random_ids(100)
    runner = Runner(folder, max_model_len=112)
    pieces = [(0, 70), (70, 90), *((i, i + 1) for i in range(90, 100))]
    logits = torch.cat([runner.step(token_ids[start:end], start) for start, end in pieces])
    expected = reference_logits(folder, token_ids)
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() < TOLERANCE


def test_every_architecture_has_a_model() -> None:
    assert set(MODELS) == set(ARCHITECTURES)


def test_greedy_tokens_of_tiny_models_vary(tmp_path: Path) -> None:
    """A tiny model that repeats one token would hide errors in whatever test uses it."""
    runner = Runner(make_tiny_model(tmp_path), max_model_len=64)
    token_ids = random_ids(8)
    logits = runner.step(token_ids, 0)[-1]
    generated: list[int] = []
    for position in range(8, 40):
        generated.append(int(logits.argmax()))
        logits = runner.step(torch.tensor(generated[-1:]), position)[-1]
    assert len(set(generated)) > 8


def test_scaling_changes_the_logits(tmp_path: Path) -> None:
    """YaRN with factor 4 against none, same weights: the rope scaling of the config is not ignored."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    token_ids = random_ids(24)
    plain = Runner(make_tiny_model(tmp_path / "plain"), 64).step(token_ids, 0)
    scaled = Runner(make_tiny_model(tmp_path / "yarn", rope_parameters=yarn), 64).step(token_ids, 0)
    assert (plain - scaled).abs().max() > 100 * TOLERANCE


def test_logits_have_the_models_dtype(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    token_ids = random_ids(20)
    logits = Runner(folder, 32, torch.bfloat16).step(token_ids, 0)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - reference_logits(folder, token_ids)).abs().max() < 0.3


def test_dummy_weights_are_finite_and_fixed_by_the_seed(tmp_path: Path) -> None:
    runner = Runner(make_tiny_model(tmp_path), 32)
    initialize_dummy_weights(runner.model, seed=1)
    first = runner.step(random_ids(16), 0)
    assert torch.isfinite(first).all() and first.std() > 0
    initialize_dummy_weights(runner.model, seed=1)
    assert torch.equal(first, runner.step(random_ids(16), 0))
    initialize_dummy_weights(runner.model, seed=2)
    assert not torch.equal(first, runner.step(random_ids(16), 0))


def test_layers_share_one_rope_table_of_the_engines_length(tmp_path: Path) -> None:
    model = Runner(make_tiny_model(tmp_path), 48).model
    tables = [layer.self_attn.cos_sin for layer in model.model.layers]
    assert all(table is tables[0] for table in tables)
    assert tables[0].shape == (48, 32) and tables[0].dtype == torch.float32


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join(str(value) for value in rope.values()))
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (1000000.0, 128)])
def test_rope_table_equals_transformers(rope: dict[str, Any], theta: float, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    num_positions = 6000  # above the original length
    given = {**rope, "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=dict(given)
    )
    reference = LlamaRotaryEmbedding(config)
    positions = torch.arange(num_positions)[None]
    cos, sin = reference(torch.zeros(1, dtype=torch.float32), positions)  # [1, P, D] each, halves repeated

    ours, _ = read_rope_config({"rope_parameters": given}, 4096)
    torch.testing.assert_close(inverse_frequencies(ours, head_dim), reference.inv_freq, rtol=1e-6, atol=0)
    table = build_cos_sin(ours, head_dim, num_positions, CPU)
    expected = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    assert (table - expected).abs().max() < 1e-3  # an ulp of a frequency, times 6000 positions
    assert (table - expected).abs()[:64].max() < 2e-5


def test_window_that_hides_nothing_is_dropped_with_the_length(tmp_path: Path) -> None:
    config: ModelConfig = read_model_config(make_tiny_model(tmp_path, "mistral", sliding_window=8))
    assert config.capped(9).layer_windows == (8, 8)
    assert config.capped(8).layer_windows == (None, None)
    assert config.capped(10**9).max_model_len == config.max_model_len
