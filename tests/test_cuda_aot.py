# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the host path compiles for every supported architecture, without a GPU, and fits."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from isomoe.common.config import FusedMoEConfig
from isomoe.cuda_impl.aot import CAPABILITIES, aot_compile

# Production dimensions: one rank of Qwen3-30B and (an eighth of the experts of) Qwen3-Coder-480B.
LAYERS = {"30b": FusedMoEConfig(128, 8, 2048, 768), "480b": FusedMoEConfig(20, 8, 6144, 2560)}


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c != "7.5"])
@pytest.mark.parametrize(
    ("layer", "scheme", "recipe", "loras"),
    [
        ("30b", "block", "w8a8", 8),
        ("30b", "channel", "w8a16", 8),
        ("480b", "channel", "w8a8", 0),
        ("480b", "bf16", "bf16", 0),
    ],
)
def test_compiles_and_fits(capability: str, layer: str, scheme: str, recipe: str, loras: int) -> None:
    reports = aot_compile(
        capability, LAYERS[layer], [64, 8192], scheme=scheme, recipe=recipe, max_loras=loras,
        max_lora_rank=64 if loras else 0,
    )  # fmt: skip
    assert [r.num_tokens for r in reports] == [64, 8192]
    for report in reports:
        assert not report.failures, [f"{k.kernel}: {k.error or k.shared_bytes}" for k in report.failures]
        names = [k.kernel for k in report.kernels]
        assert names.count("_grouped_gemm_kernel") == 2 and names[-1] == "_combine_kernel"
        assert names.count("_shrink_kernel") == (2 if loras else 0)
        # Native where the device has e4m3, decoded by hand where it has not.
        dots = {k.constexprs["DOT"] for k in report.kernels if "DOT" in k.constexprs}
        fp8 = {"8.0": "f16", "8.6": "f16", "8.9": "fp8_add", "12.0": "fp8_add"}.get(capability, "fp8")
        assert dots == {{"w8a8": fp8, "w8a16": "f16", "bf16": "bf16"}[recipe]}
        for kernel in report.kernels:
            # A few spilled words in an epilogue are harmless; kilobytes would sit in the main loop.
            assert kernel.spill_bytes <= 1024, (kernel.kernel, kernel.spill_bytes)


@pytest.mark.timeout(280)
def test_w8a16_compiles_for_turing() -> None:
    """Right but slow there: Triton has no tensor core path for it, so tiles spill."""
    reports = aot_compile("7.5", LAYERS["30b"], 64, scheme="channel", recipe="w8a16", max_loras=4, max_lora_rank=16)
    assert not reports[0].failures, [f"{k.kernel}: {k.error or k.shared_bytes}" for k in reports[0].failures]


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="capability"):
        aot_compile("7.0", LAYERS["30b"], 1, scheme="block")
