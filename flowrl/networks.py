"""Networks of policies and of action values, and what a network of your own is made with."""

from flowrl.rl.networks import CNN, MLP, RNN, action_outputs
from flowrl.rl.normalizing import RunningNorm
from flowrl.rl.recurrent_value_networks import RecurrentQNetwork
from flowrl.rl.team_networks import CentralCritic, TeamQNetwork
from flowrl.rl.value_networks import QNetwork, SACNetwork

__all__ = [
    "CNN",
    "MLP",
    "RNN",
    "CentralCritic",
    "QNetwork",
    "RecurrentQNetwork",
    "RunningNorm",
    "SACNetwork",
    "TeamQNetwork",
    "action_outputs",
]
