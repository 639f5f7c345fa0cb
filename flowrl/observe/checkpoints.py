"""Weights of policies in orbax checkpoints."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flowrl.rl.policies import Network, Weights


def write_weights(weights: Weights, path: Path) -> None:
    """Write weights as an orbax checkpoint.

    Args:
        weights: arrays by name.
        path: of a directory that does not exist.

    Raises:
        OSError: they can't be written.
    """
    arrays = jax.device_get(_savable(weights))
    try:
        _write(arrays, path.resolve())
    except TimeoutError:
        # Orbax measures its time-outs by the machine's clock, which may have been set meanwhile. A
        # disk that takes longer than they allow does so again.
        shutil.rmtree(path, ignore_errors=True)
        _write(arrays, path.resolve())


def _write(arrays: dict[str, Any], path: Path) -> None:
    """Write plain arrays as an orbax checkpoint.

    Raises:
        OSError: they can't be written; a TimeoutError where orbax waited for too long.
    """
    with _orbax().StandardCheckpointer() as checkpointer:
        try:
            checkpointer.save(path, arrays)
            checkpointer.wait_until_finished()
        except ValueError as error:
            # On a full disk orbax raises the error of the library that writes for it.
            code = re.search(r"os_error_code='(\d+)'", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def saved_weights(folder: Path) -> Weights:
    """Read all arrays of a saved policy by their names, whatever network they are of.

    Random keys are arrays of plain numbers in it.

    Args:
        folder: of the policy, which holds them in ``weights``.
    """
    path = (folder / "weights").resolve()
    with _orbax().StandardCheckpointer() as checkpointer:
        found = dict(checkpointer.metadata(path).item_metadata)
        wanted = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), found)
        saved = checkpointer.restore(path, wanted)
    # An empty part was not saved.
    return Weights(*(saved.get(part, {}) for part in Weights._fields))


def read_weights(path: Path, net: Network) -> Weights:
    """Read the weights of a network from an orbax checkpoint."""
    # Shapes and types are enough, so nothing is computed.
    like = jax.eval_shape(net.init, jax.random.key(0))
    wanted = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype),
        jax.eval_shape(lambda: _savable(net.init(jax.random.key(0)))),
    )
    with _orbax().StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(path.resolve(), wanted)
    parts = []
    for part in Weights._fields:
        shapes = getattr(like, part)
        # An empty part was not saved.
        parts.append({k: as_like(saved[part][k], x) for k, x in shapes.items()})
    return Weights(*parts)


def plain(x: Any) -> Any:
    """Return an array as plain numbers, also if it is of random keys."""
    return jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def as_like(x: Any, like: Any) -> Any:
    """Return an array on the device, as a random key if `like` is one."""
    array = jax.numpy.asarray(x)
    if jax.numpy.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array)
    return array


def _savable(weights: Weights) -> dict[str, Any]:
    """Return weights as plain arrays, because orbax knows no random keys and no empty trees."""
    parts: dict[str, Any] = {}
    for part, named in weights._asdict().items():
        if named:
            parts[part] = {name: plain(x) for name, x in named.items()}
    return parts


def _orbax() -> Any:
    """Import orbax, after silencing what it logs through absl."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    import orbax.checkpoint as ocp

    return ocp
