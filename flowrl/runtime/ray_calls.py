"""Calls to Ray's actors: their results, and what it means when there is none."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from flowrl.core.workers import SILENT_SECONDS
from flowrl.errors import FlowrlError, LostError, SettingError
from flowrl.runtime import joining
from flowrl.runtime.driver import missing, way_out
from flowrl.runtime.homes import Stored, fill

ASKING_SECONDS = 10.0
"""How long a keeper's process may take for a call before it is asked whether it is still there."""
HUNG_SECONDS = 60.0
"""How long it may take to answer that."""
CONNECTIONS = ("Gloo", "NCCL")
"""What the errors of XLA name that come from a lost connection between processes."""


class Pickled:
    """An argument that is pickled once, for all calls that have it.

    Args:
        value: the argument, as the called function gets it.
    """

    def __init__(self, value: Any) -> None:
        self.data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray pickles this object with each call, and the call's process gets the argument itself.
        return pickle.loads, (self.data,)


class Pending:
    """The result of a call to a worker in an actor.

    Args:
        ref: Ray's reference to it.
        label: what to call the worker.
        actor: the actor.
        warn: function that is called with a text where the result is waited for for long.
    """

    def __init__(
        self, ref: Any, label: str, actor: Any, warn: Callable[[str], None] | None = None
    ) -> None:
        self.ref = ref
        self.label = label
        self.actor = actor
        self.warn = warn

    def result(self) -> Any:
        """Wait for the result and return it.

        Raises:
            LostError: the actor's process ended, or the result was lost with its node.
            SettingError: the actor's node has no module that is needed there.
        """
        try:
            return self._got()
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if (lacking := _lacking(cause)) is not None:
                raise SettingError(f"{self.label}: {lacking}") from None
            if not isinstance(cause, FlowrlError):
                cause.add_note(f"in {self.label}:\n{error}")
            raise cause from None
        except ray.exceptions.RayActorError as error:
            if (lacking := _lacking(error)) is not None:
                raise SettingError(f"{self.label}: {lacking}") from None
            raise LostError(f"{self.label}'s process ended: {cause_of(error)}") from None
        except ray.exceptions.RayError as error:  # such as a result that was lost with its node
            raise LostError(f"{self.label} gave nothing: {cause_of(error)}") from None

    def _got(self) -> Any:
        """Return what Ray gives for the result, and warn wherever that takes long."""
        waited, longer = 0.0, SILENT_SECONDS
        while self.warn is not None:
            try:
                return ray.get(self.ref, timeout=longer)
            except ray.exceptions.GetTimeoutError:
                waited += longer
                longer = waited
                self.warn(f"{self.label} has given nothing for {waited:.0f} s; it works, or hangs")
        return ray.get(self.ref)

    def wait(self) -> None:
        """Wait until the result is there, and leave it there."""
        ray.wait([self.ref], fetch_local=False)

    def done(self) -> bool:
        """Return whether the result is there."""
        return bool(ray.wait([self.ref], timeout=0, fetch_local=False)[0])


class PendingKept(Pending):
    """The result of a call to keepers, whose processes answer while they work if they do not hang.

    A function that never ends in a process that answers is waited for without an end, and so is a
    process that has not started, for Ray may wait until what it asks for is free; a warning says
    so. Of a group, which does the same in all its processes, the result is that of the first. If
    one of them ends or hangs, the others wait for it in vain, or fail because of it: then it is
    what is reported.

    Args:
        keepers: by Ray's reference to its result, the keeper that was called; each notes in
            `answered` whether it ever answered, and until then reports that it waits.
        label: what to call them together.
    """

    def __init__(self, keepers: Mapping[Any, Any], label: str) -> None:
        first, keeper = next(iter(keepers.items()))
        super().__init__(first, label, keeper.actor)
        self.keepers = keepers

    def result(self) -> Any:
        """Wait for the result and return it.

        Raises:
            LostError: as of `Pending`, or a process has not answered for `HUNG_SECONDS`.
        """
        self.wait()
        if len(self.keepers) > 1:
            self._check([*self.keepers])
        return super().result()

    def wait(self) -> None:
        """Wait until the result is there, and leave it there.

        Raises:
            LostError: a process has not answered for `HUNG_SECONDS`.
        """
        waiting = dict(self.keepers)
        while waiting:
            done, _ = ray.wait(
                [*waiting], num_returns=len(waiting), timeout=ASKING_SECONDS, fetch_local=False
            )
            for ref in done:
                waiting.pop(ref).answered = True
            # What failed in one process of a group is what the others wait for.
            if waiting:
                self._check([ref for ref in self.keepers if ref not in waiting])
            for ref, keeper in waiting.items():
                self._ask(ref, keeper)

    def _ask(self, ref: Any, keeper: Any) -> None:
        """Ask a process that has not given its result whether it is still there."""
        answer = keeper.actor.spent.options(concurrency_group="aside").remote()
        # Both come from one process, so the result may be what comes first.
        came = ray.wait([ref, answer], timeout=HUNG_SECONDS, fetch_local=False)[0]
        if came:
            keeper.answered = True
        elif keeper.answered:
            raise LostError(
                f"{keeper.name}'s process has not answered for {HUNG_SECONDS:g} s: it hangs, or "
                "was stopped"
            )
        else:
            keeper.report_waiting()

    def _check(self, refs: Sequence[Any]) -> None:
        """Raise the error of one of these calls, which are done, if there is one.

        Raises:
            LostError: a process ended, or the processes of a group can't reach one another.
        """
        for number, ref in enumerate(refs):
            keeper = self.keepers[ref]
            try:
                Pending(ref, keeper.name, keeper.actor).result()
            except LostError:
                raise
            except Exception as error:
                # Where another process was lost, this error came of it.
                self._check(refs[number + 1 :])
                if any(name in str(error) for name in CONNECTIONS):
                    text = f"the processes of {self.label} lost their connection: {error}"
                    raise LostError(text) from None
                raise


class PendingPacked(Pending):
    """The result of a call whose large arrays stay in the object store."""

    def __init__(
        self, refs: Sequence[Any], label: str, actor: Any, warn: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(refs[0], label, actor, warn)
        self.arrays = Stored(Pending(refs[1], label, actor))

    def result(self) -> Any:
        """Wait for the result and return it, with remote arrays in the place of large ones."""
        return fill(super().result(), self.arrays)


def cause_of(error: Exception) -> str:
    """Return what of Ray's long texts names the fault."""
    # As a text, an error of authentication is followed by a page of advice.
    text = error.message if isinstance(error, AuthenticationError) else str(error)
    return joining.fault_in(text) or type(error).__name__


def _lacking(error: BaseException) -> str | None:
    """Return which module a node lacks and the way out, if the error came from that; else None."""
    module = error.facts.get("module") if isinstance(error, FlowrlError) else missing(error)
    if (
        module is None
        and isinstance(error, ray.exceptions.RayError)
        and (found := re.search(r"No module named '([\w.]+)'", str(error)))
    ):
        # Ray itself could not read what it was sent: an argument, or the actor, which needs flowrl.
        module = found[1]
    if module is None:
        return None
    text = error.message if isinstance(error, FlowrlError) else f"its node has no module '{module}'"
    return f"{text}; {way_out(module)}"
