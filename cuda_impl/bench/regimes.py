# SPDX-License-Identifier: Apache-2.0
"""Every chain of kernels on a small layer: which cases reach them all, and whether a case is right.

What `benchmarks/cuda_smoke.py` and `benchmarks/cuda_sanitize.py` run, and the tests on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ...common import tolerances
from .. import _runtime
from ..grouped_gemm import Tiles, rule_tiles
from ..hopper.regime import DECODE16, DECODE32, DECODE64, ONE_TOKEN, PREFILL, Regime
from ..moe import fused_moe, resolve_recipe
from ..prepare import AdapterSlots, PreparedWeights
from ..tuned import forced
from .data import Batch, Layer, LoraSetting, poison, random_adapters, random_batch, random_weights
from .reference import layer_f32, rel_l2
from .tune import hopper_off

ODD = Layer("odd", 1440, 208, 24, 24)  # nothing a multiple of a tile
SPLIT = replace(ODD, name="split", local=5)  # one rank's share, by an expert map
TINY = Layer("tiny", 256, 128, 6, 6, 2)
NONE, MIXED = LoraSetting(), LoraSetting(3, 16)


@dataclass(frozen=True)
class RegimeCase:
    """One layer call by kernels that are named, not chosen.

    Attributes:
      regime: a Hopper regime, or None for the portable kernels.
      tokens: rows of the batch; ids among them belong to no expert, and rows to no adapter.
    """

    regime: Regime | None
    scheme: str
    recipe: str
    tokens: int
    setting: LoraSetting = NONE
    layer: Layer = ODD

    def __str__(self) -> str:
        kernels = "portable" if self.regime is None else str(self.regime)
        return f"{kernels} {self.layer.name} {self.scheme} {self.recipe} T={self.tokens} LoRA {self.setting}"


def hopper_cases() -> list[RegimeCase]:
    """Each Hopper chain with every scheme and recipe it serves, with and without adapters."""
    cases = []
    for scheme in ("block", "channel"):
        for setting in (NONE, MIXED):
            for recipe in ("w8a8", "w8a16"):
                cases += [
                    RegimeCase(ONE_TOKEN, scheme, recipe, 1, setting),
                    RegimeCase(DECODE16, scheme, recipe, 40, setting),
                    RegimeCase(DECODE32, scheme, recipe, 300, setting),  # over 2048 pairs: sorted, not scanned
                ]
            cases.append(RegimeCase(PREFILL, scheme, "w8a8", 300, setting))
        cases += [
            RegimeCase(PREFILL, scheme, "w8a8", 300, LoraSetting(1, 64, True)),
            RegimeCase(DECODE16, scheme, "w8a8", 40, LoraSetting(2, 128)),
            RegimeCase(DECODE16, scheme, "w8a8", 40, MIXED, SPLIT),
            RegimeCase(ONE_TOKEN, scheme, "w8a8", 1, LoraSetting(2, 64, True), SPLIT),
            RegimeCase(PREFILL, scheme, "w8a8", 300, MIXED, SPLIT),
        ]
    cases.append(RegimeCase(DECODE64, "channel", "w8a16", 300))
    return cases


def portable_cases(layer: Layer = ODD) -> list[RegimeCase]:
    """The portable kernels: every scheme and recipe with adapters, small and sorted batches, one without."""
    kinds = (("block", "w8a8"), ("channel", "w8a8"), ("tensor", "w8a8"), ("block", "w8a16"), ("channel", "w8a16"),
             ("bf16", "bf16"))  # fmt: skip
    cases = [RegimeCase(None, scheme, recipe, 40, MIXED, layer) for scheme, recipe in kinds]
    cases += [RegimeCase(None, "block", "w8a8", 600, MIXED, layer), RegimeCase(None, "block", "w8a8", 1, NONE, layer)]
    return cases


def all_cases(target: _runtime.Target) -> list[RegimeCase]:
    """What a device has."""
    return (hopper_cases() if target.capability == (9, 0) else []) + portable_cases()


class Layers:
    """Weights and adapters by what they are made from, kept for the next case."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._weights: dict[tuple[Layer, str], PreparedWeights] = {}
        self._adapters: dict[tuple[Layer, LoraSetting], AdapterSlots] = {}

    def weights(self, layer: Layer, scheme: str) -> PreparedWeights:
        if (layer, scheme) not in self._weights:
            self._weights[layer, scheme] = random_weights(layer, scheme, self.device)
        return self._weights[layer, scheme]

    def adapters(self, layer: Layer, setting: LoraSetting) -> AdapterSlots | None:
        if not setting.count:
            return None
        if (layer, setting) not in self._adapters:
            self._adapters[layer, setting] = random_adapters(layer, setting, self.device)
        return self._adapters[layer, setting]

    def batch(self, case: RegimeCase) -> Batch:
        return random_batch(
            case.layer, case.tokens, 0, self.device, routing="skipped" if case.tokens > 1 else "uniform",
            adapters=case.setting.count,
        )  # fmt: skip


