# SPDX-License-Identifier: Apache-2.0
"""An adapter pool's mirror on a TPU mesh: no retrace, no second copy, and what the kernel computes from it."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from isomoe.common.adapters import AdapterError, AdapterPool
from isomoe.common.config import FusedMoEConfig
from isomoe.common.executors import run_moe
from isomoe.common.metrics import compare, rel_l2
from isomoe.common.numerics import BF16
from isomoe.common.recipes import default_recipe
from isomoe.common.weights import LoRAAdapter, quantize_moe_weights
from isomoe.tpu_impl import adapter_mirror, ep_moe, layout
from isomoe.tpu_impl.adapter_mirror import OPERANDS, AdapterMirror, lora_spec
from isomoe.tpu_impl.blocks import interpreter_blocks
from isomoe.tpu_impl.executor import InterpretSettings
from isomoe.tpu_impl.spec import LoRASpec

pytestmark = pytest.mark.timeout(180)

EP, T, K, E, H, I, R = 2, 8, 2, 4, 256, 128, 16
TO_RECIPE = 5e-3
RECIPE = default_recipe("w8a8", "channel").with_wire("bf16")


def _config(loras: int) -> FusedMoEConfig:
    return FusedMoEConfig(E, K, H, I).with_lora(loras, R)


def _normal(rng: np.random.Generator, *shape: int, fan: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)


def _adapter(adapter_id: int, seed: int, *, rank: int = 8, shared: bool = False) -> LoRAAdapter:
    rng = np.random.default_rng((adapter_id, seed))
    outer = 1 if shared else E
    return LoRAAdapter(
        adapter_id,
        _normal(rng, outer, 2, rank, H, fan=H).astype(BF16),
        _normal(rng, E, 2, I, rank, fan=rank).astype(BF16),
        _normal(rng, E, rank, I, fan=I).astype(BF16),
        _normal(rng, outer, H, rank, fan=rank).astype(BF16),
    )


def _build(pool: AdapterPool, **shared: bool) -> ep_moe.EPBuild:
    return ep_moe.EPBuild(
        mesh=Mesh(np.array(jax.devices("cpu")[:EP]), ("ep",)), axis="ep", config=pool.config, scheme="channel",
        recipe="w8a8", blocks=interpreter_blocks(inter=I, rows=T * K, max_loras=pool.num_slots), generation="v7x",
        lora=lora_spec(pool, **shared), interpret=InterpretSettings().params(),
    )  # fmt: skip


def _mirrored(loras: int = 2, layers: int = 1, **shared: bool) -> tuple[AdapterPool, AdapterMirror]:
    pool = AdapterPool(_config(loras), num_layers=layers)
    mirror = AdapterMirror(pool, _build(pool, **shared))
    pool.subscribe(mirror)
    return pool, mirror


def _poison(mirror: AdapterMirror) -> None:
    """NaN in every slot, without touching shapes or shardings."""
    for layer, stacks in mirror._stacks.items():
        mirror._stacks[layer] = {
            name: jax.device_put(jnp.full(s.shape, 0x7FC07FC0, s.dtype), s.sharding) for name, s in stacks.items()
        }


def _expected(mirror: AdapterMirror, layer: int, lease) -> dict[int, dict[str, np.ndarray]]:
    """Slot to operands of the adapters a lease holds."""
    build = mirror.build
    held = {a.adapter_id: a for a in lease.adapters(layer)}
    slot_of = {int(i): int(s) for i, s in zip(_ids_of(lease), lease.slots)}
    return {
        slot_of[i]: layout.adapter_arrays(
            a, bf=build.blocks.bf, rank=build.lora.rank, experts=build.ep * build.local_experts,
            shared_a13=build.lora.shared_a13, shared_b2=build.lora.shared_b2,
        )
        for i, a in held.items()
    }  # fmt: skip


def _ids_of(lease) -> tuple[int, ...]:
    return lease._pool.adapter_ids


def test_fifty_changes_of_eight_adapters_trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot update, and a program over the mesh that reads the slots; contents and shardings after every change."""
    traces: Counter[str] = Counter()
    for name in ("_with_slot", "_without_slot"):
        real = getattr(adapter_mirror, name)

        def counted(*args, name=name, real=real):
            traces[name] += 1
            return real(*args)

        monkeypatch.setattr(adapter_mirror, name, counted)
    pool, mirror = _mirrored(loras=8, layers=2)
    _poison(mirror)

    def total(tensors: dict[str, jax.Array], slots: jax.Array) -> jax.Array:
        traces["reader"] += 1
        cells = [jax.lax.bitcast_convert_type(t[slots, 0], jnp.bfloat16) for t in tensors.values()]
        rows = [c.reshape(len(slots), -1).sum(1, dtype=jnp.float32) for c in cells]
        return jnp.where(slots >= 0, jnp.stack(rows).sum(0), 0)

    reader = jax.jit(
        jax.shard_map(
            total, mesh=mirror.build.mesh, check_vma=False, in_specs=(
                {n: s for n, s in mirror.build.shardings().items() if n in OPERANDS}, jax.sharding.PartitionSpec()
            ), out_specs=jax.sharding.PartitionSpec(),
        )
    )  # fmt: skip
    random_ = random.Random(2)
    kinds: Counter[str] = Counter()
    shardings = {n: a.sharding for n, a in mirror._stacks[0].items()}
    for step in range(50):
        loaded = pool.adapter_ids
        options = (["replace", "unload"] if loaded else []) + (["load"] if len(loaded) < 8 else [])
        kind = random_.choice(options + [o for o in options if o == "load"])
        kinds[kind] += 1
        if kind == "unload":
            pool.unload(random_.choice(loaded))
        else:
            fresh = [i for i in range(100, 112) if i not in loaded]
            adapter_id = random_.choice(loaded if kind == "replace" else fresh)
            rank, shared = random_.choice((1, 5, R)), random_.random() < 0.4
            layers = (0, 1) if step % 3 else (1,)
            getattr(pool, kind)({n: _adapter(adapter_id, 2 * step + n, rank=rank, shared=shared) for n in layers})
        ids = (list(pool.adapter_ids) + [-1] * 8)[:8]
        with mirror.batch(ids) as batch:
            sums = reader(batch.operands(step % 2), batch.adapter_slots)
            assert np.isfinite(np.asarray(sums)).all()
            for layer in (0, 1):
                want = _expected(mirror, layer, batch.lease)
                for name in OPERANDS:
                    stack = batch.operands(layer)[name]
                    assert stack.sharding == shardings[name]
                    for slot in batch.lease.metadata.active_slots:
                        got = np.asarray(stack[slot])
                        if slot in want:
                            assert np.array_equal(got.view(np.int16), want[slot][name].view(np.int16))
                        else:
                            assert not got.any()  # the adapter leaves this layer alone
    assert min(kinds.values()) >= 5, kinds
    assert len(pool) > 2
    assert traces == {"_with_slot": 1, "_without_slot": 1, "reader": 1}


