# SPDX-License-Identifier: Apache-2.0
"""This package's experts inside vLLM's own layer, adapters under vLLM's own LoRA layer, against the numpy reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from simulation import CONFIGS, lora_config, routing
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

import isomoe
from isomoe.common.metrics import bitwise_equal, rel_l2
from isomoe.common.tolerances import TO_RECIPE
from isomoe.cuda_impl.vllm import experts as experts_module

BF16 = np.dtype(ml_dtypes.bfloat16)
EXPERTS, TOP_K, HIDDEN, INTER, TOKENS, SLOTS, RANK = 8, 2, 256, 128, 12, 3, 16
# bf16 rounding of both results, relative to an update about as large as the base.
UPDATE_BOUND = 1e-2
SCHEME = {"block": "block", "compressed_tensors": "channel", "tensor": "tensor", "modelopt": "tensor"}


def to_torch(a: np.ndarray) -> torch.Tensor:
    a = np.ascontiguousarray(a)
    if a.dtype == np.dtype(ml_dtypes.float8_e4m3fn):
        return torch.from_numpy(a.view(np.uint8).copy()).view(torch.float8_e4m3fn)
    if a.dtype == BF16:
        return torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(a.copy())


def to_numpy(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.int16).numpy().view(BF16)


def random_weights(scheme: str, seed: int = 0) -> isomoe.MoEWeights:
    rng = np.random.default_rng(seed)
    w13 = rng.normal(size=(EXPERTS, 2 * INTER, HIDDEN)) * np.exp(rng.normal(size=(EXPERTS, 2 * INTER, 1)) / 2) / 16
    w2 = rng.normal(size=(EXPERTS, HIDDEN, INTER)) * np.exp(rng.normal(size=(EXPERTS, HIDDEN, 1)) / 2) / 11
    return isomoe.quantize_moe_weights(w13.astype(np.float32), w2.astype(np.float32), scheme)


def random_adapter(adapter_id: int, rank: int, seed: int) -> isomoe.LoRAAdapter:
    rng = np.random.default_rng(seed)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(BF16)  # noqa: E731
    return isomoe.LoRAAdapter(
        adapter_id, draw(EXPERTS, 2, rank, HIDDEN), draw(EXPERTS, 2, INTER, rank), draw(EXPERTS, rank, INTER),
        draw(EXPERTS, HIDDEN, rank),
    )  # fmt: skip


@dataclass
class Layer:
    """vLLM's layer with weights in it, and the same weights for the reference."""

    runner: Any
    weights: isomoe.MoEWeights
    static: tuple[float, float] | None = None

    @property
    def routed(self) -> Any:
        return self.runner.routed_experts

    def __call__(self, x: np.ndarray, picked: Any) -> np.ndarray:
        out = self.routed.quant_method.apply(self.routed, to_torch(x), picked.weights, picked.ids, None, None)
        return to_numpy(out)

    def reference(self, x: np.ndarray, picked: Any, **adapters: Any) -> np.ndarray:
        config = isomoe.FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, INTER)
        return isomoe.run_moe(
            "reference", x, picked.weights.numpy(), picked.ids.numpy(), self.weights, config=config, **adapters
        )


@pytest.fixture
def make_layer(build: Any, installed: None) -> Iterator[Any]:
    def make(name: str, *, lora: Any = None, seed: int = 0) -> Layer:
        weights = random_weights(SCHEME[name], seed)
        if weights.scheme == "tensor":
            # vLLM requantises gate and up to one scale, by a CUDA operator; one scale to begin with needs none.
            weights = replace(weights, w13_scale=weights.w13_scale.reshape(EXPERTS, -1).max(1))
        runner = build(CONFIGS[name](), lora=lora, hidden=HIDDEN, inter=INTER, experts=EXPERTS, top_k=TOP_K)
        routed = runner.routed_experts
        method = routed.quant_method
        suffix = "weight_scale_inv" if hasattr(routed, "w13_weight_scale_inv") else "weight_scale"
        for which, w, s in (("w13", weights.w13, weights.w13_scale), ("w2", weights.w2, weights.w2_scale)):
            getattr(routed, f"{which}_weight").data.copy_(to_torch(w))
            parameter = getattr(routed, f"{which}_{suffix}")
            value = to_torch(s).reshape(parameter.shape[0], -1)
            parameter.data.copy_(value.expand(parameter.shape[0], parameter[0].numel()).reshape(parameter.shape))
        static = None
        if getattr(routed, "w13_input_scale", None) is not None:
            static = (0.02, 0.05)
            routed.w13_input_scale.data.fill_(static[0])
            routed.w2_input_scale.data.fill_(static[1])
            weights = replace(
                weights, w13_input_scale=np.array(static[0], np.float32), w2_input_scale=np.array(static[1], np.float32)
            )
        if weights.scheme == "tensor":
            finish_tensor_scheme(method, routed)
        else:
            method.process_weights_after_loading(routed)
        return Layer(runner, weights, static)

    yield make


