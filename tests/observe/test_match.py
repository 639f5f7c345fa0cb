"""Policies of several learners on disk, and matches of saved and scripted players."""

import json

import numpy as np
import pytest

import flowrl as fl
from flowrl.cli.main import main
from flowrl.observe.match import Match
from flowrl.rollout.evaluation import Evaluation
from teams import NAMES, TwoCartPoles, two_learners

TICTACTOE = "pettingzoo:classic.tictactoe_v3"
ALLOW = ["teams"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a run of two learners, and the run."""
    folder = tmp_path_factory.mktemp("runs") / "two"
    with fl.run(two_learners(), out=folder) as run:
        next(run)
    return folder, run


def first_free(obs, rng):
    """Take the first free field: a player without chance."""
    return int(np.flatnonzero(obs["action_mask"])[0])


def test_the_policies_of_several_learners_are_saved_and_loaded_by_name(saved):
    folder, run = saved
    found = fl.load_policies(folder, allow=ALLOW)
    assert set(found) == set(NAMES) and not (folder / "policy").exists()
    for name in NAMES:
        one = fl.load(folder, policy=name, allow=ALLOW)
        for policy in (one, found[name]):
            assert policy.agents == (name,) and policy.env is TwoCartPoles
            for key, x in run.policies[name].weights.params.items():
                np.testing.assert_array_equal(policy.weights.params[key], x)
    with pytest.raises(fl.errors.SaveError, match="holds several policies; name one of them by it"):
        fl.load(folder, allow=ALLOW)
    with pytest.raises(fl.errors.SaveError, match="unknown policy 'rad'; did you mean 'red'"):
        fl.load(folder, policy="rad", allow=ALLOW)
    with pytest.raises(fl.errors.SaveError, match="the best policy is kept of runs with one learn"):
        fl.load(folder, policy="red", which="best", allow=ALLOW)
    with pytest.raises(fl.errors.SettingError, match="has one agent only, and this policy plays r"):
        fl.load(folder, policy="red", allow=ALLOW, env="CartPole-v1")


def test_policies_of_one_team_play_their_own_agents(saved):
    folder, run = saved
    found = fl.match(fl.load_policies(folder, allow=ALLOW), episodes=3, seed=2)
    assert found.seatings == ({"red": "red", "blue": "blue"},)
    again = fl.match(run.policies, episodes=3, seed=2)
    for name in NAMES:
        np.testing.assert_array_equal(found[name].returns, again[name].returns)
    higher = found["red"].returns > found["blue"].returns
    equal = found["red"].returns == found["blue"].returns
    assert found.results("red") == (higher.sum(), equal.sum(), 3 - higher.sum() - equal.sum())


def test_others_play_from_every_seat_with_the_same_seeds():
    players = {"first": first_free, "random": fl.Scripted()}
    found = fl.match(players, env=TICTACTOE, episodes=9, seed=4)
    one, two = ("first", "random"), ("random", "first")
    agents = ("player_1", "player_2")
    assert [tuple(seats[agent] for agent in agents) for seats in found.seatings] == [one, two]
    assert found.seating.tolist() == [0] * 5 + [1] * 4
    # It is a game of two: what one wins the other loses.
    won, drew, lost = found.results("first")
    assert found.results("random") == (lost, drew, won) and won + drew + lost == 9
    assert found["first"].returns.sum() == won - lost == -found["random"].returns.sum()
    # Who begins with the first free fields beats random moves more often than not.
    assert won > lost
    fixed = fl.match(
        players, env=TICTACTOE, episodes=4, seed=4, seats=dict(zip(agents, two, strict=True))
    )
    np.testing.assert_array_equal(fixed["first"].returns, found["first"].returns[5:])


def evaluation(*returns):
    x = np.array(returns, float)
    return Evaluation(x, x.astype(int), x < 0, x.astype(np.uint64))


def test_episodes_are_won_by_the_highest_return_and_drawn_by_those_that_share_it():
    players = {
        "a": evaluation(3, 1, 2, 0.1 + 0.2),
        "b": evaluation(1, 1, 2, 0.3),
        "c": evaluation(2, 1, 0, 0),
    }
    found = Match(players, ({},), np.zeros(4, int))
    assert [found.results(name) for name in "abc"] == [(1, 3, 0), (0, 3, 1), (0, 1, 3)]
    assert str(found).splitlines()[:2] == [
        "4 episodes",
        "a  1 won, 3 drawn, 0 lost  mean 1.57, std 1.02",
    ]
    with pytest.raises(fl.errors.SettingError, match="unknown player 'd'"):
        found.results("d")


def test_copies_of_an_episode_are_logged(caplog):
    found = fl.match({"a": first_free, "b": first_free}, env=TICTACTOE, episodes=4)
    assert found["a"].different == 2
    assert "only 2 of the 4 episodes differ" in caplog.text


MISTAKES = {
    "one player": (({"a": fl.Scripted()},), {}, "needs at least 2 players and at most one for eac"),
    "too many": (({x: fl.Scripted() for x in "abc"},), {}, "got 3: a, b, c"),
    "no player": (
        ({"a": 3, "b": fl.Scripted()},),
        {},
        "player a must be a trained policy (fl.load",
    ),
    "no episodes": (({x: fl.Scripted() for x in "ab"},), {"episodes": 0}, "episodes and max_steps"),
    "an unknown agent": (
        ({x: fl.Scripted() for x in "ab"},),
        {"seats": {"player_1": "a", "player_3": "b"}},
        "unknown agent 'player_3'",
    ),
    "an unknown player": (
        ({x: fl.Scripted() for x in "ab"},),
        {"seats": {"player_1": "a", "player_2": "c"}},
        "seats: unknown player 'c'",
    ),
    "an empty seat": (
        ({x: fl.Scripted() for x in "ab"},),
        {"seats": {"player_1": "a"}},
        "seats: nobody plays player_2",
    ),
    "an idle player": (
        ({x: fl.Scripted() for x in "ab"},),
        {"seats": {"player_1": "a", "player_2": "a"}},
        "seats: no agent is played by b",
    ),
    "one agent": (({x: fl.Scripted() for x in "ab"},), {"env": "CartPole-v1"}, "has but one agent"),
    "no environment": (({x: fl.Scripted() for x in "ab"},), {"env": None}, "name it: env=..., or"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_in_a_match_is_reported_with_a_way_out(what):
    args, how, text = MISTAKES[what]
    with pytest.raises(fl.errors.SettingError) as caught:
        fl.match(*args, **{"env": TICTACTOE, **how})
    assert text in str(caught.value)


def test_the_commands_play_teams_and_matches(saved, capsys, tmp_path):
    folder, run = saved
    teams = ["--import", "teams"]
    assert main(["eval", str(folder), "--episodes", "3", "--seed", "2", *teams]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 episodes" and {line.split()[0] for line in lines[1:]} == set(NAMES)
    found = fl.match(run.policies, episodes=3, seed=2)
    of_red = next(line for line in lines if line.startswith("red"))
    assert of_red.endswith(str(found).splitlines()[1].partition("mean")[2])
    red = f"{folder}:red"
    assert main(["match", red, "random", "--episodes", "4", "--json", *teams]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["episodes"] == 4 and set(plain["players"]) == {red, "random"}
    file = tmp_path / "players.py"
    file.write_text("def right(obs, rng):\n    return 1\n")
    seats = ["--seat", f"red={red}", "--seat", f"blue={file}:right"]
    assert main(["match", red, f"{file}:right", "--episodes", "2", *seats, *teams]) == 0
    # A pole that is always pushed to the right falls within 11 steps.
    assert "right" in capsys.readouterr().out
    for words, text in (
        (["match", "nothing", "random"], "there is no directory nothing; a player is a run's dir"),
        (["match", red, "random", "--seat", "red"], "--seat takes AGENT=PLAYER, got red"),
        (["match", red, "random", "--seat", "red=blue"], "--seat red=blue: unknown player 'blue'"),
        (["eval", str(folder), "--video", "x"], "--video films environments with one agent only"),
        (["eval", str(folder), "--policy", "red"], "plays red of TwoCartPoles, and not blue"),
    ):
        assert main([*words, *teams]) == 2
        assert text in capsys.readouterr().err


def test_the_policies_of_an_earlier_part_of_a_run_are_replaced(saved, tmp_path):
    graph, folder = two_learners(), tmp_path / "x"
    with fl.run(graph, steps=64, out=folder, snapshots=fl.Snapshots(every=0)) as run:
        list(run)
    with fl.resume(folder, steps=192, allow=ALLOW) as run:
        list(run)
    found = fl.load_policies(folder, allow=ALLOW)
    for name in NAMES:
        for key, x in run.policies[name].weights.params.items():
            np.testing.assert_array_equal(found[name].weights.params[key], x)
    assert not (folder / "policies.draft").exists()
