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

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from isomoe.common.config import FusedMoEConfig
from isomoe.common.executors import make_call
from isomoe.common.metrics import bitwise_equal, compare, cosine, rel_l2
from isomoe.common.numerics import BF16, E4M3, quantize_fp8
from isomoe.common.recipes import Recipe, default_recipe
from isomoe.common.reference import reference_moe, truth
from isomoe.common.weights import LoRAAdapter, quantize_moe_weights
from isomoe.tests.matrix import Case, Shape, build
from isomoe.tests.races import keep_detectors, races_found  # noqa: F401
from isomoe.tpu_impl import ep_moe, expert_kernel, layout, plan, presum
from isomoe.tpu_impl.executor import InterpretSettings, PallasEPExecutor
from isomoe.tpu_impl.numerics import e4m3_bits
from isomoe.tpu_impl.pack_kernel import pack_kernel
from isomoe.tpu_impl.spec import ABLATIONS, STAGES, Blocks, LoRASpec

pytestmark = pytest.mark.timeout(300)

# bf16 result rows and a bf16 output against float32 rows and the same output.
TO_RECIPE = 5e-3
STRICT = InterpretSettings(detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait")
EAGER = replace(STRICT, dma_execution_mode="eager")
RANK = 16
WIRES: dict[str, dict[str, str]] = {
    "push_bf16": {}, "push_fp8": {"wire": "fp8"}, "rs_bf16": {"wire": "bf16", "wire_unit": "device"},
    "presum_fp8": {"wire": "fp8", "wire_unit": "device"},
}


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

    def slots(self) -> jax.Array:
        """int32 ``[T]``, the slot of each token's adapter."""
        known = {a.adapter_id: i for i, a in enumerate(self.inputs.adapters)}
        assert self.inputs.adapter_ids is not None
        return jnp.asarray([known.get(int(a), -1) for a in self.inputs.adapter_ids], jnp.int32)

    def run(self, *, check_races: bool = True, **changes: Any) -> np.ndarray:
        """bf16 ``[T, H]``; arguments may be replaced by name."""
        result = np.asarray(self.run_on_mesh(**changes))
        if check_races:
            assert not races_found()
        return result

    def run_on_mesh(self, **changes: Any) -> jax.Array:
        i = self.inputs
        arguments = {
            "x": jnp.asarray(i.x), "topk_weights": jnp.asarray(i.topk_weights), "topk_ids": jnp.asarray(i.topk_ids),
            "tensors": self.tensors, "adapter_slots": self.slots() if self.num_slots else None,
        } | changes
        return jax.block_until_ready(ep_moe.fused_moe_ep(build=self.build, **arguments))

    def plain(self) -> Recipe:
        """The recipe without the roundings of rows that travel."""
        return replace(self.recipe(), wire="f32", wire_unit="row", x_wire="bf16")

    def recipe(self) -> Recipe:
        """What this build declares, but for the rounding of bf16 rows."""
        recipe = replace(default_recipe(self.case.recipe, self.case.scheme), **WIRES[self.build.transport])
        if self.build.dispatch == "ag_fp8" and self.case.recipe == "w8a16":
            recipe = replace(recipe, x_wire="fp8")
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
        return reference_moe(
            make_call(config=self.case.config, recipe=recipe or self.recipe(), ep_size=self.case.ep, **arguments)
        )


def check(layer: Layer) -> np.ndarray:
    got = layer.run()
    figures = compare(got, layer.reference())
    assert figures.non_finite == 0
    assert figures.rel_l2 <= TO_RECIPE, figures
    assert figures.worst_row <= 4 * TO_RECIPE, figures
    return got


def reference_truth(layer: Layer) -> np.ndarray:
    i = layer.inputs
    return truth(
        make_call(
            i.x, i.topk_weights, i.topk_ids, i.weights, config=layer.case.config, adapters=i.adapters or None,
            adapter_ids=i.adapter_ids,
        )
    )


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


@pytest.mark.parametrize("bf", [128, 256], ids=["tiles", "one_tile"])
def test_adapters_come_in_runs_of_neighbouring_slots(bf: int) -> None:
    """Slot 1 has no rows, so that slots 0 and 2 come in a copy each; what lies between them stays out of the sums."""
    layer = Layer(Case("channel", "w8a8", "mixed", tokens=24, shape=WIDE), bf=bf, settings=EAGER)
    slots, ids = np.asarray(layer.slots()), layer.inputs.adapter_ids.copy()
    assert {0, 1, 2} <= set(slots.tolist())
    ids[slots == 1] = -1
    got = layer.run(adapter_slots=jnp.asarray(np.where(slots == 1, -1, slots)))
    assert rel_l2(got, layer.reference(adapter_ids=ids)) <= TO_RECIPE


def test_more_room_for_adapters_than_slots() -> None:
    """Three groups of 11 for 32 slots: the last place is nobody's."""
    case = Case("channel", "w8a8", "mixed", tokens=12)
    layer = Layer(case, slots=32, pairs=11)
    assert layer.build.spec(12).groups == 3
    assert bitwise_equal(check(layer), Layer(case).run())


def test_more_adapters_at_once_than_a_word_has_bits() -> None:
    case = Case("channel", "w8a8", "mixed", tokens=12)
    layer = Layer(case, slots=34, pairs=34)
    spec, slots = layer.build.spec(12), np.asarray(layer.slots())
    assert (spec.groups, spec.present_words) == (1, 2)
    stacks = [name for name in ("a13", "lora_b13", "a2", "lora_b2")]
    moved = {name: jnp.roll(layer.tensors[name], 31, axis=0) for name in stacks}
    got = layer.run(adapter_slots=jnp.where(slots < 0, -1, slots + 31), tensors=layer.tensors | moved)
    assert bitwise_equal(got, Layer(case).run())


@pytest.mark.parametrize(("slots", "deep"), [(None, True), (9, False)], ids=["one_register", "two_registers"])
@pytest.mark.parametrize("scheme", ["channel", slow("block")])
def test_tall_panels_end_in_their_only_tile(scheme: str, slots: int | None, deep: bool) -> None:
    """Two panels of one expert; what adapters add is expanded in one pass where both terms fit the matrix unit."""
    case = Case(scheme, "w8a8", "mixed", routing="one_expert", tokens=120, shape=WIDE)
    layer = Layer(case, rows=96, slots=slots, settings=EAGER)
    spec = layer.build.spec(120)
    assert (spec.one_block, spec.finishes_in_tile, spec.deep_terms) == (False, True, deep)
    got, base = check(layer), np.asarray(layer.slots()) < 0
    assert base.any()
    assert bitwise_equal(got[base], Layer(replace(case, lora="none"), rows=96).run()[base])


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
    got = layer.run()
    assert rel_l2(got, layer.reference()) <= TO_RECIPE
    assert rel_l2(got, layer.reference(layer.plain())) <= 1.5 * TO_RECIPE


def test_fp8_result_rows() -> None:
    """Codes and scales are the reference's own, and the device count still leaves no trace."""
    case = Case("channel", "w8a8", "mixed", routing="skipped", ep=4, tokens=13)
    layer = Layer(case, transport="push_fp8", settings=EAGER)
    got = layer.run()
    assert rel_l2(got, layer.reference()) <= 2 * TO_RECIPE
    assert rel_l2(got, layer.reference(layer.plain())) > 2 * TO_RECIPE
    assert bitwise_equal(got, Layer(replace(case, ep=1), transport="push_fp8").run())


@pytest.mark.parametrize("settings", [STRICT, EAGER], ids=["on_wait", "eager"])
def test_scales_of_many_rows(settings: InterpretSettings) -> None:
    """More rows to an owner, and in a chunk, than a line of scales holds; what comes from one device begins inside a
    line of another's."""
    case = Case("channel", "w8a8", ep=2, tokens=256, shape=Shape(4, 2, 256, 128))
    many = Layer(case, transport="push_fp8", rows=192, stage=192, settings=settings)
    got = many.run()
    assert rel_l2(got, many.reference()) <= 2 * TO_RECIPE
    assert bitwise_equal(got, Layer(replace(case, ep=1), transport="push_fp8").run())


TALL = Shape(8, 4, 256, 128)  # several experts of a token on one device


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        (Case("channel", "w8a8", "one", routing="ties", tokens=9, shape=TALL), STRICT),
        (Case("channel", "w8a8", "mixed", routing="skipped", ep=2, tokens=13, shape=TALL), EAGER),
        (Case("channel", "w8a16", "shared_outer", routing="remote", ep=4, tokens=11, shape=TALL), STRICT),
        (Case("channel", "w8a8", routing="empty_rank", ep=8, tokens=10, bias=True), EAGER),
        slow(Case("block", "w8a8", "zero_b", routing="one_expert", ep=4, tokens=8, shape=TALL), EAGER),
        slow(Case("channel", "w8a8", "mixed", routing="uniform", ep=8, tokens=1, shape=Shape(6, 3, 256, 128)), STRICT),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else value.dma_execution_mode,
)
def test_one_fp8_row_a_token_and_device(case: Case, settings: InterpretSettings) -> None:
    """Presummed: the declared recipe knows which experts share a device; one device rounds its sum as well."""
    layer = Layer(case, transport="presum_fp8", settings=settings)
    got = check(layer)
    assert rel_l2(got, layer.reference(layer.plain())) > 2 * TO_RECIPE
    assert rel_l2(got, reference_truth(layer)) <= 6e-2


