# SPDX-License-Identifier: Apache-2.0
"""vLLM with this package's plugin on simulated platforms; see `simulated/conftest.py` for why in processes of its own.

Where no vLLM is installed, the tests are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "simulated"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", sorted(p.name for p in FOLDER.glob("vllm_*.py")))
def test_simulated(module: str) -> None:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(FOLDER), os.environ.get("PYTHONPATH", "")) if p)
    for name in ("ISOMOE_VLLM", "ISOMOE_DISABLE", "ISOMOE_PLATFORM", "ISOMOE_MOE_BACKEND", "ISOMOE_TEST_LEG"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", str(FOLDER / module), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = dict(reversed(pair) for pair in re.findall(r"(\d+) (passed|skipped)", done.stdout.splitlines()[-1]))
    assert int(counts["passed"]) > 0 and "skipped" not in counts, done.stdout[-2000:]
