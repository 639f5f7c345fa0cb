"""`Learner`: weights, an optimiser and a loss; one compiled call per update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from flowrl.core.clock import here, update_begins
from flowrl.core.declared import hidden
from flowrl.core.events import Updated, Updating
from flowrl.core.items import Batch, Gradients, Metrics, Trained, lag_of, nbytes, plain_copy
from flowrl.core.keeping import into, leaves
from flowrl.core.remote import RemoteArray
from flowrl.errors import ContractError, GraphError, SettingError
from flowrl.graph.protocols import Handle, Ref, Resource, Site
from flowrl.graph.use import Use
from flowrl.learner.core import core_of, moved_target
from flowrl.learner.gradients import (
    FED_BACK,
    applied,
    arrays_of,
    as_item,
    gradients_of,
    versions_of,
)
from flowrl.learner.rules import lacking, misfit_of, runners_of, stale_data
from flowrl.rl.function_loss import as_loss
from flowrl.rl.losses import Loss
from flowrl.rl.optimizer_groups import Optimizers
from flowrl.rl.optimizers import as_transformation
from flowrl.rl.policies import Policy, Weights
from flowrl.rollout.handle import RunnersHandle
from flowrl.rollout.local_chain import action_values_of, values_of

Array = Any
TRACED = 32
"""With tracing on, the epochs of one update in so many are reported, for reporting takes time."""


class LearnerHandle(Handle):
    """A learner at work.

    `state` holds the core's state and the policy version, which rises by one per update.
    """

    remade = ("site", "runners", "core", "shards", "rows", "begun_with")

    # It reads no state. Where a stage has no right to train, the error is then about `update`.
    shared: ClassVar[tuple[str, ...]] = ("lacking",)

    def __init__(self, spec: Learner, site: Site) -> None:
        runners: RunnersHandle = site.resource(spec.runners)
        self.site = site
        self.runners = spec.runners
        self.core = core_of(spec.policy, runners.spaces, as_loss(spec.loss), spec.optimizer)
        if wrong := self.core.loss.check(self.core.network):
            raise GraphError(wrong)
        self.state = {"core": site.run(self.core.init, site.key("init")), "version": np.int32(0)}
        self.shards = 1
        """Devices that shared the last update."""
        self.rows = 0
        """Rows of the last update's minibatches; 0 before the first update."""
        self.begun_with: list[Callable[[], None]] = []
        """What is called when it begins with other weights than its own first ones."""
        runners.publish(*self.weights())

    def close(self) -> None:
        """Do nothing: a learner holds no processes and no files."""

    def keep(self) -> Any:
        """Return the core's state by its leaves, and the policy version."""
        return {"core": leaves(self.state["core"]), "version": self.state["version"]}

    def take(self, state: Any) -> None:
        """Go on from the state that was kept."""
        core = into(self.state["core"], state["core"], self.site.name)
        self.state = {"core": core, "version": state["version"]}

    def begin_with(self, taken: Weights) -> None:
        """Begin with these weights in place of its own first ones, and publish all of them.

        The target network begins equal to them, the optimiser at its start.

        Args:
            taken: arrays by name, of the same shapes; what is not among them stays.
        """
        core = self.site.run(self.core.begin_with, self.state["core"], taken)
        self.state = {**self.state, "core": core}
        self.site.resource(self.runners).publish(*self.weights())
        for call in self.begun_with:
            call()

    def update(
        self,
        batch: Batch,
        *,
        epochs: int = 1,
        minibatch_size: int | None = None,
        shuffle: bool = True,
    ) -> Trained:
        """Train on a batch in one compiled call, whatever its epochs and minibatches.

        Args:
            batch: ``[T, B]`` with the fields that the loss needs.
            epochs: how often each step is used.
            minibatch_size: steps per gradient step; None for all at once.
            shuffle: whether each epoch shuffles the minibatches again, or takes them in order.

        Returns:
            The metrics of the update, the policy lag of the batch, and feedback by column.

        Raises:
            ContractError: a field or the column `version` is missing, or `minibatch_size` does
                not divide the batch.
        """
        if wrong := self.lacking(batch):
            raise ContractError(wrong)
        steps = batch.steps
        size = steps if minibatch_size is None else minibatch_size
        self._check_divides(batch, size)
        lag = self.site.call(lag_of, self.state["version"], *versions_of(batch))
        settings = {"epochs": epochs, "minibatch_size": size, "shuffle": shuffle}
        metrics, priority = self._run(batch, settings, lag)
        self._count(steps, epochs, size)
        feedback = {name: batch.columns[name] for name in FED_BACK if name in batch.columns}
        if self.core.loss.priorities:
            feedback["priority"] = priority
        return self._updated(Trained(steps, metrics, lag, feedback, self.site.name))

    def _updated(self, trained: Trained) -> Trained:
        """Report an update, and return its result."""
        if self.site.stream.wants(Updated):
            before = int(self.state["version"]) - 1
            self.site.stream.emit(Updated(self.site.name, before, trained))
        return trained

    def _run(
        self, batch: Batch, settings: dict[str, Any], lag: tuple[Array, Array]
    ) -> tuple[Metrics, Array | None]:
        """Run the compiled update and keep its state; return its metrics and priorities."""
        data, columns = arrays_of(self.core, batch)
        version = self.state["version"]
        if self.site.stream.wants(Updating):
            before = self.site.run(plain_copy, self.state["core"])
            self.site.stream.emit(
                Updating(self.site.name, int(version), before, batch, settings, self.core)
            )
        if traced := self._traces(lag, settings["epochs"]):
            update_begins()
        self._share(batch, settings["minibatch_size"])
        core, metrics, priority = self.site.run(
            self.core.update,
            *self._apart(),
            data,
            columns,
            donate=(1,),
            **settings,
            traced=traced,
            shards=self.shards,
        )
        self.state = {"core": core, "version": version + 1}
        return metrics, priority

    def _apart(self) -> tuple[Weights, dict[str, Any]]:
        """Return the weights, and the rest of the state, which nobody else has."""
        others = dict(self.state["core"])
        return others.pop("weights"), others

    def _share(self, batch: Batch, size: int) -> None:
        """Find how many devices share minibatches of this size."""
        rows, devices = size // self._row_steps(batch), self.site.devices
        self.shards = devices if rows % devices == 0 else 1
        # `rows` is set last: another thread, which shows what goes on, takes a number there as a
        # sign that the rest is known.
        self.rows = rows

    def gradients(self, batch: Batch) -> Gradients:
        """Return the gradients of a batch, of the newest weights.

        Args:
            batch: ``[T, B]`` with the fields that the loss needs.

        Raises:
            ContractError: a field or the column `version` is missing.
        """
        if wrong := self.lacking(batch):
            raise ContractError(wrong)
        data, columns = arrays_of(self.core, batch)
        self._share(batch, batch.steps)
        core = self.state["core"]
        key, found = self.site.run(
            gradients_of, core, data, columns, core=self.core, shards=self.shards
        )
        self.state = {**self.state, "core": {**core, "key": key}}
        return as_item(self.site, self.site.name, found, batch, self.state["version"])

    def apply(self, gradients: Gradients) -> Trained:
        """Take one step of the optimiser by some gradients.

        Args:
            gradients: of this learner's loss, of the newest weights or older ones.

        Returns:
            The metrics of the update, the policy lag of the data, and feedback by column.

        Raises:
            ContractError: they are of another learner.
        """
        if gradients.learner != self.site.name:
            raise ContractError(
                f"applies the gradients of {gradients.learner} to {self.site.name}; name the same "
                "learner in both operators"
            )
        version, columns = self.state["version"], dict(gradients.columns)
        priority = columns.pop("priority", None)
        versions, lags = columns.pop("version"), columns.pop("lag")
        newest = gradients.batches == 1 and bool((versions == version).all())
        names = ("params", "metrics", "valid", "rest")
        found = {**{name: getattr(gradients, name) for name in names}, "priority": priority}
        core, metrics, priority = self.site.run(
            applied, *self._apart(), found, donate=(1,), core=self.core, newest=newest
        )
        self.state = {"core": core, "version": version + 1}
        self._count(gradients.steps, 1, gradients.steps)
        self.site.count(applied_gradients=1)
        if priority is not None:
            columns["priority"] = priority
        lag = self.site.call(lag_of, version, versions, lags)
        return self._updated(Trained(gradients.steps, metrics, lag, columns, self.site.name))

    def _row_steps(self, batch: Batch) -> int:
        """Return the steps of one row of a minibatch: those of a column where these stay whole."""
        return batch.shape[0] if self.core.sequences else 1

    def _check_divides(self, batch: Batch, size: int) -> None:
        """Raise an error if minibatches of this size do not divide the batch.

        Raises:
            ContractError: with the nearest sizes that do.
        """
        steps, row_steps = batch.steps, self._row_steps(batch)
        if steps % size == 0 and size % row_steps == 0:
            return
        divisors = [d for d in range(row_steps, steps + 1, row_steps) if steps % d == 0]
        nearest = sorted(divisors, key=lambda d: abs(d - size))[:2]
        columns = ""
        if self.core.sequences:
            columns = f" of {batch.shape[1]} columns with {row_steps} each, which stay whole"
        raise ContractError(
            f"minibatch_size={size} does not divide the batch of {steps:,} steps{columns}; "
            f"take {' or '.join(map(str, sorted(nearest)))}"
        )

    def _traces(self, lag: tuple[Array, Array], epochs: int) -> bool:
        """Return whether the epochs of the next update report when they end."""
        # Not where the learner is placed, whose arrays are remote, nor in a program, whose stream
        # is silent while it is traced: a callback from there can't reach this thread's clock.
        return bool(
            here().spans is not None
            and not self.site.stream.silent
            and not isinstance(lag[0], RemoteArray)
            and epochs > 1
            and self.state["version"] % TRACED == 0
        )

    def _count(self, steps: int, epochs: int, size: int) -> None:
        """Count an update; of a loss that may stop early only the most gradient steps are known."""
        counter = "most_gradient_steps" if self.core.loss.stops_early else "gradient_steps"
        self.site.count(
            updates=1,
            trained_steps=steps,
            used_steps=epochs * steps,
            **{counter: epochs * (steps // size)},
        )

    def shareable(self) -> tuple[int, int]:
        """Return the rows of the last update's minibatches, and the bytes of its gradients."""
        return self.rows, sum(map(nbytes, self.state["core"]["weights"].params.values()))

    def facts(self) -> dict[str, Any]:
        """Return how many devices share an update."""
        return {"devices": self.shards}

    def findings(self) -> Iterator[str]:
        """Report whether devices are idle during updates, and what would put them to use."""
        if self.rows and self.shards < self.site.devices:
            rows = f"{self.rows:,} {'columns' if self.core.sequences else 'steps'}"
            yield (
                f"{self.site.name}: its updates use one of {self.site.devices} devices, "
                f"which can't share minibatches of {rows} evenly; "
                f"take a multiple of {self.site.devices}"
            )

    def lacking(self, batch: Batch, added: Mapping[str, str] = MappingProxyType({})) -> str:
        """Return which fields a batch lacks that the loss needs, and the way out; empty if none.

        Args:
            batch: what is to be trained on.
            added: by field, the operator that adds it.
        """
        return lacking(self.core.loss, batch, added)

    def values(self, batch: Batch) -> Array:
        """Return the values ``[B]`` of the observations after the last rows of a batch.

        The newest weights compute them.

        Raises:
            ContractError: the batch has lost the column bootstrap_obs.
        """
        return values_of(self.site, self.core.network, self.state["core"]["weights"], batch)

    def action_values(self, batch: Batch) -> Array:
        """Return the action values ``[T + 1, B, n]`` at the rows of a batch and after the last.

        The newest weights compute them.

        Raises:
            ContractError: the batch has lost the column bootstrap_obs, or the policy has none.
        """
        return action_values_of(self.site, self.core.network, self.state["core"]["weights"], batch)

    def update_target(self, tau: float = 1.0) -> None:
        """Move the target network towards the newest parameters.

        Args:
            tau: the share of the way that it moves; 1 copies the parameters.

        Raises:
            ContractError: the loss uses no target network.
        """
        if not self.core.loss.target_network:
            raise ContractError(
                f"{type(self.core.loss).__name__} uses no target network; remove this operator"
            )
        core = self.state["core"]
        target = self.site.run(
            moved_target, core["target"], core["weights"].params, donate=(0,), tau=tau
        )
        self.state = {**self.state, "core": {**core, "target": target}}
        self.site.count(target_updates=1)

    def lag(self, batch: Batch) -> int:
        """Return the policy lag of a batch: how many updates old its oldest column is.

        Raises:
            ContractError: the column `version` was lost or computed again.
        """
        versions = batch.columns.get("version")
        if not isinstance(versions, np.ndarray):
            raise ContractError(
                "the age of the batch can't be known before the run: it was sampled from a replay "
                "(remove max_lag), or lost the column version (change batches by "
                "batch.with_(...), which keeps the columns)"
            )
        return int(np.max(self.state["version"] - versions))

    def weights(self) -> tuple[Weights, Any]:
        """Return the weights, which no update changes in place, and their policy version."""
        return self.state["core"]["weights"], self.state["version"]


@dataclass(frozen=True)
class Learner(Resource):
    """A policy in training, with its loss and its optimiser.

    Args:
        policy: policy to train, the same as its runners act with.
        loss: loss such as `PPOLoss`, or a function ``(policy, params, batch) -> (loss, metrics)``.
        optimizer: optimiser such as `Adam`, `Optimizers` of several groups of parameters, or an
            optax transformation.
        runners: name of the runners whose spaces it is made for; they get its first weights
            (default ``runners``).

    Raises:
        SettingError: one of them is of another kind, or is not hashable.
    """

    policy: Policy
    loss: Any
    optimizer: Any
    runners: Ref[RunnersHandle] = "runners"

    handle: ClassVar[type[Handle]] = LearnerHandle
    shares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise SettingError(
                f"policy must be fl.Policy(ModuleClass, **settings), got {self.policy!r}"
            )
        if not isinstance(self.optimizer, Optimizers):
            as_transformation(self.optimizer)
        try:
            hash((as_loss(self.loss), self.optimizer))
        except TypeError as error:
            raise SettingError(
                "loss and optimizer must be hashable values "
                f"(frozen dataclasses, tuples in place of lists): {error}"
            ) from None
        if wrong := hidden(as_loss(self.loss), Loss):
            raise SettingError(f"loss: {wrong}")

    def open(self, site: Site) -> LearnerHandle:
        """Make the first weights, publish them to the runners, and return the handle."""
        return LearnerHandle(self, site)

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Report whether it is trained, and on data of the right age and policy."""
        runners = runners_of(use, str(self.runners))
        if runners is not None and runners.policy != self.policy:
            problem = f"trains {self.policy}, but {self.runners} act with {runners.policy}"
            yield use.name, f"{problem}; give both the same policy"
        if use.never("updates"):
            yield use.name, "no node trains it; add train=TrainOneStep()"
        loss = as_loss(self.loss)
        kind = type(loss).__name__
        if runners is not None and (misfit := misfit_of(loss, runners.explore_of(""))):
            yield str(self.runners), misfit
        if loss.target_network and use.never("target_updates"):
            problem = f"nothing moves the target network of {kind}"
            yield use.name, f"{problem}; add target=UpdateTarget(...) after TrainOneStep"
        if loss.on_policy:
            yield from stale_data(use, kind, str(self.runners))

    def describe(self) -> str:
        """Return one line such as ``MLP, PPOLoss, Adam``."""
        parts = (self.policy.fn, self.loss, self.optimizer)
        return ", ".join(getattr(p, "__name__", type(p).__name__) for p in parts)
