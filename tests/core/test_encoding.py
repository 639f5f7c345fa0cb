"""Values as JSON and bytes: each comes back as the very kind that it is, or is refused."""

import json
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from enum import IntEnum
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from alike import alike
from flowrl.core.blocks import Blocks, Packer, Unpacker
from flowrl.core.encoding import (
    GENERATORS,
    KEYS,
    MOST_DEEP,
    EncodingError,
    decoded,
    encoded,
    whole,
)
from flowrl.core.items import Batch, Filling, Metrics, Trained
from flowrl.core.keeping import Leaves
from flowrl.core.metrics import Summed
from flowrl.errors import SaveError
from flowrl.rl.policies import Weights

MINE = ("test_encoding",)


class Memory:
    """Takes and gives arrays as a snapshot's blocks do."""

    def __init__(self):
        self.held = []

    def put(self, x):
        self.held.append(x.tobytes())
        return len(self.held) - 1

    def get(self, at, size):
        data = bytearray(self.held[whole(at)])
        if len(data) != size:
            raise ValueError(size)
        return data


def back(value, allow=MINE):
    memory = Memory()
    text = json.dumps(encoded(value, memory.put), allow_nan=False)
    return decoded(json.loads(text), memory.get, allow)


DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
    hnp.unicode_string_dtypes(endianness="?", max_len=3),
    hnp.byte_string_dtypes(max_len=3),
)
ARRAYS = DTYPES.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
)
KEYED = st.one_of(
    st.text(max_size=3),
    st.integers(),
    st.booleans(),
    st.tuples(st.text(max_size=2), st.integers(0, 9)),
    st.none(),
)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.fractions()
)


def nested(values):
    return st.one_of(
        st.lists(values, max_size=3),
        st.lists(values, max_size=3).map(tuple),
        st.dictionaries(KEYED, values, max_size=3),
        st.dictionaries(st.text(max_size=2), values, max_size=3).map(OrderedDict),
        st.lists(values, max_size=3).map(lambda x: deque(x, len(x) + 1)),
        st.lists(values, max_size=3).map(deque),
        st.dictionaries(KEYED, values, max_size=2).map(lambda x: defaultdict(list, x)),
    )


@settings(max_examples=150, deadline=None)
@given(st.recursive(PLAIN | ARRAYS, nested, max_leaves=8))
def test_any_tree_comes_back_as_it_was(value):
    alike(value, back(value))


X = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "value",
    [
        X[::2, ::-3],
        X.T,
        np.asfortranarray(X),
        np.float64(1.5),
        np.float32("nan"),
        np.bool_(True),
        np.int8(-3),
        np.array(7),
        np.zeros((0, 3)),
        np.str_("word"),
        np.datetime64("2026-11-24", "s"),
        np.longdouble("1.1"),
        np.arange(4).astype(">i2"),
        np.arange(4).astype(ml_dtypes.bfloat16),
        ml_dtypes.bfloat16(1.25),
        np.arange(4).astype(ml_dtypes.float8_e4m3fn),
        np.arange(4).astype(ml_dtypes.int4),
        jnp.arange(4),
        jnp.asarray(1.5),
        jnp.asarray(3),
        jnp.float32(3),
        jnp.full((2, 3), 0.5),
        jnp.zeros((2, 0), jnp.bfloat16),
        jnp.array([True, False]),
        jnp.arange(3, dtype=jnp.int4),
        jnp.array([jnp.nan, -jnp.inf]),
        *[jax.random.key(7, impl=kind) for kind in KEYS],
        jax.random.split(jax.random.key(7), 3),
        jax.random.PRNGKey(7),
        -0.0,
        float("-inf"),
        10**5000,
        -(2**63),
        Fraction(10**5000 + 1, 3),
        b"",
        b"\x00\xff",
        "\ud800",
        Counter({"a": 2, ("b", 1): 3}),
        defaultdict(Counter, {("a", "b"): Counter(x=1)}),
        {1: "a", "1": "b", True and (2, "x"): "c", None: "d", 1.5: "e"},
    ],
    ids=lambda x: f"{type(x).__name__}-{getattr(x, 'dtype', '')}",
)
def test_each_kind_comes_back_as_it_was(value):
    alike(value, back(value))
    alike([value], back([value]))


