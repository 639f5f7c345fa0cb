"""`Blocks`: bytes on disk under their SHA-256 sums, so that what did not change is kept once."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.encoding import whole
from flowrl.errors import SaveError

SMALL = 1 << 16
"""Arrays of fewer bytes share one block, for each file costs a fraction of a millisecond."""
BLOCK = 1 << 20
"""The bytes of a block of a larger array, if that makes no more than `MOST_BLOCKS`."""
MOST_BLOCKS = 256
ALIGNED = 64
"""Arrays in a shared block begin at multiples of this many bytes."""
NAME = re.compile(r"[0-9a-f]{64}")
"""How blocks are named."""


class Blocks:
    """A folder of files that are named by what they hold.

    Args:
        folder: the folder, which is made with the first block.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: set[str] = set()
        """The blocks that this process wrote. No other is believed to be whole."""

    def put(self, data: memoryview | bytes) -> str:
        """Write bytes unless this process wrote the same ones, and return their name.

        Before anything that names blocks is written, `sync` is to be called on the folder.

        Raises:
            OSError: they can't be written.
        """
        name = hashlib.sha256(data).hexdigest()
        path = self.folder / name
        # Someone may have removed it since.
        if name not in self.written or _size(path) != len(data):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
            self.written.add(name)
        return name

    def get(self, name: str, into: memoryview) -> None:
        """Read a block.

        Args:
            name: the name of the block.
            into: takes its bytes, all of them.

        Raises:
            SaveError: the file is missing or damaged.
        """
        with self.open(name, len(into)) as file:
            number = file.readinto(into)
        if number != len(into) or hashlib.sha256(into).hexdigest() != name:
            raise SaveError(
                f"{self.folder / name} is not what was written: its SHA-256 sum differs"
            )

    def open(self, name: str, size: int) -> BufferedReader:
        """Open a block for reading.

        Raises:
            SaveError: the file is missing, or has another size.
            ValueError: it is no name of a block; it may be a path that leads out of the folder.
        """
        if not NAME.fullmatch(name):
            raise ValueError(f"a block named {name[:80]!r}")
        return open_regular(self.folder / name, size)

    def keep_only(self, wanted: Collection[str]) -> None:
        """Remove all other blocks, and what is left of blocks that were never whole."""
        for path in [*self.folder.glob("*")]:
            is_ours = NAME.fullmatch(path.name.removesuffix(DRAFT))
            if is_ours and path.name not in wanted:
                path.unlink(missing_ok=True)
        self.written &= set(wanted)


DRAFT = ".draft"
"""The end of the name of a file that is not whole yet."""


def write_whole(path: Path, data: memoryview | bytes) -> None:
    """Write a file so that it is there with all of its bytes, or not at all.

    Raises:
        OSError: it can't be written.
    """
    draft = path.with_name(f"{path.name}{DRAFT}")
    draft.unlink(missing_ok=True)
    try:
        # A new file: a link of this name might lead anywhere.
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def sync(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk, too.

    Raises:
        OSError: the disk fails.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def open_regular(path: Path, size: int | None = None) -> BufferedReader:
    """Open a file for reading that is no pipe and no device, which might never end.

    Args:
        path: of the file.
        size: the number of its bytes; None: any (default None).

    Raises:
        SaveError: it is missing, has another size, or can't be read.
    """
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise SaveError(f"{path} is no regular file")
        if size not in (None, facts.st_size):
            raise SaveError(
                f"{path} is not what was written: it has {facts.st_size} bytes, and {size} were "
                "written"
            )
        return path.open("rb")
    except OSError as error:
        raise SaveError(f"{path} can't be read: {error.strerror}") from None


def _size(path: Path) -> int:
    """Return the bytes of a file; -1 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


class Packer:
    """Takes arrays for one snapshot: the small ones together, the large ones apart.

    Args:
        blocks: where they are put.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.small = bytearray()
        self.sizes: dict[str, int] = {}
        """The bytes of each block that is used."""

    def put(self, x: np.ndarray[Any, Any]) -> Any:
        """Put an array, and return where it is: a place among the small ones, or its blocks."""
        data = memoryview(x.reshape(-1).view(np.uint8).data)
        if x.nbytes < SMALL:
            at = len(self.small)
            self.small += data
            self.small += bytes(-len(self.small) % ALIGNED)
            return at
        size = max(BLOCK, -(-x.nbytes // MOST_BLOCKS))
        return [self._block(data[i : i + size]) for i in range(0, x.nbytes, size)]

    def _block(self, data: memoryview | bytes) -> str:
        name = self.blocks.put(data)
        self.sizes[name] = len(data)
        return name

    def end(self) -> str:
        """Put the small arrays, and return the name of their block."""
        return self._block(bytes(self.small))


class Unpacker:
    """Gives back what a `Packer` took.

    Args:
        blocks: where it was put.
        small: the block of the small arrays.
        sizes: the bytes of each block.
    """

    def __init__(self, blocks: Blocks, small: str, sizes: Mapping[str, int]) -> None:
        self.blocks = blocks
        self.sizes = {name: whole(size) for name, size in sizes.items()}
        self.small = self._joined([small], self.sizes[small])

    def get(self, at: Any, size: int) -> bytearray:
        """Return the bytes of an array.

        Raises:
            SaveError: a block is missing or damaged.
            ValueError: they are not as many as they should be.
        """
        if type(at) is list:
            return self._joined(at, size)
        data = self.small[whole(at) : at + size]
        if len(data) != size:
            raise _too_few(len(data), size)
        return data

    def _joined(self, names: list[str], size: int) -> bytearray:
        """Return the bytes of some blocks."""
        found = sum(self.sizes[name] for name in names)
        if found != size or len(names) > MOST_BLOCKS:
            raise _too_few(found, size)
        # Memory is taken only for files that are there with so many bytes.
        for name in {*names}:
            self.blocks.open(name, self.sizes[name]).close()
        data = bytearray(size)
        begin = 0
        for name in names:
            end = begin + self.sizes[name]
            self.blocks.get(name, memoryview(data)[begin:end])
            begin = end
        return data


def _too_few(found: int, wanted: int) -> ValueError:
    return ValueError(f"{found} bytes of an array where {wanted} are wanted")
