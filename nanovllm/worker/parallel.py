"""The ranks of a tensor-parallel group, and how they add up and collect.

Owns: this rank's communicators. Invariant: they are this group's own; torch.distributed's default process group is
neither used nor made, so a process that has one keeps it. It deliberately times nothing out: a rank that is lost is the
driver's to notice (`engine/ranks.py`).

Sums on GPUs go through NCCL, or, where all of them reach each other's memory (NVLink) and the sum is small, through
torch's symmetric memory: one kernel in which each rank reads all others' inputs ("one shot") or sums a part and
gathers ("two shot"). They are computed right in that memory (`partial_sums`), inside the CUDA graph. Multicast is left
alone: it needs what many machines do not set up.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

logger = logging.getLogger("nanovllm")

SYMMETRIC_BYTES = 16 << 20  # of partial sums in symmetric memory: a decode step's
ONE_SHOT_BYTES = 64 << 10  # up to here; beyond, two shots: measured on two H200, docs/performance.md
FOREVER = timedelta(days=365)


def open_store(port: int | None) -> TCPStore:
    """The key-value store through which ranks of this machine find each other; None: serve it, on any free port."""
    return TCPStore("127.0.0.1", port or 0, is_master=port is None, wait_for_workers=False)


class RankGroup:
    """One rank of a tensor-parallel group; see `TensorParallel` for what layers use of it.

    Making one is a collective call.
    """

    def __init__(self, rank: int, size: int, store: Store, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # type: ignore[attr-defined]
        options._timeout = FOREVER
        self._host: Any = dist.ProcessGroupGloo(PrefixStore("host", store), rank, size, options)  # type: ignore[arg-type]
        self._group: Any = self._host
        self._symmetric: SymmetricMemory | None = None
        if device.type == "cuda":
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = FOREVER
            self._group = dist.ProcessGroupNCCL(PrefixStore("device", store), rank, size, nccl)
            self._group.allreduce([torch.zeros(1, device=device)]).wait()  # connects
            self._symmetric = SymmetricMemory.open(self, PrefixStore("memory", store))

    def partial_sums(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        return self._symmetric.view(num_rows, width, dtype) if self._symmetric is not None else None

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel() == 0:  # a step in which no row samples
            return x
        if self._symmetric is not None and self._symmetric.holds(x):
            return self._symmetric.all_reduce(x)
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        out = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        if self.device.type == "cpu":
            self._group.allgather([list(out)], [x.contiguous()]).wait()
        else:
            self._group._allgather_base(out, x.contiguous()).wait()
        return out

    def minimum(self, value: int) -> int:
        """The least of all ranks' values, on the host."""
        tensor = torch.tensor([-value], dtype=torch.int64)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._host.allreduce([tensor], options).wait()
        return -int(tensor)

    def all_succeed(self, succeeds: bool) -> bool:
        """Whether all ranks say so, on the host."""
        return self.minimum(int(succeeds)) == 1


class SymmetricMemory:
    """A buffer that all ranks of a machine map, for sums of up to `SYMMETRIC_BYTES`."""

    def __init__(self, buffer: Tensor, name: str) -> None:
        self.buffer = buffer  # uint8
        self.name = name

    @classmethod
    def open(cls, group: RankGroup, store: Store) -> SymmetricMemory | None:
        """None where some rank cannot: no NVLink, or a torch without it. A collective call."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        memory: SymmetricMemory | None = None
        try:
            peers = [rank for rank in range(group.size) if rank != group.rank]
            if group.all_succeed(all(torch.cuda.can_device_access_peer(group.device, _peer(group, r)) for r in peers)):
                memory = cls(*_map_buffer(group, store))
        except (ImportError, RuntimeError, AttributeError) as error:
            logger.warning("sums go through NCCL: symmetric memory is not available (%s)", error)
        if not group.all_succeed(memory is not None):
            return None
        assert memory is not None
        x = memory.buffer[:1024].view(torch.bfloat16).fill_(group.rank + 1.0)
        is_right = bool((memory.all_reduce(x) == group.size * (group.size + 1) / 2).all())
        return memory if group.all_succeed(is_right) else None

    def view(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """[num_rows, width] in the buffer, where it fits and the kernels' alignment of 16 bytes holds."""
        num_bytes = num_rows * width * dtype.itemsize
        if num_bytes > len(self.buffer) or num_bytes % 16 or dtype == torch.float16:
            return None
        return self.buffer[:num_bytes].view(dtype).view(num_rows, width)

    def holds(self, x: Tensor) -> bool:
        return x.data_ptr() == self.buffer.data_ptr()

    def all_reduce(self, x: Tensor) -> Tensor:
        ops = torch.ops.symm_mem
        if x.numel() * x.element_size() <= ONE_SHOT_BYTES:
            return ops.one_shot_all_reduce(x, "sum", self.name)
        return ops.two_shot_all_reduce_(x, "sum", self.name)


def _peer(group: RankGroup, rank: int) -> torch.device:
    """The device of another rank: ranks have consecutive ones."""
    assert group.device.index is not None
    return torch.device("cuda", group.device.index - group.rank + rank)


def _map_buffer(group: RankGroup, store: Store) -> tuple[Tensor, str]:
    """(the buffer, the name that its sums go by). A collective call."""
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory

    if group.rank == 0:
        store.set("name", f"nanovllm-{os.getpid()}-{id(group)}")
    name = store.get("name").decode()
    # The name has to stand for a process group, of which nothing but the store is used.
    holder = ProcessGroup(store, group.rank, group.size)
    holder._set_group_name(name)  # type: ignore[arg-type]
    _register_process_group(name, holder)  # type: ignore[arg-type]
    _SymmetricMemory.set_group_info(name, group.rank, group.size, store)
    buffer = _SymmetricMemory.empty_strided_p2p((SYMMETRIC_BYTES,), (1,), torch.uint8, group.device, name)
    _SymmetricMemory.rendezvous(buffer)
    return buffer, name
