"""Values made from the parsed arguments of a command: graphs, runtimes, settings and goals."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.cli.policies import repeat_init
from flowrl.errors import SaveError, SettingError

if TYPE_CHECKING:
    from flowrl.algos.config import Config
    from flowrl.graph.graph import Graph


@dataclass(frozen=True)
class About:
    """Facts about a graph that the arguments name, for the texts that a command prints."""

    env: str
    """The id of the environment, empty where there is none."""
    settings: str
    """Which settings the graph has: the tuned or the default ones, and those that were set."""
    registered: Mapping[str, Sequence[str]]
    """What ``--import`` must name, by the id of each environment that only imports registered."""


def import_named(args: argparse.Namespace) -> None:
    """Import the packages and files that ``--import`` names.

    Afterwards `args.allow` holds the names of the modules, and `args.imports` what the user wrote,
    where a file is named by its path.

    Args:
        args: the parsed arguments, which are changed.

    Raises:
        SettingError: something can't be imported.
        GraphError: there is no such file.
    """
    from flowrl.algos.named import imported

    # The user's modules are found in the current directory, as by `python -m`.
    sys.path.insert(0, "")
    args.imports = tuple(args.allow)
    args.allow = imported(args.allow)


def take_config(args: argparse.Namespace) -> None:
    """Take from the file that ``--config`` names what the arguments leave open.

    Afterwards `args.loaded` holds the config, or None where none is named.

    Args:
        args: the parsed arguments of a command that takes a graph, which are changed.

    Raises:
        SettingError: the file has an unknown key, or a value of a wrong type; or the arguments
            leave out tuned settings, of which a file has none.
        SaveError: there is no such file, or ``--save-config`` names one that is there already.
    """
    from flowrl.algos.config import Config

    if args.save_config is not None and Path(args.save_config).exists():
        raise SaveError(
            f"--save-config {args.save_config} exists already, and nothing is ever overwritten; "
            "name another file"
        )
    args.loaded = None
    if args.config is None:
        return
    if args.untuned:
        raise SettingError(
            "--untuned can't be used with --config: a config names all settings, and no tuned ones "
            "are applied on top of it; leave out --untuned"
        )
    sys.path.insert(0, "")
    loaded = Config.load(args.config)
    if args.graph is not None:
        _check_settings(loaded, args)
        # Another graph has another default environment, or takes none.
        env = loaded.env if "env" in loaded.origin else None
        loaded = replace(loaded, graph=args.graph, env=env)
    args.loaded = loaded
    args.graph = args.loaded.graph
    args.allow = [*loaded.imports, *args.allow]
    # Commands that only look at a graph have some of these, or none.
    for name in ("runtime", "seed", "seeds", "steps", "until"):
        if name in args and getattr(args, name) is None:
            setattr(args, name, getattr(loaded, name))


def _check_settings(loaded: Config, args: argparse.Namespace) -> None:
    """Refuse a config of one graph for another that does not have all of its settings."""
    from flowrl.algos.named import find, imported

    known = find(args.graph, imported([*loaded.imports, *args.allow])).settings
    if foreign := [name for name in loaded.settings if name not in known]:
        raise SettingError(
            f"{args.config} is a config of {loaded.graph}, and {args.graph} has no setting "
            f"{', '.join(foreign)}; leave out {args.graph}, or write a config of it: flowrl check "
            f"{args.graph} --save-config FILE"
        )


def graph_of(args: argparse.Namespace) -> tuple[Graph, About]:
    """Return the graph that the arguments name, and facts about it; save its config if wanted.

    Raises:
        FlowrlError: the graph can't be found, or can't be built with these settings.
    """
    import gymnasium as gym

    known_before = dict(gym.registry)
    import_named(args)
    config, settings = _config_of(args)
    graph = config.build()
    if args.save_config is not None:
        run: dict[str, Any] = {
            name: getattr(args, name, None) for name in ("seed", "seeds", "steps", "until")
        }
        replace(config, runtime=_runtime_name(args), **run).save(args.save_config)
    # A graph in a package or file may register environments itself, so it is imported for them.
    where, colon, _ = args.graph.rpartition(":")
    own = []
    if colon:
        own = [where if where.endswith(".py") else where.partition(".")[0]]
    registered = dict.fromkeys(_registered_since(known_before), (*own, *args.imports))
    return graph, About(config.env or "", settings, registered)


def import_for_environments(args: argparse.Namespace) -> dict[str, Sequence[str]]:
    """Import what ``--import`` names.

    Args:
        args: the parsed arguments, which `import_named` changes.

    Returns:
        What ``--import`` named, by the id of each environment that it registered.
    """
    import gymnasium as gym

    known_before = dict(gym.registry)
    import_named(args)
    return dict.fromkeys(_registered_since(known_before), args.imports)


def _config_of(args: argparse.Namespace) -> tuple[Config, str]:
    """Return the config that the arguments name, and a text that says which settings it has."""
    from flowrl.algos.config import Config
    from flowrl.algos.tuned import tuned

    changes = changes_of(args.changes, args.allow)
    if args.loaded is None:
        config = Config.of(args.graph, env=args.env, tuned=not args.untuned, imports=args.imports)
        best = {} if args.untuned or config.env is None else tuned(args.graph, config.env)
        said = "default settings"
        if best:
            said = f"tuned settings ({', '.join(f'{k}={v}' for k, v in best.items())})"
    else:
        config = replace(_with_env(args.loaded, args.env), imports=args.imports)
        said = f"settings of {args.config}"
    if not changes:
        return config, said
    changed = config.changed(changes)
    said += f", set {', '.join(f'{k}={v}' for k, v in changes)}"
    if idle := changed.idle(config):
        said += f", of which {', '.join(idle)} {'changes' if len(idle) == 1 else 'change'} nothing"
    return changed, said


def _with_env(config: Config, env: str | None) -> Config:
    """Return a config with the environment of ``--env``, if there is one.

    Raises:
        SettingError: a field of the config sets the environment after it.
    """
    if env is None:
        return config
    for name in config.fields:
        if name.endswith(".env"):
            raise SettingError(
                f"it is set after --env {env}, which would not reach it; --set {name}={env} "
                "changes it",
                config.origin.get(name, ""),
            )
    return replace(config, env=env)


def _runtime_name(args: argparse.Namespace) -> str | None:
    """Return the name of the runtime for a config, None where the command has none.

    Raises:
        SettingError: the runtime of a repeated run has settings, which a config does not hold.
    """
    if settings := getattr(args, "runtime_settings", {}):
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise SettingError(
            f"--save-config can't write the settings of the runtime of {args.graph} ({given}); "
            f"name a runtime with --runtime, or repeat that run without --save-config"
        )
    return getattr(args, "runtime", None)


def _registered_since(before: Mapping[str, Any]) -> list[str]:
    """Return the ids of environments that were registered since, beyond those of known packages."""
    import gymnasium as gym

    from flowrl.envs.gym_envs import FAMILIES

    return [
        env_id
        for env_id, spec in gym.registry.items()
        if before.get(env_id) is not spec and spec.namespace not in FAMILIES
    ]


def changes_of(texts: Sequence[str], allow: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """Return the names and values that ``--set NAME=VALUE`` gives.

    Args:
        texts: what the user wrote, once for each ``--set``.
        allow: packages beyond flowrl that a value may import.

    Raises:
        SettingError: a text has no equals sign.
        GraphError: a value is not written as one.
    """
    from flowrl.algos.named import parse_value

    changes = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SettingError(f"--set takes NAME=VALUE, got {text!r}")
        name = name.strip()
        changes.append((name, parse_value(value, allow=allow, source=f"--set {name}")))
    return changes


ONLY_ON_RAY = {
    "address": "names the Ray to join",
    "processes": "is how many Ray processes share the runners",
    "place": "gives Ray processes to resources and stages",
    "working_dir": "is copied to the nodes of a Ray cluster",
}
"""What the arguments are that only the ray runtime takes, by their names."""


def runtime_of(args: argparse.Namespace) -> Any:
    """Return the runtime that the arguments name: a name or a runtime object.

    Raises:
        SettingError: an argument does not fit the runtime.
        GraphError: a value of ``--place`` is not written as one.
    """
    if args.threads is not None:
        args.runtime_settings = {**args.runtime_settings, "threads": args.threads}
    if args.runtime == "ray":
        return _ray_of(args)
    for name, meaning in ONLY_ON_RAY.items():
        if getattr(args, name) not in (None, []):
            flag = name.replace("_", "-")
            raise SettingError(f"--{flag} {meaning}: add --runtime ray, or leave it out")
    # Only the xla runtime has many seeds in one run.
    if args.seeds is not None and args.runtime == "xla":
        from flowrl.runtime.xla import XlaRuntime

        return XlaRuntime(seeds=args.seeds, **args.runtime_settings)
    if not args.runtime_settings:
        return args.runtime
    from flowrl.run_arguments import as_runtime

    return type(as_runtime(args.runtime))(**args.runtime_settings)


def runtime_in_place_of(args: argparse.Namespace, path: Path) -> Any:
    """Return the runtime for a saved run: its own with what the arguments say, or None for that.

    Args:
        args: the parsed arguments of a command that goes on with a run.
        path: the directory of the run.

    Raises:
        SaveError: the run's own one can't be read back.
        SettingError: an argument does not fit the runtime.
    """
    from flowrl.observe.about import read, settings_of_runtime
    from flowrl.run_arguments import as_runtime

    given = any(getattr(args, name) not in (None, []) for name in (*ONLY_ON_RAY, "threads"))
    facts = read(path)
    if facts is None or (args.runtime is None and not given):
        return None
    if args.runtime in (None, facts["runtime"]):
        args.runtime = facts["runtime"]
        kind = type(as_runtime(args.runtime))
        args.runtime_settings = settings_of_runtime(facts, path, kind)
    return runtime_of(args)


def _ray_of(args: argparse.Namespace) -> Any:
    """Return the ray runtime with what a saved run had and the arguments say instead."""
    from flowrl.runtime.ray import RayRuntime

    given: dict[str, Any] = {
        "address": args.address,
        "processes": args.processes,
        "place": place_of(args),
        "imports": args.imports,
    }
    if args.working_dir is not None:
        given["init"] = {"runtime_env": {"working_dir": args.working_dir}}
    return RayRuntime(**args.runtime_settings | {k: v for k, v in given.items() if v})


def place_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the placements, by name, that ``--place NAME`` and ``--place NAME=ACTOR`` give.

    Raises:
        SettingError: a text gives something else, or a name is given twice; or the runtime is
            another one.
        GraphError: a value is not written as one.
    """
    if args.place and args.runtime != "ray":
        raise SettingError(f"--place {ONLY_ON_RAY['place']}: add --runtime ray, or leave it out")
    from flowrl.algos.named import parse_value
    from flowrl.runtime.placement import Actor

    place: dict[str, Any] = {}
    for text in args.place:
        name, equals, value = text.partition("=")
        name = name.strip()
        actor = parse_value(value, source=f"--place {name}") if equals else Actor()
        if not name or not isinstance(actor, Actor):
            raise SettingError(
                f"--place takes NAME or 'NAME=Actor(...)', such as learner or "
                f"'learner=Actor(gpus=2)', got {text!r}"
            )
        if name in place:
            raise SettingError(f"--place names {name} twice; give it once")
        place[name] = actor
    return place


