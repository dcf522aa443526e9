# SPDX-License-Identifier: Apache-2.0
"""The Pallas expert kernel in the TPU interpreter, with the race detector on and memory that starts as NaN.

Both DMA modes run: copies done when issued show a buffer that is overwritten too early, copies done when waited for
show a missing wait. A failure on one virtual device leaves the others at a barrier, hence the timeouts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from isomoe.common.config import FusedMoEConfig  # noqa: E402
from isomoe.common.executors import make_call  # noqa: E402
from isomoe.common.metrics import bitwise_equal, compare, cosine, rel_l2  # noqa: E402
from isomoe.common.numerics import BF16  # noqa: E402
from isomoe.common.recipes import Recipe, default_recipe  # noqa: E402
from isomoe.common.reference import reference_moe  # noqa: E402
from isomoe.common.weights import LoRAAdapter, quantize_moe_weights  # noqa: E402
from isomoe.tests.matrix import Case, Shape, build  # noqa: E402
from isomoe.tpu_impl import combine, ep_moe, expert_kernel, layout, plan  # noqa: E402
from isomoe.tpu_impl.executor import InterpretSettings, PallasEPExecutor  # noqa: E402
from isomoe.tpu_impl.spec import Blocks, LoRASpec  # noqa: E402

pytestmark = pytest.mark.timeout(300)

# bf16 result rows and a bf16 output against float32 rows and the same output.
TO_RECIPE = 5e-3
STRICT = InterpretSettings(detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait")
EAGER = replace(STRICT, dma_execution_mode="eager")
RANK = 16


def _races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert interpret_pallas_call.races is not None, "the race detector did not run"
    return bool(interpret_pallas_call.races.races_found)


class Layer:
    """One case on the device-side operation, with everything a test may want to vary."""

    def __init__(
        self,
        case: Case,
        *,
        bf: int | None = None,
        rows: int = 64,
        nbuf: int = 2,
        xbuf: int = 2,
        stage: int = 32,
        pairs: int | None = None,
        slots: int | None = None,
        settings: InterpretSettings = STRICT,
        transport: str = "push_bf16",
        dispatch: str = "ag_bf16",
        axes: tuple[tuple[str, int], ...] = (),
    ) -> None:
        self.case, self.inputs = case, build(case)
        config = case.config
        self.num_slots = slots if slots is not None else len(self.inputs.adapters)
        rungs = (*(h for h in (32, 64, 128) if h < rows), rows)
        blocks = Blocks(
            bf or config.intermediate_size, rows, rungs, nbuf, xbuf, stage,
            (pairs or self.num_slots) if self.num_slots else 0,
        )
        shape = axes or (("ep", case.ep),)
        devices = np.array(jax.devices("cpu")[: int(np.prod([n for _, n in shape]))])
        self.build = ep_moe.EPBuild(
            mesh=Mesh(devices.reshape([n for _, n in shape]), tuple(name for name, _ in shape)), axis="ep",
            config=config, scheme=case.scheme, recipe=case.recipe, blocks=blocks, generation="v7x",
            transport=transport, dispatch=dispatch, interpret=settings.params(),
        )
        experts = case.ep * self.build.local_experts
        operands = layout.lay_out_weights(self.inputs.weights, bf=blocks.bf, experts=experts)
        self.adapter_operands: dict[str, np.ndarray] = {}
        if self.num_slots:
            self.adapter_operands, shared_a13, shared_b2 = layout.lay_out_adapters(
                self.inputs.adapters, bf=blocks.bf, rank=RANK, experts=experts, slots=self.num_slots
            )
            lora = LoRASpec(self.num_slots, RANK, shared_a13, shared_b2)
            self.build = replace(self.build, lora=lora)
        self.tensors = ep_moe.place(operands | self.adapter_operands, self.build)

    def slots(self) -> jax.Array | None:
        if not self.num_slots:
            return None
        known = {a.adapter_id: i for i, a in enumerate(self.inputs.adapters)}
        assert self.inputs.adapter_ids is not None
        return jnp.asarray([known.get(int(a), -1) for a in self.inputs.adapter_ids], jnp.int32)

    def run(self, *, check_races: bool = True, **changes: Any) -> np.ndarray:
        """bf16 ``[T, H]``; arguments may be replaced by name."""
        i = self.inputs
        arguments = {
            "x": jnp.asarray(i.x), "topk_weights": jnp.asarray(i.topk_weights), "topk_ids": jnp.asarray(i.topk_ids),
            "tensors": self.tensors, "adapter_slots": self.slots(),
        } | changes
        out = ep_moe.fused_moe_ep(build=self.build, **arguments)
        result = np.asarray(out)
        if check_races:
            assert not _races_found()
        return result

    def recipe(self) -> Recipe:
        recipe = default_recipe(self.case.recipe, self.case.scheme)
        if recipe.h_group == "token" and self.build.blocks.bf < self.case.config.intermediate_size:
            recipe = replace(recipe, h_group=self.build.blocks.bf)
        return recipe

    def reference(self, recipe: Recipe | None = None, **changes: Any) -> np.ndarray:
        """float32 ``[T, H]`` of the recipe this build declares."""
        i = self.inputs
        arguments = {
            "x": i.x, "topk_weights": i.topk_weights, "topk_ids": i.topk_ids, "weights": i.weights,
            "adapters": i.adapters or None, "adapter_ids": i.adapter_ids,
        } | changes
        return reference_moe(make_call(config=self.case.config, recipe=recipe or self.recipe(), **arguments))


def check(layer: Layer) -> np.ndarray:
    got = layer.run()
    figures = compare(got, layer.reference())
    assert figures.non_finite == 0
    assert figures.rel_l2 <= TO_RECIPE, figures
    assert figures.worst_row <= 4 * TO_RECIPE, figures
    return got


WIDE = Shape(8, 2, 256, 256)


def slow(*values: Any) -> Any:
    """A variant that repeats a covered path; the whole file would take five minutes of CPU."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("scheme", "recipe", "settings"),
    [
        ("channel", "w8a8", STRICT), ("channel", "w8a8", EAGER), ("channel", "w8a16", STRICT), ("block", "w8a8", EAGER),
        ("bf16", "bf16", STRICT), slow("channel", "w8a16", EAGER), slow("block", "w8a8", STRICT),
        slow("bf16", "bf16", EAGER),
    ],
)
def test_schemes_with_adapters_and_tiles(scheme: str, recipe: str, settings: InterpretSettings) -> None:
    """Two f tiles, three ring slots, mixed ranks with base rows between them."""
    check(Layer(Case(scheme, recipe, "mixed", tokens=24, shape=WIDE), bf=128, nbuf=3, settings=settings))


