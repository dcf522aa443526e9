# SPDX-License-Identifier: Apache-2.0
"""`isomoe bench --tpu`: refusals, resuming, the ledger's arithmetic. One small layer is really compiled."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isomoe.common.cli import app
from isomoe.common.config import FusedMoEConfig
from isomoe.common.presets import MODELS, ModelPreset
from isomoe.tpu_impl import bench, bench_report, published
from isomoe.tpu_impl.aot import plan_request
from isomoe.tpu_impl.kernel_loops import KernelLoops
from isomoe.tpu_impl.links import Fabric
from isomoe.tpu_impl.peer import PeerCell, compile_peer, peer_floor
from isomoe.tpu_impl.time_model import ModelTime, VisitCost, model_time
from isomoe.tpu_impl.topologies import split_topology, topology_for
from isomoe.tpu_impl.xla_ops import Glue, glue, operations, sort_bundles

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="ahead-of-time compilation needs libtpu"
)


def _invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@needs_libtpu
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--tpu"]),
        (["--tpu", "--model", "qwen3-coder-48b"], ["--model", "did you mean 'qwen3-coder-480b'"]),
        (["--tpu", "--tokens", "64,x"], ["--tokens", "1,2,4"]),
        (["--tpu", "--tokens", "0"], ["--tokens", "at least 1"]),
        (["--tpu", "--generation", "v4"], ["--generation", "v4"]),
        (["--tpu", "--ep", "7"], ["ep: got 7", "8, 16, 32"]),
        (["--tpu", "--scheme", "blocks"], ["--scheme", "did you mean 'block'"]),
        (["--tpu", "--loras", "4"], ["--rank", "want both or neither"]),
        (["--tpu", "--wire", "fp4"], ["--wire", "fp4"]),
        (["--tpu", "--peer", "/no/such/python"], ["--peer", "/no/such/python"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    code, out, err = _invoke(*arguments, "--out", str(tmp_path / "out"))
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


def test_cells_come_with_what_they_are_compared_to(tmp_path: Path) -> None:
    settings = bench.Settings(("qwen3-coder-30b",), (64,), ("v7x",), (8,), "block", 8, 16, "fp8", tmp_path)
    cells = [(c.scheme, c.loras) for c in settings.cells()]
    assert cells == [("channel", 0), ("channel", 8), ("block", 0), ("block", 8)]


def _made(heights: int, *, tile: int = 1000, shrink: bool = False) -> dict[str, Any]:
    pair, shrinks = (100, (500,) * heights) if shrink else (0, ())
    cost = VisitCost(50, 130, 300, 200, 350, 40, pair, (tile,) * heights, shrinks)
    return {
        "compile_s": 1.0, "code_bytes": 10**6, "temp_bytes": 10**6,
        "loops": asdict(KernelLoops(cost, (0,) * heights, 0.4)),
        "around": asdict(Glue(20_000, 60, 150_000, 3, (("sort.1", 3000),))),
    }


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No compiler: every cell gets a schedule of its own tile heights; the cells asked for are noted."""
    asked: list[str] = []

    def compile_layer(request: dict[str, Any], spec: Any, *, schedule: bool, what: str) -> Any:
        assert schedule
        # Only the plain layer is compiled whole.
        assert what == ("kernel" if spec.lora else "layer")
        asked.append(f"{request['tokens']} {request['lora']}")
        made = _made(len(spec.blocks.rungs), tile=1100 if spec.lora else 1000, shrink=bool(spec.lora))
        return bench._compiled(made)

    monkeypatch.setattr(bench, "compile_layer", compile_layer)
    monkeypatch.setattr(bench, "_versions", lambda: "jax 0, libtpu 0")
    return asked


def test_a_second_run_compiles_nothing(compiled: list[str], tmp_path: Path) -> None:
    settings = bench.Settings(("qwen3-coder-30b",), (64, 512), ("v7x",), (8,), "channel", 8, 16, "fp8", tmp_path)
    said: list[str] = []
    first = bench.run(settings, said.append)
    assert len(compiled) == 4
    again = bench.run(settings, said.append)
    assert len(compiled) == 4
    assert json.dumps(first) == json.dumps(again)
    assert said[0] == "[1/4] qwen3-coder-30b v7x EP8 T=64 channel"


