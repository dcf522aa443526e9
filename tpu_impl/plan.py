# SPDX-License-Identifier: Apache-2.0
"""The routing plan: which rows each device computes, in which order, and where their results go.

Runs in XLA inside `shard_map`. Every device sorts its own (token, k) pairs by (expert, group, pair), a group being
adapters that the kernel holds at once, usually all: that is the order in which results arrive in its buffer. One gather
of int32 metadata (`spec.TableLayout`) tells everyone the sorted tokens of each device, where the pairs of each (expert,
group) begin among them, the tokens' adapters and the scales of quantised rows. What was gathered is the kernel's table
as it is: the rows of an expert are a range of each device's list, and results go back to that very range. Merging the
lists is left to the kernel, which does it in vector registers, a visit ahead; sorting all devices' pairs on each device
would take longer than everything else here.

At decode the plan's own time counts, and each operation's start most of all. So: one sort that everything waits for,
and otherwise comparisons summed over small tables, which a vector unit does in passing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .spec import LANES, KernelSpec, round_up
from .table_kernel import table_kernel

# Up to so many pairs are ranked by comparing all with all, in one operation; more by two sorts.
COMPARED = 1024


@dataclass(frozen=True)
class Plan:
    """One device's plan.

    Attributes:
      rank: int32 ``[1]``, this device's own.
      table: int32 ``[spec.table.size]``, what the kernel reads.
      owned: bool ``[T_local, K]``, whether a pair of this device's tokens is routed to an existing expert.
      device: int32 ``[T_local, K]``, the rank whose experts a pair of this device's tokens goes to; ``ep`` for none.
      arrival: int32 ``[T_local, K]``, its row in the arrival buffer; None where results are not pushed.
      kept: where the rows of all devices' pairs lie; None where results are pushed.
    """

    rank: jax.Array
    table: jax.Array
    owned: jax.Array
    device: jax.Array
    arrival: jax.Array | None
    kept: KeptRows | None


@dataclass(frozen=True)
class KeptRows:
    """Results that stay in this device's compute order.

    Attributes:
      order: int32 ``[T*K]``, pairs of all tokens in that order, its own experts' first.
      mine: bool ``[T*K]``, whether a pair goes to this device's experts.
      weights: float32 ``[T, K]`` of all tokens.
      sorted_weights: float32 ``[T*K]`` in compute order.
    """

    order: jax.Array
    mine: jax.Array
    weights: jax.Array
    sorted_weights: jax.Array


def exclusive_sum(counts: jax.Array) -> jax.Array:
    """The sum of what comes before each place along the first axis; int32."""
    return jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts


def inverse_permutation(order: jax.Array, bits: int) -> jax.Array:
    """int32 ``[n]``: where each of different numbers of `bits` bits is, in ascending order of the numbers.

    Number and place go into one where they fit: a sort's code and time grow with each operand.
    """
    n = order.shape[0]
    place, place_bits = lax.iota(jnp.int32, n), (n - 1).bit_length()
    if bits + place_bits < 32:
        return lax.sort(order << place_bits | place, is_stable=False) & ((1 << place_bits) - 1)
    return lax.sort((order, place), num_keys=1, is_stable=False)[1]


def numbered(spec: KernelSpec, segment: jax.Array) -> jax.Array:
    """Pairs as numbers that sort by (segment, k, token): from each one's segment among all devices', int32 ``[K, T]``
    of one device. `blocks.max_tokens` keeps them in range."""
    k, token = (np.arange(n, dtype=np.int32) for n in segment.shape)
    return segment << spec.pair_bits | (k[:, None] << spec.token_bits | token)


def build_plan(
    spec: KernelSpec,
    num_experts: int,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    slots: jax.Array | None,
    rank: jax.Array,
    *,
    scales: jax.Array | None = None,
    launch: dict[str, Any],
) -> Plan:
    """Plan one device's share; call inside `shard_map` over ``spec.axis`` (or plainly where ``spec.ep == 1``).

    Args:
      spec: the build.
      num_experts: experts in all (an id outside ``[0, num_experts)`` is skipped).
      topk_ids: int32 ``[T_local, K]``.
      topk_weights: float32 ``[T_local, K]``.
      slots: int32 ``[T_local]`` adapter slot or -1; None without adapters.
      rank: int32 ``[1]``, this device's place along the axis (data, so that the program exports).
      scales: float32, the first ``T_local`` those of rows quantised at their source.
      launch: keyword arguments of `table_kernel`.
    """
    beyond = spec.ep * spec.segments
    owned = (topk_ids >= 0) & (topk_ids < num_experts)
    # (expert, group); base rows in an expert's last group, unrouted pairs last of all.
    group = jnp.int32(0)
    if slots is not None and spec.groups > 1:
        group = jnp.where(slots < 0, spec.groups - 1, lax.div(slots, spec.blocks.pairs))[:, None]
    # Pairs lie k by k, tokens along lanes, as XLA keeps so narrow an array.
    segment = jnp.where(owned, topk_ids * spec.groups + group, beyond).T
    laid = numbered(spec, segment)
    pairs = laid.reshape(-1)
    in_order = lax.sort(pairs, is_stable=False)

    given = {} if scales is None else {"scales": scales}
    if slots is not None:
        given |= {"slots": slots, "present": _present(spec, segment.reshape(-1), jnp.tile(slots, spec.top_k))}
    sent = [table_kernel(spec, rank, in_order, given, **launch)]
    if not spec.pushes:
        sent += [pairs, lax.bitcast_convert_type(topk_weights.T.reshape(-1), jnp.int32)]
    table, *rest = _gather(spec, sent)

    arrival = kept = None
    if not spec.pushes:
        kept = _kept_rows(spec, rank, *rest)
    elif pairs.shape[0] <= COMPARED:
        arrival = jnp.sum(pairs < laid[..., None], axis=2, dtype=jnp.int32).T
    else:
        # Only the sum needs it, so it may run while rows come in; XLA would start with it if it did not have to wait
        # for the metadata (tokens are not negative: the minimum is 0).
        number = in_order & ((1 << spec.pair_bits) - 1)
        arrival = inverse_permutation(number + jnp.minimum(table[:1], 0), spec.pair_bits).reshape(laid.shape).T
    return Plan(
        rank=rank, table=table, owned=owned, device=jnp.where(owned, lax.div(topk_ids, spec.experts), spec.ep),
        arrival=arrival, kept=kept,
    )


def _gather(spec: KernelSpec, sent: list[jax.Array]) -> list[jax.Array]:
    """Every device's int32 vectors, the first one after another, others ``[ep, length]``, by one all-gather.

    Each is padded to whole rows of lanes: what XLA gathers must not need rearranging.
    """
    ends = list(itertools.accumulate(round_up(part.shape[0], LANES) for part in sent))
    packed = jnp.concatenate([jnp.pad(part, (0, -part.shape[0] % LANES)) for part in sent])
    if spec.ep > 1:
        packed = lax.all_gather(packed, spec.axis, axis=0, tiled=True)
    if len(sent) == 1:
        return [packed]
    table, *rest = jnp.split(packed.reshape(spec.ep, -1), ends[:-1], axis=1)
    return [table.reshape(-1), *(a[:, : part.shape[0]] for a, part in zip(rest, sent[1:], strict=True))]


def _present(spec: KernelSpec, segment: jax.Array, slot: jax.Array) -> jax.Array:
    """int32 ``[segments of all devices * present_words]``: its group's adapters that a segment's pairs use, as bits."""
    every, word = np.arange(spec.ep * spec.segments)[:, None, None], np.arange(spec.present_words)[:, None]
    place = lax.rem(slot, spec.blocks.pairs)
    hit = (slot >= 0) & (segment == every) & (lax.div(place, 32) == word)
    bits = jnp.where(hit, jnp.int32(1) << lax.rem(place, 32), 0)
    return lax.reduce(bits, jnp.int32(0), lax.bitwise_or, (2,)).reshape(-1)


def _kept_rows(spec: KernelSpec, rank: jax.Array, pairs: jax.Array, weights: jax.Array) -> KeptRows:
    """From all devices' pairs (`numbered`) and weights ``[ep, n]``, k by k."""
    k, local_tokens = spec.top_k, spec.tokens // spec.ep
    here = lax.shift_right_logical(pairs, spec.pair_bits) - rank * spec.segments
    mine = (here >= 0) & (here < spec.segments)
    place = lax.broadcasted_iota(jnp.int32, pairs.shape, 0) * pairs.shape[1] + lax.broadcasted_iota(
        jnp.int32, pairs.shape, 1
    )
    keys = jnp.where(mine, here, spec.segments).reshape(-1)
    _, place, carried = lax.sort((keys, place.reshape(-1), weights.reshape(-1)), num_keys=2, is_stable=False)
    owner, pair = lax.div(place, spec.local_rows), lax.rem(place, spec.local_rows)
    order = owner * spec.local_rows + lax.rem(pair, local_tokens) * k + lax.div(pair, local_tokens)

    def by_token(a: jax.Array) -> jax.Array:
        """``[ep, K * T_local]`` to ``[T, K]``."""
        return a.reshape(spec.ep, k, local_tokens).transpose(0, 2, 1).reshape(spec.tokens, k)

    every, by_order = (lax.bitcast_convert_type(a, jnp.float32) for a in (by_token(weights), carried))
    return KeptRows(order, by_token(mine).reshape(-1), every, by_order)
