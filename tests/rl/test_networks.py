"""Networks from spaces: shapes, names, errors, acting, and the running normaliser."""

import re
from functools import partial

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import flowrl as fl
from flowrl.rl.images import Convolution
from flowrl.rl.normalizing import merge_moments
from flowrl.rl.policies import Network, Weights, network
from flowrl.rl.spaces import Spaces

N = 5
SMALL_CNN = {"channels": (4, 6), "kernels": (3, 2), "strides": (2, 1), "hidden": 8}
MLP = fl.Policy(fl.networks.MLP, hidden=(4,))
CNN = fl.Policy(fl.networks.CNN, **SMALL_CNN)
BOX, DISCRETE = Box(-1, 1, (3,)), Discrete(3)

ACTIONS = {
    "discrete": Discrete(3, start=2),
    "multi-discrete": MultiDiscrete([3, 2], start=[1, 0]),
    "multi-binary": MultiBinary(3),
    "multi-binary of two axes": MultiBinary([2, 2]),
    "box": Box(-2, 2, (2,)),
    "box of two axes": Box(0, np.inf, (2, 2)),
}
FLAT = {
    "box": Box(-1, 1, (3,)),
    "box of two axes": Box(-1, 1, (3, 2), np.float64),
    "box without axes": Box(-1, 1, ()),
    "discrete": Discrete(4, start=-1),
    "multi-discrete": MultiDiscrete([3, 2], start=[4, -1]),
    "multi-binary": MultiBinary(3),
    "bytes": Box(0, 255, (6, 6, 2), np.uint8),
}
IMAGES = {
    "channel last": Box(0, 255, (9, 8, 3), np.uint8),
    "channel first": Box(0, 255, (3, 9, 8), np.uint8),
    "floats": Box(0, 1, (9, 8, 1)),
}


def made(policy, obs=BOX, action=DISCRETE):
    """A network, and weights that need no compiling: normal ones, with the rest as it starts."""
    net, rng = network(policy, Spaces(obs, action)), np.random.default_rng(0)
    forms = jax.eval_shape(net.init, jax.random.key(0))
    params = {
        k: jnp.asarray(0.5 * rng.normal(size=x.shape), x.dtype) for k, x in forms.params.items()
    }
    return net, Weights(params, net.init(jax.random.key(0)).rest if forms.rest else {})


def initial(policy, obs=BOX, action=DISCRETE, seed=0):
    net = network(policy, Spaces(obs, action))
    return net, net.init(jax.random.key(seed))


def some_obs(space, n=N):
    space.seed(0)
    (part,) = Spaces(space, DISCRETE).parts
    return np.stack([space.sample() for _ in range(n)]).astype(part.dtype)


def assert_acts(policy, obs_space, action_space):
    """The shapes are right, and what it does is in the action space."""
    net, weights = made(policy, obs_space, action_space)
    obs = some_obs(obs_space)

    def both(weights, obs):
        _, value, rest = net.apply(weights, obs)
        return net.act(weights, obs)[0], value, rest

    packed, value, rest = jax.jit(both)(weights, obs)
    assert packed.dtype == jnp.float32 and packed.shape == (N, max(net.head.width, 1) + 2)
    assert value.shape == (N,) and rest.keys() == weights.rest.keys()
    action, logp, also_value = net.unpack(np.asarray(packed))
    assert logp.shape == (N,) and np.isfinite(packed).all()
    np.testing.assert_array_equal(value, also_value)
    assert all(action_space.contains(a) for a in net.head.to_env(action))


@pytest.mark.parametrize(
    ("obs", "action"), [*zip(FLAT, ACTIONS, strict=False), ("bytes", "discrete")]
)
def test_mlp_reads_and_acts(obs, action):
    assert_acts(MLP, FLAT[obs], ACTIONS[action])


@pytest.mark.parametrize(
    ("obs", "action"), [*zip(IMAGES, ("discrete", "box", "multi-discrete"), strict=True)]
)
def test_cnn_reads_and_acts(obs, action):
    assert_acts(CNN, IMAGES[obs], ACTIONS[action])


