# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism over a torch.distributed group.

Two ways to bring tokens to experts, both with GLOBAL adapter ids (every rank may keep an adapter in another slot):

* `replicated`: every rank has all tokens and computes its own experts' part by `expert_map`; an all-reduce adds the
  parts. What tensor-parallel ranks do.
* `gathered`: every rank has its own tokens, uneven in number. They are all-gathered with their routing and adapter ids
  (two collectives: rows, and everything else packed), every rank computes its experts' part of all of them, and a
  reduce-scatter adds the parts and hands each rank its tokens back. In `chunks`, the gather of one overlaps the experts
  of the one before, and its reduce-scatter those of the next.

Rows travel in bf16, because adapters see the original rows. Without LoRA they may travel as FP8 codes and scales (half
the bytes, and the same codes a rank would make itself), which the portable kernels read and the Hopper ones do not.

Neither reads a device value on the host, except that `gathered` must know every rank's token count: give
`token_counts` to keep it free of synchronisation (and capturable, after one call that is not captured), else it asks
the group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from ..common.checks import check_choice, check_int
from ..common.placement import ExpertPlacement
from ..common.recipes import Recipe
from ._runtime import target_of
from .moe import fused_moe, resolve_recipe
from .prepare import AdapterSlots, PreparedWeights
from .quantize import quantize_rows
from .route import CallShape, why_not_hopper

_WIRE = {"f32": torch.float32, "bf16": torch.bfloat16}


@functools.lru_cache(maxsize=256)
def expert_map(placement: ExpertPlacement, rank: int, device: torch.device) -> torch.Tensor:
    """[E_global] int32: an expert's index among `rank`'s experts, or -1. Copied to the device once, since a copy from
    the host cannot be captured."""
    return torch.from_numpy(placement.expert_map(rank)).to(device)


def _check_experts(placement: ExpertPlacement, weights: PreparedWeights, group: dist.ProcessGroup | None) -> int:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if placement.ep_size != size:
        raise ValueError(f"placement: got ep_size={placement.ep_size}, want the group's size {size}")
    held = len(placement.experts_of(rank))
    if weights.num_experts != held:
        raise ValueError(f"weights: got {weights.num_experts} experts, want the {held} that rank {rank} holds")
    return rank


def fused_moe_replicated(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: PreparedWeights,
    placement: ExpertPlacement,
    *,
    group: dist.ProcessGroup | None = None,
    activation: str = "silu",
    recipe: Recipe | str | None = None,
    adapters: AdapterSlots | None = None,
    adapter_ids: torch.Tensor | None = None,
    wire: str = "f32",
) -> torch.Tensor:
    """The layer on tokens that every rank holds.

    Args:
      x, topk_weights, topk_ids, adapter_ids: as in `fused_moe`, equal on all ranks; ids are global.
      weights, adapters: this rank's experts, as `placement` deals them.
      placement: whose experts are where; its `ep_size` is the group's size.
      group: default process group if None.
      wire: precision of the partial sums in the all-reduce, ``"f32"`` or ``"bf16"``.

    Returns:
      [T, H] bf16, on every rank.

    Raises:
      ValueError: experts or group do not fit the placement; and what `fused_moe` raises.
    """
    check_choice("wire", wire, _WIRE)
    rank = _check_experts(placement, weights, group)
    partial = fused_moe(
        x,
        topk_weights,
        topk_ids,
        weights,
        activation=activation,
        recipe=recipe,
        adapters=adapters,
        adapter_ids=adapter_ids,
        expert_map=expert_map(placement, rank, x.device),
        out_dtype=_WIRE[wire],
    )
    dist.all_reduce(partial, group=group)
    return partial.bfloat16()


T = TypeVar("T")


@dataclass(frozen=True)
class Pending(Generic[T]):
    """Collectives under way; `wait` makes the current stream (on the CPU: the caller) wait, and gives the result."""

    works: tuple[dist.Work | None, ...]
    finish: Callable[[], T]

    def wait(self) -> T:
        for work in self.works:
            if work is not None:
                work.wait()
        return self.finish()


