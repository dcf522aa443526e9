# SPDX-License-Identifier: Apache-2.0
"""The quantiser, its twins in other libraries, and the FP8 conversions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from isomoe.common import numerics as nx

ALL_BF16 = np.arange(65536, dtype=np.uint16).view(nx.BF16)
ALL_CODES = np.arange(256, dtype=np.uint8).view(nx.E4M3)
# Rows whose maxima spread over many binades, zeros and single values among them.
COLUMNS = 1024


def _random_rows(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count // COLUMNS, COLUMNS), np.float32)
    x *= np.exp(3 * rng.standard_normal((len(x), 1), np.float32))
    x[::97] = 0
    x[5::101, 1:] = 0
    return x.astype(nx.BF16)


def _grid_of_all_bf16() -> np.ndarray:
    """All finite bfloat16 values, as rows of mixed magnitude."""
    finite = ALL_BF16[np.isfinite(ALL_BF16.astype(np.float32))]
    order = np.random.default_rng(3).permutation(len(finite))
    return finite[order][: len(finite) // 128 * 128].reshape(-1, 128)


def test_every_bf16_value_quantises_within_half_a_step() -> None:
    x = _grid_of_all_bf16()
    codes, scales = nx.quantize_fp8(x, "token")
    back = codes.astype(np.float64) * scales.astype(np.float64)
    # Half a step of e4m3: 2^-4 relative, or half the smallest subnormal times the scale.
    bound = np.maximum(np.abs(x.astype(np.float64)) * 2.0**-4, scales * 2.0**-10) * (1 + 1e-5)
    assert (np.abs(back - x.astype(np.float64)) <= bound).all()


@pytest.mark.parametrize("group", ["token", 128])
def test_formula_is_the_one_written_down(group: str | int) -> None:
    """Element by element in scalar float32, nothing vectorised: the same scales and codes."""
    x = _random_rows(4 * COLUMNS, 0)
    codes, scales = nx.quantize_fp8(x, group)
    width = COLUMNS if group == "token" else 128
    for r in range(len(x)):
        for g in range(COLUMNS // width):
            run = x[r, g * width : (g + 1) * width].astype(np.float32)
            s = np.float32(max(np.abs(run).max(), np.float32(1e-10))) * np.float32(1 / 448)
            inv = np.float32(1) / s
            assert scales[r, g] == s
            want = np.array([min(max(v * inv, np.float32(-448)), np.float32(448)) for v in run], np.float32)
            assert (codes[r, g * width : (g + 1) * width].view(np.uint8) == want.astype(nx.E4M3).view(np.uint8)).all()


def test_zero_rows_nan_and_infinity_stay_in_their_group() -> None:
    x = np.ones((4, 256), np.float32)
    x[0] = 0
    x[1, 3] = np.nan
    x[2, 200] = np.inf
    codes, scales = nx.quantize_fp8(x, 128)
    assert not codes[0].astype(np.float32).any() and np.isfinite(scales[0]).all()
    assert np.isnan(codes[1, :128].astype(np.float32)).all() and np.isfinite(codes[1, 128:].astype(np.float32)).all()
    assert not codes[2, 128:200].astype(np.float32).any() and np.isnan(codes[2, 200].astype(np.float32))
    assert np.isfinite(codes[3].astype(np.float32)).all()


def test_short_last_group() -> None:
    x = _random_rows(2 * COLUMNS, 1)[:, :300]
    codes, scales = nx.quantize_fp8(x, 128)
    tail_codes, tail_scales = nx.quantize_fp8(np.ascontiguousarray(x[:, 256:]), "token")
    assert scales.shape == (2, 3) and (scales[:, 2:] == tail_scales).all()
    assert (codes[:, 256:].view(np.uint8) == tail_codes.view(np.uint8)).all()


@pytest.mark.parametrize(
    ("x", "group", "message"),
    [
        (np.ones((2, 4), np.int32), "token", "x: got int32, want a float array"),
        (np.ones((2, 0), np.float32), "token", "at least one column"),
        (np.ones((2, 4), np.float32), "row", "group: got 'row'"),
        (np.ones((2, 4), np.float32), 0, "group: got 0"),
    ],
)
def test_bad_quantiser_arguments(x: np.ndarray, group: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        nx.quantize_fp8(x, group)  # type: ignore[arg-type]


def test_overflow_is_clipped_not_cast() -> None:
    """torch#178817: casts past 448 give NaN or 448 by version; a clip before the cast gives 448 everywhere."""
    codes = nx.quantize_fp8_static(np.array([464.01, 1e9, -1e9, np.inf], np.float32), 1.0)
    assert codes.astype(np.float32).tolist() == [448, 448, -448, 448]


