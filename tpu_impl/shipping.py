# SPDX-License-Identifier: Apache-2.0
"""Rows on their way to the device that owns them: what the kernels that push have in common.

A send buffer has two halves, used in turn; a half is drained before it is written again. Rows leave in contiguous
runs, by a local copy where the owner is this device and by a remote one elsewhere. Waits count bytes: of a half's
local copies, of its remote ones, and of everything that arrives here.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .spec import Buffer

DTYPES = {
    "float8_e4m3fn": jnp.float8_e4m3fn,
    "bfloat16": jnp.bfloat16,
    "float32": jnp.float32,
    "uint32": jnp.uint32,
    "int32": jnp.int32,
}


def allocate(buffer: Buffer) -> Any:
    """The scratch shape of a declared buffer."""
    if buffer.space == "dma":
        return pltpu.SemaphoreType.DMA(buffer.shape)
    space = pltpu.VMEM if buffer.space == "vmem" else pltpu.SMEM
    return space(buffer.shape, DTYPES[buffer.dtype])


class Shipping:
    """Sends of one kernel.

    Reads the references ``lens`` (SMEM int32 ``[4]``: rows each half has under way, local and remote), ``out_sem``
    ``(2,)`` and, where there are other devices, ``send_sem`` ``(2,)`` and ``recv_sem`` ``(1,)``.

    Args:
      refs: the kernel's references by name.
      axis: mesh axis of the devices, `ep` of them.
      pairs: names of send buffers ``[2, rows, ...]`` and of the results their rows go to.
    """

    def __init__(
        self, refs: dict[str, Any], axis: str | tuple[str, ...], ep: int, pairs: list[tuple[str, str]]
    ) -> None:
        self.r, self.axis, self.ep, self.pairs = refs, axis, ep, pairs
        self.remote = "send_sem" in refs

    def enter(self) -> None:
        """Nothing is under way; and every device has entered, so every arrival buffer exists."""
        for i in range(4):
            self.r["lens"][i] = 0
        if not self.remote:
            return
        sem = pltpu.get_barrier_semaphore()

        def signal(d: jax.Array, _: None) -> None:
            pl.semaphore_signal(sem, 1, device_id={self.axis: d}, device_id_type=pl.DeviceIdType.MESH)

        lax.fori_loop(0, self.ep, signal, None)
        pl.semaphore_wait(sem, self.ep)

    def drain(self, q: jax.Array) -> None:
        """Wait until the last use of half `q` has left."""
        r = self.r

        def wait(sem: str, count: jax.Array) -> None:
            for buffer, _ in self.pairs:
                rows = r[buffer].at[q, pl.ds(0, count)]
                pltpu.make_async_copy(rows, rows, r[sem].at[q]).wait()

        for i, sem in enumerate(("out_sem", "send_sem") if self.remote else ("out_sem",)):
            count = r["lens"][2 * q + i]
            pl.when(count > 0)(functools.partial(wait, sem, count))

    def keep(self, q: jax.Array, row: jax.Array, length: jax.Array, dest: jax.Array) -> None:
        """Start a run of `length` rows of half `q` from `row` on, if any, to row `dest` of this device's results."""

        @pl.when(length > 0)
        def _() -> None:
            for source, target in self._ends(q, row, length, dest):
                pltpu.make_async_copy(source, target, self.r["out_sem"].at[q]).start()

    def send(self, q: jax.Array, row: jax.Array, length: jax.Array, owner: jax.Array, dest: jax.Array) -> None:
        """The same to another device's results.

        Give `note` how many rows a half's runs keep and send.
        """

        @pl.when(length > 0)
        def _() -> None:
            for source, target in self._ends(q, row, length, dest):
                pltpu.make_async_remote_copy(
                    source, target, self.r["send_sem"].at[q], self.r["recv_sem"].at[0],
                    device_id={self.axis: owner}, device_id_type=pl.DeviceIdType.MESH,
                ).start()

    def _ends(self, q: jax.Array, row: jax.Array, length: jax.Array, dest: jax.Array) -> list[tuple[Any, Any]]:
        r = self.r
        return [
            (r[buffer].at[q, pl.ds(row, length)], r[result].at[pl.ds(dest, length)]) for buffer, result in self.pairs
        ]

    def note(self, q: jax.Array, kept: jax.Array, sent: jax.Array | int) -> None:
        """Rows that half `q` has under way now."""
        self.r["lens"][2 * q] = kept
        self.r["lens"][2 * q + 1] = sent

    def leave(self, arriving: jax.Array, parts: tuple[str, str] | None = None) -> None:
        """Wait for what is still leaving, and for `arriving` rows from other devices.

        `parts` names two buffers ``[ep, ...]``: part d of the first goes to device d, into the part of the second that
        belongs to the device it comes from.
        """
        if parts is not None:
            self._start_exchange(*parts)
        for q in range(2):
            self.drain(jnp.int32(q))
        if self.remote:

            @pl.when(arriving > 0)
            def _() -> None:
                for _buffer, result in self.pairs:
                    rows = self.r[result].at[pl.ds(0, arriving)]
                    pltpu.make_async_copy(rows, rows, self.r["recv_sem"].at[0]).wait()

        if parts is not None:
            self._wait_exchange(*parts)

    def _kept_part(self, buffer: str, got: str) -> Any:
        r, rank = self.r, self.r["rank"][0]
        return pltpu.make_async_copy(r[buffer].at[rank], r[got].at[rank], r["out_sem"].at[0])

    def _start_exchange(self, buffer: str, got: str) -> None:
        """Send each device its part of `buffer`."""
        r, rank = self.r, self.r["rank"][0]
        self._kept_part(buffer, got).start()

        def send(d: jax.Array, _: None) -> None:
            copy = pltpu.make_async_remote_copy(
                r[buffer].at[d], r[got].at[rank], r["send_sem"].at[0], r["recv_sem"].at[0],
                device_id={self.axis: d}, device_id_type=pl.DeviceIdType.MESH,
            )
            pl.when(d != rank)(copy.start)

        if self.remote:
            lax.fori_loop(0, self.ep, send, None)

    def _wait_exchange(self, buffer: str, got: str) -> None:
        """Wait for all parts that leave and come."""
        if self.remote:
            for name, sem in ((buffer, "send_sem"), (got, "recv_sem")):
                others = self.r[name].at[pl.ds(0, self.ep - 1)]
                pltpu.make_async_copy(others, others, self.r[sem].at[0]).wait()
        self._kept_part(buffer, got).wait()