@pytest.mark.parametrize("xbuf", [1, 2])
def test_panels_are_revisited(xbuf: int) -> None:
    """More rows than a panel holds: several visits of one expert, each a whole pass over its tiles."""
    case = Case("channel", "w8a8", "mixed", routing="one_expert", tokens=80, shape=WIDE)
    check(Layer(case, bf=128, rows=32, xbuf=xbuf, settings=EAGER))


def test_visits_split_where_adapters_do_not_fit() -> None:
    """Three adapters, two at once."""
    got = check(Layer(Case("channel", "w8a8", "mixed", tokens=24), pairs=2))
    whole = Layer(Case("channel", "w8a8", "mixed", tokens=24)).run()
    assert bitwise_equal(got, whole)


@pytest.mark.parametrize("settings", [STRICT, EAGER], ids=["on_wait", "eager"])
@pytest.mark.parametrize("ep", [slow(2), 4, 8])
def test_expert_parallel_equals_one_device(ep: int, settings: InterpretSettings) -> None:
    """Pushed rows are summed by their owner in the order k = 0 .. K-1, so the device count leaves no trace."""
    case = Case("channel", "w8a8", "mixed", tokens=19)
    many = check(Layer(replace(case, ep=ep), settings=settings))
    assert bitwise_equal(many, Layer(case).run())


@pytest.mark.parametrize("routing", ["one_expert", "empty_rank", "remote", "skipped"])
def test_routings(routing: str) -> None:
    check(Layer(Case("channel", "w8a8", "mixed", routing=routing, ep=4, tokens=11, shape=Shape(8, 2, 256, 128))))


def test_one_token_and_experts_that_do_not_divide() -> None:
    check(Layer(Case("channel", "w8a8", "one", ep=8, tokens=1, shape=Shape(6, 3, 256, 128))))


