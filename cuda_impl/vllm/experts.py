# SPDX-License-Identifier: Apache-2.0
"""This package's kernels as vLLM modular experts, adapters included.

vLLM drives them as it drives its own: its LoRA layer wraps them, its adapter manager fills their slots, its CUDA
graphs capture them. Rows arrive unquantised (`expects_unquantized_inputs`), so the kernels quantise them themselves
and adapters see the original bfloat16 rows, also after an all-gather.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms import current_platform

from ...common.backends import Fp8MoeBackend
from ...common.quant_keys import KEYS_OF_SCHEME
from ..moe import fused_moe
from ..prepare import AdapterSlots, PreparedWeights
from .lora import adopt, one_route, token_slots
from .selection import ACTIVATIONS, quant_key


class IsomoeExperts(LoRAExpertsMixin, mk.FusedMoEExpertsModular):
    """W8A8 experts; `recipe` names what `fused_moe` computes."""

    recipe = "w8a8"

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        if quant_config.gemm1_clamp_limit is not None:
            raise NotImplementedError(
                f"isomoe: got swiglu_limit {quant_config.gemm1_clamp_limit}: activations are not clamped; set "
                "ISOMOE_VLLM=0"
            )
        self._gated = bool(moe_config.is_act_and_mul)
        # Whether a batch without adapters may be told on the host; see `lora.token_slots`.
        self._flag_decides = _graphs_by_lora()
        self._prepared: tuple[tuple[int, int], PreparedWeights] | None = None
        self._slots: AdapterSlots | None = None

    # What vLLM asks of the class.

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cuda()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        pair = (quant_key(weight_key), quant_key(activation_key))
        return weight_key is not None and pair in KEYS_OF_SCHEME.values()

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation.value.removesuffix("_no_mul") in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_all2all_kernels or moe_parallel_config.use_ag_rs_all2all_kernels

    @staticmethod
    def _supports_batch_invariance() -> bool:
        from .._runtime import batch_invariant

        return batch_invariant()

    @staticmethod
    def supports_lora() -> bool:
        return True

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M: int, N: int, K: int, *args: Any, **kwargs: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspace of vLLM's is used; the result is ``[M, K]``."""
        return (0,), (0,), (M, K)

    # Adapters.

    def set_lora_context(self, ctx: Any) -> None:
        """Take vLLM's slots over (see `lora.adopt`); called once, after its LoRA layer has allocated them."""
        self._slots = adopt(ctx, gated=self._gated)
        self._flag_decides &= one_route(self._slots)
        super().set_lora_context(ctx)

    # Weights.

    def prepared(self, w1: torch.Tensor, w2: torch.Tensor) -> PreparedWeights:
        """vLLM's tensors as the kernels read them: views, but for per-tensor scales, which are spread over rows."""
        key = (w1.data_ptr(), w2.data_ptr())
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = (key, self._prepare(w1, w2))
        return self._prepared[1]

    def _prepare(self, w1: torch.Tensor, w2: torch.Tensor) -> PreparedWeights:
        experts, rows, hidden = w1.shape
        s1, s2 = self.w1_scale, self.w2_scale
        assert s1 is not None and s2 is not None, "FP8 experts come with weight scales"
        if self.block_shape is None:
            s1, s2 = _row_scales("w13_weight_scale", s1, experts, rows), _row_scales(
                "w2_weight_scale", s2, experts, hidden
            )
        static = self.recipe == "w8a8" and self.a1_scale is not None
        return PreparedWeights(
            w13=w1.view(torch.uint8),
            w2=w2.view(torch.uint8),
            w13_scale=s1.float().contiguous(),
            w2_scale=s2.float().contiguous(),
            w13_bias=None if self.w1_bias is None else self.w1_bias.float().contiguous(),
            w2_bias=None if self.w2_bias is None else self.w2_bias.float().contiguous(),
            w13_input_scale=_layer_scale(self.a1_scale) if static else None,
            w2_input_scale=_layer_scale(self.a2_scale) if static else None,
        )

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor | None,
        workspace2: torch.Tensor | None,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """``output[t] = sum_k w[t, k] * expert(x_t)``: bf16 ``[T, H]``, weighted and summed.

        Raises:
          NotImplementedError: quantised rows.
        """
        if a1q_scale is not None or hidden_states.dtype != torch.bfloat16:
            raise NotImplementedError(
                f"isomoe: got rows of {hidden_states.dtype} from vLLM's prepare step, want unquantised bfloat16"
            )
        context = self._lora_context
        slots = None
        if context is not None:
            slots = token_slots(context, hidden_states.shape[0], flag_decides=self._flag_decides)
        if apply_router_weight_on_input:
            # The prepare step has multiplied the rows: that product is what the expert, and its adapter, sees.
            topk_weights = torch.ones_like(topk_weights)
        name = str(activation.value).removesuffix("_no_mul")
        output.copy_(
            fused_moe(
                hidden_states.contiguous(),
                topk_weights.float().contiguous(),
                _ids(topk_ids),
                self.prepared(w1, w2),
                activation=name,
                recipe=self.recipe,
                adapters=None if slots is None else self._slots,
                adapter_ids=slots,
                expert_map=expert_map,
            )
        )


class IsomoeW8A16Experts(IsomoeExperts):
    """W8A16 experts, for GPUs that do not multiply e4m3: activations are never quantised."""

    recipe = "w8a16"


EXPERTS_OF_BACKEND: dict[Fp8MoeBackend, type[IsomoeExperts]] = {
    Fp8MoeBackend.TRITON: IsomoeExperts,
    Fp8MoeBackend.MARLIN: IsomoeW8A16Experts,
}


def _graphs_by_lora() -> bool:
    """Whether vLLM captures graphs for batches with and without adapters apart."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is None or bool(getattr(config.compilation_config, "cudagraph_specialize_lora", True))


def _row_scales(label: str, scale: torch.Tensor, experts: int, rows: int) -> torch.Tensor:
    """f32 ``[E, rows]`` of a scale a row (``[E, rows, 1]``) or an expert (``[E]``)."""
    flat = scale.reshape(experts, -1)
    if flat.shape[1] not in (1, rows):
        raise ValueError(f"{label}: got {list(scale.shape)}, want [{experts}] or [{experts}, {rows}, 1]")
    return flat if flat.shape[1] == rows else flat.expand(experts, rows)


def _layer_scale(scale: torch.Tensor | None) -> torch.Tensor | None:
    """A static activation scale as f32 ``[1]``; of several, the largest."""
    return None if scale is None else scale.float().max().reshape(1)


def _ids(topk_ids: torch.Tensor) -> torch.Tensor:
    ids = topk_ids if topk_ids.dtype in (torch.int32, torch.int64) else topk_ids.to(torch.int32)
    return ids.contiguous()
