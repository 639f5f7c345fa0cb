"""Frozen settings as text, and back: the one address scheme and the one file format.

The text is the Python that would build the value. It is parsed, never executed: a name leads to flowrl's own public
names, and ``load("package.module:name")`` to others, which are imported only where the caller allows it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import math
import sys
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.importing import importing
from flowrl.errors import FlowrlError, GraphError, SaveError, SettingError, a, unknown


class Printed(ABC):
    """A value that says itself how it is written: the name to call, and the arguments (None for a positional one).

    A base class and no protocol: a setting of the user's that is called `parts` makes no value one of these.
    """

    @abstractmethod
    def parts(self) -> tuple[Any, list[tuple[str | None, Any]]]:
        """``(class or name, [(keyword or None, value), ...])``."""


class Spec(Printed):
    """A function or class together with the settings that it will be called with: a value that compares and prints.

    >>> Spec(dict, a=1)
    Spec(load("builtins:dict"), a=1)
    """

    def __init__(self, fn: Callable[..., Any], /, **settings: Any) -> None:
        if not callable(fn):
            raise SettingError(
                f"{type(self).__name__} takes a function or a class first, got {fn!r}"
            )
        self.__dict__["fn"] = fn
        self.__dict__["settings"] = types.MappingProxyType(settings)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; make a new one")

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self)
            and self.fn == other.fn
            and _same(dict(self.settings), dict(other.settings))
        )

    def __hash__(self) -> int:
        return hash((type(self), self.fn, tuple(sorted(self.settings))))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_make, (type(self), self.fn, dict(self.settings)))

    def __repr__(self) -> str:
        return to_text(self, defaults=False)

    def parts(self) -> tuple[Any, list[tuple[str | None, Any]]]:
        """The class, then the function, then the settings."""
        return type(self), [(None, self.fn), *self.settings.items()]

    fn: Callable[..., Any]
    settings: Mapping[str, Any]


def _same(a: Any, b: Any) -> bool:
    """Whether two settings are equal and of one type: a module may well do another thing with 0.0 or False than with 0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(np.array_equal(a, b))


def _make(kind: type[Spec], fn: Callable[..., Any], settings: dict[str, Any]) -> Spec:
    return kind(fn, **settings)


# -- settings by address -------------------------------------------------------------------------------------------


def settings(value: Any) -> dict[str, Any]:
    """The fields of a frozen value, by name; empty for anything else."""
    if isinstance(value, Spec):
        return dict(value.settings)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    return {}


def addresses(value: Any) -> Iterator[str]:
    """The paths of all fields of a frozen value and of those inside it: ``loss.clip_ratio``."""
    for name, inner in settings(value).items():
        yield name
        yield from (f"{name}.{path}" for path in addresses(inner))


def with_setting(value: Any, path: str, new: Any, where: str) -> Any:
    """`value` with the field at `path` (``loss.clip_ratio``) changed.

    Raises:
        SettingError: there is no such field, or it can't take `new`. `where` is the address of `value`.
    """
    name, _, rest = path.partition(".")
    known = settings(value)
    if (
        isinstance(value, Spec) and name not in known and not rest
    ):  # the function itself, or a setting left at its default
        return (
            type(value)(new, **known)
            if name == "fn"
            else type(value)(value.fn, **known, **{name: new})
        )
    if name not in known:
        raise SettingError(unknown("setting", name, known), where)
    if rest:
        new = with_setting(known[name], rest, new, f"{where}.{name}")
    elif not isinstance(value, Spec):
        new = fit(new, typing.get_type_hints(type(value)).get(name, Any), f"{where}.{name}")
    if isinstance(value, Spec):
        return type(value)(value.fn, **{**known, name: new})
    try:
        return dataclasses.replace(value, **{name: new})
    except SettingError as error:
        raise error.at(where) from None


def fit(value: Any, hint: Any, where: str) -> Any:
    """`value` as the annotated type takes it: an int becomes a float where one is wanted, a list a tuple.

    Raises:
        SettingError: the value is of another plain type than the annotation says.
    """
    if isinstance(value, np.generic):
        value = value.item()
    options = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )
    plain = {int, float, bool, str, type(None)}
    for option in options:
        origin = typing.get_origin(option) or option
        if origin is typing.Annotated:
            origin = typing.get_args(option)[0]
        if origin is typing.Literal and value in typing.get_args(option):
            return value
        if origin is tuple and isinstance(value, tuple | list):
            return tuple(value)
        if origin is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if (
            origin in plain
            and isinstance(value, origin)
            and not (origin is int and isinstance(value, bool))
        ):
            return value
        if origin is Any:
            return value
        if (
            origin not in plain
            and origin not in (tuple, typing.Literal)
            and type(value) not in plain
            and _is_a(value, origin)
        ):
            return value
    wanted = " or ".join(text for option in options for text in _said(option))
    raise SettingError(f"takes {wanted}, got {value!r}", where)


