# SPDX-License-Identifier: Apache-2.0
"""The routing plan: which rows each device computes, in which order, and where their results go.

Runs in XLA inside `shard_map`. Every device orders its own (token, k) pairs by (expert, adapter, pair): that is the
order in which results arrive in its buffer. One gather of packed int32 metadata then tells everyone everything, and
each device cuts its own experts' rows into visits, chunks and runs (see `spec.TableLayout`).

Because both sides order by the same key, the rows of one (expert, adapter) that one device owns are contiguous at
the sender and at the receiver, so results travel in runs rather than row by row.
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
      arrival: int32 ``[T_local, K]``, its row in the arrival buffer.
      order: int32 ``[T*K]``, pairs of all tokens in this device's compute order, its own experts' first.
      mine: bool ``[T*K]``, whether a pair goes to this device's experts.
    """

    table: jax.Array
    owned: jax.Array
    arrival: jax.Array
    order: jax.Array
    mine: jax.Array


def inverse_permutation(order: jax.Array) -> jax.Array:
    """int32 ``[n]``: where each index went."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype), unique_indices=True)


def _key(ids: jax.Array, slots: jax.Array, valid: jax.Array, num_slots: int, beyond: int) -> jax.Array:
    """Sort key (expert, adapter); base rows last inside an expert, unrouted pairs last of all."""
    slot = jnp.where(slots < 0, num_slots, slots)
    return jnp.where(valid, ids * (num_slots + 1) + slot, beyond)


def build_plan(
    spec: KernelSpec, num_experts: int, topk_ids: jax.Array, slots: jax.Array | None, rank: jax.Array
) -> Plan:
    """Plan one device's share; call inside `shard_map` over ``spec.axis`` (or plainly where ``spec.ep == 1``).

    Args:
      spec: the build.
      num_experts: experts in all (an id outside ``[0, num_experts)`` is skipped).
      topk_ids: int32 ``[T_local, K]``.
      slots: int32 ``[T_local]`` adapter slot or -1; None without adapters.
      rank: int32 scalar, this device's place along the axis (data, so that the program exports).
    """
    local_tokens, k = topk_ids.shape
    num_slots = spec.lora.slots if spec.lora else 0
    if slots is None:
        slots = jnp.full((local_tokens,), -1, jnp.int32)
    pair_slots = jnp.broadcast_to(slots[:, None], (local_tokens, k))
    owned = (topk_ids >= 0) & (topk_ids < num_experts)
    key = _key(topk_ids, pair_slots, owned, num_slots, spec.experts * spec.ep * (num_slots + 1))
    arrival = inverse_permutation(jnp.argsort(key.reshape(-1), stable=True).astype(jnp.int32)).reshape(local_tokens, k)

    packed = jnp.concatenate([jnp.where(owned, topk_ids, -1), arrival, slots[:, None]], axis=1)
    if spec.ep > 1:
        packed = lax.all_gather(packed, spec.axis, axis=0, tiled=True)
    all_ids, all_arrival, all_slots = packed[:, :k], packed[:, k : 2 * k], packed[:, 2 * k]

    here = all_ids - rank * spec.experts
    mine = ((all_ids >= 0) & (here >= 0) & (here < spec.experts)).reshape(-1)
    all_pair_slots = jnp.broadcast_to(all_slots[:, None], all_ids.shape).reshape(-1)
    segments = spec.experts * (num_slots + 1)
    all_key = _key(here.reshape(-1), all_pair_slots, mine, num_slots, segments)
    order = jnp.argsort(all_key, stable=True).astype(jnp.int32)
    starts = jnp.searchsorted(all_key[order], jnp.arange(segments + 1), side="left").astype(jnp.int32)

    mine_local = (topk_ids >= rank * spec.experts) & (topk_ids < (rank + 1) * spec.experts) & owned
    arriving = jnp.sum(owned & ~mine_local, dtype=jnp.int32)
    table = _table(spec, starts, order, all_arrival.reshape(-1), rank, arriving)
    return Plan(table, owned, arrival, order, mine)


def _table(
    spec: KernelSpec, starts: jax.Array, order: jax.Array, arrival: jax.Array, rank: jax.Array, arriving: jax.Array
) -> jax.Array:
    layout, b = spec.table, spec.blocks
    slots = spec.lora.slots if spec.lora else 0
    expert_of, group_start, group_end = _groups(spec, starts, slots)
    counts = group_end - group_start
    visits_of = (counts + b.rows - 1) // b.rows
    visit_end = jnp.cumsum(visits_of)
    num_visits = visit_end[-1]

    v = jnp.arange(spec.max_visits, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(visit_end, v, side="right"), counts.shape[0] - 1)
    first = group_start[group] + (v - (visit_end - visits_of)[group]) * b.rows
    count = jnp.where(v < num_visits, jnp.clip(group_end[group] - first, 0, b.rows), 0)
    chunks_of = (count + b.stage - 1) // b.stage
    chunk_end = jnp.cumsum(chunks_of)
    columns = [expert_of[group], first, count, chunk_end - chunks_of]
    columns += _pair_columns(spec, starts, expert_of[group], group, first, count)
    visit_table = jnp.stack([c.astype(jnp.int32) for c in columns], axis=1)

    header = jnp.zeros((layout.HEADER,), jnp.int32)
    header = header.at[0].set(num_visits).at[1].set(rank).at[2].set(arriving).at[3].set(chunk_end[-1])
    tokens = jnp.concatenate([order // spec.top_k, jnp.zeros((ROW_BLOCK,), jnp.int32)])
    parts = [header, visit_table.reshape(-1), tokens]
    if spec.pushes:
        parts += _run_parts(spec, order, arrival, starts, group_start, group_end, first, chunk_end, chunks_of)
    table = jnp.concatenate([p.astype(jnp.int32) for p in parts])
    assert table.shape == (layout.size,), (table.shape, layout)
    return table


def _groups(spec: KernelSpec, starts: jax.Array, slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Expert, first and end row of each (expert, group of `pairs` slots); the last group also has the base rows."""
    base, width = jnp.arange(spec.experts, dtype=jnp.int32), slots + 1
    low, high = [], []
    for g in range(spec.groups):
        low.append(starts[base * width + g * spec.blocks.pairs])
        last = g == spec.groups - 1
        high.append(starts[base * width + (width if last else (g + 1) * spec.blocks.pairs)])
    stack = lambda parts: jnp.stack(parts, axis=1).reshape(-1)  # noqa: E731
    return jnp.repeat(base, spec.groups), stack(low), stack(high)


