"""Any function as an operator."""

import pytest
from drive import batch, drive

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
    with pytest.raises(fl.SettingError, match="function"):
        op(wrong)
