"""What made a batch, and where values that are not finite came from, from a run's directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.saved_rows import no_directory, way_to_runs
from flowrl.core.texts import plural
from flowrl.errors import SaveError
from flowrl.observe.manifest import MANIFEST
from flowrl.observe.record import NEWEST, Recorded, find, listed, records
from flowrl.observe.saving import FAILURE
from flowrl.rollout.sample import seed_of

Array = np.ndarray[Any, Any]
Facts = Mapping[str, Any]
SHOWN = 5
"""How many values of a field that are not finite are listed one by one."""


def why(root: str | Path, number: int | None = None, learner: str | None = None) -> str:
    """Explain what made the batch of a recorded update; without a number, what ended the run.

    Args:
        root: the run's directory.
        number: the number of the update: 1 plus the learner's policy version before it.
        learner: whose update, if the run has several learners.

    Raises:
        SaveError: there is no such directory, the update was not recorded, or a file is damaged.
        SettingError: several learners have an update of this number.
    """
    if number is not None:
        return made_of(find(root, number, learner))
    path = Path(root) / FAILURE
    if not Path(root).is_dir():
        raise SaveError(no_directory(root))
    if not (Path(root) / "graph.txt").is_file():
        raise SaveError(
            f"{root} is no run's directory: it has no graph.txt; {way_to_runs(Path(root))}"
        )
    if not path.is_file():
        return _without_error(root)
    try:
        failure = json.loads(path.read_text(encoding="utf-8"))
        kind, text, facts = failure["error"], failure["text"], dict(failure["facts"])
    except (ValueError, KeyError, TypeError):
        raise SaveError(f"{path} is damaged: it is not the JSON that was written") from None
    lines = [f"the run ended by {kind}: {text}"]
    if kind == "NotFiniteError":
        lines += _update(root, facts, learner)
    elif "runner" in facts:
        lines += environment(facts)
    return "\n".join(lines)


# -- what ended the run


def _without_error(root: str | Path) -> str:
    """Describe a run whose directory holds no error."""
    if (Path(root) / MANIFEST).is_file():
        state = "no error ended this run"
    else:
        state = "this run goes on, or was killed: it left no error"
    hint = "; --update N shows what made the batch of an update" if records(root) else ""
    return f"{state}{hint}\n{listed(root, NEWEST)}"


def _update(root: str | Path, facts: Facts, learner: str | None) -> Iterator[str]:
    """Describe the update that was not finite, if it was recorded."""
    bad = [
        r
        for r in records(root)
        # One that was not finite before the run was resumed is another one.
        if "not finite" in r.header["why"]
        and learner in (None, r.learner)
        and facts.get("update") in (None, r.number)
    ]
    if not bad:
        yield (
            f"what update {facts.get('update', '')} was made of is not known: it was not recorded. "
            "Run it again with --record, then ask why again"
        )
        return
    yield ""
    yield made_of(find(root, bad[0].number, bad[0].learner))


def environment(facts: Facts) -> Iterator[str]:
    """Describe which environment failed, when, and how to reproduce the failure.

    Args:
        facts: of the error, by name, as ``failure.json`` holds them.
    """
    runner, resource = facts["runner"], facts.get("resource", "the runners")
    if "env" not in facts:
        seed = facts.get("runner_seed", "of the run")
        yield f"it was in runner {runner} of {resource}; its seed {seed} leads there again"
        return
    which = f"one of runner {runner}"
    if "within" in facts:
        which = f"number {facts['within']} of runner {runner}"
    when = _when(facts)
    if facts.get("restart_count"):
        times = facts["restart_count"]
        when += f" (the runner had been restarted {times} {plural(times, 'time')})"
    yield f"environment {facts['env']} of {resource}, {which}, {_failed(facts)} {when}"
    if "seed" in facts:
        what = facts.get("what", "it")
        yield (
            f"to see it again: make {what}, call reset(seed={facts['seed']}), and step it "
            f"{facts['step']:,} times, with resets without a seed where episodes end; "
            "or step through a run of the same seed by `flowrl debug GRAPH --seed N`"
        )


def _failed(facts: Facts) -> str:
    """Return what the environment did, as far as it is known."""
    if "field" in facts:
        return f"gave {facts['field']} {facts['value']}"
    return "failed" if "within" in facts else "gave what is not finite"


def _when(facts: Facts) -> str:
    """Return the step of the environment, counted since it was made."""
    if "episode_step" in facts:
        in_episode, step = facts["episode_step"], facts["step"]
        if not in_episode:
            return f"in a reset, after its step {step:,} since it was made"
        return f"at its step {step:,} since it was made, {in_episode:,} of its episode"
    if "step" in facts:
        return f"at its step {facts['step']:,} since it was made"
    return f"at its step {facts['row'] + 1:,} since it was made, with its resets"


# -- what made the batch of a recorded update


class Origin:
    """The runners, environments and steps that the columns of a batch come from.

    Args:
        record: of the update.
    """

    def __init__(self, record: Recorded) -> None:
        columns = record.part("columns")
        about = record.header["runners"]
        self.runners: dict[str, Any] = about or {}
        # Records of earlier versions are of single agents.
        self.agents: list[str] = self.runners.get("agents", [])
        """The agents of each environment that are columns; empty where there is but one."""
        of_env = max(len(self.agents), 1)
        self.runner = columns.get("producer")
        """The runner of each column ``[N]``; None if it is not known."""
        self.column = columns.get("env")
        """The number of each column ``[N]``, counted over all runners; None if not known."""
        self.first = columns.get("first")
        """The steps that the environment of each column ``[N]`` had done before; None if not
        known."""
        # A ring numbers its slots row by row over all environments, so that a slot leads back to
        # its environment.
        one_shard = (columns.get("shard", np.zeros(1)) == 0).all()
        if self.column is None and "slot" in columns and about and one_shard:
            self.column = columns["slot"] % (about["count"] * about["envs"] * of_env)
        self.env = None if self.column is None else self.column // of_env
        """The environment of each column ``[N]``, counted over all runners; None if not known."""
        if self.runner is None and self.env is not None and about:
            self.runner = self.env // about["envs"]

    def of(self, row: int, column: int) -> str:
        """Return where an element of the batch comes from, in words.

        Args:
            row: the index of its time step in the batch, from 0.
            column: the index of its sequence in the batch, from 0.
        """
        parts = []
        if self.runner is not None:
            parts.append(f"runner {self.runner[column]}")
        if self.env is not None:
            parts.append(f"environment {self.env[column]}")
        if self.agents and self.column is not None:
            parts.append(self.agents[self.column[column] % len(self.agents)])
        if self.first is not None:
            parts.append(f"step {self.first[column] + row + 1:,}")
        return ", ".join([*parts, f"row {row}, column {column}"])


def made_of(record: Recorded) -> str:
    """Return what made the batch of an update, and which of its values are not finite, or large.

    Args:
        record: of the update.
    """
    data, columns, origin = record.part("data"), record.part("columns"), Origin(record)
    rows, width = next(iter(data.values())).shape[:2]
    settings = record.header["settings"]
    reasons = ", ".join(record.header["why"])
    versions = f"policy version{_span(columns['version'])}"
    minibatches = f"{settings['epochs']} x minibatches of {settings['minibatch_size']:,}"
    trained = f"trained at policy version {record.number - 1:,}, {minibatches}"
    lines = [
        f"update {record.number} of {record.learner}, recorded because: {reasons}",
        f"loss {record.metrics['loss']:.6g}; batch [{rows}, {width}] of {versions}, {trained}",
        "",
    ]
    if origin.first is not None and origin.runner is not None and origin.env is not None:
        lines += _table(record, origin, data, columns)
    elif "slot" in columns:
        lines += _from_replay(origin, columns)
    else:
        lines.append(
            "sampled from a replay, or made by an operator: its columns do not name runners and "
            "environments, only policy versions"
        )
    values = [*_not_finite(record, origin, data), *_largest(origin, data)]
    return "\n".join([*lines, "", *values]).rstrip()


def _from_replay(origin: Origin, columns: Mapping[str, Array]) -> Iterator[str]:
    """Describe a batch of which only the slots of a replay are known."""
    shards = f" of shard{_span(columns['shard'])}" if "shard" in columns else ""
    slots, rollouts = _span(columns["slot"]), _span(columns["stamp"])
    yield f"sampled from a replay: slot{slots}{shards}, which came with its rollout{rollouts}"
    known = "several shards have environments of their own"
    if origin.env is not None:
        known = "runner and environment follow from the slot"
    yield f"steps of environments are not kept there; {known}"


def _span(x: Array) -> str:
    """Return a number after a noun, or the plural's s and the range of several numbers."""
    low, high = int(x.min()), int(x.max())
    return f" {low:,}" if low == high else f"s {low:,} to {high:,}"


