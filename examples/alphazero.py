"""AlphaZero (Silver et al. 2018) on tic-tac-toe: a policy that searches before it moves.

The module's call is the search, so that runners, evaluations and the saved policy play by it. The
loss searches the sampled boards once more, by the newest weights, and moves the network towards
what it finds: that stands for the visits of the first search, which a batch does not hold. There is
no buffer of old games, and moves are sampled by their visits in all of a game.
Run it: python examples/alphazero.py
"""

from dataclasses import dataclass
from typing import ClassVar

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flowrl as fl

LINES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]


def moved(board, move):
    """Return the board as the other player sees it, whether the move won, and whether it ended."""
    own = jnp.where(jnp.arange(9) == move, 1.0, board)
    won = (own[jnp.array(LINES)] == 1).all(-1).any()
    return -own, won, won | (own != 0).all()


class TicTacToe(fl.envs.JaxEnv):
    """One policy plays both sides: 1 is a field of the player to move, -1 one of the other."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (9,), np.float32)
    action_space = gym.spaces.Discrete(9)

    def reset(self, key):
        return jnp.zeros(9), jnp.zeros(9)

    def step(self, board, action, key):
        board, won, over = moved(board, action)
        return board, board, won.astype(jnp.float32), over, jnp.bool_(False)


class Searching(nnx.Module):
    """A network, and a Monte Carlo tree search by it."""

    def __init__(self, obs_space, action_space, *, width=64, searches=48, rngs):
        self.searches = searches
        self.hidden = nnx.List([nnx.Linear(n, width, rngs=rngs) for n in (9, width)])
        self.heads = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, boards):
        return jnp.log(jnp.maximum(self.search(boards), 1e-9)), self.prior(boards)[1]

    def prior(self, boards):
        """Return the network's own logits ``[..., 9]`` and values ``[...]``."""
        x = boards
        for layer in self.hidden:
            x = nnx.relu(layer(x))
        x = self.heads(x)
        return jnp.where(boards == 0, x[..., :9], -1e9), jnp.tanh(x[..., 9])

    def search(self, boards):
        """Return the shares ``[N, 9]`` of the searches that visit each move of some boards."""
        visits = jax.vmap(self._visits)(boards)
        return visits / visits.sum(-1, keepdims=True)

    def _visits(self, board):
        nodes = self.searches + 1
        # A quarter of the root's prior is the same for all moves, so that one is tried which the
        # network rules out. In AlphaZero that is random noise, and in training only.
        free = board == 0
        prior = 0.75 * jax.nn.softmax(self.prior(board)[0]) + 0.25 * free / free.sum().clip(1)
        tree = {
            "board": jnp.zeros((nodes, 9)).at[0].set(board),
            "prior": jnp.zeros((nodes, 9)).at[0].set(prior),
            "child": jnp.zeros((nodes, 9), int),  # 0: none yet
            "parent": jnp.full(nodes, -1),
            "over": jnp.zeros(nodes, bool),
            "visits": jnp.zeros(nodes).at[0].set(1.0),
            "value": jnp.zeros(nodes),  # the sum, for the player to move
        }
        tree = jax.lax.fori_loop(1, nodes, self._search_once, tree)
        return jnp.where(tree["child"][0] > 0, tree["visits"][tree["child"][0]], 0.0)

    def _search_once(self, new, tree):
        def with_best_move(node):
            child = tree["child"][node]
            visits = jnp.where(child > 0, tree["visits"][child], 0.0)
            value = jnp.where(child > 0, -tree["value"][child] / visits.clip(1.0), 0.0)
            bonus = tree["prior"][node] * jnp.sqrt(tree["visits"][node]) / (1.0 + visits)
            free = tree["board"][node] == 0
            return node, jnp.argmax(jnp.where(free, value + 1.5 * bonus, -jnp.inf))

        def goes_on(at):
            return (tree["child"][at] > 0) & ~tree["over"][tree["child"][at]]

        node, move = jax.lax.while_loop(
            goes_on, lambda at: with_best_move(tree["child"][at]), with_best_move(0)
        )
        # A leaf where the game is over is visited again; any other one is new.
        leaf = jnp.where(tree["child"][node, move] > 0, tree["child"][node, move], new)
        board, won, over = moved(tree["board"][node], move)
        logits, value = self.prior(board)
        made = {"board": board, "prior": jax.nn.softmax(logits), "parent": node, "over": over}
        tree = {**tree, **{name: tree[name].at[leaf].set(x) for name, x in made.items()}}
        tree["child"] = tree["child"].at[node, move].set(leaf)

        def up(carry):
            node, value, visits, values = carry
            visits, values = visits.at[node].add(1.0), values.at[node].add(value)
            return tree["parent"][node], -value, visits, values

        value = jnp.where(over, -won.astype(jnp.float32), value)
        carry = (leaf, value, tree["visits"], tree["value"])
        carry = jax.lax.while_loop(lambda carry: carry[0] >= 0, up, carry)
        return {**tree, "visits": carry[2], "value": carry[3]}