def test_slots_are_updated_in_place_and_split_over_the_mesh() -> None:
    pool, mirror = _mirrored()
    before = dict(mirror._stacks[0])
    places = {n: [s.data.unsafe_buffer_pointer() for s in a.addressable_shards] for n, a in before.items()}
    pool.load(_adapter(5, 1))
    for name, stack in mirror._stacks[0].items():
        assert before[name].is_deleted()
        assert [s.data.unsafe_buffer_pointer() for s in stack.addressable_shards] == places[name]
        assert {s.data.shape[1] for s in stack.addressable_shards} == {E // EP}
    assert mirror.device_nbytes == sum(a.nbytes for a in mirror._stacks[0].values()) // EP


_COMPILED = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from isomoe.tpu_impl import adapter_mirror

devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
mesh = Mesh(np.array(devices), ("ep",))
slots, experts, words, hidden, tiles, bf = 5, 32, 32, 2048, 2, 384
shapes = {
    "a13": (experts, 2, words, hidden), "lora_b13": (experts, tiles, words, 2 * bf), "a2": (experts, tiles, words, bf),
    "lora_b2": (experts, words, hidden),
}

def operand(shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

arrays = {name: operand(shape, "ep") for name, shape in shapes.items()}
stacks = {name: operand((slots, *shape), None, "ep") for name, shape in shapes.items()}
index = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
out = {name: stack.sharding for name, stack in stacks.items()}
for update, arguments in ((adapter_mirror._with_slot, (stacks, arrays, index)),
                          (adapter_mirror._without_slot, (stacks, index))):
    compiled = jax.jit(update, donate_argnums=0, out_shardings=out).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    print(json.dumps({
        "stacks": sum(4 * int(np.prod(s)) for s in shapes.values()) * slots // len(devices),
        "alias": memory.alias_size_in_bytes, "temp": memory.temp_size_in_bytes,
        "collectives": [c for c in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if c in text],
    }))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="ahead-of-time compilation needs libtpu")
def test_on_a_tpu_the_update_is_in_place_and_stays_on_its_device() -> None:
    """What the TPU compiler makes of it: every byte aliased, next to nothing beside it, nothing sent."""
    settings = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILED], env=os.environ | settings, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == 2
    for report in reports:
        assert report["alias"] == report["stacks"]
        assert report["temp"] < report["stacks"] // 50
        assert report["collectives"] == []


