"""Spans in arrays are those of a slow list of them, however often they are taken."""

import itertools
import pickle
import random
import threading

import pytest

from flowrl.core import spans
from flowrl.core.spans import Mark, Newest, Span, SpanLog, Spans

SLOTS = [(node, kind) for node in ("", "a", "b") for kind in ("step", "update")]


@pytest.fixture
def few(monkeypatch):
    """Logs that keep the last 40 spans."""
    monkeypatch.setattr(spans, "SPANS", 50)
    monkeypatch.setattr(spans, "SLACK", 10)


def filled(log, number, random, now=1.0):
    """The spans of a slow list, of which as many were added to the log."""
    found = []
    for _ in range(number):
        slot, start = random.choice(SLOTS), now
        now += random.random()
        log.add(slot, now)
        found.append(Span(*slot, start, now))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_what_is_taken_is_what_a_slow_list_holds(few, seed):
    rng, now = random.Random(seed), 1.0
    log = SpanLog(now)
    for _ in range(30):
        added = filled(log, rng.randrange(0, 90), rng, now)
        now = added[-1].end if added else now
        marks = [Mark("a", "put", "q", now, i) for i in range(rng.randrange(3))]
        log.marks.extend(marks)
        taken = log.take()
        # Of more than fit those that are older made room.
        assert list(taken) == [*(added if len(added) <= 40 else added[-40:]), *marks]
        assert len(taken) == len(list(taken))
    assert list(log.take()) == []


def test_spans_travel_and_are_brought_to_another_clock():
    log = SpanLog(0.0)
    added = filled(log, 5, random.Random(0), 0.0)
    log.marks.append(Mark("a", "put", "q", 2.0, 1))
    taken = pickle.loads(pickle.dumps(log.take()))
    assert list(taken) == [*added, Mark("a", "put", "q", 2.0, 1)]
    assert list(taken.later(10.0)) == [x.later(10.0) for x in taken]
    assert list(Spans().later(10.0)) == [] and not Spans()


def test_of_many_pieces_the_newest_are_kept(few):
    newest, log, now, everything = Newest(), SpanLog(1.0), 1.0, []
    for number in (30, 5, 0, 10, 40, 20):
        added = filled(log, number, random.Random(number), now)
        now = added[-1].end if added else now
        everything += added
        newest.add(log.take())
        kept = list(newest)
        assert kept == everything[len(everything) - len(kept) :]
        # A piece goes when the others hold enough.
        assert min(50, len(everything)) <= len(kept) < 50 + 40
    epoch = Span("", "epoch 1", 0.0, 1.0)
    newest.add((epoch,))
    assert list(newest)[-1] == epoch


def test_what_one_thread_adds_another_one_takes():
    log, found = SpanLog(0.0), []

    def work():
        for i in range(50_000):
            log.add(SLOTS[i % 6], float(i + 1))

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        found += log.take()
    thread.join()
    found += log.take()
    assert [span.end for span in found] == [float(i + 1) for i in range(50_000)]
    assert all(a.end == b.start for a, b in itertools.pairwise(found))
    assert [(x.node, x.kind) for x in found[:6]] == SLOTS
