"""`League`: frozen versions of a learner's policy, the opponents that it trains against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import RLock
from typing import Any, ClassVar

import jax
import numpy as np

from flowrl.core.items import MultiBatch, nbytes
from flowrl.core.texts import plural
from flowrl.errors import ContractError, GraphError, SettingError
from flowrl.graph.protocols import Handle, Ref, Resource, Site
from flowrl.graph.refs import resource_and_part
from flowrl.graph.settings import check_at_least_1
from flowrl.graph.use import Use
from flowrl.learner.learner import Learner, LearnerHandle
from flowrl.learner.matches import COLUMNS, Matches
from flowrl.learner.standings import Sampling, Standings, StandingsStub
from flowrl.rollout.handle import RunnersHandle
from flowrl.rollout.team_runners import PolicyRunners


class LeagueHandle(Handle):
    """A league at work: it freezes versions, publishes them to the opponent, and keeps the score.

    Args:
        spec: the settings of the league.
        site: what the runtime offers to it.
    """

    lasting: ClassVar[tuple[str, ...]] = ()
    remade: ClassVar[tuple[str, ...]] = (
        "spec", "site", "learner", "runners", "policy", "books", "lock", "state",
        "nbytes",
    )  # fmt: skip
    # The learner may be in another stage than the runners.
    shared: ClassVar[tuple[str, ...]] = ("add", "match", "assign")

    def __init__(self, spec: League, site: Site) -> None:
        self.spec, self.site = spec, site
        # What lasts is in the standings, and decides nothing that a plan is about.
        self.state: dict[str, Any] = {}
        self.learner: LearnerHandle = site.resource(spec.learner)
        runners = site.resource(spec.runners)
        own = site.resource(self.learner.runners)
        if not isinstance(runners, PolicyRunners) or not isinstance(own, PolicyRunners):
            name = resource_and_part(str(spec.runners))[0]
            raise GraphError(
                f"its learner and its opponents are two policies of the same runners; give {name} "
                f"fl.Team(learner=policy, opponent=policy), {spec.learner} "
                f"runners='{name}.learner', and the league runners='{name}.opponent'"
            )
        self.runners: PolicyRunners = runners
        self.policy = own.policy
        """The name of the policy that learns, among those of the runners."""
        self._check(own)
        envs = runners.team.spec.envs_per_runner
        agents, opponents = (each.spec.envs_per_runner // envs for each in (own, self.runners))
        self.lock = RLock()
        self.books = site.workers(
            1,
            lambda *_: Standings(
                site.name,
                site.seed,
                spec.capacity,
                spec.keep_first,
                spec.draw_return,
                Matches(own.environments, agents, opponents),
            ),
            lambda *_: StandingsStub(site.name, spec.capacity),
            near=True,
        )
        self._begin()
        # A learner that begins with saved weights has others by then.
        self.learner.begun_with.append(self._begin)

    def _check(self, own: PolicyRunners) -> None:
        """Raise an error if what the learner trains can't act for the opponent.

        Raises:
            GraphError: the two have different policies or spaces, or are one; or the rewards of the
                runners are no scores.
        """
        spec, other = self.spec, self.runners
        if own.team is not other.team or own.policy == other.policy:
            raise GraphError(
                f"{spec.learner} trains {self.learner.runners}, so {spec.runners} can't be its "
                "opponent; name another policy of the same runners"
            )
        for name in ("clip_rewards", "normalize_rewards"):
            if getattr(own.spec, name) is not None:
                raise GraphError(
                    f"{name}: a league scores games by the rewards that are learned from; leave it "
                    "out, or scale them in the environment"
                )
        if other.on_device:
            raise GraphError(
                f"{spec.runners} act in an environment written in JAX, in which a league keeps no "
                "score yet; give it a form of Gymnasium's kind, with the attributes of PettingZoo's"
            )
        for what, mine, theirs in (
            ("policy", own.spec.policy, other.spec.policy),
            ("spaces", own.spaces, other.spaces),
        ):
            if mine != theirs:
                raise GraphError(
                    f"frozen versions of {spec.learner} can't act for {spec.runners}, whose {what} "
                    f"differ: {mine} and {theirs}; give both the same"
                )

    def _call(self, verb: str, *args: Any) -> Any:
        return self.books.submit(0, verb, *args).result()

    def _begin(self) -> None:
        """Freeze the learner's first version, and let every runner play against it."""
        weights, version = self.learner.weights()
        self.nbytes = self.spec.capacity * sum(map(nbytes, jax.tree.leaves(weights)))
        self._call("begin", weights, version)
        self.runners.publish(weights, version)
        self._report()

    def _report(self) -> None:
        """Let the rows of the run report the score."""
        self.runners.report(self._call("columns"))

    def close(self) -> None:
        """Close what keeps the score."""
        self.books.close()

    def keep(self) -> Any:
        """Return the frozen versions and the score."""
        return {"standings": self._call("keep")}

    def take(self, state: Any) -> None:
        """Go on from what was kept; the runners keep the weights of the opponents at work."""
        self._call("take", state["standings"])

    def add(self) -> None:
        """Freeze the learner's newest version, unless it is there already."""
        weights, version = self.learner.weights()
        with self.lock:
            is_new = self._call("add", weights, version)
            self._report()
        self.site.count(frozen=int(is_new))

    def match(self, item: MultiBatch) -> None:
        """Take the results of the episodes that ended in a round of rollouts.

        Args:
            item: the batches of all policies.

        Raises:
            ContractError: a batch has lost a column by which games are followed.
        """
        for policy in (self.policy, self.runners.policy):
            if missing := [name for name in COLUMNS if name not in item[policy].columns]:
                raise ContractError(
                    f"the batch of {policy} lacks {', '.join(missing)}, by which games are "
                    "followed; put it right after ParallelSample"
                )
        with self.lock:
            self._call("note", item, self.policy, self.runners.policy)
            self._report()

    def assign(self, sampling: Sampling, power: float, newest_share: float) -> None:
        """Choose an opponent for each runner, whose later requests for rollouts use it.

        Args:
            sampling: ``uniform``, ``newest`` or ``pfsp``.
            power: the exponent of ``pfsp``.
            newest_share: the share of choices in which it is the newest version in any case.
        """
        number = self.runners.spec.num_runners
        with self.lock:
            chosen = self._call("choose", number, sampling, power, newest_share)
        for runner, frozen in enumerate(chosen):
            self.runners.publish(frozen.weights, frozen.version, to=np.array([runner]))
        self.site.count(matches=number)


