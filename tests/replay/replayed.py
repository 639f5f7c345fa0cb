"""A slow list of what a replay is given, and of what may be drawn from it."""

import numpy as np

import flowrl as fl

GAMMA = 0.9


class World:
    """Some environments that report in their observations who and when they are, in NEXT_STEP form;
    and a list of all that they gave."""

    def __init__(self, envs, rng, over=0.2):
        self.rng, self.over = rng, over
        self.rows = [[] for _ in range(envs)]
        """By environment: (obs, action, reward, terminated, truncated, valid, version) of what was
        added; None where something went missing."""
        self.gone = [0] * envs
        self.ended = [False] * envs

    def rollout(self, first, count, steps, version):
        """A rollout of so many environments from the first on."""
        rows = [[self.step(e, version) for _ in range(steps)] for e in range(first, first + count)]
        names = ("obs", "action", "reward", "terminated", "truncated", "valid")
        kinds = (np.float32, np.int32, np.float32, bool, bool, bool)
        data = {
            name: np.array([[row[i] for row in column] for column in rows], kind).T
            for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
        }
        envs = np.arange(first, first + count, dtype=np.int32)
        columns = {
            "bootstrap_obs": np.array([self.obs(e) for e in envs], np.float32),
            "version": np.full(count, version, np.int32),
            "env": envs,
            "first": np.array([self.gone[e] - steps for e in envs], np.int32),
        }
        return fl.extend.Batch(data, columns), rows

    def obs(self, env):
        return env * 10_000 + self.gone[env]

    def step(self, env, version):
        obs, invalid = self.obs(env), self.ended[env]
        over = not invalid and self.rng.random() < self.over
        terminated = bool(over and self.rng.random() < 0.5)
        self.gone[env] += 1
        self.ended[env] = over
        reward = 0.0 if invalid else float(np.float32(self.rng.normal()))
        return (
            obs,
            int(self.rng.integers(5)),
            reward,
            terminated,
            over and not terminated,
            not invalid,
            version,
        )

    def added(self, first, rows):
        for env, column in enumerate(rows, first):
            if self.rows[env] and self.rows[env][-1][0] + 1 != column[0][0]:
                self.rows[env].append(
                    (self.rows[env][-1][0] + 1, None)
                )  # what it led to is known, and nothing after that
            self.rows[env] += column

    def deviation(self):
        """The deviation of the discounted returns after each step that was added."""
        returns = []
        for whole in self.rows:
            returned = 0.0
            for row in whole:
                if row[1] is None:
                    returned = 0.0  # where steps are missing an episode ends
                elif row[5]:
                    returned = returned * GAMMA + row[2]
                    returns.append(returned)
                    returned = 0.0 if row[3] or row[4] else returned
        return np.std(returns)

    def transitions(self, keep, n, repairs=True):
        """By observation: all that may be drawn where so many rows of each environment are kept.
        `repairs`: what went missing cuts an episode short, and takes a row."""
        found = {}
        for whole in self.rows:
            places = [
                i for i, row in enumerate(whole) if repairs or row[1] is not None
            ]  # what went missing takes one only where it is repaired
            rows = whole[places[max(0, len(places) - keep)] :] if places else []
            for i, row in enumerate(rows):
                if row[1] is None or not row[5]:
                    continue
                reward, discount, following = 0.0, 1.0, None
                for k in range(n):
                    if i + k >= len(rows):
                        break
                    now = rows[i + k]
                    reward += discount * now[2]
                    discount *= 0.0 if now[3] else GAMMA
                    cut = i + k + 1 < len(rows) and rows[i + k + 1][1] is None
                    if cut and not repairs:
                        break
                    if now[3] or now[4] or cut or k == n - 1:
                        following = now[0] + 1
                        break
                if following is not None:
                    found[row[0]] = (row[1], reward, discount, following, row[6])
        return found
