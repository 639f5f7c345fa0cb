"""What a newcomer gets wrong first, and what is said of it."""

import re
from dataclasses import dataclass

import gymnasium as gym
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flowrl as fl
from flowrl.cli.main import main
from flowrl.core.items import Row
from flowrl.envs.jax_envs import GymnaxEnv
from flowrl.errors import line_of

PPO = fl.ppo("CartPole-v1")


def own_step(work):
    return PPO.insert(after="sample", mine=Own(work))


class Own(fl.extend.Stateless):
    def __init__(self, work):
        self.work = work

    def step(self, state, batch, ctx):
        yield batch.with_(reward=self.work(batch))


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (
            lambda b: np.clip(b["reward"], -1, 1),
            (
                r"ppo\.mine: TypeError: .*\(test_messages\.py:\d+\); while a graph is checked a "
                r"step sees shapes: put maths"
            ),
        ),
        (
            lambda b: b["reward"].mean(),
            r"ppo\.mine: AttributeError: .*put maths on arrays into ctx\.run\(function, \.\.\.\)",
        ),
        (
            lambda b: b["rewards"],
            r"ppo\.mine: the batch has no field: unknown field 'rewards'; did you mean 'reward'\?",
        ),
    ],
)
def test_a_step_that_touches_arrays_is_reported_with_the_way_out(work, says):
    with pytest.raises(fl.errors.CheckError, match=says):
        own_step(work).check()


def changes_in_place(batch):
    batch["reward"][:] = 0
    return batch


def forgets_to_return(batch):
    batch.with_(reward=batch["reward"] / 2)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (
            lambda b: b.with_(reward=b["rewrd"]),
            r"ppo\.mine: the batch has no field: unknown field 'rewrd'; did you mean 'reward'\?",
        ),
        (
            lambda b: b.rewards,
            (
                r"ppo\.mine: AttributeError: 'Batch' object has no attribute 'rewards' "
                r"\(test_messages\.py:\d+\)"
            ),
        ),
        (
            changes_in_place,
            (
                r"ppo\.mine: ValueError: assignment destination is read-only .*; other nodes may "
                r"have the same item: change a copy"
            ),
        ),
        (forgets_to_return, r"ppo\.batch: mine gives it None"),
    ],
    ids=["a field", "an attribute", "in place", "no return"],
)
def test_a_mistake_in_a_users_function_is_found_before_anything_runs(fn, says):
    with pytest.raises(fl.errors.CheckError, match=says):
        PPO.insert(after="sample", mine=fl.Map(fn)).check()


def test_a_choice_is_reported_by_its_options():
    with pytest.raises(fl.errors.SettingError, match="takes 'stop' or 'restart', got 'restrat'"):
        PPO.set("runners.on_error", "restrat")


def test_a_loss_and_a_network_of_the_wrong_form_are_reported_with_the_right_one():
    with pytest.raises(
        fl.errors.CheckError,
        match=r"ppo\.train: a loss returns \(scalar, dict of scalars\), but only_a_number "
        r"returned one float",
    ):
        PPO.set("learner.loss", only_a_number).check()
    policy = fl.Policy(OneArray)
    with pytest.raises(
        fl.errors.CheckError,
        match=r"OneArray must return \(action outputs, value\), but it returned",
    ):
        PPO.set("learner.policy", policy).set("runners.policy", policy).check()


def only_a_number(policy, params, batch):
    return 1.0


class OneArray(fl.networks.MLP):
    def __call__(self, obs):
        return super().__call__(obs)[0]


@pytest.mark.parametrize(
    ("until", "message"),
    [
        (475, "until must be a comparison such as 'return_mean>=475', or a function.*got 475"),
        ("return_mean", "^until takes a comparison such as 'return_mean>=475', got 'return_mean'"),
        ("return>=1", "^until: unknown column 'return'; did you mean 'return_mean'"),
    ],
)
@pytest.mark.parametrize("start", [fl.run, fl.run_seeds])
def test_a_goal_is_a_comparison_or_a_function(start, until, message):
    with pytest.raises(fl.errors.SettingError, match=message):
        start(PPO, until=until)


