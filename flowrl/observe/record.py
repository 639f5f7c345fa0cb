"""Records of updates: all that one was made of, on disk, so that it can be looked at and run again. Nothing in them is pickled."""

from __future__ import annotations

import json
import statistics
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import jax
import numpy as np

import flowrl
from flowrl.core.events import Ended, Restarted, Started, Updated, Updating
from flowrl.core.texts import in_bytes
from flowrl.envs.gym_envs import env_name
from flowrl.errors import ContractError, SaveError, SettingError
from flowrl.graph import values
from flowrl.graph.graph import Graph
from flowrl.learner.learner import Learner
from flowrl.observe.saving import RECORDS
from flowrl.rollout.runners import Runners

Array = Any
RECENT = 200
"""How many of the newest losses one is held against."""
ENOUGH = 20
"""How many there must be."""
FAR_OFF = 10.0
"""A loss is an outlier beyond so many times the median distance from the median."""
NEWEST = 10
"""How many records are listed where nobody asks for the list."""
HELD = 2**30
"""Bytes of the updates that are held in memory, the newest always among them."""


@dataclass(frozen=True)
class Record:
    """What is kept of updates, in ``records/`` in a run's directory: the first, those with NaN or infinity, and those with an outlying loss.

    A loss is an outlier if it is further from the median of the last 200 than any of them, and than 10 times their median distance from it.

    Args:
        every: also each update whose number this divides; None for no others.
        around: how many before one that is not finite or an outlier are kept with it.
        most_bytes: on disk. What is kept by `every` makes room first, then the oldest of the others, the very first last.

    Raises:
        SettingError: a number is too small.
    """

    every: int | None = None
    around: int = 2
    most_bytes: int = 2 * 2**30

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise SettingError(f"every must be at least 1 or None, got {self.every}")
        if self.around < 0 or self.most_bytes < 1:
            raise SettingError(
                f"around must not be negative and most_bytes at least 1, got around={self.around}, most_bytes={self.most_bytes}"
            )


def outlier(loss: float, recent: Collection[float]) -> str:
    """Why a loss stands out from those before it, or nothing. Where large ones are common, only one that is larger than all of them does."""
    middle = statistics.median(recent)
    distances = [abs(x - middle) for x in recent]
    spread, off = statistics.median(distances), abs(loss - middle)
    if off <= max(*distances, FAR_OFF * max(spread, 1e-6 * abs(middle))):
        return ""
    return f"outlier: the loss is {loss:.4g}, the median before it {middle:.4g}, the median distance from that {spread:.2g}"


