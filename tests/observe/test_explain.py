"""Explanations: a planted bottleneck is named, with the right advice.

Predictions follow from the costs, and the numbers add up.
"""

import io
import json
import time
from dataclasses import replace

import pytest

import flowrl as fl
import planted
from conftest import with_system
from flowrl.cli import main as cli
from flowrl.core.clock import by_kind
from flowrl.core.profile import Profile, from_text, to_text
from flowrl.observe import saver
from flowrl.observe.breakdown import shares
from flowrl.observe.explain import explain
from flowrl.observe.saving import profiles
from flowrl.observe.table import Window, live_table
from flowrl.observe.what_if import TIMES, sliders, what_if

SECONDS = 1.0


def explained(graph, runtime="ray", scale=1):
    with fl.run(graph, runtime=runtime) as run:
        next(run)
        began = time.perf_counter()
        while time.perf_counter() - began < SECONDS * scale:
            next(run)
    return run.explain()


@pytest.mark.ray
@pytest.mark.parametrize(
    ("build", "where", "kind", "advice"),
    [
        (planted.slow_environment, "runners", "step", "--set runners.num_runners=3"),
        (planted.slow_loss, "train", "update", "Train less on each step"),
        (planted.slow_sync, "sync", "weight sync", "Send weights less often (every=)"),
        (planted.tiny_queue, "queue", "queue", "--set queue.capacity=4"),
        (planted.straggler, "runners, ", "straggler", "sample with min_fraction below 1"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_a_planted_bottleneck_is_named_with_its_fix(build, where, kind, advice, tmp_path):
    folder = [tmp_path] if build is planted.straggler else []
    for scale in (
        1,
        4,
        16,
    ):  # beside other work on this machine, what was planted may be too small to matter
        found = explained(build(*folder, scale=scale), scale=scale)
        worst = found.bottleneck
        if worst.kind == kind:
            break
    assert (worst.where.rstrip("012"), worst.kind) == (where, kind) and advice in worst.advice
    if kind == "straggler":
        each = found.profile.workers("runners")
        assert worst.where == max(each, key=lambda name: each[name]["step"])
    assert f"bottleneck: {worst.where}" in str(found) and worst.advice in found.short()


def test_in_one_process_the_environment_is_named_and_side_by_side_advised():
    found = explained(planted.ppo(0.002), "local")
    assert (found.bottleneck.where, found.bottleneck.kind) == ("sample", "step")
    assert "--runtime ray" in found.bottleneck.advice
    assert (
        "take --runtime ray" in found.what_if[0].because
        and found.what_if[0].steps_per_second is None
    )


@pytest.mark.parametrize("runtime", with_system(["local", "xla"], {"xla"}))
def test_a_slow_loop_over_the_rows_is_named(runtime):
    env = "CartPole-v1" if runtime == "local" else "gymnax:CartPole-v1"
    settings = fl.PPOSettings(
        batch_size=128, rollout_length=32, minibatch_size=64, policy=planted.POLICY
    )
    with fl.run(fl.ppo(env, settings), runtime=runtime, steps=4 * 128) as run:
        for _ in run:
            time.sleep(0.5)
    worst = run.explain().bottleneck
    assert (worst.where, worst.kind) == ("the loop over the rows", "outside")
    assert 0.5 < worst.share < 1 and "every= of Report" in worst.advice


def test_thinking_at_a_prompt_after_the_newest_row_changes_no_explanation():
    with fl.run(planted.ppo(0.0)) as run:
        next(run), next(run)
        before = run.profile()
        time.sleep(0.2)
        after = run.profile()
        assert (after.seconds, after.processes) == (before.seconds, before.processes)
        next(run)
        assert run.profile().seconds > before.seconds + 0.2


def test_the_last_snapshot_counts_as_no_part_of_a_run(tmp_path, monkeypatch):
    kept = saver.Saver.keep

    def slowly(self, rows, state, due):
        time.sleep(2.0 * due)
        return kept(self, rows, state, due)

    monkeypatch.setattr(saver.Saver, "keep", slowly)
    with fl.run(planted.ppo(0.0), out=tmp_path / "run", steps=500) as run:
        list(run)
    assert by_kind(run.profile().processes["this process"])["outside"] < 2
    assert explain(profiles(tmp_path / "run")[1]) == run.explain()


def profile(step=0.8, update=0.1, count=2, busy=2.0, singly=True, blocked=0.0):
    """Ten seconds of an asynchronous run: 100 rollouts of 20 steps from each of two runners, which
    take `step` of their time."""
    spent = {("", "step"): 10 * step, ("", "waiting"): 10 * (1 - step)}
    return Profile(
        seconds=10.0,
        rows=10,
        env_steps=4_000,
        processes={
            "stage of sample": {
                ("sample", "waiting"): 10 * (1 - blocked),
                ("sample", "blocked"): 10 * blocked,
            },
            "stage of queue": {
                ("train", "update"): 10 * update,
                ("queue", "waiting"): 10 * (1 - update),
            },
            **{f"runners, {i}": spent for i in range(count)},
        },
        stages={"stage of sample": ("sample",), "stage of queue": ("queue", "train", "sync")},
        counts={
            ("sample", "runners"): {"sampled_steps": 4_000},
            ("train", "learner"): {"updates": 100},
        },
        edges={("sample", "queue"): (200, 4_000), ("queue", "train"): (200, 4_000)},
        queues={"queue": (3, 16)},
        ops={
            "sample": "ParallelSample",
            "queue": "Queue",
            "train": "TrainOneStep",
            "sync": "SyncWeights",
        },
        facts={
            "runners": {
                "count": count,
                "envs": 2,
                "singly": singly,
                "remote": True,
                "rollouts": [100] * count,
                "rounds": [0.0, 0.0],
            },
        },
        cores=4,
        busy=busy,
    )


def test_the_wait_for_an_update_counts_for_the_learner_that_it_is_of():
    branches = [(name, f"{kind}_{name}") for name in ("red", "blue") for kind in ("train", "sync")]
    names = ("sample", *(node for _, node in branches))
    edges = [("sample", f"train_{x}") for x in ("red", "blue")]
    edges += [(f"train_{x}", f"sync_{x}") for x in ("red", "blue")]
    spent = {("sample", "step"): 5.0, ("", "update"): 0.5, ("sample", "update"): 0.25}
    spent |= {(node, "update"): float(2**i) for i, (_, node) in enumerate(branches)}
    p = replace(
        profile(),
        stages={"loop": names},
        processes={"loop": spent},
        counts={(f"train_{x}", x): {"updates": 1} for x in ("red", "blue")},
        edges=dict.fromkeys(edges, (1, 1)),
        ops=dict.fromkeys(names, "TrainOneStep"),
    )
    updates = {node: x for (node, kind), x in p.work("loop").items() if kind == "update"}
    assert updates == {"sample": 0.25, "train_red": 1 + 2, "train_blue": 4 + 8 + 0.5}


@pytest.mark.parametrize(
    ("p", "runner", "envs", "batch"),
    [
        (profile(), 1.5, 1.0, 1.0),  # the runners' steps are what counts
        (
            profile(singly=False),
            1.5,
            2.0,
            1.0,
        ),  # a vector of their own steps more of them in the same time
        (profile(step=0.5, update=1.0, blocked=0.5), 1.0, 1.0, 1.0),  # the update is
    ],
)
def test_predictions_follow_from_the_costs(p, runner, envs, batch):
    got = [w.steps_per_second / 400 for w in what_if(p)]
    assert got == pytest.approx([runner, envs, batch])


def between_rows(p, seconds):
    """The same run, whose caller takes so many of its seconds between rows."""
    thread = "stage of queue"
    spent = {**p.processes[thread], ("", "outside"): seconds}
    spent["queue", "waiting"] -= seconds
    return replace(p, processes={**p.processes, thread: spent})


def test_predictions_count_the_time_between_rows():
    freely = profile(step=0.5, update=0.1)
    held = between_rows(freely, 8.0)
    assert explain(freely).bottleneck.where == "runners"
    found = explain(held).bottleneck
    assert (found.where, found.share) == ("the loop over the rows", pytest.approx(0.8))
    placed = {"learner": {("", "update"): 6.0, ("", "waiting"): 4.0}}
    beside = replace(held, processes={**held.processes, **placed})
    assert explain(beside).bottleneck == found, "a learner in a process of its own is less busy"
    got = [w.steps_per_second / 400 for w in what_if(held)]
    # Of 9 seconds of that stage the update of each step takes 1, and 8 go to the rows.
    assert got == pytest.approx([1.0, 1.0, 9 / 5])


def test_many_runners_and_a_learner_that_is_nearly_as_slow():
    p = profile(
        count=4, update=0.5
    )  # a rollout takes 80 ms of four runners, and 12.5 ms of the learner
    first, envs, _ = what_if(p)
    assert first.steps_per_second / 400 == pytest.approx(
        20 / 16
    ) and envs.steps_per_second / 400 == pytest.approx(1)
    (first, *_) = what_if(profile(count=4, update=0.75))  # 18.75 ms
    assert (
        first.steps_per_second / 400 == pytest.approx(20 / 18.75)
        and first.because == "stage of queue then takes longest"
    )


def test_sliders_begin_at_what_is_and_agree_with_the_predictions():
    p = profile(count=4, update=0.5)
    runners, envs, batch = sliders(p)
    assert runners.values == (4, 5, 8, 12, 16, 24, 32) and batch.values == TIMES
    for slider in (runners, envs, batch):
        now = slider.predictions[0].steps_per_second
        assert now == pytest.approx(p.env_steps / p.going)
        assert len(slider.values) == len(slider.predictions)
    found = runners.predictions[1], envs.predictions[1], batch.predictions[1]
    assert found == tuple(what_if(p)), "one more, and twice as many"
    speeds = [w.steps_per_second for w in runners.predictions]
    assert speeds == sorted(speeds), "more runners never slow a run down"
    here = replace(p, facts={"runners": {**p.facts["runners"], "remote": False}})
    assert [s.name for s in sliders(here)] == ["environments per runner", "batch"]
    assert [*sliders(replace(p, facts={}))] == []


def test_a_learner_that_runs_freely_holds_no_sampling_up():
    p = profile(step=0.9, update=1.0)
    apart = replace(p, edges={("queue", "train"): (200, 4_000)})
    assert explain(p).bottleneck.where == "train" and explain(apart).bottleneck.where == "runners"
    assert next(w.steps_per_second / 400 for w in what_if(apart)) == pytest.approx(1.5)


def test_to_be_started_is_no_work_and_a_restart_no_negative_time():
    spent = {("", "start"): 8.0, ("", "step"): 1.0, ("", "waiting"): 1.0}
    p = profile(update=0.3)
    p = replace(p, processes={**p.processes, "runners, 0": spent, "runners, 1": spent})
    assert explain(p).bottleneck.where == "train"
    (runners, *_) = [share for share in shares(p) if share.node == "runners"]
    assert (runners.busy, runners.starved) == (pytest.approx(0.1), pytest.approx(0.1))
    later = {
        ("", "start"): 8.0,
        ("", "step"): 2.0,
        ("", "waiting"): 0.5,
        ("", "transfer"): 1.5,
    }  # some waiting was transfer
    late = {("", "step"): 0.5}  # of one that was started again
    less = replace(p, processes={"a": later, "b": late}) - replace(
        p, processes={"a": spent, "b": spent}
    )
    assert less.processes["a"] == {
        ("", "start"): 0.0,
        ("", "step"): 1.0,
        ("", "waiting"): 0,
        ("", "transfer"): 1.5,
    }
    assert less.processes["b"] == late


def test_a_learner_in_a_process_of_its_own_is_named():
    p = profile(step=0.5)
    moved = {
        "stage of queue": {("train", "transfer"): 9.9, ("queue", "waiting"): 0.1},
        "learner": {("", "update"): 9.8, ("", "waiting"): 0.2},
    }
    found = explain(replace(p, processes={**p.processes, **moved})).bottleneck
    assert (found.where, found.kind) == ("learner", "update")


def test_compiling_slows_nothing_down_and_a_short_run_says_so():
    p = profile(step=0.5, update=0.6)
    late = {("train", "start"): 6.0, ("train", "update"): 2.4, ("queue", "waiting"): 1.6}
    p = replace(p, processes={**p.processes, "stage of queue": late})
    found = explain(p)
    assert found.steps_per_second == 4_000 / 4 and str(found).startswith(
        "4,000 steps in 4.0 s, not counting 6.0 s of compiling: 1,000 steps/s\n"
    )
    assert (found.bottleneck.where, found.bottleneck.share) == (
        "train",
        pytest.approx(0.6),
    ) and "measured over" not in str(found)
    assert "measured over only 1.5 s: a longer run gives more reliable numbers" in str(
        explain(replace(p, seconds=7.5))
    )


def test_a_replay_is_reported_to_draw_less():
    p = profile(update=1.0, step=0.5, blocked=0.5)
    p = replace(p, counts={**p.counts, ("batch", "replay"): {"replayed_steps": 64}})
    assert (
        explain(p).bottleneck.advice
        == "Train less for each step (a lower updates_per_step of ReplaySample), with a smaller "
        "network, or on a GPU."
    )


def test_where_the_cores_are_full_nothing_is_promised():
    first, *_ = what_if(profile(busy=39.0))
    assert (
        first.steps_per_second is None
        and "the 4 cores of this machine are full (98%)" in first.because
    )
    first, *_ = what_if(profile(busy=32.0))
    assert (
        first.steps_per_second == pytest.approx(500) and first.because == "then the cores are full"
    )


def test_advice_to_add_a_runner_agrees_with_what_that_would_bring():
    assert (
        explain(profile()).bottleneck.advice
        == "Step more environments in parallel: --set runners.num_runners=3."
    )
    full = "the 4 cores of this machine are full (98%)."
    assert explain(profile(busy=39.0)).bottleneck.advice == (
        "Step more environments in parallel: --set runners.num_runners=3. Not here, though: " + full
    )
    assert explain(profile(busy=39.0, singly=False)).bottleneck.advice == (
        "Take twice the environments (runners.envs_per_runner=4), which is predicted to bring "
        f"most; one more runner brings nothing here: {full}"
    )


def test_where_nothing_was_measured_no_table_is_printed():
    for processes in ({}, {"this process": {}}):
        nothing = explain(Profile(processes=processes))
        assert nothing.short() == "" and "seconds" not in str(nothing)
    # Of a run that failed in its first row there is a table, and nothing to say of it.
    begun = explain(Profile(processes={"this process": {("", "start"): 2.0}}))
    assert begun.short().startswith("seconds") and "\n\n" not in begun.short()


def in_one_process(sampling, update):
    """The seconds of a run of two runners in this process, whose parts take turns."""
    p = profile()
    spent = {("sample", "step"): sampling, ("train", "update"): update}
    return replace(
        p,
        processes={"this process": spent},
        stages={"this process": ("sample", "train")},
        queues={},
        facts={"runners": {**p.facts["runners"], "remote": False}},
    )


def test_processes_for_runners_are_advised_only_where_they_are_worth_it():
    much = explain(in_one_process(6.0, 4.0))
    assert "take --runtime ray" in much.what_if[0].because
    assert "--runtime ray" in much.bottleneck.advice
    little = in_one_process(1.0, 9.0)
    assert "take little of the time" in explain(little).what_if[0].because
    assert "--runtime ray" not in str(explain(little))
    # With one core they would take turns just the same.
    alone = explain(replace(in_one_process(6.0, 4.0), cores=1))
    assert "--runtime ray" not in alone.what_if[0].because
    assert "Take twice the environments" in alone.bottleneck.advice or (
        "Not here, though" in alone.bottleneck.advice
    )


def test_to_compile_an_update_is_no_work_of_its_node(tmp_path):
    """Only some updates report their epochs, where a run is traced; so there are two to compile,
    one after the first row."""
    graph = fl.ppo(
        "CartPole-v1",
        fl.PPOSettings(
            batch_size=64,
            rollout_length=32,
            minibatch_size=32,
            epochs=3,
            envs_per_runner=2,
            policy=fl.Policy(fl.networks.MLP, hidden=(24, 24)),
        ),
    )
    with fl.run(graph, trace=tmp_path / "trace.json") as run:
        for _ in range(4):
            next(run)
    steady = by_kind(
        {key: x for spent in run.explain().profile.processes.values() for key, x in spent.items()}
    )
    assert 0 <= 5 * steady["update"] < steady["start"]


def test_the_first_that_is_busy_and_not_held_up_is_the_bottleneck():
    assert explain(profile()).bottleneck.where == "runners"
    assert explain(profile(step=0.5, update=0.97, blocked=0.5)).bottleneck.where == "train"
    assert explain(profile(step=0.6, update=0.5, blocked=0.3)).bottleneck.where == "queue"
    assert explain(Profile()).bottleneck is None


def with_replay(kind, shards, share):
    """The same, with a replay in between; one shard works in the thread of the stage that draws,
    several in processes of their own."""
    p = profile(step=0.2, update=0.3, blocked=0.5)
    spent = {("", kind): 10 * share, ("", "waiting"): 10 * (1 - share)}
    apart = {f"replay, {i}": spent for i in range(shards)} if shards > 1 else {}
    here = {("batch", kind): 10 * share} if shards == 1 else {("batch", "waiting"): 10 * share}
    return replace(
        p,
        processes={
            **p.processes,
            "stage of batch": {**here, ("batch", "blocked"): 10 * (1 - share)},
            **apart,
        },
        stages={**p.stages, "stage of batch": ("batch",)},
        ops={**p.ops, "batch": "ReplaySample"},
        facts={**p.facts, "replay": {"shards": shards}},
        queues={},
    )


@pytest.mark.parametrize(
    ("shards", "where", "advice"),
    [(1, "batch", "replay.shards=2"), (2, "replay", "replay.shards=4")],
)
def test_where_drawing_takes_longest_more_shards_are_advised(shards, where, advice):
    found = explain(with_replay("replay", shards, 0.9))
    assert (found.bottleneck.where, found.bottleneck.kind) == (where, "replay")
    assert (
        found.bottleneck.advice
        == f"Split the replay over more processes: --runtime ray with --set {advice}."
    )
    assert found.bottleneck.why == "100% of that goes to storing and sampling transitions."


def test_no_graph_that_samples_while_the_learner_trains_is_advised_to():
    p = profile(step=0.1, update=1.0)
    assert explain(p).bottleneck.advice.endswith(" or on a GPU.")
    assert "impala or appo." in explain(replace(p, queues={})).bottleneck.advice


def test_the_first_line_says_which_part_of_the_run_was_measured():
    p = profile()
    whole = replace(p, rows=40, seconds=30.0, env_steps=12_000)
    assert str(explain(whole)).startswith("12,000 steps in 30.0 s")
    part = Profile.of(json.loads(json.dumps((whole - p).plain())))
    said = "rows 11 to 40 (its beginning is left out): 8,000 steps in 20.0 s: 400 steps/s\n"
    assert str(explain(part)).startswith(said)


def test_the_live_table_marks_it_and_shows_levels_and_lag():
    from rich.console import Console

    now = iter([0.0, 0.5, 2.0, 2.5])
    reported = iter([Profile(), profile()])
    window = Window(lambda: next(reported), lambda: next(now))
    assert window.look() is None and window.look() is None
    seen = window.look()
    assert window.look().env_steps == seen.env_steps == 4_000
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(live_table(seen, 2.25))
    text = console.export_text()
    assert "runners <- bottleneck  2 workers" in text and "3/16" in text
    (train,) = [line for line in text.splitlines() if line.startswith("train")]
    assert train.split() == ["train", "TrainOneStep", "10%", "0%", "0%", "400", "2.2"]
    # What is neither a node nor a set of runners is marked, too.
    console.print(live_table(between_rows(profile(step=0.5, update=0.1), 8.0), 2.25))
    (marked,) = [line for line in console.export_text().splitlines() if "bottleneck" in line]
    assert marked.split() == [*["the", "loop", "over", "the", "rows", "<-", "bottleneck"], "80%"]


def test_a_profile_is_read_back_and_a_saved_run_is_explained(tmp_path, capsys):
    p = profile()
    assert from_text(to_text(p, p)) == (p, p)
    graph = fl.ppo(
        "CartPole-v1",
        fl.PPOSettings(batch_size=128, rollout_length=32, minibatch_size=64, policy=planted.POLICY),
    )
    with fl.run(graph, steps=1_000, out=tmp_path / "run") as run:
        list(run)
    assert profiles(tmp_path / "run")[0] == run.profile()
    assert cli.main(["explain", str(tmp_path / "run")]) == 0
    assert (
        capsys.readouterr().out == str(run.explain()) == (tmp_path / "run/explain.txt").read_text()
    )
    assert cli.main(["explain", str(tmp_path / "run"), "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["bottleneck"]["where"] == run.explain().bottleneck.where
    )
    assert cli.main(["explain", str(tmp_path)]) == 2
    assert "has no profile.json: it is no run's directory" in capsys.readouterr().err
    assert cli.main(["explain", str(tmp_path / "nowhere")]) == 2


def test_a_run_that_goes_on_is_explained_by_its_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "PROFILE_SECONDS", 0.01)
    graph = fl.ppo(
        "CartPole-v1",
        fl.PPOSettings(batch_size=128, rollout_length=32, minibatch_size=64, policy=planted.POLICY),
    )
    with fl.run(graph, out=tmp_path / "run") as run:
        for _ in range(3):
            next(run)
        found = profiles(tmp_path / "run")[0]
        assert found.rows == 3 and explain(found).bottleneck is not None


def test_a_program_is_explained_as_far_as_it_has_parts():
    graph = fl.ppo(
        "gymnax:CartPole-v1",
        fl.PPOSettings(batch_size=128, rollout_length=32, minibatch_size=64, policy=planted.POLICY),
    )
    with fl.run(graph, runtime="xla", steps=2_000) as run:
        list(run)
    found = run.explain()
    assert (
        found.bottleneck.kind == "update"
        and "one XLA program" in found.bottleneck.why
        and found.what_if == ()
    )
    # Its time is not measured by node, so there is no table of nodes, not even its header.
    assert "starved" not in str(found)
