"""Where a GPU is at hand: what runs on it reach. Writes docs/benchmarks/gpu-DEVICE.md.

No part of `make bench`, since most machines have none; bench/xla.py measures fused PPO there. Each
measurement is a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
FRAMES, EPOCHS, UPDATES = {1_024: 256, 8_192: 2_048}, 4, 10
"""Frames of a batch and of a minibatch, and how often they are trained on."""
SEEDS = (8, 64)
LOCAL = ("ppo", "dqn")
PER_FRAME = 3 * 2 * 9.34e6
"""Floating-point operations of one frame in a gradient step: 9.34 million products and sums
forwards, and twice as many backwards."""
ON_GPU = "cuda,cpu"
FLAG = "--xla_gpu_deterministic_ops=true"


def frames() -> Any:
    """Return the class of a JAX environment with the observations and actions of Atari's games.

    Its images cost nothing to make, and its episodes have 1,000 steps.
    """
    import gymnasium as gym
    import jax.numpy as jnp

    import flowrl as fl

    class Frames(fl.envs.JaxEnv):
        observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        action_space = gym.spaces.Discrete(6)

        def reset(self, key: Any) -> tuple[Any, Any]:
            return jnp.int32(0), self.seen(jnp.int32(0))

        def seen(self, age: Any) -> Any:
            return (jnp.arange(84 * 84 * 4) * (age + 7)).astype(jnp.uint8).reshape(84, 84, 4)

        def step(self, state: Any, action: Any, key: Any) -> tuple[Any, ...]:
            reward = (action == state % 6).astype(jnp.float32)
            return state + 1, self.seen(state + 1), reward, jnp.bool_(False), state >= 999

    return Frames


def images() -> dict[str, Any]:
    """Seconds of updates of PPO from Atari frames, by frames of a batch, and the device's name."""
    import jax

    import flowrl as fl
    from flowrl.graph.site import HereSite, Place

    found = {}
    policy = fl.Policy(fl.networks.CNN)
    for rows, minibatch in FRAMES.items():
        place = Place(
            "frames",
            {
                "runners": fl.Runners(
                    frames(), policy, envs_per_runner=rows // 128, rollout_length=128
                ),
                "learner": fl.Learner(
                    policy, fl.losses.PPOLoss(value_clip=0.2), fl.Adam(3e-4, max_grad_norm=0.5)
                ),
            },
            0,
            HereSite,
        )
        handles: dict[str, Any] = place.open()
        batch = handles["runners"].collect()
        noise = np.random.default_rng(0).normal(size=batch.shape).astype(np.float32)
        batch = batch.with_(advantage=noise, target=noise)
        seconds = []
        for _ in range(UPDATES + 2):
            start = time.perf_counter()
            trained = handles["learner"].update(batch, epochs=EPOCHS, minibatch_size=minibatch)
            jax.block_until_ready(trained.metrics.values)
            seconds.append(time.perf_counter() - start)
        place.close()
        # The first two compile and lay out the state.
        found[str(rows)] = seconds[2:]
    device = jax.devices()[0].device_kind
    return {"device": f"{device}, jax {jax.__version__}", "seconds": found}


def rate(graph: Any, runtime: Any, skipped: int, counted: int) -> tuple[float, Any]:
    """Environment steps a second over some rows after the first ones, and the weights at last."""
    import flowrl as fl

    with fl.run(graph, runtime=runtime, seed=0) as run:
        rows = [next(run) for _ in range(skipped)]
        start = time.perf_counter()
        rows += [next(run) for _ in range(counted)]
        seconds = time.perf_counter() - start
        weights = run.policy.weights
    return (rows[-1]["env_steps"] - rows[skipped - 1]["env_steps"]) / seconds, weights


def seeds(count: str) -> float:
    """Environment steps a second of so many runs of ppo as one program."""
    import flowrl as fl

    runtime = fl.XlaRuntime(seeds=int(count), chunk=5)
    return int(count) * rate(fl.ppo("gymnax:CartPole-v1"), runtime, 11, 20)[0]


def local(name: str) -> float:
    """Environment steps a second of a stock graph in the local runtime."""
    import flowrl as fl

    return rate(getattr(fl, name)("CartPole-v1"), "local", 3, 20)[0]


def same() -> dict[str, Any]:
    """Sums of the weights of two runs of one seed, and their environment steps a second."""
    import jax

    import flowrl as fl

    graph = fl.ppo(frames(), envs_per_runner=32, batch_size=4096, minibatch_size=1024)
    sums, rates = [], []
    for _ in range(2):
        steps, weights = rate(graph, fl.XlaRuntime(chunk=5), 11, 20)
        data = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(weights))
        sums.append(hashlib.sha256(data).hexdigest()[:8])
        rates.append(steps)
    return {"sums": sums, "rates": rates}