def finish_tensor_scheme(method: Any, routed: Any) -> None:
    """`process_weights_after_loading` without its CUDA requantisation, which equal scales make the identity."""
    import sys

    module = sys.modules[type(method).__module__]
    name = "process_fp8_weight_tensor_strategy_moe"
    original = getattr(module, name)
    setattr(module, name, lambda w, scale, *args, **kwargs: (w, scale.max(1).values))
    try:
        method.process_weights_after_loading(routed)
    finally:
        setattr(module, name, original)


def random_rows(seed: int, tokens: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(tokens, HIDDEN)).astype(BF16)


@pytest.mark.parametrize("name", SCHEME)
def test_base_layer_equals_the_reference(make_layer: Any, name: str) -> None:
    layer = make_layer(name)
    assert type(layer.routed.quant_method.moe_kernel.fused_experts).__name__ == "IsomoeExperts"
    x, picked = random_rows(1), routing(TOKENS, TOP_K, EXPERTS)
    assert rel_l2(layer(x, picked), layer.reference(x, picked)) <= TO_RECIPE.bound


def test_weights_are_not_copied(make_layer: Any) -> None:
    layer = make_layer("block")
    layer(random_rows(2), routing(TOKENS, TOP_K, EXPERTS))
    held = layer.routed.quant_method.moe_kernel.fused_experts._prepared[1]
    assert held.w13.data_ptr() == layer.routed.w13_weight.data_ptr()
    assert held.w2.data_ptr() == layer.routed.w2_weight.data_ptr()
    assert held.w13_scale.data_ptr() == layer.routed.w13_weight_scale_inv.data_ptr()


class Serving:
    """vLLM's LoRA layer round a layer, its Punica wrapper, and what its adapter manager does."""

    def __init__(self, layer: Layer, config: Any) -> None:
        from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
        from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

        self.layer = layer
        self.wrapped = FusedMoEWithLoRA(layer.runner)
        self.wrapped.create_lora_weights(config.max_loras, config)
        self.punica = PunicaWrapperGPU(64, 64, "cpu", lora_config=config)
        self.wrapped.set_mapping(self.punica)

    def load(self, slot: int, adapter: isomoe.LoRAAdapter) -> None:
        """Arrays as vLLM's manager hands them over: lists of w1, w2, w3, each over all experts."""
        a13, b13 = to_torch(adapter.a13), to_torch(adapter.b13)
        a2, b2 = to_torch(adapter.a2), to_torch(adapter.b2)
        self.wrapped.set_lora(slot, [a13[:, 0], a2, a13[:, 1]], [b13[:, 0], b2, b13[:, 1]])

    def use(self, slots: list[int]) -> None:
        self.punica.token_mapping_meta.prepare_tensors(torch.tensor(slots, dtype=torch.int64))


@pytest.fixture
def make_serving(make_layer: Any) -> Any:
    def make(name: str, **options: Any) -> Serving:
        config = lora_config(**{"max_loras": SLOTS, "max_lora_rank": RANK, **options})
        return Serving(make_layer(name, lora=config), config)

    return make


