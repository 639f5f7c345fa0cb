"""Why a run is as fast as it is: where the seconds went, the bottleneck, what would mend it, and what changes would bring."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from flowrl.clock import IDLE, KINDS, by_kind
from flowrl.profile import Profile, idle

SWINGS = 0.1
"""The share of time from which on the stages before and behind a queue, that wait for one another in turn, blame the queue."""
STRAGGLES = 1.5
"""How many times as long as the median of its like a worker takes for a fragment to be called a straggler."""
FULL = 0.9
"""The share of this machine's cores at work from which on they count as full."""
MANY = 8
"""So many processes of one resource are shown each; of more, the mean and the one that works most."""
SHOWN = 0.005
"""The share of a process's time below which a kind of work is left out."""


@dataclass(frozen=True)
class Bottleneck:
    """What a run waits for."""

    where: str
    """A node, a queue, a resource, or a worker such as ``runners, 1``."""
    kind: str
    """The kind of work, of `flowrl.clock.KINDS`; ``queue``, or ``straggler``."""
    share: float
    """Of the time."""
    why: str
    advice: str


@dataclass(frozen=True)
class WhatIf:
    """A change, and the steps a second that are to be expected of it; None where nothing can be promised."""

    change: str
    steps_per_second: float | None
    because: str


@dataclass(frozen=True)
class Explanation:
    """A run explained. `print` shows it."""

    profile: Profile
    bottleneck: Bottleneck | None
    what_if: tuple[WhatIf, ...]

    @property
    def steps_per_second(self) -> float:
        """Environment steps a second in this part of the run."""
        return self.profile.env_steps / max(self.profile.seconds, 1e-9)

    def __str__(self) -> str:
        p = self.profile
        lines = [f"{p.env_steps:,} steps in {p.seconds:.1f} s: {self.steps_per_second:,.0f} steps/s", *table(p), "", *nodes(p), "", *edges(p)]
        if b := self.bottleneck:
            lines += ["", f"bottleneck: {b.where} ({b.share:.0%} of the time). {b.why}", f"  {b.advice}"]
        lines += p.findings
        if self.what_if:
            wide = max(len(w.change) for w in self.what_if)
            lines += ["", "what if", *(f"  {w.change:<{wide}}  {self._told(w)}" for w in self.what_if)]
        return "\n".join(lines) + "\n"

    def _told(self, w: WhatIf) -> str:
        if w.steps_per_second is None:
            return w.because
        return f"{w.steps_per_second:>9,.0f} steps/s ({w.steps_per_second / max(self.steps_per_second, 1e-9):.2f}x): {w.because}"


def explain(profile: Profile) -> Explanation:
    """Explain a run, or the part of one: ``later - earlier``."""
    return Explanation(profile, bottleneck(profile), tuple(what_if(profile)))


# -- tables --------------------------------------------------------------------------------------------------------


def table(p: Profile) -> list[str]:
    """The seconds of every process by kind of work, which add up to its wall time."""
    kinds = {name: by_kind(spent) for name, spent in p.processes.items()}
    shown = [k for k in KINDS if any(spent.get(k, 0.0) > SHOWN * max(sum(spent.values()), 1e-9) for spent in kinds.values())]
    wide = max(map(len, p.processes), default=7)
    lines = [f"{'seconds':<{wide}}{_cells(['wall', *shown])}"]
    for process, spent in _merged(kinds):
        lines.append(f"{process:<{wide}}{_cells([_seconds(x) for x in (sum(spent.values()), *(spent.get(k, 0.0) for k in shown))])}")
    return lines


@dataclass(frozen=True)
class Share:
    """How a node, or a set of workers elsewhere, spends the time of its thread or processes: shares of 1."""

    node: str
    does: str
    """The name of its operator, or how many workers it has."""
    busy: float
    starved: float
    """It, or its stage where it stands first, has nothing to do."""
    blocked: float
    """Its stage has no room for what would come of it."""
    trains: bool = False


