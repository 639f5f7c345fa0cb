"""Train PPO on CartPole-v1: build the stock graph, look at its plan, train, evaluate, save.

Run it: python examples/ppo_cartpole.py
"""

import flowrl as fl


def main(steps: int = 150_000, out: str | None = None) -> fl.Run:
    graph = fl.ppo("CartPole-v1", fl.PPOSettings(**fl.tuned("ppo", "CartPole-v1")))
    print(graph.compile())
    with fl.run(graph, seed=0, steps=steps, until=lambda row: row["return_mean"] >= 475) as run:
        for row in run:
            speed = f"{row['steps_per_second']:>7,.0f} steps/s"
            print(f"{row['env_steps']:>8,} steps   return {row['return_mean']:6.1f}   {speed}")
    # An evaluation takes the greedy actions; training sampled them.
    returns = run.policy.evaluate(episodes=10)
    print(f"greedy: {returns.mean():.0f} +- {returns.std():.0f}")
    if out is not None:
        run.save(out)
    return run


if __name__ == "__main__":
    main()
