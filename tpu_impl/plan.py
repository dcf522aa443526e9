# SPDX-License-Identifier: Apache-2.0
"""The routing plan: which rows each device computes, in which order, and where their results go.

Runs in XLA inside `shard_map`. One gather of packed int32 metadata tells everyone everything, and each device cuts
its own experts' rows into visits (see `spec.TableLayout`).

Where results are pushed, every device first orders its own (token, k) pairs by (expert, adapter, pair): that is the
order in which results arrive in its buffer. Because both sides order by the same key, the rows of one (expert,
adapter) that one device owns are contiguous at the sender and at the receiver, so results travel in runs rather than
row by row. Where they are not, router weights travel in the place of arrival rows.

At decode the plan's own time counts. So: two sorts that carry what they move, and otherwise comparisons summed over
small tables, which a vector unit does in passing; scalar gathers, scatters and binary searches would cost more than
the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from .spec import ROW_BLOCK, KernelSpec


@dataclass(frozen=True)
class Plan:
    """One device's plan.

    Attributes:
      table: int32 ``[spec.table.size]``, what the kernel reads.
      owned: bool ``[T_local, K]``, whether a pair of this device's tokens is routed to an existing expert.
      arrival: int32 ``[T_local, K]``, its row in the arrival buffer; None where results are not pushed.
      order: int32 ``[T*K]``, pairs of all tokens in this device's compute order, its own experts' first.
      mine: bool ``[T*K]``, whether a pair goes to this device's experts.
      device: int32 ``[T_local, K]``, the rank whose experts a pair of this device's tokens goes to; ``ep`` for none.
      rank: int32 scalar, this device's own.
      weights: float32 ``[T, K]`` of all tokens, and ``[T*K]`` in compute order; None where results are pushed.
    """

    table: jax.Array
    owned: jax.Array
    arrival: jax.Array | None
    order: jax.Array
    mine: jax.Array
    device: jax.Array
    rank: jax.Array
    weights: tuple[jax.Array, jax.Array] | None


def exclusive_sum(counts: jax.Array, axis: int = 0) -> jax.Array:
    """The sum of what comes before each place along `axis`; int32."""
    return jnp.cumsum(counts, axis=axis, dtype=jnp.int32) - counts


def inverse_permutation(order: jax.Array) -> jax.Array:
    """int32 ``[n]``: where each index went."""
    return lax.sort((order, lax.iota(jnp.int32, order.shape[0])), num_keys=1, is_stable=False)[1]


def sort_pairs(key: jax.Array, most: int, *carried: jax.Array) -> tuple[jax.Array, ...]:
    """Pairs by (key, index), keys in ``[0, most]``: the order, and what is carried along.

    Key and index go into one number where they fit: a sort's code and time grow with each operand.
    """
    n = key.shape[0]
    index = lax.iota(jnp.int32, n)
    if (most + 1) * n >= 2**31:
        return tuple(lax.sort((key, index, *carried), num_keys=2, is_stable=False)[1:])
    both, *rest = lax.sort((key * n + index, *carried), num_keys=1, is_stable=False)
    return lax.rem(both, n), *rest


def _lookup(table: jax.Array, index: jax.Array) -> jax.Array:
    """``table[index]`` for a small table, as a masked sum; 0 outside it."""
    hit = index[..., None] == lax.iota(jnp.int32, table.shape[0])
    return jnp.sum(jnp.where(hit, table, 0), axis=-1, dtype=jnp.int32)


def _count_below(values: jax.Array, bounds: jax.Array, *, inclusive: bool = False) -> jax.Array:
    """How many `values` are below (or at) each bound; int32, shaped like `bounds`."""
    below = values <= bounds[..., None] if inclusive else values < bounds[..., None]
    return jnp.sum(below, axis=-1, dtype=jnp.int32)


def _key(ids: jax.Array, slots: jax.Array, valid: jax.Array, num_slots: int, beyond: int) -> jax.Array:
    """Sort key (expert, adapter); base rows last inside an expert, unrouted pairs last of all."""
    slot = jnp.where(slots < 0, num_slots, slots)
    return jnp.where(valid, ids * (num_slots + 1) + slot, beyond)


def build_plan(
    spec: KernelSpec,
    num_experts: int,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    slots: jax.Array | None,
    rank: jax.Array,
) -> Plan:
    """Plan one device's share; call inside `shard_map` over ``spec.axis`` (or plainly where ``spec.ep == 1``).

    Args:
      spec: the build.
      num_experts: experts in all (an id outside ``[0, num_experts)`` is skipped).
      topk_ids: int32 ``[T_local, K]``.
      topk_weights: float32 ``[T_local, K]``.
      slots: int32 ``[T_local]`` adapter slot or -1; None without adapters.
      rank: int32 scalar, this device's place along the axis (data, so that the program exports).
    """
    local_tokens, k = topk_ids.shape
    num_slots = spec.lora.slots if spec.lora else 0
    if slots is None:
        slots = jnp.full((local_tokens,), -1, jnp.int32)
    owned = (topk_ids >= 0) & (topk_ids < num_experts)
    arrival = None
    if spec.pushes:
        beyond = spec.experts * spec.ep * (num_slots + 1)
        key = _key(topk_ids, slots[:, None], owned, num_slots, beyond).reshape(-1)
        arrival = inverse_permutation(sort_pairs(key, beyond)[0]).reshape(local_tokens, k)

    travelling = lax.bitcast_convert_type(topk_weights, jnp.int32) if arrival is None else arrival
    packed = jnp.concatenate([jnp.where(owned, topk_ids, -1), travelling, slots[:, None]], axis=1)
    if spec.ep > 1:
        packed = lax.all_gather(packed, spec.axis, axis=0, tiled=True)
    all_ids, travelled, all_slots = packed[:, :k], packed[:, k : 2 * k], packed[:, 2 * k :]

    here = all_ids - rank * spec.experts
    mine = (all_ids >= 0) & (here >= 0) & (here < spec.experts)
    segments = spec.experts * (num_slots + 1)
    all_key = _key(here, all_slots, mine, num_slots, segments).reshape(-1)
    carried = travelled.reshape(-1)
    if spec.pushes:
        # Where a row goes, as one number: its owner's rank times the rows an owner receives, plus the arrival row.
        carried += lax.iota(jnp.int32, spec.capacity) // spec.local_rows * spec.local_rows
    order, carried = sort_pairs(all_key, segments, carried)
    starts = _count_below(all_key, lax.iota(jnp.int32, segments + 1))

    device = jnp.where(owned, lax.div(topk_ids, spec.experts), spec.ep)
    arriving = jnp.sum(owned & (device != rank), dtype=jnp.int32)
    table = _table(spec, starts, order, carried, rank, arriving)
    weights = None
    if not spec.pushes:
        weights = (lax.bitcast_convert_type(travelled, jnp.float32), lax.bitcast_convert_type(carried, jnp.float32))
    return Plan(table, owned, arrival, order, mine.reshape(-1), device, rank, weights)


def _table(
    spec: KernelSpec, starts: jax.Array, order: jax.Array, target: jax.Array, rank: jax.Array, arriving: jax.Array
) -> jax.Array:
    layout, b = spec.table, spec.blocks
    expert_of, group_start, group_end = _groups(spec, starts)
    visits_of = (group_end - group_start + b.rows - 1) // b.rows
    visit_end = jnp.cumsum(visits_of)
    num_visits = visit_end[-1]

    v = lax.iota(jnp.int32, spec.max_visits)
    group = _count_below(visit_end, v, inclusive=True)
    first = _lookup(group_start, group) + (v - _lookup(visit_end - visits_of, group)) * b.rows
    count = jnp.where(v < num_visits, jnp.clip(_lookup(group_end, group) - first, 0, b.rows), 0)
    chunks_of = (count + b.stage - 1) // b.stage
    chunk_end = jnp.cumsum(chunks_of)
    expert = _lookup(expert_of, group)
    columns = [expert, first, count, chunk_end - chunks_of, *_pair_columns(spec, starts, expert, group, first, count)]
    visit_table = jnp.stack(columns, axis=1)

    spare = jnp.zeros((layout.HEADER - 4,), jnp.int32)
    header = jnp.concatenate([jnp.stack([num_visits, rank, arriving, chunk_end[-1]]), spare])
    parts = [header, visit_table.reshape(-1), order // spec.top_k, jnp.zeros((ROW_BLOCK,), jnp.int32)]
    if spec.pushes:
        parts += _run_parts(spec, target, starts[-1], group_start, group_end, first, chunk_end, chunks_of)
    table = jnp.concatenate(parts)
    assert table.shape == (layout.size,) and table.dtype == jnp.int32, (table.shape, table.dtype, layout)
    return table


def _groups(spec: KernelSpec, starts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Expert, first and end row of each (expert, group of `pairs` slots); the last group also has the base rows."""
    width = (spec.lora.slots if spec.lora else 0) + 1
    by_expert = starts[:-1].reshape(spec.experts, width)
    low = by_expert[:, :: spec.blocks.pairs][:, : spec.groups] if spec.lora else by_expert
    end = jnp.concatenate([by_expert[1:, :1], starts[-1:].reshape(1, 1)])
    high = jnp.concatenate([low[:, 1:], end], axis=1)
    expert = jnp.repeat(lax.iota(jnp.int32, spec.experts), spec.groups)
    return expert, low.reshape(-1), high.reshape(-1)


