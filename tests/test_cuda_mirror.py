# SPDX-License-Identifier: Apache-2.0
"""An adapter pool's mirror on torch tensors: what the kernels see after loads, replacements, unloads and failures."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from isomoe.common import tolerances
from isomoe.common.adapters import AdapterError, AdapterPool
from isomoe.common.config import FusedMoEConfig
from isomoe.common.executors import run_moe
from isomoe.common.metrics import rel_l2, worst_row
from isomoe.common.numerics import BF16
from isomoe.common.placement import ExpertPlacement
from isomoe.common.recipes import default_recipe
from isomoe.common.weights import LoRAAdapter, quantize_moe_weights
from isomoe.cuda_impl import adapter_mirror, fused_moe, prepare_weights
from isomoe.cuda_impl._runtime import INTERPRETED
from isomoe.cuda_impl.adapter_mirror import AdapterMirror
from isomoe.cuda_impl.prepare import AdapterSlots, to_torch

DEVICE = "cpu" if INTERPRETED else "cuda"
T, K, E, H, I, R = 6, 2, 4, 128, 128, 16
LORAS, LAYERS = 2, 2
CONFIG = FusedMoEConfig(E, K, H, I).with_lora(LORAS, R)
RECIPE = default_recipe("w8a8", "block")
IDS = (5, 70, 9)


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


def _settle() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _table(mirror: AdapterMirror, by: str = "id") -> list[int]:
    """A table's entries once the mirror's copies have arrived."""
    _settle()
    return mirror.adapters(int(mirror.layers[0]), by=by).slot_ids.tolist()


class Model:
    """Weights of the layers and one batch; results of the mirror's slots and of the reference."""

    def __init__(self, tokens: int = T) -> None:
        rng = np.random.default_rng(11)
        self.weights = [
            quantize_moe_weights(_normal(rng, E, 2 * I, H, fan=H), _normal(rng, E, H, I, fan=I), "block")
            for _ in range(LAYERS)
        ]
        self.prepared = [prepare_weights(w, DEVICE) for w in self.weights]
        self.x = rng.standard_normal((tokens, H)).astype(BF16)
        self.topk_ids = np.stack([rng.permutation(E)[:K] for _ in range(tokens)]).astype(np.int32)
        self.topk_weights = rng.dirichlet(np.ones(K), tokens).astype(np.float32)
        self.device_batch = tuple(to_torch(a, DEVICE) for a in (self.x, self.topk_weights, self.topk_ids))

    def run(self, layer: int, slots: AdapterSlots | None, ids: torch.Tensor | None) -> torch.Tensor:
        """`launch` when the mirror's copies have arrived."""
        _settle()
        return self.launch(layer, slots, ids)

    def launch(self, layer: int, slots: AdapterSlots | None, ids: torch.Tensor | None) -> torch.Tensor:
        x, topk_weights, topk_ids = self.device_batch
        return fused_moe(
            x, topk_weights, topk_ids, self.prepared[layer], recipe=RECIPE, adapters=slots, adapter_ids=ids
        )

    def reference(self, layer: int, adapters: tuple[LoRAAdapter, ...], ids: np.ndarray) -> np.ndarray:
        present = {a.adapter_id for a in adapters}
        known = np.where([i in present for i in ids], ids, -1).astype(np.int32)
        return run_moe(
            "reference", self.x, self.topk_weights, self.topk_ids, self.weights[layer], config=CONFIG, recipe=RECIPE,
            adapters=adapters or None, adapter_ids=known if adapters else None,
        )  # fmt: skip

    def check(self, got: torch.Tensor, layer: int, adapters: tuple[LoRAAdapter, ...], ids: np.ndarray) -> None:
        want = self.reference(layer, adapters, ids)
        host = _host(got)
        assert np.isfinite(host.astype(np.float32)).all()
        assert rel_l2(host, want) <= tolerances.TO_RECIPE.bound
        assert worst_row(host, want) <= tolerances.WORST_ROW.bound


