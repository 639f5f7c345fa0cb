"""A config says all about a graph: it is written and read again, and the graph is the same."""

import dataclasses
import itertools
import json
import typing
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.algos import STOCK
from flowrl.algos.config import decoded, encoded
from flowrl.algos.named import find
from flowrl.algos.tuned import TUNED
from flowrl.cli.main import main
from flowrl.errors import SaveError, SettingError
from flowrl.networks import MLP
from flowrl.observe.settings import settings_of


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def other(name, value, hint):
    """Another value of a setting than its default, of its type."""
    special = {
        **dict.fromkeys(("lr", "critic_lr", "alpha_lr"), fl.Linear(1e-3, 1e-5, 65_000)),
        "policy": fl.Policy(MLP, hidden=(32, 16), activation="relu"),
        "hidden": (32, 16, 8),
        "cell": "gru",
        "spread": 1.5,
        "reward": "mean",
        "distribution": "quantile",
        "policies": {"agent_0": "one", "agent_1": "two", "agent_2": "one"},
    }
    if name in special:
        return special[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"another {value}"
    if isinstance(value, int):
        return value * 2 + 2
    if isinstance(value, float):
        # Some must be from 0 to 1; a long fraction shows that none is rounded.
        return value / 3 + 1e-5
    # None: the other type in its annotation.
    (kind,) = [option for option in typing.get_args(hint) if option is not type(None)]
    return {int: 64, float: 0.1 + 0.2}[kind]


def round_trip(config, file):
    config.save(file)
    loaded = fl.Config.load(file)
    assert loaded == config
    assert repr(loaded) == repr(config)
    return loaded


@pytest.mark.parametrize("file", ["c.yaml", "c.json"])
@pytest.mark.parametrize("name", STOCK)
def test_every_setting_of_a_stock_graph_survives_the_round_trip(name, file):
    source = find(name)
    env = "Pendulum-v1" if name in ("sac", "td3", "ddpg") else source.env
    changes = {k: other(k, v, source.hints[k]) for k, v in source.settings.items()}
    if "minibatch_size" in changes:
        changes["minibatch_size"] = 64
    changes |= {"runners.timeout": 12.5, "runners.env_settings": {"x": (1, "1e-3")}}
    config = fl.Config.of(name, env=env, changes=changes)
    assert [k for k, v in source.settings.items() if config.settings[k] == v] == []
    run = {"runtime": "ray", "seed": 7, "seeds": 3, "steps": 20_000, "until": "return_mean>=475"}
    loaded = round_trip(dataclasses.replace(config, **run), file)
    assert loaded.build().text() == config.build().text()


@pytest.mark.parametrize(("name", "pattern"), [key for key in TUNED if "*" not in key[1]])
def test_tuned_settings_are_in_it_and_are_not_applied_on_top(name, pattern):
    config = fl.Config.of(name, env=pattern)
    graph = getattr(fl, name)(pattern, **fl.tuned(name, pattern))
    assert round_trip(config, "c.yaml").build().text() == graph.text()
    plain = fl.Config.of(name, env=pattern, tuned=False)
    assert round_trip(plain, "d.yaml").build().text() == getattr(fl, name)(pattern).text()


OWN = """
from dataclasses import dataclass
import flowrl as fl

class Net(fl.networks.MLP):
    pass

@dataclass(frozen=True)
class Frozen:
    size: int = 3
    rate: fl.Linear | float = 0.5

def graph(
    env="CartPole-v1", word="relu", number="1e-3", nothing="none", yes="yes", empty="", sizes=[1],
    pair=(1, "2"), deep=((1, 2.0), ("a",)), table={"a": (1,), "b": None}, large=10**20,
    tiny=1e-300, endless=float("inf"), width: int = None, net=Net, policy=fl.Policy(Net),
    frozen=Frozen(), ratio: float = 1, hook=lambda x: x, text="a: b # c\\n'd' \\"e\\"",
):
    held = (word, number, nothing, yes, empty, sizes, pair, deep, table, large, tiny, endless,
            width, net, frozen, ratio, text)
    # A text of all of them shows what the function was given.
    return fl.ppo(env, policy=policy).set("runners.env_settings", {"held": repr(held)})
"""


def test_every_kind_of_value_of_a_users_own_function_survives():
    Path("own_config.py").write_text(OWN)
    words = {"word": "5", "number": "Linear(", "nothing": "None", "text": " x "}
    changes = {
        **words,
        "sizes": [2, "3"],
        "pair": (1.0, True, None, "null", "1_000"),
        "deep": (),
        "table": {"1": {"x": (fl.Linear(1, 0, 3), "relu")}},
        "endless": -float("inf"),
        "net": MLP,
        "ratio": 2,
        "runners.wrappers": (),
    }
    for file, given in itertools.product(("c.yaml", "c.json"), ({}, changes)):
        config = fl.Config.of("own_config.py:graph", changes=given)
        Path(file).unlink(missing_ok=True)
        config.save(file)
        loaded = fl.Config.load(file)
        text = config.build().text()
        assert loaded.build().text() == text
        # The file names what its texts need, so that it can be read.
        assert loaded.imports == ("own_config.py",)
        # A default that no text can name is left to the function.
        assert set(config.settings) - set(loaded.settings) == {"hook"}
    assert "'5', 'Linear(', 'None'" in text and "[2, '3'], (1.0, True, None, 'null'" in text
    with pytest.raises(SaveError, match=r"settings\.hook: .* can't be written"):
        fl.Config.of("own_config.py:graph", changes={"hook": lambda x: -x}).save("d.yaml")
    assert not Path("d.yaml").exists()


@pytest.mark.parametrize(
    "value",
    [
        *("a", "1e-3", "None", "true", "", " ", "(1, 2)", "'x'", '"', "\n", "Linear(1, 0, 2)", "é"),
        *("x(", (1, (2.5, "3")), [], [1, "a"], {}, {"a": [1]}, 0.1 + 0.2, 5e-324, 10**30, True),
        *(None, ("",), fl.Cosine(1e-3, 0.0, 9), (fl.Linear(1, 0, 2), "x"), MLP),
        fl.Policy(MLP, hidden=(3,)),
    ],
    ids=repr,
)
def test_a_value_is_read_as_it_was_written(value):
    for kind in ("yaml", "json"):
        config = fl.Config("ppo", fields={"a.b": value})
        config.save(f"c.{kind}")
        found = fl.Config.load(f"c.{kind}").fields["a.b"]
        assert (type(found), found) == (type(value), value)
    assert repr(decoded(encoded(value, ""), (), "")) == repr(value)


def test_a_file_by_hand_reads_values_as_set_does(capsys):
    Path("c.yaml").write_text(
        """
        graph: ppo
        seed:            # a key without a value is left out
        steps: 1e4
        settings:
          lr: 1e-3
          epochs: 4
          gamma: .9
          max_grad_norm: 1
          batch_size: 1_024
          policy: Policy(networks.MLP, hidden=(8,))
        fields: {train.shuffle: false, learner.policy.hidden: [4, 4]}
        """
    )
    config = fl.Config.load("c.yaml")
    graph = fl.ppo(lr=1e-3, epochs=4, gamma=0.9, max_grad_norm=1.0)
    graph = graph.set("train.shuffle", False)
    policy = fl.Policy(MLP, hidden=(8,))
    graph = graph.set("learner.policy", policy).set("runners.policy", policy)
    assert config.build().text() == graph.set("learner.policy.hidden", (4, 4)).text()
    assert (config.seed, config.steps, config.settings["max_grad_norm"]) == (None, 10_000, 1.0)
    assert main(["plan", "--config", "c.yaml", "--set", "learner.policy.hidden=(8,)"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("ppo: ") and "settings of c.yaml, set learner.policy.hidden=(8,)" in err


def test_a_mapping_takes_in_another_one_and_numbers_may_be_large():
    Path("c.yaml").write_text(
        f"""
        graph: ppo
        steps: {10**400}
        settings: {{<<: &x {{<<: {{lr: 0.1, epochs: 2}}, lr: 0.2}}, epochs: 3}}
        fields: {{runners.env_settings: *x}}
        """
    )
    config = fl.Config.load("c.yaml")
    assert (config.settings, config.steps) == ({"lr": 0.2, "epochs": 3}, 10**400)
    assert config.fields == {"runners.env_settings": {"lr": 0.2, "epochs": 2}}


def test_what_is_changed_later_wins_in_its_order():
    config = fl.Config.of("ppo", changes={"learner.policy.hidden": (8,), "train.epochs": 2})
    policy = fl.Policy(MLP, hidden=(3,))
    changed = config.changed({"train.epochs": 3, "learner.policy": policy})
    assert list(changed.fields.items()) == [("train.epochs", 3), ("learner.policy", policy)]
    assert config.changed({}) is config and config.fields["train.epochs"] == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "there is no file c.yaml"),
        ("", "c.yaml is empty; write graph: ppo, say, or use --save-config"),
        ("# only a comment", "c.yaml is empty"),
        ("- ppo", "c.yaml holds a list, not a mapping such as graph: ppo"),
        ("ppo", "c.yaml holds a str, not a mapping"),
        ("graph: ppo\nenv: [", "c.yaml, line 2 is no YAML: "),
        ("graph: \x07", "c.yaml is no YAML: "),
        ("graph: ppo\ngraph: dqn", "c.yaml, line 2 is no YAML: the key 'graph' stands twice"),
        ("env: CartPole-v1", "c.yaml: it has no graph; write graph: ppo, say"),
        ("graph: pppo", "c.yaml: unknown graph 'pppo'; did you mean 'ppo'?"),
        ("graph: ppo\nstep: 5", "c.yaml: unknown key 'step'; did you mean 'steps'?"),
        ("graph: ppo\nseed: -1", "c.yaml: seed: must be a whole number of at least 0, got -1"),
        ("graph: ppo\nseeds: true", "c.yaml: seeds: must be a whole number of at least 1"),
        ("graph: ppo\nseeds: 2.5", "c.yaml: seeds: must be a whole number of at least 1"),
        ("graph: ppo\nsettings: {lr: '{[1]: 2}'}", "lr: '{[1]: 2}' is no value: unhashable type"),
        (f"graph: ppo\nsettings: {{lr: '{'-' * 90_000}1'}}", "lr: its brackets or signs are nest"),
        ("graph: ppo\nsettings: {<<: {lr: fast}}", "c.yaml: settings.lr: takes a number or Linear"),
        ("graph: ppo\nsettings: {<<: {lr: 1}, lr: 1, lr: 2}", "the key 'lr' stands twice"),
        (
            "graph: a.b.py:f",
            "a.b.py can't be imported, for the name of a module has no dot; rename",
        ),
        ("graph: ppo\nsteps: many", "c.yaml: steps: must be a whole number of at least 1"),
        ("graph: ppo\nuntil: 5", "c.yaml: until: must be a text, got 5"),
        (
            "graph: ppo\nruntime: rays",
            "c.yaml: runtime: unknown runtime 'rays'; did you mean 'ray'",
        ),
        ("graph: ppo\nimports: numpy", "c.yaml: imports: must be a list of texts, got 'numpy'"),
        ("graph: ppo\nimports: [no_such]", "c.yaml: --import no_such: No module named"),
        ("graph: ppo\nsettings: 5", "c.yaml: settings: must be a mapping of names to values"),
        (
            "graph: ppo\nsettings: {learning_rate: 1e-3}",
            "c.yaml: settings.learning_rate: unknown setting 'learning_rate'; did you mean 'lr'?",
        ),
        ("graph: ppo\nsettings: {lr: fast}", "c.yaml: settings.lr: takes a number or Linear(...)"),
        (
            "graph: ppo\nsettings: {epochs: 2.5}",
            "settings.epochs: takes a whole number, got 2.5",
        ),
        ("graph: ppo\nsettings: {lr: 2020-01-01}", "settings.lr: YAML reads this as a date; if"),
        ("graph: ppo\nsettings: {lr: Linaer(1)}", "settings.lr: line 1: unknown name 'Linaer'"),
        ("graph: ppo\nsettings: {3: 1}", "c.yaml: settings: its key 3 is no text"),
        (
            "graph: ppo\nfields: {train.epoch: 3}",
            "c.yaml: fields.train.epoch: ppo.train: unknown setting 'epoch'; did you mean 'epochs'",
        ),
        (
            "graph: ppo\nfields: {train.epochs: many}",
            "c.yaml: fields.train.epochs: ppo.train.epochs: takes a whole number, got 'many'",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named_with_file_and_key(text, says, capsys):
    Path("a.b.py").touch()
    if text is not None:
        Path("c.yaml").write_text(text)
    assert main(["check", "--config", "c.yaml"]) == 2
    assert says in capsys.readouterr().err


def test_json_that_is_none_is_named():
    for text, says in (("{", "is no JSON: "), ('{"a": 1, "a": 2}', "the key 'a' stands twice")):
        Path("c.json").write_text(text)
        with pytest.raises(SaveError, match=f"c.json.*{says}"):
            fl.Config.load("c.json")
    Path("latin.yaml").write_bytes(b"graph: \xe9")
    with pytest.raises(SaveError, match=r"latin\.yaml is no YAML"):
        fl.Config.load("latin.yaml")


def test_a_file_is_never_written_over(capsys):
    config = fl.Config.of("pg")
    config.save("new/folder/c.yaml")
    with pytest.raises(SaveError, match="c.yaml exists already, and nothing is ever overwritten"):
        config.save("new/folder/c.yaml")
    assert main(["check", "a2c", "--save-config", "new/folder/c.yaml"]) == 2
    assert "--save-config new/folder/c.yaml exists already" in capsys.readouterr().err
    with pytest.raises(SaveError, match="can't be written"):
        config.save("new/folder/c.yaml/d.yaml")
    text = Path("new/folder/c.yaml").read_text()
    assert text.startswith("# Start this run again: flowrl run --config new/folder/c.yaml\n#")
    assert text.split("graph: pg\n")[1].startswith(
        "env: CartPole-v1\nsettings:\n  num_runners: 1\n"
    )


def test_an_unknown_change_is_an_error_at_once():
    with pytest.raises(SettingError, match="ppo: unknown setting 'epoch'; did you mean 'epochs'"):
        fl.Config.of("ppo", changes={"epoch": 3})
    with pytest.raises(SettingError, match="ppo.epochs: takes a whole number, got 'x'"):
        fl.Config.of("ppo").changed({"epochs": "x"})


# -- the command line --------------------------------------------------------------------------


def test_every_command_that_takes_a_graph_takes_a_config(capsys):
    words = ["--env", "Pendulum-v1", "--set", "epochs=3", "--set", "train.shuffle=False"]
    assert main(["check", "ppo", *words, "--save-config", "c.yaml"]) == 0
    capsys.readouterr()
    assert main(["plan", "ppo", *words]) == 0
    plan = capsys.readouterr().out
    for command in (
        ["plan", "--config", "c.yaml"],
        ["plan", "--config=c.yaml", "--runtime", "local"],
    ):
        assert main(command) == 0
        assert capsys.readouterr().out == plan
    assert main(["draw", "--config", "c.yaml"]) == 0
    assert capsys.readouterr().out
    # The config is the first graph, --set changes the other.
    assert main(["diff", "--config", "c.yaml", "ppo", "--set", "epochs=5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:] for line in lines if "train.epochs" in line] == [["3", "5"]]
    # What the command line gives wins, also in what is saved.
    more = ["--env", "CartPole-v1", "--set", "epochs=7", "--save-config", "d.json"]
    assert main(["check", "--config", "c.yaml", *more]) == 0
    saved = json.loads(Path("d.json").read_text())
    assert (saved["env"], saved["settings"]["epochs"]) == ("CartPole-v1", 7)
    assert saved["fields"] == {"train.shuffle": False} and "seed" not in saved
    assert main(["run", "--config", "c.yaml", "--help-settings"]) == 0
    printed = capsys.readouterr().out
    assert "settings of ppo" in printed and "tuned for Pendulum-v1: " in printed


FIELDS = """
graph: ppo
settings: {epochs: 4}
fields: {train.epochs: 2, learner.optimizer: Adam(lr=0.1)}
"""


@pytest.mark.parametrize("epochs", [7, 4])
def test_a_setting_whose_effect_a_field_of_the_file_takes_is_refused(epochs, capsys):
    Path("c.yaml").write_text(FIELDS)
    assert main(["plan", "--config", "c.yaml", "--set", f"epochs={epochs}"]) == 2
    assert "c.yaml: fields.train.epochs: it is set after the settings, so epochs would not" in (
        capsys.readouterr().err
    )
    config = fl.Config.load("c.yaml")
    with pytest.raises(SettingError, match=r"fields\.learner\.optimizer: .* so lr would not reach"):
        config.changed({"lr": 0.01})
    # Other settings are taken, and this one if the field is set, too.
    for change in ({"gamma": 0.5}, {"epochs": epochs, "train.epochs": 9}):
        text = config.changed(change).build().text()
        assert "lr=0.1" in text and ("gamma=0.5" in text or "epochs=9" in text)
    Path("d.yaml").write_text("graph: ppo\nfields: {runners.env: Acrobot-v1}")
    assert main(["check", "--config", "d.yaml", "--env", "CartPole-v1"]) == 2
    assert "d.yaml: fields.runners.env: it is set after --env" in capsys.readouterr().err
    words = ["tune", "--config", "c.yaml", "--steps", "9", "--search"]
    for more in (["gamma=uniform(0, 1)", "--set", f"epochs={epochs}"], ["epochs=choice(3, 5)"]):
        assert main([*words, *more]) == 2
        assert "fields.train.epochs: it is set after the settings" in capsys.readouterr().err
    # The function's own default is said again.
    Path("e.yaml").write_text("graph: ppo\nfields: {train.epochs: 2}")
    default = find("ppo").settings["epochs"]
    assert main(["plan", "--config", "e.yaml", "--set", f"epochs={default}"]) == 2
    assert "e.yaml: fields.train.epochs: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ([("train.epochs", 3), ("epochs", 4)], None),
        ([("train.epochs", 3), ("epochs", find("ppo").settings["epochs"])], None),
        ([("epochs", 5), ("train.epochs", 3), ("epochs", 4)], None),
        ([("epochs", 4), ("train.epochs", 3)], 3),
        ([("train.epochs", 3), ("epochs", 4), ("train.epochs", 2)], 2),
        # A setting that a field rightly replaced is no fault of those that come after both.
        ([("epochs", 4), ("train.epochs", 3), ("gamma", 0.5)], 3),
    ],
)
def test_of_a_setting_and_a_field_the_later_one_wins_or_is_refused(given, value, capsys):
    words = [word for name, x in given for word in ("--set", f"{name}={x}")]
    commands = [
        ["plan", "ppo", *words],
        ["tune", "ppo", *words, "--steps", "9", "--search", "lr=uniform(0, 1)", "--metric", "x"],
    ]
    if value is None:
        says = "train.epochs: it is set after the settings, so epochs would not reach it; leave out"
        for command in commands:
            assert main(command) == 2
            assert says in capsys.readouterr().err
        with pytest.raises(SettingError, match=says):
            fl.Config.of("ppo").changed(given)
    else:
        graph = fl.Config.of("ppo").changed(given).build()
        assert settings_of(graph)["train.epochs"] == value
        # This one comes after that of the order.
        assert main(commands[1]) == 2
        assert "metric: unknown column 'x'" in capsys.readouterr().err


def test_a_study_reports_what_it_leaves_out_of_a_config(capsys):
    Path("c.yaml").write_text("graph: ppo\nuntil: return_mean>=5\nseeds: 3\nsteps: 9")
    assert (
        main(["tune", "--config", "c.yaml", "--search", "lr=uniform(0, 1)", "--metric", "x"]) == 2
    )
    assert capsys.readouterr().err.startswith("c.yaml: until and seeds left out: each trial takes")


def test_a_config_of_another_graph_is_named(capsys):
    Path("c.yaml").write_text("graph: ppo\nsettings: {epochs: 4, gamma: 0.9}")
    assert main(["check", "sac", "--config", "c.yaml"]) == 2
    assert "c.yaml is a config of ppo, and sac has no setting epochs; leave out sac, or" in (
        capsys.readouterr().err
    )
    assert main(["check", "a2c", "--config", "c.yaml"]) == 2
    Path("c.yaml").write_text("graph: ppo\nsettings: {gamma: 0.9}")
    assert main(["check", "a2c", "--config", "c.yaml"]) == 0


def test_a_file_without_an_environment_has_the_functions_default(capsys):
    Path("c.yaml").write_text("graph: ppo")
    assert fl.Config.load("c.yaml") == fl.Config("ppo", env="CartPole-v1")
    assert main(["check", "--config", "c.yaml", "--untuned"]) == 2
    assert "a config names all settings" in capsys.readouterr().err


def test_a_run_is_repeated_by_its_config(capsys):
    small = ["batch_size=64", "rollout_length=8", "envs_per_runner=2", "report_every=1"]
    words = [word for text in small for word in ("--set", text)]
    goal = ["--until", "env_steps>=150", "--steps", "900"]
    command = ["run", "a2c", "--env", "CartPole-v1", "--seed", "3", *words, *goal]
    assert main([*command, "--out", "a", "--save-config", "c.yaml"]) == 0
    assert main(["run", "--config", "c.yaml", "--out", "b"]) == 0
    assert "settings of c.yaml; local runtime, seed 3; until env_steps>=150 or 900 steps" in (
        capsys.readouterr().err
    )
    for name in ("graph.txt", "plan.txt"):
        assert Path("a", name).read_text() == Path("b", name).read_text()
    losses = [
        [json.loads(line)["loss"] for line in Path(x, "rows.jsonl").read_text().splitlines()]
        for x in "ab"
    ]
    assert losses[0] == losses[1]
    # Of a run's directory, too, whose goal the config then names.
    assert main(["run", "b", "--steps", "100", "--out", "c", "--save-config", "d.yaml"]) == 0
    assert "graph: b\nruntime: local\nseed: 3\nsteps: 100\n" in Path("d.yaml").read_text()
    with fl.run(fl.pg(), runtime=fl.LocalRuntime(schedule="random"), out="random"):
        pass
    assert main(["run", "random", "--steps", "9", "--out", "e", "--save-config", "e.yaml"]) == 2
    assert "can't write the settings of the runtime of random (schedule='random')" in (
        capsys.readouterr().err
    )


def test_numbers_that_yaml_reads_as_other_ones_are_texts(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("graph: ppo\nenv: CartPole-v1\nsettings: {epochs: 010}\n")
    with pytest.raises(fl.errors.FlowrlError, match="epochs.*takes a whole number, got '010'"):
        fl.Config.load(path).graph()
