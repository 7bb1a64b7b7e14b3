"""An engine that is entered again while it is in use: by another thread, a signal handler, the garbage collector."""

from __future__ import annotations

import dataclasses
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from tests.test_lifecycle import OPTIONS, PACKAGE, Interrupt, all_blocks_free
from tests.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=30)
ONE = dataclasses.replace(GREEDY, max_tokens=1)
PROMPTS = [list(range(5, 22)), [9, 8, 7], [6] * 12]
ONE_THREAD = "an engine is used by one thread at a time"
INSIDE = "the engine is in the middle of a step"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)


@pytest.fixture(scope="module", params=[1, 2], ids=["depth1", "depth2"])
def llm(request, folder):
    with LLM(folder, max_in_flight=request.param, max_num_batched_tokens=16, **OPTIONS) as llm:
        yield llm


def answers(llm: LLM, prompts=PROMPTS, params=GREEDY) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(llm) -> list[list[int]]:
    return answers(llm)


def is_clean(llm: LLM) -> bool:
    engine = llm.engine
    return (
        all_blocks_free(llm)
        and not engine.calls.requests
        and not engine._dropped
        and not engine.gate._entries
        and not engine._dirty
        and llm.is_finished()
    )


def at_step(llm: LLM, monkeypatch, number: int, action) -> None:
    """Run `action` in the middle of the n-th step from now."""
    submit, count = llm.engine.executor.submit, 0

    def submit_and_act(plan):
        nonlocal count
        count += 1
        if count == number:
            action()
        return submit(plan)

    monkeypatch.setattr(llm.engine.executor, "submit", submit_and_act)


def in_thread(action):
    """The result of `action` in another thread, or its exception."""
    results = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert results, "it waits for ever"
    return results[0]


def uses(llm: LLM) -> list:
    return [
        lambda: answers(llm, [[5]]),
        lambda: llm.add_request([5], GREEDY),
        lambda: next(llm.stream([5], GREEDY)),
        lambda: next(llm.generate_iter([[5]], GREEDY)),
        lambda: llm.sleep(),
        lambda: llm.wake_up(),
        lambda: llm.update_weights([]),
        lambda: llm.reset_prefix_cache(),
    ]


# ---- threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_between_steps", [False, True])
def test_another_thread_is_refused_while_one_generates(llm, expected, monkeypatch, is_between_steps):
    errors = []

    def enter() -> None:
        errors.extend(in_thread(use) for use in uses(llm))

    if is_between_steps:
        turn, count = llm.engine.turn, 0

        def turn_and_enter(call=None):
            nonlocal count
            turn(call)
            count += 1
            if count == 2:
                enter()

        monkeypatch.setattr(llm.engine, "turn", turn_and_enter)
    else:
        at_step(llm, monkeypatch, 3, enter)
    assert answers(llm) == expected
    assert [type(error).__mro__[1] for error in errors] == [RuntimeError] * len(uses(llm))
    assert all(ONE_THREAD in str(error) for error in errors)
    monkeypatch.undo()
    assert answers(llm) == expected and is_clean(llm)


def test_threads_one_after_another(llm, expected):
    assert in_thread(lambda: answers(llm)) == expected
    iterator = llm.generate_iter(PROMPTS, GREEDY)
    results = dict([next(iterator)])
    while item := in_thread(lambda: next(iterator, None)):
        results.update([item])
        results.update([item] if (item := next(iterator, None)) else [])
    assert [results[index]["token_ids"] for index in range(3)] == expected
    assert answers(llm) == expected and is_clean(llm)


def test_threads_at_once_get_right_answers_or_errors(llm, expected):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    wrong, counts = [], {"right": 0, "refused": 0}

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(8):
            try:
                if rng.random() < 0.3:
                    next(llm.generate_iter(PROMPTS, LONG))  # and leave it
                elif (got := answers(llm)) != expected:
                    wrong.append(got)
                else:
                    counts["right"] += 1
            except RuntimeError as error:
                counts["refused"] += 1
                if ONE_THREAD not in str(error):
                    wrong.append(error)
            llm.abort("nobody's")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    sys.setswitchinterval(before)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert counts["right"] and counts["refused"]
    assert answers(llm) == expected and is_clean(llm)


