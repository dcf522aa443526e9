# SPDX-License-Identifier: Apache-2.0
"""Golden packs round trip, and every planted bug is caught and named by its stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isomoe.common import golden
from isomoe.common.backends import register_moe_backend, unregister_moe_backend
from isomoe.common.executors import MoECall
from isomoe.common.metrics import bitwise_equal
from isomoe.common.reference import STAGES, reference_moe, stages
from isomoe.common.safe_files import TensorFileError
from isomoe.tests import planted
from isomoe.tests.matrix import Case, build


@contextmanager
def registered(cls: type) -> Iterator[str]:
    name = f"planted_{cls.__name__.lower()}"
    register_moe_backend(
        name,
        f"{cls.__module__}:{cls.__name__}",
        platforms=("cpu",),
        schemes=("block", "channel", "tensor", "bf16"),
    )
    try:
        yield name
    finally:
        unregister_moe_backend(name)


def _call(case: Case) -> MoECall:
    return build(case).call()


@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_stages_end_in_the_reference_and_change_no_bit(scheme: str) -> None:
    call = _call(Case(scheme, "w8a8", "mixed", routing="skipped"))
    found = stages(call)
    assert tuple(found) == STAGES
    assert bitwise_equal(found["combine"], reference_moe(call))
    k = call.config.experts_per_token
    rebuilt = sum(
        np.where((call.topk_ids[:, i] >= 0)[:, None], call.topk_weights[:, i, None] * found["delta2"][:, i], 0)
        for i in range(k)
    )
    assert np.allclose(rebuilt, found["combine"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "recipe"),
    [("channel", "w8a8"), ("block", "w8a8"), ("tensor", "w8a8"), ("channel", "w8a16"), ("bf16", "bf16")],
)
def test_probes_are_exact_and_blame_nobody_who_is_right(scheme: str, recipe: str) -> None:
    found = golden.diagnose("reference", scheme=scheme, recipe=recipe)
    assert found.stage == ""
    assert len(found.probes) == (10 if recipe == "w8a8" else 7)
    plain = stages(golden.probe_call("selection", scheme, recipe))
    if recipe == "w8a8":
        assert (plain["x_scale"] == 1).all(), "x must be on the FP8 grid under scale 1"
        x = golden.probe_call("selection", scheme, recipe).x
        assert np.array_equal(plain["x_code"].astype(np.float32), x.astype(np.float32))


@pytest.mark.parametrize("cls", planted.PLANTED, ids=lambda c: c.__name__)
@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_planted_bugs_are_named_by_stage(cls: Any, scheme: str) -> None:
    with registered(cls) as name:
        found = golden.diagnose(name, scheme=scheme)
    assert found.stage == cls.stage, "\n".join(map(str, found.probes))


def test_a_pack_round_trips(tmp_path) -> None:
    cases = [Case("channel", "w8a8", "mixed"), Case("block", "w8a8"), Case("bf16", "bf16", bias=True)]
    written = [golden.golden_case(str(c), _call(c)) for c in cases]
    written[0] = golden.with_result(written[0], "reference")
    assert golden.write_pack(tmp_path / "pack.safetensors", written) == 3
    read = golden.read_pack(tmp_path / "pack.safetensors")
    for a, b in zip(written, read, strict=True):
        assert a.name == b.name
        assert a.call.config == b.call.config
        assert a.call.recipe == b.call.recipe
        for key in ("x", "topk_weights", "topk_ids"):
            assert bitwise_equal(getattr(a.call, key), getattr(b.call, key))
        assert bitwise_equal(a.call.weights.w13, b.call.weights.w13)
        assert bitwise_equal(a.want, b.want)
        assert a.stages.keys() == b.stages.keys()
        assert bitwise_equal(reference_moe(b.call), b.want)
    assert bitwise_equal(read[0].got["reference"], written[0].got["reference"])
    assert all(r.verdict == "pass" for r in golden.check_pack(read, "reference"))


def test_check_names_the_stage(tmp_path) -> None:
    """The three bugs of the brief, found through a file alone."""
    names = ["channel-w8a8-adapter_on_w13", "channel-w8a8-dense_w13", "channel-w8a8-adapter_on_w2"]
    calls = golden.default_calls()
    golden.write_pack(tmp_path / "p.safetensors", [golden.golden_case(n, calls[n]) for n in names])
    pack = golden.read_pack(tmp_path / "p.safetensors")
    for cls in (planted.LoraFromCodes, planted.TruncatedSums, planted.ExpertSlowestB):
        with registered(cls) as name:
            bad = [r for r in golden.check_pack(pack, name) if r.verdict == "fail"]
        assert bad, cls.__name__
        assert {r.stage for r in bad} == {cls.stage}


def test_exposed_stages_are_compared_directly() -> None:
    case = golden.golden_case("c", _call(Case("channel", "w8a8")))
    with registered(planted.Exposed) as name:
        (found,) = golden.check_pack([case], name)
    assert (found.verdict, found.stage) == ("fail", "scale")


def test_two_platforms_are_held_to_each_other() -> None:
    """A result another platform stored is compared too, with twice the bound."""
    case = golden.golden_case("c", _call(Case("channel", "w8a8")))
    other = replace(case, got={"elsewhere": (case.want * 1.1).astype(case.call.x.dtype)})
    (found,) = golden.check_pack([other], "reference")
    assert found.verdict == "fail"
    assert "elsewhere" in found.reason


@pytest.mark.parametrize("damage", ["truncated", "foreign", "format", "config", "bytes", "rows", "absent", "twice"])
def test_bad_packs(tmp_path, damage: str) -> None:
    path = tmp_path / "p.safetensors"
    case = golden.golden_case("c", _call(Case("channel", "w8a8")))
    golden.write_pack(path, [case])
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "foreign":
        golden._write(path, {"a": np.zeros(3, np.float32)})
    elif damage == "format":
        golden._write(path, {"golden": np.frombuffer(b'{"format": 99, "cases": []}', np.uint8)})
    elif damage == "config":
        meta = b'{"format": 1, "cases": [{"config": 5}]}'
        golden._write(path, {"golden": np.frombuffer(meta, np.uint8)})
    elif damage == "bytes":
        golden._write(path, {"golden": np.frombuffer(b"\xff\xfe", np.uint8)})
    elif damage == "rows":
        golden.write_pack(path, [replace(case, want=case.want[:1])])
    elif damage == "absent":
        with pytest.raises(FileNotFoundError):
            golden.read_pack(tmp_path / "nowhere")
        return
    else:
        with pytest.raises(ValueError, match="twice"):
            golden.write_pack(path, [case, case])
        return
    with pytest.raises(TensorFileError, match=r"p\.safetensors"):
        golden.read_pack(path)
