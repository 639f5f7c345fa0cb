"""Graphs, environments and values by the names that a user gives on the command line.

A graph may be named as a stock graph, as a function in a package or file, or as a saved text.
"""

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
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import gymnasium as gym

from flowrl.algos import STOCK
from flowrl.core.importing import importing
from flowrl.core.texts import plural
from flowrl.envs.agents import PETTINGZOO
from flowrl.envs.gym_envs import Make, env_name
from flowrl.envs.jax_envs import JaxEnv
from flowrl.envs.prefixes import ADAPTERS
from flowrl.errors import GraphError, SettingError, a, no_file, unknown
from flowrl.graph import values
from flowrl.graph.graph import Graph


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of a graph: a function with its environment and settings, or a finished graph."""

    name: str
    build: Callable[..., Graph]
    """The function that returns the graph."""
    env: str | None
    """The default environment of the function, None where it has none."""
    takes_env: bool
    """Whether the function has a parameter for the environment."""
    settings: Mapping[str, Any]
    """The settings that the function has, with their defaults."""
    kind: type | None
    """The settings dataclass, if there is one."""
    hints: Mapping[str, Any]
    """The annotated types of the settings, by name."""

    def graph(self, env: Make | None, changes: Mapping[str, Any]) -> Graph:
        """Build the graph.

        Args:
            env: the environment; None for the default of the function.
            changes: settings by name, in place of their defaults.

        Raises:
            GraphError: the function returned no Graph.
        """
        args = [env] if self.takes_env and env is not None else []
        keywords = {"settings": self.kind(**changes)} if self.kind else changes
        graph = self.build(*args, **keywords)
        if not isinstance(graph, Graph):
            raise GraphError(f"{self.name} returned {a(graph)}, not a Graph")
        return graph


def find(name: str, allow: Collection[str] = ()) -> Source:
    """Return the source that a GRAPH argument names.

    Args:
        name: a stock name, ``package.module:function``, ``file.py:function``, a saved
            ``graph.txt`` or the directory of a run.
        allow: packages beyond flowrl that a saved graph may import.

    Raises:
        GraphError: there is no such thing.
    """
    if name in STOCK:
        return source_of(getattr(importlib.import_module(f"flowrl.algos.{name}"), name), name)
    if name.endswith(".txt") or (Path(name) / "graph.txt").is_file():
        return _saved(name, allow)
    where, colon, function = name.rpartition(":")
    if not colon or name.endswith(".py"):
        raise GraphError(_no_graph(name))
    is_file = where.endswith(".py")
    target = getattr(file_module(where), function, None) if is_file else values.named(name)
    # Known modules list their functions, so that a misspelt one is found.
    if target is None:
        hint = unknown("function", function, _functions(where)).removeprefix("unknown ")
        raise GraphError(f"{where} has no {hint}")
    if isinstance(target, Graph):
        return _finished(name, target)
    if not callable(target):
        raise GraphError(f"{name} is {a(target)}; it must be a function that returns a Graph")
    return source_of(target, function)


def _finished(name: str, graph: Graph) -> Source:
    """Return the source of a graph that is built already, which takes no settings."""
    return Source(name, lambda: graph, None, takes_env=False, settings={}, kind=None, hints={})


def _saved(name: str, allow: Collection[str]) -> Source:
    """Return the source of a graph that was saved as a text, by its file or its directory."""
    path = Path(name) if name.endswith(".txt") else Path(name) / "graph.txt"
    if not path.is_file():
        raise GraphError(no_file(name))
    graph = Graph.from_text(path.read_text(encoding="utf-8"), allow=allow, source=name)
    return _finished(graph.name, graph)


def _no_graph(name: str) -> str:
    """Say why a name without a function in it names no graph, and what would."""
    if name.endswith(".py"):
        functions = ", ".join(_functions(name)) or "none"
        wanted = f"{name} needs the function in it that makes the graph: {name}:FUNCTION"
        return f"{wanted}; it has {functions}"
    is_folder = Path(name).is_dir()
    if is_folder or len(Path(name).parts) > 1:
        problem = "has no graph.txt, so it is no run's directory" if is_folder else "is not there"
        stock = ", ".join(STOCK)
        ways = f"name a run's directory, a stock graph ({stock}), or file.py:function"
        return f"{name} {problem}; {ways}"
    hint = unknown("graph", name, STOCK)
    return f"{hint}; or name one of your own as package.module:function or file.py:function"


def environment(text: str) -> Make:
    """Return the environment that ``--env`` names.

    Args:
        text: an id, which is returned as it is, or ``file.py:function`` or
            ``package.module:Class``, which is loaded.

    Raises:
        GraphError: there is no such thing.
        SettingError: it makes no environment.
    """
    where, _, name = text.rpartition(":")
    if text.endswith(".py"):
        makers = ", ".join(_makers(text)) or "none"
        wanted = f"--env {text} needs what makes the environment in it: {text}:NAME"
        raise GraphError(f"{wanted}; it has {makers}")
    # Ids may hold a colon, too: gymnax:NAME, pettingzoo:NAME, and Gymnasium's own module:NAME-v0.
    if not where or where in (*ADAPTERS, PETTINGZOO) or re.search(r"-v\d+$", name):
        return text
    found = code(text)
    if not callable(found):
        raise SettingError(
            f"--env {text} is {a(found)}; name a function or a class that makes an environment"
        )
    return typing.cast("Make", found)


def code(text: str) -> Any:
    """Return what ``file.py:name`` or ``package.module:name`` names, after importing it.

    Raises:
        GraphError: there is no such thing.
    """
    where, _, name = text.rpartition(":")
    is_file = where.endswith(".py")
    found = getattr(file_module(where), name, None) if is_file else values.named(text)
    if found is None:
        hint = unknown("function or class", name, _makers(where)).removeprefix("unknown ")
        raise GraphError(f"{where} has no {hint}")
    return found


def _makers(path: str) -> list[str]:
    """Return the names of the functions and classes that a file defines."""
    module = file_module(path)
    return [
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    ]


def _functions(path: str) -> list[str]:
    """Return the names of the functions and graphs that a file defines."""
    module = file_module(path)
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, Graph)
        or (inspect.isfunction(value) and value.__module__ == module.__name__)
    ]


def file_module(path: str) -> Any:
    """Import a file as a module of its own name, which workers receive by value.

    Args:
        path: where the file is.

    Raises:
        GraphError: there is no such file, it can't be imported, its name has another dot than that
            of ``.py``, or another module has its name.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise GraphError(no_file(path))
    name = file.stem
    if "." in name:
        better = f"{name.replace('.', '_').strip('_') or 'graph'}.py"
        raise GraphError(
            f"{path} can't be imported, for the name of a module has no dot; rename it to {better}"
        )
    known = sys.modules.get(name)
    if known is not None:
        # A module that came by value from another process has no file here.
        origin = getattr(known, "__file__", None)
    else:
        origin = getattr(importlib.util.find_spec(name), "origin", None)
    if origin is not None and Path(origin).resolve() != file:
        raise GraphError(f"{path} has the name of another module, {origin}; rename it")
    return known if known is not None else _import_file(name, path, file)


