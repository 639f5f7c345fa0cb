"""`Init`: weights of a saved policy with which another run begins."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flowrl.errors import SaveError, SettingError
from flowrl.learner.learner import LearnerHandle
from flowrl.observe.checkpoints import as_like, plain, saved_weights
from flowrl.observe.saved_policies import policy_folder
from flowrl.observe.trained import TrainedPolicy
from flowrl.rl.policies import Weights

OF_PYTHON = "a policy of Python"
"""What stands for a policy that came from no directory that is known."""
LISTED = 40
"""How many names an error lists."""


@dataclass(frozen=True)
class Init:
    """Weights with which a run begins in place of its own first ones.

    Only weights are taken: the optimiser, the exploration and all counts start as in any run.

    Args:
        policy: directory of a saved run, whose last policy it is, or a policy such as
            ``fl.load(path, which="best")``.
        only: beginnings of names, such as ``("encoder/", "actor/layers/")``: the other weights
            begin as usual. Empty: all weights are taken, and normalisation statistics with them
            (default empty).

    Raises:
        SettingError: one of them is of another kind.
    """

    policy: str | Path | TrainedPolicy
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str | Path | TrainedPolicy):
            raise SettingError(
                "init takes the directory of a saved run, or a policy such as fl.load(path), got "
                f"{self.policy!r}"
            )
        if isinstance(self.only, str) or not all(isinstance(x, str) and x for x in self.only):
            raise SettingError(
                f"only takes beginnings of names, such as ('encoder/',), got {self.only!r}"
            )
        object.__setattr__(self, "only", tuple(self.only))

    def weights(self) -> Weights:
        """Return the saved arrays by their names, random keys as plain numbers.

        Raises:
            SaveError: there is no such run, a file of it is damaged, or it was a policy of Python
                in a process that is gone.
        """
        if self.policy == OF_PYTHON:
            raise SaveError(
                f"the run began with {OF_PYTHON}, which no directory holds, and has no snapshot "
                "yet; start it again from its beginning, with the policy as init"
            )
        if not isinstance(self.policy, TrainedPolicy):
            return saved_weights(policy_folder(Path(self.policy)))
        params, rest = self.policy.weights
        return Weights(params, {name: plain(x) for name, x in rest.items()})

    def noted(self) -> dict[str, Any]:
        """Return where the weights come from, for ``run.json``."""
        path = OF_PYTHON
        if not isinstance(self.policy, TrainedPolicy) and self.policy != OF_PYTHON:
            # A run is repeated from any folder.
            path = os.path.abspath(self.policy)
        return {"policy": path, "only": list(self.only)}


def init_of(noted: Mapping[str, Any] | None) -> Init | None:
    """Return what a saved run began with, as ``run.json`` notes it."""
    return None if noted is None else Init(noted["policy"], tuple(noted["only"]))


def beginning(init: Init) -> Callable[[LearnerHandle], None]:
    """Return what lets a learner begin with saved weights, which are read now.

    Raises:
        SaveError: there is no such run, or a file of it is damaged.
        SettingError: is raised by what is returned, if they do not fit; it lists all names.
    """
    saved = init.weights()

    def begin(handle: LearnerHandle) -> None:
        like = jax.eval_shape(handle.core.network.init, jax.random.key(0))
        handle.begin_with(_fitting(like, saved, init.only))

    return begin


def _fitting(like: Weights, saved: Weights, only: Collection[str]) -> Weights:
    """Return those of the saved arrays that are taken, which all fit.

    Args:
        like: the shapes and types of the learner's arrays.
        saved: the saved arrays, random keys as plain numbers.
        only: beginnings of the names that are taken; all where it is empty.

    Raises:
        SettingError: one does not fit.
    """
    own, found = _joined(like), _joined(saved)
    beginnings = tuple(only) or ("",)
    names = [name for name in {**own, **found} if name.startswith(beginnings)]
    problems = [text for name in names if (text := _problem(name, own, found))]
    useless = [x for x in beginnings if not _any_begins(names, x)]
    problems += [f"no weight has a name that begins with {x!r}" for x in useless]
    if problems:
        raise SettingError(_message(problems, own, found))
    parts = []
    for part in Weights._fields:
        wanted, arrays = getattr(like, part), getattr(saved, part)
        parts.append(
            {name: as_like(arrays[name], wanted[name]) for name in names if name in wanted}
        )
    return Weights(*parts)


def _any_begins(names: Collection[str], beginning: str) -> bool:
    return any(name.startswith(beginning) for name in names)


def _joined(weights: Weights) -> dict[str, Any]:
    """Return all arrays by name; a parameter and what is none never share a name."""
    return {**weights.params, **weights.rest}


def _problem(name: str, own: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return why the saved array of a name does not fit; empty if it does."""
    if name not in found:
        return f"{name} is missing: the policy that is trained has {_kind(own[name])}"
    if name not in own:
        return f"{name} is unknown: the saved policy has {_kind(found[name])}"
    was, now = _kind(found[name]), _kind(own[name])
    return "" if was == now else f"{name} is {was} in the saved policy and {now} in this one"


def _kind(x: Any) -> str:
    """Return the type and the shape of an array; of random keys those of their numbers."""
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.eval_shape(jax.random.key_data, x)
    return f"{np.dtype(x.dtype)}{list(x.shape)}"


def _message(problems: list[str], own: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the error that lists what does not fit, and names what does."""
    # Whole parts of the network, such as its encoder, are what one can take without the rest.
    parts = {f"{name.partition('/')[0]}/" for name in own if "/" in name}
    fitting = []
    for part in sorted(parts):
        names = [name for name in {**own, **found} if name.startswith(part)]
        if not any(_problem(name, own, found) for name in names):
            fitting.append(part)
    way = "train the same network on the same spaces"
    if fitting:
        options = " ".join(f"--init-only {part}" for part in fitting)
        only = "".join(f"{part!r}, " for part in fitting).rstrip(" ")
        way += f", or take only the parts that fit: {options}, or fl.Init(..., only=({only}))"
    more = [f"and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
    listed = "".join(f"\n  {text}" for text in (*problems[:LISTED], *more))
    return f"the saved weights do not fit the policy that is trained:{listed}\n{way}"