def shares(p: Profile) -> list[Share]:
    """By node, and by resource with workers elsewhere: busy, starved and blocked. An update that is waited for is its node's."""
    found = []
    for name in p.facts:
        if workers := p.workers(name):
            busy = sum(sum(spent.values()) - idle(spent) for spent in workers.values())
            wall = max(sum(sum(spent.values()) for spent in workers.values()), 1e-9)
            found.append(Share(name, f"{len(workers)} workers", busy / wall, 1 - busy / wall, 0.0))
    for thread, names in p.stages.items():
        wall, work = max(p.wall(thread), 1e-9), _work(p, thread)
        for node in names:
            spent = p.node_seconds(node)
            busy = sum(x for (name, _), x in work.items() if name == node)
            trains = any(counts.get("updates") for (name, _), counts in p.counts.items() if name == node)
            found.append(Share(node, p.ops[node], busy / wall, spent.get("waiting", 0.0) / wall, spent.get("blocked", 0.0) / wall, trains))
    order = list(p.ops)
    return sorted(found, key=lambda share: order.index(share.node) if share.node in order else -1)


def nodes(p: Profile) -> list[str]:
    """The same in lines."""
    told = shares(p)
    wide, kinds = (max((len(text) for text in texts), default=4) for texts in ([s.node for s in told], [s.does for s in told]))
    lines = [f"{'node':<{wide}}  {'':<{kinds}}{_cells(['busy', 'starved', 'blocked'])}"]
    return lines + [f"{s.node:<{wide}}  {s.does:<{kinds}}{_cells([f'{x:.0%}' for x in (s.busy, s.starved, s.blocked)])}" for s in told]


def edges(p: Profile) -> list[str]:
    """By edge: what went over it, and what its queue holds."""
    wide = max((len(f"{a} -> {b}") for a, b in p.edges), default=4)
    lines = [f"{'edge':<{wide}}{_cells(['items', 'steps', 'steps/s'])}"]
    for (a, b), (items, steps) in p.edges.items():
        level = f"  queue holds {p.queues[b][0]} of {p.queues[b][1]}" if b in p.queues else ""
        lines.append(f"{f'{a} -> {b}':<{wide}}{_cells([f'{items:,}', f'{steps:,}', f'{steps / max(p.seconds, 1e-9):,.0f}'])}{level}")
    return lines


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"{text:>13}" for text in texts)


def _seconds(x: float) -> str:
    return f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def _merged(processes: Mapping[str, Mapping[str, float]]) -> list[tuple[str, Mapping[str, float]]]:
    groups: dict[str, list[tuple[str, Mapping[str, float]]]] = {}
    for name, spent in processes.items():
        groups.setdefault(name.split(", ")[0], []).append((name, spent))
    rows: list[tuple[str, Mapping[str, float]]] = []
    for group, members in groups.items():
        if len(members) <= MANY:
            rows += members
            continue
        mean = {kind: sum(spent.get(kind, 0.0) for _, spent in members) / len(members) for kind in KINDS}
        rows += [(f"{group}, mean of {len(members)}", mean), max(members, key=lambda m: m[1].get("step", 0.0))]
    return rows


# -- the bottleneck ------------------------------------------------------------------------------------------------


def bottleneck(p: Profile) -> Bottleneck | None:
    """What the run waits for: the first that is busy and not held up by what is behind it. None where the run is too short to tell."""
    if not p.env_steps or not p.stages:
        return None
    if swinging := _swinging(p):
        return swinging
    pools = [name for name in p.facts if p.workers(name)]
    threads = {thread: _work(p, thread) for thread in p.stages}
    busy = {thread: sum(work.values()) / max(p.wall(thread), 1e-9) for thread, work in threads.items()}
    uses = {name: max(1 - idle(spent) / max(sum(spent.values()), 1e-9) for spent in p.workers(name).values()) for name in pools}
    where = max({**uses, **busy}, key=lambda name: {**uses, **busy}[name])
    if where in uses:
        return _pool(p, where, uses[where])
    work = threads[where]
    node = max({n for n, _ in work}, key=lambda n: sum(x for (m, _), x in work.items() if m == n))
    kinds = by_kind({key: x for key, x in work.items() if key[0] == node})
    kind = max(kinds, key=kinds.__getitem__)
    share = sum(kinds.values()) / max(p.wall(where), 1e-9)
    sampler = next((r for (n, r), c in p.counts.items() if n == node and c.get("sampled_steps")), None)
    return Bottleneck(node or where, kind, share, _why(p, node, kind), _advice(p, kind, sampler, elsewhere=False))


