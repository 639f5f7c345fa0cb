"""Networks of policies and of action values, and what a network of your own is made with."""

from flowrl.rl.actor_critics import SACNetwork, TD3Network
from flowrl.rl.networks import CNN, MLP, RNN, action_outputs
from flowrl.rl.noisy_layers import NoisyLinear
from flowrl.rl.normalizing import RunningNorm
from flowrl.rl.offline_networks import IQLNetwork
from flowrl.rl.recurrent_value_networks import RecurrentQNetwork
from flowrl.rl.return_distributions import CategoricalReturns, QuantileReturns
from flowrl.rl.team_networks import CentralCritic, TeamQNetwork
from flowrl.rl.value_networks import QNetwork

__all__ = [
    "CNN",
    "MLP",
    "RNN",
    "CategoricalReturns",
    "CentralCritic",
    "IQLNetwork",
    "NoisyLinear",
    "QNetwork",
    "QuantileReturns",
    "RecurrentQNetwork",
    "RunningNorm",
    "SACNetwork",
    "TD3Network",
    "TeamQNetwork",
    "action_outputs",
]
