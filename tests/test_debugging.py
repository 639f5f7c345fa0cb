"""The debugger: sessions by script, on small graphs."""

import io
import os
import signal
import subprocess
import sys
from bdb import BdbQuit
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import flowrl as fl
from conftest import rows_and_weights, same, timeless
from environments import Clockwork, Faulty
from flowrl.debugging.prompt import COMMANDS, Prompt

POLICY = fl.Policy(fl.networks.MLP, hidden=(8,))
SETTINGS = fl.PPOSettings(
    envs_per_runner=4, rollout_length=16, batch_size=64, epochs=1, minibatch_size=32, policy=POLICY
)
PPO = fl.ppo("CartPole-v1", SETTINGS)
PLAN = PPO.compile()
IMPALA = fl.impala(
    "CartPole-v1",
    fl.IMPALASettings(
        num_runners=2,
        envs_per_runner=4,
        rollout_length=8,
        batch_size=64,
        report_every=2,
        queue_capacity=2,
        policy=POLICY,
    ),
).compile()


def session(graph, *commands, seed=0):
    """The run, and what was written; the commands of each prompt are in it, too."""
    out = io.StringIO()
    run = fl.debug(
        graph, seed=seed, stdin=io.StringIO("".join(f"{c}\n" for c in commands)), stdout=out
    )
    assert run.reason is not None
    return run, out.getvalue()


def said(graph, *commands, **settings):
    return session(graph, *commands, **settings)[1]


def prompts(text):
    """The places where it stopped, each once."""
    found = [line[1 : line.index(")")] for line in text.splitlines() if line.startswith("(row")]
    return [p for p, before in zip(found, [None, *found], strict=False) if p != before]


# -- going on


def test_step_by_step_and_until():
    text = said(
        PLAN, "next", "n", "", "until train", "until row", "u row 3", "", "until row 2", "n", "q"
    )
    wanted = [
        "row 1, at sample",
        "row 1, at batch",
        "row 1, at adv",
        "row 1, at norm",
        "row 1, at train",
        "row 1 closed",
        "row 3 closed",
    ]
    assert prompts(text) == [*wanted, "row 4, at sample"]
    assert (
        "sample begins a pass\n(row 1, at sample) next\n"
        "sample -> batch: a Batch [16, 4], 64 steps\n" in text
    )
    assert (
        text.count("row 3 is closed already: 3 are; back goes back a row") == 1
    )  # the empty line was the same once more
    assert "\nrow 2: " in text


def test_the_end_of_the_commands_quits():
    run, text = session(PLAN)
    assert (run.rows, run.reason) == ([], "closed") and prompts(text) == ["row 1, at sample"]


def test_a_run_under_the_debugger_is_the_run_without_it():
    run, _ = session(PLAN, "u train", "show", "where", "next", "u row 2", seed=3)
    rows, weights = rows_and_weights(PPO, 2, seed=3)
    assert timeless(run.rows) == timeless(rows)
    assert same(run.policy.weights, weights)


# -- where to stop


def test_breaks_at_nodes_and_rows():
    text = said(
        PLAN,
        "break train",
        "b row when row>=2",
        "breaks",
        "c",
        "c",
        "clear 1",
        "c",
        "clear 7",
        "clear",
        "breaks",
        "u row",
    )
    assert prompts(text) == [
        "row 1, at sample",
        "row 1, at train",
        "row 2, at train",
        "row 2 closed",
        "row 3 closed",
    ]
    assert "break 1: train\nbreak 2: row when row>=2\n" in text
    assert "break 2: row when row>=2; row is 2" in text
    assert (
        "removed break 1: train" in text
        and "unknown break '7'. Known: 2" in text
        and "no breaks" in text
    )


