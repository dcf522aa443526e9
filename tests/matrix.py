# SPDX-License-Identifier: Apache-2.0
"""The shared test matrix: frozen case specs, and the arrays they stand for.

One `Case` describes a layer, a batch and its adapters; `build(case)` makes the arrays, always the same ones for the
same case. Tests, benchmarks and other projects read the same lists, so a backend that passes here has seen what every
other backend has seen.

Shapes are small because interpreters are slow; `WIDE` keeps one with H >= 512 * K, where sums over the experts are
short against the rows, and `PRODUCTION` lists real dimensions for executors that run natively or compile.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from isomoe.common.config import FusedMoEConfig
from isomoe.common.numerics import BF16
from isomoe.common.weights import LoRAAdapter, MoEWeights, quantize_moe_weights

if TYPE_CHECKING:
    from isomoe.common.executors import MoECall

ROUTINGS = (
    "uniform",
    "one_expert",  # every token visits the same K experts
    "empty_rank",  # no token visits the first half of the experts
    "remote",  # no token visits the experts of the last rank
    "ties",  # equal router weights
    "skipped",  # some ids are -1 or out of range, one row entirely
)
LORAS = (
    "none",
    "idle",  # adapters loaded, no row uses one
    "one",
    "mixed",  # three ranks, base rows between them
    "zero_b",
    "shared_outer",
)
FP8_SCHEMES = ("block", "channel", "tensor")


@dataclass(frozen=True)
class Shape:
    """Dimensions of one layer."""

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int


SMALL = Shape(8, 2, 256, 128)
UNEVEN = Shape(6, 3, 256, 256)  # experts do not divide by 4 or 8 ranks
WIDE = Shape(8, 2, 1024, 128)  # H >= 512 * K
PRODUCTION = {
    "qwen3-30b": Shape(128, 8, 2048, 768),
    "qwen3.6-35b": Shape(256, 8, 2048, 512),
    "qwen3-480b": Shape(160, 8, 6144, 2560),
    "qwen3-235b": Shape(128, 8, 4096, 1536),
    "deepseek-v3": Shape(256, 8, 7168, 2048),
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix. `str()` is its test id; `seed` follows from it."""

    scheme: str
    recipe: str
    lora: str = "none"
    routing: str = "uniform"
    ep: int = 1
    tokens: int = 16
    activation: str = "silu"
    bias: bool = False
    shape: Shape = field(default=SMALL)
    exact: bool = False  # inputs on the FP8 grid: quantising them loses nothing

    def __str__(self) -> str:
        s = self.shape
        parts = [self.scheme, self.recipe, self.lora, self.routing, f"ep{self.ep}", f"T{self.tokens}", self.activation]
        parts.append(f"E{s.num_experts}K{s.experts_per_token}H{s.hidden_dim}I{s.intermediate_size}")
        return "-".join(parts + ["bias"] * self.bias + ["exact"] * self.exact)

    @property
    def config(self) -> FusedMoEConfig:
        s = self.shape
        config = FusedMoEConfig(
            s.num_experts, s.experts_per_token, s.hidden_dim, s.intermediate_size, activation=self.activation,
            has_bias=self.bias,
        )
        return config if self.lora == "none" else config.with_lora(max_loras=4, max_lora_rank=16)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arrays of a case; `call_args` is what `run_moe` takes after the executor's name."""

    case: Case
    x: np.ndarray
    topk_weights: np.ndarray
    topk_ids: np.ndarray
    weights: MoEWeights
    adapters: tuple[LoRAAdapter, ...]
    adapter_ids: np.ndarray | None

    def call(self) -> MoECall:
        """The case as an executor receives it, checked."""
        from isomoe.common.executors import make_call

        return make_call(
            self.x, self.topk_weights, self.topk_ids, self.weights, config=self.case.config,
            adapters=self.adapters or None, adapter_ids=self.adapter_ids, ep_size=self.case.ep, recipe=self.case.recipe,
        )

    def run(self, executor: str, **changes: object) -> np.ndarray:
        """`run_moe` on these arrays, with keyword or array replacements."""
        from isomoe.common.executors import run_moe

        arrays = {k: changes.pop(k, getattr(self, k)) for k in ("x", "topk_weights", "topk_ids", "weights")}
        options: dict[str, object] = {
            "config": self.case.config, "adapters": self.adapters or None, "adapter_ids": self.adapter_ids,
            "ep_size": self.case.ep, "recipe": self.case.recipe,
        }
        return run_moe(executor, *arrays.values(), **(options | changes))  # type: ignore[arg-type]


