"""Where a text ends, and how much of it can be shown before it has.

Owns: the search for stop strings and the text of a sequence that somebody follows. Invariant: the work for a token is
bounded: only its new text and the few characters before it that a stop string may reach back to are searched. It
deliberately keeps no text for a sequence that is not streamed: the result is one decode, cut at the place found here.
"""

from __future__ import annotations

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


class StopStrings:
    """The stop strings of a request.

    Args:
        params: of the request.
        detokenizer: knows which of them are special tokens. Such a token stops by its id, as `skip_special_tokens`
            leaves it out of the text.
    """

    def __init__(self, params: SamplingParams, detokenizer: Detokenizer) -> None:
        self.strings: tuple[str, ...] = tuple(params.stop or ())
        self.reach = max(map(len, self.strings), default=1) - 1  # characters before new text that a match may begin in
        ids = {detokenizer.special_id(string): string for string in self.strings}
        self.special = {token_id: string for token_id, string in ids.items() if token_id is not None}

    def find(self, text: str, num_seen: int) -> tuple[int, str] | None:
        """(start, string) of the earliest match that ends behind the first `num_seen` characters; of two that begin
        together, the shorter, which was complete first."""
        best: tuple[int, int, str] | None = None
        for string in self.strings:
            start = text.find(string, max(0, num_seen - len(string) + 1))
            if start >= 0 and (best is None or (start, len(string)) < best[:2]):
                best = start, len(string), string
        return (best[0], best[2]) if best is not None else None

    def num_held(self, text: str) -> int:
        """Characters at the end of `text` with which a stop string may have begun."""
        for length in range(min(self.reach, len(text)), 0, -1):
            end = text[-length:]
            if any(len(string) > length and string.startswith(end) for string in self.strings):
                return length
        return 0


class TextProgress:
    """The text of one sequence while it grows.

    Args:
        params: of its request.
        detokenizer: of the engine.
        is_streamed: keep the text, for `shown`.

    Attributes:
        stop_start: where in the text the stop string begins that ended it, in characters; None: none did, or it is
            the last token's own.
    """

    __slots__ = (
        "stop_start",
        "_stops",
        "_min_tokens",
        "_is_streamed",
        "_decoder",
        "_num_tokens",
        "_num_characters",
        "_tail",
        "_unsure",
        "_text",
    )

    def __init__(self, params: SamplingParams, detokenizer: Detokenizer, is_streamed: bool) -> None:
        self.stop_start: int | None = None
        self._stops = StopStrings(params, detokenizer)
        self._min_tokens = params.min_tokens
        self._is_streamed = is_streamed
        self._decoder = detokenizer.incremental(params.skip_special_tokens)
        self._num_tokens = 0  # taken in
        self._num_characters = 0  # that are certain
        self._tail = ""  # the last of these, as far as a stop string may reach back
        self._unsure = ""  # behind them, after the last token
        self._text = ""  # all that are certain, if streamed

    def special_stop(self, token_id: int) -> str | None:
        """The stop string that is this special token."""
        return self._stops.special.get(token_id)

    def advance(self, seq: Sequence) -> str | None:
        """Take in the tokens of `seq` that are new; returns the stop string that one of them completed."""
        for token_id in seq.token_ids[seq.num_prompt_tokens + self._num_tokens :]:
            stop = self._push(token_id)
            if stop is not None:
                return stop
        return None

    def _push(self, token_id: int) -> str | None:
        self._num_tokens += 1
        stops, tail, decoder = self._stops, self._tail, self._decoder
        certain = decoder.push(token_id)
        unsure, unsure_before = decoder.unsure, self._unsure
        if certain:
            self._num_characters += len(certain)
            self._tail = (tail + certain)[-stops.reach :] if stops.reach else ""
            if self._is_streamed:
                self._text += certain
        self._unsure = unsure
        if self._num_tokens <= self._min_tokens:
            return None
        if token_id in stops.special:
            return stops.special[token_id]
        text = tail + certain + unsure
        for string in stops.strings:
            if string in text:  # perhaps one that was seen before, and did not count
                num_seen = len(tail) + (len(unsure_before) if text.startswith(unsure_before, len(tail)) else 0)
                found = stops.find(text, num_seen)
                if found is None:
                    return None
                self.stop_start = self._num_characters + len(unsure) - len(text) + found[0]
                return found[1]
        return None

    def shown(self, start: int) -> str:
        """The text from character `start` on that nothing can take back."""
        num_held = self._stops.num_held(self._text[-self._stops.reach :]) if self._stops.reach else 0
        return self._text[start : len(self._text) - num_held]
