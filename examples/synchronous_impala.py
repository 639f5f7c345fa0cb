"""Measure what the queue of IMPALA is worth: run it with and without, in two stages or in one.

Without the queue, the policy lag is 0.

Run it: python examples/synchronous_impala.py
"""

import flowrl as fl

impala = fl.impala("CartPole-v1")
synchronous = impala.rename("synchronous").remove("queue").replace(sample=fl.ParallelSample())


def main(steps: int = 200_000) -> list[fl.Run]:
    runs = []
    for graph in (impala, synchronous):
        print(graph.compile())
        with fl.run(graph, steps=steps) as run:
            row = list(run)[-1]
        speed = f"{row['steps_per_second']:,.0f} steps/s, policy lag {row['lag_mean']:.1f}"
        print(f"{graph.name}: return {row['return_mean']:.1f}, {speed}")
        runs.append(run)
    return runs


if __name__ == "__main__":
    main()
