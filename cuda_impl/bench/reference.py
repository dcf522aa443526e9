# SPDX-License-Identifier: Apache-2.0
"""A layer by its recipe in float32 torch products, expert by expert: what every measured path is held against."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ...common.recipes import Group, Recipe
from .. import _runtime
from .._runtime import tl, triton
from ..prepare import AdapterSlots, PreparedWeights
from .data import Batch

_INV_MAX = float(np.float32(1 / 448))


def quantised(rows: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor, int]:
    """e4m3 codes ``[R, K]`` of float32 rows, their scales ``[R, G]``, and the columns that share one."""
    v = rows.float()
    if not isinstance(group, int) and group != "token":
        raise ValueError(f"group: got {group!r}, want None, 'token' or a width")
    width = group if isinstance(group, int) else v.shape[1]
    g = torch.nn.functional.pad(v, (0, -v.shape[1] % width)).unflatten(1, (-1, width))
    scale = g.abs().amax(-1, keepdim=True).clamp(min=1e-10) * torch.tensor(_INV_MAX, device=v.device)
    codes = (g * (1.0 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, : v.shape[1]].contiguous(), scale.squeeze(-1), width


def as_multiplied(rows: torch.Tensor, group: Group) -> torch.Tensor:
    """Float32 rows as the recipe multiplies them: quantised to e4m3 by `group` and back, or as they are (None)."""
    if group is None:
        return rows.float()
    codes, scale, width = quantised(rows, group)
    return codes.float() * scale.repeat_interleave(width, 1)[:, : codes.shape[1]]


@triton.jit
def _sums_kernel(
    a_ptr, a_scale_ptr, w_ptr, w_scale_ptr, out_ptr, rows, columns, depth, a_groups,
    BLOCK: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * 64 + tl.arange(0, 64)
    n = tl.program_id(1) * 128 + tl.arange(0, 128)
    k = tl.arange(0, 128)
    acc = tl.zeros([64, 128], tl.float32)
    for start in range(0, depth, 128):
        inside = start + k < depth
        a_at = a_ptr + m[:, None] * depth + start + k[None, :]
        w_at = w_ptr + n[None, :] * depth + start + k[:, None]
        a = tl.load(a_at, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at, mask=(n < columns)[None, :] & inside[:, None], other=0.0)
        d = tl.dot(a, w, max_num_imprecise_acc=EVERY)
        if BLOCK:
            blocks = tl.cdiv(depth, 128)
            sa = tl.load(a_scale_ptr + m * a_groups + start // 128, mask=m < rows, other=0.0)
            sw = tl.load(w_scale_ptr + (n // 128) * blocks + start // 128, mask=n < columns, other=0.0)
            acc += d * (sa[:, None] * sw[None, :])
        else:
            acc += d
    if not BLOCK:
        acc *= tl.load(a_scale_ptr + m, mask=m < rows, other=0.0)[:, None]
        acc *= tl.load(w_scale_ptr + n, mask=n < columns, other=0.0)[None, :]
    tl.store(out_ptr + m[:, None] * columns + n[None, :], acc, mask=(m < rows)[:, None] & (n < columns)[None, :])


def device_sums(
    codes: torch.Tensor, scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, every: int
) -> torch.Tensor:
    """f32 ``[R, N]``: products of FP8 rows by one expert's FP8 weights, summed by the tensor core as `Recipe.fp8_sums`
    says: the plainest kernel that does so (`common.fp8_sums` gives the same bits on the host, slowly).

    Args:
      codes: e4m3 ``[R, K]``; scale: f32 ``[R, G]``.
      w: e4m3 ``[N, K]``; w_scale: f32 ``[N]``, or ``[ceil(N/128), ceil(K/128)]`` for block scales.

    Raises:
      ValueError: the device has no such sums.
    """
    if _runtime.target_of(codes.device).capability != (9, 0):
        raise ValueError(f"fp8_sums: got {every} on {codes.device}, want compute capability 9.0 or a recipe with 0")
    out = torch.empty(len(codes), len(w), device=codes.device)
    if len(codes):
        _sums_kernel[(triton.cdiv(len(codes), 64), triton.cdiv(len(w), 128))](
            codes, scale, w, w_scale, out, len(codes), len(w), codes.shape[1], scale.shape[1],
            BLOCK=w_scale.dim() == 2, EVERY=every, num_warps=4,
        )  # fmt: skip
    return out


def _gate_up(rows: torch.Tensor, weights: PreparedWeights, e: int, recipe: Recipe) -> torch.Tensor:
    """w13's products of one expert's rows, f32 ``[R, 2I]``."""
    group = recipe.x_group if recipe.name == "w8a8" else None
    scale = _at(weights.w13_scale, e)
    if not recipe.fp8_sums:
        return as_multiplied(rows, group) @ dense(weights.w13[e], scale, 2).T
    assert scale is not None
    codes, row_scale, _ = quantised(rows, group)
    w, inter = weights.w13[e].view(torch.float8_e4m3fn), weights.intermediate_size
    halves = zip(w.split(inter), scale.chunk(2))
    return torch.cat([device_sums(codes, row_scale, half, s, recipe.fp8_sums) for half, s in halves], 1)


def dense(codes: torch.Tensor, scale: torch.Tensor | None, halves: int = 1) -> torch.Tensor:
    """One expert's matrix [N, K] in float32; block scales are [halves * ceil(N/halves/128), ceil(K/128)]."""
    if scale is None:
        return codes.float()
    w = codes.view(torch.float8_e4m3fn).float()
    if scale.dim() == 1:
        return w * scale[:, None]
    n, k = w.shape[0] // halves, w.shape[1]
    spread = scale.view(halves, -1, scale.shape[1]).repeat_interleave(128, 1)[:, :n]
    return w * spread.repeat_interleave(128, 2)[:, :, :k].reshape(w.shape)