def _swinging(p: Profile) -> Bottleneck | None:
    """A queue that is full and empty in turn: the stages on both its sides wait for one another."""
    for queue, (_, capacity) in p.queues.items():
        behind = next((t for t, names in p.stages.items() if queue in names), "")
        before = {t for a, b in p.edges if b == queue for t, names in p.stages.items() if a in names} - {behind}
        if behind not in p.processes or not before:
            continue
        starved = p.node_seconds(queue).get("waiting", 0.0) / max(p.wall(behind), 1e-9)
        blocked = max(by_kind(p.processes[t]).get("blocked", 0.0) / max(p.wall(t), 1e-9) for t in before)
        if min(starved, blocked) >= SWINGS:
            why = f"Its room for {capacity} is full and empty in turn: what is behind waits {starved:.0%} of the time, what is before {blocked:.0%}."
            return Bottleneck(queue, "queue", min(starved, blocked), why, f"A larger one evens that out: --set {queue}.capacity={4 * capacity}.")
    return None


def _work(p: Profile, thread: str) -> dict[tuple[str, str], float]:
    """What a thread does, by node and kind. What waits for an update behind the node that dispatched it is that node's."""
    names = p.stages[thread]
    trainer = next((n for n in names if any(c.get("updates") for (m, _), c in p.counts.items() if m == n)), None)
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for (node, kind), seconds in p.processes[thread].items():
        if kind in IDLE or kind == "start":
            continue
        late = trainer is not None and kind == "update" and (not node or (node in names and names.index(node) > names.index(trainer)))
        found[trainer if late and trainer else node, kind] += seconds
    return dict(found)


def _pool(p: Profile, name: str, share: float) -> Bottleneck:
    each = _per_fragment(p, name)
    slowest = max(each, key=each.__getitem__, default="")
    usual = median([x for worker, x in each.items() if worker != slowest] or [0.0])
    if usual and each[slowest] >= STRAGGLES * usual:
        why = f"It takes {each[slowest] / usual:.1f} times as long for a fragment as the others ({each[slowest]:.3f} s, {usual:.3f} s)."
        advice = (
            "See what is different there (its machine, its episodes). Where all wait for it, sample with min_fraction below 1, or with "
            "mode='async' behind a Queue."
        )
        return Bottleneck(slowest, "straggler", share, why, advice)
    kinds: defaultdict[str, float] = defaultdict(float)
    for spent in p.workers(name).values():
        for kind, seconds in spent.items():
            if kind not in IDLE and kind != "start":
                kinds[kind] += seconds
    kind = max(kinds, key=kinds.__getitem__, default="other")
    return Bottleneck(name, kind, share, _why(p, name, kind), _advice(p, kind, name, elsewhere=True))


def _per_fragment(p: Profile, name: str) -> dict[str, float]:
    """By worker: its seconds of work for a fragment."""
    fragments = p.facts[name].get("fragments", [])
    found = {}
    for worker, spent in p.workers(name).items():
        number = int(worker.rpartition(", ")[2])
        if number < len(fragments) and fragments[number]:
            found[worker] = (sum(spent.values()) - idle(spent) - spent.get("start", 0.0)) / fragments[number]
    return found


DOES = {
    "step": "most of it goes to the environments' step",
    "reset": "most of it goes to resetting environments",
    "inference": "most of it goes to the policy that chooses actions",
    "update": "most of it goes to the update",
    "weight sync": "most of it goes to handing on weights",
    "transfer": "most of it goes to moving data between processes",
    "concat": "most of it goes to joining batches",
    "evaluation": "most of it goes to playing evaluation episodes",
    "other": "most of it goes to its own Python code",
}


def _why(p: Profile, node: str, kind: str) -> str:
    what = p.ops.get(node) or ("workers of this resource" if node in p.facts else "the thread of the run")
    return f"{what}: {DOES.get(kind, kind)}."