def _routing(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    num_experts, k = case.shape.num_experts, case.shape.experts_per_token
    weights = rng.dirichlet(np.ones(k), case.tokens).astype(np.float32)
    pool = np.arange(num_experts)
    if case.routing == "empty_rank":
        pool = pool[num_experts // 2 :]
    elif case.routing == "remote":
        pool = pool[: num_experts - max(1, -(-num_experts // max(case.ep, 2)))]
    ids = np.stack([rng.permutation(pool)[:k] for _ in range(case.tokens)]).astype(np.int32)
    if case.routing == "one_expert":
        ids[:] = ids[0]
    elif case.routing == "ties":
        weights[:] = np.float32(1 / k)
    elif case.routing == "skipped":
        ids[::3, 0] = -1
        ids[1::4, -1] = num_experts + 5
        ids[min(2, case.tokens - 1)] = -1
    return weights, ids


def _adapters(case: Case, rng: np.random.Generator) -> tuple[tuple[LoRAAdapter, ...], np.ndarray | None]:
    if case.lora == "none":
        return (), None
    s = case.shape
    # Sized so that the delta is of the base output's order: a tolerance on the whole then cannot hide it.
    def one(adapter_id: int, rank: int) -> LoRAAdapter:
        shared = case.lora == "shared_outer"
        outer = 1 if shared else s.num_experts

        def normal(*dims: int, fan: int) -> np.ndarray:
            return (rng.standard_normal(dims) / np.sqrt(fan)).astype(BF16)

        b13 = normal(s.num_experts, 2, s.intermediate_size, rank, fan=rank)
        b2 = normal(outer, s.hidden_dim, rank, fan=rank)
        if case.lora == "zero_b":
            b13, b2 = np.zeros_like(b13), np.zeros_like(b2)
        return LoRAAdapter(
            adapter_id, normal(outer, 2, rank, s.hidden_dim, fan=s.hidden_dim), b13,
            normal(s.num_experts, rank, s.intermediate_size, fan=s.intermediate_size), b2,
        )

    ranks = ((5, 8),) if case.lora in ("one", "zero_b") else ((5, 8), (0, 16), (11, 3))
    loaded = tuple(one(adapter_id, rank) for adapter_id, rank in ranks)
    known = np.array([a.adapter_id for a in loaded], np.int32)
    ids = known[np.arange(case.tokens) % len(known)]
    ids[1::4] = -1
    if case.lora == "idle":
        ids[:] = -1
    return loaded, ids


def build(case: Case) -> Inputs:
    """The case's arrays, the same on every machine."""
    rng = np.random.default_rng(zlib.crc32(str(replace(case, recipe="", ep=1, lora="none")).encode()))
    s = case.shape

    def normal(*dims: int, fan: int) -> np.ndarray:
        return (rng.standard_normal(dims) / np.sqrt(fan)).astype(np.float32)

    # Rows and channels of unlike loudness: scales then differ, so a misplaced one shows. Not more, or one row would
    # outweigh the rest and the FP8 error of that row be the whole figure.
    w13 = normal(s.num_experts, 2 * s.intermediate_size, s.hidden_dim, fan=s.hidden_dim)
    w13 *= np.exp(0.2 * rng.standard_normal((s.num_experts, w13.shape[1], 1))).astype(np.float32)
    w2 = normal(s.num_experts, s.hidden_dim, s.intermediate_size, fan=s.intermediate_size)
    w2 *= np.exp(0.2 * rng.standard_normal((s.num_experts, s.hidden_dim, 1))).astype(np.float32)
    weights = quantize_moe_weights(w13, w2, case.scheme)
    if case.bias:
        weights = replace(
            weights, w13_bias=normal(s.num_experts, 2 * s.intermediate_size, fan=4),
            w2_bias=normal(s.num_experts, s.hidden_dim, fan=4),
        )
    x = normal(case.tokens, s.hidden_dim, fan=1)
    x *= np.exp(0.2 * rng.standard_normal((case.tokens, 1))).astype(np.float32)
    if case.exact:
        # Small integers with the largest at a code of the grid: every group's scale is a power of two over 448.
        x = rng.integers(-7, 8, x.shape).astype(np.float32)
        x[:, ::128] = 7.0
    topk_weights, topk_ids = _routing(case, rng)
    adapters, adapter_ids = _adapters(case, rng)
    return Inputs(case, x.astype(BF16), topk_weights, topk_ids, weights, adapters, adapter_ids)


INVARIANT_CASES = (Case("channel", "w8a8", "mixed"), Case("block", "w8a8", "mixed"), Case("channel", "w8a16", "mixed"))


def recipes_of(scheme: str) -> tuple[str, ...]:
    """The recipes a scheme has."""
    return ("bf16",) if scheme == "bf16" else ("w8a8", "w8a16")


def parity_cases() -> list[Case]:
    """Every axis against every scheme and recipe, then each remaining axis on its own.

    The full product would repeat the same code paths thousands of times; a kernel's paths are chosen by scheme, recipe
    and whether adapters are present, so those three are crossed in full and the others varied one at a time.
    """
    cases = [
        Case(scheme, recipe, lora)
        for scheme in (*FP8_SCHEMES, "bf16")
        for recipe in recipes_of(scheme)
        for lora in LORAS
        if lora != "idle"
    ]
    for scheme, recipe in (("channel", "w8a8"), ("block", "w8a8"), ("channel", "w8a16")):
        plain = Case(scheme, recipe, "mixed")
        cases += [replace(plain, routing=r) for r in ROUTINGS if r != "uniform"]
        cases += [replace(plain, tokens=t) for t in (1, 17)]
        cases += [replace(plain, activation=a) for a in ("gelu", "gelu_tanh", "swigluoai")]
        cases += [replace(plain, bias=True), replace(plain, shape=WIDE, tokens=5), replace(plain, shape=UNEVEN)]
    cases.append(Case("channel", "w8a8", exact=True))
    cases.append(Case("block", "w8a8", exact=True))
    return list(dict.fromkeys(cases))


def ep_cases() -> list[Case]:
    """Experts split over ranks: sizes, uneven splits, idle ranks, tokens that do not divide."""
    cases = [Case("channel", "w8a8", "mixed", ep=ep) for ep in (2, 4, 8)]
    cases += [Case("block", "w8a8", "mixed", ep=4), Case("channel", "w8a16", "mixed", ep=4)]
    cases += [Case("channel", "w8a8", "mixed", routing=r, ep=4, tokens=11) for r in ROUTINGS if r != "uniform"]
    cases += [Case("channel", "w8a8", "mixed", shape=UNEVEN, ep=4, tokens=1), Case("bf16", "bf16", "none", ep=2)]
    return cases


def quick_cases() -> list[Case]:
    """One case a recipe without adapters and with, one split over ranks: a first answer in seconds."""
    kinds = (("channel", "w8a8"), ("channel", "w8a16"), ("block", "w8a8"), ("bf16", "bf16"))
    cases = [Case(scheme, recipe, lora) for scheme, recipe in kinds for lora in ("none", "mixed")]
    return [*cases, Case("channel", "w8a8", "mixed", ep=4), Case("channel", "w8a16", "mixed", ep=4)]


def full_cases() -> list[Case]:
    """Scheme, recipe, adapters and routing crossed, and token counts about the sizes of tiles."""
    cases = [
        Case(scheme, recipe, lora, routing)
        for scheme in (*FP8_SCHEMES, "bf16") for recipe in recipes_of(scheme)
        for lora in ("none", "mixed", "shared_outer") for routing in ROUTINGS
    ]
    cases += [
        Case(scheme, recipe, "mixed", tokens=t)
        for scheme, recipe in (("channel", "w8a8"), ("block", "w8a8"), ("channel", "w8a16"))
        for t in (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129)
    ]
    return list(dict.fromkeys(cases))


def production_cases() -> list[Case]:
    """Real H, I and K with 16 experts (one rank's share), for executors that run natively; numpy needs a few GB."""
    cases = []
    for shape in PRODUCTION.values():
        share = replace(shape, num_experts=min(16, shape.num_experts))
        cases.append(Case("block", "w8a8", "mixed", tokens=64, shape=share))
        cases.append(Case("channel", "w8a8", tokens=1, shape=share))
    return cases
