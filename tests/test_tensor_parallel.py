"""Several ranks compute what one does, in threads for every family and many sizes, in processes as users run them; and
how ranks live and die.

Ranks in processes take seconds to start, so most of these tests share one engine and mend what they do to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.engine import executor
from nanovllm.engine.ranks import Ranks
from tests.reference import reference_greedy
from tests.thread_ranks import ThreadsExecutor
from tests.tiny_models import FAMILIES, make_tiny_model

ROOT = Path(__file__).resolve().parents[1]
NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(
    skip_tokenizer_init=True, dtype="float32", device="cpu", max_model_len=64, kvcache_block_size=8,
    max_num_batched_tokens=24, num_kvcache_blocks=60, max_num_seqs=8,
)  # fmt: skip


def prompts_of(lengths: tuple[int, ...], vocab_size: int = 320, seed: int = 7) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


PLAIN = [GREEDY] * 2 + [
    SamplingParams(temperature=temperature, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, n=1 + i % 2)
    for i, temperature in enumerate((0.3, 1.0, 1.0, 2.0))
]
MIXED = [  # in one batch with rows that need none of it
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=1.0, seed=2, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, top_k=20, top_p=0.9, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=4, min_p=0.05, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0),
    SamplingParams(
        temperature=1.0, seed=5, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
        max_tokens=NUM_TOKENS, ignore_eos=True,
    ),
    SamplingParams(temperature=0, logit_bias={319: 6.0, 3: -20.0}, max_tokens=NUM_TOKENS, min_tokens=4,
                   stop_token_ids=[319]),
]  # fmt: skip


def answers(llm: LLM, prompts: list[list[int]], params: Any) -> list[Any]:
    """Everything that a request's answer says: of each sample its ids, why it ended, and its logprobs."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    stats = llm.stats()
    assert stats["kv_blocks_free"] == stats["kv_blocks_total"]
    return [
        ([(c.token_ids, c.finish_reason, c.logprobs) for c in output.outputs], output.prompt_logprobs)
        for output in outputs
    ]


def tokens_of(answer: list[Any]) -> list[Any]:
    return [[(ids, reason) for ids, reason, _ in samples] for samples, _ in answer]


def assert_equal(actual: list[Any], expected: list[Any]) -> None:
    """Equal ids, and logprobs up to rounding."""
    assert tokens_of(actual) == tokens_of(expected)
    for (samples, prompt), (expected_samples, expected_prompt) in zip(actual, expected, strict=True):
        lists = [(prompt, expected_prompt)]
        lists += [(a, b) for (_, _, a), (_, _, b) in zip(samples, expected_samples, strict=True)]
        for found, wanted in lists:
            assert (found is None) == (wanted is None)
            for one, other in zip(found or [], wanted or [], strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    assert {key: value.rank for key, value in one.items()} == {k: v.rank for k, v in other.items()}
                    assert all(abs(one[key].logprob - other[key].logprob) < 1e-4 for key in one)


def in_threads(folder: Path, size: int, monkeypatch, **options: Any) -> LLM:
    with monkeypatch.context() as patch:
        patch.setattr("nanovllm.engine.replicas.start_executor", ThreadsExecutor)
        return LLM(folder, tensor_parallel_size=size, **(OPTIONS | options))


# ---- in threads: every family, and every way to cut -----------------------------------------------------------------

EIGHT_HEADS = dict(num_attention_heads=8, head_dim=16)
CUTS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    *((name, options, (2, 4)) for name, options in FAMILIES),  # 4 heads share 2 KV heads, or have 4
    ("eight", dict(family="qwen3", num_key_value_heads=8, **EIGHT_HEADS), (2, 8)),
    ("shared-kv", dict(family="llama", num_key_value_heads=2, attention_bias=True, mlp_bias=True, **EIGHT_HEADS), (8,)),
    ("one-kv", dict(family="qwen2", num_key_value_heads=1, **EIGHT_HEADS), (4,)),
    ("vocab-1003", dict(family="qwen3", vocab_size=1003), (2, 4)),
    ("vocab-1003-tied", dict(family="qwen2", vocab_size=1003, tie_word_embeddings=True), (2, 4)),
    ("vocab-330", dict(family="llama", vocab_size=330, num_key_value_heads=8, **EIGHT_HEADS), (8,)),  # two hold none
]