def test_all_ids_skipped_gives_zeros() -> None:
    layer = Layer(Case("channel", "w8a8", ep=4, tokens=8))
    got = layer.run(topk_ids=jnp.full((8, 2), -1, jnp.int32))
    assert not got.astype(np.float32).any()


def test_repeated_expert_in_one_row() -> None:
    layer = Layer(Case("channel", "w8a8", ep=2, tokens=6))
    ids = np.full((6, 2), 3, np.int32)
    want = layer.reference(topk_ids=ids)
    assert rel_l2(layer.run(topk_ids=jnp.asarray(ids)), want) <= TO_RECIPE


def test_reduce_scatter_transport() -> None:
    layer = Layer(Case("channel", "w8a16", "mixed", routing="skipped", ep=4, tokens=13), transport="rs_bf16")
    assert rel_l2(layer.run(), layer.reference()) <= 1.5 * TO_RECIPE


def test_fp8_result_rows() -> None:
    """Codes and scales are the reference's own, and the device count still leaves no trace."""
    case = Case("channel", "w8a8", "mixed", routing="skipped", ep=4, tokens=13)
    layer = Layer(case, transport="push_fp8", settings=EAGER)
    got = layer.run()
    assert rel_l2(got, layer.reference(layer.recipe().with_wire("fp8"))) <= 2 * TO_RECIPE
    assert rel_l2(got, layer.reference()) > 2 * TO_RECIPE
    assert bitwise_equal(got, Layer(replace(case, ep=1), transport="push_fp8").run())


def test_rows_quantised_at_their_source() -> None:
    """One quantiser: where it runs leaves no trace, so programs with and without adapters agree on base rows."""
    case = Case("channel", "w8a8", ep=2, tokens=13, shape=Shape(8, 2, 512, 128))
    assert bitwise_equal(check(Layer(case, dispatch="ag_fp8")), Layer(case).run())
    with pytest.raises(ValueError, match="dispatch: got 'ag_fp8' with recipe='w8a16'"):
        Layer(replace(case, recipe="w8a16"), dispatch="ag_fp8").run()


@pytest.mark.parametrize(
    "axes", [(("data", 2), ("ep", 4)), slow((("ep", 4), ("model", 1))), (("a", 1), ("ep", 4), ("b", 2))]
)
def test_any_mesh_rank(axes: tuple[tuple[str, int], ...]) -> None:
    case = Case("channel", "w8a8", "mixed", ep=4, tokens=8)
    assert bitwise_equal(Layer(case, axes=axes, settings=EAGER).run(), Layer(replace(case, ep=1)).run())


@pytest.mark.parametrize("activation", [slow("silu"), "gelu", slow("gelu_tanh"), "swigluoai"])
def test_activations_and_biases(activation: str) -> None:
    check(Layer(Case("channel", "w8a16", activation=activation, bias=True, tokens=8, shape=WIDE), bf=128))


# -- adapters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "recipe"),
    [
        ("mixed", "w8a8"), ("shared_outer", "w8a8"), ("mixed", "w8a16"), slow("one", "w8a8"), slow("one", "w8a16"),
        slow("shared_outer", "w8a16"),
    ],
)
def test_delta_on_its_own(lora: str, recipe: str) -> None:
    """What the adapters add, judged without the base output: a wrong delta beside a large base would hide."""
    case = Case("channel", recipe, lora, tokens=24, ep=2)
    layer = Layer(case)
    base = Layer(replace(case, lora="none"))
    assert np.array_equal(layer.inputs.x, base.inputs.x)
    got = layer.run().astype(np.float64) - base.run().astype(np.float64)
    want = layer.reference().astype(np.float64) - base.reference().astype(np.float64)
    used = np.asarray(layer.slots()) >= 0
    assert used.any()
    assert cosine(got[used], want[used]) >= 0.999
    assert rel_l2(got[used], want[used]) <= 2e-2
    assert not got[~used].any()


