"""What a request comes back as.

Owns: the two result types and their dict-like access. Invariant: a RequestOutput always has at least one
CompletionOutput, also when the request was refused, so `out["text"]` never raises. They deliberately hold plain
values only: no tensors, nothing that keeps an engine alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Logprob:
    """A token's natural log probability under the model's own distribution.

    Attributes:
        logprob: the logarithm, before temperature, penalties, bias and filters.
        rank: 1 for the most probable token; of equally probable ones the lower id comes first.
        decoded_token: the text of this token alone; None without a tokenizer or with detokenize=False.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        index: which of the request's samples this is.
        text: one decode of `token_ids`, without the end id that fired, cut at the stop string that fired.
        token_ids: generated ids; an end id that fired is the last of them.
        logprobs: for each of `token_ids` {token id: Logprob} of it and of the most probable tokens; None if not asked.
        cumulative_logprob: sum of the logprobs of `token_ids`; None where `logprobs` is.
        finish_reason: "stop" (an end id or a stop string), "length", "abort" or "error".
        stop_reason: the stop string that fired, or the id where it is one of stop_token_ids, else None.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
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
        prompt_logprobs: as a completion's logprobs, for the prompt; the first is None. None if not asked for.
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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __getitem__(self, key: str) -> Any:
        if key in _COMPLETION_FIELDS:
            return getattr(self.outputs[0], key)
        if isinstance(key, str) and key in self.__dataclass_fields__:
            return getattr(self, key)
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        """Whether `out[key]` answers."""
        return key in _COMPLETION_FIELDS or key in self.__dataclass_fields__
