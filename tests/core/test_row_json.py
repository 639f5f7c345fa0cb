"""Rows as JSON: what every reader of saved rows finds in place of numbers that JSON lacks."""

import json
import math
from types import SimpleNamespace

import flowrl as fl
from flowrl.core.row_json import numbers_of, row_json
from flowrl.observe.diff import _results
from flowrl.page.saved import SavedRun
from flowrl.page.source import Cursor
from flowrl.resuming import row_of
from flowrl.tuning.trial import ending_on_disk


def strict(text):
    """Read JSON as a reader does that knows no words such as Infinity outside of texts."""

    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def test_rows_are_read_back_as_they_were_and_older_ones_too():
    row = {"row": 3, "loss": math.inf, "low": -math.inf, "return_mean": math.nan, "lr": 0.5}
    plain = strict(row_json(row))
    assert plain == {
        "row": 3, "loss": "Infinity", "low": "-Infinity", "return_mean": None, "lr": 0.5,
    }  # fmt: skip
    for found in (numbers_of(plain), dict(row_of(plain))):
        assert math.isnan(found.pop("return_mean"))
        assert found == {"row": 3, "loss": math.inf, "low": -math.inf, "lr": 0.5}
    # Python's own conversion, which other readers have, knows the texts.
    assert float(plain["low"]) == -math.inf
    # Until there were texts, null stood for infinite numbers.
    assert math.isnan(numbers_of({"loss": None})["loss"])


def test_every_reader_of_a_saved_run_finds_infinite_numbers(tmp_path):
    with fl.run(fl.ppo("CartPole-v1"), steps=4096, out=tmp_path / "run") as run:
        rows = list(run)
    file = tmp_path / "run/rows.jsonl"
    returns = [math.nan, -math.inf, math.inf]
    lines = [
        row_json({**rows[0], "row": i, "env_steps": i, "return_mean": x})
        for i, x in enumerate(returns, 1)
    ]
    file.write_text("\n".join(lines) + "\n")

    compared = fl.Curves.load(tmp_path / "run").rows[0]
    assert [row["return_mean"] for row in compared][1:] == returns[1:]
    results = _results(tmp_path / "run")
    assert (results["last return_mean"], results["best return_mean"]) == ("inf", "inf")
    # A page draws no infinite number, and gets none.
    saved = SavedRun(tmp_path / "run")
    assert [row["return_mean"] for row in saved.since(Cursor())[1]["rows"]] == [None] * 3
    assert saved.summary()["return_mean"] is None
    assert saved.row(3)["return_mean"] == math.inf
    # Of a trial an infinite number is no value, as while it goes on.
    trial = SimpleNamespace(directory="run", number=0)
    ended = ending_on_disk(tmp_path, trial, "return_mean")
    assert ended["state"] == "failed"
    assert ending_on_disk(tmp_path, trial, "loss")["value"] == rows[0]["loss"]
