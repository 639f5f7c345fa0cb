"""`fl.debug`: the debugger's prompt, as pdb's is."""

from __future__ import annotations

import cmd
import pdb  # noqa: T100 - it is led into here
import re
import signal
import sys
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import IO, Any

from flowrl.algos.named import parse_value
from flowrl.debugging.breaks import ROWS, Break, stop_at
from flowrl.debugging.changes import plan_of, settings
from flowrl.debugging.control import Control, on_interrupt
from flowrl.errors import FlowrlError, GraphError, SettingError, unknown
from flowrl.graph import values
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.observe import looking
from flowrl.running import Run

COMMANDS = (
    "next",
    "until",
    "continue",
    "break",
    "breaks",
    "clear",
    "show",
    "where",
    "row",
    "settings",
    "set",
    "back",
    "pdb",
    "quit",
    "help",
)
SHORT = {
    "n": "next",
    "u": "until",
    "c": "continue",
    "b": "break",
    "s": "show",
    "w": "where",
    "r": "row",
    "p": "pdb",
    "q": "quit",
    "h": "help",
}
"""The letters that stand for commands."""


def debug(
    graph: Graph | Plan,
    *,
    seed: int = 0,
    stdin: IO[str] | None = None,
    stdout: IO[str] | None = None,
) -> Run:
    """Run a graph in this process and thread, and stop before its first node: `help` tells what to do from there.

    ``breakpoint()`` in any operator or environment opens pdb, as in every run of the local runtime.

    Args:
        graph: what to run.
        seed: of every random number in the run.
        stdin: where commands come from; standard input by default. The end of it quits.
        stdout: where everything is written; standard output by default.

    Returns:
        The run as it was left: closed, with its rows and its policy.

    Raises:
        CheckError: the graph is faulty; nothing was started.
        SettingError: the seed can't be taken.
    """
    return Prompt(
        graph if isinstance(graph, Plan) else plan_of(graph), seed, stdin, stdout
    ).control.work()


