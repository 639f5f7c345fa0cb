"""Distributions over actions: small, pure, batched over all leading axes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from flowrl.errors import PolicyError

Array = Any


class Distribution(Protocol):
    """What losses and runners ask of a distribution over actions."""

    def sample(self, noise: Array) -> Array:
        """The action for each batch element that the noise picks, which is of the form that `Head.noise` draws."""

    def mode(self) -> Array:
        """The likeliest action: what a greedy policy does."""

    def log_prob(self, action: Array) -> Array:
        """The log-probability (density) of actions, summed over their parts."""

    def entropy(self) -> Array:
        """The entropy in nats, summed over the parts of an action."""

    def kl(self, other: Any) -> Array:
        """KL(self || other) in nats."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Categorical:
    """One of n actions. `logits`: ``[..., n]``, -inf for an action that is ruled out; actions: integers ``[...]``."""

    logits: Array

    def sample(self, noise: Array) -> Array:
        """The Gumbel trick, from standard Gumbels ``[..., n]``; int32 ``[...]``."""
        return jnp.argmax(self.logits + noise, axis=-1)

    def mode(self) -> Array:
        """The action with the largest logit."""
        return jnp.argmax(self.logits, axis=-1)

    def log_prob(self, action: Array) -> Array:
        """``[...]``."""
        logp = jax.nn.log_softmax(self.logits)
        return jnp.take_along_axis(logp, action[..., None].astype(jnp.int32), axis=-1)[..., 0]

    def entropy(self) -> Array:
        """``[...]``."""
        logp = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(logp) * jnp.where(jnp.isneginf(logp), 0.0, logp), axis=-1)

    def kl(self, other: Categorical) -> Array:
        """``[...]``."""
        logp, logq = jax.nn.log_softmax(self.logits), jax.nn.log_softmax(other.logits)
        return jnp.sum(jnp.exp(logp) * jnp.where(jnp.isneginf(logp), 0.0, logp - logq), axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MultiCategorical:
    """Several independent choices. `logits`: ``[..., sum(sizes)]``; actions: integers ``[..., len(sizes)]``."""

    logits: Array
    sizes: tuple[int, ...] = field(metadata={"static": True})

    def _split(self, x: Array) -> list[Array]:
        return jnp.split(x, [sum(self.sizes[: i + 1]) for i in range(len(self.sizes) - 1)], axis=-1)

    def _parts(self) -> list[Categorical]:
        return [Categorical(part) for part in self._split(self.logits)]

    def sample(self, noise: Array) -> Array:
        """From standard Gumbels ``[..., sum(sizes)]``; int32 ``[..., len(sizes)]``."""
        return jnp.stack(
            [p.sample(x) for p, x in zip(self._parts(), self._split(noise), strict=True)], axis=-1
        )

    def mode(self) -> Array:
        """The likeliest choice of each part."""
        return jnp.stack([p.mode() for p in self._parts()], axis=-1)

    def log_prob(self, action: Array) -> Array:
        """``[...]``: the sum over the parts."""
        parts: list[Array] = [p.log_prob(action[..., i]) for i, p in enumerate(self._parts())]
        return jnp.sum(jnp.stack(parts), axis=0)

    def entropy(self) -> Array:
        """``[...]``: the sum over the parts."""
        return jnp.sum(jnp.stack([p.entropy() for p in self._parts()]), axis=0)

    def kl(self, other: MultiCategorical) -> Array:
        """``[...]``: the sum over the parts."""
        return jnp.sum(
            jnp.stack([p.kl(q) for p, q in zip(self._parts(), other._parts(), strict=True)]), axis=0
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gaussian:
    """Independent normals. `mean` and `log_std`: ``[..., d]``; actions: floats ``[..., d]``."""

    mean: Array
    log_std: Array

    def sample(self, noise: Array) -> Array:
        """From standard normals ``[..., d]``; ``[..., d]``."""
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self) -> Array:
        """The mean."""
        return self.mean

    def log_prob(self, action: Array) -> Array:
        """``[...]``: the sum over the d parts."""
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * z**2 - self.log_std - 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self) -> Array:
        """``[...]``: the sum over the d parts."""
        return jnp.sum(self.log_std + 0.5 * math.log(2 * math.pi * math.e), axis=-1)

    def kl(self, other: Gaussian) -> Array:
        """``[...]``: the sum over the d parts."""
        ratio = jnp.exp(2 * (self.log_std - other.log_std))
        moved = ((self.mean - other.mean) * jnp.exp(-other.log_std)) ** 2
        return 0.5 * jnp.sum(ratio + moved - 1, axis=-1) + jnp.sum(
            other.log_std - self.log_std, axis=-1
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TanhGaussian:
    """Independent normals squashed into [-1, 1] by tanh (Haarnoja et al. 2018, appendix C). `mean` and `log_std`: ``[..., d]``, before that."""

    mean: Array
    log_std: Array

    @property
    def plain(self) -> Gaussian:
        """Before it is squashed."""
        return Gaussian(self.mean, self.log_std)

    def draw(self, noise: Array) -> tuple[Array, Array]:
        """Actions ``[..., d]`` from standard normals, and their log-densities ``[...]``, which are exact where `log_prob` must take tanh back."""
        before = self.plain.sample(noise)
        return jnp.tanh(before), self._density(before)

    def sample(self, noise: Array) -> Array:
        """From standard normals ``[..., d]``; ``[..., d]``."""
        return jnp.tanh(self.plain.sample(noise))

    def mode(self) -> Array:
        """The squashed mean, which is the median of each part."""
        return jnp.tanh(self.mean)

    def log_prob(self, action: Array) -> Array:
        """``[...]``: the sum over the d parts."""
        edge = 1 - 1e-6
        return self._density(jnp.arctanh(jnp.clip(action, -edge, edge)))

    def _density(self, before: Array) -> Array:
        return self.plain.log_prob(before) - jnp.sum(
            2 * (math.log(2) - before - jax.nn.softplus(-2 * before)), axis=-1
        )

    def entropy(self) -> Array:
        """None in closed form.

        Raises:
            PolicyError: always.
        """
        raise PolicyError(
            "a squashed Gaussian has no entropy in closed form; take the mean of -log_prob over samples"
        )

    def kl(self, other: TanhGaussian) -> Array:
        """``[...]``: that of the Gaussians before they are squashed."""
        return self.plain.kl(other.plain)
