# SPDX-License-Identifier: Apache-2.0
"""The expert kernel: gather -> GMM1 -> LoRA -> activation -> GMM2 -> LoRA -> ship, in one Pallas call.

One pass over a list of visits. A visit is one expert and a panel of at most R of its rows; experts without rows are
not in the list, so their weights are never read. Inside a visit the intermediate dimension is walked in tiles of
`bf` columns: gate/up weights ``[H, 2 bf]`` and down weights ``[bf, H]`` of one tile are used together, so the
hidden activations never leave the chip and each weight byte is read once per panel. Weight tiles flow through a ring
of `nbuf` slots filled across visit boundaries: while an expert's last tiles are multiplied, the next expert's first
ones are already coming in. Rows are gathered by one-row DMAs a visit ahead.

Adapters: the visit's (expert, adapter) pairs are stacked side by side into `lanes` columns, in the order of their
slots, so that neighbouring slots come in one copy. One dot shrinks all rows against all stacked A; what does not
belong to a row's own adapter is masked to zero; one dot per tile expands into the float32 pre-activations. The stack
is filled one visit ahead, each part as soon as the visit before has used it. Unused lanes hold zeros (0 x NaN would
poison) or what an earlier visit left there, and rows without adapter get +0.0.

An expert with one tile does all between rows in and rows out in it, straight-line code for each height, so that the
units which staging, dots and adapters need are busy side by side.

Results leave in chunks of `stage` rows: pushed straight from VMEM to the arrival buffer of the token's owner, one
remote DMA per contiguous run, or left in sorted order for what follows (`rs_bf16`, `presum_fp8`). `push_fp8` pushes
e4m3 codes; the rows' scales are laid along lanes where their owner will look for them, and follow when all rows have.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .numerics import apply_activation, cast_rows, fp8_scale, quantize_rows, split_bf16, unpack_fp8_rows, unpack_rows
from .shipping import DTYPES, Shipping, allocate
from .spec import (
    INDEX_RING,
    LANES,
    ROW_BLOCK,
    RUN_BLOCK,
    TRANSPORTS,
    KernelSpec,
    operands,
    results,
    scales_shape,
    scratch,
)

# Columns of the down projection handled by one dot: wide enough to keep the MXU fed, narrow enough for registers.
N_CHUNK = 1024
# Columns of gate (and of up) whose pre-activations are held at once; half where those do not divide a wider tile.
G_CHUNK = 512
# The same with block scales, where a sum over all blocks of H is held.
BLOCK_N_CHUNK, BLOCK_G_CHUNK = 512, 256

# Adapter operands and where they are stacked.
STACKS = {"a13": "la13", "lora_b13": "lb13", "a2": "la2", "lora_b2": "lb2"}


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _dot_nt(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _chunks(width: int, most: int) -> list[tuple[int, int]]:
    """First column and width of pieces of `most` columns."""
    return [(n, min(most, width - n)) for n in range(0, width, most)]


class _Kernel:
    """The traced body; methods are its stages, attributes its references."""

    def __init__(self, spec: KernelSpec, refs: dict[str, Any], interpreted: bool) -> None:
        self.spec = spec
        self.interpreted = interpreted
        self.blocks = spec.blocks
        self.r = refs
        self.table = spec.table
        self.rank = refs["rank"][0]
        self.visits = self.list_visits()
        self.shipping = Shipping(refs, spec.axis, spec.ep, [("st", "o")])

    # -- the visits -------------------------------------------------------------------------------------------

    def begin(self, owner: jax.Array | int, segment: jax.Array | int) -> jax.Array:
        """Where an owner's list has the first row of a segment of this device, or of the one past its last."""
        t = self.table
        return self.r["tab"][owner * t.stride + t.begins + self.rank * self.spec.segments + segment]

    def list_visits(self) -> jax.Array:
        """Write the list of visits (words as `KernelSpec.visit_width` says); returns how many there are.

        An expert's rows are cut where `pairs` adapters are full, the last part also holding the rows without one, and
        each part into panels. Rows of a part lie owner by owner.
        """
        spec, b, visits = self.spec, self.blocks, self.r["visits"]

        def group(g: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            v, chunk, start = carry
            rows = self.list_runs(g)

            def panel(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                v, chunk = carry
                at, first = v * spec.visit_width, i * b.rows
                count = jnp.minimum(rows - first, b.rows)
                for field, value in enumerate((g, first, count, chunk, start + first)):
                    visits[at + field] = value
                self.list_pairs(at + spec.pairs_word, g)
                return v + 1, chunk + lax.div(count + (b.stage - 1), b.stage)

            return *lax.fori_loop(0, lax.div(rows + (b.rows - 1), b.rows), panel, (v, chunk)), start + rows

        zero = jnp.int32(0)
        return lax.fori_loop(0, spec.segments, group, (zero, zero, zero))[0]

    def list_runs(self, segment: jax.Array) -> jax.Array:
        """Write where each owner's rows of a segment are (`KernelSpec.run_words`); returns how many all have."""
        runs, ep, at = self.r["runs"], self.spec.ep, segment * self.spec.run_words

        def run(owner: jax.Array, row: jax.Array) -> jax.Array:
            begin = self.begin(owner, segment)
            runs[at + owner] = row
            runs[at + (ep + 1) + owner] = begin - row
            return row + self.begin(owner, segment + 1) - begin

        rows = self.each_owner(run, jnp.int32(0))
        runs[at + ep] = rows
        return rows

    def visit_runs(self, v: jax.Array) -> tuple[Any, Any]:
        """Of a visit's segment: ``start(owner)``, its first row there (of the last plus one: how many there are), and
        ``shift(owner)``, how much farther a row lies in its owner's list."""
        at, runs = self.visit(v, 0) * self.spec.run_words, self.r["runs"]
        return lambda owner: runs[at + owner], lambda owner: runs[at + (self.spec.ep + 1) + owner]

    def list_pairs(self, at: jax.Array, segment: jax.Array) -> None:
        """Write which adapters of its group a segment has rows of: how many, and their runs.

        Adapters lie in the stack in the order of their slots, so that neighbours come in one copy. A run is where it
        starts and where the next absent one is: places where presence changes, written until it does.
        """
        spec, t = self.spec, self.table
        if spec.lora is None:
            return
        word = t.present + (self.rank * spec.segments + segment) * spec.present_words
        found, change, before = jnp.int32(0), at + 2, jnp.int32(0)
        for i in range(self.blocks.pairs):
            if i % 32 == 0:
                there = functools.partial(lambda w, o, bits: bits | self.r["tab"][o * t.stride + w], word + i // 32)
                bits = self.each_owner(there, jnp.int32(0))
            here = lax.shift_right_logical(bits, i % 32) & 1
            self.r["visits"][change] = jnp.int32(i)
            found, change, before = found + here, change + (here ^ before), here
        self.r["visits"][change] = jnp.int32(self.blocks.pairs)
        self.r["visits"][at] = found
        self.r["visits"][at + 1] = lax.shift_right_logical(change + before - (at + 2), 1)

    def visit(self, v: jax.Array, field: jax.Array | int) -> jax.Array:
        return self.r["visits"][v * self.spec.visit_width + field]

    def expert(self, v: jax.Array) -> jax.Array:
        return lax.div(self.visit(v, 0), self.spec.groups)

    def first_row(self, v: jax.Array) -> jax.Array:
        """Of the rows of its segment."""
        return self.visit(v, 1)

    def row_count(self, v: jax.Array) -> jax.Array:
        return self.visit(v, 2)

    def row_blocks(self, v: jax.Array) -> jax.Array:
        return lax.shift_right_logical(self.row_count(v) + (ROW_BLOCK - 1), ROW_BLOCK.bit_length() - 1)

    def pair_count(self, v: jax.Array) -> jax.Array:
        return self.visit(v, self.spec.pairs_word)

    def first_slot(self, v: jax.Array) -> jax.Array:
        """Slot of the adapter that lies first in the stack."""
        groups = self.spec.groups
        return lax.rem(self.visit(v, 0), groups) * self.blocks.pairs if groups > 1 else jnp.int32(0)

    # -- rows -------------------------------------------------------------------------------------------------

    def index_copy(self, v: jax.Array) -> Any:
        r = self.r
        return pltpu.make_async_copy(r["places"], r["index"].at[v & (INDEX_RING - 1)], r["index_sem"].at[0])

    def list_rows(self, v: jax.Array) -> None:
        """Start to write down where the table has a visit's rows (`KernelSpec.index_shape`); past the last, its first
        entry, which any row may have."""
        spec, t = self.spec, self.table
        line, lane = (lax.broadcasted_iota(jnp.int32, spec.index_shape, d) for d in range(2))
        row, rows = line * ROW_BLOCK + (lane & (ROW_BLOCK - 1)), lane < ROW_BLOCK
        used, row = row < self.row_count(v), row + self.first_row(v)
        farther = t.stride - spec.tokens // spec.ep
        start, shift = self.visit_runs(v)

        def run(owner: jax.Array, found: jax.Array) -> jax.Array:
            place = row + (shift(owner) + owner * t.stride)
            return jnp.where(row >= start(owner), jnp.where(rows, place, owner * farther), found)

        found = self.each_owner(run, jnp.zeros(spec.index_shape, jnp.int32))
        self.r["places"][...] = jnp.where(used, found, 0)
        self.index_copy(v).start()

    def index(self, v: jax.Array, i: jax.Array | int, lane: jax.Array | int) -> jax.Array:
        return self.r["index"][v & (INDEX_RING - 1), i, lane]

    def token(self, v: jax.Array, i: jax.Array | int, j: jax.Array | int) -> jax.Array:
        """Of row j of block i."""
        return self.r["tab"][self.index(v, i, j)]

    def entry(self, v: jax.Array, field: int, i: jax.Array | int, j: jax.Array | int) -> jax.Array:
        """What a field of the table holds for the token of row j of block i."""
        return self.r["tab"][self.token(v, i, j) + self.index(v, i, ROW_BLOCK + j) + field]

    def start_gather(self, v: jax.Array) -> None:
        """Start to bring a visit's rows, and to list the next one's."""
        p = lax.rem(v, self.blocks.xbuf)
        self.index_copy(v).wait()
        pl.when(v + 1 < self.visits)(functools.partial(self.list_rows, v + 1))

        def row(i: jax.Array, j: jax.Array | int) -> None:
            pltpu.make_async_copy(
                self.r["x"].at[self.token(v, i, j)], self.r["xg"].at[p, i, j], self.r["gather_sem"].at[p]
            ).start()

        def block(i: jax.Array, _: None) -> None:
            self.each_row(functools.partial(row, i))

        lax.fori_loop(0, self.row_blocks(v), block, None)

    def wait_gather(self, v: jax.Array) -> None:
        p = lax.rem(v, self.blocks.xbuf)
        got = self.r["xg"].at[p, pl.ds(0, self.row_blocks(v))]
        pltpu.make_async_copy(got, got, self.r["gather_sem"].at[p]).wait()

    def stage_rows(self, v: jax.Array) -> None:
        """Unpack a visit's rows; scales that they are multiplied by at once are looked up beside the block before."""
        blocks, ahead = self.row_blocks(v), int(self.spec.dispatch == "ag_fp8" and self.spec.recipe != "w8a8")

        def block(i: jax.Array, _: None) -> None:
            self.stage_block(v, i)
            self.look_up(v, jnp.minimum(i + ahead, blocks - 1))

        if ahead:
            self.look_up(v, jnp.int32(0))
        lax.fori_loop(0, blocks, block, None)

    def look_up(self, v: jax.Array, i: jax.Array | int) -> None:
        """What the table has for the rows of block i, their tokens' scales or adapters, in all lanes."""
        spec, r = self.spec, self.r
        name, field = ("sx", self.table.scales) if spec.dispatch == "ag_fp8" else ("row_slot", self.table.slots)
        if spec.dispatch != "ag_fp8" and spec.lora is None:
            return

        def row(j: jax.Array | int) -> None:
            value = jnp.full((1, LANES), self.entry(v, field, i, j), jnp.int32)
            r[name][pl.ds(i * ROW_BLOCK + j, 1), :] = lax.bitcast_convert_type(value, r[name].dtype)

        self.each_row(row)

    def stage_block(self, v: jax.Array, i: jax.Array | int) -> None:
        """Unpack (and quantise) gathered rows into the dots' operand; clear what several tiles add to."""
        spec, r = self.spec, self.r
        p = lax.rem(v, self.blocks.xbuf)
        half = spec.hidden // 2
        rows = pl.ds(i * ROW_BLOCK if isinstance(i, int) else pl.multiple_of(i * ROW_BLOCK, ROW_BLOCK), ROW_BLOCK)
        if spec.tiles > 1:
            r["y"][rows, :] = jnp.zeros((ROW_BLOCK, spec.hidden), jnp.float32)
        if spec.dispatch == "ag_fp8":
            self.unpack_block(v, i, rows)
            return
        halves = unpack_rows(r["xg"][p, i].reshape(ROW_BLOCK, half))
        kept = r["xb"] if "xb" in r else (r["xs"] if spec.recipe != "w8a8" else None)
        if kept is not None:
            for j, part in enumerate(halves):
                kept[rows, j * half : (j + 1) * half] = part.astype(jnp.bfloat16)
        if spec.recipe == "w8a8":
            self.quantize_block(rows, halves)

    def unpack_block(self, v: jax.Array, i: jax.Array | int, rows: Any) -> None:
        """Rows that were quantised at their source: w8a8 multiplies the codes, w8a16 the rows they stand for."""
        spec, r = self.spec, self.r
        p = lax.rem(v, self.blocks.xbuf)
        parts, sublanes, lanes = spec.row_shape
        quarter, width = spec.hidden // 4, sublanes * lanes
        for part in range(parts):
            words = r["xg"][p, i, :, part].reshape(ROW_BLOCK, width)
            for j, codes in enumerate(unpack_fp8_rows(words)):
                if spec.recipe != "w8a8":
                    codes = (codes.astype(jnp.float32) * r["sx"][rows, 0:1]).astype(jnp.bfloat16)
                first = j * quarter + part * width
                r["xs"][rows, first : first + width] = codes

    def each_row(self, body: Any) -> None:
        """Run ``body(j)`` for the rows of a block, unrolled; in the interpreter that would only grow the program."""
        if self.interpreted:
            lax.fori_loop(0, ROW_BLOCK, lambda j, _: body(j), None)
        else:
            for j in range(ROW_BLOCK):
                body(j)

    def quantize_block(self, rows: Any, halves: tuple[jax.Array, jax.Array]) -> None:
        spec, r = self.spec, self.r
        half = spec.hidden // 2
        if spec.static_scales:
            for j, part in enumerate(halves):
                r["xs"][rows, j * half : (j + 1) * half] = cast_rows(part, r["act_scale"][1])
            return
        if spec.block_scales:
            for j, part in enumerate(halves):
                for c in range(half // LANES):
                    column = j * half + c * LANES
                    codes, scale = quantize_rows(part[:, c * LANES : (c + 1) * LANES])
                    r["xs"][rows, column : column + LANES] = codes
                    if spec.spread_scales:
                        r["sx"][rows, column : column + LANES] = jnp.broadcast_to(scale, (ROW_BLOCK, LANES))
                    else:
                        group = column // LANES
                        r["sx"][rows, group : group + 1] = scale
            return
        codes, scale = quantize_rows(jnp.concatenate(halves, axis=1))
        r["xs"][rows, :] = codes
        r["sx"][rows, :] = jnp.broadcast_to(scale, (ROW_BLOCK, LANES))

    # -- weights ----------------------------------------------------------------------------------------------

    def weight_copies(self, step: jax.Array) -> list[Any]:
        """The copies that bring one f tile: weights, and the scales and bias that go with it."""
        spec, r = self.spec, self.r
        v, f = lax.div(step, spec.tiles), lax.rem(step, spec.tiles)
        slot = lax.rem(step, self.blocks.nbuf)
        e = self.expert(v)
        pairs = [("w13", "w13v"), ("w2", "w2v")]
        if spec.quantized:
            pairs.append(("s13", "s13v"))
            if spec.block_scales:
                pairs.append(("s2", "s2v"))
        if spec.has_bias:
            pairs.append(("b13", "b13v"))
        sem = r["weight_sem"].at[slot]
        return [pltpu.make_async_copy(r[src].at[e, f], r[dst].at[slot], sem) for src, dst in pairs]

    def start_weights(self, step: jax.Array) -> None:
        for copy in self.weight_copies(step):
            copy.start(priority=1)

    def wait_weights(self, step: jax.Array) -> None:
        for copy in self.weight_copies(step):
            copy.wait()

    def visit_copies(self, v: jax.Array) -> list[Any]:
        """What an expert needs once: the down projection's scale and bias rows."""
        spec, r = self.spec, self.r
        q = lax.rem(v, 2)
        pairs = []
        if spec.quantized and not spec.block_scales:
            pairs.append(("s2", "s2v"))
        if spec.has_bias:
            pairs.append(("b2", "b2v"))
        e = self.expert(v)
        return [pltpu.make_async_copy(r[src].at[e], r[dst].at[q], r["visit_sem"].at[q]) for src, dst in pairs]

    # -- one tile ---------------------------------------------------------------------------------------------

    def tile(self, height: int, v: jax.Array, f: jax.Array, slot: jax.Array) -> None:
        """GMM1, LoRA, activation, quantise, GMM2 of `height` rows and one f tile."""
        rows = slice(0, height)
        if self.spec.one_block and self.spec.does("gather"):
            for i in range(-(-height // ROW_BLOCK)):
                self.look_up(v, i)
                self.stage_block(v, i)
        if self.spec.lora and self.spec.one_block:
            self.shrink(height, v)
        if self.spec.block_scales:
            self.block_tile(rows, v, f, slot)
            return
        # A few columns at a time: their pre-activations stay in registers.
        bf = self.blocks.bf
        most = G_CHUNK if bf % G_CHUNK == 0 or bf < G_CHUNK else G_CHUNK // 2
        pieces = [self.hidden_columns(rows, f, slot, c, w) for c, w in _chunks(bf, most)]
        h = jnp.concatenate(pieces, axis=1)
        shrunk = self.shrink_hidden(rows, v, [_dot_nt(h, self.stack("la2", f))]) if self.spec.lora else None
        self.down(rows, v, h, slot, shrunk)

    def hidden_columns(self, rows: slice, f: jax.Array, slot: jax.Array, first: int, width: int) -> jax.Array:
        """bf16 ``[rows, width]``: activated columns of one f tile from `first` on."""
        spec, r = self.spec, self.r
        # The columns' gate, then their up part.
        parts = [slice(j * self.blocks.bf + first, j * self.blocks.bf + first + width) for j in range(spec.halves)]
        g = self.block_gate_up(rows, slot, first, width) if spec.block_scales else self.gate_up(rows, slot, parts)
        if spec.has_bias:
            g = [x + r["b13v"][slot, :, c] for x, c in zip(g, parts, strict=True)]
        if spec.lora:
            g = [x + d for x, d in zip(g, self.expand_hidden(rows, f, parts), strict=True)]
        return apply_activation(spec.activation, g[0], g[1] if spec.gated else None).astype(jnp.bfloat16)

    def expand_hidden(self, rows: slice, f: jax.Array, parts: list[slice]) -> list[jax.Array]:
        """What adapters add to the pre-activations of each range of columns."""
        a = self.spec.lanes
        shrunk = [[self.r["vs"][i, rows, j * a : (j + 1) * a] for i in range(2)] for j in range(self.spec.halves)]
        return [self.expand(x, self.stack("lb13", f, columns=c)) for x, c in zip(shrunk, parts, strict=True)]

    def shrink_hidden(self, rows: slice, v: jax.Array, parts: list[jax.Array]) -> Any:
        """Add a tile's hidden columns, shrunk in `parts`, to the sum over tiles; of the only tile, both terms of it."""
        part = functools.reduce(jnp.add, parts)
        if self.spec.finishes_in_tile:
            return split_bf16(jnp.where(self.row_mask(v, rows), part, 0.0))
        self.r["us"][rows, :] += part
        return None

    def gate_up(self, rows: slice, slot: jax.Array, parts: list[slice]) -> list[jax.Array]:
        """float32 pre-activations of each range of columns."""
        spec, r = self.spec, self.r
        g = [_dot(r["xs"][rows, :], r["w13v"][slot, :, c]) for c in parts]
        if spec.recipe == "w8a8":
            sx = r["act_scale"][0] if spec.static_scales else r["sx"][rows, 0:1]
            g = [x * sx for x in g]
        return [x * r["s13v"][slot, :, c] for x, c in zip(g, parts, strict=True)] if spec.quantized else g

    def down(self, rows: slice, v: jax.Array, h: jax.Array, slot: jax.Array, shrunk: Any) -> None:
        """Add ``h @ w2`` of one f tile to the results."""
        spec, r = self.spec, self.r
        scale = None
        if spec.recipe == "w8a8":
            if spec.static_scales:
                h, scale = cast_rows(h.astype(jnp.float32), r["act_scale"][3]), r["act_scale"][2]
            else:
                h, scale = quantize_rows(h.astype(jnp.float32))
        for n, w in _chunks(spec.hidden, N_CHUNK):
            columns = slice(n, n + w)
            delta = self.expand_result(shrunk, columns)
            out = _dot(h, r["w2v"][slot, :, n : n + w])
            if scale is not None:
                out = out * scale
            if spec.finishes_in_tile:
                out = self.finished(v, out, columns, delta)
            elif spec.tiles > 1:
                out = r["y"][rows, columns] + out
            r["y"][rows, columns] = out

    def expand_result(self, shrunk: Any, columns: slice) -> jax.Array | None:
        """What adapters add to a range of result columns; None without adapters."""
        return None if shrunk is None else self.expand(shrunk, self.stack("lb2", columns=columns))

    def finished(self, v: jax.Array, value: jax.Array, columns: slice, delta: jax.Array | None) -> jax.Array:
        """Sums over all tiles with what an expert's columns have once: scale, bias, what adapters add."""
        spec, r = self.spec, self.r
        visit_slot = lax.rem(v, 2)
        if spec.quantized and not spec.block_scales:
            value = value * r["s2v"][visit_slot, :, columns]
        if spec.has_bias:
            value = value + r["b2v"][visit_slot, :, columns]
        return value if delta is None else value + delta

    # -- one tile with block scales: each 128 rows of weights have their own, and so has what multiplies them ---

    def block_tile(self, rows: slice, v: jax.Array, f: jax.Array, slot: jax.Array) -> None:
        """`tile`, some columns at a time, so that their sums stay in registers over all blocks of H."""
        spec, bf = self.spec, self.blocks.bf
        groups: list[tuple[jax.Array, jax.Array | None]] = []
        parts, done = [], 0
        for first, width in _chunks(bf, BLOCK_G_CHUNK):
            done = len(groups)
            h = self.hidden_columns(rows, f, slot, first, width)
            if spec.lora:
                parts.append(_dot_nt(h, self.stack("la2", f, columns=slice(first, first + width))))
            for k in range(0, width, LANES):
                part = h[:, k : k + LANES]
                groups.append(quantize_rows(part.astype(jnp.float32)) if spec.recipe == "w8a8" else (part, None))
        shrunk = self.shrink_hidden(rows, v, parts) if spec.lora else None
        # What the first columns add does not wait for the activation of the last.
        passes = [p for p in (range(done), range(done, len(groups))) if p]
        for p in passes:
            self.block_down(rows, v, slot, {k: groups[k] for k in p}, shrunk, last=p is passes[-1])

    def block_down(
        self, rows: slice, v: jax.Array, slot: jax.Array, groups: dict[int, Any], shrunk: Any, *, last: bool
    ) -> None:
        """Add what some 128-blocks of a tile's hidden columns give to the results; the `last` pass finishes them."""
        spec, r = self.spec, self.r
        for n, w in _chunks(spec.hidden, BLOCK_N_CHUNK):
            columns = slice(n, n + w)
            y = r["y"][rows, columns] if spec.tiles > 1 or 0 not in groups else None
            for k, (part, scale) in groups.items():
                out = _dot(part, r["w2v"][slot, k * LANES : (k + 1) * LANES, columns])
                out = self.scaled(out, scale, [r["s2v"][slot, k, b] for b in range(n // LANES, (n + w) // LANES)])
                y = out if y is None else y + out
            assert y is not None
            if spec.finishes_in_tile and last:
                y = self.finished(v, y, columns, self.expand_result(shrunk, columns))
            r["y"][rows, columns] = y

    def block_gate_up(self, rows: slice, slot: jax.Array, first: int, width: int) -> list[jax.Array]:
        spec, r, bf = self.spec, self.r, self.blocks.bf
        g = [jnp.zeros((rows.stop, width), jnp.float32) for _ in range(spec.halves)]
        for k in range(spec.hidden // LANES):
            block = slice(k * LANES, (k + 1) * LANES)
            sx = None
            if spec.recipe == "w8a8":
                sx = r["sx"][rows, block if spec.spread_scales else slice(k, k + 1)]
            for j in range(spec.halves):
                c = j * bf + first
                part = _dot(r["xs"][rows, block], r["w13v"][slot, block, c : c + width])
                scales = [r["s13v"][slot, b, k] for b in range(c // LANES, (c + width) // LANES)]
                g[j] = g[j] + self.scaled(part, sx, scales)
        return g

    def scaled(self, part: jax.Array, row_scale: jax.Array | None, scales: list[jax.Array]) -> jax.Array:
        """One 128-block's dot times its rows' scales and the scalars that cover 128 columns each."""
        pieces = []
        for i, s in enumerate(scales):
            piece = part[:, i * LANES : (i + 1) * LANES]
            pieces.append((piece if row_scale is None else piece * row_scale) * s)
        return jnp.concatenate(pieces, axis=1)

    def by_height(self, v: jax.Array, body: Any) -> None:
        """Run `body(height)` for the smallest static height that covers the visit's rows."""
        count, below = self.row_count(v), 0
        for height in self.blocks.rungs:
            pl.when((count > below) & (count <= height))(functools.partial(body, height))
            below = height

    # -- adapters ---------------------------------------------------------------------------------------------

    def lora_copies(self, v: jax.Array, run: jax.Array, stage: int) -> list[Any]:
        """Copies of a run of adapters."""
        r, lora = self.r, self.spec.lora
        assert lora is not None
        place = self.visit(v, self.spec.pairs_word + 2 + 2 * run)
        count = self.visit(v, self.spec.pairs_word + 3 + 2 * run) - place
        slots, places = pl.ds(self.first_slot(v) + place, count), pl.ds(place, count)
        once = {"a13": lora.shared_a13, "lora_b2": lora.shared_b2}
        return [
            pltpu.make_async_copy(
                r[name].at[slots, 0 if once.get(name) else self.expert(v)], r[STACKS[name]].at[places],
                r["lora_sem"].at[stage],
            )
            for name in self.spec.adapter_stages[stage]
        ]

    def start_pairs(self, v: jax.Array, stage: int) -> None:
        def start(run: jax.Array, _: None) -> None:
            for copy in self.lora_copies(v, run, stage):
                copy.start()

        lax.fori_loop(0, self.visit(v, self.spec.pairs_word + 1), start, None)

    def wait_pairs(self, v: jax.Array, stage: int) -> None:
        """Wait for all pairs' copies of one stage: for their bytes."""
        n = self.pair_count(v)

        @pl.when(n > 0)
        def _() -> None:
            for name in self.spec.adapter_stages[stage]:
                part = self.r[STACKS[name]].at[pl.ds(0, n)]
                pltpu.make_async_copy(part, part, self.r["lora_sem"].at[stage]).wait()

    def clear_adapters(self) -> None:
        """Zero the stack once, so that lanes no pair fills stay finite."""

        def pair(i: jax.Array, _: None) -> None:
            for name in STACKS.values():
                self.r[name][i] = jnp.zeros(self.r[name].shape[1:], jnp.int32)

        lax.fori_loop(0, self.spec.stacked, pair, None)

    def row_mask(self, v: jax.Array, rows: Any) -> jax.Array:
        """bool ``[rows, lanes]``: whether a lane belongs to the adapter of a row."""
        spec = self.spec
        assert spec.lora is not None
        # lax.div, as `//` would make the lowering ask which TPU this is.
        place = lax.div(lax.broadcasted_iota(jnp.int32, (1, spec.lanes), 1), spec.lora.rank)
        slot = place + self.first_slot(v)
        own = self.r["row_slot"][rows, :]
        parts = [own == slot[:, n : n + w] for n, w in _chunks(spec.lanes, LANES)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def stack(self, name: str, *part: Any, columns: slice = slice(None)) -> jax.Array:
        """A part of the stack as bf16 ``[lanes, columns]``."""
        words = self.r[name][(slice(None), *part, slice(None), columns)]
        return pltpu.bitcast(words.reshape(self.spec.lanes // 2, words.shape[-1]), jnp.bfloat16)

    def expand(self, shrunk: Any, b: jax.Array) -> jax.Array:
        """float32 ``[rows, columns]`` of both terms of a shrunk input; one below the other, B is loaded once."""
        if self.spec.deep_terms:
            return _dot(jnp.concatenate(list(shrunk), axis=1), jnp.concatenate([b, b], axis=0))
        out = _dot(jnp.concatenate(list(shrunk), axis=0), b)
        return out[: out.shape[0] // 2] + out[out.shape[0] // 2 :]

    def shrink(self, height: int, v: jax.Array) -> None:
        spec, r = self.spec, self.r
        a = spec.lanes
        source = r["xb"] if "xb" in r else r["xs"]
        mask = self.row_mask(v, slice(0, height))
        # Tall tiles stream rows once for both halves; for few, half the lanes each keep both matrix units busy.
        together = [range(spec.halves)] if height > 2 * ROW_BLOCK else [[j] for j in range(spec.halves)]
        for part in together:
            both = jnp.concatenate([self.stack("la13", j) for j in part], axis=0)
            shrunk = _dot_nt(source[0:height, :], both)
            for n, j in enumerate(part):
                for i, term in enumerate(split_bf16(jnp.where(mask, shrunk[:, n * a : (n + 1) * a], 0.0))):
                    r["vs"][i, 0:height, j * a : (j + 1) * a] = term
        if not spec.finishes_in_tile:
            r["us"][0:height, :] = jnp.zeros((height, a), jnp.float32)

    # -- results ----------------------------------------------------------------------------------------------

    def result_chunk(self, v: jax.Array, first: jax.Array, length: jax.Array, q: jax.Array) -> None:
        """Finish `length` rows and round them into the send buffer, some rows at a time."""
        block = self.spec.finish_rows
        for at in range(0, self.blocks.stage, block):
            pl.when(length > at)(functools.partial(self.result_rows, v, first, at, q))

    def result_rows(self, v: jax.Array, first: jax.Array, at: int, q: jax.Array) -> None:
        spec, r, block = self.spec, self.r, self.spec.finish_rows
        rows, sent = pl.ds(pl.multiple_of(first + at, block), block), slice(at, at + block)
        # All columns at once: a row of the send buffer is whole tiles, which part of one would be merged into.
        value = r["y"][rows, :]
        if not spec.finishes_in_tile:
            shrunk = None
            if spec.lora:
                shrunk = split_bf16(jnp.where(self.row_mask(v, rows), r["us"][rows, :], 0.0))
            value = self.finished(v, value, slice(None), self.expand_result(shrunk, slice(None)))
        if spec.fp8_wire:
            if not spec.finishes_in_tile:
                r["y"][rows, :] = value
            scale = fp8_scale(jnp.max(jnp.abs(value), axis=1, keepdims=True))
            self.lay_along_lanes(scale, at)
            value = cast_rows(r["y"][rows, :], 1.0 / scale)
        else:
            value = value.astype(jnp.bfloat16)
        r["st"][q, sent] = value.reshape(block, spec.hidden // LANES, LANES)

    def lay_along_lanes(self, scale: jax.Array, at: int) -> None:
        """Put the scales ``[n, 1]`` of a chunk's rows from `at` on into as many lanes."""
        n, (line, first) = scale.shape[0], divmod(at, LANES)
        lane, row = (lax.broadcasted_iota(jnp.int32, (n, LANES), d) for d in (1, 0))
        laid = jnp.sum(jnp.where(lane == row + first, scale, 0.0), axis=0, keepdims=True)
        self.r["st_scale"][line] = laid if first == 0 else self.r["st_scale"][line] + laid

    def push_scales(self, v: jax.Array, first: jax.Array, length: jax.Array) -> None:
        """Lay down the scales of `length` rows of a visit's segment, from `first` on, for their owners.

        An owner's list has the rows of each segment after those of the segments before, so its scales only grow:
        lanes past a run's last may hold anything.
        """
        r = self.r
        start, shift = self.visit_runs(v)
        lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

        def one_line(line: int) -> None:
            begin = first + line * LANES
            scales = r["st_scale"][line]

            def run(owner: jax.Array, _: None) -> None:
                # Without rows here, where the owner's next will lie.
                row = jnp.clip(begin, start(owner), start(owner + 1))
                there = shift(owner) + row
                at, place = lax.shift_right_logical(there, 7), there & (LANES - 1)
                turned = pltpu.roll(scales, (there - (row - begin)) & (LANES - 1), 1)
                r["laid_scale"][owner, at] = jnp.where(lane >= place, turned, r["laid_scale"][owner, at])
                r["laid_scale"][owner, at + 1] = turned

            self.each_owner(run, None)

        for line in range(r["st_scale"].shape[0]):
            pl.when(length > line * LANES)(functools.partial(one_line, line))

    def gather_scales(self) -> None:
        """Bring the scales of this device's rows together, each from the part of the device that sent it."""
        spec, r, t = self.spec, self.r, self.table
        lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

        def source(d: jax.Array, _: None) -> None:
            first = self.rank * t.stride + t.begins + d * spec.segments
            begin, end = r["tab"][first], r["tab"][first + spec.segments]

            def line(i: jax.Array, _: None) -> None:
                # What of the line is the next device's, that one overwrites.
                own = lane >= begin - i * LANES
                r["laid_scale"][0, i] = jnp.where(own, r["got_scale"][d, i], r["laid_scale"][0, i])

            lax.fori_loop(lax.div(begin, LANES), lax.div(end + (LANES - 1), LANES), line, None)

        lax.fori_loop(0, spec.ep, source, None)
        copy = pltpu.make_async_copy(r["laid_scale"].at[0], r["o_scale"], r["out_sem"].at[0])
        copy.start()
        copy.wait()

    def push_runs(self, v: jax.Array, first: jax.Array, length: jax.Array, q: jax.Array) -> None:
        """Send `length` rows of a visit's segment, from `first` on, to their owners, a run for each."""
        start, shift = self.visit_runs(v)

        def begin(owner: jax.Array) -> jax.Array:
            """The first of these rows that goes to an owner, or to one after it."""
            return jnp.clip(start(owner), first, first + length)

        def run(owner: jax.Array, row: jax.Array) -> jax.Array:
            end = begin(owner + 1)
            away = jnp.where(owner == self.rank, 0, end - row)
            self.shipping.send(q, row - first, away, owner, shift(owner) + row)
            return end

        if self.shipping.remote:
            self.each_owner(run, first)
        own = begin(self.rank)
        kept = begin(self.rank + 1) - own
        self.shipping.keep(q, own - first, kept, shift(self.rank) + own)
        self.shipping.note(q, kept, length - kept)

    def each_owner(self, body: Any, carry: Any) -> Any:
        """``carry = body(owner, carry)`` for each owner, some unrolled.

        Unrolled, the loads of one hide those of another; in the interpreter that would only grow the program.
        """
        ep = self.spec.ep
        block = 1 if self.interpreted else math.gcd(ep, RUN_BLOCK)

        def some(i: jax.Array | int, carry: Any) -> Any:
            for j in range(block):
                carry = body(i * block + j, carry)
            return carry

        return some(0, carry) if block == ep else lax.fori_loop(0, ep // block, some, carry)

    def ship(self, v: jax.Array) -> None:
        r, stage = self.r, self.blocks.stage
        count, first_chunk = self.row_count(v), self.visit(v, 3)

        def chunk(c: jax.Array, _: None) -> None:
            q = lax.rem(first_chunk + c, 2)
            first = c * stage
            self.shipping.drain(q)
            length = jnp.minimum(stage, count - first)
            self.result_chunk(v, first, length, q)
            if self.spec.pushes:
                self.push_runs(v, self.first_row(v) + first, length, q)
                if self.spec.fp8_wire:
                    self.push_scales(v, self.first_row(v) + first, length)
            else:
                rows = pl.ds(self.visit(v, 4) + first, length)
                pltpu.make_async_copy(r["st"].at[q, pl.ds(0, length)], r["o"].at[rows], r["out_sem"].at[q]).start()
                self.shipping.note(q, length, 0)

        lax.fori_loop(0, lax.div(count + (stage - 1), stage), chunk, None)

    # -- the whole --------------------------------------------------------------------------------------------

    def prologue(self) -> None:
        spec = self.spec
        steps = self.visits * spec.tiles
        if spec.does("gather"):
            pl.when(self.visits > 0)(functools.partial(self.list_rows, jnp.int32(0)))
        if spec.does("weights"):
            for s in range(self.blocks.nbuf - 1):
                pl.when(s < steps)(functools.partial(self.start_weights, jnp.int32(s)))
        if spec.lora:
            self.clear_adapters()

        @pl.when(self.visits > 0)
        def _() -> None:
            first = jnp.int32(0)
            if spec.does("gather"):
                self.start_gather(first)
            if spec.does("weights"):
                self.visit_weights(first, "start")
            if spec.lora and spec.does("adapters"):
                for stage in range(len(spec.adapter_stages[:2])):
                    self.start_pairs(first, stage)

        self.shipping.enter()

    def visit_weights(self, v: jax.Array, action: str) -> None:
        for copy in self.visit_copies(v):
            getattr(copy, action)()

    def one_visit(self, v: jax.Array) -> None:
        spec, nbuf = self.spec, self.blocks.nbuf
        has_next = v + 1 < self.visits
        weights, dots = spec.does("weights"), spec.does("dots")
        pairs = bool(spec.lora) and spec.does("adapters")

        def ahead(action: Any, *args: Any) -> None:
            pl.when(has_next)(functools.partial(action, v + 1, *args))

        if spec.does("gather"):
            self.wait_gather(v)
        if weights:
            self.visit_weights(v, "wait")
            ahead(self.visit_weights, "start")
        if spec.does("gather"):
            if self.blocks.xbuf == 2:
                ahead(self.start_gather)
            if not spec.one_block:
                self.stage_rows(v)
            if self.blocks.xbuf == 1:
                ahead(self.start_gather)
        split, late = not spec.one_block, len(spec.adapter_stages) == 3
        if pairs and late:
            self.start_pairs(v, 2)
        if pairs:
            self.wait_pairs(v, 0)
        if spec.lora and split and dots:
            self.by_height(v, functools.partial(self.shrink, v=v))
        if pairs and split:
            ahead(self.start_pairs, 0)
            self.wait_pairs(v, 1)

        def step(f: jax.Array, _: None) -> None:
            s = v * spec.tiles + f
            if weights:
                later = s + (nbuf - 1)
                pl.when(later < self.visits * spec.tiles)(functools.partial(self.start_weights, later))
                self.wait_weights(s)
            if dots:
                self.by_height(v, functools.partial(self.tile, v=v, f=f, slot=lax.rem(s, nbuf)))

        if weights or dots:
            lax.fori_loop(0, spec.tiles, step, None)
        if pairs:
            ahead(self.start_pairs, 1 if split else 0)
        if pairs and late:
            self.wait_pairs(v, 2)
        if spec.does("ship"):
            self.ship(v)

    def run(self) -> None:
        self.prologue()

        def body(v: jax.Array, _: None) -> None:
            self.one_visit(v)

        lax.fori_loop(0, self.visits, body, None)
        if not self.spec.does("ship"):
            self.shipping.leave(jnp.int32(0))
        elif self.spec.fp8_wire:
            self.shipping.leave(self.arriving(), ("laid_scale", "got_scale"))
            self.gather_scales()
        else:
            self.shipping.leave(self.arriving())

    def arriving(self) -> jax.Array:
        """Rows that other devices send here: of this one's pairs, those routed to other devices' experts."""
        spec, t = self.spec, self.table
        routed = self.r["tab"][self.rank * t.stride + t.begins + spec.ep * spec.segments]
        return routed - (self.begin(self.rank, spec.segments) - self.begin(self.rank, 0))


def scalars(spec: KernelSpec) -> list[str]:
    """Names of the kernel's scalar operands, in order: this device's rank, the plan's table, static scales."""
    return ["rank", "tab"] + ["act_scale"] * spec.static_scales


def _names(spec: KernelSpec) -> list[str]:
    return [*scalars(spec), *operands(spec), *results(spec), *(buffer.name for buffer in scratch(spec))]


def _body(spec: KernelSpec, interpreted: bool, *refs: Any) -> None:
    _Kernel(spec, dict(zip(_names(spec), refs, strict=True)), interpreted).run()


def output_rows(spec: KernelSpec) -> int:
    """Rows of the kernel's result: arrivals of a push, or every sorted row."""
    return spec.local_rows if spec.pushes else spec.capacity


def expert_kernel(
    spec: KernelSpec,
    tables: list[jax.Array],
    tensors: dict[str, jax.Array],
    *,
    vmem_limit_bytes: int,
    interpret: Any = False,
    bounds_checks: bool = False,
    collective_id: int = 0,
) -> list[jax.Array]:
    """Run the build on one device (inside `shard_map` where ``spec.ep > 1``).

    Args:
      spec: the build.
      tables: what `scalars` names: int32 ``[1]``, the int32 table of `plan.build_plan`, float32 ``[4]`` static
        activation scales (x scale, its inverse, h scale, its inverse).
      tensors: operands by name (`spec.operands`), in the layouts of `layout`.
      vmem_limit_bytes: the compiler's on-chip budget.
      interpret: False, or `pltpu.InterpretParams`.
      bounds_checks: keep DMA bounds checks (four times slower row gathers).
      collective_id: barrier semaphore id; two collective kernels in flight need different ids.

    Returns:
      bfloat16 ``[rows, H/128, 128]`` (`output_rows`), or with `push_fp8` e4m3 codes of that shape and float32 scales
      along lanes, ``[lines, 1, 128]`` (`spec.scales_shape`); rows no pair maps to, and their scales, are undefined.
    """
    row = DTYPES[TRANSPORTS[spec.transport].row]
    out_shape = [jax.ShapeDtypeStruct((output_rows(spec), spec.hidden // LANES, LANES), row)]
    if spec.fp8_wire:
        out_shape.append(jax.ShapeDtypeStruct(scales_shape(spec.local_rows), jnp.float32))
    collective: dict[str, Any] = {}
    if spec.ep > 1 and spec.pushes:
        collective = dict(collective_id=collective_id, has_side_effects=True)
    names = operands(spec)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    rows = spec.capacity
    weights = sum(tensors[n].size * tensors[n].dtype.itemsize for n in names if n != "x")
    call = pl.pallas_call(
        functools.partial(_body, spec, bool(interpret)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(1,),
            in_specs=[anywhere] * len(names),
            out_specs=[anywhere] * len(out_shape),
            scratch_shapes=[allocate(buffer) for buffer in scratch(spec)],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=not bounds_checks, **collective
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * spec.hidden * spec.inter * (spec.halves + 1) // spec.ep,
            bytes_accessed=weights + 4 * rows * spec.hidden // spec.ep,
            transcendentals=rows * spec.inter // spec.ep,
        ),
        interpret=interpret,
        name="isomoe_expert_kernel",
    )
    return call(*tables, *(tensors[n] for n in names))
