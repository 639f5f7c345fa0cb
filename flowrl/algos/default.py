"""The default policy of a stock graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowrl.envs.gym_envs import Make, probe
from flowrl.errors import FlowrlError, SettingError
from flowrl.rl.images import NOT_NORMALIZED, shows_images
from flowrl.rl.networks import CNN, MLP
from flowrl.rl.policies import Policy


def default_policy(env: Make, *, normalize: bool, hidden: tuple[int, ...] | None = None) -> Policy:
    """Return the policy for an environment: a CNN for large images of bytes, otherwise an MLP.

    Args:
        env: the environment that the policy is for; one is made to read its spaces.
        normalize: shift and scale observations by running moments, in the MLP.
        hidden: widths of the fully connected layers, of which the CNN has one; None: as they are
            by default.

    Raises:
        SettingError: the environment shows images, and `normalize` is True or `hidden` is more
            than one width.
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
    if not images:
        return Policy(MLP, normalize=normalize, **widths(hidden))
    if hidden is not None and not (isinstance(hidden, Sequence) and len(hidden) == 1):
        raise SettingError(
            "hidden: the policy for images is a CNN with one layer after the convolutions, so it "
            f"takes one width, such as hidden=(256,); got {hidden!r}"
        )
    return Policy(CNN, **({} if hidden is None else {"hidden": hidden[0]}))


def widths(hidden: tuple[int, ...] | None) -> dict[str, Any]:
    """Return the setting of a network with these widths, none for its own default."""
    return {} if hidden is None else {"hidden": hidden}