def _host(y: torch.Tensor) -> np.ndarray:
    return y.cpu().view(torch.int16).numpy().view(BF16)


def _poison(mirror: AdapterMirror) -> None:
    """NaN in everything that no adapter has been written to."""
    for layer in mirror.layers.tolist():
        slots = mirror.adapters(layer)
        for stack in (slots.a13, slots.b13, slots.a2, slots.b2):
            stack.fill_(float("nan"))
    _settle()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture
def serving() -> Iterator[tuple[AdapterPool, AdapterMirror]]:
    pool = AdapterPool(CONFIG, num_layers=LAYERS)
    mirror = AdapterMirror(pool, device=DEVICE)
    _poison(mirror)
    pool.subscribe(mirror)
    yield pool, mirror
    mirror.close()


def _step(pool: AdapterPool, random_: random.Random, seed: int) -> str:
    """One random change that the pool accepts: rank, sharing and the layers touched vary."""
    loaded = pool.adapter_ids
    kinds = ["replace", "unload"] if loaded else []
    kinds += ["load"] if len(loaded) < LORAS else []
    kind = random_.choice(kinds)
    if kind == "unload":
        pool.unload(random_.choice(loaded))
        return kind
    adapter_id = random_.choice(loaded if kind == "replace" else [i for i in IDS if i not in loaded])
    rank, shared = random_.choice((1, 5, R)), random_.random() < 0.4
    layers = random_.choice(((0, 1), (0, 1), (0,), (1,)))
    getattr(pool, kind)({n: _adapter(adapter_id, 10 * seed + n, rank=rank, shared=shared) for n in layers})
    return kind


def _addresses(mirror: AdapterMirror) -> list[int]:
    return [
        getattr(mirror.adapters(layer, by=by), name).data_ptr()
        for layer in mirror.layers.tolist() for by in ("id", "slot")
        for name in ("slot_ids", "ranks", "a13", "b13", "a2", "b2")
    ]  # fmt: skip


def test_random_changes_serve_exactly_what_the_pool_holds(serving, model: Model) -> None:
    """Free slots hold NaN throughout; by lease and by global id; addresses stay."""
    pool, mirror = serving
    random_, rng = random.Random(4), np.random.default_rng(4)
    addresses, kinds = _addresses(mirror), set()
    for step in range(10):
        kinds.add(_step(pool, random_, step))
        layer = step % LAYERS
        ids = rng.choice([-1, *pool.adapter_ids], T).astype(np.int32)
        with mirror.batch(ids) as batch:
            leased = model.run(layer, batch.adapters(layer), batch.adapter_ids)
        model.check(leased, layer, pool.adapters(layer), ids)
        everyone = np.array([*IDS, *IDS], np.int32)  # ids that are not loaded run as base rows
        model.check(
            model.run(layer, mirror.adapters(layer), to_torch(everyone, DEVICE)), layer, pool.adapters(layer), everyone
        )
    assert kinds == {"load", "replace", "unload"}
    assert _addresses(mirror) == addresses


def test_adapters_change_the_result(serving, model: Model) -> None:
    """The tolerance of the other tests tells versions apart."""
    pool, mirror = serving
    ids = np.full(T, 5, np.int32)
    pool.load(_adapter(5, 1))
    first = model.run(0, mirror.adapters(0), to_torch(ids, DEVICE))
    pool.replace(_adapter(5, 2))
    second = model.run(0, mirror.adapters(0), to_torch(ids, DEVICE))
    assert rel_l2(_host(first), _host(second)) > 20 * tolerances.TO_RECIPE.bound


