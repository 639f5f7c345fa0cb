"""Whether a setting of a graph's function has its effect, for fields of the graph are set last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowrl.errors import SettingError
from flowrl.graph.graph import Graph
from flowrl.observe.settings import settings_of

Build = Callable[[Mapping[str, Any]], Graph]
"""Function that returns the graph with these settings, no field of which is set."""


def check_order(
    build: Build,
    defaults: Mapping[str, Any],
    old: Mapping[str, Any],
    pairs: Sequence[tuple[str, Any]],
    fields: Mapping[str, str],
) -> None:
    """Refuse a setting of which a field takes the effect that was given before it.

    What is given last must win. Fields are set once the graph is built, so a setting that comes
    after a field can't.

    Args:
        build: builds the graph from settings alone.
        defaults: settings that the graph's function has by itself, by name.
        old: settings before `pairs`, by name, where they are no defaults.
        pairs: names and values in the order in which they are given. A name with a dot is the
            address of a field, any other a setting.
        fields: by address of each field that is set in the end: where it stands, for errors. One
            that is not among `pairs` was given before all of them.

    Raises:
        SettingError: the graph's value at a field depends on a setting that is given after it.
    """
    # Of a name that is given twice, the last counts.
    place = {name: index for index, (name, _) in enumerate(pairs)}
    new = {**old, **{name: value for name, value in pairs if "." not in name}}
    for field, where in fields.items():
        since = place.get(field, -1)
        later = [name for name, index in place.items() if "." not in name and index > since]
        if not later:
            continue
        # Settings that were given before the field may well differ at it.
        before = {**old, **{name: value for name, value in pairs[: since + 1] if "." not in name}}
        known = {**defaults, **before}
        # A value that is given again changes nothing; then the names say what is meant.
        again = [name for name in later if known[name] == new[name]]
        last = field.rpartition(".")[2]
        if last in again or covers(field, differing(build, [before, new])):
            names = last if last in later else ", ".join(later)
            way_out = f"set {field} itself, or take it out of the fields"
            if field in place:
                way_out = "leave out one of them"
            raise SettingError(
                f"it is set after the settings, so {names} would not reach it; {way_out}", where
            )


def differing(build: Build, settings: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the addresses at which the graphs of several settings differ.

    Args:
        build: builds a graph from settings alone.
        settings: of each graph, by name.
    """
    first, *others = (settings_of(build(each)) for each in settings)
    found: set[str] = set()
    for other in others:
        found |= {name for name in {**first, **other} if first.get(name) != other.get(name)}
    return found


def covers(field: str, addresses: set[str]) -> bool:
    """Return whether a field is one of these addresses, or holds one of them."""
    return any(f"{address}.".startswith(f"{field}.") for address in addresses)
