"""Errors in a step that several calls share: who sees them, and that everybody else gets right answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from tests.test_lifecycle import OPTIONS, all_blocks_free
from tests.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=20)
ONE = dataclasses.replace(GREEDY, max_tokens=1)
BAD = 77  # a step that holds a prompt with this token fails
GOOD = [[5, 6, 7, 8], [9, 8, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)


@pytest.fixture(scope="module", params=[1, 2], ids=["depth1", "depth2"])
def llm(request, folder):
    with LLM(folder, max_in_flight=request.param, max_num_batched_tokens=32, **OPTIONS) as llm:
        yield llm


class Fault:
    """Makes steps fail that hold a bad sequence: at once, or when their result is waited for."""

    def __init__(self, llm: LLM, monkeypatch, is_late: bool = False, min_tokens: int = 0, min_company: int = 1) -> None:
        self.scheduler, self.submit = llm.engine.scheduler, llm.engine.executor.submit
        self.is_late, self.min_tokens, self.min_company = is_late, min_tokens, min_company
        self.count = 0
        monkeypatch.setattr(llm.engine.executor, "submit", self)

    def __call__(self, plan):
        seqs = self.scheduler._in_flight[-1].seqs
        bad = [seq for seq in seqs if BAD in seq.token_ids[: seq.num_prompt_tokens]]
        if len(seqs) >= self.min_company and any(seq.num_output_tokens >= self.min_tokens for seq in bad):
            if not self.is_late:
                self.fail()
            return self
        return self.submit(plan)

    def fail(self) -> None:
        self.count += 1
        raise MemoryError(f"planted {self.count}")

    wait = fail


def answers(llm: LLM, prompts=GOOD, params=GREEDY) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def check_clean(llm: LLM) -> None:
    assert all_blocks_free(llm) and not llm.engine.calls.requests and not llm.engine._suspects._held


@pytest.mark.parametrize(("is_late", "min_tokens"), [(False, 0), (True, 0), (False, 3), (True, 3)])
def test_a_bad_request_costs_another_call_one_error_at_most(llm, monkeypatch, is_late, min_tokens):
    expected, alone = answers(llm), answers(llm, [[4, 4]], LONG)
    bad = llm.generate_iter([([6], ONE), [BAD, 5]], LONG, on_error="return")
    innocent = llm.generate_iter([([6], ONE), [4, 4]], LONG)
    assert next(bad)[0] == 0 and next(innocent)[0] == 0  # and the others have begun
    fault = Fault(llm, monkeypatch, is_late, min_tokens)
    num_errors = 0
    for _ in range(4):
        try:
            assert answers(llm) == expected
        except MemoryError as error:
            assert "planted" in str(error)
            num_errors += 1
    assert num_errors <= 1 and fault.count == num_errors + 1
    assert [output["token_ids"] for _, output in innocent] == alone
    [(index, output)] = bad
    assert (index, output["finish_reason"]) == (1, "error") and output.metrics.arrival_time > 0
    assert output.error == f"it was lost to MemoryError('planted {fault.count}')"
    check_clean(llm)
    assert answers(llm) == expected


@pytest.mark.parametrize("way", ["generate_iter", "stream", "step"])
def test_whose_request_is_bad_gets_the_error(llm, monkeypatch, way):
    """By whatever way it was asked, and though it is another call that runs the engine."""
    expected = answers(llm)
    if way == "generate_iter":
        iterator = llm.generate_iter([([6], ONE), [BAD, 5], [8]], LONG)
        assert next(iterator)[0] == 0
    elif way == "stream":
        iterator = llm.stream([BAD, 5], LONG)
        next(iterator)
    else:
        bad, good = (llm.add_request(prompt, LONG) for prompt in ([BAD, 5], [8]))
        llm.step()
    Fault(llm, monkeypatch, min_tokens=2)
    with pytest.raises(MemoryError, match="planted 1"):
        answers(llm)
    assert answers(llm) == expected
    if way == "step":
        outputs = {}
        while not llm.is_finished():
            outputs.update((output.request_id, output) for output in llm.step())
        assert outputs[bad].error == "it was lost to MemoryError('planted 2')"
        assert outputs[good]["token_ids"] == answers(llm, [[8]], LONG)[0]
    else:
        with pytest.raises(RuntimeError, match=r"it was lost to MemoryError\('planted 2'\)"):
            list(iterator)
    check_clean(llm)


def test_ones_own_error_is_raised_as_it_is(llm, monkeypatch):
    alone = answers(llm, [[4, 4]], LONG)
    other = llm.generate_iter([([6], ONE), [4, 4]], LONG)
    assert next(other)[0] == 0
    Fault(llm, monkeypatch)
    for _ in range(4):  # the other one is not lost: alone, it runs
        with pytest.raises(MemoryError, match="planted"):
            answers(llm, [[BAD], [5]])
        if llm.engine.calls.requests:
            llm.generate([3], ONE, use_tqdm=False)
    assert [output["token_ids"] for _, output in other] == alone
    check_clean(llm)


def test_an_error_that_comes_in_company_alone(llm, monkeypatch):
    """Nobody can be found guilty by running alone: after five failed steps, who was in all of them is lost."""
    bad = llm.generate_iter([([6], ONE), [BAD, 5]], LONG, on_error="return")
    assert next(bad)[0] == 0
    Fault(llm, monkeypatch, min_company=2)
    results = []
    for _ in range(7):
        try:
            results.append(len(answers(llm)))
        except MemoryError as error:
            results.append(str(error))
    assert results == [*(f"planted {number}" for number in range(1, 6)), 2, 2]
    [(index, output)] = bad
    assert (index, output.error) == (1, "it was lost to MemoryError('planted 5')")
    check_clean(llm)


def test_a_bad_request_that_is_aborted_while_it_is_tried(llm, monkeypatch):
    expected = answers(llm)
    request_id = llm.add_request([BAD, 5], LONG)
    other = llm.add_request([5], LONG)
    llm.step()
    fault = Fault(llm, monkeypatch)
    with pytest.raises(MemoryError):
        answers(llm)
    monkeypatch.undo()
    assert llm.engine._suspects._on_trial is not None
    llm.abort(request_id)
    assert answers(llm) == expected
    while not (outputs := llm.step()):
        pass
    assert [output.request_id for output in outputs] == [other] and fault.count == 1
    check_clean(llm)


def test_samples_of_a_suspect(llm, monkeypatch):
    """A trial lasts until each sample has got past the step that failed."""
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    expected = [completion.token_ids for completion in llm.generate([4, 4], params, use_tqdm=False)[0].outputs]
    other = llm.generate_iter([([6], ONE), ([4, 4], params)], GREEDY)
    assert next(other)[0] == 0
    Fault(llm, monkeypatch)
    with pytest.raises(MemoryError):
        answers(llm, [[BAD]])
    monkeypatch.undo()
    assert answers(llm, [[5]]) == answers(llm, [[5]])
    [(_, output)] = other
    assert [completion.token_ids for completion in output.outputs] == expected
    check_clean(llm)


def test_a_suspect_runs_alone_while_one_that_is_cleared_has_not_ended(llm, monkeypatch):
    """Two suspects, the first of which is innocent and long: the second one's trial does not take it along."""
    expected, alone = answers(llm), answers(llm, [[4, 4]], LONG)[0]
    llm.add_request([4, 4], LONG, "innocent")
    llm.add_request([BAD, 5], LONG, "bad")
    fault = Fault(llm, monkeypatch)
    with pytest.raises(MemoryError):  # its own requests were in the step, too
        answers(llm)
    assert answers(llm) == expected
    found = {}
    while not llm.is_finished():
        found |= {output.request_id: output for output in llm.step()}
    assert found["innocent"]["token_ids"] == alone
    assert "planted" in found["bad"].error and fault.count >= 2
    monkeypatch.undo()
    check_clean(llm)


def test_a_stream_that_begins_while_a_suspect_runs_alone_waits(llm, monkeypatch):
    expected = "".join(llm.stream([5, 6, 7, 8], GREEDY))
    llm.add_request([4, 4], LONG)
    llm.add_request([BAD, 5], LONG)
    Fault(llm, monkeypatch)
    with pytest.raises(MemoryError):
        answers(llm)
    assert llm.engine._suspects._on_trial is not None
    assert "".join(llm.stream([5, 6, 7, 8], GREEDY)) == expected
    while not llm.is_finished():
        llm.step()
    monkeypatch.undo()
    check_clean(llm)
