"""Distributions over actions: small, pure values, batched over all leading axes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from flowrl.errors import PolicyError

Array = Any


class Distribution(Protocol):
    """A distribution over actions, as losses and runners use it."""

    def sample(self, noise: Array) -> Array:
        """Return the action that the noise picks for each batch element; see `Head.noise`."""

    def mode(self) -> Array:
        """Return the greedy action, which is the most probable one."""

    def log_prob(self, action: Array) -> Array:
        """Return the log-probability (density) of actions in nats, summed over their parts."""

    def entropy(self) -> Array:
        """Return the entropy in nats, summed over the parts of an action."""

    def kl(self, other: Any) -> Array:
        """Return KL(self || other) in nats, summed over the parts of an action."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Categorical:
    """Categorical distribution over one of n actions, which are integers ``[...]``.

    Args:
        logits: ``[..., n]``; -inf for an action that is ruled out.
    """

    logits: Array

    def sample(self, noise: Array) -> Array:
        """Return int32 actions ``[...]`` from standard Gumbels ``[..., n]`` (Gumbel trick)."""
        return jnp.argmax(self.logits + noise, axis=-1)

    def mode(self) -> Array:
        """Return the action with the largest logit, ``[...]``."""
        return jnp.argmax(self.logits, axis=-1)

    def logit(self, action: Array) -> Array:
        """Return the logits of actions ``[...]``, of the same shape."""
        return jnp.take_along_axis(self.logits, action[..., None].astype(jnp.int32), -1)[..., 0]

    def log_prob(self, action: Array) -> Array:
        """Return the log-probability of actions ``[...]``, of the same shape."""
        return Categorical(jax.nn.log_softmax(self.logits)).logit(action)

    def entropy(self) -> Array:
        """Return the entropy in nats, ``[...]``."""
        logp = jax.nn.log_softmax(self.logits)
        # An action that is ruled out adds 0, but 0 times -inf is NaN.
        return -jnp.sum(jnp.exp(logp) * jnp.where(jnp.isneginf(logp), 0.0, logp), axis=-1)

    def kl(self, other: Categorical) -> Array:
        """Return KL(self || other) in nats, ``[...]``."""
        logp, logq = jax.nn.log_softmax(self.logits), jax.nn.log_softmax(other.logits)
        return jnp.sum(jnp.exp(logp) * jnp.where(jnp.isneginf(logp), 0.0, logp - logq), axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MultiCategorical:
    """Several independent categorical choices; actions are integers ``[..., len(sizes)]``.

    Args:
        logits: ``[..., sum(sizes)]``, those of the parts one after another.
        sizes: the number of choices of each part.
    """

    logits: Array
    sizes: tuple[int, ...] = field(metadata={"static": True})

    def _split(self, x: Array) -> list[Array]:
        starts = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes) - 1)]
        return jnp.split(x, starts, axis=-1)

    def _parts(self) -> list[Categorical]:
        return [Categorical(part) for part in self._split(self.logits)]

    def sample(self, noise: Array) -> Array:
        """Return int32 actions ``[..., len(sizes)]``; standard Gumbels: ``[..., sum(sizes)]``."""
        pairs = zip(self._parts(), self._split(noise), strict=True)
        return jnp.stack([part.sample(gumbels) for part, gumbels in pairs], axis=-1)

    def mode(self) -> Array:
        """Return the most probable choice of each part, ``[..., len(sizes)]``."""
        return jnp.stack([part.mode() for part in self._parts()], axis=-1)

    def logit(self, action: Array) -> Array:
        """Return the logits of the choices of actions, ``[..., len(sizes)]``."""
        parts = enumerate(self._parts())
        return jnp.stack([part.logit(action[..., i]) for i, part in parts], axis=-1)

    def log_prob(self, action: Array) -> Array:
        """Return the log-probability of actions, ``[...]``: the sum over the parts."""
        parts = enumerate(self._parts())
        logps: list[Array] = [part.log_prob(action[..., i]) for i, part in parts]
        return jnp.sum(jnp.stack(logps), axis=0)

    def entropy(self) -> Array:
        """Return the entropy in nats, ``[...]``: the sum over the parts."""
        return jnp.sum(jnp.stack([part.entropy() for part in self._parts()]), axis=0)

    def kl(self, other: MultiCategorical) -> Array:
        """Return KL(self || other) in nats, ``[...]``: the sum over the parts."""
        pairs = zip(self._parts(), other._parts(), strict=True)
        return jnp.sum(jnp.stack([mine.kl(theirs) for mine, theirs in pairs]), axis=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gaussian:
    """Independent normal distributions; actions are floats ``[..., d]``.

    Args:
        mean: ``[..., d]``.
        log_std: ``[..., d]``, the logarithms of the standard deviations.
    """

    mean: Array
    log_std: Array

    def sample(self, noise: Array) -> Array:
        """Return actions ``[..., d]`` from standard normals ``[..., d]``."""
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self) -> Array:
        """Return the mean, ``[..., d]``."""
        return self.mean

    def log_prob(self, action: Array) -> Array:
        """Return the log-density of actions, ``[...]``: the sum over the d parts."""
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * z**2 - self.log_std - 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self) -> Array:
        """Return the entropy in nats, ``[...]``: the sum over the d parts."""
        return jnp.sum(self.log_std + 0.5 * math.log(2 * math.pi * math.e), axis=-1)

    def kl(self, other: Gaussian) -> Array:
        """Return KL(self || other) in nats, ``[...]``: the sum over the d parts."""
        ratio = jnp.exp(2 * (self.log_std - other.log_std))
        shift = ((self.mean - other.mean) * jnp.exp(-other.log_std)) ** 2
        log_ratio = jnp.sum(other.log_std - self.log_std, axis=-1)
        return 0.5 * jnp.sum(ratio + shift - 1, axis=-1) + log_ratio


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mixed:
    """Independent choices and real numbers; actions are floats ``[..., k + d]``, choices first.

    Args:
        choices: the distribution of the k choices.
        reals: the distribution of the d real numbers.
    """

    choices: MultiCategorical
    reals: Gaussian

    def _split(self, x: Array, first: int) -> tuple[Array, Array]:
        return x[..., :first], x[..., first:]

    def sample(self, noise: Array) -> Array:
        """Return actions ``[..., k + d]``; the noise is standard Gumbels, then standard normals."""
        gumbels, normals = self._split(noise, sum(self.choices.sizes))
        choices = self.choices.sample(gumbels)
        return jnp.concatenate([choices, self.reals.sample(normals)], axis=-1)

    def mode(self) -> Array:
        """Return the most probable choices and the means, ``[..., k + d]``."""
        return jnp.concatenate([self.choices.mode(), self.reals.mode()], axis=-1)

    def log_prob(self, action: Array) -> Array:
        """Return the log-density of actions, ``[...]``: the sum over their parts."""
        choices, reals = self._split(action, len(self.choices.sizes))
        return self.choices.log_prob(choices) + self.reals.log_prob(reals)

    def entropy(self) -> Array:
        """Return the entropy in nats, ``[...]``: that of the choices plus that of the numbers."""
        return self.choices.entropy() + self.reals.entropy()

    def kl(self, other: Mixed) -> Array:
        """Return KL(self || other) in nats, ``[...]``: the sum over the parts."""
        return self.choices.kl(other.choices) + self.reals.kl(other.reals)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TanhGaussian:
    """Independent normals squashed into [-1, 1] by tanh (Haarnoja et al. 2018, appendix C).

    Args:
        mean: ``[..., d]``, before squashing.
        log_std: ``[..., d]``, the logarithms of the standard deviations before squashing.
    """

    mean: Array
    log_std: Array

    @property
    def plain(self) -> Gaussian:
        """The distribution before squashing."""
        return Gaussian(self.mean, self.log_std)

    def sample_and_log_prob(self, noise: Array) -> tuple[Array, Array]:
        """Return actions ``[..., d]`` from standard normals, and their log-densities ``[...]``.

        These log-densities are exact, where `log_prob` must invert tanh.
        """
        unsquashed = self.plain.sample(noise)
        return jnp.tanh(unsquashed), self._log_density(unsquashed)

    def sample(self, noise: Array) -> Array:
        """Return actions ``[..., d]`` from standard normals ``[..., d]``."""
        return jnp.tanh(self.plain.sample(noise))

    def mode(self) -> Array:
        """Return the squashed mean, which is the median of each part, ``[..., d]``."""
        return jnp.tanh(self.mean)

    def log_prob(self, action: Array) -> Array:
        """Return the log-density of actions, ``[...]``: the sum over the d parts."""
        # The inverse of tanh is infinite at -1 and 1, which rounding makes of large numbers.
        edge = 1 - 1e-6
        return self._log_density(jnp.arctanh(jnp.clip(action, -edge, edge)))

    def _log_density(self, unsquashed: Array) -> Array:
        """Return the log-density ``[...]`` of the action that ``unsquashed [..., d]`` becomes."""
        logp = self.plain.log_prob(unsquashed)
        # This is log(1 - tanh(x)^2), in a way that does not round to -inf for large x.
        log_slope = 2 * (math.log(2) - unsquashed - jax.nn.softplus(-2 * unsquashed))
        return logp - jnp.sum(log_slope, axis=-1)

    def entropy(self) -> Array:
        """Raise, because there is no closed form of this entropy.

        Raises:
            PolicyError: always.
        """
        raise PolicyError(
            "a squashed Gaussian has no entropy in closed form; "
            "take the mean of -log_prob over samples"
        )

    def kl(self, other: TanhGaussian) -> Array:
        """Return KL(self || other) in nats, ``[...]``: that of the Gaussians before squashing."""
        return self.plain.kl(other.plain)
