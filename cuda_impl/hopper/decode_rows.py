# SPDX-License-Identifier: Apache-2.0
"""Row passes of the small-batch chain: sort, permute, quantise and shrink in one launch; quantise and shrink again.

No sort launch: the program of a (token, expert) pair reads every id (a few KB, in cache) and counts the pairs that
sort before its own; that is its row. One more program turns the histogram into the tile list. The order is stable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .plan import TILE_FIELDS, RowPlan, store_counts, write_offsets
from .rows import encode_row, row_buffers, store_scale


@triton.jit
def _store_row(v, cols, inside, row, q_ptr, scale_ptr, D: tl.constexpr, MODE: tl.constexpr):
    q, scale = encode_row(v, MODE)
    tl.store(q_ptr + row.to(tl.int64) * D + cols, q, mask=inside)
    store_scale(scale_ptr, row, scale, (D + 127) // 128, MODE)


@triton.jit
def _shrink_row(x_ptr, a_ptr, out_ptr, D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """``out[r] = sum_d a[r, d] x[d]`` for this program's BR ranks."""
    rank = tl.program_id(1) * BR + tl.arange(0, BR)
    total = tl.zeros([BR], tl.float32)
    for d in tl.static_range((D + BD - 1) // BD):
        col = d * BD + tl.arange(0, BD)
        mask = (rank < R)[:, None] & (col < D)[None, :]
        a = tl.load(a_ptr + rank[:, None] * D + col[None, :], mask=mask, other=0.0)
        x = tl.load(x_ptr + col, mask=col < D, other=0.0)
        total += tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    tl.store(out_ptr + rank, total.to(tl.bfloat16), mask=rank < R)


@triton.jit(do_not_specialize=["pairs"])
def _prologue_kernel(
    x_ptr,
    ids_ptr,
    map_ptr,
    slots_ptr,
    a_ptr,
    pos_ptr,
    row_token_ptr,
    row_slot_ptr,
    row_expert_ptr,
    tiles_ptr,
    counts_ptr,
    seg_slot_ptr,
    q_ptr,
    scale_ptr,
    shrunk_ptr,
    pairs,
    global_experts,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    P: tl.constexpr,
    E_P: tl.constexpr,
    S_P: tl.constexpr,
    HAS_MAP: tl.constexpr,
    MODE: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
    GROUPS_P: tl.constexpr,
    R: tl.constexpr,
    A_EXPERTS: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    gdc_wait()
    gdc_launch_dependents()
    me = tl.program_id(0)
    index = tl.arange(0, P)
    expert = tl.load(ids_ptr + index, mask=index < pairs, other=-1).to(tl.int32)
    valid = (expert >= 0) & (expert < global_experts)
    if HAS_MAP:
        expert = tl.load(map_ptr + expert, mask=valid, other=-1).to(tl.int32)
        valid = valid & (expert >= 0) & (expert < E)
    key = expert * S_P
    if SLOTS > 0:
        slot = tl.load(slots_ptr + index // K, mask=index < pairs, other=-1).to(tl.int32)
        key += tl.where((slot >= 0) & (slot < SLOTS), slot, -1) + 1
    NONE: tl.constexpr = 0x7FFFFFFF
    key = tl.where(valid, key, NONE)
    if me == pairs:
        if tl.program_id(1) == 0:
            count = tl.histogram(tl.where(valid, key, 0), E_P * S_P, mask=valid)
            rows, tiles, segments = write_offsets(
                tl.reshape(count, [E_P, S_P]), 0, 0, 0, 0, None, tiles_ptr, seg_slot_ptr, None,
                E, SLOTS, E_P, S_P, 1, 1, TILE, FIELDS,
            )  # fmt: skip
            store_counts(counts_ptr, rows, tiles, segments)
    else:
        mine = tl.sum(tl.where(index == me, key, 0), axis=0)
        first = tl.program_id(1) == 0
        if mine == NONE:
            if first:
                tl.store(pos_ptr + me, -1)
        else:
            row = tl.sum(((key < mine) | ((key == mine) & (index < me))).to(tl.int32), axis=0)
            token = me // K
            my_expert = mine // S_P
            my_slot = mine % S_P - 1
            if first:
                tl.store(pos_ptr + me, row)
                tl.store(row_token_ptr + row, token)
                if SLOTS > 0:
                    tl.store(row_slot_ptr + row, my_slot)
                    tl.store(row_expert_ptr + row, my_expert)
                cols = tl.arange(0, GROUPS_P)[:, None] * 128 + tl.arange(0, 128)[None, :]
                inside = cols < H
                x = tl.load(x_ptr + token.to(tl.int64) * H + cols, mask=inside, other=0.0).to(tl.float32)
                _store_row(x, cols, inside, row, q_ptr, scale_ptr, H, MODE)
            if R > 0:
                if my_slot >= 0:
                    at = my_slot.to(tl.int64) * A_EXPERTS
                    if A_EXPERTS > 1:
                        at += my_expert
                    out = shrunk_ptr + row.to(tl.int64) * R
                    _shrink_row(x_ptr + token.to(tl.int64) * H, a_ptr + at * R * H, out, H, R, BR, BD)


@triton.jit
def _hidden_kernel(
    h_ptr,
    a_ptr,
    row_slot_ptr,
    row_expert_ptr,
    counts_ptr,
    q_ptr,
    scale_ptr,
    shrunk_ptr,
    N: tl.constexpr,
    MODE: tl.constexpr,
    GROUPS_P: tl.constexpr,
    R: tl.constexpr,
    A_EXPERTS: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    gdc_wait()
    gdc_launch_dependents()
    row = tl.program_id(0)
    if row < tl.load(counts_ptr + 2):
        if MODE != "none":
            if tl.program_id(1) == 0:
                cols = tl.arange(0, GROUPS_P)[:, None] * 128 + tl.arange(0, 128)[None, :]
                inside = cols < N
                h = tl.load(h_ptr + row.to(tl.int64) * N + cols, mask=inside, other=0.0).to(tl.float32)
                _store_row(h, cols, inside, row, q_ptr, scale_ptr, N, MODE)
        if R > 0:
            slot = tl.load(row_slot_ptr + row)
            if slot >= 0:
                at = slot.to(tl.int64) * A_EXPERTS
                if A_EXPERTS > 1:
                    at += tl.load(row_expert_ptr + row)
                out = shrunk_ptr + row.to(tl.int64) * R
                _shrink_row(h_ptr + row.to(tl.int64) * N, a_ptr + at * R * N, out, N, R, BR, BD)


def _rank_tile(rows: int, ranks: int, d: int) -> dict[str, int]:
    """Ranks and columns a program takes at once; few rows need narrow tiles to fill the chip."""
    if not ranks:
        return {"BR": 1, "BD": 1}
    return {"BR": min(4 if rows * ranks <= 4096 else 16, ranks), "BD": min(1024, triton.next_power_of_2(d))}


def prologue(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    mode: str,
    tile: int,
    expert_map: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    a13: torch.Tensor | None = None,
) -> tuple[RowPlan, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sort pairs and write their rows quantised, with the shrink products of adapter rows.

    Args:
      x: bf16 ``[T, H]``.
      topk_ids: ``[T, K]``; skipped as in `plan.plan_rows`.
      num_experts: experts held here.
      mode: "group" (fp8, one scale a 128 columns), "token" (fp8, one a row) or "fp16" (one power of two a row).
      tile: rows of a tile.
      slots: int32 ``[T]`` adapter slot or -1, with `a13`.
      a13: bf16 ``[S, E or 1, 2, r, H]``.

    Returns:
      plan (rows packed), codes ``[T * K, H]``, scales, and bf16 shrink products ``[T * K, 2 r]`` or None.
    """
    tokens, h = x.shape
    k = topk_ids.shape[1]
    pairs = tokens * k
    num_slots = a13.shape[0] if a13 is not None else 0
    experts = min(pairs, num_experts)

    def i32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=x.device)

    unused = topk_ids
    plan = RowPlan(
        rows=pairs,
        tiles=i32(pairs // tile + experts, TILE_FIELDS),
        counts=i32(4),
        pos=i32(pairs),
        row_token=i32(pairs),
        row_slot=i32(pairs) if num_slots else None,
        seg_slot=i32(min(pairs, num_experts * num_slots)) if num_slots else None,
        seg_rows=None,
        row_expert=i32(pairs) if num_slots else None,
    )
    q, scale = row_buffers(pairs, h, mode, x.device)
    ranks = a13.shape[2] * a13.shape[3] if a13 is not None else 0
    shrunk = torch.empty((pairs, ranks), dtype=torch.bfloat16, device=x.device) if ranks else None
    sizes = _rank_tile(pairs, ranks, h)
    _prologue_kernel[(pairs + 1, triton.cdiv(ranks, sizes["BR"]) if ranks else 1)](
        x,
        topk_ids,
        expert_map if expert_map is not None else unused,
        slots if num_slots else unused,
        a13 if a13 is not None else x,
        plan.pos,
        plan.row_token,
        plan.row_slot if num_slots else plan.pos,
        plan.row_expert if num_slots else plan.pos,
        plan.tiles,
        plan.counts,
        plan.seg_slot if num_slots else plan.pos,
        q,
        scale,
        shrunk if shrunk is not None else x,
        pairs,
        expert_map.shape[0] if expert_map is not None else num_experts,
        H=h,
        K=k,
        E=num_experts,
        SLOTS=num_slots,
        P=max(16, triton.next_power_of_2(pairs)),
        E_P=triton.next_power_of_2(num_experts),
        S_P=triton.next_power_of_2(num_slots + 1),
        HAS_MAP=expert_map is not None,
        MODE=mode,
        TILE=tile,
        FIELDS=TILE_FIELDS,
        GROUPS_P=triton.next_power_of_2(triton.cdiv(h, 128)),
        R=ranks,
        A_EXPERTS=a13.shape[1] if a13 is not None else 1,
        **sizes,
        num_warps=4,
        launch_pdl=True,
    )
    return plan, q, scale, shrunk


def hidden_rows(
    h: torch.Tensor, plan: RowPlan, *, mode: str, a2: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Encode bf16 ``h [rows, N]`` as `mode` says ("none": not at all); shrink adapter rows by ``a2 [S, E, r, N]``.

    Returns:
      codes, scales (None for "none") and shrink products ``[rows, r]`` (None without `a2`).
    """
    rows, n = h.shape
    q = scale = None
    if mode != "none":
        q, scale = row_buffers(rows, n, mode, h.device)
    ranks = a2.shape[2] if a2 is not None else 0
    shrunk = torch.empty((rows, ranks), dtype=torch.bfloat16, device=h.device) if ranks else None
    sizes = _rank_tile(rows, ranks, n)
    _hidden_kernel[(rows, triton.cdiv(ranks, sizes["BR"]) if ranks else 1)](
        h,
        a2 if a2 is not None else h,
        plan.row_slot if plan.row_slot is not None else plan.counts,
        plan.row_expert if plan.row_expert is not None else plan.counts,
        plan.counts,
        q if q is not None else h,
        scale if scale is not None else h,
        shrunk if shrunk is not None else h,
        N=n,
        MODE=mode,
        GROUPS_P=triton.next_power_of_2(triton.cdiv(n, 128)),
        R=ranks,
        A_EXPERTS=a2.shape[1] if a2 is not None else 1,
        **sizes,
        num_warps=4,
        launch_pdl=True,
    )
    return q, scale, shrunk