def test_a_lease_keeps_its_version_and_ids_find_the_newest(serving, model: Model) -> None:
    pool, mirror = serving
    old, new = _adapter(70, 1), _adapter(70, 2, rank=R, shared=True)
    ids = np.array([70, -1, 70, 70, -1, 70], np.int32)
    device_ids = to_torch(ids, DEVICE)
    pool.load(old)
    with mirror.batch(ids) as batch:
        before = model.run(0, batch.adapters(), batch.adapter_ids)
        pool.replace(new)
        assert torch.equal(model.run(0, batch.adapters(), batch.adapter_ids), before)
        model.check(model.run(0, mirror.adapters(0), device_ids), 0, (new,), ids)
        pool.unload(70)
        assert torch.equal(model.run(0, batch.adapters(), batch.adapter_ids), before)
    model.check(before, 0, (old,), ids)
    assert torch.equal(model.run(0, mirror.adapters(0), device_ids), model.run(0, None, None))
    assert set(_table(mirror)) == set(_table(mirror, "slot")) == {-1}


class Breaking:
    """Stands for the copies to the device; the n-th one from `arm` on fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copy, self.left = adapter_mirror._copy, -1
        monkeypatch.setattr(adapter_mirror, "_copy", self)

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the bus fell off")
        self._copy(target, source)


def test_a_copy_that_fails_anywhere_leaves_the_old_adapter_serving(
    serving, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, mirror = serving
    copies = Breaking(monkeypatch)
    ids = to_torch(np.array([5, 70, -1, 5, 70, -1], np.int32), DEVICE)
    pool.load({0: _adapter(5, 1), 1: _adapter(5, 2)})
    tables = [_table(mirror), _table(mirror, "slot")]
    before = model.run(0, mirror.adapters(0), ids)
    failed = 0
    while True:
        copies.left = failed + 1
        try:
            pool.replace({0: _adapter(5, 3), 1: _adapter(5, 4)})
        except AdapterError as error:
            assert "AdapterMirror failed: the bus fell off" in str(error)
            failed += 1
            copies.left = -1
        else:
            break
        assert [_table(mirror), _table(mirror, "slot")] == tables
        if failed in (1, 6, 10):
            assert torch.equal(model.run(0, mirror.adapters(0), ids), before)
    assert failed >= 2 * 4 + 3  # every matrix stack, the ranks and the tables
    assert not torch.equal(model.run(0, mirror.adapters(0), ids), before)


def test_another_listeners_failure_brings_the_old_version_back(serving, model: Model) -> None:
    class Failing:
        def on_load(self, slot, layers):
            raise RuntimeError("full")

        def on_unload(self, slot):
            pass

    pool, mirror = serving
    pool.load(_adapter(5, 1))
    ids = to_torch(np.full(T, 5, np.int32), DEVICE)
    before = model.run(0, mirror.adapters(0), ids)
    pool._listeners.append(Failing())
    with pytest.raises(AdapterError, match="Failing failed: full"):
        pool.replace(_adapter(5, 2))
    assert torch.equal(model.run(0, mirror.adapters(0), ids), before)


def test_a_table_that_could_not_be_cleared_is_put_right_later(serving, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, mirror = serving
    copies = Breaking(monkeypatch)
    pool.load(_adapter(5, 1))
    copies.left = 1
    pool.unload(5)
    assert _table(mirror)[0] == 5
    pool.load(_adapter(70, 1))
    assert sorted(_table(mirror)) == [-1, -1, 70]


def test_after_every_copy_what_is_published_is_whole_and_no_live_id_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adapters of one value each: a published slot that mixes two values, or a wrong rank, would be half written."""

    def version(adapter_id: int, value: float, rank: int) -> dict[int, LoRAAdapter]:
        a = _adapter(adapter_id, 0, rank=rank)
        cells = {k: np.full_like(getattr(a, k), value) for k in ("a13", "b13", "a2", "b2")}
        return {n: LoRAAdapter(adapter_id, **cells) for n in range(LAYERS)}

    pool = AdapterPool(CONFIG, num_layers=LAYERS)
    mirror = AdapterMirror(pool, device=DEVICE)
    _poison(mirror)
    real, looks = adapter_mirror._copy, []
    live: set[int] = set()

    def look(target: torch.Tensor, source: torch.Tensor) -> None:
        old = mirror.adapters(0).slot_ids.tolist()
        real(target, source)
        tables = {by: mirror.adapters(0, by=by).slot_ids.tolist() for by in ("id", "slot")}
        published = {s for table in tables.values() for s, entry in enumerate(table) if entry >= 0}
        for slot in published:
            seen = set()
            for layer in range(LAYERS):
                slots = mirror.adapters(layer)
                rank = int(slots.ranks[slot])
                for name, axis in (("a13", 2), ("b13", 3), ("a2", 2), ("b2", 3)):
                    cells = getattr(slots, name)[slot].movedim(axis, 0).float()
                    seen |= {(rank, v) for v in cells[:rank].unique().tolist()}
            assert seen in ({(4, 1.0)}, {(9, 2.0)}, {(2, 3.0)}), (slot, seen)
        assert live <= set(tables["id"])
        # A copy that both shows and hides entries could be seen half done, with neither.
        changed = {(a >= 0, b >= 0) for a, b in zip(old, tables["id"]) if a != b}
        assert len(changed) < 2
        looks.append(len(published))

    monkeypatch.setattr(adapter_mirror, "_copy", look)
    pool.subscribe(mirror)
    pool.load(version(5, 1.0, 4))
    pool.load(version(70, 1.0, 4))
    live |= {5, 70}
    pool.replace(version(5, 2.0, 9))
    with pool.lease([70]):
        pool.replace(version(70, 3.0, 2))
        assert mirror.adapters(0).slot_ids.tolist().count(70) == 1  # the newest; the lease goes by slot
    live -= {5}
    pool.unload(5)
    pool.load(version(9, 1.0, 4))
    assert len(looks) > 5 * (2 * 4 + 2) and set(looks) == {0, 1, 2, 3}


