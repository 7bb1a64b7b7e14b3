"""The inputs of one step, written by one kernel from the rows.

Owns: the static buffers that the model reads (ids, positions, slots, lengths, block table). Invariant: their
addresses never change, so a captured graph reads whatever the prepare kernel wrote last. It deliberately computes
nothing on the host but the sizes that shape a launch.
"""

from __future__ import annotations

import torch

from nanovllm.attention import AttentionMetadata
from nanovllm.kernels.prepare import prepare_inputs
from nanovllm.worker.persistent_batch import PersistentBatch


class InputBatch:
    """Static input buffers for up to `max_num_tokens` query tokens of up to `max_num_seqs` rows."""

    def __init__(self, batch: PersistentBatch, max_num_tokens: int, max_num_seqs: int, block_size: int) -> None:
        device = batch.device
        self.batch = batch
        self.block_size = block_size
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self.slot_mapping = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(
            max_num_seqs, batch.block_tables.shape[1], dtype=torch.int32, device=device
        )  # [B, M]
        self.decode_cu_seqlens_q = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)

    def prepare(
        self,
        num_rows: int,
        num_tokens: int,
        num_decodes: int,
        max_query_len: int,
        max_seq_len: int,
        has_cached_prefix: bool,
    ) -> AttentionMetadata:
        """Write this step's inputs and describe them to attention.

        Args:
            num_rows: rows of the step, padding included; num_decodes of them, the first, have one token each.
            num_tokens: query tokens, padding included.
            max_query_len: the longest chunk.
            max_seq_len: upper bound of any row's keys; frozen where a graph is captured.
            has_cached_prefix: some chunk starts behind token 0.
        """
        batch = self.batch
        rows = batch.step_rows[:num_rows]
        is_decode = num_decodes == num_rows
        cu_seqlens_q = (self.decode_cu_seqlens_q if is_decode else batch.step_cu_seqlens_q)[: num_rows + 1]
        prepare_inputs(
            rows,
            cu_seqlens_q,
            batch.token_ids,
            batch.num_computed,
            batch.block_tables,
            self.block_size,
            max_query_len,
            self.input_ids,
            self.positions,
            self.slot_mapping,
            self.seq_lens,
            self.block_table,
        )
        return AttentionMetadata(
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=self.seq_lens[:num_rows],
            block_table=self.block_table[:num_rows],
            slot_mapping=self.slot_mapping[:num_tokens],
            max_seqlen_q=max_query_len,
            max_seqlen_k=max_seq_len,
            num_decode_tokens=num_decodes,
            has_cached_prefix=has_cached_prefix,
        )