def _pair_columns(
    spec: KernelSpec, starts: jax.Array, expert: jax.Array, group: jax.Array, first: jax.Array, count: jax.Array
) -> list[jax.Array]:
    """Pair count, then slot, first row and end row of each adapter that has rows in the visit."""
    if spec.lora is None:
        return [jnp.zeros_like(count)]
    slots, pairs = spec.lora.slots, spec.blocks.pairs
    slot = (group % spec.groups)[:, None] * pairs + jnp.arange(pairs, dtype=jnp.int32)[None, :]
    exists = slot < slots
    at = expert[:, None] * (slots + 1) + jnp.minimum(slot, slots - 1)
    low = jnp.maximum(starts[at], first[:, None]) - first[:, None]
    high = jnp.minimum(starts[at + 1], (first + count)[:, None]) - first[:, None]
    present = exists & (high > low)
    order = jnp.argsort(~present, axis=1, stable=True)
    take = lambda a: jnp.where(  # noqa: E731
        jnp.take_along_axis(present, order, axis=1), jnp.take_along_axis(a, order, axis=1), 0
    )
    slot, low, high = take(slot), take(low), take(high)
    columns = [jnp.sum(present, axis=1)]
    for i in range(pairs):
        columns += [slot[:, i], low[:, i], high[:, i]]
    return columns


def _run_parts(
    spec: KernelSpec,
    order: jax.Array,
    arrival: jax.Array,
    starts: jax.Array,
    group_start: jax.Array,
    group_end: jax.Array,
    visit_first: jax.Array,
    chunk_end: jax.Array,
    chunks_of: jax.Array,
) -> list[jax.Array]:
    """First run of each chunk, then row, owner and arrival row of each run."""
    b, total = spec.blocks, starts[-1]
    row = jnp.arange(spec.capacity, dtype=jnp.int32)
    owner = order // spec.local_rows
    dest = arrival[order]
    group = jnp.minimum(jnp.searchsorted(group_end, row, side="right"), group_start.shape[0] - 1)
    in_visit = (row - group_start[group]) % b.rows
    fresh = (in_visit % b.stage == 0) | (owner != jnp.roll(owner, 1)) | (dest != jnp.roll(dest, 1) + 1)
    fresh = (fresh | (row == 0)) & (row < total)
    run_of = jnp.cumsum(fresh.astype(jnp.int32))
    num_runs = run_of[-1]
    wanted = jnp.arange(1, spec.max_runs + 2, dtype=jnp.int32)
    run_row = jnp.where(wanted <= num_runs, jnp.searchsorted(run_of, wanted, side="left"), total)
    at = jnp.minimum(run_row, spec.capacity - 1)

    c = jnp.arange(spec.max_chunks + 1, dtype=jnp.int32)
    visit = jnp.minimum(jnp.searchsorted(chunk_end, c, side="right"), chunk_end.shape[0] - 1)
    chunk_row = visit_first[visit] + (c - (chunk_end - chunks_of)[visit]) * b.stage
    chunk_run = jnp.where(c < chunk_end[-1], run_of[jnp.clip(chunk_row, 0, spec.capacity - 1)] - 1, num_runs)
    return [chunk_run, run_row, owner[at], dest[at]]
