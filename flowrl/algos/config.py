"""`Config`: a graph with all its settings and how it is run, as a value and as a file."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowrl.algos.config_file import read, text_of
from flowrl.algos.effects import check_order
from flowrl.algos.named import (
    Source,
    build,
    environment,
    find,
    fitted,
    imported,
    imports_for,
    loaded,
    parse_value,
    with_field,
)
from flowrl.algos.tuned import tuned as tuned_settings
from flowrl.core.new_files import write_new
from flowrl.errors import FlowrlError, SaveError, SettingError, a, unknown
from flowrl.graph import values
from flowrl.graph.graph import Graph
from flowrl.runtime import NAMES


@dataclass(frozen=True)
class Config:
    """A graph by its name, with all settings of its function and how it is run.

    It is what ``--config`` reads and ``--save-config`` writes. It names every setting, so no tuned
    settings are applied on top of it.

    Args:
        graph: name of the graph, as the command line takes it: ``ppo``, ``file.py:function``.
        env: the environment, as ``--env`` takes it; None: the function's default, or it takes none
            (default None).
        settings: settings of the graph's function by name; one that is left out has the default
            of the function (default none).
        fields: values by the address of a field of the graph, such as ``train.shuffle``, which are
            set in this order once the graph is built (default none).
        imports: packages and files that are imported first, as ``--import`` takes them (default
            none).
        runtime: ``local``, ``ray`` or ``xla``; None: not said (default None).
        seed: seed of the run, or the first of several; None: not said (default None).
        seeds: how many consecutive seeds are run; None: one run (default None).
        steps: environment steps after which a run ends; None: no limit (default None).
        until: goal as ``--until`` takes it, such as ``return_mean>=475``; None: no goal (default
            None).
        origin: by setting and field that a file gave, and ``env``: where it stands, for errors
            (default none).
    """

    graph: str
    env: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    runtime: str | None = None
    seed: int | None = None
    seeds: int | None = None
    steps: int | None = None
    until: str | None = None
    origin: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(
        graph: str,
        *,
        env: str | None = None,
        changes: Mapping[str, Any] | None = None,
        tuned: bool = True,
        imports: Sequence[str] = (),
    ) -> Config:
        """Return the config of a graph with all its effective settings.

        Args:
            graph: name of the graph, as the command line takes it.
            env: the environment; None: the default of the graph's function (default None).
            changes: settings and fields by name, in place of the tuned or default ones (default
                none).
            tuned: whether the tuned settings for this environment are taken, if there are some
                (default True).
            imports: packages and files that are imported first (default none).

        Raises:
            GraphError: the graph can't be found.
            SettingError: a setting is unknown or can't take its value.

        >>> config = Config.of("ppo", env="CartPole-v1", changes={"epochs": 4})
        >>> config.settings["epochs"], config.settings["lr"], config.settings["clip_ratio"]
        (4, 0.001, 0.2)
        """
        source = find(graph, imported(imports))
        env = env or source.env
        best = tuned_settings(graph, env) if tuned and env is not None else {}
        config = Config(graph, env, {**source.settings, **best}, imports=tuple(imports))
        return config.changed(changes or {})

    def changed(self, changes: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> Config:
        """Return this config with other values of settings and fields.

        Args:
            changes: values by name, or pairs of a name and a value, which are applied in this
                order. A name with a dot is the address of a field of the graph; any other is a
                setting of its function.

        Raises:
            SettingError: a setting is unknown or can't take its value, or a field that was given
                before it takes its effect, for fields are set last.
        """
        if not changes:
            return self
        source = find(self.graph, imported(self.imports))
        settings, fields = dict(self.settings), dict(self.fields)
        given = list(changes.items() if isinstance(changes, Mapping) else changes)
        pairs = [(k, value if "." in k else fitted(source, k, value)) for k, value in given]
        for name, value in pairs:
            if "." not in name:
                settings[name] = value
                continue
            # What was set within the old value of a field is replaced with it, and the order in
            # which fields are set matters: the newest comes last.
            within = [known for known in fields if f"{known}.".startswith(f"{name}.")]
            for known in within:
                del fields[known]
            fields[name] = value
        changed = dict(pairs)
        origin = {name: where for name, where in self.origin.items() if name not in changed}
        config = replace(self, settings=settings, fields=fields, origin=origin)
        stands = {name: origin.get(name, f"fields.{name}") for name in fields}
        stands |= {name: name for name in fields if name in changed}
        alone = replace(config, fields={})
        check_order(
            lambda settings: replace(alone, settings=settings).build(),
            source.settings,
            self.settings,
            pairs,
            stands,
        )
        return config

    def idle(self, before: Config) -> list[str]:
        """Return the settings that differ from those of another config and yet change nothing.

        Such is a setting of the default policy beside a policy of one's own.

        Args:
            before: a config of the same graph.

        Raises:
            FlowrlError: the graph can't be built.
        """
        graph = self.build()
        return [
            name
            for name, old in before.settings.items()
            if self.settings[name] != old
            and replace(self, settings={**self.settings, name: old}).build() == graph
        ]

    def build(self) -> Graph:
        """Build the graph.

        Raises:
            FlowrlError: the graph or its environment can't be found, or can't take its settings;
                the error of a value from a file names the file and the key.
        """
        source = find(self.graph, imported(self.imports))
        changes = [
            (name, value)
            for name, value in self.settings.items()
            # The function has its defaults by itself, of whatever kind they are.
            if not _is_default(source, name, value)
        ]
        env = None if self.env is None else environment(self.env)
        graph = build(source, env, {}, changes)
        for name, value in self.fields.items():
            try:
                graph = with_field(source, graph, name, value)
            except FlowrlError as error:
                if name in self.origin:
                    error.message, error.where = str(error), self.origin[name]
                raise
        return graph

    # -- files

    @staticmethod
    def load(path: str | Path) -> Config:
        """Read a config from a file: JSON if its name ends in ``.json``, else YAML.

        A text is read as ``--set`` reads it: ``1e-3`` is a number, ``Linear(1e-3, 0, 65_000)`` a
        value of flowrl, ``relu`` stays a text. The packages and files of `imports` and `graph` are
        imported, so load only files that you trust.

        Args:
            path: path of the file.

        Raises:
            SaveError: there is no such file, or it is no mapping in YAML or JSON.
            SettingError: a key is unknown, or a value is of a wrong type; with the file and key.

        See also `save`.
        """
        return _Reader(str(path)).config(read(Path(path)))

    def save(self, path: str | Path) -> None:
        """Write this config to a new file: JSON if its name ends in ``.json``, else YAML.

        A default value of the graph's function that no text can name, such as a lambda, is left
        out: the function has it by itself.

        Args:
            path: path of the file, whose folder is made if it is not there.

        Raises:
            SaveError: the file exists already or can't be written, or a value that is no default
                can't be written as text.
        """
        file = Path(path)
        text = text_of(self._plain(), self._notes(file), as_json=file.suffix == ".json")
        write_new(file, text)

    def _plain(self) -> dict[str, Any]:
        """Return the keys of the file with plain values; those that say nothing are left out."""
        source = find(self.graph, imported(self.imports))
        settings = {}
        for name, value in self.settings.items():
            try:
                settings[name] = encoded(value, f"settings.{name}")
            except SaveError:
                if not _is_default(source, name, value):
                    raise
        fields = {name: encoded(value, f"fields.{name}") for name, value in self.fields.items()}
        # Whoever reads the file must import what its texts name.
        needed = imports_for(repr([settings, fields]).replace("\\", ""))
        known = imported(self.imports)
        names = [name for name in needed if Path(name).stem not in known]
        plain = {
            "graph": self.graph,
            "env": self.env,
            "settings": settings,
            "fields": fields,
            "imports": [*self.imports, *names],
        }
        plain |= {name: getattr(self, name) for name in _OF_A_RUN}
        return {name: value for name, value in plain.items() if value not in (None, {}, [])}

    def _notes(self, file: Path) -> list[str]:
        """Return the lines of the comment at the top of the file."""
        return [
            f"Start this run again: flowrl run --config {shlex.quote(str(file))}",
            "What the command line gives (--set, --env, --seed, --steps, ...) wins over this file.",
            "A value is a number, a word, a list, or what --set takes: Linear(1e-3, 0, 65_000).",
            f"What every setting means: flowrl run {self.graph} --help-settings",
        ]


def _is_default(source: Source, name: str, value: Any) -> bool:
    """Return whether a setting has the default value of the graph's function."""
    if name not in source.settings:
        return False
    default = source.settings[name]
    if value is default:
        return True
    try:
        return type(value) is type(default) and _text(value) == _text(default)
    except SaveError:
        return False


