"""Any function as an operator; gates and joins."""

from dataclasses import replace

import pytest
from drive import Context, batch, drive

import flowrl as fl


def test_map_yields_what_its_function_returns():
    assert drive(fl.Map(lambda x: x * 2), 1, 2, "a") == [[2], [4], ["aa"]]
    assert drive(fl.Map(lambda x: None), 1) == [[None]]


def test_filter_passes_on_what_it_keeps_as_it_is():
    small, large = batch(1, 2), batch(9, 2)
    ((), (kept,)) = drive(fl.Filter(lambda b: b.steps > 4), small, large)
    assert kept is large
    assert drive(fl.Filter(bool), 0, 1, "", "a") == [[], [1], [], ["a"]]


def test_flat_map_yields_every_item_of_what_its_function_returns():
    assert drive(fl.FlatMap(range), 0, 1, 3) == [[], [0], [0, 1, 2]]
    assert drive(fl.FlatMap(lambda x: (y for y in (x, -x))), 2) == [[2, -2]]


@pytest.mark.parametrize("op", [fl.Map, fl.Filter, fl.FlatMap])
def test_they_have_no_state_and_call_their_function_once_an_item(op):
    seen = []

    def note(x):
        seen.append(x)
        return [x]

    drive(op(note), 1, 2)
    assert seen == [1, 2] and op(note).init() is None


@pytest.mark.parametrize("op", [fl.Map, fl.Filter, fl.FlatMap])
def test_an_error_of_the_function_comes_through_as_it_is(op):
    with pytest.raises(ZeroDivisionError):
        drive(op(lambda x: 1 / x), 0)


@pytest.mark.parametrize("op", [fl.Map, fl.Filter, fl.FlatMap])
@pytest.mark.parametrize("wrong", [3, "abs"])
def test_what_is_no_function_is_refused(op, wrong):
    with pytest.raises(fl.errors.SettingError, match="function"):
        op(wrong)


def test_a_gate_lets_nothing_through_until_so_many_steps_came():
    items = [batch(1, 4) for _ in range(5)]
    assert drive(fl.Gate(start=10), *items) == [[], [], [], [items[3]], [items[4]]]
    with pytest.raises(fl.errors.SettingError, match="at least 1"):
        fl.Gate(start=0)
    with pytest.raises(fl.errors.ContractError, match="counts steps, which an int has none of"):
        drive(fl.Gate(start=1), 3)


def merged(op, sources):
    """What it yields for items that come from so named nodes, and before each whether there is room
    for it."""
    state, out, rooms = op.init(), [], []
    for i, source in enumerate(sources):
        ctx = Context({}, (), source)
        rooms.append(op.has_capacity(state, ctx))
        out.append(list(op.step(state, f"{source}{i}", ctx)))
    return out, rooms


def test_merge_passes_on_what_comes_as_it_comes():
    assert merged(fl.Merge(), "aba") == ([["a0"], ["b1"], ["a2"]], [True] * 3)


def test_by_weights_the_order_is_fixed_and_a_node_that_is_ahead_waits():
    out, rooms = merged(fl.Merge({"a": 3, "b": 1}), "aaaabaab")
    assert out == [["a0"], ["a1"], [], [], ["b4", "a2", "a3"], ["a5"], [], ["b7", "a6"]] and all(
        rooms
    )
    assert merged(fl.Merge({"a": 2, "b": 1}), "aaaaa")[1] == [True, True, True, False, False]
    assert fl.Merge({"a": 2, "b": 2, "c": 1}).order == ("a", "b", "c", "a", "b")


def test_merge_refuses_weights_that_make_no_sense_and_nodes_that_have_none():
    for weights in ({}, {"a": 0}, {"a": 0.5}):
        with pytest.raises(fl.errors.SettingError, match="whole numbers from 1 on"):
            fl.Merge(weights)
    with pytest.raises(
        fl.errors.ContractError,
        match="an item comes from c, which has no weight; weights are for a, b",
    ):
        merged(fl.Merge({"a": 1, "b": 1}), "c")


def test_switch_passes_the_items_of_each_phase_and_only_its_node_has_capacity():
    op = fl.Switch({"read": 2, "other": 1, "batch": None})
    state, found = op.init(), []
    for source in ("read", "read", "other", "batch", "batch"):
        ctx = Context({}, (), source)
        others = {"read", "other", "batch"} - {source}
        assert op.has_capacity(state, ctx)
        assert not any(op.has_capacity(state, Context({}, (), name)) for name in others)
        found += op.step(state, source, ctx)
    assert found == ["read", "read", "other", "batch", "batch"]
    # What a node yields at once may come after its phase.
    assert list(op.step(state, "late", Context({}, (), "read"))) == ["late"]
    with pytest.raises(fl.errors.ContractError, match="comes from x, which has no phase"):
        list(op.step(state, 1, Context({}, (), "x")))


@pytest.mark.parametrize("items", [{}, {"a": 1}, {"a": None, "b": None}, {"a": 0, "b": None}])
def test_phases_without_an_end_or_a_last_one_with_one_are_refused(items):
    with pytest.raises(
        fl.errors.SettingError, match="by node, or UntilReturn, and None for the last"
    ):
        fl.Switch(items)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (fl.Merge({"a": 1, "b": 2}), fl.Merge({"b": 2, "a": 1})),
        (fl.Switch({"a": 5, "b": 7, "c": None}), fl.Switch({"b": 7, "a": 5, "c": None})),
    ],
)
def test_the_order_of_turns_makes_another_operator(one, other):
    assert one == replace(one) and one != other and other == replace(other)
