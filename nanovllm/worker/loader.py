"""Weights: from safetensors files, or from any iterator of (name, tensor), into a model's parameters.

Owns: the mapping from checkpoint names to parameters, or rows of merged ones, and the cutting for ranks. Invariant: a
load that returns has filled every parameter exactly from the tensor of its name; one that cannot raises, with every
missing, unexpected and wrong-shaped tensor named (for a folder, from the headers, before any parameter is touched). It
deliberately never holds more than one tensor beside the model; of a mapped file, a rank reads its own part's pages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanovllm.layers.embedding import VocabTable
from nanovllm.layers.linear import Linear
from nanovllm.layers.parallel import Shard
from nanovllm.model_config import INDEX, ModelConfig, list_folder

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")  # a buffer that old versions of transformers saved
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MAX_NAMED = 20
_STAGING_BYTES = 64 << 20


def load_weights(model: nn.Module, folder: str | Path, model_config: ModelConfig) -> None:
    """Fill `model` from the folder's safetensors, tensor by tensor, converting each to its parameter's dtype.

    With an index file, it decides what is read, and other files are ignored; without one, the folder must hold
    model.safetensors or a single *.safetensors.

    Raises:
        ValueError: no usable weight file, an index that names what is not there, or tensors that are missing,
            unexpected, quantized or of the wrong shape.
    """
    apply_weights(model, checked_weights(model, folder, model_config), model_config.tie_word_embeddings)


def checked_weights(model: nn.Module, folder: str | Path, model_config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a folder's weights, once their names and shapes have been found to fit the model.

    Raises:
        ValueError: as `load_weights`.
    """
    files = weight_files(Path(folder).expanduser())
    _check(weight_targets(model), dict(_iterate_shapes(files)), model_config.tie_word_embeddings)
    return iterate_weights(files)


def apply_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]], tied: bool) -> None:
    """Copy named tensors, on any device and of any float dtype, into the model's parameters, in place.

    Raises:
        ValueError: as `load_weights`; by then the tensors that fit have been copied.
    """
    targets = weight_targets(model)
    copy = _HostToDevice()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in weights:
        shapes[name] = tuple(tensor.shape)
        if tied and name == OUTPUT:
            if EMBEDDING in shapes:
                continue
            name = EMBEDDING  # a file may hold the shared table under the other name only
        target = targets.get(name)
        if target is None or target.shape != tuple(tensor.shape):
            continue  # _check will name it
        check_float(name, tensor)
        copy(target.tensor, tensor[target.index])
    _check(targets, shapes, tied)


def check_float(name: str, tensor: Tensor) -> None:
    """Raises ValueError if a weight is of no dtype that a parameter can be converted from."""
    if tensor.dtype not in _FLOATS:
        raise ValueError(f"weight {name} has dtype {tensor.dtype}: quantized checkpoints are not supported")


