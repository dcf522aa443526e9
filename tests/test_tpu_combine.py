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
from isomoe.tpu_impl import combine_kernel  # noqa: E402
from isomoe.tpu_impl.executor import InterpretSettings  # noqa: E402

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

    def run(self, mode: str) -> np.ndarray:
        params = InterpretSettings(True, "nan", mode).params()
        rows = jnp.asarray(self.rows.reshape(len(self.rows), -1, 128))
        scales = None if self.scales is None else jnp.asarray(np.repeat(self.scales, 128).reshape(-1, 1, 128))

        @jax.jit
        def call(*args: Any) -> jax.Array:
            return combine_kernel.combine_kernel(*args, vmem_limit_bytes=1 << 26, interpret=params)

        return np.asarray(call(rows, jnp.asarray(self.at), jnp.asarray(self.weights), scales))


def races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert interpret_pallas_call.races is not None, "the race detector did not run"
    return bool(interpret_pallas_call.races.races_found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden", "skip"), [(48, 2, 512, 0.0), (19, 3, 256, 0.2), (1, 1, 256, 0.0), (8, 4, 768, 0.5)]
)
def test_sums(tokens: int, top_k: int, hidden: int, skip: float, fp8: bool, mode: str) -> None:
    problem = Problem(tokens, top_k, hidden, fp8, skip=skip)
    assert bitwise_equal(problem.run(mode), problem.want())
    assert not races_found()
