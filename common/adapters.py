# SPDX-License-Identifier: Apache-2.0
"""The adapter pool: fixed slots for many adapters, changed while requests run.

The pool keeps the books and a host master of every adapter; device copies follow as listeners. Its rules:

- Callers speak of adapters by global id. Slot numbers are the pool's own and may differ from rank to rank.
- An adapter is written to a slot that nothing can see (a free one; `spare_slots` keeps some beyond `max_loras` so
  that a full pool can still replace). Only when every listener has taken it is the id published, in one step.
- A batch holds a lease on the slots it uses. `unload` and `replace` take the id away at once, so new batches no longer
  find the old version, and the slot is reclaimed when the last lease on it ends.
- Whatever fails raises `AdapterError` and leaves the pool serving what it served before.
- `generation` counts published changes; per-batch metadata is cached under (ids, generation).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from .adapter_files import load_lora_adapter
from .checks import check_int
from .config import FusedMoEConfig
from .numerics import BF16
from .safe_files import clean
from .weights import LoRAAdapter

logger = logging.getLogger(__name__)

Layers = Mapping[int, LoRAAdapter]
_CACHED_BATCHES = 64
_ARRAYS = ("a13", "b13", "a2", "b2")


class AdapterError(ValueError):
    """Anything that fails with an adapter; the message names it. The pool's state is what it was before."""


class PoolListener(Protocol):
    """A device mirror. Both methods may be called from any thread, never two at once."""

    def on_load(self, slot: int, layers: Layers) -> None:
        """Write the adapter into `slot`, which no batch uses, and return once later batches will see it whole.

        Layers that are not in `layers` must be made zero. An exception cancels the load.
        """

    def on_unload(self, slot: int) -> None:
        """`slot` is no longer used by anything; its contents no longer matter."""


@dataclass(frozen=True, eq=False)
class BatchMetadata:
    """What kernels need of a batch's adapters.

    Attributes:
      slots: int32 ``[T]``, -1 = base.
      active_slots: the distinct slots in use, ascending.
      tokens_per_slot: int32, as many as `active_slots`.
      generation: of the pool when this was made.
    """

    slots: np.ndarray
    active_slots: tuple[int, ...]
    tokens_per_slot: np.ndarray
    generation: int

    @property
    def uses_adapters(self) -> bool:
        return bool(self.active_slots)


@dataclass
class _Slot:
    """One slot's state. `adapter_id` is None while it is free or retiring."""

    adapter_id: int | None = None
    layers: dict[int, LoRAAdapter] = field(default_factory=dict)
    leases: int = 0
    retiring: bool = False
    staged: bool = False

    @property
    def free(self) -> bool:
        return not self.layers and not self.staged

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.layers.values())


class Lease:
    """The slots of one batch, held until `release`. Use as a context manager around the batch."""

    def __init__(self, pool: AdapterPool, metadata: BatchMetadata) -> None:
        self._pool: AdapterPool | None = pool
        self.metadata = metadata

    @property
    def slots(self) -> np.ndarray:
        """int32 ``[T]``, -1 = base."""
        return self.metadata.slots

    def adapters(self, layer: int = 0) -> tuple[LoRAAdapter, ...]:
        """One layer's host masters of the adapters this batch uses, as they were when it began."""
        if self._pool is None:
            raise AdapterError("lease: got one that has ended")
        return self._pool._masters(self.metadata.active_slots, layer)

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._release(self.metadata.active_slots)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def _describe(adapter_id: object, name: str | None = None) -> str:
    return f"adapter {clean(adapter_id)}" + (f" ({clean(name)})" if name else "")


