# SPDX-License-Identifier: Apache-2.0
"""The kernel that sums a token's rows, in the TPU interpreter: bit for bit a float32 sum in the order of k."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402

from isomoe.common.metrics import bitwise_equal  # noqa: E402
from isomoe.common.numerics import BF16  # noqa: E402
from isomoe.tests.races import keep_detectors, races_found  # noqa: E402, F401
from isomoe.tpu_impl import combine, combine_kernel  # noqa: E402
from isomoe.tpu_impl.executor import InterpretSettings  # noqa: E402
from isomoe.tpu_impl.spec import TRANSPORTS, Blocks, KernelSpec  # noqa: E402

pytestmark = pytest.mark.timeout(120)

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
MODES = ("on_wait", "eager")


class Problem:
    """Rows in some order, a pair in eight skipped; what no pair refers to is NaN."""

    def __init__(self, tokens: int, top_k: int, hidden: int, fp8: bool, *, skip: float = 0.125, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        count = tokens * top_k + 3
        self.at = rng.permutation(count)[: tokens * top_k].reshape(tokens, top_k).astype(np.int32)
        self.at[rng.random(self.at.shape) < skip] = -1
        self.weights = rng.random(self.at.shape, np.float32)
        self.weights[self.at < 0] = np.nan
        rows = rng.standard_normal((count, hidden)).astype(np.float32)
        unused = np.setdiff1d(np.arange(count), self.at)
        self.rows = (4 * rows).astype(FP8 if fp8 else BF16)
        self.rows[unused] = np.nan
        self.scales = rng.random(count, np.float32) if fp8 else None
        if self.scales is not None:
            self.scales[unused] = np.nan

    def want(self) -> np.ndarray:
        """bf16 ``[tokens, H]``."""
        total = np.zeros((len(self.at), self.rows.shape[1]), np.float32)
        for t, k in np.ndindex(*self.at.shape):
            if self.at[t, k] >= 0:
                row = self.rows[self.at[t, k]].astype(np.float32)
                if self.scales is not None:
                    row = row * self.scales[self.at[t, k]]
                total[t] += self.weights[t, k] * row
        return total.astype(BF16)

    def run(self, mode: str, *, check_races: bool = True) -> np.ndarray:
        params = InterpretSettings(True, "nan", mode).params()
        rows = jnp.asarray(self.rows.reshape(len(self.rows), -1, 128))
        scales = None if self.scales is None else jnp.asarray(np.repeat(self.scales, 128).reshape(-1, 1, 128))

        @jax.jit
        def call(*args: Any) -> Any:
            return combine_kernel.combine_kernel(*args, vmem_limit_bytes=1 << 26, interpret=params)

        result = np.asarray(call(rows, jnp.asarray(self.at), jnp.asarray(self.weights), scales))
        if check_races:
            assert not races_found()
        return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden", "skip"), [(48, 2, 512, 0.0), (19, 3, 256, 0.2), (1, 1, 256, 0.0)]
)
def test_sums(tokens: int, top_k: int, hidden: int, skip: float, fp8: bool, mode: str) -> None:
    """Several groups, with and without skipped pairs; tokens that fill no group."""
    problem = Problem(tokens, top_k, hidden, fp8, skip=skip)
    assert bitwise_equal(problem.run(mode), problem.want())


def test_nothing_but_skipped_pairs_gives_zeros() -> None:
    """Neither a NaN weight nor what lies in the buffers gets into the sum."""
    problem = Problem(10, 2, 256, True, skip=1.1)
    assert (problem.at < 0).all()
    got = problem.run("eager")
    assert bitwise_equal(got, np.zeros((10, 256), BF16))


def test_a_token_keeps_its_infinity_to_itself() -> None:
    problem = Problem(9, 2, 256, False)
    problem.at[4] = [0, -1]
    problem.rows[0] = np.inf
    problem.weights[4] = [1, np.nan]
    problem.at[np.arange(9) != 4] = np.where(problem.at == 0, -1, problem.at)[np.arange(9) != 4]
    got = problem.run("eager").astype(np.float32)
    assert np.isinf(got[4]).all() and np.isfinite(np.delete(got, 4, axis=0)).all()


def test_the_detector_sees_sums_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combine_kernel._Kernel, "wait", lambda self, g: None)
    Problem(16, 2, 256, False).run("eager", check_races=False)
    assert races_found()


def test_unrolled_pairs_are_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled handles whole tokens in straight-line code; here it is interpreted."""
    problem = Problem(16, 2, 256, True)
    want = problem.run("on_wait")
    monkeypatch.setattr(combine_kernel, "INTERPRETED_UNROLLED", 8)
    assert bitwise_equal(problem.run("on_wait"), want)


@pytest.mark.parametrize(("tokens", "top_k", "hidden", "want"), [
    (64, 8, 6144, 16), (24, 8, 6144, 8), (64, 256, 6144, 8), (1, 1, 256, 8),
])
def test_groups(tokens: int, top_k: int, hidden: int, want: int) -> None:
    assert combine_kernel.group_size(tokens, top_k, hidden) == want


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_most_tokens_fit_on_the_chip(transport: str) -> None:
    blocks = Blocks(128, 32, (32,), 2, 2, 32)
    spec = KernelSpec(
        512, 128, 4, 8, 2, 4, "ep", "silu", True, "w8a8", False, False, False, transport, blocks
    )
    most = combine.max_tokens(spec, 1 << 20)
    own = {"rs_bf16": most}.get(transport, most // spec.ep)
    pairs = own * (spec.ep if transport == "presum_fp8" else spec.top_k)
    assert most > 0 and most % spec.ep == 0
    assert 4 * (2 * pairs + 1) <= (1 << 20) - combine_kernel.SMEM_RESERVE
    if transport.endswith("fp8"):
        assert (most if transport == "presum_fp8" else pairs) <= combine_kernel.MAX_SCALES
