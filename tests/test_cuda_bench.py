# SPDX-License-Identifier: Apache-2.0
"""`isomoe bench --cuda`: everything but the device's clock, on small layers and interpreted kernels."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from typer.testing import CliRunner

from isomoe.common.cli import app
from isomoe.common.recipes import Recipe, default_recipe
from isomoe.cuda_impl.bench import clock, data, figures, main, peers, report, roofline, run
from isomoe.cuda_impl.bench.figures import BASE, IDLE_VARIANT, Row
from isomoe.cuda_impl.bench.reference import layer_f32, rel_l2
from isomoe.cuda_impl.prepare import prepare_adapters, prepare_weights, to_torch
from isomoe.tests.matrix import Case, build

TINY = data.Layer("tiny", 256, 128, 8, 8, 2)
RATES = roofline.Rates(1e12, 2e14, 1e14, "made up")
LORA = data.LoraSetting(2, 8)


class FakeClock:
    """10 us for a call, 15 for one with adapters; every call runs once."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def time(self, calls: Mapping[str, clock.Calls], rounds: int) -> dict[str, clock.Timing | str]:
        self.names += calls
        for several in calls.values():
            assert several[0]().shape[1] == TINY.hidden
        return {n: clock.Timing.of([10.0 if n.endswith(BASE) else 15.0] * rounds) for n in calls}


def _plan(**changes) -> run.Plan:
    return run.Plan(**{"layers": [TINY], "schemes": ["block"], "tokens": [3], "rounds": 2, "device": "cpu"} | changes)


def test_a_whole_run_writes_rows_goals_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrower terminal shortens names
    fake = FakeClock()
    plan = _plan(schemes=["block", "channel"], loras=[data.LoraSetting(), LORA])
    main.bench(main.Options(out=tmp_path), clock=fake, rates=RATES, plan=plan)
    written = json.loads((tmp_path / "bench.json").read_text())
    rows = [Row(**r) for r in written["rows"]]
    own = [r for r in rows if r.backend in ("isomoe triton", "isomoe marlin")]
    assert len(own) == 2 * 2 * (1 + 3) and all(r.verdict == "ok" for r in own)
    assert all(r.us and r.floor_us and r.plan.startswith("portable") for r in own)
    assert all(r.rel_l2 < r.bound for r in own if not r.variant)
    assert all(r.bitwise for r in own if r.variant == IDLE_VARIANT)
    absent = {r.backend: r.reason for r in rows if r.verdict == "absent"}
    assert {f"vllm {b}" for b in ("triton", "marlin", "cutlass", "deepgemm")} <= set(absent)
    assert all(absent.values())
    assert (tmp_path / "bench.png").stat().st_size > 1000
    assert written["rates"]["source"] == "made up" and written["skipped_cells"] == 0
    goals = {f["name"]: f for f in written["figures"]}
    assert goals["own rows that are wrong or failed"]["ok"] is True
    assert goals["cells whose idle bits differ from no LoRA"]["ok"] is True
    assert goals["adapters loaded, none used by any id, over no LoRA"]["value"] == pytest.approx(1.5)
    shown = capsys.readouterr().out
    assert "isomoe triton (idle)" in shown and "reported" in shown and "not run" in shown


def test_wrong_and_failing_peers_are_rows_and_are_not_timed() -> None:
    own = peers.OWN[0]

    def broken(problem):
        raise RuntimeError("no such kernel")

    several = (
        dataclasses.replace(own, name="zeros", build=lambda p: [lambda: torch.zeros(3, 256)]),
        dataclasses.replace(own, name="nan", build=lambda p: [lambda: torch.full((3, 256), float("nan"))]),
        dataclasses.replace(own, name="rough", build=lambda p: [lambda: own.build(p)[0]() * 1.01]),
        dataclasses.replace(own, name="broken", build=broken),
        dataclasses.replace(own, name="isomoe triton"),
    )
    fake = FakeClock()
    rows = {r.backend: r for r in run.Runner(_plan(), several, fake, RATES).run()}
    assert {n: r.verdict for n, r in rows.items()} == {
        "zeros": "wrong", "nan": "wrong", "rough": "wrong", "broken": "error",
        "isomoe triton": "ok",
    }  # fmt: skip
    assert "no such kernel" in rows["broken"].reason and rows["nan"].rel_l2 is None
    assert fake.names == ["rough|", "isomoe triton|"] and rows["rough"].us and rows["zeros"].us is None


