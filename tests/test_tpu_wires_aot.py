# SPDX-License-Identifier: Apache-2.0
"""Every transport, FP8 rows for bf16 dots and builds with stages left out, compiled ahead of time for real topologies.

Needs libtpu, no TPU. Every compilation runs in its own process.
"""

from __future__ import annotations

import importlib.util

import pytest

from isomoe.common.config import FusedMoEConfig, FusedMoEParallelConfig
from isomoe.common.presets import MODELS
from isomoe.tpu_impl.aot import _worker, aot_compile, plan_request
from isomoe.tpu_impl.spec import ABLATIONS, TRANSPORTS

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None or importlib.util.find_spec("jax") is None,
        reason="ahead-of-time compilation needs jax and libtpu",
    ),
    pytest.mark.timeout(600),
]

SMALL = FusedMoEConfig(16, 2, 512, 256)
BIG = MODELS["qwen3-coder-480b"].config
TOPOLOGIES = ("v5e:2x4", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1")


def _code_bytes(config: FusedMoEConfig, tokens: int, ablate: str, transport: str, loras: int) -> int:
    request, _ = plan_request(
        "tpu7x:2x2x1", config, tokens, scheme="channel", max_loras=loras, max_lora_rank=16 if loras else 0,
        transport=transport,
    )
    return _worker({**request, "what": "layer", "ablate": ablate}, None)["code_bytes"]


@pytest.mark.parametrize(
    "topology", [t if t == "v6e:2x4" else pytest.param(t, marks=pytest.mark.slow) for t in TOPOLOGIES]
)
def test_one_fp8_row_a_token_and_device(topology: str) -> None:
    report = aot_compile(
        topology, SMALL, 32, scheme="channel", transport="presum_fp8", max_loras=3, max_lora_rank=16, schedule=False
    )
    assert report.code_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_fp8_rows_for_bf16_dots(topology: str, transport: str) -> None:
    """Only w8a16 rounds what arrives back to bf16; v7x compiles it too."""
    report = aot_compile(
        topology, SMALL, 32, scheme="channel", recipe="w8a16", dispatch="ag_fp8", transport=transport, schedule=False
    )
    assert report.recipe == "w8a16" and report.code_bytes > 0


def test_stages_left_out_make_a_smaller_program() -> None:
    whole = _code_bytes(SMALL, 32, "", "push_bf16", 3)
    assert 0 < _code_bytes(SMALL, 32, "metadata_only", "push_bf16", 3) < whole


@pytest.mark.slow
@pytest.mark.parametrize("ablate", sorted(set(ABLATIONS) - {""}))
@pytest.mark.parametrize(("config", "tokens"), [(SMALL, 32), (BIG, 512)], ids=["small", "480b"])
def test_stages_left_out(config: FusedMoEConfig, tokens: int, ablate: str) -> None:
    assert _code_bytes(config, tokens, ablate, "presum_fp8", 8) > 0


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [512, 8192])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_production_layers(topology: str, tokens: int) -> None:
    for name in ("qwen3-coder-30b", "qwen3-coder-480b"):
        report = aot_compile(
            topology, MODELS[name].config, tokens, scheme="channel", transport="presum_fp8", schedule=False
        )
        assert report.ep == (4 if topology.startswith("v5p") else 8)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tokens_replicated_over_a_second_axis(transport: str) -> None:
    """Four devices share the experts, twice: barriers and rows stay inside each group."""
    parallel = FusedMoEParallelConfig(ep_size=4, use_ep=True)
    half = FusedMoEConfig(16, 2, 512, 256, moe_parallel_config=parallel)
    assert aot_compile("v6e:2x4", half, 32, scheme="channel", transport=transport, schedule=False).ep == 4