def test_ranks_are_padded_with_zeros_and_missing_layers_are_zero() -> None:
    pool = AdapterPool(CONFIG, num_layers=LAYERS)
    mirror = AdapterMirror(pool, device=DEVICE, max_lora_rank=2 * R)
    _poison(mirror)
    pool.subscribe(mirror)
    adapter = _adapter(5, 1, rank=3, shared=True)
    pool.load({0: adapter})
    with pool.lease([5]) as lease:
        slot = int(lease.slots[0])
    here, there = mirror.adapters(0), mirror.adapters(1)
    assert here.ranks[slot] == 3 and there.ranks[slot] == 0
    for name, axis in (("a13", 2), ("b13", 3), ("a2", 2), ("b2", 3)):
        got = getattr(here, name)[slot].movedim(axis, 0).float().cpu()
        want = getattr(adapter, name).astype(np.float32)
        want = np.moveaxis(want if want.ndim == 4 else want[:, None], axis, 0)
        assert torch.equal(got[:3], torch.from_numpy(np.ascontiguousarray(want)).expand_as(got[:3]))
        assert got.shape[0] == 2 * R and not got[3:].any()
        assert not getattr(there, name)[slot].any()
        assert getattr(here, name)[[s for s in range(pool.num_slots) if s != slot]].isnan().all()


def test_staging_smaller_than_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = AdapterPool(CONFIG)
    whole = AdapterMirror(pool, device=DEVICE)
    monkeypatch.setattr(adapter_mirror, "_STAGING_BYTES", 3)
    pieces = AdapterMirror(pool, device=DEVICE)
    pool.subscribe(whole)
    pool.subscribe(pieces)
    pool.load(_adapter(5, 1, rank=7))
    for name in ("a13", "b13", "a2", "b2"):
        assert torch.equal(getattr(whole.adapters(), name)[0], getattr(pieces.adapters(), name)[0])


