"""A model's weights over the life of an engine: away and back, and replaced.

Owns: the host copies while the weights are away, and whether what the parameters hold makes sense. Invariant: a
parameter keeps its storage object, so whatever is a view of it stays one; between release and restore that storage
is empty. It deliberately knows no engine: that nothing runs meanwhile is the caller's business.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.kernels.packed_linear import can_pack, pack
from nanovllm.layers.embedding import LMHead
from nanovllm.layers.linear import Linear
from nanovllm.model_config import ModelConfig
from nanovllm.worker.loader import apply_weights, checked_weights

MAX_PACKED_BYTES = 4 << 30  # of packed copies: they come on top of the weights

Source = str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def check_pair(pair: Any) -> None:
    """Raises TypeError for what is no pair of a name and a tensor."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
        raise TypeError(f"update_weights takes a folder or pairs of a name and a tensor, got {pair!r:.80}")
    if not isinstance(pair[1], Tensor):
        raise TypeError(f"update_weights: {pair[0]} must be a tensor, got {type(pair[1]).__name__}")


class Weights:
    """The parameters of `model`.

    Attributes:
        missing: why they hold nothing to compute with, as the end of a sentence to the user; None: they do.
    """

    def __init__(self, model: nn.Module, model_config: ModelConfig) -> None:
        self.model = model
        self.model_config = model_config
        self.missing: str | None = None
        self._kept: dict[str, Tensor] = {}

    def release(self, keep: bool) -> None:
        """Give back the parameters' memory; with `keep`, their contents go to the host and come back with `restore`.

        On a CPU they are there already, and stay. Calling it again with another `keep` only ever drops contents.
        """
        self._drop_packed()
        for name, parameter in self.model.named_parameters():
            if keep and parameter.device.type == "cpu":
                continue
            storage = parameter.untyped_storage()
            if keep and storage.nbytes() > 0:
                self._kept[name] = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True).copy_(parameter)
            storage.resize_(0)
        if not keep:
            self._kept.clear()
            self.missing = "sleep(level=2) dropped the weights: call update_weights() with all of them first"

    def restore(self) -> None:
        """Take the memory again, with the contents that were kept, else zeros. Host copies stay until `settle`."""
        for name, parameter in self.model.named_parameters():
            storage = parameter.untyped_storage()
            if storage.nbytes() > 0:
                continue
            storage.resize_(parameter.numel() * parameter.element_size())
            if name in self._kept:
                parameter.data.copy_(self._kept[name])
            else:
                parameter.data.zero_()  # anything finite, for the graphs' warm-up
        self.pack()

    def pack(self) -> None:
        """On a CPU, make the copies that products of few rows read: after every change of the weights."""
        self._drop_packed()
        num_bytes = 0
        for module in _products(self.model):
            if can_pack(module.weight) and num_bytes + module.weight.nbytes <= MAX_PACKED_BYTES:
                num_bytes += module.weight.nbytes
                module.packed = pack(module.weight)

    def _drop_packed(self) -> None:
        for module in _products(self.model):
            module.packed = None

    def settle(self) -> None:
        """Forget the host copies."""
        self._kept.clear()

    def update(self, source: Source) -> None:
        """Replace all weights in place, from a checkpoint's folder or from pairs of its names and tensors.

        Raises:
            ValueError: as the loader's. From a folder, names and shapes are checked before anything is written.
            TypeError: what comes is not pairs of a name and a tensor.
        """
        if isinstance(source, str | os.PathLike):
            folder = Path(source).expanduser()
            if not folder.is_dir():
                raise ValueError(f"update_weights takes a checkpoint's local folder, and {str(folder)!r} is none")
            pairs: Iterable[Any] = checked_weights(self.model, folder, self.model_config)
        else:
            pairs = source.items() if isinstance(source, Mapping) else source
        apply_weights(self.model, self._noting(pairs), self.model_config.tie_word_embeddings)
        self.pack()
        self.missing = None

    def _noting(self, pairs: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
        """Pass pairs on; from the first one until the update has succeeded, the weights are neither old nor new."""
        for pair in pairs:
            check_pair(pair)
            self.missing = (
                "the last update_weights() failed half-way, and the weights are neither the old nor the new ones: call "
                "it again with all of them first"
            )
            yield pair[0], pair[1]


def _products(model: nn.Module) -> list[Linear | LMHead]:
    return [module for module in model.modules() if isinstance(module, Linear | LMHead)]
