"""`Blocks`: bytes on disk under their SHA-256 sums, so that what did not change is kept once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.encoding import Put
from flowrl.errors import SaveError

SMALL = 1 << 16
"""Arrays of fewer bytes share one block, for each file costs a fraction of a millisecond."""
BLOCK = 1 << 20
"""The bytes of a block of a larger array, if that makes no more than `MOST_BLOCKS`."""
MOST_BLOCKS = 256
ALIGNED = 64
"""Arrays in a shared block begin at multiples of this many bytes."""


class Blocks:
    """A folder of files that are named by what they hold.

    Args:
        folder: the folder, which is made with the first block.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.good: set[str] = set()
        """The blocks that this process wrote, or read and found to be as they were written."""

    def path(self, name: str) -> Path:
        """Return the file of a block.

        Raises:
            ValueError: it is no name of a block.
        """
        if len(name) != 64 or not set(name) <= set("0123456789abcdef"):
            raise ValueError(f"a block named {name!r}")
        return self.folder / name[:2] / name

    def put(self, data: memoryview | bytes) -> str:
        """Write bytes unless they are there already, and return their name.

        Raises:
            OSError: they can't be written.
        """
        name = hashlib.sha256(data).hexdigest()
        if name not in self.good:
            path = self.path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
            self.good.add(name)
        return name

    def get(self, name: str, size: int) -> bytes:
        """Return the bytes of a block.

        Raises:
            SaveError: the file is missing or damaged.
        """
        path = self.path(name)
        try:
            # Its size first, so that a file that is too large takes no memory.
            found = path.stat().st_size
            data = path.read_bytes() if found == size else b""
        except OSError as error:
            raise SaveError(f"{path} can't be read: {error.strerror}") from None
        if found != size or hashlib.sha256(data).hexdigest() != name:
            raise SaveError(f"{path} is not what was written: its size or SHA-256 sum differs")
        self.good.add(name)
        return data

    def names(self) -> Iterator[str]:
        """Yield the names of all blocks."""
        for path in self.folder.glob("??/*"):
            if len(path.name) == 64:
                yield path.name

    def keep_only(self, wanted: Collection[str]) -> None:
        """Remove all other blocks, and drafts of blocks."""
        for path in list(self.folder.glob("??/*")):
            if path.name not in wanted:
                path.unlink(missing_ok=True)
        self.good &= set(wanted)


def write_whole(path: Path, data: memoryview | bytes) -> None:
    """Write a file so that it is there with all of its bytes, or not at all.

    Raises:
        OSError: it can't be written.
    """
    draft = path.with_name(f"{path.name}.draft")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


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
        self.put: Put = self._put

    def _put(self, x: np.ndarray[Any, Any]) -> Any:
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
        self.sizes = sizes
        self.small = blocks.get(small, sizes[small])

    def get(self, at: Any, size: int) -> bytes:
        """Return the bytes of an array.

        Raises:
            SaveError: a block is missing or damaged.
            ValueError: they are not as many as they should be.
        """
        if isinstance(at, int):
            data = self.small[at : at + size]
        elif sum(self.sizes[name] for name in at) == size:
            data = b"".join(self.blocks.get(name, self.sizes[name]) for name in at)
        else:
            data = b""
        if len(data) != size:
            raise ValueError(f"{len(data)} bytes of an array where {size} are wanted")
        return data
