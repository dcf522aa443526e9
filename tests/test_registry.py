# SPDX-License-Identifier: Apache-2.0
"""The backend registry: what may be registered, when it is loaded, and how a broken registration shows."""

from __future__ import annotations

import logging
import sys
import threading
import types

import numpy as np
import pytest

from isomoe.common import backends
from isomoe.common.backends import (
    RESERVED_NAMES,
    Fp8MoeBackend,
    RegisteredBackend,
    UnquantizedMoeBackend,
    get_backend,
    register_moe_backend,
    registered_backends,
    unregister_moe_backend,
)
from isomoe.common.config import FusedMoEConfig, FusedMoEParallelConfig
from isomoe.common.executors import ExecutorInfo, executor_class, executors, run_moe
from isomoe.common.platforms import Platform, PlatformKind
from isomoe.common.quant_keys import KEYS_OF_SCHEME, kFp8Dynamic128Sym, kFp8DynamicTokenSym
from isomoe.common.reference import ReferenceExecutor
from isomoe.common.selector import (
    explain_selection,
    resolve_executor,
    select_fp8_moe_backend,
    select_unquantized_moe_backend,
)
from isomoe.common.support import ExpertsSupport, declared_support
from isomoe.tests.matrix import Case, build

CUDA, ROCM, TPU, OOT = PlatformKind.CUDA, PlatformKind.ROCM, PlatformKind.TPU, PlatformKind.OUT_OF_TREE
EVERYWHERE = (CUDA, ROCM, TPU, OOT, PlatformKind.CPU)
ALL_SCHEMES = ("block", "channel", "tensor", "bf16")
BASE = FusedMoEConfig(8, 2, 256, 128)
BLOCK_KEYS = KEYS_OF_SCHEME["block"]


def experts(**changes):
    """An experts class with its own declaration, running the reference."""
    declaration = {"platforms": EVERYWHERE, "schemes": ALL_SCHEMES, "recipes": ("w8a8", "bf16"), "lora": True}

    class Experts(ReferenceExecutor):
        name = "experts"
        support = ExpertsSupport(**(declaration | changes))

    return Experts


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """A registry of built-in backends only, restored afterwards; no entry points."""
    monkeypatch.delenv("ISOMOE_MOE_BACKEND", raising=False)
    monkeypatch.setattr(backends, "_registry", {b.name: b for b in backends._BUILTINS})
    monkeypatch.setattr(backends, "_entry_points_loaded", True)


@pytest.fixture
def module(monkeypatch):
    """A module `plugin_experts` that registrations can name."""
    found = types.ModuleType("plugin_experts")
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found


def register(name, path="plugin_experts:Experts", **options):
    options = {"platforms": ("cuda", "rocm", "tpu", "out_of_tree"), "schemes": ALL_SCHEMES} | options
    return register_moe_backend(name, path, **options)


def row_of(name, platform, config=BASE, keys=BLOCK_KEYS, **options):
    report = explain_selection(config, *keys, platform=platform, **options)
    return next(row for row in report.rows if row.candidate == name)


def test_registration_is_idempotent_and_normalised():
    first = register("My-Kernels")
    assert first.name == "my_kernels" and register("my_kernels") == first
    assert get_backend("MY-kernels") == first
    assert list(registered_backends())[-1] == "my_kernels"
    assert first.platforms == (CUDA, ROCM, TPU, OOT) and not first.auto_select and not first.builtin


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "plugin_experts:Other"},
        {"platforms": ("cuda",)},
        {"schemes": ("block",)},
        {"auto_select": True},
        {"priority": 3},
    ],
)
def test_a_taken_name_is_refused(changes):
    register("mine")
    with pytest.raises(ValueError, match="'mine' is already registered"):
        register("mine", **changes)
    assert get_backend("mine").experts == "plugin_experts:Experts"


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES | {"Triton", "deep-gemm"}))
def test_reserved_names_are_refused(name):
    with pytest.raises(ValueError, match="reserved"):
        register(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "name: got ''"),
        ({"name": "a b"}, "name: got 'a b', want ASCII letters"),
        ({"name": "größe"}, "want ASCII letters"),
        ({"path": "plugin_experts"}, "experts: got 'plugin_experts', want 'package.module:Class'"),
        ({"path": ":Class"}, "want 'package.module:Class'"),
        ({"platforms": ()}, "platforms: got \\(\\)"),
        ({"platforms": "cuda"}, "platforms: got 'cuda', want a non-empty tuple"),
        ({"platforms": ("cdua",)}, "did you mean 'cuda'"),
        ({"schemes": ()}, "schemes: got \\(\\)"),
        ({"schemes": ("blok",)}, "did you mean 'block'"),
        ({"priority": 1.5}, "priority: got 1.5, want an int"),
    ],
)
def test_malformed_registrations_are_refused(arguments, message):
    before = dict(registered_backends())
    with pytest.raises((TypeError, ValueError), match=message):
        register(**({"name": "mine"} | arguments))
    assert registered_backends() == before


