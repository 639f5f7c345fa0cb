"""Snapshots that an earlier version wrote are read for ever, or refused with a clear message.

``python tests/observe/test_golden_snapshots.py v2`` writes the directory of a format of that name
beside this file. One that is in git is never written again: a change of the format has a new number
and a new directory, and what is read stays equal to `KEPT`.
"""

import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from alike import alike
from flowrl.core import blocks
from flowrl.core.encoding import _BACK, GENERATORS, KEYS
from flowrl.core.items import Batch, Filling, Metrics
from flowrl.core.keeping import Leaves
from flowrl.core.metrics import Summed
from flowrl.observe.snapshots import FORMAT, Snapshots, SnapshotWriter, newest_snapshot

GOLDEN = Path(__file__).parent / "golden_snapshots"


def generator(kind):
    """A generator that has half a draw left, and has spawned another."""
    random = np.random.Generator(getattr(np.random, kind)([1, 2, 3]))
    random.integers(9, size=3, dtype=np.int32)
    random.spawn(1)
    return random


KEPT = {
    "none": None,
    "numbers": [True, 1, -(2**70), 10**40, 0.1, -0.0, float("inf"), float("nan"), 5e-324],
    "texts": ["", "plain", "\u00e9\U0001f600\ud800", b"", b"\x00\xff"],
    "fraction": Fraction(-1, 3),
    "tuple": (1, (2,), []),
    "pairs": {1: "a", (2, "b"): {"x": 1}, None: 2, "1": 3},
    "mappings": [
        Counter(a=2),
        OrderedDict(b=1, a=2),
        defaultdict(Counter, {("n", "r"): Counter(c=1)}),
    ],
    "deques": [deque([1, 2], 3), deque([[1]]), deque(maxlen=0)],
    "arrays": {
        "many": np.arange(40, dtype=np.float64).reshape(5, 8),
        "zero": np.array(7, np.int16),
        "empty": np.zeros((0, 3), np.uint8),
        "big": np.arange(3).astype(">i4"),
        "bool": np.array([True, False]),
        "complex": np.array([1 + 2j], np.complex64),
        "half": np.array([1.5, np.nan], np.float16),
        "time": np.array(["2026-11-24", "NaT"], "datetime64[s]"),
        "text": np.array(["ab", ""]),
        "bytes": np.array([b"ab", b""]),
        "bfloat16": np.array([1.5, -2], ml_dtypes.bfloat16),
        "int4": np.array([-8, 7], ml_dtypes.int4),
    },
    "scalars": [np.float32(0.5), np.int64(-1), np.bool_(True), np.str_("x"), ml_dtypes.bfloat16(2)],
    "device": [
        jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
        jnp.asarray(1.5),
        jnp.asarray(2),
        jnp.full((2,), 0.5),
        jnp.float32(1.5),
        jnp.zeros((2, 0), jnp.bfloat16),
        jnp.array([True, False]),
    ],
    "keys": {kind: jax.random.key(3, impl=kind) for kind in KEYS},
    "generators": {kind: generator(kind) for kind in GENERATORS},
    "items": [
        Batch({"obs": np.ones((2, 1, 3), np.float32)}, {"version": np.array([4])}),
        Metrics(("a", "b"), jnp.array([0.5, 1.5])),
        Summed(2, 3.0, 1.0, 2.0),
        Filling(3, 1000),
    ],
    "leaves": Leaves({"['w']": jnp.ones(2), "['b'].x": np.zeros(1)}),
}


def make(folder):
    """Write a snapshot of what is above, with blocks that are small enough for git."""
    assert not folder.exists()
    blocks.SMALL, blocks.BLOCK = 256, 2048
    settings = Snapshots(every=0)
    SnapshotWriter(settings, folder, "the graph\n", "the plan\n").write(
        12, 3456, lambda: nullcontext(KEPT)
    )


def kinds(text):
    """The kinds of value in a snapshot's JSON."""
    if isinstance(text, dict):
        return {next(iter(text))}.union(*map(kinds, text.values()))
    return set().union(*map(kinds, text)) if isinstance(text, list) else set()


@pytest.mark.parametrize("name", ["v1"])
def test_an_old_snapshot_holds_what_was_written(name):
    warnings = []
    found = newest_snapshot(GOLDEN / name, (), warnings.append)
    assert not warnings
    assert (found.row, found.rows_bytes) == (12, 3456)
    assert (found.graph, found.plan) == ("the graph\n", "the plan\n")
    alike(KEPT, found.state)
    for kind, random in found.state["generators"].items():
        assert random.random() == generator(kind).random()


def test_the_golden_snapshot_has_every_kind_and_blocks_of_their_own():
    (file,) = (GOLDEN / f"v{FORMAT}/snapshots").glob("row-*.json")
    assert set(_BACK) <= kinds(json.loads(file.read_bytes().partition(b"\n")[2])["state"])
    sizes = [block.stat().st_size for block in (file.parent / "blocks").iterdir()]
    assert len(sizes) >= 4
    assert sum(sizes) < 20_000


if __name__ == "__main__":
    make(GOLDEN / sys.argv[1])