@pytest.mark.parametrize(("name", "options", "sizes"), CUTS, ids=[name for name, _, _ in CUTS])
def test_ranks_in_threads_answer_as_one(name, options, sizes, tmp_path, monkeypatch):
    folder = make_tiny_model(tmp_path, **options)
    prompts = prompts_of((1, 7, 16, 30, 41, 20), options.get("vocab_size", 320))
    with LLM(folder, **OPTIONS) as llm:
        expected = [answers(llm, prompts, params) for params in (PLAIN, MIXED)]
    assert expected[0][0][0][0][0] == reference_greedy(folder, prompts[0], NUM_TOKENS)
    for size in sizes:
        with in_threads(folder, size, monkeypatch) as llm:
            assert_equal(answers(llm, prompts, PLAIN), expected[0])
            widths = [group.gathered_widths for group in llm.engine.executor.groups]
            assert widths == [{3}] * size  # candidates alone: no row needs all its logits
            assert_equal(answers(llm, prompts, MIXED), expected[1])


# ---- in processes: two ranks behind one engine ----------------------------------------------------------------------

SPAWNED = dict(
    tensor_parallel_size=2, max_model_len=96, num_kvcache_blocks=24, max_in_flight=2, skip_tokenizer_init=False
)  # 184 tokens of KV: long prompts do not fit side by side
VOCAB_SIZE = 1003


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("two"), vocab_size=VOCAB_SIZE, tokenizer=True)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), vocab_size=VOCAB_SIZE, tokenizer=True, seed=1)


@pytest.fixture(scope="module")
def started(folder):
    """An engine, and how much memory its ranks had when they were new."""
    with LLM(folder, **(OPTIONS | SPAWNED)) as llm:
        yield llm, [anonymous_bytes(pid) for pid in pids_of(llm)]
    assert_gone(llm)


@pytest.fixture(scope="module")
def ranked(started) -> LLM:
    return started[0]


@pytest.fixture(scope="module")
def at_start(started) -> list[int]:
    return started[1]


@pytest.fixture(scope="module")
def single(folder):
    with LLM(folder, **(OPTIONS | SPAWNED | dict(tensor_parallel_size=1))) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(single) -> list[Any]:
    return answers(single, LONG, PLAIN)


LONG = prompts_of((40, 1, 60, 33, 70, 41), VOCAB_SIZE)
PROMPT = LONG[0]


def pids_of(llm: LLM) -> list[int]:
    return [process.pid for process in llm.engine.executor.ranks._processes]


