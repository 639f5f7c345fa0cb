"""The pure functions of a learner: its first state, and an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flowrl.clock import epoch_ended
from flowrl.errors import ContractError
from flowrl.items import COLUMNS, Metrics
from flowrl.rl.losses import Loss, without_masked_nans
from flowrl.rl.optimizers import as_transformation
from flowrl.rl.policies import Network, Policy, RunningNorm, Weights, network
from flowrl.rl.spaces import Spaces

Array = Any
RESERVED = {*COLUMNS, "bad"}
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
        self,
        state: State,
        data: dict[str, Array],
        columns: dict[str, Array],
        *,
        epochs: int,
        minibatch: int,
        shuffle: bool = True,
        traced: bool = False,
    ) -> tuple[State, Metrics, Array | None]:
        """Epochs of minibatches in one call. A result that is not finite leaves the state as it was and sets ``bad``.

        If `traced`, every epoch of several tells when it ended.

        Returns:
            The new state, metrics, and if the loss tells it the priority of each row ``[N]`` as it was found last.
        """
        length = data["valid"].shape[0] if self.sequences else 1
        n, size = data["valid"].size // length, minibatch // length
        if self.sequences:
            rows = without_masked_nans(data)
        else:
            rows, columns = without_masked_nans({k: v.reshape(-1, *v.shape[2:]) for k, v in data.items()}), {}
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

        def epoch(carry: Any, numbered: tuple[Array, Array]) -> Any:
            number, key = numbered
            if size == n:
                carry, told = step(carry, {**rows, **columns})
                order = jnp.arange(n)
            elif not shuffle:
                parts = {k: in_order(v, int(self.sequences)) for k, v in rows.items()} | {k: in_order(v, 0) for k, v in columns.items()}
                carry, told = jax.lax.scan(step, carry, parts)
                order = jnp.arange(n)
            else:
                order = jax.random.permutation(key, n).reshape(-1, size)
                carry, told = jax.lax.scan(lambda c, i: step(c, some(i)), carry, order)
            if traced:
                jax.debug.callback(epoch_ended, number, jnp.max(told[0]))
            return carry, (*told, order)

        if size == n and epochs == 1:  # without a loop, in which XLA is many times slower at convolutions
            carry, (metrics, priority) = step(first, {**rows, **columns})
        else:
            carry, (metrics, priority, order) = jax.lax.scan(epoch, first, (jnp.arange(epochs), jax.random.split(mine, epochs)))
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
