"""Log probabilities on their way to the host.

Owns: which rows want them, and how far each prompt has come. Invariant: they are of the model's own distribution, so
they are computed from its logits before anything changes these, in float32, in pieces of bounded size and only for the
positions that were asked for. It deliberately knows no words: ids and numbers go out.

A generated token's logits are those it was sampled from. A prompt token's are those of the token before it, of which a
step computes none but here: chunk by chunk, from the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.kernels.logprobs import token_logprobs
from nanovllm.messages import ModelRunnerOutput, PromptLogprobs, SchedulerOutput, TokenLogprobs
from nanovllm.worker.logits import to_device
from nanovllm.worker.persistent_batch import PersistentBatch

PROMPT_ELEMENTS = 1 << 25  # logits of prompt positions made at once: 64 MiB in bfloat16
TOP_ELEMENTS = 1 << 22  # logits searched for the most probable at once, with some 30 bytes of workspace each
LOW_WORD = (1 << 32) - 1


def most_probable(x: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Ids int64 and values of the `num_top` largest of each row of float32 [n, V]; of equals the lower id first."""
    order = (x + 0.0).view(torch.int32)  # the sum leaves but one zero
    order ^= (order >> 31) & 0x7FFFFFFF  # integers in the order of the floats
    keys = order.long()
    keys <<= 32
    keys |= LOW_WORD - torch.arange(x.shape[1], device=x.device)
    top = LOW_WORD - (keys.topk(num_top, dim=1).values & LOW_WORD)  # [n, num_top]
    return top, x.gather(1, top)