@pytest.mark.parametrize("name", ["block", "compressed_tensors"])
def test_adapters_under_vllms_lora_layer(make_serving: Any, name: str) -> None:
    serving = make_serving(name)
    layer = serving.layer
    assert type(layer.routed.quant_method).__name__ == "FusedMoEModularMethod"
    x, picked = random_rows(3), routing(TOKENS, TOP_K, EXPERTS)
    first, second = random_adapter(0, RANK, 10), random_adapter(2, 8, 11)
    serving.use([-1] * TOKENS)
    before = layer(x, picked)

    serving.load(0, first)
    serving.load(2, second)
    serving.use([-1] * TOKENS)
    assert bitwise_equal(layer(x, picked), before), "idle adapters changed base rows"

    slots = [(-1, 0, 2)[t % 3] for t in range(TOKENS)]
    serving.use(slots)
    mixed = layer(x, picked)
    ids = np.array(slots, np.int32)
    want = layer.reference(x, picked, adapters=[first, second], adapter_ids=ids)
    assert rel_l2(mixed, want) <= TO_RECIPE.bound
    assert bitwise_equal(mixed[ids < 0], before[ids < 0]), "others' adapters changed base rows"
    # The update alone, so that the base cannot hide it.
    base = before.astype(np.float32)
    update, wanted = mixed.astype(np.float32) - base, want.astype(np.float32) - base
    assert rel_l2(update[ids >= 0], wanted[ids >= 0]) <= UPDATE_BOUND


def test_a_replaced_adapter_is_seen_at_the_next_call(make_serving: Any) -> None:
    """Slot reuse between two identical batches: the map does not change, the slot's content does."""
    serving = make_serving("block")
    layer = serving.layer
    x, picked = random_rows(4), routing(TOKENS, TOP_K, EXPERTS)
    serving.load(1, random_adapter(1, RANK, 12))
    serving.use([1] * TOKENS)
    first = layer(x, picked)
    other = random_adapter(1, 8, 13)
    serving.load(1, other)
    second = layer(x, picked)
    want = layer.reference(x, picked, adapters=[other], adapter_ids=np.ones(TOKENS, np.int32))
    assert rel_l2(second, want) <= TO_RECIPE.bound and not bitwise_equal(first, second)


def test_vllms_buffers_are_the_kernels_buffers(make_serving: Any) -> None:
    serving = make_serving("block")
    slots = serving.layer.routed.quant_method.moe_kernel.fused_experts._slots
    gate, up = serving.wrapped.w13_lora_a_stacked
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr() == slots.a13.data_ptr()
    assert slots.a13.is_contiguous() and slots.b13.is_contiguous()
    old = serving.wrapped.lora_a_stacked[0].untyped_storage()
    assert old.nbytes() == 0, "vLLM's first buffer is still allocated"
    # A second context over the same buffers finds them joined.
    serving.wrapped.set_mapping(serving.punica)
    again = serving.layer.routed.quant_method.moe_kernel.fused_experts._slots
    assert again.a13.data_ptr() == slots.a13.data_ptr() and again.a13.shape == slots.a13.shape


@pytest.mark.parametrize("flag_decides", [True, False])
def test_a_batch_without_adapters_ignores_the_last_batchs_map(make_serving: Any, flag_decides: bool) -> None:
    """vLLM leaves the map stale in such a batch, whether graphs are captured apart or for both kinds."""
    serving = make_serving("block")
    layer = serving.layer
    layer.routed.quant_method.moe_kernel.fused_experts._flag_decides = flag_decides
    x, picked = random_rows(5), routing(TOKENS, TOP_K, EXPERTS)
    serving.load(0, random_adapter(0, RANK, 14))
    serving.use([-1] * TOKENS)
    base = layer(x, picked)
    serving.use([0] * TOKENS)
    assert not bitwise_equal(layer(x, picked), base)
    serving.use([-1] * TOKENS)
    assert bitwise_equal(layer(x, picked), base)


