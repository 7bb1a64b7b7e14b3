"""A child process of the benchmark: one engine, built once, and the runs that it was given.

Owns: the order of a measurement: start, warm-up, empty the prefix cache, time one call. Invariant: nothing of the
workload is drawn, and no second engine imported, before the engine is ready, so `startup_seconds` is what a user
would wait. It deliberately prints no results: they go, one JSON line each, to the file that the parent reads.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.entrypoints.bench import floors, report
from nanovllm.entrypoints.bench.engines import ENGINES, Engine
from nanovllm.entrypoints.bench.models import BenchModel, read_config
from nanovllm.entrypoints.bench.workloads import CHAT_WORKLOAD, Workload, make_workload, warmup_workloads


@dataclass(frozen=True)
class Job:
    """What a child is to do; travels as JSON."""

    engine: str
    model: BenchModel
    workloads: list[str]  # more than one, or one name twice: on the same engine, one after another
    max_model_len: int
    dtype: str
    options: dict[str, Any]
    num_gpus: int
    bandwidth: float | None  # of the chip, bytes/s; None: by its name
    flops: float | None  # FLOP/s
    launched_at: float  # time.time() when the parent started this process
    results: str  # file that gets a line for each run

    @classmethod
    def load(cls, path: str) -> Job:
        """Read the JSON that the parent wrote with dataclasses.asdict."""
        values = json.loads(Path(path).read_text())
        return cls(**{**values, "model": BenchModel(**values["model"])})


def run_job(path: str) -> None:
    """Do the job in the file `path`. Raises what the engine raises, and RuntimeError if it returns too few tokens."""
    job = Job.load(path)
    engine = ENGINES[job.engine](job.model, job.max_model_len, job.dtype, dict(job.options))
    startup_seconds = time.time() - job.launched_at
    config = read_config(job.model.folder)
    with open(job.results, "a", encoding="utf-8") as file:
        for name in job.workloads:
            workload = make_workload(name, config["vocab_size"], _tokenizer(job) if name == CHAT_WORKLOAD else None)
            record = measure(job, engine, workload, config, startup_seconds)
            file.write(json.dumps(record) + "\n")
            file.flush()
    engine.close()


def measure(
    job: Job, engine: Engine, workload: Workload, config: dict[str, Any], startup_seconds: float
) -> report.Record:
    """Warm up, forget cached prefixes, time one call of the whole workload until its text is there: a record."""
    import torch

    _check_lengths(workload, job.max_model_len)
    for warmup in warmup_workloads(workload, config["vocab_size"], job.max_model_len):
        engine.generate(warmup)
    engine.reset()
    before = engine.stats()
    start = time.perf_counter()
    num_output_tokens, num_characters = engine.generate(workload)
    seconds = time.perf_counter() - start
    if num_output_tokens != workload.num_output_tokens:
        raise RuntimeError(f"{job.engine} made {num_output_tokens} tokens, {workload.num_output_tokens} were asked for")
    if job.model.tokenizer is not None and num_characters == 0:
        raise RuntimeError(f"{job.engine} returned no text although it has a tokenizer")
    on_gpu = torch.cuda.is_available()
    chip = floors.chip_of(torch.cuda.get_device_name() if on_gpu else "", job.bandwidth, job.flops)
    shape = floors.shape_of(config)
    floor = None if chip is None else floors.compute_floor(shape, workload, chip, job.num_gpus)
    return report.make_record(
        seconds=seconds,
        input_tokens=workload.num_input_tokens,
        output_tokens=num_output_tokens,
        floor=floor,
        stats=report.stats_between(before, engine.stats()),
        engine=job.engine,
        model=job.model.name,
        workload=workload.name,
        gpus=job.num_gpus if on_gpu else 0,
        startup_seconds=round(startup_seconds, 2),
        options={"dtype": job.dtype, "max_model_len": job.max_model_len, **job.options},
        machine=report.machine(),
        versions=report.versions(engine.package),
    )


def _check_lengths(workload: Workload, max_model_len: int) -> None:
    longest = max(map(sum, zip(workload.prompt_lens, workload.output_lens, strict=True)))
    if longest > max_model_len:
        raise ValueError(f"workload {workload.name} needs a max_model_len of at least {longest}, got {max_model_len}")


def _tokenizer(job: Job) -> Any:
    from transformers import AutoTokenizer

    if job.model.tokenizer is None:
        raise ValueError(f"workload {CHAT_WORKLOAD} needs a tokenizer: give --tokenizer FOLDER")
    return AutoTokenizer.from_pretrained(job.model.tokenizer)
