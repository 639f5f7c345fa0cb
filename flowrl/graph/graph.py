"""`Graph`: an immutable value of named operators, joined by edges, and the resources they use."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flowrl.errors import GraphError, a, unknown
from flowrl.graph import values
from flowrl.graph.names import no_setting
from flowrl.graph.protocols import Operator, Resource

if TYPE_CHECKING:
    import networkx as nx

    from flowrl.graph.plan import Plan


@dataclass(frozen=True)
class Node:
    """One operator in a graph: its name, the operator, and the nodes whose items it takes."""

    name: str
    op: Operator
    after: tuple[str, ...]


class Chain(values.Printed, Mapping[str, Operator]):
    """Named operators in a row, as a value that `fl.chain(adv=..., train=...)` makes."""

    def __init__(self, ops: Mapping[str, Operator]) -> None:
        self._ops = dict(ops)

    def __getitem__(self, name: str) -> Operator:
        return self._ops[name]

    def __iter__(self) -> Any:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and list(self._ops.items()) == list(other._ops.items())

    def __hash__(self) -> int:
        return hash(tuple(self._ops))

    def __repr__(self) -> str:
        return values.to_text(self, defaults=False)

    def parts(self) -> tuple[str, list[tuple[str | None, Any]]]:
        """Return what ``chain(name=operator, ...)`` is written with."""
        return "chain", list(_nest(self._ops.items()))


def chain(**ops: Operator | Chain) -> Chain:
    """Return operators in a row as a value.

    ``then(a=chain(adv=..., train=...))`` adds the nodes ``a.adv`` and ``a.train``.

    Args:
        **ops: the operators, or other chains, by name.

    Raises:
        GraphError: it is empty, or one of its values is no operator.
    """
    return Chain(_flatten(ops, "chain"))


def _flatten(ops: Mapping[str, Operator | Chain], where: str) -> dict[str, Operator]:
    """Return operators by full name, each chain as the nodes that it stands for."""
    flat: dict[str, Operator] = {}
    for name, op in ops.items():
        if isinstance(op, Chain):
            flat.update({f"{name}.{inner}": o for inner, o in op.items()})
        elif isinstance(op, Operator):
            flat[name] = op
        else:
            hint = "; resources go into fl.Graph(...)" if isinstance(op, Resource) else ""
            raise GraphError(f"'{name}' must be an operator or a chain, got {_a(op)}{hint}", where)
        for part in name.split("."):
            if not part.isidentifier() or keyword.iskeyword(part):
                raise GraphError(f"'{name}' can't be a name: names are Python identifiers", where)
    if not flat:
        raise GraphError("needs at least one operator: name=Operator(...)", where)
    return flat


def _a(value: Any) -> str:
    """Say in a message what a value is."""
    return "the class itself: call it" if isinstance(value, type) else a(value)


class Graph:
    """An algorithm as a graph of operators: an immutable value, whose verbs return new graphs.

    Args:
        name: the name of the graph.
        **resources: the resources by name; operators are added by name with `then`.

    Raises:
        GraphError: something else than a resource is given.

    >>> import flowrl as fl
    >>> g = fl.Graph("idle").then(a=fl.Map(abs)).then(b=fl.Map(abs))
    >>> [n.name for n in g.nodes], g.rename("busy").name, g.remove("a").nodes[0].after
    (['a', 'b'], 'busy', ())
    """

    name: str
    """The name of the graph."""
    resources: Mapping[str, Resource]
    """The resources by name, read-only."""
    nodes: tuple[Node, ...]
    """The nodes in their order, each with its `name`, its operator `op`, and the names `after`."""

    def __init__(self, name: str, /, **resources: Resource) -> None:
        for key, resource in resources.items():
            if not isinstance(resource, Resource):
                hint = "; operators go into .then(...)" if isinstance(resource, Operator) else ""
                wanted = "a resource such as fl.Learner(...)"
                raise GraphError(f"'{key}' must be {wanted}, got {_a(resource)}{hint}", name)
            if not key.isidentifier() or keyword.iskeyword(key):
                raise GraphError(f"'{key}' can't be a name: names are Python identifiers", name)
        self._fill(name, resources, ())

    def _fill(self, name: str, resources: Mapping[str, Resource], nodes: Iterable[Node]) -> Graph:
        self.__dict__.update(
            name=name, resources=MappingProxyType(dict(resources)), nodes=tuple(nodes)
        )
        return self

    def _with(self, **changed: Any) -> Graph:
        fields = {"name": self.name, "resources": self.resources, "nodes": self.nodes}
        # Not by `__init__`: the resources were checked when they came in.
        return Graph.__new__(Graph)._fill(**{**fields, **changed})

    # -- a value: frozen, compared, hashed, pickled, printed

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            "a Graph is immutable: its verbs (then, set, replace, ...) return a new one"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            "a Graph is immutable: its verbs (remove, replace, ...) return a new one"
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Graph)
            and self.name == other.name
            and dict(self.resources) == dict(other.resources)
            and self.nodes == other.nodes
        )

    def __hash__(self) -> int:
        # By names only: settings may hold what can't be hashed.
        edges = tuple((n.name, n.after) for n in self.nodes)
        return hash((self.name, frozenset(self.resources), edges))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy can't be pickled.
        return (_rebuild, (self.name, dict(self.resources), self.nodes))

    def __repr__(self) -> str:
        return self.text(defaults=False, strict=False)

    def _repr_svg_(self) -> str:
        # A notebook shows this.
        return self.draw("svg")

    def text(self, *, defaults: bool = True, strict: bool = True) -> str:
        """Return the graph as the Python that builds it; `Graph.from_text` reads it back.

        Args:
            defaults: whether settings left at their defaults are written too.
            strict: whether what has no name is an error; if not, it is written as ``<...>``.

        Raises:
            SaveError: `strict`, and the graph holds something without a name, such as a lambda.
        """

        def lines(items: Iterable[tuple[str, Any]]) -> str:
            return "".join(
                f"    {k}={values.to_text(v, defaults=defaults, strict=strict, indent=4)},\n"
                for k, v in items
            )

        name = values.to_text(self.name, defaults=True)
        text = f"Graph(\n    {name},\n{lines(self.resources.items())})"
        for after, nodes in self._groups():
            head = ""
            if after is not None:
                places = after[0] if len(after) == 1 else after
                head = f"    after={values.to_text(places, defaults=True)},\n"
            text += f".then(\n{head}{lines(_nest((n.name, n.op) for n in nodes))})"
        return text + "\n"

    def _groups(self) -> list[tuple[tuple[str, ...] | None, list[Node]]]:
        """Return the calls of `then` that add the nodes: `after` (None in the first) and nodes."""
        groups: list[tuple[tuple[str, ...] | None, list[Node]]] = []
        for i, node in enumerate(self.nodes):
            head, dot, _ = node.name.partition(".")
            follows = node.after == (self.nodes[i - 1].name,) if i else not node.after
            if follows and groups:
                # One keyword can't stand twice in a call, unless a chain goes on.
                heads = [n.name.partition(".")[0] for n in groups[-1][1]]
                follows = head not in heads or (bool(dot) and heads[-1] == head)
            if follows and groups:
                groups[-1][1].append(node)
            else:
                groups.append((None if follows else node.after, [node]))
        return groups

    @staticmethod
    def from_text(text: str, *, allow: Collection[str] = (), source: str = "graph") -> Graph:
        """Read a graph that `text` wrote; nothing in it is executed.

        Args:
            text: the graph as Python.
            allow: the packages beyond flowrl that may be imported for it.
            source: where the text is from, for errors.

        Raises:
            GraphError: the text is no graph.
            SaveError: it needs a package that is not allowed.
        """
        graph = values.from_text(text, allow=allow, source=source)
        if not isinstance(graph, Graph):
            raise GraphError(f"holds {a(graph)}, not a Graph", source)
        return graph

    # -- building and editing

    def then(self, *, after: str | Iterable[str] | None = None, **ops: Operator | Chain) -> Graph:
        """Add operators in a row: after the single open end, or after given nodes.

        Args:
            after: the node or nodes whose items the first operator takes; ``()`` for a new start.
            **ops: the operators, or chains of them, by name.

        Raises:
            GraphError: a name is taken, `after` is unknown, or there is more than one open end.
        """
        if after is None:
            ends = self.ends()
            if len(ends) > 1:
                raise GraphError(
                    f"there are {len(ends)} open ends ({', '.join(ends)}); "
                    f"say which to go on from: then(after='{ends[-1]}', ...)",
                    self.name,
                )
            after = ends
        previous = self._places(after)
        return self._with(nodes=(*self.nodes, *self._line(previous, ops)))

    def insert(self, *, after: str, **ops: Operator | Chain) -> Graph:
        """Insert operators by name after the node `after`; the last takes over its edges to others.

        Raises:
            GraphError: the node is unknown, or a name is taken.
        """
        i = self._index(after)
        new = self._line((after,), ops)
        later = [_swap(n, after, (new[-1].name,)) for n in self.nodes[i + 1 :]]
        return self._with(nodes=(*self.nodes[: i + 1], *new, *later))

    def move(self, name: str, *, after: str | Iterable[str]) -> Graph:
        """Let a node, and with it all that is downstream of it, go on from other nodes.

        Args:
            name: the node.
            after: the node or nodes whose items it takes from now on; ``()`` makes it a start.

        Raises:
            GraphError: a node is unknown, or `after` does not stand before it.
        """
        i, places = self._index(name), self._places(after)
        if late := [place for place in places if self._index(place) >= i]:
            alone = (
                f"; all that is downstream of '{name}' moves with it: to put it there by itself, "
                f"graph.remove('{name}').insert(after='{late[0]}', {name}=...)"
            )
            raise GraphError(
                f"'{name}' can't go on from '{late[0]}', which does not stand before it"
                f"{'' if late[0] == name else alone}",
                self.name,
            )
        moved = replace(self.nodes[i], after=places)
        return self._with(nodes=[*self.nodes[:i], moved, *self.nodes[i + 1 :]])

    def remove(self, *names: str) -> Graph:
        """Remove nodes by name, joining the nodes before each to those after it; or resources.

        Raises:
            GraphError: a name is unknown.
        """
        graph = self
        for name in names:
            if name in graph.resources:
                resources = {k: v for k, v in graph.resources.items() if k != name}
                graph = graph._with(resources=resources)
            else:
                removed = graph.nodes[graph._index(name, also_resources=True)]
                rest = [n for n in graph.nodes if n.name != name]
                graph = graph._with(nodes=[_swap(n, name, removed.after) for n in rest])
        return graph

    def replace(self, **new: Operator | Resource) -> Graph:
        """Replace operators and resources, each by the one that is given under its name.

        Raises:
            GraphError: a name is unknown, or an operator stands where a resource must.
        """
        nodes, resources = list(self.nodes), dict(self.resources)
        for name, value in new.items():
            if name in resources and isinstance(value, Resource):
                resources[name] = value
            elif name not in resources and isinstance(value, Operator):
                nodes[self._index(name)] = replace(nodes[self._index(name)], op=value)
            else:
                if name not in resources:
                    self._index(name, also_resources=True)
                kind = "a resource" if name in resources else "an operator"
                raise GraphError(
                    f"'{name}' is {kind} and can't be replaced by {_a(value)}", self.name
                )
        return self._with(nodes=nodes, resources=resources)

    def rename(self, name: str) -> Graph:
        """Return the same graph under another name."""
        return self._with(name=name)

    def set(self, address: str, value: Any) -> Graph:
        """Change one setting, as in ``graph.set("train.epochs", 4)``.

        Args:
            address: the node or resource, and the path of the setting: ``learner.loss.clip_ratio``.
            value: the new value.

        Raises:
            SettingError: there is no such setting, or it can't take the value.
        """
        names, address = {**self.resources, **{n.name: n.op for n in self.nodes}}, str(address)
        # The longest name, since a node of a chain has a dot in its own.
        owner = max((n for n in names if address.startswith(f"{n}.")), key=len, default=None)
        if owner is None:
            paths = {name: list(values.addresses(x)) for name, x in names.items()}
            raise no_setting(address, paths, self.name)
        changed = values.with_setting(
            names[owner], address[len(owner) + 1 :], value, f"{self.name}.{owner}"
        )
        return self.replace(**{owner: changed})

    # -- looking

    def ends(self) -> list[str]:
        """Return the names of the nodes that nothing comes after."""
        used = {name for node in self.nodes for name in node.after}
        return [n.name for n in self.nodes if n.name not in used]

    def digraph(self) -> nx.DiGraph[str]:
        """Return the nodes and edges as a networkx graph."""
        import networkx as nx

        g: nx.DiGraph[str] = nx.DiGraph()
        g.add_nodes_from(n.name for n in self.nodes)
        g.add_edges_from((a, n.name) for n in self.nodes for a in n.after)
        return g

    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the nodes of each stage.

        Stages are what is left of the graph when it is cut at its queues; each queue is the start
        of the stage after it.
        """
        import networkx as nx

        g = self.digraph()
        g.remove_edges_from([(a, n.name) for n in self.nodes if n.op.queue for a in n.after])
        order = {n.name: i for i, n in enumerate(self.nodes)}
        parts = nx.weakly_connected_components(g)
        stages = [tuple(sorted(part, key=order.__getitem__)) for part in parts]
        return tuple(sorted(stages, key=lambda stage: order[stage[0]]))

    def check(self) -> None:
        """Check the graph and run it abstractly.

        Raises:
            CheckError: all the problems found, each with its node and the way out.
        """
        self.compile()

    def compile(self) -> Plan:
        """Check the graph, run it abstractly, and return its plan in numbers.

        Raises:
            CheckError: all the problems found, each with its node and the way out.
        """
        from flowrl.graph.compile import compile_graph

        return compile_graph(self)

    def draw(self, format: str = "text") -> str:  # noqa: A002 - the field's word for it
        """Return a drawing of the graph as a text.

        Args:
            format: ``text`` (default, for a terminal), ``mermaid``, ``dot`` or ``svg``.

        Raises:
            SettingError: an unknown format.
        """
        from flowrl.graph.draw import draw

        return draw(self, format)

    # -- helpers

    def _places(self, after: str | Iterable[str]) -> tuple[str, ...]:
        """Return the names of nodes to go on from, each once."""
        places = (after,) if isinstance(after, str) else tuple(dict.fromkeys(after))
        for name in places:
            self._index(name)
        return places

    def _index(self, name: str, *, also_resources: bool = False) -> int:
        """Return the index of a node, or raise a GraphError that lists the known names."""
        for i, node in enumerate(self.nodes):
            if node.name == name:
                return i
        if name in self.resources:
            nodes = ", ".join(n.name for n in self.nodes) or "none"
            raise GraphError(f"'{name}' is a resource, not a node; nodes: {nodes}", self.name)
        known = [n.name for n in self.nodes] + (list(self.resources) if also_resources else [])
        kind = "node or resource" if also_resources else "node"
        raise GraphError(unknown(kind, name, known), self.name)

    def _line(self, previous: tuple[str, ...], ops: Mapping[str, Operator | Chain]) -> list[Node]:
        """Return new nodes in a row, of which the first takes its items from `previous`."""
        taken = {n.name for n in self.nodes} | set(self.resources)
        line = []
        for name, op in _flatten(ops, self.name).items():
            self._check_free(name, taken)
            taken.add(name)
            line.append(Node(name, op, previous))
            previous = (name,)
        return line

    def _check_free(self, name: str, taken: Collection[str]) -> None:
        # "a" and "a.x" clash too: both would be written under the keyword "a".
        clashes = (
            other
            for other in taken
            if other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.")
        )
        clash = next(clashes, None)
        if clash is None:
            return
        if clash in self.resources:
            what = "a resource"
        else:
            what = "a node" if clash == name else f"the node '{clash}'"
        raise GraphError(
            f"the name '{name}' is taken by {what}; nodes and resources share one namespace",
            self.name,
        )


def _rebuild(name: str, resources: Mapping[str, Resource], nodes: Iterable[Node]) -> Graph:
    return Graph(name)._with(resources=resources, nodes=nodes)


def _swap(node: Node, old: str, new: tuple[str, ...]) -> Node:
    """Return a node that takes its items from `new` where it took them from `old`."""
    after = [name for a in node.after for name in (new if a == old else (a,))]
    return replace(node, after=tuple(dict.fromkeys(after)))


def _nest(ops: Iterable[tuple[str, Operator]]) -> list[tuple[str, Any]]:
    """Return operators by keyword, with ``a.x, a.y`` in a row as one ``a=chain(x=..., y=...)``."""
    out: list[tuple[str, Any]] = []
    for name, op in ops:
        head, _, rest = name.partition(".")
        before = out.pop()[1] if rest and out and out[-1][0] == head else {}
        out.append((head, Chain({**before, rest: op}) if rest else op))
    return out
