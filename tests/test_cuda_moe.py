# SPDX-License-Identifier: Apache-2.0
"""`cuda_impl.fused_moe` beyond the shared matrix: slots, poison, recipes of its own, refusals, operator contract."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from isomoe.common import tolerances
from isomoe.common.config import FusedMoEConfig
from isomoe.common.executors import executors, run_moe
from isomoe.common.metrics import bitwise_equal, rel_l2, worst_row
from isomoe.common.numerics import BF16
from isomoe.common.placement import ExpertPlacement
from isomoe.common.recipes import Recipe, default_recipe
from isomoe.common.weights import LoRAAdapter, MoEWeights, quantize_moe_weights
from isomoe.cuda_impl import AdapterSlots, fused_moe, prepare_adapters, prepare_weights
from isomoe.cuda_impl._runtime import INTERPRETED, Target
from isomoe.cuda_impl.prepare import PreparedWeights, to_torch
from isomoe.cuda_impl.quantize import quantize_rows
from isomoe.cuda_impl.route import CallShape, pad_rank, why_not_hopper
from isomoe.tests.matrix import Case, build

DEVICE = "cpu" if INTERPRETED else "cuda"
T, K, E, H, I = 11, 2, 4, 256, 192
CONFIG = FusedMoEConfig(E, K, H, I)


def _normal(rng: np.random.Generator, *shape: int, fan: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)


def _weights(scheme: str, gated: bool = True, seed: int = 0):
    rng = np.random.default_rng(seed)
    return quantize_moe_weights(_normal(rng, E, (1 + gated) * I, H, fan=H), _normal(rng, E, H, I, fan=I), scheme)


def _adapter(adapter_id: int, rank: int, *, shared: bool = False, halves: int = 2) -> LoRAAdapter:
    rng = np.random.default_rng(adapter_id)
    outer = 1 if shared else E
    return LoRAAdapter(
        adapter_id,
        _normal(rng, outer, halves, rank, H, fan=H).astype(BF16),
        _normal(rng, E, halves, I, rank, fan=rank).astype(BF16),
        _normal(rng, E, rank, I, fan=I).astype(BF16),
        _normal(rng, outer, H, rank, fan=rank).astype(BF16),
    )


def _batch(tokens: int = T):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((tokens, H)).astype(BF16)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(tokens)]).astype(np.int32)
    return x, rng.dirichlet(np.ones(K), tokens).astype(np.float32), ids


ADAPTER_IDS = np.array([7, -1, 42, 42, 7, -1, 9, 7, -1, 9, 42], np.int32)
ADAPTERS = (_adapter(7, 16), _adapter(42, 4), _adapter(9, 40))


def _call(
    weights: MoEWeights, adapters: AdapterSlots | None = None, adapter_ids: np.ndarray = ADAPTER_IDS
) -> torch.Tensor:
    """The layer by the portable kernels (a recipe with f32 result rows keeps Hopper's own out)."""
    x, tw, ids = (to_torch(a, DEVICE) for a in _batch())
    return fused_moe(
        x, tw, ids, prepare_weights(weights, DEVICE), recipe=default_recipe(None, weights.scheme), adapters=adapters,
        adapter_ids=None if adapters is None else to_torch(adapter_ids, DEVICE),
    )  # fmt: skip


def _check(executor: str, recipe: Recipe | str, weights, config=CONFIG, adapters=ADAPTERS) -> None:
    """Output and delta against the reference of the same recipe."""
    x, tw, ids = _batch()
    ids = ids.copy()
    ids[0, 1], ids[6, 0] = -1, E + 4
    options = dict(config=config, recipe=recipe, adapters=adapters, adapter_ids=ADAPTER_IDS if adapters else None)
    got, want = (run_moe(name, x, tw, ids, weights, **options) for name in (executor, "reference"))
    assert rel_l2(got, want) <= tolerances.TO_RECIPE.bound
    assert worst_row(got, want) <= tolerances.WORST_ROW.bound


@pytest.mark.parametrize("rank", [1, 17, 200])
def test_ranks_that_are_no_tile(rank: int) -> None:
    _check("triton", "w8a8", _weights("block"), adapters=(_adapter(7, rank), _adapter(42, 1), _adapter(9, rank)))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_experts_without_a_gate(activation: str) -> None:
    config = FusedMoEConfig(E, K, H, I, activation=activation, is_act_and_mul=False)
    adapters = tuple(_adapter(a.adapter_id, a.rank, halves=1) for a in ADAPTERS)
    _check("triton", "w8a8", _weights("block", gated=False), config, adapters)


def test_non_gated_w8a16_with_one_tensor_scale() -> None:
    config = FusedMoEConfig(E, K, H, I, activation="relu2", is_act_and_mul=False)
    adapters = tuple(_adapter(i, 8, halves=1) for i in (7, 42, 9))
    _check("marlin", "w8a16", _weights("tensor", gated=False), config, adapters)


def test_static_activation_scales() -> None:
    weights = replace(
        _weights("tensor"), w13_input_scale=np.array([0.01], np.float32), w2_input_scale=np.array(0.005, np.float32),
    )  # fmt: skip
    _check("triton", Recipe("w8a8", x_group="static", h_group="static"), weights)


@pytest.mark.parametrize("h_group", [128, 256, "token"])
def test_channel_weights_with_grouped_activations(h_group) -> None:
    _check("triton", Recipe("w8a8", x_group=128, h_group=h_group), _weights("channel"))


def test_block_weights_with_per_token_activations() -> None:
    _check("triton", Recipe("w8a8", x_group="token", h_group="token"), _weights("block"))


@pytest.mark.parametrize("scheme", ["block", "channel"])
def test_lora_from_quantised_rows_is_an_opt_in(scheme: str) -> None:
    """The delta is that of the declared recipe, and not that of bf16 input."""
    recipe = replace(default_recipe("w8a8", scheme), lora_input="fp8")
    weights, used = _weights(scheme), ADAPTER_IDS >= 0
    x, tw, ids = _batch()

    def delta(executor: str, recipe: Recipe | str) -> np.ndarray:
        lora = run_moe(
            executor, x, tw, ids, weights, config=CONFIG, recipe=recipe, adapters=ADAPTERS, adapter_ids=ADAPTER_IDS
        )
        base = run_moe(executor, x, tw, ids, weights, config=CONFIG, recipe="w8a8")
        return (lora.astype(np.float32) - base.astype(np.float32))[used]

    got = delta("triton", recipe)
    assert rel_l2(got, delta("reference", recipe)) <= tolerances.DELTA.bound
    assert rel_l2(got, delta("reference", "w8a8")) > 2 * tolerances.DELTA.bound


def test_bf16_result_rows() -> None:
    _check("triton", replace(default_recipe("w8a8", "block"), wire="bf16"), _weights("block"))


@pytest.mark.parametrize("scheme", ["block", "bf16"])
def test_poison_in_slots_never_leaks(scheme: str) -> None:
    """NaN beyond every rank and all over the free slots: same bits as without."""
    weights = _weights(scheme)
    clean = prepare_adapters(ADAPTERS, CONFIG, device=DEVICE, max_loras=3, max_lora_rank=40)
    dirty = prepare_adapters((), CONFIG, device=DEVICE, max_loras=5, max_lora_rank=64)
    for pool in (dirty.a13, dirty.b13, dirty.a2, dirty.b2):
        pool.fill_(float("nan"))
    for slot, adapter in zip((4, 0, 2), ADAPTERS, strict=True):
        dirty.load(slot, adapter)
        for pool, axis in ((dirty.a13, 2), (dirty.b13, 3), (dirty.a2, 2), (dirty.b2, 3)):
            pool[slot].narrow(axis, adapter.rank, dirty.max_rank - adapter.rank).fill_(float("nan"))
    assert torch.equal(_call(weights, adapters=dirty), _call(weights, adapters=clean))


def test_poison_in_fresh_buffers_never_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer the layer allocates starts as NaN (or a wild integer); skipped pairs and padding read none of it."""
    weights, recipe = _weights("block"), default_recipe("w8a8", "block")
    slots = prepare_adapters(ADAPTERS, CONFIG, device=DEVICE)
    x, tw, ids = (to_torch(a, DEVICE) for a in _batch())
    ids[2] = -1
    ids[5, 1] = E
    prepared, adapter_ids = prepare_weights(weights, DEVICE), to_torch(ADAPTER_IDS, DEVICE)
    run = lambda: fused_moe(x, tw, ids, prepared, recipe=recipe, adapters=slots, adapter_ids=adapter_ids)  # noqa: E731
    want = run()
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        if out.dtype.is_floating_point:
            return out.fill_(float("nan"))
        return out.fill_(0x7F if out.dtype == torch.uint8 else 0x3FFFFFFF)

    monkeypatch.setattr(torch, "empty", poisoned)
    got = run()
    assert torch.equal(got, want)
    assert not got[2].any()


def test_ids_are_global_and_slots_move() -> None:
    weights = _weights("channel")
    here = prepare_adapters(ADAPTERS, CONFIG, device=DEVICE)
    there = prepare_adapters(reversed(ADAPTERS), CONFIG, device=DEVICE, max_loras=6)
    want = _call(weights, adapters=here)
    assert torch.equal(_call(weights, adapters=there), want)
    assert torch.equal(_call(weights, adapters=here, adapter_ids=ADAPTER_IDS.astype(np.int64)), want)


def test_unloaded_and_unknown_ids_run_as_base_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = _weights("channel")
    slots = prepare_adapters(ADAPTERS, CONFIG, device=DEVICE)
    base, mixed = _call(weights), _call(weights, adapters=slots)
    slots.unload(1)  # id 42
    monkeypatch.setenv("ISOMOE_CHECK", "1")
    got = _call(weights, adapters=slots)
    gone = torch.from_numpy(ADAPTER_IDS == 42)
    assert torch.equal(got[gone], base[gone]) and torch.equal(got[~gone], mixed[~gone])
    assert not torch.equal(mixed[gone], base[gone])
    assert "[42]" in caplog.text
    slots.load(1, ADAPTERS[1])
    assert torch.equal(_call(weights, adapters=slots), mixed)


def test_all_adapters_shared_keeps_one_outer_matrix() -> None:
    shared = tuple(_adapter(a.adapter_id, 8, shared=True) for a in ADAPTERS)
    slots = prepare_adapters(shared, CONFIG, device=DEVICE)
    assert slots.a13.shape[1] == slots.b2.shape[1] == 1
    mixed = prepare_adapters((*shared[:2], _adapter(9, 8)), CONFIG, device=DEVICE)
    assert mixed.a13.shape[1] == mixed.b2.shape[1] == E
    spread = prepare_adapters(
        [replace(a, a13=np.repeat(a.a13, E, 0), b2=np.repeat(a.b2, E, 0)) for a in shared], CONFIG, device=DEVICE
    )
    weights = _weights("channel")
    assert torch.equal(_call(weights, adapters=slots), _call(weights, adapters=spread))


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_expert_maps_add_up(strategy: str) -> None:
    """Partial sums of all ranks add up to the whole; an expert elsewhere adds nothing here."""
    weights, total = _weights("block"), np.zeros((T, H), np.float32)
    x, tw, ids = _batch()
    placement = ExpertPlacement(E, 3, strategy)
    for rank in range(3):
        local = placement.experts_of(rank)
        slots = prepare_adapters([a.take(local) for a in ADAPTERS], CONFIG, device=DEVICE, num_experts=len(local))
        total += fused_moe(
            to_torch(x, DEVICE), to_torch(tw, DEVICE), to_torch(ids, DEVICE),
            prepare_weights(weights.take(local), DEVICE), adapters=slots, adapter_ids=to_torch(ADAPTER_IDS, DEVICE),
            expert_map=to_torch(placement.expert_map(rank), DEVICE), out_dtype=torch.float32,
        ).cpu().numpy()  # fmt: skip
    want = run_moe("triton", x, tw, ids, weights, config=CONFIG, adapters=ADAPTERS, adapter_ids=ADAPTER_IDS)
    assert rel_l2(total, want) <= tolerances.TO_RECIPE.bound


def test_quantised_rows_in_give_the_same_bits() -> None:
    weights = prepare_weights(_weights("block"), DEVICE)
    x, tw, ids = (to_torch(a, DEVICE) for a in _batch())
    codes, scales = quantize_rows(x, 128)
    recipe = default_recipe("w8a8", "block")
    want = fused_moe(x, tw, ids, weights, recipe=recipe)
    for rows in (codes, codes.view(torch.float8_e4m3fn)):
        assert torch.equal(fused_moe(rows, tw, ids, weights, recipe=recipe, x_scale=scales), want)


def test_quantised_rows_with_adapters_are_refused() -> None:
    weights = prepare_weights(_weights("block"), DEVICE)
    x, tw, ids = (to_torch(a, DEVICE) for a in _batch())
    codes, scales = quantize_rows(x, 128)
    slots = prepare_adapters(ADAPTERS, CONFIG, device=DEVICE)
    adapter_ids = to_torch(ADAPTER_IDS, DEVICE)
    with pytest.raises(NotImplementedError, match="lora_input"):
        fused_moe(codes, tw, ids, weights, adapters=slots, adapter_ids=adapter_ids, x_scale=scales)
    recipe = replace(default_recipe("w8a8", "block"), lora_input="fp8")
    layer = functools.partial(fused_moe, recipe=recipe, adapters=slots, adapter_ids=adapter_ids)
    assert torch.equal(layer(codes, tw, ids, weights, x_scale=scales), layer(x, tw, ids, weights))


def test_no_tokens() -> None:
    y = fused_moe(
        torch.empty((0, H), dtype=torch.bfloat16, device=DEVICE), torch.empty((0, K), device=DEVICE),
        torch.empty((0, K), dtype=torch.int32, device=DEVICE), prepare_weights(_weights("block"), DEVICE),
    )  # fmt: skip
    assert y.shape == (0, H) and y.dtype == torch.bfloat16


BAD_CALLS = {
    "x dtype": (TypeError, "x: got dtype float32", lambda a: a | {"x": a["x"].float()}),
    "x shape": (ValueError, r"x: got shape \[11, 255\]", lambda a: a | {"x": a["x"][:, 1:].contiguous()}),
    "x strides": (ValueError, "x: got strides", lambda a: a | {"x": a["x"].T.contiguous().T}),
    "weights dtype": (
        TypeError, "topk_weights: got dtype bfloat16", lambda a: a | {"topk_weights": a["topk_weights"].bfloat16()}
    ),
    "ids dtype": (TypeError, "topk_ids: got dtype float32", lambda a: a | {"topk_ids": a["topk_ids"].float()}),
    "ids rows": (ValueError, "topk_ids: got shape", lambda a: a | {"topk_ids": a["topk_ids"][:-1]}),
    "ids width": (ValueError, "topk_weights: got shape", lambda a: a | {"topk_ids": a["topk_ids"][:, :1].contiguous()}),
    "device": (ValueError, "topk_ids: got device meta", lambda a: a | {"topk_ids": a["topk_ids"].to("meta")}),
    "not a tensor": (TypeError, "x: got ndarray", lambda a: a | {"x": np.zeros((T, H))}),
    "raw weights": (TypeError, "prepare_weights", lambda a: a | {"weights": _weights("block")}),
    "activation": (ValueError, "activation: got 'relu2'", lambda a: a | {"activation": "relu2"}),
    "recipe": (ValueError, "recipe: got 'bf16'", lambda a: a | {"recipe": "bf16"}),
    "wire": (ValueError, "wire 'fp8'", lambda a: a | {"recipe": Recipe("w8a8", 128, 128, wire="fp8")}),
    "group": (ValueError, "h_group 64", lambda a: a | {"recipe": Recipe("w8a8", 128, 64)}),
    "static": (ValueError, "w13_input_scale", lambda a: a | {"recipe": Recipe("w8a8", "static", 128)}),
    "map dtype": (TypeError, "expert_map: got dtype", lambda a: a | {"expert_map": torch.zeros(E, device=DEVICE)}),
    "ids without adapters": (ValueError, "adapter_ids", lambda a: a | {"adapter_ids": a["topk_ids"][:, 0]}),
    "out": (ValueError, "out_dtype", lambda a: a | {"out_dtype": torch.float16}),
    "scale shape": (
        ValueError, "x_scale: got shape",
        lambda a: a | {"x": a["x"].to(torch.float8_e4m3fn), "x_scale": torch.ones((T, 1), device=DEVICE)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_are_named_before_any_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, message, change = BAD_CALLS[name]
    x, tw, ids = (to_torch(a, DEVICE) for a in _batch())
    arguments = {"x": x, "topk_weights": tw, "topk_ids": ids, "weights": prepare_weights(_weights("block"), DEVICE)}
    from isomoe.cuda_impl import _runtime, align, quantize

    def forbidden(*_args, **_kwargs):
        raise AssertionError("launched")

    for module in (_runtime, align, quantize):
        monkeypatch.setattr(module, "launch", forbidden)
    with pytest.raises(error, match=message):
        fused_moe(**change(arguments))


@pytest.mark.parametrize("label", ["a13", "b13", "a2", "b2"])
def test_adapter_tensors_are_checked(label: str) -> None:
    slots = prepare_adapters(ADAPTERS, CONFIG, device=DEVICE)
    # The last axis of b13 defines the pool's rank, so cut another one there.
    cut = getattr(slots, label)[:, :, :, 1:] if label == "b13" else getattr(slots, label)[..., 1:]
    bad = replace(slots, **{label: cut.contiguous()})
    with pytest.raises(ValueError, match=f"adapters.{label}: got shape"):
        _call(_weights("block"), adapters=bad)
    with pytest.raises(TypeError, match=f"adapters.{label}: got dtype float32"):
        _call(_weights("block"), adapters=replace(slots, **{label: getattr(slots, label).float()}))


def test_adapters_that_do_not_fit_are_refused() -> None:
    slots = prepare_adapters((), CONFIG, device=DEVICE, max_loras=1, max_lora_rank=8)
    with pytest.raises(ValueError, match="rank 40, want at most 16"):
        slots.load(0, ADAPTERS[2])
    with pytest.raises(ValueError, match="slot: got 1"):
        slots.load(1, ADAPTERS[1])
    with pytest.raises(ValueError, match="a13 has shape"):
        slots.load(0, _adapter(3, 4, halves=1))
    with pytest.raises(ValueError, match="at most max_loras=1"):
        prepare_adapters(ADAPTERS, CONFIG, device=DEVICE, max_loras=1)


def test_operator_contract() -> None:
    """Schema, fake kernel and torch.compile agree with the real operator."""
    weights = prepare_weights(_weights("channel"), DEVICE)
    x, tw, ids = (to_torch(a, DEVICE) for a in _batch())
    call = lambda x, tw, ids: fused_moe(x, tw, ids, weights)  # noqa: E731
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(x, tw, ids), call(x, tw, ids))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call(mode.from_tensor(x), mode.from_tensor(tw), mode.from_tensor(ids))
    assert fake.shape == x.shape and fake.dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_rounded_rank_products_are_a_recipe_of_their_own(scheme: str) -> None:
    """Rounding A x to bf16 flips FP8 codes of h: each recipe is met closely, and the two differ by more than that."""
    inputs = build(Case(scheme, "w8a8", "mixed"))
    plain = default_recipe("w8a8", scheme)
    rounded = replace(plain, lora_products="bf16")
    got = {r: inputs.run("triton", recipe=r) for r in (plain, rounded)}
    want = {r: inputs.run("reference", recipe=r) for r in (plain, rounded)}
    for recipe in (plain, rounded):
        assert rel_l2(got[recipe], want[recipe]) < 3e-3
    assert rel_l2(got[rounded], want[plain]) > 4e-3


def test_the_route_to_hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving calls go there; every condition that keeps a call out gives its reason."""
    block = CallShape(default_recipe("w8a8", "block").with_wire("bf16"), "silu", True, True, False, 2048, 768)
    stored = default_recipe("w8a8", "channel").with_bf16_storage()
    channel = replace(block, recipe=stored, is_block=False, lora_rank=32)
    hopper = Target((9, 0))
    for good in (block, channel, replace(channel, recipe=Recipe("w8a16").with_bf16_storage())):
        assert why_not_hopper(good, hopper) is None
    for capability in (None, (8, 0), (8, 9), (10, 0), (12, 0)):
        assert why_not_hopper(block, Target(capability))
    for changes in (
        {"recipe": Recipe("bf16")}, {"recipe": default_recipe("w8a8", "block")}, {"recipe": channel.recipe},
        {"recipe": replace(block.recipe, lora_input="fp8")}, {"activation": "gelu"}, {"is_gated": False},
        {"has_bias": True}, {"hidden_dim": 2056}, {"intermediate_size": 100}, {"lora_rank": 192},
        {"quantised_rows": True},
    ):  # fmt: skip
        assert why_not_hopper(replace(block, **changes), hopper), changes
    assert why_not_hopper(replace(channel, recipe=stored.with_wire("bf16")), hopper) is None
    exact = replace(channel, recipe=replace(stored, lora_products="f32"))
    assert why_not_hopper(exact, hopper) == "rank products in f32"
    monkeypatch.setenv("ISOMOE_HOPPER", "0")
    assert why_not_hopper(block, hopper) == "ISOMOE_HOPPER=0"
    assert [pad_rank(r) for r in (1, 16, 17, 64, 100, 200, 512)] == [16, 16, 32, 64, 128, 256, 512]


def test_batch_invariance_pins_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    from isomoe.cuda_impl.grouped_gemm import choose_block_m

    hopper = Target((9, 0))
    assert len({choose_block_m(pairs, 8, hopper) for pairs in (8, 200, 400, 65536)}) == 4
    monkeypatch.setenv("ISOMOE_BATCH_INVARIANT", "1")
    assert len({choose_block_m(pairs, 8, hopper) for pairs in (8, 200, 400, 65536)}) == 1


def test_a_row_alone_and_in_a_batch() -> None:
    weights = _weights("block")
    x, tw, ids = _batch()
    whole = run_moe("triton", x, tw, ids, weights, config=CONFIG)
    alone = run_moe("triton", x[4:5], tw[4:5], ids[4:5], weights, config=CONFIG)
    assert bitwise_equal(alone, whole[4:5])


def test_executors_say_what_they_are() -> None:
    found = executors()
    for name, recipes in (("triton", ("w8a8", "bf16")), ("marlin", ("w8a16",))):
        assert found[name].state == ("interpreted" if INTERPRETED else "native")
        assert found[name].recipes == recipes and found[name].detail


def test_missing_framework_is_a_reason_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from isomoe.cuda_impl.executors import MarlinExecutor, TritonExecutor

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "triton" else find(n, *a))
    for cls in (TritonExecutor, MarlinExecutor):
        info = cls.info()
        assert info.state == "unavailable" and "triton is not installed" in info.reason and info.recipes == ()