def test_arrays_that_come_back_can_be_written_to_and_are_nobody_elses(tmp_path):
    packer = Packer(Blocks(tmp_path))
    text = encoded([X, X, np.zeros(100_000), np.zeros(100_000)], packer.put)
    small = packer.end()
    unpacker = Unpacker(Blocks(tmp_path), small, packer.sizes)
    first, second, third, fourth = decoded(text, unpacker.get)
    first[:], third[:] = -1, -1
    alike(second, X)
    alike(fourth, np.zeros(100_000))
    alike(decoded(text, unpacker.get)[0], X)


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_draws_on_and_spawns_on(kind):
    random = np.random.Generator(getattr(np.random, kind)([3, 4]))
    random.integers(9, size=3, dtype=np.int32)  # an odd number: half a draw is left
    random.spawn(2)
    again = back({"random": random})["random"]
    assert type(again.bit_generator) is type(random.bit_generator)
    for one, other in zip([random, *random.spawn(2)], [again, *again.spawn(2)], strict=True):
        assert one.integers(2**31, size=5, dtype=np.int32).tolist() == (
            other.integers(2**31, size=5, dtype=np.int32).tolist()
        )
        assert one.normal(size=5).tolist() == other.normal(size=5).tolist()


def test_a_generator_without_seeds_draws_on():
    random = np.random.default_rng(1)
    state = random.bit_generator.state
    own = np.random.PCG64(Sequenced())
    own.state = state
    assert back(np.random.Generator(own)).random() == random.random()


class Sequenced(np.random.bit_generator.ISeedSequence):
    def generate_state(self, n_words, dtype=np.uint32):
        return np.ones(n_words, dtype)


class Pair(NamedTuple):
    left: object
    right: object


class Colour(IntEnum):
    RED = 3


@dataclass(frozen=True)
class Strict:
    """A class whose own code must not run when it is read."""

    x: object
    y: object = field(default=0, init=False)

    def __post_init__(self):
        made.append(self)


made = []


@dataclass(slots=True)
class Slotted:
    x: object


@dataclass
class Named(dict):
    x: int = 0


def test_the_items_of_flowrl_come_back():
    batch = Batch({"obs": X, "reward": jnp.ones(3)}, {"version": np.int32([1, 2])})
    metrics = Metrics(("a", "b"), jnp.arange(2.0))
    trained = Trained(24, metrics, (jnp.float32(1), jnp.int32(2)), {"slot": np.arange(3)})
    weights = Weights(*({"w": jnp.ones(2)} for _ in Weights._fields))
    summed = Summed(2, 1.5)
    for item in (batch, trained, weights, summed, Filling(3, 9)):
        found = back(item, ())
        assert type(found) is type(item)
        alike(jax.tree.leaves(item), jax.tree.leaves(found))
        assert jax.tree.structure(item) == jax.tree.structure(found)
    assert (back(Filling(3, 9)) + 1, back(Filling(3, 9)).mark) == (4, 9)
    leaves = Leaves({"['a']": X, ".b": jnp.ones(2)})
    alike(back(leaves).arrays, leaves.arrays)


def test_classes_of_named_packages_come_back_and_none_of_their_code_runs():
    value = Strict({"a": Pair(1, X)})
    object.__setattr__(value, "y", 5)
    made.clear()
    found = back(value)
    assert made == []
    assert (type(found), found.y) == (Strict, 5)
    alike(found.x, value.x)
    alike(back(Slotted(X)).x, X)
    assert back(Colour.RED) is Colour.RED
    with pytest.raises(SaveError, match=r"names test_encoding:Pair, and test_encoding is not a"):
        back(Pair(1, 2), ())


@dataclass
class Local:
    x: int


Local.__qualname__ = "Renamed"


def local():
    class Within(NamedTuple):
        x: int

    return Within(1)


