"""The trials of a study at work: which comes next, and what is noted of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowrl.tuning.journal import Journal, Options, Trial
from flowrl.tuning.search import Search
from flowrl.tuning.spaces import Space
from flowrl.tuning.trial import ending_on_disk


class Trials:
    """Gives out trials until all have ended, and notes what happens to them.

    Args:
        journal: where it is noted.
        options: of the study.
        search: by name of each setting: its space.
        on_end: is called with each trial that ended.
    """

    def __init__(
        self,
        journal: Journal,
        options: Options,
        search: Mapping[str, Space],
        on_end: Callable[[Trial], None],
    ) -> None:
        self.journal, self.options, self.on_end = journal, options, on_end
        self._adopt()
        self.cut_off = [trial.number for trial in journal.trials if not trial.ended]
        """The trials that were suggested before this process, and have to start again."""
        self.search = Search(search, options.mode, options.seed, journal.trials)

    def _adopt(self) -> None:
        """Note the end of trials that had ended when the process was killed before it noted it."""
        for trial in self.journal.trials:
            if not trial.ended:
                ending = ending_on_disk(self.journal.path, trial, self.options.metric)
                if ending is not None:
                    self.journal.end([ending])

    @property
    def left(self) -> int:
        """How many trials have to be started."""
        return self.options.trials - len(self.journal.trials) + len(self.cut_off)

    def start(self, count: int = 1) -> list[Trial]:
        """Start the next trials, in one directory; fewer than `count`, or none, at the end."""
        numbers = [self._next() for _ in range(min(count, self.left))]
        if not numbers:
            return []
        first = numbers[0]
        # What is left of a process that was killed may still write to its own directory.
        attempt = self.journal.trials[first].attempt + 1
        directory = f"trials/{first:03}" + (f"-{attempt}" if attempt > 1 else "")
        return [self.journal.start(number, directory) for number in numbers]

    def _next(self) -> int:
        """Return the number of the next trial."""
        if self.cut_off:
            return self.cut_off.pop(0)
        number = len(self.journal.trials)
        return self.journal.suggest(self.search.ask(number)).number

    def again(self, numbers: Sequence[int]) -> None:
        """Let trials start again, before any others."""
        self.cut_off = [*numbers, *self.cut_off]

    def reported(self, number: int, report: Mapping[str, Any]) -> None:
        """Note a report of a trial that goes on."""
        self.journal.report(number, report["env_steps"], report["value"])

    def ended(self, endings: Sequence[Mapping[str, Any]]) -> None:
        """Note how trials ended, and learn from them."""
        self.journal.end(endings)
        for ending in endings:
            trial = self.journal.trials[ending["trial"]]
            self.search.learn(trial)
            self.on_end(trial)