@pytest.mark.parametrize("settings", [STRICT, EAGER], ids=["on_wait", "eager"])
def test_presummed_in_many_blocks(monkeypatch: pytest.MonkeyPatch, settings: InterpretSettings) -> None:
    """Blocks of eight tokens: halves of the buffers are used again, and a block's rows go to several owners.

    Two pairs are handled together, and a rest alone.
    """
    monkeypatch.setattr(presum, "BUDGET", 0)
    monkeypatch.setattr(presum, "INTERPRETED_UNROLLED", 2)
    check(Layer(Case("channel", "w8a8", ep=2, tokens=38, shape=TALL), transport="presum_fp8", settings=settings))


def test_presummed_rows_without_adapter_keep_their_bits() -> None:
    case = Case("channel", "w8a8", "mixed", ep=2, tokens=12, shape=TALL)
    mixed = Layer(case, transport="presum_fp8", settings=EAGER)
    base = Layer(replace(case, lora="none"), transport="presum_fp8", settings=EAGER).run()
    used = np.asarray(mixed.slots()) >= 0
    got = mixed.run()
    assert bitwise_equal(got[~used], base[~used])
    assert not np.array_equal(got[used], base[used])


def test_presummed_by_the_executor() -> None:
    """The declared wire is what chooses the transport."""
    inputs = build(Case("channel", "w8a8", "mixed", ep=2, tokens=7))
    recipe = Recipe("w8a8", "token", "token", "fp8", wire_unit="device")
    want = inputs.run("reference", recipe=recipe)
    assert rel_l2(inputs.run("pallas_ep", recipe=recipe), want) <= TO_RECIPE


