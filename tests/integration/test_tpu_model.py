# SPDX-License-Identifier: Apache-2.0
"""A small Qwen3-MoE from safetensors, through tpu-inference's model wrapper, on this package's kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isomoe.common.metrics import rel_l2
from isomoe.tests.integration.model_steps import Served, with_plain_attention

PROMPTS, LENGTH = 3, 8


def prompts(vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, size=(PROMPTS, LENGTH)).astype(np.int32)


@pytest.fixture(scope="module")
def checkpoints(samples: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The samples tpu-inference can load on eight devices."""
    block = with_plain_attention(samples.block, tmp_path_factory.mktemp("block") / "fp8-block")
    return {"bf16": samples.bf16, "channel": samples.channel, "block": block}


@pytest.mark.parametrize("scheme", ["channel", "block", "bf16"])
def test_a_checkpoint_loads_and_steps_on_the_kernel(
    scheme: str, checkpoints: dict[str, Path], vllm_config: Callable[..., Any], mesh: Callable[..., Any],
    samples: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits against transformers on the dequantised checkpoint, an oracle that shares no code with either.

    The bound covers tpu-inference's own linear layers, which quantise activations; experts run w8a16.
    """
    from isomoe.tests.oracle import BASE, Oracle

    monkeypatch.setenv("ISOMOE_TPU_RECIPE", "w8a16")
    served = Served(vllm_config(checkpoints[scheme], tensor_parallel=4), mesh(8), LENGTH)
    for layer in range(samples.dims.num_layers):
        taken = served.experts(layer).quant_method.ep_layer
        assert taken is not None and taken.scheme == scheme, "the kernel did not take the layer"
    tokens = prompts(samples.dims.vocab_size)
    got = served.forward(tokens)
    want = Oracle(checkpoints[scheme], {}).forward(tokens, [BASE] * PROMPTS).logits
    assert rel_l2(got, want) <= 3e-2
    assert (got.argmax(-1) == want.argmax(-1)).mean() >= 0.9
