"""What a request comes back as.

Owns: the two result types and their dict-like access. Invariant: a RequestOutput always has at least one
CompletionOutput, also when the request was refused, so `out["text"]` never raises. They deliberately hold plain
values only: no tensors, nothing that keeps an engine alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        index: which of the request's samples this is.
        text: one decode of `token_ids`, without the end id that fired.
        token_ids: generated ids; an end id that fired is the last of them.
        finish_reason: "stop" (an end id), "length", "abort" or "error".
        stop_reason: the id that fired where it is one of stop_token_ids, else None.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.monotonic()`; None where it did not come to that."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None


_COMPLETION_FIELDS = frozenset(CompletionOutput.__dataclass_fields__)


@dataclass(slots=True)
class RequestOutput:
    """The result of one request; `out["text"]`, `out["token_ids"]`... answer for its first completion.

    Attributes:
        request_id: as given to or returned by add_request.
        prompt: the text, or None where token ids were given.
        prompt_token_ids: what the model saw.
        outputs: one CompletionOutput a sample.
        finished: True; results are given out when they are complete.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        error: why the request was refused or failed, else None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __getitem__(self, key: str) -> Any:
        if key in _COMPLETION_FIELDS:
            return getattr(self.outputs[0], key)
        if isinstance(key, str) and key in self.__dataclass_fields__:
            return getattr(self, key)
        raise KeyError(key)
