"""Plain JSON for trees of values, and their arrays' bytes beside it. Nothing is pickled.

What is read may come from anyone: no class's own code runs when its values are made again, but for
kinds of numbers, and no number is believed before it was compared with what is there.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from fractions import Fraction
from functools import cached_property
from importlib import import_module
from operator import attrgetter
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
Get = Callable[[Any, int], bytearray]
"""A function that returns the bytes of an array, given by what it is found and their number.

Nobody else may hold them, for arrays of a run are written to.
"""
GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
"""The generators of random numbers whose states are kept."""
KEYS = ("threefry2x32", "rbg", "unsafe_rbg")
"""The kinds of JAX's random keys that are kept."""
MAPPINGS: dict[str, type[dict[Any, Any]]] = {"Counter": Counter, "OrderedDict": OrderedDict}
"""Kinds of dict that are kept as what they are, by name."""
FACTORIES: dict[str, Any] = {
    made.__name__: made for made in (bool, int, float, str, list, dict, Counter)
}
"""What may make the missing values of a defaultdict, by name."""
MOST_BYTES = 1 << 42
"""The most bytes of one array: more is a damaged number."""
MOST_DEEP = 100
"""How deep values may be nested, far within what Python can read back."""


class EncodingError(SaveError):
    """A value is of a kind that can't be kept."""


