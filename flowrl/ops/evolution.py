"""Operators of evolution strategies: `ParallelEvaluate`, `CentredRanks` and `TopDirections`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import jax.numpy as jnp

from flowrl.core.items import Batch
from flowrl.core.texts import amount, plural
from flowrl.envs.gym_envs import env_name
from flowrl.errors import ContractError
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Context, Operator, Ref, Stateless
from flowrl.graph.settings import check_above_0, check_at_least_1
from flowrl.ops.batch import need
from flowrl.rl.evolution import centred_ranks, top_directions
from flowrl.rollout.evaluation import MAX_STEPS
from flowrl.rollout.handle import RunnersHandle


@dataclass(frozen=True)
class ParallelEvaluate(Operator):
    """Let the runners play whole episodes with perturbed weights, and yield their returns.

    Each pair is a random direction and its mirror image (antithetic sampling): the newest weights
    plus and minus ``sigma`` times standard normal noise. Only seeds and returns travel. The item is
    ONE batch ``[2, pairs]``, whose columns are the pairs and whose second row holds their mirror
    images. Its fields are ``noise_seed`` (from which the noise is made), ``noise_scale``
    (``sigma``, or minus that), ``return`` (the mean of the perturbation's episodes) and ``length``
    (the steps of all of them). For a policy that normalises observations it also has ``obs``, two
    points with the mean and the deviation of what the pair saw, and ``visits``, for how many
    observations each of them stands.

    Both of a pair begin their episodes with the same seeds. A runner that is lost is restarted and
    asked again, so nothing is left out of the estimate.

    Args:
        pairs: mirrored pairs of perturbations in a batch.
        sigma: standard deviation of the perturbation of each weight, above 0.
        episodes: episodes of each perturbation (default 1).
        max_steps: environment steps after which an episode is cut; its return until then counts,
            and each row has the number of such episodes as ``cut_episodes`` (default 30_000).
        sampled: whether actions are picked as the runners' exploration does, not greedily (default
            False).
        runners: name of the runners that play (default ``runners``).

    Raises:
        SettingError: a number is out of its range.
        EnvError: an environment raised, gave NaN, or broke its declared shape or type.
    """

    pairs: int
    sigma: float
    episodes: int = 1
    max_steps: int = MAX_STEPS
    sampled: bool = False
    runners: Ref[RunnersHandle] = "runners"

    source: ClassVar[bool] = True
    adds: ClassVar[tuple[str, ...]] = ("noise_seed", "noise_scale", "return", "length")

    def __post_init__(self) -> None:
        check_at_least_1(self, "pairs", "episodes", "max_steps")
        check_above_0(self, "sigma")

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return what is played, and at most how many steps that takes."""
        counts, calls = plan.counts(node), plan.found.steady[node].given
        if not calls:
            return None
        runners: Any = plan.graph.resources[str(self.runners)]
        each = f"{self.episodes} {plural(self.episodes, 'episode')}"
        most = amount(Fraction(counts["most_sampled_steps"], calls), "step")
        what = f"{self.pairs} mirrored {plural(self.pairs, 'pair')} x {each}"
        return (
            f"{what} of {env_name(runners.env)}",
            f"<= {most} a call, {plan.a_row(calls, 'call')}",
        )

    def prepare(self, ctx: Context) -> None:
        """Let the runners count the episodes that are cut."""
        ctx[self.runners].expect_perturbed()

    def init(self) -> dict[str, Any]:
        """Return the number of the turn, as an array, for it grows for ever."""
        return {"turn": jnp.uint32(0)}

    def step(self, held: dict[str, Any], item: Any, ctx: Context) -> Iterator[Batch]:
        """Yield the returns of one turn."""
        turn = held["turn"]
        held["turn"] = turn + jnp.uint32(1)
        yield ctx[self.runners].perturbed(
            ctx.name,
            turn,
            pairs=self.pairs,
            sigma=self.sigma,
            episodes=self.episodes,
            max_steps=self.max_steps,
            sampled=self.sampled,
        )


@dataclass(frozen=True)
class CentredRanks(Stateless):
    """Add ``utility``: the rank of each return in the batch, from -0.5 to 0.5.

    It is the fitness shaping of Salimans et al. (2017, section 2.1), which makes a step independent
    of the scale of returns. Equal returns have equal ranks.

    Raises:
        ContractError: the batch has no ``return``.
    """

    adds: ClassVar[tuple[str, ...]] = ("utility",)

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Batch]:
        """Yield the batch with the field added."""
        returns = need(batch, *ParallelEvaluate.adds)["return"]
        yield batch.with_(utility=ctx.run(centred_ranks, returns))


@dataclass(frozen=True)
class TopDirections(Stateless):
    """Add ``utility``: the returns of the best directions, divided by their deviation.

    It is augmented random search (Mania et al. 2018, algorithm 2): with `EvolutionLoss` and `SGD`
    a step is ``lr / (top * deviation) * sum((r_plus - r_minus) * noise)`` over the `top` pairs with
    the highest of their two returns.

    Args:
        top: pairs that count.

    Raises:
        SettingError: `top` is below 1.
        ContractError: the batch has no ``return``, or fewer pairs than `top`.
    """

    top: int

    adds: ClassVar[tuple[str, ...]] = ("utility",)

    def __post_init__(self) -> None:
        check_at_least_1(self, "top")

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Batch]:
        """Yield the batch with the field added."""
        data = need(batch, *ParallelEvaluate.adds).data
        if self.top > batch.shape[1]:
            raise ContractError(
                f"top={self.top} directions of a batch of {batch.shape[1]} pairs can't count; "
                "take a smaller top, or more pairs"
            )
        utility = ctx.run(top_directions, data["return"], data["noise_scale"], top=self.top)
        yield batch.with_(utility=utility)
