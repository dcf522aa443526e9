# SPDX-License-Identifier: Apache-2.0
"""Random layers, adapters and batches at the dimensions of real models, made on the device that runs them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import torch

from ...common.checks import check_choice
from ...common.config import FusedMoEConfig
from ...common.presets import MODELS
from ..prepare import AdapterSlots, PreparedWeights, empty_slots

SCHEMES = ("block", "channel", "tensor")
ROUTINGS = ("uniform", "zipf", "hot8", "skipped")
ALIASES = {"30B": "qwen3-coder-30b", "35B": "qwen3.6-35b", "480B": "qwen3-coder-480b"}
FIRST_ADAPTER_ID = 100  # global ids that are no slot numbers
HOTTEST = 0.2  # of all pairs, under "zipf"
_EPS, _FP8_MAX = 1e-10, 448.0


@dataclass(frozen=True)
class Layer:
    """One MoE layer as one device holds it.

    Attributes:
      name: what reports call it.
      hidden, inter: H and I.
      experts: experts routed over; `local` of them, the first ones, are here.
      topk: experts a token visits.
    """

    name: str
    hidden: int
    inter: int
    experts: int
    local: int
    topk: int = 8

    @property
    def config(self) -> FusedMoEConfig:
        return FusedMoEConfig(self.experts, self.topk, self.hidden, self.inter)


def find_layer(name: str) -> Layer:
    """A layer by name: 30B, 35B, 480B or a preset's name, with "-EPn" behind it for one of n ranks' experts.

    Raises:
      ValueError: unknown, or n does not divide the experts.
    """
    match = re.fullmatch(r"(.+?)(?:-EP(\d+))?", name, re.IGNORECASE)
    base, ranks = (match[1], int(match[2] or 1)) if match else (name, 1)
    known = {**{alias.lower(): preset for alias, preset in ALIASES.items()}, **{n: n for n in MODELS}}
    check_choice("--model", base.lower(), known)
    config = MODELS[known[base.lower()]].config
    if not ranks or config.num_experts % ranks:
        raise ValueError(f"--model: got {name!r}, want a number of ranks that divides {config.num_experts} experts")
    return Layer(
        name, config.hidden_dim, config.intermediate_size, config.num_experts, config.num_experts // ranks,
        config.experts_per_token,
    )  # fmt: skip


def _codes(w: torch.Tensor, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = absmax.clamp(min=_EPS) / _FP8_MAX
    return (w / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), scale


def _blocks(w: torch.Tensor, halves: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] to codes and one scale a 128 x 128 block of each half, [halves * ceil(N/halves/128), ceil(K/128)]."""
    n, k = w.shape[0] // halves, w.shape[1]
    padded = torch.nn.functional.pad(w.view(halves, n, k), (0, -k % 128, 0, -n % 128))
    tiles = padded.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    codes, scale = _codes(tiles, tiles.abs().amax((2, 4), keepdim=True))
    codes = codes.view(torch.uint8).flatten(3, 4).flatten(1, 2)[:, :n, :k]
    return codes.reshape(w.shape), scale[:, :, 0, :, 0].flatten(0, 1)


def random_weights(layer: Layer, scheme: str, device: torch.device | str, seed: int = 1) -> PreparedWeights:
    """Experts of normal weights with unlike row gains (so that scales differ), quantised expert by expert.

    Args:
      scheme: one of SCHEMES, or "bf16".
    """
    check_choice("scheme", scheme, (*SCHEMES, "bf16"))
    gen = torch.Generator(device).manual_seed(seed)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("w13", "w2", "s13", "s2")}
    for _ in range(layer.local):
        for which, n, k, halves in (("13", 2 * layer.inter, layer.hidden, 2), ("2", layer.hidden, layer.inter, 1)):
            w = torch.randn(n, k, generator=gen, device=device) * k**-0.5
            w *= torch.exp(0.3 * torch.randn(n, 1, generator=gen, device=device))
            if scheme == "bf16":
                parts["w" + which].append(w.bfloat16())
                continue
            if scheme == "block":
                codes, scale = _blocks(w, halves)
            else:
                by_row = w.abs().amax(1, keepdim=True)
                codes, scale = _codes(w, by_row if scheme == "channel" else by_row.amax().expand(n, 1))
                scale = scale[:, 0]
            parts["w" + which].append(codes.view(torch.uint8))
            parts["s" + which].append(scale)
    w13, w2, s13, s2 = (torch.stack(p) if p else None for p in parts.values())
    assert w13 is not None and w2 is not None
    return PreparedWeights(w13, w2, s13, s2)


@dataclass(frozen=True)
class LoraSetting:
    """`count` adapters of `rank`; none where `count` is 0."""

    count: int = 0
    rank: int = 0
    shared_outer: bool = False

    def __str__(self) -> str:
        if not self.count:
            return "none"
        return f"r{self.rank} x {self.count}" + (" shared outer" if self.shared_outer else "")


