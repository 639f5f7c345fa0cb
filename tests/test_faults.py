"""Faults: what a run does where a signal, a sink, the clock or a process fails.

docs/faults.md has a row for each of them; bench/faults.py measures what its figures are.
"""

import threading
import time

import flowrl as fl
from flowrl.core import events
from flowrl.core.events import Ended, RowClosed, Started, Warned

TINY = fl.Policy(fl.networks.MLP, hidden=(4,))
PPO = fl.ppo(
    "CartPole-v1",
    fl.PPOSettings(
        envs_per_runner=2,
        rollout_length=8,
        batch_size=16,
        epochs=1,
        minibatch_size=None,
        policy=TINY,
    ),
)


# -- sinks


class Notes:
    """An observer that keeps what it takes."""

    kinds = (Started, RowClosed, Warned, Ended)

    def __init__(self):
        self.got = []

    def __call__(self, event):
        self.got.append(event)

    def of(self, kind):
        return [event for event in self.got if isinstance(event, kind)]


class Blocked(Notes):
    """Blocks in its first row until it is let go, as a service does that does not answer."""

    kinds = (RowClosed, Ended)

    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()

    def __call__(self, event):
        self.go_on.wait()
        super().__call__(event)


def test_a_sink_that_blocks_holds_up_neither_training_nor_other_sinks_and_gets_its_rows_in_order(
    tmp_path,
):
    blocked, notes = Blocked(), Notes()
    with fl.run(PPO, observers=[blocked, notes, fl.Csv(tmp_path / "rows.csv")]) as run:
        rows = [next(run) for _ in range(20)]
        deadline = time.monotonic() + 60
        while len(notes.of(RowClosed)) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(notes.of(RowClosed)) == 20 and blocked.got == []
        assert (tmp_path / "rows.csv").read_text().count("\n") >= 20
        blocked.go_on.set()
    assert [event.row for event in blocked.of(RowClosed)] == rows
    assert [type(event) for event in blocked.got[-1:]] == [Ended]
    assert notes.of(Warned) == []


def test_what_a_sink_that_blocks_lacks_in_the_end_is_counted_in_a_warning(monkeypatch):
    monkeypatch.setattr(events, "CLOSING_SECONDS", 0.2)
    blocked, notes = Blocked(), Notes()
    with fl.run(PPO, observers=[blocked, notes]) as run:
        for _ in range(5):
            next(run)
    assert [event.text for event in notes.of(Warned)] == [
        "observer Blocked did not take 6 events within 0.2 s of the end of the run, 5 rows among "
        "them, so it lacks these"
    ]
    blocked.go_on.set()


def test_a_sink_that_raises_is_switched_off_and_the_others_get_all(tmp_path):
    class Raises(Notes):
        kinds = (RowClosed,)

        def __call__(self, event):
            super().__call__(event)
            raise OSError("no network")

    raises, notes = Raises(), Notes()
    with fl.run(PPO, observers=[raises, notes], out=tmp_path / "run") as run:
        rows = [next(run) for _ in range(5)]
    assert len(raises.got) == 1
    assert [event.row for event in notes.of(RowClosed)] == rows
    assert [event.text for event in notes.of(Warned)] == [
        "observer Raises failed and is switched off: OSError: no network"
    ]
    assert (tmp_path / "run/rows.jsonl").read_text().count("\n") == 5
