# SPDX-License-Identifier: Apache-2.0
"""Selection: the truth table, the messages, and that platforms without an in-tree kernel never see an
exception."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest

from isomoe.common import backends, quant_keys, selector
from isomoe.common import config as config_module
from isomoe.common.backends import Fp8MoeBackend, UnquantizedMoeBackend
from isomoe.common.config import FusedMoEConfig, FusedMoEParallelConfig
from isomoe.common.platforms import Platform, PlatformKind
from isomoe.common.priorities import TOKEN_THRESHOLDS, TokenThreshold, backend_for_tokens
from isomoe.common.quant_keys import (
    KEYS_OF_SCHEME,
    QuantKey,
    kBf16,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockE8M0Sym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
)
from isomoe.common.selector import (
    SelectionReport,
    explain_selection,
    resolve_executor,
    select_fp8_moe_backend,
    select_unquantized_moe_backend,
)

# What the contract answers, one line a platform. FP8 columns hold for every FP8 scheme, with and without
# adapters and expert parallelism. "none" is (NONE, None); "-" NotImplementedError; "!" ValueError.
TABLE = """
platform         fp8:  auto    triton  marlin  pallas  odd     bf16:  auto    triton  marlin  pallas  odd
tpu-v4                 none    none    none    none    none           none    none    none    none    none
tpu-v5e                none    none    none    none    none           none    none    none    none    none
tpu-v5p                none    none    none    none    none           none    none    none    none    none
tpu-v6e                none    none    none    none    none           none    none    none    none    none
tpu-v7x                none    none    none    none    none           none    none    none    none    none
cpu                    none    none    none    none    none           none    none    none    none    none
oot                    none    none    none    none    none           none    none    none    none    none
oot-cuda-alike         none    none    none    none    none           none    none    none    none    none
rocm-gfx942            -       !       !       !       !              -       !       !       !       !
rocm-gfx950            -       !       !       !       !              -       !       !       !       !
cuda-7.0               -       !       !       !       !              -       !       !       !       !
cuda-7.5               marlin  !       marlin  !       !              -       !       !       !       !
cuda-8.0               marlin  !       marlin  !       !              triton  triton  !       !       !
cuda-8.6               marlin  !       marlin  !       !              triton  triton  !       !       !
cuda-8.9               triton  triton  marlin  !       !              triton  triton  !       !       !
cuda-9.0               triton  triton  marlin  !       !              triton  triton  !       !       !
cuda-10.0              triton  triton  marlin  !       !              triton  triton  !       !       !
cuda-12.0              triton  triton  marlin  !       !              triton  triton  !       !       !
"""
_COLUMNS = ("auto", "triton", "marlin", "pallas", "odd")
EXPECTED: dict[str, dict[str, str]] = {}
for _label, *_answers in (_line.split() for _line in TABLE.strip().splitlines()[1:]):
    _names = [f"{family}/{column}" for family in ("fp8", "bf16") for column in _COLUMNS]
    EXPECTED[_label] = dict(zip(_names, _answers, strict=True))
# The table's columns, and what is asked for.
REQUESTS = {"auto": "auto", "triton": "triton", "marlin": "marlin", "pallas": "pallas_ep", "odd": "nonsense"}
FP8_SCHEMES = ("block", "channel", "tensor", "tensor_static")

BASE = FusedMoEConfig(128, 8, 2048, 768)
EP = FusedMoEConfig(
    128, 8, 2048, 768, moe_parallel_config=FusedMoEParallelConfig(ep_size=8, ep_rank=3, use_ep=True)
)
CONFIGS = [layer if rank == 0 else layer.with_lora(4, rank) for layer in (BASE, EP) for rank in (0, 16)]

# Variables that steer other selectors, set to every kind of value that has broken one.
POISON = {
    "VLLM_USE_DEEP_GEMM": "1",
    "VLLM_MOE_USE_DEEP_GEMM": "1",
    "VLLM_ROCM_USE_AITER": "1",
    "VLLM_ROCM_USE_AITER_MOE": "1",
    "VLLM_TEST_FORCE_FP8_MARLIN": "1",
    "VLLM_USE_FLASHINFER_MOE_FP8": "1",
    "VLLM_BATCH_INVARIANT": "yes please",
    "ISOMOE_BATCH_INVARIANT": "1",
}


def platform_of(label: str) -> Platform:
    if label.startswith("oot"):
        return Platform.out_of_tree("kunlun", cuda_alike=label.endswith("alike"))
    return Platform.parse(label)


def select(scheme: str, config: FusedMoEConfig, platform: Platform, request: str = "auto", **options):
    if scheme == "bf16":
        return select_unquantized_moe_backend(config, platform=platform, moe_backend=request, **options)
    return select_fp8_moe_backend(
        config, *KEYS_OF_SCHEME[scheme], platform=platform, moe_backend=request, **options
    )


def outcome(scheme: str, config: FusedMoEConfig, platform: Platform, request: str) -> str:
    """The answer in the table's letters."""
    try:
        backend, experts_cls = select(scheme, config, platform, request)
    except NotImplementedError:
        return "-"
    except ValueError:
        return "!"
    enum_cls = UnquantizedMoeBackend if scheme == "bf16" else Fp8MoeBackend
    assert isinstance(backend, enum_cls)
    assert (experts_cls is None) == (backend is enum_cls.NONE)
    if experts_cls is not None:
        assert experts_cls.__name__ == {"triton": "TritonExecutor", "marlin": "MarlinExecutor"}[backend.value]
    return backend.value


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("ISOMOE_MOE_BACKEND", raising=False)
    monkeypatch.delenv("ISOMOE_PLATFORM", raising=False)
    monkeypatch.setattr(selector, "_logged", set())


