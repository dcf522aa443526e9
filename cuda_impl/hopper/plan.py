# SPDX-License-Identifier: Apache-2.0
"""Sort (token, expert) pairs by (expert, adapter slot) without the host: counts, then offsets, tiles and segments.

Three launches: clear the counters, `_count_kernel` (an atomic a pair gives its rank inside its bin), `_offsets_kernel`
(one program: prefix sums over the bins, the tile list, the adapter segments). A pair's row is its bin's first row plus
its rank; the kernel that moves the rows adds the two. The atomics make the order inside a bin vary from run to run;
no result depends on it, since every row is computed alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE_FIELDS = 8
PAIRS_PER_PROGRAM = 1024


@dataclass(frozen=True)
class RowPlan:
    """Rows sorted by (expert, adapter slot), base rows first within an expert.

    Attributes:
      rows: upper bound of the number of rows (what row buffers must hold).
      tiles: int32 ``[max_tiles, 8]``: expert, first row, rows, first segment, segments, and three unused.
      counts: int32 ``[4]``: number of tiles, of segments, of rows (padding included), and one unused.
      pos: int32 ``[T * K]``: the row of each pair, -1 for a skipped one; written by the kernel that moves rows.
      row_token: int32 ``[rows]``: the token of each row; undefined in padding rows.
      row_slot: int32 ``[rows]``: the adapter slot of each row, -1 for base; None without adapters.
      seg_slot: int32 ``[max_segments]``: the adapter slot of each non-empty (expert, adapter) bin.
      seg_rows: int32 ``[max_segments, 4]``: expert, first row, rows, slot of the same bins.
      pair_bin, pair_rank, bin_start: int32, how `pos` is found; None where the sort writes `pos` itself.
      row_expert: int32 ``[rows]``: the expert of each row, where a row pass needs it.
    """

    rows: int
    tiles: torch.Tensor
    counts: torch.Tensor
    pos: torch.Tensor
    row_token: torch.Tensor
    row_slot: torch.Tensor | None
    seg_slot: torch.Tensor | None
    seg_rows: torch.Tensor | None
    pair_bin: torch.Tensor | None = None
    pair_rank: torch.Tensor | None = None
    bin_start: torch.Tensor | None = None
    row_expert: torch.Tensor | None = None


@triton.jit
def _count_kernel(
    ids_ptr,
    map_ptr,
    slots_ptr,
    counts_ptr,
    pair_bin_ptr,
    pair_rank_ptr,
    pairs,
    global_experts,
    E: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(ids_ptr + pair, mask=inside, other=-1).to(tl.int32)
    valid = (expert >= 0) & (expert < global_experts)
    if HAS_MAP:
        expert = tl.load(map_ptr + expert, mask=valid, other=-1).to(tl.int32)
        valid = valid & (expert >= 0) & (expert < E)
    bin = expert
    if SLOTS > 0:
        slot = tl.load(slots_ptr + pair // K, mask=inside, other=-1).to(tl.int32)
        slot = tl.where((slot >= 0) & (slot < SLOTS), slot, -1)
        bin = expert * (SLOTS + 1) + slot + 1
    # Neighbouring lanes count in different bins, or many atomics would queue at one address.
    bin = bin * SPLIT + pair % SPLIT
    rank = tl.atomic_add(counts_ptr + bin, 1, mask=valid, sem="relaxed")
    tl.store(pair_bin_ptr + pair, tl.where(valid, bin, -1), mask=inside)
    tl.store(pair_rank_ptr + pair, rank, mask=inside)


@triton.jit
def write_offsets(
    parts,
    e0,
    row0,
    tile0,
    seg0,
    bin_start_ptr,
    tiles_ptr,
    seg_slot_ptr,
    seg_rows_ptr,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    E_C: tl.constexpr,
    S_P: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """From pairs a bin ``parts [E_C, S_P * SPLIT]`` of experts `e0` on to first rows, tiles and segments.

    A (expert, slot) bin, base rows first, is SPLIT neighbouring columns of `parts`. Rows, tiles and segments are
    numbered from `row0`, `tile0`, `seg0`; returns where they end. A table given as None is not written.
    """
    e = e0 + tl.arange(0, E_C)
    s = tl.arange(0, S_P)
    rows = tl.sum(parts, axis=1)
    padded = (rows + ALIGN - 1) // ALIGN * ALIGN
    first = row0 + tl.cumsum(padded, axis=0) - padded
    if bin_start_ptr is not None:
        part = tl.arange(0, S_P * SPLIT)
        inside = (e < E)[:, None] & (part < (SLOTS + 1) * SPLIT)[None, :]
        at = bin_start_ptr + e[:, None] * ((SLOTS + 1) * SPLIT) + part[None, :]
        tl.store(at, first[:, None] + tl.cumsum(parts, axis=1) - parts, mask=inside)
    count = tl.sum(tl.reshape(parts, [E_C, S_P, SPLIT]), axis=2)
    start = first[:, None] + tl.cumsum(count, axis=1) - count
    n_tiles = (rows + TILE - 1) // TILE
    my_tile = tile0 + tl.cumsum(n_tiles, axis=0) - n_tiles
    seg_end = seg0
    if SLOTS > 0:
        used = ((count > 0) & (s > 0)[None, :]).to(tl.int32)
        n_segs = tl.sum(used, axis=1)
        my_seg = seg0 + tl.cumsum(n_segs, axis=0) - n_segs
        seg_end += tl.sum(n_segs, axis=0)
        seg = my_seg[:, None] + tl.cumsum(used, axis=1) - used
        slot = tl.broadcast_to(s[None, :] - 1, seg.shape)
        tl.store(seg_slot_ptr + seg, slot, mask=used > 0)
        if seg_rows_ptr is not None:
            tl.store(seg_rows_ptr + seg * 4, tl.broadcast_to(e[:, None], seg.shape), mask=used > 0)
            tl.store(seg_rows_ptr + seg * 4 + 1, start, mask=used > 0)
            tl.store(seg_rows_ptr + seg * 4 + 2, count, mask=used > 0)
            tl.store(seg_rows_ptr + seg * 4 + 3, slot, mask=used > 0)
    for j in range(tl.max(n_tiles, axis=0)):
        have = j < n_tiles
        tile = tiles_ptr + (my_tile + j) * FIELDS
        lo = first + j * TILE
        size = tl.minimum(rows - j * TILE, TILE)
        tl.store(tile, e, mask=have)
        tl.store(tile + 1, lo, mask=have)
        tl.store(tile + 2, size, mask=have)
        if SLOTS > 0:
            before = tl.sum(tl.where(start + count <= lo[:, None], used, 0), axis=1)
            until = tl.sum(tl.where(start < (lo + size)[:, None], used, 0), axis=1)
            tl.store(tile + 3, my_seg + before, mask=have)
            tl.store(tile + 4, until - before, mask=have)
    return row0 + tl.sum(padded, axis=0), tile0 + tl.sum(n_tiles, axis=0), seg_end


@triton.jit
def store_counts(counts_ptr, rows, tiles, segments):
    """The plan's `counts`."""
    tl.store(counts_ptr, tiles)
    tl.store(counts_ptr + 1, segments)
    tl.store(counts_ptr + 2, rows)


