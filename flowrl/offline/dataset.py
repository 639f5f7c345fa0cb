"""`Dataset`: the settings of a dataset that is read, and its handle."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from flowrl.core.items import Batch
from flowrl.errors import SettingError
from flowrl.graph.protocols import Handle, Ref, Resource, Site
from flowrl.graph.settings import check_at_least_1, check_shares
from flowrl.graph.use import Use
from flowrl.offline.reader import Reader
from flowrl.rl.spaces import Spaces
from flowrl.rollout.handle import RunnersHandle


class ReaderStub:
    """A shape-only stub of a `Reader` in the abstract trace.

    Args:
        spaces: those of the environment.
    """

    def __init__(self, spaces: Spaces) -> None:
        self.spaces = spaces

    def close(self) -> None:
        """Do nothing: a stub holds nothing."""

    def sample(self, size: int) -> Batch:
        """Return the shapes of a batch ``[1, size]`` of transitions."""
        head, obs = self.spaces.head, self.spaces.shapes(1, size)

        def shape_of(dtype: Any, *shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

        width = (head.width,) if head.width else ()
        data = {
            **obs,
            "action": shape_of(np.float32 if head.reals else np.int32, 1, size, *width),
            "reward": shape_of(np.float32, 1, size),
            "discount": shape_of(np.float32, 1, size),
            **{f"next_{name}": x for name, x in obs.items()},
            "valid": shape_of(bool, 1, size),
        }
        return Batch(data, {"version": shape_of(np.float32, size)})


class DatasetHandle(Handle):
    """A dataset at work: it gives its transitions, shuffled, again and again.

    Args:
        spec: the settings of the dataset.
        site: what the runtime offers to it.
    """

    lasting = ()
    remade = ("spec", "site", "pool")

    def __init__(self, spec: Dataset, site: Site) -> None:
        self.spec, self.site = spec, site
        runners: RunnersHandle = site.resource(spec.runners)
        entropy = (int(site.seed), zlib.crc32(site.name.encode()))
        make = partial(_reader, spec, runners.spaces, runners.env_name, entropy)
        self.pool = site.workers(1, make, partial(_stub, runners.spaces), near=True)

    @property
    def state(self) -> Any:
        """Nothing: what lasts is where its reader is, on which no plan depends."""
        return {}

    def keep(self) -> Any:
        """Return the epoch, and the position in it."""
        return {"reader": self.pool.submit(0, "keep").result()}

    def take(self, state: Any) -> None:
        """Go on where it was.

        Raises:
            SaveError: the dataset is another one now.
        """
        self.pool.submit(0, "take", state["reader"]).result()

    def sample(self, size: int) -> Batch:
        """Return a batch ``[1, size]``: the transitions that come next.

        Raises:
            SaveError: an episode is damaged, or does not fit the environment.
        """
        batch: Batch = self.pool.submit(0, "sample", size).result()
        self.site.count(draws=1, replayed_steps=size)
        return batch

    def close(self) -> None:
        """Let go of what is in memory."""
        self.pool.close()


def _reader(spec: Dataset, spaces: Spaces, env: str, entropy: tuple[int, ...], *_: int) -> Reader:
    return Reader(spec, spaces, env, entropy)


def _stub(spaces: Spaces, *_: int) -> ReaderStub:
    return ReaderStub(spaces)


@dataclass(frozen=True)
class Dataset(Resource):
    """A dataset of episodes in Minari's format, which is read in transitions.

    These are what a `Replay` gives: ``obs``, ``action``, ``reward`` (the discounted sum of a
    return), ``next_obs`` after it, and ``discount``, by which the value of ``next_obs`` counts:
    ``gamma ** k`` where k steps were taken, and 0 where the episode terminated. Each transition
    comes once in an epoch. The run's seed shuffles all of them; where the dataset has more than
    `buffer_size` steps, the episodes are shuffled, and of those in memory the transitions.

    Args:
        path: the dataset's directory, or the id of one in the user's local store of Minari, such as
            ``mujoco/hopper/medium-v0``.
        n_step: environment steps of a return; None: all until the episode's end, so that ``reward``
            is the return to go (default 1).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        buffer_size: most environment steps in memory, but for an episode that is longer by itself
            (default 1_000_000).
        check_env: whether a dataset of an environment of another name is refused (default True).
        runners: name of the runners whose spaces it must have (default ``runners``).

    Raises:
        SettingError: a number is out of its range.
        SaveError: when it is opened: there is no such dataset, it is damaged or empty, or it is of
            another environment.
    """

    path: str
    n_step: int | None = 1
    gamma: float = 0.99
    buffer_size: int = 1_000_000
    check_env: bool = True
    runners: Ref[RunnersHandle] = "runners"

    handle: ClassVar[type[Handle]] = DatasetHandle

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not str(self.path):
            raise SettingError(
                "path must be a text that names a dataset, its directory or its id in Minari, "
                f"got {self.path!r}"
            )
        check_at_least_1(self, "n_step", "buffer_size")
        check_shares(self, "gamma")

    def open(self, site: Site) -> DatasetHandle:
        """Find the dataset, check it, and return the handle."""
        return DatasetHandle(self, site)

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Report whether anything reads it."""
        if use.never("draws"):
            yield use.name, "nothing reads it; add read=ReadDataset(batch_size=...)"

    def describe(self) -> str:
        """Return one line such as ``data/cartpole, 3-step returns``."""
        if self.n_step is None:
            return f"{self.path}, returns to go"
        return self.path if self.n_step == 1 else f"{self.path}, {self.n_step}-step returns"
