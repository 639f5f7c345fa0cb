"""What every runtime shares: a session that runs passes, and the Rows it makes of what the clock closed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from flowrl.errors import NotFinite
from flowrl.graph.graph import Graph
from flowrl.graph.loop import Hook, Loop
from flowrl.graph.site import Place
from flowrl.items import Row, Tally


class RowMaker:
    """Makes Rows: the running totals, which live here and nowhere else, and the means since the last Row."""

    def __init__(self, graph: str, started: float) -> None:
        self.graph = graph
        self.started = self.last = started
        self.totals = dict.fromkeys(("row", "env_steps", "trained_steps", "updates", "gradient_steps", "episodes"), 0)

    def row(self, tally: Tally) -> Row:
        """The next Row. Waits for the device.

        Raises:
            NotFinite: an update since the last Row gave NaN or infinity.
        """
        tally = jax.device_get(tally)
        before, now = dict(self.totals), time.perf_counter()
        metrics = _means(tally)
        told = dict(tally.episodes)
        self.totals["row"] += 1
        self.totals["env_steps"] += int(told.pop("env_steps"))
        self.totals["episodes"] += int(told.pop("episodes"))
        self.totals["trained_steps"] += sum(u.steps for u in tally.updates)
        self.totals["updates"] += len(tally.updates)
        self.totals["gradient_steps"] += int(metrics.pop("gradient_steps", 0.0) * len(tally.updates) + 0.5)
        for i, update in enumerate(tally.updates):
            named = dict(zip(update.metrics.names, update.metrics.values, strict=True))
            if named.get("bad"):
                number = before["updates"] + i + 1
                raise NotFinite(
                    f"update {number} gave a loss or weights that are not finite (loss {named['loss']}); the weights are those of before it. "
                    "Usual causes: a learning rate too high, rewards too large, a division by zero in a loss",
                    f"{self.graph}",
                )
        metrics.pop("bad", None)
        lags = [u.lag for u in tally.updates]
        seconds, self.last = now - self.last, now
        return Row(
            {
                **self.totals,
                **{k: float(v) for k, v in told.items()},
                "seconds": now - self.started,
                "steps_per_second": (self.totals["env_steps"] - before["env_steps"]) / max(seconds, 1e-9),
                "lag_mean": float(np.mean([m for m, _ in lags])) if lags else math.nan,
                "lag_max": float(np.max([m for _, m in lags])) if lags else math.nan,
                "loss": metrics.pop("loss", math.nan),
                **metrics,
            }
        )


def _means(tally: Tally) -> dict[str, float]:
    """The mean of every metric over the updates that have it."""
    found: dict[str, list[float]] = {}
    for update in tally.updates:
        for name, value in zip(update.metrics.names, update.metrics.values, strict=True):
            found.setdefault(name, []).append(float(value))
    return {name: float(np.mean(values)) for name, values in found.items()}


class Session:
    """A graph at work in one runtime: opened resources, the stage loop, and the Rows so far."""

    def __init__(self, graph: Graph, place: Place, hook: Hook | None = None) -> None:
        self.place = place
        self.rows = RowMaker(graph.name, time.perf_counter())
        handles = place.open()
        self.loop = Loop(graph.name, graph.nodes, handles, place.site, place.ledger, hook)

    def __iter__(self) -> Iterator[Row]:
        """Rows without end; each one after the pass that closed it has run to its end."""
        while True:
            for tally in self.loop.run_pass():
                yield self.rows.row(tally)

    def state(self, name: str) -> Any:
        """The state of a resource, between passes."""
        return self.place.handles[name].state

    def close(self) -> None:
        """Close the resources."""
        self.place.close()
