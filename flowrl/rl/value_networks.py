"""Stock networks of algorithms that learn action values, built from spaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import jax
from flax import nnx

from flowrl.errors import PolicyError
from flowrl.rl.actions import head
from flowrl.rl.few_outputs import dot_general
from flowrl.rl.images import NOT_NORMALIZED, Images, shows_images
from flowrl.rl.initializers import orthogonal
from flowrl.rl.layers import Trunk, check_widths, encoder
from flowrl.rl.noisy_layers import NoisyLinear
from flowrl.rl.return_distributions import CategoricalReturns, returns_of

Array = Any


def uniform(inputs: int, outputs: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """Return a linear layer with initial weights and offsets uniform within 1 / sqrt(inputs).

    The initial weights that suit policies make action values diverge. They are larger, and where
    observations are near 0 their offsets of 0 harm too: a network of rectified layers without
    offsets is a cone, steep wherever it is high.

    Args:
        inputs: numbers that the layer reads.
        outputs: numbers that it returns.
        rngs: the random keys of the initial weights.
    """

    def within(key: Array, shape: tuple[int, ...], dtype: Any, **_: Any) -> Array:
        return jax.random.uniform(key, shape, dtype, -(inputs**-0.5), inputs**-0.5)

    return nnx.Linear(
        inputs,
        outputs,
        kernel_init=within,
        bias_init=within,
        dot_general=dot_general,
        rngs=rngs,
    )


class QNetwork(nnx.Module):
    """Network of action values: its action outputs are a value for each of n actions.

    The value of an observation is the highest of them. Images of bytes that are large enough go
    through the convolutions of Mnih et al. (2015), all else through fully connected layers. Any
    images with 3 axes go through convolutions where `channels`, `kernels` or `strides` are given.

    With `atoms` it has the distribution of each action's return, whose mean is the action value:
    over returns from `v_min` to `v_max`, which `C51Loss` trains, or without these as quantiles,
    which `QRLoss` trains. With `noisy` its fully connected layers are noisy (`NoisyLinear`), but
    for one that reads observations themselves; runners explore by the noise with `NoisyWeights`.

    Args:
        obs_space: observation space of the environment.
        action_space: action space of the environment, which must be one of n actions.
        hidden: widths of the fully connected layers; after convolutions there is one such layer, of
            the last of these widths (default (64, 64)).
        activation: ``tanh``, ``relu``, ``silu`` or ``gelu`` (default ``relu``).
        dueling: whether to compute the value of the observation and the advantages of actions
            separately (Wang et al. 2016, equation 9) (default False).
        normalize: whether to shift and scale observations by running moments (`RunningNorm`); not
            for images that go through convolutions (default False).
        channels: number of filters of each convolution; None: (32, 64, 64) (default None).
        kernels: sizes of the convolutions in pixels; None: (8, 4, 3) (default None).
        strides: strides of the convolutions in pixels; None: (4, 2, 1) (default None).
        atoms: numbers for the distribution of each action's return; None: its mean alone (default
            None).
        v_min: lowest return of a categorical distribution; None: quantiles (default None).
        v_max: highest return of a categorical distribution; None: quantiles (default None).
        noisy: whether the fully connected layers after the first are noisy (default False).
        rngs: random keys of the initial weights.

    Raises:
        PolicyError: actions are not one of n, `normalize` is set for images, or `atoms`, `v_min`
            and `v_max` do not belong together.
    """

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden: Sequence[int] = (64, 64),
        activation: str = "relu",
        dueling: bool = False,
        normalize: bool = False,
        channels: Sequence[int] | None = None,
        kernels: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        atoms: int | None = None,
        v_min: float | None = None,
        v_max: float | None = None,
        noisy: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        actions = head(action_space)
        if actions.kind != "categorical":
            raise PolicyError(
                f"QNetwork has a value for each of n actions, not for {action_space}; "
                "take SACNetwork with SACLoss (fl.sac) for actions in a Box, and TeamQNetwork "
                "(fl.vdn, fl.qmix) for the choices of a team's agents"
            )
        convolutions = {"channels": channels, "kernels": kernels, "strides": strides}
        given = {name: values for name, values in convolutions.items() if values is not None}
        check_widths(hidden)
        width, linear = hidden[-1], NoisyLinear if noisy else uniform
        if given or shows_images(obs_space):
            if normalize:
                raise PolicyError(f"QNetwork {NOT_NORMALIZED}")
            dense: Any = NoisyLinear if noisy else orthogonal
            self.encoder: nnx.Module = Images(
                obs_space, hidden=width, linear=dense, **given, rngs=rngs
            )
            self.trunk = None
        else:
            # Everything but images is read by fully connected layers.
            flat = encoder(obs_space, normalize=normalize, rngs=rngs)
            self.encoder = flat
            # Noise in the layer that reads observations would drown them, for they are few.
            self.trunk = Trunk(
                flat.size, hidden, activation, linear=linear, first=uniform, rngs=rngs
            )
        self.distribution = returns_of(atoms, v_min, v_max)
        self.atoms = 1 if atoms is None else atoms
        self.actions = actions.outputs
        self.advantage = linear(width, self.actions * self.atoms, rngs=rngs)
        self.value = linear(width, self.atoms, rngs=rngs) if dueling else None

    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """Return action values ``[N, n]`` of ``obs [N, ...]``, and the highest of them ``[N]``."""
        returns = self.returns(obs)
        values = returns[..., 0] if self.distribution is None else self.distribution.mean(returns)
        return values, values.max(-1)

    def returns(self, obs: Array) -> Array:
        """Return the numbers ``[N, n, atoms]`` of the distributions of all actions' returns.

        They are logits of categorical distributions, or quantiles; without `atoms` they are the
        action values ``[N, n, 1]``.
        """
        x = self.encoder(obs)
        x = x if self.trunk is None else self.trunk(x)
        numbers = self.advantage(x)
        numbers = numbers.reshape(numbers.shape[0], self.actions, self.atoms)
        if self.value is not None:
            # Without subtracting the mean, value and advantages could shift against each other.
            numbers = self.value(x)[:, None] + numbers - numbers.mean(1, keepdims=True)
        return numbers

    def support(self) -> Array:
        """Return the returns ``[atoms]`` of categorical distributions.

        Raises:
            PolicyError: the network has no categorical distributions.
        """
        if not isinstance(self.distribution, CategoricalReturns):
            raise PolicyError("QNetwork has a support of returns only with atoms, v_min and v_max")
        return self.distribution.support()
