#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds an environment in which tests below tests/integration run, on a machine without a TPU or a GPU.
#
#   tests/integration/setup_env.sh LEG FOLDER      PYTHON=... picks the interpreter (3.11 or 3.12)
#
# LEG is one of
#   tpu     vLLM 0.26.0 and tpu-inference 0.26.0; 8 GB, most of it the CUDA libraries that torch 2.11 brings
#   vllm    vLLM 0.33.0; 4 GB
#
# `make test-integration` builds both and runs their tests.
set -eu

usage="usage: setup_env.sh tpu|vllm FOLDER"
leg=${1:?$usage}
folder=${2:?$usage}
root=$(cd "$(dirname "$0")/../.." && pwd)

# Serving packages' own requirements name CUDA, cloud and one another's older versions: `alone` is installed without.
# `build` decides which torch everything else finds.
case $leg in
tpu)
    alone="vllm tpu-inference"
    build="torch torchvision"
    more="jax jaxlib libtpu flax torchax qwix tpu-info pathwaysutils peft accelerate"
    ;;
vllm)
    alone="vllm triton"
    build="torch"
    more=""
    ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac

"${PYTHON:-python3}" -m venv "$folder"
install() {
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$root/constraints-integration-$leg.txt" "$@"
}

# shellcheck disable=SC2086 # lists of words
{
    install --no-deps $alone xgrammar apache-tvm-ffi
    install $build
    # What vLLM's and tpu-inference's modules import, then what this package and its tests use.
    install $more aiohttp anthropic blake3 cachetools cbor2 cloudpickle compressed-tensors depyf einops fastapi ijson \
        jsonschema lark llguidance lm-format-enforcer mcp mistral_common model-hosting-container-standards msgspec \
        ninja numba openai openai-harmony opencv-python-headless opentelemetry-api opentelemetry-exporter-otlp \
        opentelemetry-sdk opentelemetry-semantic-conventions-ai outlines_core partial-json-parser pillow \
        prometheus-fastapi-instrumentator prometheus_client protobuf psutil py-cpuinfo pybase64 pydantic \
        python-json-logger pyyaml pyzmq regex requests sentencepiece setproctitle tiktoken tokenizers tqdm \
        transformers uvloop watchfiles zstandard \
        ml_dtypes numpy pytest pytest-timeout rich safetensors setuptools typer wheel
}
install --no-deps --no-build-isolation --editable "$root"
