"""`ParallelSample`: get experience from the runners."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from flowrl.core.declared import hidden
from flowrl.core.texts import amount
from flowrl.errors import SettingError, a
from flowrl.graph.graph import Chain, Graph
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Context, Operator, Ref, Stateless
from flowrl.graph.settings import check_at_least_1
from flowrl.rollout.handle import RunnersHandle


@dataclass(frozen=True)
class ParallelSample(Stateless):
    """Get rollouts from the runners.

    With ``mode="sync"`` it works in rounds: it requests one rollout from every runner, waits for
    all, and yields ONE joined batch ``[rollout_length, num_runners x envs_per_runner]``. It is one
    batch on purpose: single rollouts would let a small `Concat` train between two of the same
    round. With ``mode="async"`` every runner is kept busy, and rollouts
    ``[rollout_length, envs_per_runner]`` are yielded as they come.

    Args:
        mode: ``sync`` samples in rounds, ``async`` takes rollouts as they come (default ``sync``).
        min_fraction: share of the runners whose rollouts end a round, above 0 and up to 1; rollouts
            of the others are in a later round, with their true policy version (default 1.0).
        in_flight: requests to each runner at the same time, with ``mode="async"`` (default 2).
        local: operators that every rollout goes through where it is sampled, before it is sent: an
            `fl.chain(...)` of operators without a state that yield one item for each; None: no
            operators (default None). In place of the learner they find the weights of the behaviour
            policy, so `Advantages` and `ComputeGradients` work there.
        runners: name of the runners that sample (default ``runners``).

    Raises:
        SettingError: a setting is out of its range, or `local` holds an operator that can't work
            at a sampler.
        EnvError: an environment raised, gave NaN, or broke its declared shape or type.
    """

    mode: Literal["sync", "async"] = "sync"
    min_fraction: float = 1.0
    in_flight: int = 2
    local: Chain | None = None
    runners: Ref[RunnersHandle] = "runners"

    source: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mode not in ("sync", "async"):
            raise SettingError(f"mode must be sync or async, got {self.mode!r}")
        if not 0 < self.min_fraction <= 1:
            raise SettingError(
                f"min_fraction must be above 0 and at most 1, got {self.min_fraction}"
            )
        check_at_least_1(self, "in_flight")
        self._check_local()

    def _check_local(self) -> None:
        """Raise an error if an operator of `local` can't work at a sampler.

        Raises:
            SettingError: with its name.
        """
        if self.local is not None and not isinstance(self.local, Chain):
            raise SettingError(f"local must be fl.chain(name=operator, ...), got {a(self.local)}")
        for name, op in (self.local or {}).items():
            if wrong := hidden(op, Operator):
                raise SettingError(f"local: {name}: {wrong}")
            if op.init() is not None or op.source or op.queue or op.reports or op.writes:
                raise SettingError(
                    f"local can't hold {name}={op!r}: "
                    "only operators without a state or an effect can work at a sampler"
                )

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return which runners it asks; for how many steps, and how often in a Row."""
        calls, steps = plan.found.steady[node].given, plan.counts(node)["sampled_steps"]
        if not steps:
            return None
        runners = plan.graph.resources[str(self.runners)]
        each = amount(Fraction(steps // max(calls, 1)), "step")
        through = f", through {', '.join(self.local)}" if self.local else ""
        return runners.describe(), f"{each} a call, {plan.a_row(calls, 'call')}{through}"

    def review(self, graph: Graph) -> Iterator[str]:
        """Report what is wrong with the operators at the sampler."""
        for name, op in (self.local or {}).items():
            yield from (f"{name}: {text}" for text in op.review(graph))

    def prepare(self, ctx: Context) -> None:
        """Pass the operators of `local` to the runners."""
        if self.local is not None:
            ops = {name: op.at_sampler(ctx) for name, op in self.local.items()}
            ctx[self.runners].localize(Chain(ops))

    def ready(self, state: None, ctx: Context) -> bool:
        """Return whether samples may be requested, where the policy lag is paced."""
        return ctx[self.runners].may(0.0 if self.mode == "async" else self.min_fraction)

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Any]:
        """Yield the batch of one round, or the next rollout, or what `local` made of it."""
        runners = ctx[self.runners]
        if self.mode == "async":
            yield runners.next(self.in_flight)
        else:
            yield runners.collect(self.min_fraction)
