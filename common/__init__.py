# SPDX-License-Identifier: Apache-2.0
"""Platform-neutral contracts: data, selection, loading and the reference. Needs numpy, ml_dtypes and safetensors."""
