"""The memory's kernels in Triton. What they compute is in ../README.md, how in docs/gpu.md.

Tokens are rows of [tokens, heads, size], contiguous; sequence n holds rows bos .. eos - 1. The
sequential kernels go through it in tiles of 16 tokens, the parallel ones have one program for each
chunk of up to 64 tokens:

    prepare      parallel     what the substitution needs of a tile: `coupling` and decays
    write        sequential   writes and z of every token; memories at the chunks' starts
    read         parallel     y
    read_back    parallel     what the reads give to query, x, writes, decay and the chunks' starts
    write_back   sequential   the substitution in reverse: dwrites, dM at the chunks' ends
    finish_back  parallel     dx, dtarget, dgamma, dlog_beta
    step                      one token, both passes

In stale mode (MB > 1, tokens of a mini-batch) tiles and chunks begin where mini-batches do. The
first mini-batch is a chunk of its own, the *lead*, if the sequence goes on inside it; so is the
last, if the sequence stops inside it. Anchors that come or go are then memories between chunks.
"""

import os

import triton.language as tl

import triton

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
C = tl.constexpr(16)  # tokens of a tile
LOG2E = tl.constexpr(1.4426950408889634)


# Rounding and products. The interpreter cuts bits off where a GPU rounds to the nearest bf16, and
# multiplies the bit patterns of bf16: there, fp32 is rounded by hand and multiplied as fp32.


@triton.jit
def narrow(a, DTYPE: tl.constexpr):
    """a in a dtype that may be narrower."""
    if INTERPRET and DTYPE == tl.bfloat16 and a.dtype == tl.float32:
        bits = a.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        a = tl.where(a == a, bits.to(tl.float32, bitcast=True), a)
    return a.to(DTYPE)


@triton.jit
def rounded(a, P: tl.constexpr):
    """a as an operand of a product of precision P."""
    if P == "bf16":
        a = narrow(a, tl.bfloat16)
    elif P == "fp16":
        a = narrow(a, tl.float16)
    return a if not INTERPRET and (P == "bf16" or P == "fp16") else a.to(tl.float32)


@triton.jit
def mm(a, b, total, P: tl.constexpr):
    """total + a b. P: "bf16" or "fp16" round both operands; "tf32x3" and "ieee" take fp32."""
    if INTERPRET or P == "ieee":
        return tl.dot(rounded(a, P), rounded(b, P), total, input_precision="ieee")
    elif P == "tf32x3":
        return tl.dot(rounded(a, P), rounded(b, P), total, input_precision="tf32x3")
    else:
        return tl.dot(rounded(a, P), rounded(b, P), total)


@triton.jit
def mm_split(a, b, total, P: tl.constexpr):
    """total + a b, where a is fp32 and taken as the sum of two 16-bit halves if b has 16 bits."""
    if P == "bf16" or P == "fp16":
        if P == "bf16":
            top = (a.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        else:
            top = a.to(tl.float16).to(tl.float32)
        total = mm(a - top, b, total, P)
        return mm(top, b, total, P)
    else:
        return mm(a, b, total, P)


# phi


@triton.jit
def sigmoid(z):
    if INTERPRET:
        return 1 / (1 + tl.exp(-z))
    else:  # without the branches for subnormal numbers, which double the time of a row
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [z * -LOG2E], tl.float32, True, 1
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1 + e], tl.float32, True, 1
        )


@triton.jit
def derivatives(z, PHI: tl.constexpr):
    """phi(z), phi'(z), phi''(z)"""
    if PHI == "identity":
        return z, z * 0 + 1, z * 0
    elif PHI == "silu":
        s = sigmoid(z)
        rest = 1 - s
        value = z * s
        return value, s + value * rest, s * rest * (2 + z * (rest - s))
    elif PHI == "tanh":
        value = 2 * sigmoid(2 * z) - 1
        slope = 1 - value * value
        return value, slope, -2 * value * slope
    else:  # gelu
        below = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
        density = tl.exp(-0.5 * z * z) * 0.3989422804014327
        return z * below, below + z * density, density * (2 - z * z)


@triton.jit
def gradient(z, target, PHI: tl.constexpr):
    """u = phi'(z) (phi(z) - target)"""
    value, slope, _ = derivatives(z, PHI)
    return (value - target) * slope


# Decay. log2 of w(t, s) is a difference of cumulated logs. A single number would lose digits as the
# sums grow, and -inf minus -inf is NaN: every log is clamped at -126 (2^-126 is the smallest normal
# number) and cut into a multiple of 1/16, whose sums are exact, and a rest of at most 1/32.


@triton.jit
def log_decays(log_beta, live, first, h, H: tl.constexpr, R: tl.constexpr):
    """log2 beta of R rows in two parts, coarse and fine; 0 where not live."""
    r = tl.arange(0, R)
    v = tl.load(log_beta + (first + r) * H + h, mask=live, other=0.0).to(tl.float32) * LOG2E
    v = tl.where(v < -126.0, -126.0, v)
    coarse = tl.floor(v * 16 + 0.5) * 0.0625
    return coarse, v - coarse


