"""Frozen settings as text, and back: the one address scheme and the one file format.

The text is the Python that would build the value. It is parsed, never executed: a name leads to
flowrl's own public names, and ``load("package.module:name")`` to others, which are imported only
where the caller allows it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import math
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Self

import numpy as np

from flowrl.core.importing import importing
from flowrl.errors import FlowrlError, GraphError, SaveError, SettingError, unknown
from flowrl.graph.keywords import check_keywords, completed
from flowrl.graph.names import harmless, name_of, own_class, public, public_names

PLAIN = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a text",
    type(None): "None", tuple[int, ...]: "whole numbers such as (64, 64)",
}  # fmt: skip
"""The types of plain settings, in words; tuples of whole numbers for the words alone.

`fit` holds them to their annotation, and `to_text` writes them as literals.
"""
_UNFIT: Any = object()


class Printed(ABC):
    """Base class of values that define how they are written as text.

    This is no protocol, since a user's setting that is called `parts` must not make a value one of
    these.
    """

    @abstractmethod
    def parts(self) -> tuple[Any, list[tuple[str | None, Any]]]:
        """Return what to call and the arguments.

        Returns:
            ``(class or name, [(keyword, value), ...])``; the keyword of a positional argument is
            None.
        """


class Spec(Printed):
    """A function or class with the settings to call it with, as a value that compares and prints.

    Args:
        fn: the function or class.
        **settings: its keyword arguments.

    Raises:
        SettingError: `fn` can't be called, or not with these arguments.

    >>> Spec(dict, a=1)
    Spec(load("builtins:dict"), a=1)
    """

    def __init__(self, fn: Callable[..., Any] | None = None, /, **settings: Any) -> None:
        if not callable(fn):
            own = type(self).__name__
            raise SettingError(f"{own} takes a function or a class first, got {fn!r}")
        check_keywords(fn, settings)
        self.__dict__["fn"] = fn
        self.__dict__["settings"] = types.MappingProxyType(settings)

    @classmethod
    def made(cls, fn: Any, settings: dict[str, Any]) -> Self:
        """Return a value of this class with other settings."""
        return cls(fn, **settings)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; make a new one")

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self)
            and self.fn == other.fn
            and _same(*completed(self.fn, self.settings, other.settings))
        )

    def __hash__(self) -> int:
        return hash((type(self), self.fn))

    def __reduce__(self) -> tuple[Any, ...]:
        return (self.made, (self.fn, dict(self.settings)))

    def __repr__(self) -> str:
        return to_text(self, defaults=False)

    def parts(self) -> tuple[Any, list[tuple[str | None, Any]]]:
        """Return the class, then the function and the settings as its arguments."""
        return type(self), [(None, self.fn), *self.settings.items()]

    fn: Callable[..., Any]
    settings: Mapping[str, Any]


def _same(a: Any, b: Any) -> bool:
    """Return whether settings are equal and of one type: 0.0 and False may do other than 0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(np.array_equal(a, b))


# -- settings by address ---------------------------------------------------------------------------


def settings(value: Any) -> dict[str, Any]:
    """Return the fields of a frozen value, by name; empty for anything else."""
    if isinstance(value, Spec):
        return dict(value.settings)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    return {}


def addresses(value: Any) -> Iterator[str]:
    """Yield the paths of all fields of a frozen value and of those inside: ``loss.clip_ratio``."""
    for name, inner in settings(value).items():
        yield name
        yield from (f"{name}.{path}" for path in addresses(inner))


def with_setting(value: Any, path: str, new: Any, where: str) -> Any:
    """Return a frozen value with one field changed.

    Args:
        value: the frozen value.
        path: the path of the field, such as ``loss.clip_ratio``.
        new: the new value of the field.
        where: the address of `value`, for errors.

    Raises:
        SettingError: there is no such field, or it can't take `new`.
    """
    name, _, rest = path.partition(".")
    known = settings(value)
    # The function of a spec itself, or a setting of it that was left at its default.
    if isinstance(value, Spec) and name not in known and not rest:
        if name == "fn":
            return value.made(new, known)
        return value.made(value.fn, {**known, name: new})
    if name not in known:
        raise SettingError(unknown("setting", name, known), where)
    if rest:
        new = with_setting(known[name], rest, new, f"{where}.{name}")
    elif not isinstance(value, Spec):
        new = fit(new, typing.get_type_hints(type(value)).get(name, Any), f"{where}.{name}")
    if isinstance(value, Spec):
        return value.made(value.fn, {**known, name: new})
    try:
        return dataclasses.replace(value, **{name: new})
    except SettingError as error:
        # The new value's class names a setting, but not the address of its owner.
        raise error.at(where) from None