def test_a_capture_that_fails_is_a_row() -> None:
    class Refuses:
        def time(self, calls, rounds):
            return {n: "RuntimeError: capture" for n in calls}

    (row,) = run.Runner(_plan(), peers.OWN[:1], Refuses(), RATES).run()
    assert (row.verdict, row.reason, row.us) == ("error", "RuntimeError: capture", None)


def test_cells_beyond_the_time_limit_are_counted() -> None:
    runner = run.Runner(_plan(tokens=[1, 2], limit_s=-1.0), peers.OWN, FakeClock(), RATES)
    assert runner.run() == [] and runner.skipped == 2


@pytest.mark.parametrize("scheme", ["block", "channel", "tensor"])
@pytest.mark.parametrize("lora", ["none", "mixed", "shared_outer"])
def test_the_torch_reference_is_the_numpy_one(scheme: str, lora: str) -> None:
    case = Case(scheme, "w8a8", lora, routing="skipped")
    inputs = build(case)
    weights = prepare_weights(inputs.weights, "cpu")
    adapters = prepare_adapters(inputs.adapters, case.config, device="cpu") if inputs.adapters else None
    ids = to_torch(inputs.topk_ids, "cpu")
    batch = data.Batch(
        to_torch(inputs.x, "cpu"), to_torch(inputs.topk_weights, "cpu"), ids,
        None if inputs.adapter_ids is None else to_torch(inputs.adapter_ids, "cpu"), None,
        torch.where((ids >= 0) & (ids < 8), ids, -1),
    )  # fmt: skip
    recipe = default_recipe("w8a8", scheme)
    got = layer_f32(batch, weights, recipe, adapters)
    want = inputs.run("reference", recipe=recipe).astype(np.float32)
    assert rel_l2(got, torch.from_numpy(want)) < 3e-3  # the rounding of the result to bf16
    assert rel_l2(layer_f32(batch, weights, Recipe("w8a16"), adapters), torch.from_numpy(want)) > 1e-2


@pytest.mark.parametrize("scheme", ["block", "channel", "tensor", "bf16"])
def test_random_weights_hold_what_the_kernels_read(scheme: str) -> None:
    layer = data.Layer("odd", 144, 80, 3, 3, 2)
    weights = data.random_weights(layer, scheme, "cpu")
    batch = data.random_batch(layer, 5, 0, "cpu")
    recipe = "bf16" if scheme == "bf16" else "w8a16"
    from isomoe.cuda_impl.moe import fused_moe

    got = fused_moe(batch.x, batch.topk_weights, batch.topk_ids, weights, recipe=recipe)
    assert rel_l2(got, layer_f32(batch, weights, Recipe("w8a16"))) < 5e-3


def test_layers_by_name() -> None:
    assert data.find_layer("480B-EP8") == data.Layer("480B-EP8", 6144, 2560, 160, 20)
    assert data.find_layer("30b").local == 128
    assert data.find_layer("deepseek-v3").experts == 256
    with pytest.raises(ValueError, match="--model"):
        data.find_layer("31B")
    with pytest.raises(ValueError, match="divides 160"):
        data.find_layer("480B-EP7")


def test_routings() -> None:
    gen = torch.Generator().manual_seed(0)
    layer = data.find_layer("480B-EP8")
    ids = data.route_ids(layer, 4096, "zipf", gen)
    share = torch.bincount(ids.flatten()) / ids.numel()
    assert abs(float(share[0]) - 0.2) < 0.01 and int(share.argmax()) == 0
    assert sum(data.zipf(160)) == pytest.approx(1.0)
    hot = data.route_ids(layer, 64, "hot8", gen)
    assert hot.unique().tolist() == list(range(8)) and all(len(set(r)) == 8 for r in hot.tolist())
    one = data.route_ids(layer, 1, "uniform", gen)
    assert int((one < layer.local).sum()) == 1
    uniform = data.route_ids(layer, 50, "uniform", gen)
    assert uniform.dtype == torch.int32 and all(len(set(r)) == 8 for r in uniform.tolist())
    assert int((data.route_ids(layer, 50, "skipped", gen) < 0).sum()) > 0