class Layer:
    """Weights and one batch for the interpreted kernel."""

    def __init__(self, mirror: AdapterMirror) -> None:
        rng = np.random.default_rng(3)
        self.mirror = mirror
        self.weights = quantize_moe_weights(_normal(rng, E, 2 * I, H, fan=H), _normal(rng, E, H, I, fan=I), "channel")
        build = mirror.build
        self.tensors = ep_moe.place(
            layout.lay_out_weights(self.weights, bf=build.blocks.bf, experts=EP * build.local_experts),
            replace(build, lora=None),
        )
        self.x = rng.standard_normal((T, H)).astype(BF16)
        self.topk_ids = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
        self.topk_weights = rng.dirichlet(np.ones(K), T).astype(np.float32)

    def run(self, ids: np.ndarray) -> np.ndarray:
        with self.mirror.batch(ids) as batch:
            out = ep_moe.fused_moe_ep(
                jnp.asarray(self.x), jnp.asarray(self.topk_weights), jnp.asarray(self.topk_ids),
                self.tensors | batch.operands(), build=self.mirror.build, adapter_slots=batch.adapter_slots,
            )  # fmt: skip
            return np.asarray(out)

    def check(self, got: np.ndarray, adapters: tuple[LoRAAdapter, ...], ids: np.ndarray) -> None:
        want = run_moe(
            "reference", self.x, self.topk_weights, self.topk_ids, self.weights, config=self.mirror.pool.config,
            recipe=RECIPE, adapters=adapters, adapter_ids=ids,
        )  # fmt: skip
        figures = compare(got, want)
        assert figures.non_finite == 0
        assert figures.rel_l2 <= TO_RECIPE and figures.worst_row <= 4 * TO_RECIPE, figures


