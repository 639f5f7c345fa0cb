"""A user's own network, without any base class of ours."""

from flax import nnx

import flowrl as fl


class Tiny(nnx.Module):
    def __init__(self, obs_space, action_space, *, width, rngs):
        self.body = nnx.Linear(obs_space.shape[0], width, rngs=rngs)
        self.out = nnx.Linear(width, fl.networks.action_outputs(action_space) + 1, rngs=rngs)

    def __call__(self, obs):
        x = self.out(nnx.relu(self.body(obs)))
        return x[:, :-1], x[:, -1]