def test_batches_differ_in_rows_and_share_adapters() -> None:
    a, b = (data.random_batch(TINY, 9, i, "cpu", adapters=3) for i in range(2))
    assert not torch.equal(a.x, b.x) and torch.equal(a.adapter_ids, b.adapter_ids)
    assert set(a.adapter_ids.tolist()) <= {-1, 100, 101, 102}
    assert (a.idle().adapter_ids == -1).all()


def test_work_and_floors_by_hand() -> None:
    ids = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
    adapter = torch.tensor([100, -1], dtype=torch.int32)
    batch = data.Batch(torch.zeros(2, 256), torch.ones(2, 2), ids, adapter, None, ids)
    plain = roofline.work_of(TINY, "channel", batch, data.LoraSetting())
    expert = 3 * 256 * 128 + 4 * (2 * 128 + 256)
    assert plain.bytes == 3 * expert + 2 * 2 * 256 * 2
    assert plain.flops == 4 * 6 * 256 * 128
    lora = roofline.work_of(TINY, "channel", batch, LORA)
    assert lora.lora_bytes == 2 * 8 * 3 * 2 * (256 + 128)  # two pairs (expert, adapter)
    assert lora.lora_flops == 2 * 8 * 3 * (256 + 128) * 2
    shared = roofline.work_of(TINY, "channel", batch, data.LoraSetting(2, 8, True))
    assert shared.lora_bytes == 2 * 8 * 3 * (256 + 2 * 128)
    slow = roofline.Rates(1e6, 1e6, 1e5)
    assert roofline.floor_us(plain, slow, "w8a8") == pytest.approx(max(plain.bytes, plain.flops))
    assert roofline.floor_us(plain, slow, "bf16") == pytest.approx(10 * plain.flops)
    assert roofline.lora_floor_us(lora, slow) == pytest.approx(max(lora.lora_bytes, 10 * lora.lora_flops))


def _row(tokens: int, us: float, backend: str = figures.OWN, **changes) -> Row:
    return Row(**{
        "model": "m", "scheme": "block", "routing": "uniform", "lora": "none", "tokens": tokens, "backend": backend,
        "us": us, "floor_us": 10.0, "lora_floor_us": 2.0, "rel_l2": 1e-3,
    } | changes)  # fmt: skip


def _figure(rows: list[Row], start: str) -> figures.Figure:
    (found,) = [f for f in figures.figures(rows) if f.name.startswith(start)]
    return found


def test_goals_against_the_best_vllm_path_of_any_scheme() -> None:
    name = "over the best vLLM path, no LoRA, block, geometric mean"
    rows = [
        _row(64, 10.0), _row(64, 13.5, "vllm triton"), _row(64, 13.0, "vllm marlin", scheme="channel"),
        _row(64, 20.0, "vllm deepgemm"), _row(8, 1.0, "vllm triton"),
    ]  # fmt: skip
    found = _figure(rows, name)
    assert found.ok and found.value == pytest.approx(1.3)
    assert _figure([_row(64, 10.1), *rows[1:]], name).ok is False
    each = "over the best vLLM path, no LoRA, each"
    assert _figure([*rows, _row(8, 1.0)], each).ok is True
    assert _figure([*rows, _row(8, 1.03)], each).ok is False
    assert _figure(rows[:1], each).value is None


def test_goals_of_skewed_batches_adapters_and_w8a16() -> None:
    def beside(us: float, **changes) -> list[Row]:
        return [_row(64, 10.0, **changes), _row(64, us, "vllm triton", **changes)]

    skewed = "the same, skewed routing"
    assert _figure(beside(12.1, routing="zipf"), skewed).ok is True
    assert _figure([*beside(12.1, routing="zipf"), *beside(11.0, routing="hot8")], skewed).ok is False
    lora = "over the best vLLM path with the same LoRA"
    assert _figure(beside(20.1, lora="r16 x 8"), f"{lora}, block").ok is True
    assert _figure(beside(19.9, lora="r16 x 8"), f"{lora}, block").ok is False
    assert _figure(beside(12.4, lora="r16 x 8"), f"{lora}, each").ok is False
    marlin = "W8A16 over W8A8, T <= 64"
    assert _figure([_row(64, 10.0), _row(64, 10.6, figures.OWN_W8A16)], marlin).ok is True
    assert _figure([_row(64, 10.0), _row(64, 10.7, figures.OWN_W8A16)], marlin).ok is False
    assert _figure([_row(256, 10.0), _row(256, 12.0, figures.OWN_W8A16)], marlin).value is None


