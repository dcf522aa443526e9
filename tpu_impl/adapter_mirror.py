# SPDX-License-Identifier: Apache-2.0
"""An `AdapterPool`'s adapters on a TPU mesh, in the kernel's layout and split over it like the experts.

Shapes and shardings never change, so neither the update of a slot nor the programs that read the slots are traced
again, whatever is loaded. An update gives the old arrays to XLA, which writes the slot in place: no second copy of
the slots exists, and programs that are already running finish on what they read before the update runs. Python must
not hold on to an array that was given away, so arrays are handed out only inside `AdapterMirror.batch` (or
`reading`), which keeps updates from being dispatched until it ends; programs need to be dispatched inside it, not
finished.

The pool writes to slots that no batch uses and names a slot only once it is written: no table is needed here. Where
the mesh spans processes, each has a pool and makes the same changes in the same order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..common.adapters import AdapterError, AdapterPool, Lease
from ..common.checks import check_int
from ..common.weights import LoRAAdapter
from .ep_moe import EPBuild, operand_shapes
from .layout import adapter_arrays, padded_rank
from .spec import LoRASpec

OPERANDS = ("a13", "lora_b13", "a2", "lora_b2")
Stacks = dict[str, jax.Array]


def lora_spec(pool: AdapterPool, *, shared_a13: bool = False, shared_b2: bool = False) -> LoRASpec:
    """The `EPBuild.lora` that fits a pool. Sharing saves memory and refuses per-expert adapters."""
    return LoRASpec(pool.num_slots, padded_rank(pool.config.max_lora_rank), shared_a13, shared_b2)


def _put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A host array on the mesh; every process brings the shards of its own devices."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _with_slot(stacks: Stacks, arrays: Stacks, slot: jax.Array) -> Stacks:
    return {name: stack.at[slot].set(arrays[name]) for name, stack in stacks.items()}


def _without_slot(stacks: Stacks, slot: jax.Array) -> Stacks:
    return {name: stack.at[slot].set(0) for name, stack in stacks.items()}


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch under a lease.

    Attributes:
      lease: keeps the batch's versions alive.
      adapter_slots: int32 ``[T]``, -1 = base; `fused_moe_ep`'s `adapter_slots`, replicated over the mesh.
      stacks: layer to adapter operands; good until the batch ends.
    """

    lease: Lease
    adapter_slots: jax.Array
    stacks: Mapping[int, Stacks]

    def operands(self, layer: int = 0) -> Stacks:
        """A layer's adapter operands: ``tensors = weights | batch.operands(layer)``."""
        return self.stacks[layer]


