# SPDX-License-Identifier: Apache-2.0
"""The contract in numpy: every other executor is held against this file.

For token t, its k-th expert e with weight w and adapter a:

    g = deq(W13[e]) xq        f32,  g += B13[a,e] (A13[a,e] x)     x: the original bf16 row; before the activation
    h = bf16(act(g_gate) * g_up)
    o = deq(W2[e]) hq         f32,  o += B2[a,e] (A2[a,e] h)       h: bf16, before its quantisation
    y = bf16(sum_k w_k * o_k)       f32, in the order k = 0 .. K-1

Scales multiply after the dot product where they are constant along it, and after each run of 128 where they are not,
as the kernels do. A base row adds nothing: its numbers are those of a layer without adapters, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .activations import apply_activation
from .executors import ExecutorInfo, MoECall
from .fp8_sums import short_sums
from .numerics import (
    BF16,
    BLOCK,
    E4M3,
    bf16_round,
    cdiv,
    dequantize_rows,
    expand_groups,
    quantize_fp8,
    quantize_fp8_static,
)
from .platforms import PlatformKind
from .recipes import Group, Recipe
from .support import ExpertsSupport
from .weights import SCHEMES, LoRAAdapter

STAGES = ("x_scale", "x_code", "gmm1", "delta13", "activation", "h_scale", "h_code", "gmm2", "delta2", "combine")
Note = Callable[[str, np.ndarray], None]


def _quantize(x: np.ndarray, group: Group, static_scale: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, int]:
    """Codes, scales ``[rows, G]`` and the width one scale covers."""
    width = x.shape[-1]
    if group == "static":
        scale = np.float32(np.max(static_scale))  # type: ignore[arg-type]
        return quantize_fp8_static(x, scale), np.full((len(x), 1), scale, np.float32), width
    codes, scales = quantize_fp8(x, group)  # type: ignore[arg-type]
    return codes, scales, width if group == "token" else int(group)  # type: ignore[arg-type]


def _matmul(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """``rows @ weight.T`` rounded once to float32, for ``[R, K]`` and ``[N, K]``.

    Summed in float64: sums of FP8 products are exact there, so the result does not depend on how a BLAS orders them,
    and a row gives the same bits in every batch.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return (rows.astype(np.float64) @ weight.astype(np.float64).T).astype(np.float32)


