# SPDX-License-Identifier: Apache-2.0
"""Which dispatch and transport a build takes: of those its declared precision allows, the cheapest by `time_model`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..common.checks import check_choice
from ..common.config import FusedMoEConfig
from .blocks import choose_blocks, make_spec
from .generations import Generation
from .layout import padded_rank
from .links import ROW_ITEM, Fabric
from .spec import DISPATCHES, TRANSPORTS, KernelSpec, LoRASpec
from .time_model import estimate_time
from .topologies import split_topology, topology_for

AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """One way of moving rows, and the layer's estimated microseconds with it."""

    dispatch: str
    transport: str
    total_us: float


def candidates(
    gen: Generation,
    fabric: Fabric,
    config: FusedMoEConfig,
    num_tokens: int,
    *,
    scheme: str,
    recipe: str,
    max_loras: int = 0,
    max_lora_rank: int = 0,
    dispatch: str = AUTO,
    transport: str = AUTO,
    fp8_wire: bool = False,
    fp8_input: bool = False,
) -> list[Choice]:
    """Every allowed (dispatch, transport), cheapest first; arguments as `resolve_wires`'s."""
    check_choice("dispatch", dispatch, (AUTO, *DISPATCHES))
    check_choice("transport", transport, (AUTO, *TRANSPORTS))
    dispatches = [dispatch] if dispatch != AUTO else [
        d for d in DISPATCHES if ROW_ITEM[d] > 1 or recipe == "w8a8" or (recipe == "w8a16" and fp8_input)
    ]
    transports = [transport] if transport != AUTO else [t for t in TRANSPORTS if fp8_wire or ROW_ITEM[t] > 1]
    lora = LoRASpec(max_loras, padded_rank(max_lora_rank)) if max_loras else None
    found = []
    for d, t in itertools.product(dispatches, transports):
        spec = _build(gen, fabric, config, num_tokens, scheme, recipe, lora, d, t, required=dispatch != AUTO)
        if spec is not None:
            found.append(Choice(d, t, estimate_time(gen, fabric, spec, config, num_tokens).total))
    return sorted(found, key=lambda c: c.total_us)


def _build(
    gen: Generation, fabric: Fabric, config: FusedMoEConfig, num_tokens: int, scheme: str, recipe: str,
    lora: LoRASpec | None, dispatch: str, transport: str, *, required: bool,
) -> KernelSpec | None:
    """The build; None where the kernel does not have this dispatch for the layer (`KernelSpec` says)."""
    slots, rank = (lora.slots, lora.rank) if lora else (0, 0)
    try:
        blocks = choose_blocks(
            gen.name, config, num_tokens, ep=fabric.ep, scheme=scheme, recipe=recipe, max_loras=slots,
            max_lora_rank=rank, transport=transport, dispatch=dispatch,
        )
        return make_spec(
            config, num_tokens, blocks, ep=fabric.ep, scheme=scheme, recipe=recipe, lora=lora, transport=transport,
            dispatch=dispatch,
        )
    except ValueError as error:
        if required or not str(error).startswith("dispatch:"):
            raise
        return None


def codes_at_source(
    generation_name: str,
    config: FusedMoEConfig,
    num_tokens: int,
    *,
    ep: int,
    scheme: str,
    recipe: str,
    transport: str,
    static_scales: bool = False,
    max_loras: int = 0,
    max_lora_rank: int = 0,
) -> str:
    """The cheaper dispatch of those that give the same bits: w8a8 may quantise a row where it comes from.

    Other recipes, static scales, and expert groups that no slice has keep ``"ag_bf16"``.
    """
    if recipe != "w8a8" or static_scales:
        return "ag_bf16"
    try:
        gen, grid = split_topology(topology_for(generation_name, ep))
    except ValueError:
        return "ag_bf16"
    return resolve_wires(
        gen, Fabric.of(gen, grid, ep), config, num_tokens, scheme=scheme, recipe=recipe, transport=transport,
        max_loras=max_loras, max_lora_rank=max_lora_rank,
    )[0]


def resolve_wires(
    gen: Generation,
    fabric: Fabric,
    config: FusedMoEConfig,
    num_tokens: int,
    *,
    scheme: str,
    recipe: str,
    max_loras: int = 0,
    max_lora_rank: int = 0,
    dispatch: str = AUTO,
    transport: str = AUTO,
    fp8_wire: bool = False,
    fp8_input: bool = False,
) -> tuple[str, str]:
    """The (dispatch, transport) to build, ``"auto"`` replaced by the cheapest.

    Args:
      gen, fabric: the devices.
      config: the layer.
      num_tokens: of all devices.
      scheme, recipe: of the build.
      max_loras, max_lora_rank: adapter slots. The transport is chosen as if there were none, so that rows without an
        adapter keep their bits; FP8 codes at the source are the codes quantised on arrival, so the dispatch may differ.
      dispatch, transport: what is asked for, or ``"auto"``.
      fp8_wire: whether FP8 result rows are declared; else ``"auto"`` keeps bf16 ones.
      fp8_input: whether FP8 rows that w8a16 rounds back are declared.

    Raises:
      ValueError: an unknown name, or a dispatch asked for that the layer cannot have.
    """
    if transport == AUTO:
        transport = candidates(
            gen, fabric, config, num_tokens, scheme=scheme, recipe=recipe, dispatch=AUTO, fp8_wire=fp8_wire,
            fp8_input=fp8_input,
        )[0].transport
    best = candidates(
        gen, fabric, config, num_tokens, scheme=scheme, recipe=recipe, max_loras=max_loras,
        max_lora_rank=max_lora_rank, dispatch=dispatch, transport=transport, fp8_input=fp8_input,
    )[0]
    return best.dispatch, best.transport
