"""What MuJoCo warns of goes through `logging`, each text once.

By itself MuJoCo prints a warning for every environment that is made, and writes it into a file
``MUJOCO_LOG.TXT`` in the folder of the process.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from flowrl.core.logs import log as log_line


def take_warnings(*, needed: bool) -> None:
    """Take what MuJoCo warns of from now on, if it is there.

    Args:
        needed: whether an environment in MuJoCo is about to be made; else it is only looked for
            among what was imported.
    """
    if needed:
        # Where it is missing, making the environment raises an error with the way out.
        with suppress(ImportError):
            importlib.import_module("mujoco")
    mujoco = sys.modules.get("mujoco")
    # A user's own function for warnings stays.
    if mujoco is not None and mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_once())


def _once() -> Callable[[str], None]:
    """Return a function that logs each text at its first call with it."""

    @cache
    def log(text: str) -> None:
        # Who runs an environment can do nothing about the age of the model that came with it.
        level = logging.INFO if "is deprecated" in text else logging.WARNING
        log_line(f"MuJoCo: {text}", level)

    return log
