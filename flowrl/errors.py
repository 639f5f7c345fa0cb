"""Errors that flowrl raises on purpose, and helpers to write their messages.

::

    FlowrlError                 where it happened, what is wrong, the way out
    ├── GraphError              a graph that is built wrongly: names, edges, edits
    │   └── CheckError          all problems that a check found, at once
    ├── SettingError            an unknown setting, or a value that it can't take
    ├── ContractError           an item lacks what an operator or resource needs of it
    ├── PolicyError             a network that does not fit its spaces
    ├── EnvError                an environment raised, or broke its declared spaces
    ├── NotFiniteError          NaN or infinity in a loss
    ├── RunError                a runtime that can't start
    │   └── LostError           a process that a run needs ended or hangs
    └── SaveError               a run or policy that can't be saved, verified or loaded
"""

from __future__ import annotations

import difflib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "CheckError",
    "ContractError",
    "EnvError",
    "FlowrlError",
    "GraphError",
    "LostError",
    "NotFiniteError",
    "PolicyError",
    "RunError",
    "SaveError",
    "SettingError",
]


class FlowrlError(Exception):
    """Base class of all errors that flowrl raises on purpose.

    Args:
        message: what is wrong, and the way out.
        where: address such as ``ppo.train``; the runtimes fill it in where it is empty (default
            empty).
        facts: what is known of the error as plain numbers and words, which `flowrl why` reads.
    """

    def __init__(self, message: str, where: str = "", **facts: Any) -> None:
        super().__init__(message, where)
        self.message = message
        self.where = where
        self.of = ""
        """The class of the value that is wrong, which stands for an address until there is one."""
        self.facts = facts

    def __str__(self) -> str:
        where = self.where or self.of
        return f"{where}: {self.message}" if where else self.message

    def at(self, where: str) -> FlowrlError:
        """Set the address unless a deeper caller has set it, and return the error.

        Args:
            where: an address such as ``ppo.train``.
        """
        self.where = self.where or where
        return self


def address_of(error: BaseException | None) -> str:
    """Return the address of an error, such as ``ppo.train``; empty if it has none.

    Args:
        error: one of flowrl, or another one, to which the address was added as a note.
    """
    if isinstance(error, FlowrlError):
        return error.where
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removeprefix("in ") for note in notes if note.startswith("in ")), "")


class GraphError(FlowrlError):
    """A graph is built wrongly: a name, an edge or an edit does not fit."""


