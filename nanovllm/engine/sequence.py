"""One sequence of tokens on its way through the engine, as the host sees it.

Owns: the tokens that the host knows and the counters from which everything else follows. Invariant: once all that was
submitted has run, the device has the sequence at `num_computed + 1` tokens or more and at most at `num_tokens_bound`.
It deliberately has no phase: a prompt, a chunk, a resumed sequence and a decode differ only in how far num_computed
is behind.

    known tokens     len(token_ids)              what results have brought to the host
    lower bound      num_computed + 1            known + one for each sampling step in flight
    upper bound      num_tokens_bound            known + the maxima of the sampling steps in flight

Without drafts both bounds are equal, and a result that arrives moves neither: it turns a counted token into a known
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.messages import TokenLogprobs
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.stop import TextProgress


class Sequence:
    """A sequence: tokens, bounds, and what the scheduler and the block manager hold for it.

    Args:
        request_id: the caller's name for it; never interpreted.
        token_ids: the prompt, and behind it what was generated before, if anything.
        sampling_params: of the request.
        num_prompt_tokens: leading tokens that are the prompt; None: all of token_ids.
        max_total_tokens: length at which the sequence ends: min(prompt + max_tokens, max_model_len).
        seed: 64-bit seed of this sample.
        end_ids: ids that end it (what min_tokens holds back).
        index: which sample of its request it is.
        bad_word_ids: token sequences that must not be completed.

    Attributes:
        row: its row on the device; 0 when it has none.
        block_table: ids of its KV blocks, in order.
        num_slots: KV slots that it may fill before it needs a block or ends: min(blocks * block_size,
            max_total_tokens - 1), since the last token's KV is never needed.
        num_computed: tokens whose KV every step submitted so far will have computed, at least.
        num_speculative: tokens that drafts in flight may add beyond one for each step; 0 without drafts.
        num_cached_tokens: prompt tokens that its first admission found in the prefix cache.
        forks: other samples of the same prompt, to be queued once this one's prompt is computed.
        prompt_blocks: of a fork that waits: blocks, held by reference, of the prompt without its last token. The last
            of them may be full only in part, and is copied when the fork starts.
        logprobs: of the generated tokens that the host knows; None if nobody asked.
        prompt_logprobs: of the prompt's second token and the following, as far as known; of the first sample alone.
            None if nobody asked.
        finish_reason: None while it lives; then "stop", "length", "abort" or "error".
        stop_reason: what fired, for whoever decides on stops; never read here.
        text_progress: of a sequence whose text is followed while it grows, for the same.
    """

    __slots__ = (
        "request_id",
        "token_ids",
        "sampling_params",
        "num_prompt_tokens",
        "max_total_tokens",
        "seed",
        "end_ids",
        "bad_word_ids",
        "logprobs",
        "prompt_logprobs",
        "index",
        "has_exact_length",
        "row",
        "block_table",
        "num_slots",
        "num_computed",
        "num_speculative",
        "num_cached_tokens",
        "num_preemptions",
        "finish_reason",
        "stop_reason",
        "text_progress",
        # the scheduler's
        "is_waiting",
        "forks",
        "num_bypassed",
        "last_chunk_step",
        # the block manager's
        "prompt_blocks",
        "block_hashes",
        "block_contents",
        "num_registered_blocks",
        "parent_serial",
        "cache_epoch",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        num_prompt_tokens: int | None = None,
        max_total_tokens: int,
        seed: int = 0,
        end_ids: tuple[int, ...] = (),
        index: int = 0,
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.request_id = request_id
        self.token_ids = token_ids
        self.sampling_params = sampling_params
        self.num_prompt_tokens = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        self.max_total_tokens = max_total_tokens
        self.seed = seed
        self.end_ids = end_ids
        self.index = index
        self.bad_word_ids = bad_word_ids
        self.logprobs: list[TokenLogprobs] | None = None if sampling_params.logprobs is None else []
        wants_prompt_logprobs = sampling_params.prompt_logprobs is not None and index == 0
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if wants_prompt_logprobs else None
        # Nothing but its length can end it, so the length is known beforehand.
        self.has_exact_length = (
            sampling_params.ignore_eos and not sampling_params.stop_token_ids and not sampling_params.stop
        )
        self.row = 0
        self.block_table: list[int] = []
        self.num_slots = 0
        self.num_computed = 0
        self.num_speculative = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.text_progress: TextProgress | None = None
        self.is_waiting = False
        self.forks: list[Sequence] = []
        self.num_bypassed = 0
        self.last_chunk_step = -1
        self.prompt_blocks: list[int] = []
        self.block_hashes: list[int] = []
        self.block_contents: list[bytes] = []
        self.num_registered_blocks = 0
        self.parent_serial = 0
        self.cache_epoch = -1

    def __len__(self) -> int:
        """Tokens that the host knows."""
        return len(self.token_ids)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, row={self.row}, prompt={self.num_prompt_tokens}, "
            f"known={len(self.token_ids)}, computed={self.num_computed}, max={self.max_total_tokens}, "
            f"finish_reason={self.finish_reason!r})"
        )

    @property
    def is_finished(self) -> bool:
        """It has ended for whatever reason: results that still come for it are dropped."""
        return self.finish_reason is not None

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    def carry_over_logprobs(self, before: Sequence) -> None:
        """Go on where `before` broke off, from the same tokens: with what is known of these."""
        self.prompt_logprobs = before.prompt_logprobs
        if before.logprobs is not None:
            self.logprobs = before.logprobs[: self.num_output_tokens]

    @property
    def first_prompt_logprob(self) -> int | None:
        """The first prompt position whose logprob is still wanted; None: no more. Position 0 has none."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) + 1 >= self.num_prompt_tokens:
            return None
        return len(self.prompt_logprobs) + 1

    @property
    def steps_in_flight(self) -> int:
        """Submitted steps that sample for this sequence, results not known yet (not chunks that sample nothing)."""
        return max(0, self.num_computed + 1 - len(self.token_ids))

    @property
    def num_inflight(self) -> int:
        """Most tokens that the steps in flight can add."""
        return self.steps_in_flight + self.num_speculative

    @property
    def num_tokens_bound(self) -> int:
        """Upper bound of its tokens on the device once all submitted steps have run."""
        return len(self.token_ids) + self.num_inflight
