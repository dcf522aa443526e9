# SPDX-License-Identifier: Apache-2.0
"""`isomoe conform`, `isomoe golden` and the pytest plugin, from outside."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isomoe.common.backends import registered_backends, unregister_moe_backend
from isomoe.common.cli import app
from isomoe.tests import conformance
from isomoe.tests.conformance import CHECKS, Figure, Judge, plan, run_check, subject_for
from isomoe.tests.matrix import INVARIANT_CASES, Case, full_cases, parity_cases, production_cases

PLANTED = "isomoe.tests.planted"


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    yield
    if conformance.REGISTERED_NAME in registered_backends():
        unregister_moe_backend(conformance.REGISTERED_NAME)


def isomoe(*args: str):
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "200"})


def test_a_right_executor_is_green_and_the_report_is_whole(tmp_path: Path) -> None:
    done = isomoe("conform", f"{PLANTED}:Honest", "--quick", "--report", str(tmp_path / "r"))
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "r" / "conform.json").read_text())
    assert data["counts"] == {"pass": 20}
    assert {r["check"] for r in data["results"]} == set(CHECKS)
    assert all(r["figures"] for r in data["results"])
    page = (tmp_path / "r" / "conform.html").read_text()
    assert "data:image/png;base64," in page
    loaded = re.findall(r"(?:src|href)=[\"']?([^\"'> ]*)", page)
    assert loaded and all(url.startswith("data:") for url in loaded), "the page must load nothing"
    for check in CHECKS:
        assert f"<td>{check}</td>" in page


def test_findings_give_exit_code_1_and_the_stage(tmp_path: Path) -> None:
    done = isomoe("conform", f"{PLANTED}:LoraFromCodes", "--quick", "--report", str(tmp_path))
    assert done.exit_code == 1
    found = [
        r for r in json.loads((tmp_path / "conform.json").read_text())["results"] if r["verdict"] == "fail"
    ]
    assert found
    assert {r["stage"] for r in found if r["check"] == "parity"} == {"delta"}
    assert all("mixed" in r["case"] for r in found)
    assert "LoraFromCodes" not in done.output.splitlines()[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nobody"], "want one of"),
        (["no.such.module:Class"], "cannot load"),
        (["reference", "--quick", "--full"], "--quick"),
        (["reference", "--golden", "/nowhere/p.safetensors"], "no such golden pack"),
        ([f"{PLANTED}:patched"], "is not a class"),
        (["reference", "--quick", "--report", __file__], "File exists"),
    ],
)
def test_usage_gives_exit_code_2(args: list[str], message: str) -> None:
    done = isomoe("conform", *args)
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


def test_cases_shared_by_processes(tmp_path: Path) -> None:
    """Findings, order and figures are those of one process, also of a class registered on the fly."""
    both = []
    for jobs in ("1", "2"):
        folder = str(tmp_path / jobs)
        done = isomoe("conform", f"{PLANTED}:LoraFromCodes", "--quick", "--jobs", jobs, "--report", folder)
        assert done.exit_code == 1, done.output
        results = json.loads((tmp_path / jobs / "conform.json").read_text())["results"]
        both.append([{k: v for k, v in r.items() if k != "seconds"} for r in results])
    assert both[0] == both[1]


def test_golden_from_the_command_line(tmp_path: Path) -> None:
    pack = str(tmp_path / "p.safetensors")
    done = isomoe("golden", "write", pack, "--cases", "channel-w8a8-shared_outer", "--executor", "reference")
    assert done.exit_code == 0, done.output
    assert "1 cases" in done.output
    assert isomoe("golden", "check", pack, "reference").exit_code == 0
    bad = isomoe("golden", "check", pack, f"{PLANTED}:ExpertSlowestB", "--json")
    assert bad.exit_code == 1
    assert [(r["verdict"], r["stage"]) for r in json.loads(bad.output)] == [("fail", "delta")]
    with_pack = isomoe("conform", "reference", "--quick", "--golden", pack)
    assert with_pack.exit_code == 0
    assert "Golden pack" in with_pack.output
    assert isomoe("golden", "check", pack, "marlin").exit_code == 2, "nothing was checked"
    assert isomoe("golden", "check", str(tmp_path / "q"), "reference").exit_code == 2
    assert isomoe("golden", "write", pack, "--cases", "nothing-of-the-sort").exit_code == 2
    assert isomoe("golden", "write", pack, "--cases", "").exit_code == 2
    pickle = isomoe("golden", "write", str(tmp_path / "p.bin"))
    assert (pickle.exit_code, (tmp_path / "p.bin").exists()) == (2, False)
    assert isomoe("golden", "write", str(tmp_path / "nowhere" / "p.safetensors")).exit_code == 2


def _pytest(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_own.py").write_text("def test_own():\n    assert True\n")
    installed = any(p.name == "isomoe" for p in importlib.metadata.entry_points(group="pytest11"))
    load = [] if installed else ["-p", "isomoe.tests.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", *load, "-p", "no:cacheprovider", "-v", *args, str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)


def test_the_plugin_adds_the_same_cases(tmp_path: Path) -> None:
    done = _pytest(tmp_path, "--isomoe-executor", f"{PLANTED}:Honest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "21 passed" in done.stdout
    assert "parity[conform_subject-channel-w8a8-mixed" in done.stdout


def test_the_plugin_fails_with_the_figures(tmp_path: Path) -> None:
    done = _pytest(tmp_path, "--isomoe-executor", f"{PLANTED}:TensorWideScale", "-k", "parity and block")
    assert done.returncode == 1
    assert "OUT recipe: relative L2" in done.stdout
    assert "Traceback" not in done.stdout


def test_the_plugin_is_silent_without_its_option(tmp_path: Path) -> None:
    done = _pytest(tmp_path)
    assert done.returncode == 0
    assert "1 passed" in done.stdout
    unknown = _pytest(tmp_path, "--isomoe-executor", "nobody")
    assert unknown.returncode == 4
    assert "want one of" in unknown.stderr + unknown.stdout


@pytest.mark.parametrize(
    "name", ["SwappedGateUp", "TruncatedSums", "ExpertSlowestB", "LoraFromDequantised", "TensorWideScale"]
)
def test_checks_find_planted_bugs(name: str) -> None:
    subject = subject_for(f"{PLANTED}:{name}")
    verdicts = {
        str(c): run_check("parity", subject, c).verdict
        for c in (Case("channel", "w8a8", "mixed"), Case("block", "w8a8", "mixed"))
    }
    assert set(verdicts.values()) == {"fail"}, verdicts


def test_plans() -> None:
    subject = subject_for("reference")
    sizes = {level: len(list(plan(subject, level))) for level in ("quick", "standard", "full")}
    assert sizes["quick"] < 25 < sizes["standard"] < sizes["full"]
    assert len(list(plan(subject, "quick", production=True))) == sizes["quick"] + len(production_cases())
    assert set(INVARIANT_CASES) <= set(parity_cases()) <= set(parity_cases()) | set(full_cases())
    ids = [str(c) for c in [*parity_cases(), *full_cases(), *production_cases()]]
    assert len(set(ids)) == len({*parity_cases(), *full_cases(), *production_cases()}), (
        "ids must tell cases apart"
    )
    for case in production_cases():
        assert case.shape.num_experts <= 16


def test_a_judge_reports_the_first_figure_out_of_bounds() -> None:
    judge = Judge()
    judge.add("a", 1, 2)
    judge.add("b", 3, 2, why="too large")
    judge.add("c", float("nan"), 2)
    assert judge.reason == "b 3 (want <= 2): too large"
    assert [f.ok for f in judge.figures] == [True, False, False], "NaN never passes"
    assert Figure("d", 2, 1, ">=").ok


def test_what_is_not_declared_is_not_served() -> None:
    subject = subject_for("marlin")
    result = run_check("parity", subject, Case("channel", "w8a8"))
    assert (result.verdict, result.ok) == ("not served", True)
    assert "w8a8" in result.reason