def test_the_kernel_serves_what_the_pool_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load, replace, a transfer that fails, unload: poisoned free slots, one trace, outputs of the reference."""
    pool, mirror = _mirrored()
    _poison(mirror)
    layer = Layer(mirror)
    ids = np.array([5, -1, 70, 5, 70, -1, 5, 70], np.int32)
    first = {5: _adapter(5, 1), 70: _adapter(70, 1, rank=R, shared=True)}
    for adapter in first.values():
        pool.load(adapter)
    traced = ep_moe.interpreted_layer._cache_size()
    before = layer.run(ids)
    layer.check(before, tuple(first.values()), ids)
    assert ep_moe.interpreted_layer._cache_size() == traced + 1

    calls: Counter[str] = Counter()
    put = adapter_mirror._put

    def failing(array, sharding):
        calls["put"] += 1
        if calls["put"] == 3:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return put(array, sharding)

    monkeypatch.setattr(adapter_mirror, "_put", failing)
    with pytest.raises(AdapterError, match="adapter 5: AdapterMirror failed: RESOURCE_EXHAUSTED"):
        pool.replace(_adapter(5, 2))
    monkeypatch.setattr(adapter_mirror, "_put", put)
    assert np.array_equal(layer.run(ids).view(np.int16), before.view(np.int16))

    pool.replace(_adapter(5, 2, rank=3))
    pool.unload(70)
    later = np.where(ids == 70, -1, ids).astype(np.int32)
    after = layer.run(later)
    layer.check(after, pool.adapters(), later)
    assert rel_l2(after[ids == 5], before[ids == 5]) > 20 * TO_RECIPE
    assert ep_moe.interpreted_layer._cache_size() == traced + 1


def test_an_update_that_fails_leaves_usable_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's transfer fails after the first layer's slot was written: no batch names that slot."""
    pool, mirror = _mirrored(layers=2)
    pool.load({0: _adapter(5, 1), 1: _adapter(5, 2)})
    held = {n: np.asarray(a[0]) for n, a in mirror._stacks[1].items()}
    transfer = mirror._transfer

    def failing(layer, adapter):
        if layer == 1:
            raise RuntimeError("lost")
        return transfer(layer, adapter)

    monkeypatch.setattr(mirror, "_transfer", failing)
    with pytest.raises(AdapterError, match="lost"):
        pool.replace({0: _adapter(5, 3), 1: _adapter(5, 4)})
    with mirror.batch([5]) as batch:
        assert batch.lease.slots.tolist() == [0]
        for name in OPERANDS:
            assert np.array_equal(np.asarray(batch.operands(1)[name][0]).view(np.int16), held[name].view(np.int16))
        want = _expected(mirror, 0, batch.lease)[0]
        assert np.array_equal(np.asarray(batch.operands(0)["a2"][0]).view(np.int16), want["a2"].view(np.int16))


def test_an_update_that_takes_the_slots_with_it_is_made_good() -> None:
    """A program that dies on the devices after its operands were given away: the pool's masters are still here."""
    pool, mirror = _mirrored(loras=3, layers=2)
    pool.load({0: _adapter(5, 1), 1: _adapter(5, 2)})
    pool.load({0: _adapter(70, 1, rank=R, shared=True)})
    real = mirror._set

    def dies(stacks, arrays, index):
        mirror._set = real
        for stack in stacks.values():
            stack.delete()
        raise RuntimeError("INTERNAL: device halted")

    mirror._set = dies
    with pytest.raises(AdapterError, match="adapter 5: AdapterMirror failed: INTERNAL"):
        pool.replace({0: _adapter(5, 3), 1: _adapter(5, 4)})
    with mirror.batch([5, 70]) as batch:
        for layer, used in ((0, {0, 1}), (1, {0})):
            want = _expected(mirror, layer, batch.lease)
            assert set(want) == used
            for name, stack in batch.operands(layer).items():
                for slot in range(pool.num_slots):
                    cells = np.asarray(stack[slot]).view(np.int16)
                    assert np.array_equal(cells, want[slot][name].view(np.int16)) if slot in want else not cells.any()


def test_slots_that_share_the_outer_matrices() -> None:
    pool, mirror = _mirrored(shared_a13=True, shared_b2=True)
    pool.load(_adapter(5, 1, shared=True))
    assert mirror._stacks[0]["a13"].shape[1] == mirror._stacks[0]["lora_b2"].shape[1] == 1
    with pytest.raises(AdapterError, match="adapter 70: AdapterMirror failed: layer 0: a13: got 4 experts"):
        pool.load(_adapter(70, 1))
    with mirror.batch([5]) as batch:
        want = _expected(mirror, 0, batch.lease)[0]
        for name in OPERANDS:
            assert np.array_equal(np.asarray(batch.operands()[name][0]).view(np.int16), want[name].view(np.int16))


