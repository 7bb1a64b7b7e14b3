"""Random requests, random engines, random trouble: whatever happens around it, a request gives what it gives alone.

Owns: the drawing of everything, the plain reference, and the comparison. Invariant: all that an episode does follows
from its `Setup`, so it is repeated by its number. It deliberately looks at results and at what is left
behind, not at how they came about: the exceptions are named in `Episode.check_idle`.

An episode is one engine (few blocks, few rows, small steps) and several rounds of requests that come by `generate`,
`generate_iter`, `stream` and `add_request`, side by side, with aborts, iterators closed half-way, refused requests and
exceptions raised at random points. The reference runs each sample by itself on an engine with a large pool, one step at
a time, without a prefix cache. What is random in both is seeded, so in float32 the tokens are the same.

    python -m tests.fuzz --requests 10000
    python -m tests.fuzz --seed 0 --episode 17      # one episode again
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from nanovllm import LLM, SamplingParams
from nanovllm.engine.request import sample_seed
from nanovllm.outputs import CompletionOutput, RequestOutput
from tests.fuzz_requests import Case, Expected, Limits, draw_cases, draw_options, resolve
from tests.test_lifecycle import Interrupt
from tests.tiny_models import make_tiny_model

TOLERANCE = 1e-4  # of log probabilities: matrix products of other sizes round differently
TIE = 2e-5  # logits that lie closer may change places for the same reason
REFERENCE = dict(dtype="float32", device="cpu", max_model_len=256, num_kvcache_blocks=32, kvcache_block_size=16)
HASH = "nanovllm.engine.block_manager.hash_block"
LOOK_AHEAD = "nanovllm.engine.admission.BlockDemand.admit"


class Mismatch(AssertionError):
    """A result that is not what the request gives alone, or something left behind."""


class Reference:
    """What a request gives alone: each sample by itself, one step at a time, nothing cached."""

    def __init__(self, folder: Path) -> None:
        self.llm = LLM(
            folder, max_num_seqs=1, max_in_flight=1, enable_prefix_caching=False, enforce_eager=True, **REFERENCE
        )
        self._known: dict[tuple[Any, ...], RequestOutput] = {}

    def output(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        key = (tuple(prompt), repr(params))
        if key not in self._known:
            self._known[key] = self.llm.generate([prompt], params, use_tqdm=False, on_error="return")[0]
        return self._known[key]

    def sample(self, expected: Expected, index: int) -> RequestOutput:
        """Sample `index` of a request, as a request of its own."""
        params = expected.params
        seed = None if params.seed is None else sample_seed(params.seed % 2**64, index)
        alone = dataclasses.replace(
            params, n=1, seed=seed, prompt_logprobs=params.prompt_logprobs if index == 0 else None
        )
        return self.output(expected.token_ids, alone)

    def is_tie(self, expected: Expected, index: int, got: list[int]) -> bool:
        """Whether a logit that is larger by a rounding error makes the reference choose as `got` did."""
        want = self.sample(expected, index)["token_ids"]
        place = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
        if place is None:
            return False
        params = expected.params
        for token_id, bias in ((got[place], TIE), (want[place], -TIE)):
            biases = dict(params.logit_bias or {})
            biases[token_id] = biases.get(token_id, 0.0) + bias
            nudged = dataclasses.replace(expected, params=dataclasses.replace(params, logit_bias=biases))
            if self.sample(nudged, index)["token_ids"][: place + 1] == got[: place + 1]:
                return True
        return False


def compare_logprobs(got: list[Any] | None, want: list[Any] | None, what: str) -> None:
    """Positions of {id: Logprob}; of alternatives that lie closer than the tolerance, others may be named."""
    if (got is None) != (want is None) or (got is not None and want is not None and len(got) != len(want)):
        raise Mismatch(f"{what}: {got} instead of {want}")
    for place, (ours, theirs) in enumerate(zip(got or (), want or (), strict=True)):
        if ours is None or theirs is None:
            if ours is not theirs:
                raise Mismatch(f"{what} {place}: {ours} instead of {theirs}")
            continue
        lowest = min(entry.logprob for entry in theirs.values())
        for token_id in ours.keys() | theirs.keys():
            one, other = ours.get(token_id), theirs.get(token_id)
            values = [entry.logprob if entry is not None else lowest for entry in (one, other)]
            if abs(values[0] - values[1]) > TOLERANCE:
                raise Mismatch(f"{what} {place}, token {token_id}: {one} instead of {other}")
            if one is not None and other is not None and one.decoded_token != other.decoded_token:
                raise Mismatch(f"{what} {place}, token {token_id}: {one} instead of {other}")


@dataclass
class Tally:
    """Counts of a run."""

    counts: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        names = (
            "requests",
            "compared",
            "refused",
            "aborted",
            "lost",
            "interrupts",
            "preemptions",
            "ties",
            "mismatches",
        )
        return ", ".join(f"{self.counts[name]} {name}" for name in names)


class Checker:
    """Holds a result against the reference."""

    def __init__(self, reference: Reference, tally: Tally) -> None:
        self.reference, self.tally = reference, tally

    def check(self, case: Case, output: RequestOutput) -> None:
        """A result of generate, generate_iter or step."""
        expected = case.expected
        if output.error == LOST:
            self.tally.counts["lost"] += 1
            return
        if expected is None:
            if output["finish_reason"] != "error" or output.error is None or output["token_ids"]:
                raise Mismatch(f"{case}: should have been refused, got {output}")
            self.tally.counts["refused"] += 1
            return
        if output.prompt_token_ids != expected.token_ids:
            raise Mismatch(f"{case}: the result is of the prompt {output.prompt_token_ids}")
        if not output.finished or [c.index for c in output.outputs] != list(range(expected.params.n)):
            raise Mismatch(f"{case}: {expected.params.n} samples expected, got {output}")
        if not 0 <= output.num_cached_tokens <= len(expected.token_ids):
            raise Mismatch(f"{case}: {output.num_cached_tokens} cached tokens")
        for completion in output.outputs:
            self.check_sample(case, expected, completion, output)
        self.tally.counts["compared"] += 1

    def check_sample(
        self, case: Case, expected: Expected, got: CompletionOutput, output: RequestOutput | None = None
    ) -> None:
        if not expected.is_repeatable:
            if len(got.token_ids) > (expected.params.max_tokens or 0) or got.finish_reason not in (
                "stop",
                "length",
                "error",
            ):
                raise Mismatch(f"{case}: got {got}")
            return
        alone = self.reference.sample(expected, got.index)
        want = alone.outputs[0]
        if output is not None and got.index == 0:
            compare_logprobs(output.prompt_logprobs, alone.prompt_logprobs, f"{case}: prompt logprobs")
            if want.finish_reason != "error" and output.error is not None and expected.params.n == 1:
                raise Mismatch(f"{case}: {output.error}")
        if got.token_ids != want.token_ids and self.reference.is_tie(expected, got.index, got.token_ids):
            self.tally.counts["ties"] += 1
            return
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            if getattr(got, name) != getattr(want, name):
                raise Mismatch(
                    f"{case}: sample {got.index}: {name} is {getattr(got, name)!r} instead of {getattr(want, name)!r}"
                )
        compare_logprobs(got.logprobs, want.logprobs, f"{case}: sample {got.index}: logprobs")
        if got.logprobs is not None:
            assert got.cumulative_logprob is not None and want.cumulative_logprob is not None
            if abs(got.cumulative_logprob - want.cumulative_logprob) > TOLERANCE * len(got.token_ids):
                raise Mismatch(f"{case}: cumulative logprob {got.cumulative_logprob}, not {want.cumulative_logprob}")


class Planted(OSError):
    """An error that is none of the engine's own."""


