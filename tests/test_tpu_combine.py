# SPDX-License-Identifier: Apache-2.0
"""The kernel that sums a token's rows, in the TPU interpreter: bit for bit a float32 sum in the order of k."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402

from isomoe.common.metrics import bitwise_equal  # noqa: E402
from isomoe.common.numerics import BF16  # noqa: E402
from isomoe.tests.races import keep_detectors, races_found  # noqa: E402, F401
from isomoe.tpu_impl import combine, combine_cost, combine_kernel  # noqa: E402
from isomoe.tpu_impl.executor import InterpretSettings  # noqa: E402
from isomoe.tpu_impl.generations import GENERATIONS  # noqa: E402
from isomoe.tpu_impl.spec import TRANSPORTS, Blocks, KernelSpec, scales_shape  # noqa: E402

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

    def lines(self) -> np.ndarray:
        """The scales along lanes; NaN past the last."""
        assert self.scales is not None
        laid = np.full(scales_shape(len(self.scales)), np.nan, np.float32)
        laid.reshape(-1)[: len(self.scales)] = self.scales
        return laid

    def run(self, mode: str, panels: int, *, check_races: bool = True) -> np.ndarray:
        params = InterpretSettings(True, "nan", mode).params()
        rows = jnp.asarray(self.rows.reshape(len(self.rows), -1, 128))
        scales = None if self.scales is None else jnp.asarray(self.lines())

        @jax.jit
        def call(*args: Any) -> Any:
            return combine_kernel.combine_kernel(*args, panels=panels, vmem_limit_bytes=1 << 26, interpret=params)

        result = np.asarray(call(rows, jnp.asarray(self.at), jnp.asarray(self.weights), scales))
        if check_races:
            assert not races_found()
        return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden", "skip", "panels"),
    [(48, 2, 512, 0.0, 0), (19, 3, 256, 0.2, 0), (1, 1, 256, 0.0, 0),
     (48, 2, 384, 0.0, 3), (19, 3, 256, 0.2, 1), (1, 1, 256, 0.0, 2)],
)
def test_sums(tokens: int, top_k: int, hidden: int, skip: float, panels: int, fp8: bool, mode: str) -> None:
    """Several groups, with and without skipped pairs; tokens that fill no group; each way rows come in."""
    problem = Problem(tokens, top_k, hidden, fp8, skip=skip)
    assert bitwise_equal(problem.run(mode, panels), problem.want())


@pytest.mark.parametrize("panels", [0, 2])
def test_nothing_but_skipped_pairs_gives_zeros(panels: int) -> None:
    """Neither a NaN weight nor what lies in the buffers gets into the sum."""
    problem = Problem(10, 2, 256, True, skip=1.1)
    assert (problem.at < 0).all()
    got = problem.run("eager", panels)
    assert bitwise_equal(got, np.zeros((10, 256), BF16))


@pytest.mark.parametrize("panels", [0, 1])
def test_a_token_keeps_its_infinity_to_itself(panels: int) -> None:
    problem = Problem(9, 2, 256, False)
    problem.at[4] = [0, -1]
    problem.rows[0] = np.inf
    problem.weights[4] = [1, np.nan]
    problem.at[np.arange(9) != 4] = np.where(problem.at == 0, -1, problem.at)[np.arange(9) != 4]
    got = problem.run("eager", panels).astype(np.float32)
    assert np.isinf(got[4]).all() and np.isfinite(np.delete(got, 4, axis=0)).all()


def test_the_detector_sees_sums_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combine_kernel._Fetched, "wait", lambda self, g: None)
    Problem(16, 2, 256, False).run("eager", 0, check_races=False)
    assert races_found()


def test_the_detector_sees_panels_that_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two panels of one buffer."""
    monkeypatch.setattr(combine_kernel._Held, "panel_copy", _into_the_first(combine_kernel._Held.panel_copy))
    Problem(16, 2, 256, False).run("eager", 2, check_races=False)
    assert races_found()