def test_unregister():
    register("mine")
    unregister_moe_backend("Mine")
    assert "mine" not in registered_backends()
    for name in ("mine", "triton", "reference"):
        with pytest.raises(ValueError, match="want a backend registered from outside"):
            unregister_moe_backend(name)


def test_classes_load_only_where_the_registration_applies(module):
    """The module does not even have the class: nobody notices until a platform it names asks."""
    register("mine", platforms=("cuda",), schemes=("block",), auto_select=True)
    assert "no" not in [select_fp8_moe_backend(BASE, *BLOCK_KEYS, platform=Platform.tpu("v7x"))[0].name]
    assert row_of("mine", Platform.tpu("v7x")).reason == "runs on cuda, not on tpu-v7x"
    assert row_of("mine", Platform.cuda(9, 0), keys=KEYS_OF_SCHEME["channel"]).reason.startswith(
        "does not read"
    )
    row = row_of("mine", Platform.cuda(9, 0))
    assert not row.serves and "cannot load 'plugin_experts:Experts'" in row.reason
    module.Experts = experts()
    assert row_of("mine", Platform.cuda(9, 0)).serves


def test_automatic_backends_come_after_built_in_ones_by_priority(module):
    module.Experts = experts()
    for name, priority in (("low", -1), ("high", 7), ("also_high", 7), ("zero", 0)):
        register(name, auto_select=True, priority=priority)
    register("by_name_only", priority=99)
    hopper, volta = Platform.cuda(9, 0), Platform.cuda(7, 0)
    assert select_fp8_moe_backend(BASE, *BLOCK_KEYS, platform=hopper)[0] is Fp8MoeBackend.TRITON
    backend, experts_cls = select_fp8_moe_backend(BASE, *BLOCK_KEYS, platform=volta)
    assert isinstance(backend, RegisteredBackend) and backend.name == "also_high"
    assert experts_cls is module.Experts
    order = [r.candidate for r in explain_selection(BASE, *BLOCK_KEYS, platform=volta).rows]
    assert order[:2] == ["triton", "marlin"]
    assert order[4:] == ["by_name_only", "also_high", "high", "zero", "low"]
    assert select_fp8_moe_backend(BASE, *BLOCK_KEYS, platform=hopper, moe_backend="by-name-only")[0].name == (
        "by_name_only"
    )
    assert select_unquantized_moe_backend(BASE, platform=Platform.rocm("gfx950"))[0].name == "also_high"


def test_the_environment_may_name_a_registered_backend(module, monkeypatch):
    module.Experts = experts()
    register("mine")
    monkeypatch.setenv("ISOMOE_MOE_BACKEND", "mine")
    assert select_fp8_moe_backend(BASE, *BLOCK_KEYS, platform=Platform.cuda(9, 0))[1] is module.Experts


def test_none_platforms_run_registered_backends(module):
    module.Experts = experts()
    kunlun = Platform.out_of_tree("kunlun", cuda_alike=True)
    assert resolve_executor(BASE, *BLOCK_KEYS, platform=kunlun) is None
    register("mine", auto_select=True)
    answer = select_fp8_moe_backend(BASE, *BLOCK_KEYS, platform=kunlun, on_missing="raise")
    assert answer == (Fp8MoeBackend.NONE, None)
    assert select_unquantized_moe_backend(BASE, platform=kunlun) == (UnquantizedMoeBackend.NONE, None)
    assert resolve_executor(BASE, *BLOCK_KEYS, platform=kunlun).name == "mine"
    tpu = Platform.tpu("v7x")
    assert resolve_executor(BASE, *BLOCK_KEYS, platform=tpu).name == "pallas_ep"
    assert resolve_executor(BASE, *BLOCK_KEYS, platform=tpu, moe_backend="mine").name == "mine"


def _raises():
    raise RuntimeError("first line\nsecond line")