def test_an_abort_in_another_thread_disturbs_nobody(llm, expected):
    """It may come at any time, and who is in the engine carries it out."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    errors, stop = [], threading.Event()

    def abort() -> None:
        while not stop.is_set():
            try:
                llm.abort("nobody's")
                time.sleep(1e-4)
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        for _ in range(2):
            assert answers(llm) == expected
        request_id = llm.add_request(PROMPTS[0], LONG)
        while not llm.step():
            pass
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not errors
    request_id = llm.add_request(PROMPTS[0], LONG)
    llm.step()
    in_thread(lambda: llm.abort(request_id))
    assert is_clean(llm)


# ---- signals and callbacks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_signal", [False, True])
def test_entering_in_the_middle_of_a_step(llm, expected, monkeypatch, has_signal):
    errors = []
    request_id = llm.add_request(PROMPTS[1], LONG)
    llm.step()

    def enter(*_: object) -> None:
        llm.abort(request_id)
        for use in (*uses(llm), llm.step):
            try:
                use()
            except RuntimeError as error:
                errors.append(str(error))

    before = signal.signal(signal.SIGUSR1, enter)
    try:
        at_step(llm, monkeypatch, 3, (lambda: signal.raise_signal(signal.SIGUSR1)) if has_signal else enter)
        llm.add_request(PROMPTS[2], GREEDY)  # so that step() has something to turn for
        assert answers(llm) == expected
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(errors) == len(uses(llm)) + 1 and all(error.startswith(INSIDE) for error in errors)
    outputs = []
    while not llm.is_finished():
        outputs += llm.step()
    assert [output["token_ids"] for output in outputs] == [expected[2]]
    assert is_clean(llm)


def test_a_signal_between_steps_may_use_the_engine(llm, expected):
    got = []
    outputs = llm.generate_iter(PROMPTS, GREEDY)
    results = dict([next(outputs)])
    before = signal.signal(signal.SIGUSR1, lambda *_: got.append(answers(llm)))
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    results.update(outputs)
    assert got == [expected] and [results[index]["token_ids"] for index in range(3)] == expected


def test_weights_from_an_iterator_that_uses_the_engine(folder):
    with LLM(folder, **OPTIONS) as llm:
        with pytest.raises(RuntimeError, match=r"of sleep, wake_up or update_weights"):
            llm.update_weights(answers(llm) for _ in range(1))
        llm.update_weights(folder)
        assert len(answers(llm)) == 3


# ---- iterators that are closed at any time --------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["stream", "generate_iter", "step"])
def test_an_iterator_closed_in_the_middle_of_a_step(llm, expected, monkeypatch, way):
    left = llm.stream(PROMPTS[0], LONG)
    next(left)
    in_step = {}

    def close() -> None:
        left.close()
        in_step.update(llm.engine.calls.requests)

    at_step(llm, monkeypatch, 3, close)
    if way == "stream":
        assert "".join(llm.stream(PROMPTS[1], GREEDY)) == llm.tokenizer.decode(expected[1])
    elif way == "generate_iter":
        assert dict(llm.generate_iter(PROMPTS, GREEDY))[1]["token_ids"] == expected[1]
    else:
        llm.add_request(PROMPTS[1], GREEDY)
        outputs = []
        while not llm.is_finished():
            outputs += llm.step()
        assert outputs[0]["token_ids"] == expected[1]
    assert in_step and is_clean(llm)
    monkeypatch.undo()
    assert answers(llm) == expected and is_clean(llm)


class At(Interrupt):
    """Calls `action` at the n-th line, instead of raising there."""

    def __init__(self, at: int, action, opcodes: bool = False) -> None:
        super().__init__(at, opcodes)
        self.action = action

    def each(self, frame, event, arg):
        if event in ("line", "opcode"):
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                self.action()
        return self.each


def num_lines(llm: LLM, work, opcodes: bool) -> int:
    with Interrupt(opcodes=opcodes) as interrupt:
        work()
    return interrupt.count


@pytest.mark.parametrize("is_in_thread", [False, True])
def test_an_iterator_closed_at_any_point(llm, expected, is_in_thread):
    rng = random.Random(1)
    totals = [num_lines(llm, lambda: answers(llm), opcodes) for opcodes in (False, True)]
    for trial in range(24):
        left = llm.generate_iter([([5], ONE), PROMPTS[0], PROMPTS[1]], LONG)
        other = llm.generate_iter([([6], ONE), *PROMPTS], GREEDY)
        assert next(other)[0] == 0
        assert next(left)[0] == 0
        opcodes = trial % 2 == 1
        with At(rng.randint(1, totals[opcodes]), lambda left=left: run(left.close, is_in_thread), opcodes):
            assert answers(llm) == expected
        results = dict(other)
        assert [results[index]["token_ids"] for index in range(1, 4)] == expected
        left.close()
        assert is_clean(llm)


def run(action, is_in_thread: bool) -> None:
    if is_in_thread:
        assert in_thread(action) is None
    else:
        action()


# ---- interrupts -----------------------------------------------------------------------------------------------------


class InEngine(Interrupt):
    """Looks at the host's side only."""

    def enter(self, frame, event, arg):
        is_host = frame.f_code.co_filename.startswith((f"{PACKAGE}/engine", f"{PACKAGE}/llm.py"))
        return super().enter(frame, event, arg) if is_host else None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["turn", "submit", "abort"])
