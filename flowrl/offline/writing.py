"""`DatasetWriter`: the settings of a dataset that a run writes, and its handle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from flowrl.core.items import Batch, check_columns, only
from flowrl.core.texts import plural
from flowrl.errors import ContractError, SettingError
from flowrl.graph.protocols import Handle, Ref, Resource, Site
from flowrl.graph.use import Use
from flowrl.offline.writer import Writer
from flowrl.rl.spaces import Spaces
from flowrl.rollout.handle import RunnersHandle

NEEDED = ("obs", "action", "reward", "terminated", "truncated", "valid")
"""The fields of rollouts that are written."""
COLUMNS = ("bootstrap_obs", "env", "first")
"""The columns of rollouts from which episodes are put together."""
NOTHING = {"added": 0, "written": 0, "held": 0}
"""What a writer reports before any step came."""


@dataclass(frozen=True)
class Written:
    """What became of the steps that came: added = written + held.

    Args:
        added: steps of environments that came, without masked rows.
        written: steps in episodes on disk.
        held: steps of episodes that go on.
    """

    added: int
    written: int
    held: int

    def __str__(self) -> str:
        return f"{self.added:,} steps added = {self.written:,} written + {self.held:,} held"

    @property
    def closed(self) -> bool:
        """Whether everything is accounted for."""
        return self.added == self.written + self.held


class WriterStub:
    """A shape-only stub of a `Writer` in the abstract trace."""

    def close(self) -> None:
        """Do nothing: nothing was written."""

    def add(self, batch: Batch) -> dict[str, int]:
        """Return what a writer reports before any step came."""
        return dict(NOTHING)


class DatasetWriterHandle(Handle):
    """A dataset that a run writes.

    Args:
        spec: the settings of the dataset.
        site: what the runtime offers to it.
    """

    lasting = ("report",)
    remade = ("spec", "site", "pool")

    def __init__(self, spec: DatasetWriter, site: Site) -> None:
        self.spec, self.site = spec, site
        runners: RunnersHandle = site.resource(spec.runners)
        make = partial(_writer, spec, runners.spaces, runners.env_name)
        self.pool = site.workers(1, make, _stub, near=True)
        self.report = dict(NOTHING)
        """What the writer reported last."""

    @property
    def state(self) -> Any:
        """Nothing on which a plan depends."""
        return {}

    def keep(self) -> Any:
        """Return what lasts, that of the writer among it."""
        return {**super().keep(), "writer": self.pool.submit(0, "keep").result()}

    def take(self, state: Any) -> None:
        """Go on where it was; what was written since is removed."""
        super().take(self.lasting_of(state))
        self.pool.submit(0, "take", state["writer"]).result()

    def add(self, batch: Batch) -> None:
        """Write rollouts ``[T, B]`` as runners give them.

        Raises:
            ContractError: a field or column is missing.
            SaveError: the dataset is there already, or can't be written.
        """
        self.report = self.pool.submit(0, "add", needed(batch)).result()
        self.site.count(written_steps=batch.steps)

    def stock(self) -> Written:
        """Return what came so far, and what became of it."""
        return Written(**self.report)

    def close(self) -> None:
        """Write what is held, and seal the dataset."""
        self.pool.close()


def needed(batch: Batch) -> Batch:
    """Return the fields and columns of a batch that are written.

    Raises:
        ContractError: one is missing, or the batch is of several agents.
    """
    if missing := [name for name in NEEDED if not batch.has(name)]:
        raise ContractError(
            f"needs the {plural(len(missing), 'field')} {', '.join(missing)}, but the batch has "
            f"{', '.join(batch.data)}; put WriteDataset after ParallelSample"
        )
    check_columns(batch, *COLUMNS)
    if "cut" in batch.columns:
        raise ContractError(
            "the batch is experience of several agents, whose turns no dataset holds; make them "
            "one agent with fl.envs.Joint, or remove WriteDataset"
        )
    return only(batch, NEEDED, COLUMNS)


def _writer(spec: DatasetWriter, spaces: Spaces, env: str, *_: int) -> Writer:
    return Writer(spec, spaces, env)


def _stub(*_: int) -> WriterStub:
    return WriterStub()


@dataclass(frozen=True)
class DatasetWriter(Resource):
    """A dataset in Minari's format that a run writes, for `Dataset` and for Minari itself.

    Each episode goes to disk when it ends, so memory holds only those that go on. Observations and
    actions are those of the environment, rewards those of the runners, scaled and clipped where
    these do so. When the run ends, episodes that go on are written as
    ones that were cut short, with their last observation, and ``manifest.json`` seals the dataset
    with the numbers of episodes and steps, the spaces, the environment and the SHA-256 sums of the
    files. A run that is resumed goes on writing.

    Args:
        path: new directory.
        runners: name of the runners whose experience it is (default ``runners``).

    Raises:
        SettingError: `path` is empty; when it is opened: the packages of the extra ``offline`` are
            not installed.
        SaveError: with the first episode: the directory is there already.
    """

    path: str
    runners: Ref[RunnersHandle] = "runners"

    handle: ClassVar[type[Handle]] = DatasetWriterHandle

    def __post_init__(self) -> None:
        if not self.path:
            raise SettingError("path must name the directory of the dataset")

    def open(self, site: Site) -> DatasetWriterHandle:
        """Return the handle; the directory is made with the first episode."""
        return DatasetWriterHandle(self, site)

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Report whether anything is written."""
        if use.never("written_steps"):
            yield use.name, "nothing is written; add write=WriteDataset() after ParallelSample"

    def describe(self) -> str:
        """Return the path."""
        return self.path
