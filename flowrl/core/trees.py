"""Trees of arrays as named fields: ``obs['camera']`` and ``obs['arm'][0]`` for a tree ``obs``.

Batches, replays and records hold one array per field. Observations of several parts are so many
fields, named as Python would index the tree; one array alone is the field ``obs`` itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

Array = Any
INDEX = re.compile(r"""\[(\d+|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]""")
"""One index in the name of a field: a number or a quoted key."""


def field_name(root: str, path: Sequence[str | int]) -> str:
    """Return the name of the field at a path of keys and numbers.

    >>> field_name("obs", ["arm", 0])
    "obs['arm'][0]"
    """
    return root + "".join(f"[{part!r}]" for part in path)


def fields_of(root: str, tree: Any) -> dict[str, Array]:
    """Return the arrays of a tree by the names of their fields.

    >>> fields_of("obs", {"arm": (1, 2), "camera": 3})
    {"obs['arm'][0]": 1, "obs['arm'][1]": 2, "obs['camera']": 3}
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {root + jax.tree_util.keystr(path): x for path, x in paths}


def names_of(root: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the fields that make up the tree `root`, none if it is not there."""
    if root in fields:
        return (root,)
    begin = f"{root}["
    return tuple(name for name in fields if name.startswith(begin))


def tree_of(root: str, fields: Mapping[str, Array]) -> Any:
    """Return the tree that the fields of a name make up: the inverse of `fields_of`.

    Raises:
        KeyError: there is no such field.

    >>> tree_of("obs", {"reward": 0, "obs['arm'][0]": 1, "obs['arm'][1]": 2, "obs['camera']": 3})
    {'arm': (1, 2), 'camera': 3}
    """
    if root in fields:
        return fields[root]
    names = names_of(root, fields)
    if not names:
        raise KeyError(root)
    ordered, structure = _structure(root, names)
    return jax.tree.unflatten(structure, [fields[name] for name in ordered])


def with_trees(fields: Mapping[str, Array], *roots: str) -> dict[str, Any]:
    """Return fields with the trees of these names beside them, where there are such fields."""
    trees = {root: tree_of(root, fields) for root in roots if names_of(root, fields)}
    return {**fields, **trees}


def with_last(tree: Any, last: Any) -> Any:
    """Return arrays ``[T, ...]`` of a tree with one more ``[...]`` after each: ``[T + 1, ...]``."""
    return jax.tree.map(lambda x, end: jnp.concatenate([x, end[None]]), tree, last)


@lru_cache(maxsize=256)
def _structure(root: str, names: tuple[str, ...]) -> tuple[list[str], Any]:
    """Return the names of fields in the order of a tree's leaves, and the tree's structure."""
    nested: dict[Any, Any] = {}
    for name in names:
        *path, last = [ast.literal_eval(part) for part in INDEX.findall(name[len(root) :])]
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = name
    return jax.tree.flatten(_with_tuples(nested))


def _with_tuples(nested: Any) -> Any:
    """Return nested dicts with a tuple in place of each that is numbered."""
    if not isinstance(nested, dict):
        return nested
    inner = {key: _with_tuples(value) for key, value in nested.items()}
    if all(isinstance(key, int) for key in inner):
        return tuple(inner[i] for i in range(len(inner)))
    return inner
