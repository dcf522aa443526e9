# SPDX-License-Identifier: Apache-2.0
"""The reference itself, against a loop over tokens written from the formula alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from isomoe.common.executors import make_call
from isomoe.common.metrics import bitwise_equal, rel_l2
from isomoe.common.numerics import BF16, E4M3, dequantize_rows, quantize_fp8
from isomoe.common.recipes import Recipe
from isomoe.common.reference import guard_lora_input, reference_moe, stages
from isomoe.tests.matrix import FP8_SCHEMES, LORAS, ROUTINGS, SMALL, WIDE, Case, build


def _dense(inputs, expert: int) -> tuple[np.ndarray, np.ndarray]:
    """Dequantised weights by scalar indexing of the scales, float64."""
    w, scheme = inputs.weights, inputs.weights.scheme
    w13, w2 = w.w13[expert].astype(np.float64), w.w2[expert].astype(np.float64)
    inter = w.intermediate_size
    for out, scale, halves in ((w13, w.w13_scale, 2), (w2, w.w2_scale, 1)):
        if scheme == "bf16":
            continue
        for n in range(out.shape[0]):
            if scheme == "channel":
                out[n] *= float(scale[expert, n])
            elif scheme == "tensor":
                out[n] *= float(scale[expert] if scale.ndim == 1 else scale[expert, n // inter])
            else:
                row = n // 128 if halves == 1 else (n // inter) * math.ceil(inter / 128) + (n % inter) // 128
                for k in range(out.shape[1]):
                    out[n, k] *= float(scale[expert, row, k // 128])
    return w13, w2


def _act(name: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if name == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if name == "gelu":
        return np.array([0.5 * g * (1 + math.erf(g / math.sqrt(2))) for g in gate]) * up
    if name == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def _by_hand(inputs) -> np.ndarray:
    case, config = inputs.case, inputs.case.config
    adapters = {a.adapter_id: a for a in inputs.adapters}
    dense = {e: _dense(inputs, e) for e in range(config.num_experts)}
    y = np.zeros((case.tokens, config.hidden_dim))
    for t in range(case.tokens):
        x = inputs.x[t].astype(np.float64)
        adapter = None if inputs.adapter_ids is None else adapters.get(int(inputs.adapter_ids[t]))
        for k in range(config.experts_per_token):
            e = int(inputs.topk_ids[t, k])
            if not 0 <= e < config.num_experts:
                continue
            w13, w2 = dense[e]
            g = w13 @ x
            if case.bias:
                g = g + inputs.weights.w13_bias[e]
            gate, up = g[: config.intermediate_size].copy(), g[config.intermediate_size :].copy()
            if adapter is not None:
                a13 = adapter.a13[e if len(adapter.a13) > 1 else 0].astype(np.float64)
                gate += adapter.b13[e, 0].astype(np.float64) @ (a13[0] @ x)
                up += adapter.b13[e, 1].astype(np.float64) @ (a13[1] @ x)
            h = _act(case.activation, gate, up)
            o = w2 @ h
            if case.bias:
                o = o + inputs.weights.w2_bias[e]
            if adapter is not None:
                b2 = adapter.b2[e if len(adapter.b2) > 1 else 0].astype(np.float64)
                o = o + b2 @ (adapter.a2[e].astype(np.float64) @ h)
            y[t] += float(inputs.topk_weights[t, k]) * o
    return y


CASES = [Case(s, "w8a16", "mixed", tokens=6) for s in FP8_SCHEMES] + [
    Case("bf16", "bf16", "shared_outer", tokens=6),
    Case("channel", "w8a16", "one", routing="skipped", bias=True, tokens=6),
    *(Case("channel", "w8a16", activation=a, tokens=4) for a in ("gelu", "gelu_tanh", "swigluoai")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_truth_equals_the_loop(case: Case) -> None:
    inputs = build(case)
    assert rel_l2(inputs.run("reference", recipe="float64"), _by_hand(inputs)) < 1e-12


@pytest.mark.parametrize("case", CASES, ids=str)
def test_w8a16_differs_from_truth_by_bf16_roundings_only(case: Case) -> None:
    inputs = build(case)
    assert rel_l2(inputs.run("reference"), inputs.run("reference", recipe="float64")) < 3e-3


@pytest.mark.parametrize("scheme", FP8_SCHEMES)
def test_inputs_on_the_grid_lose_nothing_in_the_first_product(scheme: str) -> None:
    """With x on the FP8 grid, w8a8 differs from w8a16 only by the quantisation of h."""
    inputs = build(Case(scheme, "w8a8", exact=True))
    group = 128 if scheme == "block" else "token"
    codes_only = Recipe("w8a8", group, group)
    error = rel_l2(inputs.run("reference", recipe=codes_only), inputs.run("reference", recipe="w8a16"))
    assert 1e-3 < error < 3e-2


def test_a_narrower_h_group_is_a_recipe_of_its_own() -> None:
    inputs = build(replace(Case("channel", "w8a8"), shape=replace(SMALL, intermediate_size=256)))
    truth = inputs.run("reference", recipe="float64")
    tiled = inputs.run("reference", recipe=Recipe("w8a8", "token", 128))
    plain = inputs.run("reference", recipe=Recipe("w8a8", "token", "token"))
    assert not bitwise_equal(tiled, plain)
    assert rel_l2(tiled, truth) < 1.02 * rel_l2(plain, truth)


@pytest.mark.parametrize("lora", [x for x in LORAS if x != "none"])
def test_adapters_see_unquantised_rows(lora: str) -> None:
    """vllm#42007: from raw FP8 codes the delta is wrong by the inverse scale; from dequantised rows by 2.6e-2."""
    inputs = build(Case("channel", "w8a8", lora))
    base, truth_base = (inputs.run("reference", adapters=None, adapter_ids=None, recipe=r) for r in ("w8a8", "float64"))
    got = inputs.run("reference").astype(np.float64) - base.astype(np.float64)
    if lora in ("idle", "zero_b"):
        assert not got.any()
        return
    # The delta's own error must stay near the base recipe's, which both runs share, not grow by the inverse scale.
    want = inputs.run("reference", recipe="float64") - truth_base
    assert rel_l2(got, want) < 6e-2
    cheap = inputs.run("reference", recipe=Recipe("w8a8", "token", "token", lora_input="fp8"))
    assert not bitwise_equal(cheap, inputs.run("reference"))


