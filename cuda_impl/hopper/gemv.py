# SPDX-License-Identifier: Apache-2.0
"""One token: two matrix-vector launches, no sort and no combine.

A program asks for all of its weights at once, then for the activations; the weights' block scale is folded into them,
so a weight costs one conversion and one FMA. w13's program is (pair, a few gate rows and their up rows, all of H); w2's
is a few rows of H for all pairs at once, which it sums in the order of k. Each launch lets the next one start as soon
as it is itself sure that its own inputs are complete, so the next one's weights stream while this one still computes.

The activations are quantised by each program itself (W8A8), but a long row by a small launch ahead of w13, or by the
one that shrinks it for an adapter: both are hidden behind w13's weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .rows import encode_row, fp8_scale, row_buffers, store_scale


@triton.jit
def _local_expert(ids_ptr, map_ptr, pair, mask, global_experts, E: tl.constexpr, HAS_MAP: tl.constexpr):
    """Local expert of each pair, -1 where it is skipped."""
    expert = tl.load(ids_ptr + pair, mask=mask, other=-1).to(tl.int32)
    valid = (expert >= 0) & (expert < global_experts)
    if HAS_MAP:
        expert = tl.load(map_ptr + expert, mask=valid, other=-1).to(tl.int32)
        valid = valid & (expert >= 0) & (expert < E)
    return tl.where(valid, expert, -1)


@triton.jit
def _requantized(v, MODE: tl.constexpr):
    """f32 ``[..., GROUPS, 128]`` rounded to what fp8 keeps of it, with its scale multiplied back in."""
    if MODE == "none":
        return v
    absmax = tl.max(tl.abs(v), axis=len(v.shape) - 1, keep_dims=True)
    if MODE == "token":
        absmax = tl.max(absmax, axis=len(v.shape) - 2, keep_dims=True)
    scale = fp8_scale(absmax)
    inv = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return (v * inv).to(tl.float8e4nv).to(tl.float32) * scale


@triton.jit
def _through_memory(ptrs, v, mask):
    """`v` itself, by way of global memory, so that no layout choice crosses over.

    Otherwise the adapter's small product would pull the big product's tile into its own register layout, which is slow
    and sums in another order than the kernel without adapters.
    """
    tl.store(ptrs, v, mask=mask)
    tl.debug_barrier()
    return tl.load(ptrs, mask=mask, other=0.0, volatile=True)


@triton.jit
def _glu(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-2.0 * inner)) * up
    else:
        tl.static_assert(ACTIVATION == "swigluoai")
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)


@triton.jit
def _encode(x_ptr, q_ptr, scale_ptr, H: tl.constexpr, MODE: tl.constexpr, GROUPS_P: tl.constexpr):
    cols = tl.arange(0, GROUPS_P)[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    q, scale = encode_row(x, MODE)
    tl.store(q_ptr + cols, q, mask=cols < H)
    store_scale(scale_ptr, 0, scale, (H + 127) // 128, MODE)


@triton.jit
def _encode_kernel(x_ptr, q_ptr, scale_ptr, H: tl.constexpr, MODE: tl.constexpr, GROUPS_P: tl.constexpr):
    gdc_wait()
    gdc_launch_dependents()
    _encode(x_ptr, q_ptr, scale_ptr, H, MODE, GROUPS_P)


@triton.jit
def _shrink_kernel(
    v_ptr,
    a_ptr,
    ids_ptr,
    map_ptr,
    slots_ptr,
    out_ptr,
    q_ptr,
    q_scale_ptr,
    global_experts,
    K: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    A_EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    INPUT: tl.constexpr,
    MODE: tl.constexpr,
    BR: tl.constexpr,
    GROUPS_P: tl.constexpr,
):
    """Shrink products of each pair; of the layer's INPUT, one more program also quantises it."""
    D_P: tl.constexpr = GROUPS_P * 128
    if INPUT:
        gdc_wait()
    gdc_launch_dependents()
    pair = tl.program_id(0)
    if INPUT and pair == K:
        if MODE != "none" and tl.program_id(1) == 0:
            _encode(v_ptr, q_ptr, q_scale_ptr, D, MODE, GROUPS_P)
    else:
        expert = _local_expert(ids_ptr, map_ptr, pair, True, global_experts, E, HAS_MAP)
        slot = tl.load(slots_ptr).to(tl.int32)
        used = (expert >= 0) & (slot >= 0) & (slot < SLOTS)
        rank = tl.program_id(1) * BR + tl.arange(0, BR)
        col = tl.arange(0, D_P)
        at = slot.to(tl.int64) * A_EXPERTS
        if A_EXPERTS > 1:
            at += expert
        a = tl.load(
            a_ptr + at * R * D + rank[:, None] * D + col[None, :],
            mask=used & (rank < R)[:, None] & (col < D)[None, :],
            other=0.0,
        )
        if not INPUT:
            gdc_wait()
        row = 0 if INPUT else pair
        v = tl.load(v_ptr + row * D + col, mask=used & (col < D), other=0.0)
        total = tl.sum(a.to(tl.float32) * v.to(tl.float32)[None, :], axis=1)
        tl.store(out_ptr + pair * R + rank, total.to(tl.bfloat16), mask=rank < R)


