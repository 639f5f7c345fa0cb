"""Reruns of recorded updates, without Ray and without the environment.

On the same processor a rerun has the same result to the bit.
"""

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
from flowrl.graph.protocols import Handle, Resource, Site
from flowrl.graph.refs import resource_and_part
from flowrl.graph.site import HereSite, Place
from flowrl.graph.use import Use
from flowrl.learner.learner import Learner, LearnerHandle
from flowrl.observe.record import Recorded, find, named
from flowrl.rl.spaces import Spaces

TRAINING = {"epochs": int, "minibatch_size": int | None, "shuffle": bool}
"""The settings of a node that trains, with their types."""
SAME_TREE = (
    "only what leaves the tree structure of weights and optimiser as it is can be set, such as a "
    "learning rate or a loss's coefficients"
)


@dataclass(frozen=True)
class Rerun:
    """The metrics of an update as it was recorded, rerun, and rerun with changed settings."""

    record: Recorded
    """The record of the update."""
    recorded: dict[str, np.float32]
    """The metrics that were recorded, by name."""
    again: dict[str, np.float32]
    """The metrics of the rerun with the recorded settings, by name."""
    changed: dict[str, np.float32] | None = None
    """The metrics of the rerun with changed settings, by name; None if none were changed."""
    changes: tuple[str, ...] = ()
    """The changed settings, such as ``train.epochs=4``."""
    moved: tuple[float, ...] = ()
    """The norm of the change of the weights by the rerun, and by the one with changed settings.
    With a single step of the optimiser only this shows the effect of its learning rate."""

    @property
    def equal(self) -> bool:
        """Whether the metrics of the rerun are equal to the recorded ones to the bit."""
        return self.recorded.keys() == self.again.keys() and all(
            _same(self.recorded[k], self.again[k]) for k in self.recorded
        )

    def __str__(self) -> str:
        titles, parts = ["recorded", "rerun"], [self.recorded, self.again]
        if self.changed is not None:
            titles.append(f"with {', '.join(self.changes)}")
            parts.append(self.changed)
        names = list(dict.fromkeys(name for part in parts for name in part if name != "bad"))
        width = max(map(len, [*names, "weights moved"]))
        reasons = ", ".join(self.record.header["why"])
        lines = [
            f"update {self.record.number} of {self.record.learner}, recorded because: {reasons}",
            "  ".join([" " * width, *(f"{title:>14}" for title in titles)]),
        ]
        for name in names:
            cells = [f"{part[name]:>14.8g}" if name in part else f"{'-':>14}" for part in parts]
            lines.append("  ".join([f"{name:<{width}}", *cells]))
        # How far the weights moved was not recorded.
        cells = [f"{'-':>14}", *(f"{x:>14.8g}" for x in self.moved)]
        lines.append("  ".join([f"{'weights moved':<{width}}", *cells]))
        return "\n".join([*lines, self._verdict(names)])

    def _verdict(self, names: Sequence[str]) -> str:
        """Return whether the rerun is equal to the record, and if not, where it differs most."""
        if self.equal:
            return "the rerun is equal to the record to the bit"
        off = {
            name: abs(float(self.recorded[name]) - float(self.again[name]))
            for name in names
            if name in self.recorded and name in self.again
        }
        # NaN counts as the largest difference.
        most = max(off, key=lambda name: (np.isnan(off[name]), off[name]))
        question = "was it recorded on other or more devices, by other versions, or by other code?"
        return f"THE RERUN DIFFERS, most in {most}, by {off[most]:.3g}: {question}"


def _same(a: np.float32, b: np.float32) -> bool:
    """Return whether two numbers have the same bits, or are both NaN."""
    return bool(a.tobytes() == b.tobytes() or (np.isnan(a) and np.isnan(b)))


def rerun(
    root: str | Path,
    number: int,
    changes: Sequence[tuple[str, Any]] = (),
    *,
    learner: str | None = None,
    allow: Collection[str] = (),
) -> Rerun:
    """Run a recorded update of a run again, and once more with changed settings if any are given.

    Args:
        root: the run's directory.
        number: the number of the update: 1 plus the learner's policy version before it.
        changes: settings of the learner or of a node that trains it, such as
            ``[("learner.loss.clip_ratio", 0.3), ("train.epochs", 4)]``.
        learner: whose update, if the run has several learners.
        allow: packages beyond flowrl that may be imported for the user's own networks and losses.

    Raises:
        SaveError: the update was not recorded, its record is damaged, or its learner can't be made
            again.
        SettingError: there is no such setting, or it can't take the value.

    >>> import flowrl as fl, tempfile
    >>> where = tempfile.mkdtemp()
    >>> graph = fl.ppo("CartPole-v1", fl.PPOSettings(batch_size=256, rollout_length=32))
    >>> with fl.run(graph, steps=256, out=where, record=True) as run:
    ...     rows = list(run)
    >>> rerun(where, 1).equal
    True
    """
    record = find(root, number, learner)
    header = record.header
    if header["text"] is None:
        why = header.get("because", "the run's graph was not known")
        raise SaveError(
            f"update {number} can't be run again, because its learner could not be saved: {why}"
        )
    spec = values.from_text(header["text"], allow=allow, source=f"{record.path}, {record.learner}")
    again, moved = _run(record, spec, header["settings"])
    if not changes:
        return Rerun(record, record.metrics, again, moved=(moved,))
    changed_spec, settings = _changed(record, spec, changes)
    changed, changed_moved = _run(record, changed_spec, settings)
    shown = tuple(f"{name}={value}" for name, value in changes)
    return Rerun(record, record.metrics, again, changed, shown, (moved, changed_moved))


