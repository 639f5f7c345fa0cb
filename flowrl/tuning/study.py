"""`fl.tune`: search for the settings with which a graph reaches the best result."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

from flowrl.algos.config import Config
from flowrl.algos.effects import check_order, covers, differing
from flowrl.algos.named import Source, build, environment, find, fitted, imported, source_of
from flowrl.algos.tuned import tuned as tuned_settings
from flowrl.core.importing import forbid_while_importing
from flowrl.core.logs import log
from flowrl.envs.gym_envs import Make
from flowrl.errors import FlowrlError, RunError, SettingError, a, unknown
from flowrl.graph.graph import Graph
from flowrl.graph.values import PLAIN, to_text
from flowrl.observe.about import runtime_settings
from flowrl.observe.sinks import columns
from flowrl.run_arguments import as_runtime, check_seed, check_steps
from flowrl.runtime import NAMES
from flowrl.runtime.base import Runtime, check_positive
from flowrl.tuning import results
from flowrl.tuning.journal import (
    Journal,
    Options,
    Trial,
    make_directory,
    read_options,
    write_options,
)
from flowrl.tuning.progress import Progress, best
from flowrl.tuning.spaces import Point, Space, Uniform
from flowrl.tuning.trial import Job
from flowrl.tuning.trials import Trials

BEST = "best.yaml"
"""The file of the best settings in a study's directory."""


