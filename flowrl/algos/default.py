"""The default policy of a stock graph."""

from __future__ import annotations

from flowrl.envs.gym_envs import Make, probe
from flowrl.errors import FlowrlError, SettingError
from flowrl.rl.images import NOT_NORMALIZED, shows_images
from flowrl.rl.networks import CNN, MLP
from flowrl.rl.policies import Policy


def default_policy(env: Make, *, normalize: bool) -> Policy:
    """Return the policy for an environment: a CNN for large images of bytes, otherwise an MLP.

    Args:
        env: the environment that the policy is for; one is made to read its spaces.
        normalize: shift and scale observations by running moments, in the MLP.

    Raises:
        SettingError: `normalize` is True and the environment shows images.
    """
    try:
        images = shows_images(probe(env, (), {}).first.seen)
    except FlowrlError:
        # The graph's check will report what is wrong with the environment.
        images = False
    if images and normalize:
        raise SettingError(
            f"normalize: the policy {NOT_NORMALIZED}, or give "
            "policy=fl.Policy(fl.networks.MLP, normalize=True), which reads them as numbers"
        )
    if images:
        return Policy(CNN)
    return Policy(MLP, normalize=normalize)
