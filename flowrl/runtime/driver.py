"""What a process of ours gets from the driver before any of a user's code runs in it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.abc import ExecutionLoader
from pathlib import Path
from typing import Any, cast

import cloudpickle
import gymnasium as gym
import jax
from gymnasium.envs.registration import EnvSpec

from flowrl.core.importing import importing
from flowrl.errors import FlowrlError, SettingError, raised


def for_worker(value: Any, what: str) -> bytes:
    """Pickle a value for one of our own processes, which reads it by `from_driver`.

    Args:
        value: any value.
        what: what to call it in an error.

    Raises:
        SettingError: it can't be pickled, and why.
    """
    try:
        return cast("bytes", cloudpickle.dumps(value))
    except Exception as error:
        raise SettingError(
            f"{what} can't be sent to another process: {error}; make what it holds and can't be "
            "pickled (a lock, an open file) where it is used"
        ) from error


def from_driver(code: bytes) -> Any:
    """Read what `for_worker` pickled in the driver.

    Ray could unpickle it itself. But that may import the user's script, which without a main guard
    would start its run again; `importing` refuses that.
    """
    with importing("a Ray worker"):
        # To unpickle is to run code: our own process wrote it, and it comes by Ray alone.
        return cloudpickle.loads(code)


def compilation_cache() -> dict[str, Any]:
    """Return environment variables by which workers keep what JAX compiles where the user said.

    There are none if the user said nothing: each process then uses the folder of its machine.
    """
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0,
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1,
    }


# -- what the driver's process has and a new one lacks ---------------------------------------------


@dataclass(frozen=True)
class DriverContext:
    """What only the driver's process would have.

    This is where it imports from, what it imported on request, and the environments registered
    in it.
    """

    path: tuple[str, ...] = ()
    """The driver's `sys.path`, absolute, for a remote process works in another directory."""
    imports: tuple[Imported, ...] = ()
    registered: Mapping[str, bytes] = field(default_factory=dict)
    """By id: the pickled `EnvSpec` of each registered environment. They are pickled one by one:
    what one of them lacks must not keep the others from working."""
    wrappers: Mapping[str, bytes] = field(default_factory=dict)
    """By ``module:name``: the pickled wrappers that such specs name, of modules that no other
    process can import."""

    def enter(self, variables: Mapping[str, Any] | None = None) -> None:
        """Make this process ready for the driver's code.

        It then imports as the driver does, and knows the same environments. What is printed here
        goes to the driver's standard error: standard output is for what a driver writes itself,
        such as rows in JSON.

        Args:
            variables: environment variables, which JAX, imported by now, gets too. Ray could set
                them by `runtime_env`, but would then start new processes in place of those that it
                has ready, which takes longer.

        Raises:
            ModuleNotFoundError: this node has no module of such a name among `imports`.
        """
        sys.path.extend(p for p in self.path if p not in sys.path)
        sys.stdout = sys.stderr
        _set_variables(variables or {})
        for module in self.imports:
            module.enter()
        # The driver's specs win, so they are put in last: the imports above, and reading the specs
        # (done before `update` begins), may import modules that register the same ids. A module
        # that is only imported when an environment is made registers them once more, of which
        # Gymnasium would warn in every process.
        gym.registry.update({name: _spec(name, code) for name, code in self.registered.items()})
        warnings.filterwarnings(
            "ignore", ".*Overriding environment .* already in registry", UserWarning
        )
        for path, code in self.wrappers.items():
            module_name, _, name = path.partition(":")
            home = sys.modules.setdefault(module_name, types.ModuleType(module_name))
            setattr(home, name, _read(code))


def _set_variables(variables: Mapping[str, Any]) -> None:
    for name, value in variables.items():
        os.environ[name] = str(value)
        # JAX read its variables when it was imported.
        if name.startswith("JAX_"):
            jax.config.update(name.lower(), value)


def context(imports: Sequence[str] = ()) -> DriverContext:
    """Return what other processes need of this one, as it is now.

    Args:
        imports: modules by name, or files by path, that each of them imports first.

    Raises:
        SettingError: a file can't be read.
    """
    specs = dict(gym.registry)
    named = {wrapper.entry_point for spec in specs.values() for wrapper in spec.additional_wrappers}
    wrappers = {
        path: _wrapper(path, found)
        for path in named
        if (found := _of_this_process(path)) is not None
    }
    path = tuple(os.path.abspath(p) for p in sys.path)
    return DriverContext(
        path,
        tuple(map(_imported, imports)),
        {name: _sent(spec) for name, spec in specs.items()},
        wrappers,
    )


# -- imports ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Imported:
    """A module that each process imports.

    One that is a file's comes with its text, for another node may not have the file.
    """

    name: str
    file: str = ""
    text: str = ""

    def enter(self) -> None:
        """Import the module in this process.

        Raises:
            SettingError: another file of that name was imported before.
        """
        if self.name in sys.modules:
            other = getattr(sys.modules[self.name], "__file__", None)
            if self.file and other != self.file:
                raise SettingError(
                    f"imports: {self.file} can't be imported, for another {self.name} ({other}) "
                    "was before it; give the file another name"
                )
            return
        with importing("a Ray worker"):
            if not self.file:
                importlib.import_module(self.name)
                return
            loader = _Text(self)
            spec = importlib.util.spec_from_loader(self.name, loader)
            assert spec is not None  # noqa: S101 - it is None only where no loader is given
            made = importlib.util.module_from_spec(spec)
            sys.modules[self.name] = made
            loader.exec_module(made)


