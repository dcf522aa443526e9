# SPDX-License-Identifier: Apache-2.0
"""Row passes of the small-batch chain: sort, permute, quantise and shrink in one launch; quantise and shrink again.

No sort launch: the program of a (token, expert) pair reads every id (a few KB, in cache) and counts the pairs that
sort before its own; that is its row. One more program turns the histogram into the tile list. The order is stable.

Meanwhile the memory bus would idle, so the programs also ask the L2 cache for the weights that w13's first units start
with; the share of an expert's rows that each program asks for depends on how many pairs the expert has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .decode_gemm import PROGRAMS
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
    # One sum over the columns at the end: a sum each step would hold up the next step's loads.
    products = tl.zeros([BR, BD], tl.float32)
    for d in tl.static_range((D + BD - 1) // BD):
        col = d * BD + tl.arange(0, BD)
        mask = (rank < R)[:, None] & (col < D)[None, :]
        a = tl.load(a_ptr + rank[:, None] * D + col[None, :], mask=mask, other=0.0)
        x = tl.load(x_ptr + col, mask=col < D, other=0.0)
        products += a.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(out_ptr + rank, tl.sum(products, axis=1).to(tl.bfloat16), mask=rank < R)


@triton.jit
def _prefetch_rows(w_ptr, first, last, STRIDE: tl.constexpr, BYTES: tl.constexpr):
    """Ask the L2 cache for the first BYTES of rows [first, last) of STRIDE bytes."""
    LINES: tl.constexpr = BYTES // 128
    for base in range(first * LINES, last * LINES, 128):
        line = tl.minimum(base + tl.arange(0, 128), last * LINES - 1)
        at = w_ptr + (line // LINES).to(tl.int64) * STRIDE + line % LINES * 128
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["pairs", "ahead"])
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
    w_ptr,
    pairs,
    global_experts,
    ahead,
    H: tl.constexpr,
    W_ROWS: tl.constexpr,
    W_BYTES: tl.constexpr,
    ASKERS: tl.constexpr,
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
            if W_BYTES > 0 and row < ahead and tl.program_id(1) < ASKERS:
                same = key // S_P == my_expert
                count = tl.sum(same.to(tl.int32), axis=0) * ASKERS
                nth = tl.sum((same & (index < me)).to(tl.int32), axis=0) * ASKERS + tl.program_id(1)
                rows = w_ptr + my_expert.to(tl.int64) * W_ROWS * H
                _prefetch_rows(rows, W_ROWS * nth // count, W_ROWS * (nth + 1) // count, H, W_BYTES)
            if R > 0:
                if (my_slot >= 0) & (tl.program_id(1) * BR < R):
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


def _rank_tile(rows: float, ranks: int, d: int) -> dict[str, int]:
    """Ranks and columns a program takes at once; few rows (with an expert here) need narrow tiles to fill the chip."""
    if not ranks:
        return {"BR": 1, "BD": 1}
    return {"BR": min(4 if rows * ranks <= 4096 else 16, ranks), "BD": min(1024, triton.next_power_of_2(d))}


def prologue(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    *,
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
      w13: fp8 ``[E, rows, H]``, the weights of the launch that follows.
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
    num_experts, w_rows, _ = w13.shape
    experts = min(pairs, num_experts)
    everywhere = expert_map.shape[0] if expert_map is not None else num_experts
    here = pairs * num_experts / everywhere

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
    sizes = _rank_tile(here, ranks, h)
    # The first unit of each program: so many experts' worth of 256-row units, as rows of their pairs.
    ahead = round(here * min(1.0, PROGRAMS * 256 / (w_rows * min(here, num_experts))))
    askers = 8 if pairs <= 64 else 2 if pairs <= 256 else 1  # programs a pair that share its prefetches
    _prologue_kernel[(pairs + 1, max(askers, triton.cdiv(ranks, sizes["BR"])))](
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
        w13.view(torch.uint8),
        pairs,
        everywhere,
        ahead,
        H=h,
        W_ROWS=w_rows,
        W_BYTES=min(256, h // 128 * 128),
        ASKERS=askers,
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
    h: torch.Tensor, plan: RowPlan, *, expected_rows: float, mode: str, a2: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Encode bf16 ``h [rows, N]`` as `mode` says ("none": not at all); shrink adapter rows by ``a2 [S, E, r, N]``.

    Args:
      expected_rows: of `rows`, how many the plan is likely to use.

    Returns:
      codes, scales (None for "none") and shrink products ``[rows, r]`` (None without `a2`).
    """
    rows, n = h.shape
    q = scale = None
    if mode != "none":
        q, scale = row_buffers(rows, n, mode, h.device)
    ranks = a2.shape[2] if a2 is not None else 0
    shrunk = torch.empty((rows, ranks), dtype=torch.bfloat16, device=h.device) if ranks else None
    sizes = _rank_tile(expected_rows, ranks, n)
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