@triton.jit
def _offsets_kernel(
    bins_ptr,
    bin_start_ptr,
    tiles_ptr,
    counts_ptr,
    seg_slot_ptr,
    seg_rows_ptr,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    E_C: tl.constexpr,
    S_P: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
):
    part = tl.arange(0, S_P * SPLIT)
    row0 = 0
    tile0 = 0
    seg0 = 0
    for e0 in range(0, E, E_C):
        e = e0 + tl.arange(0, E_C)
        inside = (e < E)[:, None] & (part < (SLOTS + 1) * SPLIT)[None, :]
        parts = tl.load(bins_ptr + e[:, None] * ((SLOTS + 1) * SPLIT) + part[None, :], mask=inside, other=0)
        row0, tile0, seg0 = write_offsets(
            parts, e0, row0, tile0, seg0, bin_start_ptr, tiles_ptr, seg_slot_ptr, seg_rows_ptr,
            E, SLOTS, E_C, S_P, SPLIT, ALIGN, TILE, FIELDS,
        )  # fmt: skip
    store_counts(counts_ptr, row0, tile0, seg0)


def plan_rows(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    align: int,
    tile: int,
    expert_map: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    num_slots: int = 0,
) -> RowPlan:
    """Sort the pairs of ``topk_ids [T, K]`` (int32 or int64) into rows.

    Args:
      topk_ids: an id outside ``[0, E_global)``, or one that `expert_map` sends to -1, is skipped.
      num_experts: experts held here (bins).
      align: rows to which every expert's first row is aligned.
      tile: rows of a tile.
      expert_map: int32 ``[E_global]`` local index or -1; None when every expert is here.
      slots: int32 ``[T]`` adapter slot of each token, -1 (or out of range) for base.
      num_slots: adapter slots; 0 sorts by expert only.
    """
    tokens, k = topk_ids.shape
    pairs = tokens * k
    device = topk_ids.device
    split = 1 if pairs <= 4096 else max(1, 8 // triton.next_power_of_2(num_slots + 1))
    bins = num_experts * (num_slots + 1) * split
    experts = min(pairs, num_experts)
    rows = -(-(pairs + experts * (align - 1)) // align) * align
    segments = min(pairs, num_experts * num_slots)

    def i32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    plan = RowPlan(
        rows=rows,
        tiles=i32(pairs // tile + experts, TILE_FIELDS),
        counts=i32(4),
        pos=i32(pairs),
        row_token=i32(rows),
        row_slot=i32(rows) if num_slots else None,
        seg_slot=i32(segments) if num_slots else None,
        seg_rows=i32(segments, 4) if num_slots else None,
        pair_bin=i32(pairs),
        pair_rank=i32(pairs),
        bin_start=i32(bins),
    )
    counters = torch.zeros(bins, dtype=torch.int32, device=device)
    _count_kernel[(triton.cdiv(pairs, PAIRS_PER_PROGRAM),)](
        topk_ids,
        expert_map if expert_map is not None else topk_ids,
        slots if num_slots else topk_ids,
        counters,
        plan.pair_bin,
        plan.pair_rank,
        pairs,
        expert_map.shape[0] if expert_map is not None else num_experts,
        E=num_experts,
        K=k,
        SLOTS=num_slots,
        SPLIT=split,
        HAS_MAP=expert_map is not None,
        BLOCK=PAIRS_PER_PROGRAM,
        num_warps=8,
    )
    width = triton.next_power_of_2(num_slots + 1) * split
    # As many experts at once as the program's registers and its scans' shared memory hold.
    experts_at_once = min(triton.next_power_of_2(num_experts), max(1, 4096 // width))
    _offsets_kernel[(1,)](
        counters,
        plan.bin_start,
        plan.tiles,
        plan.counts,
        plan.seg_slot if num_slots else counters,
        plan.seg_rows if num_slots else counters,
        E=num_experts,
        SLOTS=num_slots,
        E_C=experts_at_once,
        S_P=triton.next_power_of_2(num_slots + 1),
        SPLIT=split,
        ALIGN=align,
        TILE=tile,
        FIELDS=TILE_FIELDS,
        num_warps=4 if experts_at_once * width <= 1024 else 16,
    )
    return plan
