"""README and documentation are true: what they show runs, and their links lead somewhere.

The Python of the documentation's pages is run by `make docs`. Doctests run here, too.
"""

import doctest
import importlib
import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import flowrl as fl
from test_project import tracked

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [path for path in tracked("*.md") if ".github" not in path.parts]


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


def test_the_readme_is_a_front_page():
    assert len(README.splitlines()) <= 120


def test_the_readmes_picture_is_drawn_by_the_graph_it_shows():
    names = {}
    exec(blocks(README, "python")[0], names)
    assert (ROOT / "docs/pictures/ppo.svg").read_text() == names["ppo"].draw("svg")


def name_of(path):
    return str(path.relative_to(ROOT))


def commands(page):
    """The commands of flowrl in the shell blocks of a page, without their comments."""
    shell = blocks(page, "bash") + [
        cell.removeprefix("%%bash\n")
        for cell in blocks(page, r"\{code-cell\}[^\n]*")
        if "%%bash" in cell
    ]
    lines = "\n".join(shell).replace("\\\n", " ").splitlines()
    lines += re.findall(r"^!(flowrl .*)", page, re.MULTILINE)
    for line in lines:
        words = shlex.split(line, comments=True)
        # What the shell or the notebook fills in is not known here.
        if words[:1] == ["flowrl"] and not set("${") & set(line):
            yield words[
                1 : next(
                    (
                        i
                        for i, w in enumerate(words)
                        if w in ("|", ">", "<", "2>&1", "||", ";", "&&")
                    ),
                    None,
                )
            ]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_are_those_of_the_command_line(path):
    from flowrl.cli.main import parser

    for words in commands(path.read_text()):
        if "--help" not in words and "--help-settings" not in words:
            assert parser().parse_args(words).act, words


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    # `docs/gallery.py` writes the gallery.
    made = ROOT / "docs/gallery"
    targets = [(path.parent / link).resolve() for link in links]
    assert [t for t in targets if not t.exists() and made not in t.parents] == []


@pytest.mark.parametrize("path", [p for p in PAGES if "docs" in p.parts], ids=name_of)
def test_all_python_of_the_documentation_is_run_by_its_build(path):
    assert blocks(path.read_text(), "python") == []


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
