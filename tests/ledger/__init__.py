# SPDX-License-Identifier: Apache-2.0
"""Public reports of what broke elsewhere, each as a test named after it. `docs/ledger.md` lists them all."""