@pytest.mark.parametrize(
    ("place", "stop"),
    [
        ("train when loss>-1e9", "after train"),  # of what it gives
        ("train when advantage.max>-1e9", "at train"),  # of what it takes
        ("norm when reward.max==1", "at norm"),  # of both: it stops once
        ("train when steps>=64", "at train"),
        ("sync when lag_max==0", "at sync"),
    ],
)
def test_a_break_with_a_condition(place, stop):
    text = said(PLAN, f"b {place}", "c", "c")
    assert prompts(text) == ["row 1, at sample", f"row 1, {stop}", f"row 2, {stop}"]
    assert f"break 1: {place.replace('-1e9', '-1e+09')}; " in text


def test_a_condition_that_does_not_hold_and_one_of_the_last_row():
    text = said(PLAN, "break train when loss>1e9", "break adv when updates==2", "until row 4")
    assert prompts(text)[1:] == ["row 3, at adv"]
    assert prompts(said(PLAN, "until train when updates>=1"))[1:] == ["row 2, at train"]


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (
            "b trian",
            (
                "unknown node 'trian'; did you mean 'train'? Known: sample, batch, adv, norm, "
                "train, sync, report, row"
            ),
        ),
        (
            "b",
            (
                "say where: break train, break train when loss>10 or break row when "
                "return_mean>100; got ''"
            ),
        ),
        ("b train 5", "say where: break train"),
        ("b train when los>1", "unknown name 'los'; did you mean 'loss'? Known: steps, lag_mean"),
        ("b train when reward.most>1", "unknown number 'most'. Known: min, mean, max, nan"),
        (
            "b train when loss",
            (
                "takes a comparison of a name with a number, such as loss>10 or reward.mean<=0; "
                "got 'loss'"
            ),
        ),
        ("b row when obs.nan>0", "unknown name 'obs.nan'"),
        ("u", "say where: until train, until row or until row 5; got ''"),
        ("nxet", "unknown command 'nxet'; did you mean 'next'?"),
        ("show trian", "unknown node 'trian'; did you mean 'train'?"),
        ("show batch -> train", "there is no edge batch -> train; train takes from norm"),
        ("show train", "train has given nothing yet; until train, then next"),
        ("show", "there is no item here; show NODE shows what a node gave last: none has yet"),
        ("row", "no row is closed yet; until row"),
        ("settings trian", "unknown node or resource 'trian'; did you mean 'train'?"),
        (
            "set train.epochs",
            "set takes an address and a value, such as set train.epochs 4; got 'train.epochs'",
        ),
        ("set train.epoch 4", "ppo.train: unknown setting 'epoch'; did you mean 'epochs'?"),
        ("set train.epochs many", "ppo.train.epochs: takes a whole number, got 'many'"),
        (
            "set train.minibatch_size 100",
            "minibatch_size=100 does not divide the batch of 64 steps",
        ),
        (
            "set runners.envs_per_runner 8",
            (
                "runners is made when a run begins, so a change needs a new run: flowrl debug "
                "GRAPH --set runners.envs_per_runner=8"
            ),
        ),
        (
            "set learner.optimizer.max_grad_norm None",
            "the state of the learner would have another structure, so a change needs a new run",
        ),
        ("back", "this is the beginning"),
        ("help nothing", "unknown command 'nothing'"),
    ],
)
def test_mistakes_are_reported_and_the_session_goes_on(command, answer):
    text = said(PLAN, command, "n")
    assert answer in text
    assert prompts(text) == ["row 1, at sample", "row 1, at batch"]


# -- looking


def plant(batch):
    return batch.with_(mark=jnp.asarray(batch["reward"], jnp.float32).at[0, :3].set(jnp.nan))


PLANTED = PPO.insert(after="norm", plant=fl.Map(plant)).compile()


def test_show_counts_what_is_not_a_number():
    text = said(
        PLANTED, "break plant when mark.nan>2", "c", "show", "show plant->train", "show norm"
    )
    assert "break 1: plant when mark.nan>2; mark.nan is 3" in text and prompts(text)[1:] == [
        "row 1, after plant"
    ]
    marks = [line.split() for line in text.splitlines() if line.startswith("  mark")]
    assert marks == [["mark", "[16,", "4]", "float32", "1", "1", "1", "3"]] * 2
    assert "bootstrap_obs" in text


