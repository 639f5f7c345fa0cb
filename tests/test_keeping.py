"""What lasts of a run: nothing that an object holds is neither kept nor made again."""

import ast
import importlib
import inspect
import pkgutil
import textwrap

import pytest

import flowrl
from flowrl.core.keeping import Keeping, Leaves, into
from flowrl.errors import SaveError
from flowrl.rollout.gym_runners import GymRunners
from flowrl.rollout.runner import Runner
from flowrl.runtime.rows import RowMaker

for module in pkgutil.walk_packages(flowrl.__path__, "flowrl."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)


def everything(kind):
    """Yield all classes of flowrl that keep."""
    for each in kind.__subclasses__():
        if each.__module__.startswith("flowrl.") and not inspect.isabstract(each):
            yield each
        yield from everything(each)


def attributes(kind):
    """Return the names that a class gives its objects' attributes, in whichever method."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))):
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                    found.add(part.attr)
    return {name for name in found if not isinstance(vars(kind).get(name), property)}


@pytest.mark.parametrize("kind", sorted(set(everything(Keeping)), key=lambda k: k.__qualname__))
def test_every_attribute_is_kept_or_made_again(kind):
    named = {*kind.lasting, *kind.remade}
    held = set().union(*(attributes(k) for k in kind.__mro__ if k.__module__.startswith("flowrl.")))
    assert not held - named, f"{kind.__name__} neither keeps nor makes again: {held - named}"
    assert not set(kind.lasting) & set(kind.remade)
    state = {"state"} if isinstance(getattr(kind, "state", None), property) else set()
    fields = {*getattr(kind, "__dataclass_fields__", {})}
    fields |= {name for k in kind.__mro__ for name in {*inspect.get_annotations(k), *vars(k)}}
    assert not named - held - state - fields, f"{kind.__name__} has no {named - held}"


@pytest.mark.parametrize("kind", [GymRunners, RowMaker, Runner])
def test_what_another_version_kept_is_refused(kind):
    kept = dict.fromkeys(kind.lasting[1:])
    with pytest.raises(SaveError, match="is not what it keeps now; resume it with the version of"):
        object.__new__(kind).take(kept)


def test_what_was_kept_of_another_structure_is_refused():
    kept = Leaves({"['a']": 1.0})
    with pytest.raises(SaveError, match=r"has other parts: \['a'\], \['b'\]"):
        into({"b": 2.0}, kept, "the core")
    with pytest.raises(SaveError, match=r"has float at \['a'\], and now it has int"):
        into({"a": 2}, kept, "the core")
