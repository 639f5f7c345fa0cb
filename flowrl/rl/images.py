"""Convolutions for images, after Mnih et al. (2015)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flowrl.errors import PolicyError
from flowrl.rl.initializers import orthogonal, orthogonal_weights

Array = Any
NO_PLATFORM: ContextVar[bool] = ContextVar("NO_PLATFORM", default=False)
"""Whether what is traced now is for no platform in particular."""


@contextmanager
def for_no_platform() -> Iterator[None]:
    """Let what is traced decide nothing by the platform, which ONNX does not know."""
    token = NO_PLATFORM.set(True)
    try:
        yield
    finally:
        NO_PLATFORM.reset(token)


class Convolution(nnx.Module):
    """Convolution without padding, with orthogonal initial weights of gain sqrt(2).

    On a CPU it is computed as one product of matrices: there XLA takes some 40 times as long over
    the gradient of its own convolution in a loop of minibatches.

    Args:
        depth: the channels of the images that it reads.
        filters: the channels that it returns.
        size: the height and width of the kernel in pixels.
        stride: the pixels from one place of the kernel to the next.
        rngs: the random keys of the initial weights.
    """

    def __init__(self, depth: int, filters: int, size: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(
            orthogonal_weights(np.sqrt(2))(rngs.params(), (size, size, depth, filters))
        )
        self.bias = nnx.Param(jnp.zeros(filters))
        self.stride = stride

    def __call__(self, x: Array) -> Array:
        """Return images with `filters` channels for ``x [N, H, W, depth]``.

        Their shape is ``[N, (H - size) // stride + 1, (W - size) // stride + 1, filters]``.
        """
        kernel = self.kernel[...]
        if NO_PLATFORM.get():
            return self._convolution(x, kernel) + self.bias[...]
        convolved = jax.lax.platform_dependent(
            x, kernel, cpu=self._product, default=self._convolution
        )
        return convolved + self.bias[...]

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
        # The pixels that the top left pixel of the kernel moves over, the last place included.
        height, width = ((n - size) // self.stride * self.stride + 1 for n in x.shape[1:3])
        # Each pixel of the kernel meets one shifted image; a product with the kernel adds them up.
        parts = [
            x[:, i : i + height : self.stride, j : j + width : self.stride]
            for i in range(size)
            for j in range(size)
        ]
        return jnp.concatenate(parts, axis=-1) @ kernel.reshape(-1, filters)


CHANNELS, KERNELS, STRIDES = (32, 64, 64), (8, 4, 3), (4, 2, 1)
"""The convolutions of Mnih et al. (2015)."""


NOT_NORMALIZED = (
    "has convolutions for images, which divide bytes by 255 in place of running moments; "
    "leave normalize out"
)
"""The message on ``normalize=True`` for images, after the name of the network."""


def _axes(shape: Sequence[int]) -> tuple[bool, int, int, int]:
    """Return whether channels are an image's first axis, and its height, width and channels."""
    if shape[0] == min(shape):
        return True, shape[1], shape[2], shape[0]
    return False, shape[0], shape[1], shape[2]


def _after(size: int, kernels: Sequence[int], strides: Sequence[int]) -> int:
    """Return the length of an image's axis after the convolutions.

    It is below 1 if one of them is larger than the image that it reads.
    """
    for kernel, stride in zip(kernels, strides, strict=True):
        size = (size - kernel) // stride + 1
    return size


def shows_images(space: gym.Space[Any]) -> bool:
    """Return whether observations are images of bytes, large enough for `KERNELS` and `STRIDES`.

    These are the convolutions of Mnih et al. (2015). By default stock networks use them for such
    observations; all others, small images among them, go through fully connected layers.
    """
    shape = space.shape or ()
    if not isinstance(space, gym.spaces.Box) or space.dtype != np.uint8 or len(shape) != 3:
        return False
    _, height, width, _ = _axes(shape)
    return _after(min(height, width), KERNELS, STRIDES) >= 1


def _check_convolutions(
    space: gym.Space[Any],
    channels: Sequence[int],
    kernels: Sequence[int],
    strides: Sequence[int],
) -> None:
    """Refuse observations that are no images, and settings that do not belong together."""
    if len(getattr(space, "shape", None) or ()) != 3:
        raise PolicyError(
            f"convolutions read images with 3 axes, not {space}; take MLP, or QNetwork without "
            "kernels, which encode every part of observations by its kind"
        )
    if not len(channels) == len(kernels) == len(strides):
        raise PolicyError(
            "each convolution has a number of channels, a kernel and a stride, "
            f"so give as many of each; got channels={tuple(channels)}, "
            f"kernels={tuple(kernels)}, strides={tuple(strides)}"
        )


class Images(nnx.Module):
    """Convolutional trunk of Mnih et al. (2015).

    Images are ``[H, W, C]``, or ``[C, H, W]`` where the first axis is the smallest; bytes are
    divided by 255.

    Args:
        space: the observation space.
        channels: the filters of each convolution.
        kernels: the sizes of the convolutions in pixels.
        strides: the strides of the convolutions in pixels.
        hidden: the width of the fully connected layer after them.
        linear: makes that layer from its inputs and outputs; by default `orthogonal`.
        rngs: the random keys of the initial weights.

    Raises:
        PolicyError: observations are no images or too small ones, or the numbers of channels,
            kernels and strides differ.
    """

    def __init__(
        self,
        space: gym.Space[Any],
        *,
        channels: Sequence[int] = CHANNELS,
        kernels: Sequence[int] = KERNELS,
        strides: Sequence[int] = STRIDES,
        hidden: int = 512,
        linear: Callable[..., Any] = orthogonal,
        rngs: nnx.Rngs,
    ) -> None:
        shape = space.shape or ()
        _check_convolutions(space, channels, kernels, strides)
        self.first, height, width, depth = _axes(shape)
        height, width = (_after(size, kernels, strides) for size in (height, width))
        if min(height, width) < 1:
            raise PolicyError(
                f"images of {shape[1:] if self.first else shape[:2]} are too small "
                f"for kernels {tuple(kernels)} with strides {tuple(strides)}; give smaller ones"
            )
        layers = []
        for out, kernel, stride in zip(channels, kernels, strides, strict=True):
            layers.append(Convolution(depth, out, kernel, stride, rngs=rngs))
            depth = out
        self.layers = nnx.List(layers)
        self.size = hidden
        self.dense = linear(height * width * depth, hidden, rngs=rngs)
        # Observations that are not bytes are taken to be scaled already.
        self.scale = 255.0 if np.dtype(space.dtype) == np.uint8 else 1.0

    def __call__(self, obs: Array) -> Array:
        """Return features ``[N, hidden]`` of ``obs [N, ...]``."""
        x = obs.astype(jnp.float32) / self.scale
        # Convolutions read channels last.
        x = jnp.moveaxis(x, 1, -1) if self.first else x
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return jax.nn.relu(self.dense(x.reshape(x.shape[0], -1)))