def _text(value: Any) -> str:
    """Return a value as the text of one line that builds it."""
    return values.to_text(value, defaults=True, strict=True, width=math.inf)


# -- values as YAML and JSON have them ---------------------------------------------------------


def encoded(value: Any, where: str) -> Any:
    """Return a value as YAML and JSON have it, from which `decoded` makes it again.

    A tuple becomes a list, a mapping one of texts; a text that would be read as something else is
    quoted once more; other values are written as the text that builds them.

    Args:
        value: the value.
        where: its key, for errors.

    Raises:
        SaveError: no text leads back to it.

    >>> encoded((64, 64), "x"), encoded("relu", "x"), encoded("1e-3", "x"), encoded([1], "x")
    ([64, 64], 'relu', "'1e-3'", '[1]')
    """
    value = values.fit(value, Any, where)
    if value is None or type(value) in (bool, int, float):
        return value
    if type(value) is tuple:
        return [encoded(x, where) for x in value]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: encoded(x, where) for name, x in value.items()}
    try:
        candidates = [value, repr(value)] if isinstance(value, str) else [_text(value)]
    except SaveError as error:
        raise SaveError(str(error), where) from None
    if isinstance(value, type):
        # A bare name would be read as a word.
        candidates.append(f'load("{value.__module__}:{value.__qualname__}")')
    for text in candidates:
        if _reads_as(text, value):
            return text
    raise SaveError(f"{value!r} can't be written as a text that is read back as it is", where)


