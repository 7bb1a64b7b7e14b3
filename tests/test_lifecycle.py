"""The life of an engine: closing, interrupts at any point, sleep and new weights, several engines in one process."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import nanovllm
from nanovllm import LLM, SamplingParams
from tests.reference import reference_greedy
from tests.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
OPTIONS = dict(dtype="float32", device="cpu", max_model_len=64, num_kvcache_blocks=40, kvcache_block_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folders(request, tmp_path_factory) -> tuple[Path, Path]:
    """The same model with other weights."""
    return tuple(
        make_tiny_model(tmp_path_factory.mktemp(f"model{seed}"), seed=seed, tie_word_embeddings=request.param)
        for seed in (0, 1)
    )


def tokens(llm: LLM, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, params, use_tqdm=False)[0]["token_ids"]


def all_blocks_free(llm: LLM) -> bool:
    stats = llm.stats()
    return stats["kv_blocks_free"] == stats["kv_blocks_total"]


# ---- closing --------------------------------------------------------------------------------------------------------


def test_closing_again_and_using_it_afterwards(folder):
    with LLM(folder, **OPTIONS) as llm:
        iterator = llm.generate_iter([PROMPT, PROMPT], dataclasses.replace(GREEDY, max_tokens=30))
        llm.add_request(PROMPT, GREEDY)
        llm.step()
        short = llm.generate_iter(iter([([5], dataclasses.replace(GREEDY, max_tokens=1)), (PROMPT, GREEDY)]))
        assert next(short)[0] == 0
    llm.close()
    llm.close()
    for use in (
        lambda: tokens(llm),
        lambda: next(iterator),
        lambda: next(short),  # not the end that it would otherwise look like
        lambda: llm.step(),
        lambda: llm.add_request(PROMPT, GREEDY),
        lambda: llm.sleep(),
        lambda: llm.wake_up(),
        lambda: llm.update_weights([]),
        lambda: llm.reset_prefix_cache(),
    ):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            use()
    assert llm.is_finished() and llm.step() == []
    assert llm.stats()["steps"] > 0


def test_an_engine_nobody_holds_closes(folder):
    llm = LLM(folder, **OPTIONS)
    assert len(tokens(llm)) == 8
    with pytest.raises(ValueError):
        llm.generate([[]], GREEDY, use_tqdm=False)
    for _ in llm.generate_iter([PROMPT], GREEDY):
        pass
    llm.add_request(PROMPT, GREEDY)
    llm.step()
    engine, executor = weakref.ref(llm.engine), llm.engine.executor
    gc.disable()  # no cycle may keep it
    try:
        del llm
        assert engine() is None
        assert executor._runner is None
    finally:
        gc.enable()


def test_an_engine_that_cannot_start_leaves_nothing(folder):
    gc.collect()
    before = sum(issubclass(type(thing), torch.nn.Module) for thing in gc.get_objects())
    with pytest.raises((RuntimeError, MemoryError, ValueError)):
        LLM(folder, **(OPTIONS | dict(num_kvcache_blocks=10**13)))
    gc.collect()
    assert sum(issubclass(type(thing), torch.nn.Module) for thing in gc.get_objects()) == before


def test_engines_one_after_another_and_side_by_side(folder):
    expected = reference_greedy(folder, PROMPT, 8)
    for _ in range(3):
        with LLM(folder, **OPTIONS) as llm:
            assert tokens(llm) == expected
    with LLM(folder, **OPTIONS) as one, LLM(folder, **OPTIONS) as two:
        in_turn = [one.generate_iter([PROMPT, [5, 6]], GREEDY), two.generate_iter([PROMPT, [5, 6]], GREEDY)]
        results = [dict([next(iterator)]) for iterator in in_turn]
        one.reset_prefix_cache()
        for result, iterator in zip(results, in_turn, strict=True):
            result |= dict(iterator)
            assert [result[i]["token_ids"] for i in range(2)] == [expected, reference_greedy(folder, [5, 6], 8)]
        one.close()
        assert tokens(two) == expected


# ---- interrupts -----------------------------------------------------------------------------------------------------

PACKAGE = str(Path(nanovllm.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line, or opcode, that is run inside the package; n = 0: only counts."""

    def __init__(self, at: int = 0, opcodes: bool = False) -> None:
        self.at, self.opcodes, self.count = at, opcodes, 0

    def __enter__(self) -> Interrupt:
        self.before = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def enter(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.opcodes, not self.opcodes
        return self.each

    def each(self, frame, event, arg):
        if event in ("line", "opcode"):
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt("planted")
        return self.each


SAMPLED = SamplingParams(
    n=3, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=0, presence_penalty=0.5
)
BYSTANDERS = [([9, 8, 7], dataclasses.replace(GREEDY, max_tokens=20)), (PROMPT, SAMPLED)]
WORK = [(PROMPT, SAMPLED), ([5] * 20, GREEDY), ([6], dataclasses.replace(GREEDY, stop=["e"], ignore_eos=False))]


def whole(output) -> list[list[int]]:
    for completion in output.outputs:
        assert completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)
    assert output.prompt_logprobs is None or len(output.prompt_logprobs) == len(output.prompt_token_ids)
    return [completion.token_ids for completion in output.outputs]