def random_adapters(layer: Layer, setting: LoraSetting, device: torch.device | str, seed: int = 2) -> AdapterSlots:
    """Full slots with ids FIRST_ADAPTER_ID on; entries beyond the rank are zero, as a loaded adapter's are."""
    gen = torch.Generator(device).manual_seed(seed)
    slots = empty_slots(
        layer.config, max_loras=setting.count, max_lora_rank=setting.rank, device=device, num_experts=layer.local,
        shared_a13=setting.shared_outer, shared_b2=setting.shared_outer,
    )  # fmt: skip
    r = setting.rank
    for pool, axis, gain in (
        (slots.a13, 3, layer.hidden**-0.5), (slots.b13, 4, 0.5 * r**-0.5),
        (slots.a2, 3, layer.inter**-0.5), (slots.b2, 4, 0.5 * r**-0.5),
    ):  # fmt: skip
        pool.zero_()
        for slot in range(setting.count):
            part = pool[slot].narrow(axis - 1, 0, r)
            part.copy_(torch.randn(part.shape, generator=gen, device=device) * gain)
    slots.ranks.fill_(r)
    slots.slot_ids.copy_(torch.arange(FIRST_ADAPTER_ID, FIRST_ADAPTER_ID + setting.count))
    return slots


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch on the device, as `fused_moe` takes it; `local` [T, K] holds each pair's expert here, or -1."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    adapter_ids: torch.Tensor | None
    expert_map: torch.Tensor | None
    local: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.x.shape[0]

    def idle(self) -> Batch:
        """The same rows, none with an adapter."""
        assert self.adapter_ids is not None
        return replace(self, adapter_ids=torch.full_like(self.adapter_ids, -1))


@functools.lru_cache
def zipf(experts: int, hottest: float = HOTTEST) -> tuple[float, ...]:
    """Shares ``i**-s / sum`` of `experts` experts, with s such that the first takes `hottest` (bisection)."""
    low, high = 0.0, 8.0
    for _ in range(60):
        s = (low + high) / 2
        weights = [(i + 1) ** -s for i in range(experts)]
        if weights[0] / sum(weights) < hottest:
            low = s
        else:
            high = s
    return tuple(w / sum(weights) for w in weights)


def route_ids(layer: Layer, tokens: int, routing: str, gen: torch.Generator) -> torch.Tensor:
    """[T, K] int32 global expert ids on the host.

    "uniform" draws K distinct experts a token; one token of a layer spread over ranks has exactly one pair here.
    "zipf" draws every pair on its own (K distinct experts would hold the hottest to 1/K of the pairs), "hot8" sends
    all tokens to the same 8 experts, "skipped" is uniform with ids that no expert has among them.
    """
    check_choice("routing", routing, ROUTINGS)
    e, k = layer.experts, layer.topk
    if routing == "zipf":
        shares = torch.tensor(zipf(e))
        ids = torch.multinomial(shares, tokens * k, replacement=True, generator=gen).view(tokens, k)
    elif routing == "hot8":
        ids = torch.rand(tokens, min(8, e), generator=gen).argsort(1).repeat(1, -(-k // min(8, e)))[:, :k]
    elif tokens == 1 and layer.local < e and routing == "uniform":
        here = torch.randint(layer.local, (1,), generator=gen)
        elsewhere = layer.local + torch.randperm(e - layer.local, generator=gen)[: k - 1]
        ids = torch.cat([here, elsewhere])[None]
    else:
        ids = torch.rand(tokens, e, generator=gen).argsort(1)[:, :k]
    ids = ids.to(torch.int32)
    if routing == "skipped":
        ids[::5, 1 % k] = -1
        ids[::7, -1] = e + 4
        ids[min(2, tokens - 1)] = -1
    return ids.contiguous()


def random_batch(
    layer: Layer,
    tokens: int,
    index: int,
    device: torch.device | str,
    *,
    routing: str = "uniform",
    adapters: int = 0,
) -> Batch:
    """Batch number `index`; all batches of one size share their adapter ids: every fourth row is base, the others'
    are drawn uniformly over `adapters`.
    """
    gen = torch.Generator().manual_seed(1000 * tokens + 17 * index + 5)
    ids = route_ids(layer, tokens, routing, gen)
    weights = torch.softmax(torch.randn(tokens, layer.topk, generator=gen), 1)
    x = torch.randn(tokens, layer.hidden, generator=torch.Generator(device).manual_seed(index + 7), device=device)
    which = None
    if adapters:
        gen.manual_seed(tokens)
        which = FIRST_ADAPTER_ID + torch.randint(0, adapters, (tokens,), generator=gen, dtype=torch.int32)
        which[3::4] = -1
    expert_map = None
    known = (ids >= 0) & (ids < layer.experts)
    if layer.local < layer.experts:
        expert_map = torch.full((layer.experts,), -1, dtype=torch.int32)
        expert_map[: layer.local] = torch.arange(layer.local, dtype=torch.int32)
    local = torch.where(known & (ids < layer.local), ids, -1)

    def put(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.to(device)

    return Batch(x.bfloat16(), weights.to(device), ids.to(device), put(which), put(expert_map), local.to(device))


def poison(device: torch.device | str, large: int = 1 << 31) -> None:
    """Leave 0xFF bytes (NaN, out-of-range indices) in the memory that the next allocations get."""
    held = [torch.full((large,), 0xFF, dtype=torch.uint8, device=device) for _ in range(2)]
    held += [torch.full((1 << s,), 0xFF, dtype=torch.uint8, device=device) for s in range(9, 21) for _ in range(8)]
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    del held
