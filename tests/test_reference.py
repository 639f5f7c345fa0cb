"""Every public name stands on one page of the reference, with its real signature and its fields."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.cli.commands import documented

PAGES = sorted((Path(__file__).parents[1] / "docs/reference").glob("*.md"))
DIRECTIVE = re.compile(
    r"^\.\. (?:auto(?:class|function|exception)|py:(?:data|module)):: flowrl\.([\w.]+)(\(.*\))?$",
    re.MULTILINE,
)


def public():
    """The public names as a user writes them after ``fl.``."""
    modules = [importlib.import_module(f"flowrl.{name}") for name in fl.MODULES]
    return [*fl.__all__, *(f"{m.__name__[7:]}.{name}" for m in modules for name in m.__all__)]


def value(name):
    found = fl
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_every_public_name_is_on_exactly_one_page_of_the_reference():
    shown = Counter(name for page in PAGES for name, _ in DIRECTIVE.findall(page.read_text()))
    assert {name: n for name, n in shown.items() if n > 1} == {}
    assert sorted(shown) == sorted(public())


def test_signatures_written_in_the_reference_are_those_of_the_code():
    for page in PAGES:
        for name, written in DIRECTIVE.findall(page.read_text()):
            if written in ("", "()"):  # `()` hides what only flowrl itself calls
                continue
            real = inspect.signature(value(name).__init__).parameters
            arguments = ast.parse(f"def f(self, {written[1:]}: ...").body[0].args
            named = [*arguments.args, *arguments.kwonlyargs]
            assert [x.arg for x in named] == list(real), name
            defaults = [
                *[None] * (len(arguments.args) - len(arguments.defaults)),
                *arguments.defaults,
                *arguments.kw_defaults,
            ]
            for x, default in zip(named, defaults, strict=True):
                expected = real[x.arg].default
                got = inspect.Parameter.empty if default is None else ast.literal_eval(default)
                assert got == expected, (name, x.arg)


def attributes(kind):
    """The fields that have a docstring of their own after them."""
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body[0].body
    return {
        first.target.id
        for first, then in itertools.pairwise(body)
        if isinstance(first, ast.AnnAssign)
        and isinstance(then, ast.Expr)
        and isinstance(then.value, ast.Constant)
    }


@pytest.mark.parametrize("name", [name for name in public() if inspect.isclass(value(name))])
def test_every_field_of_a_public_class_is_explained(name):
    kind = value(name)
    fields = getattr(kind, "_fields", ())
    if dataclasses.is_dataclass(kind):
        fields = [field.name for field in dataclasses.fields(kind)]
    meanings = documented(kind)
    own = attributes(kind) if fields else set()
    assert [field for field in fields if field not in meanings and field not in own] == []
    if dataclasses.is_dataclass(kind) and not own:
        missing = dataclasses.MISSING
        given = [
            field.name
            for field in dataclasses.fields(kind)
            if field.default is not missing or field.default_factory is not missing
        ]
        assert [field for field in given if "default" not in meanings[field]] == []


def test_every_command_has_a_section_in_the_reference():
    from flowrl.cli.main import parser

    commands = next(a.choices for a in parser()._actions if isinstance(a.choices, dict))
    text = next(page for page in PAGES if page.stem == "command_line").read_text()
    assert sorted(re.findall(r"^## ([a-z-]+)$", text, re.MULTILINE)) == sorted(commands)
