"""Records of updates on disk, with all that an update was made of, to look at it and rerun it.

Nothing in them is pickled.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import jax
import numpy as np

import flowrl
from flowrl.core.events import Ended, Restarted, Started, Updated, Updating
from flowrl.core.saved_rows import no_directory
from flowrl.core.texts import in_bytes
from flowrl.errors import ContractError, SaveError, SettingError
from flowrl.graph.graph import Graph
from flowrl.graph.settings import Settings, check_at_least_1, check_not_negative
from flowrl.learner.learner import Learner
from flowrl.observe.manifest import RECORDS
from flowrl.observe.outliers import ENOUGH, RECENT, outlier
from flowrl.observe.record_facts import facts_of

Array = Any
NEWEST = 10
"""How many records are listed where nobody asks for the list."""
HELD = 2**30
"""Bytes of updates held in memory per learner. The newest update is held whatever its size."""

ROUTINE, NOTABLE, FIRST = 0, 1, 2
"""The ranks of records: those of a lower rank are removed first."""


@dataclass(frozen=True)
class Record(Settings):
    """Settings of the updates that a run records, in ``records/`` in its directory.

    These are the first update, those with NaN or infinity, and those whose loss is an outlier: it
    is further from the median of the last 200 losses than any of them, and further than 10 times
    their median distance from it.

    Args:
        every: record also each update whose number this divides; None: no others (default None).
        around: updates before a notable one (not finite, or an outlier) that are recorded with it
            (default 2).
        most_bytes: most bytes of all records on disk (default 2 GiB). Updates that were kept by
            `every` are removed first, then the oldest of the others, the very first last.

    Raises:
        SettingError: a number is too small.
    """

    every: int | None = None
    around: int = 2
    most_bytes: int = 2 * 2**30

    def __post_init__(self) -> None:
        check_at_least_1(self, "every", "most_bytes")
        check_not_negative(self, "around")


@dataclass
class Taken:
    """One update, held in memory."""

    header: dict[str, Any]
    """What is known about the update, as JSON can hold it."""
    arrays: dict[str, Array]
    """Its arrays by name: ``state/...``, ``data/...``, ``columns/...``."""
    trained: Any = None
    """What the learner returned; None until then, and again once its metrics are fetched."""
    why: list[str] = field(default_factory=list)
    """The reasons for which it is recorded."""

    @property
    def number(self) -> int:
        """The number of the update: 1 plus the learner's policy version before it."""
        return int(self.header["update"])

    @property
    def nbytes(self) -> int:
        """The size of all arrays in bytes."""
        return sum(x.nbytes for x in self.arrays.values())


