"""What a run leaves on disk: a directory with rows, graph, plan and policy, sealed by a manifest.

Nothing in it is pickled.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import flowrl
from flowrl.core.file_sums import facts_of
from flowrl.core.items import Row
from flowrl.core.profile import Profile, from_text
from flowrl.core.saved_rows import way_to_runs
from flowrl.envs.gym_envs import Make, env_name, probe
from flowrl.errors import SaveError, SettingError, unknown
from flowrl.graph import values
from flowrl.observe.best import best_folder
from flowrl.observe.checkpoints import read_weights, write_weights
from flowrl.observe.snapshots import FOLDER
from flowrl.observe.trained import TrainedPolicy
from flowrl.rl.policies import network
from flowrl.rl.spaces import Spaces

MANIFEST = "manifest.json"
"""The file that lists all others of a run's directory with their sizes and SHA-256 sums."""
FAILURE = "failure.json"
"""The file that holds the error that ended a run."""
FORMAT = 1
"""The format of saved policies. Every version loads those of all versions before it."""
RECORDS = "records"
"""The folder of recorded updates."""
WHICH = ("last", "best")
"""The policies that a run leaves."""
LEFT_OUT = (RECORDS, FOLDER)
"""The folders that the manifest leaves out: what is in them has checksums of its own, may be
removed, and may be large."""


# -- the directory of a run


