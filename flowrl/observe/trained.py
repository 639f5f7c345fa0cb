"""`TrainedPolicy`: a policy with its weights, which acts, is evaluated and exported."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flowrl.core.logs import log
from flowrl.envs.gym_envs import Make, env_name
from flowrl.envs.video import filmed
from flowrl.errors import SaveError, SettingError
from flowrl.observe.exporting import Export, export
from flowrl.rl.explore import EpsilonGreedy, Explore, GaussianNoise
from flowrl.rl.jitted_acting import jitted_act
from flowrl.rl.policies import SAMPLED, Memory, Network, Policy, Weights, network
from flowrl.rl.spaces import Spaces
from flowrl.rollout.evaluation import MAX_STEPS, Evaluation, play
from flowrl.rollout.playing_agents import PolicyPlayer, agents_in, play_agents

EVALUATION_EPSILON = 0.05
"""The epsilon with which Mnih et al. (2015) evaluate policies of action values."""


@dataclass(frozen=True)
class TrainedPolicy:
    """A trained policy with its weights, ready to act and to be evaluated."""

    policy: Policy
    """The description of the policy."""
    spaces: Spaces
    """The observation and action spaces that it was made for."""
    weights: Weights = field(repr=False)
    """Its trained weights."""
    env: Make | None = None
    """The id, class or function of the environment that it was trained in; None if not known."""
    wrappers: tuple[Callable[[Any], Any], ...] = ()
    """The functions that wrap the environment, the innermost first."""
    env_settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    action_values: bool = False
    """Whether the action outputs are action values, as `DQNLoss` learns them. These are no
    probabilities, so actions are not sampled from them."""
    agents: tuple[str, ...] = ()
    """The agents that it plays, in an environment of several; empty where there is but one."""
    deterministic: bool = False
    """Whether the action outputs are one action, as `TD3Loss` trains them. What stands beside it is
    no deviation, so actions are not sampled by it."""

    @property
    def exploration(self) -> Explore:
        """The exploration by which actions are chosen where they are not greedy.

        They are sampled from the distribution; with action values they are chosen
        epsilon-greedily with an epsilon of 0.05, with which Mnih et al. (2015) evaluate; those of
        a deterministic policy get noise of the deviation 0.1, as in TD3's training.
        """
        if self.action_values:
            return EpsilonGreedy(EVALUATION_EPSILON, EVALUATION_EPSILON)
        return GaussianNoise() if self.deterministic else SAMPLED

    @property
    def network(self) -> Network:
        """The network of the policy, made for its spaces."""
        return network(self.policy, self.spaces)

    @cached_property
    def _draws(self) -> Iterator[int]:
        """The seeds of the random choices that `act` makes without one."""
        return itertools.count()

    def act(
        self, obs: Any, carry: Any = None, *, greedy: bool = True, seed: int | None = None
    ) -> Any:
        """Choose actions for observations, as the environment takes them.

        Args:
            obs: one observation as the environment returns it, or N of them with a first axis
                more, ``[N, ...]``. If the environment's mask of actions comes in its `info`:
                ``{"observation": obs, "action_mask": info["action_mask"]}``.
            carry: what the last call of a recurrent policy returned; None (default) at the start
                of an episode.
            greedy: take the greedy action (default); else a random one, as `exploration` says.
            seed: seed of the random choice; None: another one in each call, the same ones in the
                same order for every policy that is loaded (default None).

        Returns:
            One action, or ``[N, ...]`` of them; from a recurrent policy that and the carry for the
            next call.

        Raises:
            ContractError: the observation has another shape or type than the space, or holds what
                is not finite.
        """
        net, explore = self.network, self.exploration
        arrays, single = self.spaces.batched(obs)
        batch, count = self.spaces.tree(arrays), len(next(iter(arrays.values())))
        if carry is None:
            memory = net.memory(self.weights, count)
        else:
            memory = Memory(carry, np.zeros(count, bool))
        noise = None
        if not greedy:
            number = next(self._draws) if seed is None else seed
            noise = _noise(net, explore, number, count)
        packed, carry = jitted_act(net, explore)(self.weights, batch, noise, memory)
        actions = net.head.to_env(net.unpack(np.asarray(packed))[0])
        action = jax.tree.map(lambda x: x[0], actions) if single else actions
        return (action, carry) if net.recurrent else action

    def evaluate(
        self,
        episodes: int = 20,
        *,
        seed: int = 0,
        greedy: bool = True,
        max_steps: int = MAX_STEPS,
        video: str | Path | None = None,
    ) -> Evaluation:
        """Play whole episodes in its environment.

        Where there are several agents it plays all of them: a return is then the mean of theirs,
        and a length that of the environment's episode. `match` plays several policies together.

        What makes the result less than it seems is logged as a warning: episodes that were cut, and
        those that are copies of each other.

        Args:
            episodes: number of episodes (default 20).
            seed: seed of the first episode (default 0). Episode i uses `seed` + i for its
                environment and for the random choice of its actions.
            greedy: take the greedy actions (default); else random ones, as `exploration` says,
                chosen again in each step.
            max_steps: most steps of an episode, which is then cut; its return until then counts
                (default 30_000).
            video: directory for videos of the first 3 episodes, for which the environment is made
                with ``render_mode="rgb_array"``; None: no videos (default None).

        Returns:
            The evaluation, which can be used as the array ``[episodes]`` of their returns.

        Raises:
            SaveError: the environment is not known: it had no name that could be saved. Or there
                are such videos already.
            SettingError: the environment can't be filmed, a package is missing for it, or some
                agent of the environment is not played by this policy.
        """
        found = (self._evaluated_agents if self.agents else self._evaluated)(
            episodes, seed, greedy, max_steps, video
        )
        for note in found.notes:
            log(note)
        return found

    def player(self, *, greedy: bool = True) -> PolicyPlayer:
        """Return what acts with this policy in a match.

        Args:
            greedy: take the greedy actions (default); else random ones, as `exploration` says.
        """
        return PolicyPlayer(self.network, self.weights, None if greedy else self.exploration)

    def _evaluated_agents(
        self, episodes: int, seed: int, greedy: bool, max_steps: int, video: str | Path | None
    ) -> Evaluation:
        """Play whole episodes as every agent of an environment."""
        if video is not None:
            raise SettingError("videos are of environments with one agent only; leave video out")
        env = self._known_env()
        known = agents_in(env, self.wrappers, self.env_settings)
        if others := [agent for agent in known if agent not in self.agents]:
            raise SettingError(
                f"this policy plays {', '.join(self.agents)} of {env_name(env)}, and not "
                f"{', '.join(others)}; let others play them: fl.match, or flowrl match"
            )
        player = self.player(greedy=greedy)
        games = play_agents(
            env,
            dict.fromkeys(self.agents, player),
            episodes,
            seed,
            self.wrappers,
            self.env_settings,
            max_steps=max_steps,
            sampled=not greedy,
        )
        return games.of(self.agents)

    def _known_env(self) -> Make:
        """Return the environment.

        Raises:
            SaveError: it is not known.
        """
        if self.env is None:
            raise SaveError(
                "the environment of this policy is not known: it was a lambda or a local function, "
                "which have no name that could be saved. Name one that has: flowrl eval DIR --env "
                "FILE.py:FUNCTION, or fl.load(dir, env=...). Or use policy.act(obs) in an "
                "environment of your own"
            )
        return self.env

    def _evaluated(
        self, episodes: int, seed: int, greedy: bool, max_steps: int, video: str | Path | None
    ) -> Evaluation:
        """Play whole episodes in an environment of one agent."""
        env = self._known_env()
        wrappers, settings = self.wrappers, self.env_settings
        if video is not None:
            folder = Path(video)
            wrappers, settings = filmed(env, wrappers, settings, self.spaces, seed, folder)
        return play(
            env,
            self.network,
            self.weights,
            episodes,
            seed,
            wrappers,
            settings,
            explore=None if greedy else self.exploration,
            max_steps=max_steps,
        )

    def export(self, path: str | Path) -> Export:
        """Write a file that takes the greedy actions in a process without flowrl.

        What it takes and returns are batches as the environment gives and takes them: normalising,
        masks and the stretching of actions over their bounds are inside. It is loaded again and
        compared with `act` on 1,000 random observations before it is written.

        Args:
            path: of the file, which does not exist yet: ``.stablehlo`` for `jax.export`, or
                ``.onnx`` (extra ``onnx``).

        Returns:
            What was written: inputs, outputs and the largest difference from `act`.

        Raises:
            SettingError: the file has another suffix, or a package is missing for it.
            SaveError: the file exists, the policy can't be exported, or what was exported acts in
                another way.
        """
        return export(self.network, self.weights, path)


def _noise(net: Network, explore: Explore, seed: int, count: int) -> Any:
    """Return the random numbers with which actions are chosen for `count` observations."""
    key = jax.random.key(seed)
    return explore.noise(net.head, key, count, jax.numpy.float32(0), jax.numpy.zeros(count), 1)