class Study:
    """The trials of a study, and the best of them."""

    def __init__(self, path: Path, job: Job, options: Options, trials: Sequence[Trial]) -> None:
        self.path = path
        """Its directory."""
        self.options = options
        self.trials = tuple(trials)
        """By number: every trial."""
        self._job = job

    @property
    def best(self) -> Trial:
        """The trial with the best metric; one that was stopped early only if none took all steps.

        Raises:
            RunError: every trial failed; the message has the error of the first.
        """
        found = best(self.trials, self.options.mode)
        if found is None:
            error = next((trial.error for trial in self.trials if trial.error), "there is none")
            raise RunError(f"{self.path}: no trial ended well; the first failed with: {error}")
        return found

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the best trial that were searched for, as the graph takes them.

        Raises:
            RunError: every trial failed.
        """
        return {n: self._job.search[n].value(p) for n, p in self.best.settings.items()}

    def config(self) -> Config:
        """Return the best settings as a config that runs that trial again.

        A runtime with settings of its own, such as ``XlaRuntime(chunk=9)``, is no part of a config:
        it is given again.

        Raises:
            RunError: every trial failed.
            GraphError: the graph or its environment has no name that leads back to it.
        """
        o = self.options
        changes = {**self._job.settings, **self.settings}
        made = Config.of(o.graph, env=o.env, changes=changes, tuned=o.tuned, imports=o.imports)
        runtime = o.runtime if o.runtime in NAMES else None
        return replace(made, runtime=runtime, seed=o.seed, steps=o.steps)

    def __str__(self) -> str:
        return results.table(self.trials, self.options)

    def picture(self, path: str | Path) -> None:
        """Draw the metric of every trial over its settings.

        Args:
            path: path of the file, such as ``results.svg`` or ``results.png``.

        Raises:
            SaveError: matplotlib is not installed.
        """
        results.picture(path, self.trials, self.options)


def tune(
    graph: str | Callable[..., Graph],
    *,
    search: Mapping[str, Space],
    steps: int,
    out: str | Path,
    env: Make | None = None,
    settings: Mapping[str, Any] | None = None,
    trials: int = 16,
    metric: str = "return_mean",
    mode: str = "max",
    seed: int = 0,
    runtime: str | Runtime = "local",
    parallel: int | None = None,
    grace_steps: int | None = None,
    reduction: int = 3,
    tuned: bool = False,
    imports: Sequence[str] = (),
    address: str | None = None,
    progress: bool = True,
) -> Study:
    """Search for the settings with which a graph reaches the best result, and return the study.

    Optuna suggests the settings of each trial from those before it. Trials are processes of Ray;
    Ray Tune stops those early that do worse than others did after as many steps (ASHA, Li et al.
    2020). If the process ends, however it ends, the same call goes on: no trial is lost or run
    twice.

    Args:
        graph: function that returns a graph, such as `fl.ppo`, or its name as ``flowrl run`` takes
            it.
        search: by name of a setting of that function, or of a field such as ``train.epochs``: its
            space.
        steps: environment steps of a trial that is not stopped early.
        out: directory of the study. One that has this study already goes on, or gets more trials.
        env: the environment; None: that of the function (default None).
        settings: by name, settings and fields that are the same in all trials (default none).
        trials: how many (default 16).
        metric: the column of a row that is compared (default ``return_mean``).
        mode: ``max``: more of it is better, or ``min`` (default ``max``).
        seed: seed of the search, and of every trial (default 0).
        runtime: ``local`` (default), ``xla``, ``ray``, or a value, in which each trial runs.
        parallel: how many trials at once; None: one per core (default None).
        grace_steps: environment steps before which no trial is stopped; None: `steps` divided by
            `reduction` twice (default None).
        reduction: one in so many trials goes on after `grace_steps`, and again after every
            `reduction` times as many steps (default 3).
        tuned: whether the tuned settings for the environment come before `settings` (default
            False).
        imports: modules by name, or files by path, that every process imports first (default none).
        address: address of a running Ray to join; None: the environment variable ``RAY_ADDRESS``,
            or a Ray on this machine (default None). All its nodes must share the directory `out`.
        progress: whether a line on each trial that ends is written to standard error (default
            True).

    Raises:
        SettingError: an argument can't be taken, a setting is unknown or would have no effect, or
            `out` has another study.
        SaveError: `out` holds something else, is damaged, or another process is at work on it.
        RunError: Ray can't start or can't be joined, or a full disk ended trials, which start again
            when the study is called again.

    >>> import flowrl as fl
    >>> study = fl.tune(
    ...     fl.ppo,
    ...     env="CartPole-v1",
    ...     search={"lr": fl.LogUniform(1e-5, 1e-2)},
    ...     steps=100_000,
    ...     out="runs/study",
    ... )  # doctest: +SKIP
    >>> study.best.settings  # doctest: +SKIP
    {'lr': 0.0017}
    """
    forbid_while_importing()
    path = Path(out)
    fixed = dict(settings or {})
    options = Options(
        graph=graph if isinstance(graph, str) else _reference("graph", graph),
        env=env if isinstance(env, str) or env is None else _reference("env", env),
        settings={name: to_text(x, defaults=False, width=math.inf) for name, x in fixed.items()},
        search={name: str(space) for name, space in search.items()},
        trials=trials,
        steps=steps,
        metric=metric,
        mode=mode,
        seed=seed,
        runtime=_runtime_text(runtime),
        grace_steps=_grace(steps, grace_steps, reduction),
        reduction=reduction,
        tuned=tuned,
        imports=list(imports),
    )
    _check(options, search)
    check_positive("parallel", parallel)
    job = _job(graph, env, fixed, search, options, runtime, path)
    _check_graph(job)
    if read_options(path) is None:
        make_directory(path)
    with Journal(path) as journal:
        # Another process may have made the study in the meantime: only now it is ours.
        saved = read_options(path)
        if saved is not None:
            options.check_same(saved, path)
        write_options(path, options)
        with Progress(options, journal, shown=progress) as shown:
            work = Trials(journal, options, search, shown)
            if work.left:
                _run(work, job, parallel, address)
        study = Study(path, job, options, journal.trials)
        results.write(study.trials, options, path)
        _write_best(study)
    return study


def _write_best(study: Study) -> None:
    """Write the config of the best trial, if there is one and its graph has a name."""
    file = study.path / BEST
    file.unlink(missing_ok=True)
    if best(study.trials, study.options.mode) is None:
        return
    try:
        study.config().save(file)
    except FlowrlError as error:
        log(f"there is no {file}: {error}")


def _run(work: Trials, job: Job, parallel: int | None, address: str | None) -> None:
    """Run the trials that are left."""
    from flowrl.tuning.program import numbers_of_program, run_program

    paths = numbers_of_program(job)
    if paths is not None and run_program(work, job, paths, parallel):
        return
    from flowrl.tuning.on_ray import run_trials

    run_trials(work, job, parallel, address)


# -- checks ----------------------------------------------------------------------------------------


def _grace(steps: int, grace_steps: int | None, reduction: int) -> int:
    """Return the steps before which no trial is stopped."""
    check_positive("steps", steps)
    if isinstance(reduction, bool) or not isinstance(reduction, int) or reduction < 2:
        raise SettingError(f"reduction must be a whole number of at least 2, got {reduction!r}")
    if grace_steps is None:
        return max(1, steps // reduction**2)
    check_positive("grace_steps", grace_steps)
    if grace_steps > steps:
        raise SettingError(f"grace_steps must be at most steps, {steps:,}; got {grace_steps:,}")
    return grace_steps


def _check(options: Options, search: Any) -> None:
    """Refuse options that can't be taken."""
    check_positive("trials", options.trials)
    if not search:
        raise SettingError("search names no setting; give one, such as lr=loguniform(1e-5, 1e-2)")
    for name, space in search.items():
        if not isinstance(space, Space):
            raise SettingError(
                f"search: {name} takes a space such as fl.LogUniform(1e-5, 1e-2), got {space!r}"
            )
        if name in options.settings:
            raise SettingError(f"{name} is searched, so it can't be set as well; leave out one")
    sizes = [space.options_in_order() for space in search.values()]
    if None not in sizes and (most := math.prod(map(len, sizes))) < options.trials:
        raise SettingError(
            f"there are only {most} combinations of what is searched, so {options.trials} trials "
            f"would repeat some; take trials={most} (--trials {most})"
        )
    if options.mode not in ("max", "min"):
        raise SettingError(f"mode must be 'max' or 'min', got {options.mode!r}")
    check_seed(options.seed)


