# SPDX-License-Identifier: Apache-2.0
"""`presum_fp8`: a device sums its own experts' rows of a token and sends that one row, as FP8 codes and a scale.

    p[t, d] = sum over k with expert ids[t, k] on device d, k ascending, of  w[t, k] * row[t, k]      float32
    y[t]    = sum over d = 0 .. EP-1 of  deq(quantize(p[t, d]))                                       float32

`row` is the expert kernel's bf16 result, left in sorted order in device memory. One scale covers a row p[t, d]. The
own device's part is quantised like the others' and so is the whole sum where EP = 1 (as `push_fp8` does): a recipe
then depends on EP only through which experts share a device. A device without an expert of token t sends nothing and
adds nothing.

Where top-8 of 8 devices would send up to 8 rows a token, this sends one a visited device (5.3 with random routing),
and its rows to one owner are one contiguous run: tokens are taken in their order, so the owner finds the row of
(device, token) by counting its own tokens that visit the device, and no index travels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .numerics import cast_rows, fp8_scale
from .plan import Plan, exclusive_sum
from .shipping import Shipping, allocate
from .spec import LANES, Buffer, KernelSpec

NAME = "isomoe_presum_kernel"
# Rows of a block are rounded this many at a time: the block would not fit registers.
ROUNDED = 8
# Pairs handled by straight-line code: a loop of one would mostly wait for its own results. In the interpreter it would
# only make a larger program.
UNROLLED = 8
INTERPRETED_UNROLLED = 1
# On-chip bytes the buffers may take; more only smooths the stream.
BUDGET = 24 << 20
# Scalar memory that is not for tables.
SMEM_RESERVE = 32 * 1024


@dataclass(frozen=True)
class TableLayout:
    """Offsets into the kernel's int32 table.

    Header: rank, rows that arrive from other devices, tokens with a row here (n), pairs here. Then the first of those
    tokens of each owner and n; the first pair of each block of `block` tokens; then for each pair, tokens and their k
    ascending, twice its row in the expert kernel's result, plus one where a token begins. A table of float32 router
    weights goes with the pairs.
    """

    block: int
    owners: int
    blocks: int
    pairs: int
    size: int

    HEADER = 4

    @classmethod
    def of(cls, spec: KernelSpec) -> TableLayout:
        block = block_tokens(spec)
        blocks = cls.HEADER + spec.ep + 1
        pairs = blocks + -(-spec.tokens // block) + 1
        return cls(block, cls.HEADER, blocks, pairs, pairs + spec.capacity)


def max_tokens(spec: KernelSpec, smem_bytes: int) -> int:
    """Most tokens whose tables fit scalar memory, as if each were a block; a multiple of ``spec.ep``, or 0."""
    words = (smem_bytes - SMEM_RESERVE) // 4 - (TableLayout.HEADER + spec.ep + 2)
    return max(0, words // (1 + 2 * spec.top_k) // spec.ep * spec.ep)


def _buffers(spec: KernelSpec, block: int) -> list[Buffer]:
    sublanes = spec.hidden // LANES
    return [
        Buffer("rows", "vmem", (2, block * spec.top_k, sublanes, LANES), "bfloat16"),
        Buffer("sums", "vmem", (block, sublanes, LANES), "float32"),
        Buffer("st", "vmem", (2, block, sublanes, LANES), "float8_e4m3fn"),
        Buffer("st_scale", "vmem", (2, block, 1, LANES), "float32"),
    ]


def block_tokens(spec: KernelSpec) -> int:
    """Tokens of a block: the most that `BUDGET` allows."""
    fitting = [b for b in (64, 32, 16) if sum(x.nbytes for x in _buffers(spec, b)) <= BUDGET]
    return fitting[0] if fitting else ROUNDED


def scratch(spec: KernelSpec) -> list[Buffer]:
    """On-chip buffers, in the kernel's argument order."""
    buffers = _buffers(spec, block_tokens(spec))
    buffers.append(Buffer("lens", "smem", (4,), "int32"))
    buffers += [Buffer("gather_sem", "dma", (2,)), Buffer("out_sem", "dma", (2,))]
    if spec.ep > 1:
        buffers += [Buffer("send_sem", "dma", (2,)), Buffer("recv_sem", "dma", (1,))]
    return buffers