@dataclass(frozen=True)
class League(Resource):
    """Frozen versions of a learner's policy, against which it trains: self-play.

    The first version is the one with which the learner begins. `AddOpponent` adds others, and
    `ChooseOpponents` lets them play. Training against older versions, too, keeps a policy from
    forgetting how to beat them (Heinrich and Silver 2016; Vinyals et al. 2019).

    Args:
        learner: name of the learner (default ``learner``).
        runners: name of the policy of its runners for which frozen versions act (default
            ``runners.opponent``).
        capacity: frozen versions that it holds (default 20).
        keep_first: how many of the first versions it keeps for ever; of the others, the oldest
            makes way for a new one (default 1).
        draw_return: return of an episode that is a draw; the learner wins with more, and loses with
            less (default 0.0).

    Raises:
        SettingError: a number is out of its range.
    """

    learner: Ref[LearnerHandle] = "learner"
    runners: Ref[RunnersHandle] = "runners.opponent"
    capacity: int = 20
    keep_first: int = 1
    draw_return: float = 0.0

    handle: ClassVar[type[Handle]] = LeagueHandle
    feeds: ClassVar[tuple[str, ...]] = ("runners",)

    def __post_init__(self) -> None:
        check_at_least_1(self, "capacity")
        if not 0 <= self.keep_first < self.capacity:
            raise SettingError(
                "keep_first must be at least 0 and below capacity, so that there is a slot for new "
                f"versions, got keep_first={self.keep_first}, capacity={self.capacity}"
            )

    def open(self, site: Site) -> LeagueHandle:
        """Freeze the learner's first version, and let it play."""
        return LeagueHandle(self, site)

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Report whether versions are added and play, and whether another learner interferes."""
        for name, other in use.resources.items():
            learns = isinstance(other, Learner) and other.runners == self.runners
            if learns and name != self.learner:
                problem = f"{self.runners} have a learner of their own, {name}, whose weights would"
                way = f"name a policy without a learner, or remove {name}"
                yield use.name, f"{problem} take the place of frozen ones; {way}"
        if use.never("frozen"):
            problem = f"only the first version of {self.learner} ever plays"
            yield use.name, f"{problem}; add freeze=AddOpponent(every=...) after TrainOneStep"
        if use.never("matches"):
            problem = "nobody ever plays against the versions that it holds"
            yield use.name, f"{problem}; add choose=ChooseOpponents() after ParallelSample"

    def describe(self) -> str:
        """Return one line such as ``20 versions of learner play runners.opponent``."""
        number = f"{self.capacity} {plural(self.capacity, 'version')}"
        return f"{number} of {self.learner} play {self.runners}"
