"""A replay on the device, over environments written in JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.clock import REPLAY
from flowrl.core.items import Batch, nbytes
from flowrl.core.texts import in_bytes
from flowrl.core.trees import names_of
from flowrl.errors import GraphError, SettingError
from flowrl.graph.protocols import Site
from flowrl.replay.handle import ReplayHandle, Stock
from flowrl.replay.jax_core import MOST, Core, State, Types, core_of
from flowrl.replay.sequences import carries_of
from flowrl.replay.shards import needed, reached, too_large, too_small

if TYPE_CHECKING:
    from flowrl.replay.replay import Replay

Array = Any
Fields = dict[str, Array]


class JaxReplay(ReplayHandle):
    """A replay on the device at work; it is one part whatever `shards` says.

    Args:
        spec: the settings of the replay.
        site: what the runtime offers to it.
    """

    lasting = (*ReplayHandle.lasting, "rollout_length", "arrays", "added", "reached", "ahead")
    remade = (*ReplayHandle.remade, "core", "nbytes")

    def __init__(self, spec: Replay, site: Site) -> None:
        super().__init__(spec, site)
        self.core: Core | None = None
        self.rollout_length = 0
        """Steps of a rollout; 0 before the first one."""
        self.arrays: State = {}
        self.added = 0
        """Steps that were added, counted on the host, for `reached` alone."""
        self.reached = False
        """Whether enough steps were added for an n-step return."""
        self.ahead = np.zeros(self.runners.environments, np.int64)
        """By environment, how many more rollouts it gave than the one that gave the fewest.

        Asynchronous runners take no turns, and a queue may drop the rollout of one of them.
        """

    @property
    def state(self) -> Any:
        """The static part of the state, and the arrays."""
        return {**self.static, "ahead": tuple(self.ahead.tolist()), "arrays": self.arrays}

    @state.setter
    def state(self, state: Any) -> None:
        self.steps, self.pending = state["steps"], dict(state["pending"])
        self.ahead = np.array(state["ahead"])
        self.arrays = state["arrays"]

    def take(self, state: Any) -> None:
        """Go on with the rows that were kept."""
        super().take(state)
        if self.rollout_length:
            self.core = self._new_core(self.rollout_length, self.runners.environments)
            self.nbytes = sum(map(nbytes, jax.tree.leaves(self.arrays)))

    @property
    def drawable(self) -> bool:
        """Whether it holds something to sample, by the number of steps that were added."""
        return self.reached

    def close(self) -> None:
        """Do nothing: a replay on the device holds only arrays."""

    def _core_for(self, batch: Batch) -> Core:
        """Return the functions for batches like this one, and make the arrays for the first.

        Raises:
            GraphError: it is too small for such rollouts, or these have several lengths.
            SettingError: it is too large for the device.
        """
        steps, envs = batch.shape[0], self.runners.environments
        if self.core is None:
            self.core, self.rollout_length = self._new_core(steps, envs), steps
        if steps != self.rollout_length:
            raise GraphError(
                f"rollouts of {steps} steps came after others of {self.rollout_length}; "
                "a replay on the device takes those of one length"
            )
        if not self.arrays:
            self._allocate(self.core, batch)
        return self.core

    def _new_core(self, steps: int, envs: int) -> Core:
        """Return the functions for rollouts of so many steps of all environments."""
        # One row more than the steps, for the observation after the last; in whole rollouts.
        rows = math.ceil((self.spec.buffer_size / envs + 1) / steps) * steps
        too_small(self.spec, self.site.name, -(-self.spec.buffer_size // envs), steps, envs)
        if rows * envs > MOST:
            raise SettingError(
                f"buffer_size={self.spec.buffer_size:,} is more than the {MOST:,} steps of a "
                f"device; lower {self.site.name}.buffer_size"
            )
        return core_of(self.spec, rows, envs, steps)

    def _allocate(self, core: Core, batch: Batch) -> None:
        """Make the arrays for batches of these fields.

        Raises:
            SettingError: the device can't hold them.
        """
        names = [*names_of("obs", batch.data), "action", "reward", *self.spec.extra]
        if self.spec.prioritized and "priority" in batch.data:
            names.append("priority")
        if self.spec.sequence_length is not None:
            names.append("terminated")
        types: dict[str, Any] = {
            "fields": _types(batch.data, names, 2),
            "carries": _types(batch.columns, carries_of(batch), 1),
        }
        shapes = jax.eval_shape(partial(core.empty, **types), jax.random.key(0))
        self.nbytes = sum(map(nbytes, jax.tree.leaves(shapes)))
        try:
            self.arrays = self.site.run(core.empty, self.site.key("draws"), **types)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            takes = in_bytes(self.nbytes)
            raise too_large(self.spec, self.site.name, takes, " on the device") from error

    @REPLAY
    def add(self, batch: Batch) -> None:
        """Write every runner's columns."""
        batch = needed(self.spec, batch)
        core, envs = self._core_for(batch), np.asarray(batch.columns["env"])
        end = {name: batch.columns[f"bootstrap_{name}"] for name in names_of("obs", batch.data)}
        end |= {name: batch.columns[name] for name in carries_of(batch)}
        parts = self._parts(envs)
        for part in parts:
            first, last = int(part[0]), int(part[-1]) + 1
            given = (batch.data, end, batch.columns["first"])
            if len(parts) > 1:
                given = self.site.run(_columns, *given, first=first, last=last)
            self.arrays = self.site.run(
                core.add, self.arrays, *given, donate=(0,), low=int(envs[part[0]])
            )
            self.ahead[envs[part]] += 1
        self.ahead -= self.ahead.min()
        self.added += batch.steps
        self.reached = self.reached or reached(self.spec, self.added, batch.shape[0], core.envs)
        self._note_added(batch.steps)

    def _parts(self, envs: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Return the columns of a batch in parts, each of which is written at once.

        A part is of neighbouring environments that gave equally many rollouts before it.

        Args:
            envs: the environment of each column; one may come several times, in its order.
        """
        ahead, parts = self.ahead.copy(), []
        # Where an environment comes again, it has given one rollout more.
        for columns in np.split(np.arange(len(envs)), np.flatnonzero(np.diff(envs) <= 0) + 1):
            numbers = envs[columns]
            apart = (np.diff(numbers) != 1) | (np.diff(ahead[numbers]) != 0)
            parts += np.split(columns, np.flatnonzero(apart) + 1)
            ahead[numbers] += 1
        return parts

    @REPLAY
    def sample(self, size: int, reader: str, ahead: int = 0) -> Batch:
        """Return a batch sampled from all environments; nothing is asked for beforehand.

        Raises:
            GraphError: too few steps were added for an n-step return.
        """
        if not self.reached:
            raise self._nothing_to_sample()
        self.arrays, data, columns = self.site.run(
            cast("Core", self.core).sample, self.arrays, donate=(0,), size=size
        )
        self._note_sampled(size)
        # Policy versions are static numbers in a program, not arrays to be stored by row. So the
        # version of a transition is not kept here, and its policy lag is NaN.
        return Batch(data, {"version": jnp.full(size, jnp.nan), **columns})

    @REPLAY
    def prioritize(self, feedback: dict[str, Array]) -> None:
        """Set the priorities at once, for the device itself waits until they are computed."""
        self._note_prioritized(feedback)
        given = (feedback["slot"], feedback["stamp"], feedback["priority"])
        self.arrays = self.site.run(
            cast("Core", self.core).prioritize, self.arrays, *given, donate=(0,)
        )

    def stock(self) -> Stock:
        """Return what was added so far and its whereabouts, as the device counted it."""
        if not self.arrays or self.core is None:
            return Stock(0, 0, 0, 0)
        count = np.asarray(self.arrays["count"])
        held = int(np.minimum(count, self.core.rows - 1).sum())
        return Stock(int(count.sum()), held, int(count.sum()) - held, 0)


def _types(fields: Fields, names: Iterable[str], axes: int) -> Types:
    """Return names, shapes and types of some fields, without their first axes."""
    return tuple(
        (name, tuple(fields[name].shape[axes:]), str(fields[name].dtype)) for name in names
    )


def _columns(
    data: Fields, end: Fields, start: Array, *, first: int, last: int
) -> tuple[Fields, Fields, Array]:
    """Return the columns from `first` to before `last` of a rollout, its end and its start."""
    rows = {name: x[:, first:last] for name, x in data.items()}
    return rows, {name: x[first:last] for name, x in end.items()}, start[first:last]
