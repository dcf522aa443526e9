# SPDX-License-Identifier: Apache-2.0
"""An `AdapterPool`'s adapters on a device, at addresses that never change.

Every tensor is allocated once, so a captured CUDA graph sees adapters that were loaded after its capture. A slot is
reachable through a table alone, and its table entry is written last: matrices and ranks go to a slot that no entry
names, then the entry appears. Two tables stand beside the matrices, for two kinds of batch:

- by slot (`AdapterMirror.batch`): the pool resolves a batch's ids under a lease, so the batch keeps the versions it
  began with in every layer;
- by global id (`AdapterMirror.adapters`): ids that come from other ranks, or that a graph keeps in a buffer; the
  newest version of an id is found, and an id that no slot holds is a base row. To have one version in every layer,
  change adapters between such batches.

Launches are asynchronous, so a lease may end before the kernels that it covers have run. `batch` therefore leaves an
event on the batch's stream, and whatever the mirror writes waits for those events on the mirror's own stream; launch
inside `batch`, whichever table the kernels read.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..common.adapters import AdapterError, AdapterPool, Lease
from ..common.checks import check_int
from ..common.numerics import BF16
from ..common.weights import LoRAAdapter
from .prepare import AdapterSlots, empty_slots

# Matrix stacks of a slot, [E|1, halves, ., .], and the axis that the rank is on.
_PARTS = (("a13", 2), ("b13", 3), ("a2", 2), ("b2", 3))
_STAGING_BYTES = 64 << 20
_generations = itertools.count(1)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """The one door to the device."""
    target.copy_(source, non_blocking=True)


class _Lane:
    """Copies in order: on a CUDA device on a stream of its own and out of pinned memory, elsewhere at once.

    Args:
      elements: bf16 cells that one staging buffer holds.
    """

    def __init__(self, device: torch.device, elements: int) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned = self._stream is not None
        self._buffers = [
            torch.empty(elements, dtype=torch.bfloat16, pin_memory=self._pinned) for _ in range(1 + self._pinned)
        ]
        self._sent: list[torch.cuda.Event | None] = [None] * len(self._buffers)
        self._turn = 0

    def current(self) -> contextlib.AbstractContextManager[object]:
        """Makes the lane's stream the current one."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def staging(self, shape: torch.Size) -> torch.Tensor:
        """A host buffer to fill and `send`; waits until its last contents have left."""
        self._turn = (self._turn + 1) % len(self._buffers)
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        return self._buffers[self._turn][: shape.numel()].view(shape)

    def send(self, target: torch.Tensor, staged: torch.Tensor) -> None:
        _copy(target, staged)
        self._sent[self._turn] = self.mark()

    def host(self, values: np.ndarray) -> torch.Tensor:
        """A copy of a small array, pinned where that matters; torch reuses it only after copies out of it are done."""
        copy = torch.from_numpy(values.copy())
        return copy.pin_memory() if self._pinned else copy

    def upload(self, target: torch.Tensor, values: np.ndarray) -> None:
        _copy(target, self.host(values))

    def wait_for(self, events: Iterable[torch.cuda.Event]) -> None:
        """What is enqueued from here on runs after `events`; the host does not wait."""
        for event in events:
            assert self._stream is not None
            self._stream.wait_event(event)

    def mark(self) -> torch.cuda.Event | None:
        """An event after everything sent so far; None where nothing is asynchronous."""
        return None if self._stream is None else self._stream.record_event()

    def finish(self) -> None:
        """Wait until everything has been written; raises what went wrong on the device."""
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(frozen=True)
class GraphToken:
    """Which tensors a graph was captured over; see `AdapterMirror.capture`."""

    generation: int
    slots: int
    rank: int


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch under a lease.

    Attributes:
      lease: keeps the batch's versions alive.
      adapter_ids: int32 ``[T]`` on the device: slots, -1 = base; `fused_moe`'s `adapter_ids` beside `adapters`.
    """

    lease: Lease
    adapter_ids: torch.Tensor
    mirror: AdapterMirror

    def adapters(self, layer: int = 0) -> AdapterSlots:
        """`fused_moe`'s `adapters` of a layer."""
        return self.mirror.adapters(layer, by="slot")