def test_a_column_that_a_row_lacks_gives_the_nearest():
    row = Row({"row": 1, "return_mean": 2.0})
    with pytest.raises(KeyError, match="unknown column 'return_men'; did you mean 'return_mean'"):
        row["return_men"]
    assert "return_men" not in row and row.get("return_men", 3.0) == 3.0
    assert "return_mean" in row and row.get("return_mean") == 2.0


def test_the_command_line_without_a_command_lists_them(capsys):
    with pytest.raises(SystemExit):
        main([])
    err = capsys.readouterr().err
    assert all(word in err for word in ("list", "check", "plan", "draw", "run", "eval"))


def test_a_number_of_steps_that_is_none_is_reported(capsys):
    for text in ("inf", "1e5x", "0.5"):
        with pytest.raises(SystemExit):
            main(["run", "ppo", "--steps", text])
        assert f"must be a whole number of at least 1, got {text}" in capsys.readouterr().err


def test_a_bare_name_is_reported_the_addresses_that_end_so():
    with pytest.raises(
        fl.errors.SettingError,
        match=r"unknown node or resource 'lr'.*did you mean learner\.optimizer\.lr\?",
    ):
        PPO.set("lr", 1e-3)


def test_a_file_without_a_function_lists_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole_file.py").write_text(
        "import flowrl as fl\nfrom math import sqrt\n\ndef mine():\n    return fl.ppo()\n\n"
        "ready = fl.a2c()\n"
    )
    assert main(["check", "whole_file.py"]) == 2
    assert capsys.readouterr().err.endswith("whole_file.py:FUNCTION; it has mine, ready\n")


def test_allow_names_packages():
    for wrong in ("numpy", [OneArray]):
        with pytest.raises(
            fl.errors.SettingError,
            match=r"allow takes a list of package names, such as \['my_package'\]",
        ):
            fl.Graph.from_text(PPO.text(), allow=wrong)


def test_numpy_in_a_compiled_function_is_reported_with_the_way_out():
    with pytest.raises(
        fl.errors.CheckError,
        match=r"ppo\.mine: a function for ctx\.run computes with jax\.numpy, not numpy",
    ):
        PPO.insert(after="sample", mine=InRun(lambda r: np.clip(r, -1, 1))).check()


class InRun(fl.extend.Stateless):
    def __init__(self, work):
        self.work = work

    def step(self, state, batch, ctx):
        yield batch.with_(reward=ctx.run(self.work, batch["reward"]))


class Anneals(fl.extend.Stateless):
    k = 1.0

    def scale(self, reward):
        return reward * self.k

    def step(self, state, batch, ctx):
        self.k *= 0.5
        yield batch.with_(reward=ctx.run(self.scale, batch["reward"]))


def test_a_method_of_what_may_change_is_not_compiled():
    with pytest.raises(
        fl.errors.CheckError,
        match=r"ppo\.mine: scale is a method of an Anneals, whose fields may change.*make Anneals "
        r"a frozen dataclass",
    ):
        PPO.insert(after="sample", mine=Anneals()).check()


class NoSpaces(gym.Env):
    pass


def test_an_environment_without_spaces_and_one_made_already_are_reported():
    with pytest.raises(
        fl.errors.CheckError,
        match=r"ppo\.runners: NoSpaces: .*observation_space.*; an environment sets "
        r"self\.observation_space and",
    ):
        fl.ppo(NoSpaces).check()
    wanted = "env must be an id, a class or a function that makes an environment, got "
    for made in (gym.make("CartPole-v1"), GymnaxEnv("CartPole-v1")):
        with pytest.raises(fl.errors.SettingError, match=wanted + "one that is made already"):
            fl.ppo(made)
    with pytest.raises(fl.errors.SettingError, match=wanted + "3"):
        fl.ppo(3)