HOLDING_ITSELF = []
HOLDING_ITSELF.append(HOLDING_ITSELF)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({1, 2}, r"a\.b\[1\] is a set, which can't be kept; take dicts"),
        (object(), r"a\.b\[1\] is an object"),
        (lambda: 0, r"a\.b\[1\] is a function"),
        (int, r"a\.b\[1\] is a type"),
        (1j, r"a\.b\[1\] is a complex"),
        (bytearray(b"a"), r"a\.b\[1\] is a bytearray"),
        ({("x", 1): {2}}, r"a\.b\[1\]\[\('x', 1\)\] is a set"),
        ({Colour: 1}, r"a\.b\[1\], key <enum 'Colour'> is an EnumType"),
        (Pair(1, [object()]), r"a\.b\[1\]\.right\[0\] is an object"),
        (Named(), r"a\.b\[1\] is a Named"),
        (np.array([object()]), r"a\.b\[1\] is an array of object, which can't be kept"),
        (np.array(["x"], np.dtypes.StringDType()), r"is an array of StringDType"),
        (np.zeros(2, [("x", "f4")]), r"is an array of \[\('x', '<f4'\)\]"),
        (np.ma.masked_array([1, 2], [True, False]), r"a\.b\[1\] is a MaskedArray"),
        (np.random.RandomState(0), r"a\.b\[1\] is a RandomState"),
        (defaultdict(lambda: 0), r"a\.b\[1\] is a defaultdict of other than bool, int"),
        (local(), r"of the class local\.<locals>\.Within, which has no name that another process"),
        (Local(1), r"of the class Renamed, which has no name"),
        (HOLDING_ITSELF, r"\[0\]\[0\] is nested more than 100 deep, or holds itself"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_what_cant_be_kept_is_refused_with_its_place(value, says):
    with pytest.raises(EncodingError, match=says):
        encoded({"a": {"b": (0, value)}}, Memory().put)


def test_what_is_as_deep_as_can_be_comes_back():
    value = {}
    for _ in range(MOST_DEEP - 1):
        value = {"a": value} if len(str(value)) % 2 else [value]
    assert back(value) == value


ARRAY = {"array": "float32", "shape": [6], "at": 0}


def generator(name, seeds=None, **changed):
    """The JSON of a generator whose state was changed."""
    memory = Memory()
    state = getattr(np.random, name)(1).state
    for key, x in changed.items():
        (state["state"] if key in state["state"] else state)[key] = x
    return {"generator": name, "of": encoded({"state": state, "seeds": seeds}, memory.put)}, memory


@pytest.mark.parametrize(
    "text",
    [
        {},
        [],
        [1],
        {"list": 5},
        {"unknown": 1},
        {"dict": [1]},
        {"pairs": [[1, 2], [1, 3]]},
        {"pairs": [[{"list": []}, 2]]},
        {"mapping": "dict", "of": []},
        {"defaults": "eval", "of": []},
        {"deque": [1, 2], "most": 1},
        {"deque": [], "most": -1},
        {"deque": [], "most": True},
        {"float": "1" * 9},
        {"int": 5},
        {"int": "word"},
        {"fraction": [1, 0]},
        {"fraction": ["1e999999999"]},
        {"fraction": ["1e999999999", 1]},
        {"fraction": [1.5, 1]},
        {"bytes": "00"},
        {"leaves": ARRAY | {"shape": 3}},
        ARRAY | {"shape": [-6]},
        ARRAY | {"shape": [-2, -3]},
        ARRAY | {"shape": [5]},
        ARRAY | {"shape": [6.0]},
        ARRAY | {"shape": ["6"]},
        ARRAY | {"shape": [6, True]},
        ARRAY | {"shape": [2**40, 2**40]},
        ARRAY | {"shape": [2**62, 0]} | {"at": -1},
        ARRAY | {"shape": [10**30, 0]},
        ARRAY | {"at": -1},
        ARRAY | {"at": True},
        ARRAY | {"at": 1 << 70},
        ARRAY | {"array": "object"},
        ARRAY | {"array": "O"},
        ARRAY | {"array": "(6,)f4"},
        ARRAY | {"array": "f4,f4"},
        ARRAY | {"array": "finfo"},
        ARRAY | {"array": "__doc__"},
        ARRAY | {"array": "V0"},
        ARRAY | {"array": "S0"},
        ARRAY | {"array": 5},
        ARRAY | {"array": ["f4"]},
        ARRAY | {"array": "bool", "shape": [24]},
        {"scalar": "float32", "shape": [6], "at": 0},
        {"device": 5},
        {"key": "own", "of": ARRAY},
        {"key": "threefry2x32", "of": ARRAY},
        {"key": "threefry2x32", "of": {"dict": {}}},
        {"generator": "BitGenerator", "of": {"dict": {}}},
        {"generator": "PCG64", "of": {"dict": {}}},
        {"item": "flowrl.core.items:Batch", "of": {"dict": {}}},
        {"item": "flowrl.core.items:Batch", "of": {"data": 1}},
        {"item": "flowrl.core.items:Batch.__init__", "of": {}},
        {"item": "flowrl.core.items:np.ndarray", "of": {}},
        {"item": "flowrl.core.items:Row", "of": {}},
        {"item": "flowrl.nowhere:Batch", "of": {}},
        {"item": "flowrl:", "of": {}},
        {"item": "flowrl.core.items", "of": {}},
        {"item": "subprocess:CompletedProcess", "of": {}},
        {"item": "..flowrl:x", "of": {}},
        {"item": 5, "of": {}},
        {"number": "builtins:int", "of": [5]},
        {"number": "flowrl.core.items:Batch", "of": [5]},
        {"number": "flowrl.core.items:Filling", "of": [5]},
        # A class that can be reached through an import, under a name that is not its own.
        {"item": "flowrl.core.keeping:jax.stages.Lowered", "of": {}},
        {"item": "flowrl.observe.saver:Curves", "of": {}},
        {"number": "flowrl.core.items:np.float64", "of": [5]},
    ],
    ids=str,
)
def test_what_was_not_written_so_is_refused(text):
    memory = Memory()
    memory.put(X.reshape(-1)[:6])
    with pytest.raises(SaveError):
        decoded(text, memory.get)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("MT19937", {"pos": 625}),
        ("MT19937", {"pos": -1}),
        ("MT19937", {"pos": 1.5}),
        ("MT19937", {"key": np.zeros(5, np.uint32)}),
        ("Philox", {"buffer_pos": 5}),
        ("Philox", {"buffer_pos": -(10**6)}),
        ("PCG64", {"inc": "word"}),
        ("PCG64", {"seeds": {"pool_size": 1 << 40}}),
        ("PCG64", {"seeds": {"pool_size": 4, "unknown": 1}}),
    ],
)
def test_a_generator_that_would_read_beyond_its_memory_is_refused(name, changed):
    text, memory = generator(name, **changed)
    with pytest.raises(SaveError):
        decoded(text, memory.get)
    text, memory = generator(name)
    assert type(decoded(text, memory.get).bit_generator).__name__ == name


