"""From what a user names on the command line to a Graph: stock names, functions in packages and files, saved texts."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from flowrl.algos import STOCK
from flowrl.core.importing import importing
from flowrl.envs.gym_envs import Make, env_name
from flowrl.envs.jax_envs import ADAPTERS
from flowrl.errors import GraphError, SettingError, a, unknown
from flowrl.graph import values
from flowrl.graph.graph import Graph


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a graph comes from: a function with its environment and settings, or a graph as it is."""

    name: str
    build: Callable[..., Graph]
    env: str | None
    """The default environment; None where the function takes none."""
    takes_env: bool
    settings: Mapping[str, Any]
    """The settings that the function has, with their defaults."""
    kind: type | None
    """The settings dataclass, if there is one."""
    hints: Mapping[str, Any]

    def graph(self, env: Make | None, changes: Mapping[str, Any]) -> Graph:
        """Build it. `changes`: settings by name."""
        args = [env] if self.takes_env and env is not None else []
        made = self.build(*args, **({"settings": self.kind(**changes)} if self.kind else changes))
        if not isinstance(made, Graph):
            raise GraphError(f"{self.name} returned {a(made)}, not a Graph")
        return made


def find(name: str, allow: Collection[str] = ()) -> Source:
    """The source that a GRAPH argument names: a stock name, ``package.module:function``, ``file.py:function``, or a saved ``graph.txt``.

    Raises:
        GraphError: there is no such thing.
    """
    if name in STOCK:
        return _source(name, getattr(importlib.import_module(f"flowrl.algos.{name}"), name))
    if name.endswith(".txt") or (Path(name) / "graph.txt").is_file():
        path = Path(name) if name.endswith(".txt") else Path(name) / "graph.txt"
        if not path.is_file():
            raise GraphError(f"there is no file {name}")
        graph = Graph.from_text(path.read_text(encoding="utf-8"), allow=allow, source=name)
        return Source(
            graph.name, lambda: graph, None, takes_env=False, settings={}, kind=None, hints={}
        )
    where, colon, function = name.rpartition(":")
    if name.endswith(".py"):
        raise GraphError(
            f"{name} needs the function in it that makes the graph: {name}:FUNCTION; it has {', '.join(_functions(name)) or 'none'}"
        )
    if not colon and (Path(name).is_dir() or len(Path(name).parts) > 1):
        there = (
            "has no graph.txt, so it is no run's directory"
            if Path(name).is_dir()
            else "is not there"
        )
        raise GraphError(
            f"{name} {there}; name a run's directory, a stock graph ({', '.join(STOCK)}), or file.py:function"
        )
    if not colon:
        raise GraphError(
            f"{unknown('graph', name, STOCK)}; or name one of your own as package.module:function or file.py:function"
        )
    target = (
        getattr(file_module(where), function, None) if where.endswith(".py") else values.named(name)
    )
    if target is None:
        raise GraphError(
            f"{where} has no {unknown('function', function, _functions(where)).removeprefix('unknown ')}"
        )
    if isinstance(target, Graph):
        return Source(name, lambda: target, None, takes_env=False, settings={}, kind=None, hints={})
    if not callable(target):
        raise GraphError(f"{name} is {a(target)}; it must be a function that returns a Graph")
    return _source(function, target)


def environment(text: str) -> Make:
    """The environment that ``--env`` names: an id as it is, or what ``file.py:function`` or ``package.module:Class`` leads to.

    Raises:
        GraphError: there is no such thing.
        SettingError: it makes no environment.
    """
    where, _, name = text.rpartition(":")
    if text.endswith(".py"):
        raise GraphError(
            f"--env {text} needs what makes the environment in it: {text}:NAME; it has {', '.join(_makers(text)) or 'none'}"
        )
    if not where or where in ADAPTERS or re.search(r"-v\d+$", name):
        return text
    found = getattr(file_module(where), name, None) if where.endswith(".py") else values.named(text)
    if found is None:
        raise GraphError(
            f"{where} has no {unknown('function or class', name, _makers(where)).removeprefix('unknown ')}"
        )
    if not callable(found):
        raise SettingError(
            f"--env {text} is {a(found)}; name a function or a class that makes an environment"
        )
    return typing.cast("Make", found)


def _makers(path: str) -> list[str]:
    """The functions and classes that a file defines."""
    module = file_module(path)
    return [
        n
        for n, v in vars(module).items()
        if (inspect.isfunction(v) or inspect.isclass(v)) and v.__module__ == module.__name__
    ]


def _functions(path: str) -> list[str]:
    """The functions and graphs that a file defines."""
    module = file_module(path)
    return [
        n
        for n, v in vars(module).items()
        if isinstance(v, Graph) or (inspect.isfunction(v) and v.__module__ == module.__name__)
    ]