def _changed(
    record: Recorded, spec: Learner, changes: Sequence[tuple[str, Any]]
) -> tuple[Learner, dict[str, Any]]:
    """Return the learner and the settings of the update with these changes."""
    settings = dict(record.header["settings"])
    trainers = record.header["trainers"]
    of_trainers = [f"{trainer}.{name}" for trainer in trainers for name in TRAINING]
    of_learner = [
        f"{record.learner}.{path}" for path in values.addresses(spec) if path != "runners"
    ]
    known = [*of_trainers, *of_learner]
    for address, value in changes:
        # A policy may take settings that are not listed; `with_setting` checks them.
        if address not in known and not address.startswith(f"{record.learner}.policy."):
            raise _not_settable(address, known, (record.learner, *trainers))
        owner, _, name = address.rpartition(".")
        if owner in trainers:
            settings[name] = found = values.fit(value, TRAINING[name], address)
            if found is not None and name != "shuffle" and found < 1:
                raise SettingError(f"{address} must be at least 1, got {found}")
        else:
            path = address.removeprefix(f"{record.learner}.")
            spec = values.with_setting(spec, path, value, record.learner)
    return spec, settings


def _not_settable(address: str, known: Sequence[str], owners: Sequence[str]) -> SettingError:
    """Return the error for a setting that a rerun does not have."""
    begins = "A rerun begins with the batch, so only what trains on it can be set"
    if address.partition(".")[0] not in owners:
        return SettingError(f"{address} can't be set. {begins}: {', '.join(known)}")
    return SettingError(f"{unknown('setting', address, known)}. {begins}")


def _run(
    record: Recorded, spec: Learner, settings: dict[str, Any]
) -> tuple[dict[str, np.float32], float]:
    """Run the update with these settings.

    Returns:
        Its metrics by name, and the Euclidean norm of the change of the weights.
    """
    runners, _ = resource_and_part(str(spec.runners))
    resources = {runners: Known(record.header["spaces"]), record.learner: spec}
    handle = Place("replay", resources, 0, HereSite).handle(record.learner)
    assert isinstance(handle, LearnerHandle)  # noqa: S101 - for a Learner gives no other
    # The rerun begins with the state and the policy version that the recorded update began with.
    handle.state = {
        "core": _state(record, handle.state["core"]),
        "version": np.int32(record.number - 1),
    }
    # The weights are copied, because the update may reuse their memory.
    before = jax.tree.map(np.array, handle.state["core"]["weights"].params)
    trained = handle.update(Batch(record.part("data"), record.part("columns")), **settings)
    squares = jax.tree.map(
        lambda a, b: float(np.square(np.asarray(b, np.float64) - a).sum()),
        before,
        handle.state["core"]["weights"].params,
    )
    metrics = dict(zip(trained.metrics.names, np.asarray(trained.metrics.values), strict=True))
    return metrics, math.sqrt(sum(jax.tree.leaves(squares)))


def _state(record: Recorded, like: Any) -> Any:
    """Return the recorded state of the learner, in the tree structure of a new one's.

    Raises:
        SettingError: the new learner has another tree structure.
    """
    saved, leaves = record.part("state"), []
    for name, new in named(like):
        recorded = saved.get(name)
        # Random keys were recorded as plain numbers.
        is_key = jax.numpy.issubdtype(new.dtype, jax.dtypes.prng_key)
        plain = jax.random.key_data(new) if is_key else new
        if recorded is None or (recorded.shape, recorded.dtype) != (plain.shape, plain.dtype):
            was = "nothing"
            if recorded is not None:
                was = f"{recorded.dtype}{list(recorded.shape)}"
            raise SettingError(
                f"{name} is {plain.dtype}{list(plain.shape)}, but {was} was recorded; {SAME_TREE}",
                record.learner,
            )
        leaf = jax.numpy.asarray(recorded)
        if is_key:
            leaf = jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(new))
        leaves.append(leaf)
    if others := saved.keys() - dict(named(like)).keys():
        raise SettingError(
            f"{min(others)} was recorded, but the changed learner has no such array; {SAME_TREE}",
            record.learner,
        )
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


class KnownHandle(Handle):
    """The handle of a resource that takes the place of runners, or of a part of them.

    It has only the spaces of these.

    Args:
        spaces: of the environment.
    """

    remade = ("spaces",)

    def __init__(self, spaces: Spaces) -> None:
        self.spaces = spaces
        self.state = {}

    def close(self) -> None:
        """Do nothing, because nothing is open."""

    def part(self, name: str) -> KnownHandle:
        """Return itself, for the spaces are those of the part that the learner trains."""
        return self

    def publish(self, weights: Any, version: Any) -> None:
        """Do nothing, because no runner acts by these weights."""


@dataclass(frozen=True)
class Known(Resource):
    """A resource that has the spaces of an environment which is not made.

    Args:
        spaces: of the environment, as JSON.
    """

    spaces: str

    handle: ClassVar[type[Handle]] = KnownHandle

    def open(self, site: Site) -> KnownHandle:
        """Return a handle with the spaces."""
        return KnownHandle(Spaces.from_json(self.spaces))

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Return no problems."""
        return iter(())

    def describe(self) -> str:
        """Return the name of the resource in texts, ``spaces``."""
        return "spaces"
