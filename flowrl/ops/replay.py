"""Operators around a replay: add to it, sample from it, and set its priorities."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar

import jax

from flowrl.core.items import Batch, Trained
from flowrl.core.texts import amount
from flowrl.errors import ContractError, SettingError, a
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Context, Ref, Stateless
from flowrl.learner.learner import Learner, LearnerHandle
from flowrl.ops.batch import need
from flowrl.ops.sample import ParallelSample
from flowrl.replay.handle import ReplayHandle
from flowrl.replay.replay import Replay
from flowrl.rl.distributional_losses import C51Loss, QRLoss
from flowrl.rl.function_loss import as_loss
from flowrl.rl.returns import td_errors
from flowrl.rl.sequence_losses import R2D2Loss

AHEAD = 4
"""Batches that a sampling stage of its own asks for beforehand."""


@dataclass(frozen=True)
class ReplayAdd(Stateless):
    """Add every batch of experience to the replay, and pass the item on.

    Args:
        replay: name of the replay that receives the steps (default ``replay``).

    Raises:
        ContractError: a field or column that a replay needs is missing.
    """

    replay: Ref[ReplayHandle] = "replay"

    writes: ClassVar[tuple[str, ...]] = ("replay",)

    def review(self, graph: Graph) -> Iterator[str]:
        """Report whether samples reach it of other runners than those that its replay is for.

        Environments of every runners count from 0, so the replay would take them for its own.
        """
        replay = graph.resources.get(str(self.replay))
        if not isinstance(replay, Replay):
            return
        here = [node.name for node in graph.nodes if node.op is self]
        for sample, runners in _samplers_upstream(graph, here):
            if runners != str(replay.runners):
                yield (
                    f"{self.replay} holds the experience of {replay.runners}, but {sample} gets it "
                    f"from {runners}; add that to a replay of its own, "
                    f"Replay(..., runners='{runners}')"
                )

    def has_capacity(self, state: None, ctx: Context) -> bool:
        """Return whether all batches that are due were sampled.

        Runners wait for readers that keep a ratio and are late.
        """
        return ctx[self.replay].has_capacity()

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Batch]:
        """Add the batch, then yield it."""
        ctx[self.replay].add(need(batch))
        yield batch


def _samplers_upstream(graph: Graph, nodes: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each `ParallelSample` upstream of some nodes: its name and that of its runners."""
    import networkx as nx

    edges = graph.digraph()
    upstream = {name for node in nodes for name in nx.ancestors(edges, node)}
    for node in graph.nodes:
        if node.name in upstream and isinstance(node.op, ParallelSample):
            # On the way a policy may be selected, whose agents alone are added.
            between = upstream & nx.descendants(edges, node.name)
            parts = (each.op.takes_part for each in graph.nodes if each.name in between)
            part = next(filter(None, parts), "")
            yield node.name, f"{node.op.runners}.{part}" if part else str(node.op.runners)