def _pair_columns(
    spec: KernelSpec, starts: jax.Array, expert: jax.Array, group: jax.Array, first: jax.Array, count: jax.Array
) -> list[jax.Array]:
    """Pair count, then slot, first row and end row of each adapter that has rows in the visit."""
    if spec.lora is None:
        return [jnp.zeros_like(count)]
    slots, pairs = spec.lora.slots, spec.blocks.pairs
    slot = (group % spec.groups)[:, None] * pairs + lax.iota(jnp.int32, pairs)
    at = expert[:, None] * (slots + 1) + slot
    low = jnp.maximum(_lookup(starts, at), first[:, None]) - first[:, None]
    high = jnp.minimum(_lookup(starts, at + 1), (first + count)[:, None]) - first[:, None]
    present = (slot < slots) & (high > low)
    place = jnp.cumsum(present, axis=1) - 1
    columns = [jnp.sum(present, axis=1, dtype=jnp.int32)]
    for i in range(pairs):
        chosen = present & (place == i)
        columns += [jnp.sum(jnp.where(chosen, a, 0), axis=1, dtype=jnp.int32) for a in (slot, low, high)]
    return columns


def _run_parts(
    spec: KernelSpec,
    target: jax.Array,
    total: jax.Array,
    group_start: jax.Array,
    group_end: jax.Array,
    visit_first: jax.Array,
    chunk_end: jax.Array,
    chunks_of: jax.Array,
) -> list[jax.Array]:
    """First run of each chunk, then row, owner and arrival row of each run."""
    b = spec.blocks
    row = lax.iota(jnp.int32, spec.capacity)
    in_visit = (row - _lookup(group_start, _count_below(group_end, row, inclusive=True))) % b.rows
    # The last row of one owner's buffer and the first of the next one's are neighbours in number only.
    fresh = (in_visit % b.stage == 0) | (target != jnp.roll(target, 1) + 1) | (target % spec.local_rows == 0)
    fresh = (fresh | (row == 0)) & (row < total)
    run_of = jnp.cumsum(fresh, dtype=jnp.int32)
    run_row = jnp.minimum(_count_below(run_of, lax.iota(jnp.int32, spec.max_runs + 1), inclusive=True), total)
    run_target = target[jnp.minimum(run_row, spec.capacity - 1)]

    c = lax.iota(jnp.int32, spec.max_chunks + 1)
    visit = _count_below(chunk_end, c, inclusive=True)
    chunk_row = _lookup(visit_first, visit) + (c - _lookup(chunk_end - chunks_of, visit)) * b.stage
    chunk_run = _count_below(run_row, jnp.where(c < chunk_end[-1], chunk_row, total))
    return [chunk_run, run_row, run_target // spec.local_rows, run_target % spec.local_rows]