def test_interrupts_at_every_line_of_a_change(llm, expected, name):
    """The engine belongs to nobody afterwards, other calls go on, and the next one is right."""

    def begin():
        other = llm.generate_iter([([6], ONE), PROMPTS[0]], GREEDY)
        assert next(other)[0] == 0
        left = llm.stream(PROMPTS[1], LONG)
        next(left)
        return other, left

    def change(left) -> None:
        if name == "abort":
            left.close()
        elif name == "submit":
            llm.add_request(PROMPTS[2], GREEDY)
        else:
            next(left)

    at, is_over = 0, False
    while not is_over:
        at += 1
        other, left = begin()
        is_over = True
        errors = []
        with InEngine(at) as interrupt:
            try:
                change(left)
            except KeyboardInterrupt as error:
                is_over = False
                errors.append(error)  # its traceback holds the frames that were inside
        assert interrupt.count >= at or is_over
        for _ in range(100):
            if llm.is_finished():
                break
            llm.step()
        left.close()
        assert in_thread(lambda: answers(llm, [PROMPTS[1]])) == [expected[1]]
        assert {index: output["token_ids"] for index, output in other} == {1: expected[0]}
        errors.clear()
        assert answers(llm, [PROMPTS[1]]) == [expected[1]]
        assert is_clean(llm), at
    assert at > 20


# ---- closing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_thread", [False, True])
def test_closing_in_the_middle_of_a_step(folder, monkeypatch, is_in_thread):
    llm = LLM(folder, **OPTIONS)
    threads = []

    def close() -> None:
        if is_in_thread:
            threads.append(threading.Thread(target=llm.close))
            threads[0].start()
            threads[0].join(0.2)
            assert threads[0].is_alive()  # it waits for the end of the step
        else:
            llm.close()
        assert llm.engine.executor._runner is not None

    at_step(llm, monkeypatch, 3, close)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        answers(llm)
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert llm.engine.executor._runner is None
    llm.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        answers(llm)


def test_an_engine_that_another_thread_has_left_can_be_closed(folder):
    llm = LLM(folder, **OPTIONS)
    assert len(in_thread(lambda: answers(llm))) == 3
    in_thread(llm.close)
    assert llm.engine.executor._runner is None
