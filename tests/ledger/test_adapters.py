# SPDX-License-Identifier: Apache-2.0
"""Reports about LoRA: what adapters see, whom they touch, how they are loaded, swapped and refused."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from isomoe.common import tolerances
from isomoe.common.adapter_files import load_lora_adapter
from isomoe.common.adapters import AdapterError, AdapterPool
from isomoe.common.config import FusedMoEConfig
from isomoe.common.executors import make_call
from isomoe.common.metrics import bitwise_equal, cosine, rel_l2
from isomoe.common.numerics import BF16, quantize_fp8
from isomoe.common.placement import ExpertPlacement
from isomoe.common.recipes import Recipe
from isomoe.common.reference import guard_lora_input, reference_moe
from isomoe.common.safe_files import TensorFileError
from isomoe.common.weights import LoRAAdapter
from isomoe.tests.conformance import inputs_of
from isomoe.tests.file_writers import write_adapter, write_tensors
from isomoe.tests.ledger.record import RNG, cases, check, report
from isomoe.tests.ledger.test_routing_and_ids import holds, served
from isomoe.tests.matrix import Case, Shape

E, H, I, R = 4, 32, 24, 4
BASE = FusedMoEConfig(E, 2, H, I)
AT = "base_model.model.model.layers.0.mlp.experts"


def rand(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def one(adapter_id: int, rank: int = R, value: float | None = None) -> LoRAAdapter:
    def make(*shape: int) -> np.ndarray:
        return (rand(*shape) if value is None else np.full(shape, value)).astype(BF16)

    return LoRAAdapter(adapter_id, make(E, 2, rank, H), make(E, 2, I, rank), make(E, rank, I), make(E, H, rank))


def per_expert(names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, np.ndarray]:
    out = {}
    for e in range(E):
        for name, (n_in, n_out) in zip(names, ((H, I), (H, I), (I, H)), strict=True):
            out[f"{AT}.{e}.{name}.lora_A.weight"] = rand(R, n_in)
            out[f"{AT}.{e}.{name}.lora_B.weight"] = rand(n_out, R)
    return out


def load(tensors: dict[str, np.ndarray], **options: object):
    with TemporaryDirectory() as folder:
        write_adapter(Path(folder), {"r": R, "lora_alpha": R}, tensors)
        return load_lora_adapter(folder, BASE, **options)  # type: ignore[arg-type]


def delta_of(executor: str, case: Case, **changes: object) -> np.ndarray:
    inputs = inputs_of(case)
    with_adapters = inputs.run(executor, **changes).astype(np.float32)
    return with_adapters - inputs.run(executor, **{**changes, "adapters": None, "adapter_ids": None}).astype(
        np.float32
    )


@report(
    "vllm#42007",
    symptom="FP8 activations without their scale reach the shrink: deltas 50 to 500 times too small",
)
def delta_scales_with_the_input(executor: str) -> None:
    _, case = served(executor, lora="one")
    inputs = inputs_of(case)
    rows = inputs.adapter_ids >= 0  # type: ignore[operator]
    for factor in (2.0**-7, 1.0, 2.0**7):
        x = (inputs.x.astype(np.float32) * factor).astype(BF16)
        got = delta_of(executor, case, x=x)[rows]
        want = delta_of("reference", case, x=x, ep_size=1)[rows]
        assert cosine(got, want) >= tolerances.DELTA_COSINE.bound
        assert 0.99 < np.linalg.norm(got) / np.linalg.norm(want) < 1.01


@report("vllm#42008", "vllm#42120", symptom="base requests are corrupted once adapters are loaded")
def base_rows_keep_their_bits(executor: str) -> None:
    subject, case = served(executor, lora="mixed")
    inputs = inputs_of(case)
    base = inputs.adapter_ids < 0  # type: ignore[operator]
    plain = subject.run(case, adapters=None, adapter_ids=None)
    assert bitwise_equal(subject.result(case)[base], plain[base])
    # A base batch after a batch with adapters.
    assert bitwise_equal(subject.run(case, adapter_ids=np.full(case.tokens, -1, np.int32)), plain)


@report("vllm#45101", symptom="FP8 layer with --enable-lora and rank 64 dies: `Unsupported lhs dtype fp8e4nv`")
def rank_64_on_block_weights() -> None:
    case = Case("block", "w8a8", "none", shape=Shape(4, 2, 256, 128))
    inputs = inputs_of(case)
    wide = LoRAAdapter(
        2,
        *((rand(*s) / 16).astype(BF16) for s in ((4, 2, 64, 256), (4, 2, 128, 64), (4, 64, 128), (4, 256, 64))),
    )
    ids = np.full(case.tokens, 2, np.int32)
    options = {"config": case.config.with_lora(1, 64), "adapters": [wide], "adapter_ids": ids}
    plain = inputs.run("reference").astype(np.float32)
    delta = inputs.run("reference", **options).astype(np.float32) - plain
    exact = inputs.run("reference", **options, recipe="float64") - inputs.run("reference", recipe="float64")
    assert cosine(delta, exact) >= 0.99


@report("vllm#45130", symptom="a cast of FP8 codes to bfloat16 drops their scale in silence")
def codes_are_refused() -> None:
    codes, scales = quantize_fp8(rand(2, 64), "token")
    with pytest.raises(NotImplementedError, match=r"apply: LoRA shrink received FP8 codes without their scale"):
        guard_lora_input(codes, None, "apply")
    guard_lora_input(codes, scales, "apply")


@report(
    "tpu-inference#2152",
    symptom="rows are quantised before they are gathered; adapters must still see the original",
)
def fp8_wire_keeps_adapter_input() -> None:
    case = Case("channel", "w8a8", "one")
    inputs = inputs_of(case)
    rows = inputs.adapter_ids >= 0  # type: ignore[operator]
    wire = Recipe("w8a8", "token", "token", "fp8")
    got = delta_of("reference", case, recipe=wire)[rows]
    assert rel_l2(got, delta_of("reference", case)[rows]) < 0.1
    call = make_call(
        inputs.x,
        inputs.topk_weights,
        inputs.topk_ids,
        inputs.weights,
        config=case.config,
        adapters=inputs.adapters,
        adapter_ids=inputs.adapter_ids,
        recipe=Recipe("w8a8", "token", "token"),
    )
    fed_fp8 = reference_moe(replace(call, recipe=replace(call.recipe, lora_input="fp8")))
    assert rel_l2(fed_fp8, reference_moe(call)) > 5e-3, "what adapters are fed must show"


@report(
    "sglang#23178",
    "sglang#24171",
    symptom="-1 reaches the adapter kernel, or lands on another adapter's expert",
)
def skipped_pairs_with_adapters(executor: str) -> None:
    subject, case = served(executor, lora="mixed", routing="skipped")
    got, want = (
        subject.result(case),
        inputs_of(case).run("reference", recipe=subject.declared(case).with_wire("f32")),
    )
    assert rel_l2(got, want) <= tolerances.TO_RECIPE.bound


@report(
    "vllm#38005",
    "vllm#38021",
    "vllm#40867",
    symptom="adapters under expert parallelism: buffers by global counts, uneven ranks, round-robin placement",
)
def adapters_are_cut_like_weights() -> None:
    case = Case("channel", "w8a8", "mixed", shape=Shape(5, 2, 128, 128))
    inputs = inputs_of(case)
    for strategy in ("linear", "round_robin"):
        placement, total = ExpertPlacement(5, 2, strategy), np.zeros(inputs.x.shape, np.float32)
        for rank in range(2):
            local = placement.experts_of(rank)
            share = {"weights": inputs.weights.take(local), "expert_map": placement.expert_map(rank)}
            whole = inputs.run("reference", **share)
            cut = inputs.run("reference", **share, adapters=[a.take(local) for a in inputs.adapters])
            assert bitwise_equal(whole, cut)
            total += whole.astype(np.float32)
        assert rel_l2(total, inputs.run("reference")) < 5e-3


@report(
    "SkyRL#2129",
    symptom="an adapter reloaded in place under the same id frees buffers that a running step reads",
)
def replace_in_use() -> None:
    pool = AdapterPool(BASE.with_lora(1, R))
    pool.load(one(1, value=1.0))
    before = pool.generation
    with pool.lease([1]) as old:
        pool.replace(one(1, value=2.0))
        assert float(old.adapters()[0].a2.flat[0]) == 1.0
        with pool.lease([1]) as new:
            assert float(new.adapters()[0].a2.flat[0]) == 2.0
            assert old.slots[0] != new.slots[0]
    assert pool.generation > before


@report(
    "dynamo#8630",
    symptom="removing an adapter fails, adding is a no-op, and old weights serve under the new name",
)
def failing_removal_serves_nothing_old() -> None:
    class Stuck:
        def on_load(self, slot: int, layers: object) -> None: ...

        def on_unload(self, slot: int) -> None:
            raise RuntimeError("cannot clear")

    pool = AdapterPool(BASE.with_lora(1, R))
    pool.subscribe(Stuck())
    pool.load(one(1, value=1.0))
    pool.unload(1)
    assert 1 not in pool
    pool.load(one(1, value=5.0))
    assert float(pool.adapters()[0].a2.flat[0]) == 5.0
    with pytest.raises(AdapterError, match="use replace"):
        pool.load(one(1, value=6.0))


@report(
    "tpu-inference#1717",
    "tpu-inference#1319",
    symptom="every adapter loaded recompiles: shapes follow their number",
)
def slots_do_not_change_with_loading() -> None:
    pool = AdapterPool(BASE.with_lora(8, R))
    shape = (pool.num_slots, pool.slot_nbytes)
    for i in range(8):
        pool.load(one(i, rank=1 + i % R))
        assert (pool.num_slots, pool.slot_nbytes) == shape
    for i in range(8):
        pool.unload(i)
        assert (pool.num_slots, pool.slot_nbytes) == shape


@report(
    "prime-rl#2073",
    symptom="each data-parallel rank numbers its slots; a rank's map applied to another's tokens corrupts",
)
def slots_differ_by_rank() -> None:
    config = BASE.with_lora(2, R)
    first, second = one(10, value=1.0), one(20, value=2.0)
    ranks = [AdapterPool(config), AdapterPool(config)]
    for pool, order in zip(ranks, ((first, second), (second, first)), strict=True):
        for adapter in order:
            pool.load(adapter)
    slots = [pool.slots_for([10, 20, -1]) for pool in ranks]
    assert slots[0].tolist() != slots[1].tolist(), "the case needs ranks that number differently"
    for pool in ranks:
        with pool.lease([20, 10]) as lease:
            assert {a.adapter_id: float(a.a2.flat[0]) for a in lease.adapters()} == {10: 1.0, 20: 2.0}


@report(
    "vllm-ascend#12451",
    "vllm-ascend#11841",
    "vllm-ascend#13365",
    "vllm-ascend#13333",
    "vllm-ascend#14367",
    "vllm-ascend#10977",
    symptom="adapter ids must travel with the tokens that are exchanged",
)
def ids_travel_with_tokens() -> None:
    holds("permutation", "reference", lora="mixed")


@report("prime-rl#2849", "prime-rl#1569", symptom="expert adapters under eight expert-parallel ranks")
def adapters_on_eight_ranks() -> None:
    holds("expert_parallel", "reference", lora="mixed", ep=8)


@report(
    "vllm#32005",
    "vllm#25914",
    "vllm#36370",
    "vllm#30984",
    "vllm#10898",
    "vllm#11436",
    symptom="base traffic pays for adapters that are enabled and idle",
)
def idle_adapters_do_no_work() -> None:
    case = Case("channel", "w8a8", "idle")
    inputs = inputs_of(case)
    call = make_call(
        inputs.x,
        inputs.topk_weights,
        inputs.topk_ids,
        inputs.weights,
        config=case.config,
        adapters=inputs.adapters,
        adapter_ids=inputs.adapter_ids,
    )
    assert call.adapters and not call.uses_adapters
    pool = AdapterPool(BASE.with_lora(1, R))
    pool.load(one(3))
    assert not pool.batch_metadata([-1, -1]).uses_adapters
    assert pool.batch_metadata([-1, 3]).uses_adapters


@report("gap: zero adapter", symptom="a zero adapter must be the same program's bits as none")
def zero_b_is_nothing() -> None:
    holds("zero_b", "reference", lora="mixed")


@report("vllm#49327", symptom="ranks below the tile are cut off in the shrink")
def small_ranks() -> None:
    case = Case("channel", "w8a16", "none", shape=Shape(2, 1, 64, 64), tokens=4)
    inputs = inputs_of(case)
    for rank in range(1, 9):
        shapes = ((2, 2, rank, 64), (2, 2, 64, rank), (2, rank, 64), (2, 64, rank))
        adapter = LoRAAdapter(1, *((rand(*s) / 4).astype(BF16) for s in shapes))
        pad = LoRAAdapter(
            1,
            *(
                np.concatenate([a, np.zeros_like(a)], axis=axis)
                for a, axis in ((adapter.a13, 2), (adapter.b13, 3), (adapter.a2, 1), (adapter.b2, 2))
            ),
        )
        options = {"config": case.config.with_lora(1, 16), "adapter_ids": np.ones(4, np.int32)}
        got, padded = (inputs.run("reference", adapters=[a], **options) for a in (adapter, pad))
        assert bitwise_equal(got, padded), f"rank {rank} stored in a wider slot"
        assert not bitwise_equal(got, inputs.run("reference"))


@report(
    "vllm#41384",
    "vllm#52198",
    symptom="adapters of target_parameters are dropped in silence, or read with E * r as rank",
)
def wrapped_parameters_are_read() -> None:
    prefix = AT
    inner, outer = f"{prefix}.base_layer", prefix
    a13, b13, a2, b2 = rand(E, 2 * R, H), rand(E, 2 * I, 2 * R), rand(E, 2 * R, I), rand(E, H, 2 * R)
    r = 2 * R
    tensors = {
        f"{inner}.lora_A.weight": a13.reshape(E * r, H),
        f"{inner}.lora_B.weight": b13.transpose(1, 2, 0).reshape(2 * I, r * E),
        f"{outer}.lora_A.weight": a2.reshape(E * r, I),
        f"{outer}.lora_B.weight": b2.transpose(1, 2, 0).reshape(H, r * E),
    }
    with TemporaryDirectory() as folder:
        write_adapter(Path(folder), {"r": r, "lora_alpha": r}, tensors)
        layer = load_lora_adapter(folder, BASE)[0]
    assert layer.rank == r
    assert np.array_equal(layer.a2, a2) and np.array_equal(layer.b2, b2)
    assert np.array_equal(layer.b13[:, 1], b13[:, I:])


@report("unsloth-zoo#1269", symptom="B packed expert-slowest is read expert-fastest; every shape fits")
def packing_is_an_argument() -> None:
    b2, a2 = rand(E, H, R), rand(E, R, I)
    a13, b13 = rand(E, R, H), rand(E, 2 * I, R)
    slow = {
        f"{AT}.base_layer.lora_A.weight": a13.reshape(E * R, H),
        f"{AT}.base_layer.lora_B.weight": b13.transpose(1, 0, 2).reshape(2 * I, E * R),
        f"{AT}.lora_A.weight": a2.reshape(E * R, I),
        f"{AT}.lora_B.weight": b2.transpose(1, 0, 2).reshape(H, E * R),
    }
    right, wrong = load(slow, b_packing="expert_slowest")[0], load(slow)
    assert np.array_equal(right.b2, b2)
    assert not np.array_equal(wrong[0].b2, b2)
    assert any("b_packing" in note for note in wrong.report.notes), "the assumption must be reported"


@report("sglang#27381", "sglang#25528", symptom="fused expert keys that nobody knows are dropped in silence")
def unknown_keys_are_refused() -> None:
    for key in ("gate_up_proj_fused.lora_A", "0.gate_proj.lora_C.weight", "w13.lora_A.weight"):
        with pytest.raises(TensorFileError, match="an expert's tensor of no form"):
            load({**per_expert(), f"{AT}.{key}": rand(R, H)})


@report("vllm#47088", symptom="an adapter that touches shared experts only loads, and changes nothing")
def shared_experts_only() -> None:
    at = "base_model.model.model.layers.0.mlp.shared_expert.gate_proj"
    with pytest.raises(TensorFileError, match="touches no routed expert: its 2 tensors are"):
        load({f"{at}.lora_A.weight": rand(R, H), f"{at}.lora_B.weight": rand(I, R)})


@report("vllm#40005", symptom="expert keys of another trainer do not load")
def other_names() -> None:
    first = per_expert()
    renamed = {
        k.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2"): v
        for k, v in first.items()
    }
    bare = {k.removeprefix("base_model.model."): v for k, v in first.items()}
    want = load(first)[0]
    for tensors in (renamed, bare):
        got = load(tensors)[0]
        assert all(bitwise_equal(getattr(got, k), getattr(want, k)) for k in ("a13", "b13", "a2", "b2"))


@report(
    "TensorRT-LLM#13391", "vllm#32045", "VoxCPM#267", symptom="an adapter path unpickles a file: remote code"
)
def pickles_are_not_opened() -> None:
    import pickle

    class Bomb:
        def __reduce__(self):
            return (threading.Thread(target=lambda: None).start, ())

    for name in ("adapter_model.bin", "adapter_model.pt"):
        with TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 4}')
            (root / name).write_bytes(pickle.dumps({"a": 1}))
            with pytest.raises(TensorFileError, match="a pickle file can run any code"):
                load_lora_adapter(root, BASE)


@report("gap: mixed ranks", symptom="ranks that differ between adapters of one batch; unused slots full of NaN")
def mixed_ranks() -> None:
    holds("relabelling", "reference", lora="mixed")


@report(
    "vllm#29890",
    "vllm#33393",
    "vllm#29708",
    "vllm#28971",
    symptom="LoRA assumed of an experts class that lacks it",
)
def lora_is_declared() -> None:
    from isomoe.common.executors import executor_class
    from isomoe.common.support import declared_support

    for name in ("triton", "marlin", "pallas_ep", "reference"):
        parent = executor_class(name)
        assert declared_support(parent).lora
        child = type("Child", (parent,), {})
        with pytest.raises(TypeError, match="only inherits one"):
            declared_support(child)


@report("gap: truncated adapter", symptom="a half-written adapter loads as zeros")
def truncated_adapter() -> None:
    with TemporaryDirectory() as folder:
        write_adapter(Path(folder), {"r": R, "lora_alpha": R}, per_expert())
        file = Path(folder) / "adapter_model.safetensors"
        raw = file.read_bytes()
        for cut in (len(raw) - 1, len(raw) // 2, 40, 7, 0):
            file.write_bytes(raw[:cut])
            with pytest.raises(TensorFileError, match=r"adapter_model\.safetensors"):
                load_lora_adapter(folder, BASE)
        write_tensors(file, per_expert())
        assert load_lora_adapter(folder, BASE)[0].rank == R


@cases(__name__)
def test_report(name: str, executor: str) -> None:
    check(name, executor)
