# SPDX-License-Identifier: Apache-2.0
"""What bounds a kernel on each TPU generation, per core: data, never asked of a device.

Sources: peak rates, HBM bandwidth and on-chip sizes as in jax's `tpu_info` and Google's TPU documentation; links one
way, per chip and link. Budgets are what libtpu accepted ahead of time (vmem limits: 64 MiB where that is all there
is, 120 of 128 MiB elsewhere; fewer than 512 DMA semaphores on v5e and v6e).
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True)
class Generation:
    """One generation's limits and rates.

    Attributes:
      name: ``v5e``, ``v5p``, ``v6e`` or ``v7x``.
      vmem_limit_bytes: on-chip budget handed to the compiler.
      smem_bytes: scalar memory.
      dma_semaphores: how many a kernel may hold.
      native_e4m3: whether the matrix unit multiplies e4m3 by e4m3 at its own rate.
      clocks_ghz: bundles a nanosecond, the reference first, then what else is plausible. v7x: not published; its bf16
        peak gives 1.1 (conservative), schedules of kernels with published times 1.2 and more.
      unmodelled_mxu: libtpu's schedules do not hold the matrix unit to its rate, so its peak is a bound of its own.
      hbm_gbps: gigabytes a second.
      bf16_tflops, fp8_tflops: dense peaks; fp8 is the bf16 rate where e4m3 is converted first.
      link_gbps: gigabytes a second one way over one inter-chip link.
      cores_per_chip: jax devices a chip.
    """

    name: str
    vmem_limit_bytes: int
    smem_bytes: int
    dma_semaphores: int
    native_e4m3: bool
    clocks_ghz: tuple[float, ...]
    hbm_gbps: float
    bf16_tflops: float
    fp8_tflops: float
    link_gbps: float
    cores_per_chip: int
    unmodelled_mxu: bool = False

    @property
    def clock_ghz(self) -> float:
        """The reference clock."""
        return self.clocks_ghz[0]

    @property
    def default_recipe(self) -> str:
        """FP8 recipe that costs least: quantising activations pays only where e4m3 is native."""
        return "w8a8" if self.native_e4m3 else "w8a16"


GENERATIONS = {
    g.name: g
    for g in (
        Generation("v5e", 120 * _MIB, _MIB, 400, False, (1.5,), 820.0, 197.0, 197.0, 45.0, 1),
        Generation("v5p", 64 * _MIB, _MIB, 400, False, (1.75,), 2765.0, 459.0, 459.0, 90.0, 1),
        Generation("v6e", 120 * _MIB, _MIB, 400, False, (1.75,), 1640.0, 920.0, 920.0, 90.0, 1),
        Generation("v7x", 64 * _MIB, _MIB, 400, True, (1.2, 1.1, 1.3), 3690.0, 1153.0, 2307.0, 100.0, 2, True),
    )
}


def generation(name: str) -> Generation:
    """A generation by name.

    Raises:
      ValueError: one this kernel has no limits for.
    """
    if name not in GENERATIONS:
        raise ValueError(f"generation: got {name!r}, want one of {', '.join(GENERATIONS)}")
    return GENERATIONS[name]
