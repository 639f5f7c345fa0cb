"""Counts of what each node did, by the threads of two stages."""

import sys
import threading

from flowrl.core.ledger import Ledger


class Steps(int):
    """A number that takes so long to add that another thread comes in between."""

    def __radd__(self, other):
        return int(other) + int(self)


def test_two_stages_lose_no_drop_of_an_edge_that_both_count():
    ledger, edge, times = Ledger(), ("sample", "queue"), 20_000
    before = sys.getswitchinterval()

    def drop():
        for _ in range(times):
            ledger.drop(edge, Steps(16))

    try:
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=drop) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert ledger.dropped[edge] == 2 * times
    assert ledger.dropped_steps[edge] == 2 * times * 16