class _Text(ExecutionLoader):
    """Loads a module from its text."""

    def __init__(self, module: Imported) -> None:
        self.module = module

    def get_source(self, fullname: str) -> str:
        """Return the module's text."""
        return self.module.text

    def get_filename(self, fullname: str) -> str:
        """Return where the driver has the module."""
        return self.module.file


def _imported(name: str) -> Imported:
    """Return a module by its name, or by the path of its file."""
    if not name.endswith(".py"):
        return Imported(name)
    file = Path(name).resolve()
    try:
        # As Python reads it: its first lines may name another encoding than UTF-8.
        return Imported(file.stem, str(file), importlib.util.decode_source(file.read_bytes()))
    except OSError as error:
        raise SettingError(f"imports: {name} can't be read: {error.strerror}") from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise SettingError(f"imports: {name} can't be read: {error}; save it as UTF-8") from None


# -- registered environments -----------------------------------------------------------------------


@dataclass(frozen=True)
class Unusable:
    """Stands for what makes an environment, and raises why there is none in this process.

    Only code that makes that environment sees the error.
    """

    error: Exception

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise the error."""
        raise self.error


def _sent(spec: EnvSpec) -> bytes:
    """Pickle a spec for another process.

    What makes the environment is in it by value if no other process could import it.
    """
    entries = {
        name: _by_value(getattr(spec, name)) for name in ("entry_point", "vector_entry_point")
    }
    try:
        return for_worker(replace(spec, **entries), f"{spec.id} (its entry point or kwargs)")
    except SettingError as error:
        return cast("bytes", cloudpickle.dumps(EnvSpec(spec.id, Unusable(error))))


def _spec(name: str, code: bytes) -> EnvSpec:
    """Read a spec from the driver. One that can't be read raises when its environment is made."""
    try:
        return cast("EnvSpec", from_driver(code))
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises when it is imported
        return EnvSpec(name, Unusable(error))


def _wrapper(path: str, found: Any) -> bytes:
    """Pickle a wrapper for another process. One that can't be pickled raises when used there."""
    try:
        return for_worker(found, path)
    except SettingError as error:
        return cast("bytes", cloudpickle.dumps(Unusable(error)))


def _read(code: bytes) -> Any:
    """Read a wrapper from the driver. One that can't be read raises when it is used."""
    try:
        return from_driver(code)
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises when it is imported
        return Unusable(error)


def _by_value(entry: Any) -> Any:
    """Return an entry point by value, if it is the name of one that only this process has."""
    found = _of_this_process(entry) if isinstance(entry, str) else None
    return entry if found is None else found


def _of_this_process(path: str) -> Any:
    """Return what ``module:name`` names in the driver's script, or in a file that is no package's.

    It is None for what other processes can import.
    """
    module, _, name = path.partition(":")
    if module != "__main__" and module not in cloudpickle.list_registry_pickle_by_value():
        return None
    return getattr(sys.modules.get(module), name, None)


# -- what a node lacks -----------------------------------------------------------------------------


@contextmanager
def on_this_node(problem: FlowrlError | None = None) -> Iterator[None]:
    """Name this node in the error where it lacks a module.

    That is no fault of a worker, which would be started again: the run has to end.

    Args:
        problem: what is wrong with this process from its beginning, as `problem_of` found.

    Raises:
        SettingError: in place of an error that came of a missing module.
        FlowrlError: `problem`.
    """
    if problem is not None:
        raise problem
    try:
        yield
    except Exception as error:
        module = missing(error)
        if module is None:
            raise
        needed = f", so {error.message}" if isinstance(error, FlowrlError) else ""
        raise SettingError(
            f"node {socket.gethostname()} has no module '{module}'{needed}", module=module
        ) from error


def problem_of(begin: Callable[[], None]) -> FlowrlError | None:
    """Call `begin`, and return what went wrong instead of raising it.

    Args:
        begin: makes this process ready for the driver's code.

    Returns:
        What went wrong, for every call to raise. If an actor raised it while it is made, it would
        count as one whose process ended, and would be started again, in vain.
    """
    try:
        with on_this_node():
            begin()
    except FlowrlError as error:
        return error
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises when it is imported
        return SettingError(
            f"node {socket.gethostname()} can't read what the driver sent: {raised(error)}"
        )
    return None


def missing(error: BaseException | None) -> str | None:
    """Return the module whose absence an error came of; None if it came of something else."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name
        error = error.__cause__
    return None


def way_out(module: str) -> str:
    """Return what to do where another node lacks a module.

    It depends on where this process has the module.
    """
    folder = _folder(module.partition(".")[0])
    if folder is None or "site-packages" in folder.parts or folder == Path(os.__file__).parent:
        return "install it there, as the packages of every node must be those of this one"
    shown = str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
    return (
        f"here it is in the folder {folder}. Let Ray copy that to every node: "
        f"fl.RayRuntime(init={{'runtime_env': {{'working_dir': '{shown}'}}}}), "
        f"or --working-dir {shown} on the command line; or install it there"
    )


def _folder(package: str) -> Path | None:
    """Return the folder on `sys.path` that a package or module is in, if it is a file's."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve().parent
    return Path(spec.origin).resolve().parent if spec.has_location and spec.origin else None
