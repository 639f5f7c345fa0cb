"""Exported policies: what acts in a process without flowrl is what `policy.act` does."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Tuple

import flowrl as fl
from flowrl.cli.main import main
from flowrl.core.trees import fields_of
from flowrl.observe import exporting
from flowrl.observe.manifest import seal
from flowrl.observe.saved_policies import save_policy
from flowrl.rl.jitted_acting import jitted_act
from flowrl.rl.policies import Memory
from flowrl.rl.spaces import Spaces
from tests.spaced import ACTIONS, OBSERVATIONS, some_mask

DOCS = Path(__file__).parents[2] / "docs/howto/deployment.md"
N = 1_000
STEPS = 3
"""The steps of a recurrent policy."""


def mlp(**settings):
    return fl.Policy(fl.networks.MLP, hidden=(8,), **settings)


def trained(policy, obs, action):
    """A policy with random weights and moments."""
    made = fl.TrainedPolicy(policy, Spaces(obs, action), None)
    shapes = jax.eval_shape(made.network.init, jax.random.key(0))
    rng = np.random.default_rng(3)

    def normal(x):
        # Larger ones would move nearly all actions to their bounds.
        return (0.4 * rng.normal(size=x.shape)).astype(x.dtype)

    params = {name: normal(x) for name, x in shapes.params.items()}
    # Variances and counts are above 0.
    rest = {
        name: normal(x) if name.endswith("mean") else abs(normal(x)) + np.float32(0.5)
        for name, x in shapes.rest.items()
    }
    return fl.TrainedPolicy(policy, made.spaces, type(shapes)(params, rest))


NARROW = Box(np.array([-3, 0.5]), np.array([1, 40]), dtype=np.float64)
HALF = Box(np.float32([-np.inf, 2, -np.inf]), np.float32([np.inf, np.inf, -1]))
MASKED = Dict(observation=OBSERVATIONS["box"], action_mask=MultiBinary(5))
IMAGE = Box(0, 255, (1, 9, 11), np.uint8)
SMALL = {"channels": (2,), "kernels": (3,), "strides": (2,), "hidden": 4}
KINDS = fl.networks
POLICIES = {
    "values": (fl.Policy(KINDS.QNetwork, hidden=(8,)), "box", "discrete from 2"),
    "noisy distributions": (
        fl.Policy(KINDS.QNetwork, hidden=(8,), atoms=5, v_min=-1.0, v_max=1.0, noisy=True),
        "box",
        "discrete from 2",
    ),
    "masked": (mlp(), MASKED, "multi-discrete"),
    "bits": (mlp(), "discrete", "multi-binary"),
    "integers": (mlp(), "integer box", "integer box"),
    "normalised": (mlp(normalize=True), "float64 box of two axes", "box"),
    "half bounded": (mlp(), "box", HALF),
    "squashed": (fl.Policy(KINDS.SACNetwork, hidden=(8,)), "box", NARROW),
    "trees": (mlp(normalize=True), "nested", "dict"),
    "tuples": (mlp(), "tuple", "tuple"),
    "images": (fl.Policy(KINDS.CNN, **SMALL), IMAGE, Discrete(5)),
    "recurrent": (fl.Policy(KINDS.RNN, hidden=(4,), size=4), "box", "dict"),
    "recurrent values": (
        fl.Policy(KINDS.RecurrentQNetwork, hidden=(16,), size=16),
        "box",
        "discrete",
    ),
}


def named(spaces, table):
    return table[spaces] if isinstance(spaces, str) else spaces


def some_observations(spaces, rng):
    """Observations of a space, as a vector of environments returns them."""
    arrays = exporting.random_observations(spaces, N)
    for name in arrays:
        arrays[name] = rng.permutation(arrays[name])
        if "action_mask" in name:
            masks = [some_mask(rng, spaces.head.sizes) for _ in range(N)]
            arrays[name] = np.stack(masks)
    return spaces.tree(arrays)


def wanted_of(policy):
    """Calls of a policy, each with its arguments as trees and what `act` makes of them."""
    net, rng = policy.network, np.random.default_rng(5)
    if not net.recurrent:
        obs = some_observations(policy.spaces, rng)
        return [((obs,), policy.act(obs))]
    calls = []
    # Where an episode begins it does not matter which carry is given.
    carry = jax.tree.map(np.ones_like, net.memory(policy.weights, N).carry)
    reset = np.ones(N, bool)
    for _ in range(STEPS):
        obs = some_observations(policy.spaces, rng)
        batch = policy.spaces.tree(policy.spaces.arrays(obs))
        packed, after = jitted_act(net)(policy.weights, batch, None, Memory(carry, reset))
        action = net.head.to_env(net.unpack(np.asarray(packed))[0])
        given = jax.tree.map(np.asarray, carry)
        calls.append(((obs, given, reset), (action, jax.tree.map(np.asarray, after))))
        carry, reset = after, rng.random(N) < 0.3
    # The first call of `act` without a carry is one at the start of an episode.
    first = policy.act(calls[0][0][0])
    jax.tree.map(np.testing.assert_array_equal, first[0], calls[0][1][0])
    return calls


OUTSIDE = """
import sys
sys.modules["flowrl"] = None
exec(open("outside.py").read())
import pickle
import jax
import numpy as np


