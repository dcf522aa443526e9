# SPDX-License-Identifier: Apache-2.0
"""Host weights and adapters as device tensors, transformed once at load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from ..common.config import FusedMoEConfig
from ..common.numerics import E4M3
from ..common.weights import LoRAAdapter, MoEWeights
from .route import pad_rank


def to_torch(a: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """A copy on `device`; float8_e4m3fn arrives as uint8 (its bits), bfloat16 as bfloat16."""
    a = np.ascontiguousarray(a)
    if a.dtype == E4M3:
        return torch.from_numpy(a.view(np.uint8).copy()).to(device)
    if a.dtype == np.dtype(ml_dtypes.bfloat16):
        return torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(a.copy()).to(device)


@dataclass(frozen=True, eq=False)
class PreparedWeights:
    """One layer's experts on a device, as the kernels read them.

    Attributes:
      w13: [E, 2I, H] (or [E, I, H]) uint8 holding e4m3fn bits, or bf16; gate rows, then up rows.
      w2: [E, H, I], same dtype.
      w13_scale: f32; [E, rows of w13] (tensor scales are spread over the rows), or for block weights
        [E, halves * ceil(I/128), ceil(H/128)]; None for bf16.
      w2_scale: f32 [E, H] or [E, ceil(H/128), ceil(I/128)].
      w13_bias, w2_bias: f32 [E, rows of w13], [E, H].
      w13_input_scale, w2_input_scale: f32 [1] static activation scales.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    w13_input_scale: torch.Tensor | None = None
    w2_input_scale: torch.Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        return self.w13.dtype == torch.uint8

    @property
    def is_block(self) -> bool:
        return self.w13_scale is not None and self.w13_scale.dim() == 3

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden_dim(self) -> int:
        return self.w13.shape[2]

    @property
    def intermediate_size(self) -> int:
        return self.w2.shape[2]

    @property
    def halves(self) -> int:
        """2 for gated experts, 1 otherwise."""
        return self.w13.shape[1] // self.w2.shape[2]


def prepare_weights(weights: MoEWeights, device: torch.device | str) -> PreparedWeights:
    """Copy a layer's experts to `device`. Weight and scale bits stay as they are."""
    s13, s2 = weights.w13_scale, weights.w2_scale
    if weights.scheme in ("channel", "tensor"):
        s13, s2 = weights.channel_scales()

    def put(a: np.ndarray | None) -> torch.Tensor | None:
        return None if a is None else to_torch(a, device)

    def layer_scale(a: np.ndarray | None) -> torch.Tensor | None:
        return None if a is None else torch.full((1,), float(np.max(a)), dtype=torch.float32, device=device)

    return PreparedWeights(
        w13=to_torch(weights.w13, device),
        w2=to_torch(weights.w2, device),
        w13_scale=put(s13),
        w2_scale=put(s2),
        w13_bias=put(weights.w13_bias),
        w2_bias=put(weights.w2_bias),
        w13_input_scale=layer_scale(weights.w13_input_scale),
        w2_input_scale=layer_scale(weights.w2_input_scale),
    )


