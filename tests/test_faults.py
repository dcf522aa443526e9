# SPDX-License-Identifier: Apache-2.0
"""What goes wrong while serving leaves the old state serving, and one clear error."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from isomoe.common import adapters as adapters_module
from isomoe.common import checkpoints as checkpoints_module
from isomoe.common.adapters import AdapterError, AdapterPool
from isomoe.common.backends import register_moe_backend, unregister_moe_backend
from isomoe.common.checkpoints import load_moe_layer
from isomoe.common.config import FusedMoEConfig
from isomoe.common.executors import executors, run_moe
from isomoe.common.metrics import bitwise_equal
from isomoe.common.numerics import BF16
from isomoe.common.safe_files import TensorFileError
from isomoe.common.weights import LoRAAdapter, quantize_moe_weights
from isomoe.tests import planted
from isomoe.tests.conformance import Subject, inputs_of, run_check, subject_for
from isomoe.tests.file_writers import write_adapter, write_checkpoint
from isomoe.tests.matrix import Case

E, H, I, R = 4, 32, 24, 4
CONFIG = FusedMoEConfig(E, 2, H, I).with_lora(3, R)
AT = "base_model.model.model.layers.0.mlp.experts"


def adapter(adapter_id: int, version: int) -> LoRAAdapter:
    rng = np.random.default_rng(1000 * adapter_id + version)
    shapes = ((E, 2, R, H), (E, 2, I, R), (E, R, I), (E, H, R))
    return LoRAAdapter(adapter_id, *(rng.standard_normal(s).astype(BF16) for s in shapes))


class Serving:
    """A pool and a layer that answers batches from it; `check` holds the answer to what was loaded."""

    def __init__(self, **options: object) -> None:
        rng = np.random.default_rng(0)
        self.pool = AdapterPool(CONFIG, **options)  # type: ignore[arg-type]
        self.weights = quantize_moe_weights(
            rng.standard_normal((E, 2 * I, H)).astype(np.float32),
            rng.standard_normal((E, H, I)).astype(np.float32),
            "channel",
        )
        self.x = rng.standard_normal((6, H)).astype(BF16)
        self.ids = rng.integers(0, E, (6, 2)).astype(np.int32)
        self.topk = np.full((6, 2), 0.5, np.float32)

    def run(self, adapters: tuple[LoRAAdapter, ...], adapter_ids: np.ndarray) -> np.ndarray:
        return run_moe(
            "reference",
            self.x,
            self.topk,
            self.ids,
            self.weights,
            config=CONFIG,
            adapters=adapters,
            adapter_ids=adapter_ids,
        )

    def answer(self, adapter_ids: np.ndarray) -> np.ndarray:
        """One batch, its adapters held by a lease."""
        with self.pool.lease(adapter_ids) as lease:
            return self.run(lease.adapters(), adapter_ids)

    def check(self, adapter_id: int, version: int) -> None:
        ids = np.where(np.arange(6) % 2, adapter_id, -1).astype(np.int32)
        assert bitwise_equal(self.answer(ids), self.run((adapter(adapter_id, version),), ids))


def write_adapter_file(root: Path) -> Path:
    rng = np.random.default_rng(5)
    tensors = {}
    for e in range(E):
        for name, n_in, n_out in (("gate_proj", H, I), ("up_proj", H, I), ("down_proj", I, H)):
            tensors[f"{AT}.{e}.{name}.lora_A.weight"] = rng.standard_normal((R, n_in)).astype(np.float32)
            tensors[f"{AT}.{e}.{name}.lora_B.weight"] = rng.standard_normal((n_out, R)).astype(np.float32)
    return write_adapter(root, {"r": R, "lora_alpha": R}, tensors)


def test_truncated_adapter_files(tmp_path: Path) -> None:
    serving = Serving()
    serving.pool.load(adapter(1, 0))
    folder = write_adapter_file(tmp_path)
    file = folder / "adapter_model.safetensors"
    raw = file.read_bytes()
    generation = serving.pool.generation
    for cut in (0, 4, 200, len(raw) // 2, len(raw) - 1):
        file.write_bytes(raw[:cut])
        with pytest.raises(AdapterError, match=r"adapter 2 \(half\): adapter_model\.safetensors"):
            serving.pool.load_file(folder, 2, name="half")
        serving.check(1, 0)
    assert (serving.pool.adapter_ids, serving.pool.generation) == ((1,), generation)


def test_200_swaps_while_requests_run() -> None:
    """Every answer is that of one whole version: the one its lease began with."""
    serving, versions = Serving(), 8
    known = {}
    for version in range(versions):
        ids = np.array([1, 2, -1, 1, 2, -1], np.int32)
        known[serving.run((adapter(1, version), adapter(2, version)), ids).tobytes()[: 2 * H]] = version
    # Row 0 uses adapter 1 alone, row 1 adapter 2 alone; each is looked up by its own bits.
    row_of = {
        i: {serving.run((adapter(1, v), adapter(2, v)), ids)[i - 1].tobytes() for v in range(versions)}
        for i in (1, 2)
    }
    base = serving.run((), np.full(6, -1, np.int32))[2].tobytes()
    serving.pool.load(adapter(1, 0))
    serving.pool.load(adapter(2, 0))
    stop, wrong, answers = threading.Event(), [], [0]

    def serve() -> None:
        while not stop.is_set():
            try:
                got = serving.answer(np.array([1, 2, -1, 1, 2, -1], np.int32))
            except Exception as error:
                wrong.append(repr(error))
                return
            if (
                got[0].tobytes() not in row_of[1]
                or got[1].tobytes() not in row_of[2]
                or got[2].tobytes() != base
            ):
                wrong.append("a mixture of versions")
            answers[0] += 1

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    swaps, deadline = 0, time.monotonic() + 60
    while swaps < 200 and time.monotonic() < deadline:
        try:
            serving.pool.replace(adapter(1 + swaps % 2, swaps % versions))
            swaps += 1
        except AdapterError as error:
            assert "slots are taken" in str(error)
            time.sleep(0.002)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not wrong, wrong[:3]
    assert swaps == 200
    assert answers[0] >= 10
    assert len(known) == versions, "versions must be told apart"


def test_loaded_twice() -> None:
    serving = Serving()
    serving.pool.load(adapter(1, 0))
    generation = serving.pool.generation
    assert serving.pool.load(adapter(1, 0)) == 1
    assert serving.pool.generation == generation
    with pytest.raises(AdapterError, match="adapter 1: the id is loaded with other contents"):
        serving.pool.load(adapter(1, 1))
    serving.check(1, 0)


def test_unloaded_in_use() -> None:
    serving = Serving()
    serving.pool.load(adapter(1, 0))
    ids = np.full(6, 1, np.int32)
    with serving.pool.lease(ids) as lease:
        serving.pool.unload(1)
        with pytest.raises(AdapterError, match="unknown"):
            serving.pool.lease(ids)
        serving.pool.load(adapter(2, 0))
        assert bitwise_equal(serving.run(lease.adapters(), ids), serving.run((adapter(1, 0),), ids))
    serving.check(2, 0)
    with pytest.raises(AdapterError, match="adapter 1: not loaded"):
        serving.pool.unload(1)


def test_over_budget(tmp_path: Path) -> None:
    serving = Serving(budget_bytes=adapter(1, 0).nbytes + 100)
    serving.pool.load(adapter(1, 0))
    with pytest.raises(AdapterError, match=r"adapter 2: needs \d+ bytes, of budget_bytes=\d+ \d+ are taken"):
        serving.pool.load(adapter(2, 0))
    with pytest.raises(AdapterError, match="budget_bytes"):
        serving.pool.load_file(write_adapter_file(tmp_path), 3)
    serving.check(1, 0)


@pytest.mark.parametrize("where", ["reading", "copying", "mirror"])
@pytest.mark.parametrize("replacing", [False, True])
def test_out_of_memory_while_loading(
    tmp_path: Path, where: str, replacing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Serving()
    serving.pool.load(adapter(1, 0))
    used, generation = serving.pool.used_bytes, serving.pool.generation
    if where == "reading":
        from isomoe.common import adapter_files

        folder, seen = write_adapter_file(tmp_path), [0]
        original = adapter_files._Reader._tensor

        def tensor(self, name):
            seen[0] += 1
            if seen[0] == 7:
                raise MemoryError
            return original(self, name)

        monkeypatch.setattr(adapter_files._Reader, "_tensor", tensor)
        with pytest.raises(AdapterError, match="adapter 2: MemoryError"):
            serving.pool.load_file(folder, 2)
    else:
        if where == "copying":
            copies, round_ = [0], adapters_module._round

            def third_fails(value, dtype):
                copies[0] += 1
                if copies[0] == 3:
                    raise MemoryError("no room for b2")
                return round_(value, dtype)

            monkeypatch.setattr(adapters_module, "_round", third_fails)
        else:

            class Full:
                def on_load(self, slot, layers):
                    if layers[0].adapter_id != 1 or float(layers[0].a2.flat[0]) != float(
                        adapter(1, 0).a2.flat[0]
                    ):
                        raise MemoryError("device memory")

                def on_unload(self, slot): ...

            serving.pool.subscribe(Full())
        with pytest.raises(AdapterError, match=r"adapter [12]: .*(no room|device memory)"):
            if replacing:
                serving.pool.replace(adapter(1, 5))
            else:
                serving.pool.load(adapter(2, 0))
    monkeypatch.undo()
    assert (serving.pool.adapter_ids, serving.pool.used_bytes, serving.pool.generation) == (
        (1,),
        used,
        generation,
    )
    serving.check(1, 0)
    if where != "mirror":
        serving.pool.load(adapter(2, 0))
        serving.check(2, 0)


def _checkpoint(root: Path) -> Path:
    rng, tensors, at = np.random.default_rng(3), {}, "model.layers.0.mlp.experts"
    for e in range(E):
        for name, shape in (("gate_proj", (I, H)), ("up_proj", (I, H)), ("down_proj", (H, I))):
            tensors[f"{at}.{e}.{name}.weight"] = rng.standard_normal(shape).astype(BF16)
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": H,
        "moe_intermediate_size": I,
        "num_experts": E,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
    }
    return write_checkpoint(root, config, tensors, shards=3)


def _open_files(root: Path) -> int:
    return sum(str(root) in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))


def test_a_shard_is_missing(tmp_path: Path) -> None:
    root = _checkpoint(tmp_path / "m")
    (root / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(TensorFileError, match=r"model-00002-of-00003\.safetensors: cannot be opened"):
        load_moe_layer(root, 0)
    assert _open_files(root) == 0


def test_out_of_memory_while_loading_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _checkpoint(tmp_path / "m")
    _, before = load_moe_layer(root, 0)
    made, original = [0], checkpoints_module._nan_buffer

    def second_fails(shape, dtype):
        made[0] += 1
        if made[0] == 2:
            raise MemoryError(f"cannot allocate {shape}")
        return original(shape, dtype)

    monkeypatch.setattr(checkpoints_module, "_nan_buffer", second_fails)
    with pytest.raises(MemoryError, match="cannot allocate"):
        load_moe_layer(root, 0)
    assert _open_files(root) == 0, "files stay open"
    monkeypatch.undo()
    _, after = load_moe_layer(root, 0)
    assert bitwise_equal(before.w13, after.w13)
    with pytest.raises(TensorFileError, match="budget_bytes"):
        load_moe_layer(root, 0, budget_bytes=100)


@pytest.fixture
def broken(request: pytest.FixtureRequest):
    """A registered executor that is broken in one way."""
    cls = request.param
    register_moe_backend(
        "broken", f"{planted.__name__}:{cls.__name__}", platforms=("cpu",), schemes=("channel", "block")
    )
    try:
        yield Subject("broken")
    finally:
        unregister_moe_backend("broken")


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (planted.Raises, MemoryError, "device memory is exhausted"),
        (
            planted.WrongShape,
            RuntimeError,
            r"executor 'broken' returned ndarray \(17, 256\), want bfloat16 \[16, 256\]",
        ),
    ],
    indirect=["broken"],
)
def test_an_executor_that_fails(broken: Subject, error: type[Exception], message: str) -> None:
    case = Case("channel", "w8a8", "mixed")
    before = inputs_of(case).run("reference")
    with pytest.raises(error, match=message):
        broken.run(case)
    result = run_check("parity", broken, case)
    assert result.verdict == "error"
    assert error.__name__ in result.reason
    assert bitwise_equal(inputs_of(case).run("reference"), before)
    assert executors()["broken"].state == "native"


@pytest.mark.parametrize("broken", [planted.NanWhereSkipped], indirect=True)
def test_an_executor_that_returns_nan(broken: Subject) -> None:
    result = run_check("parity", broken, Case("channel", "w8a8", "mixed", routing="skipped"))
    assert result.verdict == "fail"
    assert "not finite" in result.reason
    assert run_check("padding_nan", broken, Case("channel", "w8a8", "mixed")).verdict == "fail"
    assert run_check("parity", broken, Case("channel", "w8a8", "mixed")).verdict == "pass", "the rest is right"


def test_an_executor_that_cannot_be_imported() -> None:
    with pytest.raises(ImportError, match=r"cannot load 'no\.such:Thing'"):
        subject_for("no.such:Thing")
    subject_for(f"{planted.__name__}:Honest")
    unregister_moe_backend("conform_subject")
