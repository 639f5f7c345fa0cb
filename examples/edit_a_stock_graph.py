"""Edit a stock graph, see what changed, and run both: graphs are values.

Run it: python examples/edit_a_stock_graph.py
"""

import flowrl as fl

ppo = fl.ppo("CartPole-v1")

edited = (
    ppo.rename("ppo_edited")
    .set("train.epochs", 4)  # one setting of an operator
    .set("learner.loss.kl_penalty_target", 0.01)  # one setting deep inside a resource
    .replace(batch=fl.Concat(batch_size=2048))  # another operator in place of one
    .insert(after="sync", play=fl.Evaluate(every=5, episodes=5))  # one operator more
    .remove("norm")  # one operator less: its predecessor is joined to its successor
)


def main(steps: int = 30_000) -> list[fl.Run]:
    print(edited)
    print(edited.compile())
    runs = []
    for graph in (ppo, edited):
        with fl.run(graph, steps=steps) as run:
            row = list(run)[-1]
        print(f"{graph.name}: return {row['return_mean']:.1f} after {row['env_steps']:,} steps")
        runs.append(run)
    return runs


if __name__ == "__main__":
    main()
