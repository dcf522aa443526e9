# SPDX-License-Identifier: Apache-2.0
"""The routing plan: which rows each device computes, in which order, and where their results go.

Runs in XLA inside `shard_map`. Every device orders its own (token, k) pairs by (expert, group, pair), a group being
adapters that the kernel holds at once, usually all: that is the order in which results arrive in its buffer, so it
only has to say where each (expert, group) begins there. One gather of int32 metadata tells everyone that, the pairs'
keys, the tokens' adapters and the scales of quantised rows; each device then sorts the pairs of its own experts by the
same key. The rows of one (expert, group) that one device owns are contiguous at the sender and at the receiver, so
results travel in runs rather than row by row, and two small tables (`spec.TableLayout`) say where runs begin. The
kernel lists its visits from them itself: scalar code there takes less time than starting the operations would.

At decode the plan's own time counts, and each operation's start most of all. So: one sort that the kernel waits for,
and otherwise comparisons summed over small tables, which a vector unit does in passing.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .spec import LANES, KernelSpec

# Up to so many pairs are ranked by comparing all with all, in one operation; more by two sorts.
COMPARED = 1024


@dataclass(frozen=True)
class Plan:
    """One device's plan.

    Attributes:
      table: int32 ``[spec.table.size]``, what the kernel reads.
      scales: float32 ``[T]`` of all tokens' rows; None where they were not quantised at their source.
      owned: bool ``[T_local, K]``, whether a pair of this device's tokens is routed to an existing expert.
      arrival: int32 ``[T_local, K]``, its row in the arrival buffer; None where results are not pushed.
      order: int32 ``[T*K]``, pairs of all tokens in this device's compute order, its own experts' first.
      mine: bool ``[T*K]``, whether a pair goes to this device's experts.
      device: int32 ``[T_local, K]``, the rank whose experts a pair of this device's tokens goes to; ``ep`` for none.
      rank: int32 scalar, this device's own.
      weights: float32 ``[T, K]`` of all tokens, and ``[T*K]`` in compute order; None where results are pushed.
    """

    table: jax.Array
    scales: jax.Array | None
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


def sort_pairs(key: jax.Array, index: jax.Array | np.ndarray, most: int, *carried: jax.Array) -> tuple[jax.Array, ...]:
    """Pairs by (key, index), keys in ``[0, most]`` and indices a permutation: the indices, and what is carried along.

    Key and index go into one number where they fit: a sort's code and time grow with each operand.
    """
    n = key.shape[0]
    if not _fits(n, most):
        return tuple(lax.sort((key, jnp.asarray(index), *carried), num_keys=2, is_stable=False)[1:])
    both, *rest = lax.sort((key * n + index, *carried), num_keys=1, is_stable=False)
    return lax.rem(both, n), *rest


def rank_pairs(key: jax.Array, index: jax.Array | np.ndarray, most: int) -> jax.Array:
    """int32 ``[n]``: the place of each pair among all by (key, index), arguments as `sort_pairs`'s."""
    n = key.shape[0]
    if n <= COMPARED and _fits(n, most):
        both = key * n + index
        return _count_below(both, both)
    place = sort_pairs(key, index, most, lax.iota(jnp.int32, n))[1]
    return inverse_permutation(place)


def _fits(n: int, most: int) -> bool:
    return (most + 1) * n < 2**31


def _count_below(values: jax.Array, bounds: jax.Array) -> jax.Array:
    """How many `values` are below each bound; int32, shaped like `bounds`."""
    return jnp.sum(values < bounds[..., None], axis=-1, dtype=jnp.int32)


