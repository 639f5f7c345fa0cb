"""Learn tic-tac-toe by self-play: PPO against frozen versions of itself.

Run it: python examples/self_play.py
"""

import flowrl as fl


def graph() -> fl.Graph:
    settings = fl.PPOSettings(
        num_runners=2,
        envs_per_runner=64,
        rollout_length=16,
        batch_size=2048,
        minibatch_size=256,
        epochs=8,
        lr=fl.Linear(1e-3, 1e-4, steps=12_000),
        gamma=1.0,
        # So much entropy that opponents go on trying every move, and the learner has seen it.
        ent_coef=0.2,
        policy=fl.Policy(fl.networks.MLP, hidden=(128, 128)),
    )
    return fl.self_play(
        fl.ppo("pettingzoo:classic.tictactoe_v3", settings),
        fl.League(capacity=20, keep_first=4),
        fl.ChooseOpponents(every=2, sampling="uniform"),
        fl.AddOpponent(every=8),
    )


def main(steps: int = 800_000) -> fl.Run:
    with fl.run(graph(), steps=steps) as run:
        for row in run:
            rates = [
                f"{row[f'league/{name}_rate']:4.0%} {name}" for name in ("win", "draw", "loss")
            ]
            elo = f"Elo {row['league/elo']:.0f}, of the first version {row['league/elo/0']:.0f}"
            print(f"{row['env_steps']:>8,} steps   returns: {', '.join(rates)}   {elo}")
    return run


if __name__ == "__main__":
    main()
