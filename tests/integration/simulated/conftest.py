# SPDX-License-Identifier: Apache-2.0
"""Fixtures over `simulation`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulation import Simulated
from vllm.platforms.interface import PlatformEnum

_prefixes = (f"model.layers.{i}.mlp.experts" for i in itertools.count())


@pytest.fixture(autouse=True)
def cuda() -> Iterator[type[Simulated]]:
    """The simulated platform, an H100 unless a test changes it."""
    Simulated.become(PlatformEnum.CUDA)
    yield Simulated
    Simulated.become(PlatformEnum.CUDA)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A `VllmConfig` of defaults, set as the current one, and process groups of one process."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.v1.worker.workspace import init_workspace_manager

    config = VllmConfig(device_config=DeviceConfig("cpu"))
    store = tmp_path_factory.mktemp("gloo") / "store"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, local_rank=0, distributed_init_method=f"file://{store}", backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        init_workspace_manager(torch.device("cpu"))
        yield config
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture
def build(world: Any) -> Callable[..., Any]:
    """``build(quant_config, ...)``: vLLM's own MoE layer (`MoERunner`) under the current platform."""

    def make(quant_config: Any, *, lora: Any = None, hidden: int = 256, inter: int = 128, experts: int = 8,
             top_k: int = 2, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:  # fmt: skip
        from vllm.model_executor.layers import fused_moe

        factory = getattr(fused_moe, "FusedMoE", None) or fused_moe.FusedMoEFactory
        quant_config.packed_modules_mapping = {}
        world.lora_config = lora
        try:
            return factory(
                num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=inter,
                params_dtype=dtype, quant_config=quant_config, prefix=next(_prefixes), **options,
            )
        finally:
            world.lora_config = None

    return make


@pytest.fixture
def installed(world: Any) -> Iterator[None]:
    """This package's selector in vLLM's FP8 modules."""
    from isomoe.cuda_impl.vllm import selection

    assert set(selection.install()) == set(selection.METHOD_MODULES)
    yield
    selection.uninstall()
