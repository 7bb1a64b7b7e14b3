"""Draw benchmarks/results.jsonl as docs/throughput.png: tokens a second by engine and workload.

The rate is that of output tokens; where prompts are nearly all of the work, of all tokens. A line is what the chip
allows.

Owns: the picture. Invariant: a bar is the median of an engine's runs at the newest commit that it was measured at. It
deliberately computes nothing else: every number in it stands in the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINE_ORDER = ["nanovllm", "vllm", "nano-vllm", "transformers"]
COLORS = {"nanovllm": "#1b6ca8", "vllm": "#e09f3e", "nano-vllm": "#7a9e7e", "transformers": "#8d859b"}
Record = dict[str, Any]
Panel = tuple[str, str, int]  # machine, model, GPUs


def read_results(path: Path) -> list[Record]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def is_prompt_bound(record: Record) -> bool:
    """Whether prompts are nearly all of its tokens: then the rate that counts is that of all tokens."""
    return record["input_tokens"] > 100 * record["output_tokens"]


def tokens_per_second(record: Record) -> float:
    """Output tokens a second, of all tokens where prompts are the work."""
    return record["total_tok_s"] if is_prompt_bound(record) else record["output_tok_s"]


def median_rates(records: list[Record]) -> dict[Panel, dict[str, dict[str, float]]]:
    """{panel: {workload: {engine: tokens a second}}}; the engine "floor" is the chip's limit, where known."""
    runs: dict[tuple[Panel, str, str], list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record["date"]):
        panel = (record["machine"], record["model"], record["gpus"])
        runs[panel, record["workload"], record["engine"]].append(record)
    panels: dict[Panel, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (panel, workload, engine), found in runs.items():
        newest = [record for record in found if record["commit"] == found[-1]["commit"]]
        panels[panel][workload][engine] = statistics.median(map(tokens_per_second, newest))
        if newest[-1]["share_of_floor"]:
            panels[panel][workload]["floor"] = tokens_per_second(newest[-1]) / newest[-1]["share_of_floor"]
    return panels


def draw(panels: dict[Panel, dict[str, dict[str, float]]], target: Path) -> None:
    """A row a machine and model, in it a picture a workload: a bar an engine, a line for the chip's limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_columns = max(map(len, panels.values()))
    size = (2.0 + 1.7 * num_columns, 2.9 * len(panels))
    figure = pyplot.figure(figsize=size, layout="constrained")
    rows = figure.subfigures(len(panels), 1, squeeze=False)[:, 0]
    for row, (panel, workloads) in zip(rows, sorted(panels.items(), reverse=True), strict=True):
        machine, model, num_gpus = panel
        row.suptitle(f"{model}, {num_gpus} x {machine}" if num_gpus > 1 else f"{model}, {machine}", fontsize=10)
        axes = row.subplots(1, num_columns, squeeze=False)[0]
        for axis, (workload, rates) in zip(axes, workloads.items(), strict=False):
            draw_workload(axis, workload, rates)
        for axis in axes[len(workloads) :]:
            axis.set_axis_off()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    pyplot.close(figure)


def draw_workload(axis: Any, workload: str, rates: dict[str, float]) -> None:
    """One workload's bars."""
    engines = [name for name in ENGINE_ORDER if name in rates]
    values = [rates[name] for name in engines]
    bars = axis.bar(engines, values, 0.85, color=[COLORS[name] for name in engines])
    axis.bar_label(bars, labels=[short(value) for value in values], fontsize=8, label_type="center", color="white")
    if "floor" in rates:
        axis.axhline(rates["floor"], color="black", linewidth=1)
        axis.annotate(f"limit {short(rates['floor'])}", (1, rates["floor"]), xycoords=("axes fraction", "data"),
                      ha="right", va="bottom", fontsize=8)  # fmt: skip
    axis.set_ylim(0, 1.15 * max(rates.values()))
    axis.set_title(workload, fontsize=9)
    axis.set_yticks([])
    axis.tick_params(axis="x", labelsize=8, rotation=30, length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def short(value: float) -> str:
    """Tokens a second in few characters."""
    return f"{value / 1000:,.1f}k" if value >= 10_000 else f"{value:,.0f}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the kept results.")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "throughput.png")
    args = parser.parse_args(argv)
    draw(median_rates(read_results(args.results)), args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
