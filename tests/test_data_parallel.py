"""Copies of a model behind one engine: the same results as one copy's, whoever runs what, and one life for all.

Copies are processes on the CPU here; two of them are started once and shared by most tests.
"""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.engine.replicas import ReplicatedEngine
from tests.tiny_models import make_tiny_model

OPTIONS = dict(dtype="float32", device="cpu", max_model_len=256, max_num_seqs=4, kvcache_block_size=16)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
RNG = random.Random(1)
PROMPTS = [[RNG.randint(3, 300) for _ in range(RNG.randint(1, 80))] for _ in range(24)]
PARAMS = [
    SamplingParams(
        temperature=RNG.choice((0.0, 1.0)),
        top_k=RNG.choice((-1, 5)),
        max_tokens=RNG.randint(1, 30),
        n=RNG.choice((1, 1, 2)),
        logprobs=RNG.choice((None, 1)),
    )
    for _ in PROMPTS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen3", tokenizer=True))


@pytest.fixture(scope="module")
def alone(folder):
    with LLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def shared(folder):
    with LLM(folder, data_parallel_size=2, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def both(shared):
    """Two copies; behind each test nothing of it is left."""
    yield shared
    stats = shared.stats()
    assert stats["kv_blocks_free"] == stats["kv_blocks_total"] and shared.is_finished()
    assert not any(engine.calls.requests for engine in engines_of(shared))


def engines_of(llm: LLM):
    assert isinstance(llm.engine, ReplicatedEngine)
    return llm.engine.engines


def tokens(outputs) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_results_are_those_of_one_copy(alone, both):
    """Seeds that requests draw from the engine's too: the first calls of both engines."""
    first, second = alone.generate(PROMPTS, PARAMS, use_tqdm=False), both.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert tokens(first) == tokens(second)
    for one, other in zip(first, second, strict=True):
        if one["logprobs"] is not None:
            for a, b in zip(one["logprobs"], other["logprobs"], strict=True):
                assert {i: entry.rank for i, entry in a.items()} == {i: entry.rank for i, entry in b.items()}
    steps = [engine.stats()["steps"] for engine in engines_of(both)]
    assert min(steps) > 0, "both copies work"
    assert both.stats()["generated_tokens"] == alone.stats()["generated_tokens"]


def test_results_as_they_come(alone, both):
    expected = tokens(alone.generate(PROMPTS, GREEDY, use_tqdm=False))
    found = dict(both.generate_iter(iter(PROMPTS), GREEDY))
    assert tokens(found[index] for index in range(len(PROMPTS))) == expected
    text = alone.generate("hello there", GREEDY, use_tqdm=False)[0]["text"]
    assert "".join(both.stream("hello there", GREEDY)) == text
    iterator = both.generate_iter(PROMPTS, GREEDY)
    next(iterator)
    iterator.close()  # the rest is dropped, in both


def test_a_callers_own_loop(alone, both):
    expected = tokens(alone.generate(PROMPTS[:6], GREEDY, use_tqdm=False))
    ids = [both.add_request(prompt, GREEDY) for prompt in PROMPTS[:6]]
    assert len(set(ids)) == 6
    with pytest.raises(ValueError, match="in use"):
        both.add_request(PROMPTS[0], GREEDY, request_id=ids[3])
    both.abort(ids[1])
    found = {}
    while not both.is_finished():
        found |= {output.request_id: output for output in both.step()}
    assert sorted(found) == sorted(ids[:1] + ids[2:])
    assert tokens(found[i] for i in (ids[0], *ids[2:])) == [expected[0], *expected[2:]]


def test_requests_are_dealt_by_expected_tokens(both):
    sizes = [200, 10, 10, 10, 10, 10, 10, 100, 90]
    for size in sizes:
        both.add_request([5] * (size // 2), SamplingParams(max_tokens=size - size // 2, ignore_eos=True))
    loads = [engine.calls.expected_tokens for engine in engines_of(both)]
    assert sum(loads) == sum(sizes) and max(loads) <= 250
    requests = [request for engine in engines_of(both) for request in engine.calls.requests.values()]
    both.engine.abort([request.request_id for request in requests])
    assert [engine.calls.expected_tokens for engine in engines_of(both)] == [0, 0]
    shares = both.engine._deal(requests)
    loads = [sum(request.expected_tokens for request in share) for share in shares]
    assert abs(loads[0] - loads[1]) <= 10, "of several at once the largest are dealt first"


def test_bad_requests_and_interrupts(alone, both):
    expected = tokens(alone.generate(PROMPTS, GREEDY, use_tqdm=False))
    with pytest.raises(ValueError, match="request 1: "):
        both.generate([[5], [10**6], [6]], GREEDY, use_tqdm=False)
    outputs = both.generate([[5], [10**6], [6]], GREEDY, use_tqdm=False, on_error="return")
    assert [output["finish_reason"] for output in outputs] == ["length", "error", "length"]
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    for seconds in (0.003, 0.02, 0.06, 0.1):
        previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        try:
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, seconds)
                both.generate(PROMPTS, long, use_tqdm=False)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert tokens(both.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_one_thread_at_a_time(both):
    seen: list[BaseException] = []

    def use() -> None:
        try:
            both.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
        except RuntimeError as error:
            seen.append(error)

    iterator = both.generate_iter(PROMPTS, GREEDY)
    next(iterator)
    thread = threading.Thread(target=use)  # between two turns it may
    thread.start()
    thread.join()
    assert not seen
    iterator.close()
    original = engines_of(both)[1].turn

    def turn(*args, **kwargs):
        worker = threading.Thread(target=use)
        worker.start()
        worker.join()
        return original(*args, **kwargs)

    engines_of(both)[1].turn = turn
    try:
        both.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    finally:
        del engines_of(both)[1].turn
    assert seen and "one thread at a time" in str(seen[0])


def test_weights_and_memory(alone, both, folder):
    expected = tokens(alone.generate(PROMPTS[:4], GREEDY, use_tqdm=False))
    both.sleep(level=1)
    with pytest.raises(RuntimeError, match="asleep"):
        both.generate([5], GREEDY)
    both.wake_up()
    assert tokens(both.generate(PROMPTS[:4], GREEDY, use_tqdm=False)) == expected
    both.sleep(level=2)
    both.wake_up()
    with pytest.raises(RuntimeError, match="update_weights"):
        both.generate([5], GREEDY)
    both.update_weights(folder)
    assert tokens(both.generate(PROMPTS[:4], GREEDY, use_tqdm=False)) == expected
    weights = load_file(folder + "/model.safetensors")
    both.update_weights((name, tensor) for name, tensor in weights.items())  # gone through once, sent to both
    assert tokens(both.generate(PROMPTS[:4], GREEDY, use_tqdm=False)) == expected
    with pytest.raises(ValueError, match="no.such.weight"):
        both.update_weights({**weights, "no.such.weight": weights["model.norm.weight"]})
    with pytest.raises(ValueError, match="float8"):
        both.update_weights({**weights, "model.norm.weight": weights["model.norm.weight"].to(torch.float8_e4m3fn)})
    both.update_weights((name, tensor.as_subclass(OfTheTrainer)) for name, tensor in weights.items())
    assert tokens(both.generate(PROMPTS[:4], GREEDY, use_tqdm=False)) == expected


class OfTheTrainer(torch.Tensor):
    """A class that ranks cannot import."""

    def __reduce_ex__(self, protocol):
        raise AssertionError("sent as it is")


def test_a_fork_of_the_process_is_refused(both):
    """The threads that send and receive are not in it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            both.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        except RuntimeError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    both.generate(PROMPTS[:2], GREEDY, use_tqdm=False)


def test_a_copy_that_is_killed_is_named_and_all_end(folder):
    with LLM(folder, data_parallel_size=2, **OPTIONS) as llm:
        processes = [engine.executor.ranks._processes[0] for engine in engines_of(llm)]
        llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
        os.kill(processes[1].pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="killed by signal 9"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        with pytest.raises(RuntimeError, match="killed by signal 9"):
            llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert all(process.poll() is not None for process in processes)
