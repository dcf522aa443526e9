# SPDX-License-Identifier: Apache-2.0
"""The Hopper layer on a Hopper GPU, against its declared recipe and the contract's bitwise rules.

Reference, inputs and poisoning are those of the benchmark, so that what is timed is what is checked.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from isomoe.common.fp8_sums import INTERVALS, short_sums
from isomoe.common.numerics import E4M3
from isomoe.common.tolerances import TO_RECIPE
from isomoe.cuda_impl.bench import data, regimes
from isomoe.cuda_impl.bench.reference import device_sums, layer_f32, rel_l2
from isomoe.cuda_impl.hopper import slots_of
from isomoe.cuda_impl.moe import declared_recipe, fused_moe

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0"),
]

@pytest.fixture(scope="module")
def layers() -> regimes.Layers:
    torch.backends.cuda.matmul.allow_tf32 = False
    return regimes.Layers("cuda")


def _batch(tokens: int, index: int, count: int, layer: data.Layer = regimes.ODD) -> data.Batch:
    return data.random_batch(layer, tokens, index, "cuda", adapters=count)


def _call(batch: data.Batch, weights, adapters=None, recipe: str = "w8a8") -> torch.Tensor:
    return fused_moe(
        batch.x, batch.topk_weights, batch.topk_ids, weights, recipe=recipe, adapters=adapters,
        adapter_ids=None if adapters is None else batch.adapter_ids, expert_map=batch.expert_map,
    )  # fmt: skip


def _error(batch: data.Batch, weights, adapters=None, recipe: str = "w8a8") -> float:
    declared = declared_recipe(
        recipe, weights, batch.tokens, batch.topk_ids.shape[1],
        weights.num_experts if batch.expert_map is None else len(batch.expert_map),
        lora_rank=0 if adapters is None else adapters.max_rank,
    )  # fmt: skip
    want = layer_f32(batch, weights, declared, adapters)
    return rel_l2(_call(batch, weights, adapters, recipe), want)


@pytest.mark.parametrize("case", regimes.hopper_cases(), ids=str)
def test_every_regime(layers: regimes.Layers, case: regimes.RegimeCase) -> None:
    ok, figures = regimes.check(case, layers)
    assert ok, figures


@pytest.mark.parametrize("tokens", [1, 3, 40, 300, 900])
@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
@pytest.mark.parametrize("rank", [16, 32, 64, 128])
def test_ranks(layers: regimes.Layers, rank: int, recipe: str, tokens: int) -> None:
    adapters = layers.adapters(regimes.ODD, data.LoraSetting(2, rank))
    weights = layers.weights(regimes.ODD, "channel")
    assert _error(_batch(tokens, 0, 2), weights, adapters, recipe) < TO_RECIPE.bound


@pytest.mark.parametrize("tokens", [40, 900])
def test_many_slots(tokens: int) -> None:
    """More (expert, slot) bins than one program scans at once."""
    layer = dataclasses.replace(regimes.ODD, name="many", experts=60, local=60)
    weights = data.random_weights(layer, "block", "cuda")
    adapters = data.random_adapters(layer, data.LoraSetting(120, 16), "cuda")
    assert _error(_batch(tokens, 0, 120, layer), weights, adapters) < TO_RECIPE.bound


@pytest.mark.parametrize("tokens", [40, 900])
@pytest.mark.parametrize("scheme", ["block", "channel"])
def test_rows_are_computed_alone(layers: regimes.Layers, scheme: str, tokens: int) -> None:
    """Permuting tokens permutes rows, and a NaN row stays where it is, bit for bit."""
    weights = layers.weights(regimes.ODD, scheme)
    adapters = layers.adapters(regimes.ODD, regimes.MIXED)
    batch = _batch(tokens, 0, 3)
    out = _call(batch, weights, adapters)
    order = torch.randperm(tokens, device="cuda")
    x = batch.x.clone()
    x[7] = float("nan")
    moved = dataclasses.replace(
        batch, x=x[order], topk_weights=batch.topk_weights[order], topk_ids=batch.topk_ids[order],
        adapter_ids=batch.adapter_ids[order].contiguous(),
    )  # fmt: skip
    again = _call(moved, weights, adapters)
    keep = order != 7
    assert torch.equal(again[keep], out[order][keep])
    assert again[~keep].isnan().all()


@pytest.mark.parametrize("tokens", [40, 900])
def test_zero_weight_scales(tokens: int) -> None:
    """A zero channel scale silences the weight row, not the adapter's addition to it."""
    weights = data.random_weights(regimes.ODD, "channel", "cuda")
    assert weights.w2_scale is not None
    weights.w2_scale[:, ::3] = 0
    adapters = data.random_adapters(regimes.ODD, data.LoraSetting(2, 16), "cuda")
    assert _error(_batch(tokens, 0, 2), weights, adapters) < TO_RECIPE.bound


@pytest.mark.parametrize("tokens", [1, 40, 900])
def test_graph_replay_follows_its_inputs(layers: regimes.Layers, tokens: int) -> None:
    weights = layers.weights(regimes.ODD, "block")
    adapters = layers.adapters(regimes.ODD, regimes.MIXED)
    first, second = (_batch(tokens, n, 3) for n in (0, 1))
    names = ("x", "topk_weights", "topk_ids", "adapter_ids")
    live = dataclasses.replace(first, **{name: getattr(first, name).clone() for name in names})
    _call(live, weights, adapters)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _call(live, weights, adapters)
    for batch in (second, first):
        for name in names:
            getattr(live, name).copy_(getattr(batch, name))
        graph.replay()
        assert torch.equal(out, _call(batch, weights, adapters))


def test_slots_of_tokens() -> None:
    ids = np.random.default_rng(0).choice([-1, 3, 7, 99, 5], 300).astype(np.int32)
    slots = np.array([7, -1, 3, 5], np.int32)
    want = [-1 if i < 0 or i not in slots else slots.tolist().index(i) for i in ids]
    assert slots_of(torch.from_numpy(ids).cuda(), torch.from_numpy(slots).cuda()).tolist() == want


@pytest.mark.parametrize("every", INTERVALS)
@pytest.mark.parametrize("columns", [32, 80, 208, 512])
def test_the_host_sums_fp8_products_as_the_device_does(columns: int, every: int) -> None:
    gen = torch.Generator("cuda").manual_seed(columns + every)
    a, b = (
        (torch.randn(n, columns, generator=gen, device="cuda") * 40).clamp(-448, 448).to(torch.float8_e4m3fn)
        for n in (70, 130)
    )
    ones = torch.ones(130, 1, device="cuda")
    got = device_sums(a, ones[:70], b, ones[:, 0], every).cpu().numpy()
    a, b = (t.cpu().view(torch.uint8).numpy().view(E4M3) for t in (a, b))
    want = np.zeros((70, 130), np.float32)
    for i in range(0, columns, 128):
        want += short_sums(a[:, i : i + 128], b[:, i : i + 128], every)
    if every == 32:  # four parts in another order
        assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()
    else:
        assert np.array_equal(got, want)
