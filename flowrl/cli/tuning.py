"""``flowrl tune``: search for settings, or go on with a study."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.cli.arguments import changes_of, file_name, import_named, new_directory
from flowrl.cli.ending import program
from flowrl.cli.training import save_when_ended
from flowrl.errors import SettingError
from flowrl.runtime import NAMES

if TYPE_CHECKING:
    from flowrl.algos.config import Config
    from flowrl.tuning.journal import Options


def tune(args: argparse.Namespace) -> int:
    """Search for settings; print the best trials and what runs the best of them again."""
    from flowrl.tuning.journal import read_options
    from flowrl.tuning.study import tune as search_for

    if args.save_config is not None:
        raise SettingError("--save-config is of flowrl run; a study writes DIR/best.yaml itself")
    saved = read_options(Path(args.graph))
    if saved is not None:
        args.allow += [name for name in saved.imports if name not in args.allow]
    import_named(args)
    options = _given(args)
    if saved is not None:
        options = {**_saved(saved, args), **options}
    elif args.steps is None or not args.search:
        lacking = "--search" if args.steps else "--steps"
        raise SettingError(
            f"{lacking} is needed: flowrl tune {args.graph} "
            "--search 'lr=loguniform(1e-5, 1e-2)' --steps 100_000"
        )
    else:
        options = {"graph": args.graph, "tuned": not args.untuned, **options}
        options.setdefault("out", _default_directory(args))
    if args.loaded is not None:
        given = [name for name in ("until", "seeds") if getattr(args.loaded, name) is not None]
        if given:
            names = " and ".join(given)
            text = f"{args.config}: {names} left out: each trial takes all steps with one seed"
            print(text, file=sys.stderr)
    save_when_ended()
    study = search_for(**options, imports=args.imports, address=args.address)
    print(study)
    print(_ending(study.path, study.best.directory), file=sys.stderr)  # or why there is no best
    return 0


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `fl.tune` that the user gave."""
    from flowrl.tuning.spaces import parse_search

    names = (
        "env", "trials", "steps", "metric", "mode", "seed", "runtime", "parallel", "grace_steps",
        "reduction", "out",
    )  # fmt: skip
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.search:
        options["search"] = parse_search(args.search, args.allow)
    changes: dict[str, Any] = {}
    for name, value in changes_of(args.changes, args.allow):
        # One that is given again is the last: of a setting and a field, the later one must win.
        changes.pop(name, None)
        changes[name] = value
    if args.loaded is not None:
        # What is searched for must have an effect, too, as what is set: so it is set as it is.
        search = options.get("search", {})
        held = {n: value for n, value in args.loaded.settings.items() if n in search}
        config = args.loaded.changed({**held, **changes})
        options |= {"env": args.env or config.env, "tuned": False}
        changes = {**_changes_in(config, search), **changes}
    if changes:
        options["settings"] = changes
    return options


def _changes_in(config: Config, search: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config sets that is neither a default nor searched for, by name."""
    default = type(config).of(config.graph, env=config.env, tuned=False, imports=config.imports)
    settings = {
        name: value
        for name, value in config.settings.items()
        if name not in default.settings or default.settings[name] != value
    }
    changes = {**settings, **config.fields}
    return {name: value for name, value in changes.items() if name not in search}


def _saved(saved: Options, args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `fl.tune` with which a study was started.

    Raises:
        SettingError: they can't all be written on a command line.
    """
    from flowrl.algos.named import parse_value
    from flowrl.tuning.spaces import parse_space

    path, allow = args.graph, args.allow
    if saved.runtime not in NAMES:
        raise SettingError(
            f"{path}: its runtime is the Python value {saved.runtime}, which a command line can't "
            "name; go on with it by calling the same fl.tune(...)"
        )
    names = ("graph", "env", "trials", "steps", "metric", "mode", "seed", "runtime")
    options: dict[str, Any] = {name: getattr(saved, name) for name in names}
    settings = {n: parse_value(text, allow=allow) for n, text in saved.settings.items()}
    search = {n: parse_space(text, allow, f"{path}: {n}") for n, text in saved.search.items()}
    more = {"grace_steps": saved.grace_steps, "reduction": saved.reduction, "tuned": saved.tuned}
    return {**options, **more, "settings": settings, "search": search, "out": path}


def _default_directory(args: argparse.Namespace) -> Path:
    """Return a new directory that is named by the graph, its environment and the time."""
    name = [file_name(each) for each in (args.graph, args.env) if each]
    return new_directory("-".join(["tune", *name, time.strftime("%Y%m%d-%H%M%S")]))


def _ending(path: Path, directory: str) -> str:
    """Return where the results of a study are, and what to do next."""
    from flowrl.tuning.study import BEST

    lines = [f"  trials   {path / 'trials.csv'}"]
    if (path / "results.svg").is_file():
        lines.append(f"  picture  {path / 'results.svg'}")
    # The policy of a program is that of the trial with the highest return.
    if not (path / directory / "members.jsonl").is_file():
        lines.append(f"  policy   {path / directory}")
    if (path / BEST).is_file():
        run = shlex.join([program(), "run", "--config", str(path / BEST)])
        lines.append(f"  run it   {run}")
    return "\n".join(lines)