def test_codes_without_scale_are_refused_as_lora_input() -> None:
    codes = np.zeros((2, 4), E4M3)
    with pytest.raises(NotImplementedError, match="w13 shrink: LoRA shrink received FP8 codes without their scale"):
        guard_lora_input(codes, None, "w13 shrink")
    guard_lora_input(codes, np.ones((2, 1), np.float32), "w13 shrink")
    guard_lora_input(np.zeros((2, 4), BF16), None, "w13 shrink")


@pytest.mark.parametrize("routing", ROUTINGS)
def test_skipped_ids_contribute_nothing(routing: str) -> None:
    inputs = build(Case("channel", "w8a8", routing=routing, shape=WIDE, tokens=5))
    ids = inputs.topk_ids.copy()
    ids[:, 0] = -1
    weights = inputs.topk_weights.copy()
    weights[:, 0] = 0
    assert bitwise_equal(inputs.run("reference", topk_ids=ids), inputs.run("reference", topk_weights=weights))


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_wire_rounds_result_rows(wire: str) -> None:
    inputs = build(Case("channel", "w8a16"))
    got = inputs.run("reference", recipe=Recipe("w8a16", wire=wire))
    bound = 4e-3 if wire == "bf16" else 3e-2
    assert 0 < rel_l2(got, inputs.run("reference")) < bound


def _call(inputs, recipe: Recipe):
    i = inputs
    return make_call(
        i.x, i.topk_weights, i.topk_ids, i.weights, config=i.case.config, adapters=i.adapters or None,
        adapter_ids=i.adapter_ids, ep_size=i.case.ep, recipe=recipe,
    )


@pytest.mark.parametrize("wire", ["f32", "bf16", "fp8"])
@pytest.mark.parametrize("ep", [1, 3])
def test_one_row_travels_a_device(wire: str, ep: int) -> None:
    """Experts 0 to 2, 3 to 5 and 6 to 7 of eight share a device; skipped ids belong to none."""
    shape = replace(SMALL, experts_per_token=4)
    inputs = build(Case("channel", "w8a8", "mixed", routing="skipped", ep=ep, shape=shape))
    call = _call(inputs, Recipe("w8a8", "token", "token", wire, wire_unit="device"))
    rows = stages(replace(call, recipe=Recipe("w8a8", "token", "token")))["delta2"]
    if wire != "f32":
        rows = rows.astype(BF16).astype(np.float32)
    want = np.zeros_like(rows[:, 0])
    for t, ids in enumerate(inputs.topk_ids):
        for device in range(ep):
            ks = [k for k, e in enumerate(ids) if 0 <= e < 8 and e // (8 if ep == 1 else 3) == device]
            if not ks:
                continue
            partial = np.zeros_like(want[t])
            for k in ks:
                partial += inputs.topk_weights[t, k] * rows[t, k]
            if wire == "bf16":
                partial = partial.astype(BF16).astype(np.float32)
            if wire == "fp8":
                partial = dequantize_rows(*quantize_fp8(partial[None], "token"), "token")[0]
            want[t] += partial
    assert rel_l2(reference_moe(call), want) <= 1e-6


def test_fp8_rows_are_rounded_back_for_w8a16() -> None:
    inputs = build(Case("channel", "w8a16"))
    codes = quantize_fp8(inputs.x.astype(np.float32), "token")
    rounded = replace(inputs, x=dequantize_rows(*codes, "token").astype(BF16))
    got = reference_moe(_call(inputs, Recipe("w8a16", x_wire="fp8")))
    assert bitwise_equal(got, reference_moe(_call(rounded, Recipe("w8a16"))))
    assert rel_l2(got, reference_moe(_call(inputs, Recipe("w8a16")))) > 1e-2
    with pytest.raises(ValueError, match="x_wire='fp8' with adapters, which need the original rows"):
        reference_moe(_call(build(Case("channel", "w8a16", "one")), Recipe("w8a16", x_wire="fp8")))
    for name in ("w8a8", "bf16"):
        with pytest.raises(ValueError, match=f"x_wire: got 'fp8' with recipe '{name}', want it only with w8a16"):
            Recipe(name, *(("token", "token") if name == "w8a8" else ()), x_wire="fp8")
