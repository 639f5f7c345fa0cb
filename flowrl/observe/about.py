"""``run.json``: how a run was started, with what, and where; enough to repeat it."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from datetime import datetime
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gymnasium as gym
import jax

import flowrl
from flowrl.core.machine import usable_cores
from flowrl.envs.agents import PETTINGZOO
from flowrl.envs.prefixes import ADAPTERS
from flowrl.errors import FlowrlError, SaveError
from flowrl.graph.plan import Plan
from flowrl.graph.values import from_text
from flowrl.rollout.runners import Runners

FILE = "run.json"
OF_PYTHON = "a function of a row"
"""What stands for a goal that is a function of Python, which can't be written."""
PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "gymnasium", "ray", "mujoco",
    "box2d", "imageio-ffmpeg",
)  # fmt: skip
"""The packages whose versions every run notes, beside those of its environments."""


def about(
    plan: Plan,
    runtime: Any,
    seed: int,
    steps: int | None,
    until: Any,
    started: float,
    snapshots: Any = None,
    init: Any = None,
) -> dict[str, Any]:
    """Return what there is to know of a run before it starts, as plain values.

    Args:
        plan: of the graph.
        runtime: the runtime.
        seed: of every random number.
        steps: the environment steps after which it ends; None for no limit.
        until: its goal, a function of a row; None for none. One that has a `text` is noted by it.
        started: when it was started, by `time.time`.
        snapshots: how often it is kept; None for never.
        init: where its first weights come from, as plain values; None for its own.
    """
    return {
        "graph": plan.graph.name,
        "seed": int(seed),
        "steps": steps,
        "until": _goal_text(until),
        "runtime": runtime_name(runtime),
        "runtime_settings": runtime_settings(runtime),
        "runtime_left_out": _left_out(runtime),
        "snapshots": None if snapshots is None else asdict(snapshots),
        "init": init,
        "started": datetime.fromtimestamp(started).astimezone().isoformat(timespec="milliseconds"),
        "versions": _versions(plan),
        "git": _git(),
        "machine": machine(),
    }


def runtime_name(runtime: Any) -> str:
    """Return the name of a runtime as `fl.run` takes it, such as ``local``."""
    return type(runtime).__name__.removesuffix("Runtime").lower()


def runtime_settings(runtime: Any) -> dict[str, str]:
    """Return the settings of a runtime that are not the default ones, as texts without secrets."""
    if not is_dataclass(runtime):
        return {}
    found = {}
    for f in fields(runtime):
        value = _saved(f, getattr(runtime, f.name))
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if value != default:
            found[f.name] = repr(value)
    return found


def _saved(setting: Field[Any], value: Any) -> Any:
    """Return what may be noted of a setting, which by its metadata may hold secrets."""
    without_secrets = setting.metadata.get("saved")
    return value if without_secrets is None else without_secrets(value)


def _left_out(runtime: Any) -> list[str]:
    """Return the settings of a runtime of which not all is noted, for it may hold secrets."""
    if not is_dataclass(runtime):
        return []
    found = {f.name: (f, getattr(runtime, f.name)) for f in fields(runtime)}
    return [name for name, (f, value) in found.items() if _saved(f, value) != value]


@cache
def _version(package: str) -> str:
    """Return the version of a package, looked up once, for a process keeps what it imported."""
    return version(package)


def _versions(plan: Plan) -> dict[str, str]:
    """Return versions by package: of Python, of flowrl and what it uses, and of environments."""
    # A package that is installed under another name than it is imported by is not found: to look
    # through all that is installed takes half a second.
    runners = [r for r in plan.graph.resources.values() if isinstance(r, Runners)]
    names = [*PACKAGES, *(_package(each.env) for each in runners)]
    found = {"python": platform.python_version(), "flowrl": flowrl.__version__}
    for name in filter(None, dict.fromkeys(names)):
        with suppress(PackageNotFoundError):
            found[name] = _version(name)
    return found


def _package(env: Any) -> str:
    """Return the package that an environment comes from, empty if that is not known."""
    while isinstance(env, partial):
        env = env.func
    if not isinstance(env, str):
        return getattr(env, "__module__", "").partition(".")[0]
    prefix = env.partition(":")[0]
    if prefix in (*ADAPTERS, PETTINGZOO):
        return prefix
    spec = gym.registry.get(env)
    entry: Any = spec.entry_point or spec.vector_entry_point if spec is not None else ""
    where = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    return where.partition(":")[0].partition(".")[0]