def fit(value: Any, hint: Any, where: str) -> Any:
    """Return a setting as its annotated type takes it.

    An int becomes a float where one is wanted, and a list a tuple.

    Args:
        value: the setting.
        hint: the annotation.
        where: the address of the setting, for errors.

    Raises:
        SettingError: no type in the annotation takes the value.
    """
    if isinstance(value, np.generic):
        value = value.item()
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    # The first type that takes the value: in "int | float" an int stays one.
    for option in options:
        fitted = _fitted(value, option)
        if fitted is not _UNFIT:
            return fitted
    wanted = " or ".join(text for option in options for text in _in_words(option))
    raise SettingError(f"takes {wanted}, got {value!r}", where, wanted=wanted)


def _fitted(value: Any, option: Any) -> Any:
    """Return a setting as one type takes it, `_UNFIT` if the type does not."""
    origin = typing.get_origin(option) or option
    if origin is typing.Annotated:
        origin = typing.get_args(option)[0]
    if origin is Any:
        return value
    if origin is typing.Literal:
        return value if value in typing.get_args(option) else _UNFIT
    if origin is tuple:
        return tuple(value) if isinstance(value, tuple | list) else _UNFIT
    if origin in PLAIN:
        # Python counts a bool as an int, which is hardly what a user means by it.
        if isinstance(value, bool) and origin is not bool:
            return _UNFIT
        if origin is float and isinstance(value, int):
            return float(value) if abs(value) < 1e300 else _UNFIT
        return value if isinstance(value, origin) else _UNFIT
    return value if type(value) not in PLAIN and _is_a(value, origin) else _UNFIT


def _is_a(value: Any, origin: Any) -> bool:
    """Return False for a value that is not of an abstract class; True for any concrete class.

    Concrete classes are left to the owner of the setting, which knows better what to say.
    """
    return not inspect.isabstract(origin) or isinstance(value, origin)


def _in_words(option: Any) -> list[str]:
    """Return what an annotation takes, in words; for an abstract class the public kinds of it."""
    if typing.get_origin(option) is typing.Literal:
        return [repr(x) for x in typing.get_args(option)]
    if typing.get_origin(option):
        return [PLAIN.get(option, str(option))]
    if inspect.isabstract(option):
        known = {name.rpartition(".")[2]: name for name in public_names()}
        kinds = [known[k.__name__] for k in option.__subclasses__() if k.__name__ in known]
        return [f"{name}(...)" for name in kinds] or [option.__name__]
    return [PLAIN.get(option, getattr(option, "__name__", str(option)))]


# -- to text ---------------------------------------------------------------------------------------


def to_text(
    value: Any, *, defaults: bool, strict: bool = False, width: float = 110, indent: int = 0
) -> str:
    """Return a value as the Python that builds it.

    Args:
        value: the value.
        defaults: whether the fields left at their default values are written too.
        strict: whether something that no text can name is an error; if not, it is shown as
            ``<...>``.
        width: the columns beyond which a call is written with one argument a line; `inf`: never.
        indent: the column at which the text begins.

    Raises:
        SaveError: `strict`, and the value holds something that no text can name, such as a lambda.
    """

    def sub(v: Any, deeper: int = 0) -> str:
        return to_text(v, defaults=defaults, strict=strict, width=width, indent=indent + deeper)

    def argument(keyword: str | None, v: Any, deeper: int = 0) -> str:
        return sub(v, deeper) if keyword is None else f"{keyword}={sub(v, deeper)}"

    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in PLAIN:
        return _plain_text(value)
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(map(sub, value))}{comma})"
    if isinstance(value, list):
        return f"[{', '.join(map(sub, value))}]"
    call = _call_of(value, defaults, strict)
    if call is None and isinstance(value, Mapping):
        return "{" + ", ".join(f"{sub(k)}: {sub(v)}" for k, v in value.items()) + "}"
    if call is None:
        return name_of(value, strict)
    head, parts = call
    flat = f"{head}({', '.join(argument(k, v) for k, v in parts)})"
    if len(flat) + indent <= width:
        return flat
    pad = " " * (indent + 4)
    lines = "".join(f"{pad}{argument(k, v, 4)},\n" for k, v in parts)
    return f"{head}(\n{lines}{' ' * indent})"


def _plain_text(value: Any) -> str:
    """Return a number, a bool, a text or None as Python."""
    if type(value) is float and not math.isfinite(value):
        # Their repr is no Python, so they are written as the names that the reader knows.
        if math.isnan(value):
            return "nan"
        return "inf" if value > 0 else "-inf"
    if isinstance(value, str) and value.isprintable() and not set('"\\') & set(value):
        return f'"{value}"'
    return repr(value)


def _call_of(
    value: Any, defaults: bool, strict: bool
) -> tuple[str, list[tuple[str | None, Any]]] | None:
    """Return the name and the arguments of the call that builds a value; None if no call does."""
    if isinstance(value, functools.partial):
        positional: list[tuple[str | None, Any]] = [(None, value.func)]
        positional += [(None, x) for x in value.args]
        return "partial", [*positional, *value.keywords.items()]
    if isinstance(value, Printed):
        kind, parts = value.parts()
        return (kind if isinstance(kind, str) else name_of(kind, strict)), parts
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    fields = [f for f in dataclasses.fields(value) if f.init]
    shown = [f for f in fields if defaults or not _is_default(f, value)]
    return name_of(type(value), strict), [(f.name, getattr(value, f.name)) for f in shown]


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return default is not dataclasses.MISSING and bool(getattr(value, field.name) == default)


