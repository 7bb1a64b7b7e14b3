"""What `tests/fuzz.py` throws at an engine: random options, prompts and parameters, and which of them can run.

Owns: the drawing of requests, and `resolve`: the contract's rules on lengths, written down a second time. Invariant:
everything is drawn from the random.Random that is passed in. It deliberately runs nothing.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from nanovllm import LLM, SamplingParams

TEXTS = ["The quick brown fox", "The quick brown dog sleeps", "naïve 日本語 🙂", "", "def add(a, b):\n    return"]
STOPS = ["e", " ", "th", "the ", "\n", "<|im_end|>", "q", "日", "ab", "Ġ", "s,", "o", "�", "!", "1"]


@dataclass(frozen=True)
class Limits:
    """What an engine can run, in tokens."""

    max_model_len: int
    pool_tokens: int
    block_size: int
    vocab_size: int

    @classmethod
    def of(cls, llm: LLM) -> Limits:
        size = llm.engine.executor.block_size
        return cls(
            llm.config.max_model_len, (llm.num_kvcache_blocks - 1) * size, size, llm.config.model_config.vocab_size
        )


@dataclass(frozen=True)
class Expected:
    """A request that runs, with its limits written out: what the model sees, and max_tokens as a number."""

    token_ids: list[int]
    params: SamplingParams

    @property
    def is_repeatable(self) -> bool:
        """Nothing in it depends on the engine's own seed."""
        return self.params.is_greedy or self.params.seed is not None


@dataclass
class Case:
    """A request as it is passed in; `expected` is None if it has to be refused."""

    prompt: Any
    params: SamplingParams
    expected: Expected | None = None