def test_show_where_row_and_help():
    text = said(
        PLAN,
        "u sync",
        "show",
        "w",
        "s batch -> adv",
        "u row",
        "s report",
        "r",
        "help",
        "h n",
        "help quit",
    )
    assert "  loss/value" in text and "  lag_max         0\n" in text
    assert (
        "ppo, seed 0, row 1, at sync: 64 steps sampled, 1 update\n   sample  ParallelSample\n"
        in text
    )
    assert "\n-> sync    SyncWeights\n" in text
    assert "a Tally of 1 update" in text
    assert "  updates           1\n" in text
    assert all(f"`{name}" in text for name in COMMANDS)
    assert text.count("`next` (n)") == 2 and text.count("`quit` (q)") == 2


def test_settings_are_listed_by_their_addresses():
    text = said(PLAN, "settings train", "settings", "settings norm")
    assert "  train.epochs          1\n  train.minibatch_size  32\n" in text
    assert (
        "learner.loss                     PPOLoss\n" in text
        and "learner.loss.clip_ratio          0.2\n" in text
    )
    assert 'runners.env                      "CartPole-v1"\n' in text


def test_names_are_completed():
    assert Prompt(PLAN, 0, io.StringIO(), io.StringIO()).completedefault(
        "train.e", "set train.e", 4, 11
    ) == ["train.epochs"]


# -- changing


def test_set_changes_what_is_trained_from_there_on():
    run, text = session(
        PLAN,
        "u row",
        "set train.epochs 3",
        "u row",
        "u train",
        "set train.epochs=1",
        "u row",
        "u row",
    )
    steps = [row["gradient_steps"] for row in run.rows]
    assert np.diff([0, *steps]).tolist() == [2, 6, 2, 2]
    assert "train.epochs was 1 and is 3 from here on" in text


def test_a_change_of_the_loss_or_of_the_optimiser_keeps_the_weights_and_the_moments():
    commands = ("u row", "set learner.loss.clip_ratio 0.05", "set learner.optimizer.lr 0", "u row")
    first, _ = session(PLAN, commands[0])
    changed, _ = session(PLAN, *commands)
    other, _ = session(PLAN, "u row 2")
    assert same(first.policy.weights, changed.policy.weights)
    assert not same(first.policy.weights, other.policy.weights)


def test_what_resources_are_reported_beforehand_needs_a_new_run():
    text = said(IMPALA, "set queue.max_lag 3", "set queue.on_stale pace")
    assert "queue.max_lag was None and is 3 from here on" in text
    assert (
        "impala.queue.on_stale: resources are prepared for this before the first pass, so a "
        "change needs a new run: flowrl debug GRAPH --set" in text
    )


# -- going back


def test_back_is_bit_equal_also_after_changes():
    changes = ("u row", "set train.epochs 2", "u train", "set learner.optimizer.lr 0.01", "u row 2")
    straight, _ = session(PLAN, *changes, "u row 4")
    there, text = session(
        PLAN, *changes, "u row 3", "u train", "set train.epochs 9", "back", "back", "u row 4"
    )
    assert prompts(text)[-5:] == [
        "row 3 closed",
        "row 4, at train",
        "row 3 closed",
        "row 2 closed",
        "row 4 closed",
    ]
    assert "set train.epochs 9 came later, and is undone\nrunning 3 rows again" in text
    assert "set learner.optimizer.lr 0.01 stays\nrunning 2 rows again" in text
    assert timeless(there.rows) == timeless(straight.rows)
    assert same(there.policy.weights, straight.policy.weights)


