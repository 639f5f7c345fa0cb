"""Saved policies: how they are written, checked and loaded. Nothing in them is pickled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl.envs.gym_envs import Make, Probed, env_name, probe
from flowrl.errors import SaveError, SettingError, unknown
from flowrl.graph import values
from flowrl.observe.best import best_folder, best_named
from flowrl.observe.checkpoints import read_weights, write_weights
from flowrl.observe.manifest import MANIFEST, verify
from flowrl.observe.trained import TrainedPolicy
from flowrl.rl.policies import network
from flowrl.rl.spaces import Spaces

FORMAT = 1
"""The format of saved policies. Every version loads those of all versions before it."""
WHICH = ("last", "best")
"""The policies that a run leaves."""
ONE, SEVERAL = "policy", "policies"
"""The folder of a run's one policy, and that of the folders of several."""


def policy_text(policy: TrainedPolicy) -> str:
    """Return what is needed beside the weights to use a policy, as JSON.

    Raises:
        SaveError: the module has no name from which it can be imported again.
    """
    unknown = {"env": "None", "wrappers": "()", "env_settings": "{}"}
    made = {
        "env": policy.env,
        "wrappers": policy.wrappers,
        "env_settings": dict(policy.env_settings),
    }
    saved = {}
    for name, value in made.items():
        with suppress(SaveError):
            saved[name] = _strict_text(value)
    # No environment is better than one without its wrappers. Who names an environment later gets
    # what could be saved of the wrappers and settings around it.
    if len(saved) < len(made):
        saved = {**unknown, **saved, "env": "None"}
    facts = {"policy": _strict_text(policy.policy), "action_values": policy.action_values}
    if policy.deterministic:
        facts["deterministic"] = True
    facts = {"format": FORMAT, **facts, **saved, "spaces": json.loads(policy.spaces.json)}
    if policy.agents:
        facts["agents"] = [*policy.agents]
    return json.dumps(facts, indent=1) + "\n"


def _strict_text(value: Any) -> str:
    return values.to_text(value, defaults=True, strict=True)


def save_policy(policy: TrainedPolicy, path: Path) -> None:
    """Write a policy: ``policy.json``, and the weights as an orbax checkpoint.

    Args:
        policy: with its weights.
        path: of a directory that does not exist.

    Raises:
        OSError: it can't be written.
    """
    text = policy_text(policy)
    path.mkdir(parents=True)
    (path / "policy.json").write_text(text, encoding="utf-8")
    write_weights(policy.weights, path / "weights")


def save_policies(policies: Mapping[str, TrainedPolicy], root: Path) -> None:
    """Write the policies of a run into its directory, in place of those that are there.

    Those of an earlier part of the run stay until the new ones are whole.

    Args:
        policies: by learner; one is written as ``policy``, several as ``policies/LEARNER``.
        root: the run's directory.

    Raises:
        OSError: they can't be written.
    """
    if not policies:
        return
    name = ONE if len(policies) == 1 else SEVERAL
    draft = root / f"{name}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    for learner, policy in policies.items():
        save_policy(policy, draft if len(policies) == 1 else draft / learner)
    shutil.rmtree(root / name, ignore_errors=True)
    draft.replace(root / name)


def load(
    path: str | Path,
    *,
    policy: str | None = None,
    which: str = "last",
    allow: Collection[str] = (),
    env: Make | None = None,
) -> TrainedPolicy:
    """Load a policy that a run saved, after checking every file against its checksum.

    Args:
        path: directory of the run.
        policy: the name of the learner that trained it, where the run had several; None where it
            had one (default None).
        which: ``last``, the policy at the end of the run (default), or ``best``, the one with the
            best value of the column that `Snapshots` names. The best is there as soon as a snapshot
            was made, also of a run that goes on or was killed.
        allow: packages beyond flowrl that may be imported for the user's own classes and functions
            (default none).
        env: id, class or function in place of the saved environment, with the saved wrappers and
            settings around it; None: the saved environment (default None).

    Raises:
        SaveError: there is no such run or policy, a file is damaged, or a package would be needed
            that is not allowed.
        SettingError: `env` has other spaces than the policy or lacks an agent that it plays, or
            `which` is neither of the two.
    """
    root = Path(path)
    while True:
        newest = best_named(root) if which == "best" else ""
        try:
            return _load(policy_folder(root, which, policy), allow, env)
        except Exception:
            # A run that goes on may have put a better one in its place meanwhile.
            if which != "best" or best_named(root) == newest:
                raise