def build_plan(
    spec: KernelSpec,
    num_experts: int,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    slots: jax.Array | None,
    rank: jax.Array,
    scales: jax.Array | None = None,
) -> Plan:
    """Plan one device's share; call inside `shard_map` over ``spec.axis`` (or plainly where ``spec.ep == 1``).

    Args:
      spec: the build.
      num_experts: experts in all (an id outside ``[0, num_experts)`` is skipped).
      topk_ids: int32 ``[T_local, K]``.
      topk_weights: float32 ``[T_local, K]``.
      slots: int32 ``[T_local]`` adapter slot or -1; None without adapters.
      rank: int32 scalar, this device's place along the axis (data, so that the program exports).
      scales: float32 ``[T_local]`` of rows quantised at their source.
    """
    local_tokens, k = topk_ids.shape
    n, segments = local_tokens * k, spec.segments
    beyond = segments * spec.ep
    owned = (topk_ids >= 0) & (topk_ids < num_experts)
    # (expert, group); base rows in an expert's last group, unrouted pairs last of all.
    group = jnp.int32(0)
    if slots is not None and spec.groups > 1:
        group = jnp.where(slots < 0, spec.groups - 1, lax.div(slots, spec.blocks.pairs))[:, None]
    # Pairs lie k by k, tokens along lanes, as XLA keeps so narrow an array; `pair` is their number all the same.
    key = jnp.where(owned, topk_ids * spec.groups + group, beyond).T.reshape(-1)
    pair = np.arange(n, dtype=np.int32).reshape(local_tokens, k).T.reshape(-1)
    begins = _count_below(key, lax.iota(jnp.int32, beyond + 1))

    own = key - rank * segments
    arriving = jnp.sum((key < beyond) & ((own < 0) | (own >= segments)), dtype=jnp.int32)

    sent = {"key": key, "begins": begins}
    if scales is not None:
        sent["scales"] = lax.bitcast_convert_type(scales, jnp.int32)
    if slots is not None:
        sent["slots"] = slots
    if not spec.pushes:
        sent["weights"] = lax.bitcast_convert_type(topk_weights.T.reshape(-1), jnp.int32)
    got = _gather(spec, sent)
    arrival = None
    if spec.pushes:
        # Only the sum needs it, so long sorts may run while rows come in; XLA would start with them if they did not
        # have to wait for the metadata (keys are not negative: the minimum is 0).
        ranked = key if n <= COMPARED else key + jnp.minimum(got["key"][0, :1], 0)
        arrival = rank_pairs(ranked, pair, beyond).reshape(k, local_tokens).T

    here = got["key"] - rank * segments
    mine = (here >= 0) & (here < segments)
    all_pairs = (n * np.arange(spec.ep, dtype=np.int32)[:, None] + pair).reshape(-1)
    carried = [] if spec.pushes else [got["weights"].reshape(-1)]
    order, *carried = sort_pairs(jnp.where(mine, here, segments).reshape(-1), all_pairs, segments, *carried)

    adapters = []
    if slots is not None:
        adapters = [got["slots"], _present(spec, here, jnp.tile(got["slots"], (1, k)))]

    def by_token(a: jax.Array) -> jax.Array:
        """``[ep, K * T_local]`` to ``[T, K]``."""
        return a.reshape(spec.ep, k, local_tokens).transpose(0, 2, 1).reshape(spec.tokens, k)

    weights = None
    if not spec.pushes:
        every, sorted_ = by_token(got["weights"]), carried[0]
        weights = (lax.bitcast_convert_type(every, jnp.float32), lax.bitcast_convert_type(sorted_, jnp.float32))
    return Plan(
        table=_table(spec, got["begins"], arriving, order, rank, adapters),
        scales=None if scales is None else lax.bitcast_convert_type(got["scales"], jnp.float32).reshape(-1),
        owned=owned, arrival=arrival, order=order, mine=by_token(mine).reshape(-1),
        device=jnp.where(owned, lax.div(topk_ids, spec.experts), spec.ep), rank=rank, weights=weights,
    )


def _gather(spec: KernelSpec, sent: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Every device's int32 vectors, ``[ep, length]`` each, by one all-gather.

    Each is padded to whole rows of lanes: what XLA gathers must not need rearranging.
    """
    padded = [jnp.pad(part, (0, -part.shape[0] % LANES)).reshape(-1, LANES) for part in sent.values()]
    packed = jnp.concatenate(padded)[None]
    if spec.ep > 1:
        packed = lax.all_gather(packed, spec.axis, axis=0, tiled=True)
    got, start = {}, 0
    for (name, part), rows in zip(sent.items(), padded, strict=True):
        got[name] = packed[:, start : start + rows.shape[0]].reshape(spec.ep, -1)[:, : part.shape[0]]
        start += rows.shape[0]
    return got


def _present(spec: KernelSpec, segment: jax.Array, slot: jax.Array) -> jax.Array:
    """int32 ``[experts, present_words]``: slots that the pairs of each expert here use, as bits."""
    expert, word = np.arange(spec.experts)[:, None, None, None], np.arange(spec.present_words)[:, None, None]
    hit = (slot >= 0) & (lax.div(segment, spec.groups) == expert) & (segment >= 0) & (slot // 32 == word)
    return lax.reduce(jnp.where(hit, jnp.int32(1) << (slot % 32), 0), jnp.int32(0), lax.bitwise_or, (2, 3))


def _table(
    spec: KernelSpec,
    begins: jax.Array,
    arriving: jax.Array,
    order: jax.Array,
    rank: jax.Array,
    adapters: list[jax.Array],
) -> jax.Array:
    """The kernel's table.

    Args:
      begins: int32 ``[ep, ep * segments + 1]``: the arrival row of each owner at which a segment begins.
      arriving: int32 scalar, rows that other devices send here.
      adapters: the slot of each token and `_present`, where the build has adapters.
    """
    at = lax.dynamic_slice_in_dim(begins, rank * spec.segments, spec.segments + 1, axis=1).T
    ends = jnp.concatenate([at[1:], at[-1:]])
    # Sorted rows before a cell: of every owner those of earlier segments, of earlier owners those of its own too.
    earlier = np.tri(spec.ep, k=-1, dtype=bool)
    cells = jnp.sum(jnp.where(earlier, ends[:, None], at[:, None]) - at[0], axis=2, dtype=jnp.int32)
    parts = [jnp.stack([rank, arriving]), cells.reshape(-1)]
    if spec.pushes:
        parts.append((at - cells).reshape(-1))
    parts += [lax.div(order, spec.top_k), jnp.zeros((spec.rows_beyond,), jnp.int32)]
    table = jnp.concatenate([*parts, *(part.reshape(-1) for part in adapters)])
    assert table.shape == (spec.table.size,) and table.dtype == jnp.int32, (table.shape, table.dtype, spec.table)
    return table
