"""A run that is restored from a snapshot of a simulated one, and compared with it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import invariants

from flowrl.core.encoding import decoded, encoded


class Restored:
    """A run that is restored from a snapshot of another, which goes on."""

    def __init__(self, sim: Any) -> None:
        self.sim = sim
        self.state: Any = None
        self.text = ""
        """What was kept, as it would be written."""
        self.arrays: dict[str, bytes] = {}
        self.lost_runners: list[int] | None = None
        """The runners of which the snapshot has nothing."""

    def check(self) -> None:
        """Compare what both keep and hold; and if nothing was lost, how they go on."""
        sim = self.sim
        kept = self._kept(sim)
        # What fails or hangs is left out of a snapshot, and made again.
        left_out = len(sim.runners.requests) - sum(
            len(calls) for calls in self.state["place"]["handles"]["runners"]["requests"]["going"]
        )
        again = self._again(left_out)
        try:
            again.check((*invariants.PASS, *invariants.ROW))
            if (other := self._kept(again)) != kept:
                texts = (json.dumps(each, indent=1, sort_keys=True) for each in (kept, other))
                sim.violate("a_snapshot_restores_an_equal_state", difference(*texts))
            if not left_out and not self.lost_runners and not self._lost_batches():
                self._compare_the_rest(again)
        finally:
            again.session.close()
            for found in again.violations:
                sim.found("in the run that was restored", found)
        sim.note("a snapshot was restored, and kept the same")

    def _kept(self, sim: Any) -> Any:
        """Return all that a session keeps, as JSON; times of this machine are left out."""
        sim.keeping = True
        try:
            state = sim.session.keep()
        finally:
            sim.keeping = False
        text = json.dumps(encoded(state, self._put))
        if sim is self.sim:
            self.state, self.text = state, text
        tree = json.loads(text)
        place = tree["dict"]["place"]["dict"]
        del place["clock"], tree["dict"]["rows"]["dict"]["seconds"]
        # A runner that gave nothing is a new one in the restored run.
        runners = place["handles"]["dict"]["runners"]["dict"]["runners"]["list"]
        if self.lost_runners is None:
            self.lost_runners = [i for i, kept in enumerate(runners) if kept is None]
        for i in self.lost_runners:
            runners[i] = None
        return tree

    def _lost_batches(self) -> int:
        """Return how many batches a replay was asked for that a shard took with it."""
        replay = self.sim.session.place.handles.get("replay")
        if replay is None:
            return 0
        kept = self.state["place"]["handles"]["replay"]["requests"]
        return sum(len(asked) - len(kept[name]) for name, asked in replay.requests.items())

    def _put(self, x: Any) -> str:
        data = x.tobytes()
        name = hashlib.sha1(data).hexdigest()
        self.arrays[name] = data
        return name

    def _again(self, left_out: int) -> Any:
        """Return a calm simulation that goes on from the snapshot."""
        sim = self.sim
        again = type(sim)(sim.case, sim.seed, calm=True)
        again.restored = True
        for name in ("accepted", "trained", "accepted_versions", "selected", "results", "turns"):
            setattr(again, name, getattr(sim, name).copy())
        for name in ("updates", "rollouts", "last_out", "first_update"):
            setattr(again, name, getattr(sim, name))
        again.left_out = sim.left_out + left_out
        again.keeping = True
        again.session.take(
            decoded(json.loads(self.text), lambda name, size: bytearray(self.arrays[name]))
        )
        again.keeping = False
        return again

    def _compare_the_rest(self, again: Any) -> None:
        """Let both runs go on without faults, and compare what goes through the graph."""
        sim = self.sim
        sim.calm = True
        flows = []
        for each in (sim, again):
            each.flow.clear()
            rows = iter(each.session)
            for _ in range(2):
                row = next(rows)
                kept = {k: v for k, v in row.items() if k not in ("seconds", "steps_per_second")}
                each.flow.append(json.dumps(kept))
            flows.append("\n".join(each.flow))
        if flows[0] != flows[1]:
            sim.violate("a_restored_run_goes_on_equally", difference(*flows))


def difference(text: str, other: str) -> str:
    """Return the first lines in which two texts differ."""
    lines, others = text.splitlines(), other.splitlines()
    at = next((i for i, (x, y) in enumerate(zip(lines, others, strict=False)) if x != y), None)
    at = min(len(lines), len(others)) if at is None else at
    return f"line {at}: {' '.join(lines[at : at + 3])!r}, then {' '.join(others[at : at + 3])!r}"
