"""The benchmark: draws and floors against the published figures, the command line, and one run of it all on a CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nanovllm.entrypoints.bench import floors, models, report
from nanovllm.entrypoints.bench.engines import ENGINES, nano_vllm_path, why_not
from nanovllm.entrypoints.bench.workloads import (
    WORKLOADS,
    Workload,
    chat_workload,
    make_workload,
    warmup_workloads,
)

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 151_936


def load_script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_script", ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


bench = load_script("bench.py")


@pytest.mark.parametrize(
    "name, num_requests, num_input_tokens, num_output_tokens",
    [
        ("mixed256", 256, 142_827, 133_966),
        ("mixed256+kp", 256, 142_827, 133_966),
        ("mixed1024", 1024, 580_663, 583_802),
        ("prefill", 128, 128 * 4096, 128),
        ("long", 64, 64 * 7900, 64 * 256),
        ("shared", 512, 512 * 2176, 512 * 256),
        ("single", 1, 128, 512),
    ],
)
def test_draws(name: str, num_requests: int, num_input_tokens: int, num_output_tokens: int) -> None:
    workload = make_workload(name, VOCAB_SIZE)
    assert (len(workload.prompts), workload.num_input_tokens) == (num_requests, num_input_tokens)
    assert workload.num_output_tokens == num_output_tokens
    assert all(0 <= token_id <= 10_000 for prompt in workload.prompts for token_id in prompt)
    assert make_workload(name, VOCAB_SIZE) == workload
    assert workload.sampling["temperature"] == 0.6
    assert ("top_k" in workload.sampling) == name.endswith("+kp")


def test_shared_prompts_share_what_they_say() -> None:
    prompts = make_workload("shared", VOCAB_SIZE).prompts
    assert len({tuple(prompt[:2048]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 64
    assert prompts[0] == prompts[7] != prompts[8]


def test_small_vocabulary_and_unknown_name() -> None:
    assert max(max(prompt) for prompt in make_workload("smoke", 100).prompts) < 100
    with pytest.raises(ValueError, match="mixed257"):
        make_workload("mixed257", 100)
    with pytest.raises(ValueError, match="chat template"):
        make_workload("chat32", 100, tokenizer=None)


class WordTokenizer:
    """A token for each word, and a chat template of two."""

    chat_template = "<user>"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return f"<user> {messages[0]['content']} <assistant>"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def test_chat_workload() -> None:
    workload = chat_workload(WordTokenizer(), max_prompt_len=100)
    assert len(workload.prompts) == 32
    assert max(workload.prompt_lens) <= 100 and len(set(workload.prompt_lens)) > 8
    assert all(16 <= length <= 256 for length in workload.output_lens)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_warmup_fits_and_is_not_the_workload(name: str) -> None:
    workload = make_workload(name, VOCAB_SIZE)
    longest = max(map(sum, zip(workload.prompt_lens, workload.output_lens, strict=True)))
    first, second = warmup_workloads(workload, VOCAB_SIZE, longest)
    for warmup in (first, second):
        assert max(map(sum, zip(warmup.prompt_lens, warmup.output_lens, strict=True))) <= longest
        assert warmup.sampling == workload.sampling
        assert not {tuple(prompt[:4]) for prompt in warmup.prompts} & {tuple(prompt[:4]) for prompt in workload.prompts}
    assert second.prompts[0][: len(first.prompts[0])] == first.prompts[0]


# The published table, seconds on one H200 (0.6B single as its 3,607 tok/s: its seconds are cut to two digits).
@pytest.mark.parametrize(
    "model, name, num_gpus, seconds",
    [
        ("qwen3-0.6b", "mixed256", 1, 3.70),
        ("qwen3-0.6b", "mixed1024", 1, 15.9),
        ("qwen3-0.6b", "prefill", 1, 0.90),
        ("qwen3-0.6b", "long", 1, 4.7),
        ("qwen3-0.6b", "shared", 1, 0.72),
        ("qwen3-0.6b", "single", 1, 512 / 3607),
        ("qwen3-8b", "mixed1024", 1, 41),
        ("qwen3-8b", "mixed256", 1, 10.6),
        ("qwen3-8b", "prefill", 1, 10.0),
        ("qwen3-8b", "shared", 1, 3.4),
        ("qwen3-8b", "single", 1, 1.80),
        ("qwen3-8b", "mixed1024", 2, 20.1),
        ("qwen3-8b", "single", 2, 0.90),
    ],
)
def test_floors_come_out_at_the_published_table(model: str, name: str, num_gpus: int, seconds: float) -> None:
    shape = floors.shape_of(models.published_config(model))
    floor = floors.compute_floor(shape, make_workload(name, VOCAB_SIZE), floors.H200, num_gpus)
    assert floor.seconds == pytest.approx(seconds, rel=0.05)


def test_floor_by_hand() -> None:
    shape = floors.Shape(layer_weights=1000, head_weights=100, num_layers=2, num_heads=4, num_kv_heads=1, head_dim=8)
    workload = Workload("w", [[1] * 10, [1] * 20], [3, 2])
    floor = floors.compute_floor(shape, workload, floors.Chip(bandwidth=1e6, flops=1e6))
    # decodes: the first request reads 11 and 12 tokens, the second 21; 2 * 2 * 8 values of 2 bytes each
    assert floor.kv_seconds == pytest.approx((11 + 12 + 21) * 32 * 2 / 1e6)
    assert floor.num_steps == 2
    assert floor.matmul_seconds == pytest.approx((2 * 1100 * 2 + max(2 * 1100, 2 * 1100)) / 1e6)
    attention = 2 * 2 * 4 * 8 * (10**2 + 20**2)
    assert floor.prompt_seconds == pytest.approx((2 * 1000 * 30 + 2 * 100 * 2 + attention) / 1e6)


def test_chips() -> None:
    assert floors.chip_of("NVIDIA H200") == floors.H200
    assert floors.chip_of("NVIDIA H200", flops=1e15) == floors.Chip(4.3e12, 1e15)
    assert floors.chip_of("some CPU") is None and floors.chip_of("some CPU", bandwidth=1e10) is None
    assert floors.chip_of("some CPU", 1e10, 1e11) == floors.Chip(1e10, 1e11)


def test_resolve_model(tmp_path: Path) -> None:
    named = models.resolve_model("qwen3-8b", None, None, tmp_path)
    assert (named.load_format, named.tokenizer) == ("dummy", None)
    assert models.read_config(named.folder)["hidden_size"] == 4096
    again = models.resolve_model(named.folder, None, None, tmp_path)
    assert (again.name, again.load_format) == ("qwen3-8b", "dummy")
    for arguments in (("qwen3-7b", None), ("qwen3-8b", str(tmp_path / "none"))):
        with pytest.raises(ValueError, match="must be a folder"):
            models.resolve_model(*arguments, None, tmp_path)


def test_random_weights_have_the_checkpoint_names(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = {**models.published_config("qwen3-0.6b"), "num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 32,
              "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    models.write_random_weights(str(tmp_path))
    from safetensors import safe_open

    names = set()
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert names == {name for name, _ in model.named_parameters()}


def make_record(**changes: Any) -> report.Record:
    known: dict[str, Any] = {
        "engine": "nanovllm", "model": "m", "workload": "w", "gpus": 1, "startup_seconds": 3.0, "options": {},
        "machine": "x", "versions": {}, "seconds": 2.0, "input_tokens": 10, "output_tokens": 20,
        "floor": floors.Floor(0.2, 0.3, 0.5, 4e12, 7), "stats": {"host_exposed_ms": 1.5, "steps": 7},
    }  # fmt: skip
    return report.make_record(**{**known, **changes})


def test_record_has_exactly_the_fields() -> None:
    record = make_record()
    assert set(record) == {*report.FIELDS, *report.OPTIONAL_FIELDS}
    assert (record["output_tok_s"], record["total_tok_s"]) == (10.0, 15.0)
    assert (record["floor_seconds"], record["share_of_floor"], record["host_exposed_ms"]) == (1.0, 0.5, 1.5)
    assert record["breakdown"]["achieved_tb_s"] == 2.0
    unknown_chip = make_record(floor=None, stats={})
    assert set(unknown_chip) == set(report.FIELDS)
    assert unknown_chip["floor_seconds"] is unknown_chip["share_of_floor"] is unknown_chip["host_exposed_ms"] is None
    assert len(report.table([record, unknown_chip]).splitlines()) == 4


def test_stats_of_the_timed_call_alone() -> None:
    before = {"steps": 10, "mean_step_ms": 5.0, "host_exposed_ms": 2.0, "max_seqs_in_flight": 4}
    after = {"steps": 30, "mean_step_ms": 3.0, "host_exposed_ms": 2.5, "max_seqs_in_flight": 8}
    assert report.stats_between(before, after) == {
        "steps": 20, "mean_step_ms": 2.0, "host_exposed_ms": 0.5, "max_seqs_in_flight": 8,
    }  # fmt: skip


def test_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report.commit()
    monkeypatch.setenv("NANOVLLM_COMMIT", "abc1234")
    assert report.commit() == "abc1234"


def test_engine_options() -> None:
    args = bench.parse_args(
        ["--engine", "nanovllm", "vllm", "--engine-option", "max_num_seqs=512", "vllm:enforce_eager=true",
         "--engine-option", "nanovllm:attention_backend=triton", "--gpus", "2"]
    )  # fmt: skip
    common = {"max_num_seqs": 512, "tensor_parallel_size": 2}
    assert bench.engine_options(args, "nanovllm") == {**common, "attention_backend": "triton"}
    assert bench.engine_options(args, "vllm") == {**common, "enforce_eager": True}
    assert bench.parse_args([]).max_model_len == 8192


@pytest.mark.parametrize(
    "argv", [["--workload", "nope"], ["--engine", "nope"], ["--engine-option", "key"], ["--repeat", "0"]]
)
def test_bad_command_lines(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_args(argv)
    assert argv[1] in capsys.readouterr().err


def test_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert set(ENGINES) == {"nanovllm", "transformers", "vllm", "nano-vllm"}
    assert why_not("nanovllm", "mixed256", 1) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not("vllm", "mixed256", 1) == "package vllm is not installed"
    monkeypatch.setenv("NANO_VLLM_PATH", str(ROOT))  # this very project is not the other one
    assert nano_vllm_path() != ROOT
    (tmp_path / "nanovllm" / "engine").mkdir(parents=True)
    monkeypatch.setenv("NANO_VLLM_PATH", str(tmp_path))
    assert why_not("nano-vllm", "mixed256", 1) is None
    assert why_not("nano-vllm", "mixed256+kp", 1) is not None


def test_unknown_model_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--model", "qwen3-7b", "--workload", "smoke"]) == 2
    assert "qwen3-7b" in capsys.readouterr().err


def test_whole_run(tmp_path: Path) -> None:
    """Both engines on a tiny model, each in its own process; table, JSON lines and the kept file."""
    from tests.tiny_models import make_tiny_model

    make_tiny_model(tmp_path / "tiny", family="qwen3", tokenizer=False)
    kept = tmp_path / "results.jsonl"
    command = [sys.executable, "bench.py", "--model", str(tmp_path / "tiny"), "--workload", "smoke", "--engine",
               "nanovllm", "transformers", "--max-model-len", "128", "--append", str(kept)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()[-2:]]
    assert [record["engine"] for record in records] == ["nanovllm", "transformers"]
    assert records == [json.loads(line) for line in kept.read_text().splitlines()]
    workload = make_workload("smoke", VOCAB_SIZE)
    for record in records:
        assert set(report.FIELDS) <= set(record) <= {*report.FIELDS, *report.OPTIONAL_FIELDS}
        assert (record["input_tokens"], record["output_tokens"]) == (
            workload.num_input_tokens,
            workload.num_output_tokens,
        )
        assert record["seconds"] > 0 and record["startup_seconds"] > 0
    assert records[0]["stats"]["generated_tokens"] == workload.num_output_tokens


def test_kernels_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = load_script("benchmarks/kernels.py")
    out = tmp_path / "kernels.json"
    assert kernels.main(["--dry-run", "--model", "qwen3-0.6b", "--out", str(out)]) == 0
    found = {result["kernel"] for result in json.loads(out.read_text())["results"]}
    assert {"prepare_inputs", "advance", "qk_norm_rope_store", "sample", "linear logits"} <= found
    assert "add_rms_norm" in capsys.readouterr().out


def test_plot(tmp_path: Path) -> None:
    plot = load_script("benchmarks/plot.py")
    records = [make_record(), make_record(engine="vllm", seconds=4.0), make_record(model="n", floor=None)]
    rates = plot.median_rates(records)
    assert rates["x", "m", 1]["w"] == {"nanovllm": 10.0, "vllm": 5.0, "floor": 20.0}
    pytest.importorskip("matplotlib")
    results = tmp_path / "results.jsonl"
    report.append(str(results), records)
    plot.main(["--results", str(results), "--out", str(tmp_path / "out" / "plot.png")])
    assert (tmp_path / "out" / "plot.png").stat().st_size > 1000