@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_rows_without_adapter_keep_their_bits(scheme: str) -> None:
    case = Case(scheme, "w8a8", "mixed", tokens=24, ep=2)
    base = Layer(replace(case, lora="none")).run()
    mixed = Layer(case)
    used = np.asarray(mixed.slots()) >= 0
    assert (~used).any()
    got = mixed.run()
    assert bitwise_equal(got[~used], base[~used])
    assert not np.array_equal(got[used], base[used])
    assert bitwise_equal(Layer(replace(case, lora="idle")).run(), base)
    assert bitwise_equal(Layer(replace(case, lora="zero_b")).run(), base)


def test_unused_slots_may_hold_anything() -> None:
    """NaN in a slot that no row of the batch uses stays there."""
    layer = Layer(Case("channel", "w8a8", "mixed", tokens=16), slots=5)
    clean = layer.run()
    poisoned = dict(layer.tensors)
    for name in layer.adapter_operands:
        poisoned[name] = layer.tensors[name].at[3:].set(jnp.nan)
    assert bitwise_equal(layer.run(tensors=poisoned), clean)


def test_swapping_adapters_does_not_trace_again() -> None:
    layer = Layer(Case("channel", "w8a8", "mixed", tokens=16), settings=InterpretSettings())
    before = layer.run(check_races=False)
    traced = ep_moe.interpreted_layer._cache_size()
    other = dict(layer.tensors)
    for name in layer.adapter_operands:
        other[name] = jnp.roll(layer.tensors[name], 1, axis=0)
    swapped = layer.run(check_races=False, tensors=other)
    assert ep_moe.interpreted_layer._cache_size() == traced
    slots = layer.slots()
    moved = layer.run(check_races=False, tensors=other, adapter_slots=jnp.where(slots < 0, -1, (slots + 1) % 3))
    assert ep_moe.interpreted_layer._cache_size() == traced
    assert not np.array_equal(swapped, before)
    assert bitwise_equal(moved, before)


# -- invariants -----------------------------------------------------------------------------------------------


def test_permuting_tokens_permutes_rows() -> None:
    layer = Layer(Case("channel", "w8a8", "mixed", tokens=20, ep=2))
    order = np.random.default_rng(0).permutation(20)
    i = layer.inputs
    got = layer.run(
        x=jnp.asarray(i.x[order]), topk_weights=jnp.asarray(i.topk_weights[order]),
        topk_ids=jnp.asarray(i.topk_ids[order]), adapter_slots=layer.slots()[order],
    )
    assert bitwise_equal(got, layer.run()[order])


def test_a_row_does_not_depend_on_the_others() -> None:
    """Same row, other companions, other tile heights; a NaN row poisons only itself."""
    layer = Layer(Case("channel", "w8a8", "mixed", tokens=40, routing="one_expert"))
    whole = layer.run()
    i = layer.inputs
    few = layer.run(
        x=jnp.asarray(i.x[:5]), topk_weights=jnp.asarray(i.topk_weights[:5]), topk_ids=jnp.asarray(i.topk_ids[:5]),
        adapter_slots=layer.slots()[:5],
    )
    assert bitwise_equal(few, whole[:5])
    x = i.x.copy()
    x[7] = np.nan
    poisoned = layer.run(x=jnp.asarray(x))
    assert np.isnan(poisoned[7].astype(np.float32)).all()
    keep = np.arange(40) != 7
    assert bitwise_equal(poisoned[keep], whole[keep])


def test_static_scales_and_tensor_scheme() -> None:
    case = Case("tensor", "w8a8", tokens=12, shape=WIDE)
    layer = Layer(case, bf=128)
    scales = {"w13_input_scale": np.full((1,), 0.01, np.float32), "w2_input_scale": np.full((1,), 0.02, np.float32)}
    weights = replace(layer.inputs.weights, **scales)
    layer.build = replace(layer.build, static_scales=True)
    got = layer.run(act_scale=jnp.asarray(layout.activation_scales(weights)))
    want = layer.reference(Recipe("w8a8", "static", "static"), weights=weights)
    assert rel_l2(got, want) <= TO_RECIPE


