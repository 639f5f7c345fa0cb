"""TD3's loss against a slow loop, and its optimisers against optax run apart for each group."""

import itertools

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

import flowrl as fl
from flowrl.core.arguments import Values, substituted, with_arguments
from flowrl.graph.values import from_text, to_text
from flowrl.learner.core import core_of
from flowrl.rl.distributions import TanhGaussian
from flowrl.rl.function_loss import call_loss
from flowrl.rl.policies import Weights, network
from flowrl.rl.spaces import Spaces

N, WIDTH, CRITICS = 12, 2, 3
OBS, ACTION = gym.spaces.Box(-1, 1, (4,)), gym.spaces.Box(-2, 2, (2,))
SPACES = Spaces(OBS, ACTION)
POLICY = fl.Policy(fl.networks.TD3Network, hidden=(8,))


def policy(params, obs, action=None, count=None, method=""):
    """An actor and three critics that are linear in observation and action."""
    if method:
        return jnp.stack(
            [obs @ w + action @ v for w, v in zip(params["w"], params["v"], strict=False)][:count]
        )
    mean = obs @ params["actor"]
    return TanhGaussian(mean, jnp.zeros_like(mean)), jnp.zeros(obs.shape[0])


def example(seed=0):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)
    made = lambda: {"actor": f(4, WIDTH) / 2, "w": f(CRITICS, 4), "v": f(CRITICS, WIDTH)}
    return made(), {
        "obs": f(N, 4),
        "next_obs": f(N, 4),
        "action": np.tanh(f(N, WIDTH)),
        "reward": f(N),
        "weight": rng.random(N).astype(np.float32),
        "discount": np.float32(0.9) * (rng.random(N) < 0.7),
        "valid": np.arange(N) % 4 != 3,
        "seed": rng.integers(2**32, size=(N, 2), dtype=np.uint32),
        "target_params": made(),
    }


@pytest.mark.parametrize(("noise", "most"), [(0.2, 0.5), (1.5, 0.1), (0.0, 0.5)])
def test_the_loss_is_what_a_loop_over_rows_finds(noise, most):
    params, b = example()
    losses, metrics = fl.losses.TD3Loss(noise, most)(policy, params, b)
    judge = lambda p, obs, a: np.array(
        [obs @ w + a @ v for w, v in zip(p["w"], p["v"], strict=False)]
    )
    critic = actor = 0.0
    for i in np.flatnonzero(b["valid"]):
        drawn = jax.random.normal(jax.random.wrap_key_data(b["seed"][i]), (WIDTH,))
        noisy = np.tanh(b["next_obs"][i] @ b["target_params"]["actor"])
        noisy = np.clip(noisy + np.clip(noise * np.asarray(drawn), -most, most), -1, 1)
        following = judge(b["target_params"], b["next_obs"][i], noisy).min()
        target = b["reward"][i] + b["discount"][i] * following
        error = judge(params, b["obs"][i], b["action"][i]) - target
        np.testing.assert_allclose(metrics["priority"][i], abs(error).mean(), rtol=1e-4)
        critic += b["weight"][i] * (error**2).sum()
        actor -= judge(params, b["obs"][i], np.tanh(b["obs"][i] @ params["actor"]))[0]
    n = b["valid"].sum()
    assert list(losses) == ["critic", "actor"]
    np.testing.assert_allclose(losses["critic"], critic / n, rtol=1e-4)
    np.testing.assert_allclose(losses["actor"], actor / n, rtol=1e-4)


def test_the_actor_trains_no_critic_and_the_critics_train_no_actor():
    params, b = example()
    whole = jax.grad(lambda p: call_loss(fl.losses.TD3Loss(), policy, p, b)[0])(params)
    part = {
        name: jax.grad(lambda p, name=name: fl.losses.TD3Loss()(policy, p, b)[0][name])(params)
        for name in ("critic", "actor")
    }
    np.testing.assert_allclose(whole["w"], part["critic"]["w"], rtol=1e-5)
    np.testing.assert_allclose(whole["actor"], part["actor"]["actor"], rtol=1e-5)
    assert part["actor"]["actor"].any() and not part["actor"]["w"].any()
    assert part["critic"]["w"].any() and not part["critic"]["actor"].any()