def test_deep_json_is_refused():
    text = "x"
    for _ in range(20_000):
        text = {"list": [text]}
    with pytest.raises(SaveError, match="RecursionError"):
        decoded(text, Memory().get)
    while isinstance(text, dict):  # or Python itself would free it in as many nested calls
        text = text["list"][0]


def test_double_precision_of_jax_is_refused_where_it_is_switched_off():
    memory = Memory()
    text = {"device": encoded(np.arange(3.0), memory.put)}
    with pytest.raises(SaveError, match="it has JAX arrays of float64: set JAX_ENABLE_X64=1"):
        decoded(text, memory.get)


class Two(NamedTuple):
    one: int
    other: int


class Loose(Two):
    """Without slots, a subclass of a named tuple can hold more than its fields."""


@dataclass
class Half:
    whole: int

    @cached_property
    def value(self):
        return self.whole / 2


@pytest.mark.parametrize("item", [Loose(1, 2), Half(3)])
def test_what_an_item_holds_beside_its_fields_is_not_lost_unseen(item):
    assert back(item) == item
    item.note = "mine"
    with pytest.raises(EncodingError, match="holds note beside its fields.*make it a field"):
        back(item)


def test_what_is_computed_of_fields_is_computed_again():
    item = Half(3)
    assert item.value == back(item).value == 1.5
