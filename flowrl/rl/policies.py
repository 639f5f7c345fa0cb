"""`Policy`: a Flax NNX module and its settings, as a value; `Network`: that module made for given spaces, as functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flowrl.core.compiled import jitted
from flowrl.core.mesh import total
from flowrl.errors import FlowrlError, PolicyError, a
from flowrl.graph.values import Spec
from flowrl.rl.distributions import Distribution
from flowrl.rl.explore import Explore, Sampled
from flowrl.rl.spaces import Spaces

Array = Any


class Policy(Spec):
    """A Flax NNX module class with its settings: ``Policy(MLP, hidden=(64, 64))``.

    The class is built as ``module(obs_space, action_space, rngs=nnx.Rngs(...), **settings)`` and called as
    ``module(obs)`` with ``obs [N, ...]``; it returns ``(outputs [N, n], value [N])`` where n is
    `fl.action_outputs(action_space)`: logits for Discrete, mean and log-deviation for Box. It needs no base class of ours.

    A recurrent module has a method ``initial_carry(n)``, a tree of arrays ``[n, ...]``, and is called as ``module(obs, carry)``; it
    returns ``(outputs, value, carry)``. The carry is kept per environment and starts anew with each episode; a module need not see to that.

    One whose attribute ``squashed`` is True has Gaussians that are squashed into [-1, 1] by tanh, as `SACNetwork` does.
    """


class Weights(NamedTuple):
    """All that a policy needs beside its code, as plain arrays by name."""

    params: dict[str, Array]
    """What is trained."""
    rest: dict[str, Array]
    """What is not, and still travels along: normalisers, batch statistics, random states."""


@runtime_checkable
class Recurrent(Protocol):
    """What tells a recurrent module from others."""

    def initial_carry(self, n: int) -> Any:
        """What n environments start an episode with: a tree of arrays ``[n, ...]``."""


class Memory(NamedTuple):
    """What a recurrent policy goes on from: empty for one that is not."""

    carry: Any = ()
    """A tree of arrays ``[B, ...]``."""
    reset: Array = ()
    """``bool[B]``: an episode begins, so the carry is not to be used."""


NOTHING = Memory()
SAMPLED = Sampled()


class Network:
    """A policy for given spaces, as pure functions of its weights.

    Raises:
        PolicyError: the module does not fit the spaces.
    """

    def __init__(self, policy: Policy, spaces: Spaces) -> None:
        self.policy = policy
        self.spaces = spaces
        self.head = spaces.head
        self.name = getattr(policy.fn, "__name__", str(policy.fn))
        try:
            abstract = nnx.eval_shape(lambda: self._build(jax.random.key(0)))
        except FlowrlError:
            raise
        except Exception as error:
            raise PolicyError(
                f"{self.name}({spaces.obs}, {spaces.action}, rngs=..., {_settings(policy)}) failed: {type(error).__name__}: {error}"
            ) from error
        self.recurrent = isinstance(abstract, Recurrent)
        if getattr(abstract, "squashed", False) and self.head.kind == "gaussian":
            if not self.head.bounded:
                raise PolicyError(
                    f"{self.name} has actions in [-1, 1], stretched over the bounds of the action space, but {spaces.action} has bounds that "
                    "are not finite; give it finite ones by a wrapper (gymnasium.wrappers.TransformAction(env, func, action_space=Box(...))), or "
                    "take a policy whose actions have no bounds, such as fl.MLP with ppo"
                )
            self.head = replace(self.head, kind="tanh_gaussian")
        self.graphdef: Any
        self.graphdef, params, rest = _split(abstract)
        self._params = _names(params)
        self._rest = _names(rest)
        self._check()

    def __reduce__(self) -> tuple[Any, ...]:
        return network, (self.policy, self.spaces)

    def _build(self, key: Array) -> Any:
        return self.policy.fn(
            self.spaces.obs, self.spaces.action, rngs=nnx.Rngs(key), **self.policy.settings
        )

    def _check(self) -> None:
        n = 3
        obs = jax.ShapeDtypeStruct((n, *(self.spaces.obs.shape or ())), self.spaces.obs_dtype)

        def once() -> Any:
            weights = self.init(jax.random.key(0))
            before = self.memory(weights, n)
            (outputs, value), _, after = self._call(
                *weights, jnp.zeros(obs.shape, obs.dtype), before
            )
            return outputs, value, before.carry, after

        try:
            outputs, value, before, after = jax.eval_shape(once)
            got = f"outputs {tuple(outputs.shape)} and value {tuple(value.shape)}"
        except FlowrlError:
            raise
        except Exception as error:
            raise PolicyError(
                f"{self.name} can't be called on observations {obs.dtype}{list(obs.shape)} of {self.spaces.obs}: {type(error).__name__}: {error}"
            ) from error
        if _form(before) != _form(after):
            raise PolicyError(
                f"{self.name} must return a carry of the form that it gets, {_form(before)}, but it returned {_form(after)}"
            )
        wanted = f"outputs {(n, self.head.outputs)} and value {(n,)}"
        if got != wanted:
            raise PolicyError(
                f"{self.name} gave {got} for {n} observations; actions in {self.spaces.action} need {wanted} "
                f"(fl.action_outputs(action_space) numbers per observation)"
            )

    def init(self, key: Array) -> Weights:
        """Fresh weights."""
        _, params, rest = _split(self._build(key))
        return Weights(
            dict(zip(self._params[0], jax.tree.leaves(params), strict=True)),
            dict(zip(self._rest[0], jax.tree.leaves(rest), strict=True)),
        )

    def memory(self, weights: Weights, n: int) -> Memory:
        """What n environments begin with; empty for a policy that is not recurrent."""
        if not self.recurrent:
            return Memory()
        return Memory(self._merge(*weights).initial_carry(n), jnp.ones(n, bool))

    def begin(self, weights: Weights, memory: Memory) -> dict[str, Array]:
        """The carry that the next step goes on from, with a fresh one where an episode begins, as columns of a batch by name."""
        if not self.recurrent:
            return {}
        carry = jax.tree.map(
            partial(_where, memory.reset),
            self.memory(weights, memory.reset.shape[0]).carry,
            memory.carry,
        )
        return dict(zip(self._carry[0], jax.tree.leaves(carry), strict=True))

    def carry_of(self, columns: Mapping[str, Array]) -> Any:
        """The carry in the columns that `begin` made."""
        names, tree = self._carry
        return jax.tree.unflatten(tree, [columns[name] for name in names])

    @cached_property
    def _carry(self) -> tuple[list[str], Any]:
        """The names of a carry's columns, and the tree that takes them back."""
        carry = jax.eval_shape(lambda: self.memory(self.init(jax.random.key(0)), 1).carry)
        paths, tree = jax.tree_util.tree_flatten_with_path(carry)
        return [f"carry{jax.tree_util.keystr(path)}" for path, _ in paths], tree

    def _call(
        self, params: dict[str, Array], rest: dict[str, Array], obs: Array, memory: Memory
    ) -> tuple[tuple[Array, Array], Any, Any]:
        module = self._merge(params, rest)
        if self.recurrent:
            carry = jax.tree.map(
                partial(_where, memory.reset), module.initial_carry(obs.shape[0]), memory.carry
            )
            result, wanted = module(obs, carry), "(action outputs, value, carry)"
        else:
            result, wanted = module(obs), "(action outputs, value)"
        if not isinstance(result, tuple) or len(result) != 2 + self.recurrent:
            got = (
                f"a tuple of {len(result)}"
                if isinstance(result, tuple)
                else "one array"
                if isinstance(result, jax.Array)
                else a(result)
            )
            raise PolicyError(f"{self.name} must return {wanted}, but it returned {got}")
        return result[:2], module, result[2] if self.recurrent else ()

    def _merge(self, params: dict[str, Array], rest: dict[str, Array]) -> Any:
        parts = ((self._params, params), (self._rest, rest))
        return nnx.merge(
            self.graphdef,
            *(
                jax.tree.unflatten(tree, [named[k] for k in names])
                for (names, tree), named in parts
            ),
        )

    def _rest_of(self, module: Any) -> dict[str, Array]:
        return dict(zip(self._rest[0], jax.tree.leaves(_split(module)[2]), strict=True))

    def apply(
        self, weights: Weights, obs: Array, memory: Memory = NOTHING
    ) -> tuple[Distribution, Array, dict[str, Array]]:
        """The distribution over actions, the value ``[N]``, and the untrained rest after the call, for ``obs [N, ...]``."""
        (outputs, value), module, _ = self._call(*weights, obs, memory)
        return self.head.distribution(outputs), value, self._rest_of(module)

    def call(self, method: str, weights: Weights, *args: Array) -> Any:
        """What a method of the module returns.

        Raises:
            PolicyError: it has none of that name.
        """
        module = self._merge(*weights)
        if not hasattr(module, method):
            raise PolicyError(f"{self.name} has no method {method}, which the loss calls")
        return getattr(module, method)(*args)

    def unroll(
        self, weights: Weights, obs: Array, memory: Memory
    ) -> tuple[Distribution, Array, dict[str, Array]]:
        """The same for whole columns ``obs [T, B, ...]``; `memory`: the carry ``[B, ...]`` before the first row, and ``bool[T, B]``."""
        if not self.recurrent:
            dist, value, rest = self.apply(weights, obs.reshape(-1, *obs.shape[2:]))
            dist, value = jax.tree.map(
                lambda x: x.reshape(*obs.shape[:2], *x.shape[1:]), (dist, value)
            )
            return dist, value, rest

        def row(before: Any, at: Any) -> Any:
            rest, carry = before
            (outputs, value), module, carry = self._call(
                weights.params, rest, at[0], Memory(carry, at[1])
            )
            return (self._rest_of(module), carry), (outputs, value)

        (rest, _), (outputs, value) = jax.lax.scan(
            row, (weights.rest, memory.carry), (obs, memory.reset)
        )
        return self.head.distribution(outputs), value, rest

    def memory_of(self, data: Mapping[str, Array], columns: Mapping[str, Array]) -> Memory:
        """What a recurrent policy goes on from in a batch ``[T, B]``, and where episodes begin in its T rows and the one behind."""
        if not self.recurrent:
            return Memory()
        valid = data["valid"]
        return Memory(self.carry_of(columns), jnp.concatenate([jnp.zeros_like(valid[:1]), ~valid]))

    def values(
        self, weights: Weights, data: Mapping[str, Array], columns: Mapping[str, Array]
    ) -> Array:
        """The values ``[B]`` of what comes behind the last rows of a batch, of which a policy without memory needs no `data`."""
        if not self.recurrent:
            return self.apply(weights, columns["bootstrap_obs"])[1]
        obs = jnp.concatenate([data["obs"], columns["bootstrap_obs"][None]])
        return self.unroll(weights, obs, self.memory_of(data, columns))[1][-1]

    def action_values(
        self, weights: Weights, data: Mapping[str, Array], columns: Mapping[str, Array]
    ) -> Array:
        """The action outputs ``[T + 1, B, n]`` at the rows of a batch and at what comes behind, of a policy for which they are action values."""
        obs = jnp.concatenate([data["obs"], columns["bootstrap_obs"][None]])
        values: Array = cast(
            "Any", self.unroll(weights, obs, self.memory_of(data, columns))[0]
        ).logits
        return values

    def observe(self, weights: Weights, obs: Array, weight: Array) -> dict[str, Array]:
        """The rest after its normalisers saw ``obs [N, ...]``, each counted by ``weight [N]``."""
        module = self._merge(*weights)
        for _, part in nnx.iter_graph(module):
            if isinstance(part, RunningNorm):
                part.observe(obs, weight)
        return self._rest_of(module)

    def has(self, kind: type[nnx.Module]) -> bool:
        """Whether the module holds a layer of this kind."""
        module = nnx.eval_shape(lambda: self._build(jax.random.key(0)))
        return any(isinstance(part, kind) for _, part in nnx.iter_graph(module))

    def act(
        self,
        weights: Weights,
        obs: Array,
        noise: Array | None = None,
        memory: Memory = NOTHING,
        explore: Explore = SAMPLED,
    ) -> tuple[Array, Any]:
        """Act on ``obs [B, ...]``: one packed ``float32[B, width + 2]`` of action, log-probability and value; and the carry behind it.

        One small array each way per environment step is what keeps a step at one dispatch. `noise` picks the actions, as `explore` does it; without,
        they are the likeliest. It is drawn for many steps at once, by `noise`: drawing it here would cost as much as a small network.
        """
        (outputs, value), _, carry = self._call(*weights, obs, memory)
        dist = self.head.distribution(outputs)
        action = dist.mode() if noise is None else explore.pick(dist, noise)
        columns = action if self.head.width else action[:, None]
        return jnp.concatenate(
            [columns.astype(jnp.float32), dist.log_prob(action)[:, None], value[:, None]], axis=1
        ), carry

    def noise(
        self, key: Array, turn: Array, env: Array, *, steps: int, envs: int, explore: Explore
    ) -> Array:
        """The noise ``[steps, n, ...]`` of so many turns of n environments, each turn's by the key with its number folded in.

        Args:
            key: random.
            turn: the number of the first turn.
            env: the environments' numbers ``[n]``.
            steps: turns.
            envs: the environments of all runners.
            explore: what the noise is for.
        """
        turns = turn + jnp.arange(steps, dtype=jnp.uint32)
        return jax.vmap(
            lambda t: explore.noise(
                self.head,
                jax.random.fold_in(key, t),
                env.shape[0],
                t * jnp.float32(envs),
                env,
                envs,
            )
        )(turns)

    def unpack(self, packed: np.ndarray[Any, Any]) -> tuple[Array, Array, Array]:
        """The actions (int32 or float32, ``[..., width]``), log-probabilities and values in what `act` gave."""
        action = packed[..., :-2] if self.head.width else packed[..., 0]
        return action.astype(self.action_dtype, copy=False), packed[..., -2], packed[..., -1]

    @property
    def action_dtype(self) -> np.dtype[Any]:
        """The type in which actions are kept."""
        return np.dtype(np.float32 if self.head.continuous else np.int32)