def is_gone(pid: int) -> bool:
    """Ended, though its parent may not have asked for the exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def assert_gone(ranks: LLM | list[int], seconds: float = 5.0) -> None:
    pids = ranks if isinstance(ranks, list) else pids_of(ranks)
    deadline = time.monotonic() + seconds
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, "ranks outlive their engine"
        time.sleep(0.02)


def anonymous_bytes(pid: int) -> int:
    (line,) = re.findall(r"^Anonymous: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return int(line) << 10


def is_usable(llm: LLM, folder: Path) -> bool:
    stats = llm.stats()
    assert llm.is_finished() and stats["kv_blocks_free"] == stats["kv_blocks_total"]
    output = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]
    return output["token_ids"] == reference_greedy(folder, PROMPT, NUM_TOKENS)


def test_a39_a50_one_prompt_and_five_of_a_vocabulary_that_ranks_do_not_divide(ranked, folder):
    """Logits are joined in order, whether one row samples or several; both halves of the vocabulary are sampled."""
    ids: set[int] = set()
    for prompts in ([LONG[0]], LONG[:5]):
        outputs = ranked.generate(prompts, GREEDY, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output["token_ids"] == reference_greedy(folder, prompt, NUM_TOKENS)
            ids.update(output["token_ids"])
    assert min(ids) < 512 <= max(ids)  # where the second rank's part begins
    for params in (
        SamplingParams(temperature=0, logit_bias={1002: 1000.0}, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=1, seed=1, allowed_token_ids=[1002], max_tokens=3, ignore_eos=True),
    ):
        assert ranked.generate(PROMPT, params, use_tqdm=False)[0]["token_ids"] == [1002] * 3


def test_answers_equal_one_rank(ranked, single, expected):
    """Chunked, preempted, from cached prefixes and without; filters, logprobs and rules beside rows without."""
    assert_equal(answers(ranked, LONG, PLAIN), expected)
    assert_equal(answers(ranked, LONG, PLAIN), expected)
    assert ranked.stats()["prompt_tokens_cached"] > 0
    ranked.reset_prefix_cache()
    assert_equal(answers(ranked, LONG, PLAIN), expected)
    assert_equal(answers(ranked, LONG, MIXED), answers(single, LONG, MIXED))
    word = ranked.tokenizer.decode([300 - 7])
    params = [
        SamplingParams(temperature=0, max_tokens=20, bad_words=["the", word], min_tokens=5, stop=["e", "1"]),
        SamplingParams(temperature=1, seed=8, n=3, max_tokens=20, logprobs=5),
        SamplingParams(temperature=0, max_tokens=20, stop_token_ids=list(range(0, 1000, 7)), min_tokens=3),
    ]
    texts = ["The quick brown fox", "the dog", PROMPT]
    assert_equal(answers(ranked, texts, params), answers(single, texts, params))


def test_preempted_answers_equal_one_rank(ranked, single):
    never = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[0])  # its end is a guess
    short = SamplingParams(max_tokens=40, stop_token_ids=list(range(VOCAB_SIZE)))
    prompts = prompts_of((30, 31, 32, 33), VOCAB_SIZE, seed=3)
    for llm in (ranked, single):
        llm.generate([[5]] * 100, short, use_tqdm=False)  # teaches it to expect short answers
    before = ranked.stats()["preemptions"]
    assert_equal(answers(ranked, prompts, never), answers(single, prompts, never))
    assert ranked.stats()["preemptions"] > before


def test_weights_of_ranks_go_and_come_back(ranked, folder, other_folder, monkeypatch):
    for level in (1, 2):
        ranked.sleep(level)
        ranked.sleep(level)
        with pytest.raises(RuntimeError, match="asleep"):
            ranked.generate(PROMPT, GREEDY, use_tqdm=False)
        ranked.wake_up()
        ranked.wake_up()
        if level == 2:
            with pytest.raises(RuntimeError, match="dropped the weights"):
                ranked.generate(PROMPT, GREEDY, use_tqdm=False)
            ranked.update_weights(folder)
        assert is_usable(ranked, folder)
    ranked.update_weights(iter(load_file(other_folder / "model.safetensors").items()))
    assert is_usable(ranked, other_folder)
    monkeypatch.chdir(folder.parent)  # ranks are where they were
    ranked.update_weights(folder.name)
    assert is_usable(ranked, folder)


def test_weights_that_do_not_fit_are_refused_until_some_do(ranked, folder, other_folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    wrong = {**weights, "model.norm.weight": torch.ones(3), "stray": torch.ones(1)}
    del wrong["lm_head.weight"]
    save_file(wrong, tmp_path / "model.safetensors")
    names = r"missing \(1\): lm_head.weight; unexpected \(1\): stray; of the wrong shape \(1\): model.norm.weight"
    with pytest.raises(ValueError, match=names):
        ranked.update_weights(tmp_path)
    with pytest.raises(ValueError, match="is none"):
        ranked.update_weights(tmp_path / "nowhere")
    assert is_usable(ranked, folder)  # a folder is checked first

    def failing():
        yield from list(load_file(other_folder / "model.safetensors").items())[:5]
        raise LookupError("planted")

    for source, error, message in [
        (wrong, ValueError, names),
        (failing(), LookupError, "planted"),
        ([*list(weights.items())[:3], ("model.norm.weight", 5)], TypeError, "model.norm.weight must be a tensor"),
        ({**weights, "lm_head.weight": weights["lm_head.weight"].to(torch.int8)}, ValueError, "lm_head.weight has"),
    ]:
        with pytest.raises(error, match=message):
            ranked.update_weights(source)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="failed half-way"):
                ranked.generate(PROMPT, GREEDY, use_tqdm=False)
    ranked.update_weights(weights)
    assert is_usable(ranked, folder)


def test_a_file_that_cannot_be_read_is_an_error_of_the_call(ranked, folder, tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "not-downloaded")
    with pytest.raises((OSError, ValueError)):
        ranked.update_weights(tmp_path)
    assert is_usable(ranked, folder)


def test_a_view_is_sent_without_what_it_is_a_view_of():
    whole = torch.arange(1 << 20).float()
    part = executor._to_send("w", whole[5:8])
    assert part.tolist() == [5.0, 6.0, 7.0] and len(pickle.dumps(part)) < 4096
    assert executor._to_send("w", whole).data_ptr() == whole.data_ptr()


def test_logits_that_are_not_finite_name_their_request(ranked, folder):
    """The NaN is in the second rank's part of the embedding, so that only prompts with that token have it."""
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][900] = torch.nan
    ranked.update_weights(weights)
    ban = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [[5, 6, 7], [5, 900, 7], [8, 9]]
    with pytest.raises(RuntimeError, match="request 1: "):
        ranked.generate(prompts, ban, use_tqdm=False)
    outputs = ranked.generate(prompts, ban, use_tqdm=False, on_error="return")
    assert [output["finish_reason"] for output in outputs] == ["length", "error", "length"]
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][1] = torch.nan  # the first rank's part
    ranked.update_weights(weights)
    with pytest.raises(RuntimeError, match="request 0: "):
        ranked.generate(prompts, SamplingParams(seed=1, max_tokens=4), use_tqdm=False)
    ranked.update_weights(folder)
    assert is_usable(ranked, folder)


