"""Changes to logits that few requests ask for.

Owns: which rows still hold back their end ids (min_tokens). Invariant: a step none of whose rows asks for anything
pays one dict lookup. It deliberately runs outside the graphs: such a step replays the model's graph and samples
eagerly.
"""

from __future__ import annotations

import torch

from nanovllm.messages import SchedulerOutput


class LogitsMasks:
    """Per row: how many more sampled tokens must not be an end id, and which ids those are.

    The count is of submitted steps, which is exact: a row samples one token in each step that it samples in.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rows: dict[int, tuple[int, tuple[int, ...]]] = {}

    def reset(self) -> None:
        self._rows.clear()

    def apply_plan(self, plan: SchedulerOutput) -> None:
        """Take over the rows that a plan brings."""
        for new in plan.new_rows:
            self._rows.pop(new.row, None)
            remaining = new.sampling_params.min_tokens - (len(new.token_ids) - new.num_prompt_tokens)
            if remaining > 0 and new.end_ids:
                self._rows[new.row] = (remaining, new.end_ids)

    def mask(self, logits: torch.Tensor, plan: SchedulerOutput) -> bool:
        """Set held-back ids to -inf in logits [>= num_sampled, V], in place; False where there was nothing to do."""
        if not self._rows:
            return False
        indices: list[int] = []
        ids: list[int] = []
        for index, row in enumerate(plan.rows[: plan.num_sampled]):
            entry = self._rows.get(row)
            if entry is None:
                continue
            remaining, end_ids = entry
            indices += [index] * len(end_ids)
            ids += end_ids
            if remaining > 1:
                self._rows[row] = (remaining - 1, end_ids)
            else:
                del self._rows[row]
        if not indices:
            return False
        index_pairs = torch.tensor([indices, ids], device=self.device)
        logits[index_pairs[0], index_pairs[1]] = float("-inf")
        return True
