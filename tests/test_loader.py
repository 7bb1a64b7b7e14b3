"""The loader: what it reads, what it ignores, and what it names when a checkpoint does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.layers.linear import Linear
from nanovllm.model_config import read_model_config
from nanovllm.models import build_model
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.worker import loader
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


class NoBackend:
    """Loading needs no attention."""

    needs_rotated_k = False


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    config = read_model_config(folder)
    model = build_model(config, NoBackend(), dtype, CPU, 16)  # type: ignore[arg-type]
    for parameter in model.parameters():  # what is not loaded shows
        parameter.data.fill_(float("nan"))
    loader.load_weights(model, folder, config)
    return model


def state(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    """The model's weights by their checkpoint names."""
    return {name: target.tensor for name, target in loader.weight_targets(model).items()}


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite the folder's single weight file after `change` edited its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def test_every_tensor_lands_where_its_name_says(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    model = load(folder)
    saved = load_file(folder / "model.safetensors")
    loaded = state(model)
    assert set(loaded) == set(saved)
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name
    qkv = model.model.layers[1].self_attn.qkv_proj
    names = [f"model.layers.1.self_attn.{part}.bias" for part in ("q_proj", "k_proj", "v_proj")]
    assert isinstance(qkv, Linear) and qkv.bias is not None
    assert torch.equal(qkv.bias, torch.cat([saved[name] for name in names]))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_dtype_is_converted(tmp_path: Path, stored: torch.dtype) -> None:
    model = load(make_tiny_model(tmp_path, dtype=stored), torch.bfloat16)
    saved = load_file(tmp_path / "model.safetensors")
    for name, tensor in state(model).items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, saved[name].bfloat16())


def test_index_decides_and_stray_files_are_ignored(tmp_path: Path, folder: Path) -> None:
    sharded = make_tiny_model(tmp_path / "sharded", max_shard_size="60KB")
    save_file({"other.weight": torch.zeros(3)}, sharded / "adapter_model.safetensors")
    stale = load_file(folder / "model.safetensors")
    save_file({name: tensor * 0 for name, tensor in stale.items()}, sharded / "model.safetensors")
    torch.save({}, sharded / "optimizer.bin")
    expected = state(load(folder))
    for name, tensor in state(load(sharded)).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_stale_copy_inside_an_indexed_file_is_ignored(tmp_path: Path, folder: Path) -> None:
    sharded = make_tiny_model(tmp_path / "sharded", max_shard_size="60KB")
    weight_map = json.loads((sharded / loader.INDEX).read_text())["weight_map"]
    other = next(file for file in sorted(set(weight_map.values())) if file != weight_map[Q_PROJ])
    tensors = load_file(sharded / other)
    tensors[Q_PROJ] = torch.zeros(128, 64)
    save_file(tensors, sharded / other)
    assert torch.equal(state(load(sharded))[Q_PROJ], load_file(folder / "model.safetensors")[Q_PROJ])


def test_single_file_of_another_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert torch.isfinite(state(load(folder))[Q_PROJ]).all()


def test_two_files_without_index_are_refused_and_listed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"x": torch.zeros(1)}, folder / "b.safetensors")
    with pytest.raises(ValueError, match=r"index\.json.*a\.safetensors, b\.safetensors"):
        load(folder)


def test_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="load_format='dummy'"):
        load(folder)


def test_missing_shard_and_index_entry_are_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, max_shard_size="60KB")
    index = json.loads((folder / loader.INDEX).read_text())
    file = index["weight_map"][Q_PROJ]
    tensors = load_file(folder / file)
    del tensors[Q_PROJ]
    save_file({**tensors, "pad": torch.zeros(1)}, folder / file)
    with pytest.raises(ValueError, match=rf"{Q_PROJ} in '{file}', which lacks"):
        load(folder)
    (folder / file).unlink()
    with pytest.raises(ValueError, match=rf"'{file}', which is not in"):
        load(folder)


def test_cut_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors.*download complete"):
        load(folder)


