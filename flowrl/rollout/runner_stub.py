"""`RunnerStub`: the shape-only stub of a runner, for the abstract trace."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from flowrl.core.items import Batch
from flowrl.core.metrics import Summed
from flowrl.graph.graph import Chain
from flowrl.graph.protocols import Site
from flowrl.rl.normalizing import RunningNorm
from flowrl.rl.policies import Weights, network
from flowrl.rollout.evaluation import Evaluation
from flowrl.rollout.infos import column
from flowrl.rollout.local_chain import Local
from flowrl.rollout.sample import Array, Episodes, Sample, numbers

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners


class RunnerStub:
    """Shape-only stub of a runner: the same methods, which return shapes in place of arrays.

    Args:
        spec: the settings of the runners.
        site: the site of the abstract trace.
        index: the number of this runner.
        restart_count: how often it was restarted.
    """

    def __init__(self, spec: Runners, site: Site, index: int, restart_count: int = 0) -> None:
        self.spec = spec
        self.site = site
        self.index = index
        self.version = 0
        self.weights: Weights | None = None
        self.local: Local | None = None

    def localize(self, chain: Chain) -> None:
        """Pass every later rollout through these operators."""
        self.local = Local(chain, network(self.spec.policy, self.spec.spaces()), self.site)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def evaluate(
        self,
        how: tuple[int, int, int],
        published: tuple[Weights, Any] | None,
    ) -> Evaluation:
        """Return episodes without a step."""
        self._take(published)
        episodes, _, max_steps = how
        return Evaluation.empty(episodes, max_steps)

    def perturbed(
        self,
        seeds: Array,
        how: dict[str, Any],
        published: tuple[Weights, Any] | None,
    ) -> Sample:
        """Return the shapes of what pairs return; their version and producer are known."""
        self._take(published)
        pairs, net = len(seeds), network(self.spec.policy, self.spec.spaces())
        data = {
            "noise_seed": _shape(np.uint32, 2, pairs),
            "noise_scale": _shape(np.float32, 2, pairs),
            "return": _shape(np.float32, 2, pairs),
            "length": _shape(np.int32, 2, pairs),
        }
        if net.layers(RunningNorm):
            points = {
                part.name: _shape(np.float32, 2, pairs, *part.shape)
                for part in self.spec.spaces().parts
            }
            data |= {"visits": _shape(np.float32, 2, pairs), **points}
        columns = {
            "version": np.full(pairs, self.version, np.int32),
            "producer": np.full(pairs, self.index, np.int32),
        }
        return Sample(Batch(data, columns), Episodes(0, np.zeros(0), np.zeros(0), cut=0))

    def _take(self, published: tuple[Weights, Any] | None) -> None:
        """Use these weights from now on, if there are any."""
        if published is not None:
            self.weights, self.version = published[0], int(published[1])

    def sample(self, published: tuple[Weights, Any] | None) -> Sample:
        """Return a rollout of shapes; its policy version and producer are known even here."""
        self._take(published)
        batch = Batch(self._data(), self._columns())
        metrics = {column(key): Summed() for key in self.spec.metrics}
        episodes = Episodes(0, np.zeros(0), np.zeros(0), metrics=metrics)
        return Sample(batch if self.local is None else self.local(self.weights, batch), episodes)

    def _data(self) -> dict[str, Any]:
        """Return the shapes of a rollout's data."""
        spaces, net = self.spec.spaces(), network(self.spec.policy, self.spec.spaces())
        rows = (self.spec.rollout_length, self.spec.envs_per_runner)
        width = (net.head.width,) if net.head.width else ()
        return {
            **spaces.shapes(*rows),
            "reward": _shape(np.float32, *rows),
            "terminated": _shape(bool, *rows),
            "truncated": _shape(bool, *rows),
            "valid": _shape(bool, *rows),
            "action": _shape(net.action_dtype, *rows, *width),
            "logp": _shape(np.float32, *rows),
            "value": _shape(np.float32, *rows),
        }

    def _columns(self) -> dict[str, Any]:
        """Return a rollout's columns, some by their values and the others by their shapes."""
        spaces, envs = self.spec.spaces(), self.spec.envs_per_runner
        return {
            **{f"bootstrap_{name}": shape for name, shape in spaces.shapes(envs).items()},
            "version": np.full(envs, self.version, np.int32),
            "producer": np.full(envs, self.index, np.int32),
            "env": numbers(self.index, envs),
            "first": _shape(np.int32, envs),
            **self._carry,
        }

    @cached_property
    def _carry(self) -> dict[str, Array]:
        """The shapes of the columns of the policy's carry."""
        net = network(self.spec.policy, self.spec.spaces())

        def begin() -> dict[str, Array]:
            weights = net.init(jax.random.key(0))
            return net.begin(weights, net.memory(weights, self.spec.envs_per_runner))

        found: dict[str, Array] = jax.eval_shape(begin)
        return found


def _shape(dtype: Any, *shape: int) -> Any:
    """Return what stands for an array in the abstract trace."""
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))