class Recorder:
    """An observer that writes records of updates into a folder.

    Each record is written in one atomic step, so that whatever ends the run leaves whole ones. An
    update is held until the next one of its learner begins, because only then is it known whether
    it stands out. Its arrays are copied to the memory of this process, which waits for the update
    before.

    Args:
        folder: where records are written; it is made with the first record.
        record: which updates are recorded.
        seed: of the run, from which `flowrl why` computes the seeds of environments.
    """

    live = True
    kinds: ClassVar[tuple[type, ...]] = (Started, Updating, Updated, Restarted, Ended)

    def __init__(
        self, folder: str | Path, record: Record = Record(), seed: int | None = None
    ) -> None:
        self.folder = Path(folder).absolute()
        self.record = record
        self.seed = seed
        self.graph: Graph | None = None
        self.restarts: Counter[tuple[str, int]] = Counter()
        """How often each worker of each resource was restarted."""
        self.facts: dict[str, dict[str, Any]] = {}
        """By learner: what is known about it."""
        self.held: dict[str, deque[Taken]] = {}
        """By learner: the newest updates, the last of which may still be running."""
        self.losses: dict[str, deque[float]] = {}
        """By learner: its recent losses that are finite."""
        self.kept: dict[tuple[str, int], tuple[int, Path, int]] = {}
        """By learner and update number, oldest first: the rank, the file, and its bytes."""
        self._lock = Lock()

    def __call__(self, event: Any) -> None:
        """Handle an event of the run."""
        with self._lock:
            match event:
                case Started(plan=plan):
                    self.graph = plan.graph
                    self.facts.clear()
                case Restarted(resource=resource, worker=worker):
                    self.restarts[resource, worker] += 1
                    self.facts.clear()
                case Updating():
                    self._hold(event)
                case Updated(resource=resource, trained=trained):
                    # Of a step by gradients there is no batch, so it can't be recorded.
                    if held := self.held.get(resource):
                        held[-1].trained = trained
                case Ended():
                    for learner in self.held:
                        self._judge(learner)

    # -- taking

    def _hold(self, event: Updating) -> None:
        """Judge the update before, and hold this one in memory."""
        held = self.held.setdefault(event.resource, deque())
        self._judge(event.resource)
        held.append(self._taken(event))
        # The newest is held in any case, older ones only as far as they may be recorded and memory
        # allows.
        while len(held) > 1 and (
            len(held) > self.record.around + 1 or sum(x.nbytes for x in held) > HELD
        ):
            held.popleft()

    def _taken(self, event: Updating) -> Taken:
        """Copy what an update is made of."""
        dtypes: dict[str, str] = {}
        arrays = {
            f"state/{name}": _plain(x, f"state/{name}", dtypes) for name, x in named(event.state)
        }
        for part in ("data", "columns"):
            for name, x in getattr(event.batch, part).items():
                arrays[f"{part}/{name}"] = _plain(x, f"{part}/{name}", dtypes)
        header = {
            "flowrl": flowrl.__version__,
            "update": event.version + 1,
            "learner": event.resource,
            "settings": event.settings,
            "spaces": event.core.spaces.json,
            "dtypes": dtypes,
            **self._facts_of(event.resource),
        }
        return Taken(header, arrays)

    def _facts_of(self, learner: str) -> dict[str, Any]:
        """Return what is known about a learner, which changes only where a worker is restarted."""
        if learner not in self.facts:
            self.facts[learner] = facts_of(self.graph, learner, self.seed, self.restarts)
        return self.facts[learner]

    # -- keeping

    def _judge(self, learner: str) -> None:
        """Record the newest update if it is done, and stands out or is one of every n."""
        held = self.held[learner]
        if not held or held[-1].trained is None or "metrics" in held[-1].arrays:
            return
        newest = held[-1]
        metrics = _with_metrics(newest)
        if learner not in self.losses:
            self._keep(newest, "first", FIRST)
        losses = self.losses.setdefault(learner, deque(maxlen=RECENT))
        notable = ""
        if metrics["bad"]:
            notable = "not finite"
        elif len(losses) >= ENOUGH:
            notable = outlier(metrics["loss"], losses)
        # A loss that is not finite would make every later median useless.
        if not metrics["bad"]:
            losses.append(metrics["loss"])
        if notable:
            for distance, taken in enumerate(reversed(held)):
                why = f"{distance} before update {newest.number}" if distance else notable
                self._keep(taken, why, NOTABLE)
        elif self.record.every is not None and newest.number % self.record.every == 0:
            self._keep(newest, f"every {self.record.every}", ROUTINE)

    def _keep(self, taken: Taken, why: str, rank: int) -> None:
        """Write a record, after removing older ones if they would take too many bytes together.

        None of a higher rank is removed: the update is then not recorded.

        Raises:
            ContractError: it alone is larger than all records may be.
        """
        taken.why.append(why)
        learner = taken.header["learner"]
        # An update that is recorded for a second reason replaces its own file.
        earlier = self.kept.pop((learner, taken.number), None)
        if earlier:
            rank = max(rank, earlier[0])
        path = self.folder / self._file_name(taken)
        # This is an upper bound: a zip archive lists each file twice, with a header each time.
        size = taken.nbytes + 4096 + 512 * len(taken.arrays)
        most = self.record.most_bytes
        if size > most:
            raise ContractError(
                f"update {taken.number} takes {in_bytes(size)}, but records may take "
                f"most_bytes={in_bytes(most)}; allow more"
            )
        if not self._free(size, rank):
            return
        write(path, {**taken.header, "why": taken.why}, taken.arrays)
        self.kept[learner, taken.number] = rank, path, path.stat().st_size

    def _file_name(self, taken: Taken) -> str:
        """Return the name of an update's file, which names the learner if there are several."""
        resources = self.graph.resources.values() if self.graph is not None else ()
        learners = sum(isinstance(resource, Learner) for resource in resources)
        suffix = f".{taken.header['learner']}" if learners > 1 else ""
        return f"update-{taken.number:06}{suffix}.npz"

    def _free(self, size: int, rank: int) -> bool:
        """Remove records until this many bytes are free; return False if some of them rank higher.

        The records of the lowest rank are removed first, and of these the oldest.
        """
        while (
            self.kept and sum(n for _, _, n in self.kept.values()) + size > self.record.most_bytes
        ):
            first = min(self.kept, key=lambda key: self.kept[key][0])
            if self.kept[first][0] > rank:
                return False
            self.kept.pop(first)[1].unlink(missing_ok=True)
        return True