def resolve(case: Case, limits: Limits, tokenizer: Any) -> Expected | None:
    """What has to become of a request; None: it is refused."""
    prompt, params = case.prompt, case.params
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_token_ids") or prompt["prompt"]
    token_ids = list(tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
    keep = params.truncate_prompt_tokens
    if keep is not None:
        token_ids = token_ids[-(keep if keep > 0 else max(1, limits.max_model_len - (params.max_tokens or 1))) :]
    size = len(token_ids)
    ids = [*token_ids, *(params.stop_token_ids or ()), *(params.logit_bias or ())]
    if not token_ids or not all(0 <= token_id < limits.vocab_size for token_id in ids):
        return None
    if size >= limits.max_model_len or size > limits.pool_tokens:
        return None
    # the last token needs no KV
    longest = limits.pool_tokens + 1 if params.max_tokens is None else size + params.max_tokens
    longest = min(longest, limits.max_model_len)
    if longest - 1 > limits.pool_tokens:
        return None
    room = longest - size
    plain = dataclasses.replace(
        params, truncate_prompt_tokens=None, max_tokens=room, min_tokens=min(params.min_tokens, room)
    )
    return Expected(token_ids, plain)


def draw_options(rng: random.Random) -> dict[str, Any]:
    """A small engine; often one whose pool holds little more than one sequence."""
    block_size = rng.choice((1, 2, 3, 4, 8, 16))
    max_model_len = rng.choice((16, 32, 48, 80))
    whole = -(-max_model_len // block_size)
    num_blocks = 1 + rng.choice((max(2, whole // 2), whole, whole, whole + 2, whole * 2, whole * 4))
    return dict(
        kvcache_block_size=block_size,
        max_model_len=max_model_len,
        num_kvcache_blocks=num_blocks,
        max_num_seqs=rng.choice((1, 2, 3, 5, 8, 16)),
        max_num_batched_tokens=rng.choice((1, 4, 7, 16, 40, 16384)),
        max_in_flight=rng.choice((1, 2, 2, 3)),
        enable_prefix_caching=rng.random() < 0.7,
    )


def draw_cases(rng: random.Random, limits: Limits, max_requests: int) -> list[Case]:
    """Requests of a round: prompts that share beginnings, some twice, and few kinds of parameters."""
    longest = limits.max_model_len - 1
    num_ids = rng.choice((2, 6, limits.vocab_size - 3))  # few: blocks of the same contents behind other ones
    trunks = [[3 + rng.randrange(num_ids) for _ in range(longest)] for _ in range(2)]
    kinds = [draw_params(rng, limits) for _ in range(rng.choice((1, 3, 6, 12)))]
    cases: list[Case] = []
    for _ in range(rng.randint(1, max_requests)):
        if cases and rng.random() < 0.15:
            again = rng.choice(cases)
            cases.append(Case(again.prompt, again.params if rng.random() < 0.5 else rng.choice(kinds)))
        else:
            cases.append(Case(draw_prompt(rng, limits, trunks), rng.choice(kinds)))
    return cases


def draw_prompt(rng: random.Random, limits: Limits, trunks: list[list[int]]) -> Any:
    kind, longest, size = rng.random(), limits.max_model_len - 1, limits.block_size
    if kind < 0.05:
        text = rng.choice(TEXTS)
        return rng.choice((text, {"prompt": text}))
    if kind < 0.10:  # no, or hardly any, room; an empty one; an id that there is not
        too_long = [7] * (longest + rng.choice((0, 1, 2, 20)))
        return rng.choice((too_long, [], [5, limits.vocab_size], [-1], [limits.vocab_size - 1, 10**6]))
    length = rng.choice((1, 2, size, size + 1, 2 * size, rng.randint(1, longest), rng.randint(1, max(1, longest // 2))))
    length = min(length, longest)
    token_ids = rng.choice(trunks)[:length]
    if rng.random() < 0.5:  # another ending, at a block's edge or anywhere
        cut = rng.choice((length - 1, length // size * size, rng.randint(0, length)))
        ids = rng.choice(((3, 4), range(limits.vocab_size)))
        token_ids = token_ids[:cut] + [rng.choice(ids) for _ in range(length - cut)]
    return rng.choice((token_ids, token_ids, tuple(token_ids), {"prompt_token_ids": token_ids}))


def draw_params(rng: random.Random, limits: Limits) -> SamplingParams:
    """Each field is left alone more often than not."""

    def some(chance: float) -> bool:
        return rng.random() < chance

    def token_ids(most: int) -> list[int]:
        return [rng.randrange(limits.vocab_size) for _ in range(rng.randint(1, most))]

    fields: dict[str, Any] = dict(max_tokens=rng.choice((1, 2, 3, 5, 8, 13, 20)), temperature=0.0)
    if some(0.6):
        fields |= dict(temperature=rng.choice((0.3, 0.8, 1.0, 2.0)), seed=rng.choice((0, 1, -5, 2**63 + 11)))
        fields |= dict(top_k=rng.choice((1, 2, 5, 50, 1000))) if some(0.3) else {}
        fields |= dict(top_p=rng.choice((0.1, 0.5, 0.9))) if some(0.3) else {}
        fields |= dict(min_p=rng.choice((0.02, 0.2))) if some(0.2) else {}
        fields |= dict(seed=None) if some(0.1) else {}
    if some(0.2):
        fields["repetition_penalty"] = rng.choice((0.8, 1.3))
    if some(0.2):
        fields["presence_penalty"] = rng.choice((-1.0, 0.7))
    if some(0.2):
        fields["frequency_penalty"] = rng.choice((-0.5, 1.5))
    if some(0.15):
        fields["logit_bias"] = {token_id: rng.choice((-3.0, 4.0, float("-inf"))) for token_id in token_ids(4)}
    if some(0.05):
        fields["allowed_token_ids"] = token_ids(10)
    if some(0.05):
        fields["bad_words"] = [rng.choice(("the", "e", "fox jumps", "日"))]
    if some(0.3):
        fields["stop"] = [rng.choice(STOPS) for _ in range(rng.randint(1, 3))]
        fields["include_stop_str_in_output"] = some(0.3)
    if some(0.3):
        fields["stop_token_ids"] = token_ids(60)
    fields["ignore_eos"] = some(0.5)
    fields["skip_special_tokens"] = not some(0.1)
    if "stop" not in fields:
        fields["detokenize"] = not some(0.05)
    if some(0.2):
        fields["min_tokens"] = rng.randint(0, fields["max_tokens"])
    if some(0.2):
        fields["n"] = rng.choice((2, 3, 5))
    if some(0.2):
        fields["logprobs"] = rng.choice((0, 1, 4, -1) if some(0.2) else (0, 1, 4))
    if some(0.15):
        fields["prompt_logprobs"] = rng.choice((0, 1, 3))
    if some(0.1):
        fields["truncate_prompt_tokens"] = rng.choice((-1, 1, 5, 30))
    if some(0.08):
        fields["max_tokens"] = None
    if some(0.02):
        fields["stop_token_ids"] = [limits.vocab_size]
    return SamplingParams(**fields)