def test_back_within_a_pass_and_to_the_beginning():
    text = said(PLAN, "u row", "u train", "back", "back", "back", "u row", "w")
    assert prompts(text) == [
        "row 1, at sample",
        "row 1 closed",
        "row 2, at train",
        "row 1 closed",
        "row 1, at sample",
        "row 1 closed",
    ]
    assert (
        "running 1 row again" in text
        and "beginning again" in text
        and "this is the beginning" in text
    )


COUNT = []


def counted(batch):
    COUNT.append(1)
    return batch.with_(reward=batch["reward"] * len(COUNT))


def test_rows_that_do_not_follow_from_the_seed_are_reported():
    text = said(PPO.insert(after="sample", odd=fl.Map(counted)), "u row 2", "back")
    assert (
        "row 1 differs from that of the run before: something in it does not follow from the seed"
        in text
    )


# -- stages


def test_a_graph_with_queues():
    straight, _ = session(IMPALA, "u row 2", "set queue.capacity 5", "u row 3")
    there = ("u queue", "w", "u row 2", "set queue.capacity 5", "set sample.in_flight 1")
    run, text = session(IMPALA, *there, "back", "u row 2", "set queue.capacity 5", "w", "u row 3")
    assert "batch -> queue: a Batch [8, 8], 64 steps" in text
    assert " holds 0 of 2\n" in text and " of 5\n" in text
    assert "sample.in_flight was 2 and is 1 from here on" in text
    assert timeless(run.rows) == timeless(straight.rows)
    assert same(run.policy.weights, straight.policy.weights)


# -- errors and interrupts


def broken(batch):
    if isinstance(batch["reward"], np.ndarray) and ARMED:
        ARMED.pop()()
    return batch


ARMED = []


def armed(*acts, commands):
    """A session on a graph with a function of a user's that does these things, one a call."""
    plan = PPO.insert(after="batch", mine=fl.Map(broken)).compile()
    ARMED[:] = [*acts[::-1]]
    return session(plan, *commands)


def fail():
    raise ZeroDivisionError("by hand")


def test_after_an_error_the_prompt_is_there_to_see_why():
    commands = [
        "u row 5",
        "show",
        "s mine",
        "w",
        "settings train",
        "n",
        "set train.epochs 2",
        "pdb",
        "q",
        "back",
        "u row 2",
    ]
    run, text = armed(lambda: None, fail, commands=commands)
    assert (
        "ZeroDivisionError: by hand\n(row 2, failed at mine) show\na Batch [16, 4], 64 steps"
        in text
    )
    assert "\n-> mine    Map\n" in text and "train.epochs          1" in text
    assert text.count("the run is over: it failed") == 2
    assert "-> raise ZeroDivisionError" in text
    assert prompts(text)[-2:] == ["row 1 closed", "row 2 closed"]
    assert len(run.rows) == 2


def test_losses_and_environments_that_fail_are_reported_where_they_did():
    text = said(PPO.set("learner.optimizer.lr", 1e30), "u row 9", "show", "q")
    assert "gave a loss or weights that are not finite" in text
    assert prompts(text)[-1].endswith("failed at train")
    faulty = fl.ppo(lambda: Faulty(30), SETTINGS)
    text = said(faulty, "c", "q")
    assert "a joint broke" in text and prompts(text)[-1].endswith("failed at sample")


def press():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_stops_at_the_next_node_and_a_second_one_at_once():
    before = signal.getsignal(signal.SIGINT)
    text = armed(press, lambda: (press(), press()), commands=["c", "c", "w"])[1]
    assert "interrupted\nmine -> adv" in text
    assert prompts(text)[1:] == ["row 1, at adv", "row 2, failed at mine"]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_on_the_way_back_stops_there():
    def go_on():
        pass

    text = armed(
        go_on,
        go_on,
        go_on,
        press,
        commands=["u row 2", "set train.epochs 3", "u row", "back", "w", "u row 3"],
    )[1]
    assert "set train.epochs 3 stays\nrunning 2 rows again\ninterrupted\nmine -> adv" in text
    assert prompts(text)[-3:] == ["row 3 closed", "row 1, at adv", "row 3 closed"]