def test_an_id_that_would_import_a_module_is_refused():
    with pytest.raises(
        fl.errors.CheckError,
        match=r"'evil:E-v0' would import evil; import it yourself \(--import evil, .*\) and write "
        r"'E-v0'",
    ):
        fl.ppo("evil:E-v0").check()


class Holds(fl.extend.Operator):
    def __init__(self, state):
        self.state = state

    def init(self):
        return self.state

    def step(self, state, item, ctx):
        yield item


@dataclass(frozen=True)
class Frozen:
    count: int = 0


@pytest.mark.parametrize("state", [(0, 1), (), 0, np.float32(0), Frozen()], ids=repr)
def test_a_state_that_no_step_can_change_is_reported_with_the_way_out(state):
    says = (
        rf"ppo\.mine: its init returned an? {type(state).__name__}, {re.escape(repr(state))}, "
        rf"which a step can't change in place, .*return a dict"
    )
    with pytest.raises(fl.errors.CheckError, match=says):
        PPO.insert(after="sample", mine=Holds(state)).check()
    PPO.insert(after="sample", mine=Holds({"pair": state})).check()


def test_a_line_of_the_users_is_named_though_its_folder_is_called_flowrl(tmp_path):
    own = tmp_path / "flowrl" / "own.py"
    own.parent.mkdir()
    own.write_text("def fails():\n    raise ValueError('here')\n")
    names = {}
    exec(compile(own.read_text(), str(own), "exec"), names)
    with pytest.raises(ValueError, match="here") as raised:
        names["fails"]()
    assert line_of(raised.value) == " (own.py:2)"


def loss_of(**attributes):
    """A loss with these attributes, whose call sums a field up."""

    def call(self, policy, params, batch):
        return jnp.sum(batch[attributes.get("reads", "obs")]), attributes.get("metrics", {})

    return type("Own", (fl.losses.Loss,), {"__call__": call, **attributes})()


RIGHT = {"needs": ("obs",), "on_policy": False}


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (
            loss_of(on_policy=False),
            r"Own lacks needs; write needs = \(\"obs\", \"action\"\) in its",
        ),
        (loss_of(needs=("obs",)), "Own lacks on_policy; write on_policy = False in its class"),
        (loss_of(**RIGHT, reads="seed"), "needs the field 'seed'.* set random = True"),
        (loss_of(**RIGHT, reads="target_params"), "'target_params'.* set target_network = True"),
        (loss_of(**RIGHT, metrics={"x": jnp.ones(3)}), r"but 'x' of Own has the shape \(3,\)"),
        (lambda policy, params, batch: batch["advantage"].sum(), "put Advantages"),
        (lambda policy, params, batch: (batch["obs"], {}), "a loss is a scalar, but <lambda>"),
    ],
    ids=["needs", "on_policy", "seed", "target", "metric", "a function's field", "no scalar"],
)
def test_what_a_loss_of_ones_own_lacks_is_reported_with_the_way_out(loss, says):
    with pytest.raises((fl.errors.CheckError, fl.errors.SettingError), match=says):
        PPO.set("learner.loss", loss).remove("adv", "norm").check()


class Scaled(fl.networks.MLP):
    """A module with attributes that are no methods."""

    def __init__(self, *spaces, **settings):
        super().__init__(*spaces, **settings)
        self.depth, self.scale = 3, nnx.Param(jnp.ones(()))


@pytest.mark.parametrize(
    ("method", "says"), [("none", "calls$"), ("depth", "it is an int"), ("scale", "it is a Param")]
)
def test_a_loss_that_calls_what_is_no_method_is_refused(method, says):
    def loss(policy, params, batch):
        return policy(params, batch["obs"], method=method).mean(), {}

    graph = PPO.set("learner.loss", loss)
    policy = fl.Policy(Scaled)
    graph = graph.set("learner.policy", policy).set("runners.policy", policy)
    with pytest.raises(fl.errors.CheckError, match=f"Scaled has no method {method}.*{says}"):
        graph.compile()