# -- the table of runners

HEADER = ("runner", "environments", "policy versions", "policy lag", "steps", "seed")
WIDTHS = (6, 14, 15, 10, 19, 21)


def _table(
    record: Recorded, origin: Origin, data: Mapping[str, Array], columns: Mapping[str, Array]
) -> Iterator[str]:
    """Yield a line per runner, and what the steps and seeds in it mean.

    A line holds environments, policy versions, policy lag, steps, seed, and the episodes that
    ended in the batch.
    """
    assert origin.runner is not None  # noqa: S101 - made_of checked
    yield _line(HEADER, "episodes that ended")
    restarted = []
    for runner in np.unique(origin.runner).tolist():
        seed, times = _seed(record, runner)
        if times:
            restarted.append(f"{runner} ({times} {plural(times, 'time')})")
        yield _of_runner(record, origin, data, columns, runner, seed)
    if origin.agents:
        yield f"columns are the agents of each environment: {', '.join(origin.agents)}"
        yield "steps are an agent's rows since its environment was made, from 1, with masked ones"
    else:
        yield "steps are an environment's rows since it was made, from 1, with those of its resets"
    if record.header["runners"] and record.header["runners"]["jax"]:
        seed = record.header["seed"]
        yield f"environments in JAX take random keys, which all come from the run's seed {seed}"
    else:
        yield (
            "a seed + i is what the reset of environment i of a runner's vector is given, counted "
            "from 0 in each runner"
        )
    if restarted:
        yield (
            f"restarted by then: runner {', '.join(restarted)}; the seed is that of the last "
            "start, and steps count from it"
        )


