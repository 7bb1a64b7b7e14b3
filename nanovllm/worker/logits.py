"""Changes to logits that few requests ask for: held-back and allowed ids, bad words, bias, penalties.

Owns: which rows ask for what, and the index tensors that this takes on the device. Invariant: rows that ask for
nothing are not touched, and a step without any that ask pays one lookup. It deliberately counts no tokens on the host,
which does not know those of the steps in flight: counts and endings are read from the rows on the device.

A row that asks is sampled from a float32 copy of its logits, since a penalty of 0.1 would be lost in bfloat16. The
logits themselves stay as the model made them, for logprobs. (One exception: -inf is exact in any dtype, so where
nothing but end ids are held back and nobody reads the logits afterwards, they are overwritten.) All of it runs outside
the graphs: such a step replays the model's graph and samples eagerly. The order is vLLM's: ids ruled out, bias,
repetition penalty, frequency and presence penalty; then temperature and filters as in any row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from nanovllm.layers.sampler import Sampler
from nanovllm.messages import NewRow, SchedulerOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.worker.persistent_batch import PersistentBatch

PIECE_ELEMENTS = 1 << 23  # logits, or token ids, worked on at once: bounds the workspace to about 100 MB
NEVER = float("-inf")


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor of host values, enqueued: a copy from memory that is not pinned would wait for the device."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def rule_out(x: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Set x[rows, token_ids] to minus infinity, in place.

    With a value that lies on the device: assigning a Python number would copy it there and wait.
    """
    x.index_put_((rows, token_ids), torch.full((), NEVER, dtype=x.dtype, device=x.device))


class Rules:
    """What one SamplingParams asks of logits; rows with the same one share it."""

    def __init__(self, new: NewRow, vocab_size: int, device: torch.device) -> None:
        params = new.sampling_params
        self.params = params  # kept alive: its id() finds these rules
        self.biases = list((params.logit_bias or {}).items())
        self.bad_word_ids = new.bad_word_ids
        self.penalties: tuple[float, float, float] | None = None
        if _has_penalties(params):
            self.penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.forbidden: Tensor | None = None  # bool [V]
        if params.allowed_token_ids is not None:
            forbidden = np.ones(vocab_size, dtype=bool)
            forbidden[np.array(params.allowed_token_ids)] = False
            self.forbidden = to_device(forbidden, torch.bool, device)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _has_rules(new: NewRow) -> bool:
    params = new.sampling_params
    return bool(_has_penalties(params) or params.logit_bias or new.bad_word_ids or params.allowed_token_ids is not None)


@dataclass(slots=True)
class RowRules:
    """A row that asks for something."""

    rules: Rules | None
    num_tokens: int  # that it has when it next samples
    min_length: int  # tokens below which end_ids are held back; the prompt counts
    end_ids: tuple[int, ...]
    wants_logprobs: bool


@dataclass(slots=True)
class BadWords:
    """Token sequences of some rows, w in all."""

    row: Tensor  # int64 [w], in the piece
    prefix: Tensor  # int64 [w, P], the tokens before the last, flush right; -1: any
    length: Tensor  # int64 [w], of the prefix
    last: Tensor  # int64 [w]

    @classmethod
    def of(cls, words: list[tuple[int, tuple[int, ...]]], device: torch.device) -> BadWords:
        longest = max(len(ids) for _, ids in words) - 1
        prefix = np.full((len(words), longest), -1)
        for index, (_, ids) in enumerate(words):
            prefix[index, longest - len(ids) + 1 :] = ids[:-1]
        columns = [[row for row, _ in words], [len(ids) - 1 for _, ids in words], [ids[-1] for _, ids in words]]
        row, length, last = to_device(columns, torch.int64, device)
        return cls(row, to_device(prefix, torch.int64, device), length, last)

    def apply(self, x: Tensor, rows: Tensor, batch: PersistentBatch, vocab_size: int) -> None:
        """Rule out the last token of each word whose others end the row's output."""
        rows = rows[self.row]  # [w]
        num_tokens = batch.num_tokens[rows].long()
        positions = num_tokens[:, None] + torch.arange(-self.prefix.shape[1], 0, device=x.device)  # [w, P]
        tokens = batch.token_ids[rows[:, None], positions.clamp(min=0)]
        matches = ((tokens == self.prefix) | (self.prefix < 0)).all(dim=1)
        matches &= num_tokens - self.length >= batch.num_prompt_tokens[rows]
        rule_out(x, self.row, torch.where(matches, self.last, vocab_size))