class Alarm:
    """KeyboardInterrupt in the main thread, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt("planted")

        self.before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


def test_interrupts_leave_a_usable_engine(ranked, folder, expected):
    """At any time inside generate, and inside what changes weights and memory."""
    rng = random.Random(5)
    work = LONG[3:], PLAIN[3:]
    ranked.generate(*work, use_tqdm=False)
    started = time.monotonic()
    ranked.generate(*work, use_tqdm=False)
    duration = time.monotonic() - started
    num_raised = 0
    for _ in range(12):
        try:
            with Alarm(rng.uniform(0.0005, duration)):
                ranked.generate(*work, use_tqdm=False)
        except KeyboardInterrupt:
            num_raised += 1
        assert is_usable(ranked, folder)
    assert num_raised > 3
    assert_equal(answers(ranked, *work), expected[3:])
    weights = load_file(folder / "model.safetensors")
    for trial in range(8):
        act = [
            lambda: ranked.update_weights(weights),
            lambda: ranked.update_weights(folder),
            lambda: ranked.sleep(1),
            lambda: (ranked.sleep(2), ranked.wake_up()),
        ][trial % 4]
        try:
            with Alarm(rng.uniform(0.0005, 0.02)):
                act()
        except KeyboardInterrupt:
            num_raised += 1
        ranked.wake_up()
        ranked.update_weights(folder)
        assert is_usable(ranked, folder)
    assert_equal(answers(ranked, *work), expected[3:])


# ---- in processes: starting, failing, dying -------------------------------------------------------------------------

TINY = OPTIONS | dict(tensor_parallel_size=2, max_num_batched_tokens=512)


def test_a40_large_blocks_and_long_prompts(tmp_path):
    folder = make_tiny_model(tmp_path, max_position_embeddings=1024)
    prompts = prompts_of((300, 411, 500))
    expected = [reference_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
    options = dict(max_model_len=1024, kvcache_block_size=512, num_kvcache_blocks=8, max_num_batched_tokens=256)
    with LLM(folder, **(TINY | options)) as llm:
        assert llm.engine.executor.block_size == llm.config.kvcache_block_size == 512
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == expected


@pytest.mark.parametrize("block_size", [16, 32])
def test_a40_block_sizes_in_threads(block_size, tmp_path, monkeypatch):
    folder = make_tiny_model(tmp_path, max_position_embeddings=1024)
    options = dict(max_model_len=1024, kvcache_block_size=block_size, max_num_batched_tokens=256, num_kvcache_blocks=99)
    with in_threads(folder, 2, monkeypatch, **options, enable_prefix_caching=False) as llm:
        for prompt in prompts_of((300, 500)):
            output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
            assert output["token_ids"] == reference_greedy(folder, prompt, NUM_TOKENS)


def children() -> list[int]:
    """Processes of ranks that this one has."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "nanovllm.worker.rank" in line]


