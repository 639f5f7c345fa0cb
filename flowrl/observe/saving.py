"""What a run leaves behind: a directory with rows, graph, plan and policy, sealed by a manifest. Nothing in it is pickled."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

import flowrl
from flowrl.core.items import Row
from flowrl.core.profile import Profile, from_text
from flowrl.envs.gym_envs import Make, env_name, probe
from flowrl.errors import ContractError, SaveError, SettingError
from flowrl.graph import values
from flowrl.rl.explore import EpsilonGreedy, Explore
from flowrl.rl.policies import SAMPLED, Memory, Network, Policy, Weights, jitted_act, network
from flowrl.rl.spaces import Spaces
from flowrl.rollout.evaluation import MAX_STEPS, Evaluation, play

EVALUATION_EPSILON = 0.05
MANIFEST = "manifest.json"
FAILURE = "failure.json"
"""In the directory of a run that an error ended."""
RECORDS = "records"
"""The folder that the manifest leaves out: a record has sums of its own, may be removed, and may be large."""


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy with its weights, ready to act, to be evaluated, and to be saved."""

    policy: Policy
    spaces: Spaces
    weights: Weights
    env: Make | None = None
    wrappers: tuple[Callable[[Any], Any], ...] = ()
    env_settings: Mapping[str, Any] = field(default_factory=dict)
    action_values: bool = False
    """Whether the action outputs are action values, as `DQNLoss` learns them, from which no actions are drawn by their size."""

    @property
    def drawn(self) -> Explore:
        """How actions are drawn where they are not greedy: from the distribution; epsilon-greedily, with 0.05, from action values.

        That epsilon is the one with which Mnih et al. (2015) evaluate.
        """
        return (
            EpsilonGreedy(EVALUATION_EPSILON, EVALUATION_EPSILON) if self.action_values else SAMPLED
        )

    @property
    def network(self) -> Network:
        """The policy, made for its spaces."""
        return network(self.policy, self.spaces)

    def act(self, obs: Any, carry: Any = None, *, greedy: bool = True, seed: int = 0) -> Any:
        """What to do: actions as the environment takes them.

        Args:
            obs: one observation ``[...]``, or several ``[N, ...]``.
            carry: of a recurrent policy: what the last call returned, None at an episode's start.
            greedy: the likeliest action; else one that is drawn, as `drawn` says.
            seed: of that draw.

        Returns:
            One action, or ``[N, ...]`` of them; from a recurrent policy that and the carry for the next call.

        Raises:
            ContractError: the observation has another shape than the space.
        """
        shape = self.spaces.obs.shape or ()
        given = np.asarray(obs, self.spaces.obs_dtype)
        single = given.shape == shape
        if not single and given.shape[1:] != shape:
            raise ContractError(
                f"act takes an observation of shape {list(shape)}, or several of them; got {list(given.shape)}"
            )
        net, given = self.network, given[None] if single else given
        memory = (
            net.memory(self.weights, len(given))
            if carry is None
            else Memory(carry, np.zeros(len(given), bool))
        )
        count, explore = len(given), self.drawn
        noise = (
            None
            if greedy
            else explore.noise(
                net.head,
                jax.random.key(seed),
                count,
                jax.numpy.float32(0),
                jax.numpy.zeros(count),
                1,
            )
        )
        packed, carry = jitted_act(net, explore)(self.weights, given, noise, memory)
        action = net.head.to_env(net.unpack(np.asarray(packed))[0])
        action = action[0] if single else action
        return (action, carry) if net.recurrent else action

    def evaluate(
        self, episodes: int = 20, *, seed: int = 0, greedy: bool = True, max_steps: int = MAX_STEPS
    ) -> Evaluation:
        """Play whole episodes in its environment. The result counts as the array ``[episodes]`` of their returns.

        What makes it less than it seems is logged as a warning: episodes that were cut, and those that are copies of each other.

        Args:
            episodes: how many.
            seed: of the first episode; the one with number i has `seed` + i, for its environment and for the draws of its actions.
            greedy: take the likeliest actions; else draw them, as `drawn` says, anew in each step.
            max_steps: of an episode, which is cut after so many; its return so far then counts.

        Raises:
            SaveError: the environment is not known: it had no name that could be saved.
        """
        if self.env is None:
            raise SaveError(
                "the environment of this policy is not known: it was a lambda or a local function, which have no name that could be saved. Name one "
                "that has: flowrl eval DIR --env FILE.py:FUNCTION, or fl.load(dir, env=...). Or use policy.act(obs) in an environment of your own"
            )
        explore, source = None if greedy else self.drawn, (self.wrappers, self.env_settings)
        found = play(
            self.env,
            self.network,
            self.weights,
            episodes,
            seed,
            *source,
            explore=explore,
            max_steps=max_steps,
        )
        for note in found.notes:
            logging.getLogger("flowrl").warning("flowrl: %s", note)
        return found


