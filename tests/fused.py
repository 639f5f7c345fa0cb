"""The seam in one XLA program: a ten-line environment in JAX, runners over it, and the stage loop inside `lax.scan`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from flowrl.graph.loop import Loop
from flowrl.graph.protocols import Handle, Resource, Site
from flowrl.graph.site import HereSite, Place
from flowrl.items import Batch
from flowrl.resources.asking import RunnersHandle
from flowrl.rl.policies import Policy, network
from flowrl.rl.spaces import Spaces


class Corridor:
    """Walk right to the end: reward 1 there. The observation is the place in [0, 1]; cut short after 20 steps."""

    spaces = Spaces(gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(2))

    def reset(self, key: Any) -> tuple[Any, Any]:
        place = jax.random.randint(key, (), 0, 3)
        return (place, jnp.int32(0)), self.observe(place)

    def observe(self, place: Any) -> Any:
        return (place / 6)[None].astype(jnp.float32)

    def step(self, state: Any, action: Any) -> tuple[Any, ...]:
        place, age = jnp.clip(state[0] + 2 * action - 1, 0, 6), state[1] + 1
        return (place, age), self.observe(place), jnp.float32(place == 6), place == 6, age >= 20


class JaxRunnersHandle(RunnersHandle):
    def __init__(self, spec: JaxRunners, site: Site) -> None:
        self.spec, self.site, self.spaces = spec, site, spec.env.spaces
        self.state: dict[str, Any] = {"version": np.int32(0), "work": site.run(spec.start, site.key("start"))}

    def close(self) -> None:
        pass

    def publish(self, weights: Any, version: Any, to: Any = None, wait: bool = True) -> None:
        self.state = {**self.state, "weights": weights, "version": version}

    def next(self, in_flight: int = 2) -> Batch:
        raise NotImplementedError

    def collect(self, min_fraction: float = 1.0) -> Batch:
        work, data = self.site.run(self.spec.roll, self.state["work"], self.state["weights"])
        self.state = {**self.state, "work": work}
        version = (
            jnp.broadcast_to(self.state["version"], (self.spec.envs,))
            if not isinstance(self.state["version"], np.generic)
            else np.full(self.spec.envs, self.state["version"])
        )
        return Batch(data, {"bootstrap_obs": work["obs"], "version": version})

    def episodes(self) -> dict[str, Any]:
        work = self.state["work"]
        self.state = (
            {**self.state, "work": {**work, **{k: 0 * work[k] for k in ("sum", "n", "steps")}}}
            if not isinstance(work["n"], jax.ShapeDtypeStruct)
            else self.state
        )
        if isinstance(work["n"], jax.ShapeDtypeStruct):
            return {"env_steps": 0, "episodes": 0, "return_mean": math.nan, "length_mean": math.nan}
        mean = jnp.where(work["n"] > 0, work["sum"] / jnp.maximum(work["n"], 1), math.nan)
        return {"env_steps": work["steps"], "episodes": work["n"], "return_mean": mean, "length_mean": mean * 0}

    def evaluate(self, episodes: int, seed: int) -> dict[str, float]:
        raise NotImplementedError


@dataclass(frozen=True)
class JaxRunners(Resource):
    env: Any
    policy: Policy
    envs: int = 8
    fragment: int = 16
    handle: ClassVar[type[Handle]] = JaxRunnersHandle

    def open(self, site: Site) -> JaxRunnersHandle:
        return JaxRunnersHandle(self, site)

    def spaces(self) -> Spaces:
        return self.env.spaces

    def start(self, key: Any) -> Any:
        env, obs = jax.vmap(self.env.reset)(jax.random.split(key, self.envs))
        zeros = jnp.zeros(self.envs)
        return {"env": env, "obs": obs, "done": zeros > 0, "key": key, "ret": zeros, "sum": 0.0 * zeros[0], "n": jnp.int32(0), "steps": jnp.int32(0)}

    def roll(self, work: Any, weights: Any) -> Any:
        net, env = network(self.policy, self.env.spaces), self.env

        def step(w: Any, _: Any) -> Any:
            key, act, again = jax.random.split(w["key"], 3)
            action, logp, value = net.unpack(net.act(weights, w["obs"], net.head.noise(act, self.envs))[0])
            new, obs, reward, term, trunc = jax.vmap(env.step)(w["env"], action)
            fresh, fresh_obs = jax.vmap(env.reset)(jax.random.split(again, self.envs))
            pick = lambda a, b: jnp.where(w["done"].reshape(-1, *[1] * (b.ndim - 1)), a, b)
            new, obs = jax.tree.map(pick, fresh, new), pick(fresh_obs, obs)
            reward, term, trunc = pick(jnp.zeros_like(reward), reward), term & ~w["done"], trunc & ~w["done"]
            row = {
                "obs": w["obs"],
                "reward": reward,
                "terminated": term,
                "truncated": trunc,
                "valid": ~w["done"],
                "action": action,
                "logp": logp,
                "value": value,
            }
            done, ret = term | trunc, w["ret"] + reward
            total = {"sum": w["sum"] + jnp.sum(ret * done), "n": w["n"] + jnp.sum(done), "steps": w["steps"] + jnp.sum(~w["done"])}
            return {"env": new, "obs": obs, "done": done, "key": key, "ret": ret * ~done, **total}, row

        return jax.lax.scan(step, work, None, length=self.fragment)

    def review(self, use: Any) -> Any:
        return iter(())

    def describe(self) -> str:
        return f"{self.envs} envs x {self.fragment} steps in JAX"


class InlineSite(HereSite):
    """Everything inline, on tracers."""

    def run(self, fn: Any, *args: Any, donate: Any = (), **static: Any) -> Any:
        return fn(*args, **static)


def scan(graph: Any, passes: int, seed: int = 0) -> tuple[dict[str, Any], Any]:
    """Run a graph of one stage as one `lax.scan`: the resources' final states, and the stacked tallies."""
    place = Place(graph.name, graph.resources, seed, InlineSite)
    handles = place.open()
    loop = Loop(graph.name, graph.nodes, handles, place.site, place.ledger)
    leaves, tree = jax.tree.flatten((loop.states, {k: h.state for k, h in handles.items()}))
    is_array = [isinstance(x, jax.Array | np.ndarray | np.generic) for x in leaves]
    static = [None if a else x for x, a in zip(leaves, is_array, strict=True)]

    def get() -> list[Any]:
        now, again = jax.tree.flatten((loop.states, {k: h.state for k, h in handles.items()}))
        assert again == tree and [None if a else x for x, a in zip(now, is_array, strict=True)] == static, "the carry does not close"
        return [x for x, a in zip(now, is_array, strict=True) if a]

    def put(arrays: Any) -> None:
        it = iter(arrays)
        states, resources = jax.tree.unflatten(tree, [next(it) if a else s for s, a in zip(static, is_array, strict=True)])
        loop.states = states
        for k, h in handles.items():
            h.state = resources[k]

    def body(carry: Any, _: Any) -> Any:
        put(carry)
        (tally,) = loop.run_pass()
        return get(), tally

    carry, tallies = jax.jit(lambda c: jax.lax.scan(body, c, None, length=passes))(
        [jnp.asarray(x) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in get()]
    )
    put(carry)
    return {k: h.state for k, h in handles.items()}, tallies
