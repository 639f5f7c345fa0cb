"""The rules of the project: layers, public names, words, sizes, docstrings.

`make check` runs it.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.algos import STOCK
from flowrl.graph.names import public, public_names

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "flowrl").rglob("*.py"))
LAYERS = {
    "errors": 0, "core": 1, "graph": 2, "rl": 3, "losses": 4, "networks": 4, "envs": 4,
    "rollout": 5, "replay": 6, "learner": 6, "offline": 6, "ops": 7, "runtime": 7, "observe": 7,
    "algos": 8, "page": 8, "run_arguments": 9, "running": 9, "extend": 8, "resuming": 10,
    "starting": 10, "seeding": 11, "tuning": 11, "debugging": 11, "cli": 12, "__main__": 13,
}  # fmt: skip


def package(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports(path):
    """(module, whether at run time, line) of every import in a file."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(n)
        for t in ast.walk(tree)
        if isinstance(t, ast.If) and ast.unparse(t.test) == "TYPE_CHECKING"
        for n in ast.walk(t)
    }
    for node in ast.walk(tree):
        names = (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        for name in names:
            yield name, id(node) not in typing_only, node.lineno


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.parent != ROOT / "flowrl" or p.stem != "__init__"], ids=module_of
)
def test_imports_run_from_higher_layers_to_lower_ones(path):
    mine = package(module_of(path))
    for name, runs, line in imports(path):
        if not runs or not name.startswith("flowrl"):
            continue
        other = package(name)
        allowed = other in ("", mine) or LAYERS[other] < LAYERS[mine]
        assert allowed, (
            f"{path.name}:{line} imports {name}, which is in layer {LAYERS[other]}, from layer "
            f"{LAYERS[mine]}"
        )


def test_there_are_no_circles_among_the_modules():
    import networkx as nx

    g = nx.DiGraph(
        (module_of(p), name)
        for p in FILES
        for name, runs, _ in imports(p)
        if runs and name.startswith("flowrl.")
    )
    within = [c for c in nx.simple_cycles(g) if len({package(m) for m in c}) == 1]
    lazy = {
        ("flowrl.graph.graph", "flowrl.graph.compile"),
        ("flowrl.graph.graph", "flowrl.graph.draw"),
    }  # verbs of Graph, imported when called
    assert not [c for c in within if not lazy & set(zip(c, [*c[1:], c[0]], strict=True))]


def test_only_runs_and_studies_on_ray_import_ray():
    assert {
        module_of(p) for p in FILES for name, _, _ in imports(p) if name.partition(".")[0] == "ray"
    } == {
        "flowrl.runtime.ray",
        "flowrl.runtime.ray_calls",
        "flowrl.runtime.ray_keepers",
        "flowrl.tuning.on_ray",
    }


def test_runtimes_never_import_operators_nor_operators_runtimes():
    for path in FILES:
        mine = package(module_of(path))
        for name, _, _ in imports(path):
            assert (mine, package(name)) not in {
                ("runtime", "ops"),
                ("ops", "runtime"),
                ("runtime", "rl"),
            }


def test_importing_flowrl_loads_neither_jax_nor_ray():
    code = (
        "import sys, flowrl; print([m for m in ('jax', 'ray', 'flax', 'numpy', 'gymnasium', "
        "'networkx', 'orbax') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_every_public_name_is_there_and_documented_and_a_wrong_one_gives_the_nearest():
    for name in public_names():
        if name != "extend.Event":  # a union of types, which holds no docstring
            assert (public(name).__doc__ or "").strip(), name
    assert set(fl.__all__) <= set(dir(fl))
    with pytest.raises(
        AttributeError, match=r"flowrl has no name 'Lerner'; did you mean 'Learner'\?"
    ):
        fl.Lerner  # noqa: B018
    with pytest.raises(AttributeError, match=r"no name 'PPOLoss'; it is flowrl\.losses\.PPOLoss"):
        fl.PPOLoss  # noqa: B018


def test_a_public_name_stands_in_one_module():
    names = [name.rpartition(".")[2] for name in public_names()]
    assert sorted(names) == sorted(set(names))


def test_the_lazy_names_are_those_that_editors_see():
    tree = ast.parse((ROOT / "flowrl/__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    seen = {(node.module, alias.name) for node in block.body for alias in node.names}
    modules = {("flowrl", name) for name in fl.MODULES}
    assert seen == {(home, name) for name, home in fl._HOME.items()} | modules


def definitions(node, public=True):
    """The classes and functions that can be reached from outside: not those inside functions, not
    private ones, not setters."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            setter = any(ast.unparse(d).endswith(".setter") for d in child.decorator_list)
            if not child.name.startswith("_") and not setter:
                yield child
                if isinstance(child, ast.ClassDef):
                    yield from definitions(child)
        elif isinstance(child, ast.If):
            yield from definitions(child)


def test_everything_public_has_a_docstring():
    assert [
        f"{p.name}:{d.lineno} {d.name}"
        for p in FILES
        for d in definitions(ast.parse(p.read_text()))
        if not ast.get_docstring(d)
    ] == []


def code_numbers(text):
    """The numbers of the lines that hold code: no blank ones, no comments, no docstrings."""
    documented = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documented |= set(range(node.lineno, node.end_lineno + 1))
    numbered = enumerate(text.splitlines(), 1)
    return {
        number
        for number, line in numbered
        if line.strip() and not line.strip().startswith("#") and number not in documented
    }


HOUSE_WORDS = (
    r"told|(?<!study\.)(?<!rows\.)tells?",  # report, log, return; methods of other libraries
    r"anew",  # again, restarted
    r"behind",  # after, downstream
    r"mend(?:s|ed|ing)?",  # fix
    r"manieth",  # index, every n-th
    r"spell(?:s|ed)? out|spelled",  # unroll
    r"rhythm",  # schedule
    r"incarnations?",  # restart count
    r"elsewhere",  # remote
    r"twins?",  # shape-only stub
    r"owed|owes",  # pending
    r"(?<!rollout_)fragments?",  # rollout
    r"likeliest",  # greedy
    r"weights that acted",  # behaviour policy
    r"price of entropy",  # temperature
)
"""Words of this project's past that no reader of the field knows, and beside each what to write."""


def prose(path):
    """The text of a file, and its line numbers."""
    return list(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))


def tracked(*patterns):
    """The files of the repository that match."""
    command = ["git", "ls-files", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split() if (ROOT / name).is_file()]


def test_texts_use_the_words_of_the_field():
    refused = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(HOUSE_WORDS)})(?![A-Za-z])", re.IGNORECASE)
    # This file and the glossary of CONTRIBUTING.md name the words in order to refuse them.
    glossaries = {Path(__file__), ROOT / "CONTRIBUTING.md"}
    files = [path for path in tracked("*.py", "*.md") if path not in glossaries]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in prose(path)
        if refused.search(line)
    ]
    assert found == []


