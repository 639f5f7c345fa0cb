"""Ray Tune around `fl.run`, as one writes it by hand: what `flowrl tune` is measured beside.

python bench/handwritten_tune.py POINTS STEPS: POINTS is a JSON list of the settings of each trial.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

import flowrl as fl


def train(config: dict[str, Any]) -> None:
    with fl.run(fl.ppo("CartPole-v1", **config["point"]), steps=config["steps"]) as run:
        for row in run:
            tune.report({"return_mean": row["return_mean"], "env_steps": row["env_steps"]})


def main(points: list[dict[str, Any]], steps: int) -> None:
    ray.init(address="local", logging_level=logging.ERROR, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            train,
            param_space={"point": tune.grid_search(points), "steps": steps},
            tune_config=tune.TuneConfig(
                metric="return_mean",
                mode="max",
                scheduler=ASHAScheduler(
                    time_attr="env_steps", max_t=steps, grace_period=steps // 9, reduction_factor=3
                ),
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        found: Any = tuner.fit()
        results = [result.metrics for result in found]
    total = sum(metrics["env_steps"] for metrics in results)
    best = max(metrics["return_mean"] for metrics in results)
    print(json.dumps({"env_steps": total, "best": best}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
