# SPDX-License-Identifier: Apache-2.0
"""tpu-inference's MoE methods with safe constructors and this package's kernel.

Each class here is tpu-inference's own with two additions: its vLLM constructor runs through this package's selector
(`selection`), and where tpu-inference chooses its fused expert-parallel kernel (``USE_MOE_EP_KERNEL=1`` with expert
parallelism), the layer runs on ours instead. Where ours refuses a layer, everything stays tpu-inference's, and one
log line says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.sharding import Mesh
from torch.nn.parameter import Parameter
from torchax.interop import jax_view, torch_view
from tpu_inference import envs
from tpu_inference.layers.common.moe import FusedMoEMethodBase as TpuFusedMoEMethodBase
from tpu_inference.layers.common.moe import MoEBackend
from tpu_inference.layers.common.sharding import ShardingAxisName, is_attn_dp
from tpu_inference.layers.vllm.interface.moe import select_moe_backend_from_fused_moe_config
from tpu_inference.layers.vllm.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    VllmCompressedTensorsW8A8Fp8MoEMethod,
)
from tpu_inference.layers.vllm.quantization.fp8 import VllmFp8MoEMethod
from tpu_inference.layers.vllm.quantization.unquantized import VllmUnquantizedFusedMoEMethod
from tpu_inference.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts

from ...common.config import FusedMoEConfig, FusedMoEParallelConfig
from ...common.numerics import BLOCK
from ...common.support import declared_support
from ...common.weights import MoEWeights
from ..ep_moe import operand_shapes
from ..executor import PallasEPExecutor
from .ep_layer import EPLayer, mesh_generation
from .selection import (
    SafeCompressedTensorsW8A8Fp8MoEMethod,
    SafeFp8MoEMethod,
    SafeModelOptFp8MoEMethod,
    moe_config,
)
from .settings import Settings
from .weights import moe_weights, requantize_per_channel

logger = init_logger(__name__)

# Kernel operand -> how vLLM names the parameter; {scale} is the method's scale name.
_PARAMETERS = {
    "w13": "w13_weight", "w2": "w2_weight", "s13": "w13_{scale}", "s2": "w2_{scale}", "b13": "w13_bias",
    "b2": "w2_bias",
}


@dataclass(frozen=True)
class _Scheme:
    """How a method holds its layer's scales; no name, no scales."""

    scale_name: str | None
    block_shape: tuple[int, ...] | None = None
    static_input: bool = False


def layer_config(moe: Any, layer: RoutedExperts, experts: int, hidden: int, inter: int) -> FusedMoEConfig:
    """This package's config of a loaded vLLM layer.

    Raises:
      ValueError: the layer asks for what no executor here does; the message names it.
    """
    refused = {
        "custom_routing_function": layer.custom_routing_function is not None,
        "apply_router_weight_on_input": bool(layer.apply_router_weight_on_input),
        "swiglu_limit": bool(layer.swiglu_limit),
        "hash_indices_table": getattr(layer, "hash_indices_table", None) is not None,
        "FORCE_MOE_RANDOM_ROUTING": bool(envs.FORCE_MOE_RANDOM_ROUTING),
    }
    for name, present in refused.items():
        if present:
            raise ValueError(f"{name}: is set, and this kernel does not do it")
    grouped = bool(layer.use_grouped_topk)
    config = moe_config(
        moe, num_experts=experts, hidden_dim=hidden, intermediate_size=inter, scoring_func=layer.scoring_func,
        renormalize=bool(layer.renormalize), routed_scaling_factor=float(layer.routed_scaling_factor),
        num_expert_group=layer.num_expert_group if grouped else None,
        topk_group=layer.topk_group if grouped else None, is_lora_enabled=False,
        moe_parallel_config=FusedMoEParallelConfig(use_ep=True),
    )
    reason = declared_support(PallasEPExecutor).why_not_layer(config, None, None)
    if reason is not None:
        raise ValueError(f"layer: the kernel {reason}")
    return config