class RunDir:
    """The directory of one run, made anew: an existing one is never written to."""

    def __init__(self, path: str | Path, files: Mapping[str, str]) -> None:
        """Make the directory and write its first text files, by name.

        Raises:
            SaveError: it exists already and is not empty, or can't be made.
        """
        self.path = Path(path)
        check_free(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SaveError(f"can't make the directory {self.path}: {error.strerror}") from None
        for name, text in {"command.txt": _command(), **files}.items():
            (self.path / name).write_text(text, encoding="utf-8")
        self._rows = (self.path / "rows.jsonl").open("a", encoding="utf-8")

    def add(self, row: Row) -> None:
        """Write one Row, at once."""
        self._rows.write(to_json(row) + "\n")
        self._rows.flush()

    def put(self, name: str, text: str) -> None:
        """Write a text file, in place of what it was before, at one stroke."""
        draft = self.path / f"{name}.draft"
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.path / name)

    def finish(self, policy: TrainedPolicy | None, files: Mapping[str, str]) -> None:
        """Write the policy and more text files, then the manifest over all that is there."""
        self._rows.close()
        for name, text in files.items():
            self.put(name, text)
        if policy is not None:
            save_policy(policy, self.path / "policy")
        seal(self.path)


def check_free(path: str | Path) -> None:
    """Make sure that a run can be saved there.

    Raises:
        SaveError: there is a file of that name, or a directory that is not empty.
    """
    root = Path(path)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise SaveError(
            f"{root} exists already, and nothing is ever overwritten; name another directory"
        )


def to_json(row: Mapping[str, float]) -> str:
    """A Row as one JSON object; numbers that are not finite become null."""
    return json.dumps({k: v if math.isfinite(v) else None for k, v in row.items()})


def _command() -> str:
    program = Path(sys.argv[0])
    called = (
        ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    )
    return f"{shlex.join([*called, *sys.argv[1:]])}\n# flowrl {flowrl.__version__}, in {Path.cwd().name}\n"


def failure(error: BaseException) -> dict[str, str]:
    """The file, by name, that tells of an error that ended a run: its kind, its text, and the plain facts that it knows."""
    facts = {
        k: v for k, v in getattr(error, "facts", {}).items() if isinstance(v, str | int | float)
    }
    return {
        FAILURE: json.dumps(
            {"error": type(error).__name__, "text": str(error), "facts": facts}, indent=1
        )
        + "\n"
    }


def policy_text(policy: TrainedPolicy) -> str:
    """What is needed beside the weights to use a policy, as JSON.

    Raises:
        SaveError: the module has no name that leads back to it.
    """

    def text(value: Any) -> str:
        return values.to_text(value, defaults=True, strict=True)

    empty = {"env": "None", "wrappers": "()", "env_settings": "{}"}
    made = {
        "env": policy.env,
        "wrappers": policy.wrappers,
        "env_settings": dict(policy.env_settings),
    }
    saved = {}
    for name, value in made.items():
        with suppress(SaveError):
            saved[name] = text(value)
    if (
        len(saved) < len(made)
    ):  # no environment rather than one without its wrappers; who names one later gets what could be saved around it
        saved = {**empty, **saved, "env": "None"}
    facts = {"policy": text(policy.policy), "action_values": policy.action_values}
    return json.dumps({**facts, **saved, "spaces": json.loads(policy.spaces.json)}, indent=1) + "\n"


def save_policy(policy: TrainedPolicy, path: Path) -> None:
    """Write a policy: ``policy.json`` and the weights as an orbax checkpoint."""
    text = policy_text(policy)
    path.mkdir(parents=True)
    (path / "policy.json").write_text(text, encoding="utf-8")
    ocp = _orbax()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((path / "weights").resolve(), jax.device_get(_savable(policy.weights)))


def _savable(weights: Weights) -> dict[str, Any]:
    """Weights as plain arrays; orbax knows no random keys and no empty trees."""
    return {
        part: {k: _plain(x) for k, x in named.items()}
        for part, named in weights._asdict().items()
        if named
    }


