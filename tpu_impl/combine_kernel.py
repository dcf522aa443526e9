# SPDX-License-Identifier: Apache-2.0
"""The final sum of both TPU combines: rows lie anywhere in device memory, a table says where each (token, k) pair's is.

Rows ``[rows, H/128, 128]`` of e4m3 codes (with a scale each) or bf16 lie to bf16 ``[tokens, H]``.

    y[t] = sum over k with at[t, k] >= 0, k ascending, of  weights[t, k] * (scales[at[t, k]] * rows[at[t, k]])

in float32, and rounded once. Groups of tokens: a row is ``[H/128, 128]``, so a token's sum is too; sums of a group are
laid down one after another and read back across, which gives the ``[group, 128]`` columns of the result. XLA would
relayout every row first.

Rows come in one of two ways (`combine_cost` says which), and the sum has the same bits:

* A DMA for each pair, the next group's while one group is summed. Scalar instructions bound this (about four bundles
  a row on v7x), so what most calls do not need is kept out of their loop: where no pair at all is skipped, none is
  asked about.
* All of them, in one or a few panels of columns. A skipped pair then refers to a row of zeros past the last.

Scales are brought to scalar memory before the first row is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .shipping import DTYPES, allocate
from .spec import LANES, Buffer, round_up

NAME = "isomoe_combine_kernel"
# Tokens of a group: the sublanes of a bf16 tile, or half of them; the first where it fits.
GROUPS = (16, 8)
# Pairs handled by straight-line code: a loop of few would mostly wait for its own scalars. Sums of rows that are all
# on the chip have no DMA to start between them, and gain by more. In the interpreter it would only make a larger
# program.
UNROLLED, UNROLLED_HELD = 32, 128
INTERPRETED_UNROLLED = 1
# On-chip bytes the buffers may take where fewer tokens would do.
BUDGET = 24 << 20
# Scalar memory that is not for tables.
SMEM_RESERVE = 32 * 1024
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def max_tokens(top_k: int, smem_bytes: int, *, scaled: bool) -> int:
    """Most tokens of a device whose tables fit scalar memory, with the scales of `scaled` rows, one a pair."""
    words = (smem_bytes - SMEM_RESERVE) // 4 - 1 - 2 * LANES * scaled
    return max(0, words // ((2 + scaled) * top_k) - (GROUPS[-1] - 1))


def scratch(
    group: int, top_k: int, shape: tuple[int, ...], dtype: Any, panels: int, scales: tuple[int, ...] | None
) -> list[Buffer]:
    """On-chip buffers, in the kernel's argument order, for rows of `shape` ``[rows, H/128, 128]`` and `dtype`, and
    their `scales` ``[lines, 1, 128]``."""
    count, sublanes, _ = shape
    width = sublanes // max(panels, 1)
    # Held rows end with a skipped pair's: 0.
    rows = (min(panels, 2), count + 1, width, LANES) if panels else (2, group * top_k, sublanes, LANES)
    buffers = [
        Buffer("rows", "vmem", rows, _NAMES[dtype]),
        # An odd stride between tokens: reading across them meets no memory bank twice.
        Buffer("sums", "vmem", (group * (width + 1), LANES), "float32"),
        Buffer("st", "vmem", (2, group, width * LANES), "bfloat16"),
        Buffer("count", "smem", (2,), "int32"),
        Buffer("rows_sem", "dma", (2,)),
        Buffer("out_sem", "dma", (2,)),
    ]
    if scales is not None:
        buffers += [
            Buffer("row_scales", "smem", (scales[0] * LANES,), "float32"),
            Buffer("scale_sem", "dma", (1,)),
        ]
    return buffers


def group_size(tokens: int, top_k: int, hidden: int) -> int:
    """Tokens summed together: a whole tile where that divides `tokens` and `BUDGET` allows `hidden` columns a pair."""
    fitting = (g for g in GROUPS if tokens % g == 0 and 4 * g * top_k * hidden <= BUDGET)
    return next(fitting, GROUPS[-1])


class _Kernel:
    """The traced body, as far as both ways of bringing rows have it in common."""

    def __init__(self, refs: dict[str, Any], group: int, top_k: int, panels: int, unrolled: int) -> None:
        self.r, self.group, self.top_k, self.panels = refs, group, top_k, panels
        self.tokens = refs["o"].shape[0]
        self.groups = self.tokens // group
        self.sublanes = refs["x"].shape[1] // max(panels, 1)
        # Whole tokens, so that a sum stays in registers.
        self.at_once = next((n for n in (16, 8, 4, 2) if n * top_k <= unrolled and group % n == 0), 1)
        self.unroll = unrolled > 1

    def row(self, g: jax.Array, i: jax.Array, pair: jax.Array) -> jax.Array:
        """float32 ``[sublanes, 128]``: the row of a pair, its place in its group and in the tables."""
        raise NotImplementedError

    def scaled(self, row: jax.Array, pair: jax.Array) -> jax.Array:
        r = self.r
        return row * r["row_scales"][r["at"][pair]] if "scales" in r else row

    def bring_scales(self) -> None:
        """The rows' scales to scalar memory; a skipped pair's is 0."""
        r = self.r
        if "scales" not in r:
            return

        def copy(i: jax.Array) -> Any:
            target = r["row_scales"].at[pl.ds(pl.multiple_of(i * LANES, LANES), LANES)]
            return pltpu.make_async_copy(r["scales"].at[i, 0], target, r["scale_sem"].at[0])

        lines = r["scales"].shape[0]
        lax.fori_loop(0, lines, lambda i, _: copy(i).start(), None)
        lax.fori_loop(0, lines, lambda i, _: copy(i).wait(), None)
        r["row_scales"][r["x"].shape[0]] = jnp.float32(0)

    def sum_token(self, g: jax.Array, t: jax.Array) -> None:
        r, first = self.r, g * self.group + t

        def add(k: jax.Array, total: jax.Array) -> jax.Array:
            pair = first + k * self.tokens
            return total + r["weights"][pair] * self.row(g, t * self.top_k + k, pair)

        total = jnp.zeros((self.sublanes, LANES), jnp.float32)
        total = lax.fori_loop(0, self.top_k, add, total, unroll=self.unroll)
        r["sums"][pl.ds(t * (self.sublanes + 1), self.sublanes)] = total

    def sum_group(self, g: jax.Array) -> None:
        def tokens(c: jax.Array, _: None) -> None:
            for j in range(self.at_once):
                self.sum_token(g, c * self.at_once + j)

        lax.fori_loop(0, self.group // self.at_once, tokens, None)

    def out_copy(self, g: jax.Array, panel: int) -> Any:
        r, q, width = self.r, g & 1, self.sublanes * LANES
        rows = pl.ds(pl.multiple_of(g * self.group, self.group), self.group)
        target = r["o"].at[rows, pl.ds(panel * width, width)]
        return pltpu.make_async_copy(r["st"].at[q], target, r["out_sem"].at[q])

    def write_group(self, g: jax.Array, panel: int = 0) -> None:
        """Round the sums of a group and send them off."""
        r, q = self.r, g & 1
        pl.when(g >= 2)(lambda: self.out_copy(g, panel).wait())
        for j in range(self.sublanes):
            column = r["sums"][pl.ds(j, self.group, stride=self.sublanes + 1), :]
            r["st"][q, :, j * LANES : (j + 1) * LANES] = column.astype(jnp.bfloat16)
        self.out_copy(g, panel).start()

    def wait_written(self, panel: int = 0) -> None:
        """Wait for what `write_group` waited for of no later group."""
        for g in range(max(0, self.groups - 2), self.groups):
            self.out_copy(jnp.int32(g), panel).wait()


class _Held(_Kernel):
    """Rows on the chip, a panel of columns at a time."""

    def row(self, g: jax.Array, i: jax.Array, pair: jax.Array) -> jax.Array:
        r = self.r
        return self.scaled(r["rows"][self.buffer, r["at"][pair]].astype(jnp.float32), pair)

    def panel_copy(self, panel: int) -> Any:
        r, q = self.r, panel % 2
        source = r["x"].at[:, pl.ds(panel * self.sublanes, self.sublanes)]
        return pltpu.make_async_copy(source, r["rows"].at[q, pl.ds(0, source.shape[0])], r["rows_sem"].at[q])

    def run(self) -> None:
        r = self.r
        self.panel_copy(0).start()
        for q in range(r["rows"].shape[0]):
            r["rows"][q, r["x"].shape[0]] = jnp.zeros(r["rows"].shape[2:], r["rows"].dtype)
        self.bring_scales()
        for panel in range(self.panels):
            self.buffer = panel % 2  # known while tracing: an address less to compute for each pair
            self.panel_copy(panel).wait()
            if panel + 1 < self.panels:
                self.panel_copy(panel + 1).start()

            def one(g: jax.Array, _: None, panel: int = panel) -> None:
                self.sum_group(g)
                self.write_group(g, panel)

            lax.fori_loop(0, self.groups, one, None)
            self.wait_written(panel)


class _Fetched(_Kernel):
    """A DMA for each pair."""

    def row(self, g: jax.Array, i: jax.Array, pair: jax.Array) -> jax.Array:
        return self.scaled(self.r["rows"][g & 1, i].astype(jnp.float32), pair)

    def each_pair(self, g: jax.Array, body: Callable[[jax.Array, jax.Array, Any], Any], carry: Any) -> Any:
        """``carry = body(i, row, carry)`` for the pairs of a group: place in the group, row or one past the last."""

        def some(c: jax.Array, carry: Any) -> Any:
            first = g * self.group + c * self.at_once
            for j in range(self.at_once):
                slot = (c * self.at_once + j) * self.top_k

                def one(k: jax.Array, carry: Any, j: int = j, slot: jax.Array = slot) -> Any:
                    return body(slot + k, self.r["at"][first + (k * self.tokens + j)], carry)

                carry = lax.fori_loop(0, self.top_k, one, carry, unroll=self.unroll)
            return carry

        return lax.fori_loop(0, self.group // self.at_once, some, carry)

    def start_all(self, g: jax.Array) -> None:
        """Start the copies of a group without skipped pairs."""
        r, q = self.r, g & 1

        def one(i: jax.Array, row: jax.Array, _: None) -> None:
            pltpu.make_async_copy(r["x"].at[row], r["rows"].at[q, i], r["rows_sem"].at[q]).start()

        self.each_pair(g, one, None)
        r["count"][q] = self.group * self.top_k

    def start_used(self, g: jax.Array) -> None:
        """Start the copies of a group; a skipped pair has zeros for a row, as what lies anywhere may be NaN."""
        r, q, beyond = self.r, g & 1, self.r["x"].shape[0]

        def one(i: jax.Array, row: jax.Array, count: jax.Array) -> jax.Array:
            @pl.when(row < beyond)
            def _() -> None:
                pltpu.make_async_copy(r["x"].at[row], r["rows"].at[q, i], r["rows_sem"].at[q]).start()

            @pl.when(row >= beyond)
            def _() -> None:
                r["rows"][q, i] = jnp.zeros(r["rows"].shape[2:], r["rows"].dtype)

            return count + (row < beyond).astype(jnp.int32)

        r["count"][q] = self.each_pair(g, one, jnp.int32(0))

    def start(self, g: jax.Array) -> None:
        every = self.r["at"][self.tokens * self.top_k] == 1
        pl.when(every)(functools.partial(self.start_all, g))
        pl.when(jnp.logical_not(every))(functools.partial(self.start_used, g))

    def wait(self, g: jax.Array) -> None:
        r, q = self.r, g & 1
        count = r["count"][q]

        @pl.when(count > 0)
        def _() -> None:
            got = r["rows"].at[q, pl.ds(0, count)]
            pltpu.make_async_copy(got, got, r["rows_sem"].at[q]).wait()

    def one_group(self, g: jax.Array) -> None:
        self.wait(g)
        self.sum_group(g)
        self.write_group(g)

    def run(self) -> None:
        def step(s: jax.Array, _: None) -> None:
            pl.when(s < self.groups)(functools.partial(self.start, s))
            pl.when(s == 0)(self.bring_scales)
            pl.when(s > 0)(functools.partial(self.one_group, s - 1))

        lax.fori_loop(0, self.groups + 1, step, None)
        self.wait_written()


def _body(names: list[str], group: int, top_k: int, panels: int, interpreted: bool, *refs: Any) -> None:
    unrolled = INTERPRETED_UNROLLED if interpreted else UNROLLED_HELD if panels else UNROLLED
    kernel = _Held if panels else _Fetched
    kernel(dict(zip(names, refs, strict=True)), group, top_k, panels, unrolled).run()


def combine_kernel(
    rows: jax.Array,
    at: jax.Array,
    weights: jax.Array,
    scales: jax.Array | None = None,
    *,
    panels: int,
    vmem_limit_bytes: int,
    interpret: Any = False,
    bounds_checks: bool = False,
) -> jax.Array:
    """Gather and sum on one device.

    Args:
      rows: e4m3 or bfloat16 ``[rows, H/128, 128]``; rows nobody refers to may hold anything.
      at: int32 ``[tokens, K]``, each pair's row, or -1 to skip it.
      weights: float32 ``[tokens, K]``; not read as numbers where `at` is -1.
      scales: float32 ``[lines, 1, 128]`` (`spec.scales_shape`), the rows' along lanes, where they are codes.
      panels: panels of columns in which all rows are held on the chip (`combine_cost.panels_that_fit`), or 0 to copy
        each pair's row.
      vmem_limit_bytes, interpret, bounds_checks: as `expert_kernel`'s.

    Returns:
      bfloat16 ``[tokens, H]``; zeros where every pair is skipped.
    """
    tokens, top_k = at.shape
    hidden = rows.shape[1] * LANES
    group = group_size(tokens, top_k, 0 if panels else hidden)
    padded = round_up(tokens, group)
    # Tables k by k, tokens along lanes, as XLA keeps so narrow an array.
    more = ((0, 0), (0, padded - tokens))
    at, weights = jnp.pad(at.T, more, constant_values=-1), jnp.pad(weights.T, more)
    table = jnp.where(at >= 0, at, rows.shape[0]).reshape(-1)
    if not panels:
        table = jnp.append(table, jnp.all(at >= 0).astype(jnp.int32))
    scalars = {"at": table, "weights": jnp.where(at >= 0, weights, 0.0).reshape(-1)}
    tensors = {"x": rows} if scales is None else {"x": rows, "scales": scales}
    shape = None if scales is None else scales.shape
    buffers = scratch(group, top_k, rows.shape, rows.dtype.type, panels, shape)
    names = [*scalars, *tensors, "o", *(buffer.name for buffer in buffers)]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    size = tokens * top_k
    call = pl.pallas_call(
        functools.partial(_body, names, group, top_k, panels, bool(interpret)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=(1,), in_specs=[anywhere] * len(tensors), out_specs=anywhere,
            scratch_shapes=[allocate(buffer) for buffer in buffers],
        ),
        out_shape=jax.ShapeDtypeStruct((padded, hidden), jnp.bfloat16),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=not bounds_checks
        ),
        cost_estimate=pl.CostEstimate(
            flops=3 * size * hidden, bytes_accessed=size * hidden * rows.dtype.itemsize, transcendentals=0
        ),
        interpret=interpret,
        name=NAME,
    )
    return call(*scalars.values(), *tensors.values())[:tokens]
