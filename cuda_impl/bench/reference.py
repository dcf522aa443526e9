# SPDX-License-Identifier: Apache-2.0
"""A layer by its recipe in float32 torch products, expert by expert: what every measured path is held against."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ...common.recipes import Group, Recipe
from ..prepare import AdapterSlots, PreparedWeights
from .data import Batch

_INV_MAX = float(np.float32(1 / 448))


def as_multiplied(rows: torch.Tensor, group: Group) -> torch.Tensor:
    """Float32 rows as the recipe multiplies them: quantised to e4m3 by `group` and back, or as they are (None)."""
    v = rows.float()
    if group is None:
        return v
    if not isinstance(group, int) and group != "token":
        raise ValueError(f"group: got {group!r}, want None, 'token' or a width")
    width = group if isinstance(group, int) else v.shape[1]
    g = torch.nn.functional.pad(v, (0, -v.shape[1] % width)).unflatten(1, (-1, width))
    scale = g.abs().amax(-1, keepdim=True).clamp(min=1e-10) * torch.tensor(_INV_MAX, device=v.device)
    codes = (g * (1.0 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(1)[:, : v.shape[1]]


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
    x_group, h_group = (recipe.x_group, recipe.h_group) if recipe.name == "w8a8" else (None, None)
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
        g = as_multiplied(rows, x_group) @ dense(weights.w13[e], _at(weights.w13_scale, e), 2).T
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
