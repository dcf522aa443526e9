# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints and adapters: one kind of error, in bounded time and memory.

benchmarks/fuzz_loaders.py runs for longer.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isomoe.tests import fuzzing


@pytest.mark.parametrize("source", fuzzing.SOURCES)
def test_undamaged_files_load(tmp_path: Path, source: str) -> None:
    make, load = fuzzing.SOURCES[source]
    for name, raw in make().items():
        (tmp_path / name).write_bytes(raw)
    load(tmp_path)


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(fuzzing.SOURCES)), st.integers(0, 10**9))
def test_damaged_files_keep_the_promise(source: str, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outcome = fuzzing.attempt(source, seed, Path(folder))
    assert not outcome.problem, outcome


def test_damage_is_by_seed_and_mostly_found() -> None:
    files = fuzzing.adapter_files()
    assert fuzzing.damage(random.Random(3), files) == fuzzing.damage(random.Random(3), files)
    refused = 0
    for seed in range(40):
        with tempfile.TemporaryDirectory() as folder:
            refused += not fuzzing.attempt("adapter", seed, Path(folder)).loaded
    assert refused > 20, "the damage must reach what loaders check"


def test_a_broken_promise_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(root: Path) -> None:
        raise KeyError(bytearray(fuzzing.BUDGET + fuzzing.SLACK + (64 << 20))[:1])

    monkeypatch.setitem(fuzzing.SOURCES, "adapter", (fuzzing.adapter_files, greedy))
    assert fuzzing.attempt("adapter", 1, tmp_path).problem.startswith("KeyError")