def test_the_actor_learns_by_one_critic_and_no_other_is_computed_for_it():
    def products(critics):
        made = fl.Policy(fl.networks.TD3Network, hidden=(8, 8), critics=critics)
        net = network(made, SPACES)
        weights = net.init(jax.random.key(0))

        def bound(params, *args, method=""):
            now = Weights(params, weights.rest)
            return net.call(method, now, *args)[0] if method else net.apply(now, *args)[:2]

        batch = {**example()[1], "target_params": weights.params}
        actor = lambda params: fl.losses.TD3Loss()(bound, params, batch)[0]["actor"]
        return jax.jit(jax.grad(actor)).lower(weights.params).compile().as_text().count(" dot(")

    assert products(1) == products(4) > 6


# -- the optimisers of groups


def batch_of(n=16, seed=0):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=(1, n, *shape)).astype(np.float32)
    return {
        "obs": f(4),
        "next_obs": f(4),
        "action": np.tanh(f(2)),
        "reward": f(),
        "discount": np.full((1, n), 0.9, np.float32),
        "valid": np.ones((1, n), bool),
    }


def updated(core, steps, **settings):
    """The state after so many updates, the first included."""
    states = [core.init(jax.random.key(0))]
    update = jax.jit(lambda s, data: core.update(s["weights"], s, data, {}, **settings)[0])
    for step in range(steps):
        states.append(update(states[-1], batch_of(seed=step)))
    return states


def moved(before, after):
    """By what the parameters' names begin with, whether they changed."""
    firsts = {}
    for name, x in before["weights"].params.items():
        changed = bool((x != after["weights"].params[name]).any())
        firsts.setdefault(name.partition("/")[0], []).append(changed)
    return {name: any(each) for name, each in firsts.items()}


def test_a_group_steps_when_it_is_due_and_then_as_its_optimiser_does_alone():
    groups = fl.Optimizers(actor=fl.Adam(1e-2), critic=fl.SGD(0.1), every={"actor": 3})
    states = updated(
        core_of(POLICY, SPACES, fl.losses.TD3Loss(), groups), 6, epochs=1, minibatch_size=16
    )
    for step, (before, after) in enumerate(itertools.pairwise(states)):
        due = step % 3 == 2
        wanted = {"actor": due, "action": due, "critics": True, "values": True}
        assert moved(before, after) == wanted
        assert after["opt"].groups["actor"][0].count == (step + 1) // 3
    # The critics' target holds no newest parameter of the actor, so that they learn as if alone.
    core = core_of(POLICY, SPACES, fl.losses.TD3Loss(), fl.SGD(0.1))
    for state, alone in zip(states, updated(core, 6, epochs=1, minibatch_size=16), strict=True):
        for name, x in state["weights"].params.items():
            if name.startswith(("critics", "values")):
                np.testing.assert_allclose(x, alone["weights"].params[name], rtol=1e-5)


def test_a_group_that_rests_takes_no_step_though_others_computed_its_gradient():
    """As samplers do, which have no state of the optimiser."""
    groups = fl.Optimizers(actor=fl.SGD(1.0), critic=fl.SGD(1.0), every={"actor": 2})
    params = {"actor/kernel": jnp.zeros(2), "critics/kernel": jnp.zeros(2)}
    rule = groups.build(groups.members(params, {"critic": ("critics",)}))
    gradients, state = jax.tree.map(jnp.ones_like, params), rule.init(params)
    for actor in (0.0, -1.0, 0.0):
        updates, state = rule.update(gradients, state, params)
        assert updates["actor/kernel"].tolist() == [actor] * 2
        assert updates["critics/kernel"].tolist() == [-1.0] * 2


def test_groups_that_rest_at_different_times_step_as_a_loop_over_groups_does():
    """Each is clipped by its own norm, and what rests stays where it is."""
    rates, most = {"a": 0.1, "b": 0.2, "c": 0.3}, {"a": 0.5, "b": 1.0, "c": 2.0}
    every = {"a": 2, "b": 3}
    groups = fl.Optimizers(
        **{name: fl.SGD(rates[name], max_grad_norm=most[name]) for name in rates}, every=every
    )
    # The loss is |a - b|^2 + |b - c|^2 + |c - a|^2.
    after = {"a": "b", "b": "c", "c": "a"}
    wanted = {name: np.float64([i + 1, 3 - 2 * i]) for i, name in enumerate(rates)}
    params = {f"{name}/kernel": jnp.float32(x) for name, x in wanted.items()}
    members = groups.members(params, {})
    rule, seen = groups.build(members), []

    def loss(params, resting):
        seen.append(resting)
        distances = [params[f"{a}/kernel"] - params[f"{b}/kernel"] for a, b in after.items()]
        return sum(jnp.sum(x**2) for x in distances), ()

    state = rule.init(params)
    for step in range(1, 7):
        _, gradients = groups.gradients(loss, params, state, members)
        updates, state = rule.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        moved = {}
        for name, x in wanted.items():
            before = next(a for a, b in after.items() if b == name)
            gradient = 2 * (x - wanted[after[name]]) + 2 * (x - wanted[before])
            size = np.sqrt(np.sum(gradient**2))
            share = min(1.0, most[name] / size) if step % every.get(name, 1) == 0 else 0.0
            moved[name] = x - rates[name] * share * gradient
            found = gradients[f"{name}/kernel"]
            np.testing.assert_allclose(found, gradient * (share > 0), rtol=1e-4, atol=1e-5)
        wanted = moved
        for name, x in wanted.items():
            np.testing.assert_allclose(params[f"{name}/kernel"], x, rtol=1e-5)
    assert set(seen) == {frozenset(x) for x in ("", "a", "b", "ab")}


