"""What the settings of `dqn` say of the network of action values, its loss and its exploration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrl.errors import SettingError, unknown
from flowrl.rl.distributional_losses import C51Loss, QRLoss
from flowrl.rl.explore import EpsilonGreedy, Explore, NoisyWeights
from flowrl.rl.losses import Loss
from flowrl.rl.policies import Policy
from flowrl.rl.value_losses import DQNLoss
from flowrl.rl.value_networks import QNetwork

if TYPE_CHECKING:
    from flowrl.algos.dqn import DQNSettings

LOSSES: dict[str, Any] = {"none": DQNLoss, "c51": C51Loss, "quantile": QRLoss}
"""The losses by what is learned of the distribution of returns."""


def policy_of(s: DQNSettings) -> Policy:
    """Return the policy that the settings give or describe."""
    more: dict[str, Any] = {}
    if s.distribution != "none":
        more["atoms"] = s.atoms
    if s.distribution == "c51":
        more |= {"v_min": s.v_min, "v_max": s.v_max}
    if s.noisy:
        more["noisy"] = True
    return s.policy or Policy(
        QNetwork, hidden=s.hidden, dueling=s.dueling, normalize=s.normalize, **more
    )


def loss_of(s: DQNSettings) -> Loss:
    """Return the loss that the settings describe.

    Raises:
        SettingError: `distribution` has no loss.
    """
    if s.distribution not in LOSSES:
        raise SettingError(unknown("distribution", s.distribution, LOSSES))
    loss: Loss = LOSSES[s.distribution](double=s.double)
    return loss


def explore_of(s: DQNSettings) -> Explore:
    """Return the exploration that the settings describe."""
    if s.noisy:
        return NoisyWeights()
    return EpsilonGreedy(end=s.epsilon, steps=s.epsilon_steps)
