"""`Frozen`: a saved policy that acts in a run, and is not trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from flowrl.errors import GraphError
from flowrl.graph.protocols import Handle, Ref, Resource, Site
from flowrl.graph.use import Use
from flowrl.learner.learner import Learner
from flowrl.learner.rules import runners_of
from flowrl.observe.saved_policies import load
from flowrl.rollout.handle import RunnersHandle
from flowrl.rollout.runners import Runners


class FrozenHandle(Handle):
    """A saved policy at work: it sent its weights to the runners when it was opened."""

    remade = ()

    def __init__(self, spec: Frozen, site: Site) -> None:
        runners: RunnersHandle = site.resource(spec.runners)
        saved = load(spec.saved, policy=spec.policy, which=spec.which, allow=spec.allow)
        if saved.spaces != runners.spaces:
            raise GraphError(
                f"{site.name}: the policy in {spec.saved} was made for {saved.spaces}, and "
                f"{spec.runners} have {runners.spaces}"
            )
        self.state: dict[str, int] = {}
        runners.publish(saved.weights, np.int32(0))

    def close(self) -> None:
        """Do nothing: it holds no processes and no files."""


@dataclass(frozen=True)
class Frozen(Resource):
    """A saved policy that acts for runners, or for one policy of their team, and is not trained.

    It sends its weights to them when the run begins, so no node refers to it.

    Args:
        saved: directory of the run that saved it.
        runners: name of the runners, or of a part of them such as ``runners.blue``, which must have
            the same `Policy` (default ``runners``).
        policy: the name of the learner that trained it, where that run had several; None where it
            had one (default None).
        which: ``last`` or ``best`` policy of that run (default ``last``).
        allow: packages beyond flowrl that may be imported for the user's own classes (default
            none).

    Raises:
        SaveError: there is no such run or policy, or a file of it is damaged.
        GraphError: the runners have other spaces.
    """

    saved: str
    runners: Ref[RunnersHandle] = "runners"
    policy: str | None = None
    which: Literal["last", "best"] = "last"
    allow: tuple[str, ...] = ()

    handle: ClassVar[type[Handle]] = FrozenHandle
    works_alone: ClassVar[bool] = True
    feeds: ClassVar[tuple[str, ...]] = ("runners",)

    def open(self, site: Site) -> FrozenHandle:
        """Load the policy, send its weights to the runners, and return the handle."""
        return FrozenHandle(self, site)

    def describe(self) -> str:
        """Return one line such as ``red of runs/old, best``."""
        which = ", best" if self.which == "best" else ""
        return f"{f'{self.policy} of ' if self.policy else ''}{self.saved}{which}"

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Report whether the runners act otherwise, or somebody else gives them weights."""
        runners = runners_of(use, str(self.runners))
        if runners is not None:
            yield from self._misfits(use, runners)
        for name, other in use.resources.items():
            gives = isinstance(other, Learner) and other.runners == self.runners
            fed = [getattr(other, field) for field in other.feeds]
            if (gives or self.runners in fed) and name != use.name:
                yield (
                    use.name,
                    (
                        f"{name} gives weights to {self.runners}, too; let one of them name other "
                        "runners, or remove it"
                    ),
                )

    def _misfits(self, use: Use, runners: Runners) -> Iterator[tuple[str, str]]:
        """Report whether the runners have another policy, or sample from none of its own."""
        saved = load(self.saved, policy=self.policy, which=self.which, allow=self.allow)
        if saved.policy != runners.policy:
            problem = f"{self.runners} act with {runners.policy}, but the policy in {self.saved} is"
            yield use.name, f"{problem} {saved.policy}; give both the same"
        if runners.explore_of("").last.samples and not saved.exploration.samples:
            problem = f"sample actions from the policy in {self.saved}, which has no distribution"
            way = f"give them explore=fl.{type(saved.exploration).__name__}(...)"
            yield str(self.runners), f"{problem} of them; {way}"
