"""The table of the field's algorithms names every stock graph, with its true number of lines.

``FLOWRL_UPDATE_GOLDEN=1 pytest tests/test_field.py`` writes the numbers again.
"""

import ast
import importlib
import inspect
import os
import re
from pathlib import Path

from flowrl.algos import STOCK

PAGE = Path(__file__).parents[1] / "docs/field.md"
ROW = re.compile(r"^(\|[^|]*\|[^|]*\| `(\w+)`[^|]*\| )(\d+) \|$", re.MULTILINE)


def lines_of(name):
    """The lines of the function that returns a stock graph, without its docstring."""
    module = importlib.import_module(f"flowrl.algos.{name}")
    function = ast.parse(inspect.getsource(getattr(module, name))).body[0]
    docstring = function.body[0]
    written = docstring.end_lineno - docstring.lineno + 1
    return function.end_lineno - function.lineno + 1 - written


def test_every_stock_graph_is_in_the_table_with_its_lines():
    text = PAGE.read_text(encoding="utf-8")
    if os.environ.get("FLOWRL_UPDATE_GOLDEN"):
        text = ROW.sub(lambda row: f"{row[1]}{lines_of(row[2])} |", text)
        PAGE.write_text(text, encoding="utf-8")
    found = [(name, int(lines)) for _, name, lines in ROW.findall(text)]
    assert {name for name, _ in found} == set(STOCK)
    assert [(name, lines, lines_of(name)) for name, lines in found if lines != lines_of(name)] == []
    assert all(lines <= 80 for _, lines in found)