def tables(spec: KernelSpec, plan: Plan, arriving: jax.Array) -> list[jax.Array]:
    """The kernel's int32 and float32 tables; `arriving` as in the header."""
    assert plan.kept is not None
    layout = TableLayout.of(spec)
    pairs = jnp.sum(plan.kept.mine.reshape(spec.tokens, spec.top_k), axis=1, dtype=jnp.int32)
    here, total = pairs > 0, jnp.sum(pairs)
    owners = jnp.cumsum(jnp.sum(here.reshape(spec.ep, -1), axis=1, dtype=jnp.int32), dtype=jnp.int32)
    place = exclusive_sum(here.astype(jnp.int32))
    bounds = layout.block * lax.iota(jnp.int32, layout.pairs - layout.blocks)
    blocks = jnp.sum(jnp.where(place < bounds[:, None], pairs, 0), axis=1, dtype=jnp.int32)

    row = lax.iota(jnp.int32, spec.capacity)
    pair = jnp.where(row < total, plan.kept.order, spec.capacity)
    pair, rows, weights = lax.sort((pair, row, plan.kept.sorted_weights), num_keys=1, is_stable=False)
    token = lax.div(pair, spec.top_k)
    begins = (token != jnp.roll(token, 1)) | (row == 0)
    header = jnp.stack([plan.rank[0], arriving, owners[-1], total])
    table = jnp.concatenate([header, jnp.zeros((1,), jnp.int32), owners, blocks, 2 * rows + begins])
    assert table.shape == (layout.size,) and table.dtype == jnp.int32, (table.shape, table.dtype, layout)
    return [table, weights]


def _each(low: jax.Array, high: jax.Array, body: Any, carry: Any, at_once: int) -> Any:
    """``carry = body(i, carry)`` for i in ``[low, high)``, `at_once` together as far as they go."""

    def some(g: jax.Array, carry: Any) -> Any:
        for j in range(at_once):
            carry = body(low + g * at_once + j, carry)
        return carry

    if at_once > 1:
        groups = lax.div(high - low, at_once)
        carry = lax.fori_loop(0, groups, some, carry)
        low = low + groups * at_once
    return lax.fori_loop(low, high, body, carry)