@pytest.mark.parametrize("activation", [slow("silu"), "relu2"])
def test_experts_without_a_gate(activation: str) -> None:
    rng = np.random.default_rng(1)
    config = FusedMoEConfig(4, 2, 256, 96, activation=activation, is_act_and_mul=False)
    w13, w2 = rng.standard_normal((4, 96, 256)) / 16, rng.standard_normal((4, 256, 96)) / 10
    weights = quantize_moe_weights(w13, w2, "channel")
    f = lambda *s: (rng.standard_normal(s) / 8).astype(BF16)  # noqa: E731
    adapter = LoRAAdapter(3, f(4, 1, 8, 256), f(4, 1, 96, 8), f(4, 8, 96), f(4, 256, 8))
    x = rng.standard_normal((9, 256)).astype(BF16)
    ids = np.stack([rng.permutation(4)[:2] for _ in range(9)]).astype(np.int32)
    call = make_call(
        x, rng.random((9, 2), np.float32), ids, weights, config=config, adapters=[adapter],
        adapter_ids=np.array([3, -1, 3] * 3, np.int32), ep_size=2,
    )
    assert rel_l2(PallasEPExecutor.run(call, settings=STRICT), reference_moe(call)) <= TO_RECIPE
    assert not _races_found()


# -- structure ------------------------------------------------------------------------------------------------