def test_the_detector_sees_sums_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presum._Kernel, "wait_gather", lambda self, b: None)
    layer = Layer(Case("channel", "w8a16", tokens=10), transport="presum_fp8", settings=EAGER)
    layer.run(check_races=False)
    assert races_found()


def test_most_presummed_tokens_fit_scalar_memory() -> None:
    spec = replace(Layer(Case("channel", "w8a8", ep=4, tokens=8)).build, transport="presum_fp8").spec(8)
    budget = 1 << 20

    def words(tokens: int) -> int:
        return presum.TableLayout.of(replace(spec, tokens=tokens)).size + tokens * spec.top_k

    most = presum.max_tokens(spec, budget)
    assert most % 4 == 0
    assert 4 * words(most) <= budget - presum.SMEM_RESERVE < 4 * words(2 * most)


def test_rows_quantised_at_their_source() -> None:
    """One quantiser: where it runs leaves no trace, so programs with and without adapters agree on base rows."""
    case = Case("channel", "w8a8", ep=2, tokens=13, shape=Shape(8, 2, 512, 128))
    assert bitwise_equal(check(Layer(case, dispatch="ag_fp8")), Layer(case).run())
    with pytest.raises(ValueError, match="dispatch: got 'ag_fp8' with recipe='bf16'"):
        Layer(replace(case, scheme="bf16", recipe="bf16"), dispatch="ag_fp8").run()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("tokens", [5, 150])