def test_masters_in_float32(model: Model) -> None:
    pool = AdapterPool(CONFIG, dtype=np.float32)
    mirror = AdapterMirror(pool, device=DEVICE)
    pool.subscribe(mirror)
    pool.load(_adapter(5, 1))
    assert torch.equal(mirror.adapters().a2[0, :, 0, :8], to_torch(_adapter(5, 1).a2, DEVICE))


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_a_rank_keeps_its_own_experts(model: Model, strategy: str) -> None:
    """Uneven ranks' partial sums add up to the reference; ids are global while slots differ from rank to rank."""
    placement = ExpertPlacement(E, 3, strategy)
    x, topk_weights, topk_ids = model.device_batch
    ids = np.array([5, 70, -1, 70, 5, -1], np.int32)
    adapters = (_adapter(5, 1), _adapter(70, 1, rank=R, shared=True))
    total = torch.zeros((T, H), dtype=torch.float32, device=DEVICE)
    for rank in range(3):
        pool = AdapterPool(CONFIG)
        mirror = AdapterMirror(pool, device=DEVICE, experts=placement.experts_of(rank))
        pool.subscribe(mirror)
        for adapter in adapters if rank else reversed(adapters):
            pool.load(adapter)
        assert mirror.adapters().b13.shape[1] == len(placement.experts_of(rank))
        total += fused_moe(
            x, topk_weights, topk_ids, prepare_weights(model.weights[0].take(placement.experts_of(rank)), DEVICE),
            recipe=RECIPE, adapters=mirror.adapters(), adapter_ids=to_torch(ids, DEVICE),
            expert_map=to_torch(placement.expert_map(rank), DEVICE), out_dtype=torch.float32,
        )  # fmt: skip
    model.check(total.to(torch.bfloat16), 0, adapters, ids)


def test_slots_that_share_the_outer_matrices(model: Model) -> None:
    pool = AdapterPool(CONFIG)
    mirror = AdapterMirror(pool, device=DEVICE, shared_a13=True, shared_b2=True)
    _poison(mirror)
    pool.subscribe(mirror)
    assert mirror.adapters().a13.shape[1] == mirror.adapters().b2.shape[1] == 1
    pool.load(_adapter(5, 1, shared=True))
    ids = np.array([5, -1, 5, 5, -1, 5], np.int32)
    with pytest.raises(AdapterError, match="adapter 70: AdapterMirror failed: layer 0: a13: got 4 experts"):
        pool.load(_adapter(70, 1))
    model.check(model.run(0, mirror.adapters(), to_torch(ids, DEVICE)), 0, pool.adapters(), ids)


def test_budget_is_checked_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = AdapterPool(CONFIG, num_layers=LAYERS)
    fits = AdapterMirror(pool, device=DEVICE)
    stacks = [getattr(fits.adapters(n), k) for n in range(LAYERS) for k in ("a13", "b13", "a2", "b2", "ranks")]
    assert fits.nbytes == sum(s.nbytes for s in stacks) + 2 * fits.adapters().slot_ids.nbytes
    AdapterMirror(pool, device=DEVICE, budget_bytes=fits.nbytes)
    real, allocated = torch.empty, []

    def empty(*args, **kwargs):
        allocated.append(str(kwargs.get("device")))
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(AdapterError, match=rf"budget_bytes: got {fits.nbytes - 1}, 3 slots of rank 16 for 4 experts"):
        AdapterMirror(pool, device=DEVICE, budget_bytes=fits.nbytes - 1)
    assert set(allocated) == {"meta"}


def test_a_graph_over_another_pools_tensors_is_an_error(serving) -> None:
    pool, mirror = serving
    pool.load(_adapter(5, 1))
    with mirror.capture() as token:
        pass
    mirror.check(token)
    pool.replace(_adapter(5, 2))
    pool.unload(5)
    mirror.check(token)  # changes of adapters never need a new capture
    bigger = AdapterMirror(AdapterPool(CONFIG.with_lora(8, R), num_layers=LAYERS), device=DEVICE)
    with pytest.raises(AdapterError, match=r"graph: captured over 3 slots of rank 16 .*it has 9 of rank 16"):
        bigger.check(token)
    same = AdapterMirror(pool, device=DEVICE)
    with pytest.raises(AdapterError, match="capture it again"):
        same.check(token)
    pool.load(_adapter(70, 1))
    table = mirror.adapters(0).slot_ids
    assert (table >= 0).any()
    mirror.close()
    assert not (table >= 0).any()  # a graph replayed without the check finds no adapter
    for use in (lambda: mirror.check(token), mirror.adapters, lambda: mirror.batch([-1]).__enter__()):
        with pytest.raises(AdapterError, match="closed"):
            use()
    with pytest.raises(AdapterError, match="AdapterMirror failed: mirror: got one that is closed"):
        pool.load(_adapter(9, 1))
    with pytest.raises(TypeError, match="token: got int, want GraphToken"):
        bigger.check(bigger.generation)  # type: ignore[arg-type]


