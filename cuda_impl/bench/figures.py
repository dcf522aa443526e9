# SPDX-License-Identifier: Apache-2.0
"""What a benchmark run is judged by: every goal as data, its figure out of the rows, pass or fail.

A goal whose cells were not run has no figure; it is not passed over in silence but listed as "not run".
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# The fastest vLLM path of any scheme in the same batch over a call's time: geometric mean a scheme, and each.
SPEEDUP, SPEEDUP_EACH = 1.30, 0.98
SPEEDUP_SKEWED = 1.20
SPEEDUP_LORA, SPEEDUP_LORA_EACH = 2.0, 1.25
# Over the floor, W8A8 without adapters, by scheme: geometric mean of batches of 4096 tokens and more.
LARGE_MEAN = {"channel": 2.2, "tensor": 2.2, "block": 2.35}
LARGE_EACH = 2.6
AT_1024 = 1.6
AT_64 = {"channel": 1.12, "tensor": 1.12, "block": 1.14}
AT_1 = 2.0
W8A16 = 1.06  # over W8A8, up to 64 tokens
# Adapters: up to 1024 tokens LORA_FLOORS times their own floor and LORA_US more; from 4096 a factor by rank.
LORA_FLOORS, LORA_US = 1.5, 12.0
LORA_FACTOR = {16: 1.3, 64: 1.7}
DROP, STEP_FACTOR = 0.05, 2.0  # of a sweep: a larger batch may not be faster by more, nor 1.5x tokens cost over 2x
SWEEP_STEP = 1.5

BASE, IDLE_VARIANT = "no LoRA", "idle"


@dataclass(frozen=True)
class Row:
    """One backend in one cell.

    Attributes:
      model, scheme, routing, lora, tokens: the cell; `lora` is "none" or such as "r16 x 8".
      backend: who ran; `variant` says how where it is not the cell itself: BASE or IDLE_VARIANT.
      plan: the kernels it took, in words.
      us, spread: microseconds a call; (max - min) / median of the rounds.
      floor_us, lora_floor_us: what the cell, and its adapters alone, must cost.
      rel_l2, bound: against the recipe, and what it may be.
      bitwise: an idle variant's bits equal those without adapters.
      verdict: "ok", "wrong", "error" or "absent"; `reason` says why where not "ok".
    """

    model: str
    scheme: str
    routing: str
    lora: str
    tokens: int
    backend: str
    variant: str = ""
    plan: str = ""
    us: float | None = None
    spread: float | None = None
    floor_us: float | None = None
    lora_floor_us: float | None = None
    rel_l2: float | None = None
    bound: float | None = None
    bitwise: bool | None = None
    verdict: str = "ok"
    reason: str = ""

    @property
    def cell(self) -> tuple[str, str, str, str, int]:
        return self.model, self.scheme, self.routing, self.lora, self.tokens

    @property
    def where(self) -> str:
        lora = "" if self.lora == "none" else f" {self.lora}"
        return f"{self.model} {self.scheme} T={self.tokens}{lora}" + (
            "" if self.routing == "uniform" else f" {self.routing}"
        )


@dataclass(frozen=True)
class Figure:
    """One goal's outcome; `value` None: not run. `goal` is in words, `worst` names the cell that decides."""

    name: str
    goal: str
    value: float | None
    ok: bool | None
    worst: str = ""


OWN, OWN_W8A16 = "isomoe triton", "isomoe marlin"


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def _at_most(name: str, bound: float | None, found: Iterable[tuple[float, str]], unit: str = "x") -> Figure:
    """The largest of some values against a bound; None: reported only."""
    values = list(found)
    goal = "reported" if bound is None else f"<= {bound:g}{unit}"
    if not values:
        return Figure(name, goal, None, None)
    value, where = max(values)
    return Figure(name, goal, value, None if bound is None else value <= bound, where)


def _ours(rows: Iterable[Row], lora: bool, backend: str = OWN) -> list[Row]:
    """This package's rows of one backend with a time; no variant."""
    return [
        r for r in rows if r.backend == backend and r.us is not None and not r.variant and (r.lora != "none") == lora
    ]  # fmt: skip


def _uniform(rows: Iterable[Row]) -> list[Row]:
    return [r for r in rows if r.routing == "uniform"]


