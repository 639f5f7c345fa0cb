"""IMPALA without its queue: the same recipe, one stage, lag 0. What the queue is worth is then a number.

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
        print(
            f"{graph.name}: return {row['return_mean']:.1f}, {row['steps_per_second']:,.0f} steps/s, lag {row['lag_mean']:.1f}"
        )
        runs.append(run)
    return runs


if __name__ == "__main__":
    main()
