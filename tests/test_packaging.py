# SPDX-License-Identifier: Apache-2.0
"""The package as others meet it: import cost, declared contracts, wheel contents, and the README's commands."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import isomoe
from isomoe.common.environment import VARIABLES

ROOT = Path(isomoe.__file__).resolve().parent
FRAMEWORKS = ("torch", "jax", "jaxlib", "triton", "vllm", "transformers")
IMPORT_BUDGET_S = 0.2

# Only a checkout has pyproject.toml; an installed wheel is tested for the rest.
needs_checkout = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="runs in a checkout")


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_is_cheap_and_touches_no_framework() -> None:
    """The best of three: a busy machine must not fail the budget, a slow import must."""
    code = (
        "import time, sys; start = time.perf_counter(); import isomoe; took = time.perf_counter() - start;"
        f"print(took, [m for m in {(*FRAMEWORKS, 'numpy', 'typer', 'rich')!r} if m in sys.modules])"
    )
    results = [_run(code).split(maxsplit=1) for _ in range(3)]
    assert all(loaded.strip() == "[]" for _, loaded in results), results
    assert min(float(took) for took, _ in results) < IMPORT_BUDGET_S


def test_every_public_name_resolves_without_a_framework() -> None:
    code = (
        "import isomoe, sys; [getattr(isomoe, n) for n in isomoe.__all__];"
        f"print([m for m in {FRAMEWORKS!r} if m in sys.modules])"
    )
    assert _run(code).strip() == "[]"


def test_selection_and_the_command_line_import_no_framework() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from isomoe.common.cli import app;"
        "r = CliRunner().invoke(app, ['explain', '--model', 'qwen3-coder-480b', '--platform', 'tpu-v7x', '--lora', "
        "'16x4', '--ep', '8']); assert r.exit_code == 0, r.output;"
        f"print([m for m in {FRAMEWORKS!r} if m in sys.modules])"
    )
    assert _run(code).strip() == "[]"


@needs_checkout
def test_import_contracts_hold() -> None:
    pytest.importorskip("importlinter")
    script = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([script, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _sources() -> list[Path]:
    folders = ("common", "cuda_impl", "tpu_impl", "tests")
    return [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]


def test_common_never_imports_a_framework_by_name() -> None:
    """import-linter sees `import` statements; this also sees imports by name."""
    for path in (ROOT / "common").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__")
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                top = str(node.args[0].value).split(".")[0]
                assert top not in FRAMEWORKS or path.name == "environment.py", f"{path.name} imports {top}"


@needs_checkout
def test_every_package_is_declared() -> None:
    """The package list is explicit (the root is a package), so a new folder must be added to it."""
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    on_disk = {"isomoe"}
    for folder in ("common", "cuda_impl", "tpu_impl", "tests"):
        for init in (ROOT / folder).rglob("__init__.py"):
            on_disk.add(".".join(("isomoe", *init.parent.relative_to(ROOT).parts)))
    assert declared == on_disk


@needs_checkout
def test_every_source_file_names_its_licence() -> None:
    line = "SPDX-License-Identifier: Apache-2.0"
    missing = [str(path.relative_to(ROOT)) for path in _sources() if line not in path.read_text()[:200]]
    assert not missing


@needs_checkout
def test_wheel_contents(tmp_path: Path) -> None:
    """Built from a copy without build leftovers: pure Python, typed, with the tests and the command."""
    source, out = tmp_path / "source", tmp_path / "dist"
    leftovers = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "parity-out", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=leftovers)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)],
        capture_output=True, text=True, timeout=240, check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
        entry_points = archive.read(next(n for n in names if n.endswith(".dist-info/entry_points.txt"))).decode()
    # Folders without __init__.py (the integration tests, which need a serving stack) stay in the checkout.
    packaged = [path for path in _sources() if (path.parent / "__init__.py").exists()]
    expected = {str(Path("isomoe") / path.relative_to(ROOT)) for path in packaged} | {"isomoe/py.typed"}
    assert expected <= names, sorted(expected - names)
    assert any(name.endswith("LICENSE") for name in names)
    assert "isomoe = isomoe.common.cli:main" in entry_points
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    for plugin, target in plugins.items():
        assert f"{plugin} = {target}" in entry_points.split("[vllm.general_plugins]")[1]
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    assert not [n for n in names if n.startswith(("isomoe/benchmarks", "isomoe/docs", "isomoe/build"))]
    for extra in ("tpu", "cuda", "vllm", "parity", "test", "dev"):
        assert f"Provides-Extra: {extra}" in metadata
    base = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not [line for line in base if re.search(r"\b(torch|jax|triton|vllm)\b", line)], base


@needs_checkout
def test_readme_commands_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    shown = "\n".join(re.findall(r"^```console\n(.*?)^```", readme, re.M | re.S))
    used = set(re.findall(r"^make ([a-z]+)", shown, re.M))
    assert {"run", "test"} <= used <= targets
    commands = set(re.findall(r"^isomoe ([a-z-]+)", shown, re.M))
    assert commands >= {"parity", "explain", "inspect", "collect-env"}
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "isomoe", command, "--help"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, command


@needs_checkout
def test_ci_runs_the_readme_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert re.search(r"^make test$", script.read_text(), re.M)
    assert script.stat().st_mode & 0o111


@needs_checkout
def test_constraints_satisfy_the_declared_ranges() -> None:
    from packaging.requirements import Requirement

    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(r for extra in ("parity", "test", "dev") for r in extras[extra])]
    for text in wanted:
        requirement = Requirement(text)
        if requirement.name in pins:
            assert requirement.specifier.contains(pins[requirement.name]), text
        else:
            assert requirement.name in ("isomoe", "setuptools"), f"constraints.txt: {requirement.name} is not pinned"


@needs_checkout
def test_environment_variables_are_documented() -> None:
    """Each ISOMOE_* name in the sources is in the table that collect-env uses and in the README, and the reverse."""
    pattern = re.compile(r"\bISOMOE_[A-Z][A-Z_]*\b")
    read: set[str] = set()
    for path in _sources():
        if "tests" not in path.relative_to(ROOT).parts and path.name != "environment.py":
            read |= {n for n in pattern.findall(path.read_text()) if not n.startswith("ISOMOE_TEST_")}
    assert read == set(VARIABLES)
    documented = set(re.findall(r"^\| `(ISOMOE_[A-Z_]+)`", (ROOT / "README.md").read_text(), re.M))
    assert documented == set(VARIABLES)


def test_version_is_one() -> None:
    assert importlib.metadata.version("isomoe") == isomoe.__version__
