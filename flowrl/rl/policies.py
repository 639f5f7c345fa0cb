"""Policies as values, and as pure functions of their weights.

`Policy` is a Flax NNX module class with its settings. `Network` is that module built for given
spaces, as pure functions.
"""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flowrl.core.trees import tree_of, with_last
from flowrl.errors import FlowrlError, PolicyError, a
from flowrl.graph.values import Spec
from flowrl.rl.distributions import Distribution
from flowrl.rl.explore import Explore, Sampled
from flowrl.rl.module_state import by_name, paths_of, shapes_text, split_module, where_rows
from flowrl.rl.noisy_layers import noise_of_rows
from flowrl.rl.normalizing import observing
from flowrl.rl.spaces import Spaces
from flowrl.rl.unrolling import scan_after_burn_in

Array = Any


class Policy(Spec):
    """A Flax NNX module class with its settings: ``Policy(networks.MLP, hidden=(64, 64))``.

    The class is built as ``module(obs_space, action_space, rngs=nnx.Rngs(...), **settings)`` and
    called as ``module(obs)`` with ``obs [N, ...]``, which for Dict and Tuple spaces is a dict or
    tuple of such arrays. It returns ``(outputs [N, n], value [N])``, where n is
    `fl.networks.action_outputs(action_space)`: the logits of all choices, then the means and the
    log-deviations of all real numbers. It needs no base class of flowrl.

    Where observations hold a mask of actions, ``action_mask``, the module sees neither the mask nor
    its space: what is not allowed is ruled out in its outputs.

    A recurrent module has a method ``initial_carry(n)``, which returns a tree of arrays
    ``[n, ...]``, and is called as ``module(obs, carry)``; it returns ``(outputs, value, carry)``.
    The carry is kept per environment and is initial again at the start of each episode; a module
    need not see to that.

    A module whose attribute ``squashed`` is True has Gaussians that are squashed into [-1, 1] by
    tanh, as those of `SACNetwork` are. Its ``parameter_groups`` are those of `Optimizers`.

    Args:
        fn: the module class, or a function that returns a module.
        **settings: its keyword arguments beside the spaces and ``rngs``.

    Raises:
        SettingError: `fn` can't be called, or not with these settings. A module that does not fit
            its spaces is found later, when a graph with it is checked.
    """


class Weights(NamedTuple):
    """All arrays that a policy needs beside its code, by name."""

    params: dict[str, Array]
    """The arrays that are trained."""
    rest: dict[str, Array]
    """The arrays that are not trained: normalisers, batch statistics, random states."""


@runtime_checkable
class Recurrent(Protocol):
    """A recurrent module, which has one method more than others."""

    def initial_carry(self, n: int) -> Any:
        """Return the carry with which n environments start an episode: arrays ``[n, ...]``."""


class Memory(NamedTuple):
    """The state from which a recurrent policy continues; empty for any other policy."""

    carry: Any = ()
    """A tree of arrays ``[B, ...]``."""
    reset: Array = ()
    """``bool[B]``: whether an episode begins, so that an initial carry takes the carry's place."""


NOTHING = Memory()
"""The memory of a policy that is not recurrent."""
SAMPLED = Sampled()


