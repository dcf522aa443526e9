# SPDX-License-Identifier: Apache-2.0
"""The tpu-inference integration. Modules here import torch, jax, vllm and tpu_inference at their top; only the plugin
entry point imports them."""
