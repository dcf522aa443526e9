#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds an environment in which tests/integration/test_tpu_*.py run, on a machine without a TPU.
#
#   tests/integration/setup_tpu_env.sh FOLDER        about 8 GB; PYTHON=... picks the interpreter (3.11 or 3.12)
#   FOLDER/bin/python -m pytest tests/integration
set -eu

folder=${1:?usage: setup_tpu_env.sh FOLDER}
root=$(cd "$(dirname "$0")/../.." && pwd)
"${PYTHON:-python3}" -m venv "$folder"
install() {
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$root/constraints-integration-tpu.txt" "$@"
}

# Their own requirements name CUDA, cloud and one another's older versions: install them alone.
install --no-deps vllm tpu-inference xgrammar apache-tvm-ffi
# torchax needs torch below 2.12.
install torch torchvision
install jax jaxlib libtpu flax torchax qwix tpu-info pathwaysutils
# What vLLM's and tpu-inference's modules import.
install aiohttp anthropic blake3 cachetools cbor2 cloudpickle compressed-tensors depyf einops fastapi ijson jsonschema \
    lark llguidance lm-format-enforcer mcp mistral_common model-hosting-container-standards msgspec ninja numba openai \
    openai-harmony opencv-python-headless opentelemetry-api opentelemetry-exporter-otlp opentelemetry-sdk \
    opentelemetry-semantic-conventions-ai outlines_core partial-json-parser pillow prometheus-fastapi-instrumentator \
    prometheus_client protobuf psutil py-cpuinfo pybase64 pydantic python-json-logger pyyaml pyzmq regex requests \
    sentencepiece setproctitle tiktoken tokenizers tqdm transformers watchfiles zstandard
# This package, and what its tests use.
install accelerate ml_dtypes numpy peft pytest pytest-timeout rich safetensors setuptools typer wheel
install --no-deps --no-build-isolation --editable "$root"
