"""Acting, compiled: of one policy, or of several policies in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.compiled import jitted
from flowrl.rl.explore import Explore
from flowrl.rl.policies import SAMPLED, Memory, Network, Weights

Array = Any


def jitted_act(net: Network, explore: Explore = SAMPLED) -> Callable[..., tuple[Array, Any]]:
    """Return `Network.act`, compiled, as a function ``(weights, obs, noise, memory)``."""
    act: Callable[..., tuple[Array, Any]] = jitted(net.act, (), ("explore", explore))
    return act


def jitted_noise(net: Network, steps: int, envs: int, explore: Explore) -> Callable[..., Array]:
    """Return `Network.noise`, compiled, as a function ``(key, turn, env)``."""
    noise: Callable[..., Array] = jitted(
        net.noise, (), ("steps", steps), ("envs", envs), ("explore", explore)
    )
    return noise


@dataclass(frozen=True)
class Layout:
    """How arrays ``float32`` lie in one array, one after another, and others beside it.

    Args:
        tree: the structure of the tree that they are the leaves of.
        shapes: by leaf: the shape of one that lies in the array; None for another one.
    """

    tree: Any
    shapes: tuple[tuple[int, ...] | None, ...]

    @staticmethod
    def of(leaves: Sequence[Any], tree: Any) -> Layout:
        """Return the layout of the leaves of a tree."""
        return Layout(tree, tuple(x.shape if x.dtype == np.float32 else None for x in leaves))

    def packed(self, leaves: Sequence[Any]) -> tuple[np.ndarray[Any, Any], list[Any]]:
        """Return the leaves as one array, and the others."""
        each = list(zip(leaves, self.shapes, strict=True))
        inside = [x.ravel() for x, shape in each if shape is not None]
        others = [x for x, shape in each if shape is None]
        return np.concatenate(inside) if inside else np.empty(0, np.float32), others

    def unpacked(self, packed: Array, others: Sequence[Array]) -> Any:
        """Return the tree."""
        first, rest, found = 0, iter(others), []
        for shape in self.shapes:
            if shape is None:
                found.append(next(rest))
            else:
                size = math.prod(shape)
                found.append(packed[first : first + size].reshape(shape))
                first += size
        return jax.tree.unflatten(self.tree, found)


def act_together(
    weights: Sequence[Weights],
    packed: Array,
    others: Sequence[Array],
    memory: Sequence[Memory],
    *,
    nets: Sequence[Network],
    layout: Layout,
    **explores: Explore,
) -> tuple[Array, list[Any]]:
    """Return what `Network.act` returns of each of several policies, in one compiled call.

    Args:
        weights: by policy.
        packed: what the policies see, and the noise of their actions, as `layout` packs them.
        others: those of them that are not float32.
        memory: by policy.
        nets: the policies.
        layout: how observations and noise are packed.
        **explores: how the policies pick actions, in the order of `nets`.

    Returns:
        Their packed actions one after another, as one array, and their carries.
    """
    obs, noise = layout.unpacked(packed, others)
    each = zip(nets, weights, obs, noise, memory, explores.values(), strict=True)
    found = [net.act(*arguments) for net, *arguments in each]
    return jnp.concatenate([actions.ravel() for actions, _ in found]), [x for _, x in found]


class ActTogether:
    """Several policies that act in one compiled call.

    An array that passes between NumPy and XLA costs as much as a small network, so all of them are
    one array each way.

    Args:
        nets: the policies.
        explores: how each of them picks actions.
    """

    def __init__(self, nets: Sequence[Network], explores: Sequence[Explore]) -> None:
        self.nets = tuple(nets)
        self.explores = {f"explore_{i}": explore for i, explore in enumerate(explores)}
        self.widths = [max(1, net.head.width) + 2 for net in nets]
        """By policy: the numbers of a packed action."""
        self.layout: Layout | None = None
        self.act: Callable[..., Any]
        """The compiled function, once the layout is known."""

    def __call__(
        self,
        weights: Sequence[Weights],
        obs: Sequence[Any],
        noise: Sequence[np.ndarray[Any, Any]],
        memory: Sequence[Memory],
    ) -> list[tuple[np.ndarray[Any, Any], Any]]:
        """Return what `Network.act` returns of each; the arguments are those of it by policy.

        Observations and noise are arrays of NumPy, of the same shapes with every call.
        """
        leaves, tree = jax.tree.flatten((obs, noise))
        if self.layout is None:
            self.layout = Layout.of(leaves, tree)
            settings = {"nets": self.nets, "layout": self.layout, **self.explores}
            self.act = jitted(act_together, (), *settings.items())
        packed, carries = self.act(weights, *self.layout.packed(leaves), memory)
        actions, first, found = np.asarray(packed), 0, []
        for width, of_policy, carry in zip(self.widths, noise, carries, strict=True):
            last = first + width * len(of_policy)
            found.append((actions[first:last].reshape(-1, width), carry))
            first = last
        return found
