"""`Learner`: weights, an optimiser and a loss; one compiled call per update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flowrl.errors import ContractError, GraphError, SettingError
from flowrl.graph.protocols import Handle, Ref, Resource, Site, Use
from flowrl.items import COLUMNS, Batch, Metrics, Trained
from flowrl.mesh import split
from flowrl.resources.asking import RunnersHandle
from flowrl.resources.at_sampler import action_values_of, sequence_columns, values_of
from flowrl.resources.runners import Runners
from flowrl.rl.explore import Sampled
from flowrl.rl.losses import Loss, as_loss, valid_only
from flowrl.rl.optimizers import as_transformation
from flowrl.rl.policies import Network, Policy, RunningNorm, Weights, network
from flowrl.rl.spaces import Spaces

Array = Any
RESERVED = {*COLUMNS, "bad"}
FED_BACK = ("producer", "slot", "stamp", "shard")
State = dict[str, Any]


@lru_cache(maxsize=64)
def core_of(policy: Policy, spaces: Spaces, loss: Loss, optimizer: Any) -> Core:
    """The core for these settings: one and the same for equal ones, so that what was compiled for one run serves the next."""
    return Core(policy, spaces, loss, optimizer)


@dataclass(frozen=True)
class Core:
    """The learner's pure functions."""

    policy: Policy
    spaces: Spaces
    loss: Loss
    optimizer: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return core_of, (self.policy, self.spaces, self.loss, self.optimizer)

    @cached_property
    def network(self) -> Network:
        """The policy, made for the spaces."""
        return network(self.policy, self.spaces)

    @cached_property
    def tx(self) -> optax.GradientTransformation:
        """The optax transformation."""
        return as_transformation(self.optimizer)

    def init(self, key: Array) -> State:
        """The first state."""
        weights = self.network.init(jax.random.fold_in(key, 0))
        return {
            "weights": weights,
            "opt": self.tx.init(weights.params),
            "loss": self.loss.init(),
            "key": jax.random.fold_in(key, 1),
            **self._target(weights),
        }

    def _target(self, weights: Weights) -> State:
        return {"target": jax.tree.map(jnp.copy, weights.params)} if self.loss.target_network else {}

    def update_target(self, state: State, *, tau: float) -> State:
        """The state with its target network moved towards the newest parameters by the share `tau`."""
        return {**state, "target": jax.tree.map(lambda old, new: (1 - tau) * old + tau * new, state["target"], state["weights"].params)}

    def weights(self, state: State) -> Weights:
        """A copy of the weights: an update may reuse the buffers of the state's own."""
        copy: Weights = jax.tree.map(jnp.copy, state["weights"])
        return copy

    @property
    def sequences(self) -> bool:
        """Whether minibatches are made of whole columns ``[T, B, ...]``, not of single steps."""
        return self.loss.sequences or self.network.recurrent

    def update(
        self, state: State, data: dict[str, Array], columns: dict[str, Array], *, epochs: int, minibatch: int, shuffle: bool = True
    ) -> tuple[State, Metrics, Array | None]:
        """Epochs of minibatches in one call. A result that is not finite leaves the state as it was and sets ``bad``.

        Returns:
            The new state, metrics, and if the loss tells it the priority of each row ``[N]`` as it was found last.
        """
        length = data["valid"].shape[0] if self.sequences else 1
        n, size = data["valid"].size // length, minibatch // length
        if self.sequences:
            rows = valid_only(data)
        else:
            rows, columns = valid_only({k: v.reshape(-1, *v.shape[2:]) for k, v in data.items()}), {}
        key, mine = jax.random.split(state["key"])
        if self.loss.random:
            rows["seed"] = jax.random.bits(jax.random.fold_in(mine, 0), (n, 2))
        first = (state["weights"], state["opt"], jnp.bool_(False))
        names: list[str] = []
        step = self._gradient_step(state, names)

        def some(index: Array) -> dict[str, Array]:
            return {k: v[:, index] if self.sequences else v[index] for k, v in rows.items()} | {k: v[index] for k, v in columns.items()}

        def in_order(x: Array, axis: int) -> Array:
            return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)

        def epoch(carry: Any, key: Array) -> Any:
            if not shuffle:
                parts = {k: in_order(v, int(self.sequences)) for k, v in rows.items()} | {k: in_order(v, 0) for k, v in columns.items()}
                carry, told = jax.lax.scan(step, carry, parts)
                return carry, (*told, jnp.arange(n))
            order = jax.random.permutation(key, n).reshape(-1, size)
            carry, told = jax.lax.scan(lambda c, i: step(c, some(i)), carry, order)
            return carry, (*told, order)

        if size == n and epochs == 1:  # without a loop, in which XLA is many times slower at convolutions
            carry, (metrics, priority) = step(first, {**rows, **columns})
        elif size == n:
            carry, (metrics, priority) = jax.lax.scan(lambda c, _: step(c, {**rows, **columns}), first, None, length=epochs)
            priority = None if priority is None else priority[-1]
        else:
            carry, (metrics, priority, order) = jax.lax.scan(epoch, first, jax.random.split(mine, epochs))
            if priority is not None:
                priority = jnp.zeros(n).at[order[-1].reshape(-1)].set(priority[-1].reshape(-1))
        weights, opt, _ = carry
        metrics = metrics.reshape(-1, len(names))
        applied = metrics[:, -1:]  # names[-1] is gradient_steps
        share = applied / jnp.maximum(jnp.sum(applied), 1)
        means = dict(zip(names[:-1], jnp.sum(jnp.where(applied > 0, metrics, 0.0) * share, axis=0), strict=False))
        if self._normalizes:
            seen = rows["obs"].reshape(-1, *(self.spaces.obs.shape or ()))
            weights = Weights(weights.params, self.network.observe(weights, seen, rows["valid"].reshape(-1)))
        new = {"weights": weights, "opt": opt, "loss": self.loss.adapt(state["loss"], means)}
        numbers = [leaf.reshape(-1) for leaf in jax.tree.leaves(new) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        good = jnp.isfinite(means["loss"]) & jnp.all(jnp.isfinite(jnp.concatenate(numbers)))
        priority = None if priority is None else jnp.where(good, priority, 0.0)  # a NaN would spoil every draw before the next Row tells of it
        kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, {k: state[k] for k in new})
        told = {**means, "gradient_steps": jnp.where(good, jnp.sum(applied), 0), "bad": ~good}
        return {**state, **kept, "key": key}, Metrics.pack(told), priority

    def _gradient_step(self, state: State, names: list[str]) -> Callable[[Any, dict[str, Array]], Any]:
        """One step of the optimiser: from (weights, its state, whether to stop) and a minibatch to the same, metrics, the rows' priorities if any.

        Metrics, of which it tells the names, are one array, for XLA handles a few small ones no faster than a large one.
        """
        extra = {**state["loss"], **({"target_params": state["target"]} if self.loss.target_network else {})}

        def step(carry: Any, batch: dict[str, Array]) -> Any:
            weights, opt, stopped = carry

            def loss_of(params: dict[str, Array]) -> Any:
                rest = weights.rest

                def policy(params: dict[str, Array], *args: Array, method: str = "") -> Any:
                    nonlocal rest
                    if method:
                        return self.network.call(method, Weights(params, rest), *args)
                    dist, value, rest = self._forward(Weights(params, rest), args[0], batch)
                    return dist, value

                loss, metrics = self.loss(policy, params, {**batch, **extra})
                return loss, (metrics, rest)

            (loss, (metrics, rest)), grads = jax.value_and_grad(loss_of, has_aux=True)(weights.params)
            taken = sorted(RESERVED & set(metrics))
            if taken:
                raise ContractError(
                    f"the loss reports {', '.join(taken)}, which every Row has already; give it another name, such as loss/{taken[0]}"
                )
            stop, priority = metrics.pop("stop", None), metrics.pop("priority", None) if self.loss.priorities else None
            if stop is not None and not self.loss.stops_early:
                raise ContractError("the loss reports `stop`, but does not say that it may; make it a class on fl.Loss whose stops_early is True")
            updates, new_opt = self.tx.update(grads, opt, weights.params)
            new = (Weights(optax.apply_updates(weights.params, updates), rest), new_opt)
            applied = jnp.float32(1)
            if stop is not None:  # the step that goes too far is not taken, nor are those after it
                stopped = stopped | stop
                new = jax.tree.map(lambda a, b: jnp.where(stopped, a, b), (weights, opt), new)
                applied = 1 - stopped.astype(jnp.float32)
            told = {"loss": loss, **metrics, "gradient_steps": applied}
            names[:] = told
            return (*new, stopped), (jnp.stack([jnp.asarray(x, jnp.float32) for x in told.values()]), priority)

        return step

    def _forward(self, weights: Weights, obs: Array, batch: dict[str, Array]) -> Any:
        """Distribution, value and rest for the observations of a minibatch, or for its rows and the one behind."""
        if not self.sequences:
            return self.network.apply(weights, obs)
        memory = self.network.memory_of(batch, batch)
        if self.network.recurrent:
            memory = memory._replace(reset=memory.reset[: obs.shape[0]])
        return self.network.unroll(weights, obs, memory)

    @cached_property
    def _normalizes(self) -> bool:
        return self.network.has(RunningNorm)


