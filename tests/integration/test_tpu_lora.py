# SPDX-License-Identifier: Apache-2.0
"""Expert LoRA through tpu-inference: vLLM's LoRA manager, a real PEFT adapter, this package's kernel."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import isomoe
from isomoe.common.metrics import bitwise_equal, rel_l2
from isomoe.common.tolerances import TO_RECIPE, to_truth
from isomoe.tests.integration.model_steps import Served, device_mesh
from isomoe.tests.integration.test_tpu_methods import (
    BF16,
    EXPERTS,
    HIDDEN,
    INTER,
    batch,
    build,
    expected,
    load,
    process,
    random_weights,
    run,
)

PROMPTS, LENGTH = 3, 8


def changed_copy(adapter: Path, target: Path, factor: float) -> Path:
    """The adapter with every B multiplied by `factor` (a power of two keeps it exact)."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(adapter, target)
    tensors = load_file(target / "adapter_model.safetensors")
    save_file({n: t * factor if "lora_B" in n else t for n, t in tensors.items()}, target / "adapter_model.safetensors")
    return target


@pytest.fixture(scope="module")
def adapters(samples: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "one": samples.lora_per_expert,
        "half": changed_copy(samples.lora_per_expert, folder / "half", -0.5),
        "zero": changed_copy(samples.lora_per_expert, folder / "zero", 0.0),
    }


@pytest.fixture(scope="module")
def served(vllm_config: Callable[..., Any], samples: Any, adapters: dict[str, Path]) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("ISOMOE_TPU_RECIPE", "w8a16")
    # Only experts: tpu-inference's LoRA on qkv_proj is wrong where it replicates KV heads (2 heads on 8 devices).
    config = vllm_config(
        "channel", tensor_parallel=4, enable_lora=True, max_loras=2, max_lora_rank=16, lora_target_modules=["experts"]
    )
    yield Served(config, device_mesh(8), LENGTH)
    patch.undo()


def prompts(vocab: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, vocab, size=(PROMPTS, LENGTH)).astype(np.int32)


def test_adapters_of_a_mixed_batch(served: Any, samples: Any, adapters: dict[str, Path]) -> None:
    """Adapter rows follow PEFT on transformers; base rows keep every bit of a batch without adapters."""
    from isomoe.tests.oracle import BASE, Oracle

    tokens = prompts(samples.dims.vocab_size)
    base = served.forward(tokens, served.activate([None] * PROMPTS))
    mixed = served.forward(tokens, served.activate([adapters["one"], None, adapters["half"]]))
    assert bitwise_equal(mixed[1], base[1])
    oracle = Oracle(samples.channel, {0: adapters["one"], 1: adapters["half"]})
    want = oracle.forward(tokens, [0, BASE, 1]).logits
    plain = oracle.forward(tokens, [BASE] * PROMPTS).logits
    assert rel_l2(mixed, want) <= 3e-2
    for row in (0, 2):
        assert rel_l2(want[row], plain[row]) > 0.1, "the adapter must matter"
        assert rel_l2(mixed[row] - base[row], want[row] - plain[row]) <= 1e-1


def test_slots_change_without_a_new_trace(served: Any, samples: Any, adapters: dict[str, Path]) -> None:
    """More adapters than slots: each activation evicts, refills and runs the same program."""
    tokens = prompts(samples.dims.vocab_size)
    first = served.forward(tokens, served.activate([adapters["one"]] * PROMPTS))
    traces = served.wrapper.step_fn_no_options._cache_size()
    base = served.forward(tokens, served.activate([None] * PROMPTS))
    zero = served.forward(tokens, served.activate([adapters["zero"]] * PROMPTS))
    half = served.forward(tokens, served.activate([adapters["half"]] * PROMPTS))  # the third adapter of two slots
    again = served.forward(tokens, served.activate([adapters["one"]] * PROMPTS))
    assert served.wrapper.step_fn_no_options._cache_size() == traces
    assert bitwise_equal(zero, base), "an adapter whose B is zero changes nothing"
    assert bitwise_equal(again, first), "a refilled slot gives what it gave before"
    assert rel_l2(half, base) > 0.05 and rel_l2(half, first) > 0.05


def random_adapter(adapter_id: int, rank: int, *, shared: bool) -> isomoe.LoRAAdapter:
    rng = np.random.default_rng(adapter_id)
    one = 1 if shared else EXPERTS

    def factor(*shape: int, fan_in: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(fan_in)).astype(BF16)

    return isomoe.LoRAAdapter(
        adapter_id, factor(one, 2, rank, HIDDEN, fan_in=HIDDEN), factor(EXPERTS, 2, INTER, rank, fan_in=rank),
        factor(EXPERTS, rank, INTER, fan_in=INTER), factor(one, HIDDEN, rank, fan_in=rank),
    )


