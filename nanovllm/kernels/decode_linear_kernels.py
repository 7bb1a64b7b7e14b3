"""The Triton kernels behind `decode_linear.py`.

Owns: the products of one row (on CUDA cores, weights in registers) and of several (on tensor cores), each with three
ends: scaled by 1 / rms; that and SiLU(gate) * up; added to the residual. One row has a fourth, "plain". Invariant: with
dependent launch every program lets its successor start at once, asks for weights, and then waits before it reads or
writes anything else, so the end of a kernel implies the end of all before it. They deliberately choose nothing: tiles
and splits are arguments.

The programs of one tile whose K is split each store their part; the one that arrives last, by an atomic count, sums all
parts in the order of the splits, so the sum does not depend on who that was.
"""

from __future__ import annotations

from nanovllm.kernels._triton import tl, triton


@triton.jit
def _prefetch_rows(row_ptrs, k_start, k_end, LINES: tl.constexpr):
    """Ask L2 for [k_start, k_end) of each row, a line of 128 bytes (64 values) a time."""
    for k in range(k_start, k_end, LINES * 64):
        columns = tl.minimum(k + tl.arange(0, LINES) * 64, k_end - 1)
        addresses = (row_ptrs[:, None] + columns[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _silu_product(gate, up, dtype: tl.constexpr):
    """As `activation.py`: the products round, SiLU is float32 and rounds, then times up."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


@triton.jit
def _store_residual(
    acc, residual, residual_ptrs, norm_weight, scaled_ptrs, mask, sum_squares_ptrs, row_mask, INPUT_SCALE: tl.constexpr
):  # fmt: skip
    """residual += acc, and what the next norm wants to know of it. [rows, columns] tiles, but sum_squares [rows]."""
    total = (acc + residual.to(tl.float32)).to(residual.dtype)
    tl.store(residual_ptrs, total, mask=mask)
    total = total.to(tl.float32)
    tl.store(scaled_ptrs, (total * norm_weight * INPUT_SCALE).to(residual.dtype), mask=mask)
    tl.store(sum_squares_ptrs, tl.sum(tl.where(mask, total * total, 0.0), axis=1), mask=row_mask)


@triton.jit
def _vector_dot(x_ptr, weight, k, K: tl.constexpr, MASKED: tl.constexpr):
    """Sums over groups of 8 values, which lie in one thread: [BLOCK_N, BLOCK_K / 8]."""
    x = tl.load(x_ptr + k, mask=k < K, other=0.0) if MASKED else tl.load(x_ptr + k)
    product = weight.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(tl.reshape(product, [product.shape[0], product.shape[1] // 8, 8]), axis=2)


@triton.jit
def vector_kernel(
    x_ptr,  # [K]
    weight_ptr,  # [N, K]; KIND norm_silu: [2 * N, K]
    bias_ptr,
    out_ptr,  # [N]; KIND residual: the residual
    norm_weight_ptr,  # [N], KIND residual: the weight of the next norm
    scaled_ptr,  # [N], KIND residual
    sum_squares_ptr,  # float32 [num_partials]: read, or written by KIND residual
    N,
    num_partials,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTIALS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    MASKED: tl.constexpr = K % BLOCK_K != 0
    SILU: tl.constexpr = KIND == "norm_silu"
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_range = columns < N
    safe = tl.minimum(columns, N - 1)  # what is computed twice is not stored twice
    k = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + safe.to(tl.int64)[:, None] * K + k[None, :]
    up_ptrs = weight_ptrs
    if SILU:
        up_ptrs += N.to(tl.int64) * K
    # All the weights that fit are on their way before anything that an earlier kernel writes is read.
    w0 = tl.load(weight_ptrs, mask=(k < K)[None, :], other=0.0) if MASKED else tl.load(weight_ptrs)
    if SILU:
        u0 = tl.load(up_ptrs, mask=(k < K)[None, :], other=0.0) if MASKED else tl.load(up_ptrs)
    if (CHUNKS > 1) & (not SILU):
        mask1 = (k + BLOCK_K < K)[None, :]
        w1 = tl.load(weight_ptrs + BLOCK_K, mask=mask1, other=0.0) if MASKED else tl.load(weight_ptrs + BLOCK_K)
    if (CHUNKS > 2) & (not SILU):
        mask2 = (k + 2 * BLOCK_K < K)[None, :]
        w2 = tl.load(weight_ptrs + 2 * BLOCK_K, mask=mask2, other=0.0) if MASKED else tl.load(weight_ptrs + 2 * BLOCK_K)
    DONE: tl.constexpr = 1 if SILU else (CHUNKS if CHUNKS < 3 else 3)
    if KIND == "residual":
        norm_weight = tl.load(norm_weight_ptr + safe).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()

    if KIND == "residual":
        residual = tl.load(out_ptr + safe)
    elif KIND != "plain":
        parts = tl.arange(0, PARTIALS)
        squares = tl.load(sum_squares_ptr + parts, mask=parts < num_partials, other=0.0)
    acc = _vector_dot(x_ptr, w0, k, K, MASKED)
    if SILU:
        acc_up = _vector_dot(x_ptr, u0, k, K, MASKED)
    if DONE > 1:
        acc += _vector_dot(x_ptr, w1, k + BLOCK_K, K, MASKED)
    if DONE > 2:
        acc += _vector_dot(x_ptr, w2, k + 2 * BLOCK_K, K, MASKED)
    for start in range(DONE * BLOCK_K, K, BLOCK_K):
        mask = (k + start < K)[None, :]
        acc += _vector_dot(x_ptr, tl.load(weight_ptrs + start, mask=mask, other=0.0), k + start, K, MASKED)
        if SILU:
            acc_up += _vector_dot(x_ptr, tl.load(up_ptrs + start, mask=mask, other=0.0), k + start, K, MASKED)

    acc = tl.sum(acc, axis=1)
    if SILU:
        acc_up = tl.sum(acc_up, axis=1)
    if (KIND == "norm") | SILU:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps) / INPUT_SCALE
        acc *= scale
        if SILU:
            acc_up *= scale
    if HAS_BIAS:
        acc += tl.load(bias_ptr + safe).to(tl.float32)
        if SILU:
            acc_up += tl.load(bias_ptr + N + safe).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if KIND == "residual":
        _store_residual(
            acc[None, :], residual[None, :], (out_ptr + columns)[None, :], norm_weight[None, :],
            (scaled_ptr + columns)[None, :], in_range[None, :], sum_squares_ptr + tl.program_id(0) + tl.arange(0, 1),
            tl.full([1], 1, tl.int1), INPUT_SCALE,
        )  # fmt: skip
    else:
        if SILU:
            acc = _silu_product(acc, acc_up, dtype)
        tl.store(out_ptr + columns, acc.to(dtype), mask=in_range)


@triton.jit(do_not_specialize=["num_rows", "num_partials", "prefetch_k"])
def tile_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]; KIND norm_silu: N / 2 rows of gate, then as many of up
    bias_ptr,
    out_ptr,  # [M, N], norm_silu: [M, N / 2]; residual: the residual
    norm_weight_ptr,  # [N], KIND residual: the weight of the next norm
    scaled_ptr,  # [M, N], KIND residual
    sum_squares_ptr,  # float32 [M, num_partials]: read, or written by KIND residual
    partial_ptr,  # float32 [SPLITS, tiles, BLOCK_M, BLOCK_N]
    counter_ptr,  # int32 [tiles], zero; is left so
    x_desc,  # with USE_TMA, descriptors of x and weight
    weight_desc,
    num_rows,
    N,
    K,
    k_per_split,
    prefetch_k,
    num_partials,
    x_stride,
    out_stride,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    PARTIALS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    USE_PDL: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    SILU: tl.constexpr = KIND == "norm_silu"
    OUT_N: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    num_m_tiles = (num_rows + BLOCK_M - 1) // BLOCK_M
    tile = tl.program_id(0)
    m_tile = tile % num_m_tiles  # fastest: programs that run together read the same weights
    n_tile = tile // num_m_tiles
    k_start = tl.program_id(1) * k_per_split
    k_end = tl.minimum(k_start + k_per_split, K)

    n = tl.arange(0, BLOCK_N)
    if SILU:  # gate and up alternate, so that a pair lies in one thread
        weight_rows = (n % 2) * (N // 2) + tl.minimum(n_tile * OUT_N + n // 2, N // 2 - 1)
    else:
        weight_rows = tl.minimum(n_tile * BLOCK_N + n, N - 1)
    row_ptrs = weight_ptr + weight_rows.to(tl.int64) * K
    columns = n_tile * OUT_N + tl.arange(0, OUT_N)
    out_size = N // 2 if SILU else N
    safe_columns = tl.minimum(columns, out_size - 1)
    if KIND == "residual":
        norm_weight = tl.load(norm_weight_ptr + safe_columns).to(tl.float32)[None, :]
    if USE_PDL:
        if m_tile == 0:
            _prefetch_rows(row_ptrs, k_start, tl.minimum(k_start + prefetch_k, k_end), 16)
        tl.extra.cuda.gdc_wait()

    rows = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    safe_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    EARLY: tl.constexpr = BLOCK_M * BLOCK_N <= 128 * 64  # larger tiles have no registers left for it
    if (KIND == "residual") & EARLY:  # its way from L2 is as long as a step of the loop
        residual = tl.load(out_ptr + safe_rows[:, None] * out_stride + safe_columns[None, :])
    if KIND != "residual":
        parts = tl.arange(0, PARTIALS)
        squares = tl.load(
            sum_squares_ptr + safe_rows[:, None] * num_partials + parts[None, :],
            mask=(parts < num_partials)[None, :], other=0.0,
        )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if USE_TMA and SILU:
        gate = tl.zeros([BLOCK_M, OUT_N], tl.float32)
        up = tl.zeros([BLOCK_M, OUT_N], tl.float32)
        for k in tl.range(k_start, k_end, BLOCK_K):
            x = x_desc.load([m_tile * BLOCK_M, k])
            gate = tl.dot(x, weight_desc.load([n_tile * OUT_N, k]).T, gate)
            up = tl.dot(x, weight_desc.load([N // 2 + n_tile * OUT_N, k]).T, up)
    elif USE_TMA:
        for k in tl.range(k_start, k_end, BLOCK_K):
            x = x_desc.load([m_tile * BLOCK_M, k])
            acc = tl.dot(x, weight_desc.load([n_tile * BLOCK_N, k]).T, acc)
    else:
        offs_k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + safe_rows[:, None] * x_stride + offs_k[None, :]
        weight_ptrs = row_ptrs[None, :] + offs_k[:, None]  # [BLOCK_K, BLOCK_N]
        for k in tl.range(k_start, k_end, BLOCK_K):
            if EVEN_K:
                x = tl.load(x_ptrs + k)
                w = tl.load(weight_ptrs + k)
            else:
                in_k = k + offs_k < k_end
                x = tl.load(x_ptrs + k, mask=in_k[None, :], other=0.0)
                w = tl.load(weight_ptrs + k, mask=in_k[:, None], other=0.0)
            acc = tl.dot(x, w, acc)

    if SPLIT:
        num_tiles = tl.num_programs(0)
        offsets = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + n[None, :]
        tile_ptrs = partial_ptr + tile.to(tl.int64) * (BLOCK_M * BLOCK_N) + offsets
        split_stride = num_tiles * (BLOCK_M * BLOCK_N)
        tl.store(tile_ptrs + tl.program_id(1) * split_stride, acc)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") != tl.num_programs(1) - 1:
            return
        tl.debug_barrier()
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for split in range(tl.num_programs(1)):  # in this order, whoever sums
            acc += tl.load(tile_ptrs + split * split_stride, cache_modifier=".cg")  # L1 may hold an older launch's
        tl.store(counter_ptr + tile, 0)

    mask = row_mask[:, None] & (columns < out_size)[None, :]
    out_ptrs = out_ptr + safe_rows[:, None] * out_stride + columns[None, :]
    dtype = out_ptr.dtype.element_ty
    if KIND == "residual":
        if HAS_BIAS:
            acc += tl.load(bias_ptr + safe_columns).to(tl.float32)[None, :]
        if not EARLY:
            residual = tl.load(out_ptrs, mask=mask, other=0.0)
        scaled_ptrs = scaled_ptr + safe_rows[:, None] * N + columns[None, :]
        sum_squares_ptrs = sum_squares_ptr + safe_rows * num_partials + n_tile
        _store_residual(
            acc, residual, out_ptrs, norm_weight, scaled_ptrs, mask, sum_squares_ptrs, row_mask, INPUT_SCALE
        )
    else:
        scale = (tl.rsqrt(tl.sum(squares, axis=1) / K + eps) / INPUT_SCALE)[:, None]
        if SILU:
            if not USE_TMA:
                gate, up = tl.split(tl.reshape(acc, [BLOCK_M, OUT_N, 2]))
            gate *= scale
            up *= scale
            if HAS_BIAS:
                gate += tl.load(bias_ptr + safe_columns).to(tl.float32)[None, :]
                up += tl.load(bias_ptr + N // 2 + safe_columns).to(tl.float32)[None, :]
            y = _silu_product(gate, up, dtype)
        else:
            y = acc * scale
            if HAS_BIAS:
                y += tl.load(bias_ptr + safe_columns).to(tl.float32)[None, :]
        tl.store(out_ptrs, y.to(dtype), mask=mask)


@triton.jit
def scale_rows_kernel(
    residual_ptr,
    addend_ptr,  # [M, HIDDEN], contiguous, with HAS_ADDEND
    norm_weight_ptr,
    scaled_ptr,
    sum_squares_ptr,
    residual_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    weight = tl.load(norm_weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    residual_ptrs = residual_ptr + row * residual_stride + columns
    x = tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    if HAS_ADDEND:
        x += tl.load(addend_ptr + row * HIDDEN + columns, mask=mask, other=0.0).to(tl.float32)
        x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)
        tl.store(residual_ptrs, x.to(residual_ptr.dtype.element_ty), mask=mask)
    scaled = (x * weight * INPUT_SCALE).to(scaled_ptr.dtype.element_ty)
    tl.store(scaled_ptr + row * HIDDEN + columns, scaled, mask=mask)
    parts = tl.arange(0, PARTIALS)
    squares = tl.where(parts == 0, tl.sum(x * x, 0), 0.0)
    tl.store(sum_squares_ptr + row * NUM_PARTIALS + parts, squares, mask=parts < NUM_PARTIALS)
