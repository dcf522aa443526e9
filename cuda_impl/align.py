# SPDX-License-Identifier: Apache-2.0
"""Sorts (token, k) pairs by (expert, adapter) on the device, without a host synchronisation.

A pair's *bin* is ``expert * (slots + 1) + slot + 1``; base rows (slot -1) come first in their expert's block. The
sort is stable: within a bin, pairs keep their order. Each expert's block is padded to whole tiles of `block_m`
rows with -1. Adapters share an expert's tiles, so the base GEMM does the same work with and without LoRA.

Small batches take one launch. Larger ones take passes over per-chunk histograms: rank inside the chunk, prefix over
chunks and bins, scatter. No atomics, hence the same order every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._runtime import cdiv, launch, next_power_of_2, tl, triton

_SUB = 64  # pairs ranked against each other at once
_CHUNK = 1024  # pairs of one program
_SMALL_PAIRS = 256  # up to here every pair is ranked against all others in one program
_SMALL_BINS = 8192  # and every bin is scanned by it


@dataclass(frozen=True)
class Alignment:
    """Sorted pairs. P = most rows that padding can need, tiles = P / block_m; all int32.

    Attributes:
      pair_bin: [T*K] the pair's bin, -1 where it is skipped.
      sorted_pair: [P] pair at each sorted row, -1 for padding; only the first ``num_tiles * block_m`` are defined.
      tile_expert: [tiles] local expert of each tile; only the first ``num_tiles`` are defined.
      num_tiles: [1].
      expert_start: [E] first sorted row of an expert.
      bin_offset, bin_count: [E * (slots + 1)] first row of a bin inside its expert, and its rows.
      block_m: rows of a tile.
      slots: adapter slots (0 without LoRA).
    """

    pair_bin: torch.Tensor
    sorted_pair: torch.Tensor
    tile_expert: torch.Tensor
    num_tiles: torch.Tensor
    expert_start: torch.Tensor
    bin_offset: torch.Tensor
    bin_count: torch.Tensor
    block_m: int
    slots: int

    @property
    def max_tiles(self) -> int:
        return self.tile_expert.shape[0]


@triton.jit
def _bins(
    pair, inside, ids_ptr, map_ptr, adapter_ptr, slot_id_ptr, top_k, global_experts, local_experts,
    SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Each pair's bin, -1 where it is skipped."""
    expert = tl.load(ids_ptr + pair, mask=inside, other=-1)
    keep = (expert >= 0) & (expert < global_experts)
    if HAS_MAP:
        expert = tl.load(map_ptr + expert, mask=keep, other=-1)
    keep = keep & (expert >= 0) & (expert < local_experts)
    bins = expert.to(tl.int32) * (SLOTS + 1)
    if SLOTS > 0:
        adapter = tl.load(adapter_ptr + pair // top_k, mask=inside, other=-1)
        slot = tl.arange(0, SLOTS_PAD)
        slot_id = tl.load(slot_id_ptr + slot, mask=slot < SLOTS, other=-1)
        hit = (adapter[:, None] == slot_id[None, :]) & (adapter >= 0)[:, None]
        bins += tl.max(tl.where(hit, slot[None, :] + 1, 0), axis=1)
    return tl.where(keep, bins, -1)


@triton.jit
def _small_align_kernel(
    ids_ptr, map_ptr, adapter_ptr, slot_id_ptr, bin_ptr, offset_ptr, total_ptr, expert_start_ptr, num_tiles_ptr,
    sorted_ptr, tile_expert_ptr, num_pairs, top_k, global_experts, local_experts, sorted_rows,
    SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr, HAS_MAP: tl.constexpr, PAIRS: tl.constexpr,
    BINS_PAD: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, PAIRS)
    inside = pair < num_pairs
    bins = _bins(
        pair, inside, ids_ptr, map_ptr, adapter_ptr, slot_id_ptr, top_k, global_experts, local_experts,
        SLOTS, SLOTS_PAD, HAS_MAP,
    )  # fmt: skip
    keep = bins >= 0
    same = bins[:, None] == bins[None, :]
    rank = tl.sum((same & (pair[None, :] < pair[:, None])).to(tl.int32), axis=1)
    total = tl.sum(same.to(tl.int32), axis=1)
    tl.store(bin_ptr + pair, bins, mask=inside)

    expert = tl.arange(0, EXPERTS_PAD)
    lane = tl.arange(0, BINS_PAD)
    at = expert[:, None] * (SLOTS + 1) + lane[None, :]
    mask = (expert < local_experts)[:, None] & (lane < SLOTS + 1)[None, :]
    tl.store(total_ptr + at, tl.zeros([EXPERTS_PAD, BINS_PAD], tl.int32), mask=mask)
    for first in range(0, sorted_rows, 1024):
        row = first + tl.arange(0, 1024)
        tl.store(sorted_ptr + row, tl.full([1024], -1, tl.int32), mask=row < sorted_rows)
    tl.debug_barrier()
    tl.store(total_ptr + bins, total, mask=keep & (rank == 0))
    tl.debug_barrier()
    count = tl.load(total_ptr + at, mask=mask, other=0)
    tiles = (tl.sum(count, axis=1) + BLOCK_M - 1) // BLOCK_M
    start = tl.cumsum(tiles, axis=0) - tiles
    tl.store(offset_ptr + at, tl.cumsum(count, axis=1) - count, mask=mask)
    tl.store(expert_start_ptr + expert, start * BLOCK_M, mask=expert < local_experts)
    tl.store(num_tiles_ptr, tl.sum(tiles, axis=0))
    for i in range(tl.max(tiles, axis=0)):
        tl.store(tile_expert_ptr + start + i, expert, mask=i < tiles)
    tl.debug_barrier()
    row = rank + tl.load(offset_ptr + bins, mask=keep, other=0)
    row += tl.load(expert_start_ptr + bins // (SLOTS + 1), mask=keep, other=0)
    tl.store(sorted_ptr + row, pair, mask=keep)


@triton.jit
def _rank_kernel(
    ids_ptr, map_ptr, adapter_ptr, slot_id_ptr, bin_ptr, rank_ptr, count_ptr,
    num_pairs, top_k, global_experts, local_experts, num_bins,
    SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr, HAS_MAP: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    lane = tl.arange(0, SUB)
    counts = count_ptr + chunk.to(tl.int64) * num_bins
    for i in range(CHUNK // SUB):
        pair = chunk * CHUNK + i * SUB + lane
        inside = pair < num_pairs
        bins = _bins(
            pair, inside, ids_ptr, map_ptr, adapter_ptr, slot_id_ptr, top_k, global_experts, local_experts,
            SLOTS, SLOTS_PAD, HAS_MAP,
        )  # fmt: skip
        keep = bins >= 0
        same = bins[:, None] == bins[None, :]
        earlier = tl.sum((same & (lane[None, :] < lane[:, None])).to(tl.int32), axis=1)
        total = tl.sum(same.to(tl.int32), axis=1)
        before = tl.load(counts + bins, mask=keep, other=0)
        tl.debug_barrier()
        tl.store(bin_ptr + pair, bins, mask=inside)
        tl.store(rank_ptr + pair, before + earlier, mask=inside)
        tl.store(counts + bins, before + total, mask=keep & (earlier == 0))
        tl.debug_barrier()


@triton.jit
def _bin_scan_kernel(
    count_ptr, offset_ptr, total_ptr, expert_total_ptr, num_chunks, num_bins,
    BINS: tl.constexpr, BINS_PAD: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    lane = tl.arange(0, BINS_PAD)
    column = expert * BINS + lane
    running = tl.zeros([BINS_PAD], dtype=tl.int32)
    for first in range(0, num_chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        mask = (chunk < num_chunks)[:, None] & (lane < BINS)[None, :]
        where = count_ptr + chunk.to(tl.int64)[:, None] * num_bins + column[None, :]
        n = tl.load(where, mask=mask, other=0)
        tl.store(where, running[None, :] + tl.cumsum(n, axis=0) - n, mask=mask)
        running += tl.sum(n, axis=0)
    tl.store(offset_ptr + column, tl.cumsum(running, axis=0) - running, mask=lane < BINS)
    tl.store(total_ptr + column, running, mask=lane < BINS)
    tl.store(expert_total_ptr + expert, tl.sum(running, axis=0))


@triton.jit
def _expert_scan_kernel(
    expert_total_ptr, expert_start_ptr, num_tiles_ptr, local_experts, BLOCK_M: tl.constexpr, EXPERTS_PAD: tl.constexpr
):
    expert = tl.arange(0, EXPERTS_PAD)
    total = tl.load(expert_total_ptr + expert, mask=expert < local_experts, other=0)
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    start = (tl.cumsum(tiles, axis=0) - tiles) * BLOCK_M
    tl.store(expert_start_ptr + expert, start, mask=expert < local_experts)
    tl.store(num_tiles_ptr, tl.sum(tiles, axis=0))


@triton.jit
def _scatter_kernel(
    bin_ptr, rank_ptr, count_ptr, offset_ptr, expert_total_ptr, expert_start_ptr, sorted_ptr, tile_expert_ptr,
    num_pairs, num_chunks, num_bins,
    BINS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    lane = tl.arange(0, SUB)
    if pid < num_chunks:
        for i in range(CHUNK // SUB):
            pair = pid * CHUNK + i * SUB + lane
            bins = tl.load(bin_ptr + pair, mask=pair < num_pairs, other=-1)
            keep = bins >= 0
            row = tl.load(rank_ptr + pair, mask=keep, other=0)
            row += tl.load(count_ptr + pid.to(tl.int64) * num_bins + bins, mask=keep, other=0)
            row += tl.load(offset_ptr + bins, mask=keep, other=0)
            row += tl.load(expert_start_ptr + bins // BINS, mask=keep, other=0)
            tl.store(sorted_ptr + row, pair, mask=keep)
    else:
        expert = pid - num_chunks
        total = tl.load(expert_total_ptr + expert)
        start = tl.load(expert_start_ptr + expert)
        tiles = (total + BLOCK_M - 1) // BLOCK_M
        pad = total + tl.arange(0, BLOCK_M)
        tl.store(sorted_ptr + start + pad, tl.full([BLOCK_M], -1, tl.int32), mask=pad < tiles * BLOCK_M)
        for first in range(0, tiles, SUB):
            tile = first + lane
            tl.store(tile_expert_ptr + start // BLOCK_M + tile, tl.zeros([SUB], tl.int32) + expert, mask=tile < tiles)


def align(
    topk_ids: torch.Tensor,
    *,
    local_experts: int,
    block_m: int,
    expert_map: torch.Tensor | None = None,
    adapter_ids: torch.Tensor | None = None,
    slot_ids: torch.Tensor | None = None,
) -> Alignment:
    """Sort pairs by (expert, adapter slot).

    Args:
      topk_ids: [T, K] int32 or int64 expert ids; below 0 or beyond the experts means skip.
      local_experts: experts whose weights are here.
      block_m: rows of a tile, a power of two.
      expert_map: [E_global] int32, local index or -1 (skip); None where ids are local already.
      adapter_ids: [T] int32 global adapter ids; an id that no slot holds, or -1, is a base row.
      slot_ids: [slots] int32 global id in each slot, -1 for a free one; given exactly with `adapter_ids`.
    """
    device = topk_ids.device
    num_pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    slots = 0 if slot_ids is None else slot_ids.shape[0]
    bins = slots + 1
    num_bins = local_experts * bins
    chunks = cdiv(num_pairs, _CHUNK)
    max_tiles = min(num_pairs, num_pairs // block_m + min(local_experts, num_pairs))
    empty = lambda n: torch.empty(n, dtype=torch.int32, device=device)  # noqa: E731
    out = Alignment(
        pair_bin=empty(num_pairs),
        sorted_pair=empty(max_tiles * block_m),
        tile_expert=empty(max_tiles),
        num_tiles=empty(1),
        expert_start=empty(local_experts),
        bin_offset=empty(num_bins),
        bin_count=empty(num_bins),
        block_m=block_m,
        slots=slots,
    )
    inputs = dict(
        ids_ptr=topk_ids,
        map_ptr=topk_ids if expert_map is None else expert_map,
        adapter_ptr=topk_ids if adapter_ids is None else adapter_ids,
        slot_id_ptr=topk_ids if slot_ids is None else slot_ids,
    )
    sizes = dict(
        num_pairs=num_pairs,
        top_k=top_k,
        global_experts=local_experts if expert_map is None else expert_map.shape[0],
        local_experts=local_experts,
    )
    bins_pad, experts_pad = next_power_of_2(bins), next_power_of_2(local_experts)
    variant = dict(SLOTS=slots, SLOTS_PAD=next_power_of_2(max(slots, 1)), HAS_MAP=expert_map is not None)
    if num_pairs <= _SMALL_PAIRS and bins_pad * experts_pad <= _SMALL_BINS:
        launch(
            _small_align_kernel,
            (1,),
            inputs
            | dict(
                bin_ptr=out.pair_bin,
                offset_ptr=out.bin_offset,
                total_ptr=out.bin_count,
                expert_start_ptr=out.expert_start,
                num_tiles_ptr=out.num_tiles,
                sorted_ptr=out.sorted_pair,
                tile_expert_ptr=out.tile_expert,
            )
            | sizes
            | dict(sorted_rows=max_tiles * block_m),
            num_warps=8,
            PAIRS=max(16, next_power_of_2(num_pairs)),
            BINS_PAD=bins_pad,
            EXPERTS_PAD=experts_pad,
            BLOCK_M=block_m,
            **variant,
        )
        return out
    rank, expert_total = empty(num_pairs), empty(local_experts)
    count = torch.zeros(chunks * num_bins, dtype=torch.int32, device=device)
    launch(
        _rank_kernel,
        (chunks,),
        inputs | dict(bin_ptr=out.pair_bin, rank_ptr=rank, count_ptr=count) | sizes | dict(num_bins=num_bins),
        **variant,
        CHUNK=_CHUNK,
        SUB=_SUB,
    )
    launch(
        _bin_scan_kernel,
        (local_experts,),
        dict(
            count_ptr=count,
            offset_ptr=out.bin_offset,
            total_ptr=out.bin_count,
            expert_total_ptr=expert_total,
            num_chunks=chunks,
            num_bins=num_bins,
        ),
        BINS=bins,
        BINS_PAD=bins_pad,
        CHUNKS=min(64, next_power_of_2(chunks)),
    )
    launch(
        _expert_scan_kernel,
        (1,),
        dict(
            expert_total_ptr=expert_total,
            expert_start_ptr=out.expert_start,
            num_tiles_ptr=out.num_tiles,
            local_experts=local_experts,
        ),
        BLOCK_M=block_m,
        EXPERTS_PAD=experts_pad,
    )
    launch(
        _scatter_kernel,
        (chunks + local_experts,),
        dict(
            bin_ptr=out.pair_bin,
            rank_ptr=rank,
            count_ptr=count,
            offset_ptr=out.bin_offset,
            expert_total_ptr=expert_total,
            expert_start_ptr=out.expert_start,
            sorted_ptr=out.sorted_pair,
            tile_expert_ptr=out.tile_expert,
            num_pairs=num_pairs,
            num_chunks=chunks,
            num_bins=num_bins,
        ),
        BINS=bins,
        BLOCK_M=block_m,
        CHUNK=_CHUNK,
        SUB=_SUB,
    )
    return out
