"""`LocalRuntime`: runs everything in this process and thread, where pdb works."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from flowrl.core.events import Stream
from flowrl.core.keeping import Draws
from flowrl.errors import SettingError
from flowrl.graph.plan import Plan
from flowrl.graph.site import HereSite, Place
from flowrl.graph.stages import Schedule
from flowrl.runtime.base import Session, check_positive


@dataclass(frozen=True)
class LocalRuntime:
    """One plain loop in one thread of this process.

    Args:
        schedule: order of the stages of a graph with queues: ``lockstep``, in which each stage
            takes one turn a round, if it can; or ``random``, in which a stage is picked by the
            run's seed, so that what may happen side by side can be tried out (default
            ``lockstep``).
        threads: number of threads that XLA computes with; None: one, or as many as there are
            cores, whichever is faster for updates of the graph's size (default None). Where JAX has
            a GPU, larger updates and environments in JAX run there, unless this is a number; with
            several devices, or the environment variable ``NPROC`` or ``JAX_PLATFORMS`` that names a
            GPU, JAX's own choice stays.

    Raises:
        SettingError: `schedule` is neither of these, or `threads` is no whole number from 1 on.
    """

    schedule: Literal["lockstep", "random"] = "lockstep"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in ("lockstep", "random"):
            raise SettingError(f"schedule must be lockstep or random, got {self.schedule!r}")
        check_positive("threads", self.threads)

    def open(self, plan: Plan, seed: int, stream: Stream | None = None) -> Session:
        """Open the graph's resources in this process."""
        # A generator of its own: picking a stage takes no random numbers from anything else.
        # It picks the stage that goes on, and which of several results is taken first.
        pick = None if self.schedule == "lockstep" else Draws(seed)
        graph = plan.graph
        place = Place(
            graph.name, graph.resources, seed, HereSite, plan.found.totals, stream, pick=pick
        )
        return Session(plan, place, partial(Schedule, pick=pick), threads=self.threads)
