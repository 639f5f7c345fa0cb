"""The page of a run as one file, which a browser opens from disk."""

from __future__ import annotations

import json
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from flowrl.page.past import evenly, past_moment
from flowrl.page.saved import SavedRun
from flowrl.page.source import Cursor, Source

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
MOST_MOMENTS = 60
"""The most moments of a run that the file holds."""
MOST_BYTES = 500_000
"""The most bytes that they take."""


def exported(path: str | Path) -> str:
    """Return the page of a saved run as HTML that needs no server, no other file and no network.

    Args:
        path: the directory of the run.

    Raises:
        SaveError: it is no run's, or one from before runs held their pictures.
    """
    return as_one_file(SavedRun(path), Path(path).name)


def as_one_file(source: Source, name: str) -> str:
    """Return the page of a run, as it is now, as HTML that needs nothing else.

    Args:
        source: the run.
        name: what it is called.
    """
    news = source.since(Cursor())[1]
    facts = {**source.facts(), "path": name, "verbs": ()}
    data = {"facts": facts, "news": news, "past": _moments(source)}
    # Within a script nothing may look like its end.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    static = files(__package__).joinpath("static")

    def styled(match: re.Match[str]) -> str:
        return f"<style>{static.joinpath(match[1]).read_text(encoding='utf-8')}</style>"

    def scripted(match: re.Match[str]) -> str:
        return f"<script>{static.joinpath(match[1]).read_text(encoding='utf-8')}</script>"

    page = static.joinpath("index.html").read_text(encoding="utf-8")
    page = re.sub(r'<link rel="stylesheet" href="/static/([\w.]+)">', styled, page)
    page = re.sub(r'<script src="/static/([\w.]+)"></script>', scripted, page)
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        f'<script type="application/json" id="saved">{text}</script>'
    )
    return page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{head}', 1)


def _moments(source: Source) -> list[dict[str, Any]]:
    """Return what a run did over time: a moment is what happened since the one before it."""
    entries = source.entries()
    for most in (MOST_MOMENTS, MOST_MOMENTS // 4, MOST_MOMENTS // 16):
        chosen = evenly(entries, most)
        found = [past_moment(chosen, number, source.row) for number in range(len(chosen))]
        moments = [_brief(moment) for moment in found if moment is not None]
        if len(json.dumps(moments)) <= MOST_BYTES:
            return moments
    return []


def _brief(value: Any) -> Any:
    """Return plain data with numbers of fewer digits, of which a page shows three."""
    match value:
        case dict():
            return {name: _brief(x) for name, x in value.items()}
        case list():
            return [_brief(x) for x in value]
        case float():
            return float(f"{value:.5g}")
    return value