@pytest.mark.parametrize(
    ("tokens", "good", "bad", "name"),
    [
        (1, 20.0, 20.1, "over floor, T = 1"),
        (64, 11.3, 11.5, "over floor, T = 64, block"),
        (1024, 16.0, 16.1, "over floor, T = 1024"),
        (4096, 23.5, 23.6, "over floor, T >= 4096, block, geometric mean"),
        (8192, 26.0, 26.1, "over floor, T >= 4096, each"),
    ],
)
def test_goals_over_the_floor(tokens: int, good: float, bad: float, name: str) -> None:
    found = [f.ok for us in (good, bad) for f in figures.figures([_row(tokens, us)]) if f.name == name]
    assert found == [True, False]


def test_goals_of_adapters() -> None:
    def pair(tokens: int, us: float, rank: int = 16) -> list[Row]:
        lora = {"lora": f"r{rank} x 8"}
        return [_row(tokens, us, **lora), _row(tokens, 10.0, variant=BASE, **lora)]

    small = "LoRA: time over"
    assert _figure(pair(1024, 10 + 1.5 * 2 + 12), small).ok is True
    assert _figure(pair(1024, 10 + 1.5 * 2 + 12.1), small).ok is False
    assert _figure(pair(4096, 13.1), small).value is None
    assert _figure(pair(4096, 13.0), "LoRA r16").ok is True
    assert _figure(pair(4096, 13.1), "LoRA r16").ok is False
    assert _figure(pair(4096, 17.0, 64), "LoRA r64").ok is True
    assert _figure(pair(4096, 17.1, 64), "LoRA r64").ok is False
    idle = [_row(64, 10.2, variant=IDLE_VARIANT, bitwise=False, lora="r16 x 8"), *pair(64, 12.0)]
    assert _figure(idle, "adapters loaded").value == pytest.approx(1.02)
    assert _figure(idle, "cells whose idle bits").ok is False


