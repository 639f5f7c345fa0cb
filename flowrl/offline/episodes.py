"""Episodes as a dataset holds them, brought to the arrays that batches have, and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.errors import SaveError
from flowrl.offline.files import Files, damage
from flowrl.rl.actions import leaves
from flowrl.rl.spaces import Spaces

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Episode:
    """One whole episode of L steps.

    Args:
        obs: observations by the names of fields, ``[L + 1, ...]`` with the final one.
        action: ``[L]`` or ``[L, width]``, as a policy makes them.
        reward: ``float32[L]``.
        terminated: whether it ended by itself; if not, it was cut short.
    """

    obs: dict[str, Array]
    action: Array
    reward: Array
    terminated: bool

    def __len__(self) -> int:
        return int(self.reward.shape[0])


def read_episodes(files: Files, spaces: Spaces, indices: Sequence[int]) -> Iterator[Episode]:
    """Yield episodes of a dataset, each checked.

    Args:
        files: the dataset.
        spaces: those of the environment.
        indices: of the episodes.

    Raises:
        SaveError: an episode is damaged or breaks the spaces; the error names the file, the episode
            and the field.
    """
    found = iter(files.minari.get_episodes(indices))
    for index in indices:
        with damage(files.main, f", episode {index},"):
            raw = next(found)
        yield _Checked(files.main, index, raw, spaces).episode(files.lengths[index])


class _Checked:
    """An episode as it was read, of which each field is checked.

    Args:
        file: that it is in.
        index: its number.
        raw: its fields by Minari's names.
        spaces: those that it must fit.
    """

    def __init__(self, file: Path, index: int, raw: Mapping[str, Any], spaces: Spaces) -> None:
        self.file, self.index, self.raw, self.spaces = file, index, raw, spaces

    def wrong(self, field: str, problem: str) -> SaveError:
        """Return the error of a field."""
        return SaveError(
            f"{self.file}, episode {self.index}, {field}: {problem}; write that episode again, "
            "or another dataset without it"
        )

    def episode(self, length: int) -> Episode:
        """Return the episode.

        Args:
            length: its steps, by its metadata.

        Raises:
            SaveError: something is wrong with it.
        """
        if length < 1:
            raise self.wrong("rewards", "it has no steps")
        reward = self._numbers("rewards", length)
        terminated = self._end(length)
        obs, action = self._observations(length), self._actions(length)
        allowed = self.spaces.allowed({name: x[:-1] for name, x in obs.items()})
        if allowed is not None:
            self._check_allowed(action, allowed)
        return Episode(obs, action, reward, terminated)

    def _check_allowed(self, action: Array, allowed: Array) -> None:
        """Refuse an action that the mask of its own observation rules out."""
        sizes = np.asarray(self.spaces.head.sizes)
        choices = action[:, None] if action.ndim == 1 else action[:, : sizes.size].astype(int)
        taken = np.take_along_axis(allowed, choices + np.cumsum(sizes) - sizes, 1)
        self._check_all("actions", taken, "the mask rules out choice {}", choices)

    def _numbers(self, field: str, length: int) -> Array:
        x = np.asarray(self.raw[field])
        if x.shape != (length,):
            raise self.wrong(field, f"it has shape {list(x.shape)}, and not [{length}]")
        return self._converted(field, x, np.dtype(np.float32))

    def _converted(self, field: str, x: Array, dtype: np.dtype[Any]) -> Array:
        """Return numbers as those of another type, after checking that these are the same ones."""
        if x.dtype.kind not in "bfiu":
            raise self.wrong(field, f"it holds {x.dtype}, and no numbers")
        with np.errstate(over="ignore", invalid="ignore"):
            found: Array = x.astype(dtype)
        if dtype.kind == "f":
            self._check_all(field, np.isfinite(found), f"it is not finite in {dtype}", x)
        else:
            self._check_all(field, found == x, f"it holds {{}}, which {dtype} can't", x)
        return found

    def _check_all(self, field: str, right: Array, problem: str, x: Array) -> None:
        """Raise the error of the first step of which not all is right."""
        if not right.all():
            first = tuple(np.argwhere(~right)[0])
            raise self.wrong(field, f"{problem.format(x[first])} at step {first[0]}")

    def _end(self, length: int) -> bool:
        """Return whether the episode terminated, and was not cut short."""
        ends = [self._numbers(field, length) != 0 for field in ("terminations", "truncations")]
        over = ends[0] | ends[1]
        if early := np.flatnonzero(over[:-1]).tolist():
            raise self.wrong(
                "terminations and truncations",
                f"it ends at step {early[0]}, and {length - 1 - early[0]:,} more steps follow",
            )
        if not over[-1]:
            raise self.wrong(
                "terminations and truncations",
                "it has no end: its last step is neither terminated nor truncated "
                "(set truncations[-1] if it was cut there)",
            )
        return bool(ends[0][-1])

    def _observations(self, length: int) -> dict[str, Array]:
        found = {}
        for (_, space), part in zip(leaves(self.spaces.obs), self.spaces.parts, strict=True):
            field = f"observations{part.name.removeprefix('obs')}"
            try:
                x = np.asarray(part.of(self.raw["observations"]))
            except (KeyError, IndexError, TypeError):
                raise self.wrong(field, "it is missing") from None
            if x.shape != (length + 1, *part.shape):
                wanted = [length + 1, *part.shape]
                raise self.wrong(
                    field,
                    f"it has shape {list(x.shape)}, and not {wanted}: one for each step and the "
                    "final one",
                )
            found[part.name] = x = self._converted(field, x, part.dtype)
            if part.bounds is not None:
                self._check_all(
                    field, ~part.outside(x), f"it holds {{}}, which is not in {space},", x
                )
        return found

    def _actions(self, length: int) -> Array:
        head, found = self.spaces.head, {}
        for part in head.parts:
            field = "actions" + "".join(f"[{key!r}]" for key in part.path)
            x = self.raw["actions"]
            try:
                for key in part.path:
                    x = x[key]
                x = np.asarray(x)
            except (KeyError, IndexError, TypeError):
                raise self.wrong(field, "it is missing") from None
            if x.shape != (length, *part.shape):
                raise self.wrong(
                    field, f"it has shape {list(x.shape)}, and not {[length, *part.shape]}"
                )
            found[part.path] = self._converted(field, x, np.dtype(int if part.discrete else float))
        action: Array = head.from_env(found)
        sizes = np.asarray(head.sizes)
        if sizes.size:
            choices = action[:, None] if head.width == 0 else action[:, : sizes.size]
            outside = ((choices < 0) | (choices >= sizes)).any(-1)
            if outside.any():
                step = int(np.flatnonzero(outside)[0])
                raise self.wrong("actions", f"at step {step} it is not in {self.spaces.action}")
        return action
