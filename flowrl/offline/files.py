"""The files of a dataset: where they are, what is known of them, and whether they are whole.

A dataset is a directory in Minari's format, which Minari's own library reads and writes: its folder
``data`` holds ``metadata.json`` and ``main_data.hdf5``. Beside it, one that flowrl wrote has a
``manifest.json``, which is written last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import flowrl
from flowrl.core.blocks import write_whole
from flowrl.core.file_sums import check_files, facts_of
from flowrl.errors import SaveError, SettingError, install
from flowrl.rl.spaces import Spaces

DATA = "data"
"""The folder of a dataset that holds what Minari knows of."""
METADATA = "metadata.json"
"""The file in it that says what the episodes are, by Minari's name."""
MAIN = "main_data.hdf5"
"""The file in it that holds the episodes, by Minari's name."""
MANIFEST = "manifest.json"
"""The file that seals a dataset that flowrl wrote: its contents, and the sums of its files."""
BLOCK = 65_536
"""Bytes of each part of a file by which an unsealed dataset is known."""
SPACES, ENV, TOKEN = "flowrl_spaces", "flowrl_env", "flowrl_run"
"""The keys of the metadata under which flowrl notes the spaces, the environment's name, and by what
the run that writes is known."""


def storage() -> Any:
    """Return Minari's class of what reads and writes datasets.

    Raises:
        SettingError: its package, h5py or Pillow is not installed.
    """
    try:
        # Minari imports h5py and Pillow only when it opens a file, and its errors do not name the
        # extra. Pillow is none of the packages that Minari itself asks for.
        import h5py  # noqa: F401
        import PIL  # noqa: F401
        from minari.dataset.minari_storage import MinariStorage
    except ImportError as error:
        raise SettingError(
            f"datasets need a package that is not there ({error}): {install('offline')}"
        ) from None
    return MinariStorage


def located(path: str) -> Path:
    """Return the folder that holds the data of a dataset.

    Args:
        path: the dataset's directory, or the id of one in the user's local store of Minari.

    Raises:
        SaveError: it is neither.
    """
    from minari.storage.datasets_root_dir import get_dataset_path

    store = Path(get_dataset_path(path))
    for place in (Path(path), store):
        for folder in (place / DATA, place):
            if (folder / METADATA).is_file():
                # Minari finds its files again only by a whole path.
                return folder.absolute()
    if (file := Path(path)).is_file():
        whole = (x for x in (file.parent, file.parent.parent) if (x / DATA / METADATA).is_file())
        around = next(whole, file.parent)
        raise SaveError(f"{path} is a file; name the directory of the dataset, such as {around}")
    there = "has no metadata.json" if file.is_dir() else "is not there"
    raise SaveError(
        f"{path} {there}, so it is no dataset, and Minari's local store has none of that name "
        f"({store}); name the directory of one (--set data=DIR), write one with WriteDataset, or "
        f"fetch it with `minari download {path}`"
    )


@contextmanager
def damage(file: Path, what: str = "") -> Iterator[None]:
    """Turn whatever a damaged file makes other libraries raise into an error that names the file.

    Args:
        file: the file.
        what: the place in it, such as ```, episode 3,``.

    Raises:
        SaveError: something was raised.
    """
    try:
        yield
    except SaveError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise SaveError(
            f"{file}{what} can't be read ({reason}): it is damaged, or whatever wrote it was ended "
            "within a write; restore it from a copy, or write the dataset again"
        ) from error


class Files:
    """The files of a dataset that is there, checked against its manifest if it has one.

    A dataset without a manifest is one of Minari's, or one whose run was killed before it could
    seal it: it is read up to its last whole episode, which is what its metadata counts.

    Args:
        path: the dataset's directory, or the id of one in the user's local store of Minari.

    Raises:
        SettingError: the packages of the extra ``offline`` are not installed.
        SaveError: there is no such dataset, it is damaged, or it is empty.
    """

    def __init__(self, path: str) -> None:
        kind = storage()
        self.folder = located(path)
        self.main = self.folder / MAIN
        self.root = self.folder.parent if self.folder.name == DATA else self.folder
        self.manifest = self._verified(self.root)
        """What the manifest says; None without one."""
        metadata = self.folder / METADATA
        with damage(metadata):
            self.facts: dict[str, Any] = kind.read_raw_metadata(self.folder)
        if (written := self.facts.get("data_format", "hdf5")) != "hdf5":
            raise SaveError(
                f"{self.folder} is in Minari's format {written!r}, and only hdf5 is read; write it "
                'again with data_format="hdf5"'
            )
        with damage(metadata):
            self.episodes = int(self.facts["total_episodes"])
            self.minari = kind.read(self.folder)
            self.spaces = self._spaces()
        with damage(self.main):
            known = self.minari.get_episode_metadata(range(self.episodes))
            self.lengths = [int(episode["total_steps"]) for episode in known]
            """The steps of each episode."""
        if not self.steps:
            raise SaveError(f"{metadata}: the dataset is empty, it has no whole episode; write it")

    def _verified(self, root: Path) -> dict[str, Any] | None:
        """Return the manifest, after checking each file against it; None if there is none.

        Raises:
            SaveError: the manifest is damaged, or a file is not what it says.
        """
        file = root / MANIFEST
        if not file.is_file():
            return None
        try:
            manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            sums = dict(manifest["files"])
        except (ValueError, KeyError, TypeError):
            raise SaveError(f"{file} is damaged: it is not the JSON that was written") from None
        check_files(root, sums, MANIFEST, ", or write the dataset again")
        return manifest

    def _spaces(self) -> Spaces:
        """Return the spaces: as flowrl noted them, or else as Minari reads them."""
        if SPACES in self.facts:
            return Spaces.from_json(self.facts[SPACES])
        return Spaces(self.minari.observation_space, self.minari.action_space)

    @property
    def env(self) -> str:
        """The name of the environment; empty if the dataset has none."""
        if self.facts.get(ENV):
            return str(self.facts[ENV])
        spec = self.facts.get("env_spec")
        return str(json.loads(spec).get("id", "")) if isinstance(spec, str) else ""

    @cached_property
    def sum(self) -> str:
        """What distinguishes its contents from those of another dataset with as many steps.

        It is the SHA-256 sum of the file of episodes if the dataset is sealed, and else that of 64
        parts of it, for a dataset of Minari may be too large to be read as a whole at each start.
        """
        if self.manifest is not None:
            name = self.main.relative_to(self.root).as_posix()
            return str(self.manifest["files"][name]["sha256"])
        size, digest = self.main.stat().st_size, hashlib.sha256()
        with self.main.open("rb") as file:
            for part in range(64):
                file.seek(size * part // 64)
                digest.update(file.read(min(BLOCK, size)))
        return digest.hexdigest()

    @property
    def steps(self) -> int:
        """The steps of all episodes together."""
        return sum(self.lengths)


def seal(root: Path, facts: dict[str, Any]) -> None:
    """Write the manifest of a dataset, last and in one atomic step.

    Args:
        root: the directory of the dataset.
        facts: what the manifest says beside the sums of the files.
    """
    found = sorted(path for path in (root / DATA).rglob("*") if path.is_file())
    files = {path.relative_to(root).as_posix(): facts_of(path) for path in found}
    text = json.dumps({"flowrl": flowrl.__version__, **facts, "files": files}, indent=1) + "\n"
    # It gets its name when it is on disk, because its presence means a whole dataset.
    write_whole(root / MANIFEST, text.encode())