def leaves(calls, wanted):
    return [np.asarray(x) for x in jax.tree.leaves(calls)], jax.tree.leaves(wanted)


def compare(name, got, wanted):
    assert len(got) == len(wanted), (name, len(got), len(wanted))
    for x, y in zip(got, wanted):
        assert x.shape == y.shape and np.can_cast(x.dtype, y.dtype), (name, x.dtype, y.dtype)
        if y.dtype.kind == "f":
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(x, y, err_msg=name)


for name, calls, inputs in pickle.load(open("calls.pickle", "rb")):
    act = from_stablehlo(f"{name}.stablehlo")
    act_by_name = from_onnx(f"{name}.onnx") if inputs else None
    for args, wanted in calls:
        compare(name, *leaves(act(*args), wanted))
        if inputs:
            # The arguments' leaves stand in the order of the inputs.
            arrays = [np.asarray(x) for x in jax.tree.leaves(args)]
            typed = {k: x.astype(t) for (k, t), x in zip(inputs.items(), arrays, strict=True)}
            compare(name, *leaves(act_by_name(typed), wanted))
    one = jax.tree.map(lambda x: x[:1], (args, wanted))
    compare(name, *leaves(act(*one[0]), one[1]))
    print(name)
"""


@pytest.mark.system
def test_they_act_in_a_process_without_flowrl_as_policy_act_does(tmp_path):
    """Of every head, mask, tree and moments, on 1,000 observations, and on one."""
    calls = []
    for name, (policy, obs, action) in POLICIES.items():
        made = trained(policy, named(obs, OBSERVATIONS), named(action, ACTIONS))
        exports = [made.export(tmp_path / f"{name}.{kind}") for kind in ("stablehlo", "onnx")]
        assert exports[0].inputs == exports[1].inputs
        assert max(export.difference for export in exports) <= 1e-5
        dtypes = {k: text.partition("[")[0] for k, text in exports[0].inputs.items()}
        calls.append((name, wanted_of(made), dtypes))
    (tmp_path / "calls.pickle").write_bytes(pickle.dumps(calls))
    # The functions that load them are those of the guide.
    (snippet,) = re.findall(r"%%writefile outside.py\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "outside.py").write_text(snippet)
    command = [sys.executable, "-W", "error", "-c", OUTSIDE]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.split("\n")[:-1]) == (0, list(POLICIES)), ran.stderr
    # What is compared differs from observation to observation.
    for name, ((_, wanted), *_), _ in calls:
        for part, x in fields_of("", wanted).items():
            values = len(np.unique(x))
            assert values > (N / 5 if x.dtype.kind == "f" else 1), (name, part, values)


PLAIN = trained(mlp(), OBSERVATIONS["box"], ACTIONS["dict"])
EQUAL = trained(mlp(), OBSERVATIONS["box"], Discrete(4, start=-1))


def test_an_export_says_what_it_takes_and_returns(tmp_path):
    found = PLAIN.export(tmp_path / "p.stablehlo")
    assert found.inputs == {"obs": "float32[b, 3]"}
    assert found.outputs == {
        "action['go']": "int32[b]",
        "action['lever'][0]": "float32[b, 1]",
        "action['push']": "float32[b, 2]",
    }
    checked = f"largest difference from policy.act {found.difference:.1g}"
    assert str(found).splitlines() == [
        f"{found.path}: {found.path.stat().st_size:,} bytes",
        "  takes    obs                 float32[b, 3]",
        "  returns  action['go']        int32[b]",
        "  returns  action['lever'][0]  float32[b, 1]",
        "  returns  action['push']      float32[b, 2]",
        f"  checked  on 1,000 random observations: {checked}",
    ]


def changed(monkeypatch, change):
    """Let what is loaded again act otherwise."""
    stablehlo = exporting._stablehlo

    def other(acting):
        data, call = stablehlo(acting)
        return data, lambda *args: change(jax.tree.map(np.array, call(*args)))

    monkeypatch.setattr(exporting, "_stablehlo", other)


def of_one(action, name, by):
    """An action whose part of this name is another for one observation."""
    action[name][7] = by(action[name][7])
    return action


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            # Its bounds are -2 and 2.
            lambda a: of_one(a, "push", lambda x: x + 2e-4),
            "differ from those .* up to 0.0001, abov",
        ),
        (lambda a: of_one(a, "push", lambda x: x * np.nan), "by up to inf"),
        (lambda a: of_one(a, "go", lambda x: (x + 1) % 3), r"takes another action\['go'\] than"),
        (lambda a: {**a, "go": a["go"][:, None]}, r"returns action\['go'\] as int32\[100, 1\]"),
        (lambda a: {**a, "go": a["go"] * 1.0}, r"\['go'\] as float64\[100\], but .* as int32\[100"),
    ],
)
def test_what_acts_otherwise_is_not_written(change, says, tmp_path, monkeypatch):
    changed(monkeypatch, change)
    with pytest.raises(fl.errors.SaveError, match=says):
        PLAIN.export(tmp_path / "p.stablehlo")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [1e3, 1e6, np.finfo(np.float32).max])
def test_rounding_is_measured_by_the_bounds_over_which_actions_are_stretched(
    width, tmp_path, monkeypatch
):
    box = Box(np.float32([-width, -1]), np.float32([width, 1]))
    wide = trained(mlp(), OBSERVATIONS["box"], box)
    assert wide.export(tmp_path / "p.stablehlo").difference <= 1e-5
    with pytest.raises(fl.errors.SaveError, match="exists already"):
        wide.export(tmp_path / "p.stablehlo")
    # Each number has bounds of its own.
    for wrong in ([2e-5 * width, 0], [0, 2e-5]):
        with monkeypatch.context() as patched:
            changed(patched, lambda action, wrong=wrong: action + np.float32(wrong))
            with pytest.raises(fl.errors.SaveError, match="its actions differ .* by up to 2e-05"):
                wide.export(tmp_path / "other.stablehlo")


def test_of_choices_that_are_equal_either_may_be_taken_and_no_other(tmp_path, monkeypatch):
    changed(monkeypatch, lambda action: action + shift[0])
    params = {name: 0 * x for name, x in EQUAL.weights.params.items()}
    params["heads/action/bias"] = np.float32([0, 1, 1, 0])
    equal = fl.TrainedPolicy(EQUAL.policy, EQUAL.spaces, EQUAL.weights._replace(params=params))
    shift = [1]
    found = equal.export(tmp_path / "p.stablehlo")
    assert found.ties == N and "1,000 choices of two that are equal within 1e-05" in str(found)
    for other in (-1, 2, 9):
        shift[0] = other
        with pytest.raises(fl.errors.SaveError, match="is not within 1e-05 of the best"):
            equal.export(tmp_path / "other.stablehlo")


class Counts(nnx.Module):
    """Asks for the number of its observations as no symbol has it."""

    def __init__(self, obs_space, action_space, *, rngs):
        self.value = nnx.Param(np.zeros(2, np.float32))

    def __call__(self, obs):
        return jax.numpy.zeros((len(obs), 2)) + self.value[...], jax.numpy.zeros(len(obs))


def test_what_can_not_be_exported_is_refused_with_the_way_out(tmp_path, monkeypatch):
    with pytest.raises(fl.errors.SettingError, match=r"FILE.stablehlo or FILE.onnx.*; got p.tfl"):
        PLAIN.export("p.tflite")
    with pytest.raises(fl.errors.SaveError, match="there is no directory .*missing for p.onnx"):
        PLAIN.export(tmp_path / "missing" / "p.onnx")
    counts = trained(fl.Policy(Counts), OBSERVATIONS["box"], Discrete(2))
    with pytest.raises(
        fl.errors.SaveError, match=r"Counts can't be exported: .*obs.shape\[0\], not from len\(obs"
    ):
        counts.export(tmp_path / "p.stablehlo")
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(fl.errors.SettingError, match=r"ONNX needs .*jax2onnx.*'flowrl\[onnx\]'"):
        PLAIN.export(tmp_path / "p.onnx")


def test_random_observations_are_those_of_the_space_and_none_is_huge():
    wide = np.finfo(np.float32).max
    box = Box(np.float32([-wide, -np.inf, 5, 100]), np.float32([wide, 0, np.inf, 200]))
    spaces = Spaces(Tuple([box, Discrete(3, start=4)]), Discrete(2))
    first, second = exporting.random_observations(spaces, 50).values()
    assert box.contains(first[0]) and np.abs(first).max() <= 200 and first.dtype == np.float32
    assert (first.std(0) > 1).all() and (first[:, 3] >= 100).all()
    assert set(second.tolist()) == {4, 5, 6} and second.dtype == np.int64


def test_the_command_line_exports_a_saved_policy(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_policy(PLAIN, tmp_path / "runs/mine/policy")
    seal(tmp_path / "runs/mine")
    assert main(["export", "runs/mine"]) == 0
    assert (
        capsys.readouterr().out.startswith("mine.stablehlo: ") and Path("mine.stablehlo").exists()
    )
    assert main(["export", "runs/mine"]) == 2
    assert "mine.stablehlo exists already" in (said := capsys.readouterr().err)
    assert "-o FILE" in said
    assert main(["export", "runs/mine", "-o", "mine.pt"]) == 2
    assert "FILE.stablehlo or FILE.onnx" in capsys.readouterr().err