def test_sweeps_report_drops_and_jumps() -> None:
    sizes = figures.sweep_sizes()
    assert sizes[:6] == [1, 2, 3, 5, 8, 12] and sizes[-1] == 8192
    assert all(b <= max(a + 1, -(-a * 3 // 2)) for a, b in itertools.pairwise(sizes))
    smooth = [_row(t, 10.0 + t) for t in sizes]
    assert _figure(smooth, "sweep: largest drop").ok is True and _figure(smooth, "sweep: largest rise").ok is True
    dropped = [dataclasses.replace(r, us=r.us * 0.5) if r.tokens >= 123 else r for r in smooth]
    assert _figure(dropped, "sweep: largest drop").ok is False
    jumped = [dataclasses.replace(r, us=r.us * 2.5) if r.tokens >= 123 else r for r in smooth]
    found = _figure(jumped, "sweep: largest rise")
    assert found.ok is False and "T=140 after T=93" in found.worst
    assert figures.steps([_row(1, 5.0), _row(8, 90.0)]) == []  # no neighbours of a sweep


def test_the_clock_takes_the_flush_off(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]  # simulated microseconds

    class Graph:
        costs: tuple[float, ...] = ()

        def replay(self) -> None:
            for cost in self.costs:
                now[0] += cost

    class Capture:
        def __init__(self, graph: Graph, capture_error_mode: str) -> None:
            self.graph = graph

        def __enter__(self) -> None:
            log.clear()

        def __exit__(self, *error) -> None:
            self.graph.costs = tuple(log)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 1e-3

    log: list[float] = []

    class Dry(clock.GraphClock):
        def __init__(self, fixed: tuple[int, int] | None = None) -> None:
            self.graph_us, self.budget_ms, self.fixed, self._flush_graph = 2000.0, 1.0, fixed, None

        def _flush(self) -> None:
            log.append(50.0)

    for name, fake in {
        "CUDAGraph": Graph, "graph": Capture, "Event": Event, "synchronize": lambda: None, "empty_cache": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)

    def broken() -> None:
        raise RuntimeError("not   permitted")

    found = Dry().time(
        {"a": [lambda: log.append(7.0), lambda: log.append(9.0)], "b": [lambda: log.append(3000.0)], "c": [broken]}, 3
    )
    assert found["a"].us == pytest.approx(8.0) and found["b"].us == pytest.approx(3000.0)
    assert found["a"].spread == pytest.approx(0.0, abs=1e-6) and len(found["a"].rounds) == 3
    assert found["c"] == "RuntimeError: not permitted"
    made: list[int] = []

    def counted() -> None:
        made.append(1)
        log.append(7.0)

    ranks = Dry((3, 4)).time({"a": [counted]}, 1)
    assert ranks["a"].us == pytest.approx(7.0) and len(made) == 2 + 3  # warm-up, and the passes of one graph


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ["nope"]}, "--model"),
        ({"schemes": ["rows"]}, "--scheme"),
        ({"routings": ["skipped"]}, "--routing"),
        ({"tokens": [0]}, "--tokens"),
        ({"loras": [-1]}, "--loras"),
        ({"ranks": [0]}, "--rank"),
        ({"rounds": 0}, "--rounds"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main.plan_of(main.Options(**options))


def test_options_become_a_plan() -> None:
    plan = main.plan_of(main.Options(loras=[0, 1], ranks=[16, 64], shared_outer=True))
    assert [str(s) for s in plan.loras] == ["none", "r16 x 1 shared outer", "r64 x 1 shared outer"]
    assert [layer.name for layer in plan.layers] == list(main.DEFAULT_MODELS)
    assert main.plan_of(main.Options(sweep=True)).tokens == figures.sweep_sizes()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is there")
@pytest.mark.parametrize("command", [["bench", "--cuda", "--model", "30B,35B"], ["tune", "--model", "30B"]])
def test_commands_need_a_device(command: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "x")])
    assert result.exit_code == 2 and "device: got none" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bench"], "no device family"),
        (["bench", "--cuda", "--tpu"], "got both"),
        (["bench", "--cuda", "--ep", "8"], "--ep"),
        (["bench", "--tpu", "--sweep"], "--sweep"),
        (["bench", "--cuda", "--backend", "nobody"], "--backend"),
        (["bench", "--cuda", "--tokens", "1,x"], "--tokens"),
        (["tune", "--kernels", "cutlass"], "--kernels"),
    ],
)
def test_bad_command_lines(arguments: list[str], text: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "x")])
    assert result.exit_code == 2 and text in result.output


def test_rows_without_a_time_are_shown() -> None:
    table = report.rows_table([_row(1, 5.0), Row("m", "block", "zipf", "none", 1, "vllm triton", verdict="absent")])
    assert table.row_count == 2


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """vLLM's names with objects that note what they are given; the kernel returns zeros."""
    from types import SimpleNamespace as Names

    from isomoe.cuda_impl.bench import peers_vllm

    seen: list[tuple[str, object]] = []

    class Experts:
        def __init__(self, config, quant) -> None:
            self.context: object = "never set"

        def set_lora_context(self, context) -> None:
            self.context = context

    class Kernel:
        def __init__(self, prepare, experts) -> None:
            self.fused_experts = experts

        def apply(self, x, w13, w2, weights, ids, **options):
            seen.append(("apply", (self.fused_experts.context, w13.dtype, options["global_num_experts"])))
            return torch.zeros_like(x)

    def punica(**options):
        seen.append(("punica", options["lora_config"]))
        return Names(token_mapping_meta=Names(prepare_tensors=lambda ids: seen.append(("mapping", ids.tolist()))))

    def convert(backend, layer, *tensors):
        seen.append(("convert", (backend, getattr(layer, "weight_block_size", None), tensors[2].shape)))
        return tensors[:4]

    modules = Names(
        kernel=Kernel, prepare=lambda: "prepare", activation=Names(SILU="silu"), experts=lambda module, name: Experts,
        config=Names(
            FusedMoEParallelConfig=Names(make_no_parallel=lambda: Names()), FusedMoEConfig=lambda **fields: fields,
            RoutingMethodType=Names(Renormalize=1),
        ),
        oracle=Names(
            Fp8MoeBackend=Names(TRITON="t", MARLIN="m", VLLM_CUTLASS="c", DEEPGEMM="d"),
            convert_to_fp8_moe_kernel_format=convert, make_fp8_moe_quant_config=lambda *a, **fields: fields,
        ),
        lora_context=lambda **fields: Names(**fields), punica=punica, lora_config=lambda **fields: fields,
    )  # fmt: skip
    monkeypatch.setattr(peers_vllm, "_modules", lambda: modules)
    ones = torch.ones
    monkeypatch.setattr(peers_vllm.torch, "ones", lambda *a, **k: ones(*a, **{**k, "device": "cpu"}))
    return seen


