"""The best policy of a run: by a column of its rows, in memory and in its directory."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.core.blocks import write_whole
from flowrl.core.file_sums import check_files, facts_of
from flowrl.core.items import Row
from flowrl.errors import SaveError, SettingError, unknown
from flowrl.graph.plan import Plan
from flowrl.learner.learner import Learner
from flowrl.observe.sinks import columns
from flowrl.observe.snapshots import Snapshots
from flowrl.observe.trained import TrainedPolicy
from flowrl.rl.policies import Weights
from flowrl.rollout.handle import EVALUATED

BEST = "best"
"""The folder in a run's directory."""
FILE = "best.json"
"""The file in it that names the policy's folder, with the sums of all files in that."""


class Score(NamedTuple):
    """What made a policy the best so far."""

    column: str
    """The column that is compared."""
    value: float
    """Its value in the row."""
    row: int
    """The number of the row."""
    env_steps: int
    """The environment steps until the row."""


def column_of(named: str | None, plan: Plan) -> str:
    """Return the column by which the best policy of a run is found.

    Args:
        named: the column that the user named; None for ``eval/return_mean`` where the graph
            evaluates, and else ``return_mean``.
        plan: the plan of the run.

    Raises:
        SettingError: rows of this graph have no such column.
    """
    known = columns(plan)
    if named is None:
        return EVALUATED[0] if EVALUATED[0] in known else "return_mean"
    if named not in known:
        raise SettingError(f"best: {unknown('column', named, known)}")
    return named


def best_of(settings: Snapshots | None, plan: Plan, folder: Path) -> Best | None:
    """Return what keeps the best policy of a run; None where none is kept.

    Args:
        settings: how often the run is kept; None for never.
        plan: of the run.
        folder: its directory.
    """
    learners = [each for each in plan.graph.resources.values() if isinstance(each, Learner)]
    if settings is None or len(learners) != 1:
        return None
    return Best(column_of(settings.best, plan), folder, settings.every)


class Best:
    """Keeps the best policy so far.

    Args:
        column: the column of which more is better.
        folder: the run's directory.
        every: least seconds between two times at which it is written.
    """

    def __init__(self, column: str, folder: Path, every: float) -> None:
        self.column = column
        self.every, self.last = every, time.monotonic()
        self.folder = folder / BEST
        self.evaluated = column in EVALUATED
        """Whether the weights that count are those that played an evaluation."""
        self.score: Score | None = None
        self.policy: TrainedPolicy | None = None
        self.written: Score | None = None
        """The score of what is in the directory."""

    def consider(self, rows: Sequence[Row], policy: Callable[[], TrainedPolicy | None]) -> None:
        """Keep the policy if it is better than the best so far.

        Args:
            rows: those that closed together, in order.
            policy: returns the policy that the last of them with a value of the column has; None
                where it is not there any more.
        """
        if not self.evaluated:
            # There are only the weights after the last of them.
            rows = rows[-1:]
        counted = [row for row in rows if math.isfinite(row.get(self.column, math.nan))]
        if not counted:
            return
        row = counted[-1]
        score = Score(self.column, row[self.column], int(row["row"]), int(row["env_steps"]))
        if self.score is not None and score.value <= self.score.value:
            return
        if (found := policy()) is not None:
            self.score, self.policy = score, found

    def due(self) -> bool:
        """Return whether enough time has passed since it was written last."""
        return time.monotonic() - self.last >= self.every

    def keep(self) -> Any:
        """Return score and weights, for a snapshot; None where there is no best policy yet."""
        if self.score is None or self.policy is None:
            return None
        return {"score": tuple(self.score), "weights": self.policy.weights}

    def take(self, state: Any, policy: Callable[[Weights], TrainedPolicy]) -> None:
        """Go on with what was the best at a snapshot.

        What the directory holds may be of a later row, which is given up. It stays until the next
        one is written.

        Args:
            state: what `keep` returned; None where there was no best policy yet.
            policy: returns the policy with these weights.
        """
        self.score = self.policy = None
        if state is not None:
            self.score, self.policy = Score(*state["score"]), policy(state["weights"])

    def write(self, save: Callable[[TrainedPolicy, Path], None]) -> None:
        """Write the best policy, in place of the one before, unless it is there already.

        A process that is killed meanwhile leaves the old one or the new one, whole.

        Args:
            save: writes a policy into a new folder.

        Raises:
            OSError: it can't be written.
        """
        self.last = time.monotonic()
        if self.score == self.written or self.score is None or self.policy is None:
            return
        self.folder.mkdir(exist_ok=True)
        named = _named(self.folder)
        # Its name differs from that of the one before, which counts until `FILE` names this one.
        name = f"row-{self.score.row}"
        if named == name:
            name = f"{name}-again"
        draft = self.folder / name
        shutil.rmtree(draft, ignore_errors=True)
        save(self.policy, draft)
        files = {path.relative_to(draft).as_posix(): _synced(path) for path in _files(draft)}
        about = {**self.score._asdict(), "policy": name, "files": files}
        write_whole(self.folder / FILE, (json.dumps(about, indent=1) + "\n").encode())
        self.written = self.score
        for path in self.folder.iterdir():
            if path.is_dir() and path != draft:
                shutil.rmtree(path, ignore_errors=True)


def _named(folder: Path) -> str:
    """Return the folder of the policy that is there now, empty if there is none."""
    try:
        return str(_read(folder / FILE)["policy"])
    except SaveError:
        return ""


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _synced(path: Path) -> dict[str, Any]:
    """Return a file's size and sum, once it is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return facts_of(path)


def _read(file: Path) -> dict[str, Any]:
    """Return what a best policy's file says.

    Raises:
        SaveError: it is missing or damaged.
    """
    try:
        found = json.loads(file.read_bytes())
        score = Score(*(found[name] for name in Score._fields))
        # Only its last part, for it must lead nowhere else.
        name, files = Path(found["policy"]).name, dict(found["files"])
    except FileNotFoundError:
        raise SaveError(
            f"{file.parent.parent} holds no best policy: no row had a value of the column before a "
            "snapshot was due, or the run made no snapshots"
        ) from None
    except OSError as error:
        raise SaveError(f"{file} can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SaveError(f"{file} is damaged: it is not the JSON that was written") from None
    return {"score": score, "policy": name, "files": files}


def best_score(root: Path) -> Score:
    """Return what made the best policy of a saved run the best.

    Raises:
        SaveError: there is none, or its file is damaged.
    """
    score: Score = _read(root / BEST / FILE)["score"]
    return score


def best_named(root: Path) -> str:
    """Return which of the policies of a run is its best one now; empty if none is."""
    return _named(root / BEST)


def best_folder(root: Path) -> Path:
    """Return the folder of a saved run's best policy, after checking every file of it.

    Raises:
        SaveError: there is none, or a file is missing or damaged.
    """
    found = _read(root / BEST / FILE)
    folder: Path = root / BEST / found["policy"]
    check_files(folder, found["files"], f"{BEST}/{FILE}")
    return folder
