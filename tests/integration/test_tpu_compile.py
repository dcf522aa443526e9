# SPDX-License-Identifier: Apache-2.0
"""A served layer, routing included, compiled for real TPUs ahead of time: what an interpreted run cannot show."""

from __future__ import annotations

import math

import numpy as np
import pytest

import isomoe

CODER_30B = isomoe.FusedMoEConfig(128, 8, 2048, 768)
CODER_480B = isomoe.FusedMoEConfig(160, 8, 6144, 2560)


@pytest.mark.parametrize(
    ("topology", "shape", "config", "scheme", "lora"),
    [
        ("tpu7x:2x2x1", {"data": 1, "model": 8}, CODER_30B, "channel", False),
        ("tpu7x:2x2x1", {"data": 1, "attn_dp": 2, "model": 4}, CODER_30B, "channel", True),
        ("tpu7x:2x2x1", {"data": 2, "model": 4}, CODER_30B, "block", False),
        ("v6e:2x4", {"data": 1, "model": 8}, CODER_480B, "channel", True),
    ],
    ids=["v7x", "v7x-two-axes-lora", "v7x-data", "v6e-480b-lora"],
)
def test_the_layer_compiles(
    topology: str, shape: dict[str, int], config: isomoe.FusedMoEConfig, scheme: str, lora: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from isomoe.tpu_impl.blocks import tile_width
    from isomoe.tpu_impl.ep_moe import operand_shapes
    from isomoe.tpu_impl.generations import generation
    from isomoe.tpu_impl.spec import LoRASpec
    from isomoe.tpu_impl.tpu_inference.ep_layer import EPLayer, expert_axes, mesh_generation

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices)[: math.prod(shape.values())].reshape(list(shape.values())), tuple(shape))
    axis, token_axes = expert_axes(mesh, ("attn_dp", "model"))
    name, interpreted = mesh_generation(mesh)
    assert not interpreted
    limits = generation(name)
    layer = EPLayer(
        mesh, axis, token_axes, config, scheme, limits.default_recipe, name, tile_width(limits, config, scheme),
        interpreted, lora=LoRASpec(4, 16) if lora else None,
    )
    tokens = 64
    build = layer.build(tokens)

    def abstract(shape: tuple[int, ...], dtype: object, spec: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))

    split = build.shardings()
    tensors = {n: abstract(s, d, split[n]) for n, (s, d) in operand_shapes(build).items()}
    slots = abstract((tokens,), jnp.int32) if lora else None

    def step(x: jax.Array, logits: jax.Array, tensors: dict, slots: jax.Array | None) -> jax.Array:
        return layer.apply(x, logits, tensors, adapter_slots=slots)[0]

    compiled = jax.jit(step).lower(
        abstract((tokens, config.hidden_dim), jnp.bfloat16), abstract((tokens, config.num_experts), jnp.bfloat16),
        tensors, slots,
    ).compile()
    held = sum(math.prod(s) * jnp.dtype(d).itemsize for s, d in operand_shapes(build).values()) // build.ep
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < held / 4, "the program must not copy its weights"
