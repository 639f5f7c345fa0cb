"""Self-play: graphs with a league, their plans, rows, resumes and mistakes."""

from dataclasses import dataclass
from functools import cache

import jax
import numpy as np
import pytest
from jax.tree_util import DictKey, SequenceKey

import flowrl as fl
from conftest import RAY, timeless
from flowrl.core.items import Batch, MultiBatch
from flowrl.graph.graph import Graph
from flowrl.graph.site import HereSite, Place
from flowrl.graph.versions import VersionOwners
from flowrl.observe.sinks import columns
from flowrl.rollout.team_runner import TeamRunner
from teams import MLP, two_learners

pytest.importorskip("pettingzoo")
ENV = "pettingzoo:classic.tictactoe_v3"
SMALL = {"envs_per_runner": 4, "rollout_length": 8, "batch_size": 64, "minibatch_size": 32}
ROUND = 128
"""Steps of environments in a round, about."""


@dataclass(frozen=True)
class Witness(fl.extend.Operator):
    """Writes down which versions played for each runner."""

    seen: list
    __hash__ = object.__hash__

    def init(self):
        return None

    def step(self, state, item, ctx):
        if isinstance(item["learner"]["reward"], np.ndarray):
            other = item["opponent"].columns
            self.seen.append([other["last_version"][other["producer"] == i] for i in (0, 1)])
        yield item


def graph(**how):
    one = fl.ppo(ENV, num_runners=2, epochs=1, policy=MLP, **SMALL)
    how = {"every": 1, "sampling": "uniform", "newest_share": 0.0, **how}
    league = fl.League(capacity=4, keep_first=2)
    return fl.self_play(one, league, fl.ChooseOpponents(**how), fl.AddOpponent(every=2))


def rows_of(graph, rows=6, **how):
    with fl.run(graph, **how) as run:
        return [next(run) for _ in range(rows)], run


@pytest.mark.system
def test_the_plan_is_what_is_counted_and_names_the_league():
    # The second of them finds the newest version there already, every second time.
    edited = graph(every=2).insert(after="freeze", again=fl.AddOpponent(every=3))
    plan = edited.compile()
    assert (plan.found.exact, plan.lag, plan.learners) == (True, 0, ("learner",))
    rows, run = rows_of(edited)
    counted = run.counts()
    names = ("updates", "requests", "publishes", "trained_steps", "sampled_steps", "frozen")
    for name in (*names, "matches"):
        assert counted[name] == plan.per_row(name) * len(rows) > 0, name
    assert run.audit().closed
    assert counted["frozen"] == 4
    assert set(rows[-1]) <= {*columns(plan)}
    text = str(plan)
    assert "league -> runners.opponent (uniform)" in text and "1 opponent a row" in text
    assert "learner -> league" in text and "1 version in 2 rows" in text
    drawn = edited.draw()
    assert "choose  ChooseOpponents  ┄▷ league" in drawn
    assert "◆ league   4 versions of learner play runners.opponent" in drawn
    assert Graph.from_text(edited.text()) == edited


def test_frozen_versions_are_counted_by_the_learner_that_they_are_of():
    edited = graph()
    place = Place(edited.name, edited.resources, 0, HereSite)
    owners = VersionOwners(edited, place.open())
    place.close()
    assert owners.of((SequenceKey(1), DictKey("runners"), DictKey("opponent"))) == "learner"
    assert owners.of_node("train") == owners.of_node("select") == "learner"


def test_every_runner_plays_the_frozen_version_that_was_chosen_for_it():
    seen = []
    rows, _ = rows_of(graph().insert(after="sample", witness=Witness(seen)), rows=12)
    # A version every second update, of which the first two stay for ever.
    for number, runners in enumerate(seen):
        # They were chosen after the round before, of which the update was still to come.
        frozen = [0, 2, *range(4, number, 2)]
        known = {*frozen[:2], *frozen[2:][-2:]}
        for versions in runners:
            assert len(set(versions.tolist())) == 1 and versions[0] in known
    assert all((versions == 0).all() for versions in seen[0])
    assert any(one[0] != other[0] for one, other in seen)
    assert [rows[-1][f"league/version/{i}"] for i in range(4)] == [0, 2, 12, 10]
    last = rows[-1]
    assert last["league/games"] + last["league/excluded"] == last["episodes/learner"]
    assert last["league/games"] > last["league/excluded"] > 0
    rates = [last[f"league/{name}_rate"] for name in ("win", "draw", "loss")]
    assert sum(rates) == pytest.approx(1) and all(rate > 0 for rate in rates[::2])