def _reads_as(text: str, value: Any) -> bool:
    """Return whether a text is read as a value."""
    try:
        found = parse_value(text, allow=[module for module, _ in loaded(text)])
        return type(found) is type(value) and _text(found) == _text(value)
    except FlowrlError:
        return False


def decoded(value: Any, allow: Sequence[str], where: str) -> Any:
    """Return the value that `encoded` wrote, or that a user wrote by hand.

    Args:
        value: as YAML or JSON has it.
        allow: packages beyond flowrl that a text may import.
        where: its key, for errors.

    Raises:
        SettingError: YAML read it as something that is no value, such as a date.
        GraphError: a text seems to build a value, but is not written as one.
    """
    if isinstance(value, str):
        return parse_value(value, allow=allow, source=where)
    if isinstance(value, list):
        return tuple(decoded(x, allow, where) for x in value)
    if isinstance(value, dict):
        return {_key(name, where): decoded(x, allow, where) for name, x in value.items()}
    if value is None or isinstance(value, bool | int | float):
        return value
    raise SettingError(f"YAML reads this as {a(value)}; if it is a text, put it into quotes", where)


def _key(name: Any, where: str) -> str:
    """Return the key of a mapping, which must be a text."""
    if not isinstance(name, str):
        raise SettingError(f"its key {name!r} is no text; put it into quotes", where)
    return name


# -- the keys of the file ----------------------------------------------------------------------


