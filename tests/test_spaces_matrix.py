"""Every observation space with every action space, with and without a mask of actions."""

import gymnasium as gym
import jax
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import flowrl as fl
from flowrl.core.trees import fields_of
from flowrl.rl.policies import Weights, network
from flowrl.rl.spaces import Spaces
from tests.spaced import ACTIONS, KEY, OBSERVATIONS, JaxSpaced, Spaced, is_allowed, some_mask

MLP = fl.Policy(fl.networks.MLP, hidden=(4,))
N = 6
PAIRS = [(obs, action) for obs in OBSERVATIONS for action in ACTIONS]


def stacked(space, n=N):
    """A batch of observations of a space, as a vector of environments returns them."""
    space.seed(0)
    samples = [space.sample() for _ in range(n)]
    return jax.tree.map(lambda *xs: np.stack(xs), *samples)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(("obs", "action"), PAIRS)
def test_a_stock_network_reads_every_observation_and_acts_in_every_space(obs, action, masked):
    space, seen = ACTIONS[action], OBSERVATIONS[obs]
    rng = np.random.default_rng(0)
    spaces = Spaces(seen, space)
    choices = spaces.head.choices
    if masked and not choices:
        return  # there is nothing to rule out
    if masked:
        seen = gym.spaces.Dict(observation=seen, action_mask=gym.spaces.MultiBinary(choices))
        spaces = Spaces(seen, space)
    net = network(MLP, spaces)
    forms = jax.eval_shape(net.init, jax.random.key(0))
    params = {k: rng.normal(size=x.shape).astype(np.float32) for k, x in forms.params.items()}
    batch = stacked(seen)
    if masked:
        batch[KEY] = np.stack([some_mask(rng, spaces.head.sizes) for _ in range(N)])
    tree = spaces.tree(spaces.arrays(batch))
    noise = np.asarray(spaces.head.noise(jax.random.key(1), N))
    # Without a mask a greedy action is one like any other.
    for given in (None, noise) if masked else (noise,):
        packed, _ = net.act(Weights(params, {}), tree, given)
        assert np.isfinite(packed).all()
        acted = spaces.head.to_env(net.unpack(np.asarray(packed))[0])
        for i in range(N):
            one = jax.tree.map(lambda x, i=i: x[i], acted)
            assert space.contains(one)
            assert not masked or is_allowed(spaces.head, batch[KEY][i], one)


def small(env, graph=fl.pg, **settings):
    sizes = {"num_runners": 1, "envs_per_runner": 2, "rollout_length": 8}
    return graph(env, **sizes, **settings)


@pytest.mark.system
@pytest.mark.parametrize(
    ("obs", "action", "mask"),
    [
        ("nested", "dict", "obs"),
        ("tuple", "multi-discrete", "info"),
        ("dict with an image", "tuple", "obs"),
        ("discrete", "integer box", "info"),
        ("dict", "box", None),
        ("tuple of one", "multi-binary", "obs"),
    ],
)
def test_it_is_trained_saved_and_evaluated_and_nothing_that_is_ruled_out_is_done(
    obs, action, mask, tmp_path
):
    settings = {"obs": obs, "action": action, "mask": mask}
    graph = small(Spaced, policy=MLP, batch_size=16).set("runners.env_settings", settings)
    with fl.run(graph, steps=80, out=tmp_path / "run") as run:
        rows = list(run)
    assert np.isfinite([row["loss"] for row in rows]).all() and len(rows) >= 5
    policy = fl.load(tmp_path / "run", allow=["tests"])
    env = Spaced(**settings)
    seen, info = env.reset(seed=3)
    if mask == "info":
        seen = {"observation": seen, KEY: info[KEY]}
    env.step(policy.act(seen))  # it refuses what is not allowed
    assert len(policy.evaluate(2)) == len(policy.evaluate(2, greedy=False)) == 2


@pytest.mark.parametrize(
    "graph",
    [
        fl.ppo,
        # They share with the others what masks go through.
        *(
            pytest.param(graph, marks=pytest.mark.system)
            for graph in (fl.dqn, fl.impala, fl.a2c, fl.a3c, fl.appo, fl.apex, fl.rainbow)
        ),
    ],
)
def test_no_stock_graph_takes_an_action_that_is_ruled_out(graph):
    settings = {"obs": "dict", "mask": "obs"}
    sizes = {"learning_starts": 64} if graph in (fl.dqn, fl.rainbow, fl.apex) else {}
    flow = graph(Spaced, **sizes).set("runners.env_settings", settings)
    steps = 0
    with fl.run(flow) as run:
        while steps < 2_000:
            steps = next(run)["env_steps"]


def masked_vector(mode, mask="info"):
    made = [lambda: Spaced("tuple", "multi-discrete", mask)] * 3
    return SyncVectorEnv(made, autoreset_mode=AutoresetMode(mode))


