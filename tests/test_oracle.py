# SPDX-License-Identifier: Apache-2.0
"""A whole model against transformers and PEFT: logits, every MoE layer, and greedy tokens.

Three requests share each batch: one on the base model, one on each adapter. The oracle runs them one by one and decodes
32 tokens greedily; an executor then gets the finished sequences in a single forward pass, one `run_moe` call a layer,
and must find the same tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import isomoe
from isomoe.common import tolerances
from isomoe.common.backends import registered_backends
from isomoe.common.executors import executor_class, executors, make_call
from isomoe.common.metrics import rel_l2
from isomoe.common.numerics import BF16
from isomoe.common.support import declared_support
from isomoe.tests.oracle import BASE, Forward, LayerTrace, MixedModel, Oracle, dequantized_state, load_base
from isomoe.tests.samples import DIMS, Samples

PROMPT, STEPS = 6, 32
# Global adapter ids, neither in order nor dense: nothing may take them for slots.
PER_EXPERT, FUSED = 7, 2
REQUESTS = (BASE, PER_EXPERT, FUSED)
SCHEMES = ("channel", "block", "bf16")

# Relative L2 of a request's logits. Attention and head are exact, so this is the experts' error after all layers.
LOGITS = {"w8a16": 1e-2, "bf16": 1e-2, "w8a8": 6e-2}
# The share of greedy steps whose margin must exceed the error bound, or too little would be tested.
CLEAR_STEPS = {"w8a16": 0.9, "bf16": 0.9, "w8a8": 2 / 3}
# Adapters and experts must matter this many times more than the loosest tolerance.
EFFECT = 5 * LOGITS["w8a8"]
# One split of the experts for each platform: executor, scheme, recipe, ranks.
EP_CASES = (("pallas_ep", "channel", "w8a8", 4), ("triton", "channel", "w8a8", 2))


@dataclass(frozen=True, eq=False)
class Story:
    """One checkpoint's oracle, its greedy decode of the three requests, and the same files through the loaders."""

    oracle: Oracle
    tokens: np.ndarray
    want: Forward
    layers: tuple[tuple[isomoe.FusedMoEConfig, isomoe.MoEWeights], ...]
    adapters: tuple[dict[int, isomoe.LoRAAdapter], ...]

    def mixed(self, executor: str, recipe: str, **options: object) -> MixedModel:
        return MixedModel(self.oracle, self.layers, self.adapters, executor=executor, recipe=recipe, **options)


@pytest.fixture(scope="module")
def story(samples: Samples) -> Callable[[str], Story]:
    @functools.cache
    def make(scheme: str) -> Story:
        folders = {PER_EXPERT: samples.lora_per_expert, FUSED: samples.lora_fused}
        oracle = Oracle(samples.checkpoint(scheme), folders)
        prompts = np.random.default_rng(11).integers(0, DIMS.vocab_size, (len(REQUESTS), PROMPT))
        tokens = oracle.greedy(prompts, REQUESTS, STEPS)
        layers = tuple(isomoe.load_moe_layer(samples.checkpoint(scheme), i) for i in range(DIMS.num_layers))
        adapters = tuple(
            isomoe.load_lora_adapter(folder, layers[0][0], adapter_id=i) for i, folder in folders.items()
        )
        return Story(oracle, tokens, oracle.forward(tokens, REQUESTS), layers, adapters)

    return make


def _cases() -> list:
    """Each executor with every scheme and recipe that it declares, and `EP_CASES`."""
    names = os.environ.get("ISOMOE_TEST_EXECUTORS")
    cases = []
    for name in names.split(",") if names else registered_backends():
        support = declared_support(executor_class(name))
        for scheme in (s for s in SCHEMES if s in support.schemes):
            for recipe in ("bf16",) if scheme == "bf16" else ("w8a8", "w8a16"):
                if recipe in support.recipes:
                    cases.append((name, scheme, recipe, 1))
        cases += [case for case in EP_CASES if case[0] == name]
    return [pytest.param(*case, id="{}-{}-{}-ep{}".format(*case)) for case in cases]


def _require(executor: str) -> None:
    info = executors()[executor]
    if info.state == "unavailable":
        pytest.skip(f"{executor} is unavailable: {info.reason}")


def _request(trace: LayerTrace, index: int) -> LayerTrace:
    """One request's rows of a batch's trace."""
    length = len(trace.x) // len(REQUESTS)
    rows = slice(index * length, (index + 1) * length)
    return LayerTrace(*(getattr(trace, f.name)[rows] for f in dataclasses.fields(LayerTrace)))


