# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine script without vLLM: its numbers, its comparison, its verdicts, and the order engines measure in."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytestmark = pytest.mark.timeout(120)

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

# Follows the orders that a timed engine gets, and says when it did what.
FAKE = """
import json, sys, time
from pathlib import Path
command, folder, *rest = sys.argv[1:]
folder = Path(folder)
if command == "weights":
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "generation_config.json").touch()
    sys.exit()
out = Path(rest[0])
def say(what):
    with open(folder / "order", "a") as f:
        f.write(f"{out.stem} {what}\\n")
assert sys.stdin.readline() == "start\\n"
say("starts")
out.with_suffix(".ready").touch()
for line in sys.stdin:
    mark = line.split()[1]
    say("measures")
    out.write_text(json.dumps({"step_ms": {"1": [2.0]}, "prefill_ms": [5.0]}))
    out.with_suffix("." + mark).touch()
say("ends")
"""


@pytest.fixture()
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("vllm_engine")


def test_values_are_the_same_everywhere(script: ModuleType) -> None:
    """Integers of a counter-based generator times one float32: no library function that may round differently."""
    values = script.small.uniform("name", 64, 128, std=0.5)
    assert values.dtype == np.float32 and abs(values.std() - 0.5) < 0.01
    np.testing.assert_array_equal(values, script.small.uniform("name", 64, 128, std=0.5))
    assert not np.array_equal(values, script.small.uniform("other", 64, 128, std=0.5))
    first = np.random.Philox(key=7).random_raw(5)
    prompts = script.small.prompts(1, 5, 100, seed=7)
    assert prompts.tolist() == [[int(word) % 98 for word in first]]


@pytest.mark.parametrize(("scheme", "scale"), [("block", "weight_scale_inv"), ("channel", "weight_scale")])
def test_quantised_weights_follow_their_source(script: ModuleType, scheme: str, scale: str) -> None:
    weight = script.small.expert_weight(0, 3, "down", script.small.HIDDEN, 384)
    made = script.small.quantise(weight, scheme)
    spread = made[scale].numpy()
    if scheme == "block":
        spread = np.repeat(np.repeat(spread, 128, 0), 128, 1)
    assert script.small.distance(made["weight"].float().numpy() * spread, weight) < 0.04


