# SPDX-License-Identifier: Apache-2.0
"""``python -m isomoe``."""

from .common.cli import main

main()