@pytest.mark.parametrize("by", ["argument", "environment", "poisoned"])
@pytest.mark.parametrize("label", EXPECTED)
def test_truth_table(label, by, monkeypatch):
    platform = platform_of(label)
    if by == "poisoned":
        for name, value in POISON.items():
            monkeypatch.setenv(name, value)
    for scheme, column, config in itertools.product((*FP8_SCHEMES, "bf16"), REQUESTS, CONFIGS):
        want = EXPECTED[label][f"{'bf16' if scheme == 'bf16' else 'fp8'}/{column}"]
        request = REQUESTS[column]
        if by == "environment":
            monkeypatch.setenv("ISOMOE_MOE_BACKEND", request)
            got = outcome(scheme, config, platform, "auto")
        else:
            got = outcome(scheme, config, platform, request)
        assert got == want, (scheme, request, config)


@pytest.mark.parametrize("label", EXPECTED)
def test_explain_agrees_with_select_and_never_raises(label):
    platform = platform_of(label)
    for scheme, request, config in itertools.product((*FP8_SCHEMES, "bf16"), REQUESTS.values(), CONFIGS):
        report = explain_selection(config, *KEYS_OF_SCHEME[scheme], platform=platform, moe_backend=request)
        got = outcome(scheme, config, platform, request)
        if got in "-!":
            assert report.backend is None and not report.ok
            assert report.error.startswith("NotImplementedError: " if got == "-" else "ValueError: ")
        else:
            assert report.ok and report.backend.value == got
        assert {row.candidate for row in report.rows} >= {"triton", "marlin", "pallas_ep", "reference"}
        assert all(row.reason for row in report.rows)


