# SPDX-License-Identifier: Apache-2.0
"""The parity job judges right: it passes the reference, and names what is wrong with executors that are."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import DTypeLike

from isomoe.common import parity
from isomoe.common.backends import register_moe_backend, unregister_moe_backend
from isomoe.common.checkpoints import RouterWeights
from isomoe.common.config import FusedMoEConfig
from isomoe.common.executors import ExecutorInfo, MoECall, executors
from isomoe.common.numerics import BF16
from isomoe.common.platforms import PlatformKind
from isomoe.common.recipes import Recipe
from isomoe.common.reference import ReferenceExecutor
from isomoe.common.support import ExpertsSupport
from isomoe.common.weights import SCHEMES, LoRAAdapter, quantize_moe_weights
from isomoe.common.workers import TaskFailed, run_tasks
from isomoe.tests.samples import DIMS

E, K, H, I = 4, 2, 256, 128
CONFIG = FusedMoEConfig(E, K, H, I)
LAYERS = list(range(DIMS.num_layers))
LAST_LAYER = LAYERS[-1]
_SUPPORT = ExpertsSupport(platforms=tuple(PlatformKind), schemes=SCHEMES, recipes=("w8a8", "w8a16", "bf16"), lora=True)


class Honest:
    """The reference under another name: what every broken one below starts from."""

    name = "honest"
    support = _SUPPORT

    @classmethod
    def info(cls) -> ExecutorInfo:
        return ExecutorInfo(cls.name, "native", "a test", cls.support.recipes)

    @classmethod
    def run(cls, call: MoECall) -> np.ndarray:
        return ReferenceExecutor.run(call)


class TouchesBaseRows(Honest):
    """Adds a little to every row once an adapter is loaded (vllm#42008)."""

    support = _SUPPORT

    @classmethod
    def run(cls, call: MoECall) -> np.ndarray:
        y = ReferenceExecutor.run(call)
        return (y.astype(np.float32) * np.float32(1.004 if call.adapters else 1)).astype(BF16)


class FeedsQuantizedRows(Honest):
    """Adapters see dequantised FP8 rows, undeclared."""

    support = _SUPPORT

    @classmethod
    def run(cls, call: MoECall) -> np.ndarray:
        return ReferenceExecutor.run(replace(call, recipe=replace(call.recipe, lora_input="fp8")))


class IgnoresAdapters(Honest):
    """Runs the base layer for every row."""

    support = _SUPPORT

    @classmethod
    def run(cls, call: MoECall) -> np.ndarray:
        return ReferenceExecutor.run(replace(call, adapters=(), adapter_ids=None))


class OneBadRow(Honest):
    """The last row is off by a tenth: little in the whole, everything in that row."""

    support = _SUPPORT

    @classmethod
    def run(cls, call: MoECall) -> np.ndarray:
        y = ReferenceExecutor.run(call)
        y[-1] = (y[-1].astype(np.float32) * np.float32(1.1)).astype(BF16)
        return y


class NotANumber(Honest):
    """One NaN in the output."""

    support = _SUPPORT

    @classmethod
    def run(cls, call: MoECall) -> np.ndarray:
        y = ReferenceExecutor.run(call)
        y[0, 0] = np.nan
        return y


class Raises(Honest):
    """Fails when it runs."""

    support = _SUPPORT

    @classmethod
    def run(cls, call: MoECall) -> np.ndarray:
        raise RuntimeError("no such device\nwith a second line")


class Unavailable(Honest):
    """Cannot run on this machine."""

    support = _SUPPORT

    @classmethod
    def info(cls) -> ExecutorInfo:
        return ExecutorInfo(cls.name, "unavailable", "needs a quantum computer")


class OnlyBf16(Honest):
    """Does not read FP8 weights."""

    support = replace(_SUPPORT, schemes=("bf16",))


class DeclaresItsWire(Honest):
    """Stores result rows in FP8 and says so."""

    support = _SUPPORT

    @classmethod
    def recipe(cls, call: MoECall) -> Recipe:
        return call.recipe.with_wire("fp8")

    @classmethod
    def run(cls, call: MoECall) -> np.ndarray:
        return ReferenceExecutor.run(replace(call, recipe=call.recipe.with_wire("fp8")))


@pytest.fixture
def register() -> Iterator:
    added = []

    def add(cls: type) -> ExecutorInfo:
        name = f"parity_{cls.__name__.lower()}"
        register_moe_backend(name, f"{__name__}:{cls.__name__}", platforms=tuple(PlatformKind), schemes=SCHEMES)
        added.append(name)
        return replace(executors()[name], name=name)

    yield add
    for name in added:
        unregister_moe_backend(name)


def _adapter(adapter_id: int, rank: int, gain: float = 1.0, dtype: DTypeLike = BF16) -> LoRAAdapter:
    rng = np.random.default_rng(adapter_id)

    def normal(*shape: int, fan: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(fan)).astype(dtype)

    return LoRAAdapter(
        adapter_id, normal(E, 2, rank, H, fan=H), (normal(E, 2, I, rank, fan=rank) * gain).astype(dtype),
        normal(E, rank, I, fan=I), (normal(E, H, rank, fan=rank) * gain).astype(dtype),
    )


def _case(
    scheme: str = "channel", adapters: dict[str, LoRAAdapter] | None = None, **options: object
) -> parity.ParityCase:
    rng = np.random.default_rng(7)
    weights = quantize_moe_weights(
        rng.standard_normal((E, 2 * I, H)) / 16, rng.standard_normal((E, H, I)) / np.sqrt(I), scheme
    )
    if adapters is None:
        adapters = {"one": _adapter(0, 8), "two": _adapter(1, 4)}
    return parity.build_case("case", 3, CONFIG, weights, adapters, num_tokens=16, seed=0, **options)


def _rows(case: parity.ParityCase, infos: list[ExecutorInfo], **plan: object) -> parity.ParityResult:
    cells = [(0, run) for run in parity.plan_runs(case, infos, **plan)]
    return parity.gather([case], cells, dict(parity.run_cells([case], cells)))


@pytest.mark.parametrize("scheme", ["channel", "block", "tensor", "bf16"])
def test_an_honest_executor_passes_every_check(scheme: str, register) -> None:
    result = _rows(_case(scheme), [register(Honest)], ep_sizes=(1, 2))
    assert [row.recipe for row in result.rows] == (["bf16"] * 2 if scheme == "bf16" else ["w8a8"] * 2 + ["w8a16"] * 2)
    for row in result.rows:
        assert row.verdict == "pass", row.reason
        assert row.rel_l2 == 0
        assert row.delta_rel_l2 == 0
        assert row.bitwise is True
        assert row.truth_rel_l2 > 0
    assert not result.failed


@pytest.mark.parametrize(
    ("cls", "recipe", "words"),
    [
        (TouchesBaseRows, "w8a16", ["base rows changed bits", "unused rows changed bits", "zero-b rows changed bits"]),
        (FeedsQuantizedRows, "w8a8", ["delta_rel_l2"]),
        (IgnoresAdapters, "w8a8", ["rel_l2", "delta_rel_l2 1.00e+00", "delta_cosine"]),
        (OneBadRow, "w8a16", ["worst_row"]),
        (NotANumber, "w8a8", ["rel_l2 inf"]),
    ],
)
def test_a_wrong_executor_fails_for_the_right_reason(cls: type, recipe: str, words: list[str], register) -> None:
    result = _rows(_case(), [register(cls)], recipes=[recipe])
    (row,) = result.rows
    assert row.verdict == "fail"
    for word in words:
        assert word in row.reason
    assert result.failed == [row]


def test_an_exception_is_the_rows_result_and_the_others_still_run(register) -> None:
    result = _rows(_case(), [register(Raises), register(Honest)], recipes=["w8a8"])
    assert [row.verdict for row in result.rows] == ["error", "pass"]
    assert result.rows[0].reason == "RuntimeError: no such device"
    assert len(result.failed) == 1


def test_unavailable_and_unserved_are_rows_with_reasons_not_failures(register) -> None:
    result = _rows(_case(), [register(Unavailable), register(OnlyBf16)], ep_sizes=(1, 2, 4))
    assert [(row.verdict, row.reason) for row in result.rows] == [
        ("unavailable", "needs a quantum computer"), ("not served", "does not read weights of scheme channel"),
    ]
    assert not result.failed


def test_an_executor_is_held_to_what_it_declares(register) -> None:
    result = _rows(_case(), [register(DeclaresItsWire)], recipes=["w8a8"])
    (row,) = result.rows
    assert "wire='fp8'" in row.declared
    # The delta keeps its bound: an FP8 wire is declared, a delta that it drowns is still reported.
    assert "rel_l2" not in row.reason.replace("delta_rel_l2", "")


def test_the_batch_mixes_base_rows_every_adapter_and_a_zero_one() -> None:
    case = _case()
    assert sorted(set(case.adapter_ids.tolist())) == [-1, 0, 1, 2]
    assert case.zero_id == 2
    assert not case.adapters[-1].b13.any()
    assert not case.adapters[-1].b2.any()
    assert case.config.max_loras == 3
    assert set(np.unique(case.adapter_ids[case.delta_rows])) == {0, 1}
    rms = np.sqrt(np.mean(np.square(case.x.astype(np.float64)), axis=1))
    np.testing.assert_allclose(rms, 1, rtol=5e-3)


def test_without_adapters_only_the_base_is_judged(register) -> None:
    case = _case(adapters={})
    (row,) = _rows(case, [register(Honest)], recipes=["w8a8"]).rows
    assert row.verdict == "pass"
    assert row.delta_rel_l2 is None
    assert row.bitwise is None
    assert (case.adapter_ids == -1).all()


def test_a_faint_adapter_is_amplified_by_a_power_of_two_and_a_loud_one_is_not() -> None:
    faint, loud = _adapter(0, 8, gain=2.0**-8), _adapter(1, 4, gain=4.0)
    case = _case(adapters={"faint": faint, "loud": loud})
    assert case.gains["loud"] == 1
    assert case.gains["faint"] >= 16
    assert case.gains["faint"].bit_count() == 1
    np.testing.assert_array_equal(
        case.adapters[0].b13.astype(np.float32), faint.b13.astype(np.float32) * case.gains["faint"]
    )


def test_float32_adapters_are_rounded_once_for_everybody() -> None:
    adapter = _adapter(0, 8, dtype=np.float32)
    served = parity.as_served(adapter)
    assert served.a13.dtype == served.b2.dtype == BF16
    np.testing.assert_array_equal(served.b13, adapter.b13.astype(BF16))


def test_the_routers_own_weights_and_bias_decide_the_experts() -> None:
    weight = np.zeros((E, H), np.float32)
    case = _case(router=RouterWeights(weight, bias=np.array([0, 3, 0, 5], np.float32)))
    assert (case.topk_ids == [3, 1]).all()
    case = _case(router=RouterWeights(weight, correction_bias=np.array([9, 0, 8, 0], np.float32)))
    assert (case.topk_ids == [0, 2]).all()


def test_two_executors_are_compared_with_each_other(register) -> None:
    result = _rows(_case(), [register(Honest), register(OneBadRow)], recipes=["w8a16"], ep_sizes=(2, 1))
    (found,) = result.agreements
    assert (found.first, found.second, found.recipe) == ("parity_honest", "parity_onebadrow", "w8a16")
    assert found.worst_row == pytest.approx(0.1 / 1.1, rel=0.02)


def _misbehave(task: str) -> str:
    if task == "hang":
        time.sleep(600)
    if task == "die":
        os._exit(17)
    return f"{task} done"


def _make_handler(prefix: str) -> Callable[[str], str]:
    return lambda task: prefix + _misbehave(task)


def test_workers_survive_tasks_that_hang_or_die() -> None:
    tasks = ["a", "hang", "b", "die", "c", "d"]
    # By the name a fresh process can import: pytest gives this module another one.
    make_handler = importlib.import_module("isomoe.tests.test_parity_job")._make_handler
    found = dict(run_tasks(tasks, make_handler, ("> ",), count=2, timeout=10))
    assert sorted(found) == list(range(len(tasks)))
    assert [found[i] for i in (0, 2, 4, 5)] == ["> a done", "> b done", "> c done", "> d done"]
    assert isinstance(found[1], TaskFailed)
    assert "10 s" in str(found[1])
    assert isinstance(found[3], TaskFailed)
    assert "17" in str(found[3])


def test_cells_give_the_same_rows_in_processes_of_their_own() -> None:
    case = _case()
    infos = [executors()["reference"]]
    cells = [(0, run) for run in parity.plan_runs(case, infos)]
    here = parity.gather([case], cells, dict(parity.run_cells([case], cells)))
    apart = parity.gather([case], cells, dict(parity.run_cells_apart([case], cells, jobs=2, timeout=60)))
    assert [replace(r, seconds=None) for r in here.rows] == [replace(r, seconds=None) for r in apart.rows]


def _job(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "isomoe", "parity", "--out", str(out), *arguments],
        capture_output=True, text=True, timeout=550, check=False,
    )