def test_no_load_during_a_capture(serving) -> None:
    pool, mirror = serving
    done = threading.Event()

    def write() -> None:
        pool.load(_adapter(5, 1))
        done.set()

    writer = threading.Thread(target=write)
    with mirror.capture():
        writer.start()
        assert not done.wait(0.2)
    writer.join(10)
    assert done.is_set()
    with mirror.capture(), pytest.raises(AdapterError, match="thread that captures a graph"):
        pool.load(_adapter(70, 1))
    assert pool.adapter_ids == (5,)
    with mirror.capture():
        pool.unload(5)
        assert 5 in _table(mirror)
    assert 5 not in _table(mirror)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_lora_rank": R - 1}, "max_lora_rank: got 15, want at least 16"),
        ({"experts": []}, "experts: got .*at least one"),
        ({"experts": [0, E]}, r"experts: got \[0, 4\], want distinct indices in \[0, 4\)"),
        ({"experts": [1, 1]}, "experts: .*distinct"),
        ({"layers": [LAYERS]}, r"layers: got \[2\], want distinct indices in \[0, 2\)"),
        ({"budget_bytes": -1}, "budget_bytes: got -1"),
    ],
)
def test_bad_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdapterMirror(AdapterPool(CONFIG, num_layers=LAYERS), device=DEVICE, **options)


def test_bad_uses(serving) -> None:
    pool, mirror = serving
    with pytest.raises(TypeError, match="pool: got str"):
        AdapterMirror("pool", device=DEVICE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layer: got 7, this mirror has \[0, 1\]"):
        mirror.adapters(7)
    with pytest.raises(ValueError, match="by: got 'name'"):
        mirror.adapters(0, by="name")
    with pytest.raises(AdapterError, match="unknown"), mirror.batch([5]):
        pass
    late = AdapterMirror(pool, device=DEVICE, layers=[1])
    pool.load({1: _adapter(5, 1)})
    with pytest.raises(AdapterError, match="not in this mirror; pool"), late.batch([5]):
        pass
    pool.subscribe(late)
    with pytest.raises(AdapterError, match=r"layers: got \[0\], this mirror has \[1\]"):
        pool.load(_adapter(70, 1))
    for out in (torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)):
        with pytest.raises(ValueError, match="out: got"), mirror.batch([5, 5], out=out):
            pass
    out = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    with mirror.batch([5, -1], out=out) as batch:
        assert batch.adapter_ids is out and out.tolist() == [0, -1, -1, -1]


