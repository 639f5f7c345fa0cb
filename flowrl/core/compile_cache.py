"""What XLA compiled is kept in the user's cache folder, so that a second process starts quickly."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

MOST_BYTES = 1_000_000_000
"""The size beyond which the files that were used least recently are removed."""
KEPT_BYTES = 800_000_000
"""The size down to which they are removed."""
PAUSE = 3600.0
"""Seconds from one look at the size to the next, of all processes together."""
ENDINGS = ("-cache", "-atime")
"""How the names of JAX's files end: a program, and when it was used last."""
STAMP = "last-look"
"""The file whose time is that of the last look."""


@cache
def use_compile_cache() -> None:
    """Let JAX keep what it compiles in `cache_folder`, unless the user chose a folder or none.

    ``JAX_COMPILATION_CACHE_DIR`` names another folder, which is left alone, and
    ``JAX_ENABLE_COMPILATION_CACHE=false`` switches it off.
    """
    # Another process may be writing what this one reads: JAX then compiles it here, and warns.
    warnings.filterwarnings(
        "ignore", "Error reading persistent compilation cache entry", UserWarning
    )
    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a user without a home directory is the latter
        # Without a folder to write to every process compiles for itself, as without flowrl.
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # To read a file takes a few milliseconds, less than the smallest function to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX looks at these once, which it has done if anything was compiled before.
    compilation_cache.reset_cache()
    # A folder that another process removes files from at the same time is no reason to fail.
    with suppress(OSError):
        prune(folder.parent)


def cache_folder() -> Path:
    """Return the folder for this version of JAX and this kind of processor.

    Several machines may share a home directory, and what is compiled for one processor may not run
    on another.
    """
    machine = hashlib.sha256(_processor().encode()).hexdigest()[:8]
    return users_cache() / "compiled" / f"jax-{jax.__version__}-{platform.machine()}-{machine}"


def users_cache() -> Path:
    """Return flowrl's folder in the user's cache folder."""
    home = Path.home()
    if sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "flowrl"


def _processor() -> str:
    """Return what distinguishes processors that can't run each other's programs."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def prune(folder: Path, most: int = MOST_BYTES, kept: int = KEPT_BYTES) -> None:
    """Remove the programs that were used least recently from a folder that has grown too large.

    It looks at the size once in `PAUSE` seconds only. It touches no file but those of JAX's cache:
    a folder that is not what a variable was thought to name loses nothing.

    Args:
        folder: of all versions and processors.
        most: the size in bytes from which on files are removed.
        kept: the size in bytes down to which they are removed.
    """
    stamp = folder / STAMP
    # A look in the future is one before the machine's clock was set back.
    if stamp.exists() and 0.0 <= time.time() - stamp.stat().st_mtime < PAUSE:
        return
    stamp.touch()
    found = []
    for path in folder.rglob("*"):
        # Another process may have removed it meanwhile.
        with suppress(OSError):
            if path.name.endswith(ENDINGS) and path.is_file():
                facts = path.stat()
                found.append((max(facts.st_atime, facts.st_mtime), facts.st_size, path))
    size = sum(file_size for _, file_size, _ in found)
    if size <= most:
        return
    for _, file_size, path in sorted(found):
        if size <= kept:
            break
        with suppress(OSError):
            path.unlink()
        size -= file_size
