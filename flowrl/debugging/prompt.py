"""The prompt of the debugger, which works like that of pdb: `fl.debug`."""

from __future__ import annotations

import cmd
import pdb  # noqa: T100 - one of the commands starts it
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import GeneratorType
from typing import IO, Any

from flowrl.algos.named import parse_value
from flowrl.debugging.breaks import ROWS, Break, stop_at
from flowrl.debugging.changes import plan_of, settings
from flowrl.debugging.control import Control, on_interrupt
from flowrl.debugging.requests import Asked, HalfTyped, Requests
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
"""The abbreviation of each command that has one."""


def debug(
    graph: Graph | Plan,
    *,
    seed: int = 0,
    stdin: IO[str] | None = None,
    stdout: IO[str] | None = None,
    ui: bool | int | str = False,
) -> Run:
    """Run a graph in this process and thread, and stop before its first node.

    The command `help` lists what can be done from there. ``breakpoint()`` in any operator or
    environment opens pdb, as in every run of the local runtime.

    Args:
        graph: graph or plan to run.
        seed: seed of every random number in the run (default 0).
        stdin: where commands are read from; standard input by default. Its end quits.
        stdout: where everything is written; standard output by default.
        ui: as of `fl.run`; the buttons of the page give commands, too (default False).

    Returns:
        The run as it was left, closed, with its rows and its policy.

    Raises:
        CheckError: the graph is faulty; nothing was started.
        SettingError: the runtime can't take the seed, the port is in use, or there is to be a page
            and this is not the main thread.
    """
    plan = graph if isinstance(graph, Plan) else plan_of(graph)
    prompt = Prompt(plan, seed, stdin, stdout)
    return prompt.control.work() if ui is False else _with_page(prompt, ui)


def _with_page(prompt: Prompt, ui: bool | int | str) -> Run:
    """Run a graph under a prompt, and serve its page until the user quits."""
    from flowrl.debugging.page import DebuggedRun
    from flowrl.page.address import Address
    from flowrl.page.server import Page

    with prompt.requests.listening(prompt.half_typed.note):
        page = Page(*Address.given(ui))
        source = DebuggedRun(prompt.control, prompt.requests.ask)

        def opened(run: Run) -> None:
            source.begin(run)
            page.runs["run"] = source

        prompt.control.opened = opened
        prompt.say(f"live page: {page.printed}")
        try:
            return prompt.control.work()
        finally:
            page.close()


