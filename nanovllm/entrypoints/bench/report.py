"""What a run leaves behind: one JSON object with fixed fields, and a row of the table.

Owns: the fields of benchmarks/results.jsonl. Invariant: every record has all of FIELDS; what does not apply is null,
never missing. It deliberately averages nothing: each run is a line of its own.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from nanovllm.entrypoints.bench.floors import Floor

FIELDS = (
    "engine", "model", "workload", "gpus", "seconds", "input_tokens", "output_tokens", "output_tok_s", "total_tok_s",
    "floor_seconds", "share_of_floor", "startup_seconds", "host_exposed_ms", "options", "commit", "machine", "versions",
    "date",
)  # fmt: skip
OPTIONAL_FIELDS = ("stats", "breakdown")
_COUNTERS = (
    "prompt_tokens_computed", "prompt_tokens_cached", "generated_tokens", "steps", "preemptions", "host_exposed_ms",
)  # fmt: skip
_HEADS = (
    "engine", "model", "workload", "GPUs", "seconds", "out tok/s", "tok/s", "floor s", "of floor", "TB/s", "start s",
)  # fmt: skip
Record = dict[str, Any]


def make_record(
    *, seconds: float, input_tokens: int, output_tokens: int, floor: Floor | None, stats: dict[str, Any], **known: Any
) -> Record:
    """Build a run's record: `known` are the fields that the caller knows, the rest is derived here.

    `breakdown` holds the floor's parts in seconds and the bandwidth achieved, TB/s: the bytes of weights and KV that
    the decode steps cannot do without, over the whole run's time (so prompts lower it).
    """
    record: Record = {
        "seconds": round(seconds, 4),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "output_tok_s": round(output_tokens / seconds, 1),
        "total_tok_s": round((input_tokens + output_tokens) / seconds, 1),
        "floor_seconds": None if floor is None else round(floor.seconds, 4),
        "share_of_floor": None if floor is None else round(floor.seconds / seconds, 4),
        "host_exposed_ms": stats.get("host_exposed_ms"),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **known,
    }
    record = {name: record[name] for name in FIELDS}
    if stats:
        record["stats"] = stats
    if floor is not None:
        record["breakdown"] = {
            "floor_prompt_s": round(floor.prompt_seconds, 4),
            "floor_matmul_s": round(floor.matmul_seconds, 4),
            "floor_kv_s": round(floor.kv_seconds, 4),
            "achieved_tb_s": round(floor.bytes_read / seconds / 1e12, 3),
        }
    return record


def stats_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Counters of one run out of an engine's counters before and after it; means are over the run's steps alone."""
    result = {
        name: round(value - before.get(name, 0), 3) if name in _COUNTERS else value for name, value in after.items()
    }
    if "mean_step_ms" in after and result.get("steps"):
        total = after["mean_step_ms"] * after["steps"] - before.get("mean_step_ms", 0.0) * before.get("steps", 0)
        result["mean_step_ms"] = round(total / result["steps"], 4)
    return result


def commit() -> str:
    """Short hash of this checkout, "+dirty" with changes in it; $NANOVLLM_COMMIT if set; "unknown" outside git."""
    if os.environ.get("NANOVLLM_COMMIT"):
        return os.environ["NANOVLLM_COMMIT"]
    root = Path(__file__).resolve().parents[3]
    try:
        found = _git(root, "rev-parse", "--short", "HEAD")
        return found + ("+dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> str:
    """GPU or CPU, and its memory. Imports torch."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = ""
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    return f"{name}, {num_cores} cores{memory}"


def versions(engine_package: str) -> dict[str, str | None]:
    """Of Python, the libraries below, and the engine under test; null for what is not installed."""
    result: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", engine_package):
        try:
            result[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            result[package] = getattr(sys.modules.get(package.replace("-", "")), "__version__", None)
    return result


def table(records: list[Record]) -> str:
    """The records side by side, for people."""
    rows: list[tuple[str, ...]] = [_HEADS]
    for record in records:
        share, breakdown = record["share_of_floor"], record.get("breakdown")
        rows.append((
            record["engine"], record["model"], record["workload"], str(record["gpus"]), f"{record['seconds']:.2f}",
            f"{record['output_tok_s']:,.0f}", f"{record['total_tok_s']:,.0f}",
            "-" if share is None else f"{record['floor_seconds']:.2f}", "-" if share is None else f"{share:.0%}",
            "-" if breakdown is None else f"{breakdown['achieved_tb_s']:.2f}", f"{record['startup_seconds']:.1f}",
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if column < 3 else cell.rjust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def append(path: str, records: list[Record]) -> None:
    """Add the records to a file of JSON lines."""
    with open(path, "a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
