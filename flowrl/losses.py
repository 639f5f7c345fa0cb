"""Losses, and the class to write one of your own on."""

from flowrl.rl.deterministic_losses import TD3Loss
from flowrl.rl.losses import APPOLoss, Loss, PGLoss, PPOLoss, VTraceLoss
from flowrl.rl.masked import mean as masked_mean
from flowrl.rl.value_losses import DQNLoss, SACLoss

__all__ = [
    "APPOLoss",
    "DQNLoss",
    "Loss",
    "PGLoss",
    "PPOLoss",
    "SACLoss",
    "TD3Loss",
    "VTraceLoss",
    "masked_mean",
]