LOST = "it was lost to Planted('planted')"  # in a step that another call ran, and that held nothing else


class Trouble:
    """Raises once inside the engine, at a random point of whatever runs meanwhile."""

    def __init__(self, llm: LLM, rng: random.Random, tally: Tally) -> None:
        engine = llm.engine
        self.tally = tally
        self.kind: type[BaseException] = rng.choice((KeyboardInterrupt, KeyboardInterrupt, Planted))
        self.left = rng.choice((0, 0, 1, 2, 4, 8))
        self.is_late = rng.random() < 0.5  # what was called has run, and its result is lost
        line = int(rng.choice((100, 1000, 4000)) * rng.random()) + 1 if rng.random() < 0.3 else 0
        self.line = Interrupt(line, rng.random() < 0.5) if line else None
        places: list[tuple[Any, str]] = [
            (engine.executor, "submit"),
            (engine.scheduler, "schedule"),
            (engine.scheduler, "update"),
            (engine.scheduler, "finish"),
            (engine.output_processor, "process"),
            (engine.output_processor, "output"),
            (engine.executor, "wait"),
        ]
        self.owner, self.name = rng.choice(places)

    def __enter__(self) -> Trouble:
        if self.line is not None:
            self.kind = KeyboardInterrupt
            self.line.__enter__()
        elif self.name == "wait":
            submit = self.owner.submit
            self.owner.submit = lambda plan: _Pending(submit(plan), self)
        else:
            setattr(self.owner, self.name, self.wrapped(getattr(self.owner, self.name)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        self.left = -1  # a step may be in flight that would raise when it is waited for
        if self.line is not None:
            self.line.__exit__()
        else:
            delattr(self.owner, "submit" if self.name == "wait" else self.name)
        if kind is self.kind and "planted" in str(error):
            self.tally.counts["interrupts"] += 1
            return True
        return False

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.left -= 1
            if self.left != -1:
                return function(*args)
            if self.is_late:
                function(*args)
            raise self.kind("planted")

        return call


class _Pending:
    """The output of a step in flight whose `wait` may raise."""

    def __init__(self, pending: Any, trouble: Trouble) -> None:
        self.wait = trouble.wrapped(pending.wait)


class Caller:
    """Somebody who waits for results; `advance` fetches some, and returns False at the end."""

    def advance(self) -> bool:
        raise NotImplementedError

    def leave(self) -> None:
        raise NotImplementedError

    def may_lose(self, request_ids: set[str]) -> None:
        """These were aborted."""


class IteratorCaller(Caller):
    """generate_iter: every position once."""

    def __init__(self, episode: Episode, cases: list[Case]) -> None:
        self.episode, self.cases = episode, cases
        self.missing = set(range(len(cases)))
        self.num_lost = 0
        self.iterator: Any = episode.llm.generate_iter(
            ((case.prompt, case.params) for case in cases), on_error="return"
        )

    def advance(self) -> bool:
        item = next(self.iterator, None)
        if item is None:
            if len(self.missing) > self.num_lost:
                raise Mismatch(f"no result for {[self.cases[i] for i in sorted(self.missing)]}")
            return False
        index, output = item
        if index not in self.missing:
            raise Mismatch(f"result {index} came twice")
        self.missing.remove(index)
        self.episode.checker.check(self.cases[index], output)
        return True

    def leave(self) -> None:
        self.iterator.close()


class StreamCaller(Caller):
    """stream: the pieces are the text."""

    def __init__(self, episode: Episode, case: Case) -> None:
        self.episode, self.case = episode, case
        self.pieces: list[str] = []
        self.iterator: Any = episode.llm.stream(case.prompt, case.params)
        self.request = episode.last_request
        self.is_aborted = False

    def advance(self) -> bool:
        try:
            piece = next(self.iterator, None)
        except RuntimeError as error:
            if str(error) == LOST or (self.is_aborted and "was aborted" in str(error)):
                return False
            if "not finite" in str(error) or "leave no token" in str(error):  # as it should be, if it is so alone
                return self.finish("error")
            raise
        if piece is None:
            return self.finish(self.request.seqs[0].finish_reason)
        if not piece:
            raise Mismatch(f"{self.case}: an empty piece of text")
        self.pieces.append(piece)
        return True

    def finish(self, finish_reason: str) -> bool:
        expected, seq = self.case.expected, self.request.seqs[0]
        assert expected is not None
        token_ids = seq.token_ids[seq.num_prompt_tokens :]
        if finish_reason == "error":
            token_ids = token_ids[:-1]
        text = "".join(self.pieces)
        got = CompletionOutput(0, text, token_ids, None, None, finish_reason, seq.stop_reason)
        if finish_reason == "error":  # text that was held back when it broke
            got.text = self.episode.checker.reference.sample(expected, 0)["text"]
            if not got.text.startswith(text):
                raise Mismatch(f"{self.case}: streamed {text!r} of {got.text!r}")
        plain = dataclasses.replace(expected.params, logprobs=None, prompt_logprobs=None)
        self.episode.checker.check_sample(self.case, dataclasses.replace(expected, params=plain), got)
        self.episode.tally.counts["compared"] += 1
        return False

    def leave(self) -> None:
        self.iterator.close()

    def may_lose(self, request_ids: set[str]) -> None:
        self.is_aborted |= self.request.request_id in request_ids


class LoopCaller(Caller):
    """add_request and step."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.cases: dict[str, Case] = {}
        self.lost: dict[str, Case] = {}  # aborted, or of a step that was broken off: these may come or not

    def add(self, case: Case, request_id: str | None) -> None:
        llm = self.episode.llm
        if case.expected is None:
            self.episode.must_refuse(lambda: llm.add_request(case.prompt, case.params))
        else:
            self.cases[llm.add_request(case.prompt, case.params, request_id)] = case

    def advance(self) -> bool:
        llm = self.episode.llm
        for output in llm.step():
            case = self.cases.pop(output.request_id, None) or self.lost.pop(output.request_id, None)
            if case is None:
                raise Mismatch(f"request {output.request_id} came twice, or after it had been aborted")
            self.episode.checker.check(case, output)
        if self.cases and llm.is_finished():
            raise Mismatch(f"is_finished() says so, and no result for {self.cases}")
        return not llm.is_finished()

    def leave(self) -> None:
        for request_id in list(self.cases):
            self.episode.llm.abort(request_id)
            del self.cases[request_id]

    def broken_off(self) -> None:
        self.lost |= self.cases
        self.cases = {}

    def may_lose(self, request_ids: set[str]) -> None:
        for request_id in request_ids & self.cases.keys():
            del self.cases[request_id]


@dataclass(frozen=True)
class Setup:
    """What an episode is made of; all else follows from `seed`.

    Attributes:
        seed: of requests and of what happens to them.
        options: of the engine.
        num_rounds, max_requests: of the episode; of each round.
        is_reckless: the scheduler admits what fits now, whatever it will need later, and has to preempt.
        has_trouble: exceptions are raised inside the engine.
        has_weak_hashes: blocks have one of three hashes; as hits are verified by contents, only hits are lost.
    """

    seed: str
    options: dict[str, Any]
    num_rounds: int = 3
    max_requests: int = 30
    is_reckless: bool = False
    has_trouble: bool = True
    has_weak_hashes: bool = False

    @classmethod
    def draw(cls, seed: str) -> Setup:
        rng = random.Random(f"setup {seed}")
        return cls(
            seed,
            draw_options(rng),
            max_requests=rng.choice((1, 4, 10, 20, 30)),
            is_reckless=rng.random() < 0.6,
            has_weak_hashes=rng.random() < 0.3,
        )


class Episode:
    """One engine and what happens to it.

    Args:
        folder: of the model.
        checker: with the reference.
        setup: decides on everything.
    """

    def __init__(self, folder: Path, checker: Checker, setup: Setup) -> None:
        self.checker, self.tally, self.setup = checker, checker.tally, setup
        self.rng = random.Random(setup.seed)
        self.llm = LLM(folder, dtype="float32", device="cpu", enforce_eager=True, **setup.options)
        self.limits = Limits.of(self.llm)
        self.callers: list[Caller] = []
        self.loop = LoopCaller(self)
        self.last_request: Any = None
        check_one = self.llm.inputs.check_one

        def noted(*args: Any) -> Any:
            self.last_request = check_one(*args)
            return self.last_request

        self.llm.inputs.check_one = noted  # type: ignore

    def run(self) -> None:
        """Raises Mismatch."""
        with ExitStack() as patches:
            if self.setup.has_weak_hashes:
                patches.enter_context(mock.patch(HASH, lambda parent, content: (parent + content[0]) % 3))
            if self.setup.is_reckless:
                patches.enter_context(mock.patch(LOOK_AHEAD, lambda *_: True))
            for _ in range(self.setup.num_rounds):
                self.round()
                self.check_idle()
        self.tally.counts["preemptions"] += int(self.llm.stats()["preemptions"])
        self.llm.close()

    def round(self) -> None:
        rng = self.rng
        cases = draw_cases(rng, self.limits, self.setup.max_requests)
        for case in cases:
            case.expected = resolve(case, self.limits, self.llm.tokenizer)
        self.tally.counts["requests"] += len(cases)
        self.callers = [self.loop]
        while cases or len(self.callers) > 1 or not self.llm.is_finished():
            if cases and rng.random() < 0.4:
                taken = [cases.pop() for _ in range(min(len(cases), rng.choice((1, 1, 2, 4, 8, 16))))]
                self.begin(taken)
            elif rng.random() < 0.03:
                self.abort()
            elif rng.random() < 0.02:
                self.llm.reset_prefix_cache()
            else:
                self.advance(rng.choice(self.callers))
            self.check_bounds()
        self.loop.advance()

    def begin(self, cases: list[Case]) -> None:
        """New requests, by one way or another."""
        way = self.rng.choice(("generate", "generate", "iterator", "iterator", "stream", "loop", "loop", "raise"))
        if way == "generate":
            self.troubled(lambda: self.generate(cases))
        elif way == "raise":
            self.generate_or_raise(cases)
        elif way == "iterator":
            self.callers.append(IteratorCaller(self, cases))
        elif way == "loop":
            for case in cases:
                own_id = f"own {self.rng.random()}" if self.rng.random() < 0.3 else None
                self.loop.add(case, own_id)
        else:
            for case in cases:
                self.begin_stream(case)

    def begin_stream(self, case: Case) -> None:
        if case.expected is None or case.params.n > 1 or not case.params.detokenize:
            self.must_refuse(lambda: self.llm.stream(case.prompt, case.params))
        else:
            self.callers.append(StreamCaller(self, case))

    def generate(self, cases: list[Case]) -> None:
        outputs = self.llm.generate(
            [case.prompt for case in cases], [case.params for case in cases], use_tqdm=False, on_error="return"
        )
        if len(outputs) != len(cases):
            raise Mismatch(f"{len(outputs)} results for {len(cases)} prompts")
        for case, output in zip(cases, outputs, strict=True):
            self.checker.check(case, output)

    def generate_or_raise(self, cases: list[Case]) -> None:
        """One that is refused keeps all from running."""
        bad = next((index for index, case in enumerate(cases) if case.expected is None), None)
        if bad is None:
            self.generate(cases)
            return
        steps, known = self.llm.stats()["steps"], set(self.llm.engine.calls.requests)
        prompts, params = [case.prompt for case in cases], [case.params for case in cases]
        message = self.must_refuse(lambda: self.llm.generate(prompts, params, use_tqdm=False))
        if f"request {bad}: " not in message:
            raise Mismatch(f"request {bad} is refused, and the error says {message!r}")
        if self.llm.stats()["steps"] != steps or set(self.llm.engine.calls.requests) != known:
            raise Mismatch("a call that was refused ran or left something behind")

    def must_refuse(self, call: Callable[[], object]) -> str:
        try:
            call()
        except ValueError as error:
            self.tally.counts["refused"] += 1
            return str(error)
        raise Mismatch("a request that cannot run was taken")

    def advance(self, caller: Caller) -> None:
        """Fetch from one caller, or leave it; it may be broken off."""
        if caller is not self.loop and self.rng.random() < 0.02:
            caller.leave()
            self.callers.remove(caller)
            return
        goes_on = self.troubled(caller.advance)
        if caller is self.loop:
            if goes_on is None:
                self.loop.broken_off()
        elif not goes_on:
            self.callers.remove(caller)

    def troubled(self, call: Callable[[], Any]) -> Any:
        """The result of a call; None if it was broken off."""
        if self.rng.random() > 0.2 or not self.setup.has_trouble:
            return call()
        result = None
        with Trouble(self.llm, self.rng, self.tally):
            result = call()
        return result

    def abort(self) -> None:
        """Any request of any caller, by its id, and one that does not exist."""
        known = list(self.llm.engine.calls.requests.values())
        self.llm.abort("nobody's")
        if not known:
            return
        request = self.rng.choice(known)
        self.tally.counts["aborted"] += 1
        for caller in self.callers:
            caller.may_lose({request.request_id})
            if isinstance(caller, IteratorCaller) and request.request_id in _pending_ids(caller.iterator):
                caller.num_lost += 1
        self.llm.abort(request.request_id)

    def check_bounds(self) -> None:
        scheduler = self.llm.engine.scheduler
        if not 0 <= scheduler.num_seqs_in_flight <= self.llm.config.max_num_seqs:
            raise Mismatch(f"{scheduler.num_seqs_in_flight} sequences in flight")

    def check_idle(self) -> None:
        """Nothing is left behind, and the engine goes on. This one knows what the scheduler and block manager hold."""
        engine, stats = self.llm.engine, self.llm.stats()
        self.generate([Case([5, 6, 7], PLAIN, Expected([5, 6, 7], PLAIN))])
        scheduler = engine.scheduler
        blocks = scheduler.blocks
        left = {
            "requests": len(engine.calls.requests),
            "calls": len(engine.calls._calls),
            "aborts to come": len(engine._dropped),
            "held back": len(engine._suspects._held),
            "inside": len(engine.gate._entries),
            "steps in flight": len(engine._in_flight) + len(scheduler._in_flight),
            "rows": scheduler.num_seqs_in_flight,
            "running": len(scheduler._running),
            "waiting": scheduler._num_waiting,
            "blocks": blocks.num_usable - blocks.num_free,
            "references": sum(blocks.ref_counts),
            "shared blocks": blocks.num_shared,
            "blocks to come": blocks.num_to_come,
            "is_finished": int(not self.llm.is_finished()),
        }
        if any(left.values()):
            raise Mismatch(f"left behind: { {name: value for name, value in left.items() if value} }")
        if stats["max_seqs_in_flight"] > self.llm.config.max_num_seqs:
            raise Mismatch(f"{stats['max_seqs_in_flight']} sequences were in flight")


PLAIN = SamplingParams(temperature=0, max_tokens=2)


def _pending_ids(iterator: Iterator[Any]) -> set[str]:
    """Ids of the requests that a suspended generate_iter waits for."""
    frame = getattr(iterator, "gi_frame", None)
    call = frame.f_locals.get("call") if frame is not None else None
    return set(call.pending) if call is not None else set()


def run_episode(folder: Path, reference: Reference, tally: Tally, setup: Setup) -> None:
    """Raises Mismatch, or whatever else the engine should not have raised."""
    try:
        Episode(folder, Checker(reference, tally), setup).run()
    except BaseException as error:
        error.args = (f"{error}\nin {setup}",)
        raise


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=1000, help="stop after so many (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episode", type=int, help="run this one alone, and show where it fails")
    args = parser.parse_args(argv)
    tally, start = Tally(), time.monotonic()
    number = args.episode or 0
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(folder, "qwen3", tokenizer=True)
        reference = Reference(model)
        gc.freeze()  # each engine that closes collects garbage, and need not look through all libraries
        while tally.counts["requests"] < args.requests:
            try:
                run_episode(model, reference, tally, Setup.draw(f"{args.seed} {number}"))
            except (Exception, KeyboardInterrupt) as error:
                if isinstance(error, KeyboardInterrupt) and "planted" not in str(error):
                    raise
                tally.counts["mismatches"] += 1
                print(f"episode {number} of seed {args.seed}: {type(error).__name__}: {error}", flush=True)
                if args.episode is not None:
                    traceback.print_exc()
            if args.episode is not None:
                break
            number += 1
            if number % 20 == 0:
                print(f"{number} engines, {time.monotonic() - start:.0f} s: {tally.line()}", flush=True)
    gc.unfreeze()
    print(f"seed {args.seed}, {number} engines, {time.monotonic() - start:.0f} s: {tally.line()}")
    return 1 if tally.counts["mismatches"] else 0


if __name__ == "__main__":
    sys.exit(main())
