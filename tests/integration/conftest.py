# SPDX-License-Identifier: Apache-2.0
"""A vLLM world of one process on eight virtual CPU devices, as tpu-inference would see eight TPU cores.

Modules are skipped, with the reason, where the serving stack they need is not installed. `make test-integration`
names a leg (``ISOMOE_TEST_LEG``), whose environment `setup_env.sh` built: there a missing stack, a skip, or
nothing passed is a failure.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Read by vLLM and tpu-inference when they are imported.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "USE_MOE_EP_KERNEL": "1",
}
_MISSING = [name for name in ("vllm", "tpu_inference", "torchax") if importlib.util.find_spec(name) is None]
_FOLDER = Path(__file__).parent
_TPU_MODULES = "test_tpu_*.py"
# Leg -> what it does not collect.
_LEGS: dict[str, list[str]] = {"tpu": [], "vllm": [_TPU_MODULES]}
_LEG = os.environ.get("ISOMOE_TEST_LEG")
if _LEG is not None and _LEG not in _LEGS:
    raise pytest.UsageError(f"ISOMOE_TEST_LEG: got {_LEG!r}, want one of {', '.join(_LEGS)}")
collect_ignore_glob = _LEGS[_LEG] if _LEG else []

if not _MISSING:
    for _name, _value in _ENVIRONMENT.items():
        os.environ.setdefault(_name, _value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = f"{' and '.join(_MISSING)} not installed; see tests/integration/setup_env.sh"
    for item in items:
        # This hook sees the whole session: only this folder's modules need tpu-inference.
        if _MISSING and item.path.parent == _FOLDER and item.path.match(_TPU_MODULES):
            item.add_marker(pytest.mark.skip(reason=reason))


def _untested(terminal: Any) -> bool:
    """Whether a leg ran less than all of its tests."""
    return _LEG is not None and (not terminal.stats.get("passed") or bool(terminal.stats.get("skipped")))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and _untested(session.config.pluginmanager.getplugin("terminalreporter")):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _untested(terminalreporter):
        terminalreporter.write_line(f"ISOMOE_TEST_LEG={_LEG}: want every test run, and one at least", red=True)


@pytest.fixture(scope="session")
def registered() -> None:
    """Plugins as vLLM loads them: by their installed entry points."""
    from vllm.plugins import load_general_plugins

    from isomoe.tpu_impl.tpu_inference_plugin import is_registered

    load_general_plugins()
    assert is_registered(), "the vllm.general_plugins entry point did not register; is isomoe installed?"


@pytest.fixture(scope="session")
def world(registered: None, tmp_path_factory: pytest.TempPathFactory, samples: Any) -> Iterator[None]:
    """vLLM's process groups for one process."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    store = tmp_path_factory.mktemp("gloo") / "store"
    with set_current_vllm_config(make_vllm_config(samples.channel, expert_parallel=False)):
        init_distributed_environment(1, 0, local_rank=0, distributed_init_method=f"file://{store}", backend="gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


def make_vllm_config(model: Path, *, expert_parallel: bool = True, tensor_parallel: int = 1, **engine: Any) -> Any:
    """A real `VllmConfig` of a local checkpoint folder."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4,
        enable_expert_parallel=expert_parallel, tensor_parallel_size=tensor_parallel, **engine,
    ).create_engine_config()


@pytest.fixture(scope="session")
def vllm_config(world: None, samples: Any) -> Callable[..., Any]:
    """``vllm_config("channel" | "block" | a folder, ...)``: `make_vllm_config` on a sample."""

    def make(model: str | Path, **options: Any) -> Any:
        folder = samples.checkpoint(model) if model in ("bf16", "channel", "block") else Path(model)
        return make_vllm_config(folder, **options)

    return make


@pytest.fixture(scope="session")
def modelopt_folder(samples: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose config.json is that of a ModelOpt FP8 export (no weights)."""
    folder = tmp_path_factory.mktemp("modelopt")
    config = json.loads((samples.channel / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*mlp.gate"],
        "producer": {"name": "modelopt", "version": "0.40.0"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def mesh() -> Callable[..., Any]:
    """`model_steps.device_mesh`."""
    from isomoe.tests.integration.model_steps import device_mesh

    return device_mesh
