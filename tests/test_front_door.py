"""The README tells the truth: its Python runs, and prints what it says; doctests too."""

import doctest
import importlib
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import flowrl as fl

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TEXT = re.findall(r"```text\n(.*?)```", README, re.DOTALL)


@pytest.mark.ray
def test_the_readmes_python_runs_and_prints_what_it_says(tmp_path, monkeypatch, ray_up):
    monkeypatch.chdir(tmp_path)
    names = {}
    said = io.StringIO()
    for block in PYTHON:
        with redirect_stdout(said):
            exec(
                compile(block.replace("20_000", "8_000"), "README.md", "exec"), names
            )  # fewer rows, to be quick
    assert str(names["ppo"].compile()) == TEXT[0]
    assert str(names["dqn"].compile()) in TEXT
    assert TEXT[1] in said.getvalue()
    assert len(names["rows"]) == 3
    assert fl.Graph.from_text(names["watched"].text()) == names["watched"]


def test_the_readmes_picture_is_drawn_by_the_graph_it_shows():
    names = {}
    exec(PYTHON[0], names)
    assert (ROOT / "docs/pictures/ppo.svg").read_text() == names["ppo"].draw("svg")


def test_the_readmes_commands_are_those_of_the_command_line(monkeypatch, capsys):
    from flowrl.cli.main import parser

    block = re.search(r"## The command line\n\n```bash\n(.*?)```", README, re.DOTALL).group(1)
    for line in block.splitlines():
        import shlex

        args = parser().parse_args(shlex.split(line, comments=True)[1:])
        assert args.act


@pytest.mark.parametrize(
    "module",
    sorted(
        set(fl._HOME.values())
        | {"flowrl.observe.looking", "flowrl.observe.progress", "flowrl.algos.named"}
    ),
)
def test_docstring_examples(module):
    if module == "flowrl.runtime.ray":
        return
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
