"""Bounded calls in flight: whose result comes when, and what a worker that is gone still sends."""

import threading
import time

import pytest

import flowrl as fl
from flowrl.core.workers import Done, Failed
from flowrl.rollout.requests import LateError


class Calls:
    """Workers whose results come when a test says so."""

    def __init__(self):
        self.made, self.there = [], []

    def submit(self, worker):
        self.made.append(Call(worker, len(self.made)))
        return self.made[-1]

    def wait(self, futures, timeout):
        if timeout is not None and not any(f in self.there for f in futures):
            time.sleep(timeout)
            return None
        return next((i for i, f in enumerate(futures) if f in self.there), None)


class Call:
    def __init__(self, worker, number):
        self.worker, self.number = worker, number

    def result(self):
        return self.number


def test_every_worker_is_kept_busy_and_results_come_as_they_come_the_oldest_first():
    calls = Calls()
    requests = fl.extend.AsyncRequests(calls.submit, calls.wait, count=3, in_flight=2)
    requests.fill()
    assert [c.worker for c in calls.made] == [0, 1, 2, 0, 1, 2]
    calls.there = [calls.made[2], calls.made[1]]
    assert [requests.next().worker for _ in range(2)] == [1, 2]
    requests.fill()
    assert [c.worker for c in calls.made[6:]] == [1, 2]


def test_those_of_one_worker_come_in_the_order_in_which_they_were_asked_for():
    calls = Calls()
    requests = fl.extend.AsyncRequests(calls.submit, calls.wait, count=1, in_flight=3)
    requests.fill()
    calls.there = calls.made[::-1]
    assert [requests.next().result() for _ in range(3)] == [0, 1, 2]


def test_what_a_dead_worker_still_sends_and_what_comes_twice_is_never_given():
    calls = Calls()
    requests = fl.extend.AsyncRequests(calls.submit, calls.wait, count=2, in_flight=2)
    requests.fill()
    lost = requests.replace(0)
    assert [(r.worker, r.restart_count, r.number) for r in lost] == [(0, 0, 1), (0, 0, 3)]
    requests.fill()
    calls.there = list(calls.made)  # all of them come, also those of the dead one
    given = [requests.next() for _ in range(4)]
    assert [(r.worker, r.restart_count) for r in given] == [(1, 0), (1, 0), (0, 1), (0, 1)]
    assert (
        not {r.number for r in given} & {r.number for r in lost}
        and len({r.number for r in given}) == 4
    )
    with pytest.raises(LookupError, match="nobody was asked"):
        requests.next()


def test_the_one_that_takes_too_long_is_named_and_one_whose_result_is_there_is_not():
    calls = Calls()
    requests = fl.extend.AsyncRequests(calls.submit, calls.wait, count=2)
    requests.fill()
    calls.there = [calls.made[1]]
    time.sleep(0.02)
    assert requests.next(timeout=0.01).worker == 1
    with pytest.raises(LateError, match="worker 0 gave nothing for 0.01 s"):
        requests.next(timeout=0.01)


def test_an_operator_of_ones_own_may_use_it_with_threads():
    from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor
    from concurrent.futures import wait as first

    def wait(futures, timeout):
        done, _ = first(futures, timeout, return_when=FIRST_COMPLETED)
        return next((i for i, f in enumerate(futures) if f in done), None)

    slow = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        requests = fl.extend.AsyncRequests(
            lambda i: pool.submit(lambda: (i == 0 and slow.wait(5)) or i), wait, count=2
        )
        requests.fill()
        assert requests.next().result() == 1
        slow.set()
        assert requests.next().worker == 0


def test_who_was_not_asked_for_the_longest_time_is_asked_first():
    calls = Calls()
    requests = fl.extend.AsyncRequests(calls.submit, calls.wait, count=3)
    requests.fill()
    calls.there = [calls.made[0]]
    assert requests.next().worker == 0
    requests.fill()
    calls.there = list(calls.made)
    for _ in range(3):
        requests.next()
    requests.fill(most=1)
    requests.fill(most=1)
    assert [call.worker for call in calls.made[4:]] == [1, 2]