def new_directory(name: str) -> Path:
    """Return a path below runs/ at which there is nothing yet: this name, or numbered from 2."""
    path = Path("runs") / name
    for number in itertools.count(2):
        if not path.exists():
            break
        path = Path("runs") / f"{name}-{number}"
    return path


def file_name(text: str) -> str:
    """Return a text with an underscore for all that should not be in the name of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)


def repeat(args: argparse.Namespace) -> str:
    """Take from a saved run what the arguments leave open, and return what is to be said of it.

    If the graph is the directory of a run, that run is repeated: with its seed, runtime, steps and
    goal, where no others are given. What is still open then gets its default.

    Args:
        args: the parsed arguments, which are changed.

    Raises:
        SaveError: the file of the run is damaged.
    """
    from flowrl.observe.about import OF_PYTHON, differences, read, settings_of_runtime
    from flowrl.run_arguments import as_runtime

    said = []
    if (saved := read(args.graph)) is not None:
        said.append(f"repeats {args.graph} from its start")
        reason = saved.get("ended", {}).get("reason")
        if saved.get("snapshots") and reason not in ("until", "steps"):
            said.append(f"to go on where it stopped: flowrl resume {shlex.quote(args.graph)}")
        if args.steps is None and args.until is None:
            args.steps = saved["steps"]
            if saved["until"] == OF_PYTHON:
                said.append("its goal was a function, so there is none now")
            else:
                args.until = saved["until"]
        if args.runtime is None:
            args.runtime = saved["runtime"]
            kind = type(as_runtime(args.runtime))
            args.runtime_settings = settings_of_runtime(saved, args.graph, kind)
            seeds = args.runtime_settings.pop("seeds", None)
            args.seeds = seeds if args.seeds is None else args.seeds
            if left_out := saved.get("runtime_left_out"):
                said.append(f"{' and '.join(left_out)} of its runtime were not saved in full")
        args.seed = saved["seed"] if args.seed is None else args.seed
        if begins := repeat_init(args, saved):
            said.append(begins)
        if args.best is None and not args.no_snapshots:
            args.best = (saved.get("snapshots") or {}).get("best")
        if others := differences(saved):
            said.append(f"versions or devices are others ({', '.join(others)})")
    args.seed, args.runtime = args.seed or 0, args.runtime or "local"
    return "; ".join(said)
