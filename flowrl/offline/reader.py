"""`Reader`: transitions of a dataset in an order that the seed shuffles, within bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.core.items import Batch
from flowrl.core.keeping import Keeping
from flowrl.errors import SaveError
from flowrl.offline.episodes import Episode, read_episodes
from flowrl.offline.files import Files
from flowrl.rl.spaces import Spaces

if TYPE_CHECKING:
    from flowrl.offline.dataset import Dataset

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Chunk:
    """Episodes in memory, as arrays by step: every observation is there once.

    Args:
        obs: observations by the names of fields, ``[steps + episodes, ...]``.
        action: ``[steps, ...]``.
        reward: discounted sums ``[steps]`` of the rewards of a return.
        discount: ``[steps]``, by which the value of the observation after the return counts.
        here: ``[steps]``, the row of each step's observation.
        after: ``[steps]``, the row of the observation after its return.
    """

    obs: dict[str, Array]
    action: Array
    reward: Array
    discount: Array
    here: Array
    after: Array

    def __len__(self) -> int:
        return int(self.reward.shape[0])

    def batch(self, steps: Array) -> dict[str, Array]:
        """Return the transitions ``[n, ...]`` that begin at these steps, by field."""
        here, after = self.here[steps], self.after[steps]
        return {
            **{name: x.take(here, 0) for name, x in self.obs.items()},
            "action": self.action.take(steps, 0),
            "reward": self.reward.take(steps),
            "discount": self.discount.take(steps),
            **{f"next_{name}": x.take(after, 0) for name, x in self.obs.items()},
        }


def returns(
    reward: Array, terminated: bool, gamma: float, n_step: int | None
) -> tuple[Array, Array, Array]:
    """Return the returns of an episode of L steps, their discounts, and where they lead.

    Args:
        reward: ``[L]``.
        terminated: whether the episode ended by itself.
        gamma: discount factor per step.
        n_step: steps of a return; None for all until the episode's end.

    Returns:
        Of each step: the discounted sum of rewards; ``gamma ** k`` of the k steps that were taken,
        0 where the episode terminated within them; and the index of the observation after them.
    """
    length = len(reward)
    reach = length if n_step is None else min(n_step, length)
    steps = np.arange(length)
    after = np.minimum(steps + reach, length)
    sums = np.zeros(length, np.float64)
    if reach == length:
        total = 0.0
        for step in range(length - 1, -1, -1):
            total = float(reward[step]) + gamma * total
            sums[step] = total
    else:
        for k in range(reach):
            sums[: length - k] += gamma**k * reward[k:]
    discount = float(gamma) ** (after - steps)
    if terminated:
        discount = np.where(after == length, 0.0, discount)
    return sums.astype(np.float32), discount.astype(np.float32), after


def chunk_of(episodes: list[Episode], gamma: float, n_step: int | None) -> Chunk:
    """Return episodes as one chunk; `returns` describes the arguments."""
    rewards, discounts, here, after = [], [], [], []
    row = 0
    for episode in episodes:
        reward, discount, leads = returns(episode.reward, episode.terminated, gamma, n_step)
        rewards.append(reward)
        discounts.append(discount)
        here.append(row + np.arange(len(episode)))
        after.append(row + leads)
        row += len(episode) + 1
    obs = {}
    for name in episodes[0].obs:
        obs[name] = np.concatenate([episode.obs[name] for episode in episodes])
    return Chunk(
        obs,
        np.concatenate([episode.action for episode in episodes]),
        np.concatenate(rewards),
        np.concatenate(discounts),
        np.concatenate(here),
        np.concatenate(after),
    )


class Reader(Keeping):
    """Transitions of a dataset, each once in an epoch, in an order that the seed shuffles.

    In each epoch the episodes are shuffled and cut into chunks of at most `buffer_size` steps,
    and the transitions of a chunk are shuffled. So memory holds one chunk, and a dataset that fits
    is one chunk, shuffled as a whole and read once. The order follows from the seed, the epoch and
    the position in it alone, which is all that a snapshot needs.

    Args:
        spec: the settings of the dataset.
        spaces: those of the environment; None for those of the dataset.
        env: the name of the environment; empty if that is not known.
        entropy: numbers from which the order is made.

    Raises:
        SaveError: there is no such dataset, or it does not fit the environment.
    """

    lasting = ("epoch", "position", "identity")
    remade = (
        "spec", "spaces", "entropy", "files", "lengths", "_order", "_ends", "_chunk", "_held",
        "_shuffled",
    )  # fmt: skip

    def __init__(
        self, spec: Dataset, spaces: Spaces | None, env: str, entropy: tuple[int, ...]
    ) -> None:
        self.spec, self.entropy = spec, entropy
        self.files = Files(spec.path)
        self.spaces = self._checked(spaces, env)
        self.lengths = np.asarray(self.files.lengths)
        self.epoch = 0
        """Epochs that are over."""
        self.position = 0
        """Transitions of this epoch that were taken."""
        self.identity = {
            "episodes": self.files.episodes,
            "steps": self.files.steps,
            "sum": self.files.sum,
        }
        """By what it is known whether the dataset is still the same."""
        self._order: list[Array] = []
        """The episodes of each chunk of this epoch."""
        self._ends = np.zeros(0, np.int64)
        """By chunk, the position in the epoch at which it ends."""
        self._chunk: Chunk | None = None
        self._held: tuple[int, ...] = ()
        """The episodes in memory."""
        self._shuffled: tuple[tuple[int, int], Array] = ((-1, -1), np.zeros(0, np.int64))
        """The epoch and chunk whose transitions are in order now, and that order."""
        self._begin_epoch()

    def _checked(self, spaces: Spaces | None, env: str) -> Spaces:
        """Return the spaces to read by, after comparing the dataset with the environment.

        Raises:
            SaveError: it is of another environment, or has other spaces.
        """
        files, where = self.files, self.files.folder
        if self.spec.check_env and env and files.env and env != files.env:
            raise SaveError(
                f"{where}: the dataset is of {files.env}, and the environment is {env}; take the "
                "dataset of that one, or set check_env=False of the Dataset if both are alike "
                "(graph.set('dataset.check_env', False))"
            )
        if spaces is None or spaces == files.spaces:
            return files.spaces
        for field, mine, its in (
            ("observation", spaces.obs, files.spaces.obs),
            ("action", spaces.action, files.spaces.action),
        ):
            if mine != its:
                raise SaveError(
                    f"{where}: the dataset has the {field} space {its}, and the environment "
                    f"{env or ''}".rstrip()
                    + f" has {mine}; take the dataset of that one"
                )
        return spaces

    def close(self) -> None:
        """Let go of what is in memory; no file is open."""
        self._chunk = None

    def take(self, state: Any) -> None:
        """Go on where it was.

        Raises:
            SaveError: the dataset is another one now.
        """
        was, now = state["identity"], self.identity
        if was != now:
            has = f"{now['episodes']:,} with {now['steps']:,}"
            others = ""
            if (was["episodes"], was["steps"]) == (now["episodes"], now["steps"]):
                has, others = "as many", " with other contents"
            raise SaveError(
                f"{self.files.folder}: the dataset had {was['episodes']:,} episodes with "
                f"{was['steps']:,} steps{others} when the run was kept, and has {has} now; a run "
                "goes on with the dataset that it began with"
            )
        super().take(state)
        self._begin_epoch()

    def _random(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([*self.entropy, *numbers])

    def _begin_epoch(self) -> None:
        """Shuffle the episodes and cut them into chunks."""
        if self.lengths.sum() <= self.spec.buffer_size:
            # Its transitions are shuffled as a whole, so the order of the episodes is no matter.
            self._order = [np.arange(len(self.lengths))]
        else:
            shuffled = self._random(self.epoch).permutation(len(self.lengths))
            self._order = list(cut(shuffled, self.lengths, self.spec.buffer_size))
        self._ends = np.cumsum([self.lengths[episodes].sum() for episodes in self._order])

    def sample(self, size: int) -> Batch:
        """Return the next transitions, as a batch ``[1, size]``."""
        parts, missing = [], size
        while missing:
            number = int(np.searchsorted(self._ends, self.position, "right"))
            chunk, order = self._opened(number)
            begin = self.position - (int(self._ends[number - 1]) if number else 0)
            steps = order[begin : begin + missing]
            parts.append(chunk.batch(steps))
            missing -= len(steps)
            del chunk, order  # or memory would hold them while the next ones are read
            self.position += len(steps)
            if self.position == self._ends[-1]:
                self.epoch, self.position = self.epoch + 1, 0
                self._begin_epoch()
        data = {
            name: (parts[0][name] if len(parts) == 1 else _joined(parts, name))[None]
            for name in parts[0]
        }
        data["valid"] = np.ones((1, size), bool)
        for x in data.values():
            x.flags.writeable = False
        # The behaviour policy is none of this run, so no number says how old it is.
        return Batch(data, {"version": np.full(size, np.nan, np.float32)})

    def _opened(self, number: int) -> tuple[Chunk, Array]:
        """Return a chunk of this epoch, which is read if it is not in memory, and its order."""
        key = (self.epoch, number)
        if self._chunk is not None and self._shuffled[0] == key:
            return self._chunk, self._shuffled[1]
        episodes = tuple(sorted(self._order[number].tolist()))
        if self._chunk is None or self._held != episodes:
            # What was there goes first, so that memory never holds two chunks.
            self._chunk = None
            read = list(read_episodes(self.files, self.spaces, episodes))
            self._chunk, self._held = chunk_of(read, self.spec.gamma, self.spec.n_step), episodes
        self._shuffled = key, self._random(*key, 1).permutation(len(self._chunk))
        return self._chunk, self._shuffled[1]


def _joined(parts: list[dict[str, Array]], name: str) -> Array:
    return np.concatenate([part[name] for part in parts])


def cut(order: Array, lengths: Array, most: int) -> list[Array]:
    """Return episodes cut into chunks of at most so many steps, each of one episode at least."""
    chunks: list[list[int]] = []
    room = 0
    for episode in order.tolist():
        if not chunks or lengths[episode] > room:
            chunks.append([])
            room = most
        chunks[-1].append(episode)
        room -= int(lengths[episode])
    return [np.asarray(chunk) for chunk in chunks]
