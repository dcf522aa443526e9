# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the expert kernel for any layer, batch, device count and TPU generation.

The tile width `bf` depends on the layer and the generation only: weights are laid out for it at load and, with w8a8,
it is the width of a hidden scale, so results would differ between batch sizes if it followed them. Everything else
follows the batch: a panel tall enough for an expert's rows (its weights are then read once), then deeper rings.
The memory model is the list the kernel allocates from (`spec.scratch`), and what the compiler spills.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..common.config import FusedMoEConfig
from .generations import Generation, generation
from .layout import padded_hidden, padded_rank
from .spec import (
    BF16_SUBLANES,
    LANES,
    ROW_BLOCK,
    SUBLANES,
    Blocks,
    KernelSpec,
    LoRASpec,
    dma_semaphores,
    round_up,
    scratch,
    vmem_bytes,
)

MAX_TILE = 1024
# Two weight tiles may take this share of VMEM; rows, results and adapters need the rest.
WEIGHT_SHARE = 0.35
# Wide tiles pop and add the float32 result less often; about 70 columns' worth of time a tile.
TILE_OVERHEAD = 70
PANELS = (32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
RUNGS = (32, 64, 128, 256, 512, 768)
# Panels that take the matrix unit so many times as long as their weights take to come in are tall enough: another one
# costs no time, and each height costs code.
PANEL_RIDGE = 2
# Masked lanes one dot may spend on adapters before visits are split instead.
MAX_LANES = 1024
# Scalar memory the compiler keeps for itself.
SMEM_RESERVE = 24 * 1024


def tile_width(gen: Generation, config: FusedMoEConfig, scheme: str) -> int:
    """`bf`: the width with the least padded work whose two tiles fit their share of VMEM.

    Raises:
      ValueError: not even the narrowest fits; the message says which H would.
    """
    hidden, halves = padded_hidden(config.hidden_dim), 2 if config.is_act_and_mul else 1
    item = 2 if scheme == "bf16" else 1
    column = hidden * (halves + 1) * item
    budget = int(WEIGHT_SHARE * gen.vmem_limit_bytes)
    whole = round_up(config.intermediate_size, LANES)
    best: tuple[float, int] | None = None
    for bf in range(LANES, min(whole, MAX_TILE) + 1, LANES):
        if 2 * bf * column > budget:
            break
        partial = 1.05 if bf % 256 else 1.0
        cost = partial * round_up(config.intermediate_size, bf) * (1 + TILE_OVERHEAD / bf)
        if best is None or cost <= best[0]:
            best = (cost, bf)
    if best is None:
        limit = budget // (2 * LANES * (halves + 1) * item)
        raise ValueError(
            f"hidden_dim: got {config.hidden_dim}; two weight tiles of {LANES} columns need "
            f"{2 * LANES * column / 2**20:.1f} MiB of VMEM, {gen.name} has {budget / 2**20:.1f} MiB for them: "
            f"want at most {limit // 256 * 256}"
        )
    return best[1]


def _rungs(rows: int, mean: float, scheme: str) -> tuple[int, ...]:
    """Tile heights: doubling, and two that just hold a usual expert and a somewhat fuller one.

    In short panels a few rows fewer count, with block scales, where the vector unit bounds a tile, most of all.
    """
    short = SUBLANES if scheme == "block" else BF16_SUBLANES
    step = short if rows <= 2 * ROW_BLOCK else 2 * ROW_BLOCK
    last = mean % rows  # what is left for an expert's last panel
    usual = {max(ROW_BLOCK, round_up(math.ceil(last + k * math.sqrt(mean)), step)) for k in (0, 2)}
    return (*sorted(r for r in {*RUNGS, *usual} if r < rows), rows)


def _stage(rows: int, hidden: int, mean: float) -> int:
    """Rows sent at a time: fewer, larger pushes for narrow rows, no more than a usual expert has; divides the panel."""
    most = min(320 if hidden <= 3072 else 128, round_up(math.ceil(mean + math.sqrt(mean)), ROW_BLOCK))
    return max(s for s in range(ROW_BLOCK, min(rows, most) + 1, ROW_BLOCK) if rows % s == 0)


def panel_target(num_tokens: int, config: FusedMoEConfig) -> int:
    """Rows nearly every expert stays under with uniform routing: mean plus three standard deviations."""
    mean = num_tokens * config.experts_per_token / config.num_experts
    return max(1, min(math.ceil(mean + 3 * math.sqrt(mean)), num_tokens))


def panel_cap(gen: Generation, scheme: str, recipe: str) -> int:
    """Rows above which a taller panel gains nothing (`PANEL_RIDGE`)."""
    tflops = gen.fp8_tflops if recipe == "w8a8" else gen.bf16_tflops
    ridge = tflops * 1e3 / (2 * gen.hbm_gbps) * (2 if scheme == "bf16" else 1)
    return next((p for p in PANELS if p >= PANEL_RIDGE * ridge), PANELS[-1])


def make_spec(
    config: FusedMoEConfig,
    num_tokens: int,
    blocks: Blocks,
    *,
    ep: int,
    scheme: str,
    recipe: str,
    lora: LoRASpec | None = None,
    static_scales: bool = False,
    transport: str = "push_bf16",
    dispatch: str = "ag_bf16",
    axis: str | tuple[str, ...] = "ep",
    num_experts: int | None = None,
) -> KernelSpec:
    """The kernel build of a layer: pads H, I, experts and tokens."""
    return KernelSpec(
        hidden=padded_hidden(config.hidden_dim),
        inter=round_up(config.intermediate_size, blocks.bf),
        experts=-(-(num_experts or config.num_experts) // ep),
        tokens=round_up(num_tokens, ep),
        top_k=config.experts_per_token,
        ep=ep,
        axis=axis,
        activation=config.activation,
        gated=config.is_act_and_mul,
        recipe=recipe,
        block_scales=scheme == "block",
        static_scales=static_scales,
        has_bias=config.has_bias,
        transport=transport,
        blocks=blocks,
        lora=lora,
        dispatch=dispatch,
    )


def scalar_bytes(spec: KernelSpec) -> int:
    """Scalar memory: the routing table, and the kernel's buffers there."""
    return 4 * spec.table.size + sum(buffer.scalar_bytes for buffer in scratch(spec))


def max_tokens(spec: KernelSpec, smem_bytes: int) -> int:
    """Most tokens whose routing table fits scalar memory, and whose pairs the plan can number
    (`plan.numbered`); 0 where none do. A multiple of ``spec.ep``."""
    budget = smem_bytes - SMEM_RESERVE

    def fits(units: int) -> bool:
        sized = replace(spec, tokens=units * spec.ep)
        numbers = (spec.ep * spec.segments + 1) << sized.pair_bits
        return scalar_bytes(sized) <= budget and numbers < 2**31

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * spec.ep


def _pair_choices(max_loras: int, rank: int) -> list[int]:
    most = max(1, min(max_loras, MAX_LANES // rank))
    out = [most]
    while out[-1] > 1:
        out.append(-(-out[-1] // 2))
    return out


def choose_blocks(
    generation_name: str,
    config: FusedMoEConfig,
    num_tokens: int,
    *,
    ep: int,
    scheme: str,
    recipe: str,
    max_loras: int = 0,
    max_lora_rank: int = 0,
    transport: str = "push_bf16",
    dispatch: str = "ag_bf16",
    bf: int | None = None,
) -> Blocks:
    """Tile sizes for a build; total over every layer that one weight tile and one panel of 32 rows of fits.

    Args:
      generation_name: TPU generation.
      config: the layer (all experts).
      num_tokens: tokens of all devices.
      ep: devices along the expert axis.
      scheme: weight scheme.
      recipe: ``"w8a8"``, ``"w8a16"`` or ``"bf16"``.
      max_loras, max_lora_rank: adapter slots, 0 for the program without adapters.
      transport, dispatch: how results leave and activations arrive.
      bf: the width the weights were laid out with; None derives it (`tile_width`).

    Raises:
      ValueError: nothing fits; the message names the limit and what would fit.
    """
    gen = generation(generation_name)
    if num_tokens < 1:
        raise ValueError(f"num_tokens: got {num_tokens}, want at least 1")
    if ep < 1:
        raise ValueError(f"ep: got {ep}, want at least 1")
    if (max_loras > 0) != (max_lora_rank > 0):
        raise ValueError(f"max_lora_rank: got {max_lora_rank} with max_loras={max_loras}, want both or neither")
    width = bf or tile_width(gen, config, scheme)
    mean = num_tokens * config.experts_per_token / config.num_experts
    hidden = padded_hidden(config.hidden_dim)
    target = min(panel_target(num_tokens, config), panel_cap(gen, scheme, recipe))
    rank = padded_rank(max_lora_rank) if max_loras else 0
    lora = LoRASpec(max_loras, rank) if max_loras else None
    covering = [p for p in PANELS if p >= target][:1]
    panels = covering + [p for p in reversed(PANELS) if p < target]
    best: tuple[tuple[int, int, int], Blocks] | None = None
    for pairs in _pair_choices(max_loras, rank) if lora else [0]:
        for rows in panels:
            for nbuf, xbuf in ((3, 2), (2, 2), (3, 1), (2, 1)):
                blocks = Blocks(width, rows, _rungs(rows, mean, scheme), nbuf, xbuf, _stage(rows, hidden, mean), pairs)
                spec = make_spec(
                    config, num_tokens, blocks, ep=ep, scheme=scheme, recipe=recipe, lora=lora, transport=transport,
                    dispatch=dispatch,
                )
                if vmem_bytes(spec) > gen.vmem_limit_bytes or dma_semaphores(spec) > gen.dma_semaphores:
                    continue
                # Visits an expert takes decide how often its weights are read; deeper rings only smooth the stream.
                score = (spec.groups * -(-target // rows), rows, -(2 * nbuf + xbuf))
                if best is None or score < best[0]:
                    best = (score, blocks)
                break
    if best is None:
        raise ValueError(_nothing_fits(gen, config, width, scheme, recipe, max_loras, rank))
    return best[1]


def _nothing_fits(
    gen: Generation, config: FusedMoEConfig, bf: int, scheme: str, recipe: str, max_loras: int, rank: int
) -> str:
    def least(width: int, lane_rank: int) -> int:
        lora = LoRASpec(max_loras, lane_rank) if lane_rank else None
        blocks = Blocks(width, ROW_BLOCK, (ROW_BLOCK,), 2, 1, ROW_BLOCK, 1 if lora else 0)
        return vmem_bytes(make_spec(config, 1, blocks, ep=1, scheme=scheme, recipe=recipe, lora=lora))

    limit = gen.vmem_limit_bytes
    text = (
        f"VMEM: the smallest build of H={config.hidden_dim}, I={config.intermediate_size} with bf={bf}"
        + (f", LoRA rank {rank}" if rank else "")
        + f" needs {least(bf, rank) / 2**20:.1f} MiB, {gen.name} has {limit / 2**20:.0f} MiB"
    )
    for smaller in range(rank - 16, 0, -16):
        if least(bf, smaller) <= limit:
            return f"{text}; max_lora_rank={smaller} fits"
    for width in range(bf - LANES, 0, -LANES):
        if least(width, rank) <= limit:
            return f"{text}; bf={width} fits"
    return f"{text}; no tile width fits"


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
        bf=bf or round_up(inter, LANES), rows=panel, rungs=(panel,), nbuf=2, xbuf=2, stage=ROW_BLOCK, pairs=max_loras,
    )
