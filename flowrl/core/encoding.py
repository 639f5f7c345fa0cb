"""Plain JSON for trees of values, and their arrays' bytes beside it. Nothing is pickled."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from fractions import Fraction
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from flowrl.core.keeping import Leaves
from flowrl.core.remote import RemoteArray
from flowrl.errors import SaveError, a

Put = Callable[[np.ndarray[Any, Any]], Any]
"""A function that takes an array, and returns by what it is found again, as JSON."""
Get = Callable[[Any, int], bytes]
"""A function that returns the bytes of an array, given by what it is found and their number."""
GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
"""The generators of random numbers whose states are kept."""
MOST_BYTES = 1 << 42
"""The most bytes of one array: more is a damaged number."""


class EncodingError(SaveError):
    """A value is of a kind that can't be kept."""


def encoded(value: Any, put: Put) -> Any:
    """Return a value as JSON.

    Known are None, numbers, texts, bytes; dicts, lists, tuples, deques; arrays of NumPy and JAX,
    random keys and NumPy's generators; fractions; and dataclasses and named tuples that can be
    imported by their names.

    Args:
        value: the value.
        put: takes the arrays.

    Raises:
        EncodingError: something in it is of another kind; the error says where.
    """
    return _Encoder(put).of(value, "")


class _Encoder:
    def __init__(self, put: Put) -> None:
        self.put = put

    def of(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        for kinds, how in _HOW.items():
            if isinstance(value, kinds):
                return how(self, value, where)
        if _is_item(type(value)):
            return self.item_(value, where)
        raise EncodingError(
            f"{where.lstrip('.') or 'it'} is {a(value)}, which can't be kept; take dicts, lists, "
            "numbers, arrays, dataclasses and named tuples"
        )

    def _all(self, values: Any, where: str) -> list[Any]:
        return [self.of(x, f"{where}[{i}]") for i, x in enumerate(values)]

    def dict_(self, value: Mapping[Any, Any], where: str) -> Any:
        if all(type(key) is str for key in value):
            return {"dict": {key: self.of(x, f"{where}.{key}") for key, x in value.items()}}
        pairs = [[self.of(k, where), self.of(x, f"{where}[{k!r}]")] for k, x in value.items()]
        return {"pairs": pairs}

    def tuple_(self, value: tuple[Any, ...], where: str) -> Any:
        if _is_item(type(value)):
            return self.item_(value, where)
        return {"tuple": self._all(value, where)}

    def deque_(self, value: deque[Any], where: str) -> Any:
        return {"deque": self._all(value, where), "most": value.maxlen}

    def number_(self, value: float, where: str) -> Any:
        # Subclasses of numbers, such as `Filling`, say what they are made of.
        made_of: Any = type(value).__getnewargs__
        return {"number": _name(type(value)), "of": self._all(made_of(value), where)}

    def array_(self, value: Any, where: str) -> Any:
        x = np.asarray(value)
        if x.dtype.hasobject or x.dtype.fields is not None:
            raise EncodingError(
                f"{where.lstrip('.')} is an array of {x.dtype}, which can't be kept"
            )
        kind = "scalar" if isinstance(value, np.generic) else "array"
        x = np.ascontiguousarray(x).reshape(x.shape)
        return {kind: str(x.dtype), "shape": list(x.shape), "at": self.put(x)}

    def remote_(self, value: RemoteArray, where: str) -> Any:
        # Its values come here; what it becomes again is sent to its process when it is used.
        values = self.array_(np.asarray(value), where)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return {"key": str(jax.random.key_impl(jax.random.key(0))), "of": values}
        return {"device": values}

    def device_(self, value: jax.Array, where: str) -> Any:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = self.array_(jax.random.key_data(value), where)
            return {"key": str(jax.random.key_impl(value)), "of": data}
        weak = {"weak": True} if value.weak_type and not value.shape else {}
        return {"device": self.array_(jax.device_get(value), where), **weak}

    def generator_(self, value: np.random.Generator, where: str) -> Any:
        state = value.bit_generator.state
        return {"generator": state["bit_generator"], "of": self.of(state, where)}

    def fraction_(self, value: Fraction, where: str) -> Any:
        return {"fraction": [value.numerator, value.denominator]}

    def bytes_(self, value: bytes, where: str) -> Any:
        return {"bytes": value.hex()}

    def leaves_(self, value: Leaves, where: str) -> Any:
        return {"leaves": self.dict_(value.arrays, where)}

    def item_(self, value: Any, where: str) -> Any:
        kind = type(value)
        if "<" in kind.__qualname__ or kind.__module__ == "__main__":
            raise EncodingError(
                f"{where.lstrip('.')} is of the class {kind.__qualname__}, which has no name that "
                "another process can import; define it in a module"
            )
        held = {name: self.of(getattr(value, name), f"{where}.{name}") for name in _names(kind)}
        return {"item": _name(kind), "of": held}


_HOW: dict[Any, Callable[[_Encoder, Any, str], Any]] = {
    Leaves: _Encoder.leaves_,
    dict: _Encoder.dict_,
    list: lambda self, value, where: {"list": self._all(value, where)},
    tuple: _Encoder.tuple_,
    deque: _Encoder.deque_,
    jax.Array: _Encoder.device_,
    RemoteArray: _Encoder.remote_,
    (np.ndarray, np.generic): _Encoder.array_,
    np.random.Generator: _Encoder.generator_,
    Fraction: _Encoder.fraction_,
    bytes: _Encoder.bytes_,
    (int, float): _Encoder.number_,
}
"""By kind of value: how it becomes JSON. The first that fits is taken."""


def _is_item(kind: type) -> bool:
    """Return whether a class is a dataclass or a named tuple."""
    return is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _names(kind: Any) -> list[str]:
    """Return the names of the fields of a dataclass or named tuple."""
    return [f.name for f in fields(kind)] if is_dataclass(kind) else list(kind._fields)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def decoded(text: Any, get: Get, allow: Collection[str] = ()) -> Any:
    """Return the value that `encoded` made JSON of.

    Args:
        text: the JSON.
        get: returns the bytes of arrays.
        allow: packages beside flowrl whose dataclasses and named tuples may be made.

    Raises:
        SaveError: it is not what `encoded` makes, or names another class.
    """
    try:
        return _Decoder(get, frozenset({"flowrl", *allow})).of(text)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SaveError(f"it is not what was written: {error!r}") from None


class _Decoder:
    def __init__(self, get: Get, allow: frozenset[str]) -> None:
        self.get = get
        self.allow = allow

    def of(self, text: Any) -> Any:
        if not isinstance(text, dict):
            if isinstance(text, list):
                raise TypeError("a list without its kind")
            return text
        kind = next(iter(text))
        how: Callable[[Any, dict[str, Any]], Any] = _BACK[kind]
        return how(self, text)

    def _all(self, values: list[Any]) -> list[Any]:
        return [self.of(x) for x in values]

    def array_(self, text: dict[str, Any]) -> Any:
        kind = next(iter(text))
        dtype, shape = _dtype(text[kind]), tuple(int(n) for n in text["shape"])
        number = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or number > MOST_BYTES:
            raise ValueError(f"an array of shape {shape}")
        # A copy, for arrays of a run are written to.
        x = np.frombuffer(self.get(text["at"], number), dtype).reshape(shape).copy()
        return x[()] if kind == "scalar" else x

    def device_(self, text: dict[str, Any]) -> Any:
        x = self.array_(text["device"])
        if text.get("weak"):
            return jnp.asarray(x.item())
        return jnp.asarray(x, x.dtype)

    def key_(self, text: dict[str, Any]) -> Any:
        return jax.random.wrap_key_data(jnp.asarray(self.array_(text["of"])), impl=text["key"])

    def generator_(self, text: dict[str, Any]) -> np.random.Generator:
        if text["generator"] not in GENERATORS:
            raise ValueError(f"a generator {text['generator']!r}")
        made = getattr(np.random, text["generator"])()
        made.state = self.of(text["of"])
        return np.random.Generator(made)

    def float_(self, text: dict[str, Any]) -> float:
        if text["float"] not in ("nan", "inf", "-inf"):
            raise ValueError(f"a number {text['float']!r}")
        return float(text["float"])

    def _class(self, name: str) -> Any:
        """Return a class by its name.

        Raises:
            SaveError: it is of a package that is not allowed.
        """
        module, _, within = name.partition(":")
        package = module.partition(".")[0]
        if package not in self.allow:
            raise SaveError(f"it names {name}, and {package} is not a package of the run's graph")
        found: Any = import_module(module)
        for part in within.split("."):
            found = getattr(found, part)
        return found

    def item_(self, text: dict[str, Any]) -> Any:
        kind = self._class(text["item"])
        if not (isinstance(kind, type) and _is_item(kind)):
            raise ValueError(f"{text['item']} is no dataclass and no named tuple")
        held = {name: self.of(x) for name, x in text["of"].items()}
        if list(held) != _names(kind):
            raise SaveError(f"{text['item']} has other fields now than when it was written")
        made = kind(**{k: x for k, x in held.items() if _is_given(kind, k)})
        for name, x in held.items():
            if not _is_given(kind, name):
                object.__setattr__(made, name, x)
        return made

    def number_(self, text: dict[str, Any]) -> Any:
        kind = self._class(text["number"])
        if not (isinstance(kind, type) and issubclass(kind, int | float)):
            raise TypeError(f"{text['number']} is no kind of number")
        return kind(*self._all(text["of"]))


def _is_given(kind: Any, name: str) -> bool:
    """Return whether a field is an argument of the class."""
    return not is_dataclass(kind) or next(f for f in fields(kind) if f.name == name).init


def _dtype(name: str) -> np.dtype[Any]:
    """Return a type of numbers by its name, those of machine learning among them."""
    own = getattr(ml_dtypes, name, None)
    found = np.dtype(own if own is not None else name)
    if found.hasobject or found.fields is not None:
        raise ValueError(f"an array of {name}")
    return found


_BACK: dict[str, Callable[[_Decoder, dict[str, Any]], Any]] = {
    "dict": lambda self, text: {str(k): self.of(x) for k, x in text["dict"].items()},
    "pairs": lambda self, text: {self.of(k): self.of(x) for k, x in text["pairs"]},
    "list": lambda self, text: self._all(text["list"]),
    "tuple": lambda self, text: tuple(self._all(text["tuple"])),
    "deque": lambda self, text: deque(self._all(text["deque"]), text["most"]),
    "array": _Decoder.array_,
    "scalar": _Decoder.array_,
    "device": _Decoder.device_,
    "key": _Decoder.key_,
    "generator": _Decoder.generator_,
    "fraction": lambda _, text: Fraction(*text["fraction"]),
    "bytes": lambda _, text: bytes.fromhex(text["bytes"]),
    "leaves": lambda self, text: Leaves(self.of(text["leaves"])),
    "float": _Decoder.float_,
    "item": _Decoder.item_,
    "number": _Decoder.number_,
}
"""By the first key of an object of JSON: how it becomes a value again."""
