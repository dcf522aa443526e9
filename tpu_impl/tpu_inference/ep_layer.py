# SPDX-License-Identifier: Apache-2.0
"""One MoE layer of a tpu-inference model on this package's expert-parallel kernel.

An `EPLayer` is what a quant method keeps once its weights are loaded: the static part of the layer's program. The
operands themselves are parameters of the vLLM layer, so that they are arguments of the jitted model step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ...common.config import FusedMoEConfig
from ...common.platforms import TPU_DEVICE_KINDS
from ...common.weights import MoEWeights
from ..blocks import choose_blocks, interpreter_blocks, tile_width
from ..ep_moe import EPBuild, fused_moe_ep, operand_shapes
from ..generations import GENERATIONS, generation
from ..layout import activation_scales, lay_out_scales, padded_hidden
from ..spec import LoRASpec, round_up
from ..wires import codes_at_source
from .routing import route_on_device

# Limits an interpreted run takes; no device stands behind it.
INTERPRETED_GENERATION = "v7x"
# Rows of results are bf16: the serving recipes declare no FP8 ones, and another sum order would change bits.
TRANSPORT = "push_bf16"


def expert_axes(mesh: Mesh, names: str | tuple[str, ...]) -> tuple[str | tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that really split experts, and those that split only tokens.

    tpu-inference names up to six axes for experts, of which those of extent 1 split nothing. Experts are replicated
    over the others (``data``), each place along them having tokens of its own.

    Returns:
      one axis, or several with the slowest first, and the token axes.

    Raises:
      ValueError: the mesh has none of the axes.
    """
    named = tuple(n for n in ((names,) if isinstance(names, str) else tuple(names)) if n in mesh.shape)
    if not named:
        raise ValueError(f"mesh: has axes {mesh.axis_names}, none of the expert axes {names}")
    wide = tuple(name for name in named if mesh.shape[name] > 1)
    axis = wide if len(wide) > 1 else (wide or named[-1:])[0]
    return axis, tuple(name for name, size in mesh.shape.items() if name not in named and size > 1)


def mesh_generation(mesh: Mesh) -> tuple[str, bool]:
    """The TPU generation of a mesh and whether its kernels are interpreted (a mesh of CPU devices).

    Raises:
      ValueError: devices of another kind, or a generation without limits here.
    """
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return INTERPRETED_GENERATION, True
    name = TPU_DEVICE_KINDS.get(device.device_kind, device.device_kind)
    if device.platform != "tpu" or name not in GENERATIONS:
        raise ValueError(f"mesh: got {device.platform} devices ({name}), want TPU {', '.join(GENERATIONS)}")
    return name, False