class AdapterMirror:
    """A `PoolListener` that keeps adapter operands of every layer in step with a pool: ``pool.subscribe(mirror)``.

    Args:
      pool: the pool; its `num_slots` and rank are those of ``build.lora`` (see `lora_spec`).
      build: the layers' program, with `lora` set; one for all layers.
      layers: layers held, where not all of the pool's.
      budget_bytes: bound on what one device holds, checked before anything is allocated; None for none.

    Raises:
      TypeError, ValueError: a bad argument.
      AdapterError: over budget.
    """

    def __init__(
        self,
        pool: AdapterPool,
        build: EPBuild,
        *,
        layers: Sequence[int] | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        if not isinstance(pool, AdapterPool):
            raise TypeError(f"pool: got {type(pool).__name__}, want AdapterPool")
        if not isinstance(build, EPBuild):
            raise TypeError(f"build: got {type(build).__name__}, want EPBuild")
        if build.lora is None:
            raise ValueError("build: got lora=None, want lora_spec(pool)")
        want = lora_spec(pool, shared_a13=build.lora.shared_a13, shared_b2=build.lora.shared_b2)
        if build.lora.slots != want.slots or build.lora.rank < want.rank:
            raise ValueError(f"build: got lora={build.lora}, want {want.slots} slots of rank at least {want.rank}")
        sizes = ("num_experts", "hidden_dim", "intermediate_size", "is_act_and_mul")
        other = [n for n in sizes if getattr(build.config, n) != getattr(pool.config, n)]
        if other:
            raise ValueError(f"build: got a config that differs from the pool's in {', '.join(other)}")
        if budget_bytes is not None:
            check_int("budget_bytes", budget_bytes, minimum=0)
        self.pool = pool
        self.build = build
        self.layers = tuple(range(pool.num_layers)) if layers is None else tuple(layers)
        outside = sorted(i for i in self.layers if not 0 <= i < pool.num_layers)
        if outside or not self.layers or len(set(self.layers)) != len(self.layers):
            raise ValueError(f"layers: got {list(self.layers)}, want distinct layers in [0, {pool.num_layers})")
        specs, shapes = build.shardings(), operand_shapes(build)
        self._shardings = {name: NamedSharding(build.mesh, specs[name]) for name in OPERANDS}
        self._slot_shardings = {
            name: NamedSharding(build.mesh, PartitionSpec(*specs[name][1:])) for name in OPERANDS
        }
        self._whole = NamedSharding(build.mesh, PartitionSpec())
        self.device_nbytes = len(self.layers) * sum(
            int(np.prod(sharding.shard_shape(shapes[name][0]))) * jnp.dtype(shapes[name][1]).itemsize
            for name, sharding in self._shardings.items()
        )
        if budget_bytes is not None and self.device_nbytes > budget_bytes:
            raise AdapterError(
                f"budget_bytes: got {budget_bytes}, {pool.num_slots} slots of rank {build.lora.rank} in "
                f"{len(self.layers)} layers need {self.device_nbytes} bytes of every device"
            )
        self._zeros = jax.jit(
            lambda: {name: jnp.zeros(*shapes[name]) for name in OPERANDS}, out_shardings=self._shardings
        )
        self._stacks: dict[int, Stacks] = {layer: self._zeros() for layer in self.layers}
        # Without explicit shardings XLA may choose others, and readers would be traced again.
        self._set = jax.jit(_with_slot, donate_argnums=0, out_shardings=self._shardings)
        self._clear = jax.jit(_without_slot, donate_argnums=0, out_shardings=self._shardings)
        self._resident: dict[int, Mapping[int, LoRAAdapter]] = {}
        self._lock = threading.RLock()

    # -- batches ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self) -> Iterator[Mapping[int, Stacks]]:
        """Layer to adapter operands (`OPERANDS`); dispatch what reads them inside, and keep none of them."""
        with self._lock:
            yield {layer: dict(stacks) for layer, stacks in self._stacks.items()}

    @contextlib.contextmanager
    def batch(self, adapter_ids: np.ndarray | Iterable[int]) -> Iterator[Batch]:
        """Run a batch: dispatch its programs inside.

        Args:
          adapter_ids: global ids ``[T]``, -1 = base.

        Raises:
          AdapterError: an id that is not loaded, or the mirror is not subscribed.
        """
        with self.pool.lease(adapter_ids) as lease, self.reading() as stacks:
            unknown = [s for s in lease.metadata.active_slots if s not in self._resident]
            if unknown:
                raise AdapterError(f"adapter_ids: slots {unknown} are not in this mirror; pool.subscribe(mirror) first")
            yield Batch(lease, _put(lease.slots, self._whole), stacks)

    # -- PoolListener -----------------------------------------------------------------------------------------------

    def on_load(self, slot: int, layers: Mapping[int, LoRAAdapter]) -> None:
        """Write the adapter to `slot` of every layer, zeros where it has none; later dispatches see it whole.

        Raises:
          AdapterError: an adapter that does not fit; nothing was written.
        """
        outside = sorted(set(layers) - set(self.layers))
        if outside:
            raise AdapterError(f"layers: got {outside}, this mirror has {list(self.layers)}")
        # One layer's slot at a time is on the devices twice; nobody is kept waiting for the transfer.
        for layer in self.layers:
            arrays = self._transfer(layer, layers[layer]) if layer in layers else None
            try:
                with self._lock:
                    self._stacks[layer] = self._updated(self._stacks[layer], slot, arrays)
                # Only writers give arrays away, so this one lives; a failure on the devices must show before the
                # slot is named.
                jax.block_until_ready(self._stacks[layer])
            except Exception:
                self._rebuild(layer)
                raise
        self._resident[slot] = layers

    def on_unload(self, slot: int) -> None:
        """Nothing to do but forget it: no batch names the slot, and it will be written whole before one does."""
        self._resident.pop(slot, None)

    def _updated(self, stacks: Stacks, slot: int, arrays: Stacks | None) -> Stacks:
        index = jnp.int32(slot)
        return self._clear(stacks, index) if arrays is None else self._set(stacks, arrays, index)

    def _rebuild(self, layer: int) -> None:
        """A layer's slots from the host masters: a failed update may have taken the old arrays with it."""
        with self._lock:
            self._stacks[layer] = {}
            stacks = self._zeros()
            for slot, layers in self._resident.items():
                if layer in layers:
                    stacks = self._updated(stacks, slot, self._transfer(layer, layers[layer]))
            self._stacks[layer] = stacks

    def _transfer(self, layer: int, adapter: LoRAAdapter) -> Stacks:
        build = self.build
        assert build.lora is not None
        try:
            arrays = adapter_arrays(
                adapter, bf=build.blocks.bf, rank=build.lora.rank, experts=build.ep * build.local_experts,
                shared_a13=build.lora.shared_a13, shared_b2=build.lora.shared_b2,
            )
        except ValueError as error:
            raise AdapterError(f"layer {layer}: {error}") from error
        put = {name: _put(arrays[name], sharding) for name, sharding in self._slot_shardings.items()}
        return jax.block_until_ready(put)