def caller(
    case: RegimeCase, batch: Batch, weights: PreparedWeights, adapters: AdapterSlots | None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """The call, by the case's kernels."""
    choice: Regime | Tiles
    if case.regime is not None:
        choice = case.regime
    else:
        a_bytes, w_bytes = (1 if case.recipe == "w8a8" else 2), (2 if case.recipe == "bf16" else 1)
        choice = rule_tiles(
            case.tokens * case.layer.topk, case.layer.local, case.layer.inter, case.layer.hidden, weights.is_block,
            a_bytes, w_bytes, _runtime.target_of(batch.x.device),
        )  # fmt: skip

    def run() -> torch.Tensor:
        with forced(choice), hopper_off(case.regime is None):
            return fused_moe(
                batch.x, batch.topk_weights, batch.topk_ids, weights, recipe=case.recipe, adapters=adapters,
                adapter_ids=None if adapters is None else batch.adapter_ids, expert_map=batch.expert_map,
                out_dtype=out_dtype,
            )  # fmt: skip

    return run


def check(case: RegimeCase, layers: Layers) -> tuple[bool, dict[str, object]]:
    """Whether a case is right, and its figures.

    Against its declared recipe with the allocator's memory poisoned; the same bits again; base rows' bits, and those of
    a batch that uses no adapter, as without adapters; the f32 result rounds to the bf16 one.
    """
    weights, adapters, batch = layers.weights(case.layer, case.scheme), None, layers.batch(case)
    adapters = layers.adapters(case.layer, case.setting)
    recipe = resolve_recipe(case.recipe, weights)
    if case.regime is not None and recipe.name == "w8a8":
        recipe = replace(recipe, fp8_sums=case.regime.fp8_sums)
    call = caller(case, batch, weights, adapters)
    call()
    if layers.device.type == "cuda":
        poison(layers.device, 1 << 28)
    got = call()
    want = layer_f32(batch, weights, recipe, adapters)
    norms = want.norm(dim=1)
    rows = ((got.float() - want).norm(dim=1) / norms)[norms > 0]
    figures: dict[str, object] = {"rel_l2": rel_l2(got, want), "worst_row": float(rows.max())}
    # A row or two are no average.
    bound = tolerances.TO_RECIPE.bound if case.tokens > 8 else tolerances.WORST_ROW.bound
    ok = rel_l2(got, want) <= bound and float(rows.max()) <= tolerances.WORST_ROW.bound
    figures["empty_rows"] = not bool(got[norms == 0].any())
    figures["same_bits"] = torch.equal(got, call())
    wide = caller(case, batch, weights, adapters, torch.float32)()
    figures["f32_bits"] = torch.equal(wide.bfloat16(), got)
    if adapters is not None and batch.adapter_ids is not None:
        base = caller(case, batch, weights, None)()
        used = batch.adapter_ids >= 0
        figures["base_bits"] = torch.equal(base[~used], got[~used])
        figures["idle_bits"] = torch.equal(caller(case, batch.idle(), weights, adapters)(), base)
    return ok and all(v is not False for v in figures.values()), figures


def checked(cases: list[RegimeCase], device: torch.device | str) -> Iterator[tuple[str, bool, dict[str, object]]]:
    """(case, whether it is right, figures); a case that raises is wrong and does not hide the others."""
    layers = Layers(device)
    for case in cases:
        try:
            ok, figures = check(case, layers)
        except Exception as error:
            ok, figures = False, {"error": f"{type(error).__name__}: {error}"[:500]}
        yield str(case), ok, figures
