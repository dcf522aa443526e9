# SPDX-License-Identifier: Apache-2.0
"""What vLLM sees of this package on CUDA: selection, experts classes, and its adapters' buffers."""
