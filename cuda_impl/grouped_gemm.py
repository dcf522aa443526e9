# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMM of both expert stages, with everything that follows it in its epilogue.

One program computes a tile of rows of one expert by a tile of output columns. Stage 1 holds a gate and an up
accumulator, adds scales, bias and the LoRA expand in f32, applies the activation and writes h; stage 2 (no
activation) writes an expert's result rows. Rows are gathered through the alignment's sorted pairs, and results go to
pair order, so nothing is ever read from or written to a padding row.

Operands: e4m3 x e4m3 (W8A8), f16 x e4m3 (W8A16: the weight becomes f16 in registers), bf16 x bf16. Devices without
e4m3 multiply the decoded codes in f16, which holds every code exactly. Scales that vary along the reduction (128-wide
weight blocks, activation groups) multiply each step's product before it joins the f32 accumulator; constant ones
wait for the epilogue. Where the matrix unit's FP8 accumulator is narrower than f32, it is emptied into f32 every
step: inside Hopper's warpgroup instruction ("fp8"), by an addition of its own on 8.9 and 12.x ("fp8_add").

LoRA: rows of a tile are sorted by adapter, so a loop over the tile's adapters reads each B tile once; a row takes
the delta of its own adapter by selection, never by adding zero, so base rows keep their bits whatever an unused slot
holds. The rank products arrive in f32 and enter the matrix unit as a bf16 pair (value and remainder, error 2**-17).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ._runtime import INTERPRET, Target, batch_invariant, cdiv, launch, next_power_of_2, target_of, tl, triton
from .align import Alignment
from .device_numerics import activate, activate_gated, decode_e4m3, to_bf16, to_dtype, to_f32

BLOCK = 128  # side of a weight scale's block


@triton.jit
def _operand(x, KIND: tl.constexpr, DOT: tl.constexpr, NATIVE: tl.constexpr):
    if KIND == "e4m3":
        if DOT == "fp8" or DOT == "fp8_add":
            y = x.to(tl.float8e4nv, bitcast=True)
        elif NATIVE:
            y = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            y = decode_e4m3(x)
    else:
        y = x
    return y


@triton.jit
def dot(a, b, acc, DOT: tl.constexpr, STEP: tl.constexpr):
    """``acc + a @ b`` in f32; an FP8 accumulator is emptied every STEP terms."""
    if INTERPRET:
        y = tl.dot(to_f32(a), to_f32(b), acc, input_precision="ieee")
    elif DOT == "fp8":
        y = tl.dot(a, b, acc, max_num_imprecise_acc=STEP)
    elif DOT == "fp8_add":
        y = acc + tl.dot(a, b, max_num_imprecise_acc=STEP)
    else:
        y = tl.dot(a, b, acc)
    return y


