# SPDX-License-Identifier: Apache-2.0
"""The adapter pool's bookkeeping: slots, leases, budgets, failing mirrors, threads."""

from __future__ import annotations

import threading
import time

import ml_dtypes
import numpy as np
import pytest

from isomoe.common.adapters import AdapterError, AdapterPool
from isomoe.common.config import FusedMoEConfig
from isomoe.common.weights import LoRAAdapter

BF16 = np.dtype(ml_dtypes.bfloat16)
E, H, I, R = 4, 16, 8, 4
CONFIG = FusedMoEConfig(E, 2, H, I).with_lora(2, R)


def adapter(adapter_id: int, *, value: float = 1.0, rank: int = 2, experts: int = E, dtype=BF16) -> LoRAAdapter:
    def full(*shape: int) -> np.ndarray:
        return np.full(shape, value, dtype)

    return LoRAAdapter(
        adapter_id, full(experts, 2, rank, H), full(experts, 2, I, rank), full(experts, rank, I), full(experts, H, rank)
    )


class Mirror:
    """What a device copy does: slot to layers, and a record of the calls."""

    def __init__(self) -> None:
        self.slots: dict[int, dict[int, LoRAAdapter]] = {}
        self.calls: list[tuple[str, int]] = []
        self.fail = False
        self.delay = 0.0

    def on_load(self, slot, layers):
        self.calls.append(("load", slot))
        time.sleep(self.delay)
        if self.fail:
            raise RuntimeError("out of device memory")
        self.slots[slot] = dict(layers)

    def on_unload(self, slot):
        self.calls.append(("unload", slot))
        self.slots.pop(slot, None)


def test_ids_are_global_and_slots_are_the_pools():
    pool = AdapterPool(CONFIG)
    assert pool.load(adapter(70)) == 70
    assert pool.load(adapter(5)) == 5
    slots = pool.slots_for(np.array([5, -1, 70, 5, -7], np.int32))
    assert slots.dtype == np.int32
    assert slots[1] == slots[4] == -1
    assert slots[0] == slots[3] != slots[2]
    assert {int(slots[0]), int(slots[2])} <= set(range(pool.num_slots))
    assert pool.adapter_ids == (5, 70)
    assert [a.adapter_id for a in pool.adapters()] == [5, 70]


def test_unknown_id_holds_nothing():
    pool = AdapterPool(CONFIG)
    pool.load(adapter(1))
    with pytest.raises(AdapterError, match=r"unknown \[9\], want -1 or one of \[1\]"):
        pool.lease([1, 9])
    pool.unload(1)
    assert pool.used_bytes == 0  # no lease was left behind


def test_bad_id_vectors():
    pool = AdapterPool(CONFIG)
    for bad in (np.zeros(3, np.float32), np.zeros((2, 2), np.int32)):
        with pytest.raises(AdapterError, match=r"want integers of shape"):
            pool.slots_for(bad)
    assert pool.slots_for([]).shape == (0,)


def test_masters_are_private_and_rounded_once():
    source = adapter(1, value=1.001, dtype=np.float32)
    pool = AdapterPool(CONFIG)
    pool.load(source)
    source.a13[:] = 99
    held = pool.adapters()[0]
    assert held.a13.dtype == BF16
    assert float(held.a13.flat[0]) == float(np.float32(1.001).astype(BF16))
    with pytest.raises(ValueError, match=r"read-only"):
        held.a13[:] = 0


def test_same_contents_twice_is_one_load_and_other_contents_need_replace():
    pool, mirror = AdapterPool(CONFIG), Mirror()
    pool.subscribe(mirror)
    pool.load(adapter(1))
    generation = pool.generation
    pool.load(adapter(1))
    assert mirror.calls == [("load", 0)]
    assert pool.generation == generation
    with pytest.raises(AdapterError, match=r"adapter 1: the id is loaded with other contents; use replace"):
        pool.load(adapter(1, value=2.0))
    assert float(pool.adapters()[0].a2.flat[0]) == 1.0


def test_replace_publishes_a_new_slot_and_running_batches_keep_the_old():
    pool, mirror = AdapterPool(CONFIG), Mirror()
    pool.subscribe(mirror)
    pool.load(adapter(1))
    with pool.lease([1, -1]) as lease:
        old = int(lease.slots[0])
        pool.replace(adapter(1, value=2.0))
        new = int(pool.slots_for([1])[0])
        assert new != old
        assert float(mirror.slots[old][0].a2.flat[0]) == 1.0
        assert float(lease.adapters()[0].a2.flat[0]) == 1.0
        assert float(mirror.slots[new][0].a2.flat[0]) == 2.0
        assert ("unload", old) not in mirror.calls
    assert mirror.calls[-1] == ("unload", old)
    assert set(mirror.slots) == {new}
    with pytest.raises(AdapterError, match=r"lease: got one that has ended"):
        lease.adapters()