@dataclass(frozen=True)
class Tokens:
    """Rows with what travels beside them; as `fused_moe` takes them, ids global."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    adapter_ids: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None

    def rows(self, start: int, stop: int) -> Tokens:
        """Some of the rows."""
        cut = lambda t: None if t is None else t[start:stop]  # noqa: E731
        return Tokens(
            self.x[start:stop], self.topk_weights[start:stop], self.topk_ids[start:stop], cut(self.adapter_ids),
            cut(self.x_scale),
        )  # fmt: skip


def _gather(
    local: torch.Tensor, counts: list[int], group: dist.ProcessGroup | None, async_op: bool
) -> Pending[torch.Tensor]:
    """Rows of all ranks in rank order; ranks may differ in rows."""
    most = max(counts)
    padded = local.contiguous()
    if local.shape[0] < most:
        padded = local.new_zeros((most, *local.shape[1:]))
        padded[: local.shape[0]] = local
    out = local.new_empty((most * len(counts), *local.shape[1:]))
    work = dist.all_gather_into_tensor(out, padded, group=group, async_op=async_op)

    def finish() -> torch.Tensor:
        if min(counts) == most:
            return out
        parts = out.view(len(counts), most, *local.shape[1:])
        return torch.cat([parts[i, :n] for i, n in enumerate(counts)])

    # `padded` must outlive the collective.
    return Pending((work,), lambda: (finish(), padded)[0])


def gather_tokens(
    local: Tokens, counts: list[int], group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> Pending[Tokens]:
    """Every rank's tokens, in rank order: one collective for the rows and one for all that goes with them."""
    k = local.topk_ids.shape[1]
    parts = [local.topk_weights.contiguous().view(torch.int32), local.topk_ids.to(torch.int32)]
    if local.adapter_ids is not None:
        parts.append(local.adapter_ids.to(torch.int32)[:, None])
    if local.x_scale is not None:
        parts.append(local.x_scale.contiguous().view(torch.int32))
    packed = _gather(torch.cat(parts, 1), counts, group, async_op)
    rows = _gather(local.x, counts, group, async_op)

    def finish() -> Tokens:
        pack = packed.finish()
        ends = 2 * k + (local.adapter_ids is not None)
        return Tokens(
            rows.finish(), pack[:, :k].contiguous().view(torch.float32), pack[:, k : 2 * k].contiguous(),
            None if local.adapter_ids is None else pack[:, 2 * k].contiguous(),
            None if local.x_scale is None else pack[:, ends:].contiguous().view(torch.float32),
        )  # fmt: skip

    return Pending((*packed.works, *rows.works), finish)


def reduce_rows(
    partial: torch.Tensor, counts: list[int], rank: int, group: dist.ProcessGroup | None = None, *,
    async_op: bool = False,
) -> Pending[torch.Tensor]:  # fmt: skip
    """The sum over ranks of `partial [sum(counts), H]`, this rank's rows of it."""
    most = max(counts)
    padded = partial
    if min(counts) < most:
        padded = partial.new_zeros((len(counts) * most, partial.shape[1]))
        for i, part in enumerate(torch.split(partial, counts)):
            padded[i * most : i * most + counts[i]] = part
    out = partial.new_empty((most, partial.shape[1]))
    work = dist.reduce_scatter_tensor(out, padded, group=group, async_op=async_op)
    return Pending((work,), lambda: (out[: counts[rank]], padded)[0])


def _rows_as_fp8(
    gather: str, declared: Recipe, weights: PreparedWeights, activation: str, adapters: AdapterSlots | None,
    device: torch.device,
) -> bool:  # fmt: skip
    """Whether rows travel as codes; "auto" sends them so where the kernels that then run are the fastest there are."""
    possible = declared.name == "w8a8" and (adapters is None or declared.lora_input == "fp8")
    if gather == "fp8" and not possible:
        raise ValueError(
            f"gather: got 'fp8' with recipe {declared.name!r}"
            + ("" if adapters is None else " and adapters that see the original rows") + ", want 'bf16' or 'auto'"
        )
    if gather != "auto" or not possible:
        return gather == "fp8"
    shape = CallShape(
        declared, activation, weights.is_block, weights.halves == 2, weights.w13_bias is not None, weights.hidden_dim,
        weights.intermediate_size,
    )  # fmt: skip
    return why_not_hopper(shape, target_of(device)) is not None