@pytest.mark.parametrize("rank, padded", [(8, 16), (256, 256)])
def test_ranks_that_the_fast_kernels_do_not_take(make_serving: Any, rank: int, padded: int) -> None:
    """Rank 8 is padded to 16; a batch of base rows at rank 256 stays on the kernels that serve its adapters."""
    serving = make_serving("block", max_lora_rank=rank)
    layer = serving.layer
    experts = layer.routed.quant_method.moe_kernel.fused_experts
    assert [t.shape[a] for t, a in ((experts._slots.a13, 3), (experts._slots.b13, 4), (experts._slots.a2, 3),
                                    (experts._slots.b2, 4))] == [padded] * 4  # fmt: skip
    assert serving.wrapped.w13_lora_a_stacked[0].shape[2] == rank
    assert experts._flag_decides == (padded == 16)
    serving.wrapped.set_mapping(serving.punica)
    x, picked = random_rows(11), routing(TOKENS, TOP_K, EXPERTS)
    serving.use([-1] * TOKENS)
    base = layer(x, picked)
    adapter = random_adapter(1, 8, 18)
    serving.load(1, adapter)
    slots = [(-1, 1)[t % 2] for t in range(TOKENS)]
    serving.use(slots)
    ids = np.array(slots, np.int32)
    got = layer(x, picked)
    want = layer.reference(x, picked, adapters=[adapter], adapter_ids=ids)
    assert rel_l2(got, want) <= TO_RECIPE.bound and bitwise_equal(got[ids < 0], base[ids < 0])


def test_an_unloaded_slot_is_zero(make_serving: Any) -> None:
    serving = make_serving("block")
    layer = serving.layer
    x, picked = random_rows(6), routing(TOKENS, TOP_K, EXPERTS)
    serving.use([-1] * TOKENS)
    base = layer(x, picked)
    serving.load(0, random_adapter(0, RANK, 15))
    serving.wrapped.reset_lora(0)
    serving.use([0] * TOKENS)
    assert bitwise_equal(layer(x, picked), base)


def test_router_weight_on_input(make_serving: Any) -> None:
    """The expert and its adapter see w x, and nothing is weighted again (top-1, as vLLM requires)."""
    serving = make_serving("block")
    layer = serving.layer
    layer.routed.apply_router_weight_on_input = True
    adapter = random_adapter(0, RANK, 16)
    serving.load(0, adapter)
    serving.use([0] * TOKENS)
    x, picked = random_rows(7), routing(TOKENS, 1, EXPERTS)
    picked.weights = torch.linspace(0.2, 0.9, TOKENS)[:, None].contiguous()
    got = layer(x, picked)
    weighted = to_numpy(to_torch(x) * picked.weights.to(torch.bfloat16))
    config = isomoe.FusedMoEConfig(EXPERTS, 1, HIDDEN, INTER)
    want = isomoe.run_moe(
        "reference", weighted, np.ones((TOKENS, 1), np.float32), picked.ids.numpy(), layer.weights, config=config,
        adapters=[adapter], adapter_ids=np.zeros(TOKENS, np.int32),
    )  # fmt: skip
    assert rel_l2(got, want) <= TO_RECIPE.bound


def test_shared_outer_adapters(make_serving: Any) -> None:
    serving = make_serving("block", enable_moe_shared_loras=True)
    layer = serving.layer
    full = random_adapter(0, RANK, 17)
    shared = isomoe.LoRAAdapter(0, full.a13[:1], full.b13, full.a2, full.b2[:1])
    serving.load(0, shared)
    serving.use([0] * TOKENS)
    x, picked = random_rows(8), routing(TOKENS, TOP_K, EXPERTS)
    want = layer.reference(x, picked, adapters=[shared], adapter_ids=np.zeros(TOKENS, np.int32))
    assert rel_l2(layer(x, picked), want) <= TO_RECIPE.bound


