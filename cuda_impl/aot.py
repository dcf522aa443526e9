# SPDX-License-Identifier: Apache-2.0
"""Compiles, without a GPU, every kernel that the host path would launch.

The real `fused_moe` runs on tensors of torch's ``meta`` device under `_runtime.recording`, so the variants, argument
types and alignments are those of a serving call (and the path is shown to read no device value back). Each variant is
then compiled for the named architecture down to a cubin; shared memory, registers and spills come from the result.

Compilation needs a process in which Triton is not interpreted: `aot_compile` starts one. From a shell:
``TRITON_INTERPRET=0 python -m isomoe.cuda_impl.aot --capability 9.0 --tokens 64``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..common.checks import check_choice
from ..common.config import FusedMoEConfig
from ..common.recipes import default_recipe

CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


@dataclass(frozen=True)
class KernelReport:
    """One compiled variant.

    Attributes:
      kernel: the kernel function's name.
      constexprs: compile-time parameters.
      shared_bytes: shared memory of a program.
      registers: of a thread.
      spill_bytes: local memory of a thread (spilled registers).
      num_warps, num_stages: as launched.
      error: the compiler's message, empty on success.
    """

    kernel: str
    constexprs: dict[str, object]
    shared_bytes: int
    registers: int
    spill_bytes: int
    num_warps: int
    num_stages: int
    error: str = ""


@dataclass(frozen=True)
class AotReport:
    """All variants of one call for one architecture; `shared_limit` is what a program may use."""

    capability: str
    scheme: str
    recipe: str
    num_tokens: int
    max_loras: int
    max_lora_rank: int
    shared_limit: int
    kernels: tuple[KernelReport, ...]

    @property
    def failures(self) -> tuple[KernelReport, ...]:
        """Variants that do not compile or do not fit."""
        return tuple(k for k in self.kernels if k.error or k.shared_bytes > self.shared_limit)


def aot_compile(
    capability: str,
    config: FusedMoEConfig,
    num_tokens: int | Iterable[int],
    *,
    scheme: str,
    recipe: str | None = None,
    max_loras: int = 0,
    max_lora_rank: int = 0,
    timeout: float = 600.0,
) -> list[AotReport]:
    """Compile a layer's kernels for an architecture, in a process of its own.

    Args:
      capability: one of `CAPABILITIES`.
      config: the layer; `num_experts` is what one rank holds.
      num_tokens: batch sizes; tiles depend on them.
      scheme, recipe: as in `common.recipes.default_recipe`.
      max_loras, max_lora_rank: adapter slots; 0 compiles without LoRA.
      timeout: seconds.

    Raises:
      ValueError: an unknown capability or scheme.
      RuntimeError: the process failed; its last lines are in the message.
    """
    check_choice("capability", capability, CAPABILITIES)
    tokens = [num_tokens] if isinstance(num_tokens, int) else list(num_tokens)
    default_recipe(recipe, scheme)
    request = {
        "capability": capability,
        "layer": {
            key: getattr(config, key)
            for key in ("num_experts", "experts_per_token", "hidden_dim", "intermediate_size", "activation",
                        "is_act_and_mul", "has_bias")
        },
        "tokens": tokens,
        "scheme": scheme,
        "recipe": recipe,
        "max_loras": max_loras,
        "max_lora_rank": max_lora_rank,
    }  # fmt: skip
    env = dict(os.environ, TRITON_INTERPRET="0")
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.aot", "--request", json.dumps(request)],
        capture_output=True, text=True, timeout=timeout, env=env, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"ahead-of-time compilation failed: {done.stderr[-2000:]}")
    reports = json.loads(done.stdout.splitlines()[-1])
    return [AotReport(**{**r, "kernels": tuple(KernelReport(**k) for k in r["kernels"])}) for r in reports]


def _meta_call(request: dict, tokens: int) -> None:
    """One call of the host path on meta tensors."""
    import torch

    from .moe import fused_moe
    from .prepare import PreparedWeights, empty_slots

    config = FusedMoEConfig(**request["layer"])
    scheme, device = request["scheme"], torch.device("meta")
    experts, hidden, inter, rows = config.num_experts, config.hidden_dim, config.intermediate_size, config.w13_rows
    wdtype = torch.bfloat16 if scheme == "bf16" else torch.uint8

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    blocks = lambda n: -(-n // 128)  # noqa: E731
    halves = rows // inter
    s13, s2 = {
        "block": ((experts, halves * blocks(inter), blocks(hidden)), (experts, blocks(hidden), blocks(inter))),
        "channel": ((experts, rows), (experts, hidden)),
        "tensor": ((experts, rows), (experts, hidden)),
        "bf16": (None, None),
    }[scheme]
    weights = PreparedWeights(
        w13=empty(experts, rows, hidden, dtype=wdtype),
        w2=empty(experts, hidden, inter, dtype=wdtype),
        w13_scale=None if s13 is None else empty(*s13),
        w2_scale=None if s2 is None else empty(*s2),
        w13_bias=empty(experts, rows) if config.has_bias else None,
        w2_bias=empty(experts, hidden) if config.has_bias else None,
    )
    adapters = None
    if request["max_loras"]:
        adapters = empty_slots(
            config, max_loras=request["max_loras"], max_lora_rank=request["max_lora_rank"], device=device
        )
    fused_moe(
        empty(tokens, hidden, dtype=torch.bfloat16),
        empty(tokens, config.experts_per_token),
        empty(tokens, config.experts_per_token, dtype=torch.int32),
        weights,
        activation=config.activation,
        recipe=default_recipe(request["recipe"], scheme),
        adapters=adapters,
        adapter_ids=None if adapters is None else empty(tokens, dtype=torch.int32),
    )


def _compile(launch, capability: int) -> KernelReport:
    """Compile one recorded launch; registers and spills are read from ptxas."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {
        torch.uint8: "*u8", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
        torch.int32: "*i32", torch.int64: "*i64",
    }  # fmt: skip
    constexprs = dict(launch.constexprs)
    signature: dict[str, str] = {}
    attrs: dict[tuple[int, ...], list] = {}
    for i, name in enumerate(launch.kernel.arg_names):
        if name in constexprs:
            signature[name] = "constexpr"
            continue
        value = launch.arguments[name]
        if isinstance(value, torch.Tensor):
            signature[name] = names[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif value == 1:
            # Triton's launcher makes an integer argument of 1 a compile-time constant.
            signature[name], constexprs[name] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attrs[(i,)] = [["tt.divisibility", 16]]
    report = functools.partial(
        KernelReport, launch.kernel.fn.__name__, dict(launch.constexprs), num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    try:
        compiled = triton.compile(
            ASTSource(launch.kernel, signature, constexprs, attrs),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
        )
    except Exception as error:  # every compiler failure becomes a line of the report
        return report(shared_bytes=0, registers=0, spill_bytes=0, error=f"{type(error).__name__}: {error}"[:2000])
    registers, spills = _resources(compiled.asm["cubin"])
    return report(shared_bytes=compiled.metadata.shared, registers=registers, spill_bytes=spills)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of its stack frame, where ptxas puts spills, from a cubin."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text[-500:]}")
    return int(found[1]), int(found[2])


def _run_request(request: dict) -> list[AotReport]:
    from . import _runtime

    if _runtime.INTERPRETED:
        raise RuntimeError("ahead-of-time compilation needs a process with TRITON_INTERPRET=0")
    major, minor = (int(v) for v in request["capability"].split("."))
    reports, cache = [], {}
    for tokens in request["tokens"]:
        with _runtime.recording((major, minor)) as launches:
            _meta_call(request, tokens)
        kernels = []
        for item in launches:
            kinds = tuple(
                getattr(v, "dtype", (v == 1, v % 16 == 0) if isinstance(v, int) else None)
                for v in item.arguments.values()
            )
            constexprs = tuple(sorted(item.constexprs.items()))
            key = (item.kernel.fn.__name__, kinds, constexprs, item.num_warps, item.num_stages)
            if key not in cache:
                cache[key] = _compile(item, major * 10 + minor)
            kernels.append(cache[key])
        limit = _runtime.Target((major, minor)).shared_memory
        name = default_recipe(request["recipe"], request["scheme"]).name
        reports.append(
            AotReport(
                request["capability"], request["scheme"], name, tokens, request["max_loras"],
                request["max_lora_rank"], limit, tuple(kernels),
            )
        )
    return reports


def _table(report: AotReport) -> str:
    lines = [
        f"sm_{report.capability} {report.scheme} {report.recipe} T={report.num_tokens} "
        f"loras={report.max_loras} rank={report.max_lora_rank} (shared limit {report.shared_limit})"
    ]
    for k in report.kernels:
        tile = "x".join(str(k.constexprs[n]) for n in ("BLOCK_M", "BLOCK_N", "BLOCK_R", "BLOCK_K") if n in k.constexprs)
        state = f"shared {k.shared_bytes} regs {k.registers} spill {k.spill_bytes}"
        if k.error:
            state = k.error.splitlines()[0]
        lines.append(f"  {k.kernel:24} {tile:16} warps {k.num_warps} stages {k.num_stages}  {state}")
    return "\n".join(lines)


def _main() -> None:
    parser = argparse.ArgumentParser(description="Compile a layer's CUDA kernels without a GPU.")
    parser.add_argument("--request", help="internal: a JSON request")
    parser.add_argument("--capability", choices=CAPABILITIES, action="append")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 1024, 8192])
    parser.add_argument("--shape", type=int, nargs=4, default=[2048, 768, 128, 8], metavar=("H", "I", "E", "K"))
    parser.add_argument("--scheme", default="block", choices=("block", "channel", "tensor", "bf16"))
    parser.add_argument("--recipe")
    parser.add_argument("--max-loras", type=int, default=0)
    parser.add_argument("--max-lora-rank", type=int, default=0)
    args = parser.parse_args()
    if args.request:
        print(json.dumps([asdict(r) for r in _run_request(json.loads(args.request))]))
        return
    hidden, inter, experts, top_k = args.shape
    config = FusedMoEConfig(experts, top_k, hidden, inter)
    for capability in args.capability or CAPABILITIES:
        for report in aot_compile(
            capability, config, args.tokens, scheme=args.scheme, recipe=args.recipe, max_loras=args.max_loras,
            max_lora_rank=args.max_lora_rank,
        ):  # fmt: skip
            print(_table(report))


if __name__ == "__main__":
    _main()
