"""The bottleneck of a run: what all else waits for, why, and what would make it faster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from flowrl.core.clock import IDLE, by_kind
from flowrl.core.profile import Profile, idle, use

SWINGS = 0.1
"""A queue is the bottleneck if the stages before and after it each wait for at least this share of
their time."""
STRAGGLES = 1.5
"""A worker is a straggler if it takes at least this many times as long per rollout as the median of
the other workers."""
LOOP = "the loop over the rows"
"""Where the time between rows goes: the code that runs the graph."""
SHARED = 0.2
"""The second kind of work is named if it takes more than this share of the seconds."""


@dataclass(frozen=True)
class Bottleneck:
    """What a run waits for."""

    where: str
    """A node, a queue, a resource, a worker such as ``runners, 1``, or `LOOP`."""
    kind: str
    """The kind of work, of `flowrl.core.clock.KINDS`; or ``queue``, or ``straggler``."""
    share: float
    """The share of the time in which it works, or for a queue in which its stages wait; 0 to 1."""
    why: str
    """The reason, as a sentence."""
    advice: str
    """What to change, as a sentence."""


def bottleneck(p: Profile) -> Bottleneck | None:
    """Return what a run waits for.

    That is a queue that alternates between full and empty if there is one. Otherwise it is the
    thread or the set of workers that is busy for the largest share of its time. A thread is busy
    between rows, too, when the code that runs the graph holds it.

    Args:
        p: the profile of a run, or of a part of it.

    Returns:
        The bottleneck; None if the profile holds no environment steps, no stages or no work.
    """
    if not p.env_steps or not p.stages:
        return None
    if swinging := _swinging_queue(p):
        return swinging
    pools = [name for name in p.facts if p.workers(name)]
    thread_work = {thread: p.work(thread) for thread in p.sampling()}
    # A run that was resumed after its last row has counts, and did nothing here.
    if not pools and not any(thread_work.values()):
        return None
    pool_use = {name: max(map(use, p.workers(name).values())) for name in pools}
    # A thread that only waits for a remote learner or replay must not hide that process, so the
    # process is compared with what the threads do themselves.
    own_shares = [_own_share(p, thread, work) for thread, work in thread_work.items()]
    separate = _separate_process(p, pools, [*pool_use.values(), *own_shares])
    if separate is not None:
        return separate
    thread_use = {
        t: (sum(work.values()) + p.between_rows(t)) / p.uptime(t) for t, work in thread_work.items()
    }
    busy = {**pool_use, **thread_use}
    busiest = max(busy, key=busy.__getitem__)
    if busiest in pool_use:
        return _of_workers(p, busiest, pool_use[busiest])
    return _of_thread(p, busiest, thread_work[busiest], thread_use[busiest])


def _own_share(p: Profile, thread: str, work: Mapping[tuple[str, str], float]) -> float:
    """Return the share of its time in which a thread works itself instead of awaiting a process."""
    own = sum(x for (_, kind), x in work.items() if kind != "transfer")
    return (own + p.between_rows(thread)) / p.uptime(thread)


# -- the places where a bottleneck can be


def _swinging_queue(p: Profile) -> Bottleneck | None:
    """Return a queue that alternates between full and empty, so that both its sides wait."""
    for queue, (_, capacity) in p.queues.items():
        after = next((thread for thread, names in p.stages.items() if queue in names), "")
        before = _threads_before(p, queue) - {after}
        # A queue only holds stages up that run in threads of their own.
        if after not in p.processes or not before:
            continue
        starved = p.node_seconds(queue).get("waiting", 0.0) / p.uptime(after)
        blocked = max(by_kind(p.processes[t]).get("blocked", 0.0) / p.uptime(t) for t in before)
        if min(starved, blocked) >= SWINGS:
            why = (
                f"It holds up to {capacity} items and alternates between full and empty: the stage "
                f"after it waits {starved:.0%} of the time, the stage before it {blocked:.0%}."
            )
            advice = f"A larger one evens that out: --set {queue}.capacity={4 * capacity}."
            return Bottleneck(queue, "queue", min(starved, blocked), why, advice)
    return None


def _threads_before(p: Profile, queue: str) -> set[str]:
    """Return the threads that run a node from which an edge leads to this queue."""
    sources = [a for a, b in p.edges if b == queue]
    return {thread for a in sources for thread, names in p.stages.items() if a in names}


def _separate_process(
    p: Profile, pools: Sequence[str], others: Iterable[float]
) -> Bottleneck | None:
    """Return a resource in a process of its own that is busier than all of the others."""
    separate = {
        name: by_kind(spent)
        for name, spent in p.processes.items()
        if spent and name not in p.stages and name.partition(", ")[0] not in pools
    }
    name = max(separate, key=lambda n: use(separate[n]), default="")
    if not name or use(separate[name]) < max(others, default=0.0):
        return None
    kinds = {kind: x for kind, x in separate[name].items() if kind not in (*IDLE, "start")}
    kind = max(kinds, key=kinds.__getitem__, default="other")
    advice = _advice(p, "update", None, remote=False)
    return Bottleneck(name, kind, use(separate[name]), _why(kinds), advice)


def _of_thread(
    p: Profile, thread: str, work: Mapping[tuple[str, str], float], share: float
) -> Bottleneck:
    """Return the node that takes most of the time of a thread, or the loop over the rows."""
    between = p.between_rows(thread)
    by_node = {name: sum(_of_node(work, name).values()) for name, _ in work}
    if between > max(by_node.values(), default=0.0):
        return Bottleneck(LOOP, "outside", between / p.uptime(thread), HELD, DO_LESS)
    if not p.stages[thread]:
        why = "It runs one XLA program, whose parts cannot be measured separately."
        return Bottleneck(thread, "update", share, why, PROGRAM)
    node = max(by_node, key=by_node.__getitem__)
    kinds = by_kind(_of_node(work, node))
    kind = max(kinds, key=kinds.__getitem__)
    node_share = sum(kinds.values()) / p.uptime(thread)
    # Whatever a node that publishes weights spends its time on, sending them less often helps.
    if any(counts.get("publishes") for (name, _), counts in p.counts.items() if name == node):
        kind = "weight sync"
    sampler = next(
        (r for (n, r), c in p.counts.items() if n == node and c.get("sampled_steps")), None
    )
    advice = _advice(p, kind, sampler, remote=False)
    return Bottleneck(node or thread, kind, node_share, _why(kinds), advice)


def _of_node(work: Mapping[tuple[str, str], float], node: str) -> dict[tuple[str, str], float]:
    return {key: x for key, x in work.items() if key[0] == node}


def _of_workers(p: Profile, name: str, share: float) -> Bottleneck:
    """Return the slowest of the workers if it is a straggler, else all of them."""
    seconds = _per_rollout(p, name)
    slowest = max(seconds, key=seconds.__getitem__, default="")
    usual = median([x for worker, x in seconds.items() if worker != slowest] or [0.0])
    if usual and seconds[slowest] >= STRAGGLES * usual:
        why = (
            f"It takes {seconds[slowest] / usual:.1f} times as long per rollout as the others "
            f"({seconds[slowest]:.3f} s, {usual:.3f} s)."
        )
        # Where samples come by a queue, nobody waits for the slowest.
        advice = STRAGGLER if p.queues else f"{STRAGGLER} {WAIT_FOR_FEWER}"
        return Bottleneck(slowest, "straggler", share, why, advice)
    kinds: defaultdict[str, float] = defaultdict(float)
    for spent in p.workers(name).values():
        for kind, x in spent.items():
            # Neither waiting nor being started makes the work slow.
            if kind not in IDLE and kind != "start":
                kinds[kind] += x
    most = max(kinds, key=kinds.__getitem__, default="other")
    return Bottleneck(name, most, share, _why(kinds), _advice(p, most, name, remote=True))


def _per_rollout(p: Profile, name: str) -> dict[str, float]:
    """Return the seconds of work per rollout, by worker, of workers that have collected any."""
    rollouts = p.facts[name].get("rollouts", [])
    found = {}
    for worker, spent in p.workers(name).items():
        index = int(worker.rpartition(", ")[2])
        if index < len(rollouts) and rollouts[index]:
            working = sum(spent.values()) - idle(spent) - spent.get("start", 0.0)
            found[worker] = working / rollouts[index]
    return found


# -- reasons and advice

DOES = {
    "step": "stepping environments",
    "reset": "resetting environments",
    "inference": "choosing actions",
    "update": "updates",
    "weight sync": "publishing weights",
    "transfer": "moving data between processes",
    "concat": "concatenating batches",
    "replay": "storing and sampling transitions",
    "evaluation": "evaluation episodes",
    "other": "Python code of its own",
}
"""What each kind of work is called in a sentence."""

PROGRAM = (
    "More environments at once use the device better; --runtime local shows what each node takes."
)
HELD = (
    "The graph waits there for the code that runs it: for what that does with each row, for "
    "snapshots and policies that are saved, for a pause of the debugger."
)
DO_LESS = (
    "Do less for each row, have fewer rows (a larger every= of Report), or fewer snapshots "
    "(fl.Snapshots(every=), --no-snapshots)."
)
PARALLEL_RUNNERS = "Let runners step in parallel: --runtime ray, with more than one runner."
ONE_PROGRAM = (
    "Step more environments at once, or run the graph as one program, whose rounds cost no Python: "
    "--runtime xla."
)
STRAGGLER = "See what is different there (its machine, its episodes)."
WAIT_FOR_FEWER = (
    "Where all wait for it, sample with min_fraction below 1, or with mode='async' and a Queue "
    "after the sampler."
)
FASTER_REPLAY_UPDATES = (
    "Train less for each step (a lower updates_per_step of ReplaySample), with a smaller network, "
    "or on a GPU."
)
FASTER_UPDATES = (
    "Train less on each step (epochs), with larger minibatches or a smaller network, or on a GPU"
)
SAMPLE_MEANWHILE = "; or sample while the learner trains: impala or appo"
ADVICE = {
    "reset": "Make reset cheaper, or episodes longer.",
    "weight sync": (
        "Send weights less often (every=), to the runners that need them (to='producer'), or "
        "without waiting (wait=False)."
    ),
    "transfer": "Send fewer and larger things: longer rollouts, more environments per runner.",
    "concat": "Concatenate larger rollouts: longer ones, or more environments per runner.",
    "evaluation": "Evaluate less often, or with fewer episodes.",
}
"""By kind of work, the advice that depends on nothing else."""
OTHERWISE = "Profile its step; what it computes on arrays belongs in ctx.run, which compiles it."


def _why(kinds: Mapping[str, float]) -> str:
    """Return a sentence on which kinds of work most of these seconds went to."""
    total = max(sum(kinds.values()), 1e-9)
    first, *more = sorted(kinds, key=kinds.__getitem__, reverse=True)
    second = ""
    if more and kinds[more[0]] / total > SHARED:
        second = f", {kinds[more[0]] / total:.0%} to {DOES.get(more[0], more[0])}"
    return f"{kinds[first] / total:.0%} of that goes to {DOES.get(first, first)}{second}."


def _advice(p: Profile, kind: str, sampler: str | None, *, remote: bool) -> str:
    """Return what to change if this kind of work takes most of the time.

    Args:
        p: the profile.
        kind: the kind of work, of `flowrl.core.clock.KINDS`.
        sampler: the resource that is sampled from, whose settings are named.
        remote: whether the work is that of remote workers.
    """
    match kind:
        case "step" if remote:
            return f"Step more environments in parallel: {_more_runners(p, sampler)}."
        case "step" if sampler and "count" not in p.facts.get(sampler, {}):
            return ONE_PROGRAM
        case "step":
            return PARALLEL_RUNNERS
        case "inference":
            return f"Let one call act for more environments: {_more_environments(p, sampler)}."
        case "update":
            if p.total("replayed_steps"):
                return FASTER_REPLAY_UPDATES
            # A graph with a queue samples while the learner trains already.
            return f"{FASTER_UPDATES}{'' if p.queues else SAMPLE_MEANWHILE}."
        case "replay" if not any("shards" in facts for facts in p.facts.values()):
            return FASTER_REPLAY_UPDATES
        case "replay":
            return f"Split the replay over more processes: --runtime ray with {_more_shards(p)}."
    return ADVICE.get(kind, OTHERWISE)


def _more_runners(p: Profile, sampler: str | None) -> str:
    if sampler and "count" in p.facts.get(sampler, {}):
        return f"--set {sampler}.num_runners={p.facts[sampler]['count'] + 1}"
    return "more runners"


def _more_environments(p: Profile, sampler: str | None) -> str:
    if sampler and "envs" in p.facts.get(sampler, {}):
        return f"--set {sampler}.envs_per_runner={2 * p.facts[sampler]['envs']}"
    return "more environments"


def _more_shards(p: Profile) -> str:
    """Return the setting that gives the replay more shards; of several replays, that of each."""
    settings = [
        f"--set {name}.shards={max(2, 2 * facts['shards'])}"
        for name, facts in p.facts.items()
        if "shards" in facts
    ]
    return " or ".join(settings) or "more shards"
