"""Spaces as texts and values, and the search in them."""

import pytest

import flowrl as fl
from flowrl.networks import MLP as Net
from flowrl.tuning.journal import Trial
from flowrl.tuning.search import Search
from flowrl.tuning.spaces import parse_search, parse_space, values_of


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr", r"--search takes NAME=SPACE, such as .*; got 'lr'"),
        ("lr=", r"--search takes NAME=SPACE"),
        ("lr=3", r"--search 'lr=3': a space is one of loguniform\(low, high\), .* choice\(x, y"),
        ("lr=uniform(0, 1", r"--search 'lr=uniform\(0, 1': a space is one of"),
        ("lr=lognormal(0, 1)", r"'lr=lognormal\(0, 1\)': unknown space 'lognormal'; did you mean"),
        ("lr=uniform(1)", r"uniform takes two numbers, uniform\(low, high\)"),
        ("lr=uniform(2, 1)", r"takes a lower number first, got 2 and 1"),
        ("lr=uniform(0, inf)", r"Uniform takes two numbers, got 'inf'"),
        ("lr=loguniform(0, 1)", r"LogUniform takes numbers above 0"),
        ("lr=randint(1, 2.5)", r"RandInt takes two whole numbers, got 2\.5"),
        (f"lr=randint(0, {10**20})", r"RandInt takes whole numbers up to 9007199254740992"),
        ("lr=randint(True, 3)", r"RandInt takes two numbers, got True"),
        ("lr=choice(relu)", r"Choice takes two or more different values, got \('relu',\)"),
        ("lr=choice(*x, y)", r"choice\(\*x, y\) takes values one by one"),
        ("lr=choice(1, 1)", r"two or more different values"),
    ],
)
def test_a_search_that_is_none_is_reported_with_its_text_and_what_there_is(text, says):
    with pytest.raises(fl.errors.SettingError, match=says):
        parse_search([text])


def test_a_setting_has_one_space():
    with pytest.raises(fl.errors.SettingError, match="lr has a space already"):
        parse_search(["lr=uniform(0, 1)", "lr=uniform(0, 2)"])


@pytest.mark.parametrize(
    "space",
    [
        fl.LogUniform(1e-5, 1e-2),
        fl.Uniform(0, 1),
        fl.RandInt(-1, 3),
        fl.Choice(0, 0.01, None, "relu", (64, 64), fl.Linear(1e-3, 0, 65_000)),
        fl.Choice("a  b\nc", {"m": " d\t"}, (fl.Linear(1e-3, 0, 65_000),) * 5),
        fl.Choice("a  b\nc", "a b\nc", {"m": " x  y "}, fl.Policy(Net, hidden=(1234567,) * 15)),
    ],
    ids=str,
)
def test_a_space_is_read_from_what_it_prints(space):
    found = parse_space(str(space))
    assert found == space and vars(found) == vars(space)


def test_options_are_read_as_set_reads_values():
    space = parse_search(["x=choice(relu, (64,), Linear(1e-3, 0, 10), none)"])["x"]
    assert space.options == ("relu", (64,), fl.Linear(1e-3, 0, 10), None)
    assert values_of({"x": space}, {"x": space.texts[1]}) == {"x": (64,)}


def test_an_option_that_no_text_can_name_is_refused():
    with pytest.raises(fl.errors.SettingError, match="an option can't be written as text"):
        fl.Choice(0, lambda: 0)


SPACES = {"lr": fl.LogUniform(1e-5, 1e-2), "n": fl.RandInt(1, 3)}


def ended(number, points, state="done", value=1.0):
    return Trial(number, points, state, value, 90, reports=((30, 0.5), (60, 1.0)))


def test_a_search_that_goes_on_knows_the_past_and_does_not_repeat_its_random_numbers():
    first = Search(SPACES, "max", 0, [])
    points = [first.ask(number) for number in range(4)]
    assert all(1e-5 <= p["lr"] <= 1e-2 and p["n"] in (1, 2, 3) for p in points)
    assert Search(SPACES, "max", 0, []).ask(0) == points[0]
    past = [
        ended(0, points[0]),
        ended(1, points[1], "stopped"),
        ended(2, points[2], "failed", None),
        Trial(3, points[3], "running"),
    ]
    again = Search(SPACES, "max", 0, past)
    assert again.ask(4) not in points
    states = [trial.state.name for trial in again.study.trials]
    assert states == ["COMPLETE", "PRUNED", "FAIL", "RUNNING", "RUNNING"]
    assert again.study.trials[3].params == points[3]
    assert again.study.trials[1].intermediate_values == {30: 0.5, 60: 1.0}
    again.learn(ended(3, points[3], value=7.0))
    assert again.study.best_value == 7.0


def test_where_there_are_only_so_many_points_none_comes_twice():
    spaces = {"a": fl.RandInt(1, 3), "b": fl.Choice("x", "y")}
    search = Search(spaces, "max", 0, [])
    found = []
    for number in range(3):
        found.append(search.ask(number))
        search.learn(ended(number, found[-1], value=float(number)))
    again = Search(spaces, "max", 0, [ended(i, points) for i, points in enumerate(found)])
    found += [again.ask(number) for number in range(3, 6)]
    assert len({tuple(points.items()) for points in found}) == 6


def test_many_whole_numbers_are_not_held_in_memory():
    # More than a machine has room for; several make it more.
    spaces = {"seed": fl.RandInt(0, 10**15), "n": fl.RandInt(1, 10)}
    assert Search(spaces, "max", 0, []).ask(0).keys() == spaces.keys()