def test_a_full_pool_can_replace_but_not_load():
    pool = AdapterPool(CONFIG)
    pool.load(adapter(1))
    pool.load(adapter(2))
    with pytest.raises(AdapterError, match=r"adapter 3 \(c\): all max_loras=2 adapters are loaded"):
        pool.load(adapter(3), name="c")
    pool.replace(adapter(2, value=3.0))
    assert float(pool.adapters()[1].a2.flat[0]) == 3.0
    pool.replace(adapter(1, value=4.0))
    assert [float(a.a2.flat[0]) for a in pool.adapters()] == [4.0, 3.0]


def test_replace_without_a_free_slot_says_so_and_serves_on():
    pool = AdapterPool(CONFIG)
    pool.load(adapter(1))
    pool.load(adapter(2))
    lease = pool.lease([1])
    pool.replace(adapter(1, value=2.0))
    with pytest.raises(AdapterError, match=r"all 3 slots are taken, 1 leases hold retiring ones"):
        pool.replace(adapter(2, value=2.0))
    assert float(pool.adapters()[1].a2.flat[0]) == 1.0
    lease.release()
    lease.release()
    pool.replace(adapter(2, value=2.0))


def test_unload_takes_the_id_at_once_and_the_slot_when_the_last_lease_ends():
    pool, mirror = AdapterPool(CONFIG), Mirror()
    pool.subscribe(mirror)
    pool.load(adapter(1))
    first, second = pool.lease([1]), pool.lease([1, 1])
    pool.unload(1)
    assert 1 not in pool
    with pytest.raises(AdapterError, match=r"unknown"):
        pool.slots_for([1])
    with pytest.raises(AdapterError, match=r"adapter 1: not loaded"):
        pool.unload(1)
    first.release()
    assert pool.used_bytes > 0
    assert ("unload", 0) not in mirror.calls
    second.release()
    assert pool.used_bytes == 0
    assert mirror.calls[-1] == ("unload", 0)


def test_unload_waits_as_long_as_asked():
    pool = AdapterPool(CONFIG)
    pool.load(adapter(1))
    lease = pool.lease([1])
    with pytest.raises(AdapterError, match=r"adapter 1: unloaded, but batches still hold its slot after 0.01 s"):
        pool.unload(1, timeout=0.01)
    pool.load(adapter(2))
    other = pool.lease([2])
    timer = threading.Timer(0.05, other.release)
    timer.start()
    pool.unload(2, timeout=10)
    timer.join()
    lease.release()
    assert pool.used_bytes == 0


def test_replacing_what_is_not_loaded():
    with pytest.raises(AdapterError, match=r"adapter 1: not loaded; use load"):
        AdapterPool(CONFIG).replace(adapter(1))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (adapter(3, rank=8), "adapter 3: layer 0: .*got rank 8, want at most max_lora_rank=4"),
        (adapter(3, experts=2), "adapter 3: layer 0: .*made for another model: experts got 2, want 4"),
        ({0: adapter(3), 5: adapter(3)}, r"adapter 3: made for another model: got layers \[5\], the pool has 1"),
        ({0: adapter(3), "1": adapter(3)}, r"adapter 3: made for another model: got layers \['1'\], the pool has 1"),
        ({0: "text"}, "got dict, want LoRAAdapter"),
        ({}, "got no layer"),
    ],
)
def test_bad_adapters_leave_the_pool_as_it_was(bad, message):
    pool = AdapterPool(CONFIG)
    pool.load(adapter(1))
    before = (pool.generation, pool.used_bytes, pool.adapter_ids)
    with pytest.raises(AdapterError, match=message):
        pool.load(bad)
    assert (pool.generation, pool.used_bytes, pool.adapter_ids) == before


def test_mixed_ids_over_layers():
    pool = AdapterPool(CONFIG, num_layers=2)
    with pytest.raises(AdapterError, match=r"got layers with ids \[1, 2\], want one id"):
        pool.load({0: adapter(1), 1: adapter(2)})


def test_budget_is_checked_before_anything_is_copied():
    need = adapter(1).nbytes
    mirror = Mirror()
    pool = AdapterPool(CONFIG, budget_bytes=2 * need - 1)
    pool.subscribe(mirror)
    pool.load(adapter(1))
    with pytest.raises(
        AdapterError, match=rf"adapter 2: needs {need} bytes, of budget_bytes={2 * need - 1} {need} are"
    ):
        pool.load(adapter(2))
    assert mirror.calls == [("load", 0)]
    pool.unload(1)
    pool.load(adapter(2))


def test_value_that_overflows_the_pools_dtype():
    pool = AdapterPool(CONFIG)
    with pytest.raises(AdapterError, match=r"adapter 1: .*non-finite"):
        pool.load(adapter(1, value=3.4e38, dtype=np.float32))
    assert pool.used_bytes == 0


def test_a_failing_mirror_cancels_the_load_everywhere():
    pool, good, bad = AdapterPool(CONFIG), Mirror(), Mirror()
    pool.subscribe(good)
    pool.subscribe(bad)
    pool.load(adapter(1))
    bad.fail = True
    before = pool.slots_for([1]).tolist(), pool.generation
    with pytest.raises(AdapterError, match=r"adapter 2: Mirror failed: out of device memory"):
        pool.load(adapter(2))
    with pytest.raises(AdapterError, match=r"adapter 1: Mirror failed"):
        pool.replace(adapter(1, value=2.0))
    assert (pool.slots_for([1]).tolist(), pool.generation) == before
    assert set(good.slots) == {0}
    assert float(good.slots[0][0].a2.flat[0]) == 1.0
    bad.fail = False
    pool.load(adapter(2))
    assert set(good.slots) == set(bad.slots) == {0, 1}