def test_missing_unexpected_and_wrong_shapes_are_all_named_before_anything_is_written(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"], tensors[Q_PROJ]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(95, 64)
        tensors[EMBEDDING] = tensors[EMBEDDING][:-20]

    edit(folder, change)
    config = read_model_config(folder)
    model = build_model(config, NoBackend(), torch.float32, CPU, 16)  # type: ignore[arg-type]
    model.lm_head.weight.data.fill_(7.0)
    with pytest.raises(ValueError) as error:
        loader.load_weights(model, folder, config)
    message = str(error.value)
    assert "missing (2)" in message and "model.norm.weight" in message and Q_PROJ in message
    assert "unexpected (1): model.layers.0.self_attn.q_proj.bias" in message
    assert "model.layers.1.mlp.up_proj.weight is [95, 64], config.json asks for [96, 64]" in message
    assert f"{EMBEDDING} is [300, 64], config.json asks for [320, 64]" in message
    assert (model.lm_head.weight == 7.0).all()


def test_more_vocabulary_rows_than_the_config_says(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({OUTPUT: torch.zeros(330, 64)}))
    with pytest.raises(ValueError, match=r"lm_head\.weight is \[330, 64\], config\.json asks for \[320, 64\]"):
        load(folder)


def test_old_rotary_buffers_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(16)}))
    load(folder)


def test_tied_with_and_without_the_output_layer(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tie_word_embeddings=True)
    saved = load_file(folder / "model.safetensors")
    assert OUTPUT not in saved
    model = load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, saved[EMBEDDING])
    edit(folder, lambda tensors: tensors.update({OUTPUT: tensors[EMBEDDING].clone()}))
    assert torch.equal(load(folder).lm_head.weight, saved[EMBEDDING])
    edit(folder, lambda tensors: tensors.pop(EMBEDDING))  # the shared table under its other name only
    assert torch.equal(load(folder).model.embed_tokens.weight, saved[EMBEDDING])


def test_untied_without_the_output_layer_names_it(folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    assert torch.equal(load(folder).lm_head.weight, saved[OUTPUT])
    edit(folder, lambda tensors: tensors.pop(OUTPUT))
    with pytest.raises(ValueError, match=r"missing \(1\): lm_head\.weight"):
        load(folder)


def test_quantized_tensors_are_refused(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.int8)}))
    with pytest.raises(ValueError, match=f"{Q_PROJ} has dtype torch.int8"):
        load(folder)


def test_weights_from_an_iterator_are_applied_in_place(folder: Path) -> None:
    model = load(folder)
    pointers = {name: tensor.data_ptr() for name, tensor in state(model).items()}
    new = {name: tensor.bfloat16() + 1 for name, tensor in state(model).items()}
    loader.apply_weights(model, iter(new.items()), tied=False)
    for name, tensor in state(model).items():
        assert torch.equal(tensor, new[name].float()) and tensor.data_ptr() == pointers[name]
    del new[Q_PROJ]
    with pytest.raises(ValueError, match=Q_PROJ):
        loader.apply_weights(model, iter(new.items()), tied=False)


@pytest.mark.gpu(seconds=3)
def test_staged_copies_to_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_STAGING_BYTES", 1000)  # several pieces a tensor, the last one shorter
    config = read_model_config(folder)
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(config, NoBackend(), dtype, torch.device("cuda"), 16)  # type: ignore[arg-type]
        loader.load_weights(model, folder, config)
        for name, tensor in load_file(folder / "model.safetensors").items():
            assert torch.equal(state(model)[name].cpu(), tensor.to(dtype)), name


def test_one_tensor_at_a_time(folder: Path) -> None:
    """The iterator holds no tensor once the next is asked for: the peak is the model and one tensor."""
    import weakref

    alive: list[weakref.ref[Tensor]] = []
    for _, tensor in loader.iterate_weights(loader.weight_files(folder)):
        assert all(reference() is None for reference in alive[:-1])
        alive.append(weakref.ref(tensor))
    assert len(alive) > 20