class Prompt(cmd.Cmd):
    """Prompt that reads commands wherever a run stops.

    The docstring of each command is its help text, which `help` prints.

    Args:
        plan: the plan to run.
        seed: the seed of the run.
        stdin: where commands are read from; standard input by default.
        stdout: where everything is written; standard output by default.
    """

    def __init__(
        self, plan: Plan, seed: int, stdin: IO[str] | None = None, stdout: IO[str] | None = None
    ) -> None:
        super().__init__(stdin=stdin, stdout=stdout)
        self.use_rawinput = stdin is None
        self.echo = not self.stdin.isatty()
        """Whether commands are written too, so that the output of a script reads like a session."""
        self.requests = Requests()
        """What a page asks for; nothing where there is none."""
        self.half_typed = HalfTyped()
        self.control = Control(plan, seed, self.ask, self.say, self.poll)
        self.moved = ""
        """The last `next` or `until`, which an empty line repeats."""
        self.say(f"{plan.graph.name}, seed {seed}; help lists the commands")

    def say(self, text: str) -> None:
        """Write a line."""
        self.stdout.write(f"{text}\n")
        self.stdout.flush()

    def ask(self) -> None:
        """Read commands until one of them lets the run go on."""
        # pdb would go on tracing in the code of the prompt; it is meant for the code of the user.
        if isinstance(getattr(sys.gettrace(), "__self__", None), pdb.Pdb):
            sys.settrace(None)
        self.prompt = f"({self.control.spot}) "
        while True:
            try:
                with on_interrupt(signal.default_int_handler):
                    return self._read()
            except KeyboardInterrupt:
                self.say("\nquit (q) leaves")
            except Asked:
                # What is typed is put off; the page's line takes a line of its own.
                if self.half_typed.text:
                    self.stdout.write(f"\n{self.prompt}")
                if any(map(self._do_for_page, self.requests.lines())):
                    return None

    def _read(self) -> None:
        """Read commands until one of them lets the run go on, or a page asks for something."""
        # What is no terminal has no line to edit.
        kept = nullcontext() if self.echo or not self.use_rawinput else self.half_typed.kept()
        try:
            with kept:
                self.cmdloop()
        finally:
            self.requests.forbid()

    def poll(self) -> None:
        """Do what a page asked for while the run goes on: it sets another goal or break."""
        for line in self.requests.lines():
            self._do_for_page(line)

    def _do_for_page(self, line: str) -> bool:
        """Execute a line that a page asked for, and return whether the run goes on."""
        self.say(f"{line}   (from the page)")
        return self.onecmd(line)

    # -- lines

    def preloop(self) -> None:
        """Let a page interrupt the reading of the first line."""
        self.requests.allow()

    def postcmd(self, stop: bool, line: str) -> bool:
        """Let a page interrupt the reading of the next line, if there is one."""
        if not stop:
            self.requests.allow()
        return stop

    def precmd(self, line: str) -> str:
        """Write the line, if nobody saw it being typed."""
        self.requests.forbid()
        self.half_typed.finished()
        if self.echo:
            self.say("" if line == "EOF" else line)
        return line

    def onecmd(self, line: str) -> bool:
        """Execute a line, print a mistake in it, and return whether the run goes on."""
        word, _, rest = line.strip().partition(" ")
        # `cmd` turns the end of the input into this line.
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
        except Exception as error:  # noqa: BLE001 - an item's own code, such as its repr, may raise
            self.say(f"{type(error).__name__}: {error}")
        return False

    def emptyline(self) -> bool:
        """Repeat the last `next` or `until`."""
        return self.onecmd(self.moved) if self.moved else False

    def completedefault(self, text: str, *_: Any) -> list[str]:
        """Return the nodes and addresses that begin with a text."""
        graph = self.control.plan.graph
        names = [*(node.name for node in graph.nodes), *settings(graph)]
        return [name for name in names if name.startswith(text)]

    # -- going on

    def _go(self, goal: Break | None) -> bool:
        """Let the run go on until a goal, None for none."""
        self.control.alive()
        self.control.goal = goal
        return True

    def do_next(self, rest: str) -> bool:
        """`next` (n): go on until the next node takes an item."""
        return self._go(Break(""))

    def do_until(self, rest: str) -> bool:
        """`until NODE` (u): go on until NODE takes an item.

        `until NODE when loss>10` stops on a condition; `until row` and `until row 5` stop when
        that row closes.
        """
        node, when = _place(rest, "until train, until row or until row 5")
        # A number after `row` is short for a condition; for a past row, the next one would meet it.
        if node == ROWS and when.isdecimal():
            closed = len(self.control.rows)
            if int(when) <= closed:
                verb = "is" if closed == 1 else "are"
                raise GraphError(
                    f"row {when} is closed already: {closed} {verb}; back goes back a row"
                )
            return self._go(stop_at(self.control.plan, ROWS, f"row>={when}"))
        return self._go(stop_at(self.control.plan, node, when))

    def do_continue(self, rest: str) -> bool:
        """`continue` (c): go on until a break, an error or Ctrl-C."""
        return self._go(None)

    def do_back(self, rest: str) -> bool:
        """`back`: go to the end of the last row, or from there to the end of the row before it.

        It runs again from the seed, with every `set` at its place.
        """
        self.control.back()
        return True

    def do_quit(self, rest: str) -> bool:
        """`quit` (q): end the run."""
        self.control.over = True
        return True

    # -- where to stop

    def do_break(self, rest: str) -> None:
        """`break NODE` (b): stop whenever NODE takes an item.

        `break NODE when loss>10` stops on a condition, also of reward.mean or obs.nan;
        `break row when return_mean>100` stops at a row.
        """
        breaks = self.control.breaks
        number = max(breaks, default=0) + 1
        examples = "break train, break train when loss>10 or break row when return_mean>100"
        node, when = _place(rest, examples)
        breaks[number] = stop_at(self.control.plan, node, when)
        self.say(f"break {number}: {breaks[number]}")

    def do_breaks(self, rest: str) -> None:
        """`breaks`: list all breaks."""
        lines = [f"break {n}: {b}" for n, b in self.control.breaks.items()]
        self.say("\n".join(lines) or "no breaks")

    def do_clear(self, rest: str) -> None:
        """`clear N`: remove a break; `clear NODE`: those of NODE; `clear`: remove all breaks."""
        breaks = self.control.breaks
        found = [n for n, stop in breaks.items() if rest in ("", str(n), stop.node)]
        if rest and not found:
            nodes = dict.fromkeys(stop.node for stop in breaks.values())
            raise GraphError(unknown("break", rest, [*map(str, breaks), *nodes]))
        for number in found:
            self.say(f"removed break {number}: {breaks.pop(number)}")

    # -- looking

    def do_show(self, rest: str) -> None:
        """`show` (s): print the item that the run stands at.

        `show NODE` prints the last item that a node gave; `show A -> B` the last one on that edge.
        """
        before, arrow, after = (part.strip() for part in rest.partition("->"))
        if rest:
            item = self.control.on_edge(before, after if arrow else None)
        elif self.control.item is None:
            nodes = ", ".join(self.control.given) or "none has yet"
            raise GraphError(
                f"there is no item here; show NODE shows what a node gave last: {nodes}"
            )
        else:
            item = self.control.item
        self.say(looking.whole(item))

    def do_where(self, rest: str) -> None:
        """`where` (w): list the nodes, what they hold, and where the run stands."""
        self.say(self.control.where())

    def do_row(self, rest: str) -> None:
        """`row` (r): print the last row."""
        if not self.control.rows:
            raise GraphError("no row is closed yet; until row")
        row = self.control.rows[-1]
        width = max(map(len, row))
        self.say("\n".join(f"  {name:<{width}}  {value:,.6g}" for name, value in row.items()))

    def do_settings(self, rest: str) -> None:
        """`settings`: list all settings and their addresses.

        `settings NODE` and `settings RESOURCE` list those of one node or resource.
        """
        graph = self.control.plan.graph
        owners = [*(n.name for n in graph.nodes), *graph.resources]
        if rest and rest not in owners:
            raise GraphError(unknown("node or resource", rest, owners))
        found = {
            address: value
            for address, value in settings(graph).items()
            if not rest or address.startswith(f"{rest}.")
        }
        width = max(map(len, found), default=0)
        lines = []
        for address, value in found.items():
            # The settings of a value that has some of its own are lines of their own.
            has_inner = any(other.startswith(f"{address}.") for other in found)
            lines.append(f"  {address:<{width}}  {_head(value) if has_inner else _text(value)}")
        self.say("\n".join(lines) or f"{rest} has no settings")

    # -- changing

    def do_set(self, rest: str) -> None:
        """`set ADDRESS VALUE`: change a setting from here on.

        Examples are `set train.epochs 4` and `set learner.loss.clip_ratio 0.3`.
        """
        match = re.fullmatch(r"(\S+?)(?:\s*=\s*|\s+)(.+)", rest)
        if match is None:
            raise SettingError(
                f"set takes an address and a value, such as set train.epochs 4; got {rest!r}"
            )
        self.say(self.control.set(match[1], parse_value(match[2], source=match[1])))

    def do_pdb(self, rest: str) -> bool:
        """`pdb` (p): open pdb at this node's step, or at the error; its command c comes back here.

        breakpoint() works in any operator or environment.
        """
        control = self.control
        plain = pdb.Pdb() if self.use_rawinput else pdb.Pdb(stdin=self.stdin, stdout=self.stdout)
        # The run has failed: pdb opens at the frames of the error, as after a crash.
        if control.error is not None:
            plain.reset()
            plain.interaction(None, control.error.__traceback__)
            return False
        if control.spot.how != "at":
            raise GraphError(
                "pdb goes into the step of a node that is about to take an item: "
                "next, then pdb; or write breakpoint() there"
            )
        # pdb starts with the next call of the step, so the run has to go on to get there.
        unit = control.unit(control.spot.node)
        unit.step = _stepping(unit, unit.step, plain)
        return self._go(Break(""))

    # -- help

    def do_help(self, rest: str) -> None:
        """`help` (h): describe all commands; `help COMMAND`: describe one.

        An empty line repeats the last next or until.
        """
        word = SHORT.get(rest, rest)
        if word and word not in COMMANDS:
            raise GraphError(unknown("command", word, COMMANDS))
        names = [word] if word else COMMANDS
        self.say("\n".join(_help_line(getattr(self, f"do_{name}")) for name in names))