def test_a_late_mirror_gets_what_is_resident_or_is_not_subscribed():
    pool, mirror, broken = AdapterPool(CONFIG), Mirror(), Mirror()
    pool.load(adapter(1))
    pool.load(adapter(2))
    pool.subscribe(mirror)
    assert set(mirror.slots) == {0, 1}
    broken.fail = True
    with pytest.raises(AdapterError, match=r"adapter 1: Mirror failed"):
        pool.subscribe(broken)
    pool.unload(1)
    assert broken.calls == [("load", 0), ("unload", 0)]


def test_metadata_is_cached_until_the_table_changes():
    pool = AdapterPool(CONFIG)
    pool.load(adapter(7))
    ids = np.array([7, -1, 7], np.int32)
    first = pool.batch_metadata(ids)
    assert pool.batch_metadata(ids.astype(np.int64)) is first
    assert first.active_slots == (0,)
    assert first.tokens_per_slot.tolist() == [2]
    assert first.uses_adapters
    pool.load(adapter(8))
    second = pool.batch_metadata(ids)
    assert second is not first
    assert second.generation > first.generation
    assert not pool.batch_metadata([-1, -1]).uses_adapters


def test_sizes():
    pool = AdapterPool(CONFIG, num_layers=3)
    assert pool.num_slots == 3
    full = adapter(1, rank=R)
    assert pool.slot_nbytes == 3 * full.nbytes
    pool.load({0: full, 2: full})
    assert pool.used_bytes == 2 * full.nbytes
    assert pool.adapters(1) == ()


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"config": FusedMoEConfig(E, 2, H, I)}, ValueError),
        ({"config": "qwen"}, TypeError),
        ({"num_layers": 0}, ValueError),
        ({"dtype": np.float16}, ValueError),
        ({"budget_bytes": -1}, ValueError),
    ],
)
def test_bad_pools(kwargs, error):
    with pytest.raises(error, match=next(iter(kwargs)).split("_")[0]):
        AdapterPool(**{"config": CONFIG, **kwargs})


def test_a_half_written_slot_is_never_seen():
    """Versions are replaced while batches run; a mirror writes slowly, and every batch reads one whole version."""

    class SlowMirror:
        def __init__(self) -> None:
            self.cells = np.zeros((3, 8))
            self.overlap = threading.Lock()

        def on_load(self, slot, layers):
            assert self.overlap.acquire(blocking=False)
            for i in range(8):
                self.cells[slot, i] = float(layers[0].a2.flat[0])
                time.sleep(0.0002)
            self.overlap.release()

        def on_unload(self, slot):
            assert self.overlap.acquire(blocking=False)
            self.cells[slot] = np.nan
            self.overlap.release()

    pool, mirror = AdapterPool(CONFIG), SlowMirror()
    pool.subscribe(mirror)
    pool.load(adapter(1, value=1))
    pool.load(adapter(2, value=1))
    stop, torn, batches = threading.Event(), [], [0]

    def serve() -> None:
        while not stop.is_set():
            with pool.lease([1, 2]) as lease:
                for slot in lease.slots:
                    first = mirror.cells[slot].copy()
                    time.sleep(0.0001)
                    if np.isnan(first).any() or len(set(first)) != 1 or not np.array_equal(first, mirror.cells[slot]):
                        torn.append(first)
                batches[0] += 1

    readers = [threading.Thread(target=serve) for _ in range(3)]
    for thread in readers:
        thread.start()
    replaced, deadline = 0, time.monotonic() + 1.5
    while time.monotonic() < deadline:
        try:
            pool.replace(adapter(1 + replaced % 2, value=float(replaced % 100 + 2)))
            replaced += 1
        except AdapterError as error:
            assert "slots are taken" in str(error)
            time.sleep(0.001)
    stop.set()
    for thread in readers:
        thread.join(10)
    assert not torn
    assert batches[0] > 20
    assert replaced > 10
    pool.unload(1, timeout=5)
    pool.unload(2, timeout=5)
    assert pool.used_bytes == 0


def test_a_batch_does_not_wait_for_a_writer():
    pool, mirror = AdapterPool(CONFIG), Mirror()
    pool.subscribe(mirror)
    pool.load(adapter(1))
    lease = pool.lease([1])
    pool.unload(1)
    mirror.delay = 0.5
    writer = threading.Thread(target=pool.load, args=(adapter(2),))
    writer.start()
    while ("load", 1) not in mirror.calls:
        time.sleep(0.001)
    start = time.monotonic()
    lease.release()
    assert time.monotonic() - start < 0.3
    writer.join(10)
    assert ("unload", 0) in mirror.calls
    assert pool.used_bytes == adapter(2).nbytes
