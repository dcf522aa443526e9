# SPDX-License-Identifier: Apache-2.0
"""What this process runs on: the variables the package reads, versions, devices, executors and known mismatches.

Standard library only, and every probe is guarded: `isomoe collect-env` must work where nothing else does. The report
names no host and no address, and shows no variable beyond the two tables below.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import platform as host
import re
import subprocess
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .interpreters import has_cuda_device, prepare

# Every variable the package reads, and what it does. Tests hold this table against the sources and the README.
VARIABLES: dict[str, str] = {
    "ISOMOE_PLATFORM": "Platform.detect() answers this instead of probing: tpu-v7x, cuda-9.0, rocm-gfx950, cpu",
    "ISOMOE_MOE_BACKEND": "stands in for moe_backend=\"auto\" in the selectors: a registered backend name",
    "ISOMOE_CHECK": "1: report expert ids outside the layer, which are otherwise skipped silently",
    "ISOMOE_BATCH_INVARIANT": "1: one kernel for every batch size, so that a row's bits never depend on it",
    "ISOMOE_DISABLE": "1: the vLLM and tpu-inference plugins register nothing",
    "ISOMOE_VLLM": "1 (default on Hopper): vLLM's FP8 MoE layers on CUDA run on this package's kernels; 0: on vLLM's",
    "ISOMOE_HOPPER": "0: the portable Triton kernels also on compute capability 9.0, instead of the Gluon ones",
    "ISOMOE_MARLIN": "own (default) or vllm: w8a16 on CUDA by this package's kernels, or with vLLM's Marlin MoE op",
    "ISOMOE_TUNED_DIR": "a folder with tables of measured kernel choices, looked in before the shipped ones",
    "ISOMOE_TPU_RECIPE": "w8a8 or w8a16 in the tpu-inference plugin; default: w8a8 on v7x, w8a16 before it",
    "ISOMOE_WEIGHT_SCALE_POLICY": "block scales in the tpu-inference plugin: exact (default) or per_channel",
}

# Variables of others that decide how this package runs.
FOREIGN_VARIABLES = (
    "JAX_PLATFORMS", "XLA_FLAGS", "NPROC", "LIBTPU_INIT_ARGS", "TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD",
    "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "VLLM_MOE_FORCE_MARLIN", "USE_MOE_EP_KERNEL", "MODEL_IMPL_TYPE",
)

DISTRIBUTIONS = (
    "isomoe", "numpy", "ml_dtypes", "safetensors", "jax", "jaxlib", "libtpu", "torch", "triton", "vllm",
    "tpu-inference", "transformers", "peft",
)


def unknown_variables(environ: MutableMapping[str, str] | None = None) -> list[str]:
    """One warning for each ``ISOMOE_*`` variable that nothing reads, with a suggestion where one is near."""
    warnings = []
    for name in sorted(os.environ if environ is None else environ):
        if not name.startswith("ISOMOE_") or name in VARIABLES or name.startswith("ISOMOE_TEST_"):
            continue
        near = difflib.get_close_matches(name, VARIABLES, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(VARIABLES)}"
        warnings.append(f"{name} is set, but nothing reads it{hint}")
    return warnings


@dataclass
class EnvironmentReport:
    """What `collect-env` prints.

    Attributes:
      python, system: interpreter version; operating system and machine type.
      versions: distribution to version, None where it is not installed.
      devices: what each framework, or its driver, sees.
      variables: known variables that are set.
      executors: name to (state, reason and which kernels).
      mismatches: combinations that are known not to work.
      warnings: unknown variables and failed probes.
    """

    python: str = ""
    system: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    executors: dict[str, tuple[str, str]] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def version_of(distribution: str) -> str | None:
    """An installed distribution's version, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str | None) -> tuple[int, ...] | None:
    """Leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in match[0].split(".")) if match else None


def find_mismatches(versions: dict[str, str | None]) -> list[str]:
    """Version combinations known not to work together; each says what to do."""
    have = {name: _release(version) for name, version in versions.items()}
    found = []
    numpy, triton, torch, jax, jaxlib = (have.get(n) for n in ("numpy", "triton", "torch", "jax", "jaxlib"))
    if numpy and triton and numpy >= (2, 4) and triton < (3, 7) and not has_cuda_device():
        found.append(
            f"numpy {versions['numpy']} with triton {versions['triton']}: Triton's interpreter needs numpy < 2.4"
        )
    if jax and jaxlib and jax[:2] != jaxlib[:2]:
        found.append(f"jax {versions['jax']} with jaxlib {versions['jaxlib']}: install equal versions")
    if jax and jax < (0, 10, 2):
        found.append(f"jax {versions['jax']}: the Pallas kernels need jax >= 0.10.2")
    if torch and torch < (2, 11):
        found.append(f"torch {versions['torch']}: the CUDA side needs torch >= 2.11")
    if triton and triton < (3, 6):
        found.append(f"triton {versions['triton']}: the CUDA side needs triton >= 3.6")
    if have.get("tpu-inference") and torch and torch >= (2, 12):
        found.append(f"torch {versions['torch']} with tpu-inference: torchax needs torch < 2.12")
    return found


def _probe_nvidia() -> str:
    if not has_cuda_device():
        return "no device"
    output = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=20, check=True,
    ).stdout
    return "; ".join(line.strip() for line in output.splitlines() if line.strip())


def _probe_torch() -> str:
    if version_of("torch") is None:
        return "not installed"
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return "no CUDA device" + ("" if torch.version.cuda or torch.version.hip else " (CPU build)")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    major, minor = torch.cuda.get_device_capability(0)
    return f"{len(names)} x {names[0]}, capability {major}.{minor}"


def _probe_jax() -> str:
    if version_of("jax") is None:
        return "not installed"
    jax = importlib.import_module("jax")
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}"


_PROBES: dict[str, Callable[[], str]] = {"nvidia driver": _probe_nvidia, "torch": _probe_torch, "jax": _probe_jax}


def collect() -> EnvironmentReport:
    """Look at everything; a probe that fails becomes a warning. Frameworks start as the parity job starts them."""
    report = EnvironmentReport(
        python=f"{host.python_implementation()} {host.python_version()}", system=f"{host.system()} {host.machine()}"
    )
    report.versions = {name: version_of(name) for name in DISTRIBUTIONS}
    report.variables = {n: os.environ[n] for n in (*VARIABLES, *FOREIGN_VARIABLES) if n in os.environ}
    prepare()
    report.mismatches = find_mismatches(report.versions)
    report.warnings = unknown_variables()
    for name, probe in _PROBES.items():
        try:
            report.devices[name] = probe()
        except Exception as error:  # a broken driver or half-installed framework is what this report is for
            report.devices[name] = f"failed: {type(error).__name__}"
            report.warnings.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")
    try:
        from .executors import executors

        for name, info in executors().items():
            report.executors[name] = (info.state, "; ".join(filter(None, (info.reason, info.detail))))
    except Exception as error:
        report.warnings.append(f"executors: {type(error).__name__}: {error}")
    return report


def format_report(report: EnvironmentReport) -> str:
    """The report as text, one fact a line; mismatches are marked MISMATCH."""
    lines = [f"python        {report.python}", f"system        {report.system}", "", "versions"]
    lines += [f"  {name:<15} {version or '-'}" for name, version in report.versions.items()]
    lines += ["", "devices", *(f"  {name:<15} {seen}" for name, seen in report.devices.items())]
    lines += ["", "executors"]
    lines += [f"  {name:<15} {state}: {reason}" for name, (state, reason) in report.executors.items()]
    lines += ["", "variables", *(f"  {name}={value}" for name, value in report.variables.items())]
    lines += ["", *(f"MISMATCH: {text}" for text in report.mismatches)]
    lines += [f"warning: {text}" for text in report.warnings]
    return "\n".join(lines).rstrip()