@triton.jit
def _w13_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    scale_ptr,
    ids_ptr,
    map_ptr,
    slots_ptr,
    b_ptr,
    shrunk_ptr,
    h_ptr,
    scratch_ptr,
    global_experts,
    I: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RANK: tl.constexpr,
    ENCODED: tl.constexpr,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS_P: tl.constexpr,
):
    GROUPS: tl.constexpr = (H + 127) // 128
    H_P: tl.constexpr = GROUPS_P * 128
    I_BLOCKS: tl.constexpr = (I + 127) // 128
    if not EARLY:
        gdc_wait()
    gdc_launch_dependents()
    pair = tl.program_id(0)
    expert = _local_expert(ids_ptr, map_ptr, pair, True, global_experts, E, HAS_MAP)
    if expert >= 0:
        row0 = tl.program_id(1) * ROWS
        row = row0 + tl.arange(0, ROWS)
        col = tl.arange(0, H_P)
        inside = (row < I)[:, None] & (col < H)[None, :]
        at = w_ptr + expert.to(tl.int64) * 2 * I * H + row[:, None] * H + col[None, :]
        gate_w = tl.load(at, mask=inside, other=0.0)
        up_w = tl.load(at + I * H, mask=inside, other=0.0)
        group = tl.arange(0, GROUPS_P)
        if BLOCK:
            s = scale_ptr + (expert * 2 * I_BLOCKS + row0 // 128) * GROUPS + group
            gate_s = tl.load(s, mask=group < GROUPS, other=0.0)
            up_s = tl.load(s + I_BLOCKS * GROUPS, mask=group < GROUPS, other=0.0)
        else:
            gate_s = tl.load(scale_ptr + expert * 2 * I + row, mask=row < I, other=0.0)
            up_s = tl.load(scale_ptr + expert * 2 * I + I + row, mask=row < I, other=0.0)
        if RANK > 0:
            slot = tl.load(slots_ptr).to(tl.int32)
            used = (slot >= 0) & (slot < SLOTS)
            r = tl.arange(0, RANK)
            b = b_ptr + ((slot.to(tl.int64) * E + expert) * 2 * I + row[:, None]) * RANK + r[None, :]
            keep = used & (row < I)[:, None]
            gate_b = tl.load(b, mask=keep, other=0.0)
            up_b = tl.load(b + I * RANK, mask=keep, other=0.0)
        if EARLY:
            gdc_wait()
        cols = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        x = tl.load(x_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        if not ENCODED:
            x = _requantized(x, MODE)
        elif MODE == "group":
            x *= tl.load(x_scale_ptr + group, mask=group < GROUPS, other=0.0)[:, None]
        else:
            x *= tl.load(x_scale_ptr)
        if BLOCK:
            gate_x = tl.reshape(x * gate_s[:, None], [H_P])
            up_x = tl.reshape(x * up_s[:, None], [H_P])
            gate = tl.sum(gate_w.to(tl.float32) * gate_x[None, :], axis=1)
            up = tl.sum(up_w.to(tl.float32) * up_x[None, :], axis=1)
        else:
            flat = tl.reshape(x, [H_P])
            gate = tl.sum(gate_w.to(tl.float32) * flat[None, :], axis=1) * gate_s
            up = tl.sum(up_w.to(tl.float32) * flat[None, :], axis=1) * up_s
        if RANK > 0:
            gate = _through_memory(scratch_ptr + pair * 2 * I + row, gate, row < I)
            up = _through_memory(scratch_ptr + pair * 2 * I + I + row, up, row < I)
            if used:
                gate_d = tl.load(shrunk_ptr + pair * 2 * RANK + r).to(tl.float32)
                up_d = tl.load(shrunk_ptr + pair * 2 * RANK + RANK + r).to(tl.float32)
                gate += tl.sum(gate_b.to(tl.float32) * gate_d[None, :], axis=1)
                up += tl.sum(up_b.to(tl.float32) * up_d[None, :], axis=1)
        tl.store(h_ptr + pair * I + row, _glu(gate, up, ACTIVATION).to(tl.bfloat16), mask=row < I)
    elif EARLY:
        gdc_wait()


@triton.jit
def _w2_kernel(
    h_ptr,
    w_ptr,
    scale_ptr,
    ids_ptr,
    map_ptr,
    slots_ptr,
    b_ptr,
    shrunk_ptr,
    weight_ptr,
    y_ptr,
    scratch_ptr,
    global_experts,
    I: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    K_P: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    RANK: tl.constexpr,
    B_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS_P: tl.constexpr,
):
    GROUPS: tl.constexpr = (I + 127) // 128
    I_P: tl.constexpr = GROUPS_P * 128
    H_BLOCKS: tl.constexpr = (H + 127) // 128
    gdc_launch_dependents()
    pair = tl.arange(0, K_P)
    expert = _local_expert(ids_ptr, map_ptr, pair, pair < K, global_experts, E, HAS_MAP)
    valid = expert >= 0
    row0 = tl.program_id(0) * ROWS
    row = row0 + tl.arange(0, ROWS)
    col = tl.arange(0, I_P)
    base = expert.to(tl.int64)
    at = w_ptr + (base[:, None, None] * H + row[None, :, None]) * I + col[None, None, :]
    w = tl.load(at, mask=valid[:, None, None] & (row < H)[None, :, None] & (col < I)[None, None, :], other=0.0)
    group = tl.arange(0, GROUPS_P)
    if BLOCK:
        s = tl.load(
            scale_ptr + (base[:, None] * H_BLOCKS + row0 // 128) * GROUPS + group[None, :],
            mask=valid[:, None] & (group < GROUPS)[None, :],
            other=0.0,
        )
    else:
        s = tl.load(
            scale_ptr + base[:, None] * H + row[None, :], mask=valid[:, None] & (row < H)[None, :], other=0.0
        )
    if RANK > 0:
        slot = tl.load(slots_ptr).to(tl.int32)
        used = (slot >= 0) & (slot < SLOTS)
        r = tl.arange(0, RANK)
        which = slot.to(tl.int64) * B_EXPERTS + (base if B_EXPERTS > 1 else base * 0)
        b = tl.load(
            b_ptr + (which[:, None, None] * H + row[None, :, None]) * RANK + r[None, None, :],
            mask=used & valid[:, None, None] & (row < H)[None, :, None],
            other=0.0,
        )
    gdc_wait()
    cols = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    h = tl.load(
        h_ptr + pair[:, None, None] * I + cols[None, :, :],
        mask=valid[:, None, None] & (cols < I)[None, :, :],
        other=0.0,
    )
    h = _requantized(h.to(tl.float32), MODE)
    if BLOCK:
        h = h * s[:, :, None]
    out = tl.sum(w.to(tl.float32) * tl.reshape(h, [K_P, I_P])[:, None, :], axis=2)
    if not BLOCK:
        out = out * s
    if RANK > 0:
        at = scratch_ptr + pair[:, None] * H + row[None, :]
        out = _through_memory(at, out, (pair < K)[:, None] & (row < H)[None, :])
        if used:
            d = tl.load(shrunk_ptr + pair[:, None] * RANK + r[None, :], mask=valid[:, None], other=0.0)
            out += tl.sum(b.to(tl.float32) * d.to(tl.float32)[:, None, :], axis=2)
    weight = tl.load(weight_ptr + pair, mask=pair < K, other=0.0).to(tl.float32)
    out = out * tl.where(valid, weight, 0.0)[:, None]
    y = tl.zeros([ROWS], tl.float32)
    for k in tl.static_range(K):
        y += tl.sum(tl.where((pair == k)[:, None], out, 0.0), axis=0)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < H)


@triton.jit
def _w2_row_block(
    w,
    s,
    b,
    pair,
    row,
    h_ptr,
    shrunk_ptr,
    scratch_ptr,
    used,
    I: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    RANK: tl.constexpr,
    GROUPS_P: tl.constexpr,
):
    """One pair's result rows (before its routing weight), from weights already asked for."""
    cols = tl.arange(0, GROUPS_P)[:, None] * 128 + tl.arange(0, 128)[None, :]
    h = tl.load(h_ptr + pair * I + cols, mask=cols < I, other=0.0).to(tl.float32)
    h = _requantized(h, MODE)
    if BLOCK:
        h = h * s[:, None]
    out = tl.sum(w.to(tl.float32) * tl.reshape(h, [GROUPS_P * 128])[None, :], axis=1)
    if not BLOCK:
        out = out * s
    if RANK > 0:
        out = _through_memory(scratch_ptr + pair * H + row, out, row < H)
        if used:
            d = tl.load(shrunk_ptr + pair * RANK + tl.arange(0, RANK))
            out += tl.sum(b.to(tl.float32) * d.to(tl.float32)[None, :], axis=1)
    return out


@triton.jit
def _w2_ask(
    w_ptr,
    scale_ptr,
    b_ptr,
    slot,
    used,
    expert,
    row0,
    I: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    B_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS_P: tl.constexpr,
):
    """One expert's weights ``[ROWS, I_P]``, their scales and the adapter's B ``[ROWS, RANK]``; zeros for expert -1."""
    GROUPS: tl.constexpr = (I + 127) // 128
    row = row0 + tl.arange(0, ROWS)
    col = tl.arange(0, GROUPS_P * 128)
    base = expert.to(tl.int64)
    inside = (row < H)[:, None] & (col < I)[None, :] & (expert >= 0)
    w = tl.load(w_ptr + (base * H + row[:, None]) * I + col[None, :], mask=inside, other=0.0)
    if BLOCK:
        group = tl.arange(0, GROUPS_P)
        at = scale_ptr + (base * ((H + 127) // 128) + row0 // 128) * GROUPS + group
        s = tl.load(at, mask=(group < GROUPS) & (expert >= 0), other=0.0)
    else:
        s = tl.load(scale_ptr + base * H + row, mask=(row < H) & (expert >= 0), other=0.0)
    b = w
    if RANK > 0:
        at = slot.to(tl.int64) * B_EXPERTS
        if B_EXPERTS > 1:
            at += base
        at = (at * H + row[:, None]) * RANK + tl.arange(0, RANK)[None, :]
        b = tl.load(b_ptr + at, mask=used & (row < H)[:, None] & (expert >= 0), other=0.0)
    return w, s, b


@triton.jit
def _w2_loop_kernel(
    h_ptr,
    w_ptr,
    scale_ptr,
    ids_ptr,
    map_ptr,
    slots_ptr,
    b_ptr,
    shrunk_ptr,
    weight_ptr,
    y_ptr,
    scratch_ptr,
    global_experts,
    I: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    K_P: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    RANK: tl.constexpr,
    B_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS_P: tl.constexpr,
):
    """As `_w2_kernel`, one pair after the other: where the rows of all pairs do not fit in registers."""
    gdc_launch_dependents()
    pairs = tl.arange(0, K_P)
    experts = _local_expert(ids_ptr, map_ptr, pairs, pairs < K, global_experts, E, HAS_MAP)
    first = tl.min(tl.where(experts >= 0, pairs, K), axis=0)
    expert = tl.max(tl.where(pairs == first, experts, -1), axis=0)
    row0 = tl.program_id(0) * ROWS
    row = row0 + tl.arange(0, ROWS)
    slot = first * 0 - 1
    if RANK > 0:
        slot = tl.load(slots_ptr).to(tl.int32)
    used = (slot >= 0) & (slot < SLOTS)
    w, s, b = _w2_ask(
        w_ptr, scale_ptr, b_ptr, slot, used, expert, row0, I, H, BLOCK, RANK, B_EXPERTS, ROWS, GROUPS_P
    )
    gdc_wait()
    y = tl.zeros([ROWS], tl.float32)
    if first < K:
        out = _w2_row_block(
            w, s, b, first, row, h_ptr, shrunk_ptr, scratch_ptr, used, I, H, BLOCK, MODE, RANK, GROUPS_P
        )
        y += out * tl.load(weight_ptr + first).to(tl.float32)
    for k in range(first + 1, K):
        expert = tl.max(tl.where(pairs == k, experts, -1), axis=0)
        if expert >= 0:
            w, s, b = _w2_ask(
                w_ptr, scale_ptr, b_ptr, slot, used, expert, row0, I, H, BLOCK, RANK, B_EXPERTS, ROWS, GROUPS_P
            )
            out = _w2_row_block(
                w, s, b, k, row, h_ptr, shrunk_ptr, scratch_ptr, used, I, H, BLOCK, MODE, RANK, GROUPS_P
            )
            y += out * tl.load(weight_ptr + k).to(tl.float32)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < H)


LONG_ROW = 4096  # columns; longer rows are quantised once, ahead of w13


def tiles(h: int, i: int, k: int) -> dict[str, int]:
    """Rows and warps of a program of each launch; ``together``: w2 takes all pairs at once."""
    # Measured on an H200: 8 rows are best for I = 768, 4 for I = 512 (more programs) and for H = 6144 (registers).
    return {
        "w13_rows": 4 if h > LONG_ROW or i <= 512 else 8,
        "w13_warps": 4,
        "w2_rows": 4 if i <= 512 else 8,
        "w2_warps": 4,
        "together": triton.next_power_of_2(k) * triton.next_power_of_2(i) <= 8192,
        # Ranks of a shrink program: a long row is divided further, or a thread would hold too much of it.
        "ranks": 1 if h > LONG_ROW else 4,
    }


def one_token(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    out: torch.Tensor,
    *,
    block: bool,
    activation: str,
    quantised: bool,
    expert_map: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """The layer for ``x [1, H]``; shapes as in `fused.HopperWeights`, `lora` is ``(a13, b13, a2, b2)``.

    Args:
      quantised: W8A8 (activations rounded to fp8 as the other kernels do), else W8A16.
    """
    experts, i2, h = w13.shape
    i = i2 // 2
    k = topk_ids.shape[1]
    tile = tiles(h, i, k)
    mode = ("group" if block else "token") if quantised else "none"
    hidden = torch.empty((k, i), dtype=torch.bfloat16, device=x.device)
    slots_count = lora[0].shape[0] if lora is not None else 0
    rank = lora[2].shape[2] if lora is not None else 0
    scratch = torch.empty(k * max(h, i2), dtype=torch.float32, device=x.device) if rank else x
    globally = expert_map.shape[0] if expert_map is not None else experts
    emap = expert_map if expert_map is not None else topk_ids
    slot = slots if slots is not None else topk_ids
    common = {"E": experts, "SLOTS": slots_count, "HAS_MAP": expert_map is not None}

    groups = triton.next_power_of_2(triton.cdiv(h, 128))
    encoded = quantised and h > LONG_ROW
    row, scale = row_buffers(1, h, mode, x.device) if encoded else (x, x)

    def shrunk(v: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        first, d = v is x, a.shape[-1]
        ranks = a[0, 0].numel() // d
        result = torch.empty((k, ranks), dtype=torch.bfloat16, device=x.device)
        _shrink_kernel[(k + first, triton.cdiv(ranks, tile["ranks"]))](
            v, a, topk_ids, emap, slot, result, row, scale, globally,
            K=k, D=d, R=ranks, A_EXPERTS=a.shape[1], INPUT=first, MODE=mode if encoded else "none", BR=tile["ranks"],
            GROUPS_P=triton.next_power_of_2(triton.cdiv(d, 128)), **common, num_warps=4, launch_pdl=True,
        )  # fmt: skip
        return result

    s13 = x
    if lora is not None:
        s13 = shrunk(x, lora[0])
    elif encoded:
        _encode_kernel[(1,)](x, row, scale, H=h, MODE=mode, GROUPS_P=groups, num_warps=8, launch_pdl=True)
    _w13_kernel[(k, triton.cdiv(i, tile["w13_rows"]))](
        row, scale, w13, w13_scale, topk_ids, emap, slot, lora[1] if lora is not None else x, s13, hidden, scratch,
        globally,
        I=i, H=h, BLOCK=block, MODE=mode, ACTIVATION=activation, RANK=rank, ENCODED=encoded,
        EARLY=encoded or lora is not None,
        ROWS=tile["w13_rows"], GROUPS_P=groups, **common, num_warps=tile["w13_warps"], launch_pdl=True,
    )  # fmt: skip
    s2 = shrunk(hidden, lora[2]) if lora is not None else x
    (_w2_kernel if tile["together"] else _w2_loop_kernel)[(triton.cdiv(h, tile["w2_rows"]),)](
        hidden, w2, w2_scale, topk_ids, emap, slot, lora[3] if lora is not None else x, s2, topk_weights, out,
        scratch, globally,
        I=i, H=h, K=k, K_P=triton.next_power_of_2(k), BLOCK=block, MODE=mode, RANK=rank,
        B_EXPERTS=lora[3].shape[1] if lora is not None else 1, ROWS=tile["w2_rows"],
        GROUPS_P=triton.next_power_of_2(triton.cdiv(i, 128)), **common, num_warps=tile["w2_warps"], launch_pdl=True,
    )  # fmt: skip
