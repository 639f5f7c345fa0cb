"""Optimisers as settings do what the optax calls do, print, and come back from text."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flowrl as fl
from flowrl.graph.values import from_text, to_text
from flowrl.learner.checked import all_finite
from flowrl.rl.optimizers import Schedule, as_transformation

PARAMS = {"a": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array([[3.0]])}
GRADS = [{"a": jnp.array([x, 2.0, -x]), "b": jnp.array([[x - 1]])} for x in (0.3, -4.0, 1.0, 5.0)]


@partial(jax.jit, static_argnums=0)
def trained(tx):
    """The parameters after each of a few steps."""
    params, state, seen = PARAMS, tx.init(PARAMS), []
    for grads in GRADS:
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen


def clipped(norm, tx):
    return optax.chain(optax.clip_by_global_norm(norm), tx)


CASES = {
    "Adam": (fl.Adam(), optax.adam(3e-4, b1=0.9, b2=0.999, eps=1e-5)),
    "Adam, all set": (
        fl.Adam(1e-2, eps=1e-3, max_grad_norm=0.5, b1=0.8, b2=0.9),
        clipped(0.5, optax.adam(1e-2, b1=0.8, b2=0.9, eps=1e-3)),
    ),
    "Adam with weight decay": (
        fl.Adam(1e-2, max_grad_norm=1.0, weight_decay=0.1),
        clipped(1.0, optax.adamw(1e-2, eps=1e-5, weight_decay=0.1)),
    ),
    "Adam along a line": (
        fl.Adam(fl.Linear(1e-2, 1e-3, 3)),
        optax.adam(optax.linear_schedule(1e-2, 1e-3, 3), eps=1e-5),
    ),
    "RMSProp": (fl.RMSProp(), optax.rmsprop(7e-4, decay=0.99, eps=1e-5, initial_scale=1.0)),
    "RMSProp, all set": (
        fl.RMSProp(1e-2, decay=0.9, eps=0.1, max_grad_norm=0.5),
        clipped(0.5, optax.rmsprop(1e-2, decay=0.9, eps=0.1, initial_scale=1.0)),
    ),
    "SGD": (fl.SGD(), optax.sgd(1e-2)),
    "SGD, all set": (
        fl.SGD(0.1, momentum=0.9, max_grad_norm=2.0),
        clipped(2.0, optax.sgd(0.1, momentum=0.9)),
    ),
    "SGD along a cosine": (
        fl.SGD(fl.Cosine(0.1, 0.01, 3)),
        optax.sgd(optax.cosine_decay_schedule(0.1, 3, alpha=0.1)),
    ),
    "Optax": (fl.Optax(optax.lion, learning_rate=1e-2), optax.lion(learning_rate=1e-2)),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_the_optax_calls_written_by_hand(name):
    ours, by_hand = CASES[name]
    for found, wanted in zip(trained(as_transformation(ours)), trained(by_hand), strict=True):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, wanted)


def test_gradients_beyond_the_clip_are_scaled_to_its_norm_and_others_are_left():
    for scale, wanted in ((10.0, [-0.3, -0.4]), (0.01, [-0.03, -0.04])):
        tx = fl.SGD(1.0, max_grad_norm=0.5).build()
        grads = {"a": jnp.array([3.0 * scale]), "b": jnp.array([4.0 * scale])}
        updates, _ = tx.update(grads, tx.init(grads), grads)
        np.testing.assert_allclose([updates["a"][0], updates["b"][0]], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (fl.Linear(1.0, 0.0, 4), [1, 0.75, 0.5, 0.25, 0, 0]),
        (fl.Linear(0.0, 1.0, 4), [0, 0.25, 0.5, 0.75, 1, 1]),
        (fl.Cosine(1.0, 0.0, 4), [1, 0.853553, 0.5, 0.146447, 0, 0]),
        (fl.Cosine(1.0, 0.5, 4), [1, 0.926777, 0.75, 0.573223, 0.5, 0.5]),
        (fl.Cosine(0.0, 1.0, 4), [0, 0.146447, 0.5, 0.853553, 1, 1]),
    ],
    ids=str,
)
def test_schedules_go_from_start_to_end_and_stay_there(schedule, wanted):
    rate = schedule.build()
    np.testing.assert_allclose([rate(step) for step in range(6)], wanted, atol=1e-6)


@pytest.mark.parametrize("rate", [-0.1, 1e31, np.inf, np.nan])
@pytest.mark.parametrize("kind", [fl.Adam, fl.RMSProp, fl.SGD])
def test_a_rate_out_of_range_is_refused(kind, rate):
    with pytest.raises(
        fl.errors.SettingError,
        match=rf"^{kind.__name__}: lr must be from 0 to 1e\+30, got {re.escape(str(rate))}$",
    ):
        kind(rate)


@pytest.mark.parametrize("kind", [fl.Adam, fl.RMSProp, fl.SGD])
def test_both_ends_of_a_schedule_of_the_rate_are_in_its_range(kind):
    for schedule in (fl.Linear(1e31, 0.0, 3), fl.Cosine(0.0, 1e31, 3)):
        with pytest.raises(
            fl.errors.SettingError, match=rf"^{kind.__name__}: lr must be .*, got 1e"
        ):
            kind(schedule)


@pytest.mark.parametrize("eps", [0.0, 1e-45, -1e-8, np.inf, np.nan])
@pytest.mark.parametrize("kind", [fl.Adam, fl.RMSProp])
def test_an_eps_by_which_a_parameter_without_a_gradient_becomes_nan_is_refused(kind, eps):
    with pytest.raises(
        fl.errors.SettingError, match=rf"^{kind.__name__}: eps must be at least 1e-30, .* NaN$"
    ):
        kind(eps=eps)


@pytest.mark.parametrize("decay", [-0.1, 0.99999999, 1.0, 1.5])
@pytest.mark.parametrize(
    ("kind", "name"), [(fl.Adam, "b1"), (fl.Adam, "b2"), (fl.RMSProp, "decay")]
)
def test_a_decay_out_of_range_is_refused(kind, name, decay):
    with pytest.raises(
        fl.errors.SettingError,
        match=f"^{kind.__name__}: {name} must be from 0 to 0.999999, got {decay}$",
    ):
        kind(**{name: decay})


class Own(Schedule):
    def build(self):
        return lambda count: jnp.inf


KEEP_FINITE = (
    (fl.Adam(1e-3), True),
    (fl.Adam(1e-3, max_grad_norm=0.5, b1=0.0, b2=0.0, eps=1e-8), True),
    (fl.Adam(1e-3, b1=0.999999, b2=0.999999, eps=1e-30), True),
    (fl.Adam(fl.Linear(1.0, 0.0, 10)), True),
    (fl.RMSProp(1e-2, decay=0.0, eps=1e-8), True),
    (fl.Adam(1e-3, weight_decay=0.1), False),
    (fl.Adam(Own()), False),
    (fl.RMSProp(Own()), False),
    (fl.SGD(1e30), False),
)


@pytest.mark.parametrize(("optimizer", "keeps"), KEEP_FINITE)
def test_an_optimiser_that_says_so_stays_finite_by_the_largest_gradients(optimizer, keeps):
    assert optimizer.keeps_finite == keeps
    groups = fl.Optimizers(a=fl.Adam(), b=optimizer)
    assert groups.keeps_finite == keeps
    assert not fl.Optimizers(a=fl.Adam(), b=fl.Optax(optax.adam, learning_rate=0.1)).keeps_finite
    if not keeps:
        return
    # The square of 1e19 is near the largest float. Signs and zeros make the averages' worst case.
    tx = as_transformation(optimizer)
    params = {"a": jnp.array([0.0, 1e30, -1e-30])}
    state = tx.init(params)
    for step in range(60):
        gradients = {"a": jnp.array([1.0, -1.0, 0.0]) * jnp.float32(1e19 * (step % 7 == 0))}
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        assert all_finite((params, state)), (step, params, state)


@pytest.mark.parametrize("clip", [0, -1.0])
@pytest.mark.parametrize("kind", [fl.Adam, fl.RMSProp, fl.SGD])
def test_a_clip_that_would_stop_training_is_refused(kind, clip):
    with pytest.raises(
        fl.errors.SettingError,
        match=rf"^{kind.__name__}: max_grad_norm must be above 0 or None, got {clip}$",
    ):
        kind(max_grad_norm=clip)


@pytest.mark.parametrize(
    "wrong",
    ["adam", 3e-4, None, fl.Adam, optax.adam],
    ids=["str", "float", "None", "class", "function"],
)
def test_what_is_no_optimiser_is_refused(wrong):
    with pytest.raises(
        fl.errors.SettingError,
        match=r"^optimizer must be one such as fl.Adam\(3e-4\) or an optax transformation, got ",
    ):
        as_transformation(wrong)


def test_optax_takes_a_function():
    with pytest.raises(
        fl.errors.SettingError, match=r"^Optax takes a function or a class first, got 'lion'$"
    ):
        fl.Optax("lion")


@pytest.mark.parametrize(
    "own",
    [optax.sgd(0.1), optax.chain(optax.clip(1.0), optax.adam(1e-3)), optax.scale(-0.1)],
    ids=["sgd", "chain", "scale"],
)
def test_a_transformation_of_the_user_s_own_is_taken_as_it_is(own):
    assert as_transformation(own) is own


@pytest.mark.parametrize("defaults", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_text_brings_it_back(name, defaults):
    ours, _ = CASES[name]
    back = from_text(to_text(ours, defaults=defaults, strict=True), allow=["optax"])
    assert back == ours and type(back) is type(ours)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (fl.Adam(1e-3, max_grad_norm=0.5), "Adam(lr=0.001, max_grad_norm=0.5)"),
        (fl.SGD(fl.Linear(1e-2, 0.0, 10)), "SGD(lr=Linear(start=0.01, end=0.0, steps=10))"),
        (fl.RMSProp(), "RMSProp()"),
        (
            fl.Optax(optax.lion, learning_rate=1e-2),
            'Optax(load("optax._src.alias:lion"), learning_rate=0.01)',
        ),
    ],
    ids=str,
)
def test_it_prints_as_the_call_that_makes_it(value, text):
    assert to_text(value, defaults=False) == text


def test_code_of_others_comes_back_only_where_it_is_allowed():
    text = to_text(fl.Optax(optax.lion, learning_rate=1e-2), defaults=False)
    with pytest.raises(
        fl.errors.SaveError,
        match="this needs code from 'optax._src.alias', which is not flowrl's own; allow it with "
        "--import optax",
    ):
        from_text(text)


def test_a_transformation_of_the_user_s_own_has_no_text():
    with pytest.raises(fl.errors.SaveError, match=r"can't be written to a file"):
        to_text(optax.sgd(0.1), defaults=False, strict=True)


def test_a_schedule_takes_numbers_of_numpy_and_no_nan():
    assert float(fl.Linear(np.float32(1e-3), 0, np.int64(100)).build()(50)) == pytest.approx(5e-4)
    for wrong in (math.nan, math.inf):
        with pytest.raises(fl.errors.SettingError, match="must be finite and not negative"):
            fl.Linear(wrong, 0.0, 5)