@pytest.mark.parametrize("shared", [False, True])
def test_vllm_gets_its_weights_scales_and_adapters(fake_vllm: list, shared: bool) -> None:
    layer = dataclasses.replace(TINY, name="tiny-ep", local=4)
    setting = data.LoraSetting(2, 8, shared)
    adapters = data.random_adapters(layer, setting, "cpu")
    batch = data.random_batch(layer, 5, 0, "cpu", adapters=2)
    by_name = {p.name: p for p in peers.all_peers()}
    for scheme, scales in (("block", (4, 2, 2)), ("channel", (4, 256, 1))):
        layer_data = peers.LayerData(layer, scheme, data.random_weights(layer, scheme, "cpu"), torch.device("cpu"))
        problem = peers.Problem(layer_data, setting, adapters, (batch,))
        plain = dataclasses.replace(problem, adapters=None, setting=data.LoraSetting())
        fake_vllm.clear()
        with_lora = by_name["vllm triton"].build(problem)
        without = by_name["vllm triton"].build(plain)
        for calls in (with_lora, without, with_lora):
            assert calls[0]().shape == (5, 256)
        notes = dict(fake_vllm)
        assert [name for name, _ in fake_vllm].count("convert") == 1  # weights are converted once
        assert notes["convert"] == ("t", [128, 128] if scheme == "block" else None, torch.Size(scales))
        assert notes["mapping"] == [i - 100 if i >= 0 else -1 for i in batch.adapter_ids.tolist()]
        first, second, third = (what for name, what in fake_vllm if name == "apply")
        assert second == (None, torch.float8_e4m3fn, 8) and first == third
        context = first[0]
        assert [tuple(t.shape) for t in context.w13_lora_a_stacked] == [(2, 4, 8, 256)] * 2
        assert [tuple(t.shape) for t in context.w13_lora_b_stacked] == [(2, 4, 128, 8)] * 2
        assert tuple(context.w2_lora_a_stacked[0].shape) == (2, 4, 8, 128)
        assert tuple(context.w2_lora_b_stacked[0].shape) == (2, 4, 256, 8)
        up = adapters.b13[1, 3, 1, :, :8]
        assert torch.equal(context.w13_lora_b_stacked[1][1, 3], up)
        outer = adapters.a13[1, 0 if shared else 3, 0, :8]
        assert torch.equal(context.w13_lora_a_stacked[0][1, 3], outer)


def test_why_a_vllm_path_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # as if vLLM were there
    layer_data = peers.LayerData(TINY, "channel", data.random_weights(TINY, "channel", "cpu"), torch.device("cuda"))
    adapters = data.random_adapters(TINY, LORA, "cpu")
    problem = peers.Problem(layer_data, LORA, adapters, (data.random_batch(TINY, 5, 0, "cpu", adapters=2),))
    found = {p.name: p.why_not(problem) for p in peers.all_peers() if p.name.startswith("vllm ")}
    assert found == {
        "vllm triton": None, "vllm marlin": None, "vllm cutlass": "no adapters",
        "vllm deepgemm": "reads no channel scales",
    }  # fmt: skip
    big = dataclasses.replace(problem, batches=(data.random_batch(TINY, 8193, 0, "cpu"),))
    (triton,) = [p for p in peers.all_peers() if p.name == "vllm triton"]
    assert "8193 tokens" in (triton.why_not(big) or "")
