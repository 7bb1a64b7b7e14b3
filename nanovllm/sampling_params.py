"""How one request is sampled and when it ends.

Owns: every default and every rule of a request's sampling. Invariant: an instance that exists is valid, since the
constructor checks every field and the dataclass is frozen. It deliberately knows nothing of a model: what depends on
a vocabulary or a length is checked when the request is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

GREEDY_TEMPERATURE = 1e-5  # below this, dividing by the temperature would overflow: the row is greedy


def _check_int(name: str, value: object, low: int, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < low:
        raise ValueError(f"{name} must be {allowed}, got {value}")


def _check_real(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {allowed}, got {value}")


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    return float(value)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request; names and meanings follow vLLM's class of that name.

    Attributes:
        temperature: at least 0; 0 is greedy, and so is anything below 1e-5.
        top_k: keep the k most probable tokens; -1 or 0 is off, larger than the vocabulary is off too.
        top_p: in (0, 1]; keep the smallest set of most probable tokens whose mass reaches top_p (Holtzman et al.
            2019); the token that crosses the threshold stays.
        min_p: in [0, 1]; keep tokens at least min_p times as probable as the most probable one.
        seed: the same seed gives the same output whatever the batch. None: drawn from the engine's seed.
        max_tokens: at least 1; None: up to max_model_len.
        min_tokens: no end id before so many generated tokens.
        ignore_eos: generate past the model's end ids (stop_token_ids still stop).
        stop_token_ids: further ids that end the request; the id that fired is the last of token_ids.
        truncate_prompt_tokens: keep the last k prompt tokens; -1: what max_model_len leaves room for.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ValueError: a value out of range, naming field, value and what is allowed.
        TypeError: a value of the wrong type, or an unknown field.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 64
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        temperature = _real("temperature", self.temperature)
        _check_real("temperature", temperature, 0.0 <= temperature < float("inf"), "a finite number, at least 0")
        top_p = _real("top_p", self.top_p)
        _check_real("top_p", top_p, 0.0 < top_p <= 1.0, "in (0, 1]; 1 turns it off")
        min_p = _real("min_p", self.min_p)
        _check_real("min_p", min_p, 0.0 <= min_p <= 1.0, "in [0, 1]; 0 turns it off")
        _check_int("top_k", self.top_k, -1, "at least 1, or -1 or 0 to turn it off")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, "at least 1, or None for no limit but max_model_len")
        _check_int("min_tokens", self.min_tokens, 0, "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), "at least -2**63")
            if self.seed >= 2**64:
                raise ValueError(f"seed must be below 2**64, got {self.seed}")
        if self.truncate_prompt_tokens is not None:
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, "at least 1, or -1")
            if self.truncate_prompt_tokens == 0:
                raise ValueError("truncate_prompt_tokens must be at least 1, or -1, got 0")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if self.stop_token_ids is not None:
            if isinstance(self.stop_token_ids, str | bytes):
                raise TypeError(f"stop_token_ids must be a list of ints, got {self.stop_token_ids!r}")
            for token_id in self.stop_token_ids:
                _check_int("stop_token_ids", token_id, 0, "token ids, at least 0")
            object.__setattr__(self, "stop_token_ids", tuple(int(token_id) for token_id in self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        """The most probable token each time, no noise."""
        return self.temperature < GREEDY_TEMPERATURE
