"""Operators around a replay."""

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
from flowrl.learner.learner import LearnerHandle
from flowrl.ops.batch import need
from flowrl.replay.handle import ReplayHandle
from flowrl.replay.replay import Replay
from flowrl.rl.returns import td_errors

AHEAD = 4
"""Draws that a stage of their own asks for beforehand."""


@dataclass(frozen=True)
class ReplayAdd(Stateless):
    """Add every batch of experience to the replay. Passes its item on.

    Args:
        replay: what it is added to.

    Raises:
        ContractError: a field or column that a replay needs is missing.
    """

    replay: Ref[ReplayHandle] = "replay"

    writes: ClassVar[tuple[str, ...]] = ("replay",)

    def has_capacity(self, state: None, ctx: Context) -> bool:
        """Whether all that is due was drawn: sampling waits for who keeps a ratio and is behind."""
        return ctx[self.replay].has_capacity()

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Batch]:
        """Add it, then pass it on."""
        ctx[self.replay].add(need(batch))
        yield batch


@dataclass(frozen=True)
class ReplaySample(Stateless):
    """Draw batches ``[1, batch]`` from the replay: behind `ReplayAdd` with every item, or at a start of its own.

    With `updates_per_step` the ratio is kept exactly: so many draws for every step that comes from `start` on, what is left over carried to the
    next time; where they are drawn in a stage of their own, adding waits for them. The replay ratio, samples drawn for each step of an
    environment, is ``batch x updates_per_step``.

    Args:
        batch_size: transitions.
        learning_starts: steps that must have come before the first draw.
        updates_per_step: draws for each step (a fraction); None for one with each item, or at a start for as many as what follows can take.
        replay: what is drawn from.
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
                f"batch_size and learning_starts must be at least 1, got batch_size={self.batch_size}, "
                f"learning_starts={self.learning_starts}"
            )
        if self.updates_per_step is not None and not 0 < self.updates_per_step < math.inf:
            raise SettingError(
                f"updates_per_step must be a number above 0, or None, got {self.updates_per_step}"
            )

    @property
    def ratio(self) -> Fraction | None:
        """The draws for a step, exactly: 0.1 is 1/10, and 1/3 is 1/3."""
        return (
            None
            if self.updates_per_step is None
            else Fraction(self.updates_per_step).limit_denominator(1_000_000)
        )

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """How much how often, and the replay ratio."""
        counts = plan.counts(node)
        if not counts["draws"]:
            return None
        ratio = (
            counts["drawn_steps"] / max(plan.total("added_steps"), 1)
            if self.ratio is None
            else float(self.batch_size * self.ratio)
        )
        free = (
            self.updates_per_step is None
            and not next(n for n in plan.graph.nodes if n.name == node).after
        )
        return (
            f"{amount(Fraction(self.batch_size), 'step')} a draw, {plan.a_row(counts['draws'], 'draw')}",
            f"replay ratio free, in lock-step {ratio:g}"
            if free
            else f"replay ratio {ratio:g}: steps drawn for each that is added",
        )

    def prepare(self, ctx: Context) -> None:
        """Say what is waited for."""
        ctx[self.replay].expect(ctx.name, self.learning_starts, self.ratio, ctx.root)

    def ready(self, state: None, ctx: Context) -> bool:
        """Whether a draw is due."""
        return ctx[self.replay].due(ctx.name)

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Batch]:
        """One draw, and behind an item all that its steps call for."""
        replay = ctx[self.replay]
        while replay.due(ctx.name):
            if (
                batch := replay.sample(
                    self.batch_size, ctx.name, ahead=AHEAD if item is None else 0
                )
            ) is None:
                return
            yield batch
            if self.ratio is None or item is None:
                return


@dataclass(frozen=True)
class InitialPriorities(Stateless):
    """Add ``priority``: how far off the action value of each step is by the n-step return behind it, as far as the fragment goes.

    At the sampler, ``ParallelSample(local=fl.chain(prio=InitialPriorities(...)))``, it judges by the weights that acted (Horgan et al. 2018,
    algorithm 1); without it a replay gives what is new the highest priority so far.

    Args:
        gamma: discount.
        n_step: steps of a return, as the replay has them.
        learner: gives action values.

    Raises:
        ContractError: the batch lacks a field, or the policy's outputs are no action values.
    """

    gamma: float = 0.99
    n_step: int = 1
    learner: Ref[LearnerHandle] = "learner"

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1 or self.n_step < 1:
            raise SettingError(
                f"gamma must be from 0 to 1 and n_step at least 1, got gamma={self.gamma}, n_step={self.n_step}"
            )

    def review(self, graph: Graph) -> Iterator[str]:
        """Check that a replay keeps the priorities, and draws the same returns, where it is plain which replay that is."""
        replays = {name: r for name, r in graph.resources.items() if isinstance(r, Replay)}
        found = {name: r for name, r in replays.items() if r.prioritized}
        own = [
            r
            for r in graph.resources.values()
            if issubclass(r.handle, ReplayHandle) and not isinstance(r, Replay)
        ]
        if not found and not own:  # what a replay of the user's own keeps is not known here
            names = " and ".join(replays)
            kept = (
                f"{names} keep{'s' * (len(replays) == 1)} none"
                if replays
                else "there is no replay to keep them"
            )
            way = f"write Replay(..., prioritized=True){f' for {names}' * bool(replays)}, or remove this operator"
            yield f"gives what is new its first priorities, but {kept}; {way}"
        for name, replay in found.items() if len(found) == 1 else ():
            if (self.n_step, self.gamma) != (replay.n_step, replay.gamma):
                mine, its = (f"n_step={x.n_step}, gamma={x.gamma:g}" for x in (self, replay))
                yield f"judges returns of {mine}, but {name} draws those of {its}; give both the same"

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Batch]:
        """One batch in, the same with a field more out."""
        d = need(batch, "obs", "action", "reward", "terminated", "truncated", "valid").data
        values = ctx[self.learner].action_values(batch)
        fields = (d[k] for k in ("action", "reward", "terminated", "truncated", "valid"))
        yield batch.with_(
            priority=ctx.run(priorities, values, *fields, gamma=self.gamma, n_step=self.n_step)
        )


def priorities(*fields: Any, gamma: float, n_step: int) -> Any:
    """`td_errors` of every column ``[T, B]``."""
    return jax.vmap(partial(td_errors, gamma=gamma, n_step=n_step), in_axes=1, out_axes=1)(*fields)


@dataclass(frozen=True)
class UpdatePriorities(Stateless):
    """Tell the replay how far off each transition was that an update trained on. Passes its item on.

    Args:
        replay: where they were drawn.

    Raises:
        ContractError: the item does not tell, or the replay keeps no priorities.
    """

    replay: Ref[ReplayHandle] = "replay"

    writes: ClassVar[tuple[str, ...]] = ("replay",)

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Of how many steps."""
        return f"priorities -> {self.replay}", plan.a_row(
            plan.counts(node)["prioritized_steps"], "step"
        )

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Trained]:
        """Tell it, then pass the item on."""
        if not isinstance(item, Trained):
            raise ContractError(
                f"needs what an update gives, got {a(item)}; put it behind TrainOneStep"
            )
        if missing := {"slot", "priority"} - set(item.feedback):
            what = (
                "the batch was drawn without priorities"
                if "slot" in missing
                else "the loss tells no priority of each sample"
            )
            raise ContractError(
                f"{what}; take Replay(..., prioritized=True) and a loss such as DQNLoss, or remove this operator"
            )
        ctx[self.replay].prioritize(item.feedback)
        yield item