@pytest.mark.parametrize("policy", [MLP, CNN], ids=["MLP", "CNN"])
@pytest.mark.parametrize("action", ACTIONS)
def test_any_network_fits_any_action_space(policy, action):
    net = Network(policy, Spaces(IMAGES["channel first"], ACTIONS[action]))
    weights = jax.eval_shape(net.init, jax.random.key(0))
    outputs = sum(
        np.prod(v.shape[-1:])
        for k, v in weights.params.items()
        if re.search(r"heads/(action/bias|log_std)", k)
    )
    assert outputs == fl.networks.action_outputs(ACTIONS[action])


def test_a_channel_first_image_is_read_as_the_same_image_with_its_channels_last():
    last, weights = made(CNN, IMAGES["channel last"])
    first, _ = made(CNN, IMAGES["channel first"])
    obs = some_obs(IMAGES["channel last"])
    a, b = last.apply(weights, obs), first.apply(weights, np.moveaxis(obs, -1, 1))
    np.testing.assert_allclose(a[0].logits, b[0].logits, rtol=1e-5)
    np.testing.assert_allclose(a[1], b[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("side", "size", "stride"), [(84, 8, 4), (9, 4, 2), (10, 3, 1), (11, 2, 3)]
)
def test_the_product_of_matrices_is_the_convolution(side, size, stride):
    layer = Convolution(3, 5, size, stride, rngs=nnx.Rngs(0))
    x, kernel = jax.random.normal(jax.random.key(0), (2, side, side + 1, 3)), layer.kernel[...]

    @jax.jit
    def both(x, kernel):
        (a, back_a), (b, back_b) = (
            jax.vjp(layer._product, x, kernel),
            jax.vjp(layer._convolution, x, kernel),
        )
        return (a, *back_a(b)), (b, *back_b(b))

    for ours, oracle in zip(*both(x, kernel), strict=True):
        np.testing.assert_allclose(ours, oracle, rtol=1e-4, atol=1e-4)


def test_bytes_are_divided_by_255():
    as_bytes, weights = made(CNN, Box(0, 255, (9, 8, 1), np.uint8))
    as_floats, _ = made(CNN, Box(0, 1, (9, 8, 1)))
    obs = some_obs(Box(0, 255, (9, 8, 1), np.uint8))
    np.testing.assert_allclose(
        as_bytes.apply(weights, obs)[1],
        as_floats.apply(weights, obs / np.float32(255))[1],
        rtol=1e-5,
    )


def test_a_discrete_observation_is_read_as_one_of_n():
    net, weights = made(fl.Policy(fl.networks.MLP, hidden=()), Discrete(4, start=-1))
    logits = net.apply(weights, np.array([-1, 2, 0]))[0].logits
    np.testing.assert_allclose(
        logits,
        (weights.params["heads/action/kernel"] + weights.params["heads/action/bias"])[
            np.array([0, 3, 1])
        ],
        rtol=1e-6,
    )


def test_gaussian_deviations_are_parameters_that_do_not_depend_on_the_observation():
    net, weights = initial(
        fl.Policy(fl.networks.MLP, hidden=(4,), log_std=-0.7), BOX, ACTIONS["box"]
    )
    np.testing.assert_allclose(net.apply(weights, some_obs(BOX))[0].log_std, np.full((N, 2), -0.7))
    assert weights.params["heads/log_std"].shape == (2,)


def test_a_fresh_policy_prefers_no_action():
    net, weights = initial(MLP)
    np.testing.assert_allclose(
        jax.nn.softmax(net.apply(weights, some_obs(BOX))[0].logits), 1 / 3, atol=0.02
    )


def test_a_shared_trunk_has_fewer_parameters():
    apart, together = (
        made(fl.Policy(fl.networks.MLP, hidden=(4, 4), shared=shared))[1].params
        for shared in (False, True)
    )
    assert sum(p.size for p in apart.values()) - sum(p.size for p in together.values()) == (
        3 * 4 + 4
    ) + (4 * 4 + 4)
    assert not [name for name in together if name.startswith("critic")]


def test_weights_have_readable_names():
    _, weights = made(fl.Policy(fl.networks.MLP, hidden=(4, 4), normalize=True))
    trunks = [
        f"{trunk}/layers/{i}/{part}"
        for trunk in ("actor", "critic")
        for i in (0, 1)
        for part in ("bias", "kernel")
    ]
    assert sorted(weights.params) == sorted(
        [
            *trunks,
            *[
                f"heads/{head}/{part}"
                for head in ("action", "value")
                for part in ("bias", "kernel")
            ],
        ]
    )
    assert sorted(weights.rest) == ["encoder/norm/count", "encoder/norm/mean", "encoder/norm/var"]


def test_init_is_a_function_of_the_key():
    net, weights = initial(MLP)
    for seed, same in ((0, True), (1, False)):
        again = net.init(jax.random.key(seed))
        assert again.params.keys() == weights.params.keys()
        assert (
            again.params["actor/layers/0/kernel"] == weights.params["actor/layers/0/kernel"]
        ).all() == same


def test_equal_policies_and_spaces_share_one_network():
    a = network(fl.Policy(fl.networks.MLP, hidden=(4,)), Spaces(Box(-1, 1, (3,)), Discrete(3)))
    assert a is network(
        fl.Policy(fl.networks.MLP, hidden=(4,)), Spaces(Box(-1, 1, (3,)), Discrete(3))
    )
    assert a is not network(
        fl.Policy(fl.networks.MLP, hidden=(5,)), Spaces(Box(-1, 1, (3,)), Discrete(3))
    )


# -- a user's own module


class Own(nnx.Module):
    def __init__(self, obs_space, action_space, *, outputs=None, gain=1.0, rngs):
        size = int(np.prod(obs_space.shape))
        self.policy = nnx.Linear(
            size,
            fl.networks.action_outputs(action_space) if outputs is None else outputs,
            rngs=rngs,
        )
        self.value = nnx.Linear(size, 1, rngs=rngs)
        self.gain = gain

    def __call__(self, obs):
        x = obs.reshape(len(obs), -1)
        return self.gain * self.policy(x), self.value(x)[:, 0]


class WideValue(Own):
    def __call__(self, obs):
        outputs, value = super().__call__(obs)
        return outputs, value[:, None]


class OnlyOutputs(Own):
    def __call__(self, obs):
        return self.policy(obs)


class Broken:
    def __init__(self, obs_space, action_space, *, rngs, size):
        raise ZeroDivisionError(f"size {size}")


class TwoParts(nnx.Module):
    """Two parameters, one of which stands in a part named `value`."""

    def __init__(self, obs_space, action_space, *, rngs):
        self.kernel = nnx.Param(jnp.ones((3, 3)))
        self.value = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, obs):
        return obs @ self.kernel[...], self.value(obs)[:, 0]


