"""README and guide are true: their Python runs and prints what they say; doctests run, too."""

import doctest
import importlib
import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import flowrl as fl

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs/guide.md").read_text()


def blocks(page, language):
    """The fenced blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def played(page, steps):
    """The names that the Python of a page defines in shorter runs, and what it prints."""
    names, printed = {}, io.StringIO()
    for block in blocks(page, "python"):
        with redirect_stdout(printed):
            exec(compile(block.replace("20_000", steps), "a page", "exec"), names)
    return names, printed.getvalue()


@pytest.mark.ray
def test_the_readmes_python_runs_and_prints_what_it_says(tmp_path, monkeypatch, ray_up):
    monkeypatch.chdir(tmp_path)
    names, printed = played(README, "2_000")
    assert str(names["ppo"].compile()) == blocks(README, "text")[0]
    assert len(names["rows"]) == 1 and names["fused_rows"]
    assert re.search(r"5 episodes, \d different returns: mean", printed)


@pytest.mark.ray
def test_the_guides_python_runs_and_prints_what_it_says(tmp_path, monkeypatch, ray_up):
    monkeypatch.chdir(tmp_path)
    names, printed = played(GUIDE, "8_000")
    text = blocks(GUIDE, "text")
    assert str(names["ppo"].compile()) == text[0]
    assert str(names["dqn"].compile()) in text
    assert text[1] in printed
    assert len(names["rows"]) == 3
    assert fl.Graph.from_text(names["watched"].text()) == names["watched"]


def test_the_readme_is_a_front_page():
    assert len(README.splitlines()) <= 120


def test_the_readmes_picture_is_drawn_by_the_graph_it_shows():
    names = {}
    exec(blocks(README, "python")[0], names)
    assert (ROOT / "docs/pictures/ppo.svg").read_text() == names["ppo"].draw("svg")


@pytest.mark.parametrize("page", [README, GUIDE], ids=["README", "guide"])
def test_commands_are_those_of_the_command_line(page):
    from flowrl.cli.main import parser

    command = re.search(r"## The command line\n\n```bash\n(.*?)```", page, re.DOTALL).group(1)
    for line in command.splitlines():
        assert parser().parse_args(shlex.split(line, comments=True)[1:]).act


@pytest.mark.parametrize(
    "page", ["README.md", "docs/guide.md", "docs/seeing.md", "ARCHITECTURE.md"]
)
def test_links_lead_somewhere(page):
    path = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


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
