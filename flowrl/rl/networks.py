"""Stock actor-critic networks, built from spaces. A user's own NNX module takes their place without a base class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flowrl.errors import PolicyError
from flowrl.rl.policies import RunningNorm
from flowrl.rl.spaces import head

Array = Any
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}


def action_outputs(space: gym.Space[Any]) -> int:
    """How many numbers a policy puts out per observation for this action space.

    >>> import gymnasium as gym
    >>> action_outputs(gym.spaces.Discrete(4)), action_outputs(gym.spaces.Box(-1, 1, (3,)))
    (4, 6)
    """
    return head(space).outputs


class Encoder(nnx.Module):
    """Observations as flat floats ``[N, size]``: Box as it is, Discrete and MultiDiscrete one-hot."""

    def __init__(self, space: gym.Space[Any], *, normalize: bool) -> None:
        self.sizes: tuple[int, ...] = ()
        self.starts: tuple[int, ...] = ()
        if isinstance(space, gym.spaces.Discrete):
            self.sizes, self.starts = (int(space.n),), (int(space.start),)
        elif isinstance(space, gym.spaces.MultiDiscrete) and space.nvec.ndim == 1:
            self.sizes, self.starts = (
                tuple(int(n) for n in space.nvec),
                tuple(int(s) for s in space.start),
            )
        elif not isinstance(space, gym.spaces.Box | gym.spaces.MultiBinary):
            raise PolicyError(
                f"MLP reads Box, Discrete, MultiDiscrete and MultiBinary observations, not {space}; "
                "wrap the environment with gymnasium.wrappers.FlattenObservation"
            )
        if normalize and self.sizes:
            raise PolicyError(
                f"observations of {space} are read one-hot, which running moments do not improve; leave normalize out"
            )
        self.size = sum(self.sizes) or int(np.prod(space.shape or ()))
        self.norm = RunningNorm(space.shape or ()) if normalize else None

    def __call__(self, obs: Array) -> Array:
        """``[N, ...]`` to ``[N, size]``."""
        if self.sizes:
            parts = obs.reshape(obs.shape[0], -1)
            hot = [
                jax.nn.one_hot(parts[:, i] - self.starts[i], n) for i, n in enumerate(self.sizes)
            ]
            return jnp.concatenate(hot, axis=-1)
        x = obs.astype(jnp.float32)
        return (x if self.norm is None else self.norm(x)).reshape(obs.shape[0], -1)


def orthogonal(inputs: int, outputs: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """A layer of orthogonal initial weights with gain sqrt(2), and no offsets."""
    return nnx.Linear(
        inputs, outputs, kernel_init=nnx.initializers.orthogonal(np.sqrt(2)), rngs=rngs
    )


class Trunk(nnx.Module):
    """Fully connected layers, made by `linear`, each followed by the activation."""

    def __init__(
        self,
        size: int,
        hidden: Sequence[int],
        activation: str,
        *,
        linear: Callable[..., nnx.Linear] = orthogonal,
        rngs: nnx.Rngs,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise PolicyError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
            )
        self.activation = activation
        self.layers = nnx.List(
            [linear(a, b, rngs=rngs) for a, b in zip((size, *hidden), hidden, strict=False)]
        )

    def __call__(self, x: Array) -> Array:
        """``[N, size]`` to ``[N, hidden[-1]]``."""
        for layer in self.layers:
            x = ACTIVATIONS[self.activation](layer(x))
        return x


class Heads(nnx.Module):
    """The action outputs and the value, from the features of each. Gaussian deviations are parameters of their own."""

    def __init__(
        self, actor: int, critic: int, space: gym.Space[Any], log_std: float, *, rngs: nnx.Rngs
    ) -> None:
        orthogonal = nnx.initializers.orthogonal
        out = head(space)
        gaussian = out.kind == "gaussian"
        self.action = nnx.Linear(
            actor, out.width if gaussian else out.outputs, kernel_init=orthogonal(0.01), rngs=rngs
        )
        self.value = nnx.Linear(critic, 1, kernel_init=orthogonal(1.0), rngs=rngs)
        self.log_std = nnx.Param(jnp.full((out.width,), log_std)) if gaussian else None

    def __call__(self, actor: Array, critic: Array) -> tuple[Array, Array]:
        """Action outputs ``[N, outputs]`` and values ``[N]``."""
        outputs = self.action(actor)
        if self.log_std is not None:
            outputs = jnp.concatenate(
                [outputs, jnp.broadcast_to(self.log_std[...], outputs.shape)], axis=-1
            )
        return outputs, self.value(critic)[:, 0]


class MLP(nnx.Module):
    """Fully connected actor and critic, with trunks of their own or a shared one.

    Args:
        hidden: the widths of the layers of each trunk.
        activation: tanh, relu, silu or gelu.
        shared: one trunk for both.
        normalize: shift and scale observations by running moments (`RunningNorm`).
        log_std: the initial log-deviation of Gaussian actions.
    """

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden: Sequence[int] = (64, 64),
        activation: str = "tanh",
        shared: bool = False,
        normalize: bool = False,
        log_std: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        self.encoder = Encoder(obs_space, normalize=normalize)
        self.actor = Trunk(self.encoder.size, hidden, activation, rngs=rngs)
        self.critic = None if shared else Trunk(self.encoder.size, hidden, activation, rngs=rngs)
        width = hidden[-1] if hidden else self.encoder.size
        self.heads = Heads(width, width, action_space, log_std, rngs=rngs)

    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """``obs [N, ...]`` to action outputs ``[N, outputs]`` and values ``[N]``."""
        x = self.encoder(obs)
        actor = self.actor(x)
        return self.heads(actor, actor if self.critic is None else self.critic(x))


CELLS: dict[str, Callable[..., Any]] = {"lstm": nnx.OptimizedLSTMCell, "gru": nnx.GRUCell}


class Recall(nnx.Module):
    """Fully connected layers, then a cell that remembers."""

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        cell: str,
        size: int,
        activation: str,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        if cell not in CELLS:
            raise PolicyError(f"cell must be one of {', '.join(CELLS)}, got {cell!r}")
        self.trunk = Trunk(inputs, hidden, activation, rngs=rngs)
        self.size = size
        self.cell = CELLS[cell](hidden[-1] if hidden else inputs, size, rngs=rngs)

    def initial_carry(self, n: int) -> Any:
        """Zeros ``[n, size]``: two of them for an LSTM."""
        zeros = jnp.zeros((n, self.size))
        return (zeros, zeros) if isinstance(self.cell, nnx.OptimizedLSTMCell) else zeros

    def __call__(self, x: Array, carry: Any) -> tuple[Array, Any]:
        """``[N, inputs]`` to ``[N, size]``, and the carry behind."""
        carry, x = self.cell(carry, self.trunk(x))
        return x, carry


class RNN(nnx.Module):
    """A recurrent actor-critic for what one observation does not tell: fully connected layers, then an LSTM or GRU.

    Args:
        hidden: the widths of the layers before the cell.
        cell: lstm or gru.
        size: the width of the cell.
        activation: tanh, relu, silu or gelu.
        shared: one trunk and cell for actor and critic; else each has its own.
        normalize: shift and scale observations by running moments (`RunningNorm`).
        log_std: the initial log-deviation of Gaussian actions.
    """

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden: Sequence[int] = (64,),
        cell: str = "lstm",
        size: int = 64,
        activation: str = "tanh",
        shared: bool = False,
        normalize: bool = False,
        log_std: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        self.encoder = Encoder(obs_space, normalize=normalize)
        self.actor = Recall(self.encoder.size, hidden, cell, size, activation, rngs=rngs)
        self.critic = (
            None if shared else Recall(self.encoder.size, hidden, cell, size, activation, rngs=rngs)
        )
        self.heads = Heads(size, size, action_space, log_std, rngs=rngs)

    def initial_carry(self, n: int) -> Any:
        """Zeros: the actor's, and the critic's if it has its own."""
        return (
            self.actor.initial_carry(n),
            () if self.critic is None else self.critic.initial_carry(n),
        )

    def __call__(self, obs: Array, carry: Any) -> tuple[Array, Array, Any]:
        """``obs [N, ...]`` to action outputs ``[N, outputs]``, values ``[N]`` and the carry behind."""
        x = self.encoder(obs)
        actor, acted = self.actor(x, carry[0])
        critic, judged = (actor, ()) if self.critic is None else self.critic(x, carry[1])
        return *self.heads(actor, critic), (acted, judged)


class Convolution(nnx.Module):
    """A convolution without padding. Orthogonal initial weights, gain sqrt(2).

    On a CPU it is one product of matrices: there XLA takes some 40 times as long over the gradient of its own convolution in a loop of minibatches.
    """

    def __init__(self, depth: int, filters: int, size: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(
            nnx.initializers.orthogonal(np.sqrt(2))(rngs.params(), (size, size, depth, filters))
        )
        self.bias = nnx.Param(jnp.zeros(filters))
        self.stride = stride

    def __call__(self, x: Array) -> Array:
        """``[N, H, W, depth]`` to ``[N, (H - size) // stride + 1, (W - size) // stride + 1, filters]``."""
        return (
            jax.lax.platform_dependent(
                x, self.kernel[...], cpu=self._product, default=self._convolution
            )
            + self.bias[...]
        )

    def _convolution(self, x: Array, kernel: Array) -> Array:
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (self.stride, self.stride),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    def _product(self, x: Array, kernel: Array) -> Array:
        size, _, _, filters = kernel.shape
        height, width = ((n - size) // self.stride * self.stride + 1 for n in x.shape[1:3])
        parts = [
            x[:, i : i + height : self.stride, j : j + width : self.stride]
            for i in range(size)
            for j in range(size)
        ]
        return jnp.concatenate(parts, axis=-1) @ kernel.reshape(-1, filters)


CHANNELS, KERNELS, STRIDES = (32, 64, 64), (8, 4, 3), (4, 2, 1)
"""The convolutions of Mnih et al. (2015)."""


NOT_NORMALIZED = "has convolutions for images, which divide bytes by 255 in place of running moments; leave normalize out"
"""What is wrong with ``normalize=True`` on images."""


def _axes(shape: Sequence[int]) -> tuple[bool, int, int, int]:
    """Whether the channels of an image are its first axis, and its height, width and channels."""
    first = shape[0] == min(shape)
    return (True, shape[1], shape[2], shape[0]) if first else (False, shape[0], shape[1], shape[2])


def _after(size: int, kernels: Sequence[int], strides: Sequence[int]) -> int:
    """The length of an axis of an image after the convolutions; below 1 if one of them is larger than what it is given."""
    for kernel, stride in zip(kernels, strides, strict=True):
        size = (size - kernel) // stride + 1
    return size


def shows_images(space: gym.Space[Any]) -> bool:
    """Whether observations are images of bytes that are large enough for the convolutions of Mnih et al. (2015).

    What stock networks do where nobody says otherwise depends on it: others, small images among them, go through fully connected layers.
    """
    shape = space.shape or ()
    if np.dtype(space.dtype) != np.uint8 or len(shape) != 3:
        return False
    _, height, width, _ = _axes(shape)
    return _after(min(height, width), KERNELS, STRIDES) >= 1


class Images(nnx.Module):
    """The convolutional trunk of Mnih et al. (2015).

    Images are ``[H, W, C]``, or ``[C, H, W]`` where the first axis is the smallest; bytes are divided by 255.
    """

    def __init__(
        self,
        space: gym.Space[Any],
        *,
        channels: Sequence[int] = CHANNELS,
        kernels: Sequence[int] = KERNELS,
        strides: Sequence[int] = STRIDES,
        hidden: int = 512,
        rngs: nnx.Rngs,
    ) -> None:
        shape = space.shape or ()
        if len(shape) != 3:
            raise PolicyError(
                f"convolutions read images with 3 axes, not {space}; take MLP, or QNetwork without kernels"
            )
        if not len(channels) == len(kernels) == len(strides):
            given = (
                f"channels={tuple(channels)}, kernels={tuple(kernels)}, strides={tuple(strides)}"
            )
            raise PolicyError(
                f"each convolution has a number of channels, a kernel and a stride, so give as many of each; got {given}"
            )
        self.first, height, width, depth = _axes(shape)
        layers = []
        init = nnx.initializers.orthogonal(np.sqrt(2))
        height, width = (_after(size, kernels, strides) for size in (height, width))
        if min(height, width) < 1:
            raise PolicyError(
                f"images of {shape[1:] if self.first else shape[:2]} are too small for kernels {tuple(kernels)} "
                f"with strides {tuple(strides)}; give smaller ones"
            )
        for out, kernel, stride in zip(channels, kernels, strides, strict=True):
            layers.append(Convolution(depth, out, kernel, stride, rngs=rngs))
            depth = out
        self.layers = nnx.List(layers)
        self.dense = nnx.Linear(height * width * depth, hidden, kernel_init=init, rngs=rngs)
        self.scale = 255.0 if np.dtype(space.dtype) == np.uint8 else 1.0

    def __call__(self, obs: Array) -> Array:
        """``obs [N, ...]`` to ``[N, hidden]``."""
        x = obs.astype(jnp.float32) / self.scale
        x = jnp.moveaxis(x, 1, -1) if self.first else x
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return jax.nn.relu(self.dense(x.reshape(x.shape[0], -1)))


class CNN(nnx.Module):
    """The convolutional network of Mnih et al. (2015) for images, shared by actor and critic.

    Images are ``[H, W, C]``, or ``[C, H, W]`` where the first axis is the smallest; bytes are divided by 255.

    Args:
        channels: the filters of each convolution.
        kernels: their sizes.
        strides: their strides.
        hidden: the width of the layer behind them.
        log_std: the initial log-deviation of Gaussian actions.
    """

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        channels: Sequence[int] = CHANNELS,
        kernels: Sequence[int] = KERNELS,
        strides: Sequence[int] = STRIDES,
        hidden: int = 512,
        log_std: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        self.trunk = Images(
            obs_space, channels=channels, kernels=kernels, strides=strides, hidden=hidden, rngs=rngs
        )
        self.heads = Heads(hidden, hidden, action_space, log_std, rngs=rngs)

    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """``obs [N, ...]`` to action outputs ``[N, outputs]`` and values ``[N]``."""
        x = self.trunk(obs)
        return self.heads(x, x)
