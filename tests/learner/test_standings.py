"""A league's versions, ratings and choices, beside plain lists and slow references."""

import copy
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.learner.matches import Game, Matches
from flowrl.learner.standings import Standings, chances, columns_of, expected_score
from flowrl.rl.policies import Weights


def standings(capacity=4, keep_first=1, draw_return=0.0, seed=0):
    found = Standings("league", seed, capacity, keep_first, draw_return, Matches(1, 1, 1))
    found.begin(weights(0), np.int32(0))
    return found


def weights(version):
    return Weights({"w": np.float32(version)}, {})


@settings(max_examples=100, deadline=None)
@given(
    capacity=st.integers(1, 5),
    keep_first=st.integers(0, 4),
    steps=st.lists(st.integers(0, 2), max_size=20),
)
def test_the_first_versions_stay_and_the_oldest_of_the_others_make_way(capacity, keep_first, steps):
    keep_first = min(keep_first, capacity - 1)
    league, kept, version = standings(capacity, keep_first), [0], 0
    for step in steps:
        version += step
        is_new = league.add(weights(version), np.int32(version))
        assert is_new == (version not in kept)
        if is_new:
            kept.append(version)
            if len(kept) > capacity:
                del kept[keep_first]
    assert sorted(int(each.version) for each in league.frozen) == kept
    assert all(each.weights.params["w"] == each.version for each in league.frozen)
    # A version stays in its slot, by which its columns are named.
    assert [int(each.version) for each in league.frozen[:keep_first]] == kept[:keep_first]


def slow_chances(scores, sampling, power, newest_share):
    """The chance of each version, one after another."""
    found = []
    for i, score in enumerate(scores):
        is_newest = float(i == len(scores) - 1)
        weight, total = {
            "uniform": (1.0, float(len(scores))),
            "newest": (is_newest, 1.0),
            "pfsp": ((1 - score) ** power, sum((1 - x) ** power for x in scores)),
        }[sampling]
        share = weight / total if total else 1 / len(scores)
        found.append(share * (1 - newest_share) + newest_share * is_newest)
    return found


@given(
    scores=st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]), min_size=1, max_size=6),
    sampling=st.sampled_from(["uniform", "newest", "pfsp"]),
    power=st.sampled_from([0.5, 1.0, 2.0]),
    newest_share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_chances_are_those_of_a_slow_reference(scores, sampling, power, newest_share):
    found = chances(scores, sampling, power, newest_share)
    np.testing.assert_allclose(
        found, slow_chances(scores, sampling, power, newest_share), atol=1e-12
    )


def test_opponents_are_chosen_as_often_as_they_should_by_the_results_against_them():
    league = standings(capacity=3, keep_first=1)
    for version in (4, 8, 12):
        league.add(weights(version), np.int32(version))
    # The version 4 made way for 12, which is in its slot now, and the newest.
    assert [int(each.version) for each in league.frozen] == [0, 12, 8]
    wins, losses = [Game(1.0, 0)] * 3, [Game(-1.0, 8)]
    league.record([*wins, *losses, Game(1.0, 8)])
    # Scores of 1, 0.5 (nothing is known) and 0.5: nobody plays against what always loses.
    chosen = league.choose(4_000, "pfsp", 2.0, 0.0)
    counts = np.bincount([int(each.version) for each in chosen], minlength=13)[[0, 12, 8]]
    assert counts[0] == 0 and abs(counts[1] - 2_000) < 200
    newest = league.choose(10, "newest", 2.0, 0.0)
    assert {int(each.version) for each in newest} == {12}
    again = standings(capacity=3, keep_first=1)
    again.take(copy.deepcopy(league.keep()))
    now, later = (
        [int(each.version) for each in x.choose(20, "uniform", 0.0, 0.0)] for x in (league, again)
    )
    assert now == later and len(set(now)) == 3


@given(
    games=st.lists(
        st.tuples(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 3.0]), st.sampled_from([None, 0, 5, 9])),
        max_size=260,
    ),
    draw_return=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_rates_and_ratings_are_those_of_plain_lists(games, draw_return):
    league = standings(draw_return=draw_return)
    league.add(weights(5), np.int32(5))
    league.record([Game(total, version) for total, version in games])
    own, others, results = 1200.0, {0: 1200.0, 5: 1200.0}, {0: [], 5: [], 9: []}
    counted = []
    for total, version in games:
        if version is None:
            continue
        result = 1.0 if total > draw_return else 0.5 if total == draw_return else 0.0
        counted.append(result)
        results[version].append(result)
        # The version 9 is no longer in the league.
        if version in others:
            expected = 1 / (1 + math.pow(10, (others[version] - own) / 400))
            own += 16 * (result - expected)
            others[version] -= 16 * (result - expected)
    found = league.columns()
    assert list(found) == columns_of("league", 4)
    assert found["league/games"] == len(counted)
    assert found["league/excluded"] == len(games) - len(counted)
    assert found["league/elo"] == pytest.approx(own)
    for slot, version in ((0, 0), (1, 5)):
        assert found[f"league/version/{slot}"] == version
        assert found[f"league/elo/{slot}"] == pytest.approx(others[version])
        same_rates(found, f"/{slot}", results[version][-100:])
    same_rates(found, "", counted[-100:])
    assert math.isnan(found["league/version/2"]) and math.isnan(found["league/win_rate/3"])


def same_rates(found, suffix, results):
    for name, result in (("win_rate", 1.0), ("draw_rate", 0.5), ("loss_rate", 0.0)):
        rate = found[f"league/{name}{suffix}"]
        assert rate == results.count(result) / len(results) if results else math.isnan(rate)


def test_a_new_version_has_the_rating_of_the_learner():
    league = standings()
    league.record([Game(1.0, 0)] * 5)
    league.add(weights(3), np.int32(3))
    assert league.frozen[1].elo == league.elo > 1200 > league.frozen[0].elo
    assert expected_score(1200, 1200) == 0.5 and expected_score(1600, 1200) == 10 / 11