def test_weights_past_two_gib() -> None:
    """The last of 1,100 experts lies 2.3e9 bytes into w13: 32-bit offsets would read elsewhere. Other pages stay
    untouched, so they cost no memory."""
    experts, hidden, inter = 1100, 1024, 1024
    rng = np.random.default_rng(0)
    one = prepare_weights(
        quantize_moe_weights(
            _normal(rng, 1, 2 * inter, hidden, fan=hidden), _normal(rng, 1, hidden, inter, fan=inter), "channel"
        ),
        DEVICE,
    )

    def spread(t: torch.Tensor) -> torch.Tensor:
        wide = torch.empty((experts, *t.shape[1:]), dtype=t.dtype, device=DEVICE)
        wide[-1] = t[0]
        return wide

    parts = (one.w13, one.w2, one.w13_scale, one.w2_scale)
    many = PreparedWeights(*(spread(t) for t in parts if t is not None))
    assert many.w13.numel() > 2**31
    x = to_torch(rng.standard_normal((2, hidden)).astype(BF16), DEVICE)
    tw = torch.ones((2, 1), device=DEVICE)
    ids = torch.zeros((2, 1), dtype=torch.int32, device=DEVICE)
    recipe = default_recipe("w8a8", "channel")
    want = fused_moe(x, tw, ids, one, recipe=recipe)
    assert torch.equal(fused_moe(x, tw, ids + experts - 1, many, recipe=recipe), want)
