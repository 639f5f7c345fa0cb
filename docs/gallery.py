"""Write the gallery: a page for each stock graph, made from the graph itself."""

import functools
import inspect
from pathlib import Path

import flowrl as fl
from flowrl.algos import STOCK
from flowrl.algos.named import find
from flowrl.cli.commands import documented
from flowrl.runtime.placement import group_lines

PICTURES = Path(__file__).parent / "pictures"
PARENTS = {
    "a2c": "pg",
    "a3c": "a2c",
    "ppo": "a2c",
    "impala": "ppo",
    "appo": "impala",
    "sac": "dqn",
    "td3": "sac",
    "ddpg": "td3",
    "rainbow": "dqn",
    "apex": "dqn",
    "r2d2": "dqn",
    "vdn": "dqn",
    "qmix": "vdn",
    "multi_ppo": "ppo",
    "ars": "es",
    "marwil": "bc",
    "cql": "iql",
}
"""By stock graph: the one that it is shown as an edit of. The others stand by themselves."""
PAGE = """# {name}

{summary}

:::{{div}} wide
![The graph of {name}: operators from left to right, resources below]({name}.svg)
:::

## Plan

What a run with the default settings does, as `flowrl plan {name} --env {env} --untuned`
prints it:

```text
{plan}
```

## Settings

| setting | meaning |
|---|---|
{settings}

## Learning

{learning}

{parent}"""

DD_PPO = """
## On several processes or machines: DD-PPO

DD-PPO (Wijmans et al. 2020) is this graph with a learner of several processes, which is placement:
`fl.RayRuntime(place={{"learner": fl.Actor(count=2)}})`, or on the command line

```text
flowrl run ppo --env CartPole-v1 --runtime ray --place 'learner=Actor(count=2)'
```

The same arguments to `flowrl plan` add a line that says what each process does:

```text
{shares}```

Each process takes the rollouts of the runners on its node, and gradients are averaged over all;
[Running on Ray](../howto/ray.md#share-updates-among-processes) says when that is so.
"""

INDEX = """# Gallery

Each page shows a stock graph: its picture, its plan, its settings, how it learns, and, if it is
an edit of another, how it differs from that.

```{{toctree}}
:maxdepth: 1

{names}
```
"""


@functools.cache
def graph_of(name):
    """Return a stock graph with its default settings, which makes its plan once."""
    env = find(name).env
    graph = getattr(fl, name)(env)
    # The plan is on the page of the graph, and in the differences from it and to it.
    object.__setattr__(graph, "compile", functools.cache(graph.compile))
    return graph, env


def page(name):
    """Return the page of a stock graph."""
    graph, env = graph_of(name)
    function = getattr(fl, name)
    kind = find(name).kind
    rows = [
        f"| `{setting}` | {meaning.replace('|', chr(92) + '|')} |"
        for setting, meaning in documented(kind).items()
    ]
    return PAGE.format(
        name=name,
        env=env,
        summary=inspect.cleandoc(function.__doc__).split("\n\n")[0],
        plan=graph.compile(),
        settings="\n".join(rows),
        learning=learning(name),
        parent=parent(name, graph) + group(name, graph),
    )


def learning(name):
    """Return the learning curve of a stock graph, as `make pictures` measured it."""
    caption = f"Return over environment steps of {name}: the interquartile mean over seeds"
    text = (PICTURES / f"curve_{name}.txt").read_text().strip()
    return f"![{caption}](../pictures/curve_{name}.svg)\n\n{text}"


def parent(name, graph):
    """Return how a stock graph differs from the one before it, if there is one."""
    if name not in PARENTS:
        return ""
    before = PARENTS[name]
    found = fl.diff(graph_of(before)[0], graph)
    return f"## What is different from {before}\n\n```text\n{found}\n```\n"


def group(name, graph):
    """Return what a learner of two processes makes of a stock graph, for the graph of DD-PPO."""
    if name != "ppo":
        return ""
    shares = group_lines(graph.compile(), {"learner": fl.Actor(count=2)})
    return DD_PPO.format(shares=shares)


def main():
    """Write all pages and pictures into docs/gallery, each only where it changed."""
    folder = PICTURES.parent / "gallery"
    folder.mkdir(exist_ok=True)
    files = {"index.md": INDEX.format(names="\n".join(STOCK))}
    for name in STOCK:
        files |= {f"{name}.md": page(name), f"{name}.svg": graph_of(name)[0].draw("svg")}
    for file, text in files.items():
        path = folder / file
        # Sphinx reads again only what is newer than its last build.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main()