def _with_metrics(taken: Taken) -> dict[str, float]:
    """Add its metrics and policy lag to an update that is done, and return the metrics by name."""
    metrics, lag = taken.trained.metrics, taken.trained.lag
    taken.arrays["metrics"] = np.asarray(metrics.values)
    taken.header |= {
        "metrics": list(metrics.names),
        "lag": [float(np.asarray(x)) for x in lag],
    }
    taken.trained = None
    return dict(zip(metrics.names, taken.arrays["metrics"].tolist(), strict=True))


def named(tree: Any) -> Iterator[tuple[str, Array]]:
    """Yield the leaves of a tree with their names, such as ``weights/params/Dense_0/kernel``."""
    found, structure = jax.tree.flatten(tree)
    yield from zip(_names_in(structure), found, strict=True)


@lru_cache(maxsize=64)
def _names_in(structure: Any) -> tuple[str, ...]:
    """Return the names of the leaves of all trees of a structure: to make them takes long."""
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path in paths)


def _plain(x: Array, name: str, dtypes: dict[str, str]) -> np.ndarray[Any, Any]:
    """Copy an array to this process, so that nobody writes to it later.

    If NumPy can't save its type, the array is viewed as integers, and `dtypes` gets the name of the
    type.
    """
    array = np.asarray(x)
    array = array.copy() if array.flags.writeable else array
    # The type of bfloat16 and its like is "V" (void) to NumPy.
    if array.dtype.kind == "V":
        dtypes[name] = array.dtype.name
        array = array.view(f"u{array.dtype.itemsize}")
    return array


# -- on disk


@dataclass(frozen=True)
class Recorded:
    """A record that was read from disk."""

    path: Path
    """Its file."""
    header: Mapping[str, Any]
    """What is known about the update, as JSON holds it."""
    arrays: Mapping[str, np.ndarray[Any, Any]]
    """Its arrays by name: ``metrics``, ``state/...``, ``data/...``, ``columns/...``."""

    @property
    def number(self) -> int:
        """The number of the update."""
        return int(self.header["update"])

    @property
    def learner(self) -> str:
        """The name of the learner that was updated."""
        return str(self.header["learner"])

    @property
    def metrics(self) -> dict[str, np.float32]:
        """The metrics that the update returned, by name."""
        return dict(zip(self.header["metrics"], self.arrays["metrics"], strict=True))

    def part(self, name: str) -> dict[str, np.ndarray[Any, Any]]:
        """Return one group of arrays by name.

        Args:
            name: ``data`` or ``columns`` for those of the batch, ``state`` for the learner's.
        """
        return {
            k.removeprefix(f"{name}/"): self.array(k)
            for k in self.arrays
            if k.startswith(f"{name}/")
        }

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return one array with the type that it had when it was recorded."""
        x, dtype = self.arrays[name], self.header["dtypes"].get(name)
        return x if dtype is None else x.view(jax.numpy.dtype(dtype))


def write(
    path: Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """Write a record in one atomic step.

    Args:
        path: of the file; its folder is made if it is not there.
        header: what JSON can hold.
        arrays: by name, of types that NumPy can save.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Only a complete record gets its name, so that a killed run leaves no half one.
    draft = path.with_suffix(".draft")
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with draft.open("wb") as file:
        # NumPy's stubs take the names of arrays for allow_pickle.
        np.savez(file, **{"header": text, **arrays})  # type: ignore[arg-type]
    draft.replace(path)