@dataclass(frozen=True)
class AlphaZeroLoss(fl.losses.Loss):
    """Moves towards those of the search, and values towards how the games ended.

    A game that goes on after the batch counts as it is valued there.
    """

    needs: ClassVar[tuple[str, ...]] = ("obs", "reward", "terminated")
    on_policy: ClassVar[bool] = False
    sequences: ClassVar[bool] = True  # it takes whole columns, for games go on from row to row

    def __call__(self, policy, params, batch):
        def result(later, row):
            reward, terminated = row
            result = reward - jnp.where(terminated, 0.0, later)
            return result, result

        boards = batch["obs"].reshape(-1, 9)
        found = jax.lax.stop_gradient(policy(params, boards, method="search"))
        logits, value = policy(params, boards, method="prior")
        _, last = policy(params, batch["bootstrap_obs"], method="prior")
        rows = batch["reward"], batch["terminated"]
        results = jax.lax.scan(result, jax.lax.stop_gradient(last), rows, reverse=True)[1]
        weight = batch["valid"].reshape(-1) / batch["valid"].sum()
        of_moves = -(weight * (found * jax.nn.log_softmax(logits)).sum(-1)).sum()
        of_values = (weight * (value - results.reshape(-1)) ** 2).sum()
        return of_moves + of_values, {"loss/moves": of_moves, "loss/values": of_values}


def graph(width: int = 64, searches: int = 48, report_every: int = 4) -> fl.Graph:
    policy = fl.Policy(Searching, width=width, searches=searches)
    runners = fl.Runners(TicTacToe, policy, 1, envs_per_runner=64, rollout_length=32)
    learner = fl.Learner(policy, AlphaZeroLoss(), fl.Adam(3e-3))
    return fl.Graph("alphazero", runners=runners, learner=learner).then(
        sample=fl.ParallelSample(),
        train=fl.TrainOneStep(epochs=4, minibatch_size=512),
        sync=fl.SyncWeights(),
        report=fl.Report(every=report_every),
    )


def against_every_reply(policy: fl.TrainedPolicy) -> dict[str, int]:
    """Let the policy play against every reply to its moves, and count how the games end."""
    ends = {"won": 0, "drawn": 0, "lost": 0}
    boards = [(np.zeros(9, np.float32), ours) for ours in (True, False)]
    while boards:
        board, ours = boards.pop()
        for move in [int(policy.act(board))] if ours else np.flatnonzero(board == 0):
            after, won, over = moved(board, move)
            if over:
                ends[("won" if ours else "lost") if won else "drawn"] += 1
            else:
                boards.append((np.asarray(after), not ours))
    return ends


def main(steps: int = 200_000, **settings) -> fl.Run:
    with fl.run(graph(**settings), steps=steps) as run:
        print("games against every reply, before training:", against_every_reply(run.policy))
        for row in run:
            print(
                f"{row['env_steps']:>8,} steps   games with a winner (return) "
                f"{row['return_mean']:4.0%}   loss {row['loss/moves']:.2f} "
                f"{row['loss/values']:.2f}"
            )
    print("games against every reply, after training:", against_every_reply(run.policy))
    return run


if __name__ == "__main__":
    main()