def _git() -> dict[str, Any] | None:
    """Return the commit of the working directory and whether files differ; None without git."""
    program = shutil.which("git")
    if program is None:
        return None

    def git(*words: str) -> str:
        command = [str(program), *words]
        done = subprocess.run(  # noqa: S603 - all words are ours
            command, capture_output=True, text=True, check=True, timeout=5
        )
        return done.stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> dict[str, Any]:
    """Return the name of this machine, its system, its usable cores and the devices of JAX."""
    devices = [f"{device.platform} ({device.device_kind})" for device in jax.devices()]
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "cores": usable_cores(),
        "devices": devices,
    }


def goal_of(steps: int | None, until: Any) -> str:
    """Return when a run ends, as text; empty for one that goes on until it is closed.

    Args:
        steps: the environment steps after which it ends; None for no limit.
        until: its goal, a function of a row or the text that a saved run notes; None for none.
    """
    goal = _goal_text(until)
    found = [] if goal is None else [goal]
    return " or ".join(found if steps is None else [*found, f"{steps:,} steps"])


def _goal_text(until: Any) -> str | None:
    """Return a goal as text: as it was written, if it was."""
    if until is None or isinstance(until, str):
        return until
    return str(getattr(until, "text", OF_PYTHON))


def to_text(facts: dict[str, Any]) -> str:
    """Return facts about a run as the text of the file."""
    return json.dumps(facts, indent=1) + "\n"


def ending(reason: str | None, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return how a run ended.

    Args:
        reason: as `Run.reason` says; None if it goes on.
        rows: all of them so far.
    """
    last = rows[-1] if rows else {"env_steps": 0, "seconds": 0.0}
    steps, seconds = int(last["env_steps"]), round(last["seconds"], 3)
    return {"reason": reason, "rows": len(rows), "env_steps": steps, "seconds": seconds}


def read(path: str | Path) -> dict[str, Any] | None:
    """Return how a saved run was started, or None if it was saved without that.

    Args:
        path: the directory of the run.

    Raises:
        SaveError: the file is damaged.
    """
    file = Path(path) / FILE
    if not file.is_file():
        return None
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        _ = facts["seed"], facts["steps"], facts["until"], facts["runtime"]
    except (ValueError, KeyError, TypeError) as error:
        raise SaveError(f"{file} is damaged: {error}") from None
    return dict(facts)


def settings_of_runtime(facts: dict[str, Any], path: str | Path, kind: Any) -> dict[str, Any]:
    """Return the settings of a saved run's runtime that are not the default ones.

    Args:
        facts: as `read` returned them.
        path: the directory of the run.
        kind: the class of the runtime. The metadata of a field may hold the function that reads it.

    Raises:
        SaveError: one of them is no value of flowrl, so that it can't be read back.
    """
    found, own = {}, {f.name: f.metadata.get("read") for f in fields(kind)}
    for name, text in facts.get("runtime_settings", {}).items():
        read = own.get(name) or partial(from_text, what="value")
        try:
            found[name] = read(text)
        except (FlowrlError, ValueError, SyntaxError):
            raise SaveError(
                f"{Path(path) / FILE}: {name}={text} of its runtime can't be read back; name the "
                "runtime yourself: --runtime local, or fl.run(..., runtime=...)"
            ) from None
    return found


def differences(facts: dict[str, Any]) -> list[str]:
    """Return the packages, and the devices of JAX, that are others than when a run was started."""
    found = []
    for name, then in facts.get("versions", {}).items():
        if name in ("python", "flowrl"):
            now = {"python": platform.python_version(), "flowrl": flowrl.__version__}[name]
        else:
            try:
                now = _version(name)
            except PackageNotFoundError:
                now = "none"
        if now != then:
            found.append(f"{name} {then}, now {now}")
    before, here = facts.get("machine", {}).get("devices", []), machine()["devices"]
    if set(before) - set(here):
        found.append(f"{', '.join(before)}, now {', '.join(here)}")
    return found
