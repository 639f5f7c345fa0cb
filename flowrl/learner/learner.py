"""`Learner`: weights, an optimiser and a loss; one compiled call per update."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from flowrl.core.clock import here, update_begins
from flowrl.core.events import Updated, Updating
from flowrl.core.items import Batch, Trained, lag_of, plain_copy
from flowrl.core.remote import RemoteArray
from flowrl.errors import ContractError, GraphError, SettingError
from flowrl.graph.protocols import Handle, Ref, Resource, Site, Use, hidden
from flowrl.learner.core import core_of
from flowrl.rl import losses, value_losses
from flowrl.rl.explore import Explore
from flowrl.rl.losses import Loss, as_loss
from flowrl.rl.optimizers import as_transformation
from flowrl.rl.policies import Policy, Weights
from flowrl.rollout.handle import RunnersHandle
from flowrl.rollout.local_chain import action_values_of, sequence_columns, values_of
from flowrl.rollout.runners import Runners

Array = Any
TRACED = 8
"""In a trace the epochs of every so manieth update are told, for those that tell them take longer."""
FED_BACK = ("producer", "slot", "stamp", "shard")


class LearnerHandle(Handle):
    """A learner at work. `state` holds the core's state and the version, which rises by one per update."""

    shared: ClassVar[tuple[str, ...]] = ("lacking",)

    def __init__(self, spec: Learner, site: Site) -> None:
        runners: RunnersHandle = site.resource(spec.runners)
        self.site = site
        self.core = core_of(spec.policy, runners.spaces, as_loss(spec.loss), spec.optimizer)
        if wrong := self.core.loss.check(self.core.network):
            raise GraphError(wrong)
        self.state = {"core": site.run(self.core.init, site.key("init")), "version": np.int32(0)}
        self.shards = 1
        """Devices that shared the last update."""
        self.rows = 0
        """Rows of its minibatches."""
        runners.publish(*self.weights())

    def close(self) -> None:
        """Nothing to let go of."""

    def update(
        self,
        batch: Batch,
        *,
        epochs: int = 1,
        minibatch_size: int | None = None,
        shuffle: bool = True,
    ) -> Trained:
        """Train on a batch: one compiled call, whatever its epochs and minibatches.

        Args:
            batch: ``[T, B]`` with the fields that the loss needs.
            epochs: how often each step is used.
            minibatch_size: steps per gradient step; None for all at once.
            shuffle: whether minibatches are drawn anew each epoch, or taken in order.

        Raises:
            ContractError: a field is missing, or `minibatch_size` does not divide the batch.
        """
        if lacking := self.lacking(batch):
            raise ContractError(lacking)
        steps = batch.steps
        size = steps if minibatch_size is None else minibatch_size
        whole = batch.shape[0] if self.core.sequences else 1
        if steps % size or size % whole:
            near = sorted(
                (d for d in range(whole, steps + 1, whole) if steps % d == 0),
                key=lambda d: abs(d - size),
            )[:2]
            cut = (
                f" of {batch.shape[1]} columns with {whole} each, which stay whole"
                if self.core.sequences
                else ""
            )
            raise ContractError(
                f"minibatch_size={size} does not divide the batch of {steps:,} steps{cut}; take {' or '.join(map(str, sorted(near)))}"
            )
        version = self.state["version"]
        if "version" not in batch.columns:
            raise ContractError(
                "needs the column version, but the batch has lost it; change batches by batch.with_(...), which keeps the columns"
            )
        lag = self.site.call(lag_of, version, batch.columns["version"])
        data = (
            batch.data
            if "valid" in batch.data
            else batch.with_(valid=np.ones(batch.shape, bool)).data
        )
        columns = sequence_columns(batch) if self.core.sequences else {}
        how, stream = (
            {"epochs": epochs, "minibatch_size": size, "shuffle": shuffle},
            self.site.stream,
        )
        if stream.wants(Updating):
            stream.emit(
                Updating(
                    self.site.name,
                    int(version),
                    self.site.run(plain_copy, self.state["core"]),
                    batch,
                    how,
                    self.core,
                )
            )
        seen = (
            here().spans is not None and not stream.silent and not isinstance(lag[0], RemoteArray)
        )
        traced = {"traced": True} if seen and epochs > 1 and version % TRACED == 0 else {}
        if traced:
            update_begins()
        rows, devices = size // whole, self.site.devices
        # The rows last: another thread, which shows what goes on, takes them for a sign that the rest is known.
        self.shards, self.rows = devices if rows % devices == 0 else 1, rows
        core, metrics, priority = self.site.run(
            self.core.update,
            self.state["core"],
            data,
            columns,
            donate=(0,),
            **how,
            **traced,
            shards=self.shards,
        )
        self.state = {"core": core, "version": version + 1}
        planned = {
            "most_gradient_steps" if self.core.loss.stops_early else "gradient_steps": epochs
            * (steps // size)
        }
        self.site.count(updates=1, trained_steps=steps, used_steps=epochs * steps, **planned)
        feedback = {name: batch.columns[name] for name in FED_BACK if name in batch.columns}
        trained = Trained(
            steps,
            metrics,
            lag,
            {**feedback, **({"priority": priority} if self.core.loss.priorities else {})},
        )
        if stream.wants(Updated):
            stream.emit(Updated(self.site.name, int(version), trained))
        return trained

    def facts(self) -> dict[str, Any]:
        """How many devices share an update."""
        return {"devices": self.shards}

    def findings(self) -> Iterator[str]:
        """Whether devices are idle, and how they would not be."""
        if self.rows and self.shards < self.site.devices:
            rows = f"{self.rows:,} {'columns' if self.core.sequences else 'steps'}"
            yield (
                f"{self.site.name}: its updates use one of {self.site.devices} devices, which can't share minibatches of {rows} evenly; "
                f"take a multiple of {self.site.devices}"
            )

    def lacking(self, batch: Batch, added: Mapping[str, str] = MappingProxyType({})) -> str:
        """Return which fields a batch lacks that the loss needs, and the way out; empty if it has all.

        Args:
            batch: what is to be trained on.
            added: by field, the operator that adds it.
        """
        missing = [name for name in self.core.loss.needs if name not in batch.data]
        if not missing:
            return ""
        drawn = (
            "next_obs" in batch.data
        )  # transitions have no order in time, which what works on fragments needs
        ways = [
            f"put {operator}(...) before it"
            for operator in sorted({added[name] for name in missing if name in added and not drawn})
        ]
        if others := _content_with(batch.data):
            ways.append(f"take a loss that needs no more than that ({', '.join(others)})")
        fields = f"the field{'s' * (len(missing) > 1)} {', '.join(missing)}, but the batch has {', '.join(batch.data)}"
        return f"{type(self.core.loss).__name__} needs {fields}; {', or '.join(ways) or 'add them before it'}"

    def values(self, batch: Batch) -> Array:
        """The values ``[B]`` of what comes behind the last rows of a batch, by the newest weights.

        Raises:
            ContractError: the batch has lost the column bootstrap_obs.
        """
        return values_of(self.site, self.core.network, self.state["core"]["weights"], batch)

    def action_values(self, batch: Batch) -> Array:
        """The action values ``[T + 1, B, n]`` at the rows of a batch and at what comes behind, by the newest weights.

        Raises:
            ContractError: the batch has lost the column bootstrap_obs, or the policy has none.
        """
        return action_values_of(self.site, self.core.network, self.state["core"]["weights"], batch)

    def update_target(self, tau: float = 1.0) -> None:
        """Move the target network towards the newest parameters.

        Args:
            tau: by which share; 1 copies them.

        Raises:
            ContractError: the loss uses none.
        """
        if not self.core.loss.target_network:
            raise ContractError(
                f"{type(self.core.loss).__name__} uses no target network; remove this operator"
            )
        self.state = {
            **self.state,
            "core": self.site.run(self.core.update_target, self.state["core"], tau=tau),
        }
        self.site.count(target_updates=1)

    def lag(self, batch: Batch) -> int:
        """How many updates old the oldest column of a batch is.

        Raises:
            ContractError: the column `version` was lost or computed anew.
        """
        versions = batch.columns.get("version")
        if not isinstance(versions, np.ndarray):
            raise ContractError(
                "the age of the batch can't be known before the run: it was drawn from a replay (remove max_lag), or lost the column version (change "
                "batches by batch.with_(...), which keeps the columns)"
            )
        return int(np.max(self.state["version"] - versions))

    def weights(self) -> tuple[Weights, Any]:
        """A copy of the weights, and their version."""
        return self.site.run(self.core.weights, self.state["core"]), self.state["version"]


def _misfit(loss: Loss, explore: Explore) -> str:
    """Say why a loss can't learn from actions that are picked so; empty if it can."""
    kind, how = type(loss).__name__, type(explore).__name__
    if loss.values and explore.samples:
        text = f"act by chance, the likelier the higher the action value, which {kind} does not train them for"
        return f"{text}; give runners explore=fl.EpsilonGreedy(...)"
    if loss.sampled and not explore.samples:
        text = f"act by {how}, for which {kind} does not correct: it learns from actions drawn from the policy's own distribution"
        way = "leave explore out, which draws them so (fl.Sampled()), and encourage exploration by the loss's entropy bonus"
        own = (
            ""
            if how in ("EpsilonGreedy", "GaussianNoise")
            else f"; if {how} does draw them so, let it say samples = True"
        )
        return f"{text}; {way}{own}"
    return ""


def _content_with(fields: Collection[str]) -> list[str]:
    """The names of the losses of ours that need no more than these fields."""
    kinds = [
        x
        for module in (losses, value_losses)
        for x in vars(module).values()
        if isinstance(x, type) and issubclass(x, Loss)
    ]
    named = [kind for kind in kinds if kind not in (Loss, losses.FunctionLoss)]
    return sorted({kind.__name__ for kind in named if set(kind.needs) <= set(fields)})


@dataclass(frozen=True)
class Learner(Resource):
    """A policy in training.

    Args:
        policy: the same as its runners act with.
        loss: one such as `PPOLoss`, or a function ``(policy, params, batch) -> (loss, metrics)``.
        optimizer: one such as `Adam`, or an optax transformation.
        runners: whose spaces it is made for; they get its first weights.
    """

    policy: Policy
    loss: Any
    optimizer: Any
    runners: Ref[RunnersHandle] = "runners"

    handle: ClassVar[type[Handle]] = LearnerHandle

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise SettingError(
                f"policy must be fl.Policy(ModuleClass, **settings), got {self.policy!r}"
            )
        as_transformation(self.optimizer)
        try:
            hash((as_loss(self.loss), self.optimizer))
        except TypeError as error:
            raise SettingError(
                f"loss and optimizer must be hashable values (frozen dataclasses, tuples in place of lists): {error}"
            ) from None
        if wrong := hidden(as_loss(self.loss), Loss):
            raise SettingError(f"loss: {wrong}")

    def open(self, site: Site) -> LearnerHandle:
        """Make the first weights and hand them to the runners."""
        return LearnerHandle(self, site)

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Is it trained, and on data of the right age and policy?"""
        runners = use.resources.get(str(self.runners))
        if isinstance(runners, Runners) and runners.policy != self.policy:
            yield (
                use.name,
                f"trains {self.policy}, but {self.runners} act with {runners.policy}; give both the same policy",
            )
        if use.traced and not use.total("updates"):
            yield use.name, "no node trains it; add train=TrainOneStep()"
        loss = as_loss(self.loss)
        kind = type(loss).__name__
        if isinstance(runners, Runners) and (wrong := _misfit(loss, runners.explore)):
            yield str(self.runners), wrong
        if loss.target_network and use.exact and not use.total("target_updates"):
            yield (
                use.name,
                f"nothing moves the target network of {kind}; add target=UpdateTarget(...) behind TrainOneStep",
            )
        if not loss.on_policy:
            return
        if replayed := [name for name in use.resources if use.total("drawn_steps", name)]:
            yield (
                use.name,
                f"{kind} is on-policy, but {replayed[0]} gives data of any age; take a loss such as DQNLoss, or train on fresh samples",
            )
            return
        for queue in dict.fromkeys(use.queues.values()):
            text = f"{kind} is on-policy, but what comes out of a queue may be any number of updates old"
            yield queue, f"{text}; remove the queue, or take a loss that corrects for age"
        for node, lag in use.lags.items():
            if math.isnan(lag):
                text = "but the age of its data can't be known: the column `version` was computed anew on the way"
                yield (
                    node,
                    f"{kind} is on-policy, {text}; change batches by batch.with_(...), which keeps the columns",
                )
            elif lag > 0:
                text = f"but it trains on data up to {lag:.0f} update{'s' * (lag > 1)} old"
                way = "put SyncWeights() behind every update and before the next sample, and make one batch of each round"
                yield node, f"{kind} is on-policy, {text}; {way}"

    def describe(self) -> str:
        """``MLP, PPOLoss, Adam``."""
        parts = (self.policy.fn, self.loss, self.optimizer)
        return ", ".join(getattr(p, "__name__", type(p).__name__) for p in parts)
