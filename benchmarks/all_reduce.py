"""Time the sum over ranks by size and method: `python benchmarks/all_reduce.py --ranks 2`.

Owns: the table behind the crossovers in `nanovllm/worker/parallel.py`. Invariant: every time is of a CUDA graph of many
sums, as in a decode step, and every method's result is checked first. It deliberately has no model.

One row a size: microseconds for NCCL, one shot and two shots, and what the best of them moves between two GPUs, GB/s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from a checkout

import torch

from nanovllm.worker.parallel import RankGroup, SymmetricMemory, open_store

HIDDEN = 4096
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def graph_us(call: Callable[[], object], count: int) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    start.record()
    for _ in range(10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 10 / count * 1e3


def methods(group: RankGroup, memory: SymmetricMemory | None, rows: int) -> dict[str, Callable[[], Any]]:
    plain = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=group.device)
    found: dict[str, Callable[[], Any]] = {"nccl": lambda: group.all_reduce(plain)}
    shared = memory.view(rows, HIDDEN, torch.bfloat16) if memory is not None else None
    if shared is not None and memory is not None:
        ops = torch.ops.symm_mem
        found["one_shot"] = lambda: ops.one_shot_all_reduce(shared, "sum", memory.name)
        found["two_shot"] = lambda: ops.two_shot_all_reduce_(shared, "sum", memory.name)
    return found


def run(rank: int, size: int, port: Any) -> None:
    torch.cuda.set_device(rank)
    store = open_store(None) if rank == 0 else open_store(port.get())
    for _ in range(size - 1 if rank == 0 else 0):
        port.put(store.port)
    group = RankGroup(rank, size, store, torch.device("cuda", rank))
    memory = group._symmetric
    for rows in ROWS:
        times = {}
        for name, call in methods(group, memory, rows).items():
            if memory is not None:
                shared = memory.view(rows, HIDDEN, torch.bfloat16)
                if name != "nccl" and shared is not None:
                    shared.fill_(rank + 1)
                    torch.cuda.synchronize()
                    group.all_succeed(True)
                    assert (call() == size * (size + 1) / 2).all(), name
            times[name] = round(graph_us(call, 20), 2)
        if rank == 0:
            num_bytes = rows * HIDDEN * 2
            gb_s = num_bytes * 2 * (size - 1) / size / min(times.values()) / 1e3
            print(json.dumps({"ranks": size, "bytes": num_bytes, "us": times, "gb_s": round(gb_s, 1)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    size = parser.parse_args().ranks
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    processes = [context.Process(target=run, args=(rank, size, port)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode or 0 for process in processes))


if __name__ == "__main__":
    main()