def _is_a(value: Any, origin: Any) -> bool:
    """Whether a value is of an abstract class. Concrete ones are left to the owner of the setting, who knows better what to say."""
    return not inspect.isabstract(origin) or isinstance(value, origin)


def _said(option: Any) -> list[str]:
    """What an annotation takes, in words: of an abstract class what there is of it."""
    if typing.get_origin(option) is typing.Literal:
        return [repr(x) for x in typing.get_args(option)]
    if typing.get_origin(option):
        return [str(option)]
    if inspect.isabstract(option):
        kinds = [
            kind.__name__ for kind in option.__subclasses__() if kind.__name__ in _public("__all__")
        ]
        return [f"{name}(...)" for name in kinds] or [option.__name__]
    return [getattr(option, "__name__", str(option))]


# -- to text -------------------------------------------------------------------------------------------------------


def to_text(
    value: Any, *, defaults: bool, strict: bool = False, width: int = 110, indent: int = 0
) -> str:
    """A value as the Python that builds it. `defaults`: with the fields left at their default values.

    Raises:
        SaveError: `strict`, and the value holds something that no text can name, such as a lambda.
    """

    def sub(v: Any, deeper: int = 0) -> str:
        return to_text(v, defaults=defaults, strict=strict, width=width, indent=indent + deeper)

    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is float and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if type(value) in (type(None), bool, int, float, str):
        return (
            f'"{value}"'
            if isinstance(value, str) and value.isprintable() and not set('"\\') & set(value)
            else repr(value)
        )
    if isinstance(value, tuple):
        return f"({', '.join(map(sub, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{', '.join(map(sub, value))}]"
    if isinstance(value, functools.partial):
        head, parts = (
            "partial",
            [(None, value.func), *((None, x) for x in value.args), *value.keywords.items()],
        )
    elif isinstance(value, Printed):
        kind, parts = value.parts()
        head = kind if isinstance(kind, str) else _name_of(kind, strict)
    elif isinstance(value, Mapping):
        return "{" + ", ".join(f"{sub(k)}: {sub(v)}" for k, v in value.items()) + "}"
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [
            f
            for f in dataclasses.fields(value)
            if f.init and (defaults or not _is_default(f, value))
        ]
        head, parts = (
            _name_of(type(value), strict),
            [(f.name, getattr(value, f.name)) for f in shown],
        )
    else:
        return _name_of(value, strict)
    flat = f"{head}({', '.join(sub(v) if k is None else f'{k}={sub(v)}' for k, v in parts)})"
    if len(flat) + indent <= width:
        return flat
    pad = " " * (indent + 4)
    lines = "".join(f"{pad}{sub(v, 4) if k is None else f'{k}={sub(v, 4)}'},\n" for k, v in parts)
    return f"{head}(\n{lines}{' ' * indent})"


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    made = (
        field.default_factory()
        if field.default_factory is not dataclasses.MISSING
        else field.default
    )
    return made is not dataclasses.MISSING and bool(getattr(value, field.name) == made)


def _name_of(value: Any, strict: bool) -> str:
    """The text that leads back to a class or function."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module == "__main__":  # a script: its file's name leads back to it, once it is imported
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem
    if module and name and "<" not in name and (not strict or _leads_back(value)):
        return (
            name
            if module.startswith("flowrl.") and name in _public("__all__")
            else f'load("{module}:{name}")'
        )
    if strict:
        what = f"{name} in {module}" if name else a(value)
        raise SaveError(
            f"{what} can't be written to a file: only classes and functions at the top of an importable module have a "
            "name that leads back to them. Move it into a module of its own."
        )
    return f"<{name or type(value).__name__}>"


def _leads_back(value: Any) -> bool:
    """Whether the module and name that a function or class tells are its own: those of a bound method, say, are its class's."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return bool(found == value)


# -- from text -----------------------------------------------------------------------------------------------------


def from_text(
    text: str, *, allow: Collection[str] = (), source: str = "text", what: str = "graph"
) -> Any:
    """Build the value that `to_text` wrote. Nothing is executed but the constructors of frozen settings.

    Args:
        text: the Python that would build it.
        allow: the packages that may be imported.
        source: where the text is from, for errors.
        what: what it should be, for errors.

    Raises:
        GraphError: the text is not of this form.
        SaveError: it names a package that is not allowed.
    """
    if isinstance(allow, str) or not all(isinstance(a, str) for a in allow):
        raise SettingError(
            f"allow takes a list of package names, such as ['my_package'], got {allow!r}", source
        )
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f"line {error.lineno}" if isinstance(error, SyntaxError) else "it"
        raise GraphError(f"{line} is no {what}: {getattr(error, 'msg', error)}", source) from None
    return _Reader(allow, source).value(tree.body)