def fused_moe_gathered(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: PreparedWeights,
    placement: ExpertPlacement,
    *,
    group: dist.ProcessGroup | None = None,
    token_counts: list[int] | None = None,
    activation: str = "silu",
    recipe: Recipe | str | None = None,
    adapters: AdapterSlots | None = None,
    adapter_ids: torch.Tensor | None = None,
    wire: str = "f32",
    gather: str = "auto",
    chunks: int = 1,
) -> torch.Tensor:
    """The layer on tokens of which every rank holds its own.

    Args:
      x, topk_weights, topk_ids, adapter_ids: this rank's tokens, any number, also none; ids are global. Either every
        rank passes adapters or none does.
      weights, adapters: this rank's experts, as `placement` deals them.
      token_counts: tokens of every rank in rank order; asked from the group if None.
      wire: precision of the partial sums in the reduce-scatter, ``"f32"`` or ``"bf16"``.
      gather: how rows travel: ``"bf16"``, ``"fp8"`` (w8a8 without adapters), or ``"auto"``.
      chunks: parts that overlap each other's collectives; every rank must pass the same number. Every chunk reads the
        experts' weights again, so more than 1 pays for large batches only.

    Returns:
      [T_local, H] bf16.

    Raises:
      ValueError: experts, group or counts do not fit; and what `fused_moe` raises.
    """
    check_choice("wire", wire, _WIRE)
    rank = _check_experts(placement, weights, group)
    declared = resolve_recipe(recipe, weights)
    if token_counts is None:
        count = torch.tensor([x.shape[0]], dtype=torch.int64, device=x.device)
        counts_tensor = count.new_empty(placement.ep_size)
        dist.all_gather_into_tensor(counts_tensor, count, group=group)
        token_counts = counts_tensor.tolist()
    if len(token_counts) != placement.ep_size or token_counts[rank] != x.shape[0]:
        raise ValueError(
            f"token_counts: got {token_counts}, want {placement.ep_size} counts with {x.shape[0]} at rank {rank}"
        )
    check_choice("gather", gather, ("auto", "bf16", "fp8"))
    check_int("chunks", chunks, minimum=1)
    if max(token_counts) == 0:
        return x.clone()
    local = Tokens(x, topk_weights, topk_ids, adapter_ids)
    if _rows_as_fp8(gather, declared, weights, activation, adapters, x.device):
        assert declared.x_group is not None
        codes, scale = quantize_rows(x, declared.x_group, static_scale=weights.w13_input_scale)
        local = Tokens(codes, topk_weights, topk_ids, adapter_ids, scale)
    # Chunk c of a rank with n tokens: rows n * c // chunks on.
    sizes = [[n * (c + 1) // chunks - n * c // chunks for n in token_counts] for c in range(chunks)]
    starts = [x.shape[0] * c // chunks for c in range(chunks + 1)]
    overlap = chunks > 1
    # All gathers are issued first: they queue behind each other, and each chunk's experts wait for their own only.
    gathered = [
        gather_tokens(local.rows(starts[c], starts[c + 1]), counts, group, async_op=overlap) if max(counts) else None
        for c, counts in enumerate(sizes)
    ]
    reduced = []
    for counts, pending in zip(sizes, gathered, strict=True):
        if pending is None:
            continue
        tokens = pending.wait()
        partial = fused_moe(
            tokens.x,
            tokens.topk_weights,
            tokens.topk_ids,
            weights,
            activation=activation,
            recipe=declared,
            adapters=adapters,
            adapter_ids=tokens.adapter_ids,
            expert_map=expert_map(placement, rank, x.device),
            x_scale=tokens.x_scale,
            out_dtype=_WIRE[wire],
        )
        reduced.append(reduce_rows(partial, counts, rank, group, async_op=overlap))
    parts = [pending.wait().bfloat16() for pending in reduced]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
