"""The pure functions of a learner: its first state, and an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from flowrl.core.items import Metrics
from flowrl.core.mesh import mean_of_devices, shared
from flowrl.core.trees import with_trees
from flowrl.errors import ContractError
from flowrl.learner.checked import all_finite, finite_or_masked, means, refuse_reserved
from flowrl.learner.epochs import run_epochs, runs_once
from flowrl.learner.minibatches import Minibatches, Rows
from flowrl.rl.function_loss import call_loss
from flowrl.rl.losses import Loss, without_masked_nans
from flowrl.rl.noisy_layers import NoisyLinear, noise_of_rows
from flowrl.rl.normalizing import RunningNorm
from flowrl.rl.optimizer_groups import Optimizers
from flowrl.rl.optimizers import Optimizer, as_transformation
from flowrl.rl.policies import Network, Policy, Weights, network
from flowrl.rl.spaces import Spaces

Array = Any
State = dict[str, Any]
OBSERVED = ("obs", "next_obs", "bootstrap_obs")
"""The names under which a loss finds observations, as trees where these have several parts."""


@lru_cache(maxsize=64)
def core_of(policy: Policy, spaces: Spaces, loss: Loss, optimizer: Any) -> Core:
    """Return the core for these settings.

    Equal settings share one core, so that what was compiled for one run serves the next.
    """
    return Core(policy, spaces, loss, optimizer)


@dataclass(frozen=True)
class Core:
    """The learner's pure functions.

    Args:
        policy: the policy to train.
        spaces: spaces of the observations and actions that its network is made for.
        loss: the loss to minimise.
        optimizer: one such as `Adam`, or an optax transformation.
    """

    policy: Policy
    spaces: Spaces
    loss: Loss
    optimizer: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return core_of, (self.policy, self.spaces, self.loss, self.optimizer)

    @cached_property
    def network(self) -> Network:
        """The policy's network, made for the spaces."""
        return network(self.policy, self.spaces)

    @cached_property
    def tx(self) -> optax.GradientTransformation:
        """The optimiser as an optax transformation."""
        if isinstance(self.optimizer, Optimizers):
            return self.optimizer.build(self._groups)
        return as_transformation(self.optimizer)

    @cached_property
    def _groups(self) -> dict[str, list[str]]:
        """The names of the parameters of each group that has an optimiser of its own."""
        groups: Optimizers = self.optimizer
        return groups.members(self.network.parameter_names, self.network.parameter_groups)

    def init(self, key: Array) -> State:
        """Return the first state: weights, optimiser state, numbers of the loss and random key."""
        weights = self.network.init(jax.random.fold_in(key, 0))
        return {
            "weights": weights,
            "opt": self.tx.init(weights.params),
            "loss": self.loss.init(),
            "key": jax.random.fold_in(key, 1),
            **self._target(weights),
        }

    def _target(self, weights: Weights) -> State:
        if not self.loss.target_network:
            return {}
        return {"target": jax.tree.map(jnp.copy, weights.params)}

    def begin_with(self, state: State, taken: Weights) -> State:
        """Return the first state with other weights than its own, and the rest made for them.

        Args:
            state: the first state of this learner.
            taken: the arrays that take the place of its own, by name; the others stay.
        """
        own = state["weights"]
        weights = Weights({**own.params, **taken.params}, {**own.rest, **taken.rest})
        made = {"opt": self.tx.init(weights.params), **self._target(weights)}
        return {**state, "weights": weights, **made}

    @property
    def sequences(self) -> bool:
        """Whether minibatches are made of whole columns ``[T, B, ...]``, not of single steps."""
        return self.loss.sequences or self.network.recurrent

    def update(
        self,
        weights: Weights,
        others: State,
        data: dict[str, Array],
        columns: dict[str, Array],
        *,
        epochs: int,
        minibatch_size: int,
        shuffle: bool = True,
        traced: bool = False,
        shards: int = 1,
    ) -> tuple[State, Metrics, Array | None]:
        """Run epochs of minibatches in one call.

        If the result or a priority is not finite, then weights, optimiser state and the numbers of
        the loss stay as they were, and the metric ``bad`` is set; the random key moves on.

        Args:
            weights: of this learner.
            others: the rest of its state, whose buffers may be reused: only the weights, which are
                published, have readers.
            data: fields ``[T, B, ...]``.
            columns: column fields ``[B, ...]`` of a loss that takes whole columns.
            epochs: how often each step is used.
            minibatch_size: steps per gradient step, on all devices together.
            shuffle: whether each epoch shuffles the minibatches again, or takes them in order.
            traced: whether every epoch of several reports when it ended.
            shards: devices that share each minibatch; they average gradients by their numbers of
                valid rows.

        Returns:
            The new state, the metrics, and if the loss reports it the priority of each row
            ``[N]`` as it was computed last.
        """
        steps, width = data["valid"].shape
        minibatches = Minibatches(steps, width, minibatch_size, self.sequences, shuffle, shards)
        state = {**others, "weights": weights}
        next_key, key = jax.random.split(state["key"])
        fields, column_fields = self.laid_out(minibatches, data, columns, key)
        # The names are known once the function is traced, which happens when it is called.
        names: list[str] = []
        train = self._training(minibatches, names, epochs=epochs, traced=traced)
        if shards > 1:
            train = self.on_devices(train, minibatches, fields, column_fields)
        weights, opt, metrics, priority = train(
            weights, state["opt"], self.loss_inputs(state), key, fields, column_fields
        )
        alone = runs_once(minibatches, epochs)
        new = self.settled(state, weights, opt, (metrics, names), priority, alone=alone)
        return {**new[0], "key": next_key}, *new[1:]

    def settled(
        self,
        state: State,
        weights: Weights,
        opt: Any,
        metrics: tuple[Array, list[str]],
        priority: Array | None,
        *,
        alone: bool,
    ) -> tuple[State, Metrics, Array | None]:
        """Return the state after an update, its metrics and priorities.

        Args:
            state: before the update.
            weights: after it.
            opt: the optimiser's state after it.
            metrics: those of its gradient steps, and their names, as `means` takes them.
            priority: of each row, if the loss reports it.
            alone: whether the update is a single gradient step.
        """
        mean, gradient_steps = means(*metrics)
        # A result that is not finite is dropped as a whole: only the random key moves on.
        new = {"weights": weights, "opt": opt, "loss": self.loss.adapt(state["loss"], mean)}
        good = jnp.isfinite(mean["loss"])
        if not (alone and self.checks_first):
            good &= all_finite(new)
            new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, {k: state[k] for k in new})
        if priority is not None:
            # A NaN among the priorities would spoil every sample before the next Row reports it.
            flat = priority.reshape(-1)
            priority = jnp.where(good & jnp.isfinite(flat), flat, 0.0)
        report = {**mean, "gradient_steps": jnp.where(good, gradient_steps, 0), "bad": ~good}
        return {**state, **new}, Metrics.pack(report), priority

    @cached_property
    def checks_first(self) -> bool:
        """Whether a single gradient step is taken only once it is known to be finite.

        A result that may have to be dropped keeps the old numbers alive beside it, and a loop over
        updates then copies them all: a tenth of the time of TD3's. On other devices than the CPU
        a branch waits for the host, and copies cost less.
        """
        known = isinstance(self.optimizer, Optimizer | Optimizers) and self.optimizer.keeps_finite
        adapts = bool(self.loss.init()) or self.loss.stops_early or self.normalizes
        return known and not adapts and jax.default_backend() == "cpu"

    def laid_out(
        self,
        minibatches: Minibatches,
        data: dict[str, Array],
        columns: dict[str, Array],
        key: Array,
    ) -> tuple[Rows, Rows]:
        """Return the fields and the column fields of a batch, laid out as minibatches."""
        fields = without_masked_nans(data)
        if self.loss.random or self._noisy:
            shape = (*data["valid"].shape, 2)
            fields["seed"] = jax.random.bits(jax.random.fold_in(key, 0), shape)
        laid_out = {name: minibatches.laid_out(x) for name, x in fields.items()}
        if not self.sequences:
            return laid_out, {}
        return laid_out, {name: minibatches.laid_out(x, time=False) for name, x in columns.items()}

    def loss_inputs(self, state: State) -> dict[str, Array]:
        """Return what the loss takes beside the batch: its own numbers, and target parameters."""
        if not self.loss.target_network:
            return dict(state["loss"])
        return {**state["loss"], "target_params": state["target"]}

    def _training(
        self, minibatches: Minibatches, names: list[str], *, epochs: int, traced: bool
    ) -> Callable[..., Any]:
        """Return the function that each device runs: all epochs on its part of the rows.

        Args:
            minibatches: how the batch is cut.
            names: a list that the function fills with the names of the metrics when it is traced.
            epochs: how often each step is used.
            traced: whether every epoch reports when it ended.

        Returns:
            A function from weights, optimiser state, inputs of the loss, random key, fields and
            column fields to new weights, new optimiser state, the metrics of every gradient step
            ``[gradient steps, len(names)]`` and priorities.
        """

        def train(
            weights: Weights,
            opt: Any,
            loss_inputs: dict[str, Array],
            key: Array,
            fields: Rows,
            columns: Rows,
        ) -> Any:
            rows = {name: minibatches.on_this_device(x) for name, x in fields.items()}
            step = self._gradient_step(loss_inputs, names, alone=runs_once(minibatches, epochs))
            start = (weights, opt, jnp.bool_(False))
            (weights, opt, _), metrics, priority = run_epochs(
                minibatches, step, start, rows, columns, key, epochs=epochs, traced=traced
            )
            if self.normalizes:
                weights = self.observed(weights, rows)
            return weights, opt, metrics.reshape(-1, len(names)), priority

        return train

    def observed(self, weights: Weights, rows: Rows) -> Weights:
        """Return weights whose running norms have taken in the observations of a batch."""
        arrays = {part.name: rows[part.name].reshape(-1, *part.shape) for part in self.spaces.parts}
        obs = self.spaces.tree(arrays)
        # A row may stand for several observations.
        weight = rows["valid"] * rows["visits"] if "visits" in rows else rows["valid"]
        return Weights(weights.params, self.network.observe(weights, obs, weight.reshape(-1)))

    def on_devices(
        self, train: Callable[..., Any], minibatches: Minibatches, fields: Rows, columns: Rows
    ) -> Callable[..., Any]:
        """Return the training function as one that devices run side by side on shared rows."""
        whole, priorities = PartitionSpec(), PartitionSpec()
        if self.loss.priorities:
            priorities = minibatches.spec(time=not self.sequences)
        field_specs = {name: minibatches.spec() for name in fields}
        column_specs = {name: minibatches.spec(time=False) for name in columns}
        return shared(
            train,
            minibatches.shards,
            (whole, whole, whole, whole, field_specs, column_specs),
            (whole, whole, whole, priorities),
        )

    def _gradient_step(
        self, loss_inputs: dict[str, Array], names: list[str], *, alone: bool
    ) -> Callable[[Any, Rows], Any]:
        """Return one step of the optimiser.

        It goes from (weights, optimiser state, whether to stop) and a minibatch to the same three,
        the metrics, and the priorities of the rows if the loss reports them. The metrics, whose
        names it puts into `names`, are one array: XLA handles a few small arrays no faster than
        a large one.
        """

        def step(carry: Any, batch: Rows) -> Any:
            weights, opt, _ = carry
            loss, metrics, grads, rest, priority = self.found(weights, opt, batch, loss_inputs)
            carry, report = self.stepped(carry, loss, metrics, grads, rest, alone=alone)
            names[:] = report
            numbers = jnp.stack([jnp.asarray(x, jnp.float32) for x in report.values()])
            return carry, (numbers, priority)

        return step

    def found(self, weights: Weights, opt: Any, batch: Rows, loss_inputs: dict[str, Array]) -> Any:
        """Return what a gradient step takes from a minibatch, equal on all devices.

        It is the loss, its metrics, the gradients, what the network keeps beside its parameters
        after the loss's calls, and the priorities of this device's rows if the loss reports them.
        The state of the optimiser says which parameters are due.
        """
        (loss, (metrics, rest)), grads = self._gradients(weights, opt, batch, loss_inputs)
        refuse_reserved(metrics)
        priority = metrics.pop("priority", None) if self.loss.priorities else None
        if priority is not None:
            # The devices average the loss anyway, so it reports what is wrong on one of them.
            loss = jnp.where(finite_or_masked(priority, batch["valid"]), loss, jnp.nan)
        metrics = {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()}
        # What the network left as it was is equal on all devices and needs no averaging.
        changed = {name: x for name, x in rest.items() if x is not weights.rest[name]}
        loss, metrics, grads, changed = mean_of_devices(
            (loss, metrics, grads, changed), jnp.sum(self.loss.averaged(batch["valid"]))
        )
        return loss, metrics, grads, {**rest, **changed}, priority

    def stepped(
        self,
        carry: tuple[Weights, Any, Array],
        loss: Array,
        metrics: dict[str, Array],
        grads: dict[str, Array],
        rest: dict[str, Array],
        *,
        alone: bool,
    ) -> tuple[tuple[Weights, Any, Array], dict[str, Array]]:
        """Take a gradient step.

        Args:
            carry: weights, optimiser state, and whether the update has stopped.
            loss: of the minibatch.
            metrics: of the loss, by name.
            grads: the gradient of each parameter.
            rest: what the network keeps beside its parameters.
            alone: whether the update has no other step.

        Returns:
            The same three after it, and what the step reports.
        """
        weights, opt, stopped = carry

        def taken() -> tuple[dict[str, Array], Any]:
            updates, new_opt = self.tx.update(grads, opt, weights.params)
            return optax.apply_updates(weights.params, updates), new_opt

        if alone and self.checks_first:
            squares = jax.tree.map(lambda x: jnp.sum(x * x), grads)
            good = jnp.isfinite(loss) & all_finite((squares, rest))
            new_params, new_opt = jax.lax.cond(good, taken, lambda: (weights.params, opt))
            rest = jax.tree.map(lambda a, b: jnp.where(good, a, b), rest, weights.rest)
            loss = jnp.where(good, loss, jnp.nan)
        else:
            new_params, new_opt = taken()
        new = (Weights(new_params, rest), new_opt)
        applied = jnp.float32(1)
        if self.loss.stops_early:
            # The step that goes too far is not taken, nor are those after it.
            stopped = stopped | self._stop(metrics)
            new = jax.tree.map(lambda a, b: jnp.where(stopped, a, b), (weights, opt), new)
            applied = 1 - stopped.astype(jnp.float32)
        return (*new, stopped), {"loss": loss, **metrics, "gradient_steps": applied}

    def _gradients(
        self, weights: Weights, opt: Any, batch: Rows, loss_inputs: dict[str, Array]
    ) -> Any:
        """Return ``((loss, (metrics, rest)), gradients)`` of a minibatch.

        `rest` is what the network keeps beside its parameters, as the loss's calls left it. The
        state of the optimiser says which parameters are due: all of them where it is empty.
        """

        def loss_of(params: dict[str, Array], resting: frozenset[str] = frozenset()) -> Any:
            rest = weights.rest
            calls = count()

            def policy(
                params: dict[str, Array], *args: Array, method: str = "", burn_in: int = 0
            ) -> Any:
                nonlocal rest
                with noise_of_rows(batch["seed"] if self._noisy else None, next(calls)):
                    if method:
                        output, rest = self.network.call(method, Weights(params, rest), *args)
                        return output
                    dist, value, rest = self._forward(
                        Weights(params, rest), args[0], batch, burn_in
                    )
                    return dist, value

            loss, metrics = call_loss(
                self.loss, policy, params, {**with_trees(batch, *OBSERVED), **loss_inputs}, resting
            )
            return loss, (metrics, rest)

        # At a sampler there is no state of the optimiser, and everything is due.
        if opt and isinstance(self.optimizer, Optimizers) and self.optimizer.delays:
            return self.optimizer.gradients(loss_of, weights.params, opt, self._groups)
        return jax.value_and_grad(loss_of, has_aux=True)(weights.params)

    def _stop(self, metrics: dict[str, Array]) -> Array:
        """Return whether the metrics of a minibatch call for an end of the update.

        Raises:
            ContractError: the loss says that it stops early, but has no `stop` of its own.
        """
        if type(self.loss).stop is Loss.stop:
            raise ContractError(
                f"{type(self.loss).__name__} stops early, but does not say when: "
                "give it a method stop(metrics)"
            )
        return self.loss.stop(metrics)

    def _forward(self, weights: Weights, obs: Array, batch: dict[str, Array], burn_in: int) -> Any:
        """Return distribution, value and rest for observations of a minibatch.

        The observations may be those of its rows, or of its rows and the one after them. The first
        `burn_in` rows only make the carry.
        """
        if not self.sequences:
            return self.network.apply(weights, obs)
        # A minibatch holds fields and columns side by side, so it serves as both.
        memory = self.network.memory_of(batch, batch)
        if self.network.recurrent:
            length = jax.tree.leaves(obs)[0].shape[0]
            memory = memory._replace(reset=memory.reset[:length])
        return self.network.unroll(weights, obs, memory, burn_in)

    @cached_property
    def _noisy(self) -> bool:
        return bool(self.network.layers(NoisyLinear))

    @cached_property
    def normalizes(self) -> bool:
        """Whether the network has running norms, which take in the observations of a batch."""
        return bool(self.network.layers(RunningNorm))


def moved_target(
    target: dict[str, Array], newest: dict[str, Array], *, tau: float
) -> dict[str, Array]:
    """Return the parameters of a target network that moved towards the newest ones.

    Args:
        target: its parameters by name.
        newest: those of the network itself.
        tau: the share of the way that it moves (Polyak averaging); 1 copies the newest ones.
    """
    return {name: (1 - tau) * old + tau * newest[name] for name, old in target.items()}