def _number(least: int) -> Callable[[Any, str], int]:
    """Return a reader of whole numbers from `least` on, such as ``1e6`` or ``10_000``."""

    def whole(value: Any, where: str) -> int:
        number = parse_value(value) if isinstance(value, str) else value
        is_int = isinstance(number, int) and not isinstance(number, bool)
        # A whole number may be too large for a float.
        is_whole = is_int or (isinstance(number, float) and number.is_integer())
        if not is_whole or number < least:
            raise SettingError(f"must be a whole number of at least {least}, got {value!r}", where)
        return int(number)

    return whole


def _word(value: Any, where: str) -> str:
    """Return a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise SettingError(f"must be a text, got {value!r}", where)
    return value


def _runtime(value: Any, where: str) -> str:
    """Return the name of a runtime."""
    if value not in NAMES:
        raise SettingError(unknown("runtime", str(value), NAMES), where)
    return str(value)


_OF_A_RUN: Mapping[str, Callable[[Any, str], Any]] = {
    "runtime": _runtime,
    "seed": _number(0),
    "seeds": _number(1),
    "steps": _number(1),
    "until": _word,
}
"""What reads the keys that say how a graph is run."""


class _Reader:
    """Reader of the data of a file, whose name it puts into errors."""

    def __init__(self, path: str) -> None:
        self.path = path

    def at(self, key: str) -> str:
        """Return the address of a key in the file."""
        return f"{self.path}: {key}"

    def config(self, data: Mapping[Any, Any]) -> Config:
        """Return the config of the data of a whole file."""
        keys = [f.name for f in dataclasses.fields(Config) if f.compare]
        for name in data:
            if name not in keys:
                raise SettingError(unknown("key", str(name), keys), self.path)
        if data.get("graph") is None:
            raise SettingError("it has no graph; write graph: ppo, say", self.path)
        # A key without a value is as one that is left out.
        given = {name: value for name, value in data.items() if value is not None}
        graph = _word(given["graph"], self.at("graph"))
        run = {
            name: as_(given[name], self.at(name))
            for name, as_ in _OF_A_RUN.items()
            if name in given
        }
        imports = self.imports(given.get("imports", []))
        try:
            allow = imported(imports)
            source = find(graph, allow)
        except FlowrlError as error:
            error.message, error.where = str(error), self.path
            raise
        env, origin = source.env, {}
        if "env" in given:
            origin["env"] = self.at("env")
            env = _word(given["env"], origin["env"])
        settings = self.settings(given.get("settings", {}), source, allow, origin)
        fields = self.values("fields", given.get("fields", {}), allow, origin)
        return Config(graph, env, settings, fields, imports, **run, origin=origin)

    def imports(self, value: Any) -> tuple[str, ...]:
        """Return the packages and files that are imported first."""
        if not isinstance(value, list):
            raise SettingError(f"must be a list of texts, got {value!r}", self.at("imports"))
        return tuple(_word(name, self.at("imports")) for name in value)

    def settings(
        self, data: Any, source: Source, allow: Sequence[str], origin: dict[str, str]
    ) -> dict[str, Any]:
        """Return the settings of the graph's function."""
        found = self.values("settings", data, allow, origin)
        for name, value in found.items():
            where = self.at(f"settings.{name}")
            if name not in source.settings:
                raise SettingError(unknown("setting", name, source.settings), where)
            # YAML has no tuples, so a list may stand for either.
            if isinstance(source.settings[name], list) and isinstance(value, tuple):
                found[name] = list(value)
            elif not _is_default(source, name, value):
                found[name] = values.fit(value, source.hints.get(name, Any), where)
        return found

    def values(
        self, key: str, data: Any, allow: Sequence[str], origin: dict[str, str]
    ) -> dict[str, Any]:
        """Return the values of a mapping in the file, and note in `origin` where they stand."""
        if not isinstance(data, dict):
            raise SettingError(f"must be a mapping of names to values, got {data!r}", self.at(key))
        found = {}
        for name, value in data.items():
            origin[_key(name, self.at(key))] = where = self.at(f"{key}.{name}")
            found[name] = decoded(value, allow, where)
        return found
