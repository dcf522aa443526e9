# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels one by one: sort, quantisers, combine, and what must never be read."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from isomoe.common.numerics import BF16, E4M3, quantize_fp8, quantize_fp8_static
from isomoe.cuda_impl._runtime import INTERPRETED, tl, triton
from isomoe.cuda_impl.align import align
from isomoe.cuda_impl.combine import combine
from isomoe.cuda_impl.device_numerics import decode_e4m3
from isomoe.cuda_impl.prepare import to_torch
from isomoe.cuda_impl.quantize import quantize_rows, scale_rows_f16

DEVICE = "cpu" if INTERPRETED else "cuda"
ALL_BF16 = np.arange(65536, dtype=np.uint16).view(BF16)


def _expected_order(ids, adapters, top_k, experts, emap, slots, block_m):
    """Sorted pairs by plain Python: (expert, slot), then pair; padded per expert."""
    kept = []
    for pair, expert in enumerate(ids.reshape(-1).tolist()):
        if not 0 <= expert < (len(emap) if emap is not None else experts):
            continue
        local = expert if emap is None else int(emap[expert])
        if local < 0:
            continue
        adapter = -1 if adapters is None else int(adapters[pair // top_k])
        slot = slots.index(adapter) if adapter >= 0 and adapter in slots else -1
        kept.append((local, slot, pair))
    rows, tiles = [], []
    for expert in range(experts):
        mine = [p for e, _, p in sorted(kept) if e == expert]
        padded = -(-len(mine) // block_m) * block_m
        rows += mine + [-1] * (padded - len(mine))
        tiles += [expert] * (padded // block_m)
    return rows, tiles, kept


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "with_map", "with_lora", "block_m", "dtype"),
    [
        (1, 2, 4, False, False, 16, np.int32),
        (24, 3, 5, True, True, 16, np.int32),
        (300, 8, 7, False, True, 32, np.int64),  # more than one chunk of pairs
        (70, 4, 40, True, False, 16, np.int64),  # more experts than most batches visit
        (64, 1, 2, False, True, 64, np.int32),
    ],
)
def test_align_is_the_stable_sort(tokens, top_k, experts, with_map, with_lora, block_m, dtype) -> None:
    rng = np.random.default_rng(tokens)
    global_experts = experts + 3 if with_map else experts
    ids = rng.integers(-2, global_experts + 2, (tokens, top_k)).astype(dtype)
    emap = None
    if with_map:
        emap = np.full(global_experts, -1, np.int32)
        emap[rng.permutation(global_experts)[:experts]] = np.arange(experts)
    slots = [7, -1, 3] if with_lora else []
    adapters = rng.choice([-1, 3, 7, 99], tokens).astype(np.int32) if with_lora else None
    got = align(
        to_torch(ids, DEVICE), local_experts=experts, block_m=block_m,
        expert_map=None if emap is None else to_torch(emap, DEVICE),
        adapter_ids=None if adapters is None else to_torch(adapters, DEVICE),
        slot_ids=to_torch(np.array(slots, np.int32), DEVICE) if with_lora else None,
    )  # fmt: skip
    rows, tiles, kept = _expected_order(ids, adapters, top_k, experts, emap, slots, block_m)
    assert int(got.num_tiles) == len(tiles) <= got.max_tiles
    assert got.sorted_pair[: len(rows)].tolist() == rows
    assert got.tile_expert[: len(tiles)].tolist() == tiles
    bins = np.full(tokens * top_k, -1)
    for expert, slot, pair in kept:
        bins[pair] = expert * (len(slots) + 1) + slot + 1
    assert got.pair_bin.tolist() == bins.tolist()
    counts = np.bincount(bins[bins >= 0], minlength=experts * (len(slots) + 1))
    assert got.bin_count.tolist() == counts.tolist()
    for index in np.flatnonzero(counts):
        start = int(got.expert_start[index // (len(slots) + 1)] + got.bin_offset[index])
        assert got.sorted_pair[start : start + counts[index]].tolist() == np.flatnonzero(bins == index).tolist()


def _same_codes(got: torch.Tensor, want: np.ndarray) -> None:
    got_bits, want_bits = got.cpu().numpy(), want.view(np.uint8)
    nan = (want_bits & 0x7F) == 0x7F
    np.testing.assert_array_equal((got_bits & 0x7F) == 0x7F, nan)
    np.testing.assert_array_equal(got_bits[~nan], want_bits[~nan])


def _random_rows() -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal((24, 2000)) * np.exp(3 * rng.standard_normal((24, 1)))).astype(BF16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy reports the infinities
@pytest.mark.parametrize(
    ("rows", "group"),
    [
        pytest.param(ALL_BF16.reshape(256, 256), "token", id="all-bf16-token"),
        pytest.param(ALL_BF16.reshape(32, 2048), 128, id="all-bf16-128"),
        pytest.param(np.stack([ALL_BF16[:0x43E0:100], np.full(174, 448, BF16)], 1), "token", id="fixed-scale"),
        pytest.param(_random_rows(), "token", id="random-token"),
        pytest.param(_random_rows(), 128, id="random-128-short-last-group"),
        pytest.param(_random_rows(), 384, id="random-384"),
        pytest.param(np.zeros((3, 256), BF16), "token", id="zeros-token"),
        pytest.param(np.zeros((3, 256), BF16), 128, id="zeros-128"),
    ],
)
def test_quantiser_matches_the_formula_bit_for_bit(rows: np.ndarray, group: str | int) -> None:
    codes, scales = quantize_rows(to_torch(rows, DEVICE), group)
    want, want_scales = quantize_fp8(rows, group)
    _same_codes(codes, want)
    np.testing.assert_array_equal(scales.cpu().numpy(), want_scales)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_static_quantiser_matches_the_formula() -> None:
    rows = ALL_BF16.reshape(256, 256)
    codes, _ = quantize_rows(to_torch(rows, DEVICE), "static", static_scale=torch.tensor([0.37], device=DEVICE))
    _same_codes(codes, quantize_fp8_static(rows, 0.37))


def test_nan_stays_in_its_row_and_its_group() -> None:
    rows = _random_rows()[:3, :512].copy()
    rows[1, 200] = np.nan
    codes, _ = quantize_rows(to_torch(rows, DEVICE), "token")
    is_nan = (codes.cpu().numpy() & 0x7F) == 0x7F
    assert is_nan[1].all() and not is_nan[[0, 2]].any()
    codes, _ = quantize_rows(to_torch(rows, DEVICE), 128)
    is_nan = (codes.cpu().numpy() & 0x7F) == 0x7F
    assert is_nan[1, 128:256].all() and is_nan.sum() == 128


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_f16_rows_are_exact_down_to_2_to_the_minus_29_of_the_maximum() -> None:
    values = ALL_BF16[np.isfinite(ALL_BF16.astype(np.float32))].reshape(255, 256)
    q, scale = scale_rows_f16(to_torch(values, DEVICE))
    back = q.cpu().numpy().astype(np.float64) * scale.cpu().numpy()
    exact = values.astype(np.float64)
    limit = np.abs(exact).max(1, keepdims=True) * 2.0**-29
    kept = np.abs(exact) >= limit
    np.testing.assert_array_equal(back[kept], exact[kept])
    assert (np.abs(back - exact) <= limit * 2.0**-10).all()
    bits = scale.cpu().numpy().view(np.uint32)
    assert ((bits & 0x7FFFFF) == 0).all(), "scales must be powers of two"


@triton.jit
def _decode_kernel(code_ptr, out_ptr):
    lane = tl.arange(0, 256)
    tl.store(out_ptr + lane, decode_e4m3(tl.load(code_ptr + lane)).to(tl.float32))


def test_all_256_codes_decode_exactly() -> None:
    codes = torch.arange(256, dtype=torch.int32, device=DEVICE).to(torch.uint8)
    out = torch.empty(256, device=DEVICE)
    _decode_kernel[(1,)](codes, out)
    want = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    np.testing.assert_array_equal(out.cpu().numpy(), want)


@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_combine_order_and_skipped_pairs(rows_dtype, out_dtype) -> None:
    """Fixed order, f32, and NaN in the rows and weights of skipped pairs left out."""
    rng = np.random.default_rng(1)
    tokens, top_k, hidden = 5, 4, 300
    o = torch.from_numpy(rng.standard_normal((tokens * top_k, hidden)).astype(np.float32)).to(rows_dtype)
    weights = torch.from_numpy(rng.random((tokens, top_k)).astype(np.float32))
    bins = torch.from_numpy(rng.integers(0, 9, tokens * top_k).astype(np.int32))
    skipped = torch.tensor([0, 5, 6, 16, 17, 18, 19])
    bins[skipped] = -1
    o[skipped] = float("nan")
    weights.view(-1)[skipped] = float("nan")
    out = torch.full((tokens, hidden), float("nan"), dtype=out_dtype, device=DEVICE)
    combine(o.to(DEVICE), weights.to(DEVICE), bins.to(DEVICE), out)
    want = np.zeros((tokens, hidden), np.float32)
    for k in range(top_k):
        for t in range(tokens):
            if bins[t * top_k + k] >= 0:
                want[t] += weights[t, k].numpy() * o[t * top_k + k].float().numpy()
    # A fused multiply-add on the device rounds once less: one step of the output's precision.
    bound = 2.0**-22 if out_dtype == torch.float32 else 2.0**-8
    np.testing.assert_allclose(out.float().cpu().numpy(), want, rtol=bound, atol=bound)
    assert not out[4].any()