@pytest.mark.parametrize("action", ["discrete", "box"])
def test_a_module_of_the_user_s_own_needs_no_base_class(action):
    assert_acts(fl.Policy(Own, gain=0.5), BOX, ACTIONS[action])


def test_every_parameter_of_a_module_has_a_name_of_its_own():
    _, weights = made(fl.Policy(TwoParts))
    assert sorted(v.shape for v in weights.params.values()) == [(1,), (3, 1), (3, 3)]


ERRORS = {
    "too few outputs": (
        fl.Policy(Own, outputs=2),
        BOX,
        DISCRETE,
        (
            r"^Own gave outputs \(3, 2\) and value \(3,\) for 3 observations; actions in .* need "
            r"outputs \(3, 3\) and value \(3,\) .*fl.networks.action_outputs"
        ),
    ),
    "no deviations": (
        fl.Policy(Own, outputs=2),
        BOX,
        ACTIONS["box"],
        r"outputs \(3, 2\) .* need outputs \(3, 4\)",
    ),
    "a value with an axis too many": (
        fl.Policy(WideValue),
        BOX,
        DISCRETE,
        r"WideValue gave outputs \(3, 3\) and value \(3, 1\) .* need .* value \(3,\)",
    ),
    "no value": (
        fl.Policy(OnlyOutputs),
        BOX,
        DISCRETE,
        r"OnlyOutputs must return \(action outputs, value\), but it returned one array",
    ),
    "a constructor that fails": (
        fl.Policy(Broken, size=4),
        BOX,
        DISCRETE,
        r"Broken\(Box.*, Discrete\(3\), rngs=..., size=4\) failed: ZeroDivisionError: size 4",
    ),
    "an unknown activation": (
        fl.Policy(fl.networks.MLP, activation="selu"),
        BOX,
        DISCRETE,
        "activation must be one of tanh, relu, silu, gelu, got 'selu'",
    ),
    "an image too small": (
        fl.Policy(fl.networks.CNN),
        Box(0, 255, (8, 9, 3), np.uint8),
        DISCRETE,
        (
            r"images of \(8, 9\) are too small for kernels \(8, 4, 3\) with strides \(4, 2, 1\); "
            r"give smaller ones"
        ),
    ),
    "an image too small, channel first": (
        fl.Policy(fl.networks.CNN),
        Box(0, 255, (3, 8, 9), np.uint8),
        DISCRETE,
        r"images of \(8, 9\) are too small",
    ),
    "fewer strides than kernels": (
        fl.Policy(fl.networks.CNN, strides=(4, 2)),
        Box(0, 255, (40, 40, 3), np.uint8),
        DISCRETE,
        r"give as many of each; got channels=\(32, 64, 64\), kernels=\(8, 4, 3\), strides=\(4, 2\)",
    ),
    "kernels of one's own that don't fit": (
        fl.Policy(fl.networks.QNetwork, kernels=(4, 2, 3)),
        Box(0, 255, (7, 7, 3), np.uint8),
        DISCRETE,
        (
            r"images of \(7, 7\) are too small for kernels \(4, 2, 3\) with strides \(4, 2, 1\); "
            r"give smaller ones"
        ),
    ),
    "kernels for what is no image": (
        fl.Policy(fl.networks.QNetwork, kernels=(3,)),
        BOX,
        DISCRETE,
        r"not Box\(.*; take MLP, or QNetwork without kernels",
    ),
    "action values of images, normalised": (
        fl.Policy(fl.networks.QNetwork, normalize=True),
        Box(0, 255, (84, 84, 4), np.uint8),
        DISCRETE,
        (
            "QNetwork has convolutions for images, which divide bytes by 255 in place of running "
            "moments; leave normalize out"
        ),
    ),
    "a number, normalised": (
        fl.Policy(fl.networks.MLP, normalize=True),
        Discrete(4),
        DISCRETE,
        r"Discrete\(4\) are read one-hot.*; leave normalize out",
    ),
    "squashed actions without bounds": (
        fl.Policy(fl.networks.SACNetwork),
        BOX,
        Box(np.array([-1, 0], np.float32), np.array([1, np.inf], np.float32)),
        (
            r"SACNetwork has actions in \[-1, 1\].* not finite; give it finite ones "
            r".*TransformAction\(env, func, action_space=Box.*fl.networks.MLP with ppo"
        ),
    ),
    "no image": (
        CNN,
        BOX,
        DISCRETE,
        r"convolutions read images with 3 axes, not Box\(.*; take MLP",
    ),
    "no image but a number": (
        CNN,
        Discrete(4),
        DISCRETE,
        r"convolutions read images with 3 axes, not Discrete\(4\); take MLP",
    ),
    "observations that are no array": (
        MLP,
        gym.spaces.Dict(a=gym.spaces.Text(3)),
        DISCRETE,
        r"stock networks read Box, .* and a Dict or Tuple of these, not Text",
    ),
    "observations that are no array, own module": (
        fl.Policy(TwoParts),
        gym.spaces.Text(3),
        DISCRETE,
        r"observations in Text.* are no array of one shape; .*TransformObservation",
    ),
    "actions that are no array": (
        MLP,
        BOX,
        gym.spaces.Tuple([DISCRETE, gym.spaces.Text(3)]),
        r"there is no policy for actions in Text.*; it can be Discrete",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_is_named(name):
    policy, obs, action, text = ERRORS[name]
    with pytest.raises(fl.errors.PolicyError, match=text):
        Network(policy, Spaces(obs, action))


def test_a_policy_takes_a_class():
    with pytest.raises(
        fl.errors.SettingError, match="^Policy takes a function or a class first, got 'mlp'$"
    ):
        fl.Policy("mlp")
    with pytest.raises(fl.errors.SettingError, match="takes a function or a class first, got None"):
        fl.Policy()


# -- acting


@pytest.mark.parametrize("action", ["discrete", "multi-discrete", "box of two axes"])
def test_act_packs_actions_with_their_log_probability_and_value(action):
    net, weights = made(fl.Policy(Own), BOX, ACTIONS[action])
    obs, key = some_obs(BOX), jax.random.key(1)

    @jax.jit
    def both(weights, obs, turn):
        dist, value, _ = net.apply(weights, obs)
        noise = net.noise(
            key, turn, jnp.arange(len(obs)), steps=2, envs=len(obs), explore=fl.Sampled()
        )[1]
        drawn = dist.sample(net.head.noise(jax.random.fold_in(key, turn + 1), len(obs)))
        greedy, _ = net.act(weights, obs)
        return (
            net.act(weights, obs, noise)[0],
            greedy,
            (drawn, dist.log_prob(drawn), value),
            (dist.mode(), dist.log_prob(dist.mode()), value),
        )

    packed, greedy, wanted, mode = both(weights, obs, 3)
    for array, parts in ((packed, wanted), (greedy, mode)):
        for found, want in zip(net.unpack(np.asarray(array)), parts, strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    assert (
        net.unpack(np.asarray(packed))[0].dtype
        == net.action_dtype
        == (np.float32 if "box" in action else np.int32)
    )
    other = both(weights, obs, 4)
    assert (np.asarray(other[0])[:, :-2] != np.asarray(packed)[:, :-2]).any()
    np.testing.assert_array_equal(other[1], greedy)


def test_unpack_also_takes_whole_rollouts():
    net, _ = made(MLP, BOX, ACTIONS["multi-discrete"])
    packed = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    action, logp, value = net.unpack(packed)
    assert action.shape == (2, 3, 2) and action.dtype == np.int32
    np.testing.assert_array_equal(
        np.concatenate([action, logp[..., None], value[..., None]], -1), packed
    )


# -- the running normaliser


def batches():
    rng = np.random.default_rng(0)
    return [(rng.normal(5, 3, (20, 3)).astype(np.float32), rng.random(20) < 0.6) for _ in range(4)]


def assert_moments_are_those_of(rest, x):
    np.testing.assert_allclose(rest["encoder/norm/mean"], x.mean(0), rtol=1e-3)
    np.testing.assert_allclose(rest["encoder/norm/var"], x.var(0), rtol=1e-3)
    np.testing.assert_allclose(rest["encoder/norm/count"], len(x), rtol=1e-5)


NORMALIZED = fl.Policy(fl.networks.MLP, hidden=(4,), normalize=True)


def test_moments_equal_those_of_all_valid_rows_ever_seen():
    net, weights = made(NORMALIZED)
    observe = jax.jit(net.observe)
    for obs, valid in batches():
        weights = Weights(
            weights.params,
            observe(weights, np.where(valid[:, None], obs, 1e6).astype(np.float32), valid),
        )
    assert_moments_are_those_of(
        weights.rest, np.concatenate([obs[valid] for obs, valid in batches()]).astype(float)
    )


@pytest.mark.parametrize("filler", [1e30, np.nan])
def test_moments_ignore_invalid_rows_whatever_they_hold(filler):
    net, weights = made(NORMALIZED)
    obs, valid = batches()[0]
    rest = jax.jit(net.observe)(
        weights, np.where(valid[:, None], obs, filler).astype(np.float32), valid
    )
    assert_moments_are_those_of(rest, obs[valid].astype(float))


def test_a_batch_without_a_valid_row_leaves_the_moments():
    net, weights = made(NORMALIZED)
    rest = jax.jit(net.observe)(weights, batches()[0][0], np.zeros(20, bool))
    for name, number in weights.rest.items():
        np.testing.assert_allclose(rest[name], number, rtol=1e-6)


def test_the_normaliser_shifts_scales_and_clips():
    norm = fl.networks.RunningNorm((2,), clip=2.0)
    norm.mean[...], norm.var[...] = jnp.array([1.0, -1.0]), jnp.array([4.0, 0.25])
    np.testing.assert_allclose(
        norm(jnp.array([[2.0, -0.5], [-99.0, 99.0]])), [[0.5, 1.0], [-2.0, 2.0]], rtol=1e-5
    )


def test_acting_looks_through_the_moments_and_does_not_change_them():
    net, weights = made(NORMALIZED)
    plain, _ = made(MLP)
    obs = some_obs(BOX)
    moved = weights._replace(
        rest={
            **weights.rest,
            "encoder/norm/mean": jnp.full(3, 0.5),
            "encoder/norm/var": jnp.full(3, 4.0),
        }
    )
    _, value, rest = net.apply(moved, obs)
    np.testing.assert_allclose(
        value, plain.apply(Weights(weights.params, {}), (obs - 0.5) / 2)[1], rtol=1e-4
    )
    for name, number in moved.rest.items():
        np.testing.assert_array_equal(rest[name], number)


def test_layers_are_found_anywhere_in_the_module_by_their_paths():
    assert made(NORMALIZED)[0].layers(fl.networks.RunningNorm) == ["encoder/norm"]
    assert made(MLP)[0].layers(fl.networks.RunningNorm) == []


merge = jax.jit(merge_moments)
rows = arrays(np.float32, (6, 2), elements=st.floats(-100, 100, width=32))


@settings(max_examples=60, deadline=None)
@given(
    rows,
    arrays(np.float32, 6, elements=st.sampled_from([0, 1, 2, 5])),
    rows,
    arrays(np.float32, 6, elements=st.sampled_from([0, 1, 3])),
)
def test_merged_moments_are_those_of_all_rows_by_weight(x, wx, y, wy):
    moments = merge(merge((jnp.zeros(2), jnp.zeros(2), jnp.float32(1e-6)), x, wx), y, wy)
    every, weight = np.concatenate([x, y]).astype(float), np.append(wx, wy).astype(float)
    assert np.isfinite(moments[0]).all() and (moments[1] >= -1e-3).all()
    if weight.sum():
        mean = (every * weight[:, None]).sum(0) / weight.sum()
        var = ((every - mean) ** 2 * weight[:, None]).sum(0) / weight.sum()
        np.testing.assert_allclose(moments[0], mean, atol=1e-2)
        np.testing.assert_allclose(moments[1], var, rtol=1e-3, atol=1e-1)
        np.testing.assert_allclose(moments[2], weight.sum(), rtol=1e-5)


def test_moments_of_weights_that_sum_to_less_than_one():
    mean, var, count = merge(
        (jnp.zeros(1), jnp.zeros(1), jnp.float32(1e-6)),
        jnp.array([[2.0], [4.0]]),
        jnp.array([0.25, 0.25]),
    )
    np.testing.assert_allclose([mean[0], var[0], count], [3, 1, 0.5], rtol=1e-3)


def test_policies_whose_settings_differ_in_type_alone_are_two():
    policy = partial(fl.Policy, lambda *spaces, **settings: None)
    one, other = policy(slope=0), policy(slope=0.0)
    assert one != other and one != policy(slope=False) and one == policy(slope=0)
    assert policy(sizes=(0,)) != policy(sizes=(0.0,))
    table = np.arange(3)
    assert policy(table=table) == policy(table=table.copy()) != policy(table=table + 1)


def test_the_first_weights_of_many_runs_are_those_of_each_and_need_no_batches_of_qr():
    """On a CPU with few cores XLA can wait for ever over several such batches at once."""
    net = network(fl.Policy(fl.networks.MLP, hidden=(4, 4)), Spaces(BOX, gym.spaces.Discrete(2)))
    keys = jax.random.split(jax.random.key(0), 3)
    many = jax.vmap(net.init)(keys)
    for i, key in enumerate(keys):
        one = net.init(key)
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), many, one)
    text = jax.jit(jax.vmap(net.init)).lower(keys).as_text()
    batches = [line for line in text.splitlines() if "lapack_sgeqrf" in line]
    assert batches and all('num_batch_dims = "0"' in line for line in batches)


@pytest.mark.parametrize("hidden", [64, "64,64", (-1,), (1.5,), None, (0, 64)])
@pytest.mark.parametrize(
    "make",
    [
        lambda hidden: fl.ppo("CartPole-v1", policy=fl.Policy(fl.networks.MLP, hidden=hidden)),
        lambda hidden: fl.dqn("CartPole-v1", hidden=hidden),
        lambda hidden: fl.r2d2("CartPole-v1", hidden=hidden),
    ],
)
def test_what_is_no_widths_of_layers_is_refused(make, hidden):
    says = re.escape(f"whole numbers of at least 1, such as (64, 64); got {hidden!r}")
    with pytest.raises(fl.errors.CheckError, match=says):
        make(hidden).compile()


def test_a_network_whose_heads_read_a_layer_needs_one():
    with pytest.raises(fl.errors.CheckError, match=r"such as \(64, 64\); got \[\]"):
        fl.dqn("CartPole-v1", hidden=[]).compile()
    fl.ppo("CartPole-v1", policy=fl.Policy(fl.networks.MLP, hidden=())).compile()


class Seen(gym.Env):
    """Shows images of bytes, and is steered by numbers."""

    observation_space = gym.spaces.Box(0, 255, (40, 40, 1), np.uint8)
    action_space = gym.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}


