"""A learner in a group of processes: what two devices of one process do, share by share."""

import sys
from functools import cache
from pathlib import Path

import pytest

from flowrl.runtime.group import needed, share_of
from flowrl.runtime.keeper import At, Joint

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))
from test_devices import on_devices


def joint(*lengths, axis=1):
    """An array whose parts came with the message, in order."""
    return Joint(tuple(At(~i, 0) for i in range(len(lengths))), axis, lengths)


def test_members_take_neighbouring_parts_of_equal_length():
    four = joint(4, 4, 2, 2, 4)
    assert [share_of(four, i, 2, 2) for i in (0, 1)] == [slice(0, 2), slice(2, 5)]
    assert [needed([four, 3.0], i, 2, 2) for i in (0, 1)] == [{0, 1}, {2, 3, 4}]
    assert [share_of(joint(1, 2, 3), i, 2, 2) for i in (0, 1)] == [slice(0, 2), slice(2, 3)]


@pytest.mark.parametrize(
    ("array", "devices"),
    [
        (joint(4, 4, 4), 2),
        (joint(3, 3), 4),
        (Joint((At(~0, 0), At(3, 0)), 1, (4, 4)), 2),
        (Joint((joint(4, 4), At(~1, 0)), 0, (4, 4)), 2),
    ],
    ids=["no cut", "devices do not divide it", "the group has a part", "joined twice"],
)
def test_where_members_can_not_share_it_each_takes_the_whole_array(array, devices):
    assert [share_of(array, i, 2, devices) for i in (0, 1)] == [None, None]
    assert needed(array, 0, 2, devices) == needed(array, 1, 2, devices) != set()


def test_an_array_of_its_own_comes_to_every_member():
    assert [needed([At(~2, 5), At(7, 0)], i, 2, 2) for i in (0, 1)] == [{2}, {2}]


@cache
def found():
    return on_devices("shared_group.py", 2)


group = [pytest.mark.ray, pytest.mark.system, pytest.mark.timeout(450)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=group) for n in ("ppo", "in order", "recurrent", "dqn")]
)
def test_two_processes_do_what_two_devices_of_one_do(name):
    one = found()[name]
    assert one["devices"] == [2, 2]
    assert one["weights"] < 1e-5 and one["loss"] < 1e-5


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.timeout(450)
def test_a_run_in_a_group_resumes_bit_for_bit():
    assert found()["resumed"] == 0.0


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.timeout(450)
def test_members_and_the_runners_whose_rollouts_they_take_share_a_node():
    members, runners = found()["nodes"]
    assert members == runners and len(set(members)) == 2