def by_generate(llm: LLM) -> list:
    return [whole(output) for output in llm.generate(*map(list, zip(*WORK, strict=True)), use_tqdm=False)]


def by_generate_iter(llm: LLM) -> list:
    results = {index: whole(output) for index, output in llm.generate_iter(iter(WORK))}
    return [results[index] for index in range(len(WORK))]


def by_closed_iterator(llm: LLM) -> list:
    iterator = llm.generate_iter(iter(WORK))
    next(iterator)
    iterator.close()
    return by_generate(llm)


def by_steps(llm: LLM) -> list:
    ids = [llm.add_request(prompt, params) for prompt, params in WORK]
    results = {}
    while not llm.is_finished():
        results.update((output.request_id, whole(output)) for output in llm.step())
    return [results[request_id] for request_id in ids]


def by_abort(llm: LLM) -> list:
    request_id = llm.add_request(*WORK[0])
    llm.step()
    llm.abort(request_id)
    return by_generate(llm)


def by_stream(llm: LLM) -> list:
    "".join(llm.stream(*WORK[2]))
    return by_generate(llm)


WAYS = [by_generate, by_generate_iter, by_closed_iterator, by_steps, by_abort, by_stream]


@pytest.fixture(scope="module", params=[1, 2], ids=["depth1", "depth2"])
def llm(request, folder):
    with LLM(folder, max_in_flight=request.param, max_num_batched_tokens=16, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_interrupts_at_any_point(llm, way):
    rng = random.Random(way.__name__)
    expected = by_generate(llm)
    bystanders = {index: whole(output) for index, output in llm.generate_iter(iter(BYSTANDERS))}
    totals = {}
    for opcodes in (False, True):
        with Interrupt(opcodes=opcodes) as interrupt:
            assert way(llm) == expected
        totals[opcodes] = interrupt.count
    num_raised = 0
    for trial in range(24):
        others = llm.generate_iter(iter(BYSTANDERS + [([6], dataclasses.replace(GREEDY, max_tokens=1))]))
        assert next(others)[0] == 2
        opcodes = trial % 2 == 1
        try:
            with Interrupt(rng.randint(1, totals[opcodes]), opcodes):
                way(llm)
        except KeyboardInterrupt:
            num_raised += 1
        for _ in range(1000):  # what add_request took before the interrupt may go on, or be gone
            if llm.is_finished():
                break
            llm.step()
        assert llm.is_finished()
        assert {index: whole(output) for index, output in others} == bystanders
        assert by_generate(llm) == expected
        assert all_blocks_free(llm) and not llm.engine.calls.requests
    assert num_raised > 12


@pytest.mark.parametrize("way", [by_generate, by_generate_iter, by_steps], ids=lambda way: way.__name__)
def test_interrupts_while_an_error_is_mended(llm, way, monkeypatch):
    rng = random.Random(way.__name__)
    expected = by_generate(llm)
    bystanders = {index: whole(output) for index, output in llm.generate_iter(iter(BYSTANDERS))}
    submit = llm.engine.executor.submit
    for trial in range(24):
        others = llm.generate_iter(iter(BYSTANDERS + [([6], dataclasses.replace(GREEDY, max_tokens=1))]))
        assert next(others)[0] == 2
        interrupt = Interrupt(rng.randint(1, 400), opcodes=trial % 2 == 1)
        num_steps = 0

        def failing(plan, interrupt=interrupt):
            nonlocal num_steps
            num_steps += 1
            if num_steps == 3:
                interrupt.__enter__()
                for frame in frames_above():  # those that run already, and mend
                    interrupt.enter(frame, "call", None)
                    frame.f_trace = interrupt.each
                raise OSError("planted")
            return submit(plan)

        monkeypatch.setattr(llm.engine.executor, "submit", failing)
        try:
            with pytest.raises((OSError, KeyboardInterrupt)):
                way(llm)
        finally:
            sys.settrace(None)
            monkeypatch.undo()
        while not llm.is_finished():
            llm.step()
        assert {index: whole(output) for index, output in others} == bystanders
        assert by_generate(llm) == expected
        assert all_blocks_free(llm) and not llm.engine.calls.requests


def frames_above():
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            yield frame
        frame = frame.f_back


@pytest.mark.parametrize("name", ["add", "_queue"])
def test_an_interrupted_add_request_takes_no_other_along(llm, name, monkeypatch):
    expected = tokens(llm)
    llm.add_request(PROMPT, GREEDY, request_id="first")
    llm.step()
    scheduler = llm.engine.scheduler
    queue = getattr(scheduler, name)

    def interrupted(*args):
        queue(*args)
        monkeypatch.undo()
        raise KeyboardInterrupt("planted")

    monkeypatch.setattr(scheduler, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.add_request(PROMPT, GREEDY, request_id="second")
    llm.add_request([5], GREEDY, request_id="second")
    outputs = {}
    while not llm.is_finished():
        outputs.update((output.request_id, output) for output in llm.step())
    assert set(outputs) == {"first", "second"}
    assert outputs["first"]["token_ids"] == expected and outputs["second"].prompt_token_ids == [5]


def test_requests_whose_call_is_gone_are_dropped(llm):
    """An interrupt before the first line of a clean-up: nobody is left to abort them."""
    from nanovllm.engine.call import Call

    call = Call()
    llm.engine.submit([llm.inputs.check_one(PROMPT, dataclasses.replace(GREEDY, max_tokens=40))], call)
    llm.engine.turn(call)
    assert not all_blocks_free(llm)
    del call
    assert len(tokens(llm)) == 8
    assert all_blocks_free(llm) and not llm.engine.calls.requests


def test_an_error_in_a_step_surfaces_and_a_dead_engine_says_so(folder, monkeypatch):
    llm = LLM(folder, **OPTIONS)
    bystander = llm.generate_iter(iter([([6], dataclasses.replace(GREEDY, max_tokens=1)), (PROMPT, GREEDY)]))
    assert next(bystander)[0] == 0
    llm.add_request(PROMPT, GREEDY)
    runner = llm.engine.executor.runner

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runner, "execute", fail)
    monkeypatch.setattr(runner, "synchronize", fail)
    with pytest.raises(RuntimeError, match="^CUDA error: an illegal memory access"):
        tokens(llm)
    for use in (lambda: tokens(llm), lambda: next(bystander), llm.step, lambda: llm.add_request(PROMPT, GREEDY)):
        with pytest.raises(RuntimeError, match="the engine is dead: the device failed with CUDA error"):
            use()
    assert llm.is_finished()
    llm.close()
    with pytest.raises(RuntimeError, match="the engine is dead"):
        tokens(llm)


def test_cached_tokens_are_of_the_prompt_also_after_an_error(folder, monkeypatch):
    """Queued again from known tokens, one of two twins finds generated blocks of the other one, too."""
    prompt, params = PROMPT[:8], dataclasses.replace(GREEDY, max_tokens=40)
    with LLM(folder, **OPTIONS) as llm:
        twins = llm.generate_iter(
            iter([(prompt, params), (prompt, params), ([6], dataclasses.replace(params, max_tokens=20))])
        )
        assert next(twins)[0] == 2
        monkeypatch.setattr(llm.engine.executor, "submit", lambda plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tokens(llm)
        monkeypatch.undo()
        outputs = dict(twins)
        assert outputs[0]["token_ids"] == outputs[1]["token_ids"]
        # whichever of them ran first behind the last error
        assert sorted(outputs[index].num_cached_tokens for index in range(2)) == [0, len(prompt)]


def test_a_result_that_cannot_be_made_breaks_no_other(llm, monkeypatch):
    expected = tokens(llm)
    other = llm.generate_iter(iter([([6], dataclasses.replace(GREEDY, max_tokens=1)), ([7], GREEDY)]))
    assert next(other)[0] == 0
    output = llm.engine.output_processor.output

    def failing(request):
        if request.prompt_token_ids == [7]:
            raise OSError("planted")
        return output(request)

    monkeypatch.setattr(llm.engine.output_processor, "output", failing)
    assert len(tokens(llm, params=dataclasses.replace(GREEDY, max_tokens=30))) == 30
    assert all_blocks_free(llm)  # at once
    assert tokens(llm) == expected
    with pytest.raises(RuntimeError, match=r"request 1: it was lost to OSError\('planted'\)"):
        next(other)
    assert all_blocks_free(llm)


# ---- sleep and weights ----------------------------------------------------------------------------------------------


def pairs_of(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(folder / "model.safetensors").items())


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(folder, level):
    with LLM(folder, **OPTIONS) as llm:
        expected = tokens(llm)
        runner = llm.engine.executor.runner
        llm.sleep(level)
        assert runner.kv_cache is None
        sizes = [parameter.untyped_storage().nbytes() for parameter in runner.model.parameters()]
        assert level == 1 or not any(sizes)
        for use in (lambda: tokens(llm), lambda: llm.add_request(PROMPT, GREEDY)):
            with pytest.raises(RuntimeError, match=r"the engine is asleep: call wake_up\(\) first"):
                use()
        with pytest.raises(RuntimeError, match="update_weights: the engine is asleep"):
            llm.update_weights(folder)
        llm.sleep(level)
        llm.wake_up()
        llm.wake_up()
        if level == 2:
            with pytest.raises(RuntimeError, match=r"sleep\(level=2\) dropped the weights: call update_weights\(\)"):
                tokens(llm)
            llm.update_weights(folder)
        assert tokens(llm) == expected
        assert llm.stats()["prompt_tokens_cached"] == 0
        llm.sleep(level)
    with pytest.raises(RuntimeError, match="closed"):
        llm.wake_up()


def test_sleeping_deeper_drops_the_weights(folder):
    with LLM(folder, **OPTIONS) as llm:
        llm.sleep(1)
        llm.sleep(2)
        llm.sleep(1)
        llm.wake_up()
        with pytest.raises(RuntimeError, match="dropped the weights"):
            tokens(llm)
        with pytest.raises(ValueError, match="level must be 1 .* or 2 .*, got 3"):
            llm.sleep(3)


def test_a_wake_up_that_fails_can_be_tried_again(folder, monkeypatch):
    with LLM(folder, **OPTIONS) as llm:
        expected = tokens(llm)
        llm.sleep()
        runner = llm.engine.executor.runner

        def fail() -> None:
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(runner, "_new_kv_cache", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            llm.wake_up()
        assert runner.logits.untyped_storage().nbytes() == 0
        with pytest.raises(RuntimeError, match="asleep"):
            tokens(llm)
        monkeypatch.undo()
        llm.wake_up()
        assert tokens(llm) == expected


def test_sleep_and_updates_need_an_idle_engine(folder):
    with LLM(folder, **OPTIONS) as llm:
        request_id = llm.add_request(PROMPT, GREEDY)
        llm.step()
        llm.wake_up()  # awake: nothing
        for change in (llm.sleep, lambda: llm.update_weights(folder)):
            with pytest.raises(RuntimeError, match=r"needs an idle engine, and requests have not finished \(1\)"):
                change()
        outputs = []
        while not llm.is_finished():
            outputs += llm.step()
        assert outputs[0]["token_ids"] == reference_greedy(folder, PROMPT, 8)
        request_id = llm.add_request(PROMPT, GREEDY)
        llm.step()
        llm.abort(request_id)
        llm.sleep()
        llm.wake_up()
        assert tokens(llm) == outputs[0]["token_ids"]


@pytest.mark.parametrize("kind", ["folder", "str", "pairs", "dict", "generator", "model"])
def test_new_weights_answer_as_a_fresh_engine(folders, kind):
    """A49."""
    old, new = folders
    prompts = [PROMPT, PROMPT + [3] * 10, [5]]
    with LLM(new, skip_tokenizer_init=True, **OPTIONS) as fresh:
        expected = [tokens(fresh, prompt) for prompt in prompts]
    with LLM(old, skip_tokenizer_init=True, **OPTIONS) as llm:
        before = [tokens(llm, prompt) for prompt in prompts]
        addresses = [parameter.data_ptr() for parameter in llm.engine.executor.runner.model.parameters()]
        llm.update_weights(source_of(new, kind))
        assert addresses == [parameter.data_ptr() for parameter in llm.engine.executor.runner.model.parameters()]
        assert [tokens(llm, prompt) for prompt in prompts] == expected != before
        llm.update_weights(old)
        assert [tokens(llm, prompt) for prompt in prompts] == before


def source_of(folder: Path, kind: str):
    if kind == "folder":
        return folder
    if kind == "str":
        return str(folder)
    if kind == "model":
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).named_parameters()
    pairs = pairs_of(folder)
    return {"pairs": pairs, "dict": dict(pairs), "generator": (pair for pair in pairs)}[kind]


def test_weights_that_do_not_fit(folders, tmp_path):
    old, new = folders
    pairs = pairs_of(new)
    name = pairs[3][0]
    with LLM(old, skip_tokenizer_init=True, **OPTIONS) as llm:
        expected = tokens(llm)
        for folder, message in (
            (make_tiny_model(tmp_path / "wide", hidden_size=96), "of the wrong shape"),
            (tmp_path / "nowhere", "nowhere"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.update_weights(folder)
            assert tokens(llm) == expected  # nothing was written
        for wrong, error, message in (
            ([5], TypeError, "takes a folder or pairs of a name and a tensor, got 5"),
            ([("model.norm.weight", [1.0])], TypeError, "model.norm.weight must be a tensor, got list"),
            (7, TypeError, "not iterable"),
        ):
            with pytest.raises(error, match=message):
                llm.update_weights(wrong)
            assert tokens(llm) == expected

        def interrupted():
            yield from pairs[:5]
            raise KeyboardInterrupt

        for wrong, error, message in (
            (pairs[:3] + pairs[4:], ValueError, rf"missing \(1\): {name}"),
            (pairs + [("extra", pairs[0][1])], ValueError, r"unexpected \(1\): extra"),
            ([(n, t.T if n == name else t) for n, t in pairs[:3]] + [(name, torch.ones(3))], ValueError, "wrong shape"),
            ([], ValueError, "missing"),
            (interrupted(), KeyboardInterrupt, None),
        ):
            with pytest.raises(error, match=message):
                llm.update_weights(wrong)
            if wrong:
                with pytest.raises(RuntimeError, match=r"the last update_weights\(\) failed half-way"):
                    tokens(llm)
            llm.sleep()
            llm.wake_up()
            llm.update_weights(old)
            assert tokens(llm) == expected


def test_a_small_pool_answers_as_a_fresh_engine(folder):
    """A25: blocks that hold other contents now are not found under their old ones."""
    prompts = [[(seed * 31 + i) % 250 + 3 for i in range(30)] for seed in range(5)]
    expected = [reference_greedy(folder, prompt, 8) for prompt in prompts]
    with LLM(folder, **(OPTIONS | dict(num_kvcache_blocks=7))) as llm:
        for index in (0, 1, 2, 0, 3, 4, 1, 1, 0):
            assert tokens(llm, prompts[index]) == expected[index]
        assert llm.stats()["prompt_tokens_cached"] > 0


def test_the_rollout_example(folder):
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, root / "examples/rollout.py", "--model", folder, "--steps", "1", "--max-tokens", "4"]
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "step 0: mean reward" in result.stdout and "step 1: mean reward" in result.stdout


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def medium(tmp_path_factory) -> tuple[Path, Path]:
    shape = dict(hidden_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64, vocab_size=8000)
    return tuple(
        make_tiny_model(tmp_path_factory.mktemp(f"medium{seed}"), seed=seed, num_hidden_layers=4, **shape)
        for seed in (0, 1)
    )


GPU = dict(skip_tokenizer_init=True, max_model_len=512, num_kvcache_blocks=2000, max_num_seqs=32)


@pytest.mark.gpu(seconds=14)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu_sleep_gives_memory_back(medium, dtype):
    old, new = medium
    with LLM(new, dtype=dtype, **GPU) as fresh:
        expected_new = tokens(fresh)
    gc.collect()
    torch.cuda.empty_cache()
    with LLM(old, dtype=dtype, **GPU) as llm:
        expected = tokens(llm)
        # rows that end at their limit: what warms the graphs up again must not move them on
        llm.generate([[5] * 400] * 32, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
        held = torch.cuda.memory_allocated()
        runner = llm.engine.executor.runner
        kv_bytes = runner.kv_cache._data.numel() * runner.kv_cache._data.element_size()
        weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in runner.model.parameters())
        for level in (1, 1, 2):
            reserved = torch.cuda.memory_reserved()  # by this process: others run beside it
            llm.sleep(level)
            assert held - torch.cuda.memory_allocated() >= kv_bytes + weight_bytes
            assert reserved - torch.cuda.memory_reserved() >= kv_bytes + weight_bytes - (64 << 20)
            llm.wake_up()
            assert runner.graphs is not None
            if level == 1:
                assert tokens(llm) == expected
        llm.update_weights((name, tensor.cuda()) for name, tensor in pairs_of(new))
        assert tokens(llm) == expected_new


@pytest.mark.gpu(seconds=12)
def test_gpu_updates_reach_captured_graphs(medium):
    old, new = medium
    params = SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=20, ignore_eos=True)
    with LLM(new, dtype="float32", **GPU) as fresh:
        expected = [whole(output) for output in fresh.generate([PROMPT, [5]], params, use_tqdm=False)]
    with LLM(old, dtype="float32", **GPU) as llm:
        before = [whole(output) for output in llm.generate([PROMPT, [5]], params, use_tqdm=False)]
        llm.update_weights(new)
        assert [whole(output) for output in llm.generate([PROMPT, [5]], params, use_tqdm=False)] == expected != before


@pytest.mark.gpu(seconds=14)
@pytest.mark.parametrize(("block_size", "caching"), [(None, True), (16, False)])
def test_gpu_samples(medium, block_size, caching):
    """Forks share and copy blocks, beside graphs and in mixed steps: as one sample after the other gives them."""
    prompts = [[(7 * i) % 7000 + 3 for i in range(length)] for length in (1, 16, 17, 130, 300)]
    params = SamplingParams(n=6, temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    options = dict(GPU, dtype="float32", kvcache_block_size=block_size, enable_prefix_caching=caching)
    with LLM(medium[0], **options) as llm:
        outputs = [whole(output) for output in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(medium[0], **dict(options, max_num_seqs=1)) as llm:
        assert [whole(output) for output in llm.generate(prompts, params, use_tqdm=False)] == outputs
    assert all(len({tuple(tokens) for tokens in samples}) == 6 for samples in outputs)
