"""Names of classes and functions in texts: what leads back to a value, and what a text may name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import GraphError, SaveError, SettingError, a, unknown

PACKAGES = (
    *(f"flowrl.{name}." for name in ("graph", "rl", "envs", "rollout", "replay", "learner", "ops")),
    "flowrl.offline.",
    "flowrl.runtime.placement",
    "flowrl.observe.frozen",
)
"""The packages of the classes that a graph may be made of, and the modules of `Actor` and `Frozen`.

Making one of these does nothing outside this process.
"""


def public(name: str) -> Any:
    """Return what flowrl's package has under a name such as ``Graph`` or ``losses.PPOLoss``."""
    # By name and late: the package imports this module.
    found: Any = importlib.import_module("flowrl")
    for part in name.split("."):
        found = getattr(found, part)
    return found


def public_names() -> list[str]:
    """Return the public names of classes and functions: ``Graph``, ``losses.PPOLoss`` and so on."""
    modules = public("MODULES")
    names = [name for name in public("__all__") if name not in modules]
    for module in modules:
        names += [f"{module}.{name}" for name in public(module).__all__]
    return names


def own_class(name: str) -> type:
    """Return a class of flowrl's own that a graph may be made of.

    Args:
        name: its public name, such as ``Concat`` or ``losses.PPOLoss``.

    Raises:
        GraphError: there is no such class, or no graph is made of it.
    """
    names = [n for n in public_names() if n.rpartition(".")[2][0].isupper()]
    if name not in names:
        same = [n for n in names if n.endswith(f".{name}")]
        if same:
            raise GraphError(f"unknown name '{name}'; did you mean '{same[0]}'?")
        raise GraphError(unknown("name", name, names))
    return harmless(public(name), name)


def harmless(target: Any, name: str) -> type:
    """Return a class of flowrl's own if making one does nothing outside this process.

    Raises:
        GraphError: it is anything else.
    """
    if not isinstance(target, type) or not target.__module__.startswith(PACKAGES):
        raise GraphError(f"'{name}' is nothing that a graph is made of")
    return target


def name_of(value: Any, strict: bool) -> str:
    """Return the text that leads back to a class or function.

    Args:
        value: the class or function.
        strict: whether a value without such a name is an error; if not, it is shown as ``<name>``.

    Raises:
        SaveError: `strict`, and no name leads back to the value.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module == "__main__":
        module = main_module()
    if module and name and "<" not in name and (not strict or _leads_back(value)):
        if module.startswith("flowrl."):
            for known in public_names():
                if known.rpartition(".")[2] == name:
                    return known
        return f'load("{module}:{name}")'
    if strict:
        # What is typed at a prompt or in a notebook is in no module that has a name.
        what = f"{name} in {module or 'this session'}" if name else a(value)
        raise SaveError(
            f"{what} can't be written to a file: only classes and functions at the top of an "
            "importable module have a name that leads back to them. "
            "Move it into a module of its own."
        )
    return f"<{name or type(value).__name__}>"


def main_module() -> str:
    """Return the name by which the script's own module can be imported; empty if there is none."""
    main = sys.modules["__main__"]
    # What runs by `python -m` knows its own; else the name of its file leads back to it.
    if main.__spec__ is not None:
        return main.__spec__.name
    return Path(getattr(main, "__file__", None) or "").stem


def _leads_back(value: Any) -> bool:
    """Return whether a value's module and name are its own.

    Those of a bound method, say, are its class's.
    """
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return bool(found == value)


def no_setting(address: str, paths: Mapping[str, Sequence[str]], graph: str) -> SettingError:
    """Return the error for an address that begins with no node or resource and a setting.

    Args:
        address: as it was given, such as ``epochs`` in place of ``train.epochs``.
        paths: by node and resource: the paths of its settings.
        graph: the name of the graph.
    """
    head = address.partition(".")[0]
    if head in paths:
        setting = next(iter(paths[head]), "setting").partition(".")[0]
        return SettingError(f"say which setting of it: {head}.{setting}", f"{graph}.{head}")
    every = [f"{name}.{path}" for name, of_one in paths.items() for path in of_one]
    # A setting that was named without its owner.
    meant = [path for path in every if path.endswith(f".{address}")]
    if not meant:
        return SettingError(unknown("node or resource", head, paths), graph)
    hint = f"did you mean {' or '.join(meant)}?"
    known = ", ".join(paths)
    return SettingError(f"unknown node or resource '{head}'; {hint} Known: {known}", graph)
