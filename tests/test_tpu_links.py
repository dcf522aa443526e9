# SPDX-License-Identifier: Apache-2.0
"""The link model, the time model's terms and the choice of dispatch and transport. Arithmetic; nothing compiles."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from isomoe.common.config import FusedMoEConfig
from isomoe.common.presets import MODELS
from isomoe.tpu_impl.generations import GENERATIONS, generation
from isomoe.tpu_impl.links import Fabric, Traffic, dispatch_us, share_reached, transport_us
from isomoe.tpu_impl.spec import DISPATCHES, TRANSPORTS
from isomoe.tpu_impl.time_model import roofline, row_distribution
from isomoe.tpu_impl.wires import AUTO, candidates, codes_at_source, resolve_wires

LARGE, SMALL = MODELS["qwen3-coder-480b"].config, MODELS["qwen3-coder-30b"].config
# 8 devices on grids without wraparound, 100 GB/s a link one way.
GRIDS = {"v6e": Fabric((2, 4), 8, 1, 100.0), "v7x": Fabric((2, 2, 1), 8, 2, 100.0)}
NAMES = ("ag_fp8", "ag_bf16", "push_fp8", "push_bf16", "presum_fp8", "presum_bf16", "rs_bf16")
# Microseconds on the bottleneck link, worked out by hand for these grids.
TABLE = {
    ("v6e", "480b", 8192): (220, 440, 503, 1007, 335, 670, 440),
    ("v7x", "480b", 8192): (189, 378, 503, 1007, 228, 456, 378),
    ("v6e", "30b", 8192): (73, 147, 168, 336, 112, 224, 147),
    ("v7x", "30b", 8192): (63, 126, 168, 336, 76, 152, 126),
    ("v6e", "480b", 512): (13.8, 27.5, 31.5, 62.9, 20.9, 41.8, 27.5),
    ("v7x", "480b", 512): (11.8, 23.6, 31.5, 62.9, 14.2, 28.5, 23.6),
}


def _config(name: str) -> FusedMoEConfig:
    return MODELS[f"qwen3-coder-{name}"].config


@pytest.mark.parametrize("cell", TABLE, ids=str)
def test_bottleneck_links(cell: tuple[str, str, int]) -> None:
    name, model, tokens = cell
    c = _config(model)
    traffic = Traffic(tokens, c.hidden_dim, c.experts_per_token, c.num_experts, scales=False, whole_chips=True)
    got = [
        (dispatch_us if n in DISPATCHES else transport_us)(GRIDS[name], traffic, n) for n in NAMES
    ]
    assert got == pytest.approx(TABLE[cell], rel=0.01)


def test_shares_and_hops() -> None:
    """Eight of 160 experts touch 5.3 of 8 devices; a push crosses the middle of the grid, a gather fills a corner."""
    assert 8 * share_reached(160, 8, 8) == pytest.approx(5.32, abs=0.01)
    assert 4 * share_reached(160, 8, 4) == pytest.approx(3.62, abs=0.01)
    assert share_reached(8, 8, 8) == 1
    assert (GRIDS["v6e"].fewest_links(), GRIDS["v6e"].hot_link()) == (2, 8)
    assert (GRIDS["v7x"].fewest_links(), GRIDS["v7x"].hot_link()) == (2, 2)
    assert Fabric((2, 2, 4), 32, 2, 100.0).hot_link() == 16
    # Half the devices: the first half of the grid.
    assert Fabric((2, 4), 4, 1, 100.0).chips == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_one_chip_has_no_links() -> None:
    alone, traffic = Fabric((2, 2, 1), 2, 2, 100.0), Traffic(512, 2048, 8, 128)
    assert all(dispatch_us(alone, traffic, d) == 0 for d in DISPATCHES)
    assert all(transport_us(alone, traffic, t) == 0 for t in TRANSPORTS)


def test_bad_fabrics() -> None:
    with pytest.raises(ValueError, match="ep: got 3, want a divisor of the 8 devices"):
        Fabric((2, 4), 3, 1, 90.0)
    with pytest.raises(ValueError, match=r"grid: got \(0, 4\)"):
        Fabric((0, 4), 1, 1, 90.0)


@pytest.mark.parametrize(
    ("name", "model", "tokens", "want"),
    [("v7x", "480b", 512, 271), ("v7x", "480b", 8192, 692), ("v7x", "30b", 8192, 174), ("v6e", "480b", 8192, 1062),
     ("v6e", "480b", 512, 591)],
)
def test_rooflines(name: str, model: str, tokens: int, want: float) -> None:
    """Gather, then the larger of bytes, dots and pushes, or summed rows after them."""
    floor = roofline(generation(name), GRIDS[name], _config(model), tokens)
    assert floor.total == pytest.approx(want, rel=0.02)
    assert floor.dispatch == "ag_fp8"


def test_summed_rows_win_only_where_links_do() -> None:
    assert roofline(generation("v7x"), GRIDS["v7x"], LARGE, 8192).transport == "push_fp8"
    assert roofline(generation("v7x"), GRIDS["v7x"], SMALL, 8192).transport == "presum_fp8"


def test_rows_of_an_expert() -> None:
    spread = row_distribution(512, 8, 160)
    assert sum(p for _, p in spread) == pytest.approx(1, abs=1e-6)
    assert sum(n * p for n, p in spread) == pytest.approx(25.6, abs=1e-3)
    assert row_distribution(3, 4, 4) == [(3, 1.0)]


@pytest.mark.parametrize("name", ["v6e", "v7x"])
@pytest.mark.parametrize("model", ["480b", "30b"])
@pytest.mark.parametrize("tokens", [64, 512, 8192])
@pytest.mark.parametrize("fp8", [False, True])
def test_auto_is_the_cheapest_allowed(name: str, model: str, tokens: int, fp8: bool) -> None:
    gen, config = generation(name), _config(model)
    fabric = Fabric.of(gen, GRIDS[name].grid, 8)
    allowed = candidates(
        gen, fabric, config, tokens, scheme="channel", recipe=gen.default_recipe, fp8_wire=fp8, fp8_input=fp8
    )
    assert [c.total_us for c in allowed] == sorted(c.total_us for c in allowed)
    got = resolve_wires(
        gen, fabric, config, tokens, scheme="channel", recipe=gen.default_recipe, fp8_wire=fp8, fp8_input=fp8
    )
    assert got == (allowed[0].dispatch, allowed[0].transport)
    # Bits only move where that is declared: codes at the source are w8a8's own.
    assert fp8 or got[1].endswith("bf16")
    assert fp8 or got[0] == ("ag_fp8" if gen.native_e4m3 else "ag_bf16")


def test_adapters_do_not_change_how_results_leave() -> None:
    gen = generation("v7x")
    for tokens, fp8 in itertools.product((64, 512, 8192), (False, True)):
        base = resolve_wires(gen, GRIDS["v7x"], LARGE, tokens, scheme="channel", recipe="w8a8", fp8_wire=fp8)
        lora = resolve_wires(
            gen, GRIDS["v7x"], LARGE, tokens, scheme="channel", recipe="w8a8", max_loras=4, max_lora_rank=16,
            fp8_wire=fp8,
        )
        assert lora == ("ag_bf16", base[1])


def test_rows_are_quantised_where_they_come_from_if_bits_stay() -> None:
    """w8a8's own codes, halving what is gathered; not with adapters, static or block scales, nor another recipe."""
    def chosen(name: str = "v7x", ep: int = 8, scheme: str = "channel", recipe: str = "w8a8", **more: Any) -> str:
        return codes_at_source(name, LARGE, 512, ep=ep, scheme=scheme, recipe=recipe, transport="push_bf16", **more)

    assert chosen() == "ag_fp8"
    assert chosen(recipe="w8a16") == chosen(scheme="block") == chosen(static_scales=True) == "ag_bf16"
    assert chosen(max_loras=4, max_lora_rank=16) == "ag_bf16"
    # No slice has three devices to model; any mesh may.
    assert chosen(ep=3) == "ag_bf16"


def test_what_is_asked_for_is_kept_or_refused() -> None:
    gen, fabric = generation("v7x"), GRIDS["v7x"]
    asked = resolve_wires(
        gen, fabric, SMALL, 512, scheme="block", recipe="w8a8", dispatch=AUTO, transport="push_fp8"
    )
    assert asked == ("ag_bf16", "push_fp8")
    with pytest.raises(ValueError, match="dispatch: got 'ag_fp8'"):
        resolve_wires(gen, fabric, SMALL, 512, scheme="block", recipe="w8a8", dispatch="ag_fp8")
    with pytest.raises(ValueError, match="transport"):
        resolve_wires(gen, fabric, SMALL, 512, scheme="block", recipe="w8a8", transport="psuh_fp8")


def test_reference_clocks() -> None:
    assert GENERATIONS["v7x"].clock_ghz == 1.2
    assert set(GENERATIONS["v7x"].clocks_ghz) == {1.1, 1.2, 1.3}
