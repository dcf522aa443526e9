# SPDX-License-Identifier: Apache-2.0
"""``python -m isomoe``."""

from .common.cli import main

# Worker processes import this module again; only the first may run the command.
if __name__ == "__main__":
    main()