def placed(gpus: str) -> float:
    """Environment steps a second of IMPALA on Ray, its learner in a process with so many GPUs."""
    import flowrl as fl

    policy = fl.Policy(fl.networks.MLP, hidden=(512, 512))
    graph = fl.impala("CartPole-v1", num_runners=8, policy=policy)
    place = {"learner": fl.Actor(gpus=int(gpus))}
    return rate(graph, fl.RayRuntime(place=place), 10, 100)[0]


def measured(*case: str, **variables: str) -> Any:
    """Return what a process of its own finds in a case."""
    command = [sys.executable, __file__, *case]
    print(*case, *variables.values(), flush=True)
    said = subprocess.run(
        command, env=os.environ | variables, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return json.loads(said.splitlines()[-1])


def page(found: dict[str, Any]) -> str:
    """Return the text of the page for what was found."""
    updates = []
    for rows, seconds in found["images"]["seconds"].items():
        median = statistics.median(seconds)
        operations = EPOCHS * int(rows) * PER_FRAME / median
        updates.append(
            f"| {int(rows):,} | {FRAMES[int(rows)]:,} | {1e3 * median:.1f} "
            f"| {EPOCHS * int(rows) / median:,.0f} | {operations / 1e12:.0f} |"
        )
    plain, strict = found["same"]
    lost = 1 - statistics.median(strict["rates"]) / statistics.median(plain["rates"])
    equal = ["had equal weights" if len({*x["sums"]}) == 1 else "differed" for x in found["same"]]
    many = "; ".join(f"{count} seeds {steps:,.0f}" for count, steps in found["seeds"].items())
    single, on_gpu = (
        " and ".join(f"{name} {steps:,.0f}" for name, steps in rates.items())
        for rates in found["local"]
    )
    without, with_gpu = found["placed"]
    return f"""# On a GPU: {found["images"]["device"]}

Written by `python bench/gpu.py` ([bench/gpu.py](../../bench/gpu.py)). Fused PPO beside a scan
written by hand has a page of its own.

## PPO's update from Atari frames

The network of Mnih et al. (2015), frames of 84 x 84 x 4 bytes, {EPOCHS} epochs; medians of
{UPDATES} updates of a batch that lies on the GPU. An operation is one of 32-bit floats, in the
precision that JAX chooses.

| frames of a batch | of a minibatch | update, ms | frames/s in gradient steps | TFLOP/s |
|---:|---:|---:|---:|---:|
{chr(10).join(updates)}

## The same seed twice

PPO from such frames as one program (32 environments, minibatches of 1,024), two runs of one seed:
they {equal[0]}, at {statistics.median(plain["rates"]):,.0f} steps/s. With
`XLA_FLAGS={FLAG}`, which refuses operations that add up in an
order of their own, they {equal[1]}, and {lost:.1%} of the speed was lost.

## Small networks

Many seeds of ppo on gymnax CartPole-v1 as one program, environment steps a second of all together:
{many}. One run in the local runtime on CartPole-v1: {single}
environment steps a second. Actions and updates as small as these are computed on a core of the
CPU there; on the GPU (`JAX_PLATFORMS={ON_GPU}`), where each step waits for a call, it
was {on_gpu}.

## IMPALA on Ray

Eight runners on CPUs, and a learner with a network of 512 and 512 in a process of its own:
{without:,.0f} environment steps a second with the learner on CPUs
(`place={{"learner": fl.Actor(gpus=0)}}`), {with_gpu:,.0f} with it on the GPU (`gpus=1`).
"""


def main(case: list[str]) -> None:
    """Measure one case and print what it finds, or all of them and write the page."""
    cases = {f.__name__: f for f in (images, seeds, local, same, placed)}
    if case:
        print(json.dumps(cases[case[0]](*case[1:])))
        return
    found = {
        "images": measured("images"),
        "same": [measured("same"), measured("same", XLA_FLAGS=FLAG)],
        "seeds": {count: measured("seeds", str(count)) for count in SEEDS},
        "local": [
            {name: measured("local", name, **platforms) for name in LOCAL}
            for platforms in ({}, {"JAX_PLATFORMS": ON_GPU})
        ],
        # The driver leaves the GPU to the learner.
        "placed": [measured("placed", gpus, JAX_PLATFORMS="cpu") for gpus in "01"],
    }
    device = found["images"]["device"].split(",")[0]
    name = re.sub(r"[^a-z0-9]+", "-", device.lower())
    text = page(found)
    (ROOT / f"docs/benchmarks/gpu-{name}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