@pytest.mark.parametrize("mask", ["obs", "info"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_vector_with_masks_is_sampled_in_every_mode_of_resetting(mode, mask):
    spec = fl.Runners(lambda: masked_vector(mode, mask), MLP, envs_per_runner=3, rollout_length=14)
    runners = spec.open()
    for _ in range(3):
        batch = runners.collect()
        shape = batch["obs"]["observation"][0].shape
        assert shape == (14, 3, 2) and set(fields_of("obs", batch["obs"])) <= set(batch.data)
        valid, allowed = batch["valid"], batch["obs"][KEY].any(-1)
        assert allowed[valid].all()
        # After an episode's end comes a masked row, with its final observation.
        over = (batch["terminated"] | batch["truncated"])[:-1]
        assert (~valid[1:])[over].all() and over.any()
        if mask == "obs":
            assert not allowed[1:][over].any()
    runners.close()


class Forgetful(Spaced):
    """Gives no mask with its third step."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {} if self.age == 3 else info


class Deadlocked(Spaced):
    """Allows nothing after its third step, and then takes anything."""

    def _seen(self):
        obs, info = super()._seen()
        return ({**obs, KEY: np.zeros_like(obs[KEY])} if self.age == 3 else obs), info

    def step(self, action):
        if self.age == 3:
            self.mask = np.ones_like(self.mask)
        return super().step(action)


@pytest.mark.parametrize(
    ("env", "mask", "says"),
    [
        (
            Forgetful,
            "info",
            r"environment 0 of Forgetful.* gave no info\['action_mask'\] with step",
        ),
        (Deadlocked, "obs", r"environment 0 of Deadlocked allows no action at step 3"),
    ],
    ids=["no mask", "nothing allowed"],
)
def test_a_mask_that_is_missing_or_allows_nothing_is_an_error_that_says_where(env, mask, says):
    spec = fl.Runners(env, MLP, envs_per_runner=2, rollout_length=8, env_settings={"mask": mask})
    with pytest.raises(fl.errors.EnvError, match=says):
        spec.open().collect()


@pytest.mark.system
@pytest.mark.parametrize(
    "graph",
    [pytest.param(fl.pg, id="pg"), pytest.param(fl.dqn, id="dqn")],
)
def test_in_jax_the_program_does_what_the_local_runtime_does(graph):
    env = JaxDiscrete if graph is fl.dqn else JaxSpaced
    sizes = {"learning_starts": 256, "report_every": 16} if graph is fl.dqn else {}
    flow = graph(env, **sizes)
    rows = {}
    for runtime in ("local", "xla"):
        with fl.run(flow, runtime=runtime, seed=2) as run:
            rows[runtime] = [next(run) for _ in range(3)]
    for local, xla in zip(rows["local"], rows["xla"], strict=True):
        assert local["return_mean"] == pytest.approx(xla["return_mean"], rel=1e-4)
        # One action that is ruled out would make it -100.
        assert local["return_mean"] > -20


class JaxDiscrete(JaxSpaced):
    """`JaxSpaced` whose only action is the choice."""

    action_space = gym.spaces.Discrete(4)

    def step(self, state, action, key):
        return super().step(state, {"go": action, "push": jax.numpy.ones(2)}, key)


@pytest.mark.system
def test_on_ray_it_is_the_same():
    flow = fl.apex(Spaced, num_runners=2, learning_starts=64)
    flow = flow.set("runners.env_settings", {"obs": "nested", "mask": "info"})
    with fl.run(flow, runtime="ray", steps=1_500) as run:
        rows = list(run)
    assert rows and np.isfinite(rows[-1]["return_mean"])
    assert run.audit().closed and len(run.policy.evaluate(2)) == 2


def test_real_numbers_beside_choices_keep_their_fractions():
    spec = fl.Runners(
        Spaced, MLP, envs_per_runner=2, rollout_length=16, env_settings={"action": "dict"}
    )
    runners = spec.open()
    action = runners.collect()["action"]
    runners.close()
    head = spec.spaces().head
    choices, reals = action[..., : len(head.sizes)], action[..., len(head.sizes) :]
    assert action.dtype == np.float32 and (choices == np.round(choices)).all()
    assert (reals != np.round(reals)).mean() > 0.9


@pytest.mark.system
@pytest.mark.parametrize("graph", [fl.ppo, fl.impala])
def test_recurrent_policies_read_observations_of_several_parts(graph):
    policy = fl.Policy(fl.networks.RNN, hidden=(4,), size=4)
    flow = graph(Spaced, policy=policy).set("runners.env_settings", {"obs": "dict", "mask": "info"})
    with fl.run(flow, steps=1_500) as run:
        assert np.isfinite([row["loss"] for row in run]).all()


class ByPart(gym.Env):
    """Gives its mask part by part, in an action space whose order is not that of the alphabet."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Dict(
        [("move", gym.spaces.Discrete(4)), ("fire", gym.spaces.Discrete(2))]
    )

    def _info(self):
        self.allowed = {"fire": self.np_random.integers(2), "move": self.np_random.integers(4)}
        sizes = {"fire": 2, "move": 4}
        return {KEY: {name: np.arange(sizes[name]) == x for name, x in self.allowed.items()}}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return np.zeros(2, np.float32), self._info()

    def step(self, action):
        assert {name: int(x) for name, x in action.items()} == self.allowed
        self.age += 1
        return np.zeros(2, np.float32), 1.0, self.age == 5, False, self._info()


def test_a_mask_by_part_is_for_the_part_of_that_name():
    spec = fl.Runners(ByPart, MLP, envs_per_runner=2, rollout_length=32)
    runners = spec.open()
    runners.collect()
    runners.close()
