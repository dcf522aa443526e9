# SPDX-License-Identifier: Apache-2.0
"""`fused_moe`: one MoE layer after routing, on torch tensors.

A call is a fixed chain of launches whose sizes depend on shapes only: nothing is read back to the host, so the chain
can be captured in a CUDA graph, and adapters can be loaded into slots between replays. To torch.compile it is one
opaque operator, ``isomoe::fused_moe``. On compute capability 9.0 the chain is Hopper's own where `route` allows.
``ISOMOE_MARLIN=vllm`` gives w8a16 to vLLM's Marlin op (`vllm_marlin`), an operator of its own.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from ..common.activations import supports as activation_exists
from ..common.checks import check_choice
from ..common.recipes import Group, Recipe, default_recipe
from . import _runtime, vllm_marlin
from .align import align
from .combine import combine
from .grouped_gemm import LoRAExpand, choose_block_m, grouped_gemm
from .hopper.regime import INVARIANT, Regime
from .lora_shrink import lora_shrink
from .prepare import AdapterSlots, PreparedWeights
from .quantize import quantize_rows, scale_rows_f16
from .route import CallShape, why_not_hopper
from .tuned import LayerKey, regime_for, tiles_for

_INT_DTYPES = (torch.int32, torch.int64)

# The operator's schema carries a group as an int: a positive width as it is, the names as these.
_GROUP_CODES: dict[Group, int] = {None: 0, "token": -1, "static": -2}
_GROUP_NAMES = {code: name for name, code in _GROUP_CODES.items()}


def _encode_group(group: Group) -> int:
    return group if isinstance(group, int) else _GROUP_CODES[group]


def _decode_group(code: int) -> Group:
    return code if code > 0 else _GROUP_NAMES[code]


def _check_tensor(
    label: str,
    value: torch.Tensor,
    device: torch.device,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{label}: got {type(value).__name__}, want a torch tensor")
    if value.dtype not in dtypes:
        want = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{label}: got dtype {str(value.dtype).removeprefix('torch.')}, want {want}")
    if value.dim() != len(shape) or any(w is not None and w != g for w, g in zip(shape, value.shape, strict=True)):
        want = "[" + ", ".join("any" if w is None else str(w) for w in shape) + "]"
        raise ValueError(f"{label}: got shape {list(value.shape)}, want {want}")
    if value.device != device:
        raise ValueError(f"{label}: got device {value.device}, want {device} as x")
    if not value.is_contiguous():
        raise ValueError(f"{label}: got strides {list(value.stride())}, want a contiguous tensor")


def _check(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: PreparedWeights,
    activation: str,
    recipe: Recipe,
    adapters: AdapterSlots | None,
    adapter_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: got {type(x).__name__}, want a torch tensor")
    device, hidden, experts = x.device, weights.hidden_dim, weights.num_experts
    x_dtypes = (torch.bfloat16,) if x_scale is None else (torch.uint8, torch.float8_e4m3fn)
    _check_tensor("x", x, device, (None, hidden), x_dtypes)
    tokens = x.shape[0]
    _check_tensor("topk_ids", topk_ids, device, (tokens, None), _INT_DTYPES)
    _check_tensor("topk_weights", topk_weights, device, tuple(topk_ids.shape), (torch.float32,))
    if weights.w13.device != device:
        raise ValueError(f"weights: got device {weights.w13.device}, want {device} as x")
    gated = weights.halves == 2
    if not activation_exists(activation, gated):
        raise ValueError(f"activation: got {activation!r}, which has no {'gated' if gated else 'non-gated'} form here")
    check_choice("out_dtype", str(out_dtype), ("torch.bfloat16", "torch.float32"))
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe: got {type(recipe).__name__}, want Recipe")
    if (recipe.name in ("w8a8", "w8a16")) != weights.is_fp8 or recipe.name == "float64":
        raise ValueError(f"recipe: got {recipe.name!r} with {'FP8' if weights.is_fp8 else 'bf16'} weights")
    if recipe.wire == "fp8":
        raise ValueError("recipe: got wire 'fp8', want 'f32' or 'bf16' on CUDA")
    if (recipe.wire_unit, recipe.x_wire) != ("row", "bf16"):
        raise ValueError(
            f"recipe: got wire_unit {recipe.wire_unit!r} and x_wire {recipe.x_wire!r}, want 'row' and 'bf16' on CUDA"
        )
    for label, group in (("x_group", recipe.x_group), ("h_group", recipe.h_group)):
        if isinstance(group, int) and group % 128:
            raise ValueError(f"recipe: got {label} {group}, want a multiple of 128 on CUDA")
    if recipe.x_group == "static" and weights.w13_input_scale is None:
        raise ValueError("recipe: got x_group 'static', but the weights carry no w13_input_scale")
    if recipe.h_group == "static" and weights.w2_input_scale is None:
        raise ValueError("recipe: got h_group 'static', but the weights carry no w2_input_scale")
    if expert_map is not None:
        _check_tensor("expert_map", expert_map, device, (None,), _INT_DTYPES)
    if (adapters is None) != (adapter_ids is None):
        raise ValueError("adapter_ids: got one of adapters and adapter_ids, want both or neither")
    if x_scale is not None:
        if recipe.name != "w8a8":
            raise ValueError(f"x_scale: got one with recipe {recipe.name!r}, want 'w8a8' for quantised rows")
        width = recipe.x_group
        groups = -(-hidden // width) if isinstance(width, int) else 1
        _check_tensor("x_scale", x_scale, device, (tokens, groups), (torch.float32,))
        if adapters is not None and recipe.lora_input != "fp8":
            raise NotImplementedError(
                "cuda_impl.fused_moe: LoRA would see quantised rows; pass the original bfloat16 rows, or opt in "
                "with lora_input='fp8'"
            )
    if adapters is not None and adapter_ids is not None:
        if not isinstance(adapters, AdapterSlots):
            raise TypeError(f"adapters: got {type(adapters).__name__}, want AdapterSlots (see prepare_adapters)")
        _check_tensor("adapter_ids", adapter_ids, device, (tokens,), _INT_DTYPES)
        slots, rank, inter = adapters.slot_ids.shape[0], adapters.max_rank, weights.intermediate_size
        shared = lambda t: 1 if t.shape[1] == 1 else experts  # noqa: E731
        for label, value, shape in (
            ("a13", adapters.a13, (slots, shared(adapters.a13), weights.halves, rank, hidden)),
            ("b13", adapters.b13, (slots, experts, weights.halves, inter, rank)),
            ("a2", adapters.a2, (slots, experts, 1, rank, inter)),
            ("b2", adapters.b2, (slots, shared(adapters.b2), 1, hidden, rank)),
        ):
            _check_tensor(f"adapters.{label}", value, device, shape, (torch.bfloat16,))
    if os.environ.get("ISOMOE_CHECK") == "1" and not torch.compiler.is_compiling():
        _report_ids(topk_ids, experts if expert_map is None else expert_map.shape[0], adapters, adapter_ids)


def _report_ids(
    topk_ids: torch.Tensor, experts: int, adapters: AdapterSlots | None, adapter_ids: torch.Tensor | None
) -> None:
    """ISOMOE_CHECK=1: say which ids are skipped, at the price of a synchronisation."""
    import logging

    logger = logging.getLogger(__name__)
    bad = int(((topk_ids < 0) | (topk_ids >= experts)).sum())
    if bad:
        total = topk_ids.numel()
        logger.warning("isomoe: topk_ids: %d of %d ids are outside [0, %d) and are skipped", bad, total, experts)
    if adapters is not None and adapter_ids is not None:
        unknown = (adapter_ids[:, None] != adapters.slot_ids[None, :]).all(1) & (adapter_ids >= 0)
        if bool(unknown.any()):
            ids = sorted(set(adapter_ids[unknown].tolist()))
            logger.warning("isomoe: adapter_ids: ids %s are in no slot; their rows run as base rows", ids)


def resolve_recipe(recipe: Recipe | str | None, weights: PreparedWeights) -> Recipe:
    """`recipe` itself, or the weights' plain recipe of that name (None: their default).

    A recipe given by name stores each expert's result rows in bf16 before the f32 sum: half the traffic of the widest
    intermediate, for one more bf16 rounding (vLLM's Marlin op: f16). A `Recipe` says itself what it wants.
    """
    if isinstance(recipe, Recipe):
        return recipe
    scheme = "bf16" if not weights.is_fp8 else "block" if weights.is_block else "channel"
    plain = default_recipe(recipe, scheme, static_input=weights.w13_input_scale is not None)
    if plain.name == "w8a16" and vllm_marlin.chosen():
        return plain
    hopper = _runtime.target_of(weights.w13.device).capability == (9, 0)
    return plain.with_bf16_storage() if hopper else plain.with_wire("bf16")


def declared_recipe(
    recipe: Recipe | str | None, weights: PreparedWeights, tokens: int, topk: int, experts: int, *,
    activation: str = "silu", lora_rank: int = 0,
) -> Recipe:  # fmt: skip
    """`resolve_recipe` with what the kernels that a batch takes add to it: how Hopper's sum FP8 products.

    Args:
      tokens, topk, experts: T, K, and the experts routed over (all ranks').
      lora_rank: of the slots, 0 without adapters.
    """
    resolved = resolve_recipe(recipe, weights)
    shape = CallShape(
        resolved, activation, weights.is_block, weights.halves == 2, weights.w13_bias is not None,
        weights.hidden_dim, weights.intermediate_size, lora_rank,
    )  # fmt: skip
    key = LayerKey.of(weights, topk, experts, resolved.name)
    return with_device_sums(shape, key, tokens, weights.w13.device)


def with_device_sums(shape: CallShape, key: LayerKey, tokens: int, device: torch.device) -> Recipe:
    """The shape's recipe with `fp8_sums` of the kernels that a batch takes on a device."""
    recipe = replace(shape.recipe, fp8_sums=0)
    if recipe.name != "w8a8" or why_not_hopper(shape, _runtime.target_of(device)) is not None:
        return recipe
    return replace(recipe, fp8_sums=_regime(device, key, tokens, shape.lora_rank > 0).fp8_sums)


def _regime(device: torch.device, key: LayerKey, tokens: int, lora: bool) -> Regime:
    return INVARIANT if _runtime.batch_invariant() else regime_for(device, key, tokens, lora)


def fused_moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: PreparedWeights,
    *,
    activation: str = "silu",
    recipe: Recipe | str | None = None,
    adapters: AdapterSlots | None = None,
    adapter_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """One MoE layer: ``y[t] = sum_k topk_weights[t, k] * expert(topk_ids[t, k], x[t])``.

    Args:
      x: [T, H] bf16; or e4m3fn codes (uint8 or float8_e4m3fn) with `x_scale`.
      topk_weights: [T, K] f32.
      topk_ids: [T, K] int32 or int64 expert ids, global where `expert_map` is given; ids outside the experts are
        skipped.
      weights: from `prepare_weights`.
      activation: a name of `common.activations`.
      recipe: a `Recipe`, a recipe name, or None for the weights' default; `declared_recipe` says what then runs.
      adapters: from `prepare_adapters`; `adapter_ids` [T] holds global adapter ids, -1 = base. An id that no slot
        holds runs as a base row.
      expert_map: [E_global] int, a global expert's index in `weights`, or -1 where another rank holds it.
      x_scale: [T, 1] f32, or [T, ceil(H / group)] for a recipe with a grouped `x_group`.
      out_dtype: bf16, or f32 for a rank's partial sum.

    Returns:
      [T, H] of `out_dtype`.

    Raises:
      TypeError, ValueError: a bad argument, before any launch.
      NotImplementedError: adapters with quantised rows, without ``lora_input="fp8"``.
    """
    if not isinstance(weights, PreparedWeights):
        raise TypeError(f"weights: got {type(weights).__name__}, want PreparedWeights (see prepare_weights)")
    recipe = resolve_recipe(recipe, weights)
    _check(
        x, topk_weights, topk_ids, weights, activation, recipe, adapters, adapter_ids, expert_map, x_scale, out_dtype
    )
    if recipe.fp8_sums:
        want = declared_recipe(
            recipe, weights, len(x), topk_ids.shape[1], weights.num_experts if expert_map is None else len(expert_map),
            activation=activation, lora_rank=0 if adapters is None else adapters.max_rank,
        ).fp8_sums  # fmt: skip
        if recipe.fp8_sums != want:
            raise ValueError(f"recipe: got fp8_sums={recipe.fp8_sums}, the kernels that this batch takes have {want}")
    if recipe.name == "w8a16" and vllm_marlin.chosen() and not _runtime.is_recording():
        return vllm_marlin.marlin_moe(
            x, topk_weights, topk_ids, weights, activation=activation, recipe=recipe, adapters=adapters,
            adapter_ids=adapter_ids, expert_map=expert_map, out_dtype=out_dtype,
        )  # fmt: skip
    lora = adapters
    # Recording runs the chain itself on meta tensors, where the operator would only run its shape function.
    run = _fused_moe if _runtime.is_recording() else _fused_moe_op
    return run(
        x,
        topk_weights,
        topk_ids,
        weights.w13,
        weights.w2,
        weights.w13_scale,
        weights.w2_scale,
        weights.w13_bias,
        weights.w2_bias,
        weights.w13_input_scale,
        weights.w2_input_scale,
        expert_map,
        x_scale,
        adapter_ids,
        None if lora is None else lora.slot_ids,
        None if lora is None else lora.ranks,
        None if lora is None else lora.a13,
        None if lora is None else lora.b13,
        None if lora is None else lora.a2,
        None if lora is None else lora.b2,
        activation,
        recipe.name,
        _encode_group(recipe.x_group),
        _encode_group(recipe.h_group),
        recipe.wire,
        recipe.lora_input,
        recipe.lora_products,
        out_dtype == torch.float32,
    )


def _operand(
    rows: torch.Tensor, recipe: str, group: Group, static: torch.Tensor | None, pair_bin: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows as the recipe multiplies them, with their scales."""
    if recipe == "bf16":
        return rows, None
    if recipe == "w8a16":
        return scale_rows_f16(rows, pair_bin=pair_bin)
    assert group is not None
    return quantize_rows(rows, group, static_scale=static, pair_bin=pair_bin)


def _hopper(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    shape: CallShape,
    key: LayerKey,
    expert_map: torch.Tensor | None,
    lora: tuple[torch.Tensor, ...] | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """The layer by Hopper's own kernels; `why_not_hopper` has agreed."""
    from .hopper.fused import HopperAdapters, HopperWeights, hopper_fused_moe

    assert w13_scale is not None and w2_scale is not None
    weights = HopperWeights(
        "block" if shape.is_block else "channel", w13.view(torch.float8_e4m3fn), w2.view(torch.float8_e4m3fn),
        w13_scale, w2_scale, shape.activation,
    )  # fmt: skip
    return hopper_fused_moe(
        x, topk_weights, topk_ids, weights,
        adapters=None if lora is None else HopperAdapters(*lora[1:]), adapter_slots=None if lora is None else lora[0],
        expert_map=expert_map, recipe=shape.recipe.name, out=out,
        regime=_regime(x.device, key, x.shape[0], lora is not None),
    )  # fmt: skip


def _fused_moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    w13_input_scale: torch.Tensor | None,
    w2_input_scale: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    adapter_ids: torch.Tensor | None,
    slot_ids: torch.Tensor | None,
    ranks: torch.Tensor | None,
    a13: torch.Tensor | None,
    b13: torch.Tensor | None,
    a2: torch.Tensor | None,
    b2: torch.Tensor | None,
    activation: str,
    recipe: str,
    x_group: int,
    h_group: int,
    wire: str,
    lora_input: str,
    lora_products: str,
    f32_out: bool,
) -> torch.Tensor:
    tokens, top_k = topk_ids.shape
    hidden, inter = w13.shape[2], w2.shape[2]
    halves, experts = w13.shape[1] // inter, w13.shape[0]
    out = torch.empty((tokens, hidden), dtype=torch.float32 if f32_out else torch.bfloat16, device=x.device)
    if tokens == 0 or top_k == 0:
        return out.zero_()
    declared = Recipe(recipe, _decode_group(x_group), _decode_group(h_group), wire, lora_input, lora_products)
    shape = CallShape(
        declared, activation, w13_scale is not None and w13_scale.dim() == 3, halves == 2, w13_bias is not None, hidden,
        inter, 0 if b13 is None else b13.shape[4], x_scale is not None,
    )  # fmt: skip
    scheme = "bf16" if w13_scale is None else "block" if shape.is_block else "channel"
    key = LayerKey(
        experts, experts if expert_map is None else expert_map.shape[0], top_k, hidden, inter, scheme, recipe
    )
    if not _runtime.is_recording() and why_not_hopper(shape, _runtime.target_of(x.device)) is None:
        lora = None
        if adapter_ids is not None and slot_ids is not None:
            assert a13 is not None and b13 is not None and a2 is not None and b2 is not None
            from .hopper import slots_of

            lora = (slots_of(adapter_ids, slot_ids), a13, b13, a2.squeeze(2), b2.squeeze(2))
        return _hopper(x, topk_weights, topk_ids, w13, w2, w13_scale, w2_scale, shape, key, expert_map, lora, out)
    pairs = tokens * top_k
    tiles = None
    if not (_runtime.is_recording() or _runtime.batch_invariant()):
        tiles = tiles_for(x.device, key, tokens)
    alignment = align(
        topk_ids,
        local_experts=experts,
        block_m=tiles.block_m if tiles else choose_block_m(pairs, experts, _runtime.target_of(x.device)),
        expert_map=expert_map,
        adapter_ids=adapter_ids,
        slot_ids=slot_ids,
    )
    fp8_lora = lora_input == "fp8"

    def expand(
        rows: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor | None, group: int,
        a: torch.Tensor | None, b: torch.Tensor | None, row_div: int,
    ) -> LoRAExpand | None:  # fmt: skip
        if a is None or b is None or ranks is None:
            return None
        source, source_scale = (codes, scale) if fp8_lora else (rows, None)
        v = lora_shrink(
            source, a, ranks, alignment, row_div=row_div, x_scale=source_scale, x_group=max(group, 0) if fp8_lora else 0
        )
        # Asked for rounded products (Hopper's kernels store no others), this path rounds its own alike.
        return LoRAExpand(v.bfloat16().float() if lora_products == "bf16" else v, b, ranks)

    if x_scale is None:
        a1, s1 = _operand(x, recipe, _decode_group(x_group), w13_input_scale, None)
    else:
        a1, s1 = x.view(torch.uint8), x_scale
    h = torch.empty((pairs, inter), dtype=torch.bfloat16, device=x.device)
    grouped_gemm(
        a1, w13, h, alignment,
        a_scale=s1, a_group=max(x_group, 0), w_scale=w13_scale,
        bias=w13_bias, halves=halves, activation=activation, row_div=top_k,
        lora=expand(x, a1, s1, x_group, a13, b13, top_k), config=tiles.w13 if tiles else None,
    )  # fmt: skip
    q2, s2 = _operand(h, recipe, _decode_group(h_group), w2_input_scale, alignment.pair_bin)
    rows_dtype = torch.bfloat16 if wire == "bf16" else torch.float32
    o = torch.empty((pairs, hidden), dtype=rows_dtype, device=x.device)
    grouped_gemm(
        q2, w2, o, alignment,
        a_scale=s2, a_group=max(h_group, 0), w_scale=w2_scale,
        bias=w2_bias, lora=expand(h, q2, s2, h_group, a2, b2, 1), config=tiles.w2 if tiles else None,
    )  # fmt: skip
    combine(o, topk_weights, alignment.pair_bin, out)
    return out


_fused_moe_op = torch.library.custom_op("isomoe::fused_moe", _fused_moe, mutates_args=())


@_fused_moe_op.register_fake
def _(
    x, topk_weights, topk_ids, w13, w2, w13_scale, w2_scale, w13_bias, w2_bias, w13_input_scale, w2_input_scale,
    expert_map, x_scale, adapter_ids, slot_ids, ranks, a13, b13, a2, b2, activation, recipe, x_group, h_group, wire,
    lora_input, lora_products, f32_out,
):  # fmt: skip
    return torch.empty((x.shape[0], w13.shape[2]), dtype=torch.float32 if f32_out else torch.bfloat16, device=x.device)