def _arrange_w13(w13: jax.Array, halves: int, bf: int) -> jax.Array:
    """``[E, halves * I, H]`` to ``[E, nf, H, halves * bf]``, H and I padded with zeros."""
    experts, rows, hidden = w13.shape
    split = w13.reshape(experts, halves, rows // halves, hidden)
    pad = round_up(rows // halves, bf) - rows // halves, padded_hidden(hidden) - hidden
    split = jnp.pad(split, ((0, 0), (0, 0), (0, pad[0]), (0, pad[1])))
    split = split.reshape(experts, halves, -1, bf, hidden + pad[1]).transpose(0, 2, 4, 1, 3)
    return split.reshape(*split.shape[:3], halves * bf)


def _arrange_w2(w2: jax.Array, halves: int, bf: int) -> jax.Array:
    """``[E, H, I]`` to ``[E, nf, bf, H]``, H and I padded with zeros."""
    del halves
    experts, hidden, inter = w2.shape
    pad = padded_hidden(hidden) - hidden, round_up(inter, bf) - inter
    w2 = jnp.pad(w2, ((0, 0), (0, pad[0]), (0, pad[1]))).swapaxes(1, 2)
    return w2.reshape(experts, -1, bf, hidden + pad[0])


_ARRANGE = {"w13": _arrange_w13, "w2": _arrange_w2}


@dataclass(frozen=True, eq=False)
class EPLayer:
    """The static part of a layer.

    Attributes:
      mesh: the devices.
      axis, token_axes: what experts, and what only tokens are split over; see `expert_axes`.
      config: the layer.
      scheme: `MoEWeights.scheme` of the operands.
      recipe: ``"w8a8"`` or ``"w8a16"``.
      generation: TPU generation whose limits hold.
      bf: tile width the operands are laid out with.
      interpreted: the mesh is of CPU devices.
      lora: adapter slots; None where the model serves no adapters.
      static_scales: float32 ``[4]`` where activations use the checkpoint's scales.
    """

    mesh: Mesh
    axis: str | tuple[str, ...]
    token_axes: tuple[str, ...]
    config: FusedMoEConfig
    scheme: str
    recipe: str
    generation: str
    bf: int
    interpreted: bool
    lora: LoRASpec | None = None
    static_scales: np.ndarray | None = None

    @classmethod
    def of(
        cls, weights: MoEWeights, config: FusedMoEConfig, mesh: Mesh, names: str | tuple[str, ...], recipe: str
    ) -> EPLayer:
        """The layer for these weights; `names` are the mesh axes that may split experts.

        Raises:
          ValueError: a mesh, layer or recipe the kernel does not serve; the message says which.
        """
        axis, token_axes = expert_axes(mesh, names)
        name, interpreted = mesh_generation(mesh)
        weights.check_matches(config)
        static = weights.has_static_input and recipe == "w8a8"
        bf = (
            interpreter_blocks(inter=config.intermediate_size, rows=1, max_loras=0).bf
            if interpreted else tile_width(generation(name), config, weights.scheme)
        )
        layer = cls(
            mesh, axis, token_axes, config, weights.scheme, recipe, name, bf, interpreted,
            static_scales=activation_scales(weights) if static else None,
        )
        layer.build(layer.ep)  # refuses what does not fit
        return layer

    @property
    def ep(self) -> int:
        """Devices that share the experts."""
        axes = (self.axis,) if isinstance(self.axis, str) else self.axis
        return math.prod(self.mesh.shape[name] for name in axes)

    def build(self, num_tokens: int) -> EPBuild:
        """The program for a batch size; blocks follow it, operand layouts do not.

        Raises:
          ValueError: nothing fits the device; the message names the limit.
        """
        groups = math.prod(self.mesh.shape[name] for name in self.token_axes)
        num_tokens = -(-num_tokens // groups)
        slots, rank = (self.lora.slots, self.lora.rank) if self.lora else (0, 0)
        interpret: Any = False
        dispatch = "ag_bf16"
        if self.interpreted:
            from ..executor import InterpretSettings

            rows = num_tokens * self.config.experts_per_token
            blocks = interpreter_blocks(
                inter=self.config.intermediate_size, rows=rows, max_loras=slots, bf=self.bf
            )
            interpret = InterpretSettings().params()
        else:
            dispatch = codes_at_source(
                self.generation, self.config, num_tokens, ep=self.ep, scheme=self.scheme, recipe=self.recipe,
                transport=TRANSPORT, static_scales=self.static_scales is not None, max_loras=slots,
                max_lora_rank=rank,
            )
            blocks = choose_blocks(
                self.generation, self.config, num_tokens, ep=self.ep, scheme=self.scheme, recipe=self.recipe,
                max_loras=slots, max_lora_rank=rank, transport=TRANSPORT, dispatch=dispatch, bf=self.bf,
            )
        return EPBuild(
            mesh=self.mesh, axis=self.axis, config=self.config, scheme=self.scheme, recipe=self.recipe,
            blocks=blocks, generation=self.generation, transport=TRANSPORT, dispatch=dispatch, lora=self.lora,
            static_scales=self.static_scales is not None, interpret=interpret, token_axes=self.token_axes,
        )

    def with_lora(self, lora: LoRASpec) -> EPLayer:
        """The same layer serving adapters."""
        return replace(self, lora=lora)

    def without_lora(self) -> EPLayer:
        """The same layer, for batches without adapters; its rows keep the bits that base rows have beside adapters."""
        return replace(self, lora=None)

    def operands(self, weights: MoEWeights) -> dict[str, jax.Array]:
        """Weights on the mesh in the kernel's layout, by operand name (see `layout`).

        Codes go to the devices as they are, each process sending its own devices' experts, and are arranged there:
        transposing bytes takes a host minutes a layer of the largest models.
        """
        build = self.build(self.ep)
        experts = self.ep * build.local_experts
        shardings = {n: NamedSharding(self.mesh, spec) for n, spec in build.shardings().items()}
        out: dict[str, jax.Array] = {}
        for name, raw in (("w13", weights.w13), ("w2", weights.w2)):
            halves = raw.shape[1] // weights.intermediate_size if name == "w13" else 1
            split = self._split(raw, experts, shardings[name])
            out[name] = jax.jit(_ARRANGE[name], static_argnums=(1, 2), out_shardings=shardings[name])(
                split, halves, self.bf
            )
        for name, array in lay_out_scales(weights, bf=self.bf, experts=experts).items():
            out[name] = self._split(array, experts, shardings[name])
        return out

    def _split(self, array: np.ndarray, experts: int, sharding: NamedSharding) -> jax.Array:
        """A host array on the mesh, split along its first dimension, which zeros pad to `experts`."""
        per_device = experts // self.ep

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            first = (index[0].start or 0) if index else 0
            part = array[first : first + per_device]
            if len(part) == per_device:
                return part
            padded = np.zeros((per_device, *array.shape[1:]), array.dtype)
            padded[: len(part)] = part
            return padded

        return jax.make_array_from_callback((experts, *array.shape[1:]), sharding, shard)

    def apply(
        self,
        x: jax.Array,
        router_logits: jax.Array,
        tensors: dict[str, jax.Array],
        *,
        correction_bias: jax.Array | None = None,
        num_valid_tokens: jax.Array | None = None,
        adapter_slots: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Route and run; inside or outside jit.

        Args:
          x: ``[T, H]`` bfloat16.
          router_logits: ``[T, E]``.
          tensors: `operands`, and adapters where the layer serves them.
          correction_bias: ``[E]``, or None.
          num_valid_tokens: rows from this one on are padding: they visit no expert and give zeros.
          adapter_slots: int32 ``[T]``, -1 = base, where the layer serves adapters.

        Returns:
          ``[T, H]`` bfloat16, and the expert ids int32 ``[T, K]``.
        """
        weights, ids = route_on_device(router_logits, self.config, correction_bias=correction_bias)
        if num_valid_tokens is not None:
            valid = jnp.arange(ids.shape[0])[:, None] < num_valid_tokens
            ids, weights = jnp.where(valid, ids, -1), jnp.where(valid, weights, 0.0)
        x16 = x.astype(jnp.bfloat16)
        scale = None if self.static_scales is None else jnp.asarray(self.static_scales)

        def run(layer: EPLayer, slots: jax.Array | None) -> jax.Array:
            build = layer.build(x.shape[0])
            held = {name: tensors[name] for name in operand_shapes(build)}
            return fused_moe_ep(x16, weights, ids, held, build=build, adapter_slots=slots, act_scale=scale)

        def base() -> jax.Array:
            return run(self.without_lora(), None)

        def adapted() -> jax.Array:
            return run(self, adapter_slots)

        if adapter_slots is None:
            out = base()
        elif isinstance(adapter_slots, jax.core.Tracer):
            # One trace holds both programs, so that a batch without adapters, known only at run time, pays for none.
            out = jax.lax.cond(jnp.any(adapter_slots >= 0), adapted, base)
        else:
            out = adapted() if bool(jnp.any(adapter_slots >= 0)) else base()
        return out.astype(x.dtype), ids