def test_each_visited_expert_is_streamed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the weight copies that really start: visited experts x tiles x panels, nothing for idle experts."""
    started: list[tuple[int, int]] = []
    original = expert_kernel._Kernel.start_weights

    def counting(self: Any, step: Any) -> None:
        f, v = step % self.spec.tiles, step // self.spec.tiles
        jax.debug.callback(lambda e, f: started.append((int(e), int(f))), self.expert(v), f)
        original(self, step)

    monkeypatch.setattr(expert_kernel._Kernel, "start_weights", counting)
    layer = Layer(Case("channel", "w8a8", tokens=24, shape=WIDE), bf=128, rows=64)
    ids = np.asarray(layer.inputs.topk_ids).copy()
    ids[:] = np.array([[1, 6]])
    ids[:3, 0] = 4
    layer.run(topk_ids=jnp.asarray(ids))
    jax.effects_barrier()
    assert sorted(started) == sorted((e, f) for e in (1, 4, 6) for f in (0, 1))


@pytest.mark.parametrize("settings", [STRICT, EAGER], ids=["on_wait", "eager"])
def test_the_detector_sees_a_planted_race(monkeypatch: pytest.MonkeyPatch, settings: InterpretSettings) -> None:
    """Fetch the next rows before the only row buffer has been read: the other tests would notice."""
    start, stage = expert_kernel._Kernel.start_gather, expert_kernel._Kernel.stage_rows

    def only_the_first(self: Any, v: Any) -> None:
        if not hasattr(self, "started"):
            start(self, v)
        self.started = True

    def fetch_then_read(self: Any, v: Any) -> None:
        expert_kernel.pl.when(v + 1 < self.visits)(lambda: start(self, v + 1))
        stage(self, v)

    monkeypatch.setattr(expert_kernel._Kernel, "start_gather", only_the_first)
    monkeypatch.setattr(expert_kernel._Kernel, "stage_rows", fetch_then_read)
    layer = Layer(Case("channel", "w8a16", tokens=9), xbuf=1, settings=settings)
    layer.run(check_races=False)
    assert _races_found()


def test_plan_lists_only_visited_experts_and_covers_every_row() -> None:
    layer = Layer(Case("channel", "w8a8", "mixed", tokens=50))
    spec = layer.build.spec(50)
    got = plan.build_plan(spec, 8, jnp.asarray(layer.inputs.topk_ids), layer.slots(), jnp.int32(0))
    table, t = np.asarray(got.table), spec.table
    count = table[0]
    visits = table[t.visits : t.visits + t.visit_width * spec.max_visits].reshape(-1, t.visit_width)[:count]
    per_expert = np.bincount(layer.inputs.topk_ids.ravel(), minlength=8)
    assert visits[:, 0].tolist() == sorted(visits[:, 0].tolist())
    assert {int(e) for e in visits[:, 0]} == set(np.flatnonzero(per_expert).tolist())
    assert np.bincount(visits[:, 0], weights=visits[:, 2], minlength=8).astype(int).tolist() == per_expert.tolist()
    rows = table[t.rows : t.rows + 100]
    for expert, first, length in visits[:, :3]:
        for token in rows[first : first + length]:
            assert expert in layer.inputs.topk_ids[token]
    assert sorted(np.asarray(got.arrival).ravel().tolist()) == list(range(100))


# -- what is refused ------------------------------------------------------------------------------------------


def test_bad_arguments_are_named() -> None:
    layer = Layer(Case("channel", "w8a8", tokens=8), settings=InterpretSettings())
    with pytest.raises(TypeError, match="topk_ids: got int16, want int32"):
        layer.run(topk_ids=jnp.zeros((8, 2), jnp.int16))
    with pytest.raises(ValueError, match=r"topk_weights: got shape \[8, 3\], want \[8, 2\]"):
        layer.run(topk_weights=jnp.zeros((8, 3), jnp.float32))
    with pytest.raises(ValueError, match="adapter_slots: got some"):
        layer.run(adapter_slots=jnp.zeros((8,), jnp.int32))
    with pytest.raises(ValueError, match=r"tensors\['w2'\]"):
        layer.run(tensors=layer.tensors | {"w2": layer.tensors["w2"][:, :, :64]})
    with pytest.raises(ValueError, match="tensors: got"):
        layer.run(tensors={"w13": layer.tensors["w13"]})


def test_executor_names_what_it_cannot_do() -> None:
    inputs = build(Case("channel", "w8a8", tokens=4))
    with pytest.raises(RuntimeError, match=r"ep_size: got 64 .*xla_force_host_platform_device_count=64"):
        inputs.run("pallas_ep", ep_size=64)
    with pytest.raises(ValueError, match="x_group=128"):
        inputs.run("pallas_ep", recipe=Recipe("w8a8", 128, 128))
    with pytest.raises(ValueError, match="lora_input"):
        inputs.run("pallas_ep", recipe=Recipe("w8a8", "token", "token", lora_input="fp8"))


def test_executor_declares_the_tile_it_quantises_by() -> None:
    inputs = build(Case("channel", "w8a8", tokens=4, shape=WIDE))
    call = make_call(
        inputs.x, inputs.topk_weights, inputs.topk_ids, inputs.weights, config=inputs.case.config,
        recipe=Recipe("w8a8", "token", 128),
    )
    assert PallasEPExecutor.recipe(call) == Recipe("w8a8", "token", 128, "bf16")
    got = PallasEPExecutor.run(call)
    assert rel_l2(got, reference_moe(call)) <= TO_RECIPE
    token = replace(call, recipe=Recipe("w8a8", "token", "token"))
    assert PallasEPExecutor.recipe(token).h_group == "token"
    assert rel_l2(got, reference_moe(token)) > TO_RECIPE


# -- pieces of the plan and the sum ---------------------------------------------------------------------------


def test_sums_agree_unrolled_and_looped(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    rows, at = rng.standard_normal((96, 256)).astype(BF16), rng.permutation(96).reshape(24, 4).astype(np.int32)
    use, weights = rng.random((24, 4)) < 0.8, rng.random((24, 4), np.float32)
    scales = rng.random((96, 1), np.float32)
    rows[at[~use]] = np.nan
    arguments = [jnp.asarray(a) for a in (rows, at, use, weights, scales)]
    unrolled = np.asarray(combine.weighted_sum(*arguments))
    monkeypatch.setattr(combine, "UNROLLED_TOKENS", 0)
    looped = np.asarray(combine.weighted_sum(*arguments))
    want = np.zeros((24, 256), np.float32)
    for k in range(4):
        term = weights[:, k, None] * (rows[at[:, k]].astype(np.float32) * scales[at[:, k]])
        want += np.where(use[:, k, None], term, np.float32(0))
    assert rel_l2(unrolled, want) <= 1e-6
    assert rel_l2(looped, want) <= 1e-6


@pytest.mark.parametrize("most", [7, 2**30])
def test_pairs_are_ordered_by_key_then_index(most: int) -> None:
    """Key and index in one number, and where they do not fit, as two."""
    key = np.random.default_rng(3).integers(0, 8, 300).astype(np.int32)
    order, carried = plan._sort_pairs(jnp.asarray(key), most, jnp.arange(300, dtype=jnp.int32) * 3)
    want = np.argsort(key, kind="stable")
    assert np.array_equal(np.asarray(order), want)
    assert np.array_equal(np.asarray(carried), want * 3)
    assert np.array_equal(np.asarray(plan.inverse_permutation(order))[want], np.arange(300))