def functions(path):
    """(name, lines of code) of every function in a file, without docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    code = code_numbers(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = code & set(range(node.lineno, node.end_lineno + 1))
            yield f"{module_of(path)}.{node.name}:{node.lineno}", len(lines)


def test_functions_are_short():
    lengths = dict(found for path in FILES for found in functions(path))
    assert {name: n for name, n in lengths.items() if n > 80} == {}
    assert sum(n <= 25 for n in lengths.values()) >= 0.9 * len(lengths)


COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def test_nothing_is_taken_for_an_array_or_an_environment_by_one_attribute():
    # A space has a dtype too, and an environment may call its data `last`.
    code = ((path, path.read_text()) for path in (ROOT / "flowrl").rglob("*.py"))
    assert [str(path) for path, text in code if re.search(r"\bhasattr\(", text)] == []


def test_no_comprehension_stands_within_another():
    found = [
        f"{module_of(path)}:{inner.lineno}"
        for path in FILES
        for outer in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(outer, COMPREHENSIONS)
        for inner in ast.walk(outer)
        if inner is not outer and isinstance(inner, COMPREHENSIONS)
    ]
    assert found == []


def test_no_text_is_repeated_by_a_condition():
    found = [
        f"{module_of(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and any(isinstance(side, ast.Compare) for side in (node.left, node.right))
        and any(
            isinstance(side, ast.JoinedStr)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        )
    ]
    assert found == []


def test_files_stay_small():
    lines = {module_of(p): len(p.read_text(encoding="utf-8").splitlines()) for p in FILES}
    assert {m: n for m, n in lines.items() if n > 500} == {}
    for name in STOCK:
        assert lines[f"flowrl.algos.{name}"] <= 150
    for path in (ROOT / "examples").glob("*.py"):
        # An example fits on a screen; a whole algorithm, or two on one stream, on two. That of a
        # search has a game and the search as well.
        most = {"crossq": 100, "ppo_dqn": 100, "maml": 100, "alphazero": 195}
        assert len(prose(path)) <= most.get(path.stem, 50), path


def test_no_place_of_this_machine_and_no_registry_is_named():
    words = [
        "/wor" + "k/",
        "/roo" + "t/",
        "pyp" + "i.org",
        "files.python" + "hosted",
        "--index" + "-url",
        "--find" + "-links",
    ]
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    texts = [ROOT / f for f in listed if not f.endswith((".png", ".svg")) and (ROOT / f).is_file()]
    assert [(p.name, w) for p in texts for w in words if w in p.read_text(errors="replace")] == []


@pytest.mark.parametrize("name", STOCK)
def test_a_stock_graph_is_in_every_table(name):
    assert hasattr(fl, name) and has_documented_settings(name)
    for table in ("README.md", "bench/learn.py", "docs/learning.md", "docs/reference/graphs.md"):
        assert re.search(rf"\b{name}\b", (ROOT / table).read_text()), f"{table} lacks {name}"
    files = [f"tests/golden/{name}.{kind}.txt" for kind in ("graph", "plan", "drawing")]
    files += [f"docs/pictures/curve_{name}.{kind}" for kind in ("svg", "txt")]
    assert [file for file in files if not (ROOT / file).exists()] == []


def has_documented_settings(name):
    """Whether all settings of a stock graph are documented."""
    from flowrl.algos.named import find
    from flowrl.cli.commands import documented

    source = find(name)
    return set(source.settings) <= set(documented(source.kind))


def test_the_table_of_the_field_counts_the_lines_of_the_graphs():
    """Those of the function that returns a graph, without its docstring."""
    text = (ROOT / "docs/field.md").read_text(encoding="utf-8")
    said = {name: int(lines) for name, lines in re.findall(r"\| `(\w+)` \| (\d+) \|", text)}
    assert len(said) > 15 and said.keys() <= {*STOCK}
    for name, lines in said.items():
        tree = ast.parse((ROOT / f"flowrl/algos/{name}.py").read_text(encoding="utf-8"))
        (made,) = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name]
        docstring = made.body[0]
        whole, without = (x.end_lineno - x.lineno + 1 for x in (made, docstring))
        assert (name, lines) == (name, whole - without)