def load_policies(
    path: str | Path, *, allow: Collection[str] = (), env: Make | None = None
) -> dict[str, TrainedPolicy]:
    """Load all policies that a run saved, by the names of their learners.

    Args:
        path: directory of the run.
        allow: packages beyond flowrl that may be imported for the user's own classes and functions
            (default none).
        env: id, class or function in place of the saved environment (default None).

    Returns:
        The policies by learner; that of a run with one learner is called ``policy``.

    Raises:
        SaveError: there is no such run or policy, a file is damaged, or a package would be needed
            that is not allowed.
        SettingError: `env` has other spaces than a policy, or lacks an agent that it plays.
    """
    return {name: _load(folder, allow, env) for name, folder in _folders(Path(path)).items()}


def _load(folder: Path, allow: Collection[str], env: Make | None) -> TrainedPolicy:
    """Load the policy in a folder whose files were checked; the arguments are those of `load`."""
    saved = _read_policy(folder / "policy.json")

    def value(name: str) -> Any:
        source = f"{folder / 'policy.json'}, {name}"
        return values.from_text(saved[name], allow=allow, source=source)

    policy, spaces = value("policy"), Spaces.from_json(json.dumps(saved["spaces"]))
    weights = read_weights(folder / "weights", network(policy, spaces))
    wrappers, settings = value("wrappers"), value("env_settings")
    agents = tuple(saved.get("agents", ()))
    if env is not None:
        _check_fits(env, probe(env, wrappers, settings), spaces, agents)
    made = value("env") if env is None else env
    marks = (saved.get("action_values", False), agents, saved.get("deterministic", False))
    return TrainedPolicy(policy, spaces, weights, made, wrappers, settings, *marks)


def _check_fits(env: Make, found: Probed, spaces: Spaces, agents: tuple[str, ...]) -> None:
    """Check that a policy can play in an environment.

    Raises:
        SettingError: the environment has other spaces, or lacks an agent that the policy plays.
    """
    name = env_name(env)
    by_agent = {"": found.first} if found.agents is None else found.agents
    for agent in agents or ("",):
        if agent not in by_agent:
            raise SettingError(_other_agents(name, agents, found.agents))
        if (other := by_agent[agent]) != spaces:
            who = f" for agent {agent}" if agent else ""
            raise SettingError(
                f"{name} has other spaces than this policy{who}: obs {other.obs}, "
                f"action {other.action}; it has {spaces}"
            )


def _other_agents(name: str, agents: tuple[str, ...], found: Mapping[str, Spaces] | None) -> str:
    """Return the text of an error where a policy was trained for other agents."""
    plays = f"this policy plays {', '.join(agents) or 'a single agent'}"
    known = "one agent only" if found is None else f"the agents {', '.join(found)}"
    return f"{name} has {known}, and {plays}"


def _read_policy(file: Path) -> dict[str, Any]:
    """Return what a policy's file says beside its weights.

    Raises:
        SaveError: it is of a format that is not known here.
    """
    saved: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if saved.get("format") not in range(1, FORMAT + 1):
        raise SaveError(
            f"{file} has format {saved.get('format')}, and this version of flowrl reads 1 to "
            f"{FORMAT}; load it with the version that saved it"
        )
    return saved


def policy_folder(root: Path, which: str = "last", policy: str | None = None) -> Path:
    """Return the folder of a saved policy, after checking every file in it.

    Args:
        root: directory of the run.
        which: ``last`` or ``best``.
        policy: the name of its learner, where the run had several.

    Raises:
        SaveError: there is no such run or policy, or a file is damaged.
        SettingError: `which` is neither of the two.
    """
    if which not in WHICH:
        raise SettingError(unknown("policy", which, WHICH))
    if which == "best":
        # A run that was killed has no manifest.
        if not root.is_dir() or (root / MANIFEST).exists():
            verify(root)
        if policy is not None:
            raise SaveError(f"{root}: the best policy is kept of runs with one learner only")
        return best_folder(root)
    folders = _folders(root)
    if policy is None and len(folders) == 1:
        return next(iter(folders.values()))
    if policy is None:
        raise SaveError(
            f"{root} holds several policies; name one of them by its learner: "
            f"{', '.join(folders)} (policy=..., --policy), or take all by fl.load_policies"
        )
    if policy not in folders:
        raise SaveError(f"{root}: {unknown('policy', policy, folders)}")
    return folders[policy]


def _folders(root: Path) -> dict[str, Path]:
    """Return the folders of a run's last policies by learner, after checking every file.

    Raises:
        SaveError: there is no such run or policy, or a file is damaged.
    """
    verify(root)
    several = root / SEVERAL
    if several.is_dir():
        return {folder.name: folder for folder in sorted(several.iterdir())}
    if not (root / ONE).is_dir():
        raise SaveError(f"{root} holds no policy: its run ended before there was one")
    return {ONE: root / ONE}