class Prompt(cmd.Cmd):
    """Reads commands wherever a run stops. The docstring of each is its help."""

    def __init__(
        self, plan: Plan, seed: int, stdin: IO[str] | None = None, stdout: IO[str] | None = None
    ) -> None:
        super().__init__(stdin=stdin, stdout=stdout)
        self.use_rawinput = stdin is None
        self.echo = not self.stdin.isatty()
        """Whether commands are written too, so that what comes of a script reads as a session does."""
        self.control = Control(plan, seed, self.ask, self.say)
        self.moved = ""
        """The last `next` or `until`, which an empty line repeats."""
        self.say(f"{plan.graph.name}, seed {seed}; help lists the commands")

    def say(self, text: str) -> None:
        """Write a line."""
        self.stdout.write(f"{text}\n")
        self.stdout.flush()

    def ask(self) -> None:
        """Read commands until one of them lets the run go on."""
        if isinstance(
            getattr(sys.gettrace(), "__self__", None), pdb.Pdb
        ):  # it goes on elsewhere, not within the prompt
            sys.settrace(None)
        self.prompt = f"({self.control.spot}) "
        while True:
            try:
                with on_interrupt(signal.default_int_handler):
                    return self.cmdloop()
            except KeyboardInterrupt:
                self.say("\nquit (q) leaves")

    # -- lines

    def precmd(self, line: str) -> str:
        """Write it, if nobody saw it being typed."""
        if self.echo:
            self.say("" if line == "EOF" else line)
        return line

    def onecmd(self, line: str) -> bool:
        """Do what a line says, and tell of a mistake in it. Returns whether the run goes on."""
        word, _, rest = line.strip().partition(" ")
        word = "quit" if line == "EOF" else SHORT.get(word, word)
        if not word:
            return self.emptyline()
        if word not in COMMANDS:
            self.say(unknown("command", word, COMMANDS))
            return False
        if word in ("next", "until"):
            self.moved = f"{word} {rest}"
        try:
            return bool(getattr(self, f"do_{word}")(rest.strip()))
        except FlowrlError as error:
            self.say(str(error))
        except Exception as error:  # noqa: BLE001 - of an item's own code, such as its repr: the session goes on
            self.say(f"{type(error).__name__}: {error}")
        return False

    def emptyline(self) -> bool:
        """The last `next` or `until` once more."""
        return self.onecmd(self.moved) if self.moved else False

    def completedefault(self, text: str, *_: Any) -> list[str]:
        """Nodes and addresses that begin so."""
        graph = self.control.plan.graph
        return [
            name
            for name in (*(n.name for n in graph.nodes), *settings(graph))
            if name.startswith(text)
        ]

    # -- going on

    def _go(self, goal: Break | None) -> bool:
        self.control.alive()
        self.control.goal = goal
        return True

    def do_next(self, rest: str) -> bool:
        """`next` (n): go on to where the next node takes an item."""
        return self._go(Break(""))

    def do_until(self, rest: str) -> bool:
        """`until NODE` (u): go on to where NODE takes an item; `until NODE when loss>10`; `until row`, `until row 5`: until it closes."""
        node, when = _place(rest, "until train, until row or until row 5")
        if node == ROWS and when.isdecimal():
            closed = len(self.control.rows)
            if int(when) <= closed:
                raise GraphError(
                    f"row {when} is closed already: {closed} {'is' if closed == 1 else 'are'}; back goes back a row"
                )
            return self._go(stop_at(self.control.plan, ROWS, f"row>={when}"))
        return self._go(stop_at(self.control.plan, node, when))

    def do_continue(self, rest: str) -> bool:
        """`continue` (c): go on until a break, an error or Ctrl-C."""
        return self._go(None)

    def do_back(self, rest: str) -> bool:
        """`back`: to the end of the last row, or from there to that of the row before: runs from the seed again, with every `set` in its place."""
        self.control.back()
        return True

    def do_quit(self, rest: str) -> bool:
        """`quit` (q): end the run."""
        self.control.over = True
        return True

    # -- where to stop

    def do_break(self, rest: str) -> None:
        """`break NODE` (b): stop whenever NODE takes an item; `break NODE when loss>10`, reward.mean or obs.nan; `break row when return_mean>100`."""
        breaks = self.control.breaks
        number = max(breaks, default=0) + 1
        breaks[number] = stop_at(
            self.control.plan,
            *_place(
                rest, "break train, break train when loss>10 or break row when return_mean>100"
            ),
        )
        self.say(f"break {number}: {breaks[number]}")

    def do_breaks(self, rest: str) -> None:
        """`breaks`: all of them."""
        self.say(
            "\n".join(f"break {n}: {b}" for n, b in self.control.breaks.items()) or "no breaks"
        )

    def do_clear(self, rest: str) -> None:
        """`clear N`: remove a break; `clear`: all."""
        breaks = self.control.breaks
        if rest and rest not in map(str, breaks):
            raise GraphError(unknown("break", rest, map(str, breaks)))
        for number in [n for n in breaks if rest in ("", str(n))]:
            self.say(f"removed break {number}: {breaks.pop(number)}")

    # -- looking

    def do_show(self, rest: str) -> None:
        """`show` (s): the item at hand; `show NODE`: the last that it gave; `show A -> B`: the last on that edge."""
        before, arrow, after = (part.strip() for part in rest.partition("->"))
        if rest:
            item = self.control.on_edge(before, after if arrow else None)
        elif self.control.item is None:
            raise GraphError(
                f"nothing is at hand here; show NODE shows what a node gave last: {', '.join(self.control.given) or 'none has yet'}"
            )
        else:
            item = self.control.item
        self.say(looking.whole(item))

    def do_where(self, rest: str) -> None:
        """`where` (w): the nodes, what they hold, and where the run stands."""
        self.say(self.control.where())

    def do_row(self, rest: str) -> None:
        """`row` (r): the last row."""
        if not self.control.rows:
            raise GraphError("no row is closed yet; until row")
        row = self.control.rows[-1]
        wide = max(map(len, row))
        self.say("\n".join(f"  {name:<{wide}}  {value:,.6g}" for name, value in row.items()))

    def do_settings(self, rest: str) -> None:
        """`settings`: all settings and their addresses; `settings NODE`, `settings RESOURCE`: those of one."""
        graph = self.control.plan.graph
        owners = [*(n.name for n in graph.nodes), *graph.resources]
        if rest and rest not in owners:
            raise GraphError(unknown("node or resource", rest, owners))
        found = {
            address: value
            for address, value in settings(graph).items()
            if not rest or address.startswith(f"{rest}.")
        }
        wide = max(map(len, found), default=0)
        inner = {
            address for address in found if any(other.startswith(f"{address}.") for other in found)
        }
        lines = [
            f"  {address:<{wide}}  {_head(value) if address in inner else _text(value)}"
            for address, value in found.items()
        ]
        self.say("\n".join(lines) or f"{rest} has no settings")

    # -- changing

    def do_set(self, rest: str) -> None:
        """`set ADDRESS VALUE`: change a setting from here on: `set train.epochs 4`, `set learner.loss.clip_ratio 0.3`."""
        match = re.fullmatch(r"(\S+?)(?:\s*=\s*|\s+)(.+)", rest)
        if match is None:
            raise SettingError(
                f"set takes an address and a value, such as set train.epochs 4; got {rest!r}"
            )
        self.say(self.control.set(match[1], parse_value(match[2], source=match[1])))

    def do_pdb(self, rest: str) -> bool:
        """`pdb` (p): into pdb at this node's step, or at the error; c there comes back here. breakpoint() works in any operator or environment."""
        control = self.control
        plain = pdb.Pdb() if self.use_rawinput else pdb.Pdb(stdin=self.stdin, stdout=self.stdout)
        if control.error is not None:
            plain.reset()
            plain.interaction(None, control.error.__traceback__)
            return False
        if control.spot.how != "at":
            raise GraphError(
                "pdb goes into the step of a node that is about to take an item: next, then pdb; or write breakpoint() there"
            )
        unit = control.unit(control.spot.node)
        unit.step = _stepping(unit, unit.step, plain)
        return self._go(Break(""))

    # -- help

    def do_help(self, rest: str) -> None:
        """`help` (h): all commands; `help COMMAND`: one. An empty line repeats the last next or until."""
        word = SHORT.get(rest, rest)
        if word and word not in COMMANDS:
            raise GraphError(unknown("command", word, COMMANDS))
        self.say(
            "\n".join(
                getattr(self, f"do_{name}").__doc__ for name in ([word] if word else COMMANDS)
            )
        )


def _place(text: str, example: str) -> tuple[str, str]:
    """A node, or a row, and what comes behind it."""
    match = re.fullmatch(r"(\S+)(?:\s+when\s+(.+)|\s+(\d+))?", text)
    if match is None or (match[3] and match[1] != ROWS):
        raise SettingError(f"say where: {example}; got {text!r}")
    return match[1], match[2] or match[3] or ""


def _text(value: Any) -> str:
    return values.to_text(value, defaults=False)


def _head(value: Any) -> str:
    """The name of what has settings of its own, which stand below it."""
    return _text(value.fn) if isinstance(value, values.Spec) else type(value).__name__


def _stepping(
    unit: Any, step: Callable[..., Iterator[Any]], debugger: pdb.Pdb
) -> Callable[..., Iterator[Any]]:
    """A step that is gone through with pdb, this once."""

    def once(state: Any, item: Any, ctx: Any) -> Iterator[Any]:
        unit.step = step
        items = step(state, item, ctx)
        debugger.set_trace(items.gi_frame if isinstance(items, GeneratorType) else None)
        yield from items

    return once
