"""Kill runs with -9 at random moments, resume them each time, and compare them to whole runs.

Every stock graph and each thing that lasts has a case here. Rows (without their times) and weights
must be those of a run that nothing interrupted, bit for bit.

    python bench/kills.py [--kills 10] [--seed 0] [--ray | CASE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from gymnasium.wrappers import FrameStackObservation

import flowrl as fl

SMALL: dict[str, Any] = {
    "num_runners": 2,
    "envs_per_runner": 2,
    "rollout_length": 16,
    "batch_size": 64,
}
Q: dict[str, Any] = {
    "num_runners": 2,
    "envs_per_runner": 2,
    "learning_starts": 100,
    "buffer_size": 2_000,
}
MLP = fl.Policy(fl.networks.MLP, hidden=(16,))
RNN = fl.Policy(fl.networks.RNN, cell="lstm")
QNET = fl.Policy(fl.networks.QNetwork, hidden=(16,))
SAC = fl.Policy(fl.networks.SACNetwork, hidden=(16,))
GYMNAX = "gymnax:CartPole-v1"


def _ppo(env: str = "CartPole-v1", **more: Any) -> fl.Graph:
    return fl.ppo(env, **{"policy": MLP, **SMALL, "minibatch_size": 32, "epochs": 2, **more})


def ppo() -> fl.Graph:
    """PPO with small batches."""
    return _ppo()


def a2c() -> fl.Graph:
    """A2C with an evaluation."""
    graph = fl.a2c("CartPole-v1", policy=MLP, **SMALL)
    return graph.insert(after="train", check=fl.Evaluate(every=5, episodes=2, max_steps=50))


def a3c() -> fl.Graph:
    """A3C, whose runners compute gradients."""
    small = {name: x for name, x in SMALL.items() if name != "batch_size"}
    return fl.a3c("CartPole-v1", policy=MLP, **small, report_every=4)


def pg() -> fl.Graph:
    """The policy gradient."""
    return fl.pg("CartPole-v1", policy=MLP, **SMALL)


def impala(env: str = "CartPole-v1") -> fl.Graph:
    """IMPALA."""
    return fl.impala(env, policy=MLP, **SMALL, report_every=2)


def appo(env: str = "CartPole-v1") -> fl.Graph:
    """APPO, which has a target network."""
    return fl.appo(env, policy=MLP, **SMALL, report_every=2)


def dqn(env: str = "CartPole-v1") -> fl.Graph:
    """DQN with a prioritized replay and n-step returns."""
    more: dict[str, Any] = {"prioritized": True, "n_step": 3, "batch_size": 16, "rollout_length": 4}
    return fl.dqn(env, policy=QNET, **Q, **more, report_every=4)


def sac(env: str = "Pendulum-v1") -> fl.Graph:
    """SAC on Pendulum."""
    more: dict[str, Any] = {"batch_size": 16, "rollout_length": 4, "updates_per_step": 0.1}
    return fl.sac(env, policy=SAC, **Q, **more, report_every=4)


def apex(env: str = "CartPole-v1") -> fl.Graph:
    """Ape-X, whose replay has shards."""
    return fl.apex(env, policy=QNET, **Q, batch_size=16, rollout_length=4, report_every=4)


def frames() -> fl.Graph:
    """PPO over stacked frames."""
    wrappers = (partial(FrameStackObservation, stack_size=3),)
    return _ppo("Pendulum-v1").set("runners.wrappers", wrappers)


def recurrent() -> fl.Graph:
    """IMPALA with an LSTM."""
    return fl.impala("CartPole-v1", policy=RNN, **SMALL, report_every=2)


def normalized() -> fl.Graph:
    """PPO over normalised observations and rewards, with a falling learning rate."""
    more = {"policy": None, "normalize": True, "normalize_rewards": True}
    return _ppo("Pendulum-v1", **more, lr=fl.Linear(1e-3, 0.0, 60))


def mixed() -> fl.Graph:
    """IMPALA that trains on batches again, from a buffer."""
    return impala().insert(after="batch", mix=fl.MixIn(3, 2))


def jax_ppo() -> fl.Graph:
    """PPO over an environment in JAX."""
    return _ppo(GYMNAX, num_runners=1, envs_per_runner=4)


def jax_impala() -> fl.Graph:
    """IMPALA over an environment in JAX."""
    return impala(GYMNAX)


def jax_dqn() -> fl.Graph:
    """DQN over an environment in JAX."""
    return dqn(GYMNAX)


def jax_a2c() -> fl.Graph:
    """A2C over an environment in JAX."""
    return fl.a2c(GYMNAX, policy=MLP, **SMALL)


def jax_pg() -> fl.Graph:
    """The policy gradient over an environment in JAX."""
    return fl.pg(GYMNAX, policy=MLP, **SMALL)


def jax_appo() -> fl.Graph:
    """APPO over an environment in JAX."""
    return appo(GYMNAX)


def jax_sac() -> fl.Graph:
    """SAC over an environment in JAX."""
    return sac("gymnax:Pendulum-v1")


def jax_apex() -> fl.Graph:
    """Ape-X over an environment in JAX."""
    return apex(GYMNAX)


RESUME = ("resume", "--import", "gymnasium")
XLA = ("--runtime", "xla")
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "ppo": ("ppo", 6_000, ()),
    "a2c": ("a2c", 40_000, ()),
    "a3c": ("a3c", 25_000, ()),
    "pg": ("pg", 25_000, ()),
    "impala": ("impala", 25_000, ()),
    "appo": ("appo", 25_000, ()),
    "dqn": ("dqn", 4_000, ()),
    "sac": ("sac", 6_500, ()),
    "apex": ("apex", 1_500, ()),
    "frames": ("frames", 8_000, ()),
    "recurrent": ("recurrent", 10_000, ()),
    "normalized": ("normalized", 8_000, ()),
    "mixed": ("mixed", 20_000, ()),
    "seeds": ("ppo", 4_000, ("--seeds", "2")),
    "xla ppo": ("jax_ppo", 250_000, XLA),
    "xla impala": ("jax_impala", 60_000, XLA),
    "xla dqn": ("jax_dqn", 12_000, XLA),
    "xla a2c": ("jax_a2c", 350_000, XLA),
    "xla pg": ("jax_pg", 700_000, XLA),
    "xla appo": ("jax_appo", 400_000, XLA),
    "xla sac": ("jax_sac", 400_000, XLA),
    "xla apex": ("jax_apex", 50_000, XLA),
    "xla seeds": ("jax_ppo", 60_000, (*XLA, "--seeds", "2")),
}
"""By case: the function of its graph, its steps and more options of `flowrl run`."""


def flowrl(*words: Any) -> subprocess.Popen[bytes]:
    """Start a process of the command line, in a group of its own."""
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "flowrl", *map(str, words)]
    return subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)


def runs(out: Path) -> list[Path]:
    """Return the directory of a run, or those of many seeds."""
    return sorted(out.glob("seed-*")) or [out]


def size(out: Path) -> int:
    """Return how many bytes of rows there are."""
    files = [each / "rows.jsonl" for each in runs(out)]
    return sum(file.stat().st_size for file in files if file.is_file())


def killed(out: Path, words: list[Any], moments: random.Random, mean: float = 0.3) -> bool:
    """Run a command, and kill it so many seconds after a row, in the mean; was that in time?"""
    process, deadline = flowrl(*words), time.monotonic() + 300
    # It has begun once rows are added.
    before = size(out)
    while size(out) <= before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(moments.expovariate(1 / mean))
    in_time = process.poll() is None
    process.kill()
    process.wait()
    return in_time


def alike(one: Path, other: Path) -> bool:
    """Return whether two runs have the same rows, times aside, and the same weights."""
    timed = ("seconds", "steps_per_second")
    found = []
    for path in (one, other):
        rows = map(json.loads, (path / "rows.jsonl").read_text().splitlines())
        kept = [{k: v for k, v in row.items() if k not in timed} for row in rows]
        weights = fl.load(path, allow=["gymnasium"]).weights
        flat = {**weights.params, **weights.rest}
        found.append((kept, {name: bytes(x.tobytes()) for name, x in flat.items()}))
    return found[0] == found[1]


def case(name: str, kills: int, moments: random.Random, folder: Path) -> tuple[int, bool]:
    """Return how often a run was killed, and whether it is the one that nothing interrupted."""
    function, steps, more = CASES[name]
    words = ["run", f"{__file__}:{function}", "--steps", steps, *more]
    whole, out = folder / "whole", folder / "run"
    flowrl(*words, "--no-snapshots", "--out", whole).wait()
    words, count = [*words, "--snapshot-every", 0, "--out", out], 0
    while count < kills and killed(out, words, moments):
        count, words = count + 1, [*RESUME, out]
    if not all((each / "manifest.json").exists() for each in runs(out)):
        flowrl(*RESUME, out).wait()
    same = all(map(alike, runs(whole), runs(out))) and len(runs(whole)) == len(runs(out))
    return count, same


def on_ray(kills: int, moments: random.Random, folder: Path) -> tuple[int, bool, str]:
    """Kill the driver of IMPALA on Ray, and return how often, whether all is well, and the rest.

    It must reach a mean return of 450, with rows that follow one another and an audit that closes.
    """
    out, count, began = folder / "run", 0, time.monotonic()
    words: list[Any] = ["run", "impala", "--env", "CartPole-v1", "--runtime", "ray"]
    words += ["--until", "return_mean>=450", "--steps", 5_000_000]
    words += ["--snapshot-every", 0, "--out", out]
    while count < kills and killed(out, words, moments, 0.2):
        count, words = count + 1, [*RESUME, out]
    flowrl(*RESUME, out).wait()
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    in_order = [row["row"] for row in rows] == list(range(1, len(rows) + 1))
    closes = "the audit closes" in (out / "audit.txt").read_text()
    last = rows[-1]
    said = (
        f"{last['return_mean']:.0f} after {last['env_steps']:,.0f} steps, "
        f"{time.monotonic() - began:.0f} s"
    )
    return count, in_order and closes and last["return_mean"] >= 450, said


def main() -> int:
    """Print a line for each case; return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ray", action="store_true", help="kill the driver of IMPALA on Ray")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    moments, wrong = random.Random(args.seed), 0
    if args.ray:
        count, good, said = on_ray(args.kills, moments, Path(tempfile.mkdtemp()))
        print(f"impala on ray, {count} kills of the driver: {'good' if good else 'WRONG'}, {said}")
        return 0 if good else 1
    for name in args.cases or CASES:
        began, folder = time.monotonic(), Path(tempfile.mkdtemp())
        count, same = case(name, args.kills, moments, folder)
        wrong += not same
        said = "the same to the bit" if same else f"DIFFERS, see {folder}"
        print(f"{name:12} {count:3} kills  {said}  {time.monotonic() - began:6.0f} s", flush=True)
        if same:
            shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