def _split(module: Any) -> tuple[Any, Any, Any]:
    """A module's graph definition, its parameters, and the rest of its state."""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)  # type: ignore[misc]  # flax's stubs know no `...`
    return graphdef, params, rest


def _names(state: Any) -> tuple[list[str], Any]:
    """A path such as ``actor/layers/0/kernel`` for every leaf, and the tree that takes the leaves back."""
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    return [
        "/".join(str(p.key) for p in path if isinstance(p, jax.tree_util.DictKey))
        for path, _ in paths
    ], tree


def _where(flags: Array, a: Array, b: Array) -> Array:
    """``a [B, ...]`` where ``flags [B]``, else b."""
    return jnp.where(flags.reshape(-1, *(1,) * (b.ndim - 1)), a, b)


def _form(carry: Any) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(carry)) or "nothing"


def _settings(policy: Policy) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in policy.settings.items())


def jitted_act(net: Network, explore: Explore = SAMPLED) -> Callable[..., tuple[Array, Any]]:
    """`Network.act`, compiled: ``(weights, obs, noise, memory)``."""
    act: Callable[..., tuple[Array, Any]] = jitted(net.act, (), ("explore", explore))
    return act


def jitted_noise(net: Network, steps: int, envs: int, explore: Explore) -> Callable[..., Array]:
    """`Network.noise`, compiled: ``(key, turn, env)``."""
    noise: Callable[..., Array] = jitted(
        net.noise, (), ("steps", steps), ("envs", envs), ("explore", explore)
    )
    return noise


