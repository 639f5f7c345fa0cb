"""Which networks have no value of observations that a policy gradient could learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.rl.actor_critics import ActorCritics
from flowrl.rl.recurrent_value_networks import RecurrentQNetwork
from flowrl.rl.team_networks import TeamQNetwork
from flowrl.rl.value_networks import QNetwork

if TYPE_CHECKING:
    from flowrl.rl.policies import Network


def without_own_value(loss: str, net: Network) -> str:
    """Return why the loss can't learn a policy and the value beside it; empty if it can.

    Args:
        loss: name of the loss, which learns both from the same rollouts.
        net: the policy.
    """
    way = "take fl.networks.MLP"
    if net.head.kind == "tanh_gaussian":
        beside = ", or SACLoss with it (fl.sac)" if net.layers(ActorCritics) else ""
        return (
            f"{loss} takes the entropy of the policy, and the squashed Gaussian of {net.name} has "
            f"none in closed form; {way}{beside}"
        )
    # Only where it is the whole policy: a module of one's own may have one as a part of it.
    whole = (QNetwork, RecurrentQNetwork, TeamQNetwork)
    if any("" in net.layers(kind) for kind in whole):
        return (
            f"{loss} learns action probabilities and, apart from them, the value of observations; "
            f"the outputs of {net.name} are action values, and its value is the highest of them; "
            f"{way}, or DQNLoss (fl.dqn)"
        )
    return ""
