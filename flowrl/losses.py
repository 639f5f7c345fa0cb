"""Losses, and the class to write one of your own on."""

from flowrl.rl.losses import APPOLoss, Loss, PGLoss, PPOLoss, VTraceLoss
from flowrl.rl.masked import mean as masked_mean
from flowrl.rl.offline_losses import BCLoss, CQLLoss, IQLLoss, MARWILLoss
from flowrl.rl.value_losses import DQNLoss, SACLoss

__all__ = [
    "APPOLoss",
    "BCLoss",
    "CQLLoss",
    "DQNLoss",
    "IQLLoss",
    "Loss",
    "MARWILLoss",
    "PGLoss",
    "PPOLoss",
    "SACLoss",
    "VTraceLoss",
    "masked_mean",
]
