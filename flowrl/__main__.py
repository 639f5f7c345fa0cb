"""Entry point of ``python -m flowrl``."""

import sys

from flowrl.cli.main import main

# Importing it runs nothing: a graph's text may name any module of flowrl's own.
if __name__ == "__main__":
    sys.exit(main())