def _wire(executor: str, story: Story, recipe: str, ep_size: int) -> str:
    """In which precision the executor says it stores result rows."""
    cls, trace = executor_class(executor), story.want.layers[0]
    config, weights = story.layers[0]
    call = make_call(
        trace.x.astype(BF16), trace.topk_weights, trace.topk_ids, weights, config=config,
        adapters=[a[0] for a in story.adapters], ep_size=ep_size, recipe=recipe,
    )
    return (cls.recipe(call) if hasattr(cls, "recipe") else call.recipe).wire


@pytest.mark.parametrize(("executor", "scheme", "recipe", "ep_size"), _cases())
def test_model(
    executor: str, scheme: str, recipe: str, ep_size: int, story: Callable[[str], Story]
) -> None:
    _require(executor)
    told = story(scheme)
    got = told.mixed(executor, recipe, ep_size=ep_size).forward(told.tokens, REQUESTS)
    layer_bound = tolerances.to_truth(recipe, _wire(executor, told, recipe, ep_size)).bound
    for layer, trace in enumerate(got.layers):
        chosen, want = (np.sort(t.topk_ids, axis=-1) for t in (trace, told.want.layers[layer]))
        assert np.array_equal(chosen, want), "another expert was chosen, though the samples' routers have wide margins"
        for i, adapter_id in enumerate(REQUESTS):
            part = _request(trace, i)
            error = rel_l2(part.y, told.oracle.experts(layer, adapter_id, part))
            assert error <= layer_bound, f"layer {layer}, adapter {adapter_id}"
    for i, adapter_id in enumerate(REQUESTS):
        assert rel_l2(got.logits[i], told.want.logits[i]) <= LOGITS[recipe], f"adapter {adapter_id}"
    _check_greedy(told, got, recipe)


def _check_greedy(told: Story, got: Forward, recipe: str) -> None:
    """The oracle's token wherever its margin exceeds the error bound.

    The bound is measured on the prompts' positions, which choose no token here: twice the largest error of a logit,
    since two logits make a margin.
    """
    bound = 2 * np.abs(got.logits - told.want.logits)[:, : PROMPT - 1].max()
    steps = slice(PROMPT - 1, -1)
    best = np.sort(told.want.logits[:, steps], axis=-1)
    clear = best[..., -1] - best[..., -2] > bound
    assert clear.mean() >= CLEAR_STEPS[recipe], f"only {clear.mean():.0%} of the steps have a margin above {bound:.3g}"
    assert np.array_equal(got.logits[:, steps].argmax(-1)[clear], told.tokens[:, PROMPT:][clear])


# --- the oracle itself, and that the comparison above can fail ------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_teacher_forcing_repeats_the_decode(scheme: str, story: Callable[[str], Story]) -> None:
    told = story(scheme)
    assert told.tokens.shape == (len(REQUESTS), PROMPT + STEPS)
    assert np.array_equal(told.want.logits[:, PROMPT - 1 : -1].argmax(-1), told.tokens[:, PROMPT:])
    assert min(len(set(row)) for row in told.tokens.tolist()) > STEPS // 2, "the decode must not be a short loop"