def test_the_opponent_acts_by_the_learners_own_weights(monkeypatch):
    used = []
    sample = TeamRunner.sample

    def noting(self, *published):
        found = sample(self, *published)
        used.append({p: jax.device_get((x.weights, x.version)) for p, x in self.parts.items()})
        return found

    monkeypatch.setattr(TeamRunner, "sample", noting)
    rows_of(graph(sampling="newest"))
    by_version = {int(each["learner"][1]): each["learner"][0] for each in used}
    assert {each["opponent"][1] for each in used} == {0, 2, 4}
    for each in used:
        weights, version = each["opponent"]
        jax.tree.map(np.testing.assert_array_equal, weights, by_version[int(version)])


def test_it_is_repeatable_and_goes_on_bit_for_bit(tmp_path):
    edited, steps = graph(sampling="pfsp"), {"short": 5 * ROUND, "long": 9 * ROUND}
    with fl.run(edited, steps=steps["long"]) as run:
        whole = timeless(list(run))
    with fl.run(edited, steps=steps["short"], seed=1) as run:
        assert timeless(list(run)) != whole[: len(run.rows)]
    often = fl.Snapshots(every=0)
    with fl.run(edited, steps=steps["short"], out=tmp_path / "x", snapshots=often) as run:
        begun = list(run)
    with fl.resume(tmp_path / "x", steps=steps["long"]) as run:
        list(run)
        assert 0 < len(begun) < len(run.rows)
        assert timeless(run.rows) == whole


@pytest.mark.system
def test_on_ray_the_same_games_are_played(ray_up):
    here, there = (timeless(rows_of(graph(), rows=8, **how)[0]) for how in ({}, {"runtime": RAY}))
    assert here == there


def test_a_learner_that_begins_with_saved_weights_plays_against_these(tmp_path):
    with fl.run(graph(), steps=ROUND, out=tmp_path / "x") as run:
        list(run)
    saved = fl.load(tmp_path / "x")
    run = fl.run(graph(), init=fl.Init(saved))
    next(run)
    with run._session.handle("league") as league:
        standings = league._call("keep")
    run.close()
    jax.tree.map(np.testing.assert_array_equal, standings["frozen"][0].weights, saved.weights)


def with_resources(graph, **more):
    """The same graph with more resources."""
    found = Graph(graph.name, **graph.resources, **more)
    for node in graph.nodes:
        found = found.then(after=node.after, **{node.name: node.op})
    return found


def stripped(item):
    return MultiBatch({name: Batch(batch.data) for name, batch in item.batches.items()})


