# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation for real TPU topologies: what the interpreter accepts and Mosaic may refuse.

Needs libtpu, no TPU. Every compilation runs in its own process.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from isomoe.common.config import FusedMoEConfig, FusedMoEParallelConfig
from isomoe.tests.matrix import PRODUCTION
from isomoe.tpu_impl import AotReport, aot_compile
from isomoe.tpu_impl.llo import read_schedule
from isomoe.tpu_impl.topologies import split_topology

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None or importlib.util.find_spec("jax") is None,
    reason="ahead-of-time compilation needs jax and libtpu",
)
pytestmark = pytest.mark.timeout(600)

TOPOLOGIES = ("v5e:2x4", "v6e:2x4", "tpu7x:2x2x1")
SMALL = FusedMoEConfig(16, 2, 512, 256)
MIB = 1 << 20


def _production(name: str) -> FusedMoEConfig:
    s = PRODUCTION[name]
    return FusedMoEConfig(s.num_experts, s.experts_per_token, s.hidden_dim, s.intermediate_size)


def _check(report: AotReport) -> None:
    assert report.compile_s > 0
    assert 0 < report.code_bytes <= 16 * MIB
    assert 0 < report.vmem_bytes <= 120 * MIB


@needs_libtpu
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_small_layer_with_adapters(topology: str) -> None:
    _check(aot_compile(topology, SMALL, 32, scheme="channel", max_loras=3, max_lora_rank=16, schedule=False))


@needs_libtpu
def test_schedule_and_model() -> None:
    """The report's stages are the kernel's, the tile holds the matrix work, and the terms add up."""
    report = aot_compile(
        "tpu7x:2x2x1", FusedMoEConfig(16, 2, 512, 1024), 64, scheme="channel", dispatch="auto", transport="auto",
        fp8_wire=True,
    )
    _check(report)
    assert report.loops is not None and report.around is not None
    cost = report.loops.cost
    assert len(cost.tile) == len(report.blocks.rungs) == len(report.loops.spills)
    assert report.loops.mxu_share > 0.05
    # A row is gathered in a handful of bundles; taller tiles take more.
    assert 32 < cost.gather <= 8 * 32
    assert list(cost.tile) == sorted(cost.tile)
    assert cost.visit > 0 and cost.ship > 0 and cost.finish > 0
    # The only tile of a short panel stages its rows itself.
    assert cost.stage == 0 and report.blocks.rows == 32
    assert report.around.cycles > 0 and report.around.launches > 10 and report.around.collectives >= 2
    assert [m.clock_ghz for m in report.model] == [1.2, 1.1, 1.3]
    for model in report.model:
        assert model.kernel >= max(model.hbm, model.compute) - 1e-6
        links = model.dispatch + (
            max(model.kernel, model.transport) if report.transport.startswith("push")
            else model.kernel + model.transport
        )
        assert model.total == pytest.approx(links + model.fixed - model.beside)
        assert min(model.plan, model.launches, model.latency) > 0


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("loras", [(0, 0), (8, 16)])
@pytest.mark.parametrize("tokens", [512, 8192])
@pytest.mark.parametrize("name", ["qwen3-30b", "qwen3-480b"])
def test_production_layers(name: str, tokens: int, loras: tuple[int, int], topology: str) -> None:
    report = aot_compile(
        topology, _production(name), tokens, scheme="channel", max_loras=loras[0], max_lora_rank=loras[1],
        schedule=False,
    )
    _check(report)
    assert report.ep == 8


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v6e:2x4", "tpu7x:2x2x1"])
@pytest.mark.parametrize("scheme", ["block", "tensor", "bf16"])
def test_other_schemes(scheme: str, topology: str) -> None:
    layer = _production("qwen3-30b")
    _check(aot_compile(topology, layer, 64, scheme=scheme, max_loras=8, max_lora_rank=64, schedule=False))


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swigluoai"])
def test_activations_and_biases_compile(activation: str) -> None:
    config = FusedMoEConfig(32, 4, 2880, 2880, activation=activation, has_bias=True)
    for topology in TOPOLOGIES:
        _check(aot_compile(topology, config, 64, scheme="channel", schedule=False))


@needs_libtpu
@pytest.mark.slow
def test_several_hosts_and_a_second_mesh_axis() -> None:
    report = aot_compile("tpu7x:2x2x4", _production("qwen3-480b"), 512, scheme="channel", schedule=False)
    assert report.ep == 32
    half = FusedMoEConfig(16, 2, 512, 256, moe_parallel_config=FusedMoEParallelConfig(ep_size=4, use_ep=True))
    assert aot_compile("v6e:2x4", half, 32, scheme="channel", schedule=False).ep == 4