def test_argument_beats_environment_beats_auto(monkeypatch):
    platform = Platform.cuda(9, 0)
    monkeypatch.setenv("ISOMOE_MOE_BACKEND", "marlin")
    assert select("block", BASE, platform)[0] is Fp8MoeBackend.MARLIN
    assert select("block", BASE, platform, "triton")[0] is Fp8MoeBackend.TRITON
    for blank in ("", "auto", " AUTO "):
        monkeypatch.setenv("ISOMOE_MOE_BACKEND", blank)
        assert select("block", BASE, platform)[0] is Fp8MoeBackend.TRITON
    monkeypatch.setenv("ISOMOE_MOE_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="ISOMOE_MOE_BACKEND='nonsense' is not a registered"):
        select("block", BASE, platform)
    monkeypatch.setenv("ISOMOE_MOE_BACKEND", "pallas_ep")
    with pytest.raises(ValueError, match=r"asked for by ISOMOE_MOE_BACKEND.*runs on tpu, not on cuda-9.0"):
        select("block", BASE, platform)


@pytest.mark.parametrize("spelling", ["Marlin", " marlin ", "MARLIN", Fp8MoeBackend.MARLIN])
def test_names_are_normalised(spelling):
    assert select("block", BASE, Platform.cuda(9, 0), spelling)[0] is Fp8MoeBackend.MARLIN


def test_nothing_suitable_names_every_candidate():
    with pytest.raises(NotImplementedError) as caught:
        select("block", BASE.with_lora(4, 16), Platform.cuda(7, 0))
    message = str(caught.value)
    lines = {line.split()[0]: line for line in message.splitlines() if line.strip()}
    assert message.startswith("No FP8 MoE backend supports the deployment configuration on cuda-7.0:")
    assert "needs compute capability 8.0, cuda-7.0 has 7.0" in lines["triton"]
    assert "needs compute capability 7.5, cuda-7.0 has 7.0" in lines["marlin"]
    assert "runs on tpu, not on cuda-7.0" in lines["pallas_ep"]
    assert "only when asked for by name" in lines["reference"]
    assert set(backends.registered_backends()) <= set(lines)


def test_explicit_refusals_say_why():
    cuda = Platform.cuda(8, 0)
    with pytest.raises(ValueError, match=r"'triton'.*needs FP8 matrix instructions, which cuda-8.0 lacks"):
        select("block", BASE, cuda, "triton")
    with pytest.raises(ValueError, match=r"'marlin'.*does not read weights of QuantKey\(bf16\)"):
        select("bf16", BASE.with_lora(2, 8), cuda, "marlin")
    with pytest.raises(ValueError, match="want one of auto, marlin, pallas_ep, reference, triton"):
        select("block", BASE, cuda, "deep_gemm")


def test_reference_is_served_only_by_name():
    for label in ("cuda-9.0", "cuda-7.0", "rocm-gfx950"):
        backend, experts_cls = select("block", BASE, Platform.parse(label), "reference")
        assert backend.name == "reference" and experts_cls.__name__ == "ReferenceExecutor"


def test_formats_that_w8a8_refuses_go_to_w8a16():
    cuda = Platform.cuda(9, 0)
    pairs = {
        (kFp8StaticChannelSym, None): "marlin",  # activations asked to stay as they are
        (kFp8StaticChannelSym, kBf16): "marlin",
        (kFp8StaticChannelSym, kFp8DynamicTensorSym): "marlin",
        (kFp8StaticChannelSym, kFp8Dynamic128Sym): "marlin",  # scales that do not change together
        (kFp8Static128BlockSym, kFp8DynamicTokenSym): "marlin",
        (kFp8Static128BlockE8M0Sym, kFp8Dynamic128Sym): "triton",
    }
    for (weight, activation), want in pairs.items():
        assert select_fp8_moe_backend(BASE, weight, activation, platform=cuda)[0].value == want
    int8 = QuantKey("int8")
    with pytest.raises(NotImplementedError, match=r"does not read weights of QuantKey\(int8\)"):
        select_fp8_moe_backend(BASE, int8, kFp8DynamicTokenSym, platform=cuda)


def test_layers_nothing_serves():
    cuda = Platform.cuda(9, 0)
    half = FusedMoEConfig(8, 2, 256, 128, in_dtype="float16")
    with pytest.raises(NotImplementedError, match="reads bfloat16 activations, not float16"):
        select("block", half, cuda)
    batched = FusedMoEConfig(
        8,
        2,
        256,
        128,
        moe_parallel_config=FusedMoEParallelConfig(
            ep_size=2, use_ep=True, all2all_backend="deepep_low_latency"
        ),
    )
    for scheme in ("block", "bf16"):
        with pytest.raises(NotImplementedError, match="batched format of all2all backend deepep_low_latency"):
            select(scheme, batched.with_lora(2, 8), cuda)


def test_bad_arguments_raise_where_the_platform_chooses():
    cuda = Platform.cuda(9, 0)
    keys = KEYS_OF_SCHEME["block"]
    with pytest.raises(TypeError, match="config: got dict, want FusedMoEConfig"):
        select_fp8_moe_backend({}, *keys, platform=cuda)
    with pytest.raises(TypeError, match="weight_key: got 'fp8', want a QuantKey"):
        select_fp8_moe_backend(BASE, "fp8", None, platform=cuda)
    with pytest.raises(TypeError, match="activation_key: got 8"):
        select_fp8_moe_backend(BASE, keys[0], 8, platform=cuda)
    with pytest.raises(ValueError, match="bf16 weights go through select_unquantized_moe_backend"):
        select_fp8_moe_backend(BASE, kBf16, kBf16, platform=cuda)
    with pytest.raises(TypeError, match="platform: got 'cuda', want a Platform or None"):
        select_fp8_moe_backend(BASE, *keys, platform="cuda")
    with pytest.raises(ValueError, match="on_missing: got 'panic'"):
        select_fp8_moe_backend(BASE, *keys, platform=cuda, on_missing="panic")


@pytest.mark.parametrize("label", [k for k, row in EXPECTED.items() if row["fp8/auto"] == "none"])
def test_none_platforms_never_raise(label, monkeypatch):
    """Not even for what another selector would call an error: names, keys, configs and formats of any
    kind."""
    platform = platform_of(label)
    odd_layer = FusedMoEConfig(8, 2, 100, 36, activation="relu2", is_act_and_mul=False, in_dtype="float16")
    for config, weight, activation, request in (
        (odd_layer, *KEYS_OF_SCHEME["block"], "auto"),
        (BASE, QuantKey("nvfp4"), None, "cutlass"),
        (BASE, None, None, "humming"),
        (object(), "?", "?", "no such thing"),
        (BASE, *KEYS_OF_SCHEME["block"], 17),
        (BASE, *KEYS_OF_SCHEME["block"], None),
    ):
        answer = select_fp8_moe_backend(config, weight, activation, platform=platform, moe_backend=request)
        assert answer == (Fp8MoeBackend.NONE, None)
        answer = select_unquantized_moe_backend(config, platform=platform, moe_backend=request)
        assert answer == (UnquantizedMoeBackend.NONE, None)


def test_explicit_backend_that_cannot_apply_warns_once(caplog):
    tpu = Platform.tpu("v7x")
    with caplog.at_level(logging.WARNING, logger="isomoe"):
        for _ in range(3):
            select("block", BASE, tpu, "marlin")
            select("block", BASE, tpu, "nonsense")
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(messages) == 2
    assert "'marlin'" in messages[0] and "runs on cuda, not on tpu-v7x" in messages[0]
    assert "'nonsense'" in messages[1] and "ignored on tpu-v7x" in messages[1]


def test_the_platforms_own_backend_by_name_warns_nothing(caplog):
    with caplog.at_level(logging.WARNING, logger="isomoe"):
        assert select("channel", BASE, Platform.tpu("v6e"), "pallas_ep") == (Fp8MoeBackend.NONE, None)
    assert not caplog.records


def test_registry_says_who_executes_none():
    for generation in ("v5e", "v5p", "v6e", "v7x"):
        for scheme, config in itertools.product((*FP8_SCHEMES, "bf16"), CONFIGS):
            found = resolve_executor(config, *KEYS_OF_SCHEME[scheme], platform=Platform.tpu(generation))
            assert found is not None and found.name == "pallas_ep"
    keys = KEYS_OF_SCHEME["block"]
    assert resolve_executor(BASE, *keys, platform=Platform.cpu()) is None
    assert resolve_executor(BASE, *keys, platform=Platform.cpu(), moe_backend="reference").name == "reference"
    assert resolve_executor(BASE, *keys, platform=Platform.cpu(), moe_backend="nonsense") is None
    assert (
        resolve_executor(BASE, *keys, platform=Platform.tpu("v7x"), moe_backend="triton").name == "pallas_ep"
    )
    assert resolve_executor(BASE, *keys, platform=Platform.cuda(9, 0)).name == "triton"
    assert resolve_executor(BASE, *keys, platform=Platform.cuda(7, 0)) is None


def test_on_missing_moves_validation_back():
    tpu, cpu = Platform.tpu("v7x"), Platform.cpu()
    assert select("block", BASE, tpu, on_missing="raise") == (Fp8MoeBackend.NONE, None)
    assert select("bf16", BASE, tpu, on_missing="raise") == (UnquantizedMoeBackend.NONE, None)
    with pytest.raises(NotImplementedError, match=r"on cpu:\n(.*\n)*pallas_ep +no +runs on tpu, not on cpu"):
        select("block", BASE, cpu, on_missing="raise")
    with pytest.raises(ValueError, match="runs on cuda, not on tpu-v7x"):
        select("block", BASE, tpu, "triton", on_missing="raise")
    with pytest.raises(ValueError, match="'nonsense' is not a registered"):
        select("block", BASE, tpu, "nonsense", on_missing="raise")
    half = FusedMoEConfig(8, 2, 256, 128, in_dtype="float16")
    assert select("block", half, tpu) == (Fp8MoeBackend.NONE, None)
    with pytest.raises(NotImplementedError, match="reads bfloat16 activations"):
        select("block", half, tpu, on_missing="raise")


def test_report_is_an_aligned_table():
    text = str(explain_selection(BASE, *KEYS_OF_SCHEME["block"], platform=Platform.tpu("v7x")))
    lines = text.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("candidate"))
    column = lines[header].index("serves")
    rows = [line for line in lines[header + 2 :] if line][: len(backends.registered_backends())]
    assert {row[column:].split()[0] for row in rows} <= {"yes", "no"}
    assert "answer:      NONE" in lines and "executor:    pallas_ep" in lines


