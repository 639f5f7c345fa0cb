"""RLlib's multi-agent PPO on two CartPoles, for `bench/agents.py`. Prints one line of JSON.

It is run by the Python of an environment that holds RLlib and torch.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from typing import Any

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.multi_agent_env import MultiAgentEnv

import falling_poles as poles

Base: Any = MultiAgentEnv
"""Any, since it has attributes where PettingZoo, and so `FallingPoles`, has methods."""


class Poles(poles.FallingPoles, Base):
    """The two poles as RLlib takes them."""

    def __init__(self, config: Any = None) -> None:
        MultiAgentEnv.__init__(self)
        poles.FallingPoles.__init__(self)
        self.observation_spaces = {name: self.observation_space(name) for name in poles.NAMES}
        self.action_spaces = {name: self.action_space(name) for name in poles.NAMES}

    def get_observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def get_action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        obs, reward, terminated, truncated, info = super().step(actions)
        over = not self.agents
        return obs, reward, {**terminated, "__all__": over}, {**truncated, "__all__": False}, info


def config(envs: int) -> Any:
    """PPO with two policies, each of the size that the others have."""
    return (
        PPOConfig()
        .environment(Poles)
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=envs,
            rollout_fragment_length=poles.BATCH // envs,
        )
        .learners(num_learners=0)
        .multi_agent(policies=set(poles.NAMES), policy_mapping_fn=lambda agent, *_, **__: agent)
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False
            )
        )
        .training(
            train_batch_size_per_learner=poles.BATCH,
            num_epochs=poles.EPOCHS,
            minibatch_size=poles.MINIBATCH,
            lr=1e-3,
            gamma=0.98,
            lambda_=0.8,
            grad_clip=0.5,
        )
    )


def main() -> None:
    """Print how many agent steps it trains a second, after so many updates of which none counts."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    envs, skipped, iterations = map(int, sys.argv[1:4])
    algorithm = config(envs).build_algo()
    before, steps, seconds = 0, 0, 0.0
    for iteration in range(skipped + iterations):
        begun = time.perf_counter()
        found = algorithm.train()
        took = time.perf_counter() - begun
        done = sum(found["env_runners"]["num_agent_steps_sampled_lifetime"].values())
        if iteration >= skipped:
            steps, seconds = steps + done - before, seconds + took
        before = done
    algorithm.stop()
    ray.shutdown()
    print(json.dumps({"agent steps/s": steps / seconds}))


if __name__ == "__main__":
    main()
