"""Why a run is as fast as it is: where the seconds went, the bottleneck, what would mend it, and what changes would bring."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from flowrl.core.clock import IDLE, KINDS, by_kind
from flowrl.core.profile import Profile, idle, use
from flowrl.observe.what_if import WhatIf, what_if

SWINGS = 0.1
"""The share of time from which on the stages before and behind a queue, that wait for one another in turn, blame the queue."""
STRAGGLES = 1.5
"""How many times as long as the median of its like a worker takes for a fragment to be called a straggler."""
NOTABLE = 1.05
"""How many times as fast a change must make a run to be worth advising."""
SHORT = 2.0
"""The seconds below which a run is called too short to tell."""
COMPILED = 0.05
"""The share of time from which on compiling is told of."""
SHARED = 0.2
"""The share from which on a second kind of work is named."""
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
    """The kind of work, of `flowrl.core.clock.KINDS`; ``queue``, or ``straggler``."""
    share: float
    """Of the time."""
    why: str
    advice: str


@dataclass(frozen=True)
class Explanation:
    """A run explained. `print` shows it."""

    profile: Profile
    bottleneck: Bottleneck | None
    what_if: tuple[WhatIf, ...]

    @property
    def steps_per_second(self) -> float:
        """Environment steps a second in this part of the run."""
        return self.profile.env_steps / self.profile.going

    def __str__(self) -> str:
        p = self.profile
        compiled = (
            f", beside {p.seconds - p.going:.1f} s of compiling"
            if p.seconds - p.going > COMPILED * p.going
            else ""
        )
        head = f"{p.env_steps:,} steps in {p.going:.1f} s{compiled}: {self.steps_per_second:,.0f} steps/s"
        return (
            "\n".join([head, "", *table(p), "", *nodes(p), "", *edges(p), "", *self._reasons()])
            + "\n"
        )

    def short(self) -> str:
        """Without what every node and edge did."""
        return "\n".join([*table(self.profile), "", *self._reasons()]) + "\n"

    def _reasons(self) -> list[str]:
        lines = list(self.profile.findings)
        if self.profile.env_steps and self.profile.going < SHORT:
            lines.append(f"measured over {self.profile.going:.1f} s only: a longer run tells more")
        if b := self.bottleneck:
            lines += [f"bottleneck: {b.where}, {b.share:.0%} of the time. {b.why}", f"  {b.advice}"]
        if self.what_if:
            wide = max(len(w.change) for w in self.what_if)
            lines += ["what if", *(f"  {w.change:<{wide}}  {self._told(w)}" for w in self.what_if)]
        return lines

    def _told(self, w: WhatIf) -> str:
        if w.steps_per_second is None:
            return w.because
        return f"{w.steps_per_second:>9,.0f} steps/s ({w.steps_per_second / max(self.steps_per_second, 1e-9):.2f}x): {w.because}"


def explain(profile: Profile) -> Explanation:
    """Explain a run, or the part of one: ``later - earlier``."""
    found, changes = bottleneck(profile), tuple(what_if(profile))
    return Explanation(profile, found and _agreed(found, changes, profile), changes)


def _agreed(found: Bottleneck, changes: Sequence[WhatIf], p: Profile) -> Bottleneck:
    """The bottleneck, with the advice to add a runner qualified where that is to bring nothing on this machine: by why, and what brings most."""
    worth = NOTABLE * p.env_steps / p.going
    if (
        ".count=" not in found.advice
        or not changes
        or (changes[0].steps_per_second or 0.0) >= worth
    ):
        return found
    best = max(changes, key=lambda change: change.steps_per_second or 0.0)
    more = f"; {best.change} brings most" if (best.steps_per_second or 0.0) >= worth else ""
    return replace(
        found,
        advice=f"{found.advice} Not here, though: {changes[0].because.removeprefix('nothing to be expected: ')}{more}.",
    )


# -- tables --------------------------------------------------------------------------------------------------------


def table(p: Profile) -> list[str]:
    """The seconds of every process by kind of work, which add up to its wall time."""
    kinds = {name: by_kind(spent) for name, spent in p.processes.items()}
    shown = [
        k
        for k in KINDS
        if any(
            spent.get(k, 0.0) > SHOWN * max(sum(spent.values()), 1e-9) for spent in kinds.values()
        )
    ]
    if any(
        seconds > 0
        for spent in kinds.values()
        for kind, seconds in spent.items()
        if kind not in shown
    ):
        shown = [
            k for k in KINDS if k in (*shown, "other")
        ]  # which then has what is too little to have a column
    wide = max(map(len, p.processes), default=7)
    lines = [f"{'seconds':<{wide}}{_cells(['wall', *shown])}"]
    for process, spent in _merged(kinds):
        rest = sum(x for kind, x in spent.items() if kind not in shown)
        told = (spent.get(k, 0.0) + rest * (k == "other") for k in shown)
        lines.append(
            f"{process:<{wide}}{_cells([_seconds(x) for x in (sum(spent.values()), *told)])}"
        )
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
            wall = max(sum(sum(spent.values()) for spent in workers.values()), 1e-9)
            busy, starved = (
                sum(use(x) * sum(x.values()) for x in workers.values()),
                sum(map(idle, workers.values())),
            )
            found.append(Share(name, f"{len(workers)} workers", busy / wall, starved / wall, 0.0))
    for thread, names in p.stages.items():
        wall, work = p.uptime(thread), p.work(thread)
        for node in names:
            spent = p.node_seconds(node)
            busy = sum(x for (name, _), x in work.items() if name == node)
            trains = any(
                counts.get("updates") for (name, _), counts in p.counts.items() if name == node
            )
            found.append(
                Share(
                    node,
                    p.ops[node],
                    busy / wall,
                    spent.get("waiting", 0.0) / wall,
                    spent.get("blocked", 0.0) / wall,
                    trains,
                )
            )
    order = list(p.ops)
    return sorted(found, key=lambda share: order.index(share.node) if share.node in order else -1)


def nodes(p: Profile) -> list[str]:
    """The same in lines."""
    told = shares(p)
    wide, kinds = (
        max((len(text) for text in texts), default=4)
        for texts in ([s.node for s in told], [s.does for s in told])
    )
    lines = [f"{'node':<{wide}}  {'':<{kinds}}{_cells(['busy', 'starved', 'blocked'])}"]
    return lines + [
        f"{s.node:<{wide}}  {s.does:<{kinds}}{_cells([f'{x:.0%}' for x in (s.busy, s.starved, s.blocked)])}"
        for s in told
    ]


def edges(p: Profile) -> list[str]:
    """By edge: what went over it, and what its queue holds."""
    wide = max((len(f"{a} -> {b}") for a, b in p.edges), default=4)
    lines = [f"{'edge':<{wide}}{_cells(['items', 'steps', 'steps/s'])}"]
    for (a, b), (items, steps) in p.edges.items():
        level = f"  queue holds {p.queues[b][0]} of {p.queues[b][1]}" if b in p.queues else ""
        lines.append(
            f"{f'{a} -> {b}':<{wide}}{_cells([f'{items:,}', f'{steps:,}', f'{steps / p.going:,.0f}'])}{level}"
        )
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
        mean = {
            kind: sum(spent.get(kind, 0.0) for _, spent in members) / len(members) for kind in KINDS
        }
        rows += [
            (f"{group}, mean of {len(members)}", mean),
            max(members, key=lambda m: m[1].get("step", 0.0)),
        ]
    return rows


# -- the bottleneck ------------------------------------------------------------------------------------------------


def bottleneck(p: Profile) -> Bottleneck | None:
    """What the run waits for: the first that is busy and not held up by what is behind it. None where the run is too short to tell."""
    if not p.env_steps or not p.stages:
        return None
    if swinging := _swinging(p):
        return swinging
    pools = [name for name in p.facts if p.workers(name)]
    threads = {thread: p.work(thread) for thread in p.sampling()}
    busy = {thread: sum(work.values()) / p.uptime(thread) for thread, work in threads.items()}
    uses = {name: max(map(use, p.workers(name).values())) for name in pools}
    if (
        placed := _placed(
            p,
            pools,
            [*uses.values(), *(_here(p, thread, work) for thread, work in threads.items())],
        )
    ) is not None:
        return placed
    where = max({**uses, **busy}, key=lambda name: {**uses, **busy}[name])
    if where in uses:
        return _pool(p, where, uses[where])
    work = threads[where]
    if not p.stages[where]:
        return Bottleneck(
            where,
            "update",
            busy[where],
            "It runs one XLA program, whose parts can't be told apart.",
            PROGRAM,
        )
    node = max({n for n, _ in work}, key=lambda n: sum(x for (m, _), x in work.items() if m == n))
    kinds = by_kind({key: x for key, x in work.items() if key[0] == node})
    kind = max(kinds, key=kinds.__getitem__)
    share = sum(kinds.values()) / p.uptime(where)
    if any(counts.get("publishes") for (name, _), counts in p.counts.items() if name == node):
        kind = "weight sync"
    sampler = next(
        (r for (n, r), c in p.counts.items() if n == node and c.get("sampled_steps")), None
    )
    return Bottleneck(
        node or where, kind, share, _why(kinds), _advice(p, kind, sampler, remote=False)
    )


def _here(p: Profile, thread: str, work: Mapping[tuple[str, str], float]) -> float:
    """The share of its time in which a thread works itself, and does not wait for what works elsewhere."""
    return sum(x for (_, kind), x in work.items() if kind != "transfer") / p.uptime(thread)


def _placed(p: Profile, pools: Sequence[str], others: Sequence[float]) -> Bottleneck | None:
    """A resource in a process of its own that works more than all else."""
    alone = {
        n: by_kind(x)
        for n, x in p.processes.items()
        if x and n not in p.stages and n.partition(", ")[0] not in pools
    }
    name = max(alone, key=lambda n: use(alone[n]), default="")
    if not name or use(alone[name]) < max(others, default=0.0):
        return None
    kinds = {kind: x for kind, x in alone[name].items() if kind not in (*IDLE, "start")}
    return Bottleneck(
        name,
        max(kinds, key=kinds.__getitem__, default="other"),
        use(alone[name]),
        _why(kinds),
        _advice(p, "update", None, remote=False),
    )


def _swinging(p: Profile) -> Bottleneck | None:
    """A queue that is full and empty in turn: the stages on both its sides wait for one another."""
    for queue, (_, capacity) in p.queues.items():
        behind = next((t for t, names in p.stages.items() if queue in names), "")
        before = {
            t for a, b in p.edges if b == queue for t, names in p.stages.items() if a in names
        } - {behind}
        if behind not in p.processes or not before:
            continue
        starved = p.node_seconds(queue).get("waiting", 0.0) / p.uptime(behind)
        blocked = max(by_kind(p.processes[t]).get("blocked", 0.0) / p.uptime(t) for t in before)
        if min(starved, blocked) >= SWINGS:
            why = f"Its room for {capacity} is full and empty in turn: what is behind waits {starved:.0%} of the time, what is before {blocked:.0%}."
            return Bottleneck(
                queue,
                "queue",
                min(starved, blocked),
                why,
                f"A larger one evens that out: --set {queue}.capacity={4 * capacity}.",
            )
    return None


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
    return Bottleneck(name, kind, share, _why(kinds), _advice(p, kind, name, remote=True))


def _per_fragment(p: Profile, name: str) -> dict[str, float]:
    """By worker: its seconds of work for a fragment."""
    fragments = p.facts[name].get("fragments", [])
    found = {}
    for worker, spent in p.workers(name).items():
        number = int(worker.rpartition(", ")[2])
        if number < len(fragments) and fragments[number]:
            found[worker] = (
                sum(spent.values()) - idle(spent) - spent.get("start", 0.0)
            ) / fragments[number]
    return found


DOES = {
    "step": "stepping environments",
    "reset": "resetting environments",
    "inference": "choosing actions",
    "update": "updates",
    "weight sync": "handing on weights",
    "transfer": "moving data between processes",
    "concat": "joining batches",
    "replay": "storing and drawing transitions",
    "evaluation": "evaluation episodes",
    "other": "Python code of its own",
}


PROGRAM = (
    "More environments at once use the device better; --runtime local shows what each node takes."
)


def _why(kinds: Mapping[str, float]) -> str:
    """What most of these seconds went to."""
    total = max(sum(kinds.values()), 1e-9)
    first, *more = sorted(kinds, key=kinds.__getitem__, reverse=True)
    second = (
        f", {kinds[more[0]] / total:.0%} to {DOES.get(more[0], more[0])}"
        if more and kinds[more[0]] / total > SHARED
        else ""
    )
    return f"{kinds[first] / total:.0%} of that goes to {DOES.get(first, first)}{second}."


def _advice(p: Profile, kind: str, sampler: str | None, *, remote: bool) -> str:
    many = (
        f"--set {sampler}.num_runners={p.facts[sampler]['count'] + 1}"
        if sampler and "count" in p.facts.get(sampler, {})
        else "more runners"
    )
    envs = (
        f"--set {sampler}.envs_per_runner={2 * p.facts[sampler]['envs']}"
        if sampler and "envs" in p.facts.get(sampler, {})
        else "more environments"
    )
    return {
        "step": f"Step more of them side by side: {many}."
        if remote
        else "Let runners step side by side: --runtime ray, with more than one runner.",
        "reset": "Make reset cheaper, or episodes longer.",
        "inference": f"Let one call act for more environments: {envs}.",
        "update": "Train less for each step (updates_per_step), with a smaller network, or on a GPU."
        if p.total("drawn_steps")
        else "Train less on each step (epochs), with larger minibatches or a smaller network, or on a GPU; or sample meanwhile: impala or appo.",
        "weight sync": "Send weights less often (every=), to those who need them (to='producer'), or without waiting (wait=False).",
        "transfer": "Send fewer and larger things: longer fragments, more environments a runner.",
        "concat": "Join larger fragments: longer ones, or more environments a runner.",
        "replay": f"Share the replay among more processes: --runtime ray with {_more_shards(p)}.",
        "evaluation": "Evaluate less often, or with fewer episodes.",
    }.get(
        kind,
        "Profile its step; what it computes on arrays belongs into ctx.run, which compiles it.",
    )


def _more_shards(p: Profile) -> str:
    """The setting by which the replay has more shards; of several replays, that of each."""
    return (
        " or ".join(
            f"--set {name}.shards={max(2, 2 * facts['shards'])}"
            for name, facts in p.facts.items()
            if "shards" in facts
        )
        or "more shards"
    )


def plain(explanation: Explanation) -> dict[str, Any]:
    """As plain data, for JSON."""
    b = explanation.bottleneck
    return {
        "steps_per_second": explanation.steps_per_second,
        "bottleneck": None
        if b is None
        else {"where": b.where, "kind": b.kind, "share": b.share, "why": b.why, "advice": b.advice},
        "what_if": [
            {"change": w.change, "steps_per_second": w.steps_per_second, "because": w.because}
            for w in explanation.what_if
        ],
    }