def test_channel_tensor_and_block_scales_cover_their_weights() -> None:
    rng = np.random.default_rng(2)
    w = rng.standard_normal((3, 200, 300)).astype(np.float32)
    for quantize, expand in (
        (nx.quantize_weight_channel, lambda s: s[..., None]),
        (nx.quantize_weight_tensor, lambda s: s[..., None, None]),
        (nx.quantize_weight_block, lambda s: nx.expand_blocks(s, 200, 300)),
    ):
        codes, scales = quantize(w)
        back = codes.astype(np.float32) * expand(scales)
        assert np.linalg.norm(back - w) / np.linalg.norm(w) < 0.03
    assert nx.quantize_weight_block(w)[1].shape == (3, 2, 3)


def test_ue8m0_is_exact_at_powers_of_two_and_rounds_up_between() -> None:
    powers = np.ldexp(np.float32(1), np.arange(-126, 127)).astype(np.float32)
    assert (nx.ue8m0_ceil(powers) == powers).all()
    above = np.nextafter(powers[:-1], np.float32(np.inf), dtype=np.float32)
    assert (nx.ue8m0_ceil(above) == powers[1:]).all()


def test_e8m0_bytes_decode_as_ml_dtypes_does() -> None:
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    got = nx.decode_e8m0(codes)
    assert (got[:255] == want[:255]).all() and np.isnan(got[255])


def test_e4m3fnuz_reads_the_same_values() -> None:
    finite = ALL_CODES[np.isfinite(ALL_CODES.astype(np.float32))]
    fnuz, scale = nx.e4m3fn_to_fnuz(finite, np.float32(0.5))
    assert (fnuz.astype(np.float32) * scale == finite.astype(np.float32) * np.float32(0.5)).all()
    with pytest.raises(ValueError, match="codes: got NaN"):
        nx.e4m3fn_to_fnuz(ALL_CODES, np.float32(1))


# The quantiser's twins. 2^24 random values and every bfloat16 input: not one code or scale may differ.
# Long rows, because Triton's interpreter pays for every program it runs.


def _many() -> np.ndarray:
    return _random_rows(2**24, 7).reshape(256, 65536)


TWINS = pytest.mark.parametrize(
    ("make", "group"),
    [
        pytest.param(m, g, id=f"{n}-{g}")
        for n, m in (("2^24", _many), ("bf16", _grid_of_all_bf16))
        for g in ("token", 128)
    ],
)


def _assert_same(codes: np.ndarray, scales: np.ndarray, x: np.ndarray, group: str | int) -> None:
    want_codes, want_scales = nx.quantize_fp8(x, group)
    assert np.array_equal(np.asarray(scales, np.float32).reshape(want_scales.shape), want_scales)
    assert int((codes.reshape(x.shape) != want_codes.view(np.uint8)).sum()) == 0


def _as_rows(x: np.ndarray, group: str | int) -> np.ndarray:
    """A group of 128 columns is a row of its own to a row quantiser."""
    return x if group == "token" else x.reshape(-1, 128)


@TWINS
def test_torch_agrees_on_every_code(make, group: str | int) -> None:
    """The written formula, in torch: same operations in the same order, clip before cast."""
    torch = pytest.importorskip("torch")
    x = make()
    rows = torch.from_numpy(_as_rows(x, group).astype(np.float32))
    scales = rows.abs().amax(1, keepdim=True).clamp_min(float(nx.EPS)) * float(nx.INV_E4M3_MAX)
    codes = (rows * (1.0 / scales)).clamp(-448, 448).to(torch.float8_e4m3fn)
    _assert_same(codes.view(torch.uint8).numpy(), scales.numpy(), x, group)


@TWINS
def test_jax_agrees_on_every_code(make, group: str | int) -> None:
    jax = pytest.importorskip("jax")
    from isomoe.tpu_impl.numerics import quantize_rows

    x = make()
    codes, scales = jax.jit(quantize_rows)(_as_rows(x, group).astype(np.float32))
    _assert_same(np.asarray(codes).view(np.uint8), np.asarray(scales), x, group)


@TWINS
def test_triton_agrees_on_every_code(make, group: str | int) -> None:
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    from isomoe.cuda_impl.quantize import quantize_rows

    x = make()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    codes, scales = quantize_rows(torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device), group)
    _assert_same(codes.cpu().numpy(), scales.cpu().numpy(), x, group)
