# SPDX-License-Identifier: Apache-2.0
"""How long one MoE layer takes on a TPU: arithmetic on a compiled schedule, and the floor no schedule gets under.

Nothing here is measured. A layer's time is

    dispatch + max(HBM, compute, pushed results) + results that are not pushed + fixed - beside

* dispatch and results: `links`, with `HOP_US` for each hop of an all-gather.
* HBM: every visited expert's weights once a panel (and its adapters), rows in and out.
* compute: the kernel's loops (`llo`) at the heights the visits of a batch run. Routing is uniform, so an expert's
  rows are binomial: the time is the mean over that distribution, not the time of a mean expert, and an expert takes
  the longer of its compute and its HBM time, because the weight ring runs only two or three tiles ahead.
* v7x: libtpu's schedules there do not hold back the matrix unit, so a tile takes max(bundles / clock, MACs / peak).
* fixed: what XLA runs around the kernel (`xla_ops`), a device's part of the routing table (`table_us`), quantised rows
  (`pack_us`), scales of pushed codes (`scales_us`), the final sum (`combine_cost`), `LAUNCH_US` for each of these
  operations, the latency of metadata gather, entry barrier and last arrivals.
* beside: the gather of the rows is asynchronous, so the operations that the compiled program runs before it waits for
  it (most of the plan) cost only what they take longer.

Out of the model: stalls inside a schedule, congestion, imbalance between devices, instruction fetch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..common.config import FusedMoEConfig
from .combine_cost import combine_us
from .generations import Generation
from .links import Fabric, Traffic, dispatch_us, share_reached, total_us, transport_us
from .spec import LANES, ROW_BLOCK, RUN_BLOCK, SUBLANES, KernelSpec
from .xla_ops import Glue

HOP_US = 1.0
"""Latency of one hop between chips; "about 1 us" in Google's JAX scaling book."""
LAUNCH_US = 0.5
LAUNCH_MOST_US = 1.35
"""Start of one XLA operation, and the most it can be. A published 94.0 us layer (tpu-inference's GMM path, 64 tokens,
the 30B shape, v7x) compiles to 35 operations that work on arrays and 20.6 thousand cycles of XLA; with its weights at
83 % of HBM bandwidth that leaves 1.35 us an operation, if nothing else stalls. The compiler's own allowance (2298
cycles) would exceed the published time alone."""
BYTES_KEPT = 1e-9
"""Tail of the row distribution that is left out."""


@dataclass(frozen=True)
class VisitCost:
    """Bundles of one visit, by what they depend on.

    Attributes:
      visit: once.
      gather, stage: a block of 32 rows; where rows are staged in the tile, it includes that.
      ship: a chunk of `Blocks.stage` rows.
      finish: each `KernelSpec.finish_rows` of its rows.
      run: a further `RUN_BLOCK` owners that a chunk's rows may go to.
      pair: a run of adapters in neighbouring slots.
      tile: one f tile at each height of `Blocks.rungs`.
      shrink: the adapters' first dots at each height; empty without adapters, and where the only tile includes them.
    """

    visit: int
    gather: int
    stage: int
    ship: int
    finish: int
    run: int
    pair: int
    tile: tuple[int, ...]
    shrink: tuple[int, ...] = ()

    def rung(self, spec: KernelSpec, rows: int) -> int:
        return next(i for i, height in enumerate(spec.blocks.rungs) if height >= rows)


@dataclass(frozen=True)
class ModelTime:
    """Terms of one layer's time on one device, microseconds, and the clock they hold for.

    `beside`: of `dispatch`, what runs beside the plan; counted once in `total`.
    """

    clock_ghz: float
    hbm: float
    mxu: float
    compute: float
    kernel: float
    dispatch: float
    transport: float
    plan: float
    launches: float
    latency: float
    beside: float
    total: float

    @property
    def fixed(self) -> float:
        return self.plan + self.launches + self.latency


def matrix_elements(spec: KernelSpec) -> int:
    """Weights of one expert."""
    return (spec.halves + 1) * spec.hidden * spec.inter