def read(path: Path, *, whole: bool = True) -> Recorded:
    """Read a record.

    Args:
        path: of the file.
        whole: read all arrays; else only the metrics, which lists show.

    Raises:
        SaveError: it is damaged.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            header = json.loads(bytes(saved["header"]))
            names = saved.files if whole else ["metrics"]
            return Recorded(path, header, {name: saved[name] for name in names if name != "header"})
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise SaveError(
            f"{path} is damaged or no record: {error}; remove it, or restore it from a copy"
        ) from None


def records(root: str | Path) -> list[Recorded]:
    """Return all records of a run by update number, with only their metrics as arrays.

    Args:
        root: the run's directory.

    Raises:
        SaveError: there is no such directory, or a record is damaged.
    """
    if not Path(root).is_dir():
        raise SaveError(no_directory(root))
    paths = (Path(root) / RECORDS).glob("update-*.npz")
    return sorted((read(p, whole=False) for p in paths), key=lambda r: (r.number, r.learner))


def find(root: str | Path, number: int, learner: str | None = None) -> Recorded:
    """Return the record of an update, with all of its arrays.

    Args:
        root: the run's directory.
        number: of the update.
        learner: whose update, if the run has several learners.

    Raises:
        SaveError: it is not there, and the error names the nearest that are; or it is damaged.
        SettingError: several learners have one of this number.
    """
    every = records(root)
    of_learner = [r for r in every if learner in (None, r.learner)]
    found = [r for r in of_learner if r.number == number]
    if len(found) > 1:
        learners = ", ".join(r.learner for r in found)
        raise SettingError(
            f"several learners have an update {number}: name one with --learner: {learners}"
        )
    if found:
        return read(found[0].path)
    if not every:
        raise SaveError(f"{root} holds no records of updates; run it with --record")
    if not of_learner:
        known = ", ".join(sorted({r.learner for r in every}))
        raise SaveError(f"{root} holds no records of {learner}; it does of {known}")
    raise _not_recorded(number, of_learner)


def _not_recorded(number: int, known: Collection[Recorded]) -> SaveError:
    """Return the error for an update that has no record, which names the nearest that have one."""
    near = sorted(sorted({r.number for r in known}, key=lambda n: abs(n - number))[:4])
    hint = ""
    if not any(r.header["why"][0].startswith("every") for r in known):
        hint = " (more of them: flowrl run --record-every N)"
    numbers = ", ".join(map(str, near))
    return SaveError(f"update {number} was not recorded; the nearest that were are {numbers}{hint}")


def listed(root: str | Path, most: int | None = None) -> str:
    """Return the records of a run as a table.

    Args:
        root: the run's directory.
        most: list only the newest records, this many; None for all.

    Raises:
        SaveError: there is no such directory, or a record is damaged.
    """
    every = records(root)
    if not every:
        return f"{root} holds no records of updates; run it with --record"
    several = len({r.learner for r in every}) > 1
    lines = [f"{'update':>8}  {'loss':>12}  {'size':>8}  kept because"]
    if most is not None and len(every) > most:
        lines.append(f"({len(every) - most:,} before; flowrl rerun {root} lists all)")
    for r in every if most is None else every[-most:]:
        learner = f"{r.learner}: " if several else ""
        size, reasons = in_bytes(r.path.stat().st_size), ", ".join(r.header["why"])
        numbers = f"{r.number:>8}  {r.metrics['loss']:>12.6g}  {size:>8}"
        lines.append(f"{numbers}  {learner}{reasons}")
    return "\n".join(lines)
