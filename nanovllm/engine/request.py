"""From what a caller passes to what the scheduler runs.

Owns: the reading and checking of prompts and parameters. Invariant: a Request that exists can run to its end on this
engine. It
deliberately queues nothing: all requests of a call are checked before any of them runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Protocol

from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.model_config import ModelConfig
from nanovllm.outputs import RequestMetrics
from nanovllm.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]


class Tokenizer(Protocol):
    """What the engine needs of a transformers tokenizer."""

    def __call__(self, text: list[str], **kwargs: Any) -> Mapping[str, list[list[int]]]: ...
    def __len__(self) -> int: ...
    def decode(self, token_ids: list[int], **kwargs: Any) -> str: ...


@dataclass(slots=True, eq=False)
class Request:
    """One request, checked; `seqs` are its samples, by index, once it is queued."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    end_ids: tuple[int, ...]
    max_total_tokens: int
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.monotonic()))
    seed: int = 0
    ordinal: int = -1  # its place in the engine's life; -1: not submitted yet
    seqs: list[EngineSequence] = field(default_factory=list)
    position: int = 0  # in its call
    error: str | None = None
    num_failures: int = 0  # of steps that it was in together with others
    is_suspect: bool = False  # since one of them, and until it has run alone
    is_streamed: bool = False
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def expected_tokens(self) -> int:
        """Prompt and output, as far as is known before it runs: all samples reach max_tokens."""
        num_prompt_tokens = len(self.prompt_token_ids)
        return num_prompt_tokens + self.params.n * (self.max_total_tokens - num_prompt_tokens)

    @property
    def is_finished(self) -> bool:
        """All its samples have ended."""
        return bool(self.seqs) and all(seq.finish_reason is not None for seq in self.seqs)

    def rules_out_all(self, output: list[int], vocab_size: int) -> bool:
        """Whether its rules leave no token to follow `output`."""
        params = self.params
        banned = {token_id for token_id, bias in (params.logit_bias or {}).items() if bias == float("-inf")}
        banned |= {last for *first, last in self.bad_word_ids if output[len(output) - len(first) :] == first}
        if len(output) < params.min_tokens:
            banned |= set(self.end_ids)
        allowed = set(range(vocab_size)) if params.allowed_token_ids is None else set(params.allowed_token_ids)
        return allowed <= banned