@cache
def mistakes():
    whole = graph()
    other = fl.Learner(MLP, fl.losses.PPOLoss(), fl.Adam(1e-3), runners="runners.opponent")
    two = with_resources(whole, other=other).remove("report")
    two = two.then(
        after="choose",
        select_other=fl.Select("opponent"),
        adv_other=fl.Advantages(learner="other"),
        train_other=fl.TrainOneStep(learner="other"),
        sync_other=fl.SyncWeights(learner="other", runners="runners.opponent"),
    ).then(after=("freeze", "sync_other"), both=fl.Merge(), report=fl.Report())
    wide = fl.Team(learner=MLP, opponent=fl.Policy(fl.networks.MLP, hidden=(4,)))
    alone = fl.ppo("CartPole-v1", policy=MLP).insert(after="sync", freeze=fl.AddOpponent())
    lone = with_resources(alone, league=fl.League(runners="runners"))
    late = whole.remove("choose").insert(after="select", late=fl.ChooseOpponents())
    return {
        "no versions": (
            whole.remove("freeze").compile,
            "league: only the first version of learner ever plays; add freeze=AddOpponent(every=",
        ),
        "no matches": (
            whole.remove("choose").compile,
            "league: nobody ever plays against the versions that it holds; add choose=Choose",
        ),
        "an opponent that learns": (
            two.compile,
            "league: runners.opponent have a learner of their own, other, whose weights would ",
        ),
        "an opponent that is the learner": (
            whole.set("league.runners", "runners.learner").compile,
            "learner trains runners.learner, so runners.learner can't be its opponent; name anoth",
        ),
        "another policy": (
            whole.set("runners.policy", wide).compile,
            "frozen versions of learner can't act for runners.opponent, whose policy differ",
        ),
        "runners of one policy": (
            lone.compile,
            "its learner and its opponents are two policies of the same runners; give runners fl",
        ),
        "an unknown policy": (
            whole.set("league.runners", "runners.oponent").compile,
            "unknown part of a resource 'runners.oponent'; did you mean 'runners.opponent'?",
        ),
        "an unknown learner": (
            whole.set("league.learner", "lerner").compile,
            "unknown resource 'lerner'; did you mean 'learner'?",
        ),
        "an unknown league": (
            whole.set("choose.league", "liga").compile,
            "unknown resource 'liga'",
        ),
        "a league of no handle": (
            whole.set("choose.league", "learner").compile,
            "must be what gives a LeagueHandle, but 'learner' is Learner",
        ),
        "a choice too late": (
            late.compile,
            "needs the batches of all policies, got a Batch; put it right after ParallelSample",
        ),
        "columns that are lost": (
            whole.insert(after="sample", strip=fl.Map(stripped)).compile,
            "the batch of learner lacks version, last_version, cut, env, first, by which games",
        ),
        "no slot": (lambda: fl.League(capacity=0), "capacity must be at least 1, got 0"),
        "no slot for new ones": (
            lambda: fl.League(capacity=2, keep_first=2),
            "keep_first must be at least 0 and below capacity",
        ),
        "a way that there is not": (
            lambda: fl.ChooseOpponents(sampling="best"),
            "sampling must be uniform, newest or pfsp, got 'best'",
        ),
        "a share above 1": (
            lambda: fl.ChooseOpponents(newest_share=2),
            "newest_share must be from 0 to 1, got 2",
        ),
        "never": (lambda: fl.AddOpponent(every=0), "every must be at least 1, got 0"),
        "two learners": (lambda: fl.self_play(two_learners()), "self_play needs exactly one"),
        "self-play twice": (lambda: fl.self_play(whole), "self_play gives them a team"),
        "no weights published": (
            lambda: fl.self_play(fl.ppo(ENV, policy=MLP).remove("sync")),
            "self_play needs one node to publish weights to runners, got none",
        ),
    }


@pytest.mark.parametrize("what", mistakes())
def test_a_mistake_is_one_message_with_a_way_out(what):
    make, text = mistakes()[what]
    with pytest.raises(fl.errors.FlowrlError) as caught:
        make()
    assert text in str(caught.value)
    problems = getattr(caught.value, "problems", ("one",))
    assert len(problems) == 1, problems


def test_a_replay_of_self_play_holds_the_learners_turns():
    settings = {"envs_per_runner": 4, "rollout_length": 8, "learning_starts": 64, "batch_size": 32}
    q = fl.Policy(fl.networks.QNetwork, hidden=(8,))
    edited = fl.self_play(fl.dqn(ENV, policy=q, **settings), freeze=fl.AddOpponent(every=20))
    plan = edited.compile()
    assert edited.resources["replay"].runners == "runners.learner"
    # What the opponent did is in no replay.
    assert 2 * plan.total("added_steps") == plan.total("sampled_steps")


@pytest.mark.system
def test_learner_and_runners_may_be_in_two_stages():
    small = {"num_runners": 2, "envs_per_runner": 4, "rollout_length": 8, "batch_size": 64}
    edited = fl.self_play(fl.impala(ENV, policy=MLP, **small), freeze=fl.AddOpponent(every=2))
    rows, run = rows_of(edited)
    assert len(edited.stages()) == 2 and run.audit().closed
    last = rows[-1]
    assert last["league/games"] + last["league/excluded"] == last["episodes/learner"] > 0