@triton.jit
def up_to_z(coarse, fine, R: tl.constexpr, MB: tl.constexpr, AFTER: tl.constexpr):
    """Cumulated logs, in two parts, of the decay that z of each row has seen since row 0."""
    r = tl.arange(0, R)
    if MB > 1:  # up to the start of the row's mini-batch
        seen = r[None, :] < ((r // MB) * MB)[:, None]
        hi = tl.sum(tl.where(seen, coarse[None, :], 0.0), 1)
        lo = tl.sum(tl.where(seen, fine[None, :], 0.0), 1)
    else:
        hi, lo = tl.cumsum(coarse, 0) - coarse, tl.cumsum(fine, 0) - fine
    if AFTER:
        hi, lo = hi + coarse, lo + fine
    return hi, lo


@triton.jit
def decays_between(hi_t, lo_t, hi_s, lo_s, mask):
    """w(t, s) where mask is, else 0; [t, s]"""
    d = (hi_t[:, None] - hi_s[None, :]) + (lo_t[:, None] - lo_s[None, :])
    return tl.where(mask, tl.exp2(tl.where(mask, d, 0.0)), 0.0)


@triton.jit
def to_the_end(hi, lo, R: tl.constexpr):
    """From cumulated logs: w(end, s) of every row, and the decay over all rows."""
    last = tl.arange(0, R) == R - 1
    hi_end, lo_end = tl.sum(tl.where(last, hi, 0.0), 0), tl.sum(tl.where(last, lo, 0.0), 0)
    return tl.exp2((hi_end - hi) + (lo_end - lo)), tl.exp2(hi_end + lo_end)


# Places of sequences, tiles and chunks. A sequence owns tokens // S + EXTRA places for chunks of S
# tokens, at least as many as it has chunks: places follow from cu_seqlens alone, without a sum.


@triton.jit
def sequence(n, cu, T, S: tl.constexpr, EXTRA: tl.constexpr, PACKED: tl.constexpr):
    """First row, end, and the first of the places of sequence n."""
    if PACKED:
        bos, eos = tl.load(cu + n), tl.load(cu + n + 1)
        place = bos // S + n * EXTRA
    else:
        bos = n * T
        eos = bos + T
        place = n * (T // S + EXTRA)
    return bos, eos, place


@triton.jit
def chunk_at(
    c, cu, owner, offset, T,
    MB: tl.constexpr, S: tl.constexpr, EXTRA: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The chunk at place c: its sequence, its row 0, live rows lo .. hi - 1, whether it leads."""
    n = tl.load(owner + c).to(tl.int64) if PACKED else c // (T // S + EXTRA)
    bos, eos, place = sequence(n, cu, T, S, EXTRA, PACKED)
    j = c - place
    if MB == 1:
        first = bos + j * S
        return n, first, eos * 0, tl.minimum(eos - first, S), j < 0
    else:
        o = tl.load(offset + n)
        lead, full, groups = batches(bos, eos, o, MB, S)
        leads, tail = j < lead, j >= lead + groups
        batch = tl.where(tail, lead + full, lead + (j - lead) * (S // MB))
        first = bos - o + tl.where(leads, 0, batch * MB)
        size = tl.where(leads | tail, MB, tl.minimum(S, (lead + full - batch) * MB))
        hi = tl.minimum(eos - first, tl.where(j > lead + groups, 0, size))
        return n, first, tl.maximum(bos - first, 0), hi, leads


@triton.jit
def batches(bos, eos, o, MB: tl.constexpr, S: tl.constexpr):
    """Of a sequence in stale mode: 1 if it has a lead, its whole mini-batches, chunks of those."""
    lead = (o > 0).to(tl.int64)
    full = tl.maximum((eos - bos + o) // MB - lead, 0)
    return lead, full, tl.cdiv(full, S // MB)


@triton.jit
def rows(
    p, first, live, h, column,
    H: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """R rows of a block of BW columns of p [tokens, H, W]; 0 where not live."""
    r, w = tl.arange(0, R), column + tl.arange(0, BW)
    at = p + (first + r)[:, None] * (H * W) + h * W + w[None, :]
    return tl.load(at, mask=live[:, None] & (w < W)[None, :], other=0.0)


@triton.jit
def put_rows(
    p, value, first, live, h, column,
    H: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    r, w = tl.arange(0, R), column + tl.arange(0, BW)
    at = p + (first + r)[:, None] * (H * W) + h * W + w[None, :]
    tl.store(at, narrow(value, p.dtype.element_ty), mask=live[:, None] & (w < W)[None, :])


@triton.jit
def block_at(
    i, j, I: tl.constexpr, J: tl.constexpr, SI: tl.constexpr, SJ: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Places and mask of the block at (i, j) of an [I, J] matrix with strides SI and SJ."""
    a, b = i + tl.arange(0, BI), j + tl.arange(0, BJ)
    return a[:, None] * SI + b[None, :] * SJ, (a < I)[:, None] & (b < J)[None, :]


# The 16 rows of a tile as 16 vectors: a vector's entries are slots, in the lanes of the warp.


@triton.jit
def columns(x, N: tl.constexpr):
    """[N, 16] -> 16 vectors of N."""
    p = (x,)
    for level in tl.static_range(4):
        q = ()
        for k in tl.static_range(2**level):
            even, odd = tl.split(tl.reshape(p[k], (N, 8 >> level, 2)))
            q = q + (even, odd)
        p = q
    q = ()
    for k in tl.static_range(16):
        q = q + (tl.reshape(p[k], (N,)),)
    return in_order(q)


@triton.jit
def stack(vectors, N: tl.constexpr):
    """16 vectors of N -> [N, 16]"""
    p = in_order(vectors)
    for level in tl.static_range(4):
        q = ()
        for k in tl.static_range(8 >> level):
            q = q + (tl.reshape(tl.join(p[2 * k], p[2 * k + 1]), (N, 2 << level)),)
        p = q
    return p[0]


@triton.jit
def in_order(p):
    """Places with the order of their four bits reversed, which undoes itself."""
    return (
        p[0], p[8], p[4], p[12], p[2], p[10], p[6], p[14],
        p[1], p[9], p[5], p[13], p[3], p[11], p[7], p[15],
    )  # fmt: skip


@triton.jit
def backwards(p):
    q = ()
    for k in tl.static_range(16):
        q = q + (p[15 - k],)
    return q


@triton.jit
def pair(p):
    """Two fp32 numbers at p, which is aligned to 8 bytes, by one load."""
    if INTERPRET:
        return tl.load(p), tl.load(p + 1)
    else:
        v = tl.load(p.to(tl.pointer_type(tl.int64)))
        low, high = v.to(tl.int32), (v >> 32).to(tl.int32)
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def lower_rows(p, FROM: tl.constexpr, TO: tl.constexpr):
    """Rows FROM .. TO - 1 of the strictly lower triangle of [16, 16] at p, one after the other."""
    found = ()
    for t in tl.static_range(FROM, TO):
        for s in tl.static_range(0, t, 2):
            low, high = pair(p + t * C + s)
            found = found + (low,)
            if s + 1 < t:
                found = found + (high,)
    return found


@triton.jit
def row_vectors(p, stride, limit):
    """The vectors at p, p + stride, ..; `limit` [N]: how many of the 16 there are."""
    found = ()
    for t in tl.static_range(C):
        found = found + (tl.load(p + t * stride, mask=limit > t, other=0.0).to(tl.float32),)
    return found


@triton.jit
def many(own, length, FULL: tl.constexpr):
    """`length` for the slots that exist, else 0. FULL: all do, so one number will do."""
    if FULL and not INTERPRET:  # the interpreter cannot combine a vector mask with a scalar
        return length
    else:
        return tl.where(own, length, 0)


# Forward


@triton.jit(do_not_specialize=["T"])
def prepare(
    x, log_beta, gamma, z, target, coupling, started, ended, whole, curve, cu, owner, T,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    S: tl.constexpr, AFTER: tl.constexpr, PHI: tl.constexpr, P: tl.constexpr,
    BACK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Exact mode, for each tile t of a chunk, in buffers of S // 16 tiles for each place:

    coupling: [t, s] w(t - 1, s) x_s . x_t gamma_s below the diagonal; with BACK without gamma,
        transposed, and with both tokens counted from the end.
    started: the decay of the tile's first memory that z sees. ended: w(end, s). whole: of the tile.
    curve: with BACK, gamma du/dz of each row.
    """
    c, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, start, lo_row, hi_row, leads = chunk_at(c, cu, owner, cu, T, 1, S, 1, PACKED)
    r = tl.arange(0, C)
    for i in range(0, S // 16):
        first = start + i * C
        length = hi_row - i * C
        if length > 0:
            live = r < length
            coarse, fine = log_decays(log_beta, live, first, h, H, C)
            hi, lo = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
            hi_z, lo_z = up_to_z(coarse, fine, C, 1, AFTER)
            before = decays_between(hi_z, lo_z, hi, lo, r[:, None] > r[None, :])
            xs = rows(x, first, live, h, 0, H, D, BD, C)
            products = mm(xs, tl.trans(xs), tl.zeros((C, C), tl.float32), P)
            both = tl.where(before != 0, before * products, 0.0)
            g = tl.load(gamma + (first + r) * H + h, mask=live, other=0.0).to(tl.float32)
            at = (c * (S // 16) + i) * H + h
            if BACK:
                turned = (15 - r)[None, :] * 16 + (15 - r)[:, None]
                tl.store(coupling + at * (C * C) + turned, both)
                for m in range(0, M, BM):
                    value, slope, bend = derivatives(
                        rows(z, first, live, h, m, H, M, BM, C).to(tl.float32), PHI
                    )
                    error = value - rows(target, first, live, h, m, H, M, BM, C).to(tl.float32)
                    change = g[:, None] * (slope * slope + bend * error)
                    put_rows(curve, change, first, live, h, m, H, M, BM, C)
            else:
                both = tl.where(both != 0, both * g[None, :], 0.0)
                tl.store(coupling + at * (C * C) + r[:, None] * C + r[None, :], both)
            end, all_of_it = to_the_end(hi, lo, C)
            tl.store(started + at * C + r, tl.exp2(hi_z + lo_z))
            tl.store(ended + at * C + r, end)
            tl.store(whole + at, all_of_it)


@triton.jit
def write_exact(
    nh, block, x, target, gamma, coupling, started, ended, whole, memory,
    writes, z, saved, final, cu, T,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    S: tl.constexpr, PHI: tl.constexpr, P: tl.constexpr, AHEAD: tl.constexpr,
    KEEP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Slots block * BM .. of one sequence and head. KEEP: z and `saved` are wanted."""
    n, h = nh // H, nh % H
    bos, eos, chunk = sequence(n, cu, T, S, 1, PACKED)
    slot = block * BM + tl.arange(0, BM)
    own = slot < M
    r = tl.arange(0, C)
    place, square = block_at(block * BM, 0, M, D, D, 1, BM, BD)
    m = tl.load(memory + nh * (M * D) + place, mask=square, other=0.0)
    for i in range(0, tl.cdiv(eos - bos, C)):
        first = bos + i * C
        length = eos - first
        limit = many(own, length, M % BM == 0)
        at = (chunk * (S // 16) + i) * H + h
        # Loads before stores: the compiler does not move a load across a store.
        n_ts = lower_rows(coupling + at * (C * C), 1, AHEAD)
        row = first * (H * M) + h * M + slot
        a = row_vectors(target + row, H * M, limit)
        e = tl.load(started + at * C + r)
        end = tl.load(ended + at * C + r)
        w = tl.load(whole + at)
        live = r < length
        g = tl.load(gamma + (first + r) * H + h, mask=live, other=0.0).to(tl.float32)
        xs = rows(x, first, live, h, 0, H, D, BD, C)
        if i % (S // 16) == 0:
            memories = saved + ((chunk + i // (S // 16)) * H + h) * (M * D) + place
            tl.store(memories, narrow(m, saved.dtype.element_ty), mask=square)
        start = mm_split(m, tl.trans(xs), tl.zeros((BM, C), tl.float32), P)
        base = columns(start * e[None, :], BM)
        us = ()
        zs = ()
        for t in tl.static_range(C):
            # One row of `coupling` at a time: all of them at once would not fit into registers.
            if t + AHEAD < C:
                n_ts = n_ts + lower_rows(coupling + at * (C * C), t + AHEAD, t + AHEAD + 1)
            z_t = base[t]
            for s in tl.static_range(t):
                z_t -= n_ts[t * (t - 1) // 2 + s] * us[s]
            zs = zs + (z_t,)
            us = us + (gradient(z_t, a[t], PHI),)
        new = stack(us, BM) * g[None, :]
        m = mm_split(new * -end[None, :], xs, m * w, P)
        to = (first + r)[None, :] * (H * M) + h * M + slot[:, None]
        tl.store(
            writes + to, narrow(new, writes.dtype.element_ty), mask=own[:, None] & live[None, :]
        )
        if KEEP:
            for t in tl.static_range(C):
                tl.store(z + row + t * (H * M), narrow(zs[t], z.dtype.element_ty), mask=limit > t)
    tl.store(final + nh * (M * D) + place, m, mask=square)


@triton.jit
def tile_of(i, bos, eos, o, MB: tl.constexpr, S: tl.constexpr):
    """Tile i of a sequence in stale mode.

    Returns its row 0, live rows lo .. hi - 1, whether a mini-batch begins with it (a new one: not
    the rest of one), its chunk, whether that begins with it and whether it ends with it.
    """
    PER: tl.constexpr = (MB + 15) // 16  # tiles of a mini-batch
    batch, piece = i // PER, i % PER
    first = bos - o + batch * MB + piece * 16
    lo = tl.maximum(bos - first, 0)
    hi = tl.minimum(tl.minimum(eos - first, MB - piece * 16), C)
    lead, full, groups = batches(bos, eos, o, MB, S)
    inner = batch - lead
    alone = (inner < 0) | (inner == full)
    place = inner % (S // MB)
    chunk = tl.where(inner < 0, 0, lead + tl.where(inner == full, groups, inner // (S // MB)))
    begins = piece == 0
    last = alone | (place == S // MB - 1) | (inner == full - 1)
    new_chunk = begins & (alone | (place == 0))
    return first, lo, hi, begins & (inner >= 0), chunk, new_chunk, (piece == PER - 1) & last


@triton.jit
def tiles_of(bos, eos, o, MB: tl.constexpr):
    """How many tiles a sequence has in stale mode."""
    PER: tl.constexpr = (MB + 15) // 16
    return tl.where(eos > bos, tl.cdiv(eos - bos + o, MB) * PER, 0)


@triton.jit
def write_stale(
    nh, block, x, target, log_beta, gamma, memory, anchor, writes, z, saved, final, final_anchor,
    cu, offset, T,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    S: tl.constexpr, MB: tl.constexpr, AFTER: tl.constexpr, PHI: tl.constexpr, P: tl.constexpr,
    KEEP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    n, h = nh // H, nh % H
    bos, eos, chunk = sequence(n, cu, T, S, 3, PACKED)
    o = tl.load(offset + n)
    slot = block * BM + tl.arange(0, BM)
    own = slot < M
    r = tl.arange(0, C)
    place, square = block_at(block * BM, 0, M, D, D, 1, BM, BD)
    m = tl.load(memory + nh * (M * D) + place, mask=square, other=0.0)
    point = tl.load(anchor + nh * (M * D) + place, mask=square, other=0.0)
    for i in range(0, tiles_of(bos, eos, o, MB)):
        first, lo_row, hi_row, new_batch, j, new_chunk, ends = tile_of(i, bos, eos, o, MB, S)
        live = (r >= lo_row) & (r < hi_row)
        wanted = own[:, None] & live[None, :]
        to = (first + r)[None, :] * (H * M) + h * M + slot[:, None]
        a = tl.load(target + to, mask=wanted, other=0.0).to(tl.float32)
        g = tl.load(gamma + (first + r) * H + h, mask=live, other=0.0).to(tl.float32)
        xs = rows(x, first, live, h, 0, H, D, BD, C)
        coarse, fine = log_decays(log_beta, live, first, h, H, C)
        end, w = to_the_end(tl.cumsum(coarse, 0), tl.cumsum(fine, 0), C)
        if new_chunk:
            memories = saved + ((chunk + j) * H + h) * (M * D) + place
            tl.store(memories, narrow(m, saved.dtype.element_ty), mask=square)
        if new_batch:
            point = m
        z_all = mm_split(point, tl.trans(xs), tl.zeros((BM, C), tl.float32), P)
        if AFTER:
            z_all = z_all * tl.exp2(coarse + fine)[None, :]
        new = gradient(z_all, a, PHI) * g[None, :]
        m = mm_split(new * -end[None, :], xs, m * w, P)
        tl.store(writes + to, narrow(new, writes.dtype.element_ty), mask=wanted)
        if KEEP:
            tl.store(z + to, narrow(z_all, z.dtype.element_ty), mask=wanted)
    if (eos - bos + o) % MB == 0:
        point = m
    tl.store(final + nh * (M * D) + place, m, mask=square)
    tl.store(final_anchor + nh * (M * D) + place, point, mask=square)


@triton.jit(do_not_specialize=["T"])
def write(
    x1, target1, log_beta1, gamma1, coupling1, started1, ended1, whole1, memory1, anchor1,
    writes1, z1, saved1, final1, final_anchor1,
    x2, target2, log_beta2, gamma2, coupling2, started2, ended2, whole2, memory2, anchor2,
    writes2, z2, saved2, final2, final_anchor2,
    cu, offset, T,
    H: tl.constexpr, D1: tl.constexpr, M1: tl.constexpr, BD1: tl.constexpr, PHI1: tl.constexpr,
    D2: tl.constexpr, M2: tl.constexpr, BD2: tl.constexpr, PHI2: tl.constexpr,
    BM: tl.constexpr, S: tl.constexpr, MB: tl.constexpr, AFTER: tl.constexpr, P: tl.constexpr,
    AHEAD: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The writes of one pass, or of both (M2 > 0): neither depends on the other's.

    Grid: sequences x heads, blocks of slots of the first pass and then of the second.
    """
    nh, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    BLOCKS: tl.constexpr = (M1 + BM - 1) // BM
    if M2 == 0 or block < BLOCKS:
        if MB == 1:
            write_exact(
                nh, block, x1, target1, gamma1, coupling1, started1, ended1, whole1, memory1,
                writes1, z1, saved1, final1, cu, T, H, D1, M1, BD1, BM, S, PHI1, P, AHEAD,
                KEEP, PACKED,
            )  # fmt: skip
        else:
            write_stale(
                nh, block, x1, target1, log_beta1, gamma1, memory1, anchor1, writes1, z1, saved1,
                final1, final_anchor1, cu, offset, T, H, D1, M1, BD1, BM, S, MB, AFTER, PHI1, P,
                KEEP, PACKED,
            )  # fmt: skip
    else:
        if MB == 1:
            write_exact(
                nh, block - BLOCKS, x2, target2, gamma2, coupling2, started2, ended2, whole2,
                memory2, writes2, z2, saved2, final2, cu, T, H, D2, M2, BD2, BM, S, PHI2, P,
                AHEAD, KEEP, PACKED,
            )  # fmt: skip
        else:
            write_stale(
                nh, block - BLOCKS, x2, target2, log_beta2, gamma2, memory2, anchor2, writes2, z2,
                saved2, final2, final_anchor2, cu, offset, T, H, D2, M2, BD2, BM, S, MB, AFTER,
                PHI2, P, KEEP, PACKED,
            )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def read(
    query, keys, values, log_beta, saved, y, cu, owner, offset, T,
    H: tl.constexpr, I: tl.constexpr, O: tl.constexpr, SI: tl.constexpr, SO: tl.constexpr,
    BI: tl.constexpr, BO: tl.constexpr, R: tl.constexpr, S: tl.constexpr, EXTRA: tl.constexpr,
    MB: tl.constexpr, P: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """y [.., O] = query [.., I] times the memory, whose strides for I and O are SI and SO.

    keys, values: x and the writes; transposed the writes and x. R rows of a chunk, R >= S.
    """
    c, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, first, lo_row, hi_row, leads = chunk_at(c, cu, owner, offset, T, MB, S, EXTRA, PACKED)
    if hi_row > lo_row:
        r = tl.arange(0, R)
        live = (r >= lo_row) & (r < hi_row)
        coarse, fine = log_decays(log_beta, live, first, h, H, R)
        hi, lo = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
        scores = tl.zeros((R, R), tl.float32)
        strange = tl.zeros((R,), tl.float32)  # becomes NaN where a key or a value is not finite
        for i in range(0, I, BI):
            k = rows(keys, first, live, h, i, H, I, BI, R)
            scores = mm(rows(query, first, live, h, i, H, I, BI, R), tl.trans(k), scores, P)
            strange += tl.sum(k.to(tl.float32) * 0, 1)
        for o in range(0, O, BO):
            strange += tl.sum(rows(values, first, live, h, o, H, O, BO, R).to(tl.float32) * 0, 1)
        # Such a write, and all behind it, is kept out of the rows before it, where a product would
        # multiply it by zero. From it on, y is NaN.
        broken = tl.cumsum(tl.where(strange == 0, 0.0, 1.0), 0) > 0
        mask = (r[:, None] >= r[None, :]) & (tl.where(broken, 1, 0) == 0)[None, :]
        scores = tl.where(mask, -scores * decays_between(hi, lo, hi, lo, mask), 0.0)
        start = tl.exp2(hi + lo)
        memory = saved + (c * H + h) * (I * O)
        for o in range(0, O, BO):
            out = tl.zeros((R, BO), tl.float32)
            for i in range(0, I, BI):
                place, square = block_at(i, o, I, O, SI, SO, BI, BO)
                m = tl.load(memory + place, mask=square, other=0.0)
                out = mm(rows(query, first, live, h, i, H, I, BI, R), m, out, P)
            v = rows(values, first, live, h, o, H, O, BO, R)
            out = mm_split(scores, tl.where(broken[:, None], 0.0, v), out * start[:, None], P)
            out = tl.where(broken[:, None], float("nan"), out)
            put_rows(y, out, first, live, h, o, H, O, BO, R)


# Backward


@triton.jit(do_not_specialize=["T"])
def read_back(
    query, keys, values, dy, log_beta, saved, dquery, dkeys, dvalues, dlog_beta, dsaved,
    cu, owner, offset, T,
    H: tl.constexpr, I: tl.constexpr, O: tl.constexpr, SI: tl.constexpr, SO: tl.constexpr,
    BI: tl.constexpr, BO: tl.constexpr, R: tl.constexpr, S: tl.constexpr, EXTRA: tl.constexpr,
    MB: tl.constexpr, P: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    c, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, first, lo_row, hi_row, leads = chunk_at(c, cu, owner, offset, T, MB, S, EXTRA, PACKED)
    memory, dmemory = saved + (c * H + h) * (I * O), dsaved + (c * H + h) * (I * O)
    if hi_row <= lo_row:
        return
    r = tl.arange(0, R)
    live = (r >= lo_row) & (r < hi_row)
    coarse, fine = log_decays(log_beta, live, first, h, H, R)
    hi, lo = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    start = tl.exp2(hi + lo)
    causal = r[:, None] >= r[None, :]
    scores = tl.zeros((R, R), tl.float32)
    for i in range(0, I, BI):
        k = rows(keys, first, live, h, i, H, I, BI, R)
        scores = mm(rows(query, first, live, h, i, H, I, BI, R), tl.trans(k), scores, P)
    inner = tl.zeros((R, R), tl.float32)
    for o in range(0, O, BO):
        v = rows(values, first, live, h, o, H, O, BO, R)
        inner = mm(rows(dy, first, live, h, o, H, O, BO, R), tl.trans(v), inner, P)
    within = decays_between(hi, lo, hi, lo, causal)
    inner = inner * within
    # pairs[t, s] weighs the decays of s + 1 .. t, held[t] those of all rows up to t.
    pairs = -scores * inner
    grad = tl.sum(tl.where(causal, tl.cumsum(pairs, 1) - pairs, 0.0), 0)  # [t, i]: all s < i
    scores = scores * within
    held = tl.zeros((R,), tl.float32)
    for i in range(0, I, BI):
        dq = tl.zeros((R, BI), tl.float32)
        q = rows(query, first, live, h, i, H, I, BI, R)
        for o in range(0, O, BO):
            place, square = block_at(i, o, I, O, SI, SO, BI, BO)
            m = tl.load(memory + place, mask=square, other=0.0)
            d = rows(dy, first, live, h, o, H, O, BO, R)
            dq = mm(d, tl.trans(m), dq, P)
            weighed = tl.trans(q.to(tl.float32) * start[:, None])
            dm = mm(weighed, d, tl.zeros((BI, BO), tl.float32), P)
            tl.store(dmemory + place, narrow(dm, dsaved.dtype.element_ty), mask=square)
        dq = dq * start[:, None]
        held += tl.sum(q * dq, 1)
        dq = mm(-inner, rows(keys, first, live, h, i, H, I, BI, R), dq, P)
        put_rows(dquery, dq, first, live, h, i, H, I, BI, R)
        dk = mm(tl.trans(-inner), q, tl.zeros((R, BI), tl.float32), P)
        put_rows(dkeys, dk, first, live, h, i, H, I, BI, R)
    for o in range(0, O, BO):
        d = rows(dy, first, live, h, o, H, O, BO, R)
        dv = mm(tl.trans(-scores), d, tl.zeros((R, BO), tl.float32), P)
        put_rows(dvalues, dv, first, live, h, o, H, O, BO, R)
    grad += tl.sum(tl.where(causal, held[:, None], 0.0), 0)
    to = dlog_beta + (first + r) * H + h
    tl.store(to, narrow(grad, dlog_beta.dtype.element_ty), mask=live)


@triton.jit
def back_exact(
    nh, block, x, curve, coupling, started, ended, whole, dwrites, dreads, dfinal,
    total, dends, dmemory, cu, T,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr, AHEAD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    n, h = nh // H, nh % H
    bos, eos, chunk = sequence(n, cu, T, S, 1, PACKED)
    slot = block * BM + tl.arange(0, BM)
    own = slot < M
    r = tl.arange(0, C)
    place, square = block_at(block * BM, 0, M, D, D, 1, BM, BD)
    dm = tl.load(dfinal + nh * (M * D) + place, mask=square, other=0.0)
    count = tl.cdiv(eos - bos, C)
    for j in range(0, count):
        i = count - 1 - j
        first = bos + i * C
        length = eos - first
        limit = many(own, length, M % BM == 0)
        live = r < length
        at = (chunk * (S // 16) + i) * H + h
        memories = ((chunk + i // (S // 16)) * H + h) * (M * D) + place
        n_ts = lower_rows(coupling + at * (C * C), 1, AHEAD)
        row = first * (H * M) + h * M + slot
        cs = row_vectors(curve + row, H * M, limit)
        to = (first + r)[None, :] * (H * M) + h * M + slot[:, None]
        dw = tl.load(dwrites + to, mask=own[:, None] & live[None, :], other=0.0).to(tl.float32)
        e = tl.load(started + at * C + r)
        end = tl.load(ended + at * C + r)
        w = tl.load(whole + at)
        xs = rows(x, first, live, h, 0, H, D, BD, C)
        if (i % (S // 16) == S // 16 - 1) | (j == 0):
            tl.store(dends + memories, narrow(dm, dends.dtype.element_ty), mask=square)
        dw -= mm_split(dm, tl.trans(xs), tl.zeros((BM, C), tl.float32), P) * end[None, :]
        direct = backwards(columns(dw, BM))
        ts = ()
        dzs = ()
        for k in tl.static_range(C):  # token 15 - k
            if k + AHEAD < C:
                n_ts = n_ts + lower_rows(coupling + at * (C * C), k + AHEAD, k + AHEAD + 1)
            v = direct[k]
            for p in tl.static_range(k):
                v -= n_ts[k * (k - 1) // 2 + p] * dzs[p]
            ts = ts + (v,)
            dzs = dzs + (cs[C - 1 - k] * v,)
        dz = stack(backwards(dzs), BM) * e[None, :]
        dm = mm_split(dz, xs, dm * w, P)
        if i % (S // 16) == 0:
            dm += tl.load(dreads + memories, mask=square, other=0.0).to(tl.float32)
        for t in tl.static_range(C):
            late = narrow(ts[C - 1 - t], total.dtype.element_ty)
            tl.store(total + row + t * (H * M), late, mask=limit > t)
    tl.store(dmemory + nh * (M * D) + place, dm, mask=square)


@triton.jit
def back_stale(
    nh, block, x, z, target, log_beta, gamma, dwrites, dreads, dfinal, dfinal_anchor,
    total, dends, dmemory, danchor, cu, offset, T,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    S: tl.constexpr, MB: tl.constexpr, AFTER: tl.constexpr, PHI: tl.constexpr, P: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    n, h = nh // H, nh % H
    bos, eos, chunk = sequence(n, cu, T, S, 3, PACKED)
    o = tl.load(offset + n)
    slot = block * BM + tl.arange(0, BM)
    own = slot < M
    r = tl.arange(0, C)
    place, square = block_at(block * BM, 0, M, D, D, 1, BM, BD)
    dm = tl.load(dfinal + nh * (M * D) + place, mask=square, other=0.0)
    dpoint = tl.load(dfinal_anchor + nh * (M * D) + place, mask=square, other=0.0)
    whole = (eos - bos + o) % MB == 0  # the final anchor is the final memory
    dm += tl.where(whole, dpoint, 0.0)
    dpoint = tl.where(whole, 0.0, dpoint)
    count = tiles_of(bos, eos, o, MB)
    for k in range(0, count):
        i = count - 1 - k
        first, lo_row, hi_row, new_batch, j, new_chunk, ends = tile_of(i, bos, eos, o, MB, S)
        live = (r >= lo_row) & (r < hi_row)
        wanted = own[:, None] & live[None, :]
        to = (first + r)[None, :] * (H * M) + h * M + slot[:, None]
        memories = ((chunk + j) * H + h) * (M * D) + place
        dw = tl.load(dwrites + to, mask=wanted, other=0.0).to(tl.float32)
        zs = tl.load(z + to, mask=wanted, other=0.0).to(tl.float32)
        a = tl.load(target + to, mask=wanted, other=0.0).to(tl.float32)
        g = tl.load(gamma + (first + r) * H + h, mask=live, other=0.0).to(tl.float32)
        xs = rows(x, first, live, h, 0, H, D, BD, C)
        coarse, fine = log_decays(log_beta, live, first, h, H, C)
        end, w = to_the_end(tl.cumsum(coarse, 0), tl.cumsum(fine, 0), C)
        if ends | (k == 0):
            tl.store(dends + memories, narrow(dm, dends.dtype.element_ty), mask=square)
        dw -= mm_split(dm, tl.trans(xs), tl.zeros((BM, C), tl.float32), P) * end[None, :]
        value, slope, bend = derivatives(zs, PHI)
        dz = dw * (slope * slope + bend * (value - a)) * g[None, :]
        if AFTER:
            dz = dz * tl.exp2(coarse + fine)[None, :]
        dpoint = mm_split(dz, xs, dpoint, P)
        # Selections and masks, not branches: a branch holds both sides in registers.
        dm = dm * w + tl.where(new_batch, dpoint, 0.0)
        dpoint = tl.where(new_batch, 0.0, dpoint)
        begins = square & (tl.zeros((BM, 1), tl.int32) < tl.where(new_chunk, 1, 0))
        dm += tl.load(dreads + memories, mask=begins, other=0.0).to(tl.float32)
        tl.store(total + to, narrow(dw, total.dtype.element_ty), mask=wanted)
    tl.store(dmemory + nh * (M * D) + place, dm, mask=square)
    tl.store(danchor + nh * (M * D) + place, dpoint, mask=square)


@triton.jit(do_not_specialize=["T"])
def write_back(
    x1, z1, target1, log_beta1, gamma1, curve1, coupling1, started1, ended1, whole1, dwrites1,
    dreads1, dfinal1, dfinal_anchor1, total1, dends1, dmemory1, danchor1,
    x2, z2, target2, log_beta2, gamma2, curve2, coupling2, started2, ended2, whole2, dwrites2,
    dreads2, dfinal2, dfinal_anchor2, total2, dends2, dmemory2, danchor2,
    cu, offset, T,
    H: tl.constexpr, D1: tl.constexpr, M1: tl.constexpr, BD1: tl.constexpr, PHI1: tl.constexpr,
    D2: tl.constexpr, M2: tl.constexpr, BD2: tl.constexpr, PHI2: tl.constexpr,
    BM: tl.constexpr, S: tl.constexpr, MB: tl.constexpr, AFTER: tl.constexpr, P: tl.constexpr,
    AHEAD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`write` in reverse.

    dwrites, dreads: what the reads give to the writes and to the memories at the chunks' starts.
    total: the whole gradient of the writes. dends: that of the memories at the chunks' ends.
    """
    nh, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    BLOCKS: tl.constexpr = (M1 + BM - 1) // BM
    if M2 == 0 or block < BLOCKS:
        if MB == 1:
            back_exact(
                nh, block, x1, curve1, coupling1, started1, ended1, whole1, dwrites1, dreads1,
                dfinal1, total1, dends1, dmemory1, cu, T, H, D1, M1, BD1, BM, S, P, AHEAD, PACKED,
            )  # fmt: skip
        else:
            back_stale(
                nh, block, x1, z1, target1, log_beta1, gamma1, dwrites1, dreads1, dfinal1,
                dfinal_anchor1, total1, dends1, dmemory1, danchor1, cu, offset, T,
                H, D1, M1, BD1, BM, S, MB, AFTER, PHI1, P, PACKED,
            )  # fmt: skip
    else:
        if MB == 1:
            back_exact(
                nh, block - BLOCKS, x2, curve2, coupling2, started2, ended2, whole2, dwrites2,
                dreads2, dfinal2, total2, dends2, dmemory2, cu, T, H, D2, M2, BD2, BM, S, P,
                AHEAD, PACKED,
            )  # fmt: skip
        else:
            back_stale(
                nh, block - BLOCKS, x2, z2, target2, log_beta2, gamma2, dwrites2, dreads2, dfinal2,
                dfinal_anchor2, total2, dends2, dmemory2, danchor2, cu, offset, T,
                H, D2, M2, BD2, BM, S, MB, AFTER, PHI2, P, PACKED,
            )  # fmt: skip


@triton.jit(do_not_specialize=["T", "places"])
def finish_back(
    x, target, writes, z, total, log_beta, gamma, saved, dends, dx, dtarget, dgamma, dlog_beta,
    cu, owner, offset, T, places,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, EXTRA: tl.constexpr, MB: tl.constexpr, AFTER: tl.constexpr,
    PHI: tl.constexpr, P: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What flows back through the writes to x, the target, gamma and the decay.

    saved: behind the memories of all `places`, the anchor of every sequence.
    """
    c, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, first, lo_row, hi_row, leads = chunk_at(c, cu, owner, offset, T, MB, S, EXTRA, PACKED)
    if hi_row <= lo_row:
        return
    point = c
    if MB > 1:  # the memory that z is computed from
        point = tl.where(leads, places + n, c)
    r = tl.arange(0, R)
    live = (r >= lo_row) & (r < hi_row)
    g = tl.load(gamma + (first + r) * H + h, mask=live, other=0.0).to(tl.float32)
    mixed = tl.zeros((R, R), tl.float32)
    dgammas = tl.zeros((R,), tl.float32)
    own = tl.zeros((R,), tl.float32)
    for m in range(0, M, BM):
        zs = rows(z, first, live, h, m, H, M, BM, R).to(tl.float32)
        value, slope, bend = derivatives(zs, PHI)
        error = value - rows(target, first, live, h, m, H, M, BM, R)
        dw = rows(total, first, live, h, m, H, M, BM, R).to(tl.float32)
        dgammas += tl.sum(slope * error * dw, 1)
        dw = dw * g[:, None]
        put_rows(dtarget, -slope * dw, first, live, h, m, H, M, BM, R)
        dz = (slope * slope + bend * error) * dw
        own += tl.sum(dz * zs, 1)
        mixed = mm(dz, tl.trans(rows(writes, first, live, h, m, H, M, BM, R)), mixed, P)
    at = (first + r) * H + h
    tl.store(dgamma + at, narrow(dgammas, dgamma.dtype.element_ty), mask=live)

    coarse, fine = log_decays(log_beta, live, first, h, H, R)
    hi, lo = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    hi_z, lo_z = up_to_z(coarse, fine, R, MB, AFTER)
    start = tl.exp2(hi_z + lo_z)
    end, all_of_it = to_the_end(hi, lo, R)
    before = ((r // MB) * MB)[:, None] > r[None, :]
    mixed = mixed * decays_between(hi_z, lo_z, hi, lo, before)
    pairs = tl.zeros((R, R), tl.float32)
    for d in range(0, D, BD):
        xs = rows(x, first, live, h, d, H, D, BD, R)
        pairs = mm(xs, tl.trans(xs), pairs, P)
    pairs = -pairs * mixed
    grad = tl.sum(tl.where(before, tl.cumsum(pairs, 1) - pairs, 0.0), 0)  # [t, i]: all s < i
    starts = tl.zeros((R,), tl.float32)
    to_end = tl.zeros((R,), tl.float32)
    held = tl.zeros((BM,), tl.float32)
    for d in range(0, D, BD):
        out = tl.zeros((R, BD), tl.float32)
        written = tl.zeros((R, BD), tl.float32)
        for m in range(0, M, BM):
            zs = rows(z, first, live, h, m, H, M, BM, R).to(tl.float32)
            value, slope, bend = derivatives(zs, PHI)
            error = value - rows(target, first, live, h, m, H, M, BM, R)
            dz = rows(total, first, live, h, m, H, M, BM, R) * g[:, None]
            dz = dz * (slope * slope + bend * error)
            place, square = block_at(m, d, M, D, D, 1, BM, BD)
            p = tl.load(saved + (point * H + h) * (M * D) + place, mask=square, other=0.0)
            out = mm(dz, p, out, P)
            dm = tl.load(dends + (c * H + h) * (M * D) + place, mask=square, other=0.0)
            written = mm(rows(writes, first, live, h, m, H, M, BM, R), dm, written, P)
            m0 = tl.load(saved + (c * H + h) * (M * D) + place, mask=square, other=0.0)
            held += tl.sum(dm.to(tl.float32) * m0.to(tl.float32), 1)
        xs = rows(x, first, live, h, d, H, D, BD, R)
        out = out * start[:, None]
        written = written * end[:, None]
        starts += tl.sum(out * xs, 1)
        to_end -= tl.sum(written * xs, 1)
        out = mm(-(mixed + tl.trans(mixed)), xs, out - written, P)
        put_rows(dx, out, first, live, h, d, H, D, BD, R)
    grad += tl.sum(tl.where(before, starts[:, None], 0.0), 0)
    grad += tl.cumsum(to_end, 0) - to_end + all_of_it * tl.sum(held, 0)
    if AFTER:  # z contains its own token's decay
        grad += own
    tl.store(dlog_beta + at, narrow(grad, dlog_beta.dtype.element_ty), mask=live)


# One token


@triton.jit
def function(v, mask, N: tl.constexpr, F: tl.constexpr):
    """f or psi of a vector with N entries, those where mask is."""
    if F == "silu" or F == "ln_silu" or F == "soft_ln_silu" or F == "l2_silu":
        v = v * sigmoid(v)
    elif F == "gelu" or F == "tanh":
        v, _, _ = derivatives(v, F)
    if F == "softmax":
        v = tl.where(mask, v, -float("inf"))
        e = tl.exp(v - tl.max(v, 0))
        v = e / tl.sum(e, 0)
    elif F == "l2_silu" or F == "l2norm":
        v = tl.where(mask, v, 0.0)
        v = v * tl.rsqrt(tl.sum(v * v, 0) + 1e-6)
    elif F == "ln_silu" or F == "soft_ln_silu" or F == "layernorm":
        v = tl.where(mask, v - tl.sum(tl.where(mask, v, 0.0), 0) / N, 0.0)
        v = v * tl.rsqrt(tl.sum(v * v, 0) / N + (0.1 if F == "soft_ln_silu" else 1e-5))
    else:
        tl.static_assert(F == "identity" or F == "silu" or F == "gelu" or F == "tanh")
    return v


@triton.jit
def step_pass(
    nh, query, x, target, log_beta, gamma, memory, anchor, offset, final, final_anchor,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    PHI: tl.constexpr, MB: tl.constexpr, AFTER: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Writes one token and reads it with `query`."""
    d = tl.arange(0, BD)
    mi = tl.arange(0, BM)
    place, square = block_at(0, 0, M, D, D, 1, BM, BD)
    m = tl.load(memory + nh * (M * D) + place, mask=square, other=0.0)
    xt = tl.load(x + nh * D + d, mask=d < D, other=0.0).to(tl.float32)
    a = tl.load(target + nh * M + mi, mask=mi < M, other=0.0).to(tl.float32)
    beta = tl.exp(tl.load(log_beta + nh).to(tl.float32))
    point = m
    if MB > 1:
        o = tl.load(offset + nh // H)
        if o > 0:
            point = tl.load(anchor + nh * (M * D) + place, mask=square, other=0.0)
    z = tl.sum(point * xt[None, :], 1)
    if AFTER:
        z = z * beta
    u = gradient(z, a, PHI) * tl.load(gamma + nh).to(tl.float32)
    m = m * beta - u[:, None] * xt[None, :]
    if MB > 1:
        if (o + 1) % MB == 0:
            point = m
        tl.store(final_anchor + nh * (M * D) + place, point, mask=square)
    tl.store(final + nh * (M * D) + place, m, mask=square)
    if TRANSPOSED:
        return tl.sum(tl.where(square, m * query[:, None], 0.0), 0)
    else:
        return tl.sum(tl.where(square, m * query[None, :], 0.0), 1)


@triton.jit
def step(
    q, x1, target1, log_beta1, gamma1, memory1, anchor1, final1, final_anchor1,
    x2, target2, log_beta2, gamma2, memory2, anchor2, final2, final_anchor2, offset, y,
    H: tl.constexpr, D1: tl.constexpr, M1: tl.constexpr, BD1: tl.constexpr, BM1: tl.constexpr,
    D2: tl.constexpr, M2: tl.constexpr, BD2: tl.constexpr, BM2: tl.constexpr,
    PHI1: tl.constexpr, PHI2: tl.constexpr, F: tl.constexpr, PSI: tl.constexpr, MB: tl.constexpr,
    AFTER: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """One token of one sequence and head: both passes, f and psi."""
    nh = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD1)
    query = tl.load(q + nh * D1 + d, mask=d < D1, other=0.0).to(tl.float32)
    read1 = step_pass(
        nh, query, x1, target1, log_beta1, gamma1, memory1, anchor1, offset, final1, final_anchor1,
        H, M1, D1, BM1, BD1, PHI1, MB, AFTER, False,
    )  # fmt: skip
    query = function(read1, tl.arange(0, BM1) < M1, M1, F)
    out = step_pass(
        nh, query, x2, target2, log_beta2, gamma2, memory2, anchor2, offset, final2, final_anchor2,
        H, M2, D2, BM2, BD2, PHI2, MB, AFTER, TRANSPOSED,
    )  # fmt: skip
    W: tl.constexpr = D2 if TRANSPOSED else M2
    BW: tl.constexpr = BD2 if TRANSPOSED else BM2
    w = tl.arange(0, BW)
    out = function(out, w < W, W, PSI)
    tl.store(y + nh * W + w, narrow(out, y.dtype.element_ty), mask=w < W)