def _round(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.array(value, dtype, order="C")


def _same(held: Layers, new: Layers) -> bool:
    """Whether `new`, rounded as `held` was, has the same bits."""
    return held.keys() == new.keys() and all(
        a.shape == b.shape and np.array_equal(a.view(np.uint8), _round(b, a.dtype).view(np.uint8))
        for i in held for a, b in ((getattr(held[i], k), getattr(new[i], k)) for k in _ARRAYS)
    )


class AdapterPool:
    """Slots for adapters of one model.

    Args:
      config: the MoE layer, with `max_loras` and `max_lora_rank` set.
      num_layers: MoE layers are numbered 0 to num_layers - 1 here (or as the model numbers its decoder layers).
      budget_bytes: bound on the host masters, retiring ones included; None for none.
      dtype: of the masters; bfloat16 or float32. Adapters are rounded to it once, when they are loaded.
      spare_slots: slots beyond `max_loras` for versions that are being written or retired.

    Raises:
      TypeError, ValueError: a bad argument.
    """

    def __init__(
        self,
        config: FusedMoEConfig,
        *,
        num_layers: int = 1,
        budget_bytes: int | None = None,
        dtype: Any = BF16,
        spare_slots: int = 1,
    ) -> None:
        if not isinstance(config, FusedMoEConfig):
            raise TypeError(f"config: got {type(config).__name__}, want FusedMoEConfig")
        check_int("config.max_loras", config.max_loras, minimum=1)
        check_int("config.max_lora_rank", config.max_lora_rank, minimum=1)
        check_int("num_layers", num_layers, minimum=1)
        check_int("spare_slots", spare_slots, minimum=0)
        if budget_bytes is not None:
            check_int("budget_bytes", budget_bytes, minimum=0)
        if np.dtype(dtype) not in (BF16, np.dtype(np.float32)):
            raise ValueError(f"dtype: got {np.dtype(dtype)}, want bfloat16 or float32")
        self.config = config
        self.num_layers = num_layers
        self.budget_bytes = budget_bytes
        self.dtype = np.dtype(dtype)
        self._slots = [_Slot() for _ in range(config.max_loras + spare_slots)]
        self._slot_of: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._listeners: list[PoolListener] = []
        self._generation = 0
        self._batches: OrderedDict[tuple[bytes, int], BatchMetadata] = OrderedDict()
        # Writers take turns and may be slow (device copies); the table itself is only ever held briefly.
        self._writing = threading.RLock()
        self._table = threading.Condition(threading.Lock())

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Grows by one with every published change."""
        return self._generation

    @property
    def num_slots(self) -> int:
        """Slots a device mirror has to hold: `max_loras` and the spare ones."""
        return len(self._slots)

    @property
    def slot_nbytes(self) -> int:
        """Bytes that one slot of full rank, per expert, takes on a device for all layers."""
        c = self.config
        cells = c.num_experts * c.max_lora_rank * (
            (c.w13_rows // c.intermediate_size) * c.hidden_dim + c.w13_rows + c.intermediate_size + c.hidden_dim
        )
        return cells * self.dtype.itemsize * self.num_layers

    @property
    def used_bytes(self) -> int:
        """Bytes of the host masters, retiring ones included."""
        with self._table:
            return sum(s.nbytes for s in self._slots)

    @property
    def adapter_ids(self) -> tuple[int, ...]:
        """Ids that batches may use, ascending."""
        with self._table:
            return tuple(sorted(self._slot_of))

    def __contains__(self, adapter_id: object) -> bool:
        return adapter_id in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def adapters(self, layer: int = 0) -> tuple[LoRAAdapter, ...]:
        """One layer's adapters in ascending order of id, as `run_moe` takes them."""
        with self._table:
            slots = tuple(self._slot_of[i] for i in sorted(self._slot_of))
            return tuple(self._slots[s].layers[layer] for s in slots if layer in self._slots[s].layers)

    def _masters(self, slots: tuple[int, ...], layer: int) -> tuple[LoRAAdapter, ...]:
        with self._table:
            return tuple(self._slots[s].layers[layer] for s in slots if layer in self._slots[s].layers)

    def _metadata(self, adapter_ids: np.ndarray) -> BatchMetadata:
        """Slots of a batch; the table must be held."""
        key = (adapter_ids.tobytes(), self._generation)
        found = self._batches.get(key)
        if found is not None:
            self._batches.move_to_end(key)
            return found
        distinct, inverse, counts = np.unique(adapter_ids, return_inverse=True, return_counts=True)
        unknown = [int(i) for i in distinct if i >= 0 and int(i) not in self._slot_of]
        if unknown:
            raise AdapterError(f"adapter_ids: got unknown {unknown}, want -1 or one of {sorted(self._slot_of)}")
        table = np.array([self._slot_of[int(i)] if i >= 0 else -1 for i in distinct], np.int32)
        slots = table[inverse.reshape(-1)] if len(table) else np.zeros(0, np.int32)
        slots.flags.writeable = False
        used = sorted((int(s), int(n)) for s, n in zip(table, counts, strict=True) if s >= 0)
        found = BatchMetadata(
            slots, tuple(s for s, _ in used), np.array([n for _, n in used], np.int32), self._generation
        )
        self._batches[key] = found
        if len(self._batches) > _CACHED_BATCHES:
            self._batches.popitem(last=False)
        return found

    @staticmethod
    def _ids(adapter_ids: np.ndarray | Iterable[int]) -> np.ndarray:
        ids = np.asarray(adapter_ids if isinstance(adapter_ids, np.ndarray) else list(adapter_ids))
        if ids.size == 0:
            ids = ids.astype(np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise AdapterError(f"adapter_ids: got {ids.dtype} {list(ids.shape)}, want integers of shape [T]")
        # Every negative id is the base model; one spelling keeps the cache small.
        return np.maximum(ids.astype(np.int64), -1)

    def batch_metadata(self, adapter_ids: np.ndarray | Iterable[int]) -> BatchMetadata:
        """Metadata of a batch, cached. Safe to use only under a lease on the same ids.

        Raises:
          AdapterError: an id that is not loaded, or no integer vector.
        """
        ids = self._ids(adapter_ids)
        with self._table:
            return self._metadata(ids)

    def slots_for(self, adapter_ids: np.ndarray | Iterable[int]) -> np.ndarray:
        """int32 ``[T]`` slots of global ids, -1 for the base model; see `batch_metadata`."""
        return self.batch_metadata(adapter_ids).slots

    def lease(self, adapter_ids: np.ndarray | Iterable[int]) -> Lease:
        """Resolve a batch's ids and keep their slots alive until the lease ends.

        Raises:
          AdapterError: an id that is not loaded; nothing is held then.
        """
        ids = self._ids(adapter_ids)
        with self._table:
            metadata = self._metadata(ids)
            for slot in metadata.active_slots:
                self._slots[slot].leases += 1
        return Lease(self, metadata)

    def _release(self, slots: tuple[int, ...]) -> None:
        with self._table:
            for slot in slots:
                self._slots[slot].leases -= 1
            ended = any(self._slots[s].retiring and not self._slots[s].leases for s in slots)
            if ended:
                self._table.notify_all()
        # A batch must not wait for a writer's device copies: whoever writes sweeps up before and after.
        if ended and self._writing.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._writing.release()

    # -- writing ----------------------------------------------------------------------------------------------------

    def subscribe(self, listener: PoolListener) -> None:
        """Add a device mirror; it is handed every resident adapter first.

        Raises:
          AdapterError: the mirror failed; it is not subscribed.
        """
        with self._writing:
            with self._table:
                resident = [(i, s) for i, s in enumerate(self._slots) if s.adapter_id is not None]
            for told, (slot, state) in enumerate(resident):
                try:
                    self._announce([listener], slot, state.layers, _describe(state.adapter_id))
                except AdapterError:
                    for earlier, _ in resident[:told]:
                        self._withdraw([listener], earlier)
                    raise
            self._listeners.append(listener)

    def load(self, adapter: LoRAAdapter | Layers, *, name: str | None = None) -> int:
        """Make an adapter available.

        Args:
          adapter: one layer's `LoRAAdapter` (layer 0), or layer index to `LoRAAdapter`; layers left out stay base.
          name: for messages.

        Returns:
          The adapter's global id. Loading the same bits under the same id again does nothing.

        Raises:
          AdapterError: another adapter has the id (use `replace`), no slot, over budget, of another model, above the
            pool's rank, or refused by a listener.
        """
        with self._writing:
            adapter_id, layers = self._checked(adapter, name)
            who = _describe(adapter_id, name)
            current = self._slot_of.get(adapter_id)
            if current is not None:
                if _same(self._slots[current].layers, layers):
                    return adapter_id
                raise AdapterError(f"{who}: the id is loaded with other contents; use replace()")
            if len(self._slot_of) >= self.config.max_loras:
                limit = self.config.max_loras
                raise AdapterError(f"{who}: all max_loras={limit} adapters are loaded; unload one first")
            self._install(adapter_id, layers, who, None)
            if name:
                self._names[adapter_id] = name
            return adapter_id

    def replace(self, adapter: LoRAAdapter | Layers, *, name: str | None = None) -> int:
        """Publish a new version of a loaded adapter; running batches finish on the old one.

        Raises:
          AdapterError: the id is not loaded, or as for `load`; the old version then serves on.
        """
        with self._writing:
            adapter_id, layers = self._checked(adapter, name)
            who = _describe(adapter_id, name)
            old = self._slot_of.get(adapter_id)
            if old is None:
                raise AdapterError(f"{who}: not loaded; use load()")
            self._install(adapter_id, layers, who, old)
            if name:
                self._names[adapter_id] = name
            return adapter_id

    def unload(self, adapter_id: int, *, timeout: float | None = None) -> None:
        """Take an adapter away: unknown to new batches at once, its slot reclaimed when the last lease ends.

        Args:
          adapter_id: a loaded id.
          timeout: also wait this many seconds for the slot; None does not wait.

        Raises:
          AdapterError: the id is not loaded; or leases outlast the timeout (the id is gone all the same).
        """
        with self._writing:
            with self._table:
                if adapter_id not in self._slot_of:
                    raise AdapterError(f"{_describe(adapter_id)}: not loaded; loaded ids are {sorted(self._slot_of)}")
                state = self._retire(self._slot_of.pop(adapter_id))
            name = self._names.pop(adapter_id, None)
            self._sweep()
        if timeout is None:
            return
        with self._table:
            ended = self._table.wait_for(lambda: state.leases == 0, timeout)
        if not ended:
            raise AdapterError(
                f"{_describe(adapter_id, name)}: unloaded, but batches still hold its slot after {timeout} s"
            )
        with self._writing:
            self._sweep()

    def load_file(self, adapter_dir: str | Path, adapter_id: int, *, name: str | None = None, **overrides: Any) -> int:
        """Read an adapter with `load_lora_adapter` and load it.

        Raises:
          AdapterError: whatever the reading or the loading finds wrong.
        """
        who = _describe(adapter_id, name)
        options: dict[str, Any] = {"budget_bytes": self._left(), **overrides}
        try:
            layers = load_lora_adapter(adapter_dir, self.config, adapter_id=adapter_id, **options)
        except (TypeError, ValueError, OSError, MemoryError) as error:
            raise AdapterError(f"{who}: {str(error) or type(error).__name__}") from error
        return self.load(layers, name=name)

    def _left(self) -> int | None:
        if self.budget_bytes is None:
            return None
        # Files may be float32 where the masters are bfloat16.
        return (self.budget_bytes - self.used_bytes) * 4 // self.dtype.itemsize

    def _checked(self, adapter: LoRAAdapter | Layers, name: str | None) -> tuple[int, dict[int, LoRAAdapter]]:
        layers = {0: adapter} if isinstance(adapter, LoRAAdapter) else adapter
        if not isinstance(layers, Mapping) or not all(isinstance(a, LoRAAdapter) for a in layers.values()):
            kind = type(adapter).__name__
            raise AdapterError(f"{_describe('?', name)}: got {kind}, want LoRAAdapter or layers of it")
        if not layers:
            raise AdapterError(f"{_describe('?', name)}: got no layer")
        ids = sorted({a.adapter_id for a in layers.values()})
        who = _describe(ids[0], name)
        if len(ids) > 1:
            raise AdapterError(f"{who}: got layers with ids {ids}, want one id")
        # A key of another type is no layer of any model; sorted as text, for types may differ.
        outside = sorted((i for i in layers if i not in range(self.num_layers)), key=str)
        if outside:
            raise AdapterError(f"{who}: made for another model: got layers {outside}, the pool has {self.num_layers}")
        for index, one in layers.items():
            try:
                one.check_matches(self.config)
            except ValueError as error:
                raise AdapterError(f"{who}: layer {index}: {error}") from error
        return ids[0], dict(layers)

    def _converted(self, adapter: LoRAAdapter) -> LoRAAdapter:
        """A private, read-only copy in the pool's dtype."""
        arrays: dict[str, Any] = {key: _round(getattr(adapter, key), self.dtype) for key in _ARRAYS}
        for value in arrays.values():
            value.flags.writeable = False
        return replace(adapter, **arrays)

    def _install(self, adapter_id: int, layers: dict[int, LoRAAdapter], who: str, old: int | None) -> None:
        """Write `layers` to a free slot and publish it under the id in place of slot `old`."""
        self._sweep()
        need = sum(getattr(a, k).size for a in layers.values() for k in _ARRAYS) * self.dtype.itemsize
        with self._table:
            used = sum(s.nbytes for s in self._slots)
            if self.budget_bytes is not None and used + need > self.budget_bytes:
                raise AdapterError(f"{who}: needs {need} bytes, of budget_bytes={self.budget_bytes} {used} are taken")
            slot = next((i for i, s in enumerate(self._slots) if s.free), None)
            if slot is None:
                held = sum(s.leases for s in self._slots if s.retiring)
                raise AdapterError(f"{who}: all {len(self._slots)} slots are taken, {held} leases hold retiring ones")
            self._slots[slot].staged = True
        try:
            masters = {i: self._converted(a) for i, a in layers.items()}
            self._announce(self._listeners, slot, masters, who)
        except BaseException as error:
            with self._table:
                self._slots[slot] = _Slot()
            if isinstance(error, Exception) and not isinstance(error, AdapterError):
                raise AdapterError(f"{who}: {type(error).__name__}: {error}") from error
            raise
        with self._table:
            self._slots[slot] = _Slot(adapter_id, masters)
            self._slot_of[adapter_id] = slot
            if old is None:
                self._published()
            else:
                self._retire(old)
        self._sweep()

    def _published(self) -> None:
        self._generation += 1
        self._batches.clear()

    def _retire(self, slot: int) -> _Slot:
        """Hide a slot from new batches; the table must be held."""
        state = self._slots[slot]
        state.adapter_id, state.retiring = None, True
        self._published()
        return state

    def _announce(self, listeners: Iterable[PoolListener], slot: int, layers: Layers, who: str) -> None:
        """Hand a staged slot to the mirrors; all take it or none keeps it."""
        told: list[PoolListener] = []
        for listener in listeners:
            told.append(listener)
            try:
                listener.on_load(slot, layers)
            except Exception as error:
                self._withdraw(told, slot)
                raise AdapterError(f"{who}: {type(listener).__name__} failed: {clean(error)}") from error

    def _withdraw(self, listeners: Iterable[PoolListener], slot: int) -> None:
        for listener in listeners:
            try:
                listener.on_unload(slot)
            except Exception:
                # The slot will be written whole before it is used again, so a mirror that cannot clear it does no harm.
                logger.exception("isomoe: %s.on_unload(%d) failed", type(listener).__name__, slot)

    def _sweep(self) -> None:
        """Free retired slots that nobody holds; the writer's lock must be held."""
        with self._table:
            ended = [i for i, s in enumerate(self._slots) if s.retiring and not s.leases]
        for slot in ended:
            self._withdraw(self._listeners, slot)
            with self._table:
                self._slots[slot] = _Slot()