def test_gradient_steps_within_an_update_count_for_what_is_due():
    groups = fl.Optimizers(actor=fl.Adam(1e-2), critic=fl.Adam(1e-2), every={"actor": 2})
    core = core_of(POLICY, SPACES, fl.losses.TD3Loss(), groups)
    # 4 minibatches in each of 3 epochs.
    state = updated(core, 1, epochs=3, minibatch_size=4, shuffle=False)[-1]
    assert state["opt"].count == 12
    assert state["opt"].groups["actor"][0].count == 6
    assert state["opt"].groups["critic"][0].count == 12


def test_what_is_not_due_computes_no_gradient():
    """The update of the critics alone has fewer multiplications than that of both."""

    def multiplications(every):
        groups = fl.Optimizers(actor=fl.SGD(0.1), critic=fl.SGD(0.1), every=every)
        core = core_of(POLICY, SPACES, fl.losses.TD3Loss(), groups)
        state = core.init(jax.random.key(0))
        text = jax.make_jaxpr(
            lambda s: core.update(s["weights"], s, batch_of(), {}, epochs=1, minibatch_size=16)[:2]
        )(state)
        return branches(text.jaxpr)

    def branches(jaxpr):
        """The numbers of matrix products in the branches of the gradients."""
        found = []
        for equation in jaxpr.eqns:
            if equation.primitive.name == "cond":
                found.append([str(b).count("dot_general") for b in equation.params["branches"]])
            for inner in jaxprs_in_params(equation.params):
                found += branches(inner)
        return found

    counts = max(multiplications({"actor": 2}), key=max)
    both, critics = counts
    assert critics < both
    assert not [count for count in multiplications({}) if max(count)]


RESTS = fl.Optimizers(actor=fl.SGD(0.1), critic=fl.SGD(0.1), every={"actor": 2})


class Sum(fl.losses.TD3Loss):
    """The same loss as one number, which no group can leave out."""

    def __call__(self, policy, params, batch):
        parts, metrics = super().__call__(policy, params, batch)
        return parts["critic"] + parts["actor"], metrics


class Unending(fl.losses.TD3Loss):
    """A loss whose part for the actor is not finite."""

    def __call__(self, policy, params, batch):
        parts, metrics = super().__call__(policy, params, batch)
        return parts | {"actor": parts["actor"] / 0}, metrics


def test_the_part_of_a_group_that_rests_is_not_computed():
    def products(loss):
        core = core_of(POLICY, SPACES, loss, RESTS)
        state = core.init(jax.random.key(0))
        update = lambda s: core.update(s["weights"], s, batch_of(), {}, epochs=1, minibatch_size=16)
        return jax.jit(lambda s: update(s)[0]).lower(state).compile().as_text().count(" dot(")

    # The actor's three layers and one critic's; of a loss that is one number they are in both.
    assert products(fl.losses.TD3Loss()) <= products(Sum()) - 4


def test_a_loss_that_is_not_finite_counts_where_its_group_is_due():
    core = core_of(POLICY, SPACES, Unending(), RESTS)
    state, bad = core.init(jax.random.key(0)), []
    for _ in range(2):
        how = {"epochs": 1, "minibatch_size": 16}
        state, metrics, _ = core.update(state["weights"], state, batch_of(), {}, **how)
        found = dict(zip(metrics.names, metrics.values, strict=True))
        bad.append(bool(found["bad"]))
    assert bad == [False, True]


