# SPDX-License-Identifier: Apache-2.0
"""The W8A16 layer by vLLM's Marlin MoE op: the op multiplies, this package's kernels do all the rest.

``ISOMOE_MARLIN=vllm`` asks for it. vLLM's own helper repacks the weights, once, at the first call with them. Here stay
the padding of I (the helper pads gated experts only, and its block scales assume I a multiple of 128), alignment,
adapters (A from the original rows, B added in f32 before the activation), biases, activation and the weighted sum.

The op's scales and results are 16-bit, and with 128 x 128 blocks each weight times its scale is too. In bf16 that would
be up to six more roundings of 1.7e-3 than the recipe names. So rows, scales and results are f16, with the powers of two
taken out that keep them in its range: one a row, one an expert.

Base rows keep their bits: the op sorts by expert alone, so its tiles, and with them its order of summation, do not know
adapters, and a power of two multiplies exactly wherever it is applied.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import types
import weakref
from dataclasses import dataclass, replace

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..common.checks import check_choice
from ..common.recipes import Recipe
from ._runtime import INTERPRETED, batch_invariant, cdiv, launch, next_power_of_2, target_of, tl, triton
from .align import Alignment, align
from .combine import combine
from .device_numerics import to_dtype, to_f32
from .grouped_gemm import BLOCK, LoRAExpand, choose_block_m, epilogue, tile_arguments
from .lora_shrink import lora_shrink
from .prepare import AdapterSlots, PreparedWeights
from .quantize import _absmax

_TILE_ROWS = (8, 16, 32, 64)  # of the op's row tiles, those that `align` makes (it also has 48)
# Of the form with activation order, which 0.26 has and 0.33 has not.
_ACT_ORDER = {"g_idx": None, "perm": None, "is_k_full": True}


def chosen() -> bool:
    """Whether ISOMOE_MARLIN asks for vLLM's op.

    Raises:
      ValueError: an unknown value.
    """
    value = os.environ.get("ISOMOE_MARLIN", "own")
    check_choice("ISOMOE_MARLIN", value, ("own", "vllm"))
    return value == "vllm"


@functools.cache
def why_not_here() -> str | None:
    """Why vLLM's op cannot be had in this process, or None where it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    if INTERPRETED or not torch.cuda.is_available():
        return "no CUDA device"
    try:
        _vllm()
    except Exception as error:  # another version may have moved a name, and a broken build may fail in any way
        return f"vllm {vllm_version()}: {type(error).__name__}: {error}"
    if not hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm"):
        return f"vllm {vllm_version()} was built without its Marlin MoE op"
    return None


def why_not_layer(hidden_dim: int) -> str | None:
    """Why the op cannot run a layer, or None where it can."""
    if batch_invariant():
        return "ISOMOE_BATCH_INVARIANT=1: the op's order of summation depends on the batch"
    if hidden_dim % BLOCK:
        return f"got H={hidden_dim}, want a multiple of {BLOCK}"
    return None


def vllm_version() -> str:
    """The installed vLLM's version, or "?"."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "?"


@functools.cache
def _vllm() -> types.SimpleNamespace:
    """What is used of vLLM, imported once: 0.26 to 0.33 have it under these names."""
    utils = "vllm.model_executor.layers.quantization.utils"
    gemm = importlib.import_module("vllm._custom_ops").moe_wna16_marlin_gemm
    old = {k: v for k, v in _ACT_ORDER.items() if k in inspect.signature(gemm).parameters}
    return types.SimpleNamespace(
        gemm=functools.partial(gemm, **old),
        repack=importlib.import_module(f"{utils}.marlin_utils_fp8").prepare_fp8_moe_layer_for_marlin,
        workspace=importlib.import_module(f"{utils}.marlin_utils").marlin_make_workspace_new,
        e4m3=importlib.import_module("vllm.scalar_type").scalar_types.float8_e4m3fn,
    )


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """One layer's experts in the op's form.

    Attributes:
      w13, w2: what vLLM's helper made of [E, halves * P, H] and [E, H, P] e4m3, P = `padded`.
      w13_scale, w2_scale: f16, permuted: [E, groups, halves * P], [E, groups, H].
      w13_factor, w2_factor: f32 [E], powers of two: what a product still has to be multiplied with.
      padded: I as the op has it; the columns beyond I are zero.
      sources: the other tensors it was made of.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    w13_factor: torch.Tensor
    w2_factor: torch.Tensor
    padded: int
    sources: tuple[weakref.ref[torch.Tensor], ...] = ()