@pytest.mark.parametrize("adapters", [False, True], ids=["base", "adapters"])
@pytest.mark.parametrize(
    ("ranks", "placement"), [(2, "linear"), (3, "linear"), (4, "round_robin")], ids=["even", "uneven", "round-robin"]
)
def test_expert_parallel_ranks_sum_to_the_layer(make_layer: Any, ranks: int, placement: str, adapters: bool) -> None:
    """Replicated tokens, vLLM's own placement, each rank's experts and their adapters; ranks' results add up.

    vLLM cuts adapters to ranks as if the placement were even and linear, which is why selection refuses the others;
    the experts themselves follow `expert_map` wherever it puts them.
    """
    layer = make_layer("block")
    x, picked = random_rows(9), routing(TOKENS, TOP_K, EXPERTS)
    experts = layer.routed.quant_method.moe_kernel.fused_experts
    adapter = random_adapter(1, RANK, 20)
    slots = [(-1, 1)[t % 2] for t in range(TOKENS)] if adapters else [-1] * TOKENS
    total = np.zeros((TOKENS, HIDDEN), np.float32)
    for rank in range(ranks):
        count, expert_map, _ = determine_expert_map(ranks, rank, EXPERTS, placement)
        local = np.flatnonzero(expert_map.numpy() >= 0)
        assert len(local) == count
        weights = layer.weights
        part = isomoe.MoEWeights(
            "block", weights.w13[local], weights.w2[local], weights.w13_scale[local], weights.w2_scale[local]
        )
        scales = to_torch(part.w13_scale), to_torch(part.w2_scale)
        mine = experts_module.IsomoeExperts(experts.moe_config, with_scales(experts.quant_config, *scales))
        if adapters:
            mine.set_lora_context(rank_context(adapter, local, slots))
        out = torch.full((TOKENS, HIDDEN), float("nan"), dtype=torch.bfloat16)
        mine.apply(
            out, to_torch(x), to_torch(part.w13), to_torch(part.w2), picked.weights, picked.ids,
            layer.routed.activation, EXPERTS, expert_map, None, None, None, None, None, False,
        )  # fmt: skip
        total += to_numpy(out).astype(np.float32)
    want = layer.reference(x, picked, adapters=[adapter], adapter_ids=np.array(slots, np.int32))
    assert rel_l2(total.astype(BF16), want) <= TO_RECIPE.bound
    assert not adapters or rel_l2(want, layer.reference(x, picked)) > 0.1


def rank_context(adapter: isomoe.LoRAAdapter, local: np.ndarray, slots: list[int]) -> Any:
    """What vLLM's LoRA layer hands to the experts of a rank, the adapter in slot 1."""
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    def stacked(factor: np.ndarray) -> torch.Tensor:
        whole = np.zeros((SLOTS, len(local), *factor.shape[1:]), BF16)
        whole[1] = factor[local]
        return to_torch(whole).clone()  # in memory of torch, as vLLM allocates it

    punica = PunicaWrapperGPU(64, 64, "cpu", lora_config=lora_config(max_loras=SLOTS, max_lora_rank=RANK))
    punica.token_mapping_meta.prepare_tensors(torch.tensor(slots, dtype=torch.int64))
    return SimpleNamespace(
        fully_sharded=False, tp_size=1, punica_wrapper=punica,
        w13_lora_a_stacked=tuple(stacked(adapter.a13[:, half]) for half in (0, 1)),
        w13_lora_b_stacked=tuple(stacked(adapter.b13[:, half]) for half in (0, 1)),
        w2_lora_a_stacked=(stacked(adapter.a2),), w2_lora_b_stacked=(stacked(adapter.b2),),
    )  # fmt: skip


class GatheringGroup:
    """vLLM's expert-parallel group seen from one rank: everyone's tensors come, and its own rows go back."""

    def __init__(self, everyone: list[torch.Tensor], own: slice) -> None:
        self.everyone, self.own = everyone, own
        self.combined: list[torch.Tensor] = []

    def dispatch(self, *local: torch.Tensor, extra_tensors: Any = None, **_: Any) -> tuple[torch.Tensor, ...]:
        assert extra_tensors is None, "rows travel unquantised, without scales"
        for mine, whole in zip(local, self.everyone, strict=True):
            assert torch.equal(mine, whole[self.own])
        return tuple(self.everyone)

    def allocate_combine_input(self, shape: Any, dtype: Any, device: Any, **_: Any) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    def combine(self, rows: torch.Tensor, **_: Any) -> torch.Tensor:
        self.combined.append(rows.clone())
        return rows[self.own]

    def combine_into_output(self, rows: torch.Tensor, output: torch.Tensor, **options: Any) -> None:
        output.copy_(self.combine(rows, **options))


