"""Several devices share the updates of a learner, and the result is that of one device.

Each does its part of the work.
"""

import json
import os
import signal
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from conftest import rows_and_weights

ROOT = Path(__file__).parents[2]


def on_devices(script, devices=4):
    """What a script prints in a process that has so many devices, read as JSON."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    run = partial(
        subprocess.run,
        [sys.executable, str(ROOT / "tests" / script)],
        cwd=ROOT,
        env={
            **os.environ,
            "XLA_FLAGS": flags,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    done = run()
    # Within Ray, gRPC may abort a driver that joins and leaves a cluster many times (seen once).
    if done.returncode == -signal.SIGABRT and "ASSERTION FAILED: grpc_" in done.stderr:
        done = run()
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


pytestmark = [pytest.mark.timeout(450), pytest.mark.system]


@cache
def updates():
    return on_devices("shared_updates.py")


@pytest.mark.parametrize("name", ["ppo", "vtrace", "dqn", "sac"])
def test_a_device_does_its_part_of_the_operations(name):
    assert updates()[f"{name} on 2"]["operations"] <= 0.55
    assert updates()[f"{name} on 4"]["operations"] <= 0.3


def test_devices_exchange_one_sum_a_gradient_step_and_no_rows():
    # What a loss reports of each row, or sequence, one number each, is put into the order of the
    # batch.
    priorities = {"dqn": [512], "dqn, noisy c51": [512], "sac": [512], "td3": [512], "r2d2": [16]}
    for name, found in updates().items():
        expected = [] if "shuffled" in name else priorities.get(name.partition(" on ")[0], [])
        assert found["gathered"] == expected, name
    # Running moments of observations are three sums more, once an update; APPO's standardized
    # advantages two in a minibatch.
    assert [
        updates()[f"{name} on 4"]["sums"]
        for name in ("dqn", "sac", "td3", "r2d2", "recurrent", "ppo", "vtrace", "appo")
    ] == [1, 1, 1, 1, 1, 4, 4, 6]


def test_minibatches_in_order_give_the_weights_metrics_and_priorities_of_one_device():
    differences = {
        name: found["difference"] for name, found in updates().items() if "difference" in found
    }
    assert len(differences) == 16 and max(differences.values()) < 1e-5


def test_what_a_policy_tracks_in_its_calls_is_averaged_and_equal_on_all_devices():
    found = updates()["statistics"]
    assert (
        found["spread"] == 0 and found["off"] < 0.1
    )  # devices weigh by their valid rows, of which this policy knows nothing


def test_an_epoch_ends_once_on_several_devices():
    assert updates()["epochs"]["reported"] == 2


@cache
def runs():
    return on_devices("shared_runs.py")


def agrees(found, graph):
    rows, weights = rows_and_weights(graph, 2)
    assert found["loss"] == pytest.approx(rows[-1]["loss"], rel=1e-4)
    for name, x in weights.params.items():
        np.testing.assert_allclose(found["weights"][name], x, atol=1e-5, err_msg=name)


@pytest.mark.ray
def test_a_whole_run_on_devices_ends_with_the_weights_of_one_device():
    from shared_runs import EVOLUTION, GYM, JAX

    found = runs()
    assert [found[name]["devices"] for name in ("local", "xla", "uneven", "seeds")] == [4, 4, 1, 1]
    assert found["xla"]["split"] and found["seeds"]["split"], (
        "environments, or many runs, are split over the devices"
    )
    agrees(found["local"], GYM)
    agrees(found["xla"], JAX)
    agrees(found["evolution"], EVOLUTION)
    assert (
        "updates use one of 4 devices, which can't share minibatches of 2 steps evenly; take a "
        "multiple of 4" in found["uneven"]["text"]
    )


@pytest.mark.ray
def test_a_learner_beside_ray_or_placed_on_an_actor_shares_its_updates_too():
    from shared_runs import GYM

    found = runs()
    assert [found[name]["devices"] for name in ("ray", "placed")] == [4, 4]
    agrees(found["ray"], GYM)
    agrees(found["placed"], GYM)


def test_a_device_without_a_row_that_counts_changes_no_mean():
    assert updates()["a mean"]["mean"] == (1 * 1 + 2 * 3 + 1 * 4) / 4
