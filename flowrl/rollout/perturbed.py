"""`PerturbedPlayer`: whole episodes of a runner, with other perturbed weights in each environment.

Runners over environments in JAX do the same as pure functions (`jax_perturbed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.clock import INFERENCE
from flowrl.core.compiled import jitted
from flowrl.core.items import Batch
from flowrl.envs.gym_envs import env_name
from flowrl.errors import EnvError, SettingError
from flowrl.rl.evolution import perturbed
from flowrl.rl.explore import Explore
from flowrl.rl.normalizing import RunningNorm
from flowrl.rl.policies import Memory, Network, Weights
from flowrl.rl.spaces import ACTION_MASK, Spaces
from flowrl.rollout.environments import Environments
from flowrl.rollout.evaluation import CHUNK, noise_of
from flowrl.rollout.sample import Episodes, Sample

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners

Array = Any
SIGNS = np.array([1.0, -1.0], np.float32)
"""The signs of the noise in the rows of a batch."""


def perturb_each(weights: Weights, seeds: Array, scales: Array) -> dict[str, Array]:
    """Return the parameters of n perturbations, ``[n, ...]`` each.

    Args:
        weights: of the policy.
        seeds: ``uint32[n]``.
        scales: ``float32[n]``.
    """
    return jax.vmap(perturbed, (None, 0, 0))(weights.params, seeds, scales)


def act_each(
    params: dict[str, Array],
    rest: dict[str, Array],
    obs: Any,
    noise: Array | None,
    memory: Memory,
    *,
    net: Network,
    explore: Explore,
) -> tuple[Array, Any]:
    """Act with n perturbations, each in k environments of its own.

    Args:
        params: of the perturbations, ``[n, ...]``.
        rest: what is not trained, the same for all.
        obs: ``[n, k, ...]``, or a tree of such arrays.
        noise: that picks the actions, ``[n, k, ...]``; None for greedy actions.
        memory: from which a recurrent policy continues, ``[n, k, ...]``.
        net: the policy.
        explore: how actions are picked.

    Returns:
        The actions ``[n, k]`` or ``[n, k, width]``, and the carry ``[n, k, ...]`` after the step.
    """

    def one(params: dict[str, Array], obs: Any, noise: Any, memory: Memory) -> tuple[Array, Any]:
        weights = Weights(params, rest)
        if noise is None:
            action, carry = net.greedy(weights, obs, memory)
            return action.astype(net.action_dtype), carry
        packed, carry = net.act(weights, obs, noise, memory, explore)
        return net.unpack(packed)[0], carry

    return jax.vmap(one)(params, obs, noise, memory)


def memory_of_each(
    params: dict[str, Array], rest: dict[str, Array], *, net: Network, k: int
) -> Any:
    """Return the memory ``[n, k, ...]`` with which n perturbations begin k episodes each."""
    return jax.vmap(lambda params: net.memory(Weights(params, rest), k))(params)


def two_points(
    count: Array, mean: Mapping[str, Array], square: Mapping[str, Array], *, spaces: Spaces
) -> dict[str, Array]:
    """Return two points for each pair that have the moments of all observations that it saw.

    A running norm that takes them in has the same mean and variance afterwards as if it had seen
    every observation.

    Args:
        count: ``[2, pairs, episodes]``, the observations of each episode.
        mean: their means by field, ``[2, pairs, episodes, *shape]``.
        square: the sums of squared differences from these, of the same shapes.
        spaces: of the observations.

    Returns:
        ``visits [2, pairs]``, and the fields of observations ``[2, pairs, *shape]``, of floats.
    """
    axes = (0, 2)  # all but that of pairs
    total = count.sum(axes)
    points = {"visits": jnp.stack([total / 2, total / 2]).astype(jnp.float32)}
    for part in spaces.parts:
        weight = count.reshape(*count.shape, *(1,) * len(part.shape)).astype(jnp.float32)
        seen = jnp.maximum(weight.sum(axes), 1.0)
        centre = (weight * mean[part.name]).sum(axes) / seen
        # The mean keeps an axis of length 1 in the place of those that were summed over.
        apart = mean[part.name] - jnp.expand_dims(centre, axes)
        variance = (square[part.name] + weight * apart**2).sum(axes) / seen
        deviation = jnp.sqrt(variance)
        # The points are numbers even where observations are integers.
        points[part.name] = jnp.stack([centre + deviation, centre - deviation]).astype(jnp.float32)
    return points


@dataclass(frozen=True)
class Moments:
    """Running moments of what each column sees (Welford 1962).

    Args:
        count: observations that it saw, ``[columns]``.
        mean: their mean by field, ``[columns, ...]``.
        square: the sum of squared differences from it, ``[columns, ...]``.
    """

    count: np.ndarray[Any, Any]
    mean: dict[str, np.ndarray[Any, Any]]
    square: dict[str, np.ndarray[Any, Any]]

    @staticmethod
    def of(spaces: Spaces, *columns: int) -> Moments:
        """Return the moments of nothing, of columns in an array of this shape."""

        def zeros() -> dict[str, np.ndarray[Any, Any]]:
            return {part.name: np.zeros((*columns, *part.shape)) for part in spaces.parts}

        return Moments(np.zeros(columns), zeros(), zeros())

    def row(self, row: int) -> Moments:
        """Return those of one row of columns, whose arrays are views of these."""
        return Moments(*jax.tree.map(lambda x: x[row], (self.count, self.mean, self.square)))

    def see(self, at: np.ndarray[Any, Any], obs: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Take in an observation of each of the columns numbered `at`."""
        self.count[at] += 1
        for name, x in obs.items():
            mean = self.mean[name]
            apart = x - mean[at]
            mean[at] += apart / self.count[at].reshape(-1, *(1,) * (x.ndim - 1))
            self.square[name][at] += apart * (x - mean[at])


