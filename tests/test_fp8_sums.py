# SPDX-License-Identifier: Apache-2.0
"""Hopper's FP8 sums on the host: against what an H200 gave, and their place in a recipe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from isomoe.common.fp8_sums import INTERVALS, short_sums
from isomoe.common.metrics import rel_l2
from isomoe.common.numerics import E4M3
from isomoe.common.recipes import Recipe
from isomoe.tests.matrix import Case, build

MEASURED = Path(__file__).parent / "data" / "hopper_fp8_sums.safetensors"


@pytest.mark.parametrize("every", [32, 128])
def test_bits_of_a_device(every: int) -> None:
    """Values of small and large exponents, subnormals among them, as one H200 summed them."""
    found = load_file(MEASURED)
    a, b, want = found["a"].view(E4M3), found["b"].view(E4M3), found[f"sum{every}"]
    assert (np.abs(a.astype(np.float32)) < 2**-6).any() and want.shape == (5, 24, 16)
    for i in range(len(a)):
        assert np.array_equal(short_sums(a[i], b[i], every).view(np.int32), want[i].view(np.int32))
    exact = np.einsum("cmk,cnk->cmn", a.astype(np.float64), b.astype(np.float64))
    assert 2e-5 < rel_l2(want, exact) < 1e-3


def test_shorter_runs_are_closer_to_the_exact_sum() -> None:
    rng = np.random.default_rng(0)
    a, b = ((rng.standard_normal((n, 128)) * 40).astype(E4M3) for n in (40, 50))
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    errors = [rel_l2(short_sums(a, b, every), exact) for every in INTERVALS]
    assert errors == sorted(errors) and errors[0] > 0
    assert np.array_equal(short_sums(a[:, :5], b[:, :5], 64), short_sums(a[:, :5], b[:, :5], 128))


def test_rows_are_summed_alone() -> None:
    rng = np.random.default_rng(1)
    a, b = ((rng.standard_normal((n, 96)) * 40).astype(E4M3) for n in (9, 16))
    a[3] = 0
    a[5, 7] = np.nan
    out = short_sums(a, b, 64)
    assert np.isnan(out[5]).all() and not out[3].any() and np.isfinite(np.delete(out, 5, 0)).all()
    assert all(np.array_equal(short_sums(a[[i]], b, 64)[0], out[i]) for i in (0, 3, 8))


def test_bad_arguments() -> None:
    ones = np.ones((2, 128), np.float32)
    with pytest.raises(ValueError, match="every: got 16"):
        short_sums(ones, ones, 16)
    with pytest.raises(ValueError, match="got 130 and 130 columns"):
        short_sums(np.ones((2, 130), np.float32), np.ones((2, 130), np.float32), 32)
    with pytest.raises(ValueError, match="fp8_sums: got 16"):
        Recipe("w8a8", 128, 128, fp8_sums=16)
    with pytest.raises(ValueError, match="fp8_sums: got 32 with recipe 'w8a16'"):
        Recipe("w8a16", fp8_sums=32)


@pytest.mark.parametrize("scheme", ["block", "channel"])
def test_the_reference_follows_the_recipe(scheme: str) -> None:
    inputs = build(Case(scheme, "w8a8"))
    group = 128 if scheme == "block" else "token"
    plain = inputs.run("reference", recipe=Recipe("w8a8", group, group))
    short = inputs.run("reference", recipe=Recipe("w8a8", group, group, fp8_sums=128))
    assert 0 < rel_l2(short, plain) < 1e-2


@pytest.mark.parametrize("executor", ["triton", "pallas_ep"])
def test_executors_without_such_sums_refuse_them(executor: str) -> None:
    inputs = build(Case("block", "w8a8"))
    with pytest.raises(ValueError, match="fp8_sums=64"):
        inputs.run(executor, recipe=Recipe("w8a8", 128, 128, fp8_sums=64))
