"""Networks for actions in a Box: an actor, and critics that evaluate its actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import jax
import jax.numpy as jnp
from flax import nnx

from flowrl.errors import PolicyError
from flowrl.rl.actions import head
from flowrl.rl.layers import Trunk, check_widths, encoder_of_any
from flowrl.rl.value_networks import uniform

Array = Any
ACTOR = ("actor", "action")
"""What the names of an actor's parameters begin with."""
CRITIC = ("critics", "values", "encoder")
"""What the names of the critics' parameters begin with, and those of the convolutions before both.
"""


class ActorCritics(nnx.Module):
    """Base class of networks with an actor and some critics.

    Of images the convolutions come before both: they are in the critics' group, and learn from the
    critics' loss alone, as in SAC-AE (Yarats et al. 2021): the actor's gradient would change what
    the critics read.

    Args:
        obs_space: observation space of the environment.
        action_space: action space of the environment, which must be a Box of floats.
        outputs: numbers that the actor has for each number of an action.
        critics: number of critics.
        hidden: widths of the layers of the actor and of each critic.
        activation: ``tanh``, ``relu``, ``silu`` or ``gelu``.
        normalize: whether to shift and scale observations by running moments (`RunningNorm`).
        rngs: random keys of the initial weights.

    Raises:
        PolicyError: actions are not in a Box.
    """

    squashed = True
    """Actions of this policy are squashed into [-1, 1] by tanh."""

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        outputs: int,
        critics: int,
        hidden: Sequence[int],
        activation: str,
        normalize: bool,
        rngs: nnx.Rngs,
    ) -> None:
        actions = head(action_space)
        if not actions.continuous:
            raise PolicyError(
                f"{type(self).__name__} is for actions in a Box, not {action_space}; "
                "take QNetwork with DQNLoss (fl.dqn) for one of n actions"
            )
        if critics < 1:
            raise PolicyError(f"critics must be at least 1, got {critics}")
        check_widths(hidden)
        self.encoder = encoder_of_any(
            obs_space, type(self).__name__, normalize=normalize, rngs=rngs
        )
        self.actor = Trunk(self.encoder.size, hidden, activation, linear=uniform, rngs=rngs)
        self.action = uniform(hidden[-1], outputs * actions.width, rngs=rngs)
        inputs = self.encoder.size + actions.width
        self.critics = nnx.List(
            [Trunk(inputs, hidden, activation, linear=uniform, rngs=rngs) for _ in range(critics)]
        )
        self.values = nnx.List([uniform(hidden[-1], 1, rngs=rngs) for _ in range(critics)])

    def act(self, obs: Array) -> Array:
        """Return the numbers of the actor ``[N, outputs x d]`` for ``obs [N, ...]``.

        Their gradient ends before the convolutions.
        """
        numbers: Array = self.action(self.actor(jax.lax.stop_gradient(self.encoder(obs))))
        return numbers

    def critic(self, obs: Array, action: Array, count: int | None = None) -> Array:
        """Return the values ``[count, N]`` that critics give to actions ``[N, d]``.

        Args:
            obs: observations ``[N, ...]``.
            action: actions in [-1, 1].
            count: of how many critics, the first ones; None: all (default None).
        """
        x = jnp.concatenate([self.encoder(obs), action], axis=-1)
        pairs = [*zip(self.critics, self.values, strict=True)][:count]
        return jnp.stack([value(trunk(x))[:, 0] for trunk, value in pairs])


class SACNetwork(ActorCritics):
    """Squashed Gaussian policy, two critics and a temperature (Haarnoja et al. 2018b).

    The critics evaluate actions in [-1, 1]. The temperature weighs the entropy of the policy. The
    convolutions of images are shared, and learn from the critics' loss.

    Args:
        obs_space: observation space of the environment.
        action_space: action space of the environment, which must be a Box of floats.
        hidden: widths of the layers of the policy and of each critic (default (256, 256)).
        activation: ``tanh``, ``relu``, ``silu`` or ``gelu`` (default ``relu``).
        alpha: initial temperature (default 1.0).
        normalize: whether to shift and scale observations by running moments (`RunningNorm`)
            (default False).
        rngs: random keys of the initial weights.

    Raises:
        PolicyError: actions are not in a Box, or `alpha` is not above 0.
    """

    parameter_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "actor": ACTOR,
        "critic": CRITIC,
        "temperature": ("log_temperature",),
    }
    """The groups of parameters that may have optimisers of their own."""

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden: Sequence[int] = (256, 256),
        activation: str = "relu",
        alpha: float = 1.0,
        normalize: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(
            obs_space,
            action_space,
            outputs=2,
            # Two critics, because the smaller value of both is less of an overestimate.
            critics=2,
            hidden=hidden,
            activation=activation,
            normalize=normalize,
            rngs=rngs,
        )
        if not alpha > 0:
            raise PolicyError(f"alpha must be above 0, got {alpha}")
        # The logarithm is trained, so that the temperature stays above 0.
        self.log_temperature = nnx.Param(jnp.log(jnp.float32(alpha)))

    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """Return means and log-deviations ``[N, 2 d]`` of ``obs [N, ...]``, and values ``[N]``.

        The values are 0, and nothing uses them: action values come from `critic`.
        """
        mean, log_std = jnp.split(self.act(obs), 2, axis=-1)
        return jnp.concatenate([mean, jnp.clip(log_std, -20, 2)], axis=-1), jnp.zeros(mean.shape[0])

    def log_alpha(self) -> Array:
        """Return the logarithm of the temperature, a scalar."""
        return self.log_temperature[...]


class TD3Network(ActorCritics):
    """Deterministic policy and its critics (TD3, Fujimoto et al. 2018; with one critic DDPG).

    The critics evaluate actions in [-1, 1]. The convolutions of images are shared, and learn from
    the critics' loss.

    Args:
        obs_space: observation space of the environment.
        action_space: action space of the environment, which must be a Box of floats.
        critics: number of critics (default 2).
        hidden: widths of the layers of the policy and of each critic (default (256, 256)).
        activation: ``tanh``, ``relu``, ``silu`` or ``gelu`` (default ``relu``).
        normalize: whether to shift and scale observations by running moments (`RunningNorm`)
            (default False).
        rngs: random keys of the initial weights.

    Raises:
        PolicyError: actions are not in a Box, or `critics` is below 1.
    """

    parameter_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"actor": ACTOR, "critic": CRITIC}
    """The groups of parameters that may have optimisers of their own."""

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        critics: int = 2,
        hidden: Sequence[int] = (256, 256),
        activation: str = "relu",
        normalize: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(
            obs_space,
            action_space,
            outputs=1,
            critics=critics,
            hidden=hidden,
            activation=activation,
            normalize=normalize,
            rngs=rngs,
        )

    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """Return actions before tanh ``[N, d]``, zeros beside them, and values ``[N]``.

        The zeros stand where other policies have log-deviations, and nothing uses them, nor the
        values, which are 0.
        """
        mean = self.act(obs)
        return jnp.concatenate([mean, jnp.zeros_like(mean)], axis=-1), jnp.zeros(mean.shape[0])
