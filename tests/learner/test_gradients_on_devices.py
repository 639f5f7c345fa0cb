"""Gradients that several devices compute together."""

import pytest
from test_devices import on_devices


@pytest.mark.system
def test_gradients_that_four_devices_share_are_those_of_a_shared_update():
    found = on_devices("shared_gradients.py")
    assert [devices for devices, _ in found.values()] == [4, 4]
    assert max(difference for _, difference in found.values()) < 1e-6
