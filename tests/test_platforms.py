# SPDX-License-Identifier: Apache-2.0
"""Platforms as data, and detection from what drivers expose."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
import types

import pytest

from isomoe.common import platforms
from isomoe.common.platforms import TPU_GENERATIONS, Platform, PlatformKind

EXAMPLES = [
    *(Platform.tpu(g) for g in TPU_GENERATIONS),
    Platform.cuda(7, 5),
    Platform.cuda(9, 0),
    Platform.rocm("gfx942"),
    Platform.rocm("gfx90a"),
    Platform.cpu(),
    Platform.out_of_tree("kunlun"),
    Platform.out_of_tree("kunlun", cuda_alike=True),
]


@pytest.mark.parametrize("platform", EXAMPLES, ids=repr)
def test_repr_evaluates_back(platform):
    assert eval(repr(platform)) == platform
    assert hash(eval(repr(platform))) == hash(platform)


@pytest.mark.parametrize("platform", [p for p in EXAMPLES if p.kind is not PlatformKind.OUT_OF_TREE], ids=str)
def test_names_parse_back(platform):
    assert Platform.parse(str(platform)) == platform


def test_out_of_tree_by_name():
    assert Platform.parse("out_of_tree-kunlun") == Platform.out_of_tree("kunlun")


@pytest.mark.parametrize(
    "text", ["", "tpu", "tpu-v3", "cuda", "cuda-9", "cuda-9.0a", "rocm-mi300", "gpu", "out_of_tree-"]
)
def test_bad_names_say_what_is_wanted(text):
    with pytest.raises(ValueError, match="want"):
        Platform.parse(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Platform.tpu("v7"),
        lambda: Platform.cuda(9, -1),
        lambda: Platform.cuda("9", 0),
        lambda: Platform.cuda(True, 0),
        lambda: Platform.rocm("950"),
        lambda: Platform.rocm(950),
        lambda: Platform.out_of_tree(""),
    ],
)
def test_bad_arguments_are_refused(make):
    with pytest.raises(ValueError, match="got"):
        make()


def test_fp8_matrix_instructions():
    with_mma = {
        "tpu-v7x",
        "cuda-8.9",
        "cuda-9.0",
        "cuda-10.0",
        "cuda-12.0",
        "rocm-gfx942",
        "rocm-gfx950",
        "rocm-gfx1201",
    }
    without = {
        "tpu-v4",
        "tpu-v5e",
        "tpu-v5p",
        "tpu-v6e",
        "cuda-7.0",
        "cuda-7.5",
        "cuda-8.0",
        "cuda-8.6",
        "rocm-gfx90a",
        "cpu",
        "out_of_tree-x",
    }
    assert {t for t in with_mma | without if Platform.parse(t).has_fp8_mma} == with_mma


@pytest.fixture
def bare(monkeypatch):
    """A machine without devices or loaded frameworks; probes are not remembered."""
    monkeypatch.delenv("ISOMOE_PLATFORM", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("_probe_tpu", "_probe_nvml", "_probe_kfd", "_parse_override"):
        getattr(platforms, name).cache_clear()
    for name in ("_probe_tpu", "_probe_nvml", "_probe_kfd", "_probe_loaded_torch", "_probe_loaded_jax"):
        monkeypatch.setattr(platforms, name, lambda *a: None)
    return monkeypatch


def test_no_device_is_the_cpu(bare):
    assert Platform.detect() == Platform.cpu()


def test_override_wins(bare):
    bare.setattr(platforms, "_probe_tpu", lambda: Platform.tpu("v6e"))
    bare.setenv("ISOMOE_PLATFORM", "cuda-9.0")
    assert Platform.detect() == Platform.cuda(9, 0)
    bare.setenv("ISOMOE_PLATFORM", "")
    assert Platform.detect() == Platform.tpu("v6e")


def test_malformed_override_is_reported_once_and_ignored(bare, caplog):
    bare.setattr(platforms, "_probe_tpu", lambda: Platform.tpu("v6e"))
    bare.setenv("ISOMOE_PLATFORM", "tpu-v99")
    with caplog.at_level(logging.WARNING, logger="isomoe"):
        assert Platform.detect() == Platform.detect() == Platform.tpu("v6e")
    assert len(caplog.records) == 1 and "'v99'" in caplog.text


def test_a_probe_that_fails_means_not_this_device(bare):
    def broken(*args):
        raise OSError("driver")

    bare.setattr(platforms, "_probe_nvml", broken)
    bare.setattr(platforms, "_probe_kfd", lambda: Platform.rocm("gfx950"))
    assert Platform.detect() == Platform.rocm("gfx950")


@pytest.mark.parametrize(
    ("device", "generation"),
    [
        ("0x005e", "v4"),
        ("0x0062", "v5p"),
        ("0x0063", "v5e"),
        ("0x006f", "v6e"),
        ("0x0076", "v7x"),
        ("0x0042", None),
    ],
)
def test_tpu_by_pci_ids(tmp_path, device, generation):
    """0x0042 is a network card of the same vendor."""
    for i, (vendor, dev) in enumerate((("0x8086", "0x0076"), ("0x1ae0", device))):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "vendor").write_text(vendor + "\n")
        (tmp_path / str(i) / "device").write_text(dev + "\n")
    found = platforms._probe_tpu.__wrapped__(str(tmp_path))
    assert found == (None if generation is None else Platform.tpu(generation))


@pytest.mark.parametrize(
    ("version", "arch"),
    [
        (0, None),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (90010, "gfx90a"),
        (120001, "gfx1201"),
        (110000, "gfx1100"),
    ],
)
def test_rocm_by_topology(tmp_path, version, arch):
    for i, v in enumerate((0, version)):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "properties").write_text(
            f"cpu_cores_count 8\ngfx_target_version {v}\nsimd_count 4\n"
        )
    found = platforms._probe_kfd.__wrapped__(str(tmp_path))
    assert found == (None if arch is None else Platform.rocm(arch))


class FakeNvml:
    """libnvidia-ml with GPUs of the given capabilities."""

    def __init__(self, *capabilities):
        self.capabilities, self.shut_down = capabilities, False

    def nvmlInit_v2(self):
        return 0 if self.capabilities else 9

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index.value + 1
        return 0 if index.value < len(self.capabilities) else 2

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = self.capabilities[handle.value - 1]
        return 0

    def nvmlShutdown(self):
        self.shut_down = True


@pytest.mark.parametrize(
    ("visible", "want"),
    [
        (None, (9, 0)),
        ("0", (9, 0)),
        ("1,0", (8, 6)),
        ("", None),
        ("-1", None),
        ("7", None),
        ("GPU-0b5e", (9, 0)),
    ],
)
def test_nvidia_by_nvml(monkeypatch, visible, want):
    nvml = FakeNvml((9, 0), (8, 6))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    found = platforms._probe_nvml.__wrapped__(visible)
    assert found == (None if want is None else Platform.cuda(*want))
    assert nvml.shut_down or visible in ("", "-1")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml())
    assert platforms._probe_nvml.__wrapped__(None) is None


def test_loaded_torch_is_asked(monkeypatch):
    def fake(available, hip):
        properties = types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
        cuda = types.SimpleNamespace(
            is_available=lambda: available,
            get_device_capability=lambda i: (12, 0),
            get_device_properties=lambda i: properties,
        )
        return types.SimpleNamespace(cuda=cuda, version=types.SimpleNamespace(hip=hip))

    for torch, want in (
        (fake(False, None), None),
        (fake(True, None), Platform.cuda(12, 0)),
        (fake(True, "6.4"), Platform.rocm("gfx942")),
    ):
        monkeypatch.setitem(sys.modules, "torch", torch)
        assert platforms._probe_loaded_torch() == want


def test_loaded_jax_is_asked_only_once_it_runs(monkeypatch):
    started = types.SimpleNamespace(backends_are_initialized=lambda: True)
    idle = types.SimpleNamespace(backends_are_initialized=lambda: False)

    def fake(kind):
        def devices():
            return [types.SimpleNamespace(device_kind=kind)]

        return types.SimpleNamespace(default_backend=lambda: "tpu", devices=devices)

    for bridge, kind, want in (
        (idle, "TPU7x", None),
        (started, "TPU7x", "v7x"),
        (started, "TPU v6 lite", "v6e"),
        (started, "TPU v99", None),
    ):
        monkeypatch.setitem(sys.modules, "jax", fake(kind))
        monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
        assert platforms._probe_loaded_jax() == (None if want is None else Platform.tpu(want))


def test_detection_imports_no_framework():
    code = (
        "import sys; from isomoe.common.platforms import Platform; Platform.detect(); "
        "print([m for m in ('torch', 'jax', 'triton', 'vllm', 'libtpu') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
