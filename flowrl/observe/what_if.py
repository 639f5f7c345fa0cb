"""Predictions of what changes to a run would bring, from the service times that were measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flowrl.core.clock import IDLE
from flowrl.core.profile import Profile

TIMES = (1, 2, 3, 4, 6, 8)
"""How many times as much of something `sliders` predicts."""
TAKE_RAY = "take --runtime ray"
WORTH_RAY = 1.1
"""Runners in processes of their own are advised if they make a run at least this many times as
fast, because messages between processes, which the prediction leaves out, cost time, too."""
FULL = 0.9
"""The cores of this machine count as full if at least this share of their time is used."""


@dataclass(frozen=True)
class WhatIf:
    """A change to a run, and the speed that it is predicted to bring."""

    change: str
    """The change, such as ``twice the batch``."""
    steps_per_second: float | None
    """The predicted environment steps per second; None if nothing can be promised."""
    because: str
    """What the run would then wait for, or why nothing can be promised."""


@dataclass(frozen=True)
class Slider:
    """A number of a run that could be changed, and what several values of it would bring."""

    name: str
    """The number, such as ``runners``."""
    values: tuple[int, ...]
    """The values, that of the run first; of the batch, how many times as large it is."""
    predictions: tuple[WhatIf, ...]
    """What each of them would bring."""


@dataclass(frozen=True)
class _Model:
    """The seconds that one rollout costs, by part of the run.

    The costs add up if one thread does all the work. If the parts work in parallel, only the
    longest of them counts.
    """

    steps: float
    """Environment steps of a rollout."""
    workers: float
    """The seconds of the runners, divided by their number if they work in parallel."""
    threads: Mapping[str, float]
    """The seconds of each thread that runs stages."""
    serial: bool
    """Whether the parts work one after another."""

    @property
    def speed(self) -> float:
        """Environment steps per second."""
        parts = [self.workers, *self.threads.values()]
        return self.steps / max(sum(parts) if self.serial else max(parts), 1e-12)


def what_if(p: Profile) -> Iterator[WhatIf]:
    """Predict what one more runner, twice the environments, and twice the batch would bring.

    Args:
        p: the profile of a run, or of a part of it.

    Returns:
        The predictions in this order, the last only if a node trains. There are none if no runner
        has collected a rollout.
    """
    cost = _cost(p)
    if cost is None:
        return
    yield _runners(p, cost, cost.facts["count"] + 1)
    yield _envs(cost, 2)
    if cost.trainer:
        yield _batch(cost, 2)


def sliders(p: Profile) -> Iterator[Slider]:
    """Predict what several numbers of runners and environments, and larger batches would bring.

    Args:
        p: the profile of a run, or of a part of it.

    Returns:
        As of `what_if`, but for each of them several values. Runners in this process are left out.
    """
    cost = _cost(p)
    if cost is None:
        return
    count, envs = cost.facts["count"], cost.facts["envs"]
    if cost.facts["remote"]:
        counts = tuple(sorted({count + 1, *(n * count for n in TIMES)}))
        yield Slider("runners", counts, tuple(_runners(p, cost, n) for n in counts))
    more = tuple(n * envs for n in TIMES)
    yield Slider("environments per runner", more, tuple(_envs(cost, n) for n in TIMES))
    if cost.trainer:
        yield Slider("batch", TIMES, tuple(_batch(cost, n) for n in TIMES))


def _cost(p: Profile) -> _Cost | None:
    """Return what a rollout cost; None if no runner has collected one."""
    name = next((n for n, facts in p.facts.items() if any(facts.get("rollouts", ()))), None)
    if name is None or not p.env_steps:
        return None
    return _Cost(p, name, sum(p.facts[name]["rollouts"]))


def _times(number: int) -> str:
    return "twice" if number == 2 else f"{number} times"


def _envs(cost: _Cost, times: int) -> WhatIf:
    """Predict what so many times the environments would bring."""
    setting = f"{cost.name}.envs_per_runner={times * cost.facts['envs']}"
    change = f"{_times(times)} the environments ({setting})"
    return WhatIf(change, cost.speed(envs=times), cost.limit(envs=times))


def _batch(cost: _Cost, times: int) -> WhatIf:
    """Predict what so many times the batch would bring."""
    return WhatIf(f"{_times(times)} the batch", cost.speed(batch=times), cost.limit(batch=times))


def _runners(p: Profile, cost: _Cost, number: int) -> WhatIf:
    """Predict what so many runners would bring, as far as the cores of this machine allow it.

    The speed grows at most until all cores are in use, in proportion to their use.
    """
    count = cost.facts["count"]
    name = "one more runner" if number == count + 1 else f"{number} runners"
    more = f"{name} ({cost.name}.num_runners={number})"
    if not cost.facts["remote"]:
        alone = "nothing: in one process runners take turns"
        if cost.in_parallel(min(number, p.cores)) < WORTH_RAY:
            return WhatIf(more, None, f"{alone}, and they take little of the time")
        return WhatIf(more, None, f"{alone}; {TAKE_RAY}")
    used = p.busy / max(p.seconds * p.cores, 1e-9)
    now = cost.measured_speed
    predicted = cost.speed(runners=number / count)
    # If something else than the runners is the limit, that is named even where the cores are full.
    if used >= FULL and predicted > 1.02 * now:
        full = f"the {p.cores} cores of this machine are full ({used:.0%})"
        return WhatIf(more, None, f"nothing to be expected: {full}")
    with_full_cores = now / max(used, 1e-9)
    if predicted > with_full_cores:
        limit = "then the cores are full"
    else:
        limit = cost.limit(runners=number / count)
    return WhatIf(more, min(predicted, max(with_full_cores, now)), limit)


class _Cost:
    """The measured cost of a rollout, and how changes scale it.

    The work for a step stays the same, with these exceptions: a call of the policy takes as long
    for twice the environments, and so does a step of a vector of environments of its own. What is
    downstream of the update is done once for each update, so that twice the batch halves it.

    Args:
        p: the profile.
        name: of the runners.
        rollouts: how many they have collected.
    """

    def __init__(self, p: Profile, name: str, rollouts: int) -> None:
        self.facts, self.name = p.facts[name], name
        self.steps = p.env_steps / rollouts
        self.measured_speed = p.env_steps / p.going
        self.workers = _worker_seconds(p, name, rollouts)
        """Seconds of all runners per rollout, by kind of work."""
        self.threads: dict[str, dict[tuple[str, str], float]] = {}
        for thread in p.sampling():
            seconds = p.work(thread)
            self.threads[thread] = {key: x / rollouts for key, x in seconds.items()}
            self.threads[thread]["", "outside"] = p.between_rows(thread) / rollouts
        """Seconds of every thread per rollout, by node and kind of work, and between rows."""
        self.trainer = next((n for n in p.ops if _counts_updates(p, n)), None)
        self.sampler = next(
            (n for n in p.ops if p.counts.get((n, name), {}).get("sampled_steps")), None
        )
        home = next((names for names in p.stages.values() if self.trainer in names), ())
        self.downstream: set[str] = set()
        """The nodes after the trainer in its stage."""
        if self.trainer in home:
            self.downstream = set(home[home.index(self.trainer) + 1 :])
        # Runners then wait while the learner trains, and the learner while they sample.
        self.serial = self.sampler in home or len(p.stages) == 1
        self.waited = p.node_seconds(self.sampler or "").get("waiting", 0.0) / rollouts
        """Seconds that the sampler waited for runners, per rollout."""

    def speed(self, **change: float) -> float:
        """Return the environment steps per second with a change, as `model` takes it."""
        return self.measured_speed * self.model(**change).speed / self.model().speed

    def in_parallel(self, number: int) -> float:
        """Return how many times as fast so many runners in parallel would make a run in one thread.

        Args:
            number: of the runners that have a core each.
        """
        total, sampling = 0.0, 0.0
        for work in self.threads.values():
            total += sum(work.values())
            sampling += sum(x for (node, _), x in work.items() if node == self.sampler)
        return total / max(total - sampling + sampling / number, 1e-12)

    def model(self, runners: float = 1.0, envs: float = 1.0, batch: float = 1.0) -> _Model:
        """Return the cost of a rollout with a change.

        Args:
            runners: how many times as many runners.
            envs: how many times as many environments per runner.
            batch: how many times as large a batch.
        """
        before = sum(self.workers.values())
        workers = sum(x * self._scale(kind, envs) for kind, x in self.workers.items())
        # In one thread the wait for the runners counts, because it holds the delay of the slowest.
        if self.serial and before:
            waiting = self.waited * workers / before
        else:
            waiting = workers / self.facts["count"]
        threads = {t: self._seconds(work, envs, batch) for t, work in self.threads.items()}
        return _Model(self.steps * envs, waiting / runners, threads, self.serial)

    def _seconds(self, work: Mapping[tuple[str, str], float], envs: float, batch: float) -> float:
        """Return the seconds that the work of a thread for a rollout takes with a change."""
        total = 0.0
        for (node, kind), seconds in work.items():
            scale = self._scale(kind, envs) if node == self.sampler else envs
            # A larger batch makes fewer rows, too.
            fewer = batch if node in self.downstream or kind == "outside" else 1.0
            total += seconds * scale / fewer
        return total

    def _scale(self, kind: str, envs: float) -> float:
        """Return how many times as long a kind of sampling work takes with more environments."""
        if kind in ("inference", "weight sync"):
            return 1.0
        if kind == "step" and not self.facts["singly"]:
            return 1.0
        return envs

    def limit(self, **change: float) -> str:
        """Return what the run would wait for with a change, as `model` takes it."""
        changed = self.model(**change)
        parts = {self.name: changed.workers, **changed.threads}
        longest = max(parts, key=parts.__getitem__)
        # The runners are many, a thread is one.
        take = "take" if longest == self.name else "takes"
        return f"{longest} then {take} {'most of the time' if self.serial else 'longest'}"


def _worker_seconds(p: Profile, name: str, rollouts: int) -> dict[str, float]:
    """Return the working seconds of all runners per rollout, by kind of work."""
    found: dict[str, float] = {}
    for spent in p.workers(name).values():
        for kind, seconds in spent.items():
            if kind not in IDLE and kind != "start":
                found[kind] = found.get(kind, 0.0) + seconds / rollouts
    return found


def _counts_updates(p: Profile, node: str) -> bool:
    return any(counts.get("updates") for (name, _), counts in p.counts.items() if name == node)