def _mix(a: int, b: int) -> int:
    """A 64-bit hash of two integers (the finalizer of splitmix64, Steele et al. 2014)."""
    z = (a * 0x9E3779B97F4A7C15 + b + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def request_seed(params: SamplingParams, engine_seed: int, ordinal: int) -> int:
    """The 64-bit seed of a request: its own, or one drawn from the engine's seed and its place in the engine's life."""
    return params.seed % 2**64 if params.seed is not None else _mix(engine_seed % 2**64, ordinal)


def sample_seed(seed: int, index: int) -> int:
    """The 64-bit seed of a request's sample: the first one's is the request's own."""
    return seed if index == 0 else _mix(seed, index)


def queue_order(requests: Sequence[Request], max_num_seqs: int) -> list[Request]:
    """The requests of a call in the order in which they wait: as they came, but the last ones, as many as run at once,
    longest output first.

    What starts last is then short, and the batch stays full nearly to the end; otherwise a long one runs on with little
    beside it (longest processing time first: Graham 1969). Only the last ones: in a whole batch of this order
    the long ones would be together, and the pool has room for fewer of them.
    """
    num_kept = max(0, len(requests) - max_num_seqs)
    last = sorted(requests[num_kept:], key=lambda r: len(r.prompt_token_ids) - r.max_total_tokens)
    return [*requests[:num_kept], *last]


def new_sequences(request: Request) -> list[EngineSequence]:
    """Its samples to be queued, from the tokens that are known; those that have ended stay as they are."""
    known: list[EngineSequence | None] = [*request.seqs] or [None] * request.params.n
    return [
        seq if seq is not None and seq.is_finished else _new_sequence(request, index, seq)
        for index, seq in enumerate(known)
    ]


def _new_sequence(request: Request, index: int, before: EngineSequence | None) -> EngineSequence:
    seq = EngineSequence(
        request.request_id,
        list(request.prompt_token_ids if before is None else before.token_ids),
        request.params,
        num_prompt_tokens=len(request.prompt_token_ids),
        max_total_tokens=request.max_total_tokens,
        seed=sample_seed(request.seed, index),
        end_ids=request.end_ids,
        index=index,
        bad_word_ids=request.bad_word_ids,
    )
    if before is not None:
        seq.carry_over_logprobs(before)
    return seq


def eos_token_ids(model_config: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """The end ids of the model's files and of the tokenizer."""
    ids = list(model_config.eos_token_ids)
    if tokenizer is not None and getattr(tokenizer, "eos_token_id", None) is not None:
        ids.append(tokenizer.eos_token_id)
    # one beyond the vocabulary (of another tokenizer, say) can never be sampled
    return tuple(dict.fromkeys(i for i in ids if i < model_config.vocab_size))


def is_single_prompt(prompts: Any) -> bool:
    """Whether `prompts` is one bare prompt: a string, a dict, or a flat list, array or tensor of ints."""
    if isinstance(prompts, str | Mapping):
        return True
    is_flat = isinstance(prompts, list | tuple) or getattr(prompts, "ndim", 0) == 1
    return is_flat and len(prompts) > 0 and _is_int(next(iter(prompts)))


def _is_int(value: Any) -> bool:
    """An int, or an array or tensor of no dimension; others have __index__ too."""
    return hasattr(value, "__index__") and not isinstance(value, bool) and getattr(value, "ndim", 0) == 0


def split_prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """A prompt in any of its forms as (text, None) or (text or None, token ids).

    Raises:
        TypeError: no form of a prompt.
        ValueError: a dict without "prompt" and "prompt_token_ids", or text that is no text.
    """
    if isinstance(prompt, str):
        return check_text(prompt), None
    if isinstance(prompt, Mapping):
        if prompt.get("multi_modal_data"):
            raise ValueError("multi_modal_data is not supported: models here read text alone")
        if prompt.get("prompt_token_ids") is not None:
            return prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"])
        if prompt.get("input_ids") is not None:
            return prompt.get("prompt"), _only_row(prompt["input_ids"])
        if prompt.get("prompt") is None:
            raise ValueError(
                f'a dict prompt needs "prompt" or "prompt_token_ids", got the keys {sorted(map(str, prompt))}'
            )
        if not isinstance(prompt["prompt"], str):
            raise TypeError(f'"prompt" must be a str, got {type(prompt["prompt"]).__name__}')
        return check_text(prompt["prompt"]), None
    return None, _token_ids(prompt)


def check_text(text: str) -> str:
    """The text. Raises ValueError for half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} of the text is half of a surrogate pair") from None
    return text


def _only_row(ids: Any) -> list[int]:
    """The ids of one text in what a tokenizer, or its chat template, returns: a flat list, or a list of one."""
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    return _token_ids(ids[0] if len(ids) == 1 and isinstance(ids[0], list | tuple) else ids)


def _token_ids(ids: Any) -> list[int]:
    if isinstance(ids, str | bytes) or not hasattr(ids, "__iter__"):
        raise TypeError(f"a prompt must be a str, a list of token ids or a dict, got {type(ids).__name__}")
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    kinds = set(map(type, ids))
    if kinds <= {int}:
        return ids
    for token_id in ids:
        if not _is_int(token_id):
            raise TypeError(f"a prompt's token ids must be ints, got {token_id!r} ({type(token_id).__name__})")
    return [index(token_id) for token_id in ids]


@dataclass(frozen=True, slots=True)
class Limits:
    """What this engine can run. Lengths are in tokens."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int  # that the whole KV pool holds
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None  # for bad_words and stop strings

    def check(self, request_id: str, prompt: str | None, token_ids: list[int], params: SamplingParams) -> Request:
        """A Request of checked parts.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, a prompt of max_model_len tokens or more, a
                request that the whole KV pool could not hold, or bad_words where there is no tokenizer.
        """
        if params.truncate_prompt_tokens is not None:
            token_ids = self._truncate(token_ids, params)
        num_prompt_tokens = len(token_ids)
        if num_prompt_tokens == 0:
            raise ValueError("the prompt is empty: it has no tokens")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"token id {bad} is outside the vocabulary: ids are 0 to {self.vocab_size - 1}")
        if num_prompt_tokens >= self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, and max_model_len={self.max_model_len} leaves no room to "
                f"generate: at most {self.max_model_len - 1} prompt tokens (truncate_prompt_tokens=-1 keeps the last "
                "that fit)"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop strings need a tokenizer, and this engine has none, got stop={params.stop!r}")
        self._check_ids("stop token", params.stop_token_ids)
        self._check_ids("logit_bias token", params.logit_bias)
        self._check_ids("allowed token", params.allowed_token_ids)
        max_total_tokens = self._max_total_tokens(num_prompt_tokens, params)
        end_ids = tuple(
            dict.fromkeys((*(() if params.ignore_eos else self.eos_token_ids), *(params.stop_token_ids or ())))
        )
        bad_word_ids = self._bad_word_ids(params.bad_words) if params.bad_words else ()
        return Request(request_id, prompt, token_ids, params, end_ids, max_total_tokens, bad_word_ids=bad_word_ids)

    def _check_ids(self, what: str, token_ids: Iterable[int] | None) -> None:
        highest = max(token_ids, default=0) if token_ids is not None else 0
        if highest >= self.vocab_size:
            raise ValueError(f"{what} id {highest} is outside the vocabulary: ids are 0 to {self.vocab_size - 1}")

    def _bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as the tokens that it is at the start of a text and behind a space."""
        if self.tokenizer is None:
            raise ValueError("bad_words need a tokenizer, and this engine has none: use logit_bias on token ids")
        texts = [space + check_text(word).lstrip() for word in words for space in ("", " ")]
        found: dict[tuple[int, ...], None] = {}
        for text, token_ids in zip(texts, self.tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
            if not token_ids:
                raise ValueError(f"bad_words must be strings that have tokens, got {text!r}")
            self._check_ids("bad_words token", token_ids)
            found[tuple(token_ids)] = None
        return tuple(found)

    def _max_total_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Prompt and output at most. Without max_tokens the model's length and the pool bound it."""
        # the last token's KV is never written, so a pool of n slots holds n + 1 tokens
        if params.max_tokens is None and num_prompt_tokens <= self.pool_tokens:
            return min(self.max_model_len, self.pool_tokens + 1)
        wanted = min(num_prompt_tokens + (params.max_tokens or 1), self.max_model_len)
        if wanted - 1 > self.pool_tokens:
            raise ValueError(
                f"the request needs KV cache for {wanted - 1} tokens ({num_prompt_tokens} of the prompt), and the "
                f"whole pool holds {self.pool_tokens}: lower max_tokens or shorten the prompt, or raise "
                "num_kvcache_blocks or gpu_memory_utilization"
            )
        return wanted

    def _truncate(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        keep = params.truncate_prompt_tokens
        if keep == -1:
            keep = max(1, self.max_model_len - (params.max_tokens or 1))
        assert keep is not None
        return token_ids[-keep:]
