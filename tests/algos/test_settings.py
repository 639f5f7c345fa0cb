"""Stock graphs take their own settings, and say so."""

import pytest

import flowrl as fl


@pytest.mark.parametrize("name", ["ppo", "a2c", "pg", "impala", "appo", "dqn", "sac", "apex"])
@pytest.mark.parametrize("wrong", [{"lr": 1e-3}, fl.Adam()])
def test_settings_of_another_kind_are_refused_by_name(name, wrong):
    with pytest.raises(fl.SettingError, match=r"settings must be fl\.\w+Settings\(\.\.\.\), got (\{'lr'|Adam)"):
        getattr(fl, name)("CartPole-v1", wrong)