class _Reader:
    def __init__(self, allow: Collection[str], source: str) -> None:
        self.allow = allow
        self.source = source

    def value(self, node: ast.expr) -> Any:
        """The value that an expression stands for.

        Raises:
            FlowrlError: with the file and line.
        """
        try:
            return self.read(node)
        except FlowrlError as error:
            if error.where != self.source:  # the innermost expression names its line
                error.message, error.where = f"line {node.lineno}: {error}", self.source
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise GraphError(f"line {node.lineno}: {error}", self.source) from None

    def read(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=v):
                return v
            case ast.Tuple(elts=items):
                return tuple(self.value(x) for x in items)
            case ast.List(elts=items):
                return [self.value(x) for x in items]
            case ast.Dict(keys=keys, values=values) if None not in keys:
                return {
                    self.value(typing.cast("ast.expr", k)): self.value(v)
                    for k, v in zip(keys, values, strict=True)
                }
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.Name(id="inf" | "nan" as name):
                return float(name)
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="fl"), attr=name):
                return _own(name)
            case ast.Call(
                func=ast.Name(id="load"), args=[ast.Constant(value=str(path))], keywords=[]
            ):
                return named(path, self.allow)
            case ast.Call(func=ast.Name(id="partial")):
                function, *args = (self.value(x) for x in node.args)
                return functools.partial(function, *args, **self.keywords(node))
            case ast.Call(func=ast.Name(id="chain"), args=[]):
                return _public("chain")(**self.keywords(node))
            case ast.Call(func=ast.Attribute(value=target, attr="then"), args=[]) if isinstance(
                graph := self.value(target), _public("Graph")
            ):
                return graph.then(**self.keywords(node))
            case ast.Call(
                func=ast.Name()
                | ast.Attribute(value=ast.Name(id="fl"))
                | ast.Call(func=ast.Name(id="load")) as function
            ) if _makes(kind := self.value(function)):
                return kind(*map(self.value, node.args), **self.keywords(node))
        raise GraphError(f"{ast.unparse(node)!r} is more than plain data")

    def keywords(self, node: ast.Call) -> dict[str, Any]:
        names = [k.arg for k in node.keywords]
        for name in names:
            if name is None or names.count(name) > 1:
                raise GraphError(
                    f"{f'{name}= stands twice' if name else '** is more than plain data'}"
                )
        return {str(k.arg): self.value(k.value) for k in node.keywords}


def _public(name: str) -> Any:
    return getattr(importlib.import_module("flowrl"), name)


def _own(name: str) -> type:
    """A class of flowrl's own that a graph may be made of."""
    names = [n for n in _public("__all__") if n[0].isupper()]
    if name not in names:
        raise GraphError(unknown("name", name, names))
    return _harmless(_public(name), name)


def _makes(kind: Any) -> bool:
    """Whether a text may call it: of flowrl's own only what does nothing but hold settings."""
    own = isinstance(kind, type) and kind.__module__.startswith("flowrl.")
    plain = own and (
        dataclasses.is_dataclass(kind) or issubclass(kind, Spec) or kind is _public("Graph")
    )
    return isinstance(kind, type) and (plain or not own)


PACKAGES = tuple(
    f"flowrl.{name}." for name in ("graph", "rl", "envs", "rollout", "replay", "learner", "ops")
)
"""The packages of the classes that a graph may be made of. Making one does nothing outside this process."""


def _harmless(target: Any, name: str) -> type:
    if not isinstance(target, type) or not target.__module__.startswith(PACKAGES):
        raise GraphError(f"'{name}' is nothing that a graph is made of")
    return target


def named(path: str, allow: Collection[str] | None = None) -> Any:
    """What ``package.module:name`` leads to.

    Args:
        path: where it is.
        allow: the packages beyond flowrl that may be imported, or None for any. Of flowrl's own, what a graph is made of is always allowed.

    Raises:
        SaveError: the package is not allowed.
        GraphError: there is no such module or name.
    """
    module, _, qualname = path.partition(":")
    package = module.partition(".")[0]
    own = allow is not None and package == "flowrl"
    if (
        allow is not None
        and not own
        and not any(module == a or module.startswith(f"{a}.") for a in allow)
    ):
        raise SaveError(
            f"this needs code from '{module}', which is not flowrl's own; "
            f"allow it with --import {package} (fl.load(..., allow=['{package}'])) if you trust it"
        )
    try:
        with importing(f"load('{path}')"):
            target = importlib.import_module(module)
        for part in qualname.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise GraphError(f"can't load '{path}': {error}") from None
    return _harmless(target, path) if own else target
