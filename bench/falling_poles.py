"""Two CartPoles as two agents, and the sizes of the benchmark on them. It needs Gymnasium alone."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

NAMES = ("red", "blue")
ENVS, BATCH, EPOCHS, MINIBATCH = (8, 32), 1024, 4, 128
"""Numbers of environments that are stepped side by side, each for a run of its own; turns of an
agent in a batch; epochs; turns of an agent in a minibatch."""


class FallingPoles:
    """Two CartPoles; an agent whose pole fell waits until the other one's falls, too."""

    possible_agents = [*NAMES]  # noqa: RUF012 - as PettingZoo's environments have it

    def __init__(self) -> None:
        self.poles = {name: gym.make("CartPole-v1") for name in NAMES}
        self.agents: list[str] = [*NAMES]

    def observation_space(self, agent: str) -> Any:
        return self.poles[agent].observation_space

    def action_space(self, agent: str) -> Any:
        return self.poles[agent].action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.agents = [*NAMES]
        return {name: pole.reset(seed=seed)[0] for name, pole in self.poles.items()}, {}

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        obs, reward, terminated, truncated = {}, {}, {}, {}
        for name, action in actions.items():
            found = self.poles[name].step(action)
            obs[name], reward[name], terminated[name], truncated[name], _ = found
        self.agents = [name for name in obs if not (terminated[name] or truncated[name])]
        return obs, reward, terminated, truncated, {}

    def close(self) -> None:
        for pole in self.poles.values():
            pole.close()
