# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism over a torch.distributed group.

Two ways to bring tokens to experts, both with GLOBAL adapter ids (every rank may keep an adapter in another slot):

* `replicated`: every rank has all tokens and computes its own experts' part by `expert_map`; an all-reduce adds the
  parts. What tensor-parallel ranks do.
* `gathered`: every rank has its own tokens, uneven in number. They are all-gathered with their routing and adapter ids,
  every rank computes its experts' part of all of them, and a reduce-scatter adds the parts and hands each rank its
  tokens back. Without LoRA the rows travel as FP8 codes and scales (half the bytes, and the same codes a rank would
  make itself); with LoRA they travel in bf16, because adapters see the original rows.

Neither reads a device value on the host, except that `gathered` must know every rank's token count: give
`token_counts` to keep it free of synchronisation (and capturable), else it asks the group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..common.checks import check_choice
from ..common.placement import ExpertPlacement
from ..common.recipes import Recipe
from .moe import fused_moe, resolve_recipe
from .prepare import AdapterSlots, PreparedWeights
from .quantize import quantize_rows

_WIRE = {"f32": torch.float32, "bf16": torch.bfloat16}


def expert_map(placement: ExpertPlacement, rank: int, device: torch.device | str) -> torch.Tensor:
    """[E_global] int32: an expert's index among `rank`'s experts, or -1."""
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


def _gather(local: torch.Tensor, counts: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Rows of all ranks in rank order; ranks may differ in rows."""
    most = max(counts)
    padded = local.new_zeros((most, *local.shape[1:]))
    padded[: local.shape[0]] = local
    out = local.new_empty((most * len(counts), *local.shape[1:]))
    dist.all_gather_into_tensor(out, padded, group=group)
    parts = out.view(len(counts), most, *local.shape[1:])
    return torch.cat([parts[i, :n] for i, n in enumerate(counts)])


def _reduce_scatter(
    partial: torch.Tensor, counts: list[int], rank: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The sum over ranks of `partial`, this rank's rows of it."""
    most = max(counts)
    padded = partial.new_zeros((len(counts) * most, partial.shape[1]))
    for i, part in enumerate(torch.split(partial, counts)):
        padded[i * most : i * most + counts[i]] = part
    out = partial.new_empty((most, partial.shape[1]))
    dist.reduce_scatter_tensor(out, padded, group=group)
    return out[: counts[rank]]


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
) -> torch.Tensor:
    """The layer on tokens of which every rank holds its own.

    Args:
      x, topk_weights, topk_ids, adapter_ids: this rank's tokens, any number, also none; ids are global. Either every
        rank passes adapters or none does.
      weights, adapters: this rank's experts, as `placement` deals them.
      token_counts: tokens of every rank in rank order; asked from the group if None.
      wire: precision of the partial sums in the reduce-scatter, ``"f32"`` or ``"bf16"``.

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
    if max(token_counts) == 0:
        return x.clone()
    x_scale = None
    if declared.name == "w8a8" and (adapters is None or declared.lora_input == "fp8"):
        assert declared.x_group is not None
        x, scale = quantize_rows(x, declared.x_group, static_scale=weights.w13_input_scale)
        x_scale = _gather(scale, token_counts, group)
    partial = fused_moe(
        _gather(x, token_counts, group),
        _gather(topk_weights, token_counts, group),
        _gather(topk_ids, token_counts, group),
        weights,
        activation=activation,
        recipe=declared,
        adapters=adapters,
        adapter_ids=None if adapter_ids is None else _gather(adapter_ids, token_counts, group),
        expert_map=expert_map(placement, rank, x.device),
        x_scale=x_scale,
        out_dtype=_WIRE[wire],
    )
    return _reduce_scatter(partial, token_counts, rank, group).bfloat16()
