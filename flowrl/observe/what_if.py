"""What changes to a run would bring, by the service times that were measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flowrl.core.clock import IDLE
from flowrl.core.profile import Profile

FULL = 0.9
"""The share of this machine's cores at work from which on they count as full."""


@dataclass(frozen=True)
class WhatIf:
    """A change, and the steps a second that are to be expected of it; None where nothing can be promised."""

    change: str
    steps_per_second: float | None
    because: str


@dataclass(frozen=True)
class _Model:
    """Seconds that a fragment costs, by part. All are added in one thread; side by side only the longest counts."""

    steps: float
    workers: float
    """Of the runners, if they work side by side; of all of them together."""
    threads: Mapping[str, float]
    serial: bool

    @property
    def speed(self) -> float:
        parts = [self.workers, *self.threads.values()]
        return self.steps / max(sum(parts) if self.serial else max(parts), 1e-12)


def what_if(p: Profile) -> Iterator[WhatIf]:
    """What one more runner, twice the environments, and twice the batch would bring, by the service times that were measured."""
    name = next((n for n, facts in p.facts.items() if any(facts.get("fragments", ()))), None)
    if name is None or not p.env_steps:
        return
    fragments = sum(p.facts[name]["fragments"])
    facts, now = p.facts[name], p.env_steps / p.going
    cost = _Cost(p, name, fragments)
    base = cost.model()

    def speed(**change: float) -> float:
        return now * cost.model(**change).speed / base.speed

    count = facts["count"]
    used = p.busy / max(p.seconds * p.cores, 1e-9)
    more = f"one more runner ({name}.num_runners={count + 1})"
    if not facts["remote"]:
        yield WhatIf(more, None, "nothing: in one process runners take turns; take --runtime ray")
    else:
        most, got = now / max(used, 1e-9), speed(runners=(count + 1) / count)
        if used >= FULL and got > 1.02 * now:
            yield WhatIf(
                more,
                None,
                f"nothing to be expected: the {p.cores} cores of this machine are full ({used:.0%})",
            )
        else:
            yield WhatIf(
                more,
                min(got, max(most, now)),
                "then the cores are full"
                if got > most
                else cost.limit(runners=(count + 1) / count),
            )
    yield WhatIf(
        f"twice the environments ({name}.envs_per_runner={2 * facts['envs']})",
        speed(envs=2.0),
        cost.limit(envs=2.0),
    )
    if cost.trainer:
        yield WhatIf("twice the batch", speed(batch=2.0), cost.limit(batch=2.0))


class _Cost:
    """What a fragment costs, and how that changes: the work for a step stays the same, but for what is said here.

    A call of the policy takes as long for twice the environments; a step of a vector of their own too. What stands behind the update is done
    once for each, so that twice the batch halves it.
    """

    def __init__(self, p: Profile, name: str, fragments: int) -> None:
        self.facts, self.name = p.facts[name], name
        self.steps = p.env_steps / fragments
        self.workers: dict[str, float] = {}
        """Of a fragment, by kind."""
        for spent in p.workers(name).values():
            for kind, seconds in spent.items():
                if kind not in IDLE and kind != "start":
                    self.workers[kind] = self.workers.get(kind, 0.0) + seconds / fragments
        self.threads = {
            t: {key: x / fragments for key, x in p.work(t).items()} for t in p.sampling()
        }
        self.trainer = next(
            (n for n in p.ops if any(c.get("updates") for (m, _), c in p.counts.items() if m == n)),
            None,
        )
        self.sampler = next(
            (n for n in p.ops if p.counts.get((n, name), {}).get("sampled_steps")), None
        )
        home = next((names for names in p.stages.values() if self.trainer in names), ())
        self.behind = set(home[home.index(self.trainer) + 1 :]) if self.trainer in home else set()
        self.serial = self.sampler in home or len(p.stages) == 1
        self.waited = p.node_seconds(self.sampler or "").get("waiting", 0.0) / fragments

    def _scaled(self, kind: str, envs: float) -> float:
        constant = kind in ("inference", "weight sync") or (
            kind == "step" and not self.facts["singly"]
        )
        return 1.0 if constant else envs

    def model(self, runners: float = 1.0, envs: float = 1.0, batch: float = 1.0) -> _Model:
        """What a fragment costs then."""
        before = sum(self.workers.values())
        workers = sum(x * self._scaled(kind, envs) for kind, x in self.workers.items())
        alone = (
            self.waited * workers / before
            if self.serial and before
            else workers / self.facts["count"]
        )  # the one holds the slowest's lateness
        side_by_side = alone / runners
        threads = {}
        for thread, work in self.threads.items():
            total = 0.0
            for (node, kind), seconds in work.items():
                scale = self._scaled(kind, envs) if node == self.sampler else envs
                total += seconds * scale / (batch if node in self.behind else 1.0)
            threads[thread] = total
        return _Model(self.steps * envs, side_by_side, threads, self.serial)

    def limit(self, **change: float) -> str:
        """What the run waits for then."""
        then = self.model(**change)
        parts = {self.name: then.workers, **then.threads}
        first = max(parts, key=parts.__getitem__)
        return f"{first} then take{'s' * (first != self.name)} {'most of the time' if self.serial else 'longest'}"
