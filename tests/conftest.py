# SPDX-License-Identifier: Apache-2.0
"""Settings that must be in place before jax or triton are imported by any test."""

from isomoe.common.interpreters import prepare

prepare()
