# SPDX-License-Identifier: Apache-2.0
"""What a layer must at least cost: bytes over the bandwidth, FLOPs over the arithmetic rate, both measured."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...common.capacity import LORA_BYTES, expert_bytes
from .data import Batch, Layer, LoraSetting

SIDE = 8192  # of the matrices that the arithmetic rates are taken from
COPY_BYTES = 4 << 30


@dataclass(frozen=True)
class Rates:
    """Bytes and FLOPs a second of one device, and where they come from."""

    bytes_per_s: float
    fp8_flops: float
    bf16_flops: float
    source: str = "measured"


def _seconds(call: Callable[[], object], repeats: int = 12) -> float:
    """Median seconds of a call right after a rest, before a power limit slows the clock."""
    call()
    torch.cuda.synchronize()
    time.sleep(0.7)
    for _ in range(3):
        call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) * 1e-3


def _copy_seconds() -> float:
    source = torch.empty(COPY_BYTES // 4, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source))


def measure_rates() -> Rates:
    """A device copy (read and write), and cuBLAS's bf16 and fp8 products of random data; about four seconds."""
    copied = 2 * COPY_BYTES / _copy_seconds()
    a, b = (torch.randn(SIDE, SIDE, device="cuda").bfloat16() for _ in range(2))
    flops = 2 * SIDE**3
    bf16 = flops / _seconds(lambda: torch.mm(a, b))
    fp8 = bf16
    if torch.cuda.get_device_capability() >= (8, 9):
        a8 = (a * 30).clamp(-448, 448).to(torch.float8_e4m3fn)
        b8 = (b * 30).clamp(-448, 448).to(torch.float8_e4m3fn).t()
        # One scale in all, and one a row and column: whichever this device multiplies faster.
        scales = [torch.ones(shape, device="cuda") for shape in ((), (SIDE, 1), (1, SIDE))]

        def multiply(scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
            return torch._scaled_mm(
                a8, b8, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        pairs = ((scales[0], scales[0]), (scales[1], scales[2]))
        fp8 = max(flops / _seconds(functools.partial(multiply, *pair)) for pair in pairs)
    return Rates(copied, fp8, bf16)


@dataclass(frozen=True)
class Work:
    """Bytes and FLOPs of a batch; adapters' apart.

    Weights and scales of each expert touched count once, as do the matrices of each (expert, adapter) pair touched,
    the rows of x that have an expert here, and the result. Intermediates are free.
    """

    bytes: float
    flops: float
    lora_bytes: float = 0.0
    lora_flops: float = 0.0


def work_of(layer: Layer, scheme: str, batch: Batch, setting: LoraSetting) -> Work:
    """The work of one batch."""
    local = batch.local.cpu().long()
    here = local >= 0
    pairs, touched = int(here.sum()), int(local[here].unique().numel())
    rows = int(here.any(1).sum()) + batch.tokens
    base = Work(
        touched * expert_bytes(layer.config, scheme) + rows * layer.hidden * 2, 6.0 * layer.hidden * layer.inter * pairs
    )
    if not setting.count or batch.adapter_ids is None:
        return base
    adapter = batch.adapter_ids.cpu().long()[:, None].expand_as(local)
    with_adapter = here & (adapter >= 0)
    users = int(with_adapter.sum())
    stacks = int((adapter * layer.experts + local)[with_adapter].unique().numel())
    outer = int(adapter[with_adapter].unique().numel()) if setting.shared_outer else stacks
    per_rank = 3 * (outer * layer.hidden + stacks * layer.inter)
    return Work(
        base.bytes, base.flops, LORA_BYTES * setting.rank * per_rank,
        2.0 * setting.rank * 3 * (layer.hidden + layer.inter) * users,
    )  # fmt: skip


def floor_us(work: Work, rates: Rates, arithmetic: str) -> float:
    """Microseconds: the larger of bytes and FLOPs; adapters multiply in bf16, experts in `arithmetic`."""
    rate = rates.fp8_flops if arithmetic == "w8a8" else rates.bf16_flops
    moved = (work.bytes + work.lora_bytes) / rates.bytes_per_s
    return 1e6 * max(moved, work.flops / rate + work.lora_flops / rates.bf16_flops)


def lora_floor_us(work: Work, rates: Rates) -> float:
    """Microseconds that adapters alone must cost: their bytes or their FLOPs."""
    return 1e6 * max(work.lora_bytes / rates.bytes_per_s, work.lora_flops / rates.bf16_flops)