@pytest.mark.parametrize("name", ["sac", "td3", "iql", "cql", "bc", "marwil"])
def test_graphs_for_actions_in_a_box_read_images_by_convolutions(name):
    graph = getattr(fl, name)(Seen)
    graph.compile()
    policy = graph.resources["learner"].policy
    net = network(policy, Spaces(Seen.observation_space, Seen.action_space))
    params = jax.eval_shape(net.init, jax.random.key(0)).params
    assert any(x.ndim == 4 for x in params.values()), "no kernel of a convolution"
    if name not in ("bc", "marwil"):
        with pytest.raises(fl.errors.CheckError, match=r"normalize"):
            getattr(fl, name)(Seen, normalize=True).compile()


@pytest.mark.parametrize("kind", [fl.networks.SACNetwork, fl.networks.TD3Network])
def test_convolutions_before_critics_learn_nothing_from_the_actor(kind):
    module = kind(Seen.observation_space, Seen.action_space, hidden=(8,), rngs=nnx.Rngs(0))
    obs = np.random.default_rng(0).integers(256, size=(3, 40, 40, 1), dtype=np.uint8)
    action = jnp.full((3, 2), 0.5)

    def learning(function):
        """Return which layers have a gradient, by the first part of their names."""
        found = nnx.jit(nnx.grad(lambda m: (function(m) ** 2).sum()))(module)
        return {path[0] for path, x in nnx.to_flat_state(found) if np.any(x[...])}

    assert learning(lambda m: m(obs)[0]) == {"actor", "action"}
    assert learning(lambda m: m.critic(obs, action)) == {"encoder", "critics", "values"}


def test_cloning_does_not_train_convolutions_that_only_critics_do():
    policy = fl.Policy(fl.networks.SACNetwork, hidden=(8,))
    with pytest.raises(
        fl.errors.CheckError,
        match=r"the convolutions of SACNetwork learn from its critics' loss, and BCLoss trains no "
        r"critics; take fl\.networks\.MLP",
    ):
        fl.bc(Seen, policy=policy).compile()
