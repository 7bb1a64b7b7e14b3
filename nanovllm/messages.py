"""The two types that cross between the scheduler (host) and the model runner (device).

Owns: `SchedulerOutput`, the plan of one step, and `ModelRunnerOutput`, what came of it. Invariant: both hold plain
Python values only, so a plan can be pickled to another rank and a simulation can execute it without torch. They
deliberately carry no sequence objects: the device knows rows, the host knows sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.sampling_params import SamplingParams


@dataclass(slots=True)
class NewRow:
    """A sequence that takes a row in this step: everything the device has to know of it.

    `token_ids` are the prompt and, after a preemption, what was generated before it. `num_prompt_tokens` never changes
    over a sequence's life; `num_computed_tokens` counts the leading tokens whose KV its blocks already hold: from the
    prefix cache, or shared with and copied from another sample of the same prompt.
    """

    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_table: list[int]
    sampling_params: SamplingParams
    seed: int  # 64-bit, of this sample: the request's own or drawn from the engine's
    end_ids: tuple[int, ...] = ()  # what min_tokens holds back
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # each: tokens whose last must not follow the others
    first_prompt_logprob: int | None = None  # the first prompt position whose logprob is wanted; None: no more


@dataclass(slots=True)
class SchedulerOutput:
    """One step: which rows run, how many tokens each, and what changed since the step before.

    The batch is ordered: decodes (one token each, `num_computed + 1 == num_tokens`), then prompt chunks that reach
    the end of their sequence, then chunks that do not. So the rows that sample are the first `num_sampled`.
    """

    step: int  # serial number, from 0
    rows: list[int]
    num_query_tokens: list[int]  # per row; a decode has 1 (plus drafts, where there are any)
    num_decodes: int
    num_sampled: int
    new_rows: list[NewRow] = field(default_factory=list)
    block_appends: list[tuple[int, int, int]] = field(default_factory=list)  # (row, index in its block table, block id)
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to), before anything else writes KV
    max_seq_len: int = 0  # upper bound of the keys that any row attends to, this step's tokens included
    has_cached_prefix: bool = False  # some prompt chunk starts behind token 0

    @property
    def num_tokens(self) -> int:
        """Query tokens in the whole step."""
        return sum(self.num_query_tokens)


class TokenLogprobs(NamedTuple):
    """One position: the token that stands there, and the most probable ones, in that order (equals: by id)."""

    logprob: float
    rank: int  # 1: the most probable
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(NamedTuple):
    """What a chunk told of its prompt: positions `first` and the following, of row `plan.rows[place]`."""

    place: int
    first: int
    positions: list[TokenLogprobs]


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step sampled, for the first `num_sampled` rows of its plan, in their order.

    `num_new_tokens` is None when every sampling row made exactly one token; with drafts it counts the accepted tokens
    of each row, and `token_ids` holds them one row after another. A token id of -1 says that the row's logits were
    not finite.
    """

    token_ids: list[int]
    num_new_tokens: list[int] | None = None
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index into the plan's rows: who asked
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