class _HostToDevice:
    """Copies tensors into parameters, by way of one pinned buffer where they travel from the CPU to a GPU.

    From mapped files that is about four times as fast as copying pageable memory (20 against 4.5 GB/s on an H200,
    files in the page cache), and the device holds no more than the model and one buffer.
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def __call__(self, target: Tensor, source: Tensor) -> None:
        if target.device.type != "cuda" or source.device.type != "cpu":
            target.copy_(source)
            return
        if self.buffer is None:
            self.buffer = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        staging = self.buffer.view(source.dtype)
        pieces = zip(source.reshape(-1).split(len(staging)), target.view(-1).split(len(staging)), strict=True)
        for host, device in pieces:
            pinned = staging[: len(host)].copy_(host)
            device.copy_(pinned.to(device.device))  # blocking, so the buffer is free again; converted on the GPU


@dataclass(frozen=True)
class Target:
    """Where a tensor of a checkpoint goes: `tensor`, a parameter or some of its rows, takes `index` of `shape`."""

    tensor: Tensor
    shape: tuple[int, ...]
    index: tuple[slice, ...]


def weight_targets(model: nn.Module) -> dict[str, Target]:
    """By the checkpoint's names; a module whose parameters are merged or cut says so by `shards`."""
    targets: dict[str, Target] = {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            whole = Shard("", slice(None), tuple(parameter.shape), ())
            shards = module.shards(kind) if isinstance(module, Linear | VocabTable) else [whole]
            for shard in shards:
                name = f"{path.rpartition('.')[0]}.{shard.name}" if shard.name else path
                targets[f"{name}.{kind}"] = Target(parameter.data[shard.rows], shard.shape, shard.index)
    return targets


def _check(targets: Mapping[str, Target], shapes: Mapping[str, tuple[int, ...]], tied: bool) -> None:
    """Raise a ValueError that names all that does not fit between the model's parameters and a checkpoint's tensors."""
    given = {name: shape for name, shape in shapes.items() if not _IGNORED.search(name)}
    if tied and EMBEDDING not in given and OUTPUT in given:
        given[EMBEDDING] = given[OUTPUT]
    expected = {name: target.shape for name, target in targets.items()}
    if tied:  # not the embedding's twin, but whether a checkpoint brings it is no matter
        expected.pop(OUTPUT, None)
        given.pop(OUTPUT, None)
    problems = {
        "missing": [name for name in expected if name not in given],
        "unexpected": [name for name in given if name not in expected],
        "of the wrong shape": [
            f"{name} is {list(shape)}, config.json asks for {list(expected[name])}"
            for name, shape in given.items()
            if name in expected and shape != expected[name]
        ],
    }
    lines = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            lines.append(f"{kind} ({len(names)}): {', '.join(names[:_MAX_NAMED])}{more}")
    if lines:
        raise ValueError("the weights do not fit the model; " + "; ".join(lines))


def weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """The files to read, and of each the tensors to take; None: all.

    Raises:
        ValueError: nothing usable in the folder, or the index names a file that is not there.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{str(index)!r} is no index of safetensors: {error!r}") from error
        files: dict[Path, list[str] | None] = {}
        for file in sorted(set(weight_map.values())):
            if not (folder / file).is_file():
                raise ValueError(f"{INDEX} names {file!r}, which is not in {str(folder)!r}; is the download complete?")
            files[folder / file] = [name for name, where in weight_map.items() if where == file]
        return files
    found = sorted(folder.glob("*.safetensors"))
    if folder / "model.safetensors" in found:
        return {folder / "model.safetensors": None}
    if len(found) == 1:
        return {found[0]: None}
    raise ValueError(
        f"model folder {str(folder)!r} needs {INDEX}, model.safetensors or a single *.safetensors "
        f"(or load_format='dummy'); it holds {list_folder(folder)}"
    )


def _iterate_shapes(files: Mapping[Path, list[str] | None]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor, from the files' headers alone."""
    for path, wanted in files.items():
        try:
            with safe_open(path, framework="pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"{str(path)!r} is no whole safetensors file ({error}); is the download complete?"
            ) from error
        absent = [name for name in wanted or () if name not in shapes]
        if absent:
            raise ValueError(f"{INDEX} places {', '.join(absent[:_MAX_NAMED])} in {path.name!r}, which lacks them")
        for name in shapes if wanted is None else wanted:
            yield name, shapes[name]


def iterate_weights(files: Mapping[Path, list[str] | None]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of `weight_files`, one at a time, on the CPU, where they are views of the mapped file."""
    for path, wanted in files.items():
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()) if wanted is None else wanted:
                if not _IGNORED.search(name):
                    yield name, file.get_tensor(name)


def initialize_dummy_weights(model: nn.Module, seed: int) -> None:
    """Random weights in place, fixed by seed and device: matrices of standard deviation 0.02, norms 1, biases 0.

    A rank draws every tensor whole and keeps its part, so that all ranks together hold the model of one rank.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    bound = 0.02 * 3**0.5
    seen: set[int] = set()
    for name, target in weight_targets(model).items():
        tensor = target.tensor
        if tensor.numel() and tensor.data_ptr() in seen:
            continue  # a tied table
        seen.add(tensor.data_ptr())
        if len(target.shape) == 1:
            tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        elif tuple(tensor.shape) == target.shape:
            tensor.uniform_(-bound, bound, generator=generator)
        else:
            whole = torch.empty(target.shape, dtype=tensor.dtype, device=device)
            tensor.copy_(whole.uniform_(-bound, bound, generator=generator)[target.index])