def file_module(path: str) -> Any:
    """A file as a module under its own name, that workers get by value.

    Raises:
        GraphError: there is no such file, it can't be imported, or another module has its name.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise GraphError(f"there is no file {path}")
    name = file.stem
    known = sys.modules.get(name)
    origin = (
        known.__file__
        if known is not None
        else getattr(importlib.util.find_spec(name), "origin", None)
    )
    if origin is not None and Path(origin).resolve() != file:
        raise GraphError(f"{path} has the name of another module, {origin}; rename it")
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise GraphError(f"{path} can't be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with importing(path):
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise GraphError(f"{path} can't be imported: {type(error).__name__}: {error}") from error
    cloudpickle.register_pickle_by_value(module)
    return module


def _source(name: str, function: Callable[..., Any]) -> Source:
    parameters = inspect.signature(function).parameters
    hints = typing.get_type_hints(function)
    env = parameters.get("env")
    default = env.default if env is not None and isinstance(env.default, str) else None
    if "settings" in parameters:
        kind = _dataclass_in(hints.get("settings"))
        if kind is None:
            raise GraphError(f"{name}: its parameter `settings` must be annotated with a dataclass")
        settings = {f.name: _default(f) for f in dataclasses.fields(kind)}
        return Source(
            name, function, default, env is not None, settings, kind, typing.get_type_hints(kind)
        )
    settings = {k: p.default for k, p in parameters.items() if k != "env"}
    missing = [k for k, v in settings.items() if v is inspect.Parameter.empty]
    if missing:
        raise GraphError(
            f"{name}: its parameter{'s' * (len(missing) > 1)} {', '.join(missing)} must have a default to be a setting"
        )
    return Source(name, function, default, env is not None, settings, None, hints)


def _dataclass_in(hint: Any) -> type | None:
    options: Sequence[Any] = typing.get_args(hint) or (hint,)
    return next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)


def _default(field: dataclasses.Field[Any]) -> Any:
    return (
        field.default_factory()
        if field.default_factory is not dataclasses.MISSING
        else field.default
    )


MADE = re.compile(r"[\s(\[{]*[A-Za-z_][\w.]*\s*\(")
"""How a text begins that builds a value of flowrl's, such as ``Linear(``, or a tuple of them."""


def parse_value(text: str, *, allow: Collection[str] = (), source: str = "value") -> Any:
    """A value from the command line: a Python literal, one of flowrl's own frozen values, or else the text itself.

    >>> parse_value("1e-3"), parse_value("(64, 64)"), parse_value("None"), parse_value("relu")
    (0.001, (64, 64), None, 'relu')
    >>> parse_value("Linear(1e-3, 0, 65_000)")
    Linear(start=0.001, end=0, steps=65000)

    Args:
        text: what the user wrote.
        allow: packages beyond flowrl that ``load("package:name")`` in it may import.
        source: where it is from, for errors.

    Raises:
        GraphError: it builds a value, and is not written as one.
    """
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        if MADE.match(text):
            return values.from_text(text, allow=allow, source=source, what="value")
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def build(
    source: Source, env: Make | None, tuned: Mapping[str, Any], changes: Sequence[tuple[str, Any]]
) -> Graph:
    """The graph of a source, with its settings and then single fields changed.

    Raises:
        SettingError: a setting is unknown or can't take the value, or `env` is given to a function that takes none.
    """
    if env is not None and not source.takes_env:
        raise SettingError(
            f"{source.name} takes no environment, so --env {env_name(env)} can't be used; leave it out"
        )
    if env is None and source.takes_env and source.env is None:
        raise SettingError(f"{source.name} needs an environment: --env ID")
    settings, fields = dict(tuned), []
    for name, value in changes:
        if "." in name:
            fields.append((name, value))
        elif name not in source.settings:
            hint = unknown("setting", name, source.settings)
            raise SettingError(
                f"{hint}. Any field of the graph works too: --set node.field=value", source.name
            )
        else:
            settings[name] = values.fit(value, source.hints.get(name, Any), f"{source.name}.{name}")
    graph = source.graph(env, settings)
    for name, value in fields:
        graph = graph.set(name, value)
    return graph


def imports_for(text: str) -> list[str]:
    """What must be imported, as ``--import`` takes it, for a saved text: the packages and files of what it loads."""
    modules = dict.fromkeys(re.findall(r'load\("([\w.]+):', text))
    return list(
        dict.fromkeys(_import_of(module) for module in modules if not module.startswith("flowrl."))
    )


def _import_of(module: str) -> str:
    """A module as ``--import`` takes it: a file that is no package's by its path, anything else by its package."""
    if module in cloudpickle.list_registry_pickle_by_value():
        return os.path.relpath(str(sys.modules[module].__file__))
    return module.partition(".")[0]
