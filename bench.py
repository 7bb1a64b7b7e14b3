"""Throughput of this engine and others, side by side: `python bench.py --help`.

Owns: the command line and the order of runs. Invariant: each run has a process of its own (this script again, with
--child), so that no engine sees what another left behind. It deliberately holds no engine's code:
nanovllm/entrypoints/bench.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanovllm.entrypoints.bench import child, report
from nanovllm.entrypoints.bench.engines import ENGINES, why_not
from nanovllm.entrypoints.bench.models import MODEL_NAMES, BenchModel, resolve_model
from nanovllm.entrypoints.bench.workloads import WORKLOAD_NAMES
from nanovllm.entrypoints.smollm2 import DownloadError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time engines on a workload; last come lines of JSON, one object a run."
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOAD_NAMES, metavar="NAME", help=", ".join(WORKLOAD_NAMES))
    parser.add_argument("--model", help=f"a folder or one of {', '.join(MODEL_NAMES)}")
    parser.add_argument("--engine", nargs="+", choices=list(ENGINES), default=["nanovllm", "transformers"])
    parser.add_argument("--tokenizer", help="folder of the tokenizer; without one, a named Qwen3 makes token ids only")
    parser.add_argument("--load-format", choices=["auto", "dummy"], help="default: dummy where there are no weights")
    parser.add_argument("--dtype", default="auto", help="default: the checkpoint's, float32 on a CPU; for every engine")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--tensor-parallel-size", "--gpus", type=int, default=1)
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--engine-option", nargs="+", action="extend", default=[], metavar="[ENGINE:]KEY=VALUE",
                        help="an option of the engine's constructor; VALUE is JSON or a string")  # fmt: skip
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--keep-engine", action="store_true", help="one process an engine, its runs one after another")
    parser.add_argument("--bandwidth", type=float, help="of one chip, bytes/s, for the floor; known for an H200")
    parser.add_argument("--flops", type=float, help="of one chip, FLOP/s in large bf16 matrix products")
    parser.add_argument("--append", metavar="FILE", help="add the JSON lines to FILE; benchmarks/results.jsonl is kept")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("repeat", "max_model_len", "tensor_parallel_size", "data_parallel_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for option in args.engine_option:
        if "=" not in option:
            parser.error(f"--engine-option must be [ENGINE:]KEY=VALUE, got {option!r}")
    return args


def set_defaults(args: argparse.Namespace) -> None:
    """With no arguments: something worth seeing in a few minutes. On a CPU every engine computes in float32."""
    import torch

    on_gpu = torch.cuda.is_available()
    args.model = args.model or ("qwen3-0.6b" if on_gpu else "smollm2")
    args.workload = args.workload or (["mixed256", "prefill", "single"] if on_gpu else ["chat32"])
    if args.dtype == "auto" and not on_gpu:
        args.dtype = "float32"


def engine_options(args: argparse.Namespace, engine: str) -> dict[str, Any]:
    """The options meant for this engine, the parallel sizes among them."""
    options: dict[str, Any] = {}
    for name in ("tensor_parallel_size", "data_parallel_size"):
        if getattr(args, name) > 1:
            options[name] = getattr(args, name)
    for option in args.engine_option:
        key, _, text = option.partition("=")
        meant_for, _, key = key.rpartition(":")
        if meant_for in ("", engine):
            try:
                options[key] = json.loads(text)
            except json.JSONDecodeError:
                options[key] = text
    return options


def run_child(
    args: argparse.Namespace, engine: str, model: BenchModel, workloads: list[str], workdir: Path
) -> list[report.Record]:
    """Run workloads on one engine in a fresh process; the records of those that came through."""
    results, job_file = workdir / "results.jsonl", workdir / "job.json"
    results.write_text("")
    job = child.Job(
        engine=engine, model=model, workloads=workloads, max_model_len=args.max_model_len, dtype=args.dtype,
        options=engine_options(args, engine), num_gpus=args.tensor_parallel_size * args.data_parallel_size,
        bandwidth=args.bandwidth, flops=args.flops, launched_at=time.time(), results=str(results),
    )  # fmt: skip
    job_file.write_text(json.dumps(asdict(job)))
    print(f"{engine}: {', '.join(workloads)} ...", file=sys.stderr, flush=True)
    # what engines print goes to stderr: the last lines of stdout are JSON
    done = subprocess.run([sys.executable, __file__, "--child", str(job_file)], stdout=2)
    records = [json.loads(line) for line in results.read_text().splitlines()]
    if done.returncode != 0 or len(records) < len(workloads):
        print(f"{engine}: FAILED (exit status {done.returncode}) on {workloads[len(records) :]}", file=sys.stderr)
    return records


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 if every run came through or was skipped, else 1."""
    args = parse_args(argv)
    if args.child:
        child.run_job(args.child)
        return 0
    set_defaults(args)
    records, num_expected = [], 0
    with tempfile.TemporaryDirectory(prefix="nanovllm-bench-") as workdir:
        try:
            model = resolve_model(args.model, args.tokenizer, args.load_format, Path(workdir))
        except (ValueError, ImportError, DownloadError) as error:
            print(f"bench.py: error: {error}", file=sys.stderr)
            return 2
        for engine in args.engine:
            runs = []
            for workload in args.workload * args.repeat:
                reason = why_not(engine, workload, args.tensor_parallel_size * args.data_parallel_size)
                if reason:
                    print(f"{engine} on {workload}: skipped, {reason}", file=sys.stderr)
                else:
                    runs.append(workload)
            num_expected += len(runs)
            keep = args.keep_engine and ENGINES[engine].can_reset
            for group in [runs] if keep and runs else [[run] for run in runs]:
                new = run_child(args, engine, model, group, Path(workdir))
                print(report.table(new), file=sys.stderr, flush=True)
                if args.append:  # at once: a later run may be killed
                    report.append(args.append, new)
                records += new
    print(report.table(records), flush=True)
    for record in records:
        print(json.dumps(record))
    return 0 if len(records) == num_expected else 1


if __name__ == "__main__":
    sys.exit(main())
