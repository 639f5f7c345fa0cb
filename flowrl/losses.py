"""Losses, and the class to write one of your own on."""

from flowrl.rl.deterministic_losses import TD3Loss
from flowrl.rl.distributional_losses import C51Loss, QRLoss
from flowrl.rl.evolution import EvolutionLoss
from flowrl.rl.losses import APPOLoss, Loss, PGLoss, PPOLoss, VTraceLoss
from flowrl.rl.masked import mean as masked_mean
from flowrl.rl.offline_losses import BCLoss, CQLLoss, IQLLoss, MARWILLoss
from flowrl.rl.sequence_losses import R2D2Loss
from flowrl.rl.value_losses import DQNLoss, SACLoss

__all__ = [
    "APPOLoss",
    "BCLoss",
    "C51Loss",
    "CQLLoss",
    "DQNLoss",
    "EvolutionLoss",
    "IQLLoss",
    "Loss",
    "MARWILLoss",
    "PGLoss",
    "PPOLoss",
    "QRLoss",
    "R2D2Loss",
    "SACLoss",
    "TD3Loss",
    "VTraceLoss",
    "masked_mean",
]