@pytest.fixture(scope="module")
def samples_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    pytest.importorskip("peft")
    out = tmp_path_factory.mktemp("parity")
    return out, _job(out, "--executor", "reference", "--ep", "1,2")


def test_the_job_on_the_samples(samples_job: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = samples_job
    assert done.returncode == 0, done.stderr
    for platform in ("tpu-v7x", "cuda-9.0", "cuda-8.0", "rocm-gfx950", "cpu"):
        assert platform in done.stdout
    assert "[4/4]" in done.stderr
    data = json.loads((out / "parity.json").read_text())
    assert data["failed"] == 0
    assert {(row["scheme"], row["recipe"]) for row in data["rows"]} == {
        (scheme, recipe) for scheme in ("channel", "block") for recipe in ("w8a8", "w8a16")
    }
    for row in data["rows"]:
        assert row["verdict"] == "pass"
        assert 1e-3 < row["truth_rel_l2"] < 5e-2
        assert row["base_bitwise"] and row["unused_bitwise"] and row["zero_b_bitwise"]
    assert data["settings"]["tokens"] == 16
    assert all("reason" in bound for bound in data["tolerances"].values())
    assert (out / "parity.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "parity.png").stat().st_size > 20_000


def test_the_job_on_a_given_checkpoint_and_layers(
    samples_job: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    samples = samples_job[0] / "samples"
    model, adapter = str(samples / "fp8-block"), f"math={samples / 'lora-fused'}"
    done = _job(
        tmp_path, "--checkpoint", model, "--adapter", adapter, "--executor", "reference", "--ep", "1",
        "--layers", f"0,{LAST_LAYER}", "--recipe", "w8a16",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "parity.json").read_text())["rows"]
    assert [(row["layer"], row["recipe"]) for row in rows] == [(0, "w8a16"), (LAST_LAYER, "w8a16")]
    done = _job(tmp_path, "--checkpoint", model, "--layers", "7")
    assert done.returncode == 2
    assert f"0-{LAST_LAYER}" in done.stderr


def test_inspect_describes_the_samples(samples_job: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    samples = samples_job[0] / "samples"
    folders = [str(samples / name) for name in ("fp8-dynamic", "lora-per-expert")]
    command = [sys.executable, "-m", "isomoe", "inspect", *folders]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert (found["scheme"], found["moe_layers"], found["config"]["num_experts"]) == ("channel", LAYERS, 8)
    assert found["weight_bytes_per_device_by_ep"]["8"] * 8 == found["weight_bytes_per_device_by_ep"]["1"]
    (adapter,) = found["adapters"].values()
    assert (adapter["rank"], adapter["form"], adapter["layers"]) == (8, "per_expert", LAYERS)
    assert {s["platform"]: s["backend"] for s in found["selection"]}["tpu-v7x"] == "NONE"
    wide = os.environ | {"COLUMNS": "140"}
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=wide).stdout
    for word in ("channel", "H200", "TPU v7x core", "per_expert", "pallas_ep"):
        assert word in text
