# SPDX-License-Identifier: Apache-2.0
"""Public reports that no test of this folder stands for, and why: they cannot apply here, or another suite has them."""

from __future__ import annotations

_DEVICE_OFFSETS = (
    "needs more than 2^31 elements, hence a device: kernels index by int64 (cuda_impl), and benchmarks/cuda_smoke.py "
    "runs production sizes"
)
_NVFP4 = "NVFP4 weights: this package reads FP8 and bfloat16 experts only"
_MXFP8 = "MXFP8 and AITER kernels: neither is in this package; ROCm gets a table of reasons"
_GRAPHS = (
    "capture of CUDA graphs needs a device: benchmarks/cuda_smoke.py replays one over a change of adapters"
)
_SPEED = (
    "a change of speed in vLLM's own LoRA kernels; its kernels are not used, and interpreted times say nothing"
)
_SHARED = "shared experts and their all-reduce stay with the model; this layer holds routed experts only"
_AOT = "an ahead-of-time compile for real topologies: tests/test_tpu_aot.py compiles production layers"
_RACES = "remote copies between chips: tests/test_tpu_kernel.py runs the race detector, in both DMA modes"
_PACKAGING = (
    "packaging of compiled wheels: this one is pure Python; tests/test_packaging.py builds and inspects it"
)
_WISH = "a request for a feature of a server, not a fault of a layer"

ELSEWHERE: dict[str, str] = {
    "Liger-Kernel#1296": _DEVICE_OFFSETS,
    "Liger-Kernel#1248": _DEVICE_OFFSETS,
    "Liger-Kernel#1246": _DEVICE_OFFSETS,
    "megablocks#185": _DEVICE_OFFSETS,
    "megablocks#186": _DEVICE_OFFSETS,
    "DLBlas#171": "a backward pass: this package has inference only",
    "Sparse-vLLM#15": "a late report of an illegal access on a device: CUDA_LAUNCH_BLOCKING=1 is the tool for it",
    "miles#1559": _SHARED,
    "DeepGEMM#237": "K-grouped products serve training; no kernel here groups along K",
    "DeepGEMM#405": "K-grouped products serve training; no kernel here groups along K",
    "DeepGEMM#362": "speed on MXFP8; what is slow here is measured natively by `isomoe bench --cuda`",
    "flashinfer#1781": _PACKAGING,
    "flashinfer#1904": _PACKAGING,
    "flashinfer#1352": _PACKAGING,
    "torchao#2919": _PACKAGING,
    "vllm#34421": _NVFP4,
    "vllm#42629": _NVFP4,
    "vllm#34256": "tuned tile configurations of vLLM's Triton kernel, which is not used",
    "vllm#35457": "tuned tile configurations of vLLM's Triton kernel, which is not used",
    "vllm#46184": _MXFP8,
    "vllm#49747": _MXFP8,
    **dict.fromkeys(
        (
            "vllm#32317",
            "vllm#32655",
            "vllm#32711",
            "vllm#31354",
            "vllm#32195",
            "vllm#27402",
            "vllm#42290",
            "vllm#42757",
            "vllm#34933",
            "vllm#39230",
        ),
        _SPEED,
    ),
    "vllm#41899": _WISH,
    "vllm#20161": _WISH,
    "vllm#20650": _WISH,
    **dict.fromkeys(
        ("flashinfer#3107", "flashinfer#3108", "flashinfer#3109", "flashinfer#3153", "flashinfer#3987"), _WISH
    ),
    **dict.fromkeys(
        (
            "sglang#29874",
            "sglang#32584",
            "sglang#28953",
            "sglang#28466",
            "sglang#26602",
            "sglang#38649",
            "sglang#9897",
            "sglang#14105",
            "sglang#19711",
            "sglang#21647",
        ),
        _GRAPHS,
    ),
    "tpu-inference#1342": _RACES,
    "tpu-inference#2422": _AOT,
    "tpu-inference#2550": _AOT,
    "tpu-inference#2683": _AOT,
    "tpu-inference#2849": _SHARED,
    "tpu-inference#3435": _SHARED,
    "tpu-inference#2471": "missing operators of the server's LoRA wrapper: adapters here do not pass through it",
    "b/530647244": "a mesh of six axes: tests/test_tpu_kernel.py runs any mesh rank",
    "sglang-jax#1024": _RACES,
    "sglang-jax#1358": _AOT,
    "sglang-jax#1307": _AOT,
    "sglang-jax#1318": _SHARED,
    "sglang-jax#1321": _SHARED,
    "sglang-jax#1322": _SHARED,
    "sglang-jax#931": "speed of another transport; a model of the links chooses the one used here",
    "jax#39744": "a fault of one libtpu; optional operands are absent from a program here, never unused in it",
    "jax#33260": "a gap of the emulator: kernels are also compiled ahead of time, which sees what it does not",
    "tpu-inference warm-up deadlock under TP": "rows replicated over TP ranks: this kernel splits experts only",
    "tokamax capacity 64 and 256": _AOT,
}
