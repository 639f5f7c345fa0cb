"""Losses, and the class to write one of your own on."""

from flowrl.rl.losses import APPOLoss, Loss, PGLoss, PPOLoss, VTraceLoss
from flowrl.rl.masked import mean as masked_mean
from flowrl.rl.sequence_losses import R2D2Loss
from flowrl.rl.value_losses import DQNLoss, SACLoss

__all__ = [
    "APPOLoss",
    "DQNLoss",
    "Loss",
    "PGLoss",
    "PPOLoss",
    "R2D2Loss",
    "SACLoss",
    "VTraceLoss",
    "masked_mean",
]