@dataclass(frozen=True)
class ReplaySample(Stateless):
    """Sample batches ``[1, batch_size]`` from the replay, or sequences, one in each column.

    It stands after `ReplayAdd` and samples with every item, or at a start of its own.

    With `updates_per_step` the ratio is kept exactly: it samples so many batches for every step
    that comes once there are `learning_starts`, and carries what is left over to the next time.
    These are the rows that are added, T x B: where a reset takes a row of its own (NEXT_STEP), that
    one counts, so episodes of n steps have (n + 1) / n times as many updates.
    Where it is at a start, adding waits for it. The replay ratio, transitions sampled for each step
    of an environment, is ``batch_size x updates_per_step``, times the length of sequences.

    Args:
        batch_size: transitions in a batch; sequences, where the replay has a `sequence_length`.
        learning_starts: environment steps that must have been added before the first batch (default
            1).
        updates_per_step: batches for each environment step that is added, a fraction or a number
            above 0; None: one batch with each item or, at a start, as many as the nodes after it
            can take (default None).
        replay: name of the replay that is sampled (default ``replay``).

    Raises:
        SettingError: a number is out of its range.
    """

    batch_size: int
    learning_starts: int = 1
    updates_per_step: float | None = None
    replay: Ref[ReplayHandle] = "replay"

    source: ClassVar[bool] = True
    adds: ClassVar[tuple[str, ...]] = ("next_obs", "discount")

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.learning_starts < 1:
            raise SettingError(
                "batch_size and learning_starts must be at least 1, "
                f"got batch_size={self.batch_size}, learning_starts={self.learning_starts}"
            )
        if self.updates_per_step is not None and not 0 < self.updates_per_step < math.inf:
            raise SettingError(
                f"updates_per_step must be a number above 0, or None, got {self.updates_per_step}"
            )

    def review(self, graph: Graph) -> Iterator[str]:
        """Report where transitions are sampled for a loss of sequences, or the other way round."""
        replay = graph.resources.get(str(self.replay))
        if not isinstance(replay, Replay):
            return
        for name, learner in graph.resources.items():
            # What is sampled may be for other learners; those of other runners certainly are.
            if not isinstance(learner, Learner) or learner.runners != replay.runners:
                continue
            loss, whole = as_loss(learner.loss), replay.sequence_length is not None
            kind = f"{type(loss).__name__} of {name}"
            if whole and "next_obs" in loss.needs:
                yield (
                    f"samples sequences, but {kind} trains on single transitions; leave "
                    f"{self.replay}.sequence_length out, or take R2D2Loss"
                )
            if not whole and isinstance(loss, R2D2Loss):
                yield (
                    f"samples single transitions, but {kind} trains on sequences; "
                    f"set {self.replay}.sequence_length, or take DQNLoss"
                )

    @property
    def ratio(self) -> Fraction | None:
        """The batches for a step as an exact fraction: 0.1 is 1/10, and 1/3 is 1/3."""
        if self.updates_per_step is None:
            return None
        return Fraction(self.updates_per_step).limit_denominator(1_000_000)

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return the size and the number of batches in a Row, and the replay ratio."""
        counts = plan.counts(node)
        if not counts["draws"]:
            return None
        replay = plan.graph.resources[str(self.replay)]
        rows = replay.sequence_length if isinstance(replay, Replay) else None
        size = amount(Fraction(self.batch_size), "step")
        if rows is not None:
            size = f"{amount(Fraction(self.batch_size), 'sequence')} of {rows} steps"
        what = f"{size} a batch, {plan.a_row(counts['draws'], 'batch')}"
        if self.ratio is not None:
            ratio = float(self.batch_size * (rows or 1) * self.ratio)
            return what, f"replay ratio {ratio:g}: steps sampled for each that is added"
        ratio = counts["replayed_steps"] / max(plan.total("added_steps"), 1)
        # At a start, nothing ties its batches to the steps that are added.
        at_start = not next(n for n in plan.graph.nodes if n.name == node).after
        if at_start:
            return what, f"replay ratio free, in lock-step {ratio:g}"
        return what, f"replay ratio {ratio:g}: steps sampled for each that is added"

    def prepare(self, ctx: Context) -> None:
        """Register at the replay with the steps that it waits for, and its ratio."""
        ctx[self.replay].expect(ctx.name, self.learning_starts, self.ratio, ctx.root)

    def ready(self, state: None, ctx: Context) -> bool:
        """Return whether a batch is due."""
        return ctx[self.replay].due(ctx.name) > 0

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Batch]:
        """Yield one batch, or after an item all batches that its steps call for."""
        replay = ctx[self.replay]
        times = replay.due(ctx.name)
        if self.ratio is None or item is None:
            times = min(times, 1)
        replay.claim(ctx.name, times)
        ahead = AHEAD if item is None else 0
        sample = partial(replay.sample, self.batch_size, ctx.name, ahead=ahead)
        yield from ctx.repeat(times, sample)


@dataclass(frozen=True)
class InitialPriorities(Stateless):
    """Add ``priority``: the distance of each step's action value from its n-step return.

    The return goes as far as the rollout does. At the sampler,
    ``ParallelSample(local=fl.chain(prio=InitialPriorities(...)))``, action values are those of the
    behaviour policy (Horgan et al. 2018, algorithm 1). Without this operator a replay gives new
    rows the highest priority so far.

    Args:
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        n_step: environment steps of a return, as in the replay (default 1).
        learner: name of the learner that gives action values (default ``learner``).

    Raises:
        SettingError: a number is out of its range.
        ContractError: the batch lacks a field, or the policy's outputs are no action values.
    """

    gamma: float = 0.99
    n_step: int = 1
    learner: Ref[LearnerHandle] = "learner"

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1 or self.n_step < 1:
            raise SettingError(
                "gamma must be from 0 to 1 and n_step at least 1, "
                f"got gamma={self.gamma}, n_step={self.n_step}"
            )

    def review(self, graph: Graph) -> Iterator[str]:
        """Report whether a replay keeps the priorities, and samples the same returns.

        Returns are compared only where one replay is prioritized: of several, which is meant is
        not known.
        """
        replays = {name: r for name, r in graph.resources.items() if isinstance(r, Replay)}
        prioritized = {name: r for name, r in replays.items() if r.prioritized}
        users_own = [
            r
            for r in graph.resources.values()
            if issubclass(r.handle, ReplayHandle) and not isinstance(r, Replay)
        ]
        # What a replay of the user's own keeps is not known here.
        if not prioritized and not users_own:
            yield _no_priorities_kept(list(replays))
        if len(prioritized) != 1:
            return
        ((name, replay),) = prioritized.items()
        if replay.sequence_length is not None:
            yield (
                f"judges single steps, but {name} samples sequences; leave this operator out, so "
                "that new sequences get the highest priority so far"
            )
            return
        if replay.normalize_rewards:
            yield (
                f"judges rewards as they come, but {name} scales those that it samples; leave this "
                "operator out, so that new rows get the highest priority so far"
            )
        learner = graph.resources.get(str(self.learner))
        loss = as_loss(learner.loss) if isinstance(learner, Learner) else None
        if isinstance(loss, C51Loss | QRLoss):
            yield (
                f"judges action values, but {type(loss).__name__} whole distributions of returns; "
                "leave this operator out, so that new rows get the highest priority so far"
            )
        if (self.n_step, self.gamma) != (replay.n_step, replay.gamma):
            mine, its = (f"n_step={x.n_step}, gamma={x.gamma:g}" for x in (self, replay))
            problem = f"judges returns of {mine}, but {name} samples those of {its}"
            yield f"{problem}; give both the same"

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Batch]:
        """Yield the batch with the field added."""
        data = need(batch, "obs", "action", "reward", "terminated", "truncated", "valid").data
        values = ctx[self.learner].action_values(batch)
        fields = (data[k] for k in ("action", "reward", "terminated", "truncated", "valid"))
        yield batch.with_(
            priority=ctx.run(priorities, values, *fields, gamma=self.gamma, n_step=self.n_step)
        )


def _no_priorities_kept(replays: list[str]) -> str:
    """Return that none of the replays of a graph, by their names, keeps priorities."""
    problem = "gives new rows their first priorities"
    if not replays:
        way = "write Replay(..., prioritized=True), or remove this operator"
        return f"{problem}, but there is no replay to keep them; {way}"
    names, keep = " and ".join(replays), "keeps" if len(replays) == 1 else "keep"
    way = f"write Replay(..., prioritized=True) for {names}, or remove this operator"
    return f"{problem}, but {names} {keep} none; {way}"


def priorities(*fields: Any, gamma: float, n_step: int) -> Any:
    """Return the priorities ``[T, B]`` of every column by `td_errors`.

    Args:
        fields: action values ``[T + 1, B, n]``; action, reward, terminated, truncated and valid
            ``[T, B, ...]``.
        gamma: discount.
        n_step: steps of a return.
    """
    return jax.vmap(partial(td_errors, gamma=gamma, n_step=n_step), in_axes=1, out_axes=1)(*fields)


@dataclass(frozen=True)
class UpdatePriorities(Stateless):
    """Set the priorities of what an update trained on, and pass the item on.

    The priority of a transition is how far off the update found its value to be; that of a sequence
    is made of its steps' by the loss (`R2D2Loss`).

    Args:
        replay: name of the replay that the transitions were sampled from (default ``replay``).

    Raises:
        ContractError: the item has no priorities, or the replay keeps none.
    """

    replay: Ref[ReplayHandle] = "replay"

    writes: ClassVar[tuple[str, ...]] = ("replay",)

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return how many priorities are set in a Row."""
        replay = plan.graph.resources[str(self.replay)]
        whole = isinstance(replay, Replay) and replay.sequence_length is not None
        return f"priorities -> {self.replay}", plan.a_row(
            plan.counts(node)["prioritized_steps"], "sequence" if whole else "step"
        )

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Trained]:
        """Set the priorities, then yield the item."""
        if not isinstance(item, Trained):
            raise ContractError(
                f"needs what an update gives, got {a(item)}; put it after TrainOneStep"
            )
        if missing := {"slot", "priority"} - set(item.feedback):
            problem = "the loss reports no priority of each sample"
            if "slot" in missing:
                problem = "the batch was sampled without priorities"
            raise ContractError(
                f"{problem}; take Replay(..., prioritized=True) and a loss such as DQNLoss, "
                "or remove this operator"
            )
        ctx[self.replay].prioritize(item.feedback)
        yield item