def pair_bytes(spec: KernelSpec) -> int:
    """Bytes of one (expert, adapter) pair: A and B of gate, up and down, bf16."""
    return 2 * spec.lora.rank * (spec.halves + 1) * (spec.hidden + spec.inter) if spec.lora else 0


def row_distribution(num_tokens: int, top_k: int, experts: int) -> list[tuple[int, float]]:
    """(rows, chance) of one expert with uniform routing: binomial, its negligible tails cut off."""
    p = top_k / experts
    if p >= 1:
        return [(num_tokens, 1.0)]
    logs = math.lgamma(num_tokens + 1)
    found = []
    for n in range(num_tokens + 1):
        log = logs - math.lgamma(n + 1) - math.lgamma(num_tokens - n + 1) + n * math.log(p)
        chance = math.exp(log + (num_tokens - n) * math.log1p(-p))
        if chance > BYTES_KEPT:
            found.append((n, chance))
    return found


def present_pairs(spec: KernelSpec, rows: float) -> float:
    """Adapters among `rows` rows whose tokens each use one of ``spec.lora.slots``, uniformly."""
    if spec.lora is None:
        return 0.0
    return spec.lora.slots * (1 - (1 - 1 / spec.lora.slots) ** rows)


def present_runs(spec: KernelSpec, rows: float) -> float:
    """Runs of neighbouring slots among a visit's adapters, as `present_pairs`: slots that are there, the one before
    them not."""
    if spec.lora is None:
        return 0.0
    slots = spec.lora.slots
    absent, both = (1 - 1 / slots) ** rows, (1 - min(2, slots) / slots) ** rows
    return 1 - absent + (min(spec.blocks.pairs, slots) - 1) * (absent - both)


def row_bytes(spec: KernelSpec) -> float:
    """HBM bytes of a routed row in and out."""
    return spec.row_nbytes + (1 if spec.fp8_wire else 2) * spec.hidden


def weight_item(spec: KernelSpec) -> int:
    return 1 if spec.quantized else 2


def panel_rows(spec: KernelSpec, rows: int) -> list[int]:
    """Rows of each visit an expert with `rows` rows takes, adapters' groups aside."""
    full, rest = divmod(rows, spec.blocks.rows)
    return [spec.blocks.rows] * full + ([rest] if rest else [])


def expert_bytes(spec: KernelSpec, rows: int) -> float:
    """HBM bytes of an expert with `rows` rows."""
    if not rows:
        return 0.0
    visits = len(panel_rows(spec, rows))
    if spec.lora and spec.groups > 1:
        visits = max(visits, min(spec.groups, rows))
    pairs = present_pairs(spec, rows) * len(panel_rows(spec, rows))
    return visits * matrix_elements(spec) * weight_item(spec) + pairs * pair_bytes(spec) + rows * row_bytes(spec)


def tile_us(gen: Generation, clock: float, spec: KernelSpec, bundles: int, height: int) -> float:
    """One f tile: its schedule, or on v7x the matrix unit where that takes longer."""
    peak = peak_tflops(gen, spec.recipe)
    macs_us = 2 * height * matrix_elements(spec) / spec.tiles / peak / 1e6 if gen.unmodelled_mxu else 0.0
    return max(bundles / clock / 1e3, macs_us)


def peak_tflops(gen: Generation, recipe: str) -> float:
    return gen.fp8_tflops if recipe == "w8a8" else gen.bf16_tflops


