"""Self-play: PPO learns tic-tac-toe against frozen versions of itself."""

import flowrl as fl


def graph() -> fl.Graph:
    one_policy = fl.ppo(
        "pettingzoo:classic.tictactoe_v3",
        envs_per_runner=32,
        num_runners=4,
        rollout_length=16,
        batch_size=2048,
        minibatch_size=512,
        epochs=4,
        lr=1e-3,
        gamma=1.0,
        ent_coef=0.02,
        policy=fl.Policy(fl.networks.MLP, hidden=(128, 128)),
    )
    return fl.self_play(
        one_policy,
        fl.League(capacity=20, keep_first=3),
        fl.ChooseOpponents(every=2, sampling="pfsp"),
        fl.AddOpponent(every=10),
    )


def main(steps: int = 300_000) -> fl.Run:
    with fl.run(graph(), steps=steps) as run:
        for row in run:
            print(
                f"{row['env_steps']:>9,} steps, return {row['return_mean/learner']:6.2f}, lost to "
                f"the first version {row['league/loss_rate/0']:.0%}, Elo {row['league/elo']:.0f}"
            )
    return run


if __name__ == "__main__":
    main()