def test_the_ledger_adds_up(compiled: list[str], tmp_path: Path) -> None:
    settings = bench.Settings(("qwen3-coder-30b",), (512,), ("v7x",), (8,), "channel", 8, 64, "fp8", tmp_path)
    base, lora = bench.run(settings, lambda text: None)
    weights = 16 * 3 * 2048 * 768
    assert weights < base["hbm_bytes"] < 1.05 * weights
    assert base["ratio"]["1.2"] == pytest.approx(base["model"][0]["total"] / base["roofline"]["total"])
    assert base["published"] == {"us": 139.8, "by": "per-row reduce-scatter (#3040)", "source": published.SOURCE}
    assert lora["dispatch"] == "ag_bf16" and lora["transport"] == base["transport"]
    # 512 rows a device over 16 experts, 32 rows each over 8 adapters: nearly every pair is there.
    assert 120 < lora["pairs"] < 128
    assert lora["lora"]["bytes_us"] == pytest.approx(lora["pairs"] * 2 * 64 * 3 * (2048 + 768) / 3690e3)
    extra = lora["model"][0]["kernel"] - base["model"][0]["kernel"]
    assert lora["lora"]["1.2"]["extra_us"] == pytest.approx(extra)
    text = bench_report.markdown([base, lora])
    assert "30b v7x EP8 8xr64" in text and "of base compute" in text
    picture = tmp_path / "bench.png"
    bench_report.write_picture(picture, [base, lora])
    assert picture.stat().st_size > 10_000


def test_a_refused_cell_is_a_row(monkeypatch: pytest.MonkeyPatch, compiled: list[str], tmp_path: Path) -> None:
    monkeypatch.setitem(MODELS, "huge", ModelPreset(FusedMoEConfig(16, 2, 65536, 4096), 1))
    settings = bench.Settings(("huge",), (64,), ("v7x",), (8,), "channel", 0, 0, "fp8", tmp_path)
    rows = bench.run(settings, lambda text: None)
    assert rows[0]["error"].startswith("hidden_dim: got 65536")
    assert "Refused" in bench_report.markdown(rows)


@needs_libtpu
@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "small", ModelPreset(FusedMoEConfig(16, 2, 512, 1024), 1))
    code, out, err = _invoke(
        "--tpu", "--model", "small", "--tokens", "64", "--generation", "v7x", "--loras", "2", "--rank", "16", "--peer",
        "none", "--out", str(tmp_path),
    )
    assert code == 0, err
    assert "small v7x EP8 2xr16" in out
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [r["cell"]["loras"] for r in rows] == [0, 2]
    assert all(r["compute_cycles"] > 0 and r["code_bytes"] > 0 for r in rows)
    assert {p.name for p in tmp_path.iterdir()} == {"bench.json", "bench.md", "bench.png", "compiled"}


def test_topologies_by_device_count() -> None:
    assert topology_for("v7x", 8) == topology_for("v7x", 4) == "tpu7x:2x2x1"
    assert topology_for("v7x", 32) == "tpu7x:2x2x4"
    assert topology_for("v6e", 16) == "v6e:4x4"


def test_a_peer_that_is_not_there_says_so() -> None:
    cell = PeerCell.of(MODELS["qwen3-coder-30b"].config, "tpu7x:2x2x1", 512, 8)
    assert "not importable" in compile_peer(cell, sys.executable)["error"] or importlib.util.find_spec("tpu_inference")
    assert "No such file" in compile_peer(cell, "/no/such/python")["error"]


