# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel FP8 MoE on a TPU mesh: the operation on jax arrays.

A layer call is: gather the activations of all devices (rows packed to 32-bit words), gather routing metadata, plan,
the expert kernel, and the weighted sum. Everything a trace depends on is in an `EPBuild`; arrays are arguments, so
loading, replacing or removing an adapter never traces again.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..common.checks import check_choice
from ..common.config import FusedMoEConfig
from ..common.recipes import default_recipe
from ..common.weights import SCHEMES
from . import combine
from .blocks import make_spec, max_tokens
from .expert_kernel import expert_kernel
from .generations import generation
from .numerics import pack_rows
from .pack_kernel import pack_kernel
from .plan import build_plan
from .spec import Blocks, KernelSpec, LoRASpec, dma_semaphores, round_up, vmem_bytes


def _names(axis: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis


@dataclass(frozen=True)
class EPBuild:
    """Everything static about a layer's program.

    Attributes:
      mesh: the device mesh, of any rank. Tokens are replicated along axes that are named nowhere here (tensor
        parallel attention beside expert parallel experts, say): every place along them is a group of its own, which
        computes the whole layer and whose barrier and rows stay among its own devices.
      axis: the mesh axis (or axes, the first the slowest) experts and tokens are split over.
      config: the layer.
      scheme: `MoEWeights.scheme`.
      recipe: ``"w8a8"``, ``"w8a16"`` or ``"bf16"``.
      blocks: tile sizes; ``blocks.bf`` must be the width the weights were laid out with.
      generation: TPU generation the limits are taken from.
      transport: how results leave, see `combine`.
      dispatch: how activations arrive, see `spec.KernelSpec`.
      lora: adapter slots of the build; None for the program without adapters.
      static_scales: activations use the checkpoint's scales.
      interpret: False, or `pltpu.InterpretParams`.
      bounds_checks: keep DMA bounds checks.
      collective_id: barrier id of the kernel.
      num_experts: experts on the mesh, where they are not all of ``config.num_experts``.
      token_axes: axes that split the tokens once more; each place along them holds all experts (data parallel).
      ablate: leave stages of the kernel out (`spec.ABLATIONS`), for timing. Results are then wrong on purpose:
        `fused_moe_ep` refuses such a build, only `layer` runs it.
    """

    mesh: Mesh
    axis: str | tuple[str, ...]
    config: FusedMoEConfig
    scheme: str
    recipe: str
    blocks: Blocks
    generation: str
    transport: str = "push_bf16"
    dispatch: str = "ag_bf16"
    lora: LoRASpec | None = None
    static_scales: bool = False
    interpret: Any = False
    bounds_checks: bool = False
    collective_id: int = 0
    num_experts: int | None = None
    token_axes: tuple[str, ...] = ()
    ablate: str = ""

    def __post_init__(self) -> None:
        axes, named = tuple(self.mesh.axis_names), (*_names(self.axis), *self.token_axes)
        if not _names(self.axis):
            raise ValueError(f"axis: got no axis, want one of the mesh's, {', '.join(map(str, axes))}")
        for name in named:
            if name not in axes:
                label = "axis" if name in _names(self.axis) else "token_axes"
                raise ValueError(f"{label}: got {name!r}, want one of the mesh's, {', '.join(map(str, axes))}")
        if len(set(named)) < len(named):
            raise ValueError(f"token_axes: got {self.token_axes} with axis={self.axis!r}, want each mesh axis once")
        check_choice("scheme", self.scheme, SCHEMES)
        default_recipe(self.recipe, self.scheme)
        generation(self.generation)

    @property
    def experts(self) -> int:
        """Experts on the mesh; ids in ``[0, experts)`` are routed."""
        return self.config.num_experts if self.num_experts is None else self.num_experts

    @property
    def ep(self) -> int:
        """Devices that share the experts."""
        return math.prod(self.mesh.shape[name] for name in _names(self.axis))

    @property
    def token_groups(self) -> int:
        """Groups of devices that each hold all experts and their own tokens."""
        return math.prod(self.mesh.shape[name] for name in self.token_axes)

    @property
    def local_experts(self) -> int:
        """Experts a device holds; the last devices' may include padding."""
        return -(-self.experts // self.ep)

    def spec(self, tokens: int) -> KernelSpec:
        """The kernel build for `tokens` rows in all (a multiple of the device count)."""
        spec = make_spec(
            self.config, tokens, self.blocks, ep=self.ep, scheme=self.scheme, recipe=self.recipe, lora=self.lora,
            static_scales=self.static_scales, transport=self.transport, dispatch=self.dispatch,
            axis=self.axis, num_experts=self.experts,
        )
        return replace(spec, ablate=self.ablate)

    def shardings(self) -> dict[str, PartitionSpec]:
        """How each operand is split: experts over `axis`, shared adapter matrices replicated."""
        experts, slots = PartitionSpec(self.axis), PartitionSpec(None, self.axis)
        out = {name: experts for name in ("w13", "w2", "s13", "s2", "b13", "b2")}
        if self.lora:
            out["a13"] = PartitionSpec() if self.lora.shared_a13 else slots
            out["lora_b13"] = out["a2"] = slots
            out["lora_b2"] = PartitionSpec() if self.lora.shared_b2 else slots
        return out


def fused_moe_ep(
    x: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    tensors: dict[str, jax.Array],
    *,
    build: EPBuild,
    adapter_slots: jax.Array | None = None,
    act_scale: jax.Array | None = None,
) -> jax.Array:
    """One MoE layer after routing, experts split over ``build.axis``. May be called inside a jitted function.

    Args:
      x: bfloat16 ``[T, H]``; T need not divide by the device count.
      topk_weights: float32 ``[T, K]``.
      topk_ids: int32 ``[T, K]``, global; ids outside ``[0, E)`` are skipped.
      tensors: operands in the layouts of `layout`, expert axes padded to ``ep * build.local_experts``.
      build: the static part.
      adapter_slots: int32 ``[T]``, slot in ``[0, build.lora.slots)`` or -1; None where the build has no adapters.
      act_scale: float32 ``[4]`` (`layout.activation_scales`) where ``build.static_scales``.

    Returns:
      bfloat16 ``[T, H]``.

    Raises:
      TypeError, ValueError: an argument of the wrong dtype or shape.
    """
    if build.ablate:
        raise ValueError(
            f"ablate: got {build.ablate!r}, a build whose results are wrong on purpose; only ep_moe.layer runs it, "
            "to be timed"
        )
    _check_arguments(x, topk_weights, topk_ids, tensors, build, adapter_slots, act_scale)
    tokens, smem = x.shape[0], generation(build.generation).smem_bytes
    least = build.spec(build.ep)
    _check_fits(build, least)
    limit = build.token_groups * _most_tokens(least, smem)
    if limit < 1:
        raise ValueError(f"build: scalar memory of {build.generation} holds no routing table of this layer")
    # Compiler options are the outermost function's to give.
    call = interpreted_layer if build.interpret and not isinstance(x, jax.core.Tracer) else layer
    parts = []
    for start in range(0, tokens, limit):
        cut = slice(start, min(start + limit, tokens))
        slots = None if adapter_slots is None else adapter_slots[cut]
        parts.append(call(x[cut], topk_weights[cut], topk_ids[cut], slots, tensors, act_scale, build=build))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _check_fits(build: EPBuild, spec: KernelSpec) -> None:
    """Raise where the generation's memories do not hold the build; an interpreter has no such limits."""
    gen = generation(build.generation)
    for what, need, most in (
        ("MiB of VMEM", vmem_bytes(spec) / 2**20, gen.vmem_limit_bytes / 2**20),
        ("DMA semaphores", dma_semaphores(spec), gen.dma_semaphores),
    ):
        if need > most and not build.interpret:
            raise ValueError(
                f"blocks: got {build.blocks}, which with H={spec.hidden} needs {need:.4g} {what}, {gen.name} has "
                f"{most:.4g}; blocks.choose_blocks finds what fits"
            )


def _most_tokens(spec: KernelSpec, smem_bytes: int) -> int:
    """Tokens whose routing tables fit scalar memory."""
    return min(max_tokens(spec, smem_bytes), combine.max_tokens(spec, smem_bytes))


def _check_arguments(
    x: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    tensors: dict[str, jax.Array],
    build: EPBuild,
    adapter_slots: jax.Array | None,
    act_scale: jax.Array | None,
) -> None:
    c = build.config
    want: list[tuple[str, Any, Any, tuple[int | None, ...]]] = [
        ("x", x, jnp.bfloat16, (None, c.hidden_dim)),
        ("topk_weights", topk_weights, jnp.float32, (x.shape[0], c.experts_per_token)),
        ("topk_ids", topk_ids, jnp.int32, (x.shape[0], c.experts_per_token)),
    ]
    if adapter_slots is not None:
        want.append(("adapter_slots", adapter_slots, jnp.int32, (x.shape[0],)))
    if act_scale is not None:
        want.append(("act_scale", act_scale, jnp.float32, (4,)))
    for label, value, dtype, shape in want:
        if value.dtype != dtype:
            raise TypeError(f"{label}: got {value.dtype}, want {jnp.dtype(dtype).name}")
        if value.ndim != len(shape) or any(w is not None and w != g for w, g in zip(shape, value.shape, strict=True)):
            raise ValueError(f"{label}: got shape {list(value.shape)}, want {list(shape)}")
    if x.shape[0] == 0:
        raise ValueError("x: got no tokens, want at least one")
    if (adapter_slots is None) != (build.lora is None):
        raise ValueError(f"adapter_slots: got {'none' if adapter_slots is None else 'some'} with lora={build.lora}")
    if (act_scale is None) == build.static_scales:
        raise ValueError(f"act_scale: got {act_scale}, the build has static_scales={build.static_scales}")
    names = set(operand_shapes(build))
    if set(tensors) != names:
        raise ValueError(f"tensors: got {sorted(tensors)}, want {sorted(names)}")
    for name, (shape, dtype) in operand_shapes(build).items():
        if tensors[name].shape != shape or tensors[name].dtype != dtype:
            raise ValueError(
                f"tensors[{name!r}]: got {tensors[name].dtype} {list(tensors[name].shape)}, want "
                f"{jnp.dtype(dtype).name} {list(shape)} (see tpu_impl.layout)"
            )


def operand_shapes(build: EPBuild) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Global shape and dtype of every operand of a build, experts padded over all devices."""
    s = build.spec(build.ep)
    e, nf, bf, h, n = build.ep * s.experts, s.tiles, s.blocks.bf, s.hidden, s.halves
    weight = jnp.float8_e4m3fn if s.quantized else jnp.bfloat16
    out: dict[str, tuple[tuple[int, ...], Any]] = {"w13": ((e, nf, h, n * bf), weight), "w2": ((e, nf, bf, h), weight)}
    if s.quantized:
        out["s13"] = ((e, nf, *s.scale13_shape), jnp.float32)
        out["s2"] = ((e, nf, *s.scale2_shape) if s.block_scales else (e, *s.scale2_shape), jnp.float32)
    if s.has_bias:
        out |= {"b13": ((e, nf, 1, n * bf), jnp.float32), "b2": ((e, 1, h), jnp.float32)}
    if s.lora:
        slots, r = s.lora.slots, s.lora.words
        out |= {
            "a13": ((slots, 1 if s.lora.shared_a13 else e, n, r, h), jnp.int32),
            "lora_b13": ((slots, e, nf, r, n * bf), jnp.int32),
            "a2": ((slots, e, nf, r, bf), jnp.int32),
            "lora_b2": ((slots, 1 if s.lora.shared_b2 else e, r, h), jnp.int32),
        }
    return out


def _pad_rows(a: jax.Array, rows: int, value: int) -> jax.Array:
    return jnp.pad(a, [(0, rows - a.shape[0])] + [(0, 0)] * (a.ndim - 1), constant_values=value)


def _layer(
    x: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    slots: jax.Array | None,
    tensors: dict[str, jax.Array],
    act_scale: jax.Array | None,
    *,
    build: EPBuild,
) -> jax.Array:
    """`fused_moe_ep` on checked arguments whose routing table fits scalar memory; one trace a build and T."""
    tokens = x.shape[0]
    padded = round_up(tokens, build.ep * build.token_groups)
    spec = build.spec(padded // build.token_groups)
    x = jnp.pad(x, [(0, padded - tokens), (0, spec.hidden - x.shape[1])])
    topk_weights = _pad_rows(topk_weights, padded, 0)
    topk_ids = _pad_rows(topk_ids, padded, -1)
    rows = PartitionSpec((*build.token_axes, *_names(build.axis)))
    shardings = build.shardings()
    args: dict[str, Any] = {"x": x, "weights": topk_weights, "ids": topk_ids}
    specs: dict[str, Any] = {name: rows for name in args}
    args["rank"], specs["rank"] = jnp.arange(build.ep, dtype=jnp.int32), PartitionSpec(build.axis)
    if slots is not None:
        args["slots"], specs["slots"] = _pad_rows(slots, padded, -1), rows
    if act_scale is not None:
        args["act_scale"], specs["act_scale"] = act_scale, PartitionSpec()
    args["tensors"] = tensors
    specs["tensors"] = {name: shardings[name] for name in tensors}
    local = functools.partial(_local_layer, build=build, spec=spec)
    out = jax.shard_map(local, mesh=build.mesh, in_specs=(specs,), out_specs=rows, check_vma=False)(args)
    return out[:tokens, : build.config.hidden_dim]


layer = jax.jit(_layer, static_argnames=("build",))
# An interpreted program is large and runs once; optimising it would take most of the time.
interpreted_layer = jax.jit(
    _layer, static_argnames=("build",), compiler_options={"xla_backend_optimization_level": 0}
)


def _local_layer(args: dict[str, Any], *, build: EPBuild, spec: KernelSpec) -> jax.Array:
    """One device's share, inside `shard_map`."""
    gen = generation(build.generation)
    launch: dict[str, Any] = {
        "vmem_limit_bytes": gen.vmem_limit_bytes, "interpret": build.interpret, "bounds_checks": build.bounds_checks,
    }
    if spec.dispatch == "ag_fp8":
        rows, scales = pack_kernel(args["x"], spec.row_shape, native_e4m3=gen.native_e4m3, **launch)
    else:
        rows, scales = pack_rows(args["x"]), None
    plan = build_plan(
        spec, build.experts, args["ids"], args["weights"], args.get("slots"), args["rank"], scales=scales, launch=launch
    )
    tables = [plan.rank, plan.table, *([args["act_scale"]] if spec.static_scales else [])]
    launch["collective_id"] = build.collective_id
    if spec.ep > 1:
        rows = lax.all_gather(rows, spec.axis, axis=0, tiled=True)
    results = expert_kernel(spec, tables, {"x": rows, **args["tensors"]}, **launch)
    return combine.combine(spec, results, plan, args["weights"], launch, gen)


def place(tensors: dict[str, np.ndarray], build: EPBuild) -> dict[str, jax.Array]:
    """Put host operands on the mesh, split as the build wants them."""
    specs = build.shardings()
    return {name: jax.device_put(a, NamedSharding(build.mesh, specs[name])) for name, a in tensors.items()}
