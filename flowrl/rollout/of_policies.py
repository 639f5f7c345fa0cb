"""`OfPolicies`: what handles of runners have in common for whose agents several policies act."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from flowrl.errors import GraphError, unknown
from flowrl.graph.protocols import Handle, Site
from flowrl.rl.policies import Weights
from flowrl.rl.spaces import Spaces

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners


class OfPolicies:
    """Runners of several agents: one policy acts for all of them, or each policy has a part.

    The name of the one policy is ``""``.
    """

    site: Site
    on_device: bool
    parts: Mapping[str, Runners]
    """By policy: the settings of runners whose environments are its agents."""
    of_one: Mapping[str, Handle]
    """By name of a policy: its part of the runners."""

    @property
    def spaces(self) -> Spaces:
        """The spaces of each agent, where one policy acts for all.

        Raises:
            GraphError: there are several policies.
        """
        self._one_policy()
        return self.parts[""].spaces()

    @property
    def _is_team(self) -> bool:
        """Whether there are several policies, each with a name."""
        return "" not in self.parts

    def part(self, name: str) -> Handle:
        """Return the handle of one policy.

        Raises:
            GraphError: there is no such policy.
        """
        if name not in self.of_one:
            raise GraphError(f"{self.site.name}: {unknown('policy', name, self.of_one)}")
        return self.of_one[name]

    def publish(self, weights: Weights, version: Any, to: Any = None, wait: bool = True) -> None:
        """Publish new weights of the one policy.

        Raises:
            GraphError: there are several policies.
        """
        self._one_policy()
        self.publish_of("", weights, version, to, wait)

    @abstractmethod
    def publish_of(
        self, policy: str, weights: Weights, version: Any, to: Any = None, wait: bool = True
    ) -> None:
        """Publish new weights of a policy; the other arguments are those of `publish`."""

    def evaluated(self) -> Weights | None:
        """Return the weights of the one policy in the last evaluation, as `RunnersHandle` says.

        Raises:
            GraphError: there are several policies.
        """
        self._one_policy()
        return self.evaluated_of("")

    @abstractmethod
    def evaluated_of(self, policy: str) -> Weights | None:
        """Return the weights of a policy in the last evaluation, as `RunnersHandle` says."""

    def _one_policy(self) -> None:
        """Raise an error if there are several policies.

        Raises:
            GraphError: with their names.
        """
        if self._is_team:
            raise GraphError(several(self.site.name, self.parts))

    def pace(self, max_lag: int, updates: Fraction) -> None:
        """Refuse to pace requests: each policy has a lag of its own.

        Raises:
            GraphError: always.
        """
        raise GraphError("runners of several agents can't pace requests; take on_stale='drop'")


def several(name: str, policies: Iterable[str]) -> str:
    """Return the text of an error where one policy is needed, and there are several."""
    known = ", ".join(f"{name}.{policy}" for policy in policies)
    return f"{name} have several policies; name one of them: {known}"