def test_batches_read_whole_versions_while_adapters_are_replaced() -> None:
    pool, mirror = _mirrored()
    versions = []
    for value in (1.0, 2.0):
        a = _adapter(5, 1)
        full = {k: np.full_like(getattr(a, k), value) for k in ("a13", "b13", "a2", "b2")}
        versions.append(replace(a, **full))
    pool.load(versions[0])

    @jax.jit
    def spread(stacks, slot):
        """Smallest and largest cell of the ranks in use, over all operands."""
        cells = [stacks["a13"][slot, :, :, :4], stacks["lora_b13"][slot, :, :, :4], stacks["a2"][slot, :, :, :4],
                 stacks["lora_b2"][slot, :, :4]]  # fmt: skip
        words = jnp.concatenate([c.reshape(-1) for c in cells])  # two bfloat16 each
        flat = jax.lax.bitcast_convert_type(words, jnp.bfloat16)
        return jnp.stack([flat.min(), flat.max()])

    stop, errors, replaced = threading.Event(), [], [0]

    def write() -> None:
        while not stop.is_set():
            try:
                pool.replace(versions[(replaced[0] + 1) % 2])
                replaced[0] += 1
            except AdapterError as error:
                if "slots are taken" not in str(error):
                    errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    try:
        for _ in range(60):
            with mirror.batch([5, -1]) as batch:
                got = spread(batch.operands(), batch.adapter_slots[0])
                held = float(batch.lease.adapters()[0].a2.flat[0])
            assert np.asarray(got).tolist() == [held, held]  # read after the batch: updates have been dispatched since
            seen.add(held)
    finally:
        stop.set()
        writer.join(20)
    assert not errors
    assert seen == {1.0, 2.0}
    assert replaced[0] > 10


def test_bad_arguments() -> None:
    pool = AdapterPool(_config(2), num_layers=2)
    build = _build(pool)
    fits = AdapterMirror(pool, build)
    AdapterMirror(pool, build, budget_bytes=fits.device_nbytes)
    with pytest.raises(AdapterError, match=rf"budget_bytes: got 9, .* need {fits.device_nbytes} bytes of every device"):
        AdapterMirror(pool, build, budget_bytes=9)
    for bad, message in (
        (replace(build, lora=None), r"build: got lora=None, want lora_spec\(pool\)"),
        (replace(build, lora=LoRASpec(2, 16)), "build: got lora=.* want 3 slots of rank at least 16"),
        (replace(build, config=replace(build.config, hidden_dim=512)), "differs from the pool's in hidden_dim"),
    ):
        with pytest.raises(ValueError, match=message):
            AdapterMirror(pool, bad)
    for layers in ([], [0, 0], [2]):
        with pytest.raises(ValueError, match=r"layers: got .*want distinct layers in \[0, 2\)"):
            AdapterMirror(pool, build, layers=layers)
    with pytest.raises(TypeError, match="pool: got int"):
        AdapterMirror(3, build)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="build: got int"):
        AdapterMirror(pool, 3)  # type: ignore[arg-type]
    only = AdapterMirror(pool, build, layers=[1])
    pool.load({1: _adapter(5, 1)})
    with pytest.raises(AdapterError, match="not in this mirror; pool"), only.batch([5]):
        pass
    pool.subscribe(only)
    with only.batch([5, -1]) as batch:
        assert batch.adapter_slots.tolist() == [0, -1]
        assert set(batch.stacks) == {1}
    with pytest.raises(AdapterError, match=r"layers: got \[0\], this mirror has \[1\]"):
        pool.load(_adapter(70, 1))
