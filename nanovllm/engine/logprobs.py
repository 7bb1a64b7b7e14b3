"""Log probabilities, from what the steps bring to what results hold.

Owns: who gets which of them, and their final form. Invariant: a live sequence has one entry for each generated token
that the host knows, whatever preemptions or broken steps came in between. It deliberately makes no `Logprob` before a
request is complete: a long list of small objects costs more to make than to compute.
"""

from __future__ import annotations

from collections.abc import Callable

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.messages import ModelRunnerOutput, TokenLogprobs
from nanovllm.outputs import CompletionOutput, Logprob


def collect_logprobs(step: Step, output: ModelRunnerOutput) -> None:
    """Give a step's logprobs to the sequences that asked for them and still live.

    It comes before these take the step's tokens: if that is interrupted, no token is left without its logprob.
    """
    for index, logprobs in output.logprobs.items():
        seq = step.seqs[index]
        if seq.logprobs is not None and seq.finish_reason is None:
            seq.logprobs.append(logprobs)
    for chunk in output.prompt_logprobs:
        seq = step.seqs[chunk.place]
        if seq.prompt_logprobs is not None and seq.finish_reason is None:
            num_known = len(seq.prompt_logprobs) + 1 - chunk.first
            assert num_known >= 0, "chunks of a prompt come in order"
            seq.prompt_logprobs.extend(chunk.positions[num_known:])


class LogprobsBuilder:
    """Makes the form that users see; the texts of single tokens are kept."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._texts: dict[int, str] = {}

    def add_to(self, completion: CompletionOutput, seq: Sequence, with_text: bool) -> None:
        """Fill in the logprobs of a completion whose token_ids stand; nothing if `seq` did not ask for any."""
        if seq.logprobs is not None:
            entries = seq.logprobs[: len(completion.token_ids)]
            completion.logprobs = self._positions(completion.token_ids, entries, with_text)
            completion.cumulative_logprob = sum(entry.logprob for entry in entries)

    def of_prompt(self, seq: Sequence, with_text: bool) -> list[dict[int, Logprob] | None] | None:
        """One entry for each token of the prompt, of which the first is None; None if `seq` did not ask for any."""
        if seq.prompt_logprobs is None:
            return None
        return [None, *self._positions(seq.token_ids[1 : seq.num_prompt_tokens], seq.prompt_logprobs, with_text)]

    def _positions(
        self, token_ids: list[int], entries: list[TokenLogprobs], with_text: bool
    ) -> list[dict[int, Logprob]]:
        text = self._text if with_text and self._detokenizer.tokenizer is not None else _no_text
        return [_position(token_id, entry, text) for token_id, entry in zip(token_ids, entries, strict=True)]

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._detokenizer.decode([token_id], skip_special_tokens=False)
        return text


def _no_text(token_id: int) -> None:
    return None


def _position(token_id: int, entry: TokenLogprobs, text: Callable[[int], str | None]) -> dict[int, Logprob]:
    """{token id: Logprob}: the token that stands there, then the most probable ones by rank."""
    position = {token_id: Logprob(entry.logprob, entry.rank, text(token_id))}
    for rank, (top_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
        if top_id != token_id:
            position[top_id] = Logprob(logprob, rank, text(top_id))
    return position