def test_a_worker_has_as_long_for_each_call_from_when_it_could_begin():
    now, patience = [0.0], []

    def wait(futures, timeout):
        patience.append(timeout)
        return 0

    requests = fl.extend.AsyncRequests(
        Calls().submit, wait, count=1, in_flight=2, now=lambda: now[0]
    )
    requests.fill()
    for now[0] in (1.0, 5.0):
        requests.next(timeout=6.0)
    requests.fill()
    now[0] = 7.0
    requests.next(timeout=6.0)
    assert patience == [5.0, 2.0, 4.0]


def test_a_call_that_waits_for_other_work_is_not_late_until_that_is_over():
    now, patience = [0.0], []

    def wait(futures, timeout):
        patience.append(timeout)
        now[0] += timeout
        if now[0] == 24.0:
            requests.end_other(0)

    requests = fl.extend.AsyncRequests(Calls().submit, wait, count=1, now=lambda: now[0])
    requests.give_other(0, lambda: "an evaluation")
    requests.fill()
    with pytest.raises(fl.extend.LateError, match="worker 0 gave nothing for 6 s"):
        requests.next(timeout=6.0)
    assert patience == [6.0] * 5 and now == [30.0]


def test_a_call_before_other_work_is_late_all_the_same():
    now, results = [0.0], iter([0, None])

    def wait(futures, timeout):
        now[0] += 5.0
        return next(results)

    requests = fl.extend.AsyncRequests(
        Calls().submit, wait, count=1, in_flight=2, now=lambda: now[0]
    )
    requests.fill()
    requests.give_other(0, lambda: "an evaluation")
    requests.next(timeout=6.0)
    with pytest.raises(fl.extend.LateError):
        requests.next(timeout=6.0)


def test_a_worker_has_twice_as_long_after_each_restart_in_a_row_for_it_must_start_first():
    patience, results = [], iter([None, None, 0, 0])

    def wait(futures, timeout):
        patience.append(timeout)
        return next(results)

    requests = fl.extend.AsyncRequests(Calls().submit, wait, count=1, now=lambda: 0.0)
    for seconds in (6, 12):
        requests.fill()
        with pytest.raises(fl.extend.LateError, match=f"worker 0 gave nothing for {seconds} s"):
            requests.next(timeout=6.0)
        requests.replace(0)
    for _ in range(2):
        requests.fill()
        requests.next(timeout=6.0).result()
    assert patience == [6.0, 12.0, 24.0, 6.0]


def test_only_a_result_that_is_no_error_ends_the_longer_time_outs_of_a_restarted_worker():
    patience, futures = [], iter([Failed(OSError("gone")), Done(1), Done(2), Done(3)])

    def wait(_, timeout):
        patience.append(timeout)
        return 0

    requests = fl.extend.AsyncRequests(
        lambda _: next(futures), wait, count=1, in_flight=2, now=lambda: 0.0
    )
    requests.fill()
    with pytest.raises(OSError, match="gone"):
        requests.next(timeout=6.0).result()
    requests.replace(0)
    requests.fill()
    late = requests.next(timeout=6.0)
    requests.replace(0)
    # What was sent before the second restart says nothing about the new worker.
    late.result()
    assert patience == [6.0, 12.0] and requests.patience == [4]


def test_workers_without_a_time_out_that_give_nothing_are_reported_ever_more_rarely():
    now, reports, calls = [0.0], [], Calls()

    def wait(futures, timeout):
        if timeout:
            now[0] += 1.0 if calls.there else timeout
        if now[0] > 400:
            calls.there = calls.made
        return next((i for i, f in enumerate(futures) if f in calls.there), None)

    requests = fl.extend.AsyncRequests(
        calls.submit,
        wait,
        count=3,
        now=lambda: now[0],
        report_silent=lambda *report: reports.append(report),
    )
    requests.fill()
    newest = calls.made[1]
    for _ in range(70):  # worker 1 gives something every second
        calls.there = [newest]
        assert requests.next().worker == 1
        requests.ask(1)
        newest = calls.made[-1]
    assert reports == [([0, 2], 60.0)]
    # Then nobody does, until 400 seconds are over: 0 and 2 had been reported at 60 seconds.
    calls.there = []
    requests.next()
    assert reports[1:] == [([0, 1, 2], 60.0), ([1], 120.0), ([0, 1, 2], 240.0)]
    # What was there while nobody asked was not late.
    requests.fill()
    now[0] += 10_000
    calls.there = calls.made
    assert [requests.next().worker for _ in range(3)]
    assert len(reports) == 4