def test_a_part_of_the_loss_is_its_mean_over_the_steps_in_which_its_group_is_due():
    def found(steps, **how):
        core = core_of(POLICY, SPACES, fl.losses.TD3Loss(), RESTS)
        state, rows = core.init(jax.random.key(0)), []
        for step in range(steps):
            data = {k: x[:, 4 * step :][:, : how["rows"]] for k, x in batch_of().items()}
            state, metrics, _ = core.update(
                state["weights"], state, data, {}, epochs=1, minibatch_size=4, shuffle=False
            )
            rows.append(dict(zip(metrics.names, np.asarray(metrics.values), strict=True)))
        return rows

    alone, (whole,) = found(4, rows=4), found(1, rows=16)
    assert [np.isnan(row["loss/actor"]) for row in alone] == [True, False, True, False]
    actor = [row["loss/actor"] for row in alone][1::2]
    critic = [row["loss/critic"] for row in alone]
    # The noise of target actions is drawn by the update, so the critics' losses differ by it.
    assert np.isfinite(critic).all() and np.isfinite(whole["loss/critic"])
    np.testing.assert_allclose(whole["loss/actor"], np.mean(actor), rtol=0.05)
    total = whole["loss/critic"] + whole["loss/actor"] / 2
    np.testing.assert_allclose(whole["loss"], total, rtol=1e-5)


@pytest.mark.system
@pytest.mark.parametrize("runtime", ["local", "xla"])
def test_rows_show_the_losses_of_what_was_due(runtime):
    env = "Pendulum-v1" if runtime == "local" else "gymnax:Pendulum-v1"
    small = {"envs_per_runner": 1, "rollout_length": 4, "learning_starts": 16, "batch_size": 8}
    graph = fl.td3(env, **small, updates_per_step=0.25, hidden=(8,), report_every=1)
    with fl.run(graph, runtime=runtime) as run:
        rows = [row for row in itertools.islice(run, 12) if row["updates"]]
    for row in rows:
        assert np.isnan(row["loss/actor"]) == (row["updates"] % 2 == 1)
        due = 0.0 if np.isnan(row["loss/actor"]) else row["loss/actor"]
        np.testing.assert_allclose(row["loss"], row["loss/critic"] + due, rtol=1e-4)
    with fl.run(graph.set("report.every", 4), runtime=runtime) as run:
        row = next(row for row in run if row["updates"] >= 4)
    assert np.isfinite(row["loss/actor"])
    np.testing.assert_allclose(row["loss"], row["loss/critic"] + row["loss/actor"] / 2, rtol=1e-4)


def test_groups_print_compare_and_have_addresses():
    groups = fl.Optimizers(actor=fl.Adam(1e-4), critic=fl.Adam(fl.Linear(1e-3, 0.0, 9)))
    again = from_text(to_text(groups, defaults=True), what="value")
    assert again == groups and hash(again) == hash(groups)
    assert fl.Optimizers(actor=fl.Adam(1e-4), critic=fl.Adam(1e-4)) != groups
    graph = fl.td3().set("learner.optimizer.actor.lr", 5e-4)
    assert graph.resources["learner"].optimizer.groups["actor"].lr == 5e-4
    assert 'every={"actor": 2}' in repr(graph)


def test_its_numbers_are_arguments_of_what_is_compiled():
    found = {}
    groups = fl.Optimizers(actor=fl.Adam(1e-4), critic=fl.SGD(0.5), every={"actor": 2})
    general = with_arguments(groups, "optimizer", found)
    assert found["optimizer.actor.lr"] == 1e-4 and found["optimizer.critic.lr"] == 0.5
    other = fl.Optimizers(actor=fl.Adam(3e-4), critic=fl.SGD(0.1), every={"actor": 2})
    assert with_arguments(other, "optimizer", {}) == general
    values = Values({**found, "optimizer.actor.lr": 7.0})
    assert substituted(general, values).groups["actor"].lr == 7.0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (fl.Optimizers, "takes an optimiser for each group"),
        (lambda: fl.Optimizers(actor=1e-3), "actor must be an optimiser such as fl.Adam"),
        (lambda: fl.Optimizers(actor=optax.adam(1e-3)), "actor must be an optimiser such as"),
        (lambda: fl.Optimizers(a=fl.Adam(), every={"b": 2}), "every names b, but the groups are a"),
        (lambda: fl.Optimizers(a=fl.Adam(), every={"a": 0}), "at least 1, got a: 0"),
        (lambda: fl.losses.TD3Loss(-1.0), "must not be negative"),
        (lambda: fl.RandomStart(-1), "steps must not be negative"),
    ],
)
def test_wrong_settings_are_refused(make, says):
    with pytest.raises(fl.errors.SettingError, match=says):
        make()


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ({"actor": fl.Adam()}, "the parameter critics/.* is in no group of actor; the policy decl"),
        (
            {"actor": fl.Adam(), "action": fl.Adam(), "critic": fl.Adam()},
            "the parameter action/.* is in the groups actor and action",
        ),
        (
            {"actor": fl.Adam(), "critic": fl.Adam(), "valu": fl.Adam()},
            "no parameter is in the group valu; their names begin with action, actor",
        ),
        (
            {"actor": fl.Adam(), "critic": fl.Adam(), "temperature": fl.Adam()},
            "no parameter is in the group temperature; their names begin with action, actor",
        ),
    ],
)
def test_parameters_belong_to_exactly_one_group(groups, says):
    with pytest.raises(fl.errors.FlowrlError, match=says):
        fl.td3().set("learner.optimizer", fl.Optimizers(**groups)).check()