@dataclass
class Taken:
    """One update, held in memory."""

    header: dict[str, Any]
    arrays: dict[str, Array]
    trained: Any = None
    why: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The update's: the learner's version before it, and 1."""
        return int(self.header["update"])

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(x.nbytes for x in self.arrays.values())


class Recorder:
    """An observer that writes records of updates into a folder, each at one stroke, so that whatever ends the run leaves whole ones.

    An update is held until the next one of its learner begins, for only then is it known whether it stands out. What is held is brought to this
    process's memory, which waits for the update before.

    Args:
        folder: where; it is made with the first record.
        record: what is kept.
        seed: of the run, so that `flowrl why` can tell those of environments.
    """

    live = True
    kinds: ClassVar[tuple[type, ...]] = (Started, Updating, Updated, Restarted, Ended)

    def __init__(
        self, folder: str | Path, record: Record = Record(), seed: int | None = None
    ) -> None:
        self.folder = Path(folder)
        self.record = record
        self.seed = seed
        self.graph: Graph | None = None
        self.restarts: Counter[tuple[str, int]] = Counter()
        self.held: dict[str, deque[Taken]] = {}
        """By learner: the newest updates, the last of which may be at work."""
        self.losses: dict[str, deque[float]] = {}
        self.kept: dict[tuple[str, int], tuple[int, Path, int]] = {}
        """By learner and number, in the order in which they were written: how soon it makes room, its file and the bytes in it."""
        self._lock = Lock()

    def __call__(self, event: Any) -> None:
        """Take an event of the run."""
        with self._lock:
            match event:
                case Started(plan=plan):
                    self.graph = plan.graph
                case Restarted(resource=resource, worker=worker):
                    self.restarts[resource, worker] += 1
                case Updating():
                    held = self.held.setdefault(event.resource, deque())
                    self._judge(event.resource)
                    held.append(self._taken(event))
                    while len(held) > 1 and (
                        len(held) > self.record.around + 1 or sum(x.nbytes for x in held) > HELD
                    ):
                        held.popleft()
                case Updated(resource=resource, trained=trained):
                    self.held[resource][-1].trained = trained
                case Ended():
                    for learner in self.held:
                        self._judge(learner)

    # -- taking

    def _taken(self, event: Updating) -> Taken:
        forms: dict[str, str] = {}
        arrays = {
            f"state/{name}": _plain(x, f"state/{name}", forms) for name, x in named(event.state)
        }
        for part in ("data", "columns"):
            arrays |= {
                f"{part}/{name}": _plain(x, f"{part}/{name}", forms)
                for name, x in getattr(event.batch, part).items()
            }
        header = {
            "flowrl": flowrl.__version__,
            "update": event.version + 1,
            "learner": event.resource,
            "settings": event.settings,
            "spaces": event.core.spaces.json,
            "forms": forms,
            **self._about(event.resource),
        }
        return Taken(header, arrays)

    def _about(self, name: str) -> dict[str, Any]:
        """What the graph says of a learner: its text, the nodes that train it, and its runners."""
        about: dict[str, Any] = {"text": None, "trainers": [], "seed": self.seed, "runners": None}
        spec = self.graph.resources.get(name) if self.graph is not None else None
        if self.graph is None or not isinstance(spec, Learner):
            return about
        try:
            about["text"] = values.to_text(spec, defaults=True, strict=True)
        except SaveError as error:
            about["because"] = str(error)
        trains = {"learner", "epochs", "minibatch_size", "shuffle"}
        about["trainers"] = [
            n.name
            for n in self.graph.nodes
            if trains <= {*(found := values.settings(n.op))} and str(found["learner"]) == name
        ]
        runners = self.graph.resources.get(str(spec.runners))
        if isinstance(runners, Runners):
            about["runners"] = {
                "name": str(spec.runners),
                "env": env_name(runners.env),
                "count": runners.num_runners,
                "envs": runners.envs_per_runner,
                "jax": runners.jax_env is not None,
                "restarts": {
                    worker: times
                    for (resource, worker), times in self.restarts.items()
                    if resource == str(spec.runners)
                },
            }
        return about

    # -- keeping

    def _judge(self, learner: str) -> None:
        """Keep the newest update, if it stands out or is due, now that it is done."""
        held = self.held[learner]
        if not held or held[-1].trained is None or "metrics" in held[-1].arrays:
            return
        newest = held[-1]
        metrics, lag = newest.trained.metrics, newest.trained.lag
        newest.arrays["metrics"] = np.asarray(metrics.values)
        newest.header |= {
            "metrics": list(metrics.names),
            "lag": [float(np.asarray(x)) for x in lag],
        }
        newest.trained = None
        told = dict(zip(metrics.names, newest.arrays["metrics"].tolist(), strict=True))
        if learner not in self.losses:
            self._keep(newest, "first", 2)
        losses, notable = self.losses.setdefault(learner, deque(maxlen=RECENT)), ""
        if told["bad"]:
            notable = "not finite"
        elif len(losses) >= ENOUGH:
            notable = outlier(told["loss"], losses)
        if not told["bad"]:
            losses.append(told["loss"])
        if notable:
            for before, taken in enumerate(reversed(held)):
                self._keep(
                    taken, f"{before} before update {newest.number}" if before else notable, 1
                )
        elif self.record.every is not None and newest.number % self.record.every == 0:
            self._keep(newest, f"every {self.record.every}", 0)

    def _keep(self, taken: Taken, why: str, rank: int) -> None:
        """Write a record, once older ones made room for it; none that matters more does.

        Raises:
            ContractError: it alone is larger than all may be.
        """
        taken.why.append(why)
        learner = taken.header["learner"]
        old = self.kept.pop((learner, taken.number), None)
        rank = max(rank, old[0]) if old else rank
        many = (
            self.graph is not None
            and sum(isinstance(r, Learner) for r in self.graph.resources.values()) > 1
        )
        path = self.folder / f"update-{taken.number:06}{f'.{learner}' if many else ''}.npz"
        most = self.record.most_bytes
        size = (
            taken.nbytes + 4096 + 512 * len(taken.arrays)
        )  # at most: a zip tells of each file twice
        if size > most:
            raise ContractError(
                f"update {taken.number} takes {in_bytes(size)}, but records may take most_bytes={in_bytes(most)}; allow more"
            )
        while self.kept and sum(n for _, _, n in self.kept.values()) + size > most:
            first = min(self.kept, key=lambda key: self.kept[key][0])  # of equal ranks the oldest
            if self.kept[first][0] > rank:
                return
            self.kept.pop(first)[1].unlink(missing_ok=True)
        write(path, {**taken.header, "why": taken.why}, taken.arrays)
        self.kept[learner, taken.number] = rank, path, path.stat().st_size


def named(tree: Any) -> Iterator[tuple[str, Array]]:
    """The leaves of a tree by name: ``weights/params/Dense_0/kernel``."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def _plain(x: Array, name: str, forms: dict[str, str]) -> np.ndarray[Any, Any]:
    """An array here, which nobody writes to later; where its type is none that NumPy saves, `forms` is told what it was."""
    array = np.asarray(x)
    array = array.copy() if array.flags.writeable else array
    if array.dtype.kind == "V":  # bfloat16 and its like
        forms[name] = array.dtype.name
        array = array.view(f"u{array.dtype.itemsize}")
    return array


