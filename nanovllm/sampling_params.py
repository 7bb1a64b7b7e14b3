"""How one request is sampled and when it ends.

Owns: every default and every rule of a request's sampling. Invariant: an instance that exists is valid, since the
constructor checks every field and the dataclass is frozen. It deliberately knows nothing of a model: what depends on
a vocabulary or a length is checked when the request is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

GREEDY_TEMPERATURE = 1e-5  # below this, dividing by the temperature would overflow: the row is greedy
_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTS = ("n", "top_k", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
MIN_FLOAT32, MAX_FLOAT32 = 2.0**-126, 3.4028234663852886e38  # what sampling computes in
MAX_SAMPLES = 16384  # of one prompt; as in vLLM


def _check_int(name: str, value: object, low: int, allowed: str, end: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < low or (end is not None and int(value) >= end):
        raise ValueError(f"{name} must be {allowed}, got {value}")


def _check_real(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {allowed}, got {value}")


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be within the range of a float, got {value}") from None


def _strings_or_ids(name: str, values: object, what: str) -> tuple:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of {what}, got {values!r}")
    return tuple(values)


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    ids = _strings_or_ids(name, values, "ints")
    for token_id in ids:
        _check_int(name, token_id, 0, "token ids, at least 0")
    return tuple(int(token_id) for token_id in ids)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request; names and meanings follow vLLM's class of that name.

    Attributes:
        n: from 1 to 16384; samples of this prompt, which is computed once. They differ, also from one seed.
        temperature: at least 0; 0 is greedy, and so is anything below 1e-5.
        top_k: keep the k most probable tokens; -1 or 0 is off, larger than the vocabulary is off too.
        top_p: in (0, 1]; keep the smallest set of most probable tokens whose mass reaches top_p (Holtzman et al.
            2019); the token that crosses the threshold stays.
        min_p: in [0, 1]; keep tokens at least min_p times as probable as the most probable one.
        repetition_penalty: above 0; logits of tokens that the prompt or the output holds are divided by it where
            positive and multiplied by it where negative (Keskar et al. 2019). 1 is off.
        presence_penalty: in [-2, 2]; taken off the logit of every token that the output holds.
        frequency_penalty: in [-2, 2]; taken off the logit of a token once for each time that the output holds it.
        logit_bias: {token id: what is added to its logit}, finite, or -inf to rule the token out.
        allowed_token_ids: no other token is generated, end ids included.
        bad_words: strings that are not generated, read as the tokens that they are with and without a leading space:
            the last token is ruled out where the output ends in the ones before it.
        logprobs: how many of the most probable tokens to report beside each generated one; -1: all. Natural
            logarithms of the model's own distribution: before temperature, penalties, bias and filters. None: nothing.
        prompt_logprobs: the same for the tokens of the prompt, but the first, which nothing precedes.
        seed: the same seed gives the same output, in float32 whatever the batch. None: drawn from the engine's seed.
        max_tokens: at least 1; None: up to max_model_len.
        min_tokens: no end id before so many generated tokens.
        ignore_eos: generate past the model's end ids (stop_token_ids and stop still stop).
        stop: a string or several; the text is cut before the earliest match, wherever that begins or ends in a token,
            and token_ids run through the token that completed it. A match within the first min_tokens tokens does
            not count. One that is a special token matches whatever skip_special_tokens says.
        include_stop_str_in_output: keep the stop string that fired at the end of the text.
        stop_token_ids: further ids that end the request; the id that fired is the last of token_ids.
        truncate_prompt_tokens: keep the last k prompt tokens; -1: what max_model_len leaves room for.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: False: text is "". Stop strings need it.

    Raises:
        ValueError: a value out of range, naming field, value and what is allowed.
        TypeError: a value of the wrong type, or an unknown field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    max_tokens: int | None = 64
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._make_plain()
        _check_int("n", self.n, 1, f"from 1 to {MAX_SAMPLES}", MAX_SAMPLES + 1)
        _check_real("temperature", self.temperature, 0.0 <= self.temperature < float("inf"), "finite, at least 0")
        _check_real("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "in (0, 1]; 1 turns it off")
        _check_real("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "in [0, 1]; 0 turns it off")
        _check_int("top_k", self.top_k, -1, "at least 1, or -1 or 0 to turn it off")
        self._check_penalties()
        self._check_token_rules()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), -1, "a number of tokens, or -1 for all")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, "at least 1, or None for no limit but max_model_len")
        _check_int("min_tokens", self.min_tokens, 0, "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), "at least -2**63 and below 2**64", 2**64)
        if self.truncate_prompt_tokens is not None:
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, "at least 1, or -1")
            if self.truncate_prompt_tokens == 0:
                raise ValueError("truncate_prompt_tokens must be at least 1, or -1, got 0")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        self._check_stop()
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))

    def _make_plain(self) -> None:
        """Numbers of other libraries as Python's own, which do not overflow."""
        for name in _REALS:
            object.__setattr__(self, name, _real(name, getattr(self, name)))
        for name in _INTS:
            value = getattr(self, name)
            if isinstance(value, Integral) and not isinstance(value, bool):
                object.__setattr__(self, name, int(value))

    def _check_stop(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        stop = _strings_or_ids("stop", stop, "strings")
        for string in stop:
            if not isinstance(string, str):
                raise TypeError(f"stop must be a string or a list of strings, got {string!r} in it")
            if not string:
                raise ValueError("stop must not hold an empty string, got '': it would match at once")
        if stop and not self.detokenize:
            raise ValueError(f"detokenize must be True where stop is given, got False with stop={stop!r}")
        object.__setattr__(self, "stop", stop)

    def _check_penalties(self) -> None:
        repetition = self.repetition_penalty
        is_allowed = MIN_FLOAT32 <= repetition <= MAX_FLOAT32
        _check_real("repetition_penalty", repetition, is_allowed, "above 0 and finite in float32; 1 turns it off")
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            _check_real(name, penalty, -2.0 <= penalty <= 2.0, "in [-2, 2]; 0 turns it off")

    def _check_token_rules(self) -> None:
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(f"logit_bias must be a dict of token ids and numbers, got {self.logit_bias!r}")
            for token_id, bias in self.logit_bias.items():
                _check_int("logit_bias", token_id, 0, "of token ids, at least 0")
                value = _real("logit_bias", bias)
                is_allowed = abs(value) <= MAX_FLOAT32 or value == float("-inf")
                _check_real("logit_bias", bias, is_allowed, "finite in float32, or -inf to rule a token out")
            biases = {int(token_id): float(bias) for token_id, bias in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", biases)
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise ValueError("allowed_token_ids must hold at least one token id, got []; None allows all")
            object.__setattr__(self, "allowed_token_ids", ids)
        if self.bad_words is not None:
            words = _strings_or_ids("bad_words", self.bad_words, "strings")
            for word in words:
                if not isinstance(word, str):
                    raise TypeError(f"bad_words must be a list of strings, got {word!r} in it")
                if not word.strip():
                    raise ValueError(f"bad_words must be strings that are not blank, got {word!r}")
            object.__setattr__(self, "bad_words", words)

    @property
    def is_greedy(self) -> bool:
        """The most probable token each time, no noise."""
        return self.temperature < GREEDY_TEMPERATURE
