# SPDX-License-Identifier: Apache-2.0
"""Small-batch grouped GEMM for Hopper: bound by reading weights, so weights take the tensor core's M side.

A unit is at most TOKENS rows of one expert times 128 weight rows (for w13 128 gate rows and the 128 up rows that
belong to them). One persistent program a multiprocessor; one TMA warp keeps a deep ring of weight tiles in flight.

W8A8: two consumer warpgroups take units in turn, so that one's epilogue hides behind the other's main loop. The turn
is handed on by a pair of barriers once a unit's last stage has arrived: without them a consumer could wait for a stage
more than one turn of the ring ahead, and the barrier's single parity bit would let it through early.

W8A16: the activations are fp16 (each row scaled by a power of two, so exactly what they were in bf16) and the weights
are widened to fp16 in registers: e4m3 to fp16 is one instruction for two weights, to bf16 it is four. Widening is the
longer part of a stage, so both warpgroups share every unit, 64 weight rows each; the ring hides their epilogue.

Block scales, adapters and the fused activation are as in `prefill_gemm`. Rows are packed (no padding between
experts): a box may read rows of the next expert, whose columns are not stored.

The tensor core's fp8 accumulator keeps 14 bits (`common.fp8_sums` computes the same). In w13 a product leaves it after
32 or 64 columns, because a last bit of g can move a value of h to the next FP8 code and a chain bound by memory has the
time; in w2, where nothing follows, after 128.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .device_math import EPS, INV_FP8_MAX, advance, glu, reciprocal
from .plan import RowPlan

TILE_FIELDS = gl.constexpr(8)
PROGRAMS = 132  # one a multiprocessor


@gluon.jit
def _lora_views(w_bufs, x_bufs, slot, lora_layout: gl.constexpr, shrunk_layout: gl.constexpr,
                HALVES: gl.constexpr, TOKENS: gl.constexpr, CHUNK: gl.constexpr):  # fmt: skip
    b = w_bufs.index(slot * HALVES)._reinterpret(gl.bfloat16, [128, CHUNK], lora_layout)
    b_hi = w_bufs.index(slot * HALVES + HALVES - 1)._reinterpret(gl.bfloat16, [128, CHUNK], lora_layout)
    s = x_bufs.index(slot)._reinterpret(gl.bfloat16, [HALVES, TOKENS, CHUNK], shrunk_layout)
    return b, b_hi, s


@gluon.jit
def _load_lora(
    lora_desc, shrunk_desc, seg_slot_ptr, seg0, nseg, expert, n0, row0, full, empty, w_bufs, x_bufs, slot, phase,
    N: gl.constexpr, LORA_E: gl.constexpr, GATED: gl.constexpr, RANK: gl.constexpr, CHUNK: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 2 if GATED else 1
    LORA_LAYOUT: gl.constexpr = lora_desc.layout
    SHRUNK_LAYOUT: gl.constexpr = shrunk_desc.layout
    for j in range(nseg):
        adapter = gl.load(seg_slot_ptr + seg0 + j)
        e = expert if LORA_E > 1 else 0
        b_row = (adapter * LORA_E + e) * HALVES * N + n0
        for c in gl.static_range(RANK // CHUNK):
            bar = full.index(slot)
            b, b_hi, s = _lora_views(w_bufs, x_bufs, slot, LORA_LAYOUT, SHRUNK_LAYOUT, HALVES, TOKENS, CHUNK)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(bar, HALVES * (128 + TOKENS) * CHUNK * 2)
            tma.async_copy_global_to_shared(lora_desc, [b_row, c * CHUNK], bar, b)
            tma.async_copy_global_to_shared(shrunk_desc, [row0, c * CHUNK], bar, s.index(0))
            if GATED:
                tma.async_copy_global_to_shared(lora_desc, [b_row + N, c * CHUNK], bar, b_hi)
                tma.async_copy_global_to_shared(shrunk_desc, [row0, RANK + c * CHUNK], bar, s.index(1))
            slot, phase = advance(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def _load_weights(w_desc, w_row, k, bar, w_bufs, slot, N: gl.constexpr, GATED: gl.constexpr):
    HALVES: gl.constexpr = 2 if GATED else 1
    tma.async_copy_global_to_shared(w_desc, [w_row, k * 128], bar, w_bufs.index(slot * HALVES))
    if GATED:
        tma.async_copy_global_to_shared(w_desc, [w_row + N, k * 128], bar, w_bufs.index(slot * HALVES + 1))


@gluon.jit
def _producer(
    x_desc, w_desc, lora_desc, shrunk_desc, tiles_ptr, counts_ptr, seg_slot_ptr, full, empty, w_bufs, x_bufs,
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, BLOCK: gl.constexpr, A16: gl.constexpr,
    RANK: gl.constexpr, CHUNK: gl.constexpr, LORA_E: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 2 if GATED else 1
    N_TILES: gl.constexpr = (N + 127) // 128
    K_STEPS: gl.constexpr = (K + 127) // 128
    BYTES: gl.constexpr = HALVES * 128 * 128 + TOKENS * 128 * (2 if A16 else 1)
    # The first unit's weights may start before the kernel that writes its activations has ended.
    AHEAD: gl.constexpr = min(K_STEPS, STAGES) if EARLY else 0
    if PDL and not EARLY:
        gdc_wait()
    total = gl.load(counts_ptr) * N_TILES
    slot = 0
    phase = 0
    if EARLY:
        if gl.program_id(0) < total:
            tile = tiles_ptr + (gl.program_id(0) // N_TILES) * TILE_FIELDS
            w_row = gl.load(tile) * HALVES * N + (gl.program_id(0) % N_TILES) * 128
            for k in range(AHEAD):
                mbarrier.expect(full.index(k), BYTES)
                _load_weights(w_desc, w_row, k, full.index(k), w_bufs, k, N, GATED)
        gdc_wait()
    ahead = AHEAD
    for u in range(gl.program_id(0), total, gl.num_programs(0)):
        tile = tiles_ptr + (u // N_TILES) * TILE_FIELDS
        n0 = (u % N_TILES) * 128
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        w_row = expert * HALVES * N + n0
        seg0 = 0
        nseg = 0
        if RANK > 0:
            seg0 = gl.load(tile + 3)
            nseg = gl.load(tile + 4)
            if BLOCK:
                slot, phase = _load_lora(
                    lora_desc, shrunk_desc, seg_slot_ptr, seg0, nseg, expert, n0, row0, full, empty, w_bufs, x_bufs,
                    slot, phase, N, LORA_E, GATED, RANK, CHUNK, TOKENS, STAGES,
                )  # fmt: skip
        for k in range(K_STEPS):
            bar = full.index(slot)
            if k >= ahead:
                mbarrier.wait(empty.index(slot), phase ^ 1)
                mbarrier.expect(bar, BYTES)
                _load_weights(w_desc, w_row, k, bar, w_bufs, slot, N, GATED)
            tma.async_copy_global_to_shared(x_desc, [row0, k * 128], bar, x_bufs.index(slot))
            slot, phase = advance(slot, phase, STAGES)
        ahead = 0
        if RANK > 0 and not BLOCK:
            slot, phase = _load_lora(
                lora_desc, shrunk_desc, seg_slot_ptr, seg0, nseg, expert, n0, row0, full, empty, w_bufs, x_bufs,
                slot, phase, N, LORA_E, GATED, RANK, CHUNK, TOKENS, STAGES,
            )  # fmt: skip


@gluon.jit
def _add_lora(
    lo, hi, col_slot, seg_slot_ptr, seg0, nseg, full, empty, w_bufs, x_bufs, slot, phase,
    lora_layout: gl.constexpr, shrunk_layout: gl.constexpr, FIRST: gl.constexpr, GATED: gl.constexpr,
    RANK: gl.constexpr, CHUNK: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 2 if GATED else 1
    ROWS: gl.constexpr = lo.shape[0]
    ACC: gl.constexpr = lo.type.layout
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    zero = gl.zeros([ROWS, TOKENS], gl.float32, MMA)
    for j in range(nseg):
        mine = (col_slot == gl.load(seg_slot_ptr + seg0 + j))[None, :]
        for _ in gl.static_range(RANK // CHUNK):
            b, b_hi, s = _lora_views(w_bufs, x_bufs, slot, lora_layout, shrunk_layout, HALVES, TOKENS, CHUNK)
            mbarrier.wait(full.index(slot), phase)
            d = warpgroup_mma(b.slice(FIRST, ROWS), s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
            if GATED:
                d_hi = warpgroup_mma(
                    b_hi.slice(FIRST, ROWS), s.index(1).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                d, d_hi = warpgroup_mma_wait(0, deps=[d, d_hi])
                d_hi = gl.convert_layout(d_hi, ACC, assert_trivial=True)
                hi = gl.where(mine, hi + d_hi, hi)
            else:
                d = warpgroup_mma_wait(0, deps=[d])
            mbarrier.arrive(empty.index(slot), count=1)
            lo = gl.where(mine, lo + gl.convert_layout(d, ACC, assert_trivial=True), lo)
            slot, phase = advance(slot, phase, STAGES)
    return lo, hi, slot, phase


@gluon.jit
def _multiply(w_buf, x, acc, use_acc: gl.constexpr, A16: gl.constexpr, MMA: gl.constexpr):
    if A16:
        w = w_buf.load(gl.DotOperandLayout(0, MMA, 2)).to(gl.float16)
        return warpgroup_mma(w, x, acc, use_acc=use_acc, is_async=True)
    else:
        return warpgroup_mma(w_buf, x, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _columns(w_buf, x_buf, zero, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """The product over COUNT columns of FP8, on its way."""
    x = x_buf.slice(FIRST, COUNT, 1).permute((1, 0))
    return warpgroup_mma(w_buf.slice(FIRST, COUNT, 1), x, zero, use_acc=False, is_async=True)


@gluon.jit
def _short_sums(w_buf, x_buf, zero, SUMS: gl.constexpr):
    """The product over 128 columns of FP8, as the sum of products that left the accumulator after SUMS, 32 or 64."""
    if SUMS == 32:
        a = _columns(w_buf, x_buf, zero, 0, 32)
        b = _columns(w_buf, x_buf, zero, 32, 32)
        c = _columns(w_buf, x_buf, zero, 64, 32)
        d = _columns(w_buf, x_buf, zero, 96, 32)
        a, b, c, d = warpgroup_mma_wait(0, deps=[a, b, c, d])
        total = (a + b) + (c + d)
    else:
        a = _columns(w_buf, x_buf, zero, 0, 64)
        b = _columns(w_buf, x_buf, zero, 64, 64)
        a, b = warpgroup_mma_wait(0, deps=[a, b])
        total = a + b
    return total


@gluon.jit
def _main_loop(
    lo, hi, x_scale_ptr, w_scale_ptr, row0, expert, nb, full, empty, w_bufs, x_bufs, slot, phase, turn,
    FIRST: gl.constexpr, GIVE: gl.constexpr, N_BLOCKS: gl.constexpr, K_STEPS: gl.constexpr, GATED: gl.constexpr,
    BLOCK: gl.constexpr, A16: gl.constexpr, SUMS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """K loop over this warpgroup's weight rows, from FIRST on; with GIVE the turn is handed on once the last stage is
    there."""
    HALVES: gl.constexpr = 2 if GATED else 1
    ROWS: gl.constexpr = lo.shape[0]
    MMA: gl.constexpr = lo.type.layout
    cols = row0 + gl.arange(0, TOKENS, gl.SliceLayout(0, MMA))
    lo_ptr = w_scale_ptr + (expert * N_BLOCKS + nb) * K_STEPS
    hi_ptr = lo_ptr + (N_BLOCKS // HALVES) * K_STEPS
    # A product leaves the accumulator to be scaled, or because fp8's is short; fp16's is not.
    PROMOTE: gl.constexpr = BLOCK or not A16
    SHORT: gl.constexpr = GATED and not A16
    # Widened weights of both halves beside two wide accumulators do not fit in registers.
    ONE_BY_ONE: gl.constexpr = A16 and TOKENS > 32
    zero = gl.zeros([ROWS, TOKENS], gl.float32, MMA)
    if BLOCK:
        s_lo = gl.load(lo_ptr)
        s_hi = gl.load(hi_ptr) if GATED else s_lo
        if A16:
            sx = gl.full([TOKENS], 1.0, gl.float32, gl.SliceLayout(0, MMA))
        else:
            sx = gl.load(x_scale_ptr + cols * K_STEPS)
    for k in range(K_STEPS):
        if BLOCK:
            nxt = gl.minimum(k + 1, K_STEPS - 1)
            lo_next = gl.load(lo_ptr + nxt)
            hi_next = gl.load(hi_ptr + nxt) if GATED else lo_next
            if A16:
                sx_next = sx
            else:
                sx_next = gl.load(x_scale_ptr + cols * K_STEPS + nxt)
        w_lo = w_bufs.index(slot * HALVES).slice(FIRST, ROWS)
        w_hi = w_bufs.index(slot * HALVES + HALVES - 1).slice(FIRST, ROWS)
        x = x_bufs.index(slot).permute((1, 0))
        mbarrier.wait(full.index(slot), phase)
        if GIVE:
            mbarrier.arrive(turn, count=1, pred=k == K_STEPS - 1)
        if PROMOTE:
            if SHORT:
                d = _short_sums(w_lo, x_bufs.index(slot), zero, SUMS)
                # At once, or the sums of both halves would need registers together.
                lo += d * (sx * s_lo)[None, :] if BLOCK else d
                d_hi = _short_sums(w_hi, x_bufs.index(slot), zero, SUMS)
            elif GATED and ONE_BY_ONE:
                d = warpgroup_mma_wait(0, deps=[_multiply(w_lo, x, zero, False, A16, MMA)])
                d_hi = warpgroup_mma_wait(0, deps=[_multiply(w_hi, x, zero, False, A16, MMA)])
            elif GATED:
                d = _multiply(w_lo, x, zero, False, A16, MMA)
                d_hi = _multiply(w_hi, x, zero, False, A16, MMA)
                d, d_hi = warpgroup_mma_wait(0, deps=[d, d_hi])
            else:
                d = warpgroup_mma_wait(0, deps=[_multiply(w_lo, x, zero, False, A16, MMA)])
            mbarrier.arrive(empty.index(slot), count=1)
            if not SHORT:
                lo += d * (sx * s_lo)[None, :] if BLOCK else d
            if BLOCK:
                if GATED:
                    hi += d_hi * (sx * s_hi)[None, :]
                s_lo = lo_next
                s_hi = hi_next
                sx = sx_next
            elif GATED:
                hi += d_hi
        else:
            lo = _multiply(w_lo, x, lo, True, A16, MMA)
            if GATED and ONE_BY_ONE:
                lo = warpgroup_mma_wait(0, deps=[lo])
                hi = _multiply(w_hi, x, hi, True, A16, MMA)
                hi = warpgroup_mma_wait(0, deps=[hi])
            elif GATED:
                hi = _multiply(w_hi, x, hi, True, A16, MMA)
                lo, hi = warpgroup_mma_wait(0, deps=[lo, hi])
            else:
                lo = warpgroup_mma_wait(0, deps=[lo])
            mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = advance(slot, phase, STAGES)
    return lo, hi, slot, phase


@gluon.jit
def _consumer(
    WHO: gl.constexpr, x_scale_ptr, w_scale_ptr, out_ptr, q_ptr, q_scale_ptr, row_slot_ptr, seg_slot_ptr, tiles_ptr,
    counts_ptr, full, empty, turns, w_bufs, x_bufs, lora_layout: gl.constexpr, shrunk_layout: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, BLOCK: gl.constexpr, A16: gl.constexpr,
    SUMS: gl.constexpr, QUANT: gl.constexpr, RANK: gl.constexpr, CHUNK: gl.constexpr, ACTIVATION: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 2 if GATED else 1
    N_TILES: gl.constexpr = (N + 127) // 128
    K_STEPS: gl.constexpr = (K + 127) // 128
    LORA_SLOTS: gl.constexpr = RANK // CHUNK if RANK > 0 else 0
    # W8A16 shares units: this warpgroup's weight rows of each are ROWS from FIRST on.
    ROWS: gl.constexpr = 64 if A16 else 128
    FIRST: gl.constexpr = WHO * ROWS if A16 else 0
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16 if A16 else 32])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, 4], [0, 1])
    gl.static_assert(not (QUANT and A16), "a group of 128 columns would be spread over two warpgroups")
    if PDL:
        gdc_wait()
        # Only now: a successor that starts early may count on the kernel before this one having ended.
        gdc_launch_dependents()
    total = gl.load(counts_ptr) * N_TILES
    at = 0  # stages handed out before this unit
    index = 0
    parity = 1 - WHO
    for u in range(gl.program_id(0), total, gl.num_programs(0)):
        tile = tiles_ptr + (u // N_TILES) * TILE_FIELDS
        seg0 = 0
        nseg = 0
        if RANK > 0:
            seg0 = gl.load(tile + 3)
            nseg = gl.load(tile + 4)
        if A16 or index % 2 == WHO:
            n0 = (u % N_TILES) * 128
            expert = gl.load(tile)
            row0 = gl.load(tile + 1)
            size = gl.load(tile + 2)
            slot = at % STAGES
            phase = (at // STAGES) & 1
            token = gl.arange(0, TOKENS, gl.SliceLayout(0, MMA))
            row = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
            if RANK > 0:
                col_slot = gl.load(row_slot_ptr + row0 + token, mask=token < size, other=-1)
            if not BLOCK:
                inside = n0 + row < N
                w_ptrs = w_scale_ptr + expert * HALVES * N + n0 + row
                s_lo = gl.load(w_ptrs, mask=inside, other=0.0)
                s_hi = gl.load(w_ptrs + (HALVES - 1) * N, mask=inside, other=0.0)
            if A16 or not BLOCK:
                sx = gl.load(x_scale_ptr + row0 + token, mask=token < size, other=0.0)
            lo = gl.zeros([ROWS, TOKENS], gl.float32, MMA)
            hi = gl.zeros([ROWS, TOKENS], gl.float32, MMA)
            if not A16:
                mbarrier.wait(turns.index(WHO), parity)
                parity = parity ^ 1
            if RANK > 0 and BLOCK:
                # W8A16 scales its rows at the end, so the product is scaled the other way here (both powers of two).
                lo, hi, slot, phase = _add_lora(
                    lo, hi, col_slot, seg_slot_ptr, seg0, nseg, full, empty, w_bufs, x_bufs, slot, phase,
                    lora_layout, shrunk_layout, FIRST, GATED, RANK, CHUNK, TOKENS, STAGES,
                )  # fmt: skip
                if A16:
                    back = reciprocal(sx)
                    lo = lo * back[None, :]
                    hi = hi * back[None, :]
            lo, hi, slot, phase = _main_loop(
                lo, hi, x_scale_ptr, w_scale_ptr, row0, expert, n0 // 128, full, empty, w_bufs, x_bufs, slot, phase,
                turns.index(1 - WHO), FIRST, not A16 and (BLOCK or RANK == 0), N_TILES * HALVES, K_STEPS, GATED,
                BLOCK, A16, SUMS, TOKENS, STAGES,
            )  # fmt: skip
            if not BLOCK:
                lo = lo * (s_lo[:, None] * sx[None, :])
                if GATED:
                    hi = hi * (s_hi[:, None] * sx[None, :])
                if RANK > 0:
                    lo, hi, slot, phase = _add_lora(
                        lo, hi, col_slot, seg_slot_ptr, seg0, nseg, full, empty, w_bufs, x_bufs, slot, phase,
                        lora_layout, shrunk_layout, FIRST, GATED, RANK, CHUNK, TOKENS, STAGES,
                    )  # fmt: skip
                    if not A16:
                        mbarrier.arrive(turns.index(1 - WHO), count=1)
            elif A16:
                lo = lo * sx[None, :]
                hi = hi * sx[None, :]
            if GATED:
                value = glu(lo, hi, ACTIVATION, False).to(gl.bfloat16)
            else:
                value = lo.to(gl.bfloat16)
            out_row = n0 + FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
            out_token = gl.arange(0, TOKENS, gl.SliceLayout(0, OUT))
            out_at = (row0 + out_token).to(gl.int64)[None, :] * N + out_row[:, None]
            keep = (out_token < size)[None, :] & (out_row < N)[:, None]
            if QUANT:
                v = gl.where((n0 + row < N)[:, None], value.to(gl.float32), 0.0)
                scale = gl.maximum(gl.max(gl.abs(v), axis=0), EPS) * INV_FP8_MAX
                inv = gl.div_rn(gl.full([TOKENS], 1.0, gl.float32, gl.SliceLayout(0, MMA)), scale)
                # The conversion saturates at 448 and keeps NaN.
                q = (v * inv[None, :]).to(gl.float8e4nv)
                gl.store(q_scale_ptr + (row0 + token) * N_TILES + n0 // 128, scale, mask=token < size)
                gl.store(q_ptr + out_at, gl.convert_layout(q, OUT), mask=keep)
            if not QUANT or RANK > 0:
                gl.store(out_ptr + out_at, gl.convert_layout(value, OUT), mask=keep)
        at += K_STEPS + nseg * LORA_SLOTS
        index += 1


@gluon.jit
def decode_gemm_kernel(
    x_desc, x_scale_ptr, w_desc, w_scale_ptr, out_ptr, q_ptr, q_scale_ptr, lora_desc, shrunk_desc, row_slot_ptr,
    seg_slot_ptr, tiles_ptr, counts_ptr,
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, BLOCK: gl.constexpr, A16: gl.constexpr,
    SUMS: gl.constexpr, QUANT: gl.constexpr, RANK: gl.constexpr, CHUNK: gl.constexpr, LORA_E: gl.constexpr,
    ACTIVATION: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 2 if GATED else 1
    w_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * HALVES, 128, 128], w_desc.layout)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, 128], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2 if A16 else 1)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    LORA_LAYOUT: gl.constexpr = lora_desc.layout if RANK > 0 else None
    SHRUNK_LAYOUT: gl.constexpr = shrunk_desc.layout if RANK > 0 else None
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, x_scale_ptr, w_scale_ptr, out_ptr, q_ptr, q_scale_ptr, row_slot_ptr, seg_slot_ptr, tiles_ptr,
                    counts_ptr, full, empty, turns, w_bufs, x_bufs, LORA_LAYOUT, SHRUNK_LAYOUT,
                    N, K, GATED, BLOCK, A16, SUMS, QUANT, RANK, CHUNK, ACTIVATION, TOKENS, STAGES, PDL,
                ),
            ),
            (
                _consumer,
                (
                    1, x_scale_ptr, w_scale_ptr, out_ptr, q_ptr, q_scale_ptr, row_slot_ptr, seg_slot_ptr, tiles_ptr,
                    counts_ptr, full, empty, turns, w_bufs, x_bufs, LORA_LAYOUT, SHRUNK_LAYOUT,
                    N, K, GATED, BLOCK, A16, SUMS, QUANT, RANK, CHUNK, ACTIVATION, TOKENS, STAGES, PDL,
                ),
            ),
            (
                _producer,
                (
                    x_desc, w_desc, lora_desc, shrunk_desc, tiles_ptr, counts_ptr, seg_slot_ptr, full, empty, w_bufs,
                    x_bufs, N, K, GATED, BLOCK, A16, RANK, CHUNK, LORA_E, TOKENS, STAGES, EARLY, PDL,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def _stages(gated: bool, tokens: int, a16: bool) -> int:
    stage = (2 if gated else 1) * 128 * 128 + tokens * 128 * (2 if a16 else 1)
    # 227 KB a program, less the barriers and the layout-conversion scratch of the two epilogues.
    return min(12, (227 * 1024 - 14 * 1024) // stage)


def decode_gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    plan: RowPlan,
    *,
    block: bool,
    activation: str | None,
    tokens: int,
    out: torch.Tensor | None,
    q: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    shrunk: torch.Tensor | None = None,
    sums: int = 128,
    early: bool = False,
    programs: int = PROGRAMS,
) -> None:
    """Multiply every expert's rows by its weights (small batches).

    As `prefill_gemm.grouped_gemm`, except that rows are packed, the plan's tiles hold at most `tokens` (16, 32 or, for
    W8A16, 64) rows, and `x` may be fp16 ``[R, K]`` beside an f32 ``[R]`` scale for W8A16. `sums` is `Recipe.fp8_sums`
    of w13 (32 or 64; without `activation` always 128). `early` lets the weights of the first unit start before the
    preceding kernel ends: right only where that kernel did not write the plan.
    """
    gated = activation is not None
    n = w.shape[1] // 2 if gated else w.shape[1]
    k = w.shape[2]
    a16 = x.dtype == torch.float16
    rank = lora_b.shape[-1] if lora_b is not None else 0
    chunk = min(rank, 32 if gated else 64) if rank else 0
    fp8_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    x_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16 if a16 else 8, rank=2)
    w_desc = TensorDescriptor.from_tensor(w.view(-1, k), [128, 128], fp8_layout)
    x_desc = TensorDescriptor.from_tensor(x, [tokens, 128], x_layout)
    lora_desc, shrunk_desc = w_desc, x_desc
    if lora_b is not None and shrunk is not None:
        lora_layout = gl.NVMMASharedLayout(swizzle_byte_width=chunk * 2, element_bitwidth=16, rank=2)
        lora_desc = TensorDescriptor.from_tensor(lora_b.view(-1, rank), [128, chunk], lora_layout)
        shrunk_desc = TensorDescriptor.from_tensor(shrunk, [tokens, chunk], lora_layout)
    decode_gemm_kernel[(programs,)](
        x_desc,
        x_scale,
        w_desc,
        w_scale,
        out if out is not None else q,
        q if q is not None else x,
        q_scale if q_scale is not None else x_scale,
        lora_desc,
        shrunk_desc,
        plan.row_slot if plan.row_slot is not None else plan.tiles,
        plan.seg_slot if plan.seg_slot is not None else plan.tiles,
        plan.tiles,
        plan.counts,
        N=n,
        K=k,
        GATED=gated,
        BLOCK=block,
        A16=a16,
        SUMS=sums,
        QUANT=q is not None,
        RANK=rank,
        CHUNK=chunk,
        LORA_E=lora_b.shape[1] if lora_b is not None else 1,
        ACTIVATION=activation or "none",
        TOKENS=tokens,
        STAGES=_stages(gated, tokens, a16),
        # Adapter stages come first in the ring for block scales, and they need the shrink's result.
        EARLY=early and not (block and rank > 0),
        PDL=True,
        num_warps=4,
        maxnreg=168,
        launch_pdl=True,
    )
