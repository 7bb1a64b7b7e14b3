"""Show where the time of a step goes: `python benchmarks/steps.py --decode 256x600 --prompt 4x4096 --workload long`.

Owns: two views of a running engine. `--decode BxL` and `--prompt BxL` take the kernels of such steps from torch's
profiler and group them; `--workload NAME` times every step of a workload on the device, by decodes and prompt tokens.
Invariant: the engine is the one that users run, graphs and all; it is only watched. It deliberately knows no floors:
`kernels.py` does. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from a checkout

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.entrypoints.bench.models import read_config, resolve_model
from nanovllm.entrypoints.bench.workloads import make_workload, warmup_workloads

KINDS = (  # the first pattern that a kernel's name has
    ("attention, decodes", "paged_decode|row_decode"),
    ("attention, prompts", "paged_prefill|flash"),
    ("QK-norm, RoPE, KV store", "rope"),
    ("norms", "rms_norm|scale_rows"),
    ("activation", "silu"),
    ("sampling", "sampl|scan|pick|gumbel"),
    ("products", "gemm|nvjet|cutlass|xmma|splitK|cublas|vector_kernel|tile_kernel|gemv"),
)
PRODUCTS = ("qkv", "o", "gate_up", "down")
PROFILED_STEPS = 6
BANDS = (0, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 1024)


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def device_kernels(profiler: torch.profiler.profile) -> list[tuple[float, float, str]]:
    """(start, microseconds, name) of everything that ran on the device, in order."""
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sorted((event.time_range.start, event.time_range.elapsed_us(), event.name) for event in events)


def breakdown(kernels: list[tuple[float, float, str]], num_steps: int, num_layers: int) -> dict[str, Any]:
    """Microseconds and launches a step by kind, products by their place in the layer, and what lies between."""
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    place = 0
    for _, us, name in kernels:
        kind = kind_of(name)
        if kind == "products":
            place -= "splitk" in name.lower() and "reduce" in name.lower()  # the sum of the product before it
            in_step = place % (len(PRODUCTS) * num_layers + 1)
            kind = "output layer" if in_step == len(PRODUCTS) * num_layers else f"product {PRODUCTS[in_step % 4]}"
            place += 1
        total[kind][0] += us
        total[kind][1] += 1
    span = kernels[-1][0] + kernels[-1][1] - kernels[0][0]
    parts = {kind: {"us": us / num_steps, "launches": count / num_steps} for kind, (us, count) in total.items()}
    busy = sum(us for _, us, _ in kernels)
    return {"span_us": span / num_steps, "between_us": (span - busy) / num_steps, "parts": parts}


def print_breakdown(title: str, result: dict[str, Any]) -> None:
    print(f"\n{title}: {result['span_us']:.0f} us a step, {result['between_us']:.0f} of them between kernels")
    for kind, part in sorted(result["parts"].items(), key=lambda item: -item[1]["us"]):
        mean = part["us"] / max(part["launches"], 1e-9)
        print(f"  {kind:26}{part['us']:10.0f} us {part['launches']:7.1f} launches of {mean:8.1f}")


class Engine:
    """An LLM, and the prompts that no step before has seen."""

    def __init__(self, model: str, tokenizer: str | None, options: dict[str, Any]) -> None:
        self.workdir = tempfile.TemporaryDirectory()
        found = resolve_model(model, tokenizer, None, Path(self.workdir.name))
        config = read_config(found.folder)
        self.num_layers, self.vocab_size = config["num_hidden_layers"], config["vocab_size"]
        has_text = {"skip_tokenizer_init": True} if found.tokenizer is None else {}
        self.llm = LLM(found.folder, load_format=found.load_format, max_model_len=8192, **has_text, **options)
        self.generator = torch.Generator().manual_seed(0)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return torch.randint(0, 10_000, (count, length), generator=self.generator).tolist()

    def profile(self, count: int, length: int, num_outputs: int, num_before: int, num_steps: int) -> dict[str, Any]:
        """Kernels of `num_steps` steps of so many requests, behind the first `num_before` ones."""
        params = SamplingParams(temperature=0.6, max_tokens=num_outputs, ignore_eos=True)
        for prompt in self.prompts(count, length):
            self.llm.add_request(prompt, params)
        for _ in range(num_before):
            self.llm.step()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(num_steps):
                self.llm.step()
            torch.cuda.synchronize()
        while not self.llm.is_finished():
            self.llm.step()
        kernels = device_kernels(profiler)
        marks = [i for i, kernel in enumerate(kernels) if "advance" in kernel[2]]  # the end of a step
        if len(marks) > 2:  # steps that began or ended outside are left out
            num_whole = len(marks) - 1
            kernels = kernels[marks[0] + 1 : marks[-1] + 1]
        else:
            num_whole = max(1, len(marks))
        return breakdown(kernels, num_whole, self.num_layers)

    def decode(self, count: int, length: int) -> dict[str, Any]:
        num_prompt_steps = -(-count * length // self.llm.config.max_num_batched_tokens) + 4
        return self.profile(count, length, num_prompt_steps + 24, num_prompt_steps + 4, PROFILED_STEPS)

    def prompt(self, count: int, length: int) -> dict[str, Any]:
        return self.profile(count, length, 1, 0, 4)

    def log(self, name: str) -> list[dict[str, float]]:
        """Every step of a workload: decodes, prompt tokens, milliseconds, and those that the device idled before."""
        workload = make_workload(name, self.vocab_size)
        params = [SamplingParams(max_tokens=n, ignore_eos=True, **workload.sampling) for n in workload.output_lens]
        for warmup in warmup_workloads(workload, self.vocab_size, 8192):
            self.llm.generate(warmup.prompts, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        self.llm.reset_prefix_cache()
        runner = self.llm.engine.executor.runner
        ring, execute, read = runner.outputs, runner.execute, runner.outputs.read
        plans: list[tuple[int, int]] = []
        times: list[tuple[float, float]] = []

        def watched_execute(plan: Any) -> Any:
            plans.append((plan.num_decodes, sum(plan.num_query_tokens[plan.num_decodes :])))
            return execute(plan)

        def watched_read(slot: int, num_sampled: int) -> list[int]:
            step_ms, exposed_ms = ring.step_ms, ring.exposed_ms
            ids = read(slot, num_sampled)
            times.append((ring.step_ms - step_ms, ring.exposed_ms - exposed_ms))
            return ids

        runner.execute, ring.read = watched_execute, watched_read
        self.llm.generate(workload.prompts, params, use_tqdm=False)
        runner.execute, ring.read = execute, read
        return [
            {"decodes": decodes, "prompt_tokens": tokens, "ms": ms, "idle_ms": idle}
            for (decodes, tokens), (ms, idle) in zip(plans, times, strict=True)
        ]


def print_log(name: str, steps: list[dict[str, float]]) -> None:
    all_ms, idle_ms = sum(step["ms"] for step in steps), sum(step["idle_ms"] for step in steps)
    print(f"\n{name}: {len(steps)} steps, {all_ms:.0f} ms, idle {idle_ms:.0f}")
    groups: dict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)
    for step in steps:
        band = max(i for i, low in enumerate(BANDS) if step["decodes"] >= low)
        groups[int(step["prompt_tokens"] > 0), band].append(step)
    print(f"  {'':10}{'decodes from':>14}{'steps':>7}{'prompt tokens':>15}{'ms, mean':>10}{'ms, all':>9}")
    for (has_prompts, band), group in sorted(groups.items()):
        ms, tokens = sum(s["ms"] for s in group), sum(s["prompt_tokens"] for s in group)
        kind = "prompts" if has_prompts else "decodes"
        print(f"  {kind:10}{BANDS[band]:>14}{len(group):>7}{tokens:>15.0f}{ms / len(group):>10.3f}{ms:>9.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder, or a name that bench.py knows")
    parser.add_argument("--tokenizer", help="a folder; without one, token ids only")
    parser.add_argument("--decode", nargs="*", default=[], metavar="BxL", help="B decodes of about L keys")
    parser.add_argument("--prompt", nargs="*", default=[], metavar="BxL", help="B prompts of L tokens")
    parser.add_argument("--workload", nargs="*", default=[], help="time every step of it")
    parser.add_argument("--backend", default="auto", help="attention_backend")
    parser.add_argument("--out", type=Path, help="a file for the figures, JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    if not (args.decode or args.prompt or args.workload):
        parser.error("give --decode, --prompt or --workload")
    engine = Engine(args.model, args.tokenizer, {"attention_backend": args.backend})
    results: dict[str, Any] = {}
    for kind, shapes in (("decode", args.decode), ("prompt", args.prompt)):
        for shape in shapes:
            count, length = map(int, shape.split("x"))
            run = engine.decode if kind == "decode" else engine.prompt
            run(count, length)  # once before, so that nothing is compiled while it is watched
            results[f"{kind} {shape}"] = run(count, length)
            print_breakdown(f"{args.model} {kind} {shape}", results[f"{kind} {shape}"])
    for name in args.workload:
        results[name] = engine.log(name)
        print_log(f"{args.model} {name}", results[name])
    if args.out:
        args.out.write_text(json.dumps({"model": args.model, **results}))
    engine.llm.close()


if __name__ == "__main__":
    main()