class _Matrix:
    """One expert's weight matrix ``[N, K]`` with its scale, ready to multiply rows in a recipe's precision."""

    def __init__(self, codes: np.ndarray, scale: np.ndarray | None, scheme: str, halves: int) -> None:
        self.codes, self.scale, self.scheme, self.halves = codes, scale, scheme, halves

    def _row_scale(self) -> np.ndarray:
        """Channel or tensor scale, one a row."""
        scale = np.atleast_1d(np.asarray(self.scale, np.float32))
        return np.repeat(scale, self.codes.shape[0] // scale.shape[0])

    def _block_rows(self) -> np.ndarray:
        """Block scales with the row axis expanded: ``[N, ceil(K/128)]``."""
        per_half = np.asarray(self.scale).reshape(self.halves, -1, self.scale.shape[-1])  # type: ignore[union-attr]
        rows = self.codes.shape[0] // self.halves
        return np.concatenate([np.repeat(s, BLOCK, axis=0)[:rows] for s in per_half])

    def apply(self, x: np.ndarray, group: Group, static_scale: np.ndarray | None, fp8_sums: int = 0) -> np.ndarray:
        """``deq(W) xq`` in float32, ``[R, N]``; `x` float32 holding bf16 values, `fp8_sums` as in `Recipe`."""
        if group is None:
            xq, sx, width = x, np.ones((len(x), 1), np.float32), x.shape[-1]
        else:
            xq, sx, width = _quantize(x, group, static_scale)
        if self.scheme != "block" and sx.shape[1] == 1:
            acc = _matmul(xq, self.codes) if not fp8_sums else np.zeros((len(x), len(self.codes)), np.float32)
            for i in range(0, x.shape[-1] if fp8_sums else 0, BLOCK):
                acc += short_sums(xq[:, i : i + BLOCK], self.codes[:, i : i + BLOCK], fp8_sums)
            return acc if self.scheme == "bf16" else (acc * sx) * self._row_scale()
        # Scales vary along K: a partial product per run that shares both scales, then the float32 sum.
        step = BLOCK if self.scheme == "block" else width
        out = np.zeros((len(x), self.codes.shape[0]), np.float32)
        block = self._block_rows() if self.scheme == "block" else None
        for i in range(cdiv(x.shape[-1], step)):
            run = slice(i * step, (i + 1) * step)
            part = short_sums(xq[:, run], self.codes[:, run], fp8_sums) if fp8_sums else _matmul(
                xq[:, run], self.codes[:, run]
            )
            part = part * sx[:, [i * step // width]]
            out += part * block[:, i] if block is not None else part
        return out if block is not None else out * self._row_scale()


def _lora_input(x: np.ndarray, recipe: Recipe, group: Group, static_scale: np.ndarray | None) -> np.ndarray:
    """What adapters see: the original rows, or (opt-in) the quantised rows times their scale."""
    if recipe.lora_input == "bf16":
        return x
    codes, scales, width = _quantize(x, group, static_scale)
    return codes.astype(np.float32) * expand_groups(scales, width, x.shape[-1])


def _take(a: np.ndarray, expert: int) -> np.ndarray:
    return a[0 if a.shape[0] == 1 else expert].astype(np.float32)


def guard_lora_input(x: np.ndarray, scale: np.ndarray | None, path: str) -> None:
    """Refuse FP8 codes as an adapter's input without their scale.

    From raw codes the delta is wrong by the inverse of the scale (about 50 to 500 times), and a tolerance on the whole
    output does not notice.

    Raises:
      NotImplementedError: naming the path.
    """
    if np.dtype(x.dtype) == E4M3 and scale is None:
        raise NotImplementedError(
            f"{path}: LoRA shrink received FP8 codes without their scale; pass the original bfloat16 rows, "
            "or the codes with their scales under lora_input='fp8'"
        )


def _add_delta(out: np.ndarray, x: np.ndarray, rows: dict[int, np.ndarray], delta) -> None:
    """Add each adapter's delta to its own rows in float32; other rows are not touched."""
    for adapter_id, index in rows.items():
        out[index] += delta(adapter_id, x[index])


def _unnoted(name: str, value: np.ndarray) -> None:
    """Keeps nothing; stands in where no stages are asked for."""


def _expert_rows(
    call: MoECall, expert: int, x: np.ndarray, rows: dict[int, np.ndarray], note: Note = _unnoted
) -> np.ndarray:
    """One expert's float32 results ``[R, H]`` for float32 rows `x` ``[R, H]``; `note` is shown each stage."""
    weights, recipe, config = call.weights, call.recipe, call.config
    adapters = {a.adapter_id: a for a in call.adapters}
    halves = 2 if config.is_act_and_mul else 1
    s13 = None if weights.w13_scale is None else weights.w13_scale[expert]
    s2 = None if weights.w2_scale is None else weights.w2_scale[expert]
    g = _Matrix(weights.w13[expert], s13, weights.scheme, halves).apply(
        x, recipe.x_group, weights.w13_input_scale, recipe.fp8_sums
    )
    note("gmm1", g)
    if weights.w13_bias is not None:
        g += weights.w13_bias[expert].astype(np.float32)

    def expand(part: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        products = _matmul(part, a)
        return _matmul(bf16_round(products) if recipe.lora_products == "bf16" else products, b)

    def up_delta(adapter_id: int, part: np.ndarray) -> np.ndarray:
        adapter: LoRAAdapter = adapters[adapter_id]
        a, b = _take(adapter.a13, expert), adapter.b13[expert].astype(np.float32)
        return np.concatenate([expand(part, a[i], b[i]) for i in range(halves)], axis=1)

    if rows:
        _add_delta(g, _lora_input(x, recipe, recipe.x_group, weights.w13_input_scale), rows, up_delta)
    note("delta13", g)
    gate, up = (g[:, : config.intermediate_size], g[:, config.intermediate_size :]) if halves == 2 else (g, None)
    h = apply_activation(config.activation, gate, up).astype(BF16).astype(np.float32)
    note("activation", h)
    o = _Matrix(weights.w2[expert], s2, weights.scheme, 1).apply(h, recipe.h_group, weights.w2_input_scale)
    note("gmm2", o)
    if weights.w2_bias is not None:
        o += weights.w2_bias[expert].astype(np.float32)

    def down_delta(adapter_id: int, part: np.ndarray) -> np.ndarray:
        adapter: LoRAAdapter = adapters[adapter_id]
        a, b = adapter.a2[expert].astype(np.float32), _take(adapter.b2, expert)
        return expand(part, a, b)

    if rows:
        _add_delta(o, _lora_input(h, recipe, recipe.h_group, weights.w2_input_scale), rows, down_delta)
    note("delta2", o)
    if recipe.wire_unit == "row":
        return _to_wire(o, recipe.wire)
    return o if recipe.wire == "f32" else _to_wire(o, "bf16")


def _to_wire(o: np.ndarray, wire: str) -> np.ndarray:
    """The rounding of a row that travels."""
    if wire == "bf16":
        return o.astype(BF16).astype(np.float32)
    if wire == "fp8":
        return dequantize_rows(*quantize_fp8(o, "token"), "token")
    return o


def _pairs_of(call: MoECall, expert: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and k positions that visit local expert `expert`, in token order."""
    ids = call.topk_ids
    if call.expert_map is not None:
        ids = np.where(ids < 0, -1, call.expert_map[np.maximum(ids, 0)])
    tokens, ks = np.nonzero(ids == expert)
    return tokens, ks


def _adapter_rows(call: MoECall, tokens: np.ndarray) -> dict[int, np.ndarray]:
    if call.adapter_ids is None:
        return {}
    ids = call.adapter_ids[tokens]
    return {int(a): np.flatnonzero(ids == a) for a in np.unique(ids) if a >= 0}


def reference_moe(call: MoECall, found: dict[str, np.ndarray] | None = None) -> np.ndarray:
    """The declared recipe, float32 ``[T, H]`` before the final rounding to bfloat16; `found` gathers `stages`."""
    x = call.x.astype(np.float32)
    if call.recipe.x_wire == "fp8":
        if call.uses_adapters:
            raise ValueError("recipe: got x_wire='fp8' with adapters, which need the original rows")
        x = bf16_round(dequantize_rows(*quantize_fp8(x, "token"), "token"))
    tokens_n, k_n = call.topk_ids.shape
    results = np.zeros((tokens_n, k_n, call.config.hidden_dim), np.float32)
    device = np.full((tokens_n, k_n), -1)
    for expert in range(call.weights.num_experts):
        tokens, ks = _pairs_of(call, expert)
        if len(tokens):
            note = _unnoted if found is None else _gather(found, call.topk_ids.shape, tokens, ks)
            results[tokens, ks] = _expert_rows(call, expert, x[tokens], _adapter_rows(call, tokens), note)
            device[tokens, ks] = expert // cdiv(call.weights.num_experts, call.ep_size)
    with np.errstate(invalid="ignore", over="ignore"):
        if call.recipe.wire_unit == "row":
            return _weighted_sum(call, results, device >= 0)
        y = np.zeros((tokens_n, call.config.hidden_dim), np.float32)
        for rank in range(call.ep_size):
            here = device == rank
            partial = _to_wire(_weighted_sum(call, results, here), call.recipe.wire)
            y += np.where(here.any(axis=1)[:, None], partial, np.float32(0))
    return y


def _weighted_sum(call: MoECall, results: np.ndarray, use: np.ndarray) -> np.ndarray:
    """float32 ``[T, H]``: the rows of the pairs in `use` times their router weights, k ascending."""
    y = np.zeros((results.shape[0], results.shape[2]), np.float32)
    for k in range(results.shape[1]):
        y += np.where(use[:, k, None], call.topk_weights[:, k, None] * results[:, k], np.float32(0))
    return y


def _gather(found: dict[str, np.ndarray], shape: tuple[int, ...], tokens: np.ndarray, ks: np.ndarray) -> Note:
    """A `Note` that files an expert's rows under their token and k."""

    def note(name: str, value: np.ndarray) -> None:
        found.setdefault(name, np.zeros((*shape, value.shape[1]), value.dtype))[tokens, ks] = value

    return note


def stages(call: MoECall) -> dict[str, np.ndarray]:
    """What the declared recipe holds between its steps, in their order; rows of skipped pairs are zero.

    ``x_scale`` float32 ``[T, G]`` and ``x_code`` float8 ``[T, H]`` (w8a8); ``gmm1`` float32 ``[T, K, 2I]`` and
    ``delta13`` the same with bias and adapters; ``activation`` float32 ``[T, K, I]`` of bfloat16 values; ``h_scale``
    ``[T, K, G]`` and ``h_code`` (w8a8); ``gmm2`` float32 ``[T, K, H]``, ``delta2`` with bias and adapters;
    ``combine`` float32 ``[T, H]``.
    """
    found: dict[str, np.ndarray] = {}
    recipe, weights = call.recipe, call.weights
    with np.errstate(invalid="ignore", over="ignore"):
        y = reference_moe(call, found)
        if recipe.x_group is not None:
            x = call.x.astype(np.float32)
            found["x_code"], found["x_scale"], _ = _quantize(x, recipe.x_group, weights.w13_input_scale)
        if recipe.h_group is not None and "activation" in found:
            h = found["activation"]
            flat, shape = h.reshape(-1, h.shape[-1]), h.shape[:2]
            codes, scales, _ = _quantize(flat, recipe.h_group, weights.w2_input_scale)
            found["h_code"], found["h_scale"] = codes.reshape(h.shape), scales.reshape(*shape, -1)
    found["combine"] = y
    return {name: found[name] for name in STAGES if name in found}


def truth(call: MoECall) -> np.ndarray:
    """Float64 on dequantised weights and unquantised activations, ``[T, H]``: what every recipe approximates."""
    config, halves = call.config, 2 if call.config.is_act_and_mul else 1
    adapters = {a.adapter_id: a for a in call.adapters}
    y = np.zeros((call.num_tokens, config.hidden_dim), np.float64)
    x = call.x.astype(np.float64)
    for expert in range(call.weights.num_experts):
        tokens, ks = _pairs_of(call, expert)
        if not len(tokens):
            continue
        w13, w2 = call.weights.dequantize(expert, np.float64)
        rows = _adapter_rows(call, tokens)
        g = x[tokens] @ w13.T
        if call.weights.w13_bias is not None:
            g += call.weights.w13_bias[expert].astype(np.float64)
        for adapter_id, index in rows.items():
            adapter = adapters[adapter_id]
            a = adapter.a13[0 if adapter.a13.shape[0] == 1 else expert].astype(np.float64)
            b = adapter.b13[expert].astype(np.float64)
            part = x[tokens][index]
            g[index] += np.concatenate([(part @ a[i].T) @ b[i].T for i in range(halves)], axis=1)
        gate, up = (g[:, : config.intermediate_size], g[:, config.intermediate_size :]) if halves == 2 else (g, None)
        h = apply_activation(config.activation, gate, up)
        o = h @ w2.T
        if call.weights.w2_bias is not None:
            o += call.weights.w2_bias[expert].astype(np.float64)
        for adapter_id, index in rows.items():
            adapter = adapters[adapter_id]
            b = adapter.b2[0 if adapter.b2.shape[0] == 1 else expert].astype(np.float64)
            o[index] += (h[index] @ adapter.a2[expert].astype(np.float64).T) @ b.T
        np.add.at(y, tokens, call.topk_weights[tokens, ks].astype(np.float64)[:, None] * o)
    return y


class ReferenceExecutor:
    """`run_moe("reference", ...)`: any recipe, any scheme, numpy, always available."""

    name = "reference"
    support = ExpertsSupport(
        platforms=tuple(PlatformKind), schemes=SCHEMES, recipes=("w8a8", "w8a16", "bf16", "float64"), lora=True
    )

    @classmethod
    def info(cls) -> ExecutorInfo:
        return ExecutorInfo(cls.name, "native", "numpy on the host", cls.support.recipes, "numpy")

    @classmethod
    def recipe(cls, call: MoECall) -> Recipe:
        return call.recipe

    @classmethod
    def run(cls, call: MoECall) -> np.ndarray:
        """bfloat16 ``[T, H]``; float64 for the recipe "float64". `ep_size` only says which experts share a device's sum
        where ``recipe.wire_unit`` is ``"device"``."""
        if call.recipe.name == "float64":
            return truth(call)
        with np.errstate(invalid="ignore", over="ignore"):
            return reference_moe(call).astype(BF16)
