"""A member of a group of processes that work as one.

Each has all functions and all state, and does what the others do, in the same order. JAX joins
their devices, over which `core/mesh.py` splits the rows of an update. Of arrays that are joined
from parts, such as rollouts, each takes its share alone, so that they stay on their nodes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from flowrl.core.clock import TRANSFER, By
from flowrl.core.items import Packed
from flowrl.core.mesh import joined, on_all, on_one, shared, total, whole
from flowrl.runtime.keeper import At, Joint, Keeper

MEETING_SECONDS = 120
"""How long the members of a group may take to meet."""


def share_of(joint: Joint, index: int, count: int, devices: int) -> slice | None:
    """Return which parts of an array a member takes, if the members can share it evenly.

    Args:
        joint: the array.
        index: of the member.
        count: of the members.
        devices: of all members together.

    Returns:
        The parts; None where each member takes the whole array.
    """
    ends = [0, *accumulate(joint.lengths)]
    begin, end = index * ends[-1] // count, (index + 1) * ends[-1] // count
    # What the keeper has itself is laid out already. All members have to come to the same answer.
    kept = any(not isinstance(part, At) or part.number >= 0 for part in joint.parts)
    cuts = {number * ends[-1] // count for number in range(count)}
    if kept or ends[-1] % devices or not cuts <= set(ends):
        return None
    return slice(ends.index(begin), ends.index(end))


def needed(args: Any, index: int, count: int, devices: int) -> set[int]:
    """Return which of the packed arrays that come with a message a member needs.

    Args:
        args: the other arguments of the message.
        index: of the member.
        count: of the members.
        devices: of all members together.
    """
    found: set[int] = set()
    for x in jax.tree.leaves(args):
        parts = [x]
        if isinstance(x, Joint) and (share := share_of(x, index, count, devices)) is not None:
            parts = [*x.parts[share]]
        addresses = (at for part in parts for at in _addresses(part))
        found |= {~at.number for at in addresses if at.number < 0}
    return found


def _addresses(x: Any) -> Iterator[At]:
    """Yield the addresses that something in a message is made of."""
    if isinstance(x, Joint):
        for part in x.parts:
            yield from _addresses(part)
    elif isinstance(x, At):
        yield x


class Member(Keeper):
    """One process of a group."""

    def begin(self) -> None:
        """Wait for `join`: JAX must know of the group before any code of the user's may use it."""

    def free_port(self) -> int:
        """Return a port of this machine that nothing uses."""
        with socket.socket() as free:
            free.bind(("", 0))
            port: int = free.getsockname()[1]
            return port

    def join(self, address: str, count: int, index: int) -> int:
        """Meet the other members, and take over what only the driver's process knows.

        Args:
            address: ``HOST:PORT`` at which they meet, on the node of the first.
            count: of the members.
            index: of this one.

        Returns:
            How many devices they have together.
        """
        self.count, self.index = count, index
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, count, index, initialization_timeout=MEETING_SECONDS)
        super().begin()
        add = shared(total, self.devices(), PartitionSpec(), PartitionSpec())
        # The first sum makes the connections, of which gloo writes a line to standard output.
        with _quiet():
            jax.jit(add)(jnp.float32(1)).block_until_ready()
        return self.devices()

    def gather(self, dropped: Sequence[int], tree: Any, *sent: Packed) -> None:
        """Take part in what `make` of another member needs, whose arguments these are."""
        with By(self.clock), TRANSFER:
            self._values(jax.tree.leaves(tree), sent)
            self._drop(dropped)

    def _laid_out(self, outputs: Any) -> list[jax.Array]:
        # Laid out alike, whoever computed them, they need no other compiled functions.
        return [on_all(x) for x in jax.tree.leaves(outputs)]

    def _values(self, leaves: Sequence[Any], sent: Sequence[Packed]) -> list[Any]:
        return [_here(x) for x in self._resolved(leaves, sent)]

    def _joined(self, joint: Joint, sent: Sequence[Packed]) -> Any:
        share = share_of(joint, self.index, self.count, self.devices())
        if share is not None:
            parts = [self._resolve(part, sent) for part in joint.parts[share]]
            return joined(np.concatenate(parts, joint.axis), joint.axis)
        return self._alone(joint, sent)

    def _alone(self, x: Any, sent: Sequence[Packed]) -> Any:
        """Return an array whole, as each member takes it that shares it with no other."""
        if not isinstance(x, Joint):
            return _here(self._resolve(x, sent))
        return np.concatenate([self._alone(part, sent) for part in x.parts], x.axis)


def _here(x: Any) -> Any:
    """Return an array of the group as one of this process."""
    return on_one(whole(x)) if isinstance(x, jax.Array) else x


@contextmanager
def _quiet() -> Iterator[None]:
    """Send this process's standard output nowhere for a while."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