class _Kernel:
    """The traced body: blocks of tokens, the next block's rows on their way while one is summed."""

    def __init__(self, spec: KernelSpec, refs: dict[str, Any], at_once: int) -> None:
        self.spec, self.r, self.t = spec, refs, TableLayout.of(spec)
        self.at_once = at_once
        self.rank, self.count = refs["tab"][0], refs["tab"][2]
        self.shipping = Shipping(refs, spec.axis, spec.ep, [("st", "o"), ("st_scale", "o_scale")])

    def tokens(self, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First token of block `b`, and one past its last."""
        low = b * self.t.block
        return low, jnp.minimum(low + self.t.block, self.count)

    def pairs(self, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First pair of block `b`, and one past its last."""
        return self.r["tab"][self.t.blocks + b], self.r["tab"][self.t.blocks + b + 1]

    def start_gather(self, b: jax.Array) -> None:
        r, q = self.r, lax.rem(b, 2)
        low, high = self.pairs(b)

        def one(i: jax.Array, _: None) -> None:
            source = r["x"].at[r["tab"][self.t.pairs + i] >> 1]
            pltpu.make_async_copy(source, r["rows"].at[q, i - low], r["gather_sem"].at[q]).start()

        _each(low, high, one, None, self.at_once)

    def wait_gather(self, b: jax.Array) -> None:
        q = lax.rem(b, 2)
        low, high = self.pairs(b)
        got = self.r["rows"].at[q, pl.ds(0, high - low)]
        pltpu.make_async_copy(got, got, self.r["gather_sem"].at[q]).wait()

    def sum_rows(self, b: jax.Array) -> None:
        """Walk the block's pairs: a sum goes on within a token, and is stored after each of its pairs."""
        r, q = self.r, lax.rem(b, 2)
        low, high = self.pairs(b)

        def add(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            token, total = carry
            begins = r["tab"][self.t.pairs + i] & 1
            token = token + begins
            row = r["weights"][i] * r["rows"][q, i - low].astype(jnp.float32)
            total = jnp.where(begins == 1, 0.0, total) + row
            r["sums"][token] = total
            return token, total

        _each(low, high, add, (jnp.int32(-1), jnp.zeros(r["sums"].shape[1:], jnp.float32)), self.at_once)

    def round_rows(self, b: jax.Array) -> None:
        """Codes and scales of the block's sums; rows past its tokens are rounded too, and stay here."""
        r, q = self.r, lax.rem(b, 2)

        def some(i: jax.Array, _: None) -> None:
            rows = pl.ds(pl.multiple_of(i * ROUNDED, ROUNDED), ROUNDED)
            value = r["sums"][rows]
            scale = fp8_scale(jnp.max(jnp.max(jnp.abs(value), axis=1, keepdims=True), axis=2, keepdims=True))
            r["st"][q, rows] = cast_rows(value, 1.0 / scale)
            r["st_scale"][q, rows] = jnp.broadcast_to(scale, (ROUNDED, 1, LANES))

        low, high = self.tokens(b)
        lax.fori_loop(0, lax.div(high - low + (ROUNDED - 1), ROUNDED), some, None)

    def push(self, b: jax.Array) -> None:
        """The block's rows to their owners: at most one run each."""
        q = lax.rem(b, 2)
        low, high = self.tokens(b)

        def owner(d: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            begin = self.r["tab"][self.t.owners + d]
            start = jnp.maximum(begin, low)
            length = jnp.maximum(jnp.minimum(self.r["tab"][self.t.owners + d + 1], high) - start, 0)
            dest = self.rank * (self.spec.tokens // self.spec.ep) + start - begin

            kept = jnp.where(d == self.rank, length, 0)
            self.shipping.keep(q, start - low, kept, dest)
            if self.shipping.remote:
                self.shipping.send(q, start - low, length - kept, d, dest)
            return sums[0] + kept, sums[1] + length - kept

        zero = jnp.int32(0)
        self.shipping.note(q, *lax.fori_loop(0, self.spec.ep, owner, (zero, zero)))

    def one_block(self, b: jax.Array, blocks: jax.Array) -> None:
        self.wait_gather(b)
        pl.when(b + 1 < blocks)(functools.partial(self.start_gather, b + 1))
        self.shipping.drain(lax.rem(b, 2))
        self.sum_rows(b)
        self.round_rows(b)
        self.push(b)

    def run(self) -> None:
        blocks = lax.div(self.count + (self.t.block - 1), self.t.block)
        pl.when(blocks > 0)(functools.partial(self.start_gather, jnp.int32(0)))
        self.shipping.enter()
        lax.fori_loop(0, blocks, lambda b, _: self.one_block(b, blocks), None)
        self.shipping.leave(self.r["tab"][1])


def _body(spec: KernelSpec, at_once: int, *refs: Any) -> None:
    names = ["tab", "weights", "x", "o", "o_scale", *(buffer.name for buffer in scratch(spec))]
    _Kernel(spec, dict(zip(names, refs, strict=True)), at_once).run()


def presum_kernel(
    spec: KernelSpec,
    scalars: list[jax.Array],
    rows: jax.Array,
    *,
    vmem_limit_bytes: int,
    interpret: Any = False,
    bounds_checks: bool = False,
    collective_id: int = 0,
) -> list[jax.Array]:
    """Sum, round and exchange on one device (inside `shard_map` where ``spec.ep > 1``).

    Args:
      spec: the build.
      scalars: `tables`.
      rows: the expert kernel's bfloat16 ``[T*K, H/128, 128]``.
      vmem_limit_bytes, interpret, bounds_checks, collective_id: as `expert_kernel`'s.

    Returns:
      e4m3 codes ``[T, H/128, 128]`` and float32 scales ``[T, 1, 128]`` (equal along lanes): what device d sent is
      from row ``d * T / EP`` on; rows nobody sent are undefined.
    """
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    collective: dict[str, Any] = dict(collective_id=collective_id, has_side_effects=True) if spec.ep > 1 else {}
    mean = spec.capacity // spec.ep
    call = pl.pallas_call(
        functools.partial(_body, spec, INTERPRETED_UNROLLED if interpret else UNROLLED),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=(1,), in_specs=[anywhere], out_specs=[anywhere] * 2,
            scratch_shapes=[allocate(buffer) for buffer in scratch(spec)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((spec.tokens, spec.hidden // LANES, LANES), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((spec.tokens, 1, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=not bounds_checks, **collective
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * mean * spec.hidden, bytes_accessed=3 * mean * spec.hidden, transcendentals=0
        ),
        interpret=interpret,
        name=NAME,
    )
    return call(*scalars, rows)
