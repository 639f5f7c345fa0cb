"""Networks of policies and of action values, and what a network of your own is made with."""

from flowrl.rl.actor_critics import SACNetwork, TD3Network
from flowrl.rl.networks import CNN, MLP, RNN, action_outputs
from flowrl.rl.normalizing import RunningNorm
from flowrl.rl.team_networks import CentralCritic, TeamQNetwork
from flowrl.rl.value_networks import QNetwork

__all__ = [
    "CNN",
    "MLP",
    "RNN",
    "CentralCritic",
    "QNetwork",
    "RunningNorm",
    "SACNetwork",
    "TD3Network",
    "TeamQNetwork",
    "action_outputs",
]