def _speedups(rows: Sequence[Row], ours: Sequence[Row]) -> list[tuple[float, Row]]:
    """(time of vLLM's fastest path, whatever its scheme, over ours, our row)."""

    def key(r: Row) -> tuple:
        return r.model, r.routing, r.lora, r.tokens

    best: dict[tuple, float] = {}
    for r in rows:
        if r.backend.startswith("vllm ") and r.us is not None and r.verdict == "ok":
            best[key(r)] = min(r.us, best.get(key(r), math.inf))
    return [(best[key(r)] / r.us, r) for r in ours if key(r) in best and r.us is not None]


def _speedup_figures(name: str, found: Sequence[tuple[float, Row]], mean: float, each: float | None) -> list[Figure]:
    """A scheme's geometric mean against `mean`, and the slowest cell against `each`."""
    figures = []
    for scheme in sorted({r.scheme for _, r in found}) or [""]:
        mine = [(v, r.where) for v, r in found if r.scheme == scheme]
        label = f"{name}{', ' * bool(scheme)}{scheme}, geometric mean"
        if not mine:
            figures.append(Figure(label, f">= {mean:g}x", None, None))
            continue
        value = _geomean([v for v, _ in mine])
        figures.append(
            Figure(label, f">= {mean:g}x", value, value >= mean, f"least {min(mine)[0]:.2f} {min(mine)[1]}")
        )
    if each is not None:
        least = min(((v, r.where) for v, r in found), default=None)
        figures.append(
            Figure(f"{name}, each", f">= {each:g}x", None, None) if least is None
            else Figure(f"{name}, each", f">= {each:g}x", least[0], least[0] >= each, least[1])
        )  # fmt: skip
    return figures


def _over_floor(rows: Iterable[Row]) -> list[tuple[float, str]]:
    return [(r.us / r.floor_us, r.where) for r in rows if r.us is not None and r.floor_us]


def _beside(rows: Sequence[Row], variant: str) -> list[tuple[Row, Row]]:
    """(the cell with adapters, the same backend's variant) pairs of this package's backends."""
    variants = {(r.cell, r.backend): r for r in rows if r.variant == variant and r.us is not None}
    return [
        (r, variants[r.cell, r.backend])
        for r in rows if not r.variant and r.us is not None and (r.cell, r.backend) in variants
    ]  # fmt: skip


def _lora_figures(rows: Sequence[Row]) -> list[Figure]:
    pairs = [(r, base) for r, base in _beside(rows, BASE) if r.routing == "uniform"]
    small = [
        (r.us / (base.us + LORA_FLOORS * (r.lora_floor_us or 0.0) + LORA_US), f"{r.backend} {r.where}")
        for r, base in pairs if r.tokens <= 1024 and r.us is not None and base.us is not None
    ]  # fmt: skip
    goal = f"its time without + {LORA_FLOORS:g} x adapters' floor + {LORA_US:g} us, T <= 1024"
    figures = [_at_most(f"LoRA: time over ({goal})", 1.0, small)]
    for rank, factor in LORA_FACTOR.items():
        large = [
            (r.us / base.us, f"{r.backend} {r.where}")
            for r, base in pairs
            if r.tokens >= 4096 and r.lora.startswith(f"r{rank} ") and r.us is not None and base.us is not None
        ]  # fmt: skip
        figures.append(_at_most(f"LoRA r{rank} over no LoRA, T >= 4096", factor, large))
    return figures


def _idle_figures(rows: Sequence[Row]) -> list[Figure]:
    base = {(r.cell, r.backend): r for r in rows if r.variant == BASE and r.us is not None}
    idle = [r for r in rows if r.variant == IDLE_VARIANT and r.us is not None]
    times = [
        (r.us / base[r.cell, r.backend].us, f"{r.backend} {r.where}")  # type: ignore[operator]
        for r in idle if (r.cell, r.backend) in base
    ]  # fmt: skip
    bits = [(0.0 if r.bitwise else 1.0, f"{r.backend} {r.where}") for r in idle if r.bitwise is not None]
    return [
        # Nothing on the host says here that no row has an adapter; an engine that knows leaves adapters out.
        _at_most("adapters loaded, none used by any id, over no LoRA", None, times),
        _at_most("cells whose idle bits differ from no LoRA", 0.0, bits, ""),
    ]


