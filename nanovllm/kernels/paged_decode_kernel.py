"""The Triton kernel behind `paged_decode.py`.

Owns: one program's work: an item, which is one KV head of one sequence, or a split of it. Invariant: the last program
of an item to arrive merges all splits in their order, so the result does not depend on who that was. It deliberately
chooses nothing: tiles and splits are arguments.
"""

from __future__ import annotations

from nanovllm.kernels._triton import tl, triton


@triton.jit
def norm_rope(
    x_ptrs, weight_ptr, eps, cos_sin_ptr, offs_d, mask, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr
):  # fmt: skip
    """Heads at x_ptrs [R, 1], normalised, rotated and rounded as `rope.py` does it: [R, D]."""
    HALF: tl.constexpr = HEAD_DIM // 2
    is_first = offs_d < HALF
    other_d = tl.where(is_first, offs_d + HALF, offs_d - HALF)
    x = tl.load(x_ptrs + offs_d[None, :], mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    other = tl.load(x_ptrs + other_d[None, :], mask=mask, other=0.0).to(tl.float32)
    is_dim = offs_d < HEAD_DIM
    if HAS_NORM:
        weight = tl.load(weight_ptr + offs_d, mask=is_dim, other=0.0).to(tl.float32)
        other_weight = tl.load(weight_ptr + other_d, mask=is_dim, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x = ((x * scale).to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32)
        other = ((other * scale).to(dtype).to(tl.float32) * other_weight[None, :]).to(dtype).to(tl.float32)
    column = tl.where(is_first, offs_d, other_d)
    cos = tl.load(cos_sin_ptr + column, mask=is_dim, other=0.0)
    sin = tl.load(cos_sin_ptr + HALF + column, mask=is_dim, other=0.0)
    sin = tl.where(is_first, -sin, sin)
    return (x * cos[None, :] + other * sin[None, :]).to(dtype)


@triton.jit
def load_tile(
    block, num_keys, k_ptr, v_ptr, table_ptr, offs_n, offs_d, stride_k_page, stride_k_token, stride_v_page,
    stride_v_token, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Keys and values of a block of BLOCK_N cached tokens of one KV head: [BLOCK_N, D] each."""
    keys = block * BLOCK_N + offs_n
    in_cache = keys < num_keys
    if PAGE % BLOCK_N == 0:
        page = tl.load(table_ptr + block * BLOCK_N // PAGE).to(tl.int64)
        slots = block * BLOCK_N % PAGE + offs_n
        k_tile_ptr = k_ptr + page * stride_k_page + slots[:, None] * stride_k_token + offs_d[None, :]
        v_tile_ptr = v_ptr + page * stride_v_page + slots[:, None] * stride_v_token + offs_d[None, :]
    else:  # the keys of a block lie in several pages; entries behind the last one are not to be trusted
        pages = tl.load(table_ptr + keys // PAGE, mask=in_cache, other=0).to(tl.int64)
        slots = keys % PAGE
        k_tile_ptr = k_ptr + (pages * stride_k_page + slots * stride_k_token)[:, None] + offs_d[None, :]
        v_tile_ptr = v_ptr + (pages * stride_v_page + slots * stride_v_token)[:, None] + offs_d[None, :]
    # Masked, so that the rest of a page costs no traffic and its NaNs, if it has any, meet no zero probability.
    mask = in_cache[:, None] if HEAD_DIM == HEAD_DIM_PAD else in_cache[:, None] & (offs_d < HEAD_DIM)[None, :]
    return tl.load(k_tile_ptr, mask=mask, other=0.0), tl.load(v_tile_ptr, mask=mask, other=0.0)


@triton.jit
def take_new(
    seq, kv_head, stores, new_k_ptr, new_v_ptr, k_weight_ptr, eps, cos_sin_ptr, slots_ptr, k_ptr, v_ptr, offs_d,
    stride_q_seq, stride_q_head, stride_k_page, stride_k_token, stride_v_page, stride_v_token, PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """The new key of a sequence and KV head, normalised and rotated, [1, D], and its value [D]; into the cache where it
    `stores`. k_ptr, v_ptr: of that head."""
    is_dim = offs_d < HEAD_DIM
    one = tl.arange(0, 1)[:, None]
    new_offset = seq.to(tl.int64) * stride_q_seq + kv_head * stride_q_head
    new_k_ptrs = new_k_ptr + new_offset + one
    new_k = norm_rope(new_k_ptrs, k_weight_ptr, eps, cos_sin_ptr, offs_d, is_dim[None, :], HEAD_DIM, HAS_NORM)
    new_v = tl.load(new_v_ptr + new_offset + offs_d, mask=is_dim, other=0.0)
    if stores:
        slot = tl.load(slots_ptr + seq)
        page, token = slot // PAGE, slot % PAGE
        k_row_ptr = k_ptr + page * stride_k_page + token * stride_k_token
        v_row_ptr = v_ptr + page * stride_v_page + token * stride_v_token
        tl.store(k_row_ptr + one + offs_d[None, :], new_k, mask=is_dim[None, :])
        tl.store(v_row_ptr + offs_d, new_v, mask=is_dim)
    return new_k, new_v


@triton.jit(do_not_specialize=["num_splits", "window", "eps", "stride_table"])
def paged_decode_kernel(
    out_ptr,  # [B, H, D]
    partial_ptr,  # float32 [B, KH, num_splits, GROUP, D], with SPLIT only, like the next two
    lse_ptr,  # float32 [B, KH, num_splits, GROUP]
    arrivals_ptr,  # int32 [B, KH], zero before and after
    q_ptr,  # [B, H, D]
    new_k_ptr,  # [B, KH, D], with HAS_ROPE only, like the next five; as far apart as the heads and rows of q
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
    num_splits,
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
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    seq_len = tl.load(seq_lens_ptr + seq)
    num_keys = seq_len - 1 if HAS_ROPE else seq_len  # in the cache
    first = 0  # of the blocks of BLOCK_N cached keys that the last token sees
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0) // BLOCK_N
    end = tl.maximum((num_keys + BLOCK_N - 1) // BLOCK_N, first)
    num_used = 1
    if SPLIT:
        per_split = tl.maximum((end - first + num_splits - 1) // num_splits, 1)
        num_used = tl.maximum((end - first + per_split - 1) // per_split, 1)
        if split >= num_used:
            return
        first += split * per_split
        end = tl.minimum(first + per_split, end)

    offs_g = tl.arange(0, GROUP_PAD)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM_PAD)
    is_head = offs_g < GROUP
    is_dim = offs_d < HEAD_DIM
    out_mask = is_head[:, None] & is_dim[None, :]
    row_max = tl.full([GROUP_PAD], -1e30, tl.float32)
    row_sum = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_DIM_PAD], tl.float32)
    q_ptrs = q_ptr + seq.to(tl.int64) * stride_q_seq + (kv_head * GROUP + offs_g)[:, None] * stride_q_head
    if HAS_ROPE:
        cos_sin_ptr += num_keys.to(tl.int64) * HEAD_DIM
        q = norm_rope(q_ptrs, q_weight_ptr, eps, cos_sin_ptr, offs_d, out_mask, HEAD_DIM, HAS_NORM)
        if (not SPLIT) or (
            split == num_used - 1
        ):  # the new key and value: into the cache, and straight into the result
            new_k, new_v = take_new(
                seq, kv_head, True, new_k_ptr, new_v_ptr, k_weight_ptr, eps, cos_sin_ptr, slots_ptr,
                k_ptr + kv_head * stride_k_head, v_ptr + kv_head * stride_v_head, offs_d, stride_q_seq, stride_q_head,
                stride_k_page, stride_k_token, stride_v_page, stride_v_token, PAGE, HEAD_DIM, HAS_NORM,
            )  # fmt: skip
            row_max = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale_log2
            row_sum += 1.0
            acc += new_v.to(tl.float32)[None, :]
    else:
        q = tl.load(q_ptrs + offs_d[None, :], mask=out_mask, other=0.0)  # [GROUP_PAD, D]

    table_ptr = block_table_ptr + seq.to(tl.int64) * stride_table
    k_ptr += kv_head * stride_k_head
    v_ptr += kv_head * stride_v_head
    for block in tl.range(first, end):
        k, v = load_tile(
            block, num_keys, k_ptr, v_ptr, table_ptr, offs_n, offs_d, stride_k_page, stride_k_token, stride_v_page,
            stride_v_token, PAGE, BLOCK_N, HEAD_DIM, HEAD_DIM_PAD,
        )  # fmt: skip
        keys = block * BLOCK_N + offs_n
        visible = keys < num_keys
        if HAS_WINDOW:
            visible = visible & (keys >= seq_len - window)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2  # [GROUP_PAD, BLOCK_N]
        scores = tl.where(visible[None, :], scores, -1e30)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        probs = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max

    out = acc / row_sum[:, None]
    out_row_ptr = out_ptr + seq.to(tl.int64) * stride_out_seq + kv_head * GROUP * HEAD_DIM
    if num_used == 1:
        tl.store(out_row_ptr + offs_g[:, None] * HEAD_DIM + offs_d[None, :], out.to(out_ptr.dtype.element_ty), out_mask)
    elif SPLIT:
        item = seq.to(tl.int64) * num_kv_heads + kv_head
        row = (item * num_splits + split) * GROUP + offs_g
        tl.store(lse_ptr + row, row_max + tl.log2(row_sum), mask=is_head)
        tl.store(partial_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], out, mask=out_mask)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        arrived = tl.atomic_add(arrivals_ptr + item, 1, sem="acq_rel")
        if arrived == num_used - 1:
            tl.store(arrivals_ptr + item, 0)
            for head in range(GROUP):  # not unrolled: that would cost registers, so programs on an SM
                first_row = item * num_splits * GROUP + head
                merged = merge_partials(
                    partial_ptr, lse_ptr, first_row, num_used, GROUP, HEAD_DIM, HEAD_DIM_PAD, MERGE_SPLITS
                )
                out_head_ptr = out_row_ptr + head * HEAD_DIM + offs_d
                tl.store(out_head_ptr, merged.to(out_ptr.dtype.element_ty), mask=is_dim)


@triton.jit
def merge_partials(
    partial_ptr,
    lse_ptr,
    first_row,
    num_used,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
):
    """One head's output [D] from its partial results; split s lies in row first_row + s * GROUP.

    Other SMs wrote them: they are read from L2, for L1 may hold these lines from before.
    """
    offs_s = tl.arange(0, MERGE_SPLITS)
    offs_d = tl.arange(0, HEAD_DIM_PAD)
    is_dim = offs_d < HEAD_DIM
    lse_max = -1e30
    total = 0.0
    acc = tl.zeros([HEAD_DIM_PAD], tl.float32)
    for start in tl.range(0, num_used, MERGE_SPLITS):
        used = start + offs_s < num_used
        rows = first_row + (start + offs_s) * GROUP
        lse = tl.load(lse_ptr + rows, mask=used, other=-1e30, cache_modifier=".cg")  # [MERGE_SPLITS]
        part = tl.load(
            partial_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :],
            mask=used[:, None] & is_dim[None, :],
            other=0.0,
            cache_modifier=".cg",
        )  # [MERGE_SPLITS, D]
        new_max = tl.maximum(lse_max, tl.max(lse, 0))
        weights = tl.exp2(lse - new_max)
        rescale = tl.exp2(lse_max - new_max)
        acc = acc * rescale + tl.sum(part * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        lse_max = new_max
    return acc / total