# -- from text -------------------------------------------------------------------------------------


def from_text(
    text: str, *, allow: Collection[str] = (), source: str = "text", what: str = "graph"
) -> Any:
    """Return the value that `to_text` wrote.

    Nothing is executed but the constructors of frozen settings.

    Args:
        text: the Python that would build it.
        allow: the packages that may be imported.
        source: where the text is from, for errors.
        what: what it should be, for errors.

    Raises:
        GraphError: the text is not what `to_text` writes.
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
    """Reader of expressions.

    Args:
        allow: the packages that may be imported.
        source: where the text is from, for errors.
    """

    def __init__(self, allow: Collection[str], source: str) -> None:
        self.allow = allow
        self.source = source

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression.

        Raises:
            FlowrlError: with the file and line.
        """
        try:
            return self.read(node)
        except FlowrlError as error:
            # The innermost expression names its line; those around it leave that as it is.
            if error.where != self.source:
                error.message, error.where = f"line {node.lineno}: {error}", self.source
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise GraphError(f"line {node.lineno}: {error}", self.source) from None

    def read(self, node: ast.expr) -> Any:
        """Return the value of an expression; its errors lack the line."""
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
            case ast.Name() | ast.Attribute() if public_name := _public_name(node):
                return own_class(public_name)
            case ast.Call():
                return self.call(node)
        raise GraphError(f"{ast.unparse(node)!r} is more than plain data")

    def call(self, node: ast.Call) -> Any:
        """Return the value of a call."""
        match node:
            case ast.Call(
                func=ast.Name(id="load"), args=[ast.Constant(value=str(path))], keywords=[]
            ):
                return named(path, self.allow)
            case ast.Call(func=ast.Name(id="partial")):
                function, *args = (self.value(x) for x in node.args)
                return functools.partial(function, *args, **self.keywords(node))
            case ast.Call(
                func=ast.Name(id="chain") | ast.Attribute(value=ast.Name(id="fl"), attr="chain"),
                args=[],
            ):
                return public("chain")(**self.keywords(node))
            case ast.Call(func=ast.Attribute(value=target, attr="then"), args=[]) if isinstance(
                graph := self.value(target), public("Graph")
            ):
                return graph.then(**self.keywords(node))
            case ast.Call(
                func=ast.Name() | ast.Attribute() | ast.Call(func=ast.Name(id="load")) as function
            ) if _makes(kind := self.value(function)):
                return kind(*map(self.value, node.args), **self.keywords(node))
        raise GraphError(f"{ast.unparse(node)!r} is more than plain data")

    def keywords(self, node: ast.Call) -> dict[str, Any]:
        """Return the keyword arguments of a call."""
        names = [k.arg for k in node.keywords]
        for name in names:
            if name is None:
                raise GraphError("** is more than plain data")
            if names.count(name) > 1:
                raise GraphError(f"{name}= stands twice")
        return {str(k.arg): self.value(k.value) for k in node.keywords}


def _public_name(node: ast.expr) -> str | None:
    """Return a name without ``fl.``, or None for one in a module that is not of the public ones.

    ``fl.losses.PPOLoss`` and ``losses.PPOLoss`` are the same.
    """
    name = ast.unparse(node).removeprefix("fl.")
    module, _, _ = name.rpartition(".")
    return name if not module or module in public("MODULES") else None


def _makes(kind: Any) -> bool:
    """Return whether a text may call a value.

    It may call any class but those of flowrl's own that do more than hold settings.
    """
    if not isinstance(kind, type):
        return False
    if not kind.__module__.startswith("flowrl."):
        return True
    return dataclasses.is_dataclass(kind) or issubclass(kind, Spec) or kind is public("Graph")


def named(path: str, allow: Collection[str] | None = None) -> Any:
    """Return what ``package.module:name`` leads to.

    Args:
        path: where it is.
        allow: the packages beyond flowrl that may be imported, or None for any. What a graph is
            made of is always allowed of flowrl's own.

    Raises:
        SaveError: the package is not allowed.
        GraphError: there is no such module or name.
    """
    module, _, qualname = path.partition(":")
    package = module.partition(".")[0]
    own = allow is not None and package == "flowrl"
    allowed = allow is None or own
    if not allowed and not any(module == a or module.startswith(f"{a}.") for a in allow or ()):
        raise SaveError(
            f"this needs code from '{module}', which is not flowrl's own; "
            f"allow it with --import {package}, or the path of its file, if you trust it "
            f"(fl.load(..., allow=['{package}']), fl.Frozen(..., allow=('{package}',)))"
        )
    try:
        with importing(f"load('{path}')"):
            target = importlib.import_module(module)
        for part in qualname.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise GraphError(f"can't load '{path}': {error}") from None
    return harmless(target, path) if own else target