def test_report_round_trips():
    reports = [
        explain_selection(c, *KEYS_OF_SCHEME[s], platform=platform_of(p), moe_backend=b)
        for c, s, p, b in (
            (BASE, "block", "cuda-9.0", "auto"),
            (EP.with_lora(4, 16), "channel", "tpu-v7x", "marlin"),
            (BASE, "tensor", "oot-cuda-alike", "auto"),
            (BASE, "bf16", "cuda-7.0", "auto"),
            (BASE, "tensor_static", "rocm-gfx942", "reference"),
        )
    ]
    names = {**vars(backends), **vars(config_module), **vars(quant_keys), **vars(selector)}
    for report in reports:
        assert eval(repr(report), names) == report
        plain = json.loads(report.as_json())
        assert plain["platform"] == str(report.platform)
        assert [row["candidate"] for row in plain["candidates"]] == [row.candidate for row in report.rows]
        assert plain["backend"] == (None if report.backend is None else report.backend.name)


def test_explain_survives_anything():
    for arguments in ((None,), (BASE, "x"), (BASE, KEYS_OF_SCHEME["block"][0], 3)):
        for platform in (Platform.tpu("v7x"), Platform.cuda(9, 0), "tpu", None):
            report = explain_selection(*arguments, platform=platform, moe_backend=object())
            assert isinstance(report, SelectionReport) and str(report) and report.as_json()
    assert not explain_selection(BASE, platform=Platform.cuda(9, 0), on_missing="x").ok