def _import_file(name: str, path: str, file: Path) -> Any:
    """Import a file as the module `name`; `path` is the user's name for it, for errors."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise GraphError(f"{path} can't be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with importing(path):
            spec.loader.exec_module(module)
    except Exception as error:
        # A module that was only half executed must not be found by the next import.
        del sys.modules[name]
        raise GraphError(f"{path} can't be imported: {type(error).__name__}: {error}") from error
    # Other processes may not have the file, so its functions are sent as a whole.
    cloudpickle.register_pickle_by_value(module)
    return module


def source_of(function: Callable[..., Any], name: str = "") -> Source:
    """Return the source of a function, whose settings are a dataclass or its own parameters.

    Args:
        function: it returns a graph.
        name: what it is called; its own name by default.

    Raises:
        GraphError: a parameter is no setting.
    """
    name = name or getattr(function, "__name__", repr(function))
    parameters = inspect.signature(function).parameters
    kind: Any = function
    if inspect.isclass(kind) and issubclass(kind, gym.Env | JaxEnv):
        raise GraphError(
            f"{name} is an environment, and no graph; give it to one, such as fl.ppo({name}) "
            f"(--env in place of the graph's name: flowrl plan ppo --env FILE.py:{name})"
        )
    hints = _hints(function)
    env = parameters.get("env")
    takes_env = env is not None
    default_env = env.default if env is not None and isinstance(env.default, str) else None
    # As in the stock graphs, all settings may be fields of one dataclass.
    if "settings" in parameters:
        kind = _dataclass_in(hints.get("settings"))
        if kind is None:
            raise GraphError(f"{name}: its parameter `settings` must be annotated with a dataclass")
        settings = {field.name: _default(field) for field in dataclasses.fields(kind)}
        hints = _hints(kind)
        return Source(name, function, default_env, takes_env, settings, kind, hints)
    # Otherwise every other parameter is a setting; it is optional, so it must have a default.
    settings = {k: parameter.default for k, parameter in parameters.items() if k != "env"}
    missing = [k for k, value in settings.items() if value is inspect.Parameter.empty]
    if missing:
        word = plural(len(missing), "parameter")
        names = ", ".join(missing)
        raise GraphError(f"{name}: its {word} {names} must have a default to be a setting")
    return Source(name, function, default_env, takes_env, settings, None, hints)


def _hints(of: Any) -> dict[str, Any]:
    """Return the types of parameters or fields, but of those with names for type checkers only."""
    try:
        return typing.get_type_hints(of)
    except NameError:
        found: dict[str, Any] = {}
        # A class has the fields of its bases, too.
        for each in reversed(inspect.getmro(of)) if isinstance(of, type) else (of,):
            known = getattr(each, "__globals__", vars(sys.modules.get(each.__module__, typing)))
            for name, hint in inspect.get_annotations(each).items():
                with suppress(NameError):
                    alone = SimpleNamespace(__annotations__={name: hint})
                    found |= typing.get_type_hints(alone, known)
        return found


def _dataclass_in(hint: Any) -> type | None:
    """Return the dataclass in an annotated type such as ``PPOSettings | None``."""
    options: Sequence[Any] = typing.get_args(hint) or (hint,)
    return next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default value of a dataclass's field."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


MADE = re.compile(r"[\s(\[{]*[A-Za-z_][\w.]*\s*\(")
"""The beginning of a text that builds a flowrl value, such as ``Linear(``, or a tuple of them."""


def parse_value(text: str, *, allow: Collection[str] = (), source: str = "value") -> Any:
    """Read a value from the command line.

    It is a Python literal, one of flowrl's own frozen values, or else the text itself.

    >>> parse_value("1e-3"), parse_value("(64, 64)"), parse_value("None"), parse_value("relu")
    (0.001, (64, 64), None, 'relu')
    >>> parse_value("Linear(1e-3, 0, 65_000)")
    Linear(start=0.001, end=0, steps=65000)

    Args:
        text: what the user wrote.
        allow: packages beyond flowrl that ``load("package:name")`` in the text may import.
        source: where the text is from, for errors.

    Raises:
        GraphError: the text seems to build a value, but is not written as one, or there is no
            such value.
    """
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        # Words such as relu stay texts; only what looks like a call is read as a flowrl value.
        if MADE.match(text):
            return values.from_text(text, allow=allow, source=source, what="value")
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)
    except TypeError as error:
        raise GraphError(f"{text!r} is no value: {error}", source) from None
    except (RecursionError, MemoryError):
        raise GraphError("its brackets or signs are nested too deeply", source) from None


def build(
    source: Source, env: Make | None, tuned: Mapping[str, Any], changes: Sequence[tuple[str, Any]]
) -> Graph:
    """Build the graph of a source, with settings changed first and single fields after them.

    Args:
        source: where the graph comes from.
        env: the environment; None for the default of the source.
        tuned: settings by name, which come before those of `changes`.
        changes: pairs of a name and a value. A name with a dot is the address of a field of the
            graph, such as ``train.epochs``; any other is a setting of the source.

    Raises:
        SettingError: a setting is unknown or can't take the value, or `env` is given to a
            function that takes none.
    """
    if env is not None and not source.takes_env:
        raise SettingError(
            f"{source.name} takes no environment, "
            f"so --env {env_name(env)} can't be used; leave it out"
        )
    if env is None and source.takes_env and source.env is None:
        raise SettingError(f"{source.name} needs an environment: --env ID")
    # A field is the address of a part of the graph, so the graph has to be built before it is set.
    settings, fields = dict(tuned), []
    for name, value in changes:
        if "." in name:
            fields.append((name, value))
        else:
            settings[name] = fitted(source, name, value)
    graph = source.graph(env, settings)
    for name, value in fields:
        graph = with_field(source, graph, name, value)
    return graph


def with_field(source: Source, graph: Graph, name: str, value: Any) -> Graph:
    """Return a graph with one field changed.

    Args:
        source: where the graph comes from.
        graph: the graph.
        name: the address of the field, such as ``learner.loss.clip_ratio``.
        value: the new value.

    Raises:
        SettingError: there is no such field, or it can't take the value.
    """
    head, _, part = name.partition(".")
    # A node of a chain has a dot in its name.
    names = [*graph.resources, *(node.name for node in graph.nodes)]
    parts = {each.partition(".")[0] for each in names}
    if head in source.settings and head not in parts:
        other = f", or {part}=..." if part in source.settings else ""
        text = f"{head} is a setting of {source.name} and is given whole: {head}=...{other}"
        raise SettingError(text, f"{source.name}.{name}")
    return graph.set(name, value)


def fitted(source: Source, name: str, value: Any) -> Any:
    """Return a setting of a source as its annotation takes it.

    Args:
        source: where the graph comes from.
        name: name of the setting.
        value: its value.

    Raises:
        SettingError: the source has no such setting, or it can't take the value.
    """
    if name not in source.settings:
        hint = unknown("setting", name, source.settings)
        raise SettingError(
            f"{hint}. Any field of the graph works too: --set node.field=value", source.name
        )
    return values.fit(value, source.hints.get(name, Any), f"{source.name}.{name}")


def imported(names: Sequence[str]) -> list[str]:
    """Import packages, and files by their paths, and return the names of the modules.

    Args:
        names: as ``--import`` takes them, such as ``my_package`` or ``my_file.py``.

    Raises:
        SettingError: a package can't be imported.
        GraphError: there is no such file, or it can't be imported.
    """
    modules = []
    for name in names:
        try:
            if name.endswith(".py"):
                modules.append(file_module(name).__name__)
            else:
                importlib.import_module(name)
                modules.append(name)
        except ImportError as error:
            raise SettingError(f"--import {name}: {error}") from None
    return modules


def imports_for(text: str) -> list[str]:
    """Return what ``--import`` must name for a saved text: the packages and files that it loads."""
    imports = (_import_of(module) for module, _ in loaded(text) if not _is_ours(module))
    # A dict keeps the order and drops what is named twice.
    return list(dict.fromkeys(imports))


def loaded(text: str) -> list[tuple[str, str]]:
    """Return the modules that a saved text loads something from, each with the name in it."""
    return re.findall(r'load\("([^":]+):(\w+)', text)


def _is_ours(module: str) -> bool:
    """Return whether a module is one of flowrl, which a text may load from without an import."""
    return module.startswith("flowrl.")


def _import_of(module: str) -> str:
    """Return a module as ``--import`` takes it.

    A file that belongs to no package is named by its path, any other module by its package.
    """
    if module in cloudpickle.list_registry_pickle_by_value():
        return os.path.relpath(str(sys.modules[module].__file__))
    return module.partition(".")[0]