class RunDir:
    """The new directory of one run. An existing directory is never written to.

    Args:
        path: of the directory, which must be empty or not exist.
        files: its first text files, by name.

    Raises:
        SaveError: it exists already and is not empty, or can't be made.
    """

    def __init__(self, path: str | Path, files: Mapping[str, str]) -> None:
        self.path = Path(path)
        check_free(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SaveError(f"can't make the directory {self.path}: {error.strerror}") from None
        # Whoever finds the other files finds this one, too, and that it is locked.
        self._rows = (self.path / "rows.jsonl").open("a", encoding="utf-8")
        self._lock()
        for name, text in {"command.txt": _command(), **files}.items():
            self.put(name, text)

    @staticmethod
    def again(path: Path) -> RunDir:
        """Return the directory of a run that may be resumed, locked and unchanged.

        Args:
            path: of the directory.

        Raises:
            SaveError: it is no run's, another process is writing it, or it can't be written.
        """
        if not path.is_dir():
            raise SaveError(f"there is no directory {path}")
        file = path / "rows.jsonl"
        # To open it for writing would make it.
        if not file.is_file():
            raise SaveError(
                f"{path} is no run's directory, for it has no {file.name}; {way_to_runs(path)}"
            )
        self = object.__new__(RunDir)
        self.path = path
        try:
            self._rows = file.open("a", encoding="utf-8")
        except OSError as error:
            raise SaveError(f"can't write to {path}: {error.strerror}") from None
        self._lock()
        return self

    def go_on(self, rows_bytes: int, files: Mapping[str, str]) -> None:
        """Take a run that was saved back to one of its snapshots, from which it goes on.

        Args:
            rows_bytes: the size of ``rows.jsonl`` then. What came after it is removed.
            files: text files, by name, in place of those of these names.

        Raises:
            SaveError: they can't be written; everything is as it was.
        """
        command = self.path / "command.txt"
        before = command.read_text(encoding="utf-8") if command.is_file() else ""
        texts = {**files, command.name: before + _command()}
        drafts = {name: self.path / f"{name}.draft" for name in texts}
        try:
            for name, draft in drafts.items():
                draft.write_text(texts[name], encoding="utf-8")
        except OSError as error:
            for draft in drafts.values():
                draft.unlink(missing_ok=True)
            raise SaveError(
                f"{self.path} can't be written ({error.strerror}), and is as it was"
            ) from None
        # It is no whole run any more until it is sealed again.
        (self.path / MANIFEST).unlink(missing_ok=True)
        for name, draft in drafts.items():
            draft.replace(self.path / name)
        (self.path / FAILURE).unlink(missing_ok=True)
        self.cut(rows_bytes)

    def cut(self, rows_bytes: int) -> None:
        """Remove the rows that came after these bytes of ``rows.jsonl``."""
        self._rows.flush()
        self._rows.truncate(rows_bytes)
        self._rows.seek(rows_bytes)

    def close(self) -> None:
        """Write nothing more, and let other processes resume the run."""
        self._rows.close()

    def _lock(self) -> None:
        """Keep other processes from writing this directory. The lock ends with the process.

        Raises:
            SaveError: another one is writing it.
        """
        try:
            fcntl.flock(self._rows, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._rows.close()
            raise SaveError(
                f"{self.path}: another process is still at work on this run; wait for it, or end it"
            ) from None

    @property
    def rows_bytes(self) -> int:
        """The size of ``rows.jsonl``."""
        return self._rows.tell()

    def add(self, row: Row) -> None:
        """Write one Row to ``rows.jsonl`` and flush it."""
        self._rows.write(to_json(row) + "\n")
        self._rows.flush()

    def put(self, name: str, text: str) -> None:
        """Write a text file in one atomic step, in place of any earlier one of this name."""
        # Who reads the directory of a run that goes on never finds half a file.
        draft = self.path / f"{name}.draft"
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.path / name)

    def finish(self, policy: TrainedPolicy | None, files: Mapping[str, str]) -> None:
        """Write the policy and more text files, then the manifest of all files.

        Args:
            policy: what was trained; None if there is nothing.
            files: text files by name.
        """
        # The lock ends with the file of the rows, so nobody resumes a run that is being saved.
        with closing(self):
            self._rows.flush()
            for name, text in files.items():
                self.put(name, text)
            if policy is not None:
                # That of an earlier part of the run stays until the new one is whole.
                draft = self.path / "policy.draft"
                shutil.rmtree(draft, ignore_errors=True)
                save_policy(policy, draft)
                shutil.rmtree(self.path / "policy", ignore_errors=True)
                draft.replace(self.path / "policy")
            seal(self.path)


def check_free(path: str | Path) -> None:
    """Make sure that a run can be saved in a directory.

    Raises:
        SaveError: there is a file of that name, or a directory that is not empty.
    """
    root = Path(path)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise SaveError(
            f"{root} exists already, and nothing is ever overwritten; name another directory"
        )


def to_json(row: Mapping[str, float]) -> str:
    """Return a Row as one JSON object; numbers that are not finite become null."""
    return json.dumps({k: v if math.isfinite(v) else None for k, v in row.items()})


def _command() -> str:
    """Return the command line of this process, its flowrl version and its directory's name."""
    program = Path(sys.argv[0])
    name = [program.name]
    if program.name == "__main__.py":
        name = ["python", "-m", program.parent.name]
    command = shlex.join([*name, *sys.argv[1:]])
    return f"{command}\n# flowrl {flowrl.__version__}, in {Path.cwd().name}\n"


def failure(error: BaseException) -> dict[str, str]:
    """Return the file that describes the error that ended a run, by its name.

    It holds the kind of the error, its text, and those of its facts that are plain values.
    """
    facts = {
        k: v for k, v in getattr(error, "facts", {}).items() if isinstance(v, str | int | float)
    }
    about = {"error": type(error).__name__, "text": str(error), "facts": facts}
    return {FAILURE: json.dumps(about, indent=1) + "\n"}


def profiles(path: str | Path) -> tuple[Profile, Profile]:
    """Read where the time of a run went, whether it is saved, goes on or was killed.

    Args:
        path: the run's directory.

    Returns:
        The profile of the whole run, and that of the part from which its speed is measured.

    Raises:
        SaveError: there is no such run, or it has only begun.
    """
    try:
        return from_text((Path(path) / "profile.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SaveError(_without_profile(Path(path))) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SaveError(f"{path}/profile.json is damaged: {error}") from None


def _without_profile(path: Path) -> str:
    """Return why a directory has no profile."""
    if not path.is_dir():
        return f"there is no directory {path}"
    reason = f"it is no run's directory; {way_to_runs(path)}"
    if (path / "graph.txt").is_file():
        reason = (
            "its run has only begun, or was killed before it wrote a profile; the first comes "
            "seconds after the first row"
        )
    return f"{path} has no profile.json: {reason}"


# -- policies


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
    facts = {"format": FORMAT, **facts, **saved, "spaces": json.loads(policy.spaces.json)}
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


def load(
    path: str | Path,
    *,
    which: str = "last",
    allow: Collection[str] = (),
    env: Make | None = None,
) -> TrainedPolicy:
    """Load a policy that a run saved, after checking every file against its checksum.

    Args:
        path: directory of the run.
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
        SettingError: `env` has other spaces than the policy, or `which` is neither of the two.
    """
    folder = policy_folder(Path(path), which)
    saved = _read_policy(folder / "policy.json")

    def value(name: str) -> Any:
        source = f"{folder / 'policy.json'}, {name}"
        return values.from_text(saved[name], allow=allow, source=source)

    policy, spaces = value("policy"), Spaces.from_json(json.dumps(saved["spaces"]))
    weights = read_weights(folder / "weights", network(policy, spaces))
    wrappers, settings = value("wrappers"), value("env_settings")
    if env is not None and (found := probe(env, wrappers, settings).first) != spaces:
        raise SettingError(
            f"{env_name(env)} has other spaces than this policy: obs {found.obs}, "
            f"action {found.action}; it has {spaces}"
        )
    made = value("env") if env is None else env
    action_values = saved.get("action_values", False)
    return TrainedPolicy(policy, spaces, weights, made, wrappers, settings, action_values)


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


def policy_folder(root: Path, which: str = "last") -> Path:
    """Return the folder of a saved policy, after checking every file in it.

    Args:
        root: directory of the run.
        which: ``last`` or ``best``.

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
        return best_folder(root)
    verify(root)
    if not (root / "policy").is_dir():
        raise SaveError(f"{root} holds no policy: its run ended before there was one")
    return root / "policy"


# -- the manifest


def seal(root: Path) -> None:
    """Write the manifest of a run's directory, last, and in one atomic step.

    It holds the size and the SHA-256 sum of every file but records and snapshots.
    """
    found = [
        p
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name != MANIFEST and p.relative_to(root).parts[0] not in LEFT_OUT
    ]
    files = {p.relative_to(root).as_posix(): facts_of(p) for p in found}
    text = json.dumps({"flowrl": flowrl.__version__, "files": files}, indent=1) + "\n"
    # The manifest gets its name when it is on disk, because its presence means a whole run.
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
        hint = ""
        if (root.parent / MANIFEST).is_file():
            hint = f"; its run's directory is {root.parent}"
        elif not (root / "graph.txt").is_file():
            hint = f"; {way_to_runs(root)}"
        raise SaveError(
            f"{root} has no {MANIFEST}: it is no run's directory, or its run was killed before it "
            f"could save{hint}"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise SaveError(
            f"{root / MANIFEST} is damaged: it is not the JSON that was written"
        ) from None
    for name, facts in files.items():
        path = root / name
        if not path.is_file():
            raise SaveError(f"{path} is missing, though the manifest lists it")
        if facts_of(path) != facts:
            raise SaveError(
                f"{path} is not what was saved: its size or SHA-256 sum differs from the "
                "manifest's; restore it from a copy"
            )