def test_detected_platform_is_used(monkeypatch):
    monkeypatch.setenv("ISOMOE_PLATFORM", "tpu-v6e")
    assert select_unquantized_moe_backend(BASE) == (UnquantizedMoeBackend.NONE, None)
    monkeypatch.setenv("ISOMOE_PLATFORM", "cuda-9.0")
    assert select_fp8_moe_backend(BASE, *KEYS_OF_SCHEME["block"])[0] is Fp8MoeBackend.TRITON
    assert explain_selection(BASE).platform == Platform.cuda(9, 0)


def test_token_thresholds_are_measured_data(monkeypatch):
    monkeypatch.delenv("ISOMOE_BATCH_INVARIANT", raising=False)
    hopper = Platform.cuda(9, 0)
    for row in TOKEN_THRESHOLDS:
        assert row.measured and row.max_tokens > 0
    assert backend_for_tokens("triton", hopper, "block", 64, table=()) == "triton"
    table = (TokenThreshold("marlin", "triton", (9, 0), "block", 256, "an invented row"),)
    assert backend_for_tokens("triton", hopper, "block", 256, table) == "marlin"
    assert backend_for_tokens("triton", hopper, "block", 257, table) == "triton"
    assert backend_for_tokens("triton", hopper, "channel", 1, table) == "triton"
    assert backend_for_tokens("triton", Platform.cuda(8, 9), "block", 1, table) == "triton"
    monkeypatch.setenv("ISOMOE_BATCH_INVARIANT", "1")
    assert backend_for_tokens("triton", hopper, "block", 1, table) == "triton"


