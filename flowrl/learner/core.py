"""The pure functions of a learner: its first state, and an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from flowrl.core.clock import epoch_ended
from flowrl.core.items import COLUMNS, Metrics
from flowrl.core.mesh import mean_of_devices, number, shared
from flowrl.errors import ContractError
from flowrl.learner.minibatches import Minibatches, Rows
from flowrl.rl.losses import Loss, without_masked_nans
from flowrl.rl.optimizers import as_transformation
from flowrl.rl.policies import Network, Policy, RunningNorm, Weights, network
from flowrl.rl.spaces import Spaces

Array = Any
RESERVED = {*COLUMNS, "bad"}
State = dict[str, Any]


def _report_epoch(epoch: Array, done: Array) -> None:
    """Report from within an update that an epoch ended, once `done` is computed; of several devices the first does."""
    jax.lax.cond(number() == 0, lambda: jax.debug.callback(epoch_ended, epoch, done), lambda: None)


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
        return (
            {"target": jax.tree.map(jnp.copy, weights.params)} if self.loss.target_network else {}
        )

    def update_target(self, state: State, *, tau: float) -> State:
        """The state with its target network moved towards the newest parameters by the share `tau`."""
        return {
            **state,
            "target": jax.tree.map(
                lambda old, new: (1 - tau) * old + tau * new,
                state["target"],
                state["weights"].params,
            ),
        }

    def weights(self, state: State) -> Weights:
        """A copy of the weights: an update may reuse the buffers of the state's own."""
        copy: Weights = jax.tree.map(jnp.copy, state["weights"])
        return copy

    @property
    def sequences(self) -> bool:
        """Whether minibatches are made of whole columns ``[T, B, ...]``, not of single steps."""
        return self.loss.sequences or self.network.recurrent

    def update(
        self,
        state: State,
        data: dict[str, Array],
        columns: dict[str, Array],
        *,
        epochs: int,
        minibatch_size: int,
        shuffle: bool = True,
        traced: bool = False,
        shards: int = 1,
    ) -> tuple[State, Metrics, Array | None]:
        """Epochs of minibatches in one call. A result that is not finite leaves the state as it was and sets ``bad``.

        Args:
            state: of this learner.
            data: fields ``[T, B, ...]``.
            columns: of a loss that takes whole columns ``[B, ...]``.
            epochs: how often each step is used.
            minibatch_size: steps per gradient step, on all devices together.
            shuffle: whether minibatches are drawn again in each epoch, or taken in order.
            traced: whether every epoch of several reports when it ended.
            shards: devices that share each minibatch; they average gradients by their numbers of valid rows.

        Returns:
            The new state, metrics, and if the loss reports it the priority of each row ``[N]`` as it was found last.
        """
        steps, width = data["valid"].shape
        cut = Minibatches(steps, width, minibatch_size, self.sequences, shuffle, shards)
        key, mine = jax.random.split(state["key"])
        fields = without_masked_nans(data)
        if self.loss.random:
            fields["seed"] = jax.random.bits(jax.random.fold_in(mine, 0), (*data["valid"].shape, 2))
        given = (
            {name: cut.laid_out(x) for name, x in fields.items()},
            {name: cut.laid_out(x, time=False) for name, x in columns.items()}
            if self.sequences
            else {},
        )
        extra = {
            **state["loss"],
            **({"target_params": state["target"]} if self.loss.target_network else {}),
        }
        names: list[str] = []

        def train(
            weights: Weights,
            opt: Any,
            extra: dict[str, Array],
            key: Array,
            fields: Rows,
            columns: Rows,
        ) -> Any:
            rows = {name: cut.on_this_device(x) for name, x in fields.items()}
            step = self._gradient_step(extra, names)

            def epoch(carry: Any, numbered: tuple[Array, Array]) -> Any:
                number, key = numbered
                carry, (metrics, priority), order = cut.epoch(step, carry, rows, columns, key)
                if traced:
                    _report_epoch(number, jnp.max(metrics))
                return carry, (
                    metrics,
                    None if priority is None else cut.as_laid_out(priority, order),
                )

            first = (weights, opt, jnp.bool_(False))
            if (
                cut.count == 1 and epochs == 1
            ):  # without a loop, in which XLA is many times slower at convolutions
                (weights, opt, _), (metrics, priority) = epoch(first, (jnp.int32(0), key))
            else:
                (weights, opt, _), (metrics, priority) = jax.lax.scan(
                    epoch, first, (jnp.arange(epochs), jax.random.split(key, epochs))
                )
                priority = None if priority is None else priority[-1]
            if self._normalizes:
                shape = self.spaces.obs.shape or ()
                weights = Weights(
                    weights.params,
                    self.network.observe(
                        weights, rows["obs"].reshape(-1, *shape), rows["valid"].reshape(-1)
                    ),
                )
            return weights, opt, metrics.reshape(-1, len(names)), priority

        if shards > 1:
            whole, row = PartitionSpec(), cut.spec(time=not self.sequences)
            split = (
                {name: cut.spec() for name in given[0]},
                {name: cut.spec(time=False) for name in given[1]},
            )
            train = shared(
                train,
                shards,
                (whole, whole, whole, whole, *split),
                (whole, whole, whole, row if self.loss.priorities else whole),
            )
        weights, opt, metrics, priority = train(state["weights"], state["opt"], extra, mine, *given)
        applied = metrics[:, -1:]  # names[-1] is gradient_steps
        share = applied / jnp.maximum(jnp.sum(applied), 1)
        means = dict(
            zip(
                names[:-1],
                jnp.sum(jnp.where(applied > 0, metrics, 0.0) * share, axis=0),
                strict=False,
            )
        )
        new = {"weights": weights, "opt": opt, "loss": self.loss.adapt(state["loss"], means)}
        numbers = [
            leaf.reshape(-1)
            for leaf in jax.tree.leaves(new)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        good = jnp.isfinite(means["loss"]) & jnp.all(jnp.isfinite(jnp.concatenate(numbers)))
        # A NaN among the priorities would spoil every draw before the next Row reports it.
        priority = None if priority is None else jnp.where(good, priority.reshape(-1), 0.0)
        kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, {k: state[k] for k in new})
        report = {**means, "gradient_steps": jnp.where(good, jnp.sum(applied), 0), "bad": ~good}
        return {**state, **kept, "key": key}, Metrics.pack(report), priority

    def _gradient_step(
        self, extra: dict[str, Array], names: list[str]
    ) -> Callable[[Any, Rows], Any]:
        """One step of the optimiser: from (weights, its state, whether to stop) and a minibatch to the same, metrics, the rows' priorities if any.

        Metrics, whose names it adds to `names`, are one array, for XLA handles a few small ones no faster than a large one.
        """

        def step(carry: Any, batch: Rows) -> Any:
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

            (loss, (metrics, rest)), grads = jax.value_and_grad(loss_of, has_aux=True)(
                weights.params
            )
            taken = sorted(RESERVED & set(metrics))
            if taken:
                raise ContractError(
                    f"the loss reports {', '.join(taken)}, which every Row has already; give it another name, such as loss/{taken[0]}"
                )
            priority = metrics.pop("priority", None) if self.loss.priorities else None
            metrics = {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()}
            changed = {name: x for name, x in rest.items() if x is not weights.rest[name]}
            loss, metrics, grads, changed = mean_of_devices(
                (loss, metrics, grads, changed), jnp.sum(batch["valid"])
            )
            updates, new_opt = self.tx.update(grads, opt, weights.params)
            new = (
                Weights(optax.apply_updates(weights.params, updates), {**rest, **changed}),
                new_opt,
            )
            applied = jnp.float32(1)
            if self.loss.stops_early:
                if type(self.loss).stop is Loss.stop:
                    raise ContractError(
                        f"{type(self.loss).__name__} stops early, but does not say when: give it a method stop(metrics)"
                    )
                # The step that goes too far is not taken, nor are those after it.
                stopped = stopped | self.loss.stop(metrics)
                new = jax.tree.map(lambda a, b: jnp.where(stopped, a, b), (weights, opt), new)
                applied = 1 - stopped.astype(jnp.float32)
            report = {"loss": loss, **metrics, "gradient_steps": applied}
            names[:] = report
            return (*new, stopped), (
                jnp.stack([jnp.asarray(x, jnp.float32) for x in report.values()]),
                priority,
            )

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