def compute_logprobs(logits: Tensor, index: Tensor, tokens: Tensor, num_top: int) -> list[Tensor]:
    """Of `tokens` int32 [n] under rows `index` int64 [n] of `logits` [S, V], with the `num_top` most probable ones.

    Returns int32 [., 2 + 2 * num_top] on the host, once what is enqueued has run: log probability (the bits of a
    float32), rank, ids, log probabilities. Several pieces where one would be large.
    """
    logprobs, ranks, log_sums = token_logprobs(logits, index, tokens)
    head = torch.stack([logprobs.view(torch.int32), ranks], dim=1)  # [n, 2]
    if num_top == 0:
        return [_to_host(head)]
    pieces = []
    size = max(1, TOP_ELEMENTS // logits.shape[1])
    for start in range(0, len(index), size):
        rows = slice(start, start + size)
        ids, values = most_probable(logits[index[rows]].float(), num_top)
        values -= log_sums[rows, None]
        pieces.append(_to_host(torch.cat([head[rows], ids.int(), values.view(torch.int32)], dim=1)))
    return pieces


def _to_host(values: Tensor) -> Tensor:
    """A copy that the host may read when the step has run. It takes its turn on the compute stream: by then `values`
    may be given away again, however many pieces there are."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def _unpack(pieces: list[Tensor], num_top: int) -> list[TokenLogprobs]:
    result: list[TokenLogprobs] = []
    for piece in pieces:
        words = piece.numpy()
        floats = words.view(np.float32)
        columns = (floats[:, 0], words[:, 1], words[:, 2 : 2 + num_top], floats[:, 2 + num_top :])
        result += map(TokenLogprobs, *(column.tolist() for column in columns))
    return result


@dataclass(slots=True)
class Span:
    """Consecutive positions of one prompt."""

    place: int  # of its row in the plan
    first: int  # position in the prompt
    num_positions: int


@dataclass(slots=True)
class PendingLogprobs:
    """Of a step in flight; each entry has its number of alternatives and its numbers."""

    sampled: list[tuple[list[int], int, list[Tensor]]]
    prompts: list[tuple[list[Span], int, list[Tensor]]]

    def fill(self, output: ModelRunnerOutput) -> None:
        """Put them into the output of their step, which has run."""
        for indices, num_top, pieces in self.sampled:
            output.logprobs.update(zip(indices, _unpack(pieces, num_top), strict=True))
        for spans, num_top, pieces in self.prompts:
            positions = _unpack(pieces, num_top)
            start = 0
            for span in spans:
                end = start + span.num_positions
                output.prompt_logprobs.append(PromptLogprobs(span.place, span.first, positions[start:end]))
                start = end


@dataclass(slots=True)
class PromptRow:
    """A prompt whose logprobs are wanted and not all computed."""

    num_computed: int
    first: int  # position whose logprob comes next
    num_prompt_tokens: int
    num_top: int


class LogprobsRunner:
    """Computes what the rows of each plan want.

    Args:
        batch: the rows.
        vocab_size: V.
        compute_logits: [n, hidden] -> [n, V].
    """

    def __init__(self, batch: PersistentBatch, vocab_size: int, compute_logits: Callable[[Tensor], Tensor]) -> None:
        self.batch = batch
        self.vocab_size = vocab_size
        self.compute_logits = compute_logits
        self._num_top: dict[int, int] = {}  # row: alternatives to each generated token
        self._prompts: dict[int, PromptRow] = {}
        self._done: list[tuple[list[Span], int, list[Tensor]]] = []  # of this step's chunks
        self._rows: list[int] | None = None  # the sampling rows that _groups is of
        self._groups: list[tuple[list[int], int, Tensor]] = []  # indices into the logits, alternatives, the indices

    def reset(self) -> None:
        self._num_top.clear()
        self._prompts.clear()
        self._done = []
        self._rows = None

    def apply_plan(self, plan: SchedulerOutput) -> None:
        """Take over the rows that a plan brings."""
        for new in plan.new_rows:
            params = new.sampling_params
            self._rows = None
            self._num_top.pop(new.row, None)
            self._prompts.pop(new.row, None)
            if params.logprobs is not None:
                self._num_top[new.row] = self._clamp(params.logprobs)
            if new.first_prompt_logprob is not None and params.prompt_logprobs is not None:
                num_top = self._clamp(params.prompt_logprobs)
                self._prompts[new.row] = PromptRow(
                    new.num_computed_tokens, new.first_prompt_logprob, new.num_prompt_tokens, num_top
                )

    def _clamp(self, num_top: int) -> int:
        return self.vocab_size if num_top < 0 else min(num_top, self.vocab_size)

    def wants_prompts(self, plan: SchedulerOutput) -> bool:
        """Whether `of_prompts` needs the hidden states of all tokens of this step."""
        return bool(self._prompts) and not self._prompts.keys().isdisjoint(plan.rows[plan.num_decodes :])

    def of_prompts(self, plan: SchedulerOutput, hidden: Tensor) -> None:
        """Compute those of this step's prompt chunks from `hidden` [T, hidden size], for `finish` to pass on; where
        `wants_prompts` says no, `hidden` is not read."""
        self._done = []
        if not self._prompts:
            return
        by_num_top: dict[int, list[tuple[Span, int]]] = {}  # spans, each with its first place in `hidden`
        start = plan.num_decodes
        for index in range(plan.num_decodes, len(plan.rows)):
            prompt, num_tokens = self._prompts.get(plan.rows[index]), plan.num_query_tokens[index]
            if prompt is not None:
                end = prompt.num_computed + num_tokens
                stop = min(end + 1, prompt.num_prompt_tokens)  # the last token of the chunk tells of the one behind it
                if prompt.first < stop:
                    span = Span(index, prompt.first, stop - prompt.first)
                    by_num_top.setdefault(prompt.num_top, []).append(
                        (span, start + prompt.first - 1 - prompt.num_computed)
                    )
                    prompt.first = stop
                prompt.num_computed = end
                if stop == prompt.num_prompt_tokens:
                    del self._prompts[plan.rows[index]]
            start += num_tokens
        for num_top, spans in by_num_top.items():
            pieces = self._of_spans(plan, hidden, spans, num_top)
            self._done.append(([span for span, _ in spans], num_top, pieces))

    def _of_spans(
        self, plan: SchedulerOutput, hidden: Tensor, spans: list[tuple[Span, int]], num_top: int
    ) -> list[Tensor]:
        device = hidden.device
        columns = np.concatenate(
            [
                np.stack(
                    [
                        np.arange(first_hidden, first_hidden + span.num_positions),
                        np.full(span.num_positions, plan.rows[span.place]),
                        np.arange(span.first, span.first + span.num_positions),
                    ]
                )
                for span, first_hidden in spans
            ],
            axis=1,
        )
        places, rows, positions = to_device(columns, torch.int64, device)  # [n] each
        tokens = self.batch.token_ids[rows, positions]
        pieces: list[Tensor] = []
        size = max(1, PROMPT_ELEMENTS // self.vocab_size)
        for start in range(0, len(places), size):
            logits = self.compute_logits(hidden[places[start : start + size]])  # [., V]
            index = torch.arange(len(logits), device=device)
            pieces += compute_logprobs(logits, index, tokens[start : start + size], num_top)
        return pieces

    def finish(self, plan: SchedulerOutput, logits: Tensor, sampled: Tensor) -> PendingLogprobs | None:
        """All of this step, once it has sampled `sampled` int32 [S] from `logits` [S, V]; None: nobody asked."""
        prompts, self._done = self._done, []
        groups = self._find_groups(plan) if self._num_top else []
        if not groups and not prompts:
            return None
        done = [
            (indices, num_top, compute_logprobs(logits, index, sampled[index], num_top))
            for indices, num_top, index in groups
        ]
        return PendingLogprobs(done, prompts)

    def _find_groups(self, plan: SchedulerOutput) -> list[tuple[list[int], int, Tensor]]:
        """The sampling rows that want logprobs, by number of alternatives; kept while the rows stay the same."""
        rows = plan.rows[: plan.num_sampled]
        if rows != self._rows:
            by_num_top: dict[int, list[int]] = {}
            for index, row in enumerate(rows):
                num_top = self._num_top.get(row)
                if num_top is not None:
                    by_num_top.setdefault(num_top, []).append(index)
            device = self.batch.device
            self._groups = [
                (indices, num_top, to_device(indices, torch.int64, device)) for num_top, indices in by_num_top.items()
            ]
            self._rows = rows
        return self._groups
