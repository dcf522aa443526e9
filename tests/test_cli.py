# SPDX-License-Identifier: Apache-2.0
"""The commands: what they print, their JSON, and how they refuse bad input."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from isomoe.common import capacity, environment, presets
from isomoe.common.cli import app, parse_adapters, parse_ints, parse_lora
from isomoe.common.config import FusedMoEConfig
from isomoe.common.numerics import BF16
from isomoe.common.report import format_bytes, ranges
from isomoe.common.weights import LoRAAdapter, quantize_moe_weights


def _invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "--platform", "cuda-x"], ["cuda-x", "cuda-9.0"]),
        (["explain", "--model", "qwen3-coder-48b"], ["qwen3-coder-48b", "did you mean 'qwen3-coder-480b'"]),
        (["explain", "--lora", "4"], ["--lora", "RANKxN"]),
        (["explain", "--scheme", "blocks"], ["--scheme", "did you mean 'block'"]),
        (["explain", "--ep", "0"], ["--ep", "at least 1"]),
        (["explain", "--num-experts", "4", "--experts-per-token", "8"], ["experts_per_token", "num_experts=4"]),
        (["explain", "--model", "deepseek-v3", "--checkpoint", "."], ["--model", "--checkpoint"]),
        (["explain", "--model", "deepseek-v3", "--hidden-dim", "512"], ["--hidden-dim", "--model"]),
        (["explain", "--platform", "tpu"], ["platform", "'tpu'", "tpu-GENERATION"]),
        (["explain", "--checkpoint", "/no/such/folder"], ["/no/such/folder does not exist"]),
        (["inspect", "/no/such/folder"], ["/no/such/folder does not exist"]),
        (["inspect", __file__], ["is not a folder"]),
        (["parity", "--checkpoint", "/no/such/folder"], ["/no/such/folder does not exist"]),
        (["parity", "--ep", "1,two"], ["--ep", "1,2,4"]),
        (["parity", "--ep", "0"], ["--ep", "at least 1"]),
        (["parity", "--executor", "tritan"], ["--executor", "did you mean 'triton'"]),
        (["parity", "--recipe", "w9"], ["--recipe", "w8a8"]),
        (["parity", "--seed", "-1"], ["--seed", "at least 0"]),
        (["parity", "--tokens", "0"], ["--tokens", "at least 1"]),
        (["parity", "--adapter", "a=/no/such"], ["--adapter", "/no/such does not exist"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    if arguments[0] == "parity":
        arguments = [*arguments, "--out", str(tmp_path)]
    code, out, err = _invoke(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("isomoe: error: ")
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


def test_an_empty_checkpoint_folder_names_what_is_missing(tmp_path: Path) -> None:
    code, _, err = _invoke("inspect", str(tmp_path))
    assert code == 2
    assert "config.json" in err
    assert len(err.splitlines()) == 1


def test_a_command_that_does_not_exist_is_refused() -> None:
    code, _, err = _invoke("paritty")
    assert code == 2
    assert "paritty" in err


def test_module_and_script_are_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "isomoe", "explain", "--model", "qwen3-coder-480b", "--platform", "tpu-v7x", "--json"],
        capture_output=True, text=True, timeout=60, check=True,
    )
    code, out, _ = _invoke("explain", "--model", "qwen3-coder-480b", "--platform", "tpu-v7x", "--json")
    assert code == 0
    assert json.loads(done.stdout) == json.loads(out)


@pytest.mark.parametrize("model", presets.MODELS)
def test_explain_answers_none_on_tpu_and_says_who_executes(model: str) -> None:
    options = ("--platform", "tpu-v7x", "--lora", "16x4", "--ep", "8", "--json")
    code, out, _ = _invoke("explain", "--model", model, *options)
    report = json.loads(out)
    assert code == 0
    assert report["backend"] == "NONE"
    assert report["executor"] == "pallas_ep"
    assert report["config"]["max_loras"] == 4
    assert report["config"]["max_lora_rank"] == 16
    assert report["config"]["moe_parallel_config"]["ep_size"] == 8


@pytest.mark.parametrize(
    ("platform", "code", "backend"),
    [("cuda-9.0", 0, "TRITON"), ("cuda-8.0", 0, "MARLIN"), ("cpu", 0, "NONE"), ("rocm-gfx950", 1, None)],
)
def test_explain_by_platform(platform: str, code: int, backend: str | None) -> None:
    got, out, _ = _invoke("explain", "--scheme", "channel", "--platform", platform, "--json")
    report = json.loads(out)
    assert got == code
    assert report["backend"] == backend
    assert {row["candidate"] for row in report["candidates"]} >= {"triton", "marlin", "pallas_ep"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--platform", "tpu-v4"), "has no limits for tpu-v4, only for v5e, v5p, v6e, v7x"),
        (("--platform", "tpu-v7x", "--ep", "3"), "ep: got 3, want a divisor of a v7x slice's devices"),
        (("--platform", "tpu-v7x", "--hidden-dim", "32768"), "hidden_dim: got 32768; .*MiB of VMEM.* want at most"),
        (("--platform", "tpu-v7x", "--activation", "relu2"), "no gated form of activation relu2"),
    ],
    ids=["generation", "devices", "memory", "activation"],
)
def test_explain_says_what_a_tpu_build_refuses(options: tuple[str, ...], reason: str) -> None:
    """No candidate is chosen, and no time is modelled for a layer that nothing executes."""
    code, out, _ = _invoke("explain", "--scheme", "channel", "--json", *options)
    report = json.loads(out)
    assert code == 0
    row = next(r for r in report["candidates"] if r["candidate"] == "pallas_ep")
    assert not row["serves"]
    assert re.search(reason, row["reason"])
    assert report["executor"] is None
    assert "tpu" not in report


def test_explain_models_what_one_call_holds() -> None:
    options = ("explain", "--platform", "tpu-v7x", "--ep", "8", "--json", "--tokens", "512,99999999999")
    fp8, bf16 = (json.loads(_invoke(*options, "--scheme", scheme)[1])["tpu"] for scheme in ("channel", "bf16"))
    assert re.search("tokens: got 99999999999, want at most [0-9]+: .*scalar memory of v7x", fp8[1]["error"])
    # Twice the weights and rows.
    assert bf16[0]["roofline_us"] == pytest.approx(2 * fp8[0]["roofline_us"], rel=0.01)


def test_explain_text_names_every_candidate_and_the_layer() -> None:
    code, out, _ = _invoke("explain", "--model", "qwen3-coder-30b", "--platform", "cuda-8.0", "--moe-backend", "triton")
    assert code == 1  # an explicit backend that cannot serve raises
    assert "num_experts=128" in out
    for word in ("triton", "marlin", "pallas_ep", "error:"):
        assert word in out


def test_collect_env_reports_executors_and_hides_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOMOE_PLATFROM", "cpu")
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    code, out, _ = _invoke("collect-env", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["versions"]["numpy"] == np.__version__
    assert report["executors"]["reference"][0] == "native"
    assert any("ISOMOE_PLATFROM" in w and "did you mean ISOMOE_PLATFORM" in w for w in report["warnings"])
    assert "hunter2" not in out
    assert os.uname().nodename not in out
    code, text, _ = _invoke("collect-env")
    assert code == 0
    assert "warning: ISOMOE_PLATFROM" in text


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"jax": "0.10.2", "jaxlib": "0.9.0"}, "equal versions"),
        ({"jax": "0.10.0", "jaxlib": "0.10.0"}, "jax >= 0.10.2"),
        ({"torch": "2.9.1+cu130"}, "torch >= 2.11"),
        ({"triton": "3.5.0"}, "triton >= 3.6"),
        ({"torch": "2.13.0", "tpu-inference": "0.26.0"}, "torch < 2.12"),
        ({"numpy": "2.3.5", "jax": "0.10.2", "jaxlib": "0.10.2", "torch": "2.13.0+cpu", "triton": "3.6.0"}, None),
    ],
    ids=str,
)
def test_known_mismatches(versions: dict[str, str | None], words: str | None) -> None:
    found = environment.find_mismatches(versions)
    assert (found == []) if words is None else (len(found) == 1 and words in found[0])


def test_parsers() -> None:
    assert parse_ints("--ep", "1,2,2,8") == [1, 2, 8]
    assert parse_lora("16x4") == (16, 4)
    assert parse_lora(None) == (0, 0)
    for bad in ("x4", "0x4", "16x0", "16", "ax4"):
        with pytest.raises(ValueError, match="--lora"):
            parse_lora(bad)


def test_parse_adapters(tmp_path: Path) -> None:
    assert parse_adapters([f"a={tmp_path}", str(tmp_path)]) == {"a": tmp_path, tmp_path.name: tmp_path}
    with pytest.raises(ValueError, match="twice"):
        parse_adapters([f"a={tmp_path}", f"a={tmp_path}"])
    with pytest.raises(ValueError, match="NAME=DIR"):
        parse_adapters(["=x"])


def test_formats() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 96 * 2**30)] == ["0 B", "1023 B", "1 KiB", "96 GiB"]
    assert ranges([5, 0, 1, 2]) == "0-2, 5"
    assert ranges([]) == "none"


@pytest.mark.parametrize("scheme", ["block", "channel", "tensor", "bf16"])
@pytest.mark.parametrize("gated", [True, False])
def test_expert_bytes_are_those_of_real_weights(scheme: str, gated: bool) -> None:
    experts, hidden, inter = 3, 384, 160
    rng = np.random.default_rng(0)
    rows = 2 * inter if gated else inter
    weights = quantize_moe_weights(
        rng.standard_normal((experts, rows, hidden)), rng.standard_normal((experts, hidden, inter)), scheme
    )
    config = FusedMoEConfig(experts, 1, hidden, inter, is_act_and_mul=gated)
    assert experts * capacity.expert_bytes(config, scheme) == weights.nbytes
    assert capacity.weight_bytes_per_device(config, scheme, 5, 2) == 5 * 2 * capacity.expert_bytes(config, scheme)


@pytest.mark.parametrize("outer", [3, 1])
def test_slot_bytes_are_those_of_a_real_adapter(outer: int) -> None:
    experts, hidden, inter, rank = 3, 64, 32, 8
    adapter = LoRAAdapter(
        0, np.zeros((outer, 2, rank, hidden), BF16), np.zeros((experts, 2, inter, rank), BF16),
        np.zeros((experts, rank, inter), BF16), np.zeros((outer, hidden, rank), BF16),
    )
    config = FusedMoEConfig(experts, 1, hidden, inter)
    assert capacity.slot_bytes_per_device(config, rank, 1, 1, shared_outer=outer == 1) == adapter.nbytes


def test_slot_bytes_of_a_released_model() -> None:
    """1.55 GiB for rank 16 on Qwen3-30B-A3B: 48 layers x 128 experts x 16 x 3 (2048 + 768) x 2 bytes."""
    preset = presets.model("qwen3-coder-30b")
    got = capacity.slot_bytes_per_device(preset.config, 16, preset.num_moe_layers, 1)
    assert got == 48 * 128 * 16 * 3 * (2048 + 768) * 2
    assert capacity.slots_that_fit(10 * got, 9 * got - 1, got) == 1
    assert capacity.slots_that_fit(got, got + 1, got) is None


def test_version() -> None:
    assert _invoke("--version") == (0, f"isomoe {importlib.metadata.version('isomoe')}\n", "")
    assert "Show the version" in _invoke("--help")[1]
