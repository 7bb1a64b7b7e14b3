"""The Triton kernel of a single row's short context, behind `paged_decode.py`.

Owns: one program's work: one query head and one block of keys. Invariant: whoever arrives last of a head's programs
merges all blocks in their order, so the result does not depend on who that was. It deliberately has no loop over
blocks, and uses no tensor cores: their operands would lie in shared memory.

With one row nothing is bound by bandwidth: the time is a chain of loads that wait for each other (length, table, keys),
the arithmetic, and the merge. So the keys and values of a program are in registers before the wait of dependent launch:
they were stored in earlier steps, and come while the projection before still runs. And since the programs need next to
no shared memory, they and the products around them share multiprocessors, which tiles in shared memory would keep them
from (docs/performance.md). Each query head reads its keys itself, from L2: the price of it, paid by long contexts.
"""

from __future__ import annotations

from nanovllm.kernels._triton import tl, triton
from nanovllm.kernels.paged_decode_kernel import load_tile, merge_partials, norm_rope, take_new


@triton.jit(do_not_specialize=["num_blocks", "window", "eps", "stride_table"])
def row_decode_kernel(
    out_ptr,  # [B, H, D]
    partial_ptr,  # float32 [B, H, num_blocks, D]
    lse_ptr,  # float32 [B, H, num_blocks]
    arrivals_ptr,  # int32 [B, H], zero before and after
    q_ptr,  # [B, H, D]
    new_k_ptr,  # [B, KH, D]; as far apart as the heads and rows of q
    new_v_ptr,
    q_weight_ptr,  # [D]
    k_weight_ptr,
    cos_sin_ptr,  # float32 [positions, D]
    slots_ptr,  # int64 [B]
    k_ptr,  # [num_blocks, PAGE, KH, D]
    v_ptr,
    seq_lens_ptr,  # int32 [B]
    block_table_ptr,  # int32 [B, max_blocks]
    scale_log2,
    eps,
    num_blocks,  # of BLOCK_N keys, enough for the longest sequence
    window,
    stride_out_seq,
    stride_q_seq,
    stride_q_head,
    stride_k_page,
    stride_k_token,
    stride_k_head,
    stride_v_page,
    stride_v_token,
    stride_v_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    seq = tl.program_id(1)
    kv_head = head // GROUP
    seq_len = tl.load(seq_lens_ptr + seq)
    num_keys = seq_len - 1  # in the cache
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0) // BLOCK_N
    num_used = tl.maximum((num_keys + BLOCK_N - 1) // BLOCK_N - first, 1)
    index = tl.program_id(2)
    if index >= num_used:
        if USE_PDL:
            tl.extra.cuda.gdc_wait()
        return

    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM_PAD)
    is_dim = offs_d < HEAD_DIM
    block = first + index
    k_ptr += kv_head * stride_k_head
    v_ptr += kv_head * stride_v_head
    k, v = load_tile(
        block, num_keys, k_ptr, v_ptr, block_table_ptr + seq.to(tl.int64) * stride_table, offs_n, offs_d,
        stride_k_page, stride_k_token, stride_v_page, stride_v_token, PAGE, BLOCK_N, HEAD_DIM, HEAD_DIM_PAD,
    )  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_wait()

    cos_sin_ptr += num_keys.to(tl.int64) * HEAD_DIM
    q_ptrs = q_ptr + seq.to(tl.int64) * stride_q_seq + head * stride_q_head + tl.arange(0, 1)[:, None]
    q = norm_rope(q_ptrs, q_weight_ptr, eps, cos_sin_ptr, offs_d, is_dim[None, :], HEAD_DIM, HAS_NORM)
    q = tl.sum(q.to(tl.float32), 0) * scale_log2  # [D]: it has one row
    keys = block * BLOCK_N + offs_n
    visible = keys < num_keys
    if HAS_WINDOW:
        visible = visible & (keys >= seq_len - window)
    scores = tl.where(visible, tl.sum(k.to(tl.float32) * q[None, :], 1), -1e30)  # [BLOCK_N]
    row_max = tl.max(scores, 0)
    probs = tl.exp2(scores - row_max)
    row_sum = tl.sum(probs, 0)
    acc = tl.sum(v.to(tl.float32) * probs[:, None], 0)  # [D]
    if index == num_used - 1:  # the new key and value: into the cache, and straight into the result
        new_k, new_v = take_new(
            seq, kv_head, head % GROUP == 0, new_k_ptr, new_v_ptr, k_weight_ptr, eps, cos_sin_ptr, slots_ptr, k_ptr,
            v_ptr, offs_d, stride_q_seq, stride_q_head, stride_k_page, stride_k_token, stride_v_page, stride_v_token,
            PAGE, HEAD_DIM, HAS_NORM,
        )  # fmt: skip
        score = tl.sum(q * tl.sum(new_k.to(tl.float32), 0), 0)
        new_max = tl.maximum(row_max, score)
        rescale, prob = tl.exp2(row_max - new_max), tl.exp2(score - new_max)
        row_sum = row_sum * rescale + prob
        acc = acc * rescale + new_v.to(tl.float32) * prob
        row_max = new_max

    out = acc / row_sum
    out_head_ptr = out_ptr + seq.to(tl.int64) * stride_out_seq + head * HEAD_DIM + offs_d
    if num_used == 1:
        tl.store(out_head_ptr, out.to(out_ptr.dtype.element_ty), mask=is_dim)
    else:
        item = seq.to(tl.int64) * tl.num_programs(0) + head
        row = item * num_blocks + index
        tl.store(lse_ptr + row, row_max + tl.log2(row_sum))
        tl.store(partial_ptr + row * HEAD_DIM + offs_d, out, mask=is_dim)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        if tl.atomic_add(arrivals_ptr + item, 1, sem="acq_rel") == num_used - 1:
            tl.store(arrivals_ptr + item, 0)
            merged = merge_partials(
                partial_ptr, lse_ptr, item * num_blocks, num_used, 1, HEAD_DIM, HEAD_DIM_PAD, MERGE_SPLITS
            )
            tl.store(out_head_ptr, merged.to(out_ptr.dtype.element_ty), mask=is_dim)
