"""A recorded update, run again: without Ray, without the environment, and on the same processor with the same result to the bit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from flowrl.core.items import Batch
from flowrl.errors import SaveError, SettingError, unknown
from flowrl.graph import values
from flowrl.graph.protocols import Handle, Resource, Site, Use
from flowrl.graph.site import HereSite, Place
from flowrl.learner.learner import Learner, LearnerHandle
from flowrl.observe.record import Recorded, find, named
from flowrl.rl.spaces import Spaces

TRAINING = {"epochs": int, "minibatch_size": int | None, "shuffle": bool}
"""The settings of a node that trains."""


@dataclass(frozen=True)
class Replayed:
    """What an update told when it was recorded, what it told again, and what it tells with changed settings, by name."""

    record: Recorded
    recorded: dict[str, np.float32]
    again: dict[str, np.float32]
    changed: dict[str, np.float32] | None = None
    changes: tuple[str, ...] = ()
    moved: tuple[float, ...] = ()
    """The norm of the change of weights by the replay, and with the changed settings: what a single step of the optimiser tells of its rate."""

    @property
    def equal(self) -> bool:
        """Whether the replay tells the same to the bit."""
        return self.recorded.keys() == self.again.keys() and all(
            _same(self.recorded[k], self.again[k]) for k in self.recorded
        )

    def __str__(self) -> str:
        head = [
            "recorded",
            "replayed",
            *([f"with {', '.join(self.changes)}"] if self.changed is not None else []),
        ]
        parts = [self.recorded, self.again, *([self.changed] if self.changed is not None else [])]
        names = list(dict.fromkeys(name for part in parts for name in part if name != "bad"))
        width = max(map(len, [*names, "weights moved"]))
        lines = [
            f"update {self.record.number} of {self.record.learner}, recorded because: {', '.join(self.record.header['why'])}"
        ]
        lines.append("  ".join([" " * width, *(f"{h:>14}" for h in head)]))
        lines += [
            "  ".join(
                [f"{n:<{width}}", *(f"{p[n]:>14.8g}" if n in p else f"{'-':>14}" for p in parts)]
            )
            for n in names
        ]
        lines.append(
            "  ".join(
                [f"{'weights moved':<{width}}", f"{'-':>14}", *(f"{x:>14.8g}" for x in self.moved)]
            )
        )
        if self.equal:
            return "\n".join([*lines, "the replay is equal to the record to the bit"])
        off = {
            n: abs(float(self.recorded[n]) - float(self.again[n]))
            for n in names
            if n in self.recorded and n in self.again
        }
        most = max(off, key=lambda n: (np.isnan(off[n]), off[n]))
        asked = "was it recorded on other or more devices, or by other versions?"
        return "\n".join(
            [*lines, f"THE REPLAY DIFFERS, most in {most}, by {off[most]:.3g}: {asked}"]
        )


def _same(a: np.float32, b: np.float32) -> bool:
    return bool(a.tobytes() == b.tobytes() or (np.isnan(a) and np.isnan(b)))


def replay(
    root: str | Path,
    number: int,
    changes: Sequence[tuple[str, Any]] = (),
    *,
    learner: str | None = None,
    allow: Collection[str] = (),
) -> Replayed:
    """Run a recorded update of a run again, and once more with changed settings if any are given.

    Args:
        root: the run's directory.
        number: the update's: the learner's version before it, and 1.
        changes: settings of the learner or of a node that trains it: ``[("learner.loss.clip_ratio", 0.3), ("train.epochs", 4)]``.
        learner: whose, if the run has several.
        allow: packages beyond flowrl that may be imported for the user's own networks and losses.

    Raises:
        SaveError: the update was not recorded, its record is damaged, or its learner can't be made again.
        SettingError: there is no such setting, or it can't take the value.

    >>> import flowrl as fl, tempfile
    >>> where = tempfile.mkdtemp()
    >>> with fl.run(fl.ppo("CartPole-v1", fl.PPOSettings(batch_size=256, rollout_length=32)), steps=256, out=where, record=True) as run:
    ...     rows = list(run)
    >>> replay(where, 1).equal
    True
    """
    record = find(root, number, learner)
    header = record.header
    if header["text"] is None:
        why = header.get("because", "the run's graph was not known")
        raise SaveError(
            f"update {number} can't be run again, for its learner could not be written down: {why}"
        )
    spec = values.from_text(header["text"], allow=allow, source=f"{record.path}, {record.learner}")
    again, moved = _run(record, spec, header["settings"])
    if not changes:
        return Replayed(record, record.metrics, again, moved=(moved,))
    new, how = _changed(record, spec, changes)
    told = tuple(f"{name}={value}" for name, value in changes)
    changed, further = _run(record, new, how)
    return Replayed(record, record.metrics, again, changed, told, (moved, further))


def _changed(
    record: Recorded, spec: Learner, changes: Sequence[tuple[str, Any]]
) -> tuple[Learner, dict[str, Any]]:
    """The learner and the settings of the update with these changes."""
    how = dict(record.header["settings"])
    trainers = record.header["trainers"]
    known = [f"{t}.{k}" for t in trainers for k in TRAINING] + [
        f"{record.learner}.{path}" for path in values.addresses(spec) if path != "runners"
    ]
    for address, value in changes:
        if address not in known and not address.startswith(f"{record.learner}.policy."):
            begins = "A replay begins with the batch, so only what trains on it can be set"
            if address.partition(".")[0] not in (record.learner, *trainers):
                raise SettingError(f"{address} can't be set. {begins}: {', '.join(known)}")
            raise SettingError(f"{unknown('setting', address, known)}. {begins}")
        owner, _, name = address.rpartition(".")
        if owner in trainers:
            how[name] = values.fit(value, TRAINING[name], address)
        else:
            spec = values.with_setting(
                spec, address.removeprefix(f"{record.learner}."), value, record.learner
            )
    return spec, how


def _run(
    record: Recorded, spec: Learner, how: dict[str, Any]
) -> tuple[dict[str, np.float32], float]:
    """Run the update with these settings; what it tells, and how far it moved the weights."""
    known = Known(record.header["spaces"])
    handle = Place("replay", {str(spec.runners): known, record.learner: spec}, 0, HereSite).handle(
        record.learner
    )
    assert isinstance(handle, LearnerHandle)  # noqa: S101 - for a Learner gives no other
    handle.state = {
        "core": _state(record, handle.state["core"]),
        "version": np.int32(record.number - 1),
    }
    before = jax.tree.map(np.array, handle.state["core"]["weights"].params)
    trained = handle.update(Batch(record.part("data"), record.part("columns")), **how)
    squares = jax.tree.map(
        lambda a, b: float(np.square(np.asarray(b, np.float64) - a).sum()),
        before,
        handle.state["core"]["weights"].params,
    )
    metrics = dict(zip(trained.metrics.names, np.asarray(trained.metrics.values), strict=True))
    return metrics, math.sqrt(sum(jax.tree.leaves(squares)))


def _state(record: Recorded, like: Any) -> Any:
    """The recorded state of the learner, in the form of a new one's.

    Raises:
        SettingError: the learner has another form.
    """
    saved, leaves = record.part("state"), []
    for name, now in named(like):
        x, key = saved.get(name), jax.numpy.issubdtype(now.dtype, jax.dtypes.prng_key)
        leaf = jax.random.key_data(now) if key else now
        if x is None or (x.shape, x.dtype) != (leaf.shape, leaf.dtype):
            was = f"{x.dtype}{list(x.shape)}" if x is not None else "nothing"
            raise SettingError(
                f"{name} is {leaf.dtype}{list(leaf.shape)}, but {was} was recorded; only what leaves the form of weights and optimiser as it is "
                "can be set, such as a learning rate or a loss's coefficients",
                record.learner,
            )
        leaves.append(
            jax.random.wrap_key_data(jax.numpy.asarray(x), impl=jax.random.key_impl(now))
            if key
            else jax.numpy.asarray(x)
        )
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


class KnownHandle(Handle):
    """In the place of runners: their spaces alone."""

    def __init__(self, spaces: Spaces) -> None:
        self.spaces = spaces
        self.state = {}

    def close(self) -> None:
        """Nothing to let go of."""

    def publish(self, weights: Any, version: Any) -> None:
        """Nobody acts."""


@dataclass(frozen=True)
class Known(Resource):
    """The spaces of an environment that is not made.

    Args:
        spaces: as JSON.
    """

    spaces: str

    handle: ClassVar[type[Handle]] = KnownHandle

    def open(self, site: Site) -> KnownHandle:
        """Read them."""
        return KnownHandle(Spaces.from_json(self.spaces))

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Nothing can be wrong."""
        return iter(())

    def describe(self) -> str:
        """``spaces``."""
        return "spaces"