class Network:
    """A policy for given spaces, as pure functions of its weights.

    Args:
        policy: the module class and its settings.
        spaces: the observation and action space of the environments.

    Raises:
        PolicyError: the module does not fit the spaces.
    """

    def __init__(self, policy: Policy, spaces: Spaces) -> None:
        self.policy = policy
        self.spaces = spaces
        self.head = spaces.head
        self.name = getattr(policy.fn, "__name__", str(policy.fn))
        try:
            # Shapes are enough to know the module, and cost no memory.
            abstract = nnx.eval_shape(lambda: self._build(jax.random.key(0)))
        except (FlowrlError, BdbQuit):
            raise
        except Exception as error:
            settings = ", ".join(f"{name}={value!r}" for name, value in policy.settings.items())
            call = f"{self.name}({spaces.seen}, {spaces.action}, rngs=..., {settings})"
            raise PolicyError(f"{call} failed: {type(error).__name__}: {error}") from error
        self.recurrent = isinstance(abstract, Recurrent)
        if getattr(abstract, "squashed", False) and self.head.kind == "gaussian":
            self._check_bounds()
            # The same numbers are then the parameters of another distribution.
            self.head = replace(self.head, kind="tanh_gaussian")
        self.graphdef: Any
        self.graphdef, params, rest = split_module(abstract)
        self._params = paths_of(params)
        self._rest = paths_of(rest)
        self.parameter_names: list[str] = self._params[0]
        self.parameter_groups = getattr(abstract, "parameter_groups", {})
        self._parts = {"/".join(map(str, path)): type(x) for path, x in nnx.iter_graph(abstract)}
        self._check(Weights(by_name(self._params, params), by_name(self._rest, rest)))

    def __reduce__(self) -> tuple[Any, ...]:
        return network, (self.policy, self.spaces)

    def _build(self, key: Array) -> Any:
        return self.policy.fn(
            self.spaces.seen, self.spaces.action, rngs=nnx.Rngs(key), **self.policy.settings
        )

    def _check_bounds(self) -> None:
        """Refuse squashed actions where the action space has bounds that are not finite."""
        if not self.head.bounded:
            raise PolicyError(
                f"{self.name} has actions in [-1, 1], stretched over the bounds of the action "
                f"space, but {self.spaces.action} has bounds that are not finite; give it finite "
                "ones by a wrapper (gymnasium.wrappers.TransformAction(env, func, "
                "action_space=Box(...))), or take a policy whose actions have no bounds, such as "
                "fl.networks.MLP with ppo"
            )

    def _check(self, weights: Weights) -> None:
        """Refuse a module whose outputs, values or carry have another shape than they must have.

        Args:
            weights: the shapes of its weights.
        """
        n = 3
        outputs_shape, value_shape, before, after = self._shapes_of_call(weights, n)
        # A carry of other shapes could not be given to the next step.
        given, returned = shapes_text(before), shapes_text(after)
        if given != returned:
            raise PolicyError(
                f"{self.name} must return a carry of the shapes that it gets, {given}, "
                f"but it returned {returned}"
            )
        got = f"outputs {outputs_shape} and value {value_shape}"
        wanted = f"outputs {(n, self.head.outputs)} and value {(n,)}"
        if got != wanted:
            raise PolicyError(
                f"{self.name} gave {got} for {n} observations; "
                f"actions in {self.spaces.action} need {wanted} "
                f"(fl.networks.action_outputs(action_space) numbers per observation)"
            )

    def _shapes_of_call(self, weights: Weights, n: int) -> tuple[Any, Any, Any, Any]:
        """Return the shapes of one call's outputs and values, and of the carry before and after."""
        arrays = self.spaces.shapes(n)

        def once(weights: Weights) -> Any:
            memory = self.memory(weights, n)
            obs = self.spaces.tree(
                {name: jnp.zeros(x.shape, x.dtype) for name, x in arrays.items()}
            )
            (outputs, value), _, carry = self._module_call(
                *weights, self.spaces.without_mask(obs), memory
            )
            return outputs, value, memory.carry, carry

        try:
            outputs, value, before, after = jax.eval_shape(once, weights)
            return tuple(outputs.shape), tuple(value.shape), before, after
        except (FlowrlError, BdbQuit):
            raise
        except Exception as error:
            raise PolicyError(
                f"{self.name} can't be called on observations {shapes_text(arrays)} of "
                f"{self.spaces.seen}: {type(error).__name__}: {error}"
            ) from error

    def init(self, key: Array) -> Weights:
        """Return initial weights."""
        weights: Weights = self._init(key)
        return weights

    @cached_property
    def _init(self) -> Callable[[Array], Weights]:
        """What makes initial weights: a function of its own, so that JAX traces it only once."""

        def one(key: Array) -> Weights:
            module = self._build(key)
            _, params, rest = split_module(module)
            return Weights(by_name(self._params, params), by_name(self._rest, rest))

        # Those of many runs are made one after another. Orthogonal ones come from QR, and on a CPU
        # with few cores XLA can wait for ever where it computes several batches of it at once.
        return jax.jit(jax.custom_batching.sequential_vmap(one))

    def memory(self, weights: Weights, n: int) -> Memory:
        """Return the memory with which n environments begin; empty unless recurrent."""
        if not self.recurrent:
            return Memory()
        # All environments begin with an episode.
        return Memory(self._merge(*weights).initial_carry(n), jnp.ones(n, bool))

    def begin(self, weights: Weights, memory: Memory) -> dict[str, Array]:
        """Return the carry before the next step as columns of a batch, by name.

        Where an episode begins it is an initial carry.
        """
        if not self.recurrent:
            return {}
        carry = jax.tree.map(
            partial(where_rows, memory.reset),
            self.memory(weights, memory.reset.shape[0]).carry,
            memory.carry,
        )
        return dict(zip(self._carry[0], jax.tree.leaves(carry), strict=True))

    def carry_of(self, columns: Mapping[str, Array]) -> Any:
        """Return the carry in the columns that `begin` made."""
        names, tree = self._carry
        return jax.tree.unflatten(tree, [columns[name] for name in names])

    @cached_property
    def _carry(self) -> tuple[list[str], Any]:
        """The names of a carry's columns, and the tree structure that they are put back into."""
        carry = jax.eval_shape(lambda: self.memory(self.init(jax.random.key(0)), 1).carry)
        paths, tree = jax.tree_util.tree_flatten_with_path(carry)
        return [f"carry{jax.tree_util.keystr(path)}" for path, _ in paths], tree

    def _call(
        self, params: dict[str, Array], rest: dict[str, Array], obs: Any, memory: Memory
    ) -> tuple[tuple[Array, Array], Any, Any]:
        """Return outputs and values, the module after the call, and the carry after it.

        What the mask of the observations rules out is ruled out in the outputs.
        """
        seen, mask = self.spaces.split(obs)
        (outputs, value), module, carry = self._module_call(params, rest, seen, memory)
        return (outputs if mask is None else self.head.masked(outputs, mask), value), module, carry

    def _module_call(
        self, params: dict[str, Array], rest: dict[str, Array], obs: Any, memory: Memory
    ) -> tuple[tuple[Array, Array], Any, Any]:
        """Return what `_call` returns, for observations without their mask."""
        module = self._merge(params, rest)
        if self.recurrent:
            initial = module.initial_carry(jax.tree.leaves(obs)[0].shape[0])
            carry = jax.tree.map(partial(where_rows, memory.reset), initial, memory.carry)
            result, wanted, length = module(obs, carry), "(action outputs, value, carry)", 3
        else:
            result, wanted, length = module(obs), "(action outputs, value)", 2
        if not isinstance(result, tuple) or len(result) != length:
            raise PolicyError(
                f"{self.name} must return {wanted}, but it returned {_description(result)}"
            )
        return result[:2], module, result[2] if self.recurrent else ()

    def _merge(self, params: dict[str, Array], rest: dict[str, Array]) -> Any:
        """Return the module with these weights."""

        def state(names: list[str], tree: Any, arrays: dict[str, Array]) -> Any:
            return jax.tree.unflatten(tree, [arrays[name] for name in names])

        return nnx.merge(self.graphdef, state(*self._params, params), state(*self._rest, rest))

    def _rest_of(self, module: Any) -> dict[str, Array]:
        """Return the arrays of a module that are not trained, by name."""
        return by_name(self._rest, split_module(module)[2])

    def apply(
        self, weights: Weights, obs: Any, memory: Memory = NOTHING
    ) -> tuple[Distribution, Array, dict[str, Array]]:
        """Apply the policy to observations ``[N, ...]``: an array, or a tree of arrays.

        Returns:
            The distribution over actions, the value ``[N]``, and the untrained rest after the call.
        """
        (outputs, value), module, _ = self._call(*weights, obs, memory)
        return self.head.distribution(outputs), value, self._rest_of(module)

    def call(self, method: str, weights: Weights, *args: Array) -> tuple[Any, dict[str, Array]]:
        """Return what a method of the module returns, and the untrained rest after the call.

        Raises:
            PolicyError: the module has no method of that name.
        """
        module = self._merge(*weights)
        found = getattr(module, method, None)
        if not callable(found) or isinstance(found, nnx.Variable):
            it = "" if found is None else f"; it is {a(found)}"
            raise PolicyError(f"{self.name} has no method {method}, which the loss calls{it}")
        # Methods see observations as calls of the module do.
        seen = [self.spaces.without_mask(x) for x in args]
        return found(*seen), self._rest_of(module)

    def unroll(
        self, weights: Weights, obs: Any, memory: Memory, burn_in: int = 0
    ) -> tuple[Distribution, Array, dict[str, Array]]:
        """Apply the policy to whole columns ``obs [T, B, ...]``, one row after another.

        Args:
            weights: those of all rows.
            obs: ``[T, B, ...]``.
            memory: the carry ``[B, ...]`` before the first row, and the resets ``bool[T, B]``.
            burn_in: first rows which only make the carry; no gradient flows back into them.

        Returns:
            The distribution over actions and the value of each row after the burn-in, and the
            untrained rest after the last one.
        """
        # Rows of a policy that is not recurrent do not depend on each other: one call is enough.
        if not self.recurrent:
            n = jax.tree.leaves(obs)[0].shape[1]
            flat = jax.tree.map(lambda x: x[burn_in:].reshape(-1, *x.shape[2:]), obs)
            dist, value, rest = self.apply(weights, flat)
            dist, value = jax.tree.map(lambda x: x.reshape(-1, n, *x.shape[1:]), (dist, value))
            return dist, value, rest

        def apply_row(before: Any, row: Any) -> Any:
            rest, carry = before
            row_obs, reset = row
            outputs_and_value, module, carry_after = self._call(
                weights.params, rest, row_obs, Memory(carry, reset)
            )
            return (self._rest_of(module), carry_after), outputs_and_value

        (rest, _), (outputs, value) = scan_after_burn_in(
            apply_row, (weights.rest, memory.carry), (obs, memory.reset), burn_in
        )
        return self.head.distribution(outputs), value, rest

    def memory_of(self, data: Mapping[str, Array], columns: Mapping[str, Array]) -> Memory:
        """Return a recurrent policy's memory for a batch ``[T, B]`` and the observation after it.

        It has the carry ``[B, ...]`` before the first row, and says where episodes begin in the T
        rows and the one after them: ``bool[T + 1, B]``.
        """
        if not self.recurrent:
            return Memory()
        # An episode begins after the masked row that holds the last one's final observation.
        valid = data["valid"]
        return Memory(self.carry_of(columns), jnp.concatenate([jnp.zeros_like(valid[:1]), ~valid]))

    def values(
        self, weights: Weights, data: Mapping[str, Array], columns: Mapping[str, Array]
    ) -> Array:
        """Return the bootstrap values ``[B]``: those of the observations after a batch's last rows.

        A policy that is not recurrent needs no `data` for them.
        """
        if not self.recurrent:
            return self.apply(weights, tree_of("bootstrap_obs", columns))[1]
        obs = with_last(tree_of("obs", data), tree_of("bootstrap_obs", columns))
        return self.unroll(weights, obs, self.memory_of(data, columns))[1][-1]

    def action_values(
        self, weights: Weights, data: Mapping[str, Array], columns: Mapping[str, Array]
    ) -> Array:
        """Return the action values ``[T + 1, B, n]`` at a batch's rows and the observation after.

        They are the action outputs of the policy, which must be action values.
        """
        obs = with_last(tree_of("obs", data), tree_of("bootstrap_obs", columns))
        dist = cast("Any", self.unroll(weights, obs, self.memory_of(data, columns))[0])
        values: Array = dist.logits
        return values

    def observe(self, weights: Weights, obs: Any, weight: Array) -> dict[str, Array]:
        """Return the untrained rest after its normalisers saw ``obs [N, ...]``.

        Each observation counts by ``weight [N]``.
        """
        count = weight.shape[0]
        with observing(weight):
            _, module, _ = self._call(*weights, obs, self.memory(weights, count))
        return self._rest_of(module)

    def layers(self, kind: type[Any]) -> list[str]:
        """Return the paths of the layers of this kind; that of the module itself is empty."""
        return [path for path, found in self._parts.items() if issubclass(found, kind)]

    def act(
        self,
        weights: Weights,
        obs: Any,
        noise: Array | None = None,
        memory: Memory = NOTHING,
        explore: Explore = SAMPLED,
    ) -> tuple[Array, Any]:
        """Act on ``obs [B, ...]``.

        One small array each way per environment step keeps a step at one dispatch.

        Args:
            weights: of the policy.
            obs: ``[B, ...]``, or a tree of such arrays.
            noise: picks the actions, as `explore` does it; None for greedy actions. The method
                `noise` draws it for many steps at once: to draw it here would cost as much as a
                small network.
            memory: from which a recurrent policy continues.
            explore: how actions are picked.

        Returns:
            One packed ``float32[B, width + 2]`` of action, log-probability and value, and the carry
            after the step.
        """
        with noise_of_rows(noise if explore.noisy else None):
            (outputs, value), _, carry = self._call(*weights, obs, memory)
        dist = self.head.distribution(outputs)
        action = dist.mode() if noise is None else explore.pick(dist, noise)
        # A scalar action becomes a column, to be packed with the others.
        columns = action if self.head.width else action[:, None]
        return jnp.concatenate(
            [columns.astype(jnp.float32), dist.log_prob(action)[:, None], value[:, None]], axis=1
        ), carry

    def greedy(self, weights: Weights, obs: Any, memory: Memory = NOTHING) -> tuple[Array, Any]:
        """Return the greedy actions ``[B]`` or ``[B, width]``, and the carry after the step."""
        (outputs, _), _, carry = self._call(*weights, obs, memory)
        return self.head.distribution(outputs).mode(), carry

    def noise(
        self, key: Array, turn: Array, env: Array, *, steps: int, envs: int, explore: Explore
    ) -> Array:
        """Return the noise ``[steps, n, ...]`` of `steps` turns of n environments.

        Each turn's key is `key` with the number of the turn folded in.

        Args:
            key: the random key.
            turn: the number of the first turn.
            env: the environments' numbers ``[n]``, counted over all runners.
            steps: the number of turns.
            envs: the number of environments of all runners.
            explore: the exploration that takes the noise.
        """

        # A turn's noise depends on its number alone, not on how many turns are drawn at once.
        def of_turn(number: Array) -> Array:
            turn_key = jax.random.fold_in(key, number)
            # As float32: a product of integers could overflow in a long run.
            step = number * jnp.float32(envs)
            return explore.noise(self.head, turn_key, env.shape[0], step, env, envs)

        return jax.vmap(of_turn)(turn + jnp.arange(steps, dtype=jnp.uint32))

    def unpack(self, packed: np.ndarray[Any, Any]) -> tuple[Array, Array, Array]:
        """Return the actions, log-probabilities and values in an array that `act` packed.

        Actions are int32 or float32, ``[..., width]``; the others are ``[...]``.
        """
        action = packed[..., :-2] if self.head.width else packed[..., 0]
        return action.astype(self.action_dtype, copy=False), packed[..., -2], packed[..., -1]

    @property
    def action_dtype(self) -> np.dtype[Any]:
        """The type of actions in batches."""
        return np.dtype(np.float32 if self.head.reals else np.int32)


def _description(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    return "one array" if isinstance(result, jax.Array) else a(result)


@lru_cache(maxsize=64)
def network(policy: Policy, spaces: Spaces) -> Network:
    """Return the network of a policy for given spaces; the same one for equal arguments."""
    # One that the cache forgot may be in use, and what was compiled of it serves no other one.
    made = _in_use.get((policy, spaces)) or Network(policy, spaces)
    return _in_use.setdefault((policy, spaces), made)


_in_use: WeakValueDictionary[tuple[Policy, Spaces], Network] = WeakValueDictionary()