def _place(text: str, example: str) -> tuple[str, str]:
    """Return a node or `ROWS`, and the condition or number after it, from what the user wrote."""
    match = re.fullmatch(r"(\S+)(?:\s+when\s+(.+)|\s+(\d+))?", text)
    if match is None or (match[3] and match[1] != ROWS):
        raise SettingError(f"say where: {example}; got {text!r}")
    return match[1], match[2] or match[3] or ""


def _help_line(command: Callable[..., Any]) -> str:
    """Return the help of a command, its docstring, as one line."""
    return " ".join((command.__doc__ or "").split())


def _text(value: Any) -> str:
    """Return a value as the user would write it."""
    return values.to_text(value, defaults=False)


def _head(value: Any) -> str:
    """Return the name of a value whose own settings are listed below it."""
    return _text(value.fn) if isinstance(value, values.Spec) else type(value).__name__


def _stepping(
    unit: Any, step: Callable[..., Iterator[Any]], debugger: pdb.Pdb
) -> Callable[..., Iterator[Any]]:
    """Return a step that runs under pdb, and puts the plain step back in its place."""

    def once(state: Any, item: Any, ctx: Any) -> Iterator[Any]:
        unit.step = step
        items = step(state, item, ctx)
        # A step is a generator: its frame exists, but none of its lines has run yet.
        debugger.set_trace(items.gi_frame if isinstance(items, GeneratorType) else None)
        yield from items

    return once