def _reference(script: ModuleType) -> dict[str, np.ndarray]:
    small = script.small
    shape = (len(small.REQUESTS), small.STEPS, small.VOCAB)
    logits = small.centred(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    return {"block_logits": logits, "block_tokens": logits.argmax(-1)}


def _engine(script: ModuleType, reference: dict[str, np.ndarray], noise: float) -> Any:
    """An engine that gives the reference's log-probabilities with noise of a relative size."""
    logits = reference["block_logits"]
    got = logits + noise * np.random.default_rng(1).normal(size=logits.shape)

    def ask(rows: list[list[int]], tokens: int, adapters: list[int] | None, **sampling: Any) -> list[Any]:
        assert (len(rows), tokens, adapters) == (len(logits), script.small.STEPS, list(script.small.REQUESTS))
        return [
            SimpleNamespace(outputs=[SimpleNamespace(
                token_ids=request.argmax(-1).tolist(),
                logprobs=[{t: SimpleNamespace(logprob=v - 7) for t, v in enumerate(step)} for step in request],
            )])
            for request in got
        ]  # fmt: skip

    return SimpleNamespace(adapters=Path("."), ask=ask)


def _judged(script: ModuleType, folder: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    (check,) = (c for c in script.CHECKS if c.name == "block_w8a16")
    (folder / "block_w8a16.json").write_text(json.dumps(result))
    script.judge_checks(folder, [check])
    return capsys.readouterr().out


@pytest.mark.parametrize(("noise", "good"), [(3e-3, True), (3e-2, False)])
def test_logits_are_held_against_the_reference(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], noise: float, good: bool
) -> None:
    reference = _reference(script)
    compared = script.engine.against_reference(_engine(script, reference, noise), "block", reference)
    result = {
        "done": True, "wall_s": 1, "fingerprint": ["a", "a"], "reference": compared,
        "classes": {"experts": "IsomoeW8A16Experts"},
    }  # fmt: skip
    said = _judged(script, tmp_path, result, capsys)
    assert said.count("logits against transformers and PEFT") == 3
    assert ("FAIL" not in said) == good
    assert f"{noise:.0e}"[-1] in said.split("relative L2 ")[1][:8]


def test_a_check_fails_where_something_is_off(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"done": True, "fingerprint": ["a", "b"], "classes": {"experts": "TritonExperts"}}
    said = _judged(script, tmp_path, other, capsys)
    assert "FAIL block_w8a16: weights" in said and "FAIL block_w8a16: class" in said
    assert not script.judge_checks(tmp_path / "nothing", script.CHECKS)
    assert capsys.readouterr().out.count("FAIL") == len(script.CHECKS)


def test_a_refusal_must_be_logged_once(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (check,) = (c for c in script.CHECKS if c.refused)
    result = {"done": True, "wall_s": 1, "classes": {"experts": "TritonExperts"}}
    (tmp_path / f"{check.name}.json").write_text(json.dumps(result))
    line = "isomoe: FP8 MoE layers stay on vLLM's experts: no such backend\n"
    for times in (0, 1, 2):
        (tmp_path / f"{check.name}.log").write_text(line * times)
        assert script.judge_checks(tmp_path, [check]) == (times == 1)
    assert "no such backend" in capsys.readouterr().out


def test_speed_goals(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best of the last runs counts; ratios are stock over ours, and a cell that is missing fails."""

    def write(name: str, ms: float, prefill: float) -> None:
        steps = {str(c): [0.1, 3 * ms, ms] for c in script.engine.CONCURRENCIES}
        kind = {"isomoe": "IsomoeExperts", "vllm": "TritonExperts"}[name.split("_")[0]]
        values = {"step_ms": steps, "prefill_ms": [0.1, 2 * prefill, prefill, 3 * prefill, prefill]}
        (tmp_path / f"{name}.json").write_text(json.dumps(values | {"classes": {"experts": kind}}))

    for name, ms, prefill in (("vllm_off", 11, 150), ("isomoe_off", 10, 100), ("vllm_on", 16, 200)):
        write(name, ms, prefill)
    write("isomoe_on", 12, 120)
    assert script.judge_speed(tmp_path, script.SPEED)
    write("isomoe_on", 12.6, 120)
    assert not script.judge_speed(tmp_path, script.SPEED)
    said = capsys.readouterr().out
    assert said.count("FAIL") == 4 + 3 and "ours over our step without, 16: 1.260" in said
    (tmp_path / "isomoe_on.json").unlink()
    assert not script.judge_speed(tmp_path, script.SPEED)
    assert "not measured: isomoe_on" in capsys.readouterr().out


def test_engines_measure_in_turn(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs alternate; nothing starts while another measures; the group's engines end before the next starts."""
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    monkeypatch.setattr(script, "__file__", str(fake))
    script.run_speed(tmp_path, tmp_path / "out", 60, layers=1)
    lines = (tmp_path / "order").read_text().split("\n")[:-1]
    assert sorted(lines[:3]) == [f"{name} starts" for name in ("isomoe_off", "isomoe_on", "vllm_off")]
    first = ["vllm_off", "isomoe_off", "isomoe_on", "vllm_off", "isomoe_off"]
    assert lines[3:8] == [f"{name} measures" for name in first]
    assert sorted(lines[8:10]) == ["isomoe_off ends", "vllm_off ends"]
    second = ["vllm_on", "isomoe_on"] * 2
    assert lines[10:] == ["vllm_on starts", *(f"{n} measures" for n in second), "vllm_on ends", "isomoe_on ends"]


def test_an_engine_that_fails_leaves_the_others(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE.replace('say("starts")', 'assert out.stem != "isomoe_on", "broken"\nsay("starts")'))
    monkeypatch.setattr(script, "__file__", str(fake))
    script.run_speed(tmp_path, tmp_path / "out", 60, layers=1)
    lines = (tmp_path / "order").read_text().split("\n")
    assert lines.count("vllm_off measures") == 2 and lines.count("vllm_on measures") == 2
    assert "isomoe_on: exit 1" in capsys.readouterr().out