class AdapterMirror:
    """A `PoolListener` that keeps `AdapterSlots` of every layer in step with a pool: ``pool.subscribe(mirror)``.

    Args:
      pool: sizes the slots; `max_lora_rank` and `num_slots` are its.
      device: of the tensors.
      experts: global ids of the experts held here, in the order of their weights (`ExpertPlacement.experts_of`);
        None for all.
      layers: layers held, where not all of the pool's.
      max_lora_rank: rank to allocate, at least the pool's; ranks are padded with zeros.
      shared_a13, shared_b2: keep one A13 (B2) for all experts; per-expert adapters are refused then. Without it,
        shared adapters are spread over the experts, and both kinds fit.
      budget_bytes: bound on the device tensors, checked before any is allocated; None for none.

    Raises:
      TypeError, ValueError: a bad argument.
      AdapterError: over budget.
    """

    def __init__(
        self,
        pool: AdapterPool,
        *,
        device: torch.device | str,
        experts: np.ndarray | Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
        max_lora_rank: int | None = None,
        shared_a13: bool = False,
        shared_b2: bool = False,
        budget_bytes: int | None = None,
    ) -> None:
        if not isinstance(pool, AdapterPool):
            raise TypeError(f"pool: got {type(pool).__name__}, want AdapterPool")
        rank = pool.config.max_lora_rank if max_lora_rank is None else max_lora_rank
        check_int("max_lora_rank", rank, minimum=pool.config.max_lora_rank)
        if budget_bytes is not None:
            check_int("budget_bytes", budget_bytes, minimum=0)
        self.pool = pool
        self.device = torch.device(device)
        self.layers = _indices("layers", layers, pool.num_layers)
        self.experts = _indices("experts", experts, pool.config.num_experts)
        local = len(self.experts)
        # Where one expert is held, "shared" and "per expert" are the same tensors.
        self._shared = {"a13": shared_a13 and local > 1, "b2": shared_b2 and local > 1}

        def empty(where: torch.device | str) -> AdapterSlots:
            return empty_slots(
                pool.config, max_loras=pool.num_slots, max_lora_rank=rank, device=where, num_experts=local,
                shared_a13=self._shared["a13"], shared_b2=self._shared["b2"],
            )  # fmt: skip

        stacks = [getattr(empty("meta"), part) for part, _ in _PARTS]
        self.nbytes = len(self.layers) * sum(s.nbytes for s in stacks) + 4 * (2 + len(self.layers)) * pool.num_slots
        if budget_bytes is not None and self.nbytes > budget_bytes:
            raise AdapterError(
                f"budget_bytes: got {budget_bytes}, {pool.num_slots} slots of rank {rank} for {local} experts in "
                f"{len(self.layers)} layers need {self.nbytes}"
            )
        slot, per_expert = max(s[0].numel() for s in stacks), max(s[0, 0].numel() for s in stacks)
        self._staging = min(slot, max(per_expert, _STAGING_BYTES // 2))
        self._lane = _Lane(self.device, self._staging)
        # Row 0 holds global ids, row 1 slot numbers; -1 where a slot is free. Shared by all layers.
        self._tables = torch.full((2, pool.num_slots), -1, dtype=torch.int32, device=self.device)
        self._ranks = torch.zeros((len(self.layers), pool.num_slots), dtype=torch.int32, device=self.device)
        self._host_ranks = np.zeros(self._ranks.shape, np.int32)
        self._shown = np.full(self._tables.shape, -1, np.int32)
        self._slots: dict[str, dict[int, AdapterSlots]] = {"id": {}, "slot": {}}
        for i, layer in enumerate(self.layers.tolist()):
            one = replace(empty(self.device), slot_ids=self._tables[0], ranks=self._ranks[i])
            self._slots["id"][layer] = one
            self._slots["slot"][layer] = replace(one, slot_ids=self._tables[1])
        self._resident: dict[int, int] = {}  # slot to id, oldest first
        self._ended: dict[int, torch.cuda.Event] = {}  # stream to the end of its last batch
        self._cleared: torch.cuda.Event | None = None
        self._ended_lock = threading.Lock()
        self._lock = threading.RLock()
        self._capturing = False
        self._closed = False
        self._token = GraphToken(next(_generations), pool.num_slots, rank)
        if self.device.type == "cuda":
            # The lane does not wait for the stream that filled the tables.
            torch.cuda.synchronize(self.device)

    # -- batches ----------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Of the tensors: no two mirrors of a process have the same."""
        return self._token.generation

    def adapters(self, layer: int = 0, *, by: str = "id") -> AdapterSlots:
        """A layer's slots for `fused_moe`; the same tensors every time.

        Args:
          layer: one of `layers`.
          by: what `adapter_ids` will hold: ``"id"`` global ids, ``"slot"`` slots of a lease.

        Raises:
          AdapterError: the mirror is closed.
          ValueError: it has no such layer.
        """
        self._check_open()
        if by not in self._slots:
            raise ValueError(f"by: got {by!r}, want 'id' or 'slot'")
        found = self._slots[by].get(layer)
        if found is None:
            raise ValueError(f"layer: got {layer}, this mirror has {self.layers.tolist()}")
        return found

    @contextlib.contextmanager
    def batch(
        self, adapter_ids: np.ndarray | Iterable[int], *, out: torch.Tensor | None = None
    ) -> Iterator[Batch]:
        """Run a batch: inside, launch on the stream that is current at the end.

        Args:
          adapter_ids: global ids ``[T]``, -1 = base.
          out: int32 ``[>= T]`` on the device, the buffer a graph reads; its tail becomes -1. None allocates ``[T]``.

        Raises:
          AdapterError: an id that is not loaded, or the mirror is closed or not subscribed.
          ValueError: `out` does not fit.
        """
        self._check_open()
        with self.pool.lease(adapter_ids) as lease:
            unknown = [s for s in lease.metadata.active_slots if s not in self._resident]
            if unknown:
                raise AdapterError(f"adapter_ids: slots {unknown} are not in this mirror; pool.subscribe(mirror) first")
            if self._cleared is not None:
                # Not on the host: an unload that returned may still be on its way to the tables.
                torch.cuda.current_stream(self.device).wait_event(self._cleared)
            try:
                yield Batch(lease, self._device_ids(lease.slots, out), self)
            finally:
                self._end_of_batch()

    def _device_ids(self, slots: np.ndarray, out: torch.Tensor | None) -> torch.Tensor:
        host = self._lane.host(slots)
        if out is None:
            return host.to(self.device, non_blocking=True)
        if out.dtype != torch.int32 or out.dim() != 1 or out.shape[0] < len(slots) or out.device != self._tables.device:
            raise ValueError(
                f"out: got {out.dtype} {list(out.shape)} on {out.device}, want torch.int32 of at least {len(slots)} "
                f"on {self._tables.device}"
            )
        out[: len(slots)].copy_(host, non_blocking=True)
        out[len(slots) :].fill_(-1)
        return out

    def _end_of_batch(self) -> None:
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        event = stream.record_event()
        with self._ended_lock:
            self._ended[stream.cuda_stream] = event

    def _batches(self) -> list[torch.cuda.Event]:
        with self._ended_lock:
            return list(self._ended.values())

    # -- graphs -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capture(self) -> Iterator[GraphToken]:
        """Capture a graph inside: writers wait meanwhile, since their copies could end up in it or break it.

        Slots that this thread frees inside are cleared at the end.

        Yields:
          the token to `check` before every replay.
        """
        with self._lock:
            self._check_open()
            self._capturing = True
            try:
                yield self._token
            finally:
                self._capturing = False
                self._clear()

    def check(self, token: GraphToken) -> None:
        """Raise unless a graph captured under `token` reads this mirror's tensors.

        Raises:
          TypeError: no token.
          AdapterError: the mirror is closed, or the graph was captured over another one (the pool was resized).
        """
        if not isinstance(token, GraphToken):
            raise TypeError(f"token: got {type(token).__name__}, want GraphToken")
        self._check_open()
        if token != self._token:
            raise AdapterError(
                f"graph: captured over {token.slots} slots of rank {token.rank} that this pool no longer uses (it has "
                f"{self._token.slots} of rank {self._token.rank}); capture it again"
            )

    def close(self) -> None:
        """Give the tensors up: pools of another size need another mirror. Graphs over these fail `check`.

        The table that such a graph reads stays, emptied, as long as this object does: were it replayed all the same,
        its rows would be base rows.
        """
        with self._lock, self._lane.current():
            if self._closed:
                return
            self._closed = True
            self._resident.clear()
            self._lane.wait_for(self._batches())
            self._lane.upload(self._tables, np.full(self._tables.shape, -1, np.int32))
            self._lane.finish()
            for slots in self._slots.values():
                slots.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise AdapterError("mirror: got one that is closed; the pool was resized, capture graphs again")

    # -- PoolListener -----------------------------------------------------------------------------------------------

    def on_load(self, slot: int, layers: Mapping[int, LoRAAdapter]) -> None:
        """Write the adapter to `slot` and publish it; returns when every later launch sees it.

        After a failure the pool calls `on_unload`, which puts the tables right.

        Raises:
          AdapterError: closed, a graph is being captured by this thread, or an adapter that does not fit.
        """
        with self._lock, self._lane.current():
            self._check_open()
            adapter_id = self._checked(layers)
            self._lane.wait_for(self._batches())
            self._resident.pop(slot, None)
            self._publish()
            for i, layer in enumerate(self.layers.tolist()):
                adapter = layers.get(layer)
                self._host_ranks[i, slot] = 0 if adapter is None else adapter.rank
                self._write_layer(self._slots["id"][layer], slot, adapter)
            self._lane.upload(self._ranks, self._host_ranks)
            self._lane.finish()
            # Batches that began meanwhile may look the id's old version up.
            self._lane.wait_for(self._batches())
            self._resident[slot] = adapter_id
            self._publish()
            self._lane.finish()

    def on_unload(self, slot: int) -> None:
        """Clear the slot's entries, after the batches that were launched so far; the host does not wait."""
        with self._lock:
            self._resident.pop(slot, None)
            if not self._capturing:
                self._clear()

    def _clear(self) -> None:
        """Take from the tables what is no longer resident."""
        if self._closed:
            return
        with self._lane.current():
            self._lane.wait_for(self._batches())
            self._publish()
            self._cleared = self._lane.mark()

    def _checked(self, layers: Mapping[int, LoRAAdapter]) -> int:
        """The adapter's id."""
        adapter_id = next(iter(layers.values())).adapter_id
        if self._capturing:
            raise AdapterError("capture: got a load from the thread that captures a graph")
        outside = sorted(set(layers) - set(self.layers.tolist()))
        if outside:
            raise AdapterError(f"layers: got {outside}, this mirror has {self.layers.tolist()}")
        for layer, adapter in layers.items():
            for part, shared in self._shared.items():
                experts = getattr(adapter, part).shape[0]
                if shared and experts != 1:
                    raise AdapterError(f"layer {layer}: {part}: got {experts} experts, these slots share it: want 1")
        return adapter_id

    def _publish(self) -> None:
        """Bring the tables to what is resident.

        What appears is written before what goes: an id whose version changes is always found.
        """
        wanted = np.full(self._shown.shape, -1, np.int32)
        newest = {adapter_id: slot for slot, adapter_id in self._resident.items()}
        for slot, adapter_id in self._resident.items():
            wanted[0, slot] = adapter_id if newest[adapter_id] == slot else -1
            wanted[1, slot] = slot
        both = np.where(wanted >= 0, wanted, self._shown)
        if not np.array_equal(both, wanted):
            self._lane.upload(self._tables, both)
        self._lane.upload(self._tables, wanted)
        self._shown = wanted

    def _write_layer(self, slots: AdapterSlots, slot: int, adapter: LoRAAdapter | None) -> None:
        for part, rank_axis in _PARTS:
            target = getattr(slots, part)[slot]
            if adapter is None:
                target.zero_()
                continue
            source = getattr(adapter, part)
            self._write(target, source if source.ndim == 4 else source[:, None], rank_axis)

    def _write(self, target: torch.Tensor, source: np.ndarray, rank_axis: int) -> None:
        """One stack, the experts held here, the rank padded with zeros; as many experts at a time as staging holds."""
        spread = source.shape[0] == 1
        index = np.zeros(target.shape[0], np.int64) if spread else self.experts
        step = max(1, self._staging // target[0].numel())
        rank = source.shape[rank_axis]
        for first in range(0, target.shape[0], step):
            part = target[first : first + step]
            staged = self._lane.staging(part.shape)
            cells = np.moveaxis(staged.view(torch.int16).numpy(), rank_axis, 0)
            rows = source[index[first : first + step]].astype(BF16, copy=False).view(np.int16)
            cells[:rank] = np.moveaxis(rows, rank_axis, 0)
            cells[rank:] = 0
            self._lane.send(part, staged)


def _indices(label: str, value: np.ndarray | Sequence[int] | None, limit: int) -> np.ndarray:
    """Distinct indices below `limit`, int64; None for all."""
    if value is None:
        return np.arange(limit)
    array = np.asarray(value)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(f"{label}: got {value!r}, want a vector of at least one index")
    if array.min() < 0 or array.max() >= limit or len(np.unique(array)) != len(array):
        raise ValueError(f"{label}: got {array.tolist()}, want distinct indices in [0, {limit})")
    return array.astype(np.int64)