def _advice(p: Profile, kind: str, sampler: str | None, *, elsewhere: bool) -> str:
    many = f"--set {sampler}.count={p.facts[sampler]['count'] + 1}" if sampler and "count" in p.facts.get(sampler, {}) else "more runners"
    envs = f"--set {sampler}.envs={2 * p.facts[sampler]['envs']}" if sampler and "envs" in p.facts.get(sampler, {}) else "more environments"
    return {
        "step": f"Step more of them side by side: {many}."
        if elsewhere
        else "Let runners step side by side: --runtime ray, with more than one runner.",
        "reset": "Make reset cheaper, or episodes longer.",
        "inference": f"Let one call act for more environments: {envs}.",
        "update": "Train less on each step (epochs), with larger minibatches or a smaller network, or on a GPU; or sample meanwhile: impala or appo.",
        "weight sync": "Send weights less often (every=), to those who need them (to='producer'), or without waiting (wait=False).",
        "transfer": "Send fewer and larger things: longer fragments, more environments a runner.",
        "concat": "Join larger fragments: longer ones, or more environments a runner.",
        "evaluation": "Evaluate less often, or with fewer episodes.",
    }.get(kind, "Profile its step; what it computes on arrays belongs into ctx.run, which compiles it.")


# -- what if -------------------------------------------------------------------------------------------------------


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
    name = next((n for n, facts in p.facts.items() if "fragments" in facts), None)
    fragments = sum(p.facts[name]["fragments"]) if name else 0
    if name is None or not fragments or not p.env_steps:
        return
    facts, now = p.facts[name], p.env_steps / p.seconds
    cost = _Cost(p, name, fragments)
    base = cost.model()

    def speed(**change: float) -> float:
        return now * cost.model(**change).speed / base.speed

    count = facts["count"]
    used = p.busy / max(p.seconds * p.cores, 1e-9)
    more = f"one more runner ({name}.count={count + 1})"
    if not facts["elsewhere"]:
        yield WhatIf(more, None, "nothing: in one process runners take turns; take --runtime ray")
    elif used >= FULL:
        yield WhatIf(more, None, f"nothing to be expected: the {p.cores} cores of this machine are full ({used:.0%})")
    else:
        most = now / max(used, 1e-9)
        got = speed(runners=(count + 1) / count)
        yield WhatIf(more, min(got, most), "then the cores are full" if got > most else cost.limit(runners=(count + 1) / count))
    yield WhatIf(f"twice the environments ({name}.envs={2 * facts['envs']})", speed(envs=2.0), cost.limit(envs=2.0))
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
        each = p.workers(name)
        for spent in each.values():
            for kind, seconds in spent.items():
                if kind not in IDLE and kind != "start":
                    self.workers[kind] = self.workers.get(kind, 0.0) + seconds / fragments / len(each)
        self.threads = {t: {key: x / fragments for key, x in _work(p, t).items()} for t in p.stages}
        self.trainer = next((n for n in p.ops if any(c.get("updates") for (m, _), c in p.counts.items() if m == n)), None)
        self.sampler = next((n for n in p.ops if p.counts.get((n, name), {}).get("sampled_steps")), None)
        home = next((names for names in p.stages.values() if self.trainer in names), ())
        self.behind = set(home[home.index(self.trainer) + 1 :]) if self.trainer in home else set()
        self.serial = self.sampler in home or len(p.stages) == 1
        rounds, idle_ = self.facts.get("rounds", (0.0, 0.0))
        self.uneven = 1 / max(1 - idle_ / rounds, 0.05) if rounds else 1.0
        """How much longer a round takes than its mean fragment."""
        self.waited = p.node_seconds(self.sampler or "").get("waiting", 0.0) / fragments

    def _scaled(self, kind: str, envs: float) -> float:
        constant = kind in ("inference", "weight sync") or (kind == "step" and not self.facts["singly"])
        return 1.0 if constant else envs

    def model(self, runners: float = 1.0, envs: float = 1.0, batch: float = 1.0) -> _Model:
        """What a fragment costs then."""
        before = sum(self.workers.values())
        workers = sum(x * self._scaled(kind, envs) for kind, x in self.workers.items())
        alone = self.waited * workers / before if self.serial and before else workers / self.facts["count"]  # the one holds the slowest's lateness
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


def plain(explanation: Explanation) -> dict[str, Any]:
    """As plain data, for JSON."""
    b = explanation.bottleneck
    return {
        "steps_per_second": explanation.steps_per_second,
        "bottleneck": None if b is None else {"where": b.where, "kind": b.kind, "share": b.share, "why": b.why, "advice": b.advice},
        "what_if": [{"change": w.change, "steps_per_second": w.steps_per_second, "because": w.because} for w in explanation.what_if],
    }
