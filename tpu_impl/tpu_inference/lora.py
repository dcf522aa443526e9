# SPDX-License-Identifier: Apache-2.0
"""Expert LoRA on a TPU: vLLM's MoE LoRA layer for a method that routes and runs its experts in one call.

vLLM's own layer refuses such methods ("monolithic") and hangs its adapters on a CUDA kernel. This one keeps every
adapter slot in the kernel's layout, split over the mesh like the experts, as four parameters of the layer:

    w13_lora_a_stacked [L, E|1, 2, r, H]    w13_lora_b_stacked [L, E, nf, r, 2 bf]
    w2_lora_a_stacked  [L, E, nf, r, bf]    w2_lora_b_stacked  [L, E|1, r, H]

tpu-inference passes parameters of these names to the model step anew whenever adapters change, so loading, replacing
or removing one never traces again. A slot is written as a whole: new arrays take the old ones' place only when all
four are there, and steps in flight keep the old ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torchax
import vllm.lora.layers as vllm_layers
import vllm.lora.utils as vllm_lora_utils
from jax.sharding import NamedSharding
from torch.nn.parameter import Parameter
from torchax.interop import jax_view, torch_view
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

from ...common.weights import LoRAAdapter
from ..ep_moe import operand_shapes
from ..layout import adapter_arrays, padded_rank
from ..spec import LoRASpec
from .methods import EPKernelMixin
from .weights import to_numpy

# Kernel operand -> parameter. tpu-inference refreshes parameters by these parts of their names.
_STACKS = {
    "a13": "w13_lora_a_stacked", "lora_b13": "w13_lora_b_stacked", "a2": "w2_lora_a_stacked",
    "lora_b2": "w2_lora_b_stacked",
}


def _host(tensor: torch.Tensor) -> np.ndarray:
    """A torch or torchax tensor on the host."""
    return np.asarray(jax_view(tensor)) if isinstance(tensor, torchax.tensor.Tensor) else to_numpy(tensor)


@jax.jit
def _with_slot(stack: jax.Array, index: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, slot, index, 0)


class FusedMoEWithLoRA(vllm_layers.FusedMoEWithLoRA, BaseLinearLayerWithLoRA):
    """vLLM's per-expert (2-D) MoE LoRA layer, on this package's kernel.

    The name is vLLM's because its LoRA manager tells layers apart by class name. `BaseLinearLayerWithLoRA` is among
    the bases because tpu-inference finds the batch's adapter metadata through the first layer of that class, and
    there may be no other where only experts are adapted.
    """

    def __init__(self, base_layer: Any) -> None:
        BaseLayerWithLoRA.__init__(self)
        self.base_layer = base_layer
        self.moe_config = base_layer.moe_config
        self._shared_experts = base_layer._shared_experts
        base_layer.routed_experts.lora_base_layer_prefix = "base_layer."
        # One process holds the whole layer; the mesh splits it.
        self.tp_size, self.tp_rank = 1, 0
        self._w13_slices = 2 if self.moe_config.is_act_and_mul else 1
        self.n_slices = self.local_num_experts * (self._w13_slices + 1)
        self.enable_moe_shared_loras = False

    @property
    def method(self) -> EPKernelMixin:
        """The quant method that runs the layer."""
        return self.base_layer.routed_experts.quant_method

    @classmethod
    def can_replace_layer(
        cls, source_layer: Any, lora_config: Any, packed_modules_list: list, model_config: Any = None
    ) -> bool:
        if not super().can_replace_layer(source_layer, lora_config, packed_modules_list, model_config):
            return False
        method = source_layer.routed_experts.quant_method
        return isinstance(method, EPKernelMixin) and method.ep_layer is not None

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        """Allocate empty slots on the mesh."""
        self.max_loras = max_loras
        self.enable_moe_shared_loras = shared = bool(lora_config.enable_moe_shared_loras)
        method = self.method
        assert method.ep_layer is not None
        spec = LoRASpec(max_loras, padded_rank(lora_config.max_lora_rank), shared, shared)
        method.ep_layer = method.ep_layer.with_lora(spec)
        for operand, (shape, dtype) in self._shapes().items():
            empty = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=self._sharding(operand))(shape, dtype)
            self._set(operand, empty)
        self._describe_for_dummies(lora_config.max_lora_rank, lora_config.lora_dtype)

    def _describe_for_dummies(self, rank: int, dtype: torch.dtype) -> None:
        """The list of per-expert factors (w1, w2, w3 an expert) whose shapes vLLM's warm-up adapters copy."""
        hidden, inter = self.hidden_size, self.intermediate_size_per_partition
        wide = (SimpleNamespace(shape=(rank, hidden), dtype=dtype), SimpleNamespace(shape=(inter, rank), dtype=dtype))
        back = (SimpleNamespace(shape=(rank, inter), dtype=dtype), SimpleNamespace(shape=(hidden, rank), dtype=dtype))
        expert = [wide, back, wide][: self._w13_slices + 1]
        factors = expert * (self.local_num_experts * self.max_loras)
        self.lora_a_stacked, self.lora_b_stacked = [a for a, _ in factors], [b for _, b in factors]

    def _build(self) -> Any:
        layer = self.method.ep_layer
        assert layer is not None
        return layer.build(layer.ep)

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        return {name: entry for name, entry in operand_shapes(self._build()).items() if name in _STACKS}

    def _sharding(self, operand: str) -> NamedSharding:
        build = self._build()
        return NamedSharding(build.mesh, build.shardings()[operand])

    def _set(self, operand: str, array: jax.Array) -> None:
        setattr(self, _STACKS[operand], Parameter(torch_view(array), requires_grad=False))

    def set_mapping(self, punica_wrapper: Any) -> None:
        BaseLayerWithLoRA.set_mapping(self, punica_wrapper)
        # A method may be a torch module, which must not take this layer for a part of itself.
        object.__setattr__(self.method, "lora", self)

    def set_lora(self, index: int, lora_a: list[torch.Tensor], lora_b: list[torch.Tensor]) -> None:
        """Fill a slot: ``[w1, w2, w3]`` factors, A ``[E|1, r, in]``, B ``[E|1, out, r]`` with the scaling in B.

        Raises:
          ValueError: another shape, a rank over the slot's, or non-finite values; the slot keeps what it had.
        """
        (w1a, w2a, w3a), (w1b, w2b, w3b) = ([_host(t) for t in factors] for factors in (lora_a, lora_b))
        if self.enable_moe_shared_loras:  # the warm-up adapter brings a copy an expert
            w1a, w3a, w2b = w1a[:1], w3a[:1], w2b[:1]
        gated = self._w13_slices == 2
        adapter = LoRAAdapter(
            adapter_id=index, a13=np.stack([w1a, w3a] if gated else [w1a], axis=1),
            b13=np.stack([w1b, w3b] if gated else [w1b], axis=1), a2=w2a, b2=w2b,
        )
        build = self._build()
        if adapter.rank > build.lora.rank:
            raise ValueError(f"lora_a: got rank {adapter.rank}, want at most {build.lora.rank}")
        adapter.check_matches(build.config)
        self._write(index, adapter_arrays(
            adapter, bf=build.blocks.bf, rank=build.lora.rank, experts=build.ep * build.local_experts,
            shared_a13=build.lora.shared_a13, shared_b2=build.lora.shared_b2,
        ))

    def reset_lora(self, index: int) -> None:
        """Empty a slot: its adapter adds nothing."""
        self._write(index, {
            name: np.zeros(shape[1:], jnp.dtype(dtype)) for name, (shape, dtype) in self._shapes().items()
        })

    def _write(self, index: int, arrays: dict[str, np.ndarray]) -> None:
        written: dict[str, jax.Array] = {}
        for operand, array in arrays.items():
            sharding = self._sharding(operand)
            one_slot = NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))
            stack = jax_view(getattr(self, _STACKS[operand]))
            written[operand] = _with_slot(stack, jnp.int32(index), jax.device_put(array, one_slot))
        for operand, stack in written.items():
            self._set(operand, stack)

    def stacks(self) -> dict[str, jax.Array]:
        """All slots, by kernel operand."""
        return {operand: jax_view(getattr(self, name)) for operand, name in _STACKS.items()}

    def slots(self, x: torch.Tensor) -> jax.Array:
        """Each row's slot, int32 ``[T]``, -1 = base; inside the model step."""
        return jax_view(self.punica_wrapper._get_token_lora_indices(x)).astype(jnp.int32)


def register_lora() -> None:
    """Let vLLM's LoRA manager find the layer: it has no registry, so the class is put before the others.

    It takes only layers this package's kernel runs; all others find vLLM's classes as before.
    """
    known = tuple(vllm_lora_utils._all_lora_classes)
    if FusedMoEWithLoRA not in known:
        vllm_lora_utils._all_lora_classes = (FusedMoEWithLoRA, *known)
