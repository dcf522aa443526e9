# SPDX-License-Identifier: Apache-2.0
"""Compiles tpu-inference's expert-parallel kernel ahead of time: a JSON request in, a JSON answer out.

Run by path with the interpreter that has tpu-inference; imports nothing of isomoe.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def answer(cell: dict[str, Any]) -> dict[str, Any]:
    """Seconds, sizes and block sizes, or the reason there are none under ``error``."""
    try:
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.experimental import topologies
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        from tpu_inference.kernels.fused_moe.v1 import kernel as v1
    except ImportError as error:
        return {"error": f"not importable: {error}"}
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=cell["topology"]).devices
        mesh = Mesh(np.array(devices[: cell["ep"]]).reshape(1, cell["ep"]), ("data", "model"))
        t, e, h, i = cell["tokens"], cell["experts"], cell["hidden"], cell["inter"]

        def abstract(shape: tuple[int, ...], dtype: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec("model")))

        f8, f32 = jnp.float8_e4m3fn, jnp.float32
        chosen: dict[str, Any] = {}
        inner = v1.get_tuned_block_sizes

        def noted(**kwargs: Any) -> Any:
            sizes = inner(**kwargs)
            chosen["blocks"] = [int(s) for s in sizes]
            return sizes

        v1.get_tuned_block_sizes = noted

        def layer(x: Any, w1: Any, w2: Any, gating: Any, s1: Any, s2: Any) -> Any:
            return v1.fused_ep_moe(
                mesh, x, w1, w2, gating, cell["top_k"], renormalize_topk_logits=True, w1_scale=s1, w2_scale=s2,
                subc_quant_w1_sz=h, subc_quant_w2_sz=i, ep_axis_name="model",
            )

        start = time.perf_counter()
        compiled = jax.jit(layer).lower(
            abstract((t, h), jnp.bfloat16), abstract((e, 2, h, i), f8), abstract((e, i, h), f8),
            abstract((t, e), jnp.bfloat16), abstract((e, 2, 1, 1, i), f32), abstract((e, 1, 1, h), f32),
        ).compile()
        seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        assert memory is not None
    except Exception as error:  # whatever the peer raises is the answer
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    local = t // cell["ep"]
    bt = local if local <= 16 else min(local, chosen["blocks"][0])
    return {
        "compile_s": round(seconds, 2), "code_bytes": int(memory.generated_code_size_in_bytes),
        "temp_bytes": int(memory.temp_size_in_bytes), "bt": bt, "blocks": chosen.get("blocks"),
    }


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, which has a tpu_inference of its own
    print(json.dumps(answer(json.load(sys.stdin))), flush=True)
