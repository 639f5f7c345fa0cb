"""Settings of modules and optax's functions that do not exist are refused where they are made."""

from dataclasses import fields
from functools import partial

import optax
import pytest
from flax import linen, nnx

import flowrl as fl
from flowrl.graph.keywords import check_keywords
from flowrl.graph.values import from_text


class Module(nnx.Module):
    def __init__(self, o, a, *, width=3, rngs):
        pass


class Open(nnx.Module):
    def __init__(self, obs_space, action_space, **settings):
        pass


class Dense(linen.Module):
    width: int


def function(obs_space, action_space, /, width, rngs):
    pass


OF_MLP = (
    "MLP: unknown setting 'hiden'; did you mean 'hidden'? "
    "Known: hidden, activation, shared, normalize, log_std"
)
OF_SGD = (
    "sgd: unknown setting 'learing_rate'; did you mean 'learning_rate'? "
    "Known: learning_rate, momentum, nesterov, accumulator_dtype"
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fl.Policy(fl.networks.MLP, hiden=(64,)), OF_MLP),
        (lambda: from_text("Policy(networks.MLP, hiden=(64,))"), OF_MLP),
        (lambda: fl.Optax(optax.sgd, learing_rate=0.1), OF_SGD),
        (
            lambda: fl.Adam(learning_rate=0.1),
            (
                "Adam: unknown setting 'learning_rate'; did you mean 'lr'? "
                "Known: lr, eps, max_grad_norm, b1, b2, weight_decay"
            ),
        ),
        (
            lambda: fl.TrainOneStep(epoch=3),
            (
                "TrainOneStep: unknown setting 'epoch'; did you mean 'epochs'? "
                "Known: epochs, minibatch_size, shuffle, learner"
            ),
        ),
        (
            lambda: fl.PGSettings(gama=1),
            (
                "PGSettings: unknown setting 'gama'; did you mean 'gamma'? "
                f"Known: {', '.join(field.name for field in fields(fl.PGSettings))}"
            ),
        ),
        (
            lambda: from_text("Concat(min_step=1)"),
            "line 1: Concat: unknown setting 'min_step'. Known: batch_size",
        ),
        (lambda: fl.Policy(Module, x=1), "Module: unknown setting 'x'. Known: o, a, width"),
        (lambda: fl.Policy(function, x=1), "function: unknown setting 'x'. Known: width"),
    ],
)
def test_a_misspelt_setting_is_named_with_the_nearest_one(make, message):
    with pytest.raises(fl.errors.SettingError) as error:
        make()
    assert str(error.value).endswith(message)


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (fl.networks.MLP, ["hidden", "log_std"]),
        (Module, ["width"]),
        (Open, ["anything"]),
        (Dense, ["width"]),
        (function, ["width"]),
        (partial(Module, width=2), ["width"]),
        (dict, ["anything"]),
        (type("Bare", (), {}), []),
        (min, ["key"]),
    ],
)
def test_keywords_that_a_signature_takes_or_may_take_pass(fn, names):
    check_keywords(fn, names)


class OwnAdam(fl.Adam):
    def __init__(self, speed):
        super().__init__(lr=speed)


def test_a_class_with_a_constructor_of_its_own_takes_what_that_takes():
    assert OwnAdam(speed=0.5).lr == 0.5
    with pytest.raises(fl.errors.SettingError, match="OwnAdam: unknown setting 'lr'. Known: speed"):
        OwnAdam(lr=0.5)


def test_a_setting_that_is_left_out_is_its_default():
    plain, narrow = fl.Policy(Module), fl.Policy(Module, width=2)
    assert plain == fl.Policy(Module, width=3) and hash(plain) == hash(fl.Policy(Module, width=3))
    assert plain != narrow and plain != fl.Policy(Module, width=3.0)
    # Nothing is known of what an open one leaves out.
    assert fl.Policy(Open, width=3) != fl.Policy(Open)
    # So runners and learner that say the same in two ways have the same policy.
    graph = fl.ppo("CartPole-v1").set("runners.policy", fl.Policy(fl.networks.MLP))
    graph.compile()
    with pytest.raises(fl.errors.CheckError, match="give both the same policy"):
        graph.set("runners.policy", fl.Policy(fl.networks.MLP, normalize=True)).compile()
