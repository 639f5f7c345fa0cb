"""The policy of a stock graph for which none is given."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.errors import FlowrlError
from flowrl.resources.environments import Make, probe
from flowrl.rl.networks import CNN, MLP
from flowrl.rl.policies import Policy, network


def default_policy(env: Make, **settings: Any) -> Policy:
    """A CNN where the environment shows images of bytes large enough for it; else, or where a setting asks for what only it can, an MLP.

    Args:
        env: what the policy is for; one is made to see its spaces.
        settings: of the MLP.
    """
    cnn, mlp = Policy(CNN), Policy(MLP, **settings)
    if any(settings.values()):
        return mlp
    try:
        spaces, _ = probe(env, (), {})
        images = spaces.obs_dtype == np.uint8 and len(spaces.obs.shape or ()) == 3
        return cnn if images and network(cnn, spaces) else mlp
    except FlowrlError:  # of the environment, which the graph's check will tell; or the images are too small
        return mlp