@lru_cache(maxsize=64)
def network(policy: Policy, spaces: Spaces) -> Network:
    """The network of a policy for given spaces; the same one for equal arguments."""
    return Network(policy, spaces)


class RunningNorm(nnx.Module):
    """A layer that shifts and scales observations to mean 0 and variance 1, by the moments of all that it was shown.

    The moments are no parameters: they change once per `learner.update`, by that batch, and travel with the weights.
    """

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0) -> None:
        self.clip = clip
        self.mean = nnx.BatchStat(jnp.zeros(shape))
        self.var = nnx.BatchStat(jnp.ones(shape))
        self.count = nnx.BatchStat(jnp.float32(1e-4))

    def __call__(self, obs: Array) -> Array:
        """``[N, *shape]`` to the same, clipped."""
        return jnp.clip(
            (obs - self.mean[...]) / jnp.sqrt(self.var[...] + 1e-8), -self.clip, self.clip
        )

    def observe(self, obs: Array, weight: Array) -> None:
        """Count ``obs [N, *shape]`` in, each by ``weight [N]`` (Chan et al. 1979, parallel moments)."""
        self.mean[...], self.var[...], self.count[...] = merge_moments(
            (self.mean[...], self.var[...], self.count[...]), obs, weight
        )


def merge_moments(
    moments: tuple[Array, Array, Array], x: Array, weight: Array
) -> tuple[Array, Array, Array]:
    """(mean, variance, count) with ``x [N, ...]`` of all devices that share it counted in, each by ``weight [N]`` (Chan et al. 1979)."""
    mean, var, count = moments
    w = weight.reshape((-1,) + (1,) * (x.ndim - 1)).astype(jnp.float32)
    x = jnp.where(w > 0, x, 0)
    n = total(jnp.sum(weight.astype(jnp.float32)))
    share = w / jnp.where(n > 0, n, 1)
    batch_mean = total(jnp.sum(x * share, axis=0))
    batch_var = total(jnp.sum((x - batch_mean) ** 2 * share, axis=0))
    new_count = count + n
    delta = batch_mean - mean
    new_var = (var * count + batch_var * n + delta**2 * count * n / new_count) / new_count
    return mean + delta * n / new_count, new_var, new_count