def test_selection_on_a_tpu_imports_nothing_of_cuda():
    """In a process where every framework fails to import and every foreign variable is set."""
    code = """
        import sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {"torch", "triton", "vllm", "jax", "jaxlib", "libtpu", "torchax"}:
                    raise ImportError(f"{name} is blocked")

        sys.meta_path.insert(0, Blocker())
        import socket
        def no_network(*args, **kwargs):
            raise AssertionError("network")
        socket.socket = no_network
        from isomoe import (
            FusedMoEConfig, Platform, explain_selection, select_fp8_moe_backend,
            select_unquantized_moe_backend,
        )
        from isomoe.common.quant_keys import KEYS_OF_SCHEME
        config = FusedMoEConfig(160, 8, 6144, 2560).with_lora(8, 64)
        for platform in (Platform.tpu("v7x"), Platform.out_of_tree("x", cuda_alike=True), None):
            for request in ("auto", "triton", "marlin", "nonsense"):
                for scheme, keys in KEYS_OF_SCHEME.items():
                    if scheme == "bf16":
                        answer = select_unquantized_moe_backend(config, platform=platform,
                        moe_backend=request)
                    else:
                        answer = select_fp8_moe_backend(config, *keys, platform=platform, moe_backend=request)
                    assert answer[0].name == "NONE" and answer[1] is None, answer
        loaded = [m for m in sys.modules if m.startswith("isomoe.cuda_impl")]
        assert not loaded, loaded
        print(explain_selection(config, *KEYS_OF_SCHEME["channel"], platform=Platform.tpu("v7x")))
    """
    env = {**os.environ, **POISON, "ISOMOE_MOE_BACKEND": "deep_gemm", "ISOMOE_PLATFORM": "garbage"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "executor:    pallas_ep" in done.stdout
    assert "ISOMOE_PLATFORM is ignored" in done.stderr


def test_every_platform_kind_is_in_the_table():
    assert {platform_of(label).kind for label in EXPECTED} == set(PlatformKind)