def _unit_scales(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales with each expert's largest in [1/2, 1), and f32 [E] powers of two that were taken out."""
    exponent = torch.frexp(scale.flatten(1).amax(1)).exponent
    one = torch.ones(len(scale), dtype=torch.float32, device=scale.device)
    inverse = torch.ldexp(one, -exponent).view(-1, *[1] * (scale.dim() - 1))
    return scale * inverse, torch.ldexp(one, exponent)


def pack(w13: torch.Tensor, w2: torch.Tensor, w13_scale: torch.Tensor, w2_scale: torch.Tensor) -> PackedWeights:
    """A layer in the op's form; the arguments are as in `PreparedWeights`, FP8."""
    experts, rows, hidden = w13.shape
    inter = w2.shape[2]
    halves, block = rows // inter, w13_scale.dim() == 3
    # The op's thread tiles: 64 of GEMM2's depth I, 128 of GEMM1's columns; and whole scale groups.
    step = BLOCK if block else max(64, 128 // halves)
    padded = cdiv(inter, step) * step

    def pad_rows(t: torch.Tensor) -> torch.Tensor:
        """[E, halves * I, ...] with each half padded by zeros."""
        if padded == inter:
            return t
        fill = t.new_zeros((experts, halves, padded - inter, *t.shape[2:]))
        return torch.cat((t.view(experts, halves, inter, *t.shape[2:]), fill), 2).flatten(1, 2)

    w13_scale, w13_factor = _unit_scales(w13_scale)
    w2_scale, w2_factor = _unit_scales(w2_scale)
    if not block:  # a half's blocks are padded with the half
        w13_scale = pad_rows(w13_scale)
    wide13 = pad_rows(w13).view(torch.float8_e4m3fn)
    wide2 = torch.nn.functional.pad(w2, (0, padded - inter)).view(torch.float8_e4m3fn)
    layer = types.SimpleNamespace(
        num_experts=experts, hidden_size=hidden, intermediate_size_per_partition=padded, w13_weight=wide13,
        orig_dtype=torch.float16, weight_block_size=[BLOCK, BLOCK] if block else None,
    )  # fmt: skip
    made13, made2, scale13, scale2 = _vllm().repack(layer, wide13, wide2, w13_scale, w2_scale)
    return PackedWeights(made13, made2, scale13, scale2, w13_factor, w2_factor, padded)


_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def packed_form(w13: torch.Tensor, w2: torch.Tensor, w13_scale: torch.Tensor, w2_scale: torch.Tensor) -> PackedWeights:
    """`pack`, once as long as the tensors live; a later change of their contents is not seen.

    Raises:
      RuntimeError: the first call with these weights is under a CUDA graph's capture.
    """
    others = (w2, w13_scale, w2_scale)
    found = _packed.get(w13)
    if found is not None and all(ref() is t for ref, t in zip(found.sources, others, strict=True)):
        return found
    if w13.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("ISOMOE_MARLIN=vllm: got the first call with these weights under a CUDA graph's capture, "
                           "want one before it, which repacks them")  # fmt: skip
    made = replace(pack(w13, *others), sources=tuple(weakref.ref(t) for t in others))
    _packed[w13] = made
    return made


@triton.jit
def _f16_rows_kernel(
    x_ptr, q_ptr, scale_ptr, bin_ptr, columns, width,
    LIMIT: tl.constexpr, HIGHEST: tl.constexpr, HAS_BINS: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if HAS_BINS:
        if tl.load(bin_ptr + row) < 0:
            return
    column = tl.arange(0, WIDTH_PAD)
    x = tl.reshape(to_f32(tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0)), [1, WIDTH_PAD])
    # Exponent field of the maximum, kept where 2**(field - 126 - LIMIT) and its inverse are normal numbers.
    field = _absmax(x, 1).to(tl.int32, bitcast=True) >> 23
    field = tl.where(field < 15, 15, field)
    field = tl.where(field > HIGHEST, HIGHEST, field)
    scale = ((field + 1 - LIMIT) << 23).to(tl.float32, bitcast=True)
    inverse = ((253 + LIMIT - field) << 23).to(tl.float32, bitcast=True)
    q = tl.reshape((x * inverse[:, None]).to(tl.float16), [WIDTH_PAD])
    tl.store(q_ptr + row * width + column, q, mask=column < width)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)


def f16_rows(x: torch.Tensor, width: int, pair_bin: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as the op reads them: so small that ``depth`` products with weights up to 448 sum within f16's range.

    Args:
      x: [M, depth] bf16.
      width: columns of the result; those beyond `depth` are zero.
      pair_bin: [M] int32; rows below 0 are left out.

    Returns:
      f16 [M, width], and f32 [M] powers of two to multiply products with.
    """
    rows, depth = x.shape
    limit = 7 - (depth - 1).bit_length()  # depth * 2**limit * 448 <= 57344 < 65504
    out = torch.empty((rows, width), dtype=torch.float16, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    width_pad = next_power_of_2(width)
    launch(
        _f16_rows_kernel,
        (rows,),
        dict(
            x_ptr=x, q_ptr=out, scale_ptr=scales, bin_ptr=out if pair_bin is None else pair_bin, columns=depth,
            width=width,
        ),
        num_warps=min(8, max(1, width_pad // 512)),
        LIMIT=limit,
        HIGHEST=min(252 + limit, 254),
        HAS_BINS=pair_bin is not None,
        WIDTH_PAD=width_pad,
    )  # fmt: skip
    return out, scales


@triton.jit
def _finish_kernel(
    c_ptr, row_scale_ptr, factor_ptr, bias_ptr, out_ptr, sorted_ptr, tile_expert_ptr, num_tiles_ptr, bin_ptr,
    v_ptr, b_ptr, rank_ptr, columns, width, row_div, b_experts, b_expert_stride, R,
    HALVES: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    n_blocks = tl.cdiv(columns, BLOCK_N)
    tile = tl.program_id(0) // n_blocks
    if tile >= tl.load(num_tiles_ptr):
        return
    column = (tl.program_id(0) % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < columns
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    pair = tl.load(sorted_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    valid = pair >= 0
    safe_pair = tl.where(valid, pair, 0).to(tl.int64)
    mask = valid[:, None] & inside[None, :]
    scale = tl.load(row_scale_ptr + safe_pair // row_div, mask=valid, other=0.0) * tl.load(factor_ptr + expert)
    c_at = c_ptr + safe_pair[:, None] * (HALVES * width) + column[None, :]
    gate = to_f32(tl.load(c_at, mask=mask, other=0.0)) * scale[:, None]
    up = gate
    if HALVES == 2:
        up = to_f32(tl.load(c_at + width, mask=mask, other=0.0)) * scale[:, None]
    out = epilogue(
        gate, up, expert, safe_pair, valid, column, inside, columns, bias_ptr, bin_ptr, v_ptr, b_ptr, rank_ptr,
        b_experts, b_expert_stride, R, HALVES, ACTIVATION, HAS_BIAS, SLOTS, BLOCK_R,
    )
    out_at = out_ptr + safe_pair[:, None] * columns + column[None, :]
    tl.store(out_at, to_dtype(out, out_ptr.dtype.element_ty), mask=mask)


def _finish(
    product: torch.Tensor, row_scale: torch.Tensor, factor: torch.Tensor, out: torch.Tensor, alignment: Alignment, *,
    bias: torch.Tensor | None, halves: int, activation: str, row_div: int, lora: LoRAExpand | None,
) -> None:  # fmt: skip
    """``out[pair] = act(scaled product + bias + B v)``, all in f32, for every kept pair.

    Args:
      product: [T*K, halves * width] f16 from the op, `width` at least the columns of `out`.
      row_scale: f32 [T*K / row_div]; factor: f32 [E].
      out: [T*K, columns] bf16 or f32.
    """
    columns = out.shape[1]
    rank = 0 if lora is None else lora.b.shape[-1]
    # Some 2048 accumulators a program: more would spill beside the expand's operands.
    block_n = min(256, max(32, 2048 // (alignment.block_m * halves)), next_power_of_2(max(columns, 16)))
    launch(
        _finish_kernel,
        (alignment.max_tiles * cdiv(columns, block_n),),
        dict(
            c_ptr=product,
            row_scale_ptr=row_scale,
            factor_ptr=factor,
            bias_ptr=factor if bias is None else bias,
            out_ptr=out,
            columns=columns,
            width=product.shape[1] // halves,
            row_div=row_div,
            **tile_arguments(out, alignment, lora),
        ),
        num_warps=8 if alignment.block_m >= 64 else 4,
        HALVES=halves,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        SLOTS=0 if lora is None else alignment.slots,
        BLOCK_R=16 if rank <= 16 else 32,
        BLOCK_M=alignment.block_m,
        BLOCK_N=block_n,
    )


def tile_rows(pairs: int, global_experts: int) -> int:
    """Rows of the op's tiles, by vLLM's own rule: the first of which an expert's share of the pairs fills below 0.9."""
    return next((rows for rows in _TILE_ROWS if pairs < 0.9 * rows * global_experts), _TILE_ROWS[-1])


@dataclass(frozen=True, eq=False)
class _Sorted:
    """Pairs as the op reads them: padding is any number past the pairs, and base and adapter rows share tiles."""

    alignment: Alignment
    pair: torch.Tensor
    topk_weights: torch.Tensor
    locks: torch.Tensor

    def multiply(
        self, rows: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, columns: int, row_div: int
    ) -> torch.Tensor:
        """f16 [T*K, columns]; rows of skipped pairs stay undefined."""
        vllm = _vllm()
        out = torch.empty((len(rows) * row_div, columns), dtype=torch.float16, device=rows.device)
        vllm.gemm(
            input=rows, output=out, b_qweight=w, b_bias=None, b_scales=w_scale, a_scales=None, global_scale=None,
            b_qzeros=None, workspace=self.locks, sorted_token_ids=self.pair, expert_ids=self.alignment.tile_expert,
            num_tokens_past_padded=self.alignment.num_tiles * self.alignment.block_m, topk_weights=self.topk_weights,
            moe_block_size=self.alignment.block_m, top_k=row_div, mul_topk_weights=False, b_q_type=vllm.e4m3,
            size_m=len(rows), size_n=columns, size_k=rows.shape[1], use_atomic_add=False, use_fp32_reduce=True,
            is_zp_float=False,
        )  # fmt: skip
        return out


def _layer(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    adapter_ids: torch.Tensor | None,
    slot_ids: torch.Tensor | None,
    ranks: torch.Tensor | None,
    a13: torch.Tensor | None,
    b13: torch.Tensor | None,
    a2: torch.Tensor | None,
    b2: torch.Tensor | None,
    activation: str,
    wire: str,
    lora_products: str,
    f32_out: bool,
) -> torch.Tensor:
    reason = why_not_here()  # here, where torch.compile does not look
    if reason is not None:
        raise RuntimeError(f"ISOMOE_MARLIN=vllm: vLLM's Marlin MoE op cannot be had: {reason}")
    tokens, top_k = topk_ids.shape
    experts, hidden, inter = w13.shape[0], w13.shape[2], w2.shape[2]
    halves, pairs = w13.shape[1] // inter, tokens * top_k
    out = torch.empty((tokens, hidden), dtype=torch.float32 if f32_out else torch.bfloat16, device=x.device)
    if pairs == 0:
        return out.zero_()
    packed = packed_form(w13, w2, w13_scale, w2_scale)
    everywhere = experts if expert_map is None else expert_map.shape[0]
    # The op's tiles must not depend on adapters; those of the kernels that apply them do.
    base = align(topk_ids, local_experts=experts, block_m=tile_rows(pairs, everywhere), expert_map=expert_map)
    mine = base
    if slot_ids is not None:
        mine = align(
            topk_ids, local_experts=experts, block_m=choose_block_m(pairs, experts, target_of(x.device)),
            expert_map=expert_map, adapter_ids=adapter_ids, slot_ids=slot_ids,
        )  # fmt: skip
    ready = _Sorted(
        base, torch.where(base.sorted_pair < 0, pairs, base.sorted_pair), topk_weights,
        _vllm().workspace(x.device, 4),  # locks of one call: another stream may run this layer at the same time
    )  # fmt: skip

    def expand(rows: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None, row_div: int) -> LoRAExpand | None:
        if a is None or b is None or ranks is None:
            return None
        v = lora_shrink(rows, a, ranks, mine, row_div=row_div)
        return LoRAExpand(v.bfloat16().float() if lora_products == "bf16" else v, b, ranks)

    rows, row_scale = f16_rows(x, hidden)
    product = ready.multiply(rows, packed.w13, packed.w13_scale, halves * packed.padded, top_k)
    h = torch.empty((pairs, inter), dtype=torch.bfloat16, device=x.device)
    _finish(
        product, row_scale, packed.w13_factor, h, mine, bias=w13_bias, halves=halves, activation=activation,
        row_div=top_k, lora=expand(x, a13, b13, top_k),
    )  # fmt: skip
    rows, row_scale = f16_rows(h, packed.padded, mine.pair_bin)
    o = ready.multiply(rows, packed.w2, packed.w2_scale, hidden, 1)
    lora = expand(h, a2, b2, 1)
    if lora is None and w2_bias is None and wire == "f32":
        # A power of two may multiply the router's weight instead of the row: the products are the same bits.
        scale = row_scale * packed.w2_factor[base.pair_bin.clamp(min=0).long()]
        combine(o, topk_weights * scale.view_as(topk_weights), base.pair_bin, out)
        return out
    finished = torch.empty((pairs, hidden), dtype=torch.bfloat16 if wire == "bf16" else torch.float32, device=x.device)
    _finish(
        o, row_scale, packed.w2_factor, finished, mine, bias=w2_bias, halves=1, activation="none", row_div=1, lora=lora
    )
    combine(finished, topk_weights, mine.pair_bin, out)
    return out


_layer_op = torch.library.custom_op("isomoe::vllm_marlin_moe", _layer, mutates_args=())


@_layer_op.register_fake
def _(
    x, topk_weights, topk_ids, w13, w2, w13_scale, w2_scale, w13_bias, w2_bias, expert_map, adapter_ids, slot_ids,
    ranks, a13, b13, a2, b2, activation, wire, lora_products, f32_out,
):  # fmt: skip
    return torch.empty((x.shape[0], w13.shape[2]), dtype=torch.float32 if f32_out else torch.bfloat16, device=x.device)


def marlin_moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: PreparedWeights,
    *,
    activation: str = "silu",
    recipe: Recipe = Recipe("w8a16"),  # noqa: B008 frozen
    adapters: AdapterSlots | None = None,
    adapter_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The layer as `fused_moe` describes it, whose checks the arguments have passed.

    Args:
      recipe: a w8a16 one; the op's own result is f16, and a bf16 `wire` rounds it once more.

    Raises:
      ValueError: a layer that the op cannot run, before any launch.
      RuntimeError: vLLM's op cannot be had here; or the first call with these weights is under a graph's capture.
    """
    reason = why_not_layer(weights.hidden_dim)
    if reason is not None:
        raise ValueError(f"ISOMOE_MARLIN=vllm: vLLM's Marlin MoE op cannot run this: {reason}")
    assert weights.w13_scale is not None and weights.w2_scale is not None, "w8a16 comes with FP8 weights"
    lora = adapters
    return _layer_op(
        x, topk_weights, topk_ids, weights.w13, weights.w2, weights.w13_scale, weights.w2_scale, weights.w13_bias,
        weights.w2_bias, expert_map, adapter_ids,
        None if lora is None else lora.slot_ids, None if lora is None else lora.ranks,
        None if lora is None else lora.a13, None if lora is None else lora.b13,
        None if lora is None else lora.a2, None if lora is None else lora.b2,
        activation, recipe.wire, recipe.lora_products, out_dtype == torch.float32,
    )  # fmt: skip