class PerturbedPlayer:
    """Plays whole episodes with perturbed weights, as many at once as a runner has environments.

    Args:
        spec: the settings of the runners.
        network: the policy.
        label: which runner it is, for errors.
        index: the number of the runner.
    """

    def __init__(self, spec: Runners, network: Network, label: str, index: int) -> None:
        self.spec = spec
        self.network = network
        self.spaces = spec.spaces()
        self.label = label
        self.index = index
        self.environments = Environments(spec, self.spaces)
        self._width = 0
        """How many environments were wanted last; 0 before the first time."""
        explore = ("explore", spec.explore_of("").last)
        self.act = jitted(act_each, (), ("net", network), explore)
        self.memory = jitted(memory_of_each, (), ("net", network), ("k", 1))
        self.perturb = jitted(perturb_each, ())
        self.noise = jitted(noise_of, (), ("net", network), explore)
        self.points = jitted(two_points, (), ("spaces", self.spaces))

    def close(self) -> None:
        """Close the environments."""
        self.environments.close()

    def play(
        self,
        weights: Weights,
        version: int,
        seeds: np.ndarray[Any, Any],
        *,
        sigma: float,
        episodes: int,
        max_steps: int,
        sampled: bool,
    ) -> Sample:
        """Play the episodes of some pairs.

        Args:
            weights: those that are perturbed.
            version: their policy version.
            seeds: of the pairs, ``uint32[pairs]``.
            sigma: standard deviation of the perturbations.
            episodes: of each perturbation.
            max_steps: after so many steps an episode is cut.
            sampled: whether actions are picked by the runners' exploration, not greedily.

        Raises:
            EnvError: an environment raised, gave NaN, or broke its declared shape or type.
        """
        each_seed, scales = np.repeat(seeds, episodes), np.float32(sigma) * SIGNS
        self._widen(min(self.spec.envs_per_runner, each_seed.size))
        width = self.environments.spec.envs_per_runner
        found = _Found(self.spaces, each_seed.size, bool(self.network.layers(RunningNorm)))
        for first in range(0, each_seed.size, width):
            # The last round may have more environments than there are episodes left.
            at = np.minimum(np.arange(first, first + width), each_seed.size - 1)
            lanes = range(first, min(first + width, each_seed.size))
            # Both of a pair begin with the same seed, which is that of a whole vector: one with a
            # form of its own takes no other. Episodes of a pair that come in later rounds begin
            # with later ones.
            begin = int(each_seed[first] >> 1) + first % episodes
            for row, scale in enumerate(scales):
                params = self.perturb(weights, each_seed[at], np.full(width, scale))
                policy = Weights(params, weights.rest)
                self._round(found.row(row), lanes, policy, begin, max_steps, sampled)
        return self._sample(found, seeds, scales, version)

    def _widen(self, width: int) -> None:
        """Play in so many environments, for more of them would be stepped in vain."""
        if self._width == width:
            return
        self._width = width
        self.environments.close()
        narrow = Environments(replace(self.spec, envs_per_runner=width), self.spaces)
        try:
            _ = narrow.vector  # made now
        except SettingError:
            # A vector of the user's own has the size that the settings say, and no other.
            narrow = Environments(self.spec, self.spaces)
        self.environments = narrow

    def _sample(
        self, found: _Found, seeds: np.ndarray[Any, Any], scales: Array, version: int
    ) -> Sample:
        """Return what was found of the pairs with these seeds as a sample."""
        pairs, shape = len(seeds), (2, len(seeds), -1)
        columns = {
            "version": np.full(pairs, version, np.int32),
            "producer": np.full(pairs, self.index, np.int32),
        }
        data: dict[str, Any] = {
            "noise_seed": np.broadcast_to(seeds, shape[:2]),
            "noise_scale": np.broadcast_to(scales[:, None], shape[:2]),
            "return": found.returns.reshape(shape).mean(axis=2).astype(np.float32),
            "length": found.lengths.reshape(shape).sum(axis=2).astype(np.int32),
        }
        if found.moments is not None:
            moments = found.moments
            data |= self.points(
                *jax.tree.map(
                    lambda x: x.reshape(*shape, *x.shape[2:]),
                    (moments.count, moments.mean, moments.square),
                )
            )
        batch = Batch({name: np.asarray(x) for name, x in data.items()}, columns)
        returns, lengths = found.returns.ravel(), found.lengths.ravel()
        episodes = Episodes(int(lengths.sum()), returns, lengths, cut=int(found.cut.sum()))
        return Sample(batch, episodes)

    def _round(
        self,
        found: _Found,
        lanes: range,
        policy: Weights,
        begin: int,
        max_steps: int,
        sampled: bool,
    ) -> None:
        """Play one episode in each environment, which all begin together.

        Args:
            found: what is found of all episodes, into which it is written.
            lanes: the numbers of these episodes, as many as environments count.
            policy: the weights, whose parameters are those of each environment,
                ``[environments, ...]``.
            begin: the seed of the environments.
            max_steps: after so many steps an episode is cut.
            sampled: whether actions are not greedy.
        """
        environments, net, first = self.environments, self.network, lanes[0]
        width = environments.spec.envs_per_runner
        obs = environments.reset(seed=begin)
        memory = self.memory(*policy)
        noise_seeds = np.arange(begin, begin + width, dtype=np.uint32)
        noise: Any = None
        live = np.arange(len(lanes))
        self._check(obs, live, 0)
        for step in range(max_steps):
            self._check_allowed(obs, live, step)
            if sampled and step % CHUNK == 0:
                noise = np.asarray(self.noise(noise_seeds, np.uint32(step)))[:, :, None]
            if found.moments is not None:
                found.moments.see(first + live, {name: x[live] for name, x in obs.items()})
            seen = self.spaces.tree({name: x[:, None] for name, x in obs.items()})
            with INFERENCE:
                of_step = noise[step % CHUNK] if sampled else None
                actions, carry = self.act(*policy, seen, of_step, memory)
                to_env = net.head.to_env(np.asarray(actions)[:, 0])
            if net.recurrent:
                memory = Memory(carry, np.zeros((width, 1), bool))
            obs, reward, terminated, truncated, led_to = environments.step(to_env)
            self._check({"reward": reward, **led_to}, live, step + 1)
            found.returns[first + live] += reward[live]
            found.lengths[first + live] += 1
            live = live[~(terminated | truncated)[live]]
            if not len(live):
                return
        found.cut[first + live] = True

    def _check_allowed(self, obs: Mapping[str, Any], live: np.ndarray[Any, Any], step: int) -> None:
        """Raise an error if a mask allows an environment that counts no action.

        Raises:
            EnvError: with the environment and the step of its episode.
        """
        nothing = self.spaces.nothing_allowed(obs)
        if nothing is None or not nothing[live].any():
            return
        label, wrong = env_name(self.spec.env), int(live[nothing[live]][0])
        error = EnvError(
            f"{self.label}: environment {wrong} of {label} allows no action at step {step:,} of an "
            f"episode with perturbed weights: its {ACTION_MASK} is 0 for every choice; let it "
            "allow one, or end the episode",
            what=label,
            within=wrong,
            field=ACTION_MASK,
        )
        raise self.environments.located(error)

    def _check(self, fields: Mapping[str, Any], live: np.ndarray[Any, Any], step: int) -> None:
        """Raise an error if a number of an environment that counts is not finite.

        Raises:
            EnvError: with the environment and the step of its episode.
        """
        for name, x in fields.items():
            if x.dtype.kind != "f" or np.isfinite(x[live]).all():
                continue
            wrong = next(int(i) for i in live if not np.isfinite(x[i]).all())
            part = name.removeprefix("obs")
            what = "a reward" if name == "reward" else f"an observation{part and f' {part}'}"
            label = env_name(self.spec.env)
            raise EnvError(
                f"{self.label}: environment {wrong} of {label} gave {what} that is not finite, at "
                f"step {step:,} of an episode with perturbed weights; fix it (a division by zero? "
                "an unbounded state?), or take a smaller sigma, if it can't bear such actions",
                what=label,
                within=wrong,
                field=name,
                episode_step=step,
            )


class _Found:
    """What is found of the episodes of all perturbations, by row: the pairs and their mirrors."""

    def __init__(self, spaces: Spaces, episodes: int, moments: bool) -> None:
        self.returns = np.zeros((2, episodes))
        self.lengths = np.zeros((2, episodes), np.int64)
        self.cut = np.zeros((2, episodes), bool)
        self.moments = Moments.of(spaces, 2, episodes) if moments else None

    def row(self, row: int) -> _Found:
        """Return the same of one row, whose arrays are views of these."""
        found = object.__new__(_Found)
        for name in ("returns", "lengths", "cut"):
            setattr(found, name, getattr(self, name)[row])
        found.moments = self.moments and self.moments.row(row)
        return found
