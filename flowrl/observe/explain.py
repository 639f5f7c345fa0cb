"""Why a run is as fast as it is: where its seconds went, its bottleneck, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowrl.core.profile import Profile
from flowrl.observe.bottleneck import PARALLEL_RUNNERS, Bottleneck, bottleneck
from flowrl.observe.breakdown import edges, nodes, table
from flowrl.observe.what_if import TAKE_RAY, WhatIf, what_if

NOTABLE = 1.05
"""A change is worth advising if it makes a run at least this many times as fast."""
SHORT = 2.0
"""A run of fewer seconds than this is reported as too short for a reliable explanation."""
COMPILED = 0.05
"""Compiling is reported if it took more than this share of the seconds that the run took."""


@dataclass(frozen=True)
class Explanation:
    """The explanation of a run. `print` shows it."""

    profile: Profile
    """Where the time of the run went."""
    bottleneck: Bottleneck | None
    """What the run waits for; None if the run was too short to find out."""
    what_if: tuple[WhatIf, ...]
    """What changes to the run would bring."""

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second in this part of the run, without the time of compiling."""
        return self.profile.env_steps / self.profile.going

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # A notebook shows this.
        printer.text("Explanation(...)" if cycle else str(self))

    def __str__(self) -> str:
        p = self.profile
        # Compiling does not count towards the speed, so it is reported apart.
        compiling = p.seconds - p.going
        without = ""
        if compiling > COMPILED * p.going:
            without = f", not counting {compiling:.1f} s of compiling"
        count, what = p.env_steps, "steps"
        if not count:
            # From a dataset a run learns without any.
            count, what = sum(counts.get("updates", 0) for counts in p.counts.values()), "updates"
        speed = f"{count / p.going:,.0f} {what}/s"
        head = f"{self._part()}{count:,} {what} in {p.going:.1f} s{without}: {speed}"
        tables = (table(p), nodes(p), edges(p)) if any(p.processes.values()) else ()
        return _text([head], *tables, self._reasons())

    def _part(self) -> str:
        """Return which part of the run was measured, empty where it is all of it."""
        before, last = self.profile.rows_before, self.profile.rows_before + self.profile.rows
        if not before:
            return ""
        return f"rows {before + 1} to {last} (its beginning is left out): "

    def short(self) -> str:
        """Return the explanation without the tables of nodes and edges.

        It is empty where nothing was measured, as of a run that failed in its first row.
        """
        seconds = table(self.profile) if any(self.profile.processes.values()) else ()
        return _text(seconds, self._reasons())

    def _reasons(self) -> list[str]:
        """Return the lines after the tables: findings, the bottleneck and predictions."""
        lines = list(self.profile.findings)
        if self.profile.env_steps and self.profile.going < SHORT:
            measured = f"measured over only {self.profile.going:.1f} s"
            lines.append(f"{measured}: a longer run gives more reliable numbers")
        if b := self.bottleneck:
            lines += [f"bottleneck: {b.where}, {b.share:.0%} of the time. {b.why}", f"  {b.advice}"]
        if self.what_if:
            wide = max(len(w.change) for w in self.what_if)
            lines.append(f"what if, beside {self.steps_per_second:,.0f} steps/s now")
            lines += [f"  {w.change:<{wide}}  {self._prediction(w)}" for w in self.what_if]
        return lines

    def _prediction(self, change: WhatIf) -> str:
        if change.steps_per_second is None:
            return change.because
        times = change.steps_per_second / max(self.steps_per_second, 1e-9)
        return f"{change.steps_per_second:>9,.0f} steps/s ({times:.2f}x): {change.because}"


def _text(*blocks: Sequence[str]) -> str:
    """Return blocks of lines as a text, with an empty line between those that have lines."""
    texts = ["\n".join([*block, ""]) for block in blocks if block]
    return "\n".join(texts)


def explain(profile: Profile) -> Explanation:
    """Explain a run, or a part of it.

    Args:
        profile: of the run; or ``later - earlier``, two profiles of it, for the part in between.

    Returns:
        Its bottleneck, and the predicted effect of changes.
    """
    found, changes = bottleneck(profile), tuple(what_if(profile))
    return Explanation(profile, found and _qualified(found, changes, profile), changes)


def _qualified(found: Bottleneck, changes: Sequence[WhatIf], p: Profile) -> Bottleneck:
    """Return the bottleneck with advice that agrees with the predictions.

    If it advises one more runner, or runners in parallel, but that is predicted to bring little or
    nothing on this machine, the advice says why, and names the change that brings most.
    """
    worth = NOTABLE * p.env_steps / p.going
    # The first of the changes is one more runner.
    advises_runners = ".num_runners=" in found.advice or found.advice == PARALLEL_RUNNERS
    if not advises_runners or not changes or (changes[0].steps_per_second or 0.0) >= worth:
        return found
    if found.advice == PARALLEL_RUNNERS and changes[0].because.endswith(TAKE_RAY):
        return found
    best = max(changes, key=lambda change: change.steps_per_second or 0.0)
    reason = changes[0].because.removeprefix("nothing to be expected: ").removeprefix("nothing: ")
    if (best.steps_per_second or 0.0) >= worth:
        take = f"Take {best.change}, which is predicted to bring most"
        advice = f"{take}; one more runner brings nothing here: {reason}."
    else:
        advice = f"{found.advice} Not here, though: {reason}."
    return replace(found, advice=advice)


def plain(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation as plain data, for JSON.

    Args:
        explanation: as `explain` returns it.

    Returns:
        The keys ``steps_per_second``, ``bottleneck`` (None if there is none) and ``what_if``.
    """
    b = explanation.bottleneck
    named = None
    if b is not None:
        named = {
            "where": b.where,
            "kind": b.kind,
            "share": b.share,
            "why": b.why,
            "advice": b.advice,
        }
    return {
        "steps_per_second": explanation.steps_per_second,
        "bottleneck": named,
        "what_if": [
            {"change": w.change, "steps_per_second": w.steps_per_second, "because": w.because}
            for w in explanation.what_if
        ],
    }
