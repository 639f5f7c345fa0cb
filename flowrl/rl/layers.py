"""Parts of which stock networks are made: encoders of observations, connected trunk, heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flowrl.errors import PolicyError
from flowrl.rl.actions import Path, head, leaves
from flowrl.rl.few_outputs import dot_general
from flowrl.rl.images import NOT_NORMALIZED, Images, shows_images
from flowrl.rl.initializers import orthogonal, orthogonal_weights
from flowrl.rl.normalizing import RunningNorm

Array = Any
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}
"""The activations that networks take by name."""


class Encoder(nnx.Module):
    """Layer that makes flat floats ``[N, size]`` of observations.

    Box and MultiBinary stay as they are; Discrete and MultiDiscrete become one-hot.

    Args:
        space: the observation space.
        normalize: shift and scale observations by running moments (`RunningNorm`).

    Raises:
        PolicyError: the space is of another kind, or `normalize` is set for a one-hot one.
    """

    def __init__(self, space: gym.Space[Any], *, normalize: bool) -> None:
        self.sizes: tuple[int, ...] = ()
        self.starts: tuple[int, ...] = ()
        if isinstance(space, gym.spaces.Discrete):
            self.sizes, self.starts = (int(space.n),), (int(space.start),)
        elif isinstance(space, gym.spaces.MultiDiscrete) and space.nvec.ndim == 1:
            self.sizes = tuple(int(n) for n in space.nvec)
            self.starts = tuple(int(start) for start in space.start)
        elif not isinstance(space, gym.spaces.Box | gym.spaces.MultiBinary):
            raise PolicyError(
                "stock networks read Box, Discrete, MultiDiscrete and MultiBinary observations, "
                f"and a Dict or Tuple of these, not {space}; write a module of your own for them"
            )
        if normalize and self.sizes:
            raise PolicyError(
                f"observations of {space} are read one-hot, "
                "which running moments do not improve; leave normalize out"
            )
        self.size = sum(self.sizes) or int(np.prod(space.shape or ()))
        self.norm = RunningNorm(space.shape or ()) if normalize else None

    def __call__(self, obs: Array) -> Array:
        """Return floats ``[N, size]`` for ``obs [N, ...]``."""
        if self.sizes:
            # Discrete has no axis of its own, MultiDiscrete has one.
            parts = obs.reshape(obs.shape[0], -1)
            one_hot = [
                jax.nn.one_hot(parts[:, i] - self.starts[i], n) for i, n in enumerate(self.sizes)
            ]
            return jnp.concatenate(one_hot, axis=-1)
        x = obs.astype(jnp.float32)
        if self.norm is not None:
            x = self.norm(x)
        return x.reshape(obs.shape[0], -1)


class Parts(nnx.Module):
    """Layer that encodes each part of observations that are a Dict or a Tuple, and joins them.

    Images of bytes go through the convolutions of Mnih et al. (2015), all else through `Encoder`.

    Args:
        space: the observation space.
        normalize: shift and scale by running moments what is neither one-hot nor an image.
        rngs: the random keys of the initial weights.

    Raises:
        PolicyError: a part is of a kind that is not supported, or `normalize` is set where there is
            nothing to normalize.
    """

    def __init__(self, space: gym.Space[Any], *, normalize: bool, rngs: nnx.Rngs) -> None:
        self.paths: tuple[Path, ...] = tuple(path for path, _ in leaves(space))
        parts: list[Any] = []
        normalizes = False
        for _, one in leaves(space):
            if shows_images(one):
                parts.append(Images(one, rngs=rngs))
                continue
            numbers = isinstance(one, gym.spaces.Box | gym.spaces.MultiBinary)
            normalizes |= numbers
            parts.append(Encoder(one, normalize=normalize and numbers))
        if normalize and not normalizes:
            raise PolicyError(
                f"observations of {space} hold no numbers that running moments improve; "
                "leave normalize out"
            )
        self.parts = nnx.List(parts)
        self.size = sum(part.size for part in parts)

    def __call__(self, obs: Any) -> Array:
        """Return floats ``[N, size]`` for a tree of observations ``[N, ...]``."""
        encoded = []
        for path, part in zip(self.paths, self.parts, strict=True):
            x = obs
            for step in path:
                x = x[step]
            encoded.append(part(x))
        return jnp.concatenate(encoded, axis=-1)


def encoder(space: gym.Space[Any], *, normalize: bool, rngs: nnx.Rngs) -> Any:
    """Return the layer that makes floats ``[N, size]`` of observations; it has the `size`.

    Args:
        space: the observation space.
        normalize: shift and scale observations by running moments (`RunningNorm`).
        rngs: the random keys of the initial weights.

    Raises:
        PolicyError: the space is of a kind that is not supported, or `normalize` does not fit it.
    """
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        return Parts(space, normalize=normalize, rngs=rngs)
    return Encoder(space, normalize=normalize)


def encoder_of_any(space: gym.Space[Any], name: str, *, normalize: bool, rngs: nnx.Rngs) -> Any:
    """Return convolutions for large images of bytes, and else what `encoder` returns.

    Args:
        space: the observation space.
        name: the name of the network, for errors.
        normalize: as of `encoder`.
        rngs: as of `encoder`.

    Raises:
        PolicyError: as of `encoder`, which includes `normalize` for images.
    """
    if not shows_images(space):
        return encoder(space, normalize=normalize, rngs=rngs)
    if normalize:
        raise PolicyError(f"{name} {NOT_NORMALIZED}")
    return Images(space, rngs=rngs)


def check_widths(hidden: Any, *, none: bool = False) -> None:
    """Refuse what is no widths of layers.

    Args:
        hidden: what was given for them.
        none: whether there may be no layers (default False).

    Raises:
        PolicyError: it is no sequence of whole numbers of at least 1.
    """
    listed = isinstance(hidden, Sequence) and not isinstance(hidden, str)
    if not (
        listed
        and (hidden or none)
        and all(isinstance(x, int | np.integer) and x >= 1 for x in hidden)
    ):
        raise PolicyError(
            "hidden must be the widths of layers, whole numbers of at least 1, such as (64, 64); "
            f"got {hidden!r}"
        )


class Trunk(nnx.Module):
    """Fully connected layers, each followed by the activation.

    Args:
        size: numbers that the first layer reads.
        hidden: the widths of the layers.
        activation: tanh, relu, silu or gelu.
        linear: makes a layer from its inputs and outputs; by default `orthogonal`.
        first: makes the layer that reads `size` numbers; None: `linear`.
        rngs: the random keys of the initial weights.

    Raises:
        PolicyError: the activation is none of these, or `hidden` holds no widths.
    """

    def __init__(
        self,
        size: int,
        hidden: Sequence[int],
        activation: str,
        *,
        linear: Callable[..., Any] = orthogonal,
        first: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise PolicyError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
            )
        check_widths(hidden, none=True)
        self.activation = activation
        layers, make, inputs = [], first or linear, size
        for outputs in hidden:
            layers.append(make(inputs, outputs, rngs=rngs))
            # Each layer reads what the one before it returns.
            make, inputs = linear, outputs
        self.layers = nnx.List(layers)

    def __call__(self, x: Array) -> Array:
        """Return features ``[N, hidden[-1]]`` of ``x [N, size]``."""
        for layer in self.layers:
            x = ACTIVATIONS[self.activation](layer(x))
        return x


class Heads(nnx.Module):
    """The last layers of an actor-critic, from features to action outputs and the value.

    The log-deviations of Gaussian actions are parameters of their own, the same for every
    observation.

    Args:
        actor: the number of features for the action outputs.
        critic: the number of features for the value.
        space: the action space.
        log_std: the initial log-deviation of Gaussian actions.
        rngs: the random keys of the initial weights.
    """

    def __init__(
        self, actor: int, critic: int, space: gym.Space[Any], log_std: float, *, rngs: nnx.Rngs
    ) -> None:
        init = orthogonal_weights
        out = head(space)
        outputs = out.choices + out.reals
        # Small weights of the action outputs make the first policy almost independent of obs.
        self.action = nnx.Linear(
            actor, outputs, kernel_init=init(0.01), dot_general=dot_general, rngs=rngs
        )
        self.value = nnx.Linear(critic, 1, kernel_init=init(1.0), rngs=rngs)
        self.log_std = nnx.Param(jnp.full((out.reals,), log_std)) if out.reals else None

    def __call__(self, actor: Array, critic: Array) -> tuple[Array, Array]:
        """Return action outputs ``[N, outputs]`` and values ``[N]`` from the features of each."""
        outputs = self.action(actor)
        if self.log_std is not None:
            # A policy outputs means and log-deviations side by side.
            log_std = self.log_std[...]
            log_std = jnp.broadcast_to(log_std, (outputs.shape[0], len(log_std)))
            outputs = jnp.concatenate([outputs, log_std], axis=-1)
        return outputs, self.value(critic)[:, 0]
