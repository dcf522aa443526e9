# SPDX-License-Identifier: Apache-2.0
"""The block chooser: total over layers, batches, devices and generations, and honest where nothing fits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from isomoe.common.config import FusedMoEConfig
from isomoe.tests.matrix import PRODUCTION
from isomoe.tpu_impl import blocks as chooser
from isomoe.tpu_impl.generations import GENERATIONS, generation
from isomoe.tpu_impl.spec import Blocks, Buffer, LoRASpec, dma_semaphores, scratch, scratch_bytes, vmem_bytes

LAYERS = {
    **{name: FusedMoEConfig(s.num_experts, s.experts_per_token, s.hidden_dim, s.intermediate_size)
       for name, s in PRODUCTION.items()},
    "gpt-oss-20b": FusedMoEConfig(32, 4, 2880, 2880, activation="swigluoai", has_bias=True),
    "mixtral": FusedMoEConfig(8, 2, 4096, 14336),
    "odd": FusedMoEConfig(7, 3, 200, 96),
    "nemotron": FusedMoEConfig(128, 6, 2688, 1856, activation="relu2", is_act_and_mul=False),
}
ADAPTERS = ((0, 0), (1, 8), (8, 16), (8, 64), (16, 64), (3, 256))


def _choose(gen: str, config: FusedMoEConfig, tokens: int, ep: int, loras: int, rank: int, scheme: str = "channel"):
    recipe = "bf16" if scheme == "bf16" else generation(gen).default_recipe
    blocks = chooser.choose_blocks(
        gen, config, tokens, ep=ep, scheme=scheme, recipe=recipe, max_loras=loras, max_lora_rank=rank
    )
    lora = LoRASpec(loras, -(-rank // 16) * 16) if loras else None
    return blocks, chooser.make_spec(config, tokens, blocks, ep=ep, scheme=scheme, recipe=recipe, lora=lora)


@pytest.mark.parametrize("gen", sorted(GENERATIONS))
@pytest.mark.parametrize("name", sorted(LAYERS))
def test_total_and_within_limits(gen: str, name: str) -> None:
    config, limits = LAYERS[name], generation(gen)
    schemes = ("channel", "block", "bf16")
    for tokens, ep, (loras, rank), scheme in itertools.product((1, 512, 8192), (1, 32), ADAPTERS, schemes):
        blocks, spec = _choose(gen, config, tokens, ep, loras, rank, scheme)
        assert scratch_bytes(spec) < vmem_bytes(spec) <= limits.vmem_limit_bytes
        assert dma_semaphores(spec) <= limits.dma_semaphores
        assert spec.inter % blocks.bf == 0 and spec.inter >= config.intermediate_size
        assert blocks.rows % blocks.stage == 0 and blocks.rungs[-1] == blocks.rows
        fit = chooser.max_tokens(spec, limits.smem_bytes)
        assert fit >= ep
        assert chooser.scalar_bytes(replace(spec, tokens=fit)) <= limits.smem_bytes
        assert chooser.scalar_bytes(replace(spec, tokens=2 * fit + ep)) > limits.smem_bytes - chooser.SMEM_RESERVE


@pytest.mark.parametrize("gen", sorted(GENERATIONS))
@pytest.mark.parametrize("name", sorted(LAYERS))
def test_tile_width_follows_the_layer_only(gen: str, name: str) -> None:
    """Weights are laid out for one width and hidden scales cover it: batch, devices and adapters must not move it."""
    widths = {
        _choose(gen, LAYERS[name], tokens, ep, loras, rank)[0].bf
        for tokens, ep, (loras, rank) in itertools.product((1, 512, 8192), (1, 8), ADAPTERS)
    }
    assert len(widths) == 1


def test_production_choices() -> None:
    """One panel holds a uniformly routed expert, so that its weights are read once, at decode and at prefill; or it
    takes the matrix unit at least twice as long as reading the next one's weights."""
    for name, tokens in itertools.product(PRODUCTION, (64, 512, 8192)):
        config = LAYERS[name]
        for gen in GENERATIONS:
            blocks, spec = _choose(gen, config, tokens, 8, 0, 0)
            mean = tokens * config.experts_per_token / config.num_experts
            limits = generation(gen)
            # Bytes of a weight and its operations a row: 1 and 2, whatever the layer.
            hidden = blocks.rows * 2 / limits.bf16_tflops >= 2 * 1e3 / limits.hbm_gbps
            assert blocks.rows >= mean or (spec.recipe == "w8a16" and hidden), (name, gen, tokens, blocks)
            assert spec.groups == 1
    blocks, _ = _choose("v7x", LAYERS["qwen3-30b"], 512, 8, 0, 0)
    assert blocks.bf == 768  # the whole expert: hidden scales are per token
    blocks, spec = _choose("v7x", LAYERS["qwen3-480b"], 512, 8, 8, 64)
    assert blocks.pairs == 8 and spec.groups == 1


def test_budget_is_what_the_kernel_allocates() -> None:
    _, spec = _choose("v7x", LAYERS["qwen3-480b"], 8192, 8, 8, 16)
    assert scratch_bytes(spec) == sum(b.nbytes for b in scratch(spec))
    names = [b.name for b in scratch(spec)]
    assert len(names) == len(set(names))
    # 8-bit data pads to 32 sublanes, 16-bit to 16, 32-bit to 8, all to 128 lanes.
    assert Buffer("a", "vmem", (33, 100), "float8_e4m3fn").nbytes == 64 * 128
    assert Buffer("a", "vmem", (2, 17, 128), "bfloat16").nbytes == 2 * 32 * 128 * 2
    assert Buffer("a", "vmem", (3, 128), "float32").nbytes == 8 * 128 * 4


def test_messages_name_the_limit_and_what_fits() -> None:
    huge = FusedMoEConfig(8, 2, 65536, 4096)
    with pytest.raises(ValueError, match=r"hidden_dim: got 65536.*v7x has .* MiB.*want at most \d+"):
        _choose("v7x", huge, 8, 8, 0, 0)
    with pytest.raises(ValueError, match=r"VMEM: .*LoRA rank 512.*v7x has 64 MiB; max_lora_rank=\d+ fits"):
        _choose("v7x", FusedMoEConfig(8, 2, 8192, 28672), 8, 8, 2, 512)
    with pytest.raises(ValueError, match="generation: got 'v4', want one of v5e, v5p, v6e, v7x"):
        _choose_v4()
    with pytest.raises(ValueError, match="max_lora_rank: got 0 with max_loras=2"):
        _choose("v7x", LAYERS["odd"], 8, 8, 2, 0)
    with pytest.raises(ValueError, match="num_tokens: got 0"):
        _choose("v7x", LAYERS["odd"], 0, 8, 0, 0)


def _choose_v4() -> Blocks:
    return chooser.choose_blocks("v4", LAYERS["odd"], 8, ep=8, scheme="channel", recipe="w8a16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bf": 100}, "bf: got 100"), ({"rows": 48}, "rows: got 48"), ({"rungs": (32,)}, "rungs: got"),
        ({"nbuf": 1}, "nbuf: got 1"), ({"xbuf": 3}, "xbuf: got 3"), ({"stage": 48}, "stage: got 48"),
    ],
)
def test_blocks_are_checked(change: dict, message: str) -> None:
    good = Blocks(bf=128, rows=64, rungs=(32, 64), nbuf=2, xbuf=2, stage=32)
    with pytest.raises(ValueError, match=message):
        replace(good, **change)