@pytest.mark.parametrize("name", ["block", "compressed_tensors"])
def test_tokens_gathered_from_two_ranks(make_layer: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Data-parallel EP through vLLM's own prepare and finalize steps, ranks with 5 and 7 tokens."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep

    layer = make_layer(name)
    experts = layer.routed.quant_method.moe_kernel.fused_experts
    x, picked = random_rows(21), routing(TOKENS, TOP_K, EXPERTS)
    total = torch.zeros((TOKENS, HIDDEN))
    for rank, own in enumerate((slice(0, 5), slice(5, TOKENS))):
        _, expert_map, _ = determine_expert_map(2, rank, EXPERTS, "linear")
        local = expert_map >= 0
        scales = [s[local] for s in (experts.w1_scale, experts.w2_scale)]
        group = GatheringGroup([to_torch(x), picked.weights, picked.ids], own)
        monkeypatch.setattr(naive_dp_ep, "get_ep_group", lambda group=group: group)
        mine = experts_module.IsomoeExperts(experts.moe_config, with_scales(experts.quant_config, *scales))
        step = naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular(num_dispatchers=2)
        out = mk.FusedMoEKernel(step, mine).apply(
            to_torch(x)[own], layer.routed.w13_weight[local], layer.routed.w2_weight[local], picked.weights[own],
            picked.ids[own], layer.routed.activation, EXPERTS, expert_map, False,
        )  # fmt: skip
        assert out.shape == (own.stop - own.start, HIDDEN) and len(group.combined) == 1
        total += group.combined[0].float()
    assert rel_l2(to_numpy(total.bfloat16()), layer.reference(x, picked)) <= TO_RECIPE.bound


@pytest.mark.parametrize("name", ["block", "compressed_tensors"])
def test_experts_moved_in_place_are_followed(make_layer: Any, name: str) -> None:
    """What load balancing (EPLB) does: vLLM rewrites the tensors it finds, and routes to where experts then are."""
    layer = make_layer(name)
    x, picked = random_rows(13), routing(TOKENS, TOP_K, EXPERTS)
    before = layer(x, picked)
    moved_to = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(1))
    held = list(layer.routed.get_expert_weights())
    assert len(held) == 4
    for tensor in held:
        assert tensor.shape[0] == EXPERTS
        tensor[moved_to] = tensor.clone()
    assert not bitwise_equal(layer(x, picked), before), "the experts must have moved"
    picked.ids = moved_to[picked.ids.long()].to(torch.int32)
    assert bitwise_equal(layer(x, picked), before)


def with_scales(quant_config: Any, w1_scale: torch.Tensor, w2_scale: torch.Tensor) -> Any:
    """A rank's share of a layer's quantisation config."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    return fp8_w8a8_moe_quant_config(
        w1_scale=w1_scale, w2_scale=w2_scale, block_shape=quant_config.block_shape,
        per_act_token_quant=quant_config.per_act_token_quant,
    )  # fmt: skip


def test_quantised_rows_are_refused(make_layer: Any) -> None:
    layer = make_layer("block")
    experts = layer.routed.quant_method.moe_kernel.fused_experts
    x, picked = to_torch(random_rows(10)), routing(TOKENS, TOP_K, EXPERTS)
    with pytest.raises(NotImplementedError, match="unquantised"):
        experts.apply(
            torch.empty_like(x), x.to(torch.float8_e4m3fn), layer.routed.w13_weight, layer.routed.w2_weight,
            picked.weights, picked.ids, layer.routed.activation, EXPERTS, None, torch.ones(TOKENS, 2), None, None, None,
            None, False,
        )  # fmt: skip


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(fully_sharded=True, tp_size=2), "fully_sharded_loras"),
        (dict(drop_up=True), "enable_mixed_moe_lora_format"),
        (dict(dtype=torch.float16), "lora_dtype"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    from isomoe.cuda_impl.vllm.lora import adopt

    dtype = change.get("dtype", torch.bfloat16)
    empty = lambda *shape: torch.zeros(shape, dtype=dtype)  # noqa: E731
    halves = 1 if change.get("drop_up") else 2
    context = SimpleNamespace(
        fully_sharded=change.get("fully_sharded", False), tp_size=change.get("tp_size", 1),
        w13_lora_a_stacked=tuple(empty(SLOTS, 2, RANK, 32) for _ in range(halves)),
        w13_lora_b_stacked=tuple(empty(SLOTS, 2, 32 * (2 // halves), RANK) for _ in range(halves)),
        w2_lora_a_stacked=(empty(SLOTS, 2, RANK, 32),), w2_lora_b_stacked=(empty(SLOTS, 2, 32, RANK),),
    )  # fmt: skip
    with pytest.raises((NotImplementedError, TypeError), match=message):
        adopt(context, gated=True)
