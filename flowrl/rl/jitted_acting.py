"""Acting, compiled: of one policy, or of several policies in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


def act_together(
    weights: Sequence[Weights],
    obs: Sequence[Any],
    noise: Sequence[Array],
    memory: Sequence[Memory],
    *,
    nets: Sequence[Network],
    **explores: Explore,
) -> tuple[tuple[Array, Any], ...]:
    """Return what `Network.act` returns of each of several policies, in one compiled call.

    The arguments are those of `Network.act` for each policy, in the order of `nets` and `explores`.
    """
    each = zip(nets, weights, obs, noise, memory, explores.values(), strict=True)
    return tuple(net.act(*arguments) for net, *arguments in each)


def jitted_together(nets: Sequence[Network], explores: Sequence[Explore]) -> Callable[..., Any]:
    """Return `act_together`, compiled, as a function ``(weights, obs, noise, memory)``."""
    ways = [(f"explore_{i}", explore) for i, explore in enumerate(explores)]
    act: Callable[..., Any] = jitted(act_together, (), ("nets", tuple(nets)), *ways)
    return act