def _into_the_first(panel_copy: Any) -> Any:
    def copy(self: Any, panel: int) -> Any:
        made = panel_copy(self, panel)
        target = self.r["rows"].at[0, 1:]
        return combine_kernel.pltpu.make_async_copy(made.src_ref, target, self.r["rows_sem"].at[panel % 2])

    return copy


@pytest.mark.parametrize("panels", [0, 2])
def test_unrolled_pairs_are_the_same_sum(panels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled handles whole tokens in straight-line code; here it is interpreted."""
    problem = Problem(16, 2, 256, True)
    want = problem.run("on_wait", panels)
    monkeypatch.setattr(combine_kernel, "INTERPRETED_UNROLLED", 8)
    assert bitwise_equal(problem.run("on_wait", panels), want)


@pytest.mark.parametrize(("tokens", "top_k", "hidden", "want"), [
    (64, 8, 6144, 16), (24, 8, 6144, 8), (64, 256, 6144, 8), (1, 1, 256, 8),
])
def test_groups(tokens: int, top_k: int, hidden: int, want: int) -> None:
    assert combine_kernel.group_size(tokens, top_k, hidden) == want


def spec_of(transport: str, *, hidden: int = 512, tokens: int = 8, ep: int = 4, top_k: int = 2) -> KernelSpec:
    blocks = Blocks(128, 32, (32,), 2, 2, 32)
    return KernelSpec(
        hidden, 128, 4, tokens, top_k, ep, "ep", "silu", True, "w8a8", False, False, False, transport, blocks
    )


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_way_rows_come_in_is_known_and_fits(transport: str, name: str) -> None:
    """For any size; rows that are held are whole tiles wide, and take no more than the chip has."""
    gen = GENERATIONS[name]
    for hidden, tokens in itertools.product((256, 2048, 2816, 6144, 7168), (8, 512, 8192, 32768)):
        spec = spec_of(transport, hidden=hidden, tokens=tokens, ep=8, top_k=8)
        panels, count = combine_cost.combine_panels(gen, spec), combine_cost.summed_rows(spec)
        assert combine_cost.combine_us(gen, gen.clock_ghz, spec) > 0
        if panels:
            dtype = jnp.float8_e4m3fn if transport.endswith("fp8") else jnp.bfloat16
            scales = scales_shape(count) if transport.endswith("fp8") else None
            rows, *others = combine_kernel.scratch(16, 8, (count, hidden // 128, 128), dtype, panels, scales)
            assert panels == 1 or rows.shape[2] % combine_cost.TILE[dtype.dtype.itemsize] == 0
            held = np.prod(rows.shape) * dtype.dtype.itemsize
            held += sum(np.prod(x.shape) * 4 for x in others if x.space == "vmem")
            assert held <= gen.vmem_limit_bytes


def test_rows_are_held_where_most_are_wanted() -> None:
    """A reduce-scatter at prefill skips seven of eight rows, which would not fit."""
    gen, size = GENERATIONS["v7x"], dict(hidden=2048, tokens=8192, ep=8, top_k=8)
    assert combine_cost.combine_panels(gen, spec_of("push_fp8", **size)) == 1
    assert combine_cost.combine_panels(gen, spec_of("push_fp8", **{**size, "hidden": 6144})) == 2
    assert combine_cost.combine_panels(gen, spec_of("rs_bf16", **size)) == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_most_tokens_fit_on_the_chip(transport: str) -> None:
    spec = spec_of(transport)
    most = combine.max_tokens(spec, 1 << 20)
    own = {"rs_bf16": most}.get(transport, most // spec.ep)
    pairs = own * (spec.ep if transport == "presum_fp8" else spec.top_k)
    assert most > 0 and most % spec.ep == 0
    scales = np.prod(scales_shape(pairs)) if transport.endswith("fp8") else 0
    assert 4 * (2 * pairs + 1 + scales) <= (1 << 20) - combine_kernel.SMEM_RESERVE
