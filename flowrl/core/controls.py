"""What other threads ask of a run."""

from __future__ import annotations

from threading import Event


class Controls:
    """Requests to a run, which it meets between two rows; any thread may make them."""

    def __init__(self) -> None:
        self._goes_on = Event()
        self._goes_on.set()
        self._stops = self._keeps = False

    @property
    def paused(self) -> bool:
        """Whether the run waits, or will after its next row."""
        return not self._goes_on.is_set()

    def pause(self) -> None:
        """Let the run wait after its next row, until `go_on` or `stop` is called."""
        self._goes_on.clear()

    def go_on(self) -> None:
        """Let a run that was paused go on."""
        self._goes_on.set()

    def stop(self) -> None:
        """Let the run end after its next row, as `Run.close` ends it."""
        self._stops = True
        self._goes_on.set()

    def snapshot(self) -> None:
        """Let the run keep a snapshot after its next row."""
        self._keeps = True

    def wait(self) -> bool:
        """Wait while the run is paused; return whether it is to go on."""
        # Not without end: a signal that another thread of the process gets wakes nobody.
        while not self._goes_on.wait(0.2):
            pass
        return not self._stops

    def take_snapshot(self) -> bool:
        """Return whether a snapshot is asked for, once."""
        asked, self._keeps = self._keeps, False
        return asked