class EPKernelMixin:
    """`process_weights_after_loading` and `apply_monolithic` on this package's kernel, else the next class's."""

    ep_layer: EPLayer | None = None
    """Set once a layer's weights are on the kernel; None means tpu-inference runs it."""
    lora: Any = None
    """The layer's LoRA wrapper, which holds adapters and the batch's slots; see `lora`."""

    # Given by the tpu-inference class.
    mesh: Mesh
    moe: Any
    moe_backend: MoEBackend

    def _scheme(self) -> _Scheme:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        if self.ep_layer is not None:  # a loader that processes layers as they fill calls again at the end
            return
        if self.moe_backend is MoEBackend.FUSED_MOE:
            settings = Settings.from_env()
            try:
                self.ep_layer, operands = self._prepare(layer, settings)
            except Exception as error:  # the layer is untouched: whatever this kernel lacks, tpu-inference may run it
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                logger.warning_once(f"isomoe: layers like this stay on tpu-inference's own kernel: {kind}{error}")
            else:
                self._take_over(layer, operands)
                logger.info_once(
                    f"isomoe: expert-parallel kernel on {self.ep_layer.ep} devices, "
                    f"{self.ep_layer.scheme} weights, {self.ep_layer.recipe}"
                    + (", interpreted (no TPU)" if self.ep_layer.interpreted else "")
                )
                return
        super().process_weights_after_loading(layer)  # type: ignore[misc]

    def _prepare(self, layer: RoutedExperts, settings: Settings) -> tuple[EPLayer, dict[str, jax.Array]]:
        """The layer's program and its operands on the devices.

        Raises:
          ValueError: the kernel does not serve the layer.
        """
        weights = self._weights(layer)
        recipe = "bf16" if weights.scheme == "bf16" else settings.recipe_on(mesh_generation(self.mesh)[0])
        if weights.scheme == "block" and settings.weight_scale_policy == "per_channel":
            weights = requantize_per_channel(weights)
        config = layer_config(
            self.moe, layer, weights.num_experts, weights.hidden_dim, weights.intermediate_size
        )
        taken = EPLayer.of(weights, config, self.mesh, ShardingAxisName.EXPERT, recipe)
        return taken, taken.operands(weights)

    def _take_over(self, layer: RoutedExperts, operands: dict[str, jax.Array]) -> None:
        """Put the operands in the place of the loaded parameters."""
        for name, array in operands.items():
            setattr(layer, self._parameter(name), Parameter(torch_view(array), requires_grad=False))
        for name in ("w13_input_scale", "w2_input_scale"):
            if getattr(layer, name, None) is not None:  # part of the program from here on
                setattr(layer, name, None)

    def _parameter(self, operand: str) -> str:
        return _PARAMETERS[operand].format(scale=self._scheme().scale_name)

    def _weights(self, layer: RoutedExperts) -> MoEWeights:
        scheme = self._scheme()
        if scheme.block_shape is not None and tuple(scheme.block_shape) != (BLOCK, BLOCK):
            raise ValueError(f"weight_block_size: got {list(scheme.block_shape)}, want [{BLOCK}, {BLOCK}]")
        tensors: dict[str, torch.Tensor] = {
            label: getattr(layer, f"{label}_weight") for label in ("w13", "w2")
        }
        for label in ("w13", "w2"):
            if scheme.scale_name is not None:
                tensors[f"{label}_scale"] = getattr(layer, f"{label}_{scheme.scale_name}")
            if self.moe.has_bias:
                tensors[f"{label}_bias"] = getattr(layer, f"{label}_bias")
            if scheme.static_input:
                tensors[f"{label}_input_scale"] = getattr(layer, f"{label}_input_scale")
        return moe_weights(**tensors, block=scheme.block_shape is not None)

    def operands(self, layer: RoutedExperts) -> dict[str, jax.Array]:
        """The kernel's operands of a layer it has taken, adapters apart."""
        assert self.ep_layer is not None
        return {
            operand: jax_view(getattr(layer, self._parameter(operand)))
            for operand in operand_shapes(self.ep_layer.without_lora().build(self.ep_layer.ep))
        }

    def apply_monolithic(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        taken = self.ep_layer
        if taken is None:
            return super().apply_monolithic(layer, x, router_logits, input_ids)  # type: ignore[misc]
        tensors, slots = self.operands(layer), None
        if self.lora is not None:
            tensors |= self.lora.stacks()
            slots = self.lora.slots(x)
        bias = layer.e_score_correction_bias
        with jax.named_scope(layer._get_name()):
            out, ids = taken.apply(
                jax_view(x), jax_view(router_logits), tensors,
                correction_bias=None if bias is None else jax_view(bias),
                num_valid_tokens=_num_valid_tokens(self.mesh), adapter_slots=slots,
            )
        _report_routed_experts(ids)
        return torch_view(out)


def _num_valid_tokens(mesh: Mesh) -> jax.Array | None:
    """Rows of this step that are not padding, where tpu-inference is asked to treat padding apart."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not envs.MOE_ROUTE_PADDING_TO_EXPERT0 or is_attn_dp(mesh) or not is_forward_context_available():
        return None
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, dict):
        metadata = next(iter(metadata.values()), None)
    starts = getattr(metadata, "query_start_loc", None)
    return None if starts is None else (jax_view(starts) if isinstance(starts, torch.Tensor) else starts)[-1]


# Where vLLM keeps ``enable_return_routed_experts``: 0.26's place and 0.32's.
_ROUTED_EXPERTS_SWITCH = ("model_config", "aux_output_config")


def _report_routed_experts(ids: jax.Array) -> None:
    """Hand the chosen experts to the model step where it returns them (``enable_return_routed_experts``)."""
    from tpu_inference.models.vllm.vllm_model_wrapper_context import get_vllm_model_wrapper_context

    try:
        context = get_vllm_model_wrapper_context()
    except AssertionError:  # a layer run outside a model step
        return
    holders = (getattr(context.vllm_config, name, None) for name in _ROUTED_EXPERTS_SWITCH)
    if any(getattr(holder, "enable_return_routed_experts", False) for holder in holders):
        context.expert_indices_list.append(ids)


class EPUnquantizedFusedMoEMethod(EPKernelMixin, VllmUnquantizedFusedMoEMethod):
    """bfloat16 experts; vLLM's selector for them answers on a TPU without a walk."""

    def _scheme(self) -> _Scheme:
        return _Scheme(None)


class EPFp8MoEMethod(EPKernelMixin, VllmFp8MoEMethod, SafeFp8MoEMethod):
    """FP8 checkpoints: [128, 128] blocks, or per-tensor scales."""

    def __init__(self, quant_config: Any, layer: RoutedExperts, mesh: Mesh, ep_axis_name: str = "model") -> None:
        # tpu-inference's constructor skips vLLM's; run both, so that no field of either is missing.
        VllmFp8MoEMethod.__init__(self, quant_config, layer, mesh, ep_axis_name)
        SafeFp8MoEMethod.__init__(self, quant_config, layer)

    def _scheme(self) -> _Scheme:
        block = tuple(self.weight_block_size) if self.block_quant else None
        return _Scheme(self.weight_scale_name, block, self.quant_config.activation_scheme == "static")


class EPCompressedTensorsW8A8Fp8MoEMethod(
    EPKernelMixin, VllmCompressedTensorsW8A8Fp8MoEMethod, SafeCompressedTensorsW8A8Fp8MoEMethod
):
    """compressed-tensors FP8: per-channel with per-token activations, blocks, or per-tensor."""

    def _scheme(self) -> _Scheme:
        block = tuple(self.weight_block_size) if self.block_quant else None
        return _Scheme("weight_scale", block, bool(self.static_input_scales))


class _TpuModelOptFp8MoEMethod(SafeModelOptFp8MoEMethod):
    """tpu-inference's own path for ModelOpt FP8, which it lacks: that of its FP8 method, whose per-tensor form is the
    same."""

    block_quant = False
    weight_block_size = None
    weight_scale_name = "weight_scale"
    process_weights_after_loading = VllmFp8MoEMethod.process_weights_after_loading
    apply_monolithic = VllmFp8MoEMethod.apply_monolithic

    def __init__(self, quant_config: Any, layer: RoutedExperts, mesh: Mesh, ep_axis_name: str = "model") -> None:
        super().__init__(quant_config, layer.moe_config)
        self.mesh = mesh
        self.moe_backend = select_moe_backend_from_fused_moe_config(self.moe)
        TpuFusedMoEMethodBase.__init__(self, self.moe_backend, ep_axis_name)

    @property
    def is_monolithic(self) -> bool:
        return True


class EPModelOptFp8MoEMethod(EPKernelMixin, _TpuModelOptFp8MoEMethod):
    """ModelOpt FP8: per-tensor scales, static activations. tpu-inference has no method for it."""

    def _scheme(self) -> _Scheme:
        return _Scheme(self.weight_scale_name, None, True)
