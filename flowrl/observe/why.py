"""What made a batch, and where what is not finite came from: in words, from a run's directory alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.errors import SaveError
from flowrl.observe.record import NEWEST, Recorded, find, listed, records
from flowrl.observe.saving import FAILURE, MANIFEST
from flowrl.rollout.sample import seed_of

Array = np.ndarray[Any, Any]
Facts = Mapping[str, Any]
TOLD = 5
"""How many numbers of a field that are not finite are told one by one."""


def why(root: str | Path, number: int | None = None, learner: str | None = None) -> str:
    """What made the batch of a recorded update; without a number, what ended the run.

    Args:
        root: the run's directory.
        number: the update's: the learner's version before it, and 1.
        learner: whose, if the run has several.

    Raises:
        SaveError: there is no such directory, the update was not recorded, or a file is damaged.
        SettingError: several learners have an update of this number.
    """
    if number is not None:
        return made_of(find(root, number, learner))
    path = Path(root) / FAILURE
    if not Path(root).is_dir():
        raise SaveError(f"there is no directory {root}")
    if not (Path(root) / "graph.txt").is_file():
        raise SaveError(f"{root} is no run's directory: it has no graph.txt")
    if not path.is_file():
        over = (
            "no error ended this run"
            if (Path(root) / MANIFEST).is_file()
            else "this run goes on, or was killed: it left no error"
        )
        more = "; --update N tells what made the batch of an update" if records(root) else ""
        return f"{over}{more}\n{listed(root, NEWEST)}"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        kind, text, facts = told["error"], told["text"], dict(told["facts"])
    except (ValueError, KeyError, TypeError):
        raise SaveError(f"{path} is damaged: it is not the JSON that was written") from None
    lines = [f"the run ended by {kind}: {text}"]
    if kind == "NotFinite":
        lines += _update(root, facts, learner)
    elif "runner" in facts:
        lines += environment(facts)
    return "\n".join(lines)


def _update(root: str | Path, facts: Facts, learner: str | None) -> Iterator[str]:
    """Of an update that was not finite."""
    bad = [
        r for r in records(root) if "not finite" in r.header["why"] and learner in (None, r.learner)
    ]
    if not bad:
        yield f"what update {facts.get('update', '')} was made of is not known: it was not recorded. Run it again with --record, then ask why again"
        return
    yield ""
    yield made_of(find(root, bad[0].number, bad[0].learner))


def environment(facts: Facts) -> Iterator[str]:
    """Of an environment that failed: which one, when, and how to see it again."""
    runner, resource = facts["runner"], facts.get("resource", "the runners")
    if "env" not in facts:
        yield f"it was in runner {runner} of {resource}, which its seed {facts.get('runner_seed', 'of the run')} leads to again"
        return
    which = (
        f"number {facts['within']} of runner {runner}"
        if "within" in facts
        else f"one of runner {runner}"
    )
    what = (
        f"gave {facts['field']} {facts['value']}"
        if "field" in facts
        else "failed"
        if "within" in facts
        else "gave what is not finite"
    )
    if "episode_step" in facts:
        now, step = facts["episode_step"], facts["step"]
        when = (
            f"at its step {step:,} since it was made, {now:,} of its episode"
            if now
            else f"in a reset, after its step {step:,} since it was made"
        )
    elif "step" in facts:
        when = f"at its step {facts['step']:,} since it was made"
    else:
        when = f"at its step {facts['row'] + 1:,} since it was made, with its resets"
    if facts.get("incarnation"):
        when += f" (the runner had been started anew {facts['incarnation']} times)"
    yield f"environment {facts['env']} of {resource}, {which}, {what} {when}"
    if "seed" in facts:
        yield (
            f"to see it again: make {facts.get('what', 'it')}, call reset(seed={facts['seed']}), and step it {facts['step']:,} times, with resets "
            "without a seed where episodes end; or step through a run of the same seed by `flowrl debug GRAPH --seed N`"
        )


# -- of a recorded update


class Origin:
    """Where the columns of a batch come from."""

    def __init__(self, record: Recorded) -> None:
        columns = record.part("columns")
        about = record.header["runners"]
        self.runners: dict[str, Any] = about or {}
        self.runner, self.env, self.first = (
            columns.get(name) for name in ("producer", "env", "first")
        )
        if (
            self.env is None
            and "slot" in columns
            and about
            and (columns.get("shard", np.zeros(1)) == 0).all()
        ):
            self.env = columns["slot"] % (
                about["count"] * about["envs"]
            )  # as a ring numbers its slots
        if self.runner is None and self.env is not None and about:
            self.runner = self.env // about["envs"]

    def of(self, row: int, column: int) -> str:
        """A row of the batch in words."""
        parts = []
        if self.runner is not None:
            parts.append(f"runner {self.runner[column]}")
        if self.env is not None:
            parts.append(f"environment {self.env[column]}")
        if self.first is not None:
            parts.append(f"step {self.first[column] + row + 1:,}")
        return ", ".join([*parts, f"row {row}, column {column}"])


def made_of(record: Recorded) -> str:
    """What made the batch of an update, and what in it is not finite, or large."""
    data, columns, origin = record.part("data"), record.part("columns"), Origin(record)
    rows, width = next(iter(data.values())).shape[:2]
    settings = record.header["settings"]
    head = f"update {record.number} of {record.learner}, recorded because: {', '.join(record.header['why'])}"
    how = f"trained at version {record.number - 1:,}, {settings['epochs']} x minibatches of {settings['minibatch_size']:,}"
    lines = [
        head,
        f"loss {record.metrics['loss']:.6g}; batch [{rows}, {width}] of version{_span(columns['version'])}, {how}",
        "",
    ]
    if origin.first is not None and origin.runner is not None and origin.env is not None:
        lines += _table(record, origin, data, columns)
    elif "slot" in columns:
        shards = f" of shard{_span(columns['shard'])}" if "shard" in columns else ""
        known = (
            "runner and environment follow from the slot"
            if origin.env is not None
            else "several shards have environments of their own"
        )
        lines.append(
            f"drawn from a replay: slot{_span(columns['slot'])}{shards}, which came with its fragment{_span(columns['stamp'])}"
        )
        lines.append(f"steps of environments are not kept there; {known}")
    else:
        lines.append(
            "drawn from a replay, or made anew: its columns do not tell runners and environments, only versions"
        )
    return "\n".join(
        [*lines, "", *_not_finite(record, origin, data), *_largest(origin, data)]
    ).rstrip()


def _span(x: Array) -> str:
    low, high = int(x.min()), int(x.max())
    return f" {low:,}" if low == high else f"s {low:,} to {high:,}"


def _table(
    record: Recorded, origin: Origin, data: Mapping[str, Array], columns: Mapping[str, Array]
) -> Iterator[str]:
    """By runner: environments, versions, lag, steps, the episodes that ended, the seed."""
    assert origin.runner is not None and origin.env is not None and origin.first is not None  # noqa: S101, PT018 - the caller looked
    length = next(iter(data.values())).shape[0]
    yield f"{'runner':>6}  {'environments':>14}  {'versions':>13}  {'lag':>7}  {'steps':>19}  {'seed':>21}  episodes that ended"
    anew = []
    for runner in np.unique(origin.runner).tolist():
        at = np.flatnonzero(origin.runner == runner)
        version, first = columns["version"][at], origin.first[at]
        steps = f"{first.min() + 1:,} to {first.max() + length:,}"
        seed, times = _seed(record, runner)
        anew += [f"{runner} ({times} times)"] if times else []
        ended = _episodes(
            {k: data[k][:, at] for k in ("reward", "terminated", "truncated", "valid") if k in data}
        )
        lag = _range(record.number - 1 - version)
        yield f"{runner:>6}  {_range(origin.env[at]):>14}  {_range(version):>13}  {lag:>7}  {steps:>19}  {seed:>21}  {ended}"
    yield "steps are an environment's rows since it was made, from 1, with those of its resets"
    if record.header["runners"] and record.header["runners"]["jax"]:
        yield f"environments in JAX take random keys, which all come from the run's seed {record.header['seed']}"
    else:
        yield "a seed + i is what Gymnasium's reset gives environment i of a runner's vector, counted from 0 in each runner"
    if anew:
        yield f"started anew by then: runner {', '.join(anew)}; the seed is that of the last start, and steps count from it"


def _range(x: Array) -> str:
    low, high = int(x.min()), int(x.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _seed(record: Recorded, runner: int) -> tuple[str, int]:
    """Of a runner's environments, and how often it was started anew by then."""
    about, seed = record.header["runners"], record.header["seed"]
    if about is None or seed is None or about["jax"]:
        return "-", 0
    times = about["restarts"].get(str(runner), 0)
    return str(seed_of(seed, about["name"], runner, times)), times