@needs_libtpu
def test_a_refusal_carries_the_reason() -> None:
    with pytest.raises(ValueError, match="hidden_dim: got 65536"):
        aot_compile("tpu7x:2x2x1", FusedMoEConfig(8, 2, 65536, 4096), 8, scheme="channel")
    with pytest.raises(RuntimeError, match=r"tpu7x:9x9x9, T=8: "):
        aot_compile("tpu7x:9x9x9", SMALL, 8, scheme="channel", schedule=False)


def test_exports_for_tpu_from_a_cpu() -> None:
    """The program asks neither which TPU it will run on nor which device it is (rank is data)."""
    pytest.importorskip("jax")
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from isomoe.tpu_impl.ep_moe import EPBuild, fused_moe_ep, operand_shapes
    from isomoe.tpu_impl.spec import Blocks, LoRASpec

    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("data", "model"))
    build = EPBuild(
        mesh=mesh, axis="model", config=FusedMoEConfig(8, 2, 512, 256), scheme="channel", recipe="w8a8",
        blocks=Blocks(128, 64, (32, 64), 2, 2, 32, 2), generation="v7x", lora=LoRASpec(2, 16),
    )

    def abstract(shape: tuple[int, ...], dtype: object, split: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, split or PartitionSpec()))

    split = build.shardings()
    tensors = {n: abstract(shape, dtype, split[n]) for n, (shape, dtype) in operand_shapes(build).items()}
    function = jax.jit(lambda x, w, i, s, t: fused_moe_ep(x, w, i, t, build=build, adapter_slots=s))
    exported = jax.export.export(function, platforms=["tpu"])(
        abstract((32, 512), jnp.bfloat16), abstract((32, 2), jnp.float32), abstract((32, 2), jnp.int32),
        abstract((32,), jnp.int32), tensors,
    )
    module = exported.mlir_module()
    assert "isomoe_expert_kernel" in module
    assert "partition_id" not in module


def test_topology_names() -> None:
    gen, grid = split_topology("tpu7x:2x2x1")
    assert (gen.name, grid) == ("v7x", (2, 2, 1))
    for bad in ("v7:2x2", "v6e", "v6e:2xtwo", "v4:2x2x1"):
        with pytest.raises(ValueError, match="topology: got"):
            split_topology(bad)
    config = FusedMoEConfig(16, 2, 512, 256, moe_parallel_config=FusedMoEParallelConfig(ep_size=3, use_ep=True))
    with pytest.raises(ValueError, match="ep_size: got 3, want a divisor of the 8 devices"):
        aot_compile("v6e:2x4", config, 8, scheme="channel")


_DUMP = """
     0   :  { %s0 = smov 0 }
   0x1 LB: > { %v0 = vld [vmem:[#allocation1]] }
   0x2   : > { %v1 = vmatmul %v0 }
   0x3 LB: >> { %v2 = vmatmul %v1 }
   0x4   : >> { %3 = sbr.rel (!%p0) target = $region2 }
   0x5   :  {}
   0x6 PF: > { %v3 = vst %v2 }
   0x7 LB: >> { %v4 = vadd %v3 }
   0x8 PF: > { %v5 = vadd %v4 }
   0x9 PF:  { %v6 = vst %v5 }
"""
_USAGE = """== CAPACTIY:
MXU, VSTORE:SPILL
    2     1
== UTILIZATION:
""" + "\n".join(["0 0", "0 1", "1 0", "2 0", "2 0", "0 0", "0 0", "0 1", "0 0", "0 0"])


def test_reading_a_dump(tmp_path: Path) -> None:
    """Loops nest, neighbours at one depth are told apart, branches and empty bundles do not end a loop."""
    (tmp_path / "1-moe_kernel.1-71-final_bundles.txt").write_text(_DUMP)
    (tmp_path / "1-moe_kernel.1-69-final_hlo-static-per-bundle-utilization.txt").write_text(_USAGE)
    got = read_schedule(tmp_path, "moe_kernel")
    assert got.bundles == 10
    assert [(x.depth, x.start, x.bundles, x.mxu_ops, x.spills) for x in got.loops] == [
        (1, 1, 8, 5, 2), (2, 3, 3, 4, 0), (2, 7, 1, 0, 1),
    ]
    assert got.loops[1].mxu_share == pytest.approx(4 / 6, abs=1e-3)
    assert [x.start for x in got.children(got.loops[0])] == [3, 7]
    assert [x.landings for x in got.loops] == [(6, 8), (), ()]
    assert got.spills_between(0, 8) == 2
    with pytest.raises(FileNotFoundError, match="no final bundles of a kernel named 'other'"):
        read_schedule(tmp_path, "other")
