# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the expert kernel, chosen for any layer, and the limits they must respect."""

from __future__ import annotations

from dataclasses import dataclass

from .spec import LANES, ROW_BLOCK, Blocks, KernelSpec, LoRASpec, round_up


@dataclass(frozen=True)
class Generation:
    """What bounds a kernel on one TPU generation, per core.

    Attributes:
      name: ``v5e``, ``v5p``, ``v6e`` or ``v7x``.
      vmem_limit_bytes: budget handed to the compiler.
      smem_bytes: scalar memory.
      dma_semaphores: how many a kernel may hold.
      native_e4m3: whether the matrix unit multiplies e4m3 by e4m3.
    """

    name: str
    vmem_limit_bytes: int
    smem_bytes: int
    dma_semaphores: int
    native_e4m3: bool


_MIB = 1 << 20
GENERATIONS = {
    "v5e": Generation("v5e", 120 * _MIB, _MIB, 400, False),
    "v5p": Generation("v5p", 64 * _MIB, _MIB, 400, False),
    "v6e": Generation("v6e", 120 * _MIB, _MIB, 400, False),
    "v7x": Generation("v7x", 64 * _MIB, _MIB, 400, True),
}


def generation(name: str) -> Generation:
    """The generation's limits by name."""
    if name not in GENERATIONS:
        raise ValueError(f"generation: got {name!r}, want one of {', '.join(GENERATIONS)}")
    return GENERATIONS[name]


def max_tokens(spec):
    return 1 << 30


def choose_blocks(*a, **k):
    raise NotImplementedError


def interpreter_blocks(*, inter: int, rows: int, max_loras: int = 0, bf: int | None = None) -> Blocks:
    """Tile sizes for interpreted runs: few steps, and one f tile, so that hidden scales are per token.

    Args:
      inter: intermediate size.
      rows: (token, k) pairs of the call.
      max_loras: adapters of the call.
      bf: tile width that the recipe asks for.
    """
    panel = ROW_BLOCK if rows <= ROW_BLOCK else 2 * ROW_BLOCK
    return Blocks(
        bf=bf or round_up(inter, LANES), rows=panel, rungs=tuple(sorted({ROW_BLOCK, panel})), nbuf=2, xbuf=2,
        stage=ROW_BLOCK, pairs=max_loras,
    )
