"""`Plan`: what a run will do, in numbers, before it starts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax

from flowrl.core.items import Batch, Trained
from flowrl.core.texts import amount, in_bytes
from flowrl.graph.graph import Graph, Node
from flowrl.graph.trace import Trace, Traffic
from flowrl.graph.values import to_text


@dataclass(frozen=True)
class Plan:
    """What a compiled graph will do: the numbers of the abstract trace. `print(plan)` shows them."""

    graph: Graph
    found: Trace

    @property
    def lag(self) -> float:
        """The largest number of updates that trained data is old where stages take turns; NaN where it can't be known."""
        lags = [x for lags in self.found.lags.values() for x in lags]
        return (
            math.nan if self.found.opaque or any(map(math.isnan, lags)) else max(lags, default=0.0)
        )

    @property
    def expected_lag(self) -> float:
        """The mean number of updates that trained data is old where stages take turns."""
        means = self.found.mean_lags
        return math.nan if math.isnan(self.lag) else sum(means) / max(len(means), 1)

    @property
    def lag_bound(self) -> float:
        """The most updates that trained data can be old, however slow a runner or a stage is; infinite where that can be any number.

        Three things bound it. Where one stage samples in rounds, nothing varies. A queue's `max_lag` is one. And behind rounds a queue that
        blocks is: of what is sampled while it has room, ``capacity - 1`` items are trained before, and one may be in training.
        """
        cuts = [(n.name, n.op.queue) for n in self.graph.nodes if n.op.queue]
        loose = self.total("outstanding") + self.total("unawaited") > 0
        if math.isnan(self.lag) or (not cuts and not loose):
            return self.lag
        if len(cuts) != 1:
            return math.inf
        name, bounds = cuts[0]
        updates, steady = self.total("updates"), self.found.steady
        if (
            updates > steady[name].given
        ):  # an item trains several times, so what is behind it waits for more
            return math.inf
        if bounds.max_lag is not None:
            return bounds.max_lag
        before = next(stage for stage in self.graph.stages() if name not in stage)
        spreads = any(
            steady[n.name].given > steady[n.name].taken
            for n in self.graph.nodes
            if n.after and n.name in before
        )
        if loose or spreads or (bounds.full, bounds.order) != ("block", "fifo"):
            return math.inf
        return bounds.capacity - 1 + math.ceil(updates / max(self.total("publishes"), 1))

    @property
    def rows(self) -> int:
        """The Rows that the totals are of; 1 where no Row came within the trace's patience."""
        return max(self.found.rows, 1)

    def per_row(self, counter: str, node: str | None = None) -> float:
        """A counter per Row, of one node or summed over all.

        The counters: ``requests sampled_steps updates trained_steps used_steps gradient_steps publishes weight_bytes``.
        """
        return (self.total(counter) if node is None else self.counts(node)[counter]) / self.rows

    def __str__(self) -> str:
        lines = [(n.name, *self._line(n)) for n in self.graph.nodes]
        shown = {text for _, text, _ in lines}
        rest = [
            (
                name,
                r.describe(),
                in_bytes(self.found.nbytes[name]) if name in self.found.nbytes else "",
            )
            for name, r in self.graph.resources.items()
            if r.describe() not in shown
        ]
        wide = max(len(name) for name, _, _ in [*lines, *rest])
        left = max((len(text) for _, text, right in lines if right), default=0)
        body = [
            f"  {name:<{wide}}  {text:<{left}}   {right}".rstrip()
            for name, text, right in [*lines, *rest]
        ]
        return "\n".join([self._title(), *body]) + "\n"

    def _title(self) -> str:
        stages = len(self.graph.stages())
        parts = [f"{stages} stage{'s' * (stages != 1)}", self._lag()]
        if self.found.opaque:
            parts += [
                f"not traced behind {node}, whose function works only on real data ({text})"
                for node, text in self.found.opaque.items()
            ]
            parts.append("so rates, lag and syncs were not checked")
        elif not self.found.rows:
            parts.append(f"no row within {self.found.passes:,} passes, whose numbers these are")
        elif not self.found.exact:
            parts.append(f"means over {self.found.rows:,} rows, no period found")
        elif (self.found.rows, self.found.warmup_rows) != (1, 0) or self._warmup():
            every = "row" if self.found.rows == 1 else f"{self.found.rows:,} rows"
            parts.append(f"repeats every {every}{self._warmup()}")
        if self.found.timed:
            parts.append("rows close by the clock: these are the numbers of the shortest")
        return f"{self.graph.name}: {', '.join(parts)}"

    def _warmup(self) -> str:
        """What comes before the steady period: rows, or steps where none of these trains."""
        rows, steps = self.found.warmup_rows, self.found.warmup_steps * bool(self.total("draws"))
        idle = f" after {steps:,} steps of warm-up, {self.found.idle_steps:,} of them before the first update"
        return idle if steps else f" after {rows:,} of warm-up" if rows else ""

    def _lag(self) -> str:
        if self.total("draws") and math.isnan(self.lag):
            return "data of any age"
        if math.isnan(self.lag):
            return "lag unknown"
        if self.lag_bound == self.lag:
            return f"lag {self.lag:g}"
        return f"lag bound {'none' if math.isinf(self.lag_bound) else self.lag_bound}, expected {self.expected_lag:.3g} in lock-step"

    def _line(self, node: Node) -> tuple[str, str]:
        traffic = self.found.steady.get(node.name)
        if traffic is None:
            return type(node.op).__name__, ""
        return node.op.line(self, node.name) or self._generic(
            node, traffic, self.found.forms.get(node.name)
        )

    def _generic(self, node: Node, traffic: Traffic, form: Any) -> tuple[str, str]:
        before = self.found.forms.get(node.after[0]) if node.after else None
        if traffic.taken != traffic.given:
            ratio = Fraction(traffic.taken, max(traffic.given, 1))
            return f"{ratio.numerator} -> {ratio.denominator}", _form(form)
        if isinstance(form, Batch) and isinstance(before, Batch):
            new = [k for k in form.data if k not in before.data]
            changed = [
                k for k in form.data if k in before.data and form.data[k] is not before.data[k]
            ]
            if new:
                return f"+ {', '.join(new)}", _array(form.data[new[0]])
            if changed and len(changed) < len(form.data):
                return f"~ {', '.join(changed)}", _array(form.data[changed[0]])
        counted = [
            f"{name} {number / self.rows:g}"
            for name, number in self.counts(node.name).items()
            if number
        ]
        return to_text(
            node.op, defaults=False
        ), f"{', '.join(counted)} a row" if counted and not isinstance(form, Batch) else _form(form)

    def total(self, counter: str) -> int:
        """A counter summed over all nodes, in the steady period."""
        return sum(c[counter] for t in self.found.steady.values() for c in t.counts.values())

    def counts(self, node: str) -> Counter[str]:
        """What a node counts of all resources in the steady period."""
        return sum(self.found.steady[node].counts.values(), Counter())

    def a_row(self, number: int, word: str) -> str:
        """``2 calls a row``, of a number in the steady period."""
        return f"{amount(Fraction(number, self.rows), word)} a row"


def _array(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _form(form: Any) -> str:
    if isinstance(form, Batch):
        return f"{form.steps:,} steps, [{form.shape[0]}, {form.shape[1]}, ...]"
    if isinstance(form, Trained):
        return "passes updates on"
    leaves = jax.tree.leaves(form)
    return (
        f"{type(form).__name__} of {len(leaves)} arrays"
        if len(leaves) > 1
        else type(form).__name__
        if form is not None
        else ""
    )