def sweep_sizes(last: int = 8192) -> list[int]:
    """1 to `last` in steps of SWEEP_STEP (at least one more each time)."""
    sizes = [1]
    while sizes[-1] < last:
        sizes.append(min(last, max(sizes[-1] + 1, math.ceil(sizes[-1] * SWEEP_STEP))))
    return sizes


def steps(rows: Sequence[Row]) -> list[tuple[float, str]]:
    """(time of a batch over that of the next smaller one, where) of this package's rows, sizes a sweep's step apart."""
    series: dict[tuple, list[Row]] = defaultdict(list)
    for r in rows:
        if r.backend.startswith("isomoe ") and r.us is not None and not r.variant:
            series[r.backend, r.model, r.scheme, r.routing, r.lora].append(r)
    found = []
    for several in series.values():
        several.sort(key=lambda r: r.tokens)
        for a, b in itertools.pairwise(several):
            if b.tokens <= max(a.tokens + 1, math.ceil(a.tokens * SWEEP_STEP)) and a.us and b.us:
                found.append((b.us / a.us, f"{b.backend} {b.where} after T={a.tokens}"))
    return found


def _sweep_figures(rows: Sequence[Row]) -> list[Figure]:
    found = steps(rows)
    # From 1 token to 2 is no step of 1.5x.
    jumps = [(ratio, where) for ratio, where in found if not where.endswith("after T=1")]
    drops = [(1 - ratio, where) for ratio, where in found]
    return [
        _at_most("sweep: largest drop to the next larger batch", DROP, drops, ""),
        _at_most("sweep: largest rise over a step of 1.5x tokens", STEP_FACTOR, jumps),
    ]


def _w8a16_ratios(rows: Sequence[Row]) -> list[tuple[float, str]]:
    eight = {r.cell: r.us for r in _ours(rows, lora=False)}
    return [
        (r.us / us, r.where)
        for r in _uniform(_ours(rows, False, OWN_W8A16))
        if r.tokens <= 64 and r.us is not None and (us := eight.get(r.cell)) is not None
    ]


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Every goal's outcome."""
    plain = _uniform(_ours(rows, lora=False))
    skewed = [r for r in _ours(rows, lora=False) if r.routing != "uniform"]
    found = [
        *_speedup_figures("over the best vLLM path, no LoRA", _speedups(rows, plain), SPEEDUP, SPEEDUP_EACH),
        *_speedup_figures("the same, skewed routing", _speedups(rows, skewed), SPEEDUP_SKEWED, None),
        *_speedup_figures(
            "over the best vLLM path with the same LoRA", _speedups(rows, _uniform(_ours(rows, lora=True))),
            SPEEDUP_LORA, SPEEDUP_LORA_EACH,
        ),
    ]  # fmt: skip
    for scheme, bound in LARGE_MEAN.items():
        ratios = _over_floor(r for r in plain if r.tokens >= 4096 and r.scheme == scheme)
        mean = [(_geomean([v for v, _ in ratios]), f"worst {max(ratios)[1]}")] if ratios else []
        found.append(_at_most(f"over floor, T >= 4096, {scheme}, geometric mean", bound, mean))
    found.append(_at_most("over floor, T >= 4096, each", LARGE_EACH, _over_floor(r for r in plain if r.tokens >= 4096)))
    found.append(_at_most("over floor, T = 1024", AT_1024, _over_floor(r for r in plain if r.tokens == 1024)))
    for scheme, bound in AT_64.items():
        cells = _over_floor(r for r in plain if r.tokens == 64 and r.scheme == scheme)
        found.append(_at_most(f"over floor, T = 64, {scheme}", bound, cells))
    found.append(_at_most("over floor, T = 1", AT_1, _over_floor(r for r in plain if r.tokens == 1)))
    found.append(_at_most("W8A16 over W8A8, T <= 64", W8A16, _w8a16_ratios(rows)))
    wrong = [
        (1.0, f"{r.backend} {r.where}: {r.reason}")
        for r in rows
        if r.verdict in ("wrong", "error") and r.backend.startswith("isomoe ")
    ]
    checked = [(0.0, "")] if any(r.rel_l2 is not None for r in rows) else []
    found += [*_lora_figures(rows), *_idle_figures(rows), *_sweep_figures(rows)]
    return [_at_most("own rows that are wrong or failed", 0.0, wrong or checked, ""), *found]
