# SPDX-License-Identifier: Apache-2.0
"""Laws of the layer on random small layers: hypothesis on the reference, a few fixed draws on interpreted kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isomoe.common import tolerances
from isomoe.common.config import FusedMoEConfig
from isomoe.common.executors import executor_class, executors, run_moe
from isomoe.common.metrics import bitwise_equal, rel_l2
from isomoe.common.numerics import BF16
from isomoe.common.placement import ExpertPlacement
from isomoe.common.recipes import Recipe
from isomoe.common.support import declared_support
from isomoe.common.weights import LoRAAdapter, MoEWeights, quantize_moe_weights

BOUNDED = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True, eq=False)
class Layer:
    """One random layer, batch and two adapters."""

    config: FusedMoEConfig
    weights: MoEWeights
    recipe: str
    x: np.ndarray
    topk_weights: np.ndarray
    topk_ids: np.ndarray
    adapters: tuple[LoRAAdapter, ...]
    adapter_ids: np.ndarray

    def run(self, executor: str = "reference", **changes: object) -> np.ndarray:
        arrays = {k: changes.pop(k, getattr(self, k)) for k in ("x", "topk_weights", "topk_ids", "weights")}
        options = {
            "config": self.config,
            "adapters": self.adapters,
            "adapter_ids": self.adapter_ids,
            "recipe": self.recipe,
            **changes,
        }
        return run_moe(executor, *arrays.values(), **options)  # type: ignore[arg-type]


def layer(
    seed: int, scheme: str, recipe: str, tokens: int = 7, ragged: bool = False, activation: str = "silu"
) -> Layer:
    rng = np.random.default_rng(seed)
    experts, k = int(rng.integers(2, 7)), int(rng.integers(1, 3))
    hidden, inter = (int(rng.integers(20, 150)), int(rng.integers(20, 150))) if ragged else (128, 128)

    def normal(*dims: int, fan: int) -> np.ndarray:
        return (rng.standard_normal(dims) / np.sqrt(fan)).astype(np.float32)

    weights = quantize_moe_weights(
        normal(experts, 2 * inter, hidden, fan=hidden), normal(experts, hidden, inter, fan=inter), scheme
    )
    adapters = tuple(
        LoRAAdapter(
            i,
            *(
                normal(*s, fan=f).astype(BF16)
                for s, f in (
                    ((experts, 2, r, hidden), hidden),
                    ((experts, 2, inter, r), r),
                    ((experts, r, inter), inter),
                    ((experts, hidden, r), r),
                )
            ),
        )
        for i, r in ((4, 3), (9, 8))
    )
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
    return Layer(
        FusedMoEConfig(experts, k, hidden, inter, activation=activation),
        weights,
        recipe,
        normal(tokens, hidden, fan=1).astype(BF16),
        rng.dirichlet(np.ones(k), tokens).astype(np.float32),
        ids,
        adapters,
        rng.choice([-1, 4, 9], tokens).astype(np.int32),
    )


KINDS = (
    ("channel", "w8a8"),
    ("block", "w8a8"),
    ("tensor", "w8a8"),
    ("channel", "w8a16"),
    ("block", "w8a16"),
    ("bf16", "bf16"),
)
LAYERS = st.builds(
    lambda seed, kind, tokens, ragged, activation: layer(seed, kind[0], kind[1], tokens, ragged, activation),
    st.integers(0, 10**6),
    st.sampled_from(KINDS),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from(("silu", "gelu_tanh", "swigluoai")),
)


def permutation(one: Layer, executor: str, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(one.x))
    moved = one.run(
        executor,
        x=one.x[order],
        topk_weights=one.topk_weights[order],
        topk_ids=one.topk_ids[order],
        adapter_ids=one.adapter_ids[order],
    )
    assert bitwise_equal(moved, one.run(executor)[order])


def relabelling(one: Layer, executor: str, seed: int) -> None:
    new = np.random.default_rng(seed).choice(1000, 2, replace=False)
    rename = {-1: -1, 4: int(new[0]), 9: int(new[1])}
    adapters = [replace(a, adapter_id=rename[a.adapter_id]) for a in reversed(one.adapters)]
    ids = np.array([rename[int(i)] for i in one.adapter_ids], np.int32)
    assert bitwise_equal(one.run(executor, adapters=adapters, adapter_ids=ids), one.run(executor))


def zero_b(one: Layer, executor: str, seed: int) -> None:
    zeros = [replace(a, b13=np.zeros_like(a.b13), b2=np.zeros_like(a.b2)) for a in one.adapters]
    assert bitwise_equal(one.run(executor, adapters=zeros), one.run(executor, adapters=None, adapter_ids=None))


def rank_shares(one: Layer, executor: str, seed: int) -> None:
    """The ranks of any placement add up to the layer."""
    rng = np.random.default_rng(seed)
    ranks, strategy = (
        int(rng.integers(1, one.config.num_experts + 1)),
        str(rng.choice(["linear", "round_robin"])),
    )
    placement, total = (
        ExpertPlacement(one.config.num_experts, ranks, strategy),
        np.zeros(one.x.shape, np.float32),
    )
    for rank in range(ranks):
        local = placement.experts_of(rank)
        total += one.run(
            executor, weights=one.weights.take(local), expert_map=placement.expert_map(rank)
        ).astype(np.float32)
    whole = one.run(executor)
    assert np.abs(total - whole.astype(np.float32)).max() <= 1e-2 * np.abs(whole.astype(np.float32)).max()


@given(LAYERS, st.integers(0, 99))
@BOUNDED
def test_permuting_tokens_permutes_rows(one: Layer, seed: int) -> None:
    permutation(one, "reference", seed)


@given(LAYERS, st.integers(0, 8))
@BOUNDED
def test_a_row_alone_is_the_row_in_the_batch(one: Layer, row: int) -> None:
    pick = [row % len(one.x)]
    alone = one.run(
        x=one.x[pick],
        topk_weights=one.topk_weights[pick],
        topk_ids=one.topk_ids[pick],
        adapter_ids=one.adapter_ids[pick],
    )
    assert bitwise_equal(alone, one.run()[pick])


@given(LAYERS, st.integers(0, 99))
@BOUNDED
def test_rank_shares_add_up(one: Layer, seed: int) -> None:
    rank_shares(one, "reference", seed)


@given(LAYERS, st.integers(0, 99))
@BOUNDED
def test_adapter_ids_are_labels(one: Layer, seed: int) -> None:
    relabelling(one, "reference", seed)


@given(LAYERS, st.integers(0, 99))
@BOUNDED
def test_zero_b_is_the_base_model(one: Layer, seed: int) -> None:
    zero_b(one, "reference", seed)


def _truth(one: Layer, adapters: object) -> np.ndarray:
    return one.run(adapters=adapters, recipe=Recipe("float64"))


@given(LAYERS, st.floats(-4, 4))
@BOUNDED
def test_the_delta_is_linear_in_b_of_w2(one: Layer, factor: float) -> None:
    """``W2 h + s * B2 A2 h``: doubling B2 doubles the delta; B13 passes through an activation and is left out."""
    only = [replace(a, b13=np.zeros_like(a.b13), b2=a.b2.astype(np.float32)) for a in one.adapters]
    scaled = [replace(a, b2=(a.b2 * np.float32(factor)).astype(np.float32)) for a in only]
    base, plain, more = (
        _truth(one, a)
        for a in (
            None if a is None else a for a in ([replace(o, b2=np.zeros_like(o.b2)) for o in only], only, scaled)
        )
    )
    want = np.float64(np.float32(factor)) * (plain - base)
    assert np.allclose(more - base, want, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(base).max())))


@given(LAYERS)
@BOUNDED
def test_experts_add_up(one: Layer) -> None:
    """The layer is the sum over k of one-expert layers, in order, in float32."""
    total = np.zeros(one.x.shape)
    for k in range(one.config.experts_per_token):
        only = np.full_like(one.topk_ids, -1)
        only[:, k] = one.topk_ids[:, k]
        total += one.run(topk_ids=only, recipe=Recipe("float64"))
    assert np.allclose(total, one.run(recipe=Recipe("float64")), rtol=1e-12, atol=1e-12)


@given(LAYERS, st.integers(-6, 6))
@BOUNDED
def test_router_weights_scale_by_powers_of_two(one: Layer, power: int) -> None:
    scaled = one.run(topk_weights=one.topk_weights * np.float32(2.0**power))
    want = (one.run().astype(np.float32) * np.float32(2.0**power)).astype(BF16)
    assert bitwise_equal(scaled, want)


@given(st.integers(0, 10**6), st.integers(-5, 5))
@BOUNDED
def test_scales_move_by_powers_of_two(seed: int, power: int) -> None:
    """Doubling x and halving w13's scale is the same layer, bit for bit: FP8 codes do not move."""
    one = layer(seed, "channel", "w8a8")
    factor = np.float32(2.0**power)
    weights = replace(one.weights, w13_scale=one.weights.w13_scale / factor)
    x = (one.x.astype(np.float32) * factor).astype(BF16)
    got = one.run(x=x, weights=weights, adapters=None, adapter_ids=None)
    assert bitwise_equal(got, one.run(adapters=None, adapter_ids=None))