@dataclass(slots=True)
class Penalties:
    """Penalties of some rows, m in all."""

    row: Tensor  # int64 [m], in the piece
    values: Tensor  # float32 [3, m, 1]: repetition, frequency, presence
    num_tokens: int  # that the longest row has in the first step

    @classmethod
    def of(cls, rows: list[tuple[int, RowRules]], device: torch.device) -> Penalties:
        values = [state.rules.penalties for _, state in rows if state.rules is not None]
        return cls(
            to_device([row for row, _ in rows], torch.int64, device),
            to_device(values, torch.float32, device).T[:, :, None],
            max(state.num_tokens for _, state in rows),
        )

    def apply(self, x: Tensor, rows: Tensor, batch: PersistentBatch, vocab_size: int, num_steps: int) -> None:
        """Change the logits of the tokens that the rows hold; those that occur twice are written twice, alike."""
        rows = rows[self.row]
        num_tokens = min(self.num_tokens + num_steps, batch.token_ids.shape[1])
        tokens = batch.token_ids[:, :num_tokens][rows].long()  # [m, L]
        positions = torch.arange(num_tokens, device=x.device)
        is_there = (positions < batch.num_tokens[rows, None]) & (tokens >= 0)
        is_output = is_there & (positions >= batch.num_prompt_tokens[rows, None])
        tokens = torch.where(is_there, tokens, vocab_size)  # the others fall into the column behind the vocabulary
        counts = torch.zeros(len(rows), x.shape[1], device=x.device)
        counts = counts.scatter_add_(1, tokens, is_output.float()).gather(1, tokens)  # [m, L], of the output
        repetition, frequency, presence = self.values
        value = x[self.row[:, None], tokens]
        value = torch.where(value > 0, value / repetition, value * repetition)
        x[self.row[:, None], tokens] = value - frequency * counts - presence * (counts > 0)