def _check_graph(job: Job) -> None:
    """Refuse settings that the graph does not take, and a metric that its rows do not have.

    Every example of a space is tried: what one trial in ten fails with is found at once.
    """
    first = {name: space.examples()[0] for name, space in job.search.items()}
    for name, space in job.search.items():
        trials = [{**first, name: point} for point in space.examples()]
        try:
            graphs = [job.graph(points) for points in trials]
        except SettingError as error:
            raise SettingError(_refused(name, space, error)) from error
        for points in trials:
            _check_order(job, points)
        if all(graph == graphs[0] for graph in graphs):
            _check_effect(job, name, trials)
    plan = job.graph(first).compile()
    check_steps(plan, job.options.steps)
    known = columns(plan)
    if job.options.metric not in known:
        raise SettingError(f"metric: {unknown('column', job.options.metric, known)}")


def _alone(job: Job, settings: Mapping[str, Any]) -> Graph:
    """Return the graph with settings of its function, of which no field is set."""
    return build(job.source, job.env, {}, list(settings.items()))


def _check_order(job: Job, points: Mapping[str, Point]) -> None:
    """Refuse a field that takes the effect of a setting after it; what is searched is the last."""
    pairs = [(name, _fitted(job, name, value)) for name, value in job.changes(points).items()]
    stands = {name: name for name, _ in pairs if "." in name}
    check_order(partial(_alone, job), job.source.settings, job.tuned, pairs, stands)


def _fitted(job: Job, name: str, value: Any) -> Any:
    """Return the value of a setting as its function takes it, that of a field as it is."""
    return value if "." in name else fitted(job.source, name, value)


def _of_function(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the graph's function among settings and fields."""
    return {name: value for name, value in changes.items() if "." not in name}


def _check_effect(job: Job, name: str, trials: Sequence[Mapping[str, Point]]) -> None:
    """Refuse to search a setting that changes nothing, whatever the others are.

    Args:
        job: what all trials have in common.
        name: of the setting.
        trials: points that differ in this setting alone, all of which have the same graph.
    """
    # A setting of a user's function may count only where another one has a certain value.
    others = [(k, p) for k, space in job.search.items() if k != name for p in space.examples()]
    for other, point in others:
        graphs = [job.graph({**points, other: point}) for points in trials]
        if any(graph != graphs[0] for graph in graphs):
            return
    changes = [job.changes(points) for points in trials]
    settings = [{**job.tuned, **_of_function(each)} for each in changes]
    reached = differing(partial(_alone, job), settings)
    hiding = [field for field in changes[0] if "." in field and covers(field, reached)]
    if hiding:
        problem = f"{', '.join(hiding)}, set after it, takes its effect; leave out one of them"
    else:
        problem = "the graph is the same with all its values; search another one"
    raise SettingError(f"search: {name} would change nothing: {problem}")


def _refused(name: str, space: Space, error: SettingError) -> str:
    """Return what is wrong with a space of which the graph does not take every value."""
    text = f"search ({name}={space}): {error}"
    if isinstance(space, Uniform) and PLAIN[int] in error.facts.get("wanted", "").split(" or "):
        text += f"; randint({math.ceil(space.low)}, {math.floor(space.high)}) gives whole numbers"
    return text


# -- names -----------------------------------------------------------------------------------------


def _job(
    graph: Any,
    env: Make | None,
    settings: Mapping[str, Any],
    search: Mapping[str, Space],
    options: Options,
    runtime: str | Runtime,
    path: Path,
) -> Job:
    """Return what all trials have in common."""
    allow = imported(options.imports)
    source: Source = find(graph, allow) if isinstance(graph, str) else source_of(graph)
    env_text = options.env or source.env
    best_known = tuned_settings(options.graph, env_text) if options.tuned and env_text else {}
    as_runtime(runtime)  # this raises for an unknown one
    return Job(
        options=options,
        source=source,
        env=environment(env) if isinstance(env, str) else env,
        tuned=best_known,
        settings=dict(settings),
        search=dict(search),
        runtime=runtime,
        folder=str(path.resolve()),
    )


def _runtime_text(runtime: str | Runtime) -> str:
    """Return what the study's file notes of a runtime, which holds no secrets."""
    if isinstance(runtime, str):
        return runtime
    settings = [f"{name}={text}" for name, text in runtime_settings(runtime).items()]
    return f"{type(runtime).__name__}({', '.join(settings)})"


def _reference(argument: str, function: Any) -> str:
    """Return how ``flowrl run`` names a function of Python.

    Raises:
        SettingError: it has no name, as a `functools.partial` or an object has none.
    """
    module, name = (getattr(function, x, None) for x in ("__module__", "__qualname__"))
    if module is None or name is None:
        raise SettingError(
            f"{argument} is {a(function)}, which has no name by which the study notes it; write a "
            "function of a module that returns what it makes"
        )
    if module == f"flowrl.algos.{name}":
        return str(name)
    # A script, or a file that belongs to no package, is named by its path.
    by_value = module == "__main__" or module in cloudpickle.list_registry_pickle_by_value()
    file = getattr(sys.modules.get(module), "__file__", None)
    return f"{file if by_value and file else module}:{name}"
