"""Mappings of plain values as the text of a file, in YAML or JSON, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flowrl.errors import SaveError, a, no_file


class _Dumper(yaml.SafeDumper):
    """Writer of YAML with mappings in lines of their own, and lists within one line."""


_Dumper.add_representer(
    list,
    lambda dumper, items: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", items, flow_style=True
    ),
)


MERGE = "tag:yaml.org,2002:merge"
"""What YAML calls the key ``<<``, which takes in another mapping."""


class _Loader(yaml.SafeLoader):
    """Reader of YAML that refuses a key that stands twice, of which YAML would take the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Return a mapping as it is written: what it takes in by ``<<`` may have its keys, too.

        Raises:
            ConstructorError: a key stands twice.
        """
        node = super().compose_mapping_node(anchor)
        keys = []
        for key, _ in node.value:
            if key.tag == MERGE:
                continue
            name = self.construct_object(key, deep=True)
            if name in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name!r} stands twice", key.start_mark
                )
            keys.append(name)
        return node


_PLAIN_NUMBER = re.compile(
    r"[-+]?(0|[1-9][0-9_]*)(\.[0-9_]*)?([eE][-+]?[0-9]+)?|[-+]?\.[0-9_]+([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
"""The numbers that a config may hold; YAML 1.1 reads 010 as 8, too, and 1:30 as 90."""


def _number(loader: _Loader, node: Any) -> Any:
    """Return a number of YAML; what is written in another way is a text."""
    if not _PLAIN_NUMBER.fullmatch(node.value):
        return node.value
    kind = node.tag.rpartition(":")[2]
    return getattr(loader, f"construct_yaml_{kind}")(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _number)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; refuse a key that stands twice."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the key {name!r} stands twice")
    return dict(pairs)


def text_of(data: Mapping[str, Any], notes: Sequence[str], *, as_json: bool) -> str:
    """Return plain data as the text of a file, in the order of its keys.

    Args:
        data: mapping of texts, numbers, lists and mappings.
        notes: lines of the comment at its top, which JSON can't have.
        as_json: whether it is JSON; else YAML.
    """
    if as_json:
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    head = "".join(f"# {line}\n" for line in notes)
    # So wide that no text is broken into lines.
    options = {"sort_keys": False, "width": 10**9, "allow_unicode": True}
    return head + str(yaml.dump(dict(data), Dumper=_Dumper, default_flow_style=False, **options))


def read(path: Path) -> dict[Any, Any]:
    """Return the mapping that a file holds: JSON if its name ends in ``.json``, else YAML.

    Args:
        path: path of the file.

    Raises:
        SaveError: there is no such file, or it holds something else.
    """
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        text = path.read_text(encoding="utf-8")
        if kind == "JSON":
            data = json.loads(text, object_pairs_hook=_once) if text.strip() else None
        else:
            data = yaml.load(text, Loader=_Loader)  # noqa: S506 - it is a SafeLoader
    except FileNotFoundError:
        raise SaveError(no_file(path)) from None
    except OSError as error:
        raise SaveError(f"{path} can't be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SaveError(f"{path}{line} is no {kind}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise SaveError(f"{path} is no {kind}: {error}") from None
    if data is None:
        raise SaveError(f"{path} is empty; write graph: ppo, say, or use --save-config")
    if not isinstance(data, dict):
        raise SaveError(f"{path} holds {a(data)}, not a mapping such as graph: ppo")
    return data