BROKEN = {
    "missing": (lambda m: None, "has no attribute 'Experts'"),
    "not a class": (lambda m: setattr(m, "Experts", 3), "is not a class"),
    "no declaration": (lambda m: setattr(m, "Experts", type("Experts", (), {})), "it has none"),
    "inherited": (lambda m: setattr(m, "Experts", type("Experts", (experts(),), {})), "it only inherits one"),
    "not a declaration": (
        lambda m: setattr(m, "Experts", type("Experts", (experts(),), {"support": {"lora": True}})),
        "must declare its own class attribute",
    ),
    "raises when asked": (
        lambda m: setattr(
            m,
            "Experts",
            type(
                "Experts",
                (),
                {
                    "support": type("S", (ExpertsSupport,), {"why_not": lambda *a: _raises()})(
                        (CUDA,), ("block",), ("w8a8",)
                    )
                },
            ),
        ),
        "RuntimeError: first line second line",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_registration_is_a_reason_not_an_error(kind, module):
    prepare, message = BROKEN[kind]
    prepare(module)
    register("mine", auto_select=True, priority=5)
    row = row_of("mine", Platform.cuda(9, 0))
    assert not row.serves and message in row.reason and "\n" not in row.reason
    assert select_fp8_moe_backend(BASE, *BLOCK_KEYS, platform=Platform.cuda(9, 0))[0] is Fp8MoeBackend.TRITON
    with pytest.raises(NotImplementedError, match="mine"):
        select_fp8_moe_backend(BASE, *BLOCK_KEYS, platform=Platform.cuda(7, 0))
    with pytest.raises(ValueError, match=r"'mine' .* cannot be used"):
        select_fp8_moe_backend(BASE, *BLOCK_KEYS, platform=Platform.cuda(9, 0), moe_backend="mine")
    answer = select_fp8_moe_backend(BASE, *BLOCK_KEYS, platform=Platform.tpu("v7x"), moe_backend="mine")
    assert answer == (Fp8MoeBackend.NONE, None)


def test_an_import_that_fails_in_any_way_is_a_reason(monkeypatch, tmp_path):
    for name, body in (
        ("plugin_syntax", "def ("),
        ("plugin_zero", "1 / 0"),
        ("plugin_exit", "import sys; sys.exit('wrong hardware')"),
        ("plugin_import", "import no_such_module"),
    ):
        (tmp_path / f"{name}.py").write_text(body)
        register(name, f"{name}:Experts", auto_select=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("plugin_syntax", "plugin_zero", "plugin_exit", "plugin_import"):
        assert row_of(name, Platform.cuda(9, 0)).reason.startswith("cannot be used: ")
        assert executors()[name].state == "unavailable"


@pytest.mark.parametrize(
    ("changes", "config", "keys", "reason"),
    [
        ({"lora": False}, BASE.with_lora(2, 8), BLOCK_KEYS, "does not apply LoRA"),
        (
            {"max_lora_rank": 16},
            BASE.with_lora(2, 64),
            BLOCK_KEYS,
            "applies LoRA up to rank 16, the config asks for 64",
        ),
        (
            {"expert_parallel": False},
            FusedMoEConfig(
                8, 2, 256, 128, moe_parallel_config=FusedMoEParallelConfig(ep_size=2, use_ep=True)
            ),
            BLOCK_KEYS,
            "does not split experts over ranks",
        ),
        ({"hidden_multiple": 512}, BASE, BLOCK_KEYS, "needs hidden_dim to be a multiple of 512, got 256"),
        (
            {"intermediate_multiple": 128},
            FusedMoEConfig(8, 2, 256, 128, moe_parallel_config=FusedMoEParallelConfig(tp_size=2)),
            BLOCK_KEYS,
            "needs intermediate_size per rank to be a multiple of 128, got 64",
        ),
        ({"activations": ("gelu",)}, BASE, BLOCK_KEYS, "does not serve activation silu"),
        (
            {"non_gated": False},
            FusedMoEConfig(8, 2, 256, 128, is_act_and_mul=False),
            BLOCK_KEYS,
            "does not serve experts without a gate",
        ),
        ({"schemes": ("channel",)}, BASE, BLOCK_KEYS, "does not read weights of"),
        (
            {"activation_keys": (kFp8DynamicTokenSym,)},
            BASE,
            BLOCK_KEYS,
            f"does not quantise activations to {kFp8Dynamic128Sym}",
        ),
        (
            {"activation_keys": (kFp8DynamicTokenSym, kFp8Dynamic128Sym)},
            BASE,
            (BLOCK_KEYS[0], kFp8DynamicTokenSym),
            "does not multiply weights of",
        ),
        ({"min_capability": (9, 0)}, BASE, BLOCK_KEYS, "needs compute capability 9.0, cuda-8.6 has 8.6"),
        ({"requires_fp8_mma": True}, BASE, BLOCK_KEYS, "needs FP8 matrix instructions, which cuda-8.6 lacks"),
        ({"platforms": (TPU,)}, BASE, BLOCK_KEYS, "runs on tpu, not on cuda-8.6"),
    ],
)
def test_the_declaration_decides(changes, config, keys, reason, module):
    module.Experts = experts(**changes)
    register("mine", auto_select=True)
    row = row_of("mine", Platform.cuda(8, 6), config, keys)
    assert not row.serves and row.reason.startswith(reason)
    module.Experts = experts()
    assert row_of("mine", Platform.cuda(8, 6), config, keys).serves


def test_bf16_needs_no_fp8_instructions(module):
    module.Experts = experts(requires_fp8_mma=True)
    register("mine")
    old = Platform.cuda(8, 0)
    assert row_of("mine", old, keys=KEYS_OF_SCHEME["bf16"]).serves
    assert not row_of("mine", old, keys=(KEYS_OF_SCHEME["bf16"][0], kFp8DynamicTokenSym)).serves
    assert not row_of("mine", old).serves


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schemes": ("blocks",)}, "schemes: got 'blocks'"),
        ({"schemes": "block"}, "schemes: got 'block', want a tuple"),
        ({"recipes": ("fp8",)}, "recipes: got 'fp8'"),
        ({"platforms": ("cuda",)}, "want PlatformKinds"),
        ({"activations": ("swish",)}, "activations: got 'swish'"),
        ({"activation_keys": ("token",)}, "want QuantKeys or None"),
        ({"lora": 1}, "lora: got 1, want a bool"),
        ({"hidden_multiple": 0}, "hidden_multiple: got 0, want at least 1"),
    ],
)
def test_malformed_declarations_are_refused(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        experts(**changes)


def test_declarations_are_never_inherited():
    parent = experts()
    assert declared_support(parent).lora
    child = type("Child", (parent,), {})
    with pytest.raises(TypeError, match=r"must declare its own class attribute .* it only inherits one"):
        declared_support(child)


def test_a_registered_backend_runs(module):
    module.Experts = experts()
    register("mine", platforms=("cpu",))
    inputs = build(Case("channel", "w8a8", lora="mixed"))
    assert executors()["mine"] == module.Experts.info()
    assert np.array_equal(inputs.run("mine").view(np.uint16), inputs.run("reference").view(np.uint16))


def test_an_executor_needs_info_and_run(module):
    module.Experts = type("Experts", (), {"support": ExpertsSupport((CUDA,), ("block",), ("w8a8",))})
    register("mine")
    with pytest.raises(TypeError, match="must have a classmethod `info`"):
        executor_class("mine")
    assert executors()["mine"] == ExecutorInfo("mine", "unavailable", executors()["mine"].reason)
    inputs = build(Case("block", "w8a8"))
    with pytest.raises(ValueError, match=r"backend: got 'nobody', want one of .*mine"):
        run_moe(
            "nobody",
            inputs.x,
            inputs.topk_weights,
            inputs.topk_ids,
            inputs.weights,
            config=inputs.case.config,
        )


class _Point:
    """An entry point."""

    def __init__(self, name, function):
        self.name, self.value, self._function = name, f"plugin:{name}", function

    def load(self):
        return self._function


def test_entry_points_register_once_and_a_broken_one_stops_nobody(module, monkeypatch, caplog):
    module.Experts = experts()
    calls = []

    def plugin():
        calls.append(1)
        register("plugged", auto_select=True)

    def entry_points(group):
        assert group == "isomoe.moe_backends"
        return [_Point("broken", _raises), _Point("plugin", plugin)]

    monkeypatch.setattr(backends.importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(backends, "_entry_points_loaded", False)
    with caplog.at_level(logging.WARNING, logger="isomoe"):
        for _ in range(2):
            assert "plugged" in registered_backends()
    assert calls == [1]
    assert [r.getMessage() for r in caplog.records if "broken" in r.getMessage()]
    assert select_fp8_moe_backend(BASE, *BLOCK_KEYS, platform=Platform.cuda(7, 0))[0].name == "plugged"


def test_concurrent_registration_and_selection(module):
    module.Experts = experts()
    errors = []

    def work(i):
        try:
            for j in range(20):
                register(f"t{i}_{j}", auto_select=True)
                select_fp8_moe_backend(BASE, *BLOCK_KEYS, platform=Platform.cuda(9, 0))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors and len(registered_backends()) == 4 + 80


def test_enums_and_registrations_evaluate_back():
    entry = register("mine", priority=2)
    names = vars(backends)
    for value in (entry, *Fp8MoeBackend, *UnquantizedMoeBackend, *PlatformKind):
        assert eval(repr(value), dict(names)) == value