@given(LAYERS)
@BOUNDED
def test_experts_may_be_renumbered(one: Layer) -> None:
    order = np.random.default_rng(0).permutation(one.config.num_experts)
    place = np.argsort(order).astype(np.int32)
    got = one.run(
        weights=one.weights.take(order),
        topk_ids=place[one.topk_ids],
        adapters=[a.take(order) for a in one.adapters],
    )
    assert bitwise_equal(got, one.run())


@given(LAYERS, st.integers(1, 8))
@BOUNDED
def test_padding_a_rank_with_zeros_changes_nothing(one: Layer, extra: int) -> None:
    def pad(a: LoRAAdapter) -> LoRAAdapter:
        def grow(v: np.ndarray, axis: int) -> np.ndarray:
            shape = list(v.shape)
            shape[axis] = extra
            return np.concatenate([v, np.zeros(shape, v.dtype)], axis=axis)

        return replace(a, a13=grow(a.a13, 2), b13=grow(a.b13, 3), a2=grow(a.a2, 1), b2=grow(a.b2, 2))

    assert bitwise_equal(one.run(adapters=[pad(a) for a in one.adapters]), one.run())


def test_the_laws_can_fail() -> None:
    """Each bitwise law is broken by a layer that breaks it: equality is not vacuous."""
    one = layer(3, "channel", "w8a8")
    assert (one.adapter_ids >= 0).any()
    assert not bitwise_equal(one.run(), one.run(adapters=None, adapter_ids=None))
    assert not bitwise_equal(one.run(), one.run(topk_ids=(one.topk_ids + 1) % one.config.num_experts))
    assert not bitwise_equal(one.run(), one.run()[::-1])


@pytest.mark.slow
@pytest.mark.parametrize("law", [permutation, relabelling, zero_b, rank_shares], ids=lambda f: f.__name__)
@pytest.mark.parametrize("executor", ["triton", "marlin", "pallas_ep"])
def test_laws_on_interpreted_kernels(executor: str, law) -> None:
    info = executors()[executor]
    if info.state == "unavailable":
        pytest.skip(info.reason)
    recipes = declared_support(executor_class(executor)).recipes
    for seed, kind in ((1, ("channel", "w8a8")), (2, ("channel", "w8a16"))):
        if kind[1] in recipes:
            law(layer(seed, *kind), executor, seed)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["triton", "marlin", "pallas_ep"])
def test_ragged_layers_on_interpreted_kernels(executor: str) -> None:
    recipe = "w8a8" if "w8a8" in declared_support(executor_class(executor)).recipes else "w8a16"
    one = layer(5, "channel", recipe, ragged=True)
    assert rel_l2(one.run(executor), one.run()) <= tolerances.TO_RECIPE.bound