def lag_of(version: Array, versions: Array) -> tuple[Array, Array]:
    """Mean and maximum of how many updates old the columns ``[B]`` of a batch are."""
    lag = version - versions
    return lag.mean(), lag.max()


class LearnerHandle(Handle):
    """A learner at work. `state` holds the core's state and the version, which rises by one per update."""

    def __init__(self, spec: Learner, site: Site) -> None:
        runners: RunnersHandle = site.resource(spec.runners)
        self.site = site
        self.core = core_of(spec.policy, runners.spaces, as_loss(spec.loss), spec.optimizer)
        if wrong := self.core.loss.check(self.core.network):
            raise GraphError(wrong)
        self.state = {"core": site.run(self.core.init, site.key("init")), "version": np.int32(0)}
        runners.publish(*self.weights())

    def close(self) -> None:
        """Nothing to let go of."""

    def update(self, batch: Batch, *, epochs: int = 1, minibatch: int | None = None, shuffle: bool = True) -> Trained:
        """Train on a batch: one compiled call, whatever its epochs and minibatches.

        Args:
            batch: ``[T, B]`` with the fields that the loss needs.
            epochs: how often each step is used.
            minibatch: steps per gradient step; None for all at once.
            shuffle: whether minibatches are drawn anew each epoch, or taken in order.

        Raises:
            ContractError: a field is missing, or `minibatch` does not divide the batch.
        """
        missing = [name for name in self.core.loss.needs if name not in batch.data]
        if missing:
            makers = {"advantage": "Advantages()", "target": "Advantages()"}
            hint = "; ".join(sorted({f"put {makers[m]} before it" for m in missing if m in makers})) or "add them before it"
            if "next_obs" in batch.data and "next_obs" not in self.core.loss.needs:
                hint = f"{type(self.core.loss).__name__} can't train on single steps drawn from a replay, so take DQNLoss or SACLoss"
            raise ContractError(
                f"the loss needs the field{'s' * (len(missing) > 1)} {', '.join(missing)}, but the batch has {', '.join(batch.data)}; {hint}"
            )
        steps = batch.steps
        size = steps if minibatch is None else minibatch
        whole = batch.shape[0] if self.core.sequences else 1
        if steps % size or size % whole:
            near = sorted((d for d in range(whole, steps + 1, whole) if steps % d == 0), key=lambda d: abs(d - size))[:2]
            cut = f" of {batch.shape[1]} columns with {whole} each, which stay whole" if self.core.sequences else ""
            raise ContractError(f"minibatch={size} does not divide the batch of {steps:,} steps{cut}; take {' or '.join(map(str, sorted(near)))}")
        version = self.state["version"]
        if "version" not in batch.columns:
            raise ContractError("needs the column version, but the batch has lost it; change batches by batch.with_(...), which keeps the columns")
        lag = self.site.call(lag_of, version, batch.columns["version"])
        data = batch.data if "valid" in batch.data else batch.with_(valid=np.ones(batch.shape, bool)).data
        columns = sequence_columns(batch) if self.core.sequences else {}
        data, columns = ({k: split(x, axis) for k, x in part.items()} for part, axis in ((data, 1), (columns, 0)))
        core, metrics, priority = self.site.run(
            self.core.update, self.state["core"], data, columns, donate=(0,), epochs=epochs, minibatch=size, shuffle=shuffle
        )
        self.state = {"core": core, "version": version + 1}
        planned = {"most_gradient_steps" if self.core.loss.stops_early else "gradient_steps": epochs * (steps // size)}
        self.site.count(updates=1, trained_steps=steps, used_steps=epochs * steps, **planned)
        feedback = {name: batch.columns[name] for name in FED_BACK if name in batch.columns}
        return Trained(steps, metrics, lag, {**feedback, **({"priority": priority} if self.core.loss.priorities else {})})

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
            raise ContractError(f"{type(self.core.loss).__name__} uses no target network; remove this operator")
        self.state = {**self.state, "core": self.site.run(self.core.update_target, self.state["core"], tau=tau)}
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
            raise SettingError(f"policy must be fl.Policy(ModuleClass, **settings), got {self.policy!r}")
        as_transformation(self.optimizer)
        try:
            hash((as_loss(self.loss), self.optimizer))
        except TypeError as error:
            raise SettingError(f"loss and optimizer must be hashable values (frozen dataclasses, tuples in place of lists): {error}") from None

    def open(self, site: Site) -> LearnerHandle:
        """Make the first weights and hand them to the runners."""
        return LearnerHandle(self, site)

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Is it trained, and on data of the right age and policy?"""
        runners = use.resources.get(str(self.runners))
        if isinstance(runners, Runners) and runners.policy != self.policy:
            yield use.name, f"trains {self.policy}, but {self.runners} act with {runners.policy}; give both the same policy"
        if use.traced and not use.total("updates"):
            yield use.name, "no node trains it; add train=TrainOneStep()"
        loss = as_loss(self.loss)
        kind = type(loss).__name__
        if loss.values and isinstance(runners, Runners) and isinstance(runners.explore, Sampled):
            text = f"act by chance, the likelier the higher the action value, which {kind} does not train them for"
            yield str(self.runners), f"{text}; give runners explore=fl.EpsilonGreedy(...)"
        if loss.target_network and use.exact and not use.total("target_updates"):
            yield use.name, f"nothing moves the target network of {kind}; add target=UpdateTarget(...) behind TrainOneStep"
        if not loss.on_policy:
            return
        if replayed := [name for name in use.resources if use.total("drawn_steps", name)]:
            yield use.name, f"{kind} is on-policy, but {replayed[0]} gives data of any age; take a loss such as DQNLoss, or train on fresh samples"
            return
        for queue in dict.fromkeys(use.queues.values()):
            text = f"{kind} is on-policy, but what comes out of a queue may be any number of updates old"
            yield queue, f"{text}; remove the queue, or take a loss that corrects for age"
        for node, lag in use.lags.items():
            if math.isnan(lag):
                text = "but the age of its data can't be known: the column `version` was computed anew on the way"
                yield node, f"{kind} is on-policy, {text}; change batches by batch.with_(...), which keeps the columns"
            elif lag > 0:
                text = f"but it trains on data up to {lag:.0f} update{'s' * (lag > 1)} old"
                way = "put SyncWeights() behind every update and before the next sample, and make one batch of each round"
                yield node, f"{kind} is on-policy, {text}; {way}"

    def describe(self) -> str:
        """``MLP, PPOLoss, Adam``."""
        parts = (self.policy.fn, self.loss, self.optimizer)
        return ", ".join(getattr(p, "__name__", type(p).__name__) for p in parts)
