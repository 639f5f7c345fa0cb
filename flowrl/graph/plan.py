"""`Plan`: what a run will do, in numbers, before it starts."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax

from flowrl.core.items import Batch, Trained
from flowrl.core.texts import amount, in_bytes, plural
from flowrl.core.xla_threads import LARGE, LARGE_FOR_GPU
from flowrl.graph.graph import Graph, Node
from flowrl.graph.period import ROUNDS
from flowrl.graph.trace import Trace, Traffic
from flowrl.graph.values import to_text

OF_MACHINE = re.compile(r" +(one thread|a thread a core|on the [A-Z]+)$", re.MULTILINE)
"""What a plan's text says of the machine that made it."""


@dataclass(frozen=True)
class Plan:
    """What a compiled graph will do, in the numbers of the abstract trace; `print` shows them."""

    graph: Graph
    """What was compiled."""
    found: Trace
    """What the abstract trace found."""

    @property
    def lag(self) -> float:
        """The largest policy lag where stages take turns, in updates.

        NaN where it can't be known.
        """
        lags = [lag for of_node in self.found.lags.values() for lag in of_node]
        if self.found.opaque or any(map(math.isnan, lags)):
            return math.nan
        return max(lags, default=0.0)

    @property
    def expected_lag(self) -> float:
        """The mean policy lag where stages take turns, in updates."""
        if math.isnan(self.lag):
            return math.nan
        means = self.found.mean_lags
        return sum(lag * number for lag, number in means.items()) / max(means.total(), 1)

    @property
    def lag_bound(self) -> float:
        """The largest possible policy lag, however slow a runner or a stage is, in updates.

        Three things bound it. Without any of them it is infinite; so it is with several queues, and
        where more than one update may come of an item that leaves the queue.

        - One stage does everything, in rounds: the lag is what the trace found.
        - A queue has a `max_lag`: the lag is at most that.
        - Runners sample in rounds, into a queue that blocks while it is full: at most
          ``capacity - 1`` items are trained on before a new one, and one may be in training when
          its sampling begins.
        """
        queues = [(n.name, n.op.queue) for n in self.graph.nodes if n.op.queue]
        # Rollouts in flight, and weights that nobody waits for, may arrive at any later time.
        loose = self.total("outstanding") + self.total("unawaited") > 0
        if math.isnan(self.lag) or (not queues and not loose):
            return self.lag
        if len(queues) != 1:
            return math.inf
        name, bounds = queues[0]
        updates = self.total("updates")
        # Where an item trains several times, what comes after it waits for more updates.
        if updates > self.found.steady[name].given or self._spreads(name, before=False):
            return math.inf
        if bounds.max_lag is not None:
            return bounds.max_lag
        blocks_in_order = (bounds.full, bounds.order) == ("block", "fifo")
        if loose or not blocks_in_order or self._spreads(name, before=True):
            return math.inf
        # Weights are published every `updates / publishes` updates, so those that a round begins
        # with may be that much older.
        return bounds.capacity - 1 + math.ceil(updates / max(self._publishes(), 1))

    def _spreads(self, queue: str, *, before: bool) -> bool:
        """Return whether a node before or after a graph's only queue gives several items a step.

        Then some of what a round samples may wait upstream of the full queue, or downstream, where
        the capacity does not count it. So it may if the queue does not cut the graph in two.
        """
        stages = self.graph.stages()
        names = {name for stage in stages for name in stage if (queue not in stage) == before}
        return len(stages) < 2 or any(
            self.found.steady[n.name].given > self.found.steady[n.name].calls
            for n in self.graph.nodes
            if n.name in names
        )

    def _publishes(self) -> int:
        """Return how often weights are published to the runners that get them least often."""
        by_resource: Counter[str] = Counter()
        for traffic in self.found.steady.values():
            for resource, counters in traffic.counts.items():
                by_resource[resource] += counters["publishes"]
        return min((n for n in by_resource.values() if n), default=0)

    @property
    def rows(self) -> int:
        """The Rows that the totals are of; 1 where no Row closed within the trace's patience."""
        return max(self.found.rows, 1)

    def per_row(self, counter: str, node: str | None = None) -> float:
        """Return a counter per Row, of one node or summed over all.

        Args:
            counter: any that a verb counts, such as ``requests sampled_steps updates trained_steps
                used_steps gradient_steps publishes weight_bytes``.
            node: the node; None for all.
        """
        number = self.total(counter) if node is None else self.counts(node)[counter]
        return number / self.rows

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # A notebook shows this.
        printer.text("Plan(...)" if cycle else str(self))

    def __str__(self) -> str:
        lines = [(n.name, *self._line(n)) for n in self.graph.nodes]
        # A node's line may describe its resource already.
        shown = {text for _, text, _ in lines}
        for name, resource in self.graph.resources.items():
            if resource.describe() not in shown:
                lines.append((name, resource.describe(), self._size(name)))
        nodes = lines[: len(self.graph.nodes)]
        name_width = max(len(name) for name, _, _ in lines)
        # Only the nodes' texts set the width of the column; those of resources may be longer.
        text_width = max((len(text) for _, text, right in nodes if right), default=0)
        body = [
            f"  {name:<{name_width}}  {text:<{text_width}}   {right}".rstrip()
            for name, text, right in lines
        ]
        return "\n".join([self._title(), *body]) + "\n"

    def _size(self, resource: str) -> str:
        """Return how much memory a resource sets aside, or with how many threads it computes."""
        if resource in self.found.nbytes:
            return in_bytes(self.found.nbytes[resource])
        rows, _ = self.found.shareable.get(resource, (0, 0))
        if not rows:
            return ""
        if self.threads == 1:
            return "one thread"
        backend = jax.default_backend()
        return "a thread a core" if backend == "cpu" else f"on the {backend.upper()}"

    def _title(self) -> str:
        """Return the first line: the stages, the policy lag, and how well the numbers are known."""
        stages = len(self.graph.stages())
        parts = [f"{stages} {plural(stages, 'stage')}", self._lag(), *self._period()]
        if self.found.timed:
            parts.append("rows close by the clock: these are the numbers of the shortest")
        return f"{self.graph.name}: {', '.join(parts)}"

    def _period(self) -> list[str]:
        """Return what the numbers are of: a period, means, or what the trace reached."""
        found = self.found
        if found.opaque:
            untraced = [
                f"not traced after {node}, whose function works only on real data ({text})"
                for node, text in found.opaque.items()
            ]
            return [*untraced, "so rates, lag and syncs were not checked"]
        if not found.rows:
            return [f"no row within {found.ever[ROUNDS]:,} passes, whose numbers these are"]
        if not found.exact:
            text = f"means over {found.rows:,} rows, no period found"
            if found.restless:
                text += f" (the state of {', '.join(found.restless)} never repeats itself)"
            return [text]
        # What repeats with every row, from the first one on, needs no words.
        if found.rows == 1 and found.warmup_rows == 0 and not self._warmup():
            return []
        every = "row" if found.rows == 1 else f"{found.rows:,} rows"
        return [f"repeats every {every}{self._warmup()}"]

    def _warmup(self) -> str:
        """Return what comes before the steady period: steps if a replay is sampled, else rows.

        The text is empty if there is nothing.
        """
        rows, steps, idle = self.found.warmup_rows, self.found.warmup_steps, self.found.idle_steps
        if steps and self.total("draws"):
            return f" after {steps:,} steps of warm-up, {idle:,} of them before the first update"
        return f" after {rows:,} of warm-up" if rows else ""

    def _lag(self) -> str:
        """Return the policy lag in words."""
        if self.total("draws") and math.isnan(self.lag):
            return "data of any age"
        if math.isnan(self.lag):
            return "lag unknown"
        if self.lag_bound == self.lag:
            return f"lag {self.lag:g}"
        bound = "none" if math.isinf(self.lag_bound) else self.lag_bound
        return f"lag bound {bound}, expected {self.expected_lag:.3g} in lock-step"

    def _line(self, node: Node) -> tuple[str, str]:
        """Return what a node does, and how much of it."""
        traffic = self.found.steady.get(node.name)
        if traffic is None:
            return type(node.op).__name__, ""
        return node.op.line(self, node.name) or self._generic(node, traffic)

    def _generic(self, node: Node, traffic: Traffic) -> tuple[str, str]:
        """Return what can be said of any node."""
        item = self.found.first_items.get(node.name)
        if not node.after and traffic.given:
            return self.a_row(traffic.given, "item"), _described(item)
        if traffic.taken != traffic.given:
            most = math.gcd(traffic.taken, traffic.given)
            return f"{traffic.taken // most} -> {traffic.given // most}", _described(item)
        before = self.found.first_items.get(node.after[0]) if node.after else None
        if isinstance(item, Batch) and isinstance(before, Batch):
            changes = _changes(before, item)
            if changes is not None:
                return changes
        counted = [
            f"{name} {number / self.rows:g}"
            for name, number in self.counts(node.name).items()
            if number
        ]
        # A class of the user's is shown by its name alone: nobody reads a plan back.
        written = re.sub(r'load\("[^"]*?(\w+)"\)', r"\1", to_text(node.op, defaults=False))
        if counted and not isinstance(item, Batch):
            return written, f"{', '.join(counted)} a row"
        return written, _described(item)

    @property
    def operations(self) -> int:
        """The floating-point operations of a gradient step, of the learner that has most.

        They are those of a dense network: two for each parameter and row forward, and twice as many
        back.
        """
        work = self.found.shareable.values()
        return max((6 * rows * nbytes // 4 for rows, nbytes in work), default=0)

    @property
    def small(self) -> bool:
        """Whether a gradient step is faster with one thread of XLA than with one a core."""
        return self.operations < LARGE

    @property
    def threads(self) -> int | None:
        """How many threads of XLA a run gets; None: as many as there are cores, or a GPU.

        A GPU takes longer to be called than a small gradient step takes on a core, but not than
        many environments in JAX take.
        """
        if jax.default_backend() == "cpu":
            return 1 if self.small else None
        in_jax = any(resource.in_jax for resource in self.graph.resources.values())
        return None if in_jax or self.operations >= LARGE_FOR_GPU else 1

    @property
    def ahead(self) -> bool:
        """Whether the next batch is made while an update is computed, for nothing waits for most.

        Weights that are published are waited for at once; where all are, handing a small update to
        another thread takes longer than computing it.
        """
        return self.total("updates") > self.total("publishes")

    @property
    def learners(self) -> tuple[str, ...]:
        """The names of the learners that are updated, in the order of the nodes."""
        items = (self.found.first_items.get(node.name) for node in self.graph.nodes)
        return tuple(dict.fromkeys(x.learner for x in items if isinstance(x, Trained)))

    def total(self, counter: str) -> int:
        """Return a counter summed over all nodes, in the steady period."""
        return sum(c[counter] for t in self.found.steady.values() for c in t.counts.values())

    def counts(self, node: str) -> Counter[str]:
        """Return what a node counts of all resources in the steady period."""
        return sum(self.found.steady[node].counts.values(), Counter())

    def a_row(self, number: int, word: str) -> str:
        """Return a number in the steady period as a rate, such as ``2 calls a row``."""
        rate = Fraction(number, self.rows)
        # What is rarer than rows, or no number of two decimals, is clearer in whole numbers.
        if rate and (rate < 1 or 100 % rate.denominator):
            rows = amount(Fraction(rate.denominator), "row")
            return f"{amount(Fraction(rate.numerator), word)} in {rows}"
        return f"{amount(rate, word)} a row"


def _changes(before: Batch, after: Batch) -> tuple[str, str] | None:
    """Return which fields a node adds to a batch or changes; None if neither, or if all change."""
    new = [name for name in after.data if name not in before.data]
    if new:
        return f"+ {', '.join(new)}", _array(after.data[new[0]])
    changed = [name for name, x in after.data.items() if x is not before.data[name]]
    if changed and len(changed) < len(after.data):
        return f"~ {', '.join(changed)}", _array(after.data[changed[0]])
    return None


def _array(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _described(item: Any) -> str:
    """Return what an item is, in a few words."""
    if isinstance(item, Batch):
        return f"{item.steps:,} steps, [{item.shape[0]}, {item.shape[1]}, ...]"
    if isinstance(item, Trained):
        return "passes updates on"
    if item is None:
        return ""
    leaves = jax.tree.leaves(item)
    kind = type(item).__name__
    return f"{kind} of {len(leaves)} arrays" if len(leaves) > 1 else kind