@dataclass(frozen=True, eq=False)
class AdapterSlots:
    """Fixed adapter slots of one layer on a device; addresses never change, so captured graphs stay valid.

    Kernels match a token's global adapter id against `slot_ids` on the device; a free slot is never read. Entries
    beyond an adapter's rank are zero (the Hopper kernels multiply them) and never read by the portable kernels.

    Attributes:
      slot_ids: [slots] int32 global adapter id, -1 = free.
      ranks: [slots] int32.
      a13: [slots, E|1, halves, R, H] bf16 (expert dimension 1 where every adapter shares it over experts).
      b13: [slots, E, halves, I, R] bf16, scaling folded in.
      a2: [slots, E, 1, R, I] bf16.
      b2: [slots, E|1, 1, H, R] bf16, scaling folded in.
    """

    slot_ids: torch.Tensor
    ranks: torch.Tensor
    a13: torch.Tensor
    b13: torch.Tensor
    a2: torch.Tensor
    b2: torch.Tensor

    @property
    def max_rank(self) -> int:
        return self.b13.shape[4]

    def load(self, slot: int, adapter: LoRAAdapter) -> None:
        """Write an adapter into a slot.

        The slot is closed first and opened last, in stream order, so no launch sees half an adapter.

        Raises:
          ValueError: the adapter's rank or shape does not fit, or it is shared over experts and the slot is not
            wide enough the other way round.
        """
        if not 0 <= slot < self.slot_ids.shape[0]:
            raise ValueError(f"slot: got {slot}, want 0 to {self.slot_ids.shape[0] - 1}")
        if adapter.rank > self.max_rank:
            raise ValueError(f"adapter {adapter.adapter_id}: got rank {adapter.rank}, want at most {self.max_rank}")
        self.slot_ids[slot] = -1
        r = adapter.rank
        for label, pool, value, rank_axis in (
            ("a13", self.a13, adapter.a13, 2),
            ("b13", self.b13, adapter.b13, 3),
            ("a2", self.a2, adapter.a2[:, None], 2),
            ("b2", self.b2, adapter.b2[:, None], 3),
        ):
            target = pool[slot].narrow(rank_axis, 0, r)
            pool[slot].narrow(rank_axis, r, self.max_rank - r).zero_()
            source = to_torch(value.astype(ml_dtypes.bfloat16), pool.device)
            if source.shape[0] not in (1, target.shape[0]) or source.shape[1:] != target.shape[1:]:
                raise ValueError(
                    f"adapter {adapter.adapter_id}: {label} has shape {list(source.shape)}, the slot takes "
                    f"{list(target.shape)} (1 expert where shared)"
                )
            target.copy_(source.expand_as(target))
        self.ranks[slot] = r
        self.slot_ids[slot] = adapter.adapter_id

    def unload(self, slot: int) -> None:
        """Free a slot; tokens that still carry its id run as base rows."""
        self.slot_ids[slot] = -1


def empty_slots(
    config: FusedMoEConfig,
    *,
    max_loras: int,
    max_lora_rank: int,
    device: torch.device | str,
    num_experts: int | None = None,
    shared_a13: bool = False,
    shared_b2: bool = False,
) -> AdapterSlots:
    """Free slots for a layer; `num_experts` where only a rank's share of the experts is held.

    R is `max_lora_rank` rounded up to what every kernel takes: 16, 32, 64, 128, or a multiple of 64.
    """
    max_lora_rank = pad_rank(max_lora_rank)
    experts = config.num_experts if num_experts is None else num_experts
    halves, hidden, inter = 2 if config.is_act_and_mul else 1, config.hidden_dim, config.intermediate_size

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty((max_loras, *shape), dtype=torch.bfloat16, device=device)

    return AdapterSlots(
        slot_ids=torch.full((max_loras,), -1, dtype=torch.int32, device=device),
        ranks=torch.zeros(max_loras, dtype=torch.int32, device=device),
        a13=empty(1 if shared_a13 else experts, halves, max_lora_rank, hidden),
        b13=empty(experts, halves, inter, max_lora_rank),
        a2=empty(experts, 1, max_lora_rank, inter),
        b2=empty(1 if shared_b2 else experts, 1, hidden, max_lora_rank),
    )


def prepare_adapters(
    adapters: Iterable[LoRAAdapter],
    config: FusedMoEConfig,
    *,
    device: torch.device | str,
    max_loras: int | None = None,
    max_lora_rank: int | None = None,
    num_experts: int | None = None,
) -> AdapterSlots:
    """Slots with these adapters in them, in order.

    Args:
      adapters: adapters of this layer, cut to the experts held here.
      config: the layer; its `max_loras` and `max_lora_rank` are the defaults for the sizes where set.
      max_loras, max_lora_rank: slots and rank to allocate; otherwise what the adapters need.
      num_experts: experts held here, where not all.

    Raises:
      ValueError: more adapters than slots, or an adapter that does not fit.
    """
    loaded = list(adapters)
    slots = max_loras or config.max_loras or len(loaded)
    rank = max_lora_rank or config.max_lora_rank or max((a.rank for a in loaded), default=1)
    if len(loaded) > slots:
        raise ValueError(f"adapters: got {len(loaded)}, want at most max_loras={slots}")
    if not slots:
        raise ValueError("max_loras: got 0, want at least 1")
    one_expert = (config.num_experts if num_experts is None else num_experts) == 1
    pool = empty_slots(
        config,
        max_loras=slots,
        max_lora_rank=rank,
        device=device,
        num_experts=num_experts,
        shared_a13=not one_expert and bool(loaded) and all(a.a13.shape[0] == 1 for a in loaded),
        shared_b2=not one_expert and bool(loaded) and all(a.b2.shape[0] == 1 for a in loaded),
    )
    for slot, adapter in enumerate(loaded):
        pool.load(slot, adapter)
    return pool
