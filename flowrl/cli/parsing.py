"""The parser of the command line: its errors are one line each, with what may be meant."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from flowrl.errors import unknown

CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", re.DOTALL)
"""What argparse says of a value that is none of those known: the argument, it, and those."""

MEANT = {
    "--format": ("-o FILE.onnx",),
    "--out": ("-o",),
    "--output": ("--out", "-o"),
    "--total-timesteps": ("--steps",),
}
"""Options of other programs or commands, and what is meant by them where a command has that."""
LIKE = 0.6
"""How alike two options must be, from 0 to 1, for one to be suggested in the place of the other."""


class Parser(argparse.ArgumentParser):
    """Parser that suggests what may be meant, and lists the commands where none is given."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse words; with ``--config`` among them, which names a graph, GRAPH may be left out."""
        words = sys.argv[1:] if args is None else args
        if any(word.partition("=")[0] == "--config" for word in words):
            for action in self._actions:
                if action.dest == "graph":
                    action.nargs, action.required = "?", False
        found, rest = super().parse_known_args(args, namespace)
        # Here and not where all words are parsed, for here it is known of which command they are.
        if rest:
            self.error(self._unknown(rest))
        return found, rest

    def _unknown(self, rest: Sequence[str]) -> str:
        """Return what is wrong with words that no argument takes."""
        option = next((word for word in rest if word.startswith("-")), None)
        if option is None:
            return f"unexpected {' '.join(rest)!r}{self._given_as(rest[0])}"
        option = option.partition("=")[0]
        known = [name for action in self._actions for name in action.option_strings]
        meant = next((x for x in MEANT.get(option, ()) if x.partition(" ")[0] in known), "")
        if not meant:
            # Dashes would make all of them alike.
            names = {name.lstrip("-"): name for name in known}
            word = option.lstrip("-")
            # A longer word of which an option is the beginning, such as --environment, is like it.
            near = [name for name in names if len(name) > 1 and word.startswith(name)]
            near = near or difflib.get_close_matches(word, names, n=1, cutoff=LIKE)
            meant = names[near[0]] if near else ""
        if meant:
            return f"unknown option {option}; did you mean {meant}?"
        if "--set" in known:
            return f"unknown option {option}; a setting is given as --set NAME=VALUE"
        return f"unknown option {option}"

    def _given_as(self, word: str) -> str:
        """Return how a command takes a word that stands alone, such as an environment's id."""
        known = [name for action in self._actions for name in action.option_strings]
        if "=" in word:
            return f"; a setting is given as --set {word}" if "--set" in known else ""
        return f"; an environment is given as --env {word}" if "--env" in known else ""

    def error(self, message: str) -> NoReturn:
        """Print an error in one line, and exit with status 2."""
        if wrong := CHOICE.fullmatch(message):
            argument, value, choices = wrong.groups()
            kind = argument.removeprefix("--").lower()
            text = unknown(kind, value, re.findall(r"[\w-]+", choices))
            self.exit(2, f"{self.prog}: {text}\n")
        # The message names COMMAND where it is missing.
        if "COMMAND" in message:
            self.print_help(sys.stderr)
        text = message.removeprefix("argument ").rstrip(".")
        stop = "" if text.endswith("?") else "."
        self.exit(2, f"{self.prog}: {text}{stop} See {self.prog} --help\n")
