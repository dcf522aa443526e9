# SPDX-License-Identifier: Apache-2.0
"""Routing against a plain per-row loop, and on the inputs that crashed others."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from isomoe.common.config import FusedMoEConfig
from isomoe.common.numerics import BF16
from isomoe.common.routing import route

CONFIG = FusedMoEConfig(16, 4, 64, 64)
GROUPED = replace(CONFIG, scoring_func="sigmoid", num_expert_group=4, topk_group=2, routed_scaling_factor=2.5)


def _by_hand(logits: np.ndarray, config: FusedMoEConfig, bias: np.ndarray | None) -> tuple[list[float], list[int]]:
    """One row, in Python floats."""
    if config.scoring_func == "softmax":
        top = max(logits)
        exp = [math.exp(v - top) for v in logits]
        scores = [v / sum(exp) for v in exp]
    else:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    choice = [s + (0 if bias is None else b) for s, b in zip(scores, bias if bias is not None else scores)]
    allowed = set(range(config.num_experts))
    if config.num_expert_group:
        size = config.num_experts // config.num_expert_group
        groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(config.num_expert_group)]
        worth = [sum(g[:2]) if bias is not None else g[0] for g in groups]
        kept = sorted(range(len(groups)), key=lambda g: (-worth[g], g))[: config.topk_group]
        allowed = {e for g in kept for e in range(g * size, (g + 1) * size)}
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[: config.experts_per_token]
    weights = [scores[e] for e in ids]
    if config.renormalize:
        weights = [w / sum(weights) for w in weights]
    return [w * config.routed_scaling_factor for w in weights], ids


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    "config", [CONFIG, replace(CONFIG, scoring_func="sigmoid"), GROUPED], ids=["soft", "sig", "group"]
)
def test_route_equals_the_loop(config: FusedMoEConfig, renormalize: bool, with_bias: bool) -> None:
    rng = np.random.default_rng(0)
    logits = (2 * rng.standard_normal((200, 16))).astype(np.float32)
    bias = (0.3 * rng.standard_normal(16)).astype(np.float32) if with_bias else None
    config = replace(config, renormalize=renormalize)
    weights, ids = route(logits, config, correction_bias=bias)
    assert weights.dtype == np.float32 and ids.dtype == np.int32
    for t in range(len(logits)):
        want_weights, want_ids = _by_hand(logits[t].tolist(), config, bias)
        assert ids[t].tolist() == want_ids
        np.testing.assert_allclose(weights[t], want_weights, rtol=2e-6)


def test_ties_go_to_the_lower_index() -> None:
    """jax#34620: an exact tie must not depend on the top-k algorithm."""
    logits = np.zeros((3, 16), np.float32)
    logits[1, [3, 9, 12]] = 1.0
    _, ids = route(logits, CONFIG)
    assert ids[0].tolist() == [0, 1, 2, 3] and ids[1].tolist() == [3, 9, 12, 0]


@pytest.mark.parametrize("config", [CONFIG, GROUPED], ids=["softmax", "grouped"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poisoned_logits_give_distinct_ids_in_range(config: FusedMoEConfig, poison: float) -> None:
    """sglang#30079: an all-NaN gate row produced expert E+1 and an illegal access."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, 16)).astype(np.float32)
    clean_weights, clean_ids = route(logits, config)
    logits[0] = poison
    logits[1, 5] = poison
    weights, ids = route(logits, config)
    for row in ids:
        assert len(set(row.tolist())) == 4 and row.min() >= 0 and row.max() < 16
    assert (ids[2:] == clean_ids[2:]).all() and (weights[2:] == clean_weights[2:]).all()
    if np.isnan(poison):
        assert np.isnan(weights[:2]).all()
        assert 5 not in ids[1], "a NaN logit won against numbers"


def test_bf16_logits_are_read_as_float32() -> None:
    logits = np.random.default_rng(2).standard_normal((8, 16)).astype(BF16)
    for got, want in zip(route(logits, CONFIG), route(logits.astype(np.float32), CONFIG)):
        assert (got == want).all()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"router_logits: got shape \[2, 8\], want \[any, 16\]"):
        route(np.zeros((2, 8), np.float32), CONFIG)
    with pytest.raises(TypeError, match="router_logits: got dtype int32"):
        route(np.zeros((2, 16), np.int32), CONFIG)
    with pytest.raises(ValueError, match=r"correction_bias: got shape \[4\], want \[16\]"):
        route(np.zeros((2, 16), np.float32), CONFIG, correction_bias=np.zeros(4, np.float32))
    with pytest.raises(TypeError, match="config: got NoneType, want FusedMoEConfig"):
        route(np.zeros((2, 16), np.float32), None)  # type: ignore[arg-type]