def _of_runner(
    record: Recorded,
    origin: Origin,
    data: Mapping[str, Array],
    columns: Mapping[str, Array],
    runner: int,
    seed: str,
) -> str:
    """Return the line of one runner."""
    assert origin.env is not None  # noqa: S101 - made_of checked
    assert origin.first is not None  # noqa: S101 - made_of checked
    length = next(iter(data.values())).shape[0]
    at = np.flatnonzero(origin.runner == runner)
    version, first = columns["version"][at], origin.first[at]
    steps = f"{first.min() + 1:,} to {first.max() + length:,}"
    wanted = ("reward", "terminated", "truncated", "valid")
    ended = _episodes({k: data[k][:, at] for k in wanted if k in data})
    lag = _range(record.number - 1 - version)
    cells = (str(runner), _range(origin.env[at]), _range(version), lag, steps, seed)
    return _line(cells, ended)


def _line(cells: tuple[str, ...], last: str) -> str:
    aligned = [f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)]
    return "  ".join([*aligned, last])


def _range(x: Array) -> str:
    low, high = int(x.min()), int(x.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _seed(record: Recorded, runner: int) -> tuple[str, int]:
    """Return the seed of a runner's environments, and how often it had been restarted by then."""
    about, seed = record.header["runners"], record.header["seed"]
    if about is None or seed is None or about["jax"]:
        return "-", 0
    times = about["restarts"].get(str(runner), 0)
    return str(seed_of(seed, about["name"], runner, times)), times


def _episodes(data: Mapping[str, Array]) -> str:
    """Describe the episodes that ended: their number, lengths, and sums of rewards in the batch."""
    if not {"terminated", "truncated", "reward", "valid"} <= data.keys():
        return "-"
    over, valid = data["terminated"] | data["truncated"], data["valid"]
    lengths, returns = [], []
    for column in range(over.shape[1]):
        begin = 0
        for t in np.flatnonzero(over[:, column]).tolist():
            lengths.append(int(valid[begin : t + 1, column].sum()))
            returns.append(float(data["reward"][begin : t + 1, column].sum()))
            begin = t + 1
    if not lengths:
        return "none"
    rewards = f"{min(returns):.4g} to {max(returns):.4g}"
    return f"{len(lengths)}, here {_range(np.array(lengths))} long, rewards {rewards}"


# -- values


def _floats(data: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of floating-point numbers, in double precision."""
    return {
        k: np.asarray(x, np.float64)
        for k, x in data.items()
        if np.issubdtype(x.dtype, np.inexact) or x.dtype.name == "bfloat16"
    }


def _not_finite(record: Recorded, origin: Origin, data: Mapping[str, Array]) -> Iterator[str]:
    """Yield where values are not finite, field by field, in the order in which they arose."""
    found = [line for name, x in _floats(data).items() for line in _bad_places(name, x, origin)]
    found += _bad_arrays("the learner before it", record.part("state"))
    found += _bad_arrays("columns", record.part("columns"))
    if found:
        yield from [*found, ""]
    elif "not finite" in record.header["why"]:
        # The cause is then the update, which can be run again with other settings.
        again = f"flowrl rerun {record.path.parent.parent} --update {record.number}"
        yield (
            "all of the batch and of the learner before it is finite: the update itself made what "
            "is not, as a division, a logarithm or a rate that"
        )
        yield f"is too high may. Look at it: {again} --set {record.learner}.optimizer.lr=1e-5"
        yield ""


def _bad_places(name: str, x: Array, origin: Origin) -> Iterator[str]:
    """Yield the places ``[row, column, ...]`` of a field that are not finite, the first ones."""
    places = np.argwhere(~np.isfinite(x))
    if not len(places):
        return
    start = origin.first if origin.first is not None else np.zeros(x.shape[1], int)
    # Columns may begin at different steps of their environments: sort by step, then by column.
    step = start[places[:, 1]] + places[:, 0]
    places = places[np.lexsort((places[:, 1], step))]
    first_ones = ", the first ones" if len(places) > SHOWN else ""
    count = f"{len(places):,} {plural(len(places), 'place')}"
    yield f"{name} is not finite in {count}{first_ones}:"
    for row, column, *rest in places[:SHOWN].tolist():
        within = f", at {rest}" if rest else ""
        yield f"  {x[row, column, *rest]} of {origin.of(row, column)}{within}"


def _bad_arrays(owner: str, arrays: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the arrays that hold values that are not finite, the first ones."""
    floats = _floats({k: x for k, x in arrays.items() if isinstance(x, np.ndarray)})
    bad = [name for name, x in floats.items() if not np.isfinite(x).all()]
    if bad:
        yield f"{owner}: not finite: {', '.join(bad[:SHOWN])}"


def _largest(origin: Origin, data: Mapping[str, Array]) -> Iterator[str]:
    """Yield the largest finite value of each field that has one number per step.

    Beside it stands its distance from the mean, in standard deviations.
    """
    fields = {k: x for k, x in _floats(data).items() if x.ndim == 2}
    if not fields:
        return
    yield f"{'largest by size':<16}{'value':>14}  {'deviations':>10}  of"
    for name, x in fields.items():
        good = np.isfinite(x)
        # Masked rows hold values that no loss uses.
        if "valid" in data:
            good &= data["valid"].astype(bool)
        if not good.any():
            continue
        sizes = np.where(good, np.abs(x), -1.0)
        row, column = np.unravel_index(int(np.argmax(sizes)), x.shape)
        value = x[row, column]
        distance = abs(value - x[good].mean()) / max(float(x[good].std()), 1e-12)
        place = origin.of(int(row), int(column))
        yield f"{name:<16}{value:>14.6g}  {distance:>10.1f}  {place}"