def encoded(value: Any, put: Put) -> Any:
    """Return a value as JSON.

    Known are None, numbers, texts, bytes; dicts (also counters, ordered ones, and those with
    defaults), lists, tuples, deques; arrays of NumPy and JAX, random keys and NumPy's generators;
    fractions; and dataclasses and named tuples that can be imported by their names. Each comes back
    as the very kind that it is.

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
        self.depth = 0

    def of(self, value: Any, where: str) -> Any:
        self.depth += 1
        if self.depth > MOST_DEEP:
            raise _refused(where, f"nested more than {MOST_DEEP} deep, or holds itself")
        text = self._of(value, where)
        self.depth -= 1
        return text

    def _of(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        # By its very type: a subclass may hold more than what is known of its base, such as the
        # mask of an array.
        how = _HOW.get(kind)
        if how is None:
            how = next((how for fits, how in _FITTING if fits(kind)), None)
        if how is None:
            raise _refused(
                where,
                f"{a(value)}, which can't be kept; take dicts, lists, numbers, arrays, dataclasses "
                "and named tuples",
            )
        return how(self, value, where)

    def _all(self, values: Iterable[Any], where: str) -> list[Any]:
        return [self.of(x, f"{where}[{i}]") for i, x in enumerate(values)]

    def int_(self, value: int, where: str) -> Any:
        # Python reads and writes only some thousand decimal digits.
        return value if value.bit_length() < 64 else {"int": hex(value)}

    def float_(self, value: float, where: str) -> Any:
        return value if math.isfinite(value) else {"float": repr(value)}

    def dict_(self, value: Mapping[Any, Any], where: str) -> Any:
        if all(type(key) is str for key in value):
            return {"dict": {key: self.of(x, f"{where}.{key}") for key, x in value.items()}}
        return {"pairs": self._pairs(value, where)}

    def _pairs(self, value: Mapping[Any, Any], where: str) -> list[Any]:
        return [
            [self.of(key, f"{where}, key {key!r}"), self.of(x, f"{where}[{key!r}]")]
            for key, x in value.items()
        ]

    def mapping_(self, value: Mapping[Any, Any], where: str) -> Any:
        return {"mapping": type(value).__name__, "of": self._pairs(value, where)}

    def defaults_(self, value: defaultdict[Any, Any], where: str) -> Any:
        named = {made: name for name, made in FACTORIES.items()}
        if value.default_factory not in named:
            raise _refused(where, f"a defaultdict of other than {', '.join(FACTORIES)}")
        return {"defaults": named[value.default_factory], "of": self._pairs(value, where)}

    def list_(self, value: list[Any], where: str) -> Any:
        return {"list": self._all(value, where)}

    def tuple_(self, value: tuple[Any, ...], where: str) -> Any:
        return {"tuple": self._all(value, where)}

    def deque_(self, value: deque[Any], where: str) -> Any:
        return {"deque": self._all(value, where), "most": value.maxlen}

    def number_(self, value: float, where: str) -> Any:
        # Subclasses of numbers, such as `Filling`, say what they are made of.
        made_of: Any = type(value).__getnewargs__
        return {"number": _importable(value, where), "of": self._all(made_of(value), where)}

    def array_(self, value: Any, where: str) -> Any:
        x = np.asarray(value)
        try:
            known = _dtype(str(x.dtype)) == x.dtype
        except (TypeError, ValueError):
            known = False
        if not known:
            raise _refused(where, f"an array of {x.dtype}, which can't be kept")
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
            kind = str(jax.random.key_impl(value))
            if kind not in KEYS:
                raise _refused(where, f"a random key of {kind}, which can't be kept")
            return {"key": kind, "of": self.array_(jax.random.key_data(value), where)}
        plain = value.dtype == jnp.asarray(value.dtype.type(0).item()).dtype
        weak = {"weak": True} if value.weak_type and plain else {}
        return {"device": self.array_(jax.device_get(value), where), **weak}

    def generator_(self, value: np.random.Generator, where: str) -> Any:
        bits: Any = value.bit_generator
        if bits.state["bit_generator"] not in GENERATORS:
            raise _refused(where, f"a generator of {type(bits).__name__}, which can't be kept")
        seeds = bits.seed_seq
        # From these it makes the seeds of generators that it spawns.
        seeds = seeds.state if type(seeds) is np.random.SeedSequence else None
        state = {"state": bits.state, "seeds": seeds}
        return {"generator": bits.state["bit_generator"], "of": self.of(state, where)}

    def fraction_(self, value: Fraction, where: str) -> Any:
        return {"fraction": self._all((value.numerator, value.denominator), where)}

    def bytes_(self, value: bytes, where: str) -> Any:
        return {"bytes": self.array_(np.frombuffer(value, np.uint8), where)}

    def leaves_(self, value: Leaves, where: str) -> Any:
        return {"leaves": self.dict_(value.arrays, where)}

    def item_(self, value: Any, where: str) -> Any:
        name, names = _importable(value, where), _names(type(value))
        if others := _beside_fields(value, names):
            raise _refused(
                where,
                f"of the class {type(value).__qualname__}, which holds {', '.join(others)} beside "
                "its fields, and would lose it; make it a field",
            )
        held = {name: self.of(getattr(value, name), f"{where}.{name}") for name in names}
        return {"item": name, "of": held}


_HOW: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    int: _Encoder.int_,
    float: _Encoder.float_,
    dict: _Encoder.dict_,
    defaultdict: _Encoder.defaults_,
    list: _Encoder.list_,
    tuple: _Encoder.tuple_,
    deque: _Encoder.deque_,
    RemoteArray: _Encoder.remote_,
    np.ndarray: _Encoder.array_,
    np.random.Generator: _Encoder.generator_,
    Fraction: _Encoder.fraction_,
    bytes: _Encoder.bytes_,
    Leaves: _Encoder.leaves_,
    **dict.fromkeys(MAPPINGS.values(), _Encoder.mapping_),
}
"""By kind of value: how it becomes JSON."""


def _is_item(kind: type) -> bool:
    """Return whether a class is a named tuple, or a dataclass that holds nothing but its fields."""
    if issubclass(kind, tuple):
        # Named tuples have no class of their own in common.
        return isinstance(getattr(kind, "_fields", None), tuple)
    return is_dataclass(kind) and not issubclass(kind, (int, float, str, bytes, list, dict))


_FITTING: tuple[tuple[Callable[[type], bool], Callable[[_Encoder, Any, str], Any]], ...] = (
    (lambda kind: issubclass(kind, jax.Array), _Encoder.device_),
    (lambda kind: issubclass(kind, np.generic), _Encoder.array_),
    (_is_item, _Encoder.item_),
    (lambda kind: issubclass(kind, int | float), _Encoder.number_),
)
"""How the others become JSON, by what their class is. The first that fits is taken."""


def _refused(where: str, what: str) -> EncodingError:
    return EncodingError(f"{where.lstrip('.') or 'it'} is {what}")


def _beside_fields(value: Any, names: Collection[str]) -> list[str]:
    """Return the attributes of an item that are no fields of it, nor computed of these."""
    held = getattr(value, "__dict__", {})
    kind = type(value)
    return [x for x in held if x not in names and not _is_computed(kind, x)]


def _is_computed(kind: type, name: str) -> bool:
    # A new object computes it again.
    return isinstance(getattr(kind, name, None), cached_property)


def _names(kind: Any) -> list[str]:
    """Return the names of the fields of a dataclass or named tuple."""
    return [f.name for f in fields(kind)] if is_dataclass(kind) else list(kind._fields)


def _importable(value: Any, where: str) -> str:
    """Return the name of a value's class, from which another process can import it.

    Raises:
        EncodingError: there is none.
    """
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        found = None if kind.__module__ == "__main__" else _class(name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not kind:
        raise _refused(
            where,
            f"of the class {kind.__qualname__}, which has no name that another process can import; "
            "define it in a module",
        )
    return name


def _class(name: str) -> Any:
    """Return the class of which this is the own name.

    Raises:
        ImportError, AttributeError, ValueError: there is none.
    """
    module, _, within = name.partition(":")
    found = attrgetter(within)(import_module(module))
    # Through modules that a module imports, any other class could be reached.
    if not isinstance(found, type) or f"{found.__module__}:{found.__qualname__}" != name:
        raise ValueError(f"{name} is not the name of a class")
    return found


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
    except SaveError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever fails, it is not what was written
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
        how = _BACK[next(iter(text), "")]
        return how(self, text)

    def _all(self, values: list[Any]) -> list[Any]:
        return [self.of(x) for x in values]

    def _pairs(self, pairs: list[Any]) -> dict[Any, Any]:
        found = {self.of(key): self.of(x) for key, x in pairs}
        if len(found) != len(pairs):
            raise ValueError("a dict with a key twice")
        return found

    def defaults_(self, text: dict[str, Any]) -> Any:
        return defaultdict(FACTORIES[text["defaults"]], self._pairs(text["of"]))

    def deque_(self, text: dict[str, Any]) -> deque[Any]:
        most, values = text["most"], self._all(text["deque"])
        if most is not None and whole(most) < len(values):
            raise ValueError(f"a deque of {len(values)} where {most} are the most")
        return deque(values, most)

    def array_(self, text: dict[str, Any]) -> Any:
        kind = next(iter(text))
        dtype, shape = _dtype(text[kind]), tuple(whole(n) for n in text["shape"])
        number = math.prod(shape) * dtype.itemsize
        if number > MOST_BYTES or (kind == "scalar" and shape):
            raise ValueError(f"an array of shape {shape}")
        x = np.frombuffer(self.get(text["at"], number), dtype).reshape(shape)
        # NumPy counts by these bytes, and writes as many numbers as it counted.
        if dtype == np.bool_ and x.view(np.uint8).max(initial=0) > 1:
            raise ValueError("a bool that is neither 0 nor 1")
        return x[()] if kind == "scalar" else x

    def device_(self, text: dict[str, Any]) -> Any:
        x = self.array_(text["device"])
        if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
            raise SaveError(f"it has JAX arrays of {x.dtype}: set JAX_ENABLE_X64=1, as it had")
        if not text.get("weak"):
            return jnp.asarray(x, x.dtype)
        # Only what begins as a number of Python is of a weak type.
        return jnp.full(x.shape, x.dtype.type(0).item()).at[...].set(x)

    def key_(self, text: dict[str, Any]) -> Any:
        if text["key"] not in KEYS:
            raise ValueError(f"a random key of {text['key']!r}")
        return jax.random.wrap_key_data(jnp.asarray(self.array_(text["of"])), impl=text["key"])

    def generator_(self, text: dict[str, Any]) -> np.random.Generator:
        if text["generator"] not in GENERATORS:
            raise ValueError(f"a generator {text['generator']!r}")
        held = self.of(text["of"])
        state, seeds = held["state"], held["seeds"]
        # NumPy reads its memory at these places without looking where they are.
        for part, name, most in ((state["state"], "pos", 624), (state, "buffer_pos", 4)):
            if name in part and whole(part[name]) > most:
                raise ValueError(f"a generator at {part[name]}")
        if seeds is not None and whole(seeds["pool_size"]) > 1024:
            raise ValueError(f"a pool of {seeds['pool_size']}")
        made = getattr(np.random, text["generator"])(seeds and np.random.SeedSequence(**seeds))
        made.state = state
        return np.random.Generator(made)

    def float_(self, text: dict[str, Any]) -> float:
        if text["float"] not in ("nan", "inf", "-inf"):
            raise ValueError(f"a number {text['float']!r}")
        return float(text["float"])

    def fraction_(self, text: dict[str, Any]) -> Fraction:
        # Fraction would also take texts, of which a short one may be a number of any length.
        above, below = (x.__index__() for x in self._all(text["fraction"]))
        return Fraction(above, below)

    def _allowed(self, name: str) -> Any:
        """Return a class by its name.

        Raises:
            SaveError: it is of a package that is not allowed.
        """
        package = name.partition(":")[0].partition(".")[0]
        if package not in self.allow:
            raise SaveError(f"it names {name}, and {package} is not a package of the run's graph")
        return _class(name)

    def item_(self, text: dict[str, Any]) -> Any:
        kind = self._allowed(text["item"])
        if not _is_item(kind):
            raise ValueError(f"{text['item']} is no dataclass and no named tuple")
        held = {name: self.of(x) for name, x in text["of"].items()}
        if list(held) != _names(kind):
            raise SaveError(f"{text['item']} has other fields now than when it was written")
        if issubclass(kind, tuple):
            return tuple.__new__(kind, held.values())
        made = object.__new__(kind)
        for name, x in held.items():
            object.__setattr__(made, name, x)
        return made

    def number_(self, text: dict[str, Any]) -> Any:
        kind = self._allowed(text["number"])
        if not issubclass(kind, int | float):
            raise TypeError(f"{text['number']} is no kind of number")
        return kind(*self._all(text["of"]))


def whole(n: Any) -> int:
    """Return a number that was read, if it is a whole one that can be a size or a place.

    Raises:
        ValueError: it is not.
    """
    if type(n) is not int or not 0 <= n < 1 << 63:
        raise ValueError(f"{str(n)[:40]} where a whole number is wanted")
    return n


def _dtype(name: str) -> np.dtype[Any]:
    """Return a type of numbers by its name, those of machine learning among them.

    Raises:
        TypeError, ValueError: it is not the name of a type that is kept.
    """
    if not re.fullmatch(r"[<>|]?[a-zA-Z]+[0-9a-z_]*(\[[0-9a-zA-Z]+\])?", name):
        raise ValueError(f"an array of {name!r}")
    own = getattr(ml_dtypes, name, None)
    is_own = isinstance(own, type) and issubclass(own, np.generic)
    found = np.dtype(own if is_own else name)
    if found.hasobject or found.fields is not None or not found.itemsize or found.subdtype:
        raise ValueError(f"an array of {name}")
    return found


_BACK: dict[str, Callable[[_Decoder, dict[str, Any]], Any]] = {
    "int": lambda _, text: int(text["int"], 16),
    "float": _Decoder.float_,
    "dict": lambda self, text: {k: self.of(x) for k, x in text["dict"].items()},
    "pairs": lambda self, text: self._pairs(text["pairs"]),
    "mapping": lambda self, text: MAPPINGS[text["mapping"]](self._pairs(text["of"])),
    "defaults": _Decoder.defaults_,
    "list": lambda self, text: self._all(text["list"]),
    "tuple": lambda self, text: tuple(self._all(text["tuple"])),
    "deque": _Decoder.deque_,
    "array": _Decoder.array_,
    "scalar": _Decoder.array_,
    "device": _Decoder.device_,
    "key": _Decoder.key_,
    "generator": _Decoder.generator_,
    "fraction": _Decoder.fraction_,
    "bytes": lambda self, text: bytes(self.array_(text["bytes"])),
    "leaves": lambda self, text: Leaves(self.of(text["leaves"])),
    "item": _Decoder.item_,
    "number": _Decoder.number_,
}
"""By the first key of an object of JSON: how it becomes a value again."""
