"""`Writer`: makes episodes of rollouts, and writes each to disk when it ends."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.core.items import Batch
from flowrl.core.keeping import Keeping
from flowrl.core.trees import fields_of, tree_of
from flowrl.errors import SaveError
from flowrl.offline.files import (
    DATA,
    ENV,
    MAIN,
    MANIFEST,
    METADATA,
    SPACES,
    TOKEN,
    damage,
    seal,
    storage,
)
from flowrl.rl.spaces import Spaces

if TYPE_CHECKING:
    from flowrl.offline.writing import DatasetWriter

Array = np.ndarray[Any, Any]


@dataclass
class Open:
    """An episode that goes on: what came of it so far.

    Args:
        rows: its rows by field, in pieces as rollouts brought them.
        final: the observation after the last row, by field.
        next_step: the number of the environment's step with which it goes on.
    """

    rows: dict[str, list[Array]]
    final: dict[str, Array]
    next_step: int


class Writer(Keeping):
    """Makes episodes of rollouts, and writes each to disk when it ends.

    The directory is made with the first episode. When the writer is closed, episodes that go on are
    written as ones that were cut short, and the manifest seals the dataset.

    Args:
        spec: the settings of the dataset.
        spaces: those of the environment.
        env: the name of the environment; empty if that is not known.
    """

    lasting = ("open", "added", "episodes", "steps", "cut", "token")
    remade = ("spec", "spaces", "env", "root", "_storage")

    def __init__(self, spec: DatasetWriter, spaces: Spaces, env: str) -> None:
        self.spec, self.spaces, self.env = spec, spaces, env
        # Minari finds its files again only by a whole path.
        self.root = Path(spec.path).absolute()
        storage()
        self.open: dict[int, Open] = {}
        """By the number of the environment: its episode."""
        self.added = 0
        """Steps that came, without masked rows."""
        self.episodes = self.steps = 0
        """What is written, in episodes and in their steps."""
        self.cut: list[int] = []
        """The episodes whose ends are not those of the environment."""
        self.token = uuid.uuid4().hex
        """By what the directory is known as that of this run."""
        self._storage: Any = None
        """What writes, once the directory is there."""

    # -- episodes of rollouts

    def add(self, batch: Batch) -> dict[str, int]:
        """Add rollouts ``[T, B]``, and write the episodes that ended.

        Returns:
            How many steps came, are written and are held so far.
        """
        fields = self._fields(batch)
        columns = {name: np.asarray(x) for name, x in batch.columns.items()}
        ended: list[Mapping[str, Array]] = []
        for column, env in enumerate(columns["env"].tolist()):
            rows = {name: x[:, column] for name, x in fields.items()}
            final = {
                part.name: columns[f"bootstrap_{part.name}"][column] for part in self.spaces.parts
            }
            ended += self._add_column(env, rows, final, int(columns["first"][column]))
        self._write(ended)
        self.added += int(fields["valid"].sum())
        held = sum(_length(episode) for episode in self.open.values())
        return {"added": self.added, "written": self.steps, "held": held}

    def _fields(self, batch: Batch) -> dict[str, Array]:
        """Return the fields ``[T, B, ...]`` that an episode has, actions as the environment's."""
        data = {name: np.asarray(x) for name, x in batch.data.items()}
        steps, columns = batch.shape
        flat = data["action"].reshape(steps * columns, *data["action"].shape[2:])
        actions = fields_of("action", self.spaces.head.to_env(flat))
        names = [part.name for part in self.spaces.parts]
        return {
            **{name: data[name] for name in (*names, "reward", "terminated", "truncated", "valid")},
            **{name: x.reshape(steps, columns, *x.shape[1:]) for name, x in actions.items()},
        }

    def _add_column(
        self, env: int, rows: dict[str, Array], final: dict[str, Array], first: int
    ) -> Iterator[Mapping[str, Array]]:
        """Add the rollout of one environment, and yield the episodes that ended.

        Args:
            env: the environment's number.
            rows: ``[T, ...]`` by field.
            final: the observation after the last row.
            first: the steps that the environment had taken before the first row.
        """
        if env in self.open and self.open[env].next_step != first:
            # A rollout is missing, or the environment was restarted: it was cut short there.
            yield self._ended(env, cut=True)
        valid, over = rows["valid"].astype(bool), rows["terminated"] | rows["truncated"]
        length, begin = len(valid), 0
        for stop in np.flatnonzero(over & valid).tolist():
            # The row after an end holds the final observation.
            last = stop + 1 < length
            after = {name: rows[name][stop + 1] if last else x for name, x in final.items()}
            self._extend(env, rows, slice(begin, stop + 1), after, first + stop + 1)
            yield self._ended(env)
            begin = stop + 1
        if valid[begin:].any():
            self._extend(env, rows, slice(begin, length), final, first + length)

    def _extend(
        self,
        env: int,
        rows: dict[str, Array],
        where: slice,
        final: dict[str, Array],
        next_step: int,
    ) -> None:
        """Add the valid ones of some rows to the episode of an environment."""
        valid = rows["valid"][where].astype(bool)
        kept = {name: x[where][valid] for name, x in rows.items() if name != "valid"}
        episode = self.open.setdefault(env, Open({name: [] for name in kept}, {}, 0))
        for name, x in kept.items():
            episode.rows[name].append(x)
        episode.final, episode.next_step = final, next_step

    def _ended(self, env: int, *, cut: bool = False) -> Mapping[str, Array]:
        """Take the episode of an environment out, and return its fields.

        Args:
            env: the environment's number.
            cut: whether it is cut short here, and has no end of its own.
        """
        episode = self.open.pop(env)
        fields = {name: np.concatenate(pieces) for name, pieces in episode.rows.items()}
        for name, x in episode.final.items():
            fields[name] = np.concatenate([fields[name], x[None]])
        if cut:
            fields["truncated"][-1] = True
            fields["cut"] = np.ones(1, bool)
        return fields

    # -- files

    def _write(self, ended: list[Mapping[str, Array]]) -> None:
        """Write episodes."""
        if not ended:
            return
        if self._storage is None:
            self._storage = self._made()
        for number, fields in enumerate(ended, self.episodes):
            if "cut" in fields:
                self.cut.append(number)
        try:
            self._storage.update_episodes([self._buffer(fields) for fields in ended])
        except OSError as error:
            raise SaveError(
                f"{self.root / DATA / MAIN} can't be written: {error}; make space on the disk, "
                "or write the dataset to another one"
            ) from error
        self.episodes += len(ended)
        self.steps += sum(len(fields["reward"]) for fields in ended)

    def _buffer(self, fields: Mapping[str, Array]) -> Any:
        """Return an episode as Minari takes it."""
        from minari.data_collector.episode_buffer import EpisodeBuffer

        obs = {part.name: fields[part.name].astype(part.declared) for part in self.spaces.parts}
        return EpisodeBuffer(
            observations=self.spaces.tree(obs),
            actions=tree_of("action", fields),
            rewards=fields["reward"],
            terminations=fields["terminated"],
            truncations=fields["truncated"],
        )

    def _made(self) -> Any:
        """Make the directory, and return what writes into it.

        Raises:
            SaveError: it is there already, and is not of this run.
        """
        folder, spaces = self.root / DATA, self.spaces
        if self._is_mine():
            return storage().read(folder)
        if self.root.exists():
            raise SaveError(
                f"{self.root} exists already; give the dataset a new path, or remove what is there"
            )
        folder.mkdir(parents=True)
        # JPEG would not give back the same pictures.
        made = storage().new(folder, spaces.obs, spaces.action, None, jpeg_encoding=False)
        facts = {SPACES: spaces.json, ENV: self.env, TOKEN: self.token, **_env_spec(self.env)}
        made.update_metadata({**facts, **_names(self.root)})
        return made

    def _is_mine(self) -> bool:
        """Return whether the directory is there and of this run."""
        metadata = self.root / DATA / METADATA
        if not metadata.is_file():
            return False
        with damage(metadata):
            return bool(json.loads(metadata.read_text("utf-8")).get(TOKEN) == self.token)

    def take(self, state: Any) -> None:
        """Go on where it was: what was written since is removed.

        Raises:
            SaveError: the dataset is not there, or is damaged.
        """
        super().take(state)
        if self._is_mine():
            (self.root / MANIFEST).unlink(missing_ok=True)
            self._cut_files()
        elif self.episodes:
            raise SaveError(
                f"{self.root}: the dataset that the run wrote is not there; restore it from a copy"
            )

    def _cut_files(self) -> None:
        """Remove the episodes that were written after the run was kept.

        Raises:
            SaveError: the files can't be read, or hold fewer episodes.
        """
        import h5py

        metadata, main = self.root / DATA / METADATA, self.root / DATA / MAIN
        with damage(main):
            facts = json.loads(metadata.read_text(encoding="utf-8"))
            with h5py.File(main, "a", track_order=True) as file:
                found = len(file)
                for number in range(self.episodes, found):
                    del file[f"episode_{number}"]
        if found < self.episodes:
            raise SaveError(
                f"{main} holds {found} episodes, and held {self.episodes} when the run was kept; "
                "restore it from a copy"
            )
        facts |= {"total_episodes": self.episodes, "total_steps": self.steps}
        metadata.write_text(json.dumps(facts), encoding="utf-8")

    def close(self) -> None:
        """Write the episodes that go on as ones that were cut short, and seal the dataset."""
        self._write([self._ended(env, cut=True) for env in sorted(self.open)])
        if self.episodes:
            facts = {"env": self.env, "spaces": json.loads(self.spaces.json)}
            counts = {"episodes": self.episodes, "steps": self.steps, "cut_episodes": self.cut}
            seal(self.root, {**facts, **counts})


def _length(episode: Open) -> int:
    return sum(len(piece) for piece in episode.rows["reward"])


def _names(root: Path) -> dict[str, str]:
    """Return what Minari's metadata say of any dataset: an id, and the version that wrote it."""
    from minari import __version__

    # Minari takes no other letters.
    name = re.sub(r"[^-\w]", "-", root.name)
    return {"dataset_id": f"{name}-v0", "minari_version": __version__}


def _env_spec(env: str) -> dict[str, str]:
    """Return the entry of Gymnasium's specification of an environment, if it has one."""
    import gymnasium as gym

    spec = gym.registry.get(env)
    try:
        return {} if spec is None else {"env_spec": spec.to_json()}
    except TypeError:
        # Keyword arguments of its registration may be of any kind.
        return {}