class CheckError(GraphError):
    """A check found problems in a graph; the message lists all of them.

    Args:
        name: the name of the graph.
        problems: all problems, a line each, which the attribute `problems` holds as a tuple.
    """

    def __init__(self, name: str, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [f"{name} can't run: {count}", *(f"  {problem}" for problem in self.problems)]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        # An exception is pickled by the arguments of its base class, which are other ones here.
        return (_rebuild_check_error, (self.message, self.problems))


def _rebuild_check_error(message: str, problems: tuple[str, ...]) -> CheckError:
    error = CheckError("", problems)
    error.message = message
    return error


class SettingError(FlowrlError):
    """A setting is unknown, or can't take the value that it was given.

    For a name of another library the message gives flowrl's name.
    """


class ContractError(FlowrlError):
    """An item lacks what an operator or resource needs of it, such as a field of a batch."""


class PolicyError(FlowrlError):
    """A network does not fit the spaces of its environment."""


class EnvError(FlowrlError):
    """An environment raised, gave NaN or infinity, or broke its declared spaces."""


class NotFiniteError(FlowrlError):
    """A loss or weights became NaN or infinite; the weights are as they were before that update."""


class RunError(FlowrlError):
    """A runtime can't start, or can't go on."""


class LostError(RunError):
    """A process that a run needs ended or hangs, or what it computed was lost with its node.

    A run that makes snapshots goes on from the newest one.
    """


def lasting(error: FlowrlError) -> FlowrlError:
    """Return an error that came again and again, which no snapshot helps against."""
    return RunError(error.message, error.where) if isinstance(error, LostError) else error


class SaveError(FlowrlError):
    """A run or policy can't be saved, verified or loaded."""


def a(value: object) -> str:
    """Return the type of a value with its article, for messages: ``an int``, ``a Batch``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def raised(error: BaseException) -> str:
    """Describe an error of a user's code: its type, its text and the line of theirs it is from."""
    return f"{type(error).__name__}: {error}{line_of(error)}"


def step_of(step: int, in_episode: int) -> str:
    """Return at which of its steps an environment failed, to end a message with.

    Args:
        step: the steps that it took since it was made, the one that failed among them.
        in_episode: those of them in the episode; 0 where it failed in a reset.

    >>> step_of(57, 12)
    'at its step 57 since it was made, 12 of an episode'
    >>> step_of(57, 0)
    'in a reset, after its step 57'
    """
    if not in_episode:
        return f"in a reset, after its step {step:,}"
    return f"at its step {step:,} since it was made, {in_episode:,} of an episode"


def no_file(path: str | Path) -> str:
    """Return the message for a file that is not there, with the nearest one or where it was sought.

    >>> no_file("/none/graph.py")
    'there is no file /none/graph.py; is its path right?'
    """
    missing = Path(path)
    folder = missing.parent if missing.parent.is_dir() else Path()
    names = [file.name for file in folder.glob(f"*{missing.suffix}")] if missing.suffix else []
    near = difflib.get_close_matches(missing.name, names, n=1)
    if near:
        return f"there is no file {path}; did you mean {folder / near[0]}?"
    if missing.is_absolute():
        return f"there is no file {path}; is its path right?"
    return f"there is no file {path}; its path begins in the folder where you are, {Path.cwd()}"


def described(error: BaseException) -> str:
    """Return an error as one message, as the command line prints it."""
    kind = "" if isinstance(error, FlowrlError) else f"{type(error).__name__}: "
    # The runtimes add the address of the node as a note.
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
    return f"{kind}{error}{''.join(f' ({note})' for note in notes)}"


def line_of(error: BaseException) -> str:
    """Return the line of a user's code that an error is from, such as `` (mine.py:12)``.

    The text is empty if no line of a user's code took part.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(NOT_THE_USERS) and "site-packages" not in frame.filename
    ]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def install(extra: str) -> str:
    """Return the command that installs an extra of flowrl into the environment of this process."""
    return f"{sys.executable} -m pip install 'flowrl[{extra}]'"


# By its own folder and not by its name: a clone, with a user's files, may be called flowrl too.
NOT_THE_USERS = (
    str(Path(__file__).resolve().parent) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    "<",
)
"""How the names of files begin that no user wrote: flowrl's, Python's own, and what is no file."""

HINTS = dict.fromkeys(
    [("runtime", device) for device in ("cpu", "gpu", "cuda", "tpu")],
    "; they use a GPU by themselves if JAX finds one",
)
"""What to add to the message for an unknown name, by its kind and the name."""
FOREIGN = {
    "clip": "clip_ratio",
    "clip_coef": "clip_ratio",
    "clip_eps": "clip_ratio",
    "clip_param": "clip_ratio",
    "clip_range": "clip_ratio",
    "clip_range_vf": "value_clip",
    "discount": "gamma",
    "delta_std": "sigma",
    "ent_coeff": "ent_coef",
    "entropy_coef": "ent_coef",
    "entropy_coeff": "ent_coef",
    "exploration_fraction": "epsilon_steps",
    "fcnet_hiddens": "hidden",
    "grad_clip": "max_grad_norm",
    "hidden_sizes": "hidden",
    "l2_coeff": "weight_decay",
    "lambda_": "gae_lambda",
    "learning_rate": "lr",
    "n_envs": "envs_per_runner",
    "n_epochs": "epochs",
    "n_steps": "rollout_length",
    "n_delta": "pairs",
    "n_top": "top",
    "net_arch": "hidden",
    "noise_stdev": "sigma",
    "normalize_observations": "normalize",
    "norm_obs": "normalize",
    "num_env_runners": "num_runners",
    "num_envs": "envs_per_runner",
    "num_envs_per_env_runner": "envs_per_runner",
    "num_epochs": "epochs",
    "num_rollouts": "pairs",
    "num_sgd_iter": "epochs",
    "num_steps": "rollout_length",
    "num_workers": "num_runners",
    "replay_buffer_size": "buffer_size",
    "rollout_fragment_length": "rollout_length",
    "rollouts_used": "top",
    "sgd_minibatch_size": "minibatch_size",
    "sgd_stepsize": "lr",
    "stepsize": "lr",
    "target_network_frequency": "target_update_every",
    "target_network_update_freq": "target_update_every",
    "target_update_interval": "target_update_every",
    "train_batch_size": "batch_size",
    "update_epochs": "epochs",
    "vf_loss_coeff": "vf_coef",
    "value_coef": "vf_coef",
}
"""Settings of Stable-Baselines3, RLlib and CleanRL, and what they are called here."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name, with the known names and the nearest of them.

    Args:
        kind: what the name is of, such as ``setting``.
        name: the unknown name.
        known: all names that there are.

    >>> unknown("setting", "epoch", ["epochs", "lr"])
    "unknown setting 'epoch'; did you mean 'epochs'? Known: epochs, lr"
    >>> unknown("setting", "clip", ["value_clip", "clip_ratio"])
    "unknown setting 'clip'; did you mean 'clip_ratio'? Known: value_clip, clip_ratio"
    >>> unknown("name", "PPO", ["PPOSettings", "ppo"])
    "unknown name 'PPO'; did you mean 'ppo'? Known: PPOSettings, ppo"
    """
    names, name = list(known), str(name)
    if FOREIGN.get(name) in names:
        return f"unknown {kind} '{name}'; did you mean '{FOREIGN[name]}'? Known: {', '.join(names)}"
    # Who writes a name large means it.
    nearest = [known_name for known_name in names if known_name.lower() == name.lower()]
    # Who gives the last part of a path, such as that of a setting, means the path.
    ends = (f".{name}", f"/{name}")
    nearest += [known_name for known_name in names if known_name.endswith(ends)]
    # So does who gives its beginning.
    begun = [known_name for known_name in names if len(name) > 2 and known_name.startswith(name)]
    nearest = nearest or sorted(begun, key=len)[:1]
    nearest = nearest or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean '{nearest[0]}'?" if nearest else "."
    more = HINTS.get((kind, name.lower()), "")
    return f"unknown {kind} '{name}'{hint} Known: {', '.join(names) or 'none'}{more}"