def test_the_peers_floor() -> None:
    """Weights of all 20 local experts once for each of 16 blocks of 64 tokens; bf16 rows there and back."""

    gen, grid = split_topology("tpu7x:2x2x1")
    found = peer_floor(gen, Fabric.of(gen, grid, 8), MODELS["qwen3-coder-480b"].config, 8192, {"bt": 64})
    assert found["hbm_bytes"] == 16 * 20 * 3 * 6144 * 2560
    assert found["hbm_us"] == pytest.approx(4092, rel=0.01)
    assert found["links_us"] == pytest.approx(2013, rel=0.01)
    assert found["floor_us"] > found["hbm_us"] + 400


_HLO = """HloModule jit_layer

%body (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  ROOT %add.1 = s32[8]{0:T(128)} fusion(%p), kind=kLoop, backend_config={"estimated_cycles":"2500"}
}

%cond (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %eight = s32[]{:T(128)} constant(8)
  ROOT %lt = pred[]{:T(512)} compare(%p, %eight), direction=LT
}

ENTRY %main (a: s32[8]) -> s32[8] {
  %a = s32[8]{0:T(128)} parameter(0)
  %small = s32[8]{0:T(128)} fusion(%a), kind=kLoop, backend_config={"estimated_cycles":"2300"}
  %small.1 = s32[8]{0:T(128)} fusion(%a), kind=kLoop, backend_config={"estimated_cycles":"2300"}
  %ag-start = (s32[8], s32[64]) all-gather-start(%a), dimensions={0}
  %sort.1 = (s32[4096]{0}, s32[4096]{0}) sort(%a, %a), dimensions={0}
  %moe.1 = bf16[8,128]{1,0} custom-call(%a), frontend_attributes={x={
"mesh_axes":"ep"
}}, custom_call_target="tpu_custom_call"
  %row.1 = f32[4]{0} fusion(%moe.1), kind=kCustom
  %row.2 = f32[4]{0} fusion(%moe.1), kind=kCustom
  ROOT %loop = s32[8]{0} while(%a), condition=%cond, body=%body, metadata={op_name="while"}
}
"""


def test_what_runs_around_the_kernel() -> None:
    """Loops count as often as they run, equal operations share a program, the compiler's allowance is taken off."""
    assert [(op.name, op.times) for op in operations(_HLO) if op.opcode == "fusion"] == [
        ("small", 1), ("small.1", 1), ("row.1", 1), ("row.2", 1), ("add.1", 8),
    ]
    found = glue(_HLO, {"small": 20, "row.1": 4000, "sort.1": 2399}, "moe")
    assert found.launches == 2 + 1 + 2 + 8
    assert found.collectives == 1
    assert found.cycles == 20 + 20 + sort_bundles("(s32[4096], s32[4096])") + 2 * 4000 + 8 * 200
    assert sort_bundles("(s32[4096]{0:T(1024)}, s32[4096]{0})") == pytest.approx(2399, rel=0.06)
    with pytest.raises(ValueError, match="hlo: got a text without an entry"):
        operations("HloModule x\n")


_ASYNC_HLO = """
ENTRY %main (a: s32[8]) -> s32[8] {
  %before = s32[8]{0} fusion(%a), kind=kLoop
  %all-gather.1.call-start = ((s32[1,8]{1,0}, token[]), s32[8,8]{1,0}) call-start(%before)
  %all-gather.2.call-start = ((u32[8,128]{1,0}, token[]), u32[64,128]{1,0}) call-start(%a)
  %inside = s32[8]{0} fusion(%a), kind=kLoop
  %all-gather.1.call-done = s32[8,8]{1,0} call-done(%all-gather.1.call-start)
  %inside.1 = s32[8]{0} add(%a, %a)
  %all-gather.2.call-done = u32[64,128]{1,0} call-done(%all-gather.2.call-start)
  %isomoe_expert_kernel.1 = s32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call"
  ROOT %after = s32[8]{0} fusion(%a), kind=kLoop
}
"""


