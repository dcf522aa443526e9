# SPDX-License-Identifier: Apache-2.0
"""What the Hopper entry points refuse, and which chain they choose; nothing is launched, so no GPU is needed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from isomoe.cuda_impl.hopper import hopper_fused_moe, prepare_adapters, prepare_weights  # noqa: E402
from isomoe.cuda_impl.hopper.regime import DECODE16, DECODE32, ONE_TOKEN, PREFILL, Regime, choose  # noqa: E402

E, I, H, K = 4, 256, 384, 2
F8, BF = torch.float8_e4m3fn, torch.bfloat16


def _weights(**changes):
    args = {
        "scheme": "channel",
        "w13": torch.zeros(E, 2 * I, H).to(F8),
        "w2": torch.zeros(E, H, I).to(F8),
        "w13_scale": torch.ones(E, 2 * I),
        "w2_scale": torch.ones(E, H),
        **changes,
    }
    return prepare_weights(args.pop("scheme"), **args)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"scheme": "rows"}, ValueError, "scheme: got 'rows'"),
        ({"activation": "relu"}, ValueError, "activation: got 'relu'"),
        ({"w13": torch.zeros(E, 2 * I, H)}, TypeError, r"w13: got torch.float32"),
        ({"w2": torch.zeros(E, H, I + 16).to(F8)}, ValueError, r"w2: got \[4, 384, 272\]"),
        ({"w13_scale": torch.ones(E, I)}, ValueError, r"w13_scale: got \[4, 256\], want \[4, 512\]"),
        ({"scheme": "block"}, ValueError, r"w13_scale: got \[4, 512\], want \[4, 4, 3\]"),
        (
            {"w13": torch.zeros(E, 2 * I, 8).to(F8), "w2": torch.zeros(E, 8, I).to(F8)},
            ValueError,
            "multiples of 16",
        ),
    ],
)
def test_weights_refused(changes, error, match) -> None:
    with pytest.raises(error, match=match):
        _weights(**changes)


@pytest.mark.parametrize("halves", [1, 2])
def test_tensor_scales_are_spread_over_rows(halves: int) -> None:
    scale = torch.arange(1.0, E * halves + 1).reshape(E, halves)
    weights = _weights(scheme="tensor", w13_scale=scale if halves == 2 else scale[:, 0], w2_scale=torch.ones(E) * 3)
    assert weights.scheme == "channel"
    assert torch.equal(weights.w13_scale[:, 0], scale[:, 0])
    assert torch.equal(weights.w13_scale[:, -1], scale[:, -1])
    assert torch.equal(weights.w2_scale, torch.full((E, H), 3.0))


def _adapters(rank: int = 16, **changes):
    args = {
        "a13": torch.zeros(2, E, 2, rank, H, dtype=BF),
        "b13": torch.zeros(2, E, 2, I, rank, dtype=BF),
        "a2": torch.zeros(2, E, rank, I, dtype=BF),
        "b2": torch.zeros(2, 1, H, rank, dtype=BF),
        **changes,
    }
    return prepare_adapters(**args)


def test_adapters_accept_a_unit_half_axis() -> None:
    adapters = _adapters(a2=torch.zeros(2, E, 1, 16, I, dtype=BF), b2=torch.zeros(2, E, 1, H, 16, dtype=BF))
    assert adapters.a2.shape == (2, E, 16, I)
    assert adapters.b2.shape == (2, E, H, 16)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"rank": 24}, ValueError, "rank 24"),
        ({"a2": torch.zeros(2, E, 16, I)}, TypeError, "a2: got torch.float32"),
        ({"b2": torch.zeros(2, 3, H, 16, dtype=BF)}, ValueError, r"b2: got \[2, 3, 384, 16\]"),
    ],
)
def test_adapters_refused(changes, error, match) -> None:
    with pytest.raises(error, match=match):
        _adapters(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"x": torch.zeros(5, H)}, TypeError, "x: got torch.float32"),
        ({"x": torch.zeros(5, H + 1, dtype=BF)}, ValueError, r"x: got shape \[5, 385\]"),
        ({"topk_ids": torch.zeros(4, K, dtype=torch.int32)}, ValueError, "topk_ids"),
        ({"topk_weights": torch.zeros(5, K, dtype=BF)}, TypeError, "topk_weights"),
        ({"adapter_slots": torch.zeros(5, dtype=torch.int32)}, ValueError, "adapter_slots"),
        ({"out": torch.zeros(5, H).half()}, TypeError, "out: got torch.float16"),
        ({"recipe": "w4a16"}, ValueError, "recipe: got 'w4a16'"),
        ({"regime": ONE_TOKEN}, ValueError, "regime: got 'one_token' with 5 tokens"),
        ({"regime": PREFILL, "recipe": "w8a16"}, ValueError, "regime: got 'prefill' with recipe 'w8a16'"),
    ],
)
def test_calls_refused(changes, error, match) -> None:
    args = {
        "x": torch.zeros(5, H, dtype=BF),
        "topk_weights": torch.zeros(5, K),
        "topk_ids": torch.zeros(5, K, dtype=torch.int32),
        "weights": _weights(),
        **changes,
    }
    with pytest.raises(error, match=match):
        hopper_fused_moe(**args)


def test_no_tokens() -> None:
    empty = torch.zeros(0, H, dtype=BF)
    out = hopper_fused_moe(empty, torch.zeros(0, K), torch.zeros(0, K, dtype=torch.int32), _weights())
    assert out.shape == (0, H)


def test_regimes_follow_rows_an_expert() -> None:
    pick = lambda tokens, **kw: choose(tokens, 8, 128, **{"w8a16": False, "block": True, "lora": False, **kw})  # noqa: E731
    assert [pick(t) for t in (1, 8, 64, 256, 1024)] == [ONE_TOKEN, DECODE16, DECODE16, DECODE32, PREFILL]
    # No W8A16 chain for large batches: units of 64 rows only where registers allow.
    assert pick(4096, w8a16=True) == DECODE32
    assert pick(4096, w8a16=True, block=False) == Regime("decode", 64)
    assert pick(4096, w8a16=True, block=False, lora=True) == DECODE32


def test_regime_is_checked() -> None:
    with pytest.raises(ValueError, match="rows: got 8 for chain 'decode'"):
        Regime("decode", 8)
    with pytest.raises(ValueError, match="chain: got 'gemv'"):
        Regime("gemv")