def _episodes(data: Mapping[str, Array]) -> str:
    """Those that ended: how many, their lengths, and the sums of their rewards in the batch."""
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
    return f"{len(lengths)}, here {_range(np.array(lengths))} long, rewards {min(returns):.4g} to {max(returns):.4g}"


def _floats(data: Mapping[str, Array]) -> dict[str, Array]:
    return {
        k: np.asarray(x, np.float64)
        for k, x in data.items()
        if np.issubdtype(x.dtype, np.inexact) or x.dtype.name == "bfloat16"
    }


def _not_finite(record: Recorded, origin: Origin, data: Mapping[str, Array]) -> Iterator[str]:
    """Where it stands, field by field, in the order in which they came to be."""
    found = False
    for name, x in _floats(data).items():
        bad = np.argwhere(~np.isfinite(x))
        if not len(bad):
            continue
        found = True
        start = origin.first if origin.first is not None else np.zeros(x.shape[1], int)
        bad = bad[np.lexsort((bad[:, 1], start[bad[:, 1]] + bad[:, 0]))]
        where = [
            f"  {x[*place]} of {origin.of(*place[:2])}{f', at {place[2:]}' if place[2:] else ''}"
            for place in bad[:TOLD].tolist()
        ]
        yield f"{name} is not finite in {len(bad):,} place{'s' * (len(bad) > 1)}{', the first ones' * (len(bad) > TOLD)}:"
        yield from where
    for name, state in (("state", record.part("state")), ("columns", record.part("columns"))):
        broken = [
            k
            for k, x in _floats(
                {k: v for k, v in state.items() if isinstance(v, np.ndarray)}
            ).items()
            if not np.isfinite(x).all()
        ]
        if broken:
            found = True
            yield f"{'the learner before it' if name == 'state' else 'columns'}: not finite: {', '.join(broken[:TOLD])}"
    if found:
        yield ""
    elif "not finite" in record.header["why"]:
        yield "all of the batch and of the learner before it is finite: the update itself made what is not, as a division, a logarithm or a rate that"
        again = f"flowrl replay {record.path.parent.parent} --update {record.number}"
        yield f"is too high may. Look at it: {again} --set {record.learner}.optimizer.lr=1e-5"
        yield ""


def _largest(origin: Origin, data: Mapping[str, Array]) -> Iterator[str]:
    """By field with one number to a step: the largest finite one, and how far from the mean it is."""
    fields = {k: x for k, x in _floats(data).items() if x.ndim == 2}
    if not fields:
        return
    yield f"{'largest by size':<16}{'value':>14}  {'deviations':>10}  of"
    for name, x in fields.items():
        good = np.isfinite(x)
        if "valid" in data:
            good &= data["valid"].astype(bool)
        if not good.any():
            continue
        row, column = np.unravel_index(int(np.argmax(np.where(good, np.abs(x), -1.0))), x.shape)
        off = abs(x[row, column] - x[good].mean()) / max(float(x[good].std()), 1e-12)
        yield f"{name:<16}{x[row, column]:>14.6g}  {off:>10.1f}  {origin.of(int(row), int(column))}"
