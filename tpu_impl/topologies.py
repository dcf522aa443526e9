# SPDX-License-Identifier: Apache-2.0
"""libtpu's names of the slices that programs are compiled for."""

from __future__ import annotations

import math

from .generations import Generation, generation

_GENERATION_OF = {"v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7x": "v7x", "v7x": "v7x"}

TOPOLOGIES = {
    "v7x": ("tpu7x:2x2x1", "tpu7x:2x2x2", "tpu7x:2x2x4", "tpu7x:2x4x4"),
    "v6e": ("v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:8x8"),
    "v5e": ("v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8"),
    "v5p": ("v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4"),
}
"""Targets by generation, the smallest first."""


def topology_for(generation_name: str, ep: int) -> str:
    """The smallest topology whose devices `ep` divides.

    Raises:
      ValueError: none.
    """
    devices = {}
    for topology in TOPOLOGIES[generation(generation_name).name]:
        gen, grid = split_topology(topology)
        devices[topology] = gen.cores_per_chip * math.prod(grid)
        if ep > 0 and devices[topology] % ep == 0:
            return topology
    sizes = ", ".join(str(n) for n in devices.values())
    raise ValueError(f"ep: got {ep}, want a divisor of a {generation_name} slice's devices ({sizes})")


def largest_slice(generation_name: str) -> int:
    """Devices of the largest slice named here."""
    gen, grid = split_topology(TOPOLOGIES[generation(generation_name).name][-1])
    return gen.cores_per_chip * math.prod(grid)


def split_topology(topology: str) -> tuple[Generation, tuple[int, ...]]:
    """``"tpu7x:2x2x1"`` to the generation and the chip grid.

    Raises:
      ValueError: not a topology name, or a generation without limits.
    """
    name, _, grid = topology.partition(":")
    dims = grid.split("x")
    if name not in _GENERATION_OF or not all(d.isdigit() and int(d) > 0 for d in dims):
        raise ValueError(
            f"topology: got {topology!r}, want one of {', '.join(_GENERATION_OF)} and a chip grid, "
            "for example 'v6e:2x4' or 'tpu7x:2x2x1'"
        )
    return generation(_GENERATION_OF[name]), tuple(int(d) for d in dims)