@triton.jit
def _expand(acc, v_ptr, b_ptr, rows, slot, rank, adapter, column, columns, R, BLOCK_R: tl.constexpr):
    """acc, plus B of `adapter` times the rank products in the rows that use it. b_ptr: [columns, R]."""
    mine = slot == adapter
    delta = tl.zeros(acc.shape, dtype=tl.float32)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        v = tl.load(v_ptr + rows[:, None] + r[None, :], mask=mine[:, None] & (r < rank)[None, :], other=0.0)
        b = tl.load(
            b_ptr + column[None, :].to(tl.int64) * R + r[:, None],
            mask=(r < rank)[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        high = to_bf16(v)
        low = to_bf16(v - to_f32(high))
        delta = dot(high, b, delta, "bf16", BLOCK_R)
        delta = dot(low, b, delta, "bf16", BLOCK_R)
    return tl.where(mine[:, None], acc + delta, acc)


@triton.jit
def epilogue(
    gate, up, expert, pair, valid, column, inside, columns, bias_ptr, bin_ptr, v_ptr, b_ptr, rank_ptr,
    b_experts, b_expert_stride, R,
    HALVES: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """What follows the scaled products of a tile: bias, LoRA expand, activation; `up` counts where HALVES is 2."""
    if HAS_BIAS:
        bias_at = bias_ptr + expert * HALVES * columns + column
        gate += tl.load(bias_at, mask=inside, other=0.0)[None, :]
        if HALVES == 2:
            up += tl.load(bias_at + columns, mask=inside, other=0.0)[None, :]
    if SLOTS > 0:
        slot = tl.load(bin_ptr + pair, mask=valid, other=0) % (SLOTS + 1) - 1
        lowest = tl.min(tl.where(slot < 0, SLOTS, slot), axis=0)
        highest = tl.max(slot, axis=0)
        v_row = pair * (HALVES * R)
        b_slot_stride = columns.to(tl.int64) * b_experts * (HALVES * R)
        for adapter in range(lowest, highest + 1):
            if tl.max((slot == adapter).to(tl.int32), axis=0) > 0:
                rank = tl.load(rank_ptr + adapter)
                b_at = b_ptr + adapter * b_slot_stride + expert * b_expert_stride * (HALVES * columns * R)
                gate = _expand(gate, v_ptr, b_at, v_row, slot, rank, adapter, column, columns, R, BLOCK_R)
                if HALVES == 2:
                    b_up = b_at + columns.to(tl.int64) * R
                    up = _expand(up, v_ptr + R, b_up, v_row, slot, rank, adapter, column, columns, R, BLOCK_R)
    if ACTIVATION == "none":
        out = gate
    elif HALVES == 2:
        out = activate_gated(gate, up, ACTIVATION)
    else:
        out = activate(gate, ACTIVATION)
    return out


@triton.jit
def _grouped_gemm_kernel(
    a_ptr, a_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr,
    sorted_ptr, tile_expert_ptr, num_tiles_ptr, bin_ptr,
    v_ptr, b_ptr, rank_ptr,
    columns, depth, row_div, a_groups, b_experts, b_expert_stride, R,
    HALVES: tl.constexpr, ACTIVATION: tl.constexpr,
    A_KIND: tl.constexpr, W_KIND: tl.constexpr, DOT: tl.constexpr, NATIVE: tl.constexpr,
    A_SCALE: tl.constexpr, A_GROUP: tl.constexpr, W_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_R: tl.constexpr, EVEN_DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n_blocks = tl.cdiv(columns, BLOCK_N)
    tile = tl.program_id(0) // n_blocks
    first_column = (tl.program_id(0) % n_blocks) * BLOCK_N
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    pair = tl.load(sorted_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    valid = pair >= 0
    safe_pair = tl.where(valid, pair, 0).to(tl.int64)
    a_row = safe_pair // row_div
    column = first_column + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)

    a_at = a_ptr + a_row[:, None] * depth + k[None, :]
    w_at = w_ptr + expert * (HALVES * columns.to(tl.int64) * depth) + column[None, :].to(tl.int64) * depth + k[:, None]
    up_at = w_at + columns.to(tl.int64) * depth
    w_mask = (column < columns)[None, :]
    n_scale_blocks = tl.cdiv(columns, 128)
    k_scale_blocks = tl.cdiv(depth, 128)
    w_scale_at = w_scale_ptr + (expert * (HALVES * n_scale_blocks) + first_column // 128) * k_scale_blocks
    up_scale_at = w_scale_at + n_scale_blocks * k_scale_blocks

    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    # In w13 a last bit of g can move a value of h to the next FP8 code; Hopper's fp8 accumulator keeps some 14 bits.
    STEP: tl.constexpr = BLOCK_K if ACTIVATION == "none" else 32
    for start in range(0, depth, BLOCK_K):
        if EVEN_DEPTH:
            a = tl.load(a_at + start, mask=valid[:, None], other=0)
            w = tl.load(w_at + start, mask=w_mask, other=0)
        else:
            inside = k < depth - start
            a = tl.load(a_at + start, mask=valid[:, None] & inside[None, :], other=0)
            w = tl.load(w_at + start, mask=w_mask & inside[:, None], other=0)
        a = _operand(a, A_KIND, DOT, NATIVE)
        w = _operand(w, W_KIND, DOT, NATIVE)
        if A_SCALE == "group" or W_SCALE == "block":
            zero = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            if A_SCALE == "group":
                step = tl.load(a_scale_ptr + a_row * a_groups + start // A_GROUP, mask=valid, other=0.0)[:, None]
            else:
                step = tl.full([BLOCK_M, 1], 1.0, tl.float32)
            if W_SCALE == "block":
                gate += dot(a, w, zero, DOT, STEP) * (step * tl.load(w_scale_at + start // 128))
            else:
                gate += dot(a, w, zero, DOT, STEP) * step
        else:
            gate = dot(a, w, gate, DOT, STEP)
        if HALVES == 2:
            if EVEN_DEPTH:
                u = tl.load(up_at + start, mask=w_mask, other=0)
            else:
                u = tl.load(up_at + start, mask=w_mask & (k < depth - start)[:, None], other=0)
            u = _operand(u, W_KIND, DOT, NATIVE)
            if A_SCALE == "group" or W_SCALE == "block":
                zero = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
                if W_SCALE == "block":
                    up += dot(a, u, zero, DOT, STEP) * (step * tl.load(up_scale_at + start // 128))
                else:
                    up += dot(a, u, zero, DOT, STEP) * step
            else:
                up = dot(a, u, up, DOT, STEP)

    inside_n = column < columns
    if A_SCALE == "row":
        row_scale = tl.load(a_scale_ptr + a_row, mask=valid, other=0.0)[:, None]
        gate *= row_scale
        up *= row_scale
    if W_SCALE == "channel":
        scale_at = w_scale_ptr + expert * HALVES * columns + column
        gate *= tl.load(scale_at, mask=inside_n, other=0.0)[None, :]
        if HALVES == 2:
            up *= tl.load(scale_at + columns, mask=inside_n, other=0.0)[None, :]
    out = epilogue(
        gate, up, expert, safe_pair, valid, column, inside_n, columns, bias_ptr, bin_ptr, v_ptr, b_ptr, rank_ptr,
        b_experts, b_expert_stride, R, HALVES, ACTIVATION, HAS_BIAS, SLOTS, BLOCK_R,
    )
    out_at = out_ptr + safe_pair[:, None] * columns + column[None, :]
    tl.store(out_at, to_dtype(out, out_ptr.dtype.element_ty), mask=valid[:, None] & inside_n[None, :])


@dataclass(frozen=True)
class GemmConfig:
    """Tile of one launch; `block_m` is the alignment's."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiles:
    """Tiles of both stages of one layer; `block_m` rows is the alignment's."""

    block_m: int
    w13: GemmConfig
    w2: GemmConfig

    def why_not(self) -> str | None:
        """What these tiles would have to be, or None where the kernels take them."""
        power = lambda n: n >= 16 and n & (n - 1) == 0  # noqa: E731
        for config in (self.w13, self.w2):
            if not (power(self.block_m) and power(config.block_n) and config.block_n <= BLOCK):
                return f"block_m and block_n as powers of two from 16, block_n up to {BLOCK}"
            if config.block_k not in (64, BLOCK):
                return f"block_k 64 or {BLOCK}"
            if config.num_warps not in (4, 8) or config.num_stages > 8:
                return "4 or 8 warps and at most 8 stages"
        return None


def choose_block_m(num_pairs: int, local_experts: int, target: Target) -> int:
    """Rows of a tile: near the rows an expert gets, at least the matrix unit's 16."""
    if target.capability is None:
        return 16
    if batch_invariant():
        return 64
    rows = cdiv(num_pairs, max(local_experts, 1))
    if rows <= 16:
        return 16
    return 32 if rows <= 32 else 64 if rows <= 96 else 128


def choose_config(
    block_m: int, halves: int, columns: int, two_level: bool, a_bytes: int, w_bytes: int, target: Target
) -> GemmConfig:
    """Column tile, depth step, warps and stages that fit the target's shared memory."""
    if target.capability is None:
        return GemmConfig(min(128, next_power_of_2(max(columns, 16))), 128, 4, 1)
    # Two accumulators, and a third value while a step's product waits for its scale, share the registers.
    narrow = halves == 2 if block_m < 128 else halves == 2 or two_level
    if (9, 0) <= target.capability < (12, 0) and block_m >= 64 and not two_level:
        # Warpgroup tiles: only FP8's promotion needs that third value.
        narrow = block_m >= 128 and halves == 2 and a_bytes == 1
    block_n = 64 if narrow else 128
    num_warps = 8 if block_m >= 64 else 4
    block_k = 128 if max(a_bytes, w_bytes) == 1 or two_level or block_m <= 32 else 64
    stage = block_m * block_k * a_bytes + halves * block_n * block_k * w_bytes
    # A quarter is left to what the compiler adds (layout conversions, the expand's tiles).
    num_stages = max(2, min(4, int(target.shared_memory * 0.75) // stage))
    return GemmConfig(block_n, block_k, num_warps, num_stages)


def rule_tiles(
    num_pairs: int, local_experts: int, inter: int, hidden: int, two_level: bool, a_bytes: int, w_bytes: int,
    target: Target,
) -> Tiles:  # fmt: skip
    """What `choose_block_m` and `choose_config` decide for a layer of gated experts."""
    block_m = choose_block_m(num_pairs, local_experts, target)
    return Tiles(
        block_m, choose_config(block_m, 2, inter, two_level, a_bytes, w_bytes, target),
        choose_config(block_m, 1, hidden, two_level, a_bytes, w_bytes, target),
    )  # fmt: skip


def candidate_tiles(
    num_pairs: int, local_experts: int, two_level: bool, a_bytes: int, w_bytes: int, target: Target
) -> tuple[Tiles, ...]:
    """Tiles worth measuring for gated experts: the rule's own row tile and its neighbours, with varied widths.

    What does not fit the target's shared memory is left out.
    """
    rows = choose_block_m(num_pairs, local_experts, target)
    # A step of 64 leaves room for wide operands; with scales along the depth a step is a block.
    block_k = BLOCK if two_level or max(a_bytes, w_bytes) == 1 else 64
    found = []
    for block_m, (n13, n2), warps, stages in itertools.product(
        [m for m in (rows // 4, rows // 2, rows, rows * 2) if 16 <= m <= 128], ((64, 64), (64, 128), (128, 128)),
        (4, 8), (2, 3, 4, 5),
    ):  # fmt: skip
        stage = block_k * max(block_m * a_bytes + 2 * n13 * w_bytes, block_m * a_bytes + n2 * w_bytes)
        # Accumulators of both halves: at most 128 registers a thread.
        if stage * stages <= target.shared_memory * 0.9 and 2 * block_m * n13 <= 128 * 32 * warps:
            found.append(Tiles(block_m, *(GemmConfig(n, block_k, warps, stages) for n in (n13, n2))))
    return tuple(found)


@dataclass(frozen=True)
class LoRAExpand:
    """Rank products and B matrices of one stage.

    Attributes:
      v: [T*K, halves, R] f32; only the first `rank` entries of rows with an adapter are defined.
      b: [slots, E|1, halves, columns, R] bf16; entries beyond a slot's rank are never read.
      ranks: [slots] int32.
    """

    v: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor


def tile_arguments(out: torch.Tensor, alignment: Alignment, lora: LoRAExpand | None) -> dict[str, torch.Tensor | int]:
    """Arguments of kernels that end in `epilogue`: the rows of each tile, and the adapters' (without, never read)."""
    return dict(
        sorted_ptr=alignment.sorted_pair,
        tile_expert_ptr=alignment.tile_expert,
        num_tiles_ptr=alignment.num_tiles,
        bin_ptr=alignment.pair_bin,
        v_ptr=out if lora is None else lora.v,
        b_ptr=out if lora is None else lora.b,
        rank_ptr=alignment.pair_bin if lora is None else lora.ranks,
        b_experts=1 if lora is None else lora.b.shape[1],
        b_expert_stride=0 if lora is None or lora.b.shape[1] == 1 else 1,
        R=0 if lora is None else lora.b.shape[-1],
    )


def grouped_gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    alignment: Alignment,
    *,
    a_scale: torch.Tensor | None = None,
    a_group: int = 0,
    w_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    halves: int = 1,
    activation: str = "none",
    row_div: int = 1,
    lora: LoRAExpand | None = None,
    config: GemmConfig | None = None,
) -> None:
    """``out[pair] = act(w[expert] a[pair // row_div])`` for every kept pair; other rows of `out` stay untouched.

    Args:
      a: [M, depth] uint8 (e4m3), f16 or bf16.
      w: [E, halves * columns, depth] uint8 (e4m3) or bf16.
      out: [T*K, columns] bf16 or f32.
      a_scale: [M, 1] f32, or [M, ceil(depth / a_group)] with `a_group` > 0 (a multiple of 128).
      w_scale: f32 [E, halves * columns], or for 128 x 128 blocks [E, halves * ceil(columns/128), ceil(depth/128)].
      bias: [E, halves * columns] f32.
      activation: ``"none"`` or a name of `common.activations`.
      row_div: K where `a` holds one row a token, 1 where it holds one a pair.
      config: a measured tile; None lets `choose_config` decide.
    """
    target = target_of(a.device)
    columns, depth = out.shape[1], a.shape[1]
    a_kind = {torch.uint8: "e4m3", torch.float16: "f16", torch.bfloat16: "bf16"}[a.dtype]
    w_kind = "e4m3" if w.dtype == torch.uint8 else "bf16"
    if w_kind == "bf16":
        dot_kind = "bf16"
    elif a_kind == "e4m3" and target.native_fp8:
        dot_kind = "fp8" if target.wide_fp8_accumulator else "fp8_add"
    else:
        dot_kind = "f16"
    block_scale = w_scale is not None and w_scale.dim() == 3
    two_level = a_group > 0 or block_scale
    if config is None:
        config = choose_config(
            alignment.block_m, halves, columns, two_level, a.element_size(), w.element_size(), target
        )
    slots = 0 if lora is None else alignment.slots
    rank = 0 if lora is None else lora.b.shape[-1]
    launch(
        _grouped_gemm_kernel,
        (alignment.max_tiles * cdiv(columns, config.block_n),),
        dict(
            a_ptr=a,
            a_scale_ptr=a if a_scale is None else a_scale,
            w_ptr=w,
            w_scale_ptr=w if w_scale is None else w_scale,
            bias_ptr=w if bias is None else bias,
            out_ptr=out,
            columns=columns,
            depth=depth,
            row_div=row_div,
            a_groups=cdiv(depth, a_group) if a_group else 1,
            **tile_arguments(out, alignment, lora),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        HALVES=halves,
        ACTIVATION=activation,
        A_KIND=a_kind,
        W_KIND=w_kind,
        DOT=dot_kind,
        NATIVE=target.native_fp8,
        A_SCALE="none" if a_scale is None else "group" if a_group else "row",
        A_GROUP=a_group,
        W_SCALE="none" if w_scale is None else "block" if block_scale else "channel",
        HAS_BIAS=bias is not None,
        SLOTS=slots,
        BLOCK_R=16 if rank <= 16 else 32,
        EVEN_DEPTH=depth % config.block_k == 0,
        BLOCK_M=alignment.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
    )