def test_a_policy_that_declares_no_groups_has_those_of_its_parameters_names():
    groups = fl.Optimizers(actor=fl.Adam(1e-3), critic=fl.SGD(0.1), heads=fl.Adam(1e-3))
    graph = fl.ppo().set("learner.optimizer", groups)
    try:
        graph.check()
    except fl.errors.FlowrlError as error:
        pytest.fail(str(error))


# -- exploration


def test_random_actions_come_first_and_then_those_of_the_other_exploration():
    head = SPACES.head
    explore = fl.RandomStart(10, fl.GaussianNoise(0.0))
    dist = head.distribution(jnp.concatenate([jnp.full((500, 2), 0.3), jnp.zeros((500, 2))], 1))
    noise = lambda step: explore.noise(
        head, jax.random.key(1), 500, jnp.float32(step), jnp.arange(500), 500
    )
    first = np.asarray(explore.pick(dist, noise(9)))
    assert first.min() < -0.95 and first.max() > 0.95 and abs(first.mean()) < 0.1
    assert first.std() == pytest.approx(3**-0.5, abs=0.03)
    np.testing.assert_allclose(explore.pick(dist, noise(10)), 0.3, rtol=1e-6)
    # Rows of one rollout are of different steps.
    mixed = np.asarray(explore.pick(dist, noise(np.arange(500) % 20)))
    random = np.arange(500) % 20 < 10
    np.testing.assert_array_equal((np.abs(mixed - 0.3) > 1e-4).all(1), random)


@pytest.mark.system
@pytest.mark.parametrize("runners", [1, 2])
def test_random_actions_come_first_in_environments_in_jax_too(runners):
    graph = fl.td3(
        "gymnax:Pendulum-v1",
        num_runners=runners,
        envs_per_runner=3,
        rollout_length=4,
        learning_starts=24 * runners,
        batch_size=8,
        updates_per_step=1 / 12,
        hidden=(8,),
        noise=0.0,
        report_every=4 * runners,
    )
    seen = []
    look = lambda rollout: seen.append(rollout["action"]) or rollout
    plan = graph.insert(after="sample", look=fl.Map(look)).compile()
    seen.clear()  # the plan's own rollouts hold no numbers
    with fl.run(plan) as run:
        next(run)
    jumps = [np.abs(np.diff(x, axis=0)).max() for x in seen]
    assert len(jumps) >= 4 and min(jumps[:2]) > 0.7, "two rollouts of random actions"
    assert max(jumps[2:]) < 0.5, "greedy actions change with the observation, slowly"


@pytest.mark.parametrize(
    ("graph", "explore", "says"),
    [
        (fl.td3("Pendulum-v1"), fl.Sampled(), "give runners explore=fl.GaussianNoise"),
        (fl.td3("Pendulum-v1"), fl.RandomStart(9), "give runners explore=fl.GaussianNoise"),
        (fl.dqn("CartPole-v1"), fl.RandomStart(9), "RandomStart is for actions in a Box"),
        (fl.ppo("Pendulum-v1"), fl.RandomStart(9), "act by RandomStart, for which PPOLoss"),
    ],
)
def test_an_exploration_that_does_not_fit_is_refused(graph, explore, says):
    with pytest.raises(fl.errors.FlowrlError, match=says):
        graph.set("runners.explore", explore).check()


def test_a_policy_without_critics_is_refused():
    policy = fl.Policy(fl.networks.MLP)
    graph = fl.td3("Pendulum-v1", policy=policy).set("learner.optimizer", fl.Adam())
    with pytest.raises(fl.errors.FlowrlError, match="TD3Loss needs a policy with critics"):
        graph.check()