def _changed_tokens(a: Forward, b: Forward) -> np.ndarray:
    """The share of positions with another best token, a request."""
    return (a.logits.argmax(-1) != b.logits.argmax(-1)).mean(axis=1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_adapters_matter(scheme: str, story: Callable[[str], Story]) -> None:
    """An adapter moves logits and layers far beyond the tolerances, and the base request not at all."""
    told = story(scheme)
    base = told.oracle.forward(told.tokens, [BASE] * len(REQUESTS))
    assert np.array_equal(told.want.logits[0], base.logits[0])
    for i in (1, 2):
        assert rel_l2(told.want.logits[i], base.logits[i]) > EFFECT
        assert _changed_tokens(told.want, base)[i] > 0.1
        for layer, trace in enumerate(told.want.layers):
            part = _request(trace, i)
            assert rel_l2(part.y, told.oracle.experts(layer, BASE, part)) > EFFECT


def test_swapped_adapters_are_noticed(story: Callable[[str], Story]) -> None:
    told = story("channel")
    got = told.mixed("reference", "w8a16").forward(told.tokens, (BASE, FUSED, PER_EXPERT))
    assert rel_l2(got.logits[0], told.want.logits[0]) <= LOGITS["w8a16"]
    assert min(rel_l2(got.logits[i], told.want.logits[i]) for i in (1, 2)) > EFFECT


def test_experts_matter(story: Callable[[str], Story]) -> None:
    """With every expert taken for its neighbour, logits and most tokens are others."""
    told = story("channel")
    rolled = tuple(
        (config, weights.take(np.roll(np.arange(DIMS.num_experts), 1))) for config, weights in told.layers
    )
    got = MixedModel(told.oracle, rolled, told.adapters, executor="reference", recipe="w8a16").forward(
        told.tokens, REQUESTS
    )
    assert min(rel_l2(got.logits[i], told.want.logits[i]) for i in range(len(REQUESTS))) > EFFECT
    assert _changed_tokens(got, told.want).min() > 0.5


# --- the package's routing and loaders against the same libraries ---------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_route_agrees_with_transformers(scheme: str, story: Callable[[str], Story]) -> None:
    told = story(scheme)
    for block, trace, (config, _) in zip(told.oracle.base.model.layers, told.want.layers, told.layers, strict=True):
        with torch.no_grad():
            logits = torch.nn.functional.linear(torch.from_numpy(trace.x), block.mlp.gate.weight).numpy()
        topk_weights, topk_ids = isomoe.route(logits, config)
        assert np.array_equal(topk_ids, trace.topk_ids)
        np.testing.assert_allclose(topk_weights, trace.topk_weights, rtol=1e-5)
        ranked = np.sort(logits, axis=-1)
        margin = ranked[:, -DIMS.experts_per_token] - ranked[:, -DIMS.experts_per_token - 1]
        assert margin.min() > 0.5, "the last choice must lead the next expert by far more than FP8 noise"
        assert topk_weights.min() > 0.1, "every choice must have a say"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_load_moe_layer_agrees_with_transformers(scheme: str, story: Callable[[str], Story]) -> None:
    told = story(scheme)
    for layer, (config, weights) in enumerate(told.layers):
        assert weights.scheme == scheme
        assert config == isomoe.FusedMoEConfig(
            DIMS.num_experts, DIMS.experts_per_token, DIMS.hidden_dim, DIMS.intermediate_size
        )
        experts = told.oracle.base.model.layers[layer].mlp.experts
        for e in range(DIMS.num_experts):
            w13, w2 = weights.dequantize(e, np.float32)
            assert np.array_equal(w13, experts.gate_up_proj[e].detach().numpy())
            assert np.array_equal(w2, experts.down_proj[e].detach().numpy())


@pytest.mark.parametrize(("adapter_id", "rank"), [(PER_EXPERT, 8), (FUSED, 16)])
def test_load_lora_adapter_agrees_with_peft(adapter_id: int, rank: int, story: Callable[[str], Story]) -> None:
    """The change to each expert's weights, as PEFT would merge it."""
    told = story("bf16")
    loaded = told.adapters[REQUESTS.index(adapter_id) - 1]
    assert sorted(loaded) == list(range(DIMS.num_layers))
    for layer, adapter in loaded.items():
        assert adapter.adapter_id == adapter_id and adapter.rank == rank
        want = told.oracle.merged_deltas(layer, adapter_id)
        for e in range(DIMS.num_experts):
            halves = [adapter.b13[e, i].astype(np.float32) @ adapter.a13[e, i].astype(np.float32) for i in (0, 1)]
            down = adapter.b2[e].astype(np.float32) @ adapter.a2[e].astype(np.float32)
            # Scaling folded into a bfloat16 B rounds once more.
            assert rel_l2(np.concatenate(halves), want["gate_up_proj"][e]) < 3e-3
            assert rel_l2(down, want["down_proj"][e]) < 3e-3


def test_transformers_reads_the_block_checkpoint_itself(samples: Samples) -> None:
    """transformers' own FP8 reader, config and scales included, gives the weights the oracle dequantised."""
    from transformers import FineGrainedFP8Config, Qwen3MoeForCausalLM

    theirs = Qwen3MoeForCausalLM.from_pretrained(
        samples.block, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    ).state_dict()
    ours = load_base(samples.block).state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())


def test_compressed_tensors_reads_the_channel_checkpoint_itself(samples: Samples) -> None:
    """The same for the library that FP8_DYNAMIC checkpoints are named after."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from transformers import CompressedTensorsConfig, Qwen3MoeForCausalLM

    theirs = Qwen3MoeForCausalLM.from_pretrained(
        samples.channel, quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.float32
    ).state_dict()
    ours = load_base(samples.channel).state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())


def test_codes_without_a_scale_are_refused(samples: Samples, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    broken = shutil.copytree(samples.channel, tmp_path / "broken")
    weight_map = json.loads((broken / "model.safetensors.index.json").read_text())["weight_map"]
    shard = broken / weight_map[f"{name}_scale"]
    save_file({k: v for k, v in load_file(shard).items() if k != f"{name}_scale"}, shard)
    with pytest.raises(ValueError, match=f"{name}: FP8 codes without a scale"):
        dequantized_state(broken)
