"""Memory that is freed serves the next array, and the user's own settings stay."""

import os
import subprocess
import sys

import pytest

CODE = """
import resource
import threading
import numpy as np
from flowrl.core.machine import keep_freed_memory

keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        arrays = [np.ones(100_000) for _ in range(200)]
        del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def work():
    faults()
    print(faults())

work()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.system
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc has these options")
@pytest.mark.parametrize(("own", "kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "0"}, False)])
def test_arrays_take_over_what_was_freed_unless_the_user_said_otherwise(own, kept):
    clean = {k: x for k, x in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    found = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**clean, **own},
        capture_output=True,
        text=True,
        check=True,
    )
    # 10 times 200 arrays of 196 pages each are 392,000 pages, and none of them is a new one.
    of_main, of_thread = map(int, found.stdout.split())
    assert (of_main < 5_000) == (of_thread < 5_000) == kept, found.stdout