def test_batches_run_while_adapters_are_replaced(serving, model: Model) -> None:
    """Every batch gets one whole version, in both layers: the one its lease holds."""
    pool, mirror = serving
    ids = np.array([5, 5, -1, 5, -1, 5], np.int32)
    versions = [{n: _adapter(5, 10 * v + n, rank=(R, 3)[v]) for n in range(LAYERS)} for v in (0, 1)]
    known: list[list[torch.Tensor]] = []
    for version in versions:
        (pool.replace if known else pool.load)(version)
        with mirror.batch(ids) as batch:
            known.append([model.run(n, batch.adapters(n), batch.adapter_ids) for n in range(LAYERS)])
    stop, replaced, errors = threading.Event(), [0], []

    def write() -> None:
        while not stop.is_set():
            try:
                pool.replace(versions[replaced[0] % 2])
                replaced[0] += 1
            except AdapterError as error:
                if "slots are taken" not in str(error):
                    errors.append(error)
            stop.wait(0.005)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(4):
            with mirror.batch(ids) as batch:
                expected = known[0 if batch.lease.adapters(0)[0].rank == R else 1]
                got = [model.run(n, batch.adapters(n), batch.adapter_ids) for n in range(LAYERS)]
            assert all(torch.equal(a, b) for a, b in zip(got, expected))
    finally:
        stop.set()
        writer.join(20)
    assert not errors
    assert replaced[0] > 4


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tokens", [6, 300])
def test_graphs_see_every_change_without_recapture(tokens: int) -> None:
    """200 replays of one graph (by lease) and one more (by global id) with random changes between them."""
    model, pool = Model(tokens), AdapterPool(CONFIG, num_layers=LAYERS)
    mirror = AdapterMirror(pool, device=DEVICE)
    _poison(mirror)
    pool.subscribe(mirror)
    buffers = {by: torch.full((tokens,), -1, dtype=torch.int32, device=DEVICE) for by in ("slot", "id")}
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = {}
    for by, buffer in buffers.items():
        forward = lambda by=by, buffer=buffer: [  # noqa: E731
            model.launch(n, mirror.adapters(n, by=by), buffer) for n in range(LAYERS)
        ]
        forward()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with mirror.capture() as token, torch.cuda.graph(graph):
            outputs = forward()
        graphs[by] = graph, outputs
    random_, rng = random.Random(7), np.random.default_rng(7)
    kinds: dict[str, int] = {}
    for step in range(200):
        kind = _step(pool, random_, step)
        kinds[kind] = kinds.get(kind, 0) + 1
        mirror.check(token)
        ids = rng.choice([-1, *pool.adapter_ids], tokens).astype(np.int32)
        with mirror.batch(ids, out=buffers["slot"]):
            graphs["slot"][0].replay()
            buffers["id"].copy_(torch.from_numpy(ids))
            graphs["id"][0].replay()
        for n in range(LAYERS):
            leased, by_id = graphs["slot"][1][n], graphs["id"][1][n]
            model.check(leased, n, pool.adapters(n), ids)
            assert torch.equal(leased, by_id)
    assert min(kinds.values()) > 20, kinds
    mirror.close()
    with pytest.raises(AdapterError, match="closed"):
        mirror.check(token)


@pytest.mark.gpu
@needs_gpu
def test_changes_wait_for_batches_that_are_still_running() -> None:
    """Batches whose leases end long before their kernels run; loads and unloads from another thread meanwhile."""
    model, pool = Model(), AdapterPool(CONFIG, num_layers=LAYERS)
    mirror = AdapterMirror(pool, device=DEVICE)
    _poison(mirror)
    pool.subscribe(mirror)
    ids = np.full(T, 5, np.int32)
    device_ids = to_torch(ids, DEVICE)
    model.run(0, mirror.adapters(0), device_ids)
    torch.cuda.synchronize()
    results: list[tuple[LoRAAdapter | None, torch.Tensor]] = []
    for step in range(20):
        adapter = _adapter(5, step, rank=(R, 3)[step % 2], shared=step % 3 == 0)
        pool.load(adapter)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), mirror.batch(ids) as batch:
            torch.cuda._sleep(20_000_000)  # about 10 ms
            results.append((adapter, model.launch(0, batch.adapters(), batch.adapter_ids)))
        writer = threading.Thread(target=pool.unload, args=(5,))
        writer.start()
        writer.join()
        with mirror.batch([-1]):  # a batch after the unload no longer finds the id, though nobody waited for anything
            results.append((None, model.launch(0, mirror.adapters(0), device_ids)))
    torch.cuda.synchronize()
    for held, got in results:
        model.check(got, 0, () if held is None else (held,), ids)
    mirror.close()
