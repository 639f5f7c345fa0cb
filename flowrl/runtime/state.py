"""The state of a graph at work, as arrays and a static structure that programs take and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.items import Filling
from flowrl.graph.graph import Graph
from flowrl.graph.period import began_again, is_counter
from flowrl.graph.stages import Schedule
from flowrl.graph.versions import Newest, VersionOwners, is_version
from flowrl.runtime.inline import ProgramPlace

Array = Any


@dataclass(frozen=True)
class Structure:
    """What is static about the state of a graph at work. Policy versions count by their age."""

    tree: Any
    """The tree structure."""
    static: tuple[tuple[Any, ...], ...]
    """By leaf, its kind and what is static about it: ``age``, the learner and the age of a policy
    version; ``array``, shape and dtype of an array of JAX; ``filling``, its mark and whether that
    is reached; ``value``, any other value itself."""
    filled: tuple[Filling, ...] = field(compare=False)
    """The numbers that fill up: rounds that start with other ones do the same, until a mark."""

    def later(self, before: Structure, after: Structure, times: int) -> Structure | None:
        """Return the structure after some work that begins in this one, if it is what was traced.

        It is not where a number that fills up reaches its mark otherwise.

        Args:
            before: the structure in which it was traced.
            after: the structure after it ran once there.
            times: how often it runs.
        """
        if before != self or (times > 1 and after != before):
            return None
        filled = []
        for now, begin, end in zip(self.filled, before.filled, after.filled, strict=True):
            last = now + times * (end - begin)
            # What begins again within the work does so at the same moment from the same number.
            turns = began_again(begin, end) and (now != begin or (times > 1 and end != begin))
            if turns or (end > begin and last >= end.mark):
                return None
            filled.append(Filling(last, end.mark, end.turns))
        return replace(after if times else self, filled=tuple(filled))


class State:
    """The state of a graph's operators, resources and queues, taken apart and put together."""

    def __init__(self, graph: Graph, place: ProgramPlace, schedule: Schedule) -> None:
        self.place = place
        self.schedule = schedule
        self.version_owners = VersionOwners(graph, place.handles)

    def _tree(self) -> Any:
        handles = {name: handle.state for name, handle in self.place.handles.items()}
        queues = {name: list(channel.items) for name, channel in self.schedule.channels.items()}
        return (
            [loop.states for loop in self.schedule.loops],
            handles,
            queues,
            dict(self.place.site.swept),
            self.place.seed,
        )

    def environment_axes(self) -> list[bool]:
        """Return, by array, whether its first axis is of environments.

        Such an axis may be split over devices.
        """
        flags = []
        for path, x in jax.tree_util.tree_flatten_with_path(self._tree())[0]:
            if isinstance(x, jax.Array) or is_counter(path, x):
                flags.append(self._is_spread(path))
        return flags

    def _is_spread(self, path: Any) -> bool:
        """Return whether a leaf is part of what a resource's `spread` names."""
        part, *names = (getattr(key, "key", getattr(key, "idx", None)) for key in path[:3])
        # The resources' states are part 1 of the tree, by resource and then by name. A state that
        # is itself an array has no names.
        if part != 1 or len(names) < 2:
            return False
        return names[1] in self.place.handles[str(names[0])].spread

    def get(self) -> tuple[list[Array], Structure, Newest]:
        """Return the arrays, what is static, and the newest policy versions."""
        paths, tree = jax.tree_util.tree_flatten_with_path(self._tree())
        newest = self.version_owners.newest(paths)
        arrays: list[Array] = []
        filled: list[Filling] = []
        static: list[tuple[Any, ...]] = []
        for path, leaf in paths:
            x = jnp.asarray(leaf) if is_counter(path, leaf) else leaf
            if is_version(path, x):
                learner = self.version_owners.of(path)
                static.append(("age", learner, _comparable(newest[learner] - np.asarray(x))))
            elif isinstance(x, jax.Array):
                arrays.append(x)
                static.append(("array", x.shape, str(x.dtype)))
            elif isinstance(x, Filling):
                filled.append(x)
                static.append(("filling", x.mark, x >= x.mark))
            else:
                static.append(("value", _comparable(x)))
        return arrays, Structure(tree, tuple(static), tuple(filled)), newest

    def put(self, arrays: Sequence[Array], structure: Structure, newest: Newest) -> None:
        """Set the state to one that `get` returned, or to one of the same structure."""
        remaining, filled = iter(arrays), iter(structure.filled)
        leaves = []
        for kind, *facts in structure.static:
            if kind == "array":
                leaves.append(next(remaining))
            elif kind == "filling":
                leaves.append(next(filled))
            elif kind == "value":
                leaves.append(_restored(facts[0]))
            else:
                learner, age = facts
                version = newest.get(learner, 0) - _restored(age)
                leaves.append(version.astype(np.int32)[()])
        tree = jax.tree.unflatten(structure.tree, leaves)
        loops, handles, queues, swept, self.place.seed = tree
        self.place.site.swept.update(swept)
        for loop, states in zip(self.schedule.loops, loops, strict=True):
            loop.states = states
        for name, state in handles.items():
            self.place.handles[name].state = state
        for name, items in queues.items():
            self.schedule.channels[name].items.clear()
            self.schedule.channels[name].items.extend(items)


def _comparable(x: Any) -> Any:
    """Return a value that can be compared and hashed: NumPy's as dtype, shape and bytes."""
    return (x.dtype.str, x.shape, x.tobytes()) if isinstance(x, np.ndarray | np.generic) else x


def _restored(value: Any) -> Any:
    """Return what `_comparable` was given."""
    if not (isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], bytes)):
        return value
    return np.frombuffer(value[2], value[0]).reshape(value[1])[()]


def strong(arrays: Sequence[Array]) -> list[Array]:
    """Return the arrays without weak types, as a loop carries them."""
    return [
        jax.lax.convert_element_type(x, x.dtype)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else x
        for x in arrays
    ]


def differing(a: Structure, b: Structure) -> str:
    """Return where two unequal structures differ, for a message: what `a` had there, and `b`."""
    if a.tree != b.tree:
        return "what its operators hold has another tree structure"
    if a.static == b.static:
        return f"its counts were at {[*map(int, a.filled)]} and became {[*map(int, b.filled)]}"
    pairs = zip(a.static, b.static, strict=True)
    at = next(i for i, (before, after) in enumerate(pairs) if before != after)
    numbered = jax.tree.unflatten(a.tree, range(len(a.static)))
    path = jax.tree_util.tree_flatten_with_path(numbered)[0][at][0]
    # First come the operators' states, by stage and node; then resources and queues, by name.
    name, rest = (path[2], path[3:]) if path[0].idx == 0 else (path[1], path[2:])
    where = f"{name.key}{jax.tree_util.keystr(rest)}"
    changed = f"{where} was {_described(a.static[at])} and became {_described(b.static[at])}"
    if a.static[at][0] == b.static[at][0]:
        return changed
    return f"{changed}; an array in a state is one of JAX from the beginning, such as jnp.zeros(3)"


def _described(static: tuple[Any, ...]) -> str:
    """Return what is static about a leaf, in words: its value, or the shape and type of an array.

    Of policy versions it is the learner and the age in updates.
    """
    kind, *facts = static
    return " ".join([kind, *(str(_restored(fact)) for fact in facts)])
