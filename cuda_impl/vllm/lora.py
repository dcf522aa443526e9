# SPDX-License-Identifier: Apache-2.0
"""vLLM's MoE adapter buffers as this package's kernels read them, without a second copy.

vLLM's LoRA layer owns one tensor a projection: two of ``[slots, E, R, H]`` for the A of gate and up. The kernels read
one ``[slots, E, 2, R, H]``. `adopt` allocates that one and makes vLLM's tensors views of it, so what vLLM's adapter
manager copies into a slot is where the kernels, captured in CUDA graphs or not, read it at the next launch.
"""

from __future__ import annotations

from typing import Any

import torch

from ..prepare import AdapterSlots
from ..route import LORA_RANKS, pad_rank


def _joined(parts: tuple[torch.Tensor, ...], rank_axis: int) -> torch.Tensor:
    """``[slots, E, len(parts), ...]`` over the memory of `parts`, each ``[slots, E, ...]``, which become its views.

    Ranks along `rank_axis` of the result are padded with zeros to what every kernel takes (`route.pad_rank`), so that
    batches with and without adapters take the same kernels, and base rows the same bits.
    """
    first = parts[0]
    slots, experts, *rest = first.shape
    rank = rest[rank_axis - 3]
    rest[rank_axis - 3] = pad_rank(rank)
    shape = (slots, experts, len(parts), *rest)
    if len(parts) == 1 and rank == pad_rank(rank):
        return first.unsqueeze(2)
    size = torch.Size(shape).numel()
    storage = first.untyped_storage()
    if all(p.untyped_storage().data_ptr() == storage.data_ptr() for p in parts) and storage.nbytes() == 2 * size:
        # The context came again.
        return torch.empty(0, dtype=first.dtype, device=first.device).set_(storage, 0, shape)  # type: ignore[call-overload]
    joint = torch.zeros(shape, dtype=first.dtype, device=first.device)
    views = [joint[:, :, index].narrow(rank_axis - 1, 0, rank) for index in range(len(parts))]
    replaced = [part.untyped_storage() for part in parts]
    for part, view in zip(parts, views, strict=True):
        view.copy_(part)
    for part, view in zip(parts, views, strict=True):
        part.set_(view)  # type: ignore[call-overload]
    for old in replaced:
        # vLLM keeps per-slot views of the old memory, for their shapes only; they must not keep it allocated.
        old.resize_(0)
    return joint


def adopt(context: Any, *, gated: bool) -> AdapterSlots:
    """The slots of vLLM's `MoELoRAContext`; its tensors become views where they must be joined.

    Args:
      context: its ``w13_lora_a_stacked``, ``w13_lora_b_stacked``, ``w2_lora_a_stacked`` and ``w2_lora_b_stacked``.
      gated: whether w13 holds gate and up rows.

    Raises:
      NotImplementedError: buffers split over ranks, or one A for gate and up.
      TypeError: adapters that are not bfloat16.
    """
    if context.fully_sharded and context.tp_size > 1:
        raise NotImplementedError("isomoe: fully_sharded_loras with tensor parallelism is not supported")
    halves = 2 if gated else 1
    if len(context.w13_lora_a_stacked) != halves:
        raise NotImplementedError(
            f"isomoe: got {len(context.w13_lora_a_stacked)} LoRA buffer for gate and up, want {halves}; set "
            "enable_mixed_moe_lora_format, or ISOMOE_VLLM=0"
        )
    buffers = (
        *context.w13_lora_a_stacked, *context.w13_lora_b_stacked, *context.w2_lora_a_stacked,
        *context.w2_lora_b_stacked,
    )  # fmt: skip
    for buffer in buffers:
        if buffer.dtype != torch.bfloat16:
            raise TypeError(f"lora_dtype: got {buffer.dtype}, want torch.bfloat16")
    b13 = _joined(context.w13_lora_b_stacked, 4)
    slots, rank = b13.shape[0], b13.shape[4]
    device = b13.device
    return AdapterSlots(
        slot_ids=torch.arange(slots, dtype=torch.int32, device=device),
        ranks=torch.full((slots,), rank, dtype=torch.int32, device=device),
        a13=_joined(context.w13_lora_a_stacked, 3),
        b13=b13,
        a2=_joined(context.w2_lora_a_stacked, 3),
        b2=_joined(context.w2_lora_b_stacked, 4),
    )


def one_route(slots: AdapterSlots) -> bool:
    """Whether batches with and without adapters take the same kernels, so that a base batch may leave adapters out."""
    return slots.max_rank in LORA_RANKS


def token_slots(context: Any, tokens: int, *, flag_decides: bool) -> torch.Tensor | None:
    """Each row's slot, int32 ``[tokens]``, -1 = base; None where vLLM knows that no row has one.

    vLLM leaves the map as it was when a batch uses no adapter, and says so in a flag on the host. Graphs captured for
    batches with and without adapters apart carry the flag of their kind. A graph captured for both cannot
    (`flag_decides` false), so there the ids of active adapters, all -1 in such a batch, decide on the device.
    """
    meta = context.punica_wrapper.token_mapping_meta
    if flag_decides and bool(meta.no_lora_flag_cpu.item()):
        return None
    slots = meta.token_lora_mapping[:tokens]
    if slots.shape[0] != tokens:
        raise ValueError(f"hidden_states: got {tokens} rows, vLLM's LoRA map holds {slots.shape[0]}")
    if flag_decides:
        return slots
    return torch.where(meta.active_lora_ids.max() >= 0, slots, -1)