# -- on disk


@dataclass(frozen=True)
class Recorded:
    """A record as it was read: what is said of the update, and its arrays by name: ``state/...``, ``data/...``, ``columns/...``."""

    path: Path
    header: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray[Any, Any]]

    @property
    def number(self) -> int:
        """The update's."""
        return int(self.header["update"])

    @property
    def learner(self) -> str:
        """Whose."""
        return str(self.header["learner"])

    @property
    def metrics(self) -> dict[str, np.float32]:
        """What the update told."""
        return dict(zip(self.header["metrics"], self.arrays["metrics"], strict=True))

    def part(self, name: str) -> dict[str, np.ndarray[Any, Any]]:
        """``data`` or ``columns`` of its batch, or its ``state``, by name."""
        return {
            k.removeprefix(f"{name}/"): self.array(k)
            for k in self.arrays
            if k.startswith(f"{name}/")
        }

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """One array, of the type that it was."""
        x, form = self.arrays[name], self.header["forms"].get(name)
        return x if form is None else x.view(jax.numpy.dtype(form))


def write(
    path: Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """Write a record, at one stroke."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with draft.open("wb") as file:
        np.savez(file, **{"header": text, **arrays})  # type: ignore[arg-type]  # it takes allow_pickle among the names
    draft.replace(path)


def read(path: Path, *, whole: bool = True) -> Recorded:
    """Read a record; all of it, or what lists need.

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
    """What lists need of all records of a run, by number.

    Raises:
        SaveError: there is no such directory, or a record is damaged.
    """
    if not Path(root).is_dir():
        raise SaveError(f"there is no directory {root}")
    return sorted(
        (read(p, whole=False) for p in (Path(root) / RECORDS).glob("update-*.npz")),
        key=lambda r: (r.number, r.learner),
    )


def find(root: str | Path, number: int, learner: str | None = None) -> Recorded:
    """The record of an update.

    Raises:
        SaveError: it is not there: which are is told; or it is damaged.
        SettingError: several learners have one of this number.
    """
    every = records(root)
    here = [r for r in every if learner in (None, r.learner)]
    found = [r for r in here if r.number == number]
    if len(found) > 1:
        raise SettingError(
            f"several learners have an update {number}: name one with --learner: {', '.join(r.learner for r in found)}"
        )
    if found:
        return read(found[0].path)
    if not every:
        raise SaveError(f"{root} holds no records of updates; run it with --record")
    known = sorted({r.learner for r in every})
    if not here:
        raise SaveError(f"{root} holds no records of {learner}; it does of {', '.join(known)}")
    near = sorted(sorted({r.number for r in here}, key=lambda n: abs(n - number))[:4])
    more = (
        " (more of them: flowrl run --record-every N)"
        if all(r.header["why"][0][:5] != "every" for r in here)
        else ""
    )
    raise SaveError(
        f"update {number} was not recorded; the nearest that were are {', '.join(map(str, near))}{more}"
    )


def listed(root: str | Path, most: int | None = None) -> str:
    """The records of a run as a table; only so many of them, the newest, if a number is given.

    Raises:
        SaveError: as `records`.
    """
    every = records(root)
    if not every:
        return f"{root} holds no records of updates; run it with --record"
    many = len({r.learner for r in every}) > 1
    lines = [f"{'update':>8}  {'loss':>12}  {'size':>8}  kept because"]
    if most is not None and len(every) > most:
        lines.append(f"({len(every) - most:,} before; flowrl replay {root} lists all)")
    for r in every if most is None else every[-most:]:
        who = f"{r.learner}: " if many else ""
        lines.append(
            f"{r.number:>8}  {r.metrics['loss']:>12.6g}  {in_bytes(r.path.stat().st_size):>8}  {who}{', '.join(r.header['why'])}"
        )
    return "\n".join(lines)
