"""`RunnerTwin`: a runner in the abstract trace."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from flowrl.core.items import Batch
from flowrl.core.metrics import Summed
from flowrl.graph.graph import Chain
from flowrl.graph.protocols import Site
from flowrl.rl.policies import Weights, network
from flowrl.rollout.evaluation import MAX_STEPS, Evaluation
from flowrl.rollout.infos import column
from flowrl.rollout.local_chain import Local
from flowrl.rollout.sample import Array, Episodes, Sample, numbers

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners


class RunnerStub:
    """A runner in the abstract trace: the same methods, giving shapes."""

    def __init__(self, spec: Runners, site: Site, index: int, restart_count: int = 0) -> None:
        self.spec = spec
        self.site = site
        self.index = index
        self.version = 0
        self.weights: Weights | None = None
        self.local: Local | None = None

    def localize(self, chain: Chain) -> None:
        """From now on every fragment goes through these operators."""
        self.local = Local(chain, network(self.spec.policy, self.spec.spaces()), self.site)

    def close(self) -> None:
        """Nothing to close."""

    def evaluate(
        self,
        published: tuple[Weights, Any] | None,
        episodes: int,
        seed: int,
        max_steps: int = MAX_STEPS,
    ) -> Evaluation:
        """Episodes without a step."""
        self._take(published)
        return Evaluation.empty(episodes, max_steps)

    def _take(self, published: tuple[Weights, Any] | None) -> None:
        if published is not None:
            self.weights, self.version = published[0], int(published[1])

    def sample(self, published: tuple[Weights, Any] | None) -> Sample:
        """A fragment of shapes; its version and producer are known even here."""
        self._take(published)
        spaces, net = self.spec.spaces(), network(self.spec.policy, self.spec.spaces())
        rows, obs = (self.spec.rollout_length, self.spec.envs_per_runner), spaces.obs.shape or ()
        width = (net.head.width,) if net.head.width else ()

        def of(dtype: Any, *shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

        data = {
            "obs": of(spaces.obs_dtype, *rows, *obs),
            "reward": of(np.float32, *rows),
            "terminated": of(bool, *rows),
            "truncated": of(bool, *rows),
            "valid": of(bool, *rows),
            "action": of(net.action_dtype, *rows, *width),
            "logp": of(np.float32, *rows),
            "value": of(np.float32, *rows),
        }
        columns = {
            "bootstrap_obs": of(spaces.obs_dtype, self.spec.envs_per_runner, *obs),
            "version": np.full(self.spec.envs_per_runner, self.version, np.int32),
            "producer": np.full(self.spec.envs_per_runner, self.index, np.int32),
            "env": numbers(self.index, self.spec.envs_per_runner),
            "first": of(np.int32, self.spec.envs_per_runner),
            **self._carry,
        }
        metrics = {column(key): Summed() for key in self.spec.metrics}
        sample = Sample(
            Batch(data, columns), Episodes(0, np.zeros(0), np.zeros(0), metrics=metrics)
        )
        return (
            sample
            if self.local is None
            else Sample(self.local(self.weights, sample.batch), sample.episodes)
        )

    @cached_property
    def _carry(self) -> dict[str, Array]:
        net = network(self.spec.policy, self.spec.spaces())

        def begin() -> dict[str, Array]:
            weights = net.init(jax.random.key(0))
            return net.begin(weights, net.memory(weights, self.spec.envs_per_runner))

        found: dict[str, Array] = jax.eval_shape(begin)
        return found
