"""`Replay`: the settings of a replay, a buffer of experience to train on again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from flowrl.core.texts import plural
from flowrl.errors import SettingError
from flowrl.graph.protocols import Handle, Ref, Resource, Site
from flowrl.graph.settings import check_at_least_1, check_not_negative, check_shares
from flowrl.graph.use import Use
from flowrl.replay.handle import ReplayHandle
from flowrl.replay.host_replay import HostReplay
from flowrl.replay.jax_replay import JaxReplay
from flowrl.rollout.handle import RunnersHandle


@dataclass(frozen=True)
class Replay(Resource):
    """A buffer of the newest `buffer_size` steps of experience.

    Every observation is stored once. The buffer is sampled in transitions of `n_step` steps:
    ``obs``, ``action``, ``reward`` (the discounted sum), ``next_obs``, and ``discount``, by which
    the value of ``next_obs`` is multiplied: ``gamma ** k`` where k <= n_step steps were taken, and
    0 where the episode terminated. An episode that was truncated goes on from its last observation.

    With `sequence_length` it is sampled in sequences, as recurrent policies need them: batches
    ``[sequence_length, B]`` of the rows as runners gave them, with the carry before the first row
    that was stored then (Kapturowski et al. 2019). The carry is known where rollouts begin, so each
    sequence begins with a rollout, and overlaps the next one by
    ``sequence_length - rollout_length`` rows. It may hold several episodes. Where rollouts are
    missing, the rows after that are masked.

    Args:
        buffer_size: environment steps that it holds, masked rows between two episodes included.
        prioritized: whether transitions or sequences are sampled by priority (Schaul et al. 2016),
            with importance weights as the field ``weight``; if not, each is as likely as any other
            of its shard (default False).
        n_step: environment steps of a transition's return (default 1). Of several agents they are
            the agent's own; the return also ends where a rollout ends before its next turn.
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        shards: parts, each with its own environments: one is in this process; several are where the
            workers of the runtime are (default 1). They are sampled in turn, however much each
            holds: of a smaller one, each transition is more likely than of a larger one. A replay
            over environments in JAX lies on the device, and is one part whatever this says.
        alpha: exponent of a priority; with 0 all transitions are sampled alike (default 0.6).
        beta: exponent of the importance weights, at first (default 0.4).
        beta_steps: environment steps added over which beta rises to 1, where the correction is
            whole; 0: never (default 100_000). Schaul et al. (2016) let it rise over the run, whose
            length a replay does not know: give it the steps of the run, or those over which the
            policy still changes much.
        eps: number added to every priority, so that none is 0 (default 1e-6).
        normalize_rewards: divide the rewards of transitions by the running standard deviation of
            discounted returns, as it is when they are sampled; each shard has its own. Not of
            several agents (default False).
        sequence_length: rows of a sequence, those of a burn-in among them; of several agents at
            most those of a rollout. None: transitions are sampled (default None).
        extra: names of more fields to store; a transition has them as they were at its first step
            (default none).
        restarts: restarts in a row of a shard whose process ended; it is then empty; 0: none
            (default 3).
        runners: name of the runners whose experience it holds (default ``runners``).

    Raises:
        SettingError: a number is out of its range.
    """

    buffer_size: int
    prioritized: bool = False
    n_step: int = 1
    gamma: float = 0.99
    shards: int = 1
    alpha: float = 0.6
    beta: float = 0.4
    beta_steps: int = 100_000
    eps: float = 1e-6
    normalize_rewards: bool = False
    sequence_length: int | None = None
    extra: tuple[str, ...] = ()
    restarts: int = 3
    runners: Ref[RunnersHandle] = "runners"

    handle: ClassVar[type[Handle]] = ReplayHandle  # type: ignore[type-abstract]

    def __post_init__(self) -> None:
        check_at_least_1(self, "buffer_size", "n_step", "shards")
        if self.sequence_length is not None and (self.sequence_length < 1 or self.n_step > 1):
            raise SettingError(
                "sequence_length must be at least 1, and the returns of sequences are the loss's "
                "own (R2D2Loss(n_step=...)), so n_step must be 1, "
                f"got sequence_length={self.sequence_length}, n_step={self.n_step}"
            )
        check_shares(self, "gamma", "alpha", "beta")
        if not self.eps > 0:
            raise SettingError(
                "eps must be above 0, or a row with priority 0 is never sampled again, "
                f"got {self.eps}"
            )
        check_not_negative(self, "beta_steps", "restarts")

    @property
    def reach(self) -> int:
        """The rows from its first one on that a transition or sequence is made of."""
        return self.n_step if self.sequence_length is None else self.sequence_length

    def open(self, site: Site) -> ReplayHandle:
        """Make an empty replay: on the device where its runners are functions of the device."""
        if site.resource(self.runners).on_device:
            return JaxReplay(self, site)
        return HostReplay(self, site)

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Report whether steps are added and sampled, and whether priorities come back."""
        if use.idle and not use.did("added_steps"):
            problem = f"nothing is added to it before {use.idle[0]}"
            yield use.name, f"{problem}; put add=ReplayAdd() in front of it"
        if use.never("added_steps"):
            yield use.name, "nothing is added to it; put add=ReplayAdd() after a ParallelSample"
        if use.never("draws"):
            way = "add batch=ReplaySample(batch_size=...)"
            yield use.name, f"nothing is sampled from it; {way}"
        elif self.prioritized and use.never("prioritized_steps"):
            problem = "its priorities are never set to what an update computed"
            way = "add prio=UpdatePriorities() after TrainOneStep, or set prioritized=False"
            yield use.name, f"{problem}; {way}"

    def describe(self) -> str:
        """Return one line such as ``50,000 steps, prioritized, 3-step returns``."""
        parts = [f"{self.buffer_size:,} steps"]
        if self.prioritized:
            parts.append("prioritized")
        if self.sequence_length is not None:
            parts.append(f"sequences of {self.sequence_length}")
        if self.n_step > 1:
            parts.append(f"{self.n_step}-step returns")
        if self.shards > 1:
            parts.append(f"{self.shards} {plural(self.shards, 'shard')}")
        return ", ".join(parts)
