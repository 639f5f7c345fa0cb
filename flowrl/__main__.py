"""Entry point of ``python -m flowrl``."""

import sys

from flowrl.cli.main import main

sys.exit(main())