def test_ctrl_c_at_the_prompt_leaves_it_there():
    class Keys(io.StringIO):
        def readline(self, *args):
            line = super().readline(*args)
            if line == "^C\n":
                press()
            return line

    out = io.StringIO()
    fl.debug(PLAN, stdin=Keys("^C\nn\nq\n"), stdout=out)
    assert "quit (q) leaves\n(row 1, at sample) n\n" in out.getvalue()


# -- pdb


def test_pdb_goes_into_the_step_of_a_node():
    text = said(PLAN, "u train", "pdb", "p batch.steps, self.epochs", "c", "n", "u row", "pdb", "q")
    assert "(64, 1)" in text and "flowrl/ops/train.py" in text
    assert prompts(text)[1:] == [
        "row 1, at train",
        "row 1, at sync",
        "row 1, at report",
        "row 1 closed",
    ]
    assert "pdb goes into the step of a node that is about to take an item" in text


def test_quitting_pdb_quits():
    run, text = session(PLAN, "u train", "pdb", "q", "n")
    assert prompts(text) == ["row 1, at sample", "row 1, at train"]
    assert run.rows == []


class Left(Clockwork):
    def step(self, action):
        raise BdbQuit


def test_quitting_pdb_in_an_environment_quits_too():
    run, text = session(fl.ppo(Left, SETTINGS), "c", "w")
    assert prompts(text) == ["row 1, at sample"] and run.rows == []


MINE = """
import gymnasium as gym
import flowrl as fl

class Watched(gym.Wrapper):
    def step(self, action):
        if not fl.seen:
            fl.seen = True
            breakpoint()
        return self.env.step(action)

fl.seen = False

def look(batch):
    breakpoint()
    return batch

def small():
    policy = fl.Policy(fl.networks.MLP, hidden=(8,))
    runners = fl.Runners(
        "CartPole-v1", policy, num_runners=1, envs_per_runner=2, rollout_length=4,
        wrappers=(Watched,),
    )
    return fl.Graph("small", runners=runners).then(
        sample=fl.ParallelSample(), look=fl.Map(look), report=fl.Report()
    )
"""


def test_breakpoints_in_operators_and_environments_by_the_command_line(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "flowrl",
            "debug",
            "mine.py:small",
            "--set",
            "runners.envs_per_runner=3",
        ],
        input="c\np 'action', action\nc\np 'seen', batch.steps\nc\n",
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONBREAKPOINT"}
        | {"PYTHONPATH": str(Path(fl.__file__).parents[1])},  # Ray has its own
        timeout=240,
    )
    assert done.returncode == 0
    assert "no learner" in done.stderr  # the one warning of a graph that nothing trains
    assert done.stderr.count("\n") == 1
    assert "(row 1, at sample) c\n" in done.stdout
    assert "('action', " in done.stdout and "('seen', 12)" in done.stdout


@pytest.mark.parametrize("runtime", ["local", "xla"])
@pytest.mark.parametrize("where", ["loss", "module", "operator"])
def test_who_quits_pdb_in_the_graph_does_not_find_it_open_again(where, runtime):
    calls = []

    def quit_pdb(*args, **settings):
        calls.append(where)
        raise BdbQuit

    env = "gymnax:CartPole-v1" if runtime == "xla" else "CartPole-v1"
    graph = fl.ppo(env, SETTINGS)
    if where == "loss":
        graph = graph.set("learner.loss", quit_pdb)
    elif where == "module":
        graph = graph.set("learner.policy", fl.Policy(quit_pdb))
        graph = graph.set("runners.policy", fl.Policy(quit_pdb))
    else:
        graph = graph.insert(after="sample", quit=fl.Map(quit_pdb))
    with pytest.raises(BdbQuit):
        fl.run(graph, runtime=runtime)
    assert len(calls) == 1
