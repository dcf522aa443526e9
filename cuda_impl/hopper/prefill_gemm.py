# SPDX-License-Identifier: Apache-2.0
"""Large-batch grouped FP8 GEMM for Hopper: one TMA warp feeds two warpgroups that share every weight tile.

A tile is 128 rows of one expert times 256 weight rows; each warpgroup owns 64 of the rows. The 256 weight rows are
two boxes of 128: for w13 a gate box and the up box that belongs to it, so ``act(gate) * up`` happens in registers; for
w2 two neighbouring boxes. Rows arrive sorted by (expert, adapter) with every expert padded to 64 rows, and a tile
whose second half is empty costs one warpgroup nothing but the handshakes.

Scales. Every 128-column step is multiplied into a temporary that is added in f32, because the tensor core's own fp8
accumulator keeps 14 bits (`common.fp8_sums` computes the same). ``block`` scales the temporary first; ``channel`` (one
scale a row, one a weight row) scales the sum. The temporary of one step is the accumulator operand of the next with
``use_acc=False``: given a fresh zero tensor instead, the assembler keeps two of them and spills.

LoRA. The B tiles of the adapters present in the tile travel through the same ring as stages of their own, before the K
loop, while the temporary is free (after it the assembler would serialise the products and spill). Their product
goes through the temporary and is added only where the row belongs to that adapter, so a base row's arithmetic is the
same with and without adapters.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .device_math import EPS, INV_FP8_MAX, advance, glu, reciprocal
from .plan import RowPlan

TILE_FIELDS = gl.constexpr(8)


@gluon.jit
def _load_tile(
    a_desc,
    b_desc,
    row0,
    two_halves,
    b_row0,
    b_row1,
    full,
    empty,
    a_bufs,
    b_bufs,
    slot,
    phase,
    K_STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    for k in range(K_STEPS):
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), phase ^ 1)
        mbarrier.expect(bar, 128 * 128 + 256 * 128, pred=two_halves)
        mbarrier.expect(bar, 64 * 128 + 256 * 128, pred=two_halves == 0)
        tma.async_copy_global_to_shared(a_desc, [row0, k * 128], bar, a_bufs.index(slot * 2))
        tma.async_copy_global_to_shared(a_desc, [row0 + 64, k * 128], bar, a_bufs.index(slot * 2 + 1), pred=two_halves)
        tma.async_copy_global_to_shared(b_desc, [b_row0, k * 128], bar, b_bufs.index(slot).slice(0, 128, 0))
        tma.async_copy_global_to_shared(b_desc, [b_row1, k * 128], bar, b_bufs.index(slot).slice(128, 128, 0))
        slot, phase = advance(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def _load_lora(
    lora_desc,
    seg_slot_ptr,
    seg0,
    nseg,
    expert,
    n0,
    full,
    empty,
    b_bufs,
    slot,
    phase,
    N: gl.constexpr,
    LORA_E: gl.constexpr,
    GATED: gl.constexpr,
    RANK: gl.constexpr,
    STAGES: gl.constexpr,
):
    CHUNK: gl.constexpr = min(RANK, 64)
    for j in range(nseg):
        adapter = gl.load(seg_slot_ptr + seg0 + j)
        e = expert if LORA_E > 1 else 0
        if GATED:
            row0 = (adapter * LORA_E + e) * 2 * N + n0
            row1 = row0 + N
        else:
            row0 = (adapter * LORA_E + e) * N + n0
            row1 = row0 + 128
        for c in gl.static_range(RANK // CHUNK):
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(bar, 2 * 128 * CHUNK * 2)
            lo = b_bufs.index(slot).slice(0, 128, 0)._reinterpret(gl.bfloat16, [128, CHUNK], lora_desc.layout)
            hi = b_bufs.index(slot).slice(128, 128, 0)._reinterpret(gl.bfloat16, [128, CHUNK], lora_desc.layout)
            tma.async_copy_global_to_shared(lora_desc, [row0, c * CHUNK], bar, lo)
            tma.async_copy_global_to_shared(lora_desc, [row1, c * CHUNK], bar, hi)
            slot, phase = advance(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def _producer(
    a_desc,
    b_desc,
    lora_desc,
    tiles_ptr,
    counts_ptr,
    seg_slot_ptr,
    full,
    empty,
    a_bufs,
    b_bufs,
    N: gl.constexpr,
    K: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK: gl.constexpr,
    RANK: gl.constexpr,
    LORA_E: gl.constexpr,
    STAGES: gl.constexpr,
):
    WIDTH: gl.constexpr = 128 if GATED else 256
    N_TILES: gl.constexpr = (N + WIDTH - 1) // WIDTH
    total = gl.load(counts_ptr) * N_TILES
    slot = 0
    phase = 0
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        tile = tiles_ptr + (t // N_TILES) * TILE_FIELDS
        n0 = (t % N_TILES) * WIDTH
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        two = gl.load(tile + 2) > 64
        if GATED:
            b_row0 = expert * 2 * N + n0
            b_row1 = b_row0 + N
        else:
            b_row0 = expert * N + n0
            b_row1 = b_row0 + 128
        if RANK > 0:
            seg0 = gl.load(tile + 3)
            nseg = gl.load(tile + 4)
            slot, phase = _load_lora(
                lora_desc, seg_slot_ptr, seg0, nseg, expert, n0, full, empty, b_bufs, slot, phase,
                N, LORA_E, GATED, RANK, STAGES,
            )  # fmt: skip
        slot, phase = _load_tile(
            a_desc, b_desc, row0, two, b_row0, b_row1, full, empty, a_bufs, b_bufs, slot, phase,
            (K + 127) // 128, STAGES,
        )  # fmt: skip


@gluon.jit
def _drain(count, full, empty, slot, phase, STAGES: gl.constexpr):
    # An idle warpgroup still takes part in the ring's handshakes, or its arrivals would fall into later turns.
    for _ in range(count):
        mbarrier.wait(full.index(slot), phase)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = advance(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def _add_lora(
    lo_acc,
    hi_acc,
    tmp,
    lora_layout: gl.constexpr,
    shrunk_ptr,
    row_slot_ptr,
    seg_slot_ptr,
    seg0,
    nseg,
    row0,
    full,
    empty,
    b_bufs,
    slot,
    phase,
    GATED: gl.constexpr,
    RANK: gl.constexpr,
    STAGES: gl.constexpr,
):
    CHUNK: gl.constexpr = min(RANK, 64)
    ACC: gl.constexpr = lo_acc.type.layout
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WIDTH: gl.constexpr = 2 * RANK if GATED else RANK
    HI: gl.constexpr = RANK if GATED else 0
    row_slot = gl.load(row_slot_ptr + row0 + gl.arange(0, 64, gl.SliceLayout(1, ACC)))
    rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, DOT))
    cols = gl.arange(0, CHUNK, gl.SliceLayout(0, DOT))
    ptrs = shrunk_ptr + rows[:, None] * WIDTH + cols[None, :]
    for j in range(nseg):
        adapter = gl.load(seg_slot_ptr + seg0 + j)
        mine = (row_slot == adapter)[:, None]
        # Unrolled, the products of one chunk would wait in registers beside those of the next, and spill.
        for c in range(RANK // CHUNK):
            s_lo = gl.load(ptrs + c * CHUNK)
            if GATED:
                s_hi = gl.load(ptrs + HI + c * CHUNK)
            else:
                s_hi = s_lo
            mbarrier.wait(full.index(slot), phase)
            b_lo = b_bufs.index(slot).slice(0, 128, 0)._reinterpret(gl.bfloat16, [128, CHUNK], lora_layout)
            b_hi = b_bufs.index(slot).slice(128, 128, 0)._reinterpret(gl.bfloat16, [128, CHUNK], lora_layout)
            t = gl.convert_layout(tmp, MMA, assert_trivial=True)
            t = warpgroup_mma(s_lo, b_lo.permute((1, 0)), t, use_acc=False, is_async=True)
            t = warpgroup_mma_wait(0, deps=[t])
            tmp = gl.convert_layout(t, ACC, assert_trivial=True)
            lo_acc = gl.where(mine, lo_acc + tmp, lo_acc)
            t = gl.convert_layout(tmp, MMA, assert_trivial=True)
            t = warpgroup_mma(s_hi, b_hi.permute((1, 0)), t, use_acc=False, is_async=True)
            t = warpgroup_mma_wait(0, deps=[t])
            mbarrier.arrive(empty.index(slot), count=1)
            tmp = gl.convert_layout(t, ACC, assert_trivial=True)
            hi_acc = gl.where(mine, hi_acc + tmp, hi_acc)
            slot, phase = advance(slot, phase, STAGES)
    return lo_acc, hi_acc, tmp, slot, phase


@gluon.jit
def _main_loop(
    lo_acc,
    hi_acc,
    tmp,
    a_scale_ptr,
    b_scale_ptr,
    row0,
    expert,
    nb_lo,
    nb_hi,
    full,
    empty,
    a_bufs,
    b_bufs,
    slot,
    phase,
    WG: gl.constexpr,
    N_BLOCKS: gl.constexpr,
    K_STEPS: gl.constexpr,
    SCALED: gl.constexpr,
    STAGES: gl.constexpr,
):
    ACC: gl.constexpr = lo_acc.type.layout
    rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
    a_ptrs = a_scale_ptr + rows * K_STEPS
    lo_ptr = b_scale_ptr + (expert * N_BLOCKS + nb_lo) * K_STEPS
    hi_ptr = b_scale_ptr + (expert * N_BLOCKS + nb_hi) * K_STEPS
    if SCALED:
        sa = gl.load(a_ptrs)
        s_lo = gl.load(lo_ptr)
        s_hi = gl.load(hi_ptr)
    for k in range(K_STEPS):
        if SCALED:
            # The next step's scales start now and are needed one step later.
            nxt = gl.minimum(k + 1, K_STEPS - 1)
            sa_next = gl.load(a_ptrs + nxt)
            lo_next = gl.load(lo_ptr + nxt)
            hi_next = gl.load(hi_ptr + nxt)
        a = a_bufs.index(slot * 2 + WG)
        mbarrier.wait(full.index(slot), phase)
        tmp = warpgroup_mma(
            a, b_bufs.index(slot).slice(0, 128, 0).permute((1, 0)), tmp, use_acc=False, is_async=True
        )
        tmp = warpgroup_mma_wait(0, deps=[tmp])
        if SCALED:
            lo_acc += tmp * (sa * s_lo)[:, None]
        else:
            lo_acc += tmp
        tmp = warpgroup_mma(
            a, b_bufs.index(slot).slice(128, 128, 0).permute((1, 0)), tmp, use_acc=False, is_async=True
        )
        tmp = warpgroup_mma_wait(0, deps=[tmp])
        mbarrier.arrive(empty.index(slot), count=1)
        if SCALED:
            hi_acc += tmp * (sa * s_hi)[:, None]
            sa = sa_next
            s_lo = lo_next
            s_hi = hi_next
        else:
            hi_acc += tmp
        slot, phase = advance(slot, phase, STAGES)
    return lo_acc, hi_acc, tmp, slot, phase


@gluon.jit
def _channel_scales(
    a_scale_ptr,
    b_scale_ptr,
    row0,
    expert,
    n0,
    ACC: gl.constexpr,
    GATED: gl.constexpr,
    NONZERO: gl.constexpr,
    N: gl.constexpr,
):
    """Scales of the tile's rows and of its two boxes of weight rows; 1 past the end.

    NONZERO makes 2^-60 of a zero scale, by which a weight's codes vanish as well and by which one can divide.
    """
    WIDTH: gl.constexpr = 128 if GATED else 256
    cols = n0 + gl.arange(0, 128, gl.SliceLayout(0, ACC))
    sa = gl.load(a_scale_ptr + row0 + gl.arange(0, 64, gl.SliceLayout(1, ACC)))
    lo_ptrs = b_scale_ptr + expert * (2 if GATED else 1) * N + cols
    hi_ptrs = lo_ptrs + (N if GATED else 128)
    if N % WIDTH == 0:
        lo = gl.load(lo_ptrs)
        hi = gl.load(hi_ptrs)
    else:
        lo = gl.load(lo_ptrs, mask=cols < N, other=1.0)
        hi = gl.load(hi_ptrs, mask=cols < N if GATED else cols + 128 < N, other=1.0)
    if NONZERO:
        lo = gl.where(lo == 0.0, 2.0**-60, lo)
        hi = gl.where(hi == 0.0, 2.0**-60, hi)
    return sa, lo, hi


@gluon.jit
def _store_half(value, out_desc, stage, row, col):
    tma.store_wait(0)
    stage.store(value.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, col], stage)


@gluon.jit
def _consumer(
    WG: gl.constexpr,
    a_scale_ptr,
    b_scale_ptr,
    out_desc,
    q_desc,
    q_scale_ptr,
    lora_layout: gl.constexpr,
    shrunk_ptr,
    row_slot_ptr,
    seg_slot_ptr,
    tiles_ptr,
    counts_ptr,
    full,
    empty,
    a_bufs,
    b_bufs,
    stages,
    N: gl.constexpr,
    K: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK: gl.constexpr,
    RANK: gl.constexpr,
    ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
):
    WIDTH: gl.constexpr = 128 if GATED else 256
    N_TILES: gl.constexpr = (N + WIDTH - 1) // WIDTH
    K_STEPS: gl.constexpr = (K + 127) // 128
    HALF_BLOCKS: gl.constexpr = (N + 127) // 128
    CHUNKS: gl.constexpr = RANK // min(RANK, 64) if RANK > 0 else 0
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    total = gl.load(counts_ptr) * N_TILES
    stage = stages.index(WG)
    slot = 0
    phase = 0
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        tile = tiles_ptr + (t // N_TILES) * TILE_FIELDS
        n0 = (t % N_TILES) * WIDTH
        expert = gl.load(tile)
        row0 = gl.load(tile + 1) + WG * 64
        valid = gl.load(tile + 2)
        seg0 = 0
        nseg = 0
        if RANK > 0:
            seg0 = gl.load(tile + 3)
            nseg = gl.load(tile + 4)
        if valid > WG * 64:
            nb = n0 // 128
            if GATED:
                nb_hi = nb + HALF_BLOCKS
            else:
                nb_hi = gl.minimum(nb + 1, HALF_BLOCKS - 1)
            lo = gl.zeros([64, 128], gl.float32, HALF)
            hi = gl.zeros([64, 128], gl.float32, HALF)
            tmp = gl.zeros([64, 128], gl.float32, HALF)
            if RANK > 0:
                lo, hi, tmp, slot, phase = _add_lora(
                    lo, hi, tmp, lora_layout, shrunk_ptr, row_slot_ptr, seg_slot_ptr, seg0, nseg, row0,
                    full, empty, b_bufs, slot, phase, GATED, RANK, STAGES,
                )  # fmt: skip
                if not BLOCK:
                    if nseg > 0:
                        # The scales come after the loop, so they are taken out here first.
                        sa, s_lo, s_hi = _channel_scales(
                            a_scale_ptr, b_scale_ptr, row0, expert, n0, HALF, GATED, RANK > 0, N
                        )
                        sa = reciprocal(sa)[:, None]
                        lo = lo * sa * reciprocal(s_lo)[None, :]
                        hi = hi * sa * reciprocal(s_hi)[None, :]
            lo, hi, tmp, slot, phase = _main_loop(
                lo, hi, tmp, a_scale_ptr, b_scale_ptr, row0, expert, nb, nb_hi, full, empty, a_bufs, b_bufs,
                slot, phase, WG, HALF_BLOCKS * (2 if GATED else 1), K_STEPS, BLOCK, STAGES,
            )  # fmt: skip
            if not BLOCK:
                sa, s_lo, s_hi = _channel_scales(a_scale_ptr, b_scale_ptr, row0, expert, n0, HALF, GATED, RANK > 0, N)
                lo = lo * sa[:, None] * s_lo[None, :]
                hi = hi * sa[:, None] * s_hi[None, :]
            if GATED:
                h = glu(lo, hi, ACTIVATION, not BLOCK)
                if BLOCK and N % 128 != 0:
                    # Columns past N came from other weight rows and must not raise a group's maximum.
                    inside = n0 + gl.arange(0, 128, gl.SliceLayout(0, HALF)) < N
                    h = gl.where(inside[None, :], h, 0.0)
                h = h.to(gl.bfloat16)
                tma.store_wait(0)
                stage.store(h)
                if BLOCK:
                    if RANK > 0:
                        # The second shrink reads the unquantised rows.
                        fence_async_shared()
                        tma.async_copy_shared_to_global(out_desc, [row0, n0], stage)
                    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
                    v = stage.load(ROWS).to(gl.float32)
                    scale = gl.maximum(gl.max(gl.abs(v), axis=1), EPS) * INV_FP8_MAX
                    inv = gl.div_rn(gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, ROWS)), scale)
                    q_rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, ROWS))
                    gl.store(q_scale_ptr + q_rows * HALF_BLOCKS + n0 // 128, scale)
                    if RANK > 0:
                        tma.store_wait(0)
                    q_stage = stage._reinterpret(gl.float8e4nv, [64, 128], q_desc.layout)
                    # The conversion saturates at 448 and keeps NaN.
                    q_stage.store((v * inv[:, None]).to(gl.float8e4nv))
                    fence_async_shared()
                    tma.async_copy_shared_to_global(q_desc, [row0, n0], q_stage)
                else:
                    fence_async_shared()
                    tma.async_copy_shared_to_global(out_desc, [row0, n0], stage)
            else:
                _store_half(lo, out_desc, stage, row0, n0)
                _store_half(hi, out_desc, stage, row0, n0 + 128)
        else:
            slot, phase = _drain(K_STEPS + nseg * CHUNKS, full, empty, slot, phase, STAGES)
    tma.store_wait(0)


@gluon.jit
def grouped_gemm_kernel(
    a_desc,
    a_scale_ptr,
    b_desc,
    b_scale_ptr,
    out_desc,
    q_desc,
    q_scale_ptr,
    lora_desc,
    shrunk_ptr,
    row_slot_ptr,
    seg_slot_ptr,
    tiles_ptr,
    counts_ptr,
    N: gl.constexpr,
    K: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK: gl.constexpr,
    RANK: gl.constexpr,
    LORA_E: gl.constexpr,
    ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
):
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 64, 128], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 256, 128], b_desc.layout)
    stages = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    LORA_LAYOUT: gl.constexpr = lora_desc.layout if RANK > 0 else None
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, a_scale_ptr, b_scale_ptr, out_desc, q_desc, q_scale_ptr, LORA_LAYOUT, shrunk_ptr, row_slot_ptr,
                    seg_slot_ptr, tiles_ptr, counts_ptr, full, empty, a_bufs, b_bufs, stages,
                    N, K, GATED, BLOCK, RANK, ACTIVATION, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    1, a_scale_ptr, b_scale_ptr, out_desc, q_desc, q_scale_ptr, LORA_LAYOUT, shrunk_ptr, row_slot_ptr,
                    seg_slot_ptr, tiles_ptr, counts_ptr, full, empty, a_bufs, b_bufs, stages,
                    N, K, GATED, BLOCK, RANK, ACTIVATION, STAGES,
                ),
            ),
            (
                _producer,
                (
                    a_desc, b_desc, lora_desc, tiles_ptr, counts_ptr, seg_slot_ptr, full, empty, a_bufs, b_bufs,
                    N, K, GATED, BLOCK, RANK, LORA_E, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


STAGES = 4
TILE_ROWS = 128
ROW_ALIGN = 64


def lora_box(b: torch.Tensor) -> TensorDescriptor:
    """TMA descriptor over stacked LoRA B matrices ``[..., rows, r]``: boxes of 128 rows by at most 64 ranks."""
    rank = b.shape[-1]
    chunk = min(rank, 64)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=chunk * 2, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(b.view(-1, rank), [128, chunk], layout)


def fp8_box(t: torch.Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor over a row-major fp8 matrix: boxes of `rows` rows by 128 bytes, swizzled for wgmma."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return TensorDescriptor.from_tensor(t, [rows, 128], layout)


def grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    plan: RowPlan,
    *,
    block: bool,
    activation: str | None,
    out: torch.Tensor | None,
    q: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    shrunk: torch.Tensor | None = None,
    programs: int = 132,
) -> None:
    """Multiply every expert's rows by its weights.

    Args:
      a: ``[R, K]`` float8_e4m3fn, rows sorted by (expert, adapter), experts padded to 64 rows.
      a_scale: f32 ``[R]`` (channel) or ``[R, ceil(K/128)]`` (block).
      w: ``[E, 2N, K]`` gate rows then up rows (`activation` given) or ``[E, N, K]``; float8_e4m3fn.
      w_scale: f32 ``[E, rows of w]`` (channel), or ``[E, blocks, ceil(K/128)]`` with ``ceil(N/128)`` blocks a half.
      plan: tiles and adapter segments of the rows.
      block: block scales (else channel).
      activation: fuse ``act(gate) * up``; None multiplies only.
      out: bf16 ``[R, N]``. With `activation` and `block` needed only beside adapters.
      q, q_scale: fp8 ``[R, N]`` and f32 ``[R, ceil(N/128)]``: the activated rows quantised by 128 columns.
      lora_b: bf16 ``[S, E or 1, (2,) N, r]``, r one of 16, 32, 64, 128, scaling folded in.
      shrunk: bf16 ``[R, 2 r]`` (gate then up) or ``[R, r]``.
      programs: persistent programs to start, one a multiprocessor.
    """
    gated = activation is not None
    n = w.shape[1] // 2 if gated else w.shape[1]
    k = w.shape[2]
    out_box = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    b_desc = fp8_box(w.view(-1, k), 128)
    if out is None:
        if not (gated and block and q is not None):
            raise ValueError("out: got None, want a bf16 tensor wherever the result is not quantised in the kernel")
        # Never written: it only fixes the staging buffer's layout.
        out_desc = TensorDescriptor.from_tensor(q.view(torch.bfloat16), [64, 128], out_box)
    else:
        out_desc = TensorDescriptor.from_tensor(out, [64, 128], out_box)
    grouped_gemm_kernel[(programs,)](
        fp8_box(a, 64),
        a_scale,
        b_desc,
        w_scale,
        out_desc,
        fp8_box(q, 64) if q is not None else b_desc,
        q_scale if q_scale is not None else a_scale,
        lora_box(lora_b) if lora_b is not None else b_desc,
        shrunk if shrunk is not None else a_scale,
        plan.row_slot if plan.row_slot is not None else plan.tiles,
        plan.seg_slot if plan.seg_slot is not None else plan.tiles,
        plan.tiles,
        plan.counts,
        N=n,
        K=k,
        GATED=gated,
        BLOCK=block,
        RANK=lora_b.shape[-1] if lora_b is not None else 0,
        LORA_E=lora_b.shape[1] if lora_b is not None else 1,
        ACTIVATION=activation or "none",
        STAGES=STAGES,
        num_warps=4,
        maxnreg=168,
    )