def visit_us(gen: Generation, clock: float, spec: KernelSpec, cost: VisitCost, rows: int) -> float:
    """Compute of one visit of `rows` rows."""
    blocks, chunks = -(-rows // ROW_BLOCK), -(-rows // spec.blocks.stage)
    i = cost.rung(spec, rows)
    own: float = cost.visit + blocks * (cost.gather + cost.stage) + chunks * cost.ship
    own += -(-rows // spec.finish_rows) * cost.finish
    own += chunks * (spec.ep // math.gcd(spec.ep, RUN_BLOCK) - 1) * cost.run
    own += present_runs(spec, rows) * cost.pair + (cost.shrink[i] if cost.shrink else 0)
    return own / clock / 1e3 + spec.tiles * tile_us(gen, clock, spec, cost.tile[i], spec.blocks.rungs[i])


def expert_us(gen: Generation, clock: float, spec: KernelSpec, cost: VisitCost, rows: int) -> float:
    """Compute of all visits of an expert with `rows` rows; adapters beyond what one visit holds split it."""
    if not rows:
        return 0.0
    groups = min(spec.groups, rows) if spec.lora else 1
    parts = panel_rows(spec, rows)
    if groups > 1:
        parts = [max(1, round(n / groups)) for n in parts for _ in range(groups)]
    return sum(visit_us(gen, clock, spec, cost, n) for n in parts)


def presum_us(gen: Generation, clock: float, spec: KernelSpec, config: FusedMoEConfig) -> float:
    """The kernel that sums a token's rows before they travel: bytes, or its loops.

    Bundles are those of libtpu's schedules at H 2048 and 6144, linear in between: a pair is copied and added, a
    token's sum is rounded.
    """
    if not spec.transport.startswith("presum"):
        return 0.0
    pairs = spec.capacity / spec.ep
    tokens = spec.tokens * share_reached(config.num_experts, config.experts_per_token, spec.ep)
    bundles = pairs * (10 + 1.05 * spec.hidden / 1024) + tokens * (5.6 + 1.84 * spec.hidden / 1024)
    return max(bundles / clock, (2 * pairs + tokens) * spec.hidden / gen.hbm_gbps) / 1e3


def pack_us(gen: Generation, clock: float, spec: KernelSpec) -> float:
    """The kernel that quantises rows at their source: bytes, or its loops.

    Bundles are those of libtpu's schedules at H 2048 and 6144, linear in between.
    """
    if spec.dispatch != "ag_fp8":
        return 0.0
    rows = spec.tokens // spec.ep
    bundles = rows * (1.2 + (2.0 if gen.native_e4m3 else 5.3) * spec.hidden / 1024)
    return max(bundles / clock, 3 * rows * spec.hidden / gen.hbm_gbps) / 1e3


def table_us(clock: float, spec: KernelSpec) -> float:
    """The kernel that lays out a device's part of the table: loops over lines of pairs, by registers of segments."""
    lines, registers = -(-spec.local_rows // LANES), -(-(spec.ep * spec.segments + 1) // SUBLANES)
    return (60 + 1.4 * lines * registers) / clock / 1e3


def scales_us(clock: float, spec: KernelSpec) -> float:
    """The expert kernel's loops that send scales of FP8 results, and bring together those that come."""
    return (SENT * spec.ep + LINE * -(-spec.local_rows // LANES)) / clock / 1e3 if spec.fp8_wire else 0.0


SENT, LINE = 130, 9
"""Bundles for each device and for each 128 rows, of libtpu's schedule for v7x."""


def arrivals(spec: KernelSpec) -> int:
    """Latencies of a kernel that sends rows itself: its entry barrier, and its last row."""
    return 0 if spec.transport.startswith("rs") else 2


def hops(fabric: Fabric) -> int:
    """Hops between the chips that are farthest apart."""
    chips = fabric.chips
    return sum(max(c[d] for c in chips) - min(c[d] for c in chips) for d in range(len(chips[0])))


def model_time(
    gen: Generation,
    fabric: Fabric,
    spec: KernelSpec,
    config: FusedMoEConfig,
    num_tokens: int,
    cost: VisitCost,
    around: Glue,
    clock_ghz: float | None = None,
) -> ModelTime:
    """The layer's time on one device with uniform routing.

    Args:
      gen, fabric: the devices.
      spec: the kernel build.
      config: the layer.
      num_tokens: of all devices.
      cost: the kernel's schedule.
      around: what XLA runs around it.
      clock_ghz: bundles a nanosecond; None takes the generation's.
    """
    clock = clock_ghz or gen.clock_ghz
    spread = row_distribution(num_tokens, config.experts_per_token, config.num_experts)

    def mean(term: Callable[[int], float]) -> float:
        return spec.experts * sum(chance * term(n) for n, chance in spread)

    def hbm_us(n: int) -> float:
        return expert_bytes(spec, n) / gen.hbm_gbps / 1e3

    def compute_us(n: int) -> float:
        return expert_us(gen, clock, spec, cost, n)

    kernel = mean(lambda n: max(hbm_us(n), compute_us(n)))
    return _added(gen, fabric, spec, config, num_tokens, around, clock, mean(hbm_us), mean(compute_us), kernel)


def _added(
    gen: Generation, fabric: Fabric, spec: KernelSpec, config: FusedMoEConfig, num_tokens: int, around: Glue,
    clock: float, hbm: float, compute: float, kernel: float,
) -> ModelTime:
    """The kernel's time with everything else."""
    rows = num_tokens * config.experts_per_token / spec.ep
    traffic, sums = traffic_of(spec, config, num_tokens), presum_us(gen, clock, spec, config)
    plan = around.cycles / clock / 1e3 + table_us(clock, spec)
    plan += pack_us(gen, clock, spec) + scales_us(clock, spec) + combine_us(gen, clock, spec)
    launches = (around.launches + 2 + (spec.dispatch == "ag_fp8")) * LAUNCH_US
    latency = (around.collectives + arrivals(spec)) * hops(fabric) * HOP_US if spec.ep > 1 else 0.0
    dispatch = dispatch_us(fabric, traffic, spec.dispatch)
    beside = min(dispatch, around.beside_cycles / clock / 1e3 + around.beside_launches * LAUNCH_US)
    total = total_us(fabric, traffic, spec.dispatch, spec.transport, kernel, sums) + plan + launches + latency - beside
    return ModelTime(
        clock, hbm, 2 * rows * matrix_elements(spec) / peak_tflops(gen, spec.recipe) / 1e6, compute, kernel, dispatch,
        max(sums, transport_us(fabric, traffic, spec.transport)), plan, launches, latency, beside, total,
    )


def traffic_of(spec: KernelSpec, config: FusedMoEConfig, num_tokens: int) -> Traffic:
    return Traffic(num_tokens, spec.hidden, config.experts_per_token, config.num_experts)


# -- the floor ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roofline:
    """The least a layer can take, microseconds, and how it gets there.

    Attributes:
      hbm: weights of visited experts once, FP8 rows in and out.
      mxu: the dots at peak.
      dispatch, transport: the cheapest way of moving rows.
      links: microseconds of the two.
      total: dispatch, then the larger of kernel and pushed results, or their sum where results are summed first.
    """

    hbm: float
    mxu: float
    dispatch: str
    transport: str
    links: tuple[float, float]
    total: float


FLOOR_WIRES = {
    True: (("ag_fp8",), ("push_fp8", "presum_fp8")), False: (("ag_bf16",), ("push_bf16", "presum_bf16", "rs_bf16")),
}
"""Dispatches and transports of the floor, by whether weights are quantised."""


def roofline(
    gen: Generation, fabric: Fabric, config: FusedMoEConfig, num_tokens: int, *, quantized: bool = True
) -> Roofline:
    """The floor of a layer without adapters: every byte once, every dot at peak, FP8 on the links (bf16 for bf16).

    Rows that are summed first leave once a *chip*: the cores of a chip would add theirs, which costs the links least.
    """
    halves = 2 if config.is_act_and_mul else 1
    matrix = (halves + 1) * config.hidden_dim * config.intermediate_size
    local = -(-config.num_experts // fabric.ep)
    visited = local * (1 - (1 - config.experts_per_token / config.num_experts) ** num_tokens)
    rows = num_tokens * config.experts_per_token / fabric.ep
    item, recipe = (1, gen.default_recipe) if quantized else (2, "bf16")
    hbm = (visited * matrix * item + rows * 2 * config.hidden_dim * item) / gen.hbm_gbps / 1e3
    mxu = 2 * rows * matrix / peak_tflops(gen, recipe) / 1e6
    traffic = Traffic(
        num_tokens, config.hidden_dim, config.experts_per_token, config.num_experts, scales=False, whole_chips=True
    )
    kernel = max(hbm, mxu)
    dispatches, transports = FLOOR_WIRES[quantized]
    best = min((total_us(fabric, traffic, d, t, kernel), d, t) for d in dispatches for t in transports)
    total, dispatch, transport = best
    links = dispatch_us(fabric, traffic, dispatch), transport_us(fabric, traffic, transport)
    return Roofline(hbm, mxu, dispatch, transport, links, total)


# -- without a compiler ---------------------------------------------------------------------------------------------


def estimate_kernel_us(gen: Generation, spec: KernelSpec, config: FusedMoEConfig, num_tokens: int) -> float:
    """The kernel's time without a schedule: bytes and dots, padded to tile heights, at `MXU_SHARE` of peak."""
    spread = row_distribution(num_tokens, config.experts_per_token, config.num_experts)
    peak = peak_tflops(gen, spec.recipe) * (MXU_SHARE_E4M3 if gen.native_e4m3 else MXU_SHARE)

    per_kib = 0.0 if gen.native_e4m3 else PACKED * spec.fp8_wire + UNPACKED * (spec.dispatch == "ag_fp8")
    row_us = per_kib * spec.hidden / 1024 / gen.clock_ghz / 1e3

    def one(rows: int) -> float:
        hbm = expert_bytes(spec, rows) / gen.hbm_gbps / 1e3
        heights = [next(h for h in spec.blocks.rungs if h >= n) for n in panel_rows(spec, rows)]
        return max(hbm, 2 * sum(heights) * matrix_elements(spec) / peak / 1e6 + rows * row_us)

    return spec.experts * sum(chance * one(n) for n, chance in spread)


def estimate_glue(spec: KernelSpec) -> Glue:
    """What XLA runs around the kernels, without having compiled it: `USUAL`, pairs and packed rows, and the order of
    all devices' pairs for results that are not pushed."""
    packing = 0 if spec.dispatch == "ag_fp8" else spec.tokens // spec.ep * PACKED_COLUMN * spec.hidden
    pair, launches = (0.0, 0) if spec.pushes else (KEPT_PAIR, KEPT_LAUNCHES)
    cycles = round(USUAL.cycles + (PLANNED_PAIR + pair) * spec.capacity + packing)
    return Glue(cycles, USUAL.launches + launches, USUAL.compiler_cycles, USUAL.collectives if spec.ep > 1 else 0, ())


def estimate_time(
    gen: Generation, fabric: Fabric, spec: KernelSpec, config: FusedMoEConfig, num_tokens: int
) -> ModelTime:
    """`model_time` without a schedule."""
    kernel = estimate_kernel_us(gen, spec, config, num_tokens)
    spread = row_distribution(num_tokens, config.experts_per_token, config.num_experts)
    hbm = spec.experts * sum(chance * expert_bytes(spec, n) for n, chance in spread) / gen.hbm_gbps / 1e3
    return _added(
        gen, fabric, spec, config, num_tokens, estimate_glue(spec), gen.clock_ghz, hbm, kernel, kernel
    )


USUAL = Glue(1_000, 12, 30_000, 2, ())
PLANNED_PAIR, PACKED_COLUMN = 0.09, 0.0045
"""What compiled layers have around their kernels (v7x, 512 to 8192 tokens of both Qwen3-Coder shapes): cycles for each
pair of all devices, and for each column of a bf16 row that XLA packs. What of it runs beside the gather is left out."""
KEPT_PAIR, KEPT_LAUNCHES = 2.5, 24
"""What results that are not pushed add: sorts of all devices' pairs with their weights, and back; operations."""

PACKED, UNPACKED = 6.3, 2.9
"""Bundles for 1024 elements of a row rounded to e4m3 and back where that is not native (v6e, H 6144)."""

MXU_SHARE_E4M3, MXU_SHARE = 0.5, 0.85
"""Of peak, what compiled prefill schedules reach all in, on v7x and elsewhere; used only where there is no schedule."""
