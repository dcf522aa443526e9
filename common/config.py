# SPDX-License-Identifier: Apache-2.0
"""What a fused MoE layer is and how it is spread over devices (vLLM's names)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

from .activations import ACTIVATIONS
from .checks import check_choice, check_int

SCORING_FUNCS = ("softmax", "sigmoid")
IN_DTYPES = ("bfloat16", "float16")
MAX_LORA_RANK = 512


@dataclass(frozen=True)
class FusedMoEParallelConfig:
    """How experts and tokens are spread.

    Attributes:
      tp_size: tensor-parallel ranks that split each expert's intermediate dimension.
      dp_size: data-parallel ranks, each with its own tokens.
      ep_size: ranks that split the experts; 1 without expert parallelism.
      ep_rank: this rank, in ``[0, ep_size)``.
      use_ep: whether experts are split at all.
      all2all_backend: vLLM's dispatch name; None or ``"allgather_reducescatter"`` is what kernels here serve.
    """

    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    ep_rank: int = 0
    use_ep: bool = False
    all2all_backend: str | None = None

    def __post_init__(self) -> None:
        for label in ("tp_size", "dp_size", "ep_size"):
            check_int(label, getattr(self, label), minimum=1)
        check_int("ep_rank", self.ep_rank, minimum=0)
        if self.ep_rank >= self.ep_size:
            raise ValueError(f"ep_rank: got {self.ep_rank}, want less than ep_size={self.ep_size}")
        if self.all2all_backend is not None and not isinstance(self.all2all_backend, str):
            raise TypeError(f"all2all_backend: got {self.all2all_backend!r}, want a string or None")

    @property
    def use_batched_activation_format(self) -> bool:
        """Whether the dispatch hands experts one padded batch each (DeepEP low latency, NIXL)."""
        return self.all2all_backend in ("deepep_low_latency", "nixl_ep")


@dataclass(frozen=True)
class FusedMoEConfig:
    """One MoE layer.

    Attributes:
      num_experts: routed experts over all ranks (E).
      experts_per_token: routed experts a token visits (K, top-k).
      hidden_dim: model width (H).
      intermediate_size: width inside one expert (I), before any split.
      activation: one of `activations.ACTIVATIONS`.
      scoring_func: ``"softmax"`` or ``"sigmoid"`` over the router logits.
      renormalize: divide the chosen weights by their sum.
      routed_scaling_factor: multiplies the chosen weights last.
      num_expert_group, topk_group: grouped top-k (DeepSeek); both or neither.
      has_bias: experts carry w13 and w2 biases.
      is_act_and_mul: gated experts (w13 holds gate rows, then up rows).
      is_lora_enabled, max_loras, max_lora_rank: adapter slots and the largest rank a slot holds.
      moe_parallel_config: the spread over devices.
      in_dtype: activations' dtype.
    """

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int
    activation: str = "silu"
    scoring_func: str = "softmax"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int | None = None
    topk_group: int | None = None
    has_bias: bool = False
    is_act_and_mul: bool = True
    is_lora_enabled: bool = False
    max_loras: int = 0
    max_lora_rank: int = 0
    moe_parallel_config: FusedMoEParallelConfig = field(default_factory=FusedMoEParallelConfig)
    in_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for label in ("num_experts", "experts_per_token", "hidden_dim", "intermediate_size"):
            check_int(label, getattr(self, label), minimum=1)
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token: got {self.experts_per_token}, want at most num_experts={self.num_experts}"
            )
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("scoring_func", self.scoring_func, SCORING_FUNCS)
        check_choice("in_dtype", self.in_dtype, IN_DTYPES)
        for label in ("renormalize", "has_bias", "is_act_and_mul", "is_lora_enabled"):
            if not isinstance(getattr(self, label), bool):
                raise TypeError(f"{label}: got {getattr(self, label)!r}, want True or False")
        factor = self.routed_scaling_factor
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= sys.float_info.max:
            raise ValueError(f"routed_scaling_factor: got {self.routed_scaling_factor!r}, want a positive number")
        if (self.num_expert_group is None) != (self.topk_group is None):
            raise ValueError(
                f"topk_group: got num_expert_group={self.num_expert_group} with topk_group={self.topk_group}, "
                "want both or neither"
            )
        if self.num_expert_group is not None and self.topk_group is not None:
            check_int("num_expert_group", self.num_expert_group, minimum=1)
            check_int("topk_group", self.topk_group, minimum=1)
            if self.num_experts % self.num_expert_group:
                raise ValueError(
                    f"num_expert_group: got {self.num_expert_group}, want a divisor of num_experts={self.num_experts}"
                )
            if self.topk_group > self.num_expert_group:
                raise ValueError(f"topk_group: got {self.topk_group}, want at most {self.num_expert_group}")
            reachable = self.topk_group * (self.num_experts // self.num_expert_group)
            if self.experts_per_token > reachable:
                raise ValueError(
                    f"experts_per_token: got {self.experts_per_token}, want at most the {reachable} experts of "
                    f"topk_group={self.topk_group} groups"
                )
        check_int("max_loras", self.max_loras, minimum=0)
        check_int("max_lora_rank", self.max_lora_rank, minimum=0)
        if self.max_lora_rank > MAX_LORA_RANK:
            raise ValueError(f"max_lora_rank: got {self.max_lora_rank}, want at most {MAX_LORA_RANK}")
        if not isinstance(self.moe_parallel_config, FusedMoEParallelConfig):
            raise TypeError(
                f"moe_parallel_config: got {type(self.moe_parallel_config).__name__}, want FusedMoEParallelConfig"
            )

    @property
    def w13_rows(self) -> int:
        """Rows of w13: 2I for gated experts, I otherwise."""
        return (2 if self.is_act_and_mul else 1) * self.intermediate_size

    def with_lora(self, max_loras: int, max_lora_rank: int) -> FusedMoEConfig:
        """The same layer with adapter slots."""
        return replace(self, is_lora_enabled=True, max_loras=max_loras, max_lora_rank=max_lora_rank)
