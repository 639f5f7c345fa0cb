"""Names and flags that a class declares are checked where it is written."""

import gymnasium as gym
import numpy as np
import pytest

import flowrl as fl
from flowrl.core.items import bytes_of
from flowrl.core.keeping import Keeping
from flowrl.core.remote import is_array
from flowrl.extend import Operator


@pytest.mark.parametrize("base", [fl.losses.PPOLoss, Operator, Keeping])
def test_a_text_in_place_of_a_tuple_of_names_is_refused(base):
    name = {fl.losses.PPOLoss: "needs", Operator: "writes", Keeping: "lasting"}[base]
    with pytest.raises(
        fl.errors.SettingError, match=rf"Mine\.{name} .* such as \('obs',\), got 'obs'"
    ):
        type("Mine", (base,), {name: "obs"})
    type("Mine", (base,), {name: ("obs",)})


@pytest.mark.parametrize("flag", ["no", 1, None])
def test_a_flag_is_true_or_false(flag):
    with pytest.raises(fl.errors.SettingError, match=r"Mine\.on_policy must be True or False"):
        type("Mine", (fl.losses.PPOLoss,), {"on_policy": flag})


def test_what_a_loss_decides_by_its_settings_is_left_alone():
    type("Mine", (fl.losses.PPOLoss,), {"needs": property(lambda loss: ("obs",))})


def test_what_has_a_type_and_a_shape_need_not_be_an_array():
    box = gym.spaces.Box(-1, 1, (2,))
    assert not is_array(box) and not is_array(np.float32)
    assert bytes_of({"space": box, "kind": np.float32, "x": np.zeros(3, np.float32)}) == 12