@pytest.mark.parametrize(("scheme", "recipe"), [("channel", "w8a16"), ("block", "w8a8"), ("bf16", "bf16")])
@pytest.mark.parametrize("shared", [False, True], ids=["per-expert", "shared-outer"])
def test_one_layer_equals_the_reference(
    shared: bool, scheme: str, recipe: str, vllm_config: Callable[..., Any], mesh: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two adapters of different ranks and base rows in one batch, split over eight devices, per-expert and shared."""
    import torch
    from torchax.interop import jax_view, torch_view

    from isomoe.tpu_impl.tpu_inference.lora import FusedMoEWithLoRA

    monkeypatch.setenv("ISOMOE_TPU_RECIPE", recipe if recipe != "bf16" else "")
    built, weights = build(vllm_config(scheme), mesh(8)), random_weights(scheme)
    load(built, weights)
    process(built)
    assert FusedMoEWithLoRA.can_replace_layer(built.runner, None, ["w1", "w3"])
    layer = FusedMoEWithLoRA(built.runner)
    layer.create_lora_weights(3, SimpleNamespace(
        max_lora_rank=16, lora_dtype=torch.bfloat16, enable_moe_shared_loras=shared
    ))
    for name in ("w13_lora_b_stacked", "w2_lora_a_stacked"):  # per-expert factors are split like the experts
        assert {s.data.shape[1] for s in jax_view(getattr(layer, name)).addressable_shards} == {EXPERTS // 8}
    adapters = [random_adapter(11, 8, shared=shared), random_adapter(12, 16, shared=shared)]

    def tensor(a: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(a).view(np.int16)).view(torch.bfloat16)

    for slot, adapter in ((2, adapters[0]), (0, adapters[1])):
        gate_up = [tensor(adapter.a13[:, i]) for i in (0, 1)], [tensor(adapter.b13[:, i]) for i in (0, 1)]
        layer.set_lora(
            slot, [gate_up[0][0], tensor(adapter.a2), gate_up[0][1]], [gate_up[1][0], tensor(adapter.b2), gate_up[1][1]]
        )
    x, logits = batch()
    slots = np.random.default_rng(9).choice([2, 0, -1], size=len(x)).astype(np.int32)
    ids = np.select([slots == 2, slots == 0], [11, 12], -1).astype(np.int32)
    layer.set_mapping(SimpleNamespace(_get_token_lora_indices=lambda _: torch_view(jnp_array(slots))))
    got = run(built, mesh(8), x, logits)
    want, truth = expected(weights, x, logits, recipe, adapters=adapters, adapter_ids=ids)
    base, _ = expected(weights, x, logits, recipe)
    assert rel_l2(want, base) > 0.1, "the adapters must matter"
    assert rel_l2(got, want) <= TO_RECIPE.bound
    assert rel_l2(got, truth) <= to_truth(recipe, "bf16").bound
    for slot in (0, 2):
        layer.reset_lora(slot)
    emptied = run(built, mesh(8), x, logits)
    built.method.lora, built.method.ep_layer = None, replace(built.method.ep_layer, lora=None)
    assert bitwise_equal(emptied, run(built, mesh(8), x, logits)), "empty slots are the layer without adapters"


def test_a_batch_without_adapters_runs_the_program_without(
    vllm_config: Callable[..., Any], mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen at run time inside one trace; outside a trace, on the host."""
    import jax
    import jax.numpy as jnp
    import torch

    from isomoe.tpu_impl.tpu_inference import ep_layer
    from isomoe.tpu_impl.tpu_inference.lora import FusedMoEWithLoRA

    built = build(vllm_config("channel"), mesh(8))
    load(built, random_weights("channel"))
    process(built)
    layer = FusedMoEWithLoRA(built.runner)
    layer.create_lora_weights(2, SimpleNamespace(
        max_lora_rank=16, lora_dtype=torch.bfloat16, enable_moe_shared_loras=False
    ))
    layer.set_mapping(SimpleNamespace(_get_token_lora_indices=None))
    x, logits = batch()
    tensors = built.method.operands(built.layer) | layer.stacks()
    traces: list[bool] = []

    def program(rows: Any, *unused: Any, build: Any, **also_unused: Any) -> Any:
        traces.append(build.lora is not None)
        return jnp.full_like(rows, 1.0 if build.lora else 0.0)

    monkeypatch.setattr(ep_layer, "fused_moe_ep", program)
    taken = built.method.ep_layer

    def apply(slots: Any) -> Any:
        return taken.apply(jnp.asarray(x), jnp.asarray(logits), tensors, adapter_slots=slots)[0]

    base, mixed = np.full(len(x), -1, np.int32), np.full(len(x), -1, np.int32)
    mixed[-1] = 1
    jitted = jax.jit(apply)
    for how in (apply, jitted):
        traces.clear()
        assert not np.asarray(how(jnp.asarray(base))).any()
        assert np.asarray(how(jnp.asarray(mixed))).all()
        assert sorted(traces) == [False, True]


def jnp_array(a: np.ndarray) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(a)


@pytest.mark.parametrize("change", ["rank", "experts", "nan"])
def test_a_bad_adapter_leaves_its_slot_alone(
    change: str, vllm_config: Callable[..., Any], mesh: Callable[..., Any]
) -> None:
    import torch
    from torchax.interop import jax_view

    from isomoe.tpu_impl.tpu_inference.lora import FusedMoEWithLoRA

    built = build(vllm_config("channel"), mesh(2))
    load(built, random_weights("channel"))
    process(built)
    layer = FusedMoEWithLoRA(built.runner)
    layer.create_lora_weights(1, SimpleNamespace(
        max_lora_rank=16, lora_dtype=torch.bfloat16, enable_moe_shared_loras=False
    ))
    experts, rank = (EXPERTS - 1 if change == "experts" else EXPERTS), (32 if change == "rank" else 8)
    a, b, a2, b2 = (torch.ones(experts, *shape, dtype=torch.bfloat16) for shape in (
        (rank, HIDDEN), (INTER, rank), (rank, INTER), (HIDDEN, rank)
    ))
    if change == "nan":
        b2[3, 0, 0] = float("nan")
    with pytest.raises(ValueError):
        layer.set_lora(0, [a, a2, a], [b, b2, b])
    for name in ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked"):
        assert not np.asarray(jax_view(getattr(layer, name))).any(), name
