"""The state of NNX modules, by name and as text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def split_module(module: Any) -> tuple[Any, Any, Any]:
    """Return a module's graph definition, its parameters, and the rest of its state."""
    # The stubs of flax know no `...`.
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)  # type: ignore[misc]
    return graphdef, params, rest


def paths_of(state: Any) -> tuple[list[str], Any]:
    """Return a path such as ``actor/layers/0/kernel`` for every leaf, and the tree structure."""

    def name(path: Any) -> str:
        return "/".join(str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey))

    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    return [name(path) for path, _ in paths], tree


def by_name(paths: tuple[list[str], Any], state: Any) -> dict[str, Any]:
    """Return the leaves of a state by the names that `paths_of` found."""
    return dict(zip(paths[0], jax.tree.leaves(state), strict=True))


def shapes_text(arrays: Any) -> str:
    """Return the types and shapes of the arrays of a tree as text."""
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(arrays)) or "nothing"


def where_rows(flags: Any, x: Any, y: Any) -> Any:
    """Return ``x [B, ...]`` where ``flags [B]``, else ``y``."""
    return jnp.where(flags.reshape(-1, *(1,) * (y.ndim - 1)), x, y)