@dataclass(slots=True)
class Piece:
    """Rows that are worked on together, n in all; ids in `vocab_size` and behind are a column that nobody reads."""

    index: Tensor  # int64 [n], into the step's logits
    held: Tensor | None = None  # int64 [2, e]: row in the piece, id ruled out
    bias: tuple[Tensor, Tensor] | None = None  # int64 [2, e] likewise, float32 [e]
    forbidden: tuple[Tensor, Tensor] | None = None  # bool [u, V]; int64 [n], which of them
    words: BadWords | None = None
    penalties: Penalties | None = None

    @classmethod
    def of(cls, rows: list[tuple[int, RowRules]], device: torch.device) -> Piece:
        piece = cls(to_device([index for index, _ in rows], torch.int64, device))
        states = [state for _, state in rows]
        held = [(i, id_) for i, row in enumerate(states) if row.num_tokens < row.min_length for id_ in row.end_ids]
        if held:
            piece.held = to_device(list(zip(*held, strict=True)), torch.int64, device)
        rules = [(i, state.rules) for i, state in enumerate(states) if state.rules is not None]
        biases = [(i, id_, bias) for i, rule in rules for id_, bias in rule.biases]
        if biases:
            where = [[i for i, _, _ in biases], [id_ for _, id_, _ in biases]]
            values = to_device([bias for _, _, bias in biases], torch.float32, device)
            piece.bias = to_device(where, torch.int64, device), values
        masks = {id(rule): rule.forbidden for _, rule in rules if rule.forbidden is not None}
        if masks:
            numbers = {key: number for number, key in enumerate(masks, start=1)}  # 0: nothing is forbidden
            which = [numbers.get(id(state.rules), 0) for state in states]
            tensors = [mask for mask in masks.values() if mask is not None]
            table = torch.stack([torch.zeros_like(tensors[0]), *tensors])
            piece.forbidden = table, to_device(which, torch.int64, device)
        words = [(i, ids) for i, rule in rules for ids in rule.bad_word_ids]
        if words:
            piece.words = BadWords.of(words, device)
        penal = [(i, state) for i, state in enumerate(states) if state.rules is not None and state.rules.penalties]
        if penal:
            piece.penalties = Penalties.of(penal, device)
        return piece

    def apply(self, logits: Tensor, rows: Tensor, batch: PersistentBatch, num_steps: int) -> Tensor:
        """The rows' changed logits, float32 [n, V], of `logits` [S, V]; `rows` int64 [n] are theirs."""
        vocab_size = logits.shape[1]
        width = (vocab_size // 16 + 1) * 16  # at least one column behind the vocabulary; rows aligned for the sampler
        x = torch.empty(len(rows), width, dtype=torch.float32, device=logits.device)
        real = x[:, :vocab_size]
        real.copy_(logits[self.index])
        if self.forbidden is not None:
            table, which = self.forbidden
            real.masked_fill_(table[which], NEVER)
        if self.words is not None:
            self.words.apply(x, rows, batch, vocab_size)
        if self.held is not None:
            rule_out(x, self.held[0], self.held[1])
        if self.bias is not None:
            (row, token_ids), values = self.bias
            x[row, token_ids] += values
        if self.penalties is not None:
            self.penalties.apply(x, rows, batch, vocab_size, num_steps)
        return real


@dataclass(slots=True)
class StepEdits:
    """What the sampling rows of a plan ask for, as tensors; it serves the following steps too while they stay alike."""

    rows: list[int]  # that sample
    states: list[RowRules]  # of those among them that ask
    max_steps: int = 1 << 62  # then some row's end ids are no longer held back
    num_steps: int = 0  # that it has served
    held: Tensor | None = None  # int64 [2, e]: index into the logits, id ruled out in place
    pieces: list[Piece] = field(default_factory=list)
    is_whole: bool = False  # the pieces hold every sampling row

    def sample(self, logits: Tensor, rows: Tensor, sampler: Sampler, batch: PersistentBatch) -> Tensor:
        """Sampled ids int32 [S], as `sampler`, of `logits` [S, V] of `rows` int32 [S], graph padding included."""
        if self.held is not None:
            rule_out(logits, self.held[0], self.held[1])
        if not self.pieces:
            return sampler(logits, rows, batch)
        # a clone, as the sampler's buffer is used again below
        sampled = torch.zeros_like(rows) if self.is_whole else sampler(logits, rows, batch).clone()
        for piece in self.pieces:
            piece_rows = rows[piece.index]  # [n]
            changed = piece.apply(logits, piece_rows.long(), batch, self.num_steps - 1)
            sampled.index_copy_(0, piece.index, sampler(changed, piece_rows, batch))
        return sampled


class LogitsEdits:
    """Keeps what rows ask for and turns it into the edits of a step."""

    def __init__(self, batch: PersistentBatch, vocab_size: int) -> None:
        self.batch = batch
        self.vocab_size = vocab_size
        self._rows: dict[int, RowRules] = {}
        self._rules: WeakValueDictionary[int, Rules] = WeakValueDictionary()  # by id() of the SamplingParams
        self._edits: StepEdits | None = None

    def reset(self) -> None:
        self._rows.clear()
        self._edits = None

    def apply_plan(self, plan: SchedulerOutput) -> None:
        """Take over the rows that a plan brings."""
        if plan.new_rows:
            self._end_edits()
        for new in plan.new_rows:
            self._rows.pop(new.row, None)
            params = new.sampling_params
            min_length = new.num_prompt_tokens + params.min_tokens if new.end_ids else 0
            rules = self._find_rules(new) if _has_rules(new) else None
            num_tokens = len(new.token_ids)
            if rules is not None or num_tokens < min_length:
                wants_logprobs = params.logprobs is not None
                self._rows[new.row] = RowRules(rules, num_tokens, min_length, new.end_ids, wants_logprobs)

    def of_step(self, plan: SchedulerOutput) -> StepEdits | None:
        """The edits of a plan that is about to sample, to be called once for each; None: nobody asks for any."""
        if not self._rows:
            return None
        rows = plan.rows[: plan.num_sampled]
        edits = self._edits
        if edits is None or edits.num_steps >= edits.max_steps or edits.rows != rows:
            self._end_edits()
            edits = self._edits = self._build(rows)
        edits.num_steps += 1
        return edits if edits.states else None

    def _find_rules(self, new: NewRow) -> Rules:
        rules = self._rules.get(id(new.sampling_params))
        if rules is None:
            rules = self._rules[id(new.sampling_params)] = Rules(new, self.vocab_size, self.batch.device)
        return rules

    def _end_edits(self) -> None:
        """Every row of a step got one token in each step that the edits served."""
        edits, self._edits = self._edits, None
        if edits is not None:
            for state in edits.states:
                state.num_tokens += edits.num_steps

    def _build(self, rows: Sequence[int]) -> StepEdits:
        device = self.batch.device
        edits = StepEdits(list(rows), [])
        held: list[tuple[int, int]] = []
        copied: list[tuple[int, RowRules]] = []
        longest = self.vocab_size
        for index, row in enumerate(rows):
            state = self._rows.get(row)
            if state is None:
                continue
            num_held = state.min_length - state.num_tokens
            if num_held <= 0 and state.rules is None:
                del self._rows[row]
                continue
            edits.states.append(state)
            if num_held > 0:
                edits.max_steps = min(edits.max_steps, num_held)
            if state.rules is None and not state.wants_logprobs:
                held += [(index, token_id) for token_id in state.end_ids]
            else:
                copied.append((index, state))
                longest = max(longest, state.num_tokens)
        if held:
            edits.held = to_device(list(zip(*held, strict=True)), torch.int64, device)
        size = max(1, PIECE_ELEMENTS // longest)
        edits.pieces = [Piece.of(copied[start : start + size], device) for start in range(0, len(copied), size)]
        edits.is_whole = len(copied) == len(rows)
        return edits