def test_packed_rows(tokens: int, native: bool) -> None:
    """Codes and scales are the host quantiser's, rows beyond the last block's end included."""
    x = (np.random.default_rng(5).standard_normal((tokens, 1536)) * 3).astype(BF16)
    x[1] = 0
    x[2, :3] = 1e-3, -1e-3, -0.0  # below a code's normal numbers
    x[3, 5:7] = np.inf, -np.inf
    words, scales = pack_kernel(
        jnp.asarray(x), (3, 1, 128), native_e4m3=native, vmem_limit_bytes=1 << 26,
        interpret=InterpretSettings().params(),
    )
    codes, want = quantize_fp8(x.astype(np.float32), "token")
    packed = np.asarray(words).reshape(tokens, -1, 1).view(np.uint8).transpose(0, 2, 1).reshape(tokens, -1)
    assert same_codes(packed, codes)
    assert scales.shape == (-(-tokens // 128) * 128,)
    assert np.array_equal(np.asarray(scales)[:tokens], want.ravel(), equal_nan=True)


def same_codes(got: np.ndarray, want: np.ndarray) -> bool:
    """Equal bytes, NaN of either sign aside."""
    want = want.view(np.uint8)
    return bool(np.all((got == want) | ((got & 0x7F == 0x7F) & (want & 0x7F == 0x7F))))


def test_codes_without_the_cast() -> None:
    """Of every bf16, of what lies half way between codes and beside it, and of NaN: the cast's own."""
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(BF16).astype(np.float32)
    codes = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    half = (codes[1:] + codes[:-1]) / 2
    near = np.concatenate([half, np.nextafter(half, 0), np.nextafter(half, 500, dtype=np.float32)])
    x = np.concatenate([every, near, -near])
    x = x[~(np.abs(x) > np.float32(448.0001))]
    with np.errstate(invalid="ignore"):
        want = x.astype(E4M3)
    assert same_codes(np.asarray(e4m3_bits(jnp.asarray(x))), want)


@pytest.mark.parametrize("transport", ["push_fp8", slow("push_bf16"), "presum_fp8"])
def test_fp8_rows_for_bf16_dots(transport: str) -> None:
    """Quantised for the way only: a rounding of its own, which the recipe declares."""
    case = Case("channel", "w8a16", ep=2, tokens=13, shape=Shape(8, 2, 512, 128))
    layer = Layer(case, dispatch="ag_fp8", transport=transport, settings=EAGER)
    got = layer.run()
    assert rel_l2(got, layer.reference()) <= 2 * TO_RECIPE
    assert rel_l2(got, layer.reference(replace(layer.recipe(), x_wire="bf16"))) > 2 * TO_RECIPE


@pytest.mark.parametrize(
    ("axes", "transport"),
    [
        ((("data", 2), ("ep", 4)), "push_bf16"), slow((("ep", 4), ("model", 1)), "push_bf16"),
        ((("a", 1), ("ep", 4), ("b", 2)), "presum_fp8"), slow((("a", 1), ("ep", 4), ("b", 2)), "push_fp8"),
    ],
)
def test_any_mesh_rank(axes: tuple[tuple[str, int], ...], transport: str) -> None:
    """Tokens replicated along another axis: each place along it is a group of its own, and all agree."""
    case = Case("channel", "w8a8", "mixed", ep=4, tokens=8)
    many = Layer(case, axes=axes, settings=EAGER, transport=transport)
    whole = Layer(case, transport=transport).run()
    out = many.run_on_mesh()
    assert not races_found()
    assert len(out.addressable_shards) == many.build.mesh.size
    for shard in out.addressable_shards:
        assert bitwise_equal(np.asarray(shard.data), whole[shard.index])


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
        poisoned[name] = layer.tensors[name].at[3:].set(0x7FC07FC0)  # two NaN
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

    def f(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / 8).astype(BF16)

    adapter = LoRAAdapter(3, f(4, 1, 8, 256), f(4, 1, 96, 8), f(4, 8, 96), f(4, 256, 8))
    x = rng.standard_normal((9, 256)).astype(BF16)
    ids = np.stack([rng.permutation(4)[:2] for _ in range(9)]).astype(np.int32)
    call = make_call(
        x, rng.random((9, 2), np.float32), ids, weights, config=config, adapters=[adapter],
        adapter_ids=np.array([3, -1, 3] * 3, np.int32), ep_size=2,
    )
    assert rel_l2(PallasEPExecutor.run(call, settings=STRICT), reference_moe(call)) <= TO_RECIPE
    assert not races_found()


# -- structure ------------------------------------------------------------------------------------------------


def test_each_visited_expert_is_streamed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the weight copies that really start: visited experts x tiles x panels, nothing for idle experts."""
    started: list[tuple[int, int, int]] = []
    original = expert_kernel._Kernel.start_weights

    def counting(self: Any, step: Any) -> None:
        f, v = step % self.spec.tiles, step // self.spec.tiles
        moved = sum(copy.src_ref.size * copy.src_ref.dtype.itemsize for copy in self.weight_copies(step))
        jax.debug.callback(lambda e, f: started.append((int(e), int(f), moved)), self.expert(v), f)
        original(self, step)

    monkeypatch.setattr(expert_kernel._Kernel, "start_weights", counting)
    layer = Layer(Case("channel", "w8a8", tokens=24, shape=WIDE), bf=128, rows=64)
    ids = np.asarray(layer.inputs.topk_ids).copy()
    ids[:] = np.array([[1, 6]])
    ids[:3, 0] = 4
    layer.run(topk_ids=jnp.asarray(ids))
    jax.effects_barrier()
    assert sorted((e, f) for e, f, _ in started) == sorted((e, f) for e in (1, 4, 6) for f in (0, 1))
    # s2 comes once a visit, apart from the tiles.
    expert_bytes = sum(layer.tensors[name][0].nbytes for name in ("w13", "w2", "s13"))
    assert sum(moved for *_, moved in started) == 3 * expert_bytes


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
    assert races_found()


PLANNED = {"vmem_limit_bytes": 1 << 26, "interpret": InterpretSettings().params()}


@pytest.mark.parametrize("tokens", [50, 700])
def test_the_plan_says_where_segments_and_rows_are(tokens: int) -> None:
    """Against numpy's sort, with pairs ranked by comparison and by sorts; one pair goes to no expert."""
    layer = Layer(Case("channel", "w8a8", "mixed", tokens=tokens))
    spec, given = layer.build.spec(tokens), layer.slots()
    assert given is not None and spec.ep == 1
    slots, ids = np.asarray(given), layer.inputs.topk_ids.copy()
    ids[3, 1] = -1
    got = plan.build_plan(
        spec, 8, jnp.asarray(ids), jnp.asarray(layer.inputs.topk_weights), given, jnp.zeros((1,), jnp.int32),
        launch=PLANNED,
    )
    table, t = np.asarray(got.table), spec.table
    # Pairs k by k.
    key = np.where(ids < 0, spec.segments, ids).T.ravel()
    order, begins = np.argsort(key, kind="stable"), np.searchsorted(np.sort(key), np.arange(spec.segments + 1))
    assert table[: 2 * tokens].tolist() == (order % tokens).tolist()
    assert table[t.begins : t.begins + spec.segments + 1].tolist() == begins.tolist()
    assert table[t.slots : t.slots + tokens].tolist() == slots.tolist()
    for expert, present in enumerate(table[t.present : t.present + spec.segments]):
        used = {int(s) for s in slots[(ids == expert).any(axis=1)] if s >= 0}
        assert used == {s for s in range(32) if present >> s & 1}
    assert np.asarray(got.arrival).T.ravel()[order].tolist() == list(range(2 * tokens))
    assert np.asarray(got.owned).tolist() == (ids >= 0).tolist()


def test_the_plan_of_rows_that_stay() -> None:
    layer = Layer(Case("channel", "w8a16", tokens=12), transport="rs_bf16")
    spec, ids = layer.build.spec(12), layer.inputs.topk_ids.copy()
    ids[3, 1] = -1
    weights = layer.inputs.topk_weights
    zero = jnp.zeros((1,), jnp.int32)
    got = plan.build_plan(spec, 8, jnp.asarray(ids), jnp.asarray(weights), None, zero, launch=PLANNED).kept
    assert got is not None
    # Within an expert k by k, named by their place in [T, K].
    pairs = np.arange(24).reshape(12, 2).T.ravel()
    order = pairs[np.argsort(np.where(ids < 0, spec.segments, ids).T.ravel(), kind="stable")]
    assert np.asarray(got.order).tolist() == order.tolist()
    assert np.asarray(got.mine).tolist() == (ids >= 0).ravel().tolist()
    assert bitwise_equal(got.weights, weights) and bitwise_equal(got.sorted_weights, weights.ravel()[order])


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


def test_builds_that_cannot_be_are_named() -> None:
    """A mesh without the axis, precisions that do not go together, blocks or a layer beyond a generation's memory."""
    build = Layer(Case("channel", "w8a8", tokens=8)).build
    for changes, message in (
        ({"axis": "model"}, "axis: got 'model', want one of the mesh's, ep"),
        ({"axis": ()}, "axis: got no axis, want one of the mesh's, ep"),
        ({"token_axes": ("data",)}, "token_axes: got 'data', want one of the mesh's, ep"),
        ({"token_axes": ("ep",)}, "token_axes: got .* want each mesh axis once"),
        ({"scheme": "int4"}, "scheme: got 'int4'"),
        ({"recipe": "w4a4"}, "recipe: got 'w4a4'"),
        ({"recipe": "bf16"}, "recipe: got 'bf16' for weights of scheme 'channel', want 'w8a8' or 'w8a16'"),
        ({"generation": "v4"}, "generation: got 'v4', want one of v5e, v5p, v6e, v7x"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(build, **changes)
    layer = Layer(Case("channel", "w8a8", tokens=8))
    tall = replace(layer.build.blocks, rows=32768, rungs=(32768,))
    layer.build = replace(layer.build, interpret=False, blocks=tall)
    with pytest.raises(ValueError, match=r"MiB of VMEM, v7x has 64; blocks\.choose_blocks finds what fits"):
        layer.run()


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


# -- builds for timing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ablate", sorted(set(ABLATIONS) - {""}))
def test_stages_can_be_left_out(ablate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out does not start, the rest neither hangs nor leaves a copy unwaited; parity is refused."""
    traced: set[str] = set()
    stages = {"start_gather": "gather", "start_weights": "weights", "start_pairs": "adapters", "tile": "dots",
              "ship": "ship"}  # fmt: skip

    def noting(name: str) -> Any:
        original = getattr(expert_kernel._Kernel, name)

        def noted(*args: Any, **options: Any) -> Any:
            traced.add(stages[name])
            return original(*args, **options)

        return noted

    for name in stages:
        monkeypatch.setattr(expert_kernel._Kernel, name, noting(name))
    settings = InterpretSettings(uninitialized_memory="zero")
    layer = Layer(Case("channel", "w8a8", "mixed", ep=2, tokens=6), settings=settings)
    layer.build = replace(layer.build, ablate=ablate)
    with pytest.raises(ValueError, match=f"ablate: got '{ablate}', a build whose results are wrong on purpose"):
        layer.run()
    i = layer.inputs
    out = ep_moe.interpreted_layer(
        jnp.asarray(i.x), jnp.asarray(i.topk_weights), jnp.asarray(i.topk_ids), layer.slots(), layer.tensors, None,
        build=layer.build,
    )
    assert out.shape == (6, 256)
    assert traced == STAGES - ABLATIONS[ablate]


def test_unknown_ablation() -> None:
    build = replace(Layer(Case("channel", "w8a8", tokens=8)).build, ablate="no_math")
    with pytest.raises(ValueError, match="ablate: got 'no_math', want one of '', 'metadata_only'"):
        build.spec(8)


# -- pieces of the plan --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [9, 30])
def test_where_numbers_went(bits: int) -> None:
    """Number and place in one, and where they do not fit, as two."""
    order = np.random.default_rng(4).permutation(2**9)[:300].astype(np.int32)
    want = np.argsort(order)
    assert np.array_equal(np.asarray(plan.inverse_permutation(jnp.asarray(order), bits)), want)