# Run by every interpreter that starts with it on its path: the second rank fails while the first waits for it.
PLANT = """
import os, sys
from importlib.util import find_spec

class Plant:
    def find_spec(self, name, path, target=None):
        if name != "nanovllm.worker.model_runner":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            build = module.ModelRunner._build_batch
            def failing(self):
                if self.tp.rank == 1:
                    {failure}
                build(self)
            module.ModelRunner._build_batch = failing
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Plant())
"""


@pytest.mark.parametrize("failure", ["raise OSError('planted')", "os._exit(7)"])
def test_a_rank_that_does_not_start_is_named(folder, tmp_path, monkeypatch, failure):
    """The loss of it, which is all that the other one can tell, does not hide what it told."""
    (tmp_path / "sitecustomize.py").write_text(PLANT.replace("{failure}", failure))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = children()
    with pytest.raises(RuntimeError) as caught:
        LLM(folder, **TINY)
    text = str(caught.value)
    if failure.startswith("raise"):
        assert text.startswith("rank 1 of 2 failed:\nTraceback") and "OSError: planted" in text and "failing" in text
    else:
        assert text == "rank 1 of 2 ended with exit code 7"
    assert children() == before


def test_what_one_rank_refuses_several_refuse(folder, tmp_path):
    """As with one rank: a ValueError, with the names."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    broken = make_tiny_model(tmp_path, vocab_size=VOCAB_SIZE)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    before = children()
    with pytest.raises(ValueError, match=r"rank \d of 2 failed:\n(.|\n)*missing \(1\): model.norm.weight"):
        LLM(broken, **TINY)
    assert children() == before


def test_a38_a_killed_rank_is_named_and_the_next_engine_starts(folder):
    llm = LLM(folder, **TINY)
    first, second = pids_of(llm)
    work = llm.generate_iter(prompts_of((5, 6, 7)) * 40, SamplingParams(max_tokens=50, ignore_eos=True))
    next(work)
    os.kill(second, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 of 2 was killed by signal 9"):
        list(work)
    assert time.monotonic() - started < 5
    assert_gone([first, second])
    with LLM(folder, **TINY) as again:
        assert is_usable(again, folder)
        for use in (
            lambda: llm.generate(PROMPT, GREEDY, use_tqdm=False),
            lambda: llm.add_request(PROMPT, GREEDY),
            llm.sleep,
            lambda: llm.update_weights(folder),
        ):
            with pytest.raises(RuntimeError, match="rank 1 of 2 was killed by signal 9"):
                use()
        assert llm.stats()["steps"] > 0
        llm.close()
        llm.close()
        with pytest.raises(RuntimeError, match="closed|killed"):
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert is_usable(again, folder)
        os.kill(pids_of(again)[0], signal.SIGKILL)  # while nobody asks for anything
        assert_gone(again)
        with pytest.raises(RuntimeError, match="rank 0 of 2 was killed by signal 9"):
            again.generate(PROMPT, GREEDY, use_tqdm=False)


SCRIPT = """
import os, sys, time
import torch.distributed as dist
from nanovllm import LLM, SamplingParams

dist.init_process_group("gloo", rank=0, world_size=1, init_method="file://" + sys.argv[2])
group = dist.group.WORLD
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", device="cpu", max_model_len=64,
          num_kvcache_blocks=60, kvcache_block_size=8, tensor_parallel_size=2)
output = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)[0]
assert dist.is_initialized() and dist.group.WORLD is group and dist.get_world_size() == 1
print(output["token_ids"], [process.pid for process in llm.engine.executor.ranks._processes], sep="\\n", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_a38_ranks_end_with_a_driver_that_dies(folder, tmp_path, end):
    """The script has no guard around what it does, and a process group of its own. It runs in a folder whose files
    are named as modules are."""
    last = {
        "kill": "list(llm.generate_iter([[5]] * 10**6, SamplingParams(max_tokens=60, ignore_eos=True)))",
        "exit": "os._exit(3)",
    }
    (tmp_path / "script.py").write_text(SCRIPT.replace("{end}", last[end]))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("torch", "logging", "nanovllm"):
        (elsewhere / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", folder, tmp_path / "store"],
        stdout=subprocess.PIPE, text=True, cwd=elsewhere, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    with process:
        tokens, pids = (json.loads(process.stdout.readline()) for _ in range(2))
        if end == "kill":
            time.sleep(0.3)
            process.kill()
    assert tokens == reference_greedy(folder, [5, 6, 7], 8)
    assert process.returncode == (-signal.SIGKILL if end == "kill" else 3)
    assert_gone(pids, seconds=10)


@pytest.mark.slow
def test_a36_engines_of_two_ranks_start_at_once(folder):
    with ThreadPoolExecutor(4) as pool:
        engines = list(pool.map(lambda _: LLM(folder, **TINY), range(4)))
    try:
        assert len({pid for llm in engines for pid in pids_of(llm)}) == 8
        assert all(is_usable(llm, folder) for llm in engines)
    finally:
        for llm in engines:
            llm.close()
    for llm in engines:
        assert_gone(llm)


def test_an_interrupt_while_ranks_start_leaves_none(folder):
    before = children()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Alarm(0.8):
        LLM(folder, **TINY)
    assert time.monotonic() - started < 5
    assert children() == before


def test_an_interrupt_while_copies_start_leaves_none(folder):
    before = children()
    with pytest.raises(KeyboardInterrupt), Alarm(0.8):
        LLM(folder, **(OPTIONS | dict(data_parallel_size=2)))
    assert children() == before


def test_a_rank_that_wakes_up_to_too_little_memory(folder, monkeypatch):
    """None of them keeps any, none waits for it, and it can be tried again."""
    with in_threads(folder, 2, monkeypatch) as llm:
        llm.sleep(level=1)
        poor = llm.engine.executor.runners[1]

        def fail() -> None:
            raise MemoryError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(poor, "_new_kv_cache", fail)
            with pytest.raises((MemoryError, RuntimeError), match="planted|another rank has too little memory"):
                llm.wake_up()
        assert all(runner.kv_cache is None for runner in llm.engine.executor.runners)
        with pytest.raises(RuntimeError, match="asleep"):
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
        llm.wake_up()
        assert is_usable(llm, folder)


def test_a54_a_rank_holds_its_part_of_the_weights(at_start, tmp_path, monkeypatch):
    """At no time more than that and one tensor, in memory of its own: pages of the mapped file come and go. In float16,
    of which no packed copies are made."""
    folder = make_tiny_model(
        tmp_path, vocab_size=VOCAB_SIZE, hidden_size=512, intermediate_size=4096, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, num_hidden_layers=9, dtype=torch.float16,
    )  # fmt: skip
    whole = (folder / "model.safetensors").stat().st_size  # 134 MB
    largest = 2 * 4096 * 512
    peaks: dict[int, int] = {}
    spawn = Ranks._spawn

    def spawn_noted(ranks: Ranks) -> None:
        spawn(ranks)
        peaks[ranks._processes[-1].pid] = 0

    monkeypatch.setattr(Ranks, "_spawn", spawn_noted)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(LLM, folder, **(TINY | dict(dtype="float16")))
        done = False
        while not done:
            time.sleep(0.005)
            done = starting.done()
            for pid in list(peaks):  # at the end, too
                with contextlib.suppress(OSError):
                    peaks[pid] = max(peaks[pid], anonymous_bytes(pid))
        starting.result().close()
    for small, peak in zip(at_start, peaks.values(), strict=True):
        assert 0.45 * whole < peak - small < 0.5 * whole + 3 * largest, (whole, peak - small)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "tensor_parallel_size=3 must divide the model's 4 attention heads"),
        (8, "tensor_parallel_size=8 must divide the model's 4 attention heads"),
        (0, "tensor_parallel_size must be at least 1, got 0"),
    ],
)
def test_sizes_that_cannot_be_cut_are_refused_before_anything_starts(folder, monkeypatch, size, message):
    monkeypatch.setattr("nanovllm.engine.ranks.Ranks._spawn", None)
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(folder, **(TINY | dict(tensor_parallel_size=size)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_attention_heads=12, num_key_value_heads=6, head_dim=16), "4 must divide the model's 6 KV heads, or"),
        (dict(num_attention_heads=12, num_key_value_heads=3, head_dim=16), "4 must divide the model's 3 KV heads, or"),
        (dict(intermediate_size=98), "4 must divide the model's 98 units of intermediate_size"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr("nanovllm.engine.ranks.Ranks._spawn", None)
    folder = make_tiny_model(tmp_path, **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(folder, **(TINY | dict(tensor_parallel_size=4)))
