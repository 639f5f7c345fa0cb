"""Every example runs, with few steps."""

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", sorted(p.stem for p in EXAMPLES.glob("*.py")))
def test_example(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    runs = importlib.import_module(name).main(steps=2_500)
    for run in runs if isinstance(runs, list) else [runs]:
        assert run.reason == "steps"
        assert run.rows[-1]["env_steps"] >= 2_500
    assert "return" in capsys.readouterr().out
    del sys.modules[name]


def test_there_are_those_that_the_readme_names():
    assert {p.stem for p in EXAMPLES.glob("*.py")} >= {
        "ppo_cartpole",
        "vanilla_policy_gradient",
        "custom_operator",
        "custom_policy",
        "edit_a_stock_graph",
        "synchronous_impala",
        "recurrent_policy",
    }