def test_what_runs_while_rows_are_gathered() -> None:
    """Between start and end of the largest all-gather."""
    found = glue(_ASYNC_HLO, {"before": 10, "inside": 20, "inside.1": 30, "after": 40}, "isomoe_")
    assert (found.cycles, found.launches) == (10 + 20 + 30 + 40, 4)
    assert (found.beside_cycles, found.beside_launches) == (20 + 30, 2)
    # Nothing is beside where the program waits for the rows at once.
    assert glue(_HLO, {}, "moe").beside_launches == 0


def test_the_plan_hides_the_gather_of_rows() -> None:
    """The total counts what takes longer."""
    config = MODELS["qwen3-coder-480b"].config
    _, spec = plan_request("tpu7x:2x2x1", config, 512, scheme="channel", dispatch="auto", transport="auto")
    gen, grid = split_topology("tpu7x:2x2x1")
    cost = VisitCost(50, 130, 300, 200, 350, 40, 0, (1000,) * len(spec.blocks.rungs))

    def model(beside: int) -> ModelTime:
        around = Glue(20_000, 10, 50_000, 2, (), beside, 0)
        return model_time(gen, Fabric.of(gen, grid, 8), spec, config, 512, cost, around, 1.0)

    none, some, most = model(0), model(1000), model(20_000)
    assert none.total - some.total == pytest.approx(some.beside) == pytest.approx(1.0)
    assert none.total - most.total == pytest.approx(most.beside) == pytest.approx(none.dispatch)


def test_wires_of_a_plan() -> None:
    """``auto`` in a plan is resolved before anything is compiled."""
    request, spec = plan_request(
        "tpu7x:2x2x1", MODELS["qwen3-coder-480b"].config, 512, scheme="channel", dispatch="auto", transport="auto"
    )
    assert (request["dispatch"], request["transport"]) == (spec.dispatch, spec.transport)
    assert spec.dispatch == "ag_fp8" and spec.transport.endswith("bf16")


def test_explain_says_where_its_time_is_from(compiled: list[str], tmp_path: Path) -> None:
    settings = bench.Settings(("qwen3-coder-480b",), (512,), ("v7x",), (8,), "channel", 0, 0, "bf16", tmp_path)
    rows = bench.run(settings, lambda text: None)
    (tmp_path / "bench.json").write_text(json.dumps(bench.document(settings, rows)))
    command = [
        "explain", "--model", "qwen3-coder-480b", "--scheme", "channel", "--platform", "tpu-v7x", "--ep", "8",
        "--tokens", "64,512", "--bench", str(tmp_path / "bench.json"), "--json",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    few, many = json.loads(result.stdout)["tpu"]
    assert few["from"] == "estimate" and many["from"] == "compiled schedule"
    assert many["us"] == pytest.approx(rows[0]["model"][0]["total"])
    assert few["dispatch"] == "ag_fp8" and few["transport"].endswith("bf16")
    assert few["us"] > few["roofline_us"] and few["blocks"]["bf"] == 512
    text = CliRunner().invoke(app, command[:-1]).stdout
    assert "T=512" in text and "compiled schedule" in text and "not measured" in text


def test_explain_refuses_a_ledger_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text("{}")
    for platform, words in (("tpu-v7x", "want a bench.json"), ("cuda-9.0", "want it with --platform tpu-")):
        result = CliRunner().invoke(
            app, ["explain", "--platform", platform, "--bench", str(tmp_path / "bench.json")]
        )
        assert result.exit_code == 2
        assert "--bench: got" in result.stderr and words in result.stderr


def test_declared_roundings_reach_the_plan() -> None:
    """v6e multiplies bf16 by FP8: FP8 rows in are a rounding of their own, taken only where declared; FP8 result rows
    would cost its vector unit more than they save the links."""
    config = MODELS["qwen3-coder-480b"].config
    for declared, want in ((False, ("ag_bf16", "push_bf16")), (True, ("ag_fp8", "push_bf16"))):
        _, spec = plan_request(
            "v6e:2x4", config, 8192, scheme="channel", dispatch="auto", transport="auto", fp8_wire=declared,
            fp8_input=declared,
        )
        assert (spec.dispatch, spec.transport) == want
