"""Networks of policies and of action values, and what a network of your own is made with."""

from flowrl.rl.networks import CNN, MLP, RNN, action_outputs
from flowrl.rl.normalizing import RunningNorm
from flowrl.rl.offline_networks import IQLNetwork
from flowrl.rl.team_networks import CentralCritic, TeamQNetwork
from flowrl.rl.value_networks import QNetwork, SACNetwork

__all__ = [
    "CNN",
    "MLP",
    "RNN",
    "CentralCritic",
    "IQLNetwork",
    "QNetwork",
    "RunningNorm",
    "SACNetwork",
    "TeamQNetwork",
    "action_outputs",
]