def _users(adapter_ids: torch.Tensor, adapters: AdapterSlots) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(slot, rank, rows) of every adapter among some rows' ids."""
    for slot, (held, rank) in enumerate(zip(adapters.slot_ids.tolist(), adapters.ranks.tolist())):
        rows = (adapter_ids == held).nonzero(as_tuple=True)[0]
        if held >= 0 and len(rows):
            yield slot, rank, rows


def layer_f32(
    batch: Batch, weights: PreparedWeights, recipe: Recipe, adapters: AdapterSlots | None = None
) -> torch.Tensor:
    """f32 [T, H]. `recipe` decides the rounding of rows and rank products; result rows are not rounded.

    TF32 must be off. Recipes other than "w8a8" leave rows in bf16: with it unquantised activations are what one gets.
    """
    h_group = recipe.h_group if recipe.name == "w8a8" else None
    inter = weights.intermediate_size
    y = torch.zeros(batch.x.shape, device=batch.x.device)

    def products(rows: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        v = rows.float() @ a.float().T
        return v.bfloat16().float() if recipe.lora_products == "bf16" else v

    for e in range(weights.num_experts):
        token, k = (batch.local == e).nonzero(as_tuple=True)
        if not len(token):
            continue
        rows = batch.x[token]
        g = _gate_up(rows, weights, e, recipe)
        users = []
        if adapters is not None and batch.adapter_ids is not None:
            users = list(_users(batch.adapter_ids[token], adapters))
        for slot, r, mine in users:
            assert adapters is not None
            for half in range(2):
                v = products(rows[mine], _of(adapters.a13, slot, e)[half, :r])
                g[mine, half * inter : (half + 1) * inter] += v @ _of(adapters.b13, slot, e)[half, :, :r].float().T
        h = (torch.nn.functional.silu(g[:, :inter]) * g[:, inter:]).bfloat16()
        o = as_multiplied(h, h_group) @ dense(weights.w2[e], _at(weights.w2_scale, e)).T
        for slot, r, mine in users:
            assert adapters is not None
            v = products(h[mine], _of(adapters.a2, slot, e)[0, :r])
            o[mine] += v @ _of(adapters.b2, slot, e)[0, :, :r].float().T
        y.index_add_(0, token, o * batch.topk_weights[token, k][:, None])
    return y


def _at(scale: torch.Tensor | None, e: int) -> torch.Tensor | None:
    return None if scale is None else scale[e]


def _of(stack: torch.Tensor, slot: int, e: int) -> torch.Tensor:
    """An adapter's matrices of one expert; matrices shared over the experts are stored once."""
    return stack[slot, e if stack.shape[1] > 1 else 0]


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 distance of all entries; NaN where either holds one."""
    return float((got.float() - want.float()).norm() / want.float().norm())
