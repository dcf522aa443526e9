# SPDX-License-Identifier: Apache-2.0
"""One ahead-of-time compilation, started by `aot` in its own process: a JSON request in, a JSON answer out."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..common.config import FusedMoEConfig, FusedMoEParallelConfig
from .ep_moe import EPBuild, layer, operand_shapes
from .expert_kernel import expert_kernel
from .generations import generation
from .spec import Blocks, LoRASpec


def _build(request: dict[str, Any]) -> EPBuild:
    # Frozen dataclasses whose repr evaluates back, written by the parent process.
    names = {
        "FusedMoEConfig": FusedMoEConfig, "FusedMoEParallelConfig": FusedMoEParallelConfig, "Blocks": Blocks,
        "LoRASpec": LoRASpec,
    }
    values = {k: eval(request[k], {"__builtins__": {}, **names}) for k in ("config", "blocks", "lora")}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=request["topology"]).devices
    mesh = Mesh(np.array(devices).reshape(request["devices"] // request["ep"], request["ep"]), ("data", "ep"))
    return EPBuild(
        mesh=mesh, axis="ep", scheme=request["scheme"], recipe=request["recipe"],
        generation=request["generation"], transport=request["transport"],
        dispatch=request["dispatch"], ablate=request.get("ablate", ""), **values,
    )


def _abstract(build: EPBuild, shape: tuple[int, ...], dtype: Any, split: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(build.mesh, split))


def _tensors(build: EPBuild) -> dict[str, jax.ShapeDtypeStruct]:
    split = build.shardings()
    return {n: _abstract(build, shape, dtype, split[n]) for n, (shape, dtype) in operand_shapes(build).items()}


def _lower_layer(build: EPBuild, tokens: int) -> Any:
    c, rows = build.config, PartitionSpec("ep") if tokens % build.ep == 0 else PartitionSpec()
    slots = _abstract(build, (tokens,), jnp.int32, rows) if build.lora else None
    return layer.lower(
        _abstract(build, (tokens, c.hidden_dim), jnp.bfloat16, rows),
        _abstract(build, (tokens, c.experts_per_token), jnp.float32, rows),
        _abstract(build, (tokens, c.experts_per_token), jnp.int32, rows),
        slots, _tensors(build), None, build=build,
    )


def _lower_kernel(build: EPBuild, tokens: int) -> Any:
    spec = build.spec(-(-tokens // build.ep) * build.ep)
    split = build.shardings()

    def local(tables: list[jax.Array], x: jax.Array, tensors: dict[str, jax.Array]) -> list[jax.Array]:
        return expert_kernel(
            spec, tables, {"x": x, **tensors},
            vmem_limit_bytes=generation(build.generation).vmem_limit_bytes,
        )

    tensors = _tensors(build)
    rows = PartitionSpec("ep")
    mapped = jax.shard_map(
        local, mesh=build.mesh, in_specs=(rows, PartitionSpec(), {n: split[n] for n in tensors}), out_specs=rows,
        check_vma=False,
    )
    tables = [_abstract(build, (build.ep * n,), jnp.int32, rows) for n in (1, spec.table.size)]
    return jax.jit(mapped).lower(
        tables,
        _abstract(build, (spec.tokens, *spec.row_shape), jnp.uint32, PartitionSpec()),
        tensors,
    )


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Compile what is asked for: seconds and sizes, or the compiler's refusal under ``error``."""
    try:
        build = _build(request)
        start = time.perf_counter()
        lower = _lower_layer if request["what"] == "layer" else _lower_kernel
        compiled = lower(build, request["tokens"]).compile()
        seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        if "hlo" in request:
            Path(request["hlo"]).write_text(compiled.as_text())
    except Exception as error:  # whoever asked raises it again, with the compiler's words
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "compile_s": round(seconds, 2),
        "code_bytes": int(memory.generated_code_size_in_bytes),
        "temp_bytes": int(memory.temp_size_in_bytes),
    }


def main() -> None:
    print(json.dumps(answer(json.load(sys.stdin))), flush=True)


if __name__ == "__main__":
    main()
