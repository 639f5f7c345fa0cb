"""How the numbers that a network gives for an action describe the distribution of its return."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flowrl.errors import PolicyError

Array = Any


class Returns(nnx.Module):
    """Base class of layers that read numbers of an action as the distribution of its return.

    They have no weights: a network holds one, so that a loss knows what its numbers are.

    Args:
        atoms: numbers for each action.
    """

    atoms: int

    @abstractmethod
    def mean(self, x: Array) -> Array:
        """Return the means ``[...]`` of ``x [..., atoms]``, which are action values."""


class CategoricalReturns(Returns):
    """Distributions over returns at equal distances (C51, Bellemare et al. 2017), by logits.

    A network that holds this layer and has the methods ``returns(obs)``, which gives the logits
    ``[N, n, atoms]`` of n actions, and ``support()``, which gives this layer's `support`, is
    trained by `C51Loss`.

    Args:
        atoms: number of these returns, at least 2 (default 51).
        v_min: lowest return (default -10.0).
        v_max: highest return (default 10.0).

    Raises:
        PolicyError: there are fewer than 2 atoms, or `v_min` is not below `v_max`.
    """

    def __init__(self, atoms: int = 51, v_min: float = -10.0, v_max: float = 10.0) -> None:
        if atoms < 2 or not v_min < v_max:
            raise PolicyError(
                "a categorical distribution needs at least 2 atoms, from v_min up to v_max; "
                f"got atoms={atoms}, v_min={v_min}, v_max={v_max}"
            )
        self.atoms = atoms
        self.v_min = v_min
        self.v_max = v_max

    def support(self) -> Array:
        """Return the returns ``[atoms]`` whose probabilities the logits give."""
        return jnp.linspace(self.v_min, self.v_max, self.atoms)

    def mean(self, x: Array) -> Array:
        """Return the means ``[...]`` of distributions with the logits ``x [..., atoms]``."""
        return jax.nn.softmax(x) @ self.support()


class QuantileReturns(Returns):
    """Distributions of equally probable returns (QR-DQN, Dabney et al. 2018), by these.

    A network that holds this layer and has a method ``returns(obs)``, which gives the returns
    ``[N, n, atoms]`` of n actions, is trained by `QRLoss`. Number i of them, from 0, stands for the
    quantile at ``(i + 1/2) / atoms``.

    Args:
        atoms: number of these returns, at least 1 (default 51).

    Raises:
        PolicyError: there are no atoms.
    """

    def __init__(self, atoms: int = 51) -> None:
        if atoms < 1:
            raise PolicyError(f"quantiles need at least 1 atom, got atoms={atoms}")
        self.atoms = atoms

    def mean(self, x: Array) -> Array:
        """Return the means ``[...]`` of distributions with the quantiles ``x [..., atoms]``."""
        return x.mean(-1)


def returns_of(atoms: int | None, v_min: float | None, v_max: float | None) -> Returns | None:
    """Return the layer that these settings of a network ask for; None without `atoms`.

    Args:
        atoms: numbers for each action.
        v_min: lowest return of a categorical distribution; None for quantiles.
        v_max: highest return of it; None for quantiles.

    Raises:
        PolicyError: one bound is given without the other, or bounds without `atoms`.
    """
    if (v_min is None) != (v_max is None) or (atoms is None and v_min is not None):
        raise PolicyError(
            "a categorical distribution needs atoms, v_min and v_max, and quantiles atoms alone; "
            f"got atoms={atoms}, v_min={v_min}, v_max={v_max}"
        )
    if atoms is None:
        return None
    if v_min is None or v_max is None:
        return QuantileReturns(atoms)
    return CategoricalReturns(atoms, v_min, v_max)