def _plain(x: Any) -> Any:
    return jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _orbax() -> Any:
    import logging

    logging.getLogger("absl").setLevel(logging.ERROR)
    import orbax.checkpoint as ocp

    return ocp


def load(
    path: str | Path, *, allow: Collection[str] = (), env: Make | None = None
) -> TrainedPolicy:
    """Load a policy that a run saved, after checking every file against the manifest.

    Args:
        path: the run's directory.
        allow: packages beyond flowrl that may be imported for the user's own classes and functions.
        env: an id, class or function in place of the saved environment, with the saved wrappers and settings around it.

    Raises:
        SaveError: there is no such run, a file is damaged, or a package would be needed that is not allowed.
        SettingError: `env` has other spaces than the policy.
    """
    root = Path(path)
    verify(root)
    folder = root / "policy"
    if not folder.is_dir():
        raise SaveError(f"{root} holds no policy: its run ended before there was one")
    saved = json.loads((folder / "policy.json").read_text(encoding="utf-8"))

    def value(name: str) -> Any:
        return values.from_text(
            saved[name], allow=allow, source=f"{folder / 'policy.json'}, {name}"
        )

    policy, spaces = value("policy"), Spaces.from_json(json.dumps(saved["spaces"]))
    net = network(policy, spaces)
    like = jax.eval_shape(net.init, jax.random.key(0))
    wanted = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype),
        jax.eval_shape(lambda: _savable(net.init(jax.random.key(0)))),
    )
    with _orbax().StandardCheckpointer() as checkpointer:
        parts = checkpointer.restore((folder / "weights").resolve(), wanted)
    weights = Weights(
        *(
            {k: _like(parts[part][k], x) for k, x in getattr(like, part).items()}
            for part in Weights._fields
        )
    )
    wrappers, settings = value("wrappers"), value("env_settings")
    if env is not None and (found := probe(env, wrappers, settings)[0]) != spaces:
        raise SettingError(
            f"{env_name(env)} has other spaces than this policy: obs {found.obs}, action {found.action}; it has {spaces}"
        )
    made = value("env") if env is None else env
    return TrainedPolicy(
        policy, spaces, weights, made, wrappers, settings, saved.get("action_values", False)
    )


def _like(x: Any, like: Any) -> Any:
    array = jax.numpy.asarray(x)
    return (
        jax.random.wrap_key_data(array)
        if jax.numpy.issubdtype(like.dtype, jax.dtypes.prng_key)
        else array
    )


def profiles(path: str | Path) -> tuple[Profile, Profile]:
    """Where the time of a run went that is saved, goes on or was killed: of all of it, and of the part that tells its speed.

    Raises:
        SaveError: there is no such run, or it has only begun.
    """
    try:
        return from_text((Path(path) / "profile.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = Path(path).is_dir()
        early = "its run has only begun, or was killed before it told anything; the first comes seconds after the first row"
        early = early if (Path(path) / "graph.txt").is_file() else "it is no run's directory"
        what = f"{path} has no profile.json: {early}" if there else f"there is no directory {path}"
        raise SaveError(what) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SaveError(f"{path}/profile.json is damaged: {error}") from None


def seal(root: Path) -> None:
    """Write the manifest: the size and SHA-256 sum of every file but records. Last, and at one stroke."""
    found = [
        p
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name != MANIFEST and p.relative_to(root).parts[0] != RECORDS
    ]
    files = {p.relative_to(root).as_posix(): _facts(p) for p in found}
    text = json.dumps({"flowrl": flowrl.__version__, "files": files}, indent=1) + "\n"
    draft = root / f"{MANIFEST}.draft"
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(root / MANIFEST)


def verify(root: Path) -> None:
    """Check every file of a run against its manifest.

    Raises:
        SaveError: there is no manifest, or a file is missing or differs.
    """
    if not root.is_dir():
        raise SaveError(f"there is no directory {root}")
    try:
        manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except FileNotFoundError:
        inside = (
            f"; its run's directory is {root.parent}" if (root.parent / MANIFEST).is_file() else ""
        )
        raise SaveError(
            f"{root} has no {MANIFEST}: it is no run's directory, or its run was killed before it could save{inside}"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise SaveError(
            f"{root / MANIFEST} is damaged: it is not the JSON that was written"
        ) from None
    for name, facts in files.items():
        path = root / name
        if not path.is_file():
            raise SaveError(f"{path} is missing, though the manifest lists it")
        if _facts(path) != facts:
            raise SaveError(
                f"{path} is not what was saved: its size or SHA-256 sum differs from the manifest's; restore it from a copy"
            )


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {
            "size": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }
