"""In which form environments of Gymnasium are made."""

import gymnasium as gym
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import SyncVectorEnv

from flowrl.envs.gym_envs import make_vector


class OwnVector(SyncVectorEnv):
    """A vector of the user's own, which may show something else than a single environment."""

    def __init__(self, num_envs):
        super().__init__([lambda: gym.make("CartPole-v1")] * num_envs)


@pytest.fixture
def own_id():
    gym.register("Own/Vector-v1", "x:Single", vector_entry_point=OwnVector)
    yield "Own/Vector-v1"
    gym.registry.pop("Own/Vector-v1")


@pytest.mark.parametrize(("count", "kind"), [(1, SyncVectorEnv), (2, CartPoleVectorEnv)])
def test_a_single_environment_of_gymnasium_is_no_vector_of_its_own(count, kind):
    vector = make_vector("CartPole-v1", count, (), {})
    assert type(vector.unwrapped) is kind and vector.num_envs == count


@pytest.mark.parametrize("count", [1, 2])
def test_a_vectorised_form_of_the_users_own_is_always_taken(own_id, count):
    vector = make_vector(own_id, count, (), {})
    assert type(vector.unwrapped) is OwnVector and vector.num_envs == count
