# SPDX-License-Identifier: Apache-2.0
"""`marlin` by vLLM's Marlin MoE op: all that surrounds the op, with a stand-in for it that multiplies unpacked weights;
and the op itself where vLLM and a CUDA device are."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from typer.testing import CliRunner

from isomoe.common import tolerances
from isomoe.common.cli import app
from isomoe.common.config import FusedMoEConfig
from isomoe.common.environment import collect
from isomoe.common.executors import executors, run_moe
from isomoe.common.metrics import bitwise_equal, rel_l2, worst_row
from isomoe.common.numerics import BF16
from isomoe.common.recipes import Recipe
from isomoe.common.weights import LoRAAdapter, MoEWeights, quantize_moe_weights
from isomoe.cuda_impl import aot, fused_moe, prepare_adapters, prepare_weights, vllm_marlin
from isomoe.cuda_impl._runtime import INTERPRETED, Target, recording
from isomoe.cuda_impl.bench import data, peers, reference
from isomoe.cuda_impl.moe import declared_recipe, resolve_recipe
from isomoe.cuda_impl.prepare import PreparedWeights, empty_slots, to_torch
from isomoe.tests.conformance import CHECKS, run_check, subject_for
from isomoe.tests.matrix import FP8_SCHEMES, UNEVEN, WIDE, Case

DEVICE = "cpu" if INTERPRETED else "cuda"
HAS_OP = not INTERPRETED and importlib.util.find_spec("vllm") is not None
T, K, E, H = 9, 2, 4, 256
ADAPTER_IDS = np.array([7, -1, 42, 42, 7, -1, 9, -1, 42], np.int32)


class FakeOp:
    """vLLM's names as `_vllm` gives them; weights stay unpacked. Everything the op checks or assumes is asserted."""

    e4m3 = "e4m3"

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.tiles: list[int] = []

    def workspace(self, device: torch.device, max_blocks_per_sm: int) -> torch.Tensor:
        assert max_blocks_per_sm == 4
        return torch.zeros(8, dtype=torch.int32, device=device)

    def repack(
        self, layer: Any, w13_weight: torch.Tensor, w2_weight: torch.Tensor, w13_weight_scale: torch.Tensor,
        w2_weight_scale: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        self.layers.append(layer)
        experts, hidden, inter = layer.num_experts, layer.hidden_size, layer.intermediate_size_per_partition
        rows = w13_weight.shape[1]
        assert w13_weight.shape == (experts, rows, hidden) and w2_weight.shape == (experts, hidden, inter)
        assert w13_weight.dtype == w2_weight.dtype == torch.float8_e4m3fn and layer.w13_weight is w13_weight
        assert rows in (inter, 2 * inter) and rows % 128 == 0 and inter % 64 == 0 and hidden % 128 == 0
        block = layer.weight_block_size

        def spread(scale: torch.Tensor, columns: int, depth: int) -> torch.Tensor:
            assert bool((scale.flatten(1).amax(1) < 1).all())
            scale = scale.to(layer.orig_dtype)
            if block is None:
                assert scale.numel() == experts * columns
                return scale.view(experts, 1, columns)
            groups = scale.permute(0, 2, 1).repeat_interleave(block[0], 2)[..., :columns].contiguous()
            assert depth == groups.shape[1] * block[1]
            return groups

        scales = (spread(w13_weight_scale, rows, hidden), spread(w2_weight_scale, hidden, inter))
        return w13_weight.clone(), w2_weight.clone(), *scales

    def gemm(
        self, *, input: torch.Tensor, output: torch.Tensor, b_qweight: torch.Tensor, b_bias: None,
        b_scales: torch.Tensor, a_scales: None, global_scale: None, b_qzeros: None, workspace: torch.Tensor,
        sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor, num_tokens_past_padded: torch.Tensor,
        topk_weights: torch.Tensor, moe_block_size: int, top_k: int, mul_topk_weights: bool, b_q_type: str, size_m: int,
        size_n: int, size_k: int, use_atomic_add: bool, use_fp32_reduce: bool, is_zp_float: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert input.shape == (size_m, size_k) and output.shape == (size_m * top_k, size_n)
        assert input.dtype == output.dtype == b_scales.dtype == torch.float16 and b_q_type == self.e4m3
        assert b_qweight.shape[1:] == (size_n, size_k) and b_scales.shape[2] == size_n
        assert sorted_token_ids.dtype == expert_ids.dtype == num_tokens_past_padded.dtype == torch.int32
        assert moe_block_size in (8, 16, 32, 48, 64) and topk_weights.dtype == torch.float32
        assert not mul_topk_weights and not use_atomic_add and not is_zp_float and use_fp32_reduce
        self.tiles.append(moe_block_size)
        groups = b_scales.shape[1]
        output.fill_(torch.nan)  # what the op does not write must not matter
        for tile in range(int(num_tokens_past_padded) // moe_block_size):
            pairs = sorted_token_ids[tile * moe_block_size : (tile + 1) * moe_block_size].long()
            kept = pairs < size_m * top_k
            assert bool((pairs >= 0).all()) and bool((kept == kept.cummin(0).values).all()), "padding comes last"
            pairs, expert = pairs[kept], int(expert_ids[tile])
            w, scale = b_qweight[expert].float(), b_scales[expert].float()
            if groups > 1:  # a weight times its group's scale is 16-bit
                w = (w.view(size_n, groups, -1) * scale.T[:, :, None]).half().float().view(size_n, size_k)
            y = input[pairs // top_k].float() @ w.T
            output[pairs] = (y if groups > 1 else y * scale).half()
        return output


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> FakeOp:
    fake = FakeOp()
    monkeypatch.setenv("ISOMOE_MARLIN", "vllm")
    monkeypatch.setattr(vllm_marlin, "_vllm", lambda: fake)
    monkeypatch.setattr(vllm_marlin, "why_not_here", lambda: None)
    return fake


def _normal(rng: np.random.Generator, *shape: int, fan: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)


def _weights(scheme: str, inter: int, gated: bool = True) -> MoEWeights:
    rng = np.random.default_rng(0)
    loud = np.exp2(rng.integers(-3, 4, (E, 1, 1)))  # experts of unlike loudness
    w13 = _normal(rng, E, (1 + gated) * inter, H, fan=H) * loud
    return quantize_moe_weights(w13.astype(np.float32), _normal(rng, E, H, inter, fan=inter), scheme)


def _adapters(inter: int, gated: bool = True) -> tuple[LoRAAdapter, ...]:
    def one(adapter_id: int, rank: int) -> LoRAAdapter:
        rng = np.random.default_rng(adapter_id)
        return LoRAAdapter(
            adapter_id, _normal(rng, E, 1 + gated, rank, H, fan=H).astype(BF16),
            _normal(rng, E, 1 + gated, inter, rank, fan=rank).astype(BF16),
            _normal(rng, E, rank, inter, fan=inter).astype(BF16), _normal(rng, E, H, rank, fan=rank).astype(BF16),
        )  # fmt: skip

    return one(7, 16), one(42, 4), one(9, 40)


def _batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((T, H)).astype(BF16)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    ids[0, 1], ids[6, 0], ids[7] = -1, E + 4, -1
    return x, rng.dirichlet(np.ones(K), T).astype(np.float32), ids


def _check(weights: MoEWeights, config: FusedMoEConfig, adapters: tuple[LoRAAdapter, ...]) -> None:
    """Whole output and delta against the reference of the declared recipe; base rows bit for bit."""
    x, tw, ids = _batch()

    def run(executor: str, loaded: tuple[LoRAAdapter, ...]) -> np.ndarray:
        return run_moe(
            executor, x, tw, ids, weights, config=config, recipe="w8a16", adapters=loaded or None,
            adapter_ids=ADAPTER_IDS if loaded else None,
        )  # fmt: skip

    got, want, base, want_base = (run(e, a) for a in (adapters, ()) for e in ("marlin", "reference"))
    used = ADAPTER_IDS >= 0
    assert rel_l2(got, want) <= tolerances.TO_RECIPE.bound and worst_row(got, want) <= tolerances.WORST_ROW.bound
    assert rel_l2(base, want_base) <= tolerances.TO_RECIPE.bound
    delta, true_delta = (a[used].astype(np.float32) - b[used].astype(np.float32) for a, b in
                         ((got, base), (want, want_base)))  # fmt: skip
    assert rel_l2(delta, true_delta) <= 2 * tolerances.DELTA.bound  # of a difference of two bf16 results
    assert bitwise_equal(got[~used], base[~used])


LAYER_CASES = [
    (scheme, inter, gated) for scheme in FP8_SCHEMES
    for inter, gated in ((208, True), (72, True), (72, False), (192, False))
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "inter", "gated"), LAYER_CASES)
def test_dimensions_that_are_no_tiles(op: FakeOp, scheme: str, inter: int, gated: bool) -> None:
    config = FusedMoEConfig(E, K, H, inter, activation="silu" if gated else "relu2", is_act_and_mul=gated)
    _check(_weights(scheme, inter, gated), config, _adapters(inter, gated))
    assert op.layers[0].intermediate_size_per_partition > inter or (inter == 192 and scheme != "block")


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swigluoai"])
def test_activations(op: FakeOp, activation: str) -> None:
    config = FusedMoEConfig(E, K, H, 96, activation=activation)
    _check(_weights("channel", 96), config, _adapters(96))


MATRIX = [
    *(Case(s, "w8a16", lora) for s in FP8_SCHEMES for lora in ("none", "mixed", "shared_outer")),
    Case("channel", "w8a16", "mixed", bias=True), Case("block", "w8a16", "none", bias=True),
    Case("block", "w8a16", "mixed", routing="skipped"), Case("channel", "w8a16", "mixed", routing="one_expert"),
    Case("channel", "w8a16", "mixed", tokens=1), Case("block", "w8a16", "mixed", shape=UNEVEN),
    Case("block", "w8a16", "mixed", shape=WIDE, tokens=5),
]  # fmt: skip
INVARIANT = Case("channel", "w8a16", "mixed")
CELLS = [
    *(("parity", case) for case in MATRIX),
    ("expert_parallel", Case("channel", "w8a16", "mixed", ep=4)),
    ("expert_parallel", Case("block", "w8a16", "mixed", ep=2)),
    *((name, case) for name in sorted(set(CHECKS) - {"parity", "expert_parallel"}) for case in
      (INVARIANT, replace(INVARIANT, scheme="block"))),
]  # fmt: skip


@pytest.mark.parametrize(("check", "case"), CELLS, ids=lambda v: str(v))
def test_the_contract(op: FakeOp, check: str, case: Case) -> None:
    result = run_check(check, subject_for("marlin"), case)
    assert result.verdict == "pass", str(result)
    assert op.layers or check == "empty_batch", "the op ran"


def _call(weights: Any, **options: Any) -> torch.Tensor:
    x, tw, ids = (to_torch(a, DEVICE) for a in _batch())
    return fused_moe(x, tw, ids, weights, **({"recipe": "w8a16"} | options))


def test_weights_are_repacked_once_and_let_go(op: FakeOp) -> None:
    first, second = (prepare_weights(_weights("channel", 96), DEVICE) for _ in range(2))
    kept = len(vllm_marlin._packed)
    results = [_call(w) for w in (first, first, second, first)]
    assert len(op.layers) == 2 and all(torch.equal(r, results[0]) for r in results)
    # The same codes with other scales are other weights.
    assert first.w2_scale is not None
    louder = _call(replace(first, w2_scale=first.w2_scale * 2))
    assert len(op.layers) == 3 and torch.allclose(louder.float(), 2 * results[0].float(), rtol=1e-2)
    assert len(vllm_marlin._packed) == kept + 2
    op.layers.clear()
    del first, second
    gc.collect()
    assert len(vllm_marlin._packed) == kept


def test_the_ops_tiles_do_not_know_adapters(op: FakeOp) -> None:
    weights, config = prepare_weights(_weights("block", 96), DEVICE), FusedMoEConfig(E, K, H, 96)
    slots = prepare_adapters(_adapters(96), config, device=DEVICE)
    base = _call(weights)
    idle = _call(weights, adapters=slots, adapter_ids=to_torch(np.full(T, -1, np.int32), DEVICE))
    assert op.tiles == [8] * 4 and torch.equal(base, idle)
    for pairs, rows in ((57, 8), (58, 16), (10_000, 64)):
        assert vllm_marlin.tile_rows(pairs, 8) == rows


@pytest.mark.parametrize("gated", [True, False])
def test_a_recipe_says_how_result_rows_are_stored(op: FakeOp, gated: bool) -> None:
    """A name stores no further rounding; bf16 rows, when asked for, round with and without adapters alike."""
    weights = prepare_weights(_weights("channel", 96, gated), DEVICE)
    activation = "silu" if gated else "gelu"
    assert resolve_recipe("w8a16", weights) == declared_recipe("w8a16", weights, T, K, E) == Recipe("w8a16")
    by_name, plain, rounded = (
        _call(weights, recipe=r, activation=activation, out_dtype=torch.float32)
        for r in ("w8a16", Recipe("w8a16"), Recipe("w8a16").with_bf16_storage())
    )
    assert torch.equal(by_name, plain) and not torch.equal(plain, rounded)
    assert rel_l2(rounded.cpu().numpy(), plain.cpu().numpy()) < tolerances.TO_RECIPE.bound
    slots = prepare_adapters(
        _adapters(96, gated), FusedMoEConfig(E, K, H, 96, activation=activation, is_act_and_mul=gated), device=DEVICE
    )
    idle = _call(
        weights, recipe=Recipe("w8a16").with_bf16_storage(), activation=activation, out_dtype=torch.float32,
        adapters=slots, adapter_ids=to_torch(np.full(T, -1, np.int32), DEVICE),
    )  # fmt: skip
    assert torch.equal(idle, rounded)


def test_extreme_rows_and_scales_stay_in_range(op: FakeOp) -> None:
    """Rows and experts many powers of two apart come out as loud as they are: f16 alone would overflow or vanish."""
    x, tw, ids = (to_torch(a, DEVICE) for a in _batch())
    power = torch.exp2(torch.tensor([30.0, -30, 0, 20, -20, 10, -10, 0, 5], device=DEVICE))[:, None]
    options: dict[str, Any] = {"activation": "relu2", "recipe": "w8a16", "out_dtype": torch.float32}
    relu = prepare_weights(_weights("block", 96, gated=False), DEVICE)
    assert relu.w2_scale is not None
    quiet = replace(relu, w2_scale=relu.w2_scale * 2.0**-40)
    want = fused_moe(x, tw, ids, relu, **options) * power**2 * 2.0**-40
    got = fused_moe((x.float() * power).bfloat16(), tw, ids, quiet, **options)
    assert torch.isfinite(got).all() and torch.equal(got, want)


def test_operator_contract(op: FakeOp) -> None:
    weights = prepare_weights(_weights("channel", 96), DEVICE)
    x, tw, ids = (to_torch(a, DEVICE) for a in _batch())
    call = lambda x, tw, ids: fused_moe(x, tw, ids, weights, recipe="w8a16")  # noqa: E731
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(x, tw, ids), call(x, tw, ids))
    assert len(op.layers) == 1
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call(mode.from_tensor(x), mode.from_tensor(tw), mode.from_tensor(ids))
    assert fake.shape == x.shape and fake.dtype == torch.bfloat16


def test_which_of_the_two_runs_is_visible(op: FakeOp, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "vLLM" in executors()["marlin"].detail and "Marlin MoE op" in executors()["marlin"].detail
    assert "vLLM" not in executors()["triton"].detail
    monkeypatch.setenv("ISOMOE_PLATFORM", "cuda-9.0")
    for options in ((), ("--json",)):
        explained = CliRunner().invoke(app, ["explain", "--moe-backend", "marlin", *options]).output
        assert executors()["marlin"].detail in explained
    assert executors()["marlin"].detail in collect().executors["marlin"][1]
    monkeypatch.setenv("ISOMOE_MARLIN", "own")
    assert "this package's" in executors()["marlin"].detail
    _call(prepare_weights(_weights("channel", 96), DEVICE))
    assert not op.layers


def _forbid_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from isomoe.cuda_impl import _runtime, align, quantize

    def forbidden(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("launched")

    for module in (_runtime, align, quantize, vllm_marlin):
        monkeypatch.setattr(module, "launch", forbidden)


def test_what_cannot_be_had_is_an_error_before_any_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    _forbid_launches(monkeypatch)
    weights, config = _weights("channel", 96), FusedMoEConfig(E, K, H, 96)
    prepared = prepare_weights(weights, DEVICE)
    cases = {"marlin": "ISOMOE_MARLIN: got 'marlin', want one of own, vllm"}
    if not HAS_OP:
        cases["vllm"] = "vllm is not installed|no CUDA device"
    for value, message in cases.items():
        monkeypatch.setenv("ISOMOE_MARLIN", value)
        assert executors()["marlin"].state == "unavailable" and executors()["triton"].state != "unavailable"
        with pytest.raises(RuntimeError, match=f"'marlin' is unavailable: .*({message})"):
            run_moe("marlin", *_batch(), weights, config=config)
        with pytest.raises((RuntimeError, ValueError), match=message):
            _call(prepared)


def test_layers_and_modes_the_op_has_no_form_for(op: FakeOp, monkeypatch: pytest.MonkeyPatch) -> None:
    _forbid_launches(monkeypatch)
    rng = np.random.default_rng(0)
    narrow = quantize_moe_weights(_normal(rng, E, 128, 192, fan=192), _normal(rng, E, 192, 64, fan=64), "channel")
    x, tw, ids = _batch()
    with pytest.raises(ValueError, match="got H=192, want a multiple of 128"):
        run_moe("marlin", np.ascontiguousarray(x[:, :192]), tw, ids, narrow, config=FusedMoEConfig(E, K, 192, 64))
    monkeypatch.setenv("ISOMOE_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="ISOMOE_BATCH_INVARIANT=1"):
        _call(prepare_weights(_weights("channel", 96), DEVICE))
    assert not op.layers


def test_a_first_call_under_capture_is_refused(op: FakeOp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(vllm_marlin, "_packed", {})
    with pytest.raises(RuntimeError, match="under a CUDA graph's capture"):
        vllm_marlin.packed_form(*[Mock(is_cuda=True)] * 4)
    assert not op.layers


def print_compiled(capability: tuple[int, int]) -> None:
    """For a process with TRITON_INTERPRET=0: this module's kernels as `aot` compiles them, one line each."""
    config = FusedMoEConfig(128, 8, 2048, 208, has_bias=True)
    experts, hidden, inter = config.num_experts, config.hidden_dim, config.intermediate_size

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    vllm_marlin._vllm = lambda: types.SimpleNamespace(  # type: ignore[assignment]
        gemm=lambda **_: None, e4m3=None, workspace=lambda device, blocks: empty(blocks, dtype=torch.int32),
        repack=lambda layer, w13, w2, s13, s2: (w13, w2, s13.half(), s2.half()),
    )  # fmt: skip
    vllm_marlin.why_not_here = lambda: None  # type: ignore[assignment]
    vllm_marlin._layer_op = vllm_marlin._layer  # type: ignore[assignment]
    weights = PreparedWeights(
        empty(experts, 2 * inter, hidden, dtype=torch.uint8), empty(experts, hidden, inter, dtype=torch.uint8),
        empty(experts, 2 * inter), empty(experts, hidden), empty(experts, 2 * inter), empty(experts, hidden),
    )  # fmt: skip
    slots = empty_slots(config, max_loras=4, max_lora_rank=64, device="meta")
    for tokens in (64, 8192):
        ids = empty(tokens, 8, dtype=torch.int32)
        with recording(capability) as launches:
            vllm_marlin.marlin_moe(
                empty(tokens, hidden, dtype=torch.bfloat16), empty(tokens, 8), ids, weights, adapters=slots,
                adapter_ids=empty(tokens, dtype=torch.int32),
            )  # fmt: skip
        for launch in launches:
            if launch.kernel.fn.__module__ == vllm_marlin.__name__:
                report = aot._compile(launch, 10 * capability[0] + capability[1])
                print(json.dumps([report.kernel, report.shared_bytes, report.spill_bytes, report.error]))


@pytest.mark.timeout(280)
@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_kernels_compile_and_fit(capability: tuple[int, int]) -> None:
    program = f"from isomoe.tests.test_cuda_vllm_marlin import print_compiled; print_compiled({capability})"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kernel for kernel, *_ in found] == ["_f16_rows_kernel", "_finish_kernel"] * 4
    for kernel, shared, spilled, error in found:
        assert not error and shared <= Target(capability).shared_memory and spilled <= 1024, (kernel, spilled, error)


@pytest.mark.parametrize("scheme", ["block", "channel"])
def test_the_benchmarks_peer(op: FakeOp, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There where vLLM is beside a CUDA device, whatever the variable says, and held to the recipe it declares."""
    assert bool(peers._marlin_op()) == HAS_OP
    monkeypatch.setenv("ISOMOE_MARLIN", "own")
    with monkeypatch.context() as pretend:
        pretend.setattr(peers._runtime, "INTERPRETED", False)
        pretend.setattr(importlib.util, "find_spec", lambda name: name)
        (peer,) = peers._marlin_op()
    layer, setting = data.Layer("tiny-ep", 256, 96, 8, 4, 2), data.LoraSetting(2, 8)
    layer_data = peers.LayerData(layer, scheme, data.random_weights(layer, scheme, DEVICE), torch.device(DEVICE))
    batch = data.random_batch(layer, 5, 0, DEVICE, adapters=2)
    problem = peers.Problem(layer_data, setting, data.random_adapters(layer, setting, DEVICE), (batch,))
    assert peer.own and peer.why_not(problem) is None and "Marlin MoE op" in peer.plan(problem)
    recipe, bound = peer.declared(problem)
    want = reference.layer_f32(batch, layer_data.weights, recipe, problem.adapters)
    assert recipe == Recipe("w8a16") and reference.rel_l2(peer.build(problem)[0](), want) <= bound
    assert len(op.layers) == 1
    own = {p.name: p for p in peers.OWN}["isomoe marlin"]
    assert "Marlin MoE op" not in own.plan(problem)
    monkeypatch.setenv("ISOMOE_MARLIN", "vllm")
    assert "Marlin MoE op" in own.plan(problem)


@pytest.mark.parametrize("old", [True, False])
def test_both_forms_of_the_op_are_called_by_name(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 has three arguments of the order of activations, which 0.33 dropped."""
    names = list(inspect.signature(FakeOp().gemm).parameters)
    extra = ["g_idx", "perm", "is_k_full"] if old else []
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names + extra]
    seen: list[dict] = []

    def gemm(**arguments: Any) -> None:
        seen.append(arguments)

    gemm.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    module = types.SimpleNamespace(
        moe_wna16_marlin_gemm=gemm, prepare_fp8_moe_layer_for_marlin=None, marlin_make_workspace_new=None,
        scalar_types=types.SimpleNamespace(float8_e4m3fn=0),
    )  # fmt: skip
    monkeypatch.setattr(vllm_marlin.importlib, "import_module", lambda name: module)
    made = vllm_marlin._vllm.__wrapped__()
    made.gemm(**dict.fromkeys(names))
    assert sorted(seen[0]) == sorted(names + extra)


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@needs_vllm
@pytest.mark.parametrize(("scheme", "inter", "gated"), LAYER_CASES)
def test_vllms_helper_makes_the_stand_ins_scales(
    scheme: str, inter: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its permutation and the 2**8 of e4m3's exponent apart, and with the shapes that the op checks."""
    import vllm.model_executor.layers.quantization.utils.marlin_utils as utils
    import vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 as helper

    def repack(b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, **_: Any) -> torch.Tensor:
        assert b_q_weight.shape == (size_k // 4, size_n) and b_q_weight.dtype == torch.int32 and num_bits == 8
        return b_q_weight.new_zeros((size_k // 16, size_n * 4))

    monkeypatch.setattr(helper.ops, "gptq_marlin_repack", repack)
    fake = FakeOp()
    monkeypatch.setattr(helper, "marlin_make_workspace_new", fake.workspace, raising=False)
    w = prepare_weights(_weights(scheme, inter, gated), "cpu")
    assert w.w13_scale is not None and w.w2_scale is not None
    tensors = (w.w13, w.w2, w.w13_scale, w.w2_scale)
    made = vllm_marlin.pack(*tensors)
    monkeypatch.setattr(vllm_marlin, "_vllm", lambda: fake)
    plain = vllm_marlin.pack(*tensors)
    rows = (1 + gated) * plain.padded
    assert made.padded == plain.padded
    assert made.w13.shape == (E, H // 16, 4 * rows) and made.w2.shape == (E, plain.padded // 16, 4 * H)
    for got, want, depth in ((made.w13_scale, plain.w13_scale, H), (made.w2_scale, plain.w2_scale, plain.padded)):
        group = depth // want.shape[1]
        for e in range(E):
            permuted = utils.marlin_permute_scales(want[e], depth, want.shape[2], -1 if group == depth else group)
            assert torch.equal(got[e], permuted * 256)


@needs_vllm
def test_arguments_are_those_of_the_installed_vllm() -> None:
    vllm_marlin._vllm.cache_clear()
    found = vllm_marlin._vllm()
    inspect.signature(found.gemm.func).bind(**dict.fromkeys(inspect.signature(FakeOp().gemm).parameters),
                                            **found.gemm.keywords)  # fmt: skip
    assert list(inspect.signature(found.repack).parameters) == list(inspect.signature(FakeOp().repack).parameters)
    assert list(inspect.signature(found.workspace).parameters) == list(inspect.signature(FakeOp().workspace).parameters)


# On a GPU with vLLM: the op itself.

on_gpu = pytest.mark.skipif(not HAS_OP, reason="needs vllm and a CUDA device")


@pytest.fixture
def real_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOMOE_MARLIN", "vllm")
    assert vllm_marlin.why_not_here() is None


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("check", "case"), CELLS, ids=lambda v: str(v))
def test_gpu_contract(real_op: None, check: str, case: Case) -> None:
    result = run_check(check, subject_for("marlin"), case)
    assert result.verdict == "pass", str(result)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("scheme", "inter", "gated"), LAYER_CASES)
def test_gpu_dimensions_that_are_no_tiles(real_op: None, scheme: str, inter: int, gated: bool) -> None:
    config = FusedMoEConfig(E, K, H, inter, activation="silu" if gated else "relu2", is_act_and_mul=gated)
    _check(_weights(scheme, inter, gated), config, _adapters(inter, gated))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 300])
def test_gpu_graph_replays_what_eager_calls_compute(real_op: None, tokens: int) -> None:
    """At every tile height of the op, with adapters; a capture after the first call replays the same bits."""
    layer = data.Layer("odd inside", 1024, 208, 24, 24)
    weights = data.random_weights(layer, "block", "cuda")
    setting = data.LoraSetting(2, 16)
    slots = data.random_adapters(layer, setting, "cuda")
    batch = data.random_batch(layer, tokens, 0, "cuda", adapters=2)

    def call() -> torch.Tensor:
        return fused_moe(
            batch.x, batch.topk_weights, batch.topk_ids, weights, recipe="w8a16", adapters=slots,
            adapter_ids=batch.adapter_ids, expert_map=batch.expert_map,
        )  # fmt: skip

    want = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.isfinite(want).all() and torch.equal(got, want)
