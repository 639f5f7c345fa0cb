"""Drives one operator alone: items in, lists of items out."""

import numpy as np

import flowrl as fl
from flowrl.graph.loop import one_by_one


class Context:
    """The context of a node, with handles and a clock that the test gives."""

    def __init__(self, handles, clock, source=None, root=False):
        self.name, self.root, self.source, self.handles, self.clock = (
            "node",
            root,
            source,
            handles,
            iter(clock),
        )

    def __getitem__(self, ref):
        return self.handles[ref]

    def run(self, fn, *arrays, **static):
        return fn(*arrays, **static)

    def repeat(self, times, make):
        return one_by_one(times, make)

    def call(self, fn, *args):
        return fn(*args)

    def test(self, fn, *args):
        return bool(fn(*args))

    def when(self, due, ref, verb, *args):
        if due:
            getattr(self[ref], verb)(*args)

    def seconds(self):
        return next(self.clock)

    def drop(self):
        pass


def drive(op, *items, clock=(), **handles):
    """What the operator yields for each item, by a state of its own."""
    state, ctx = op.init(), Context(handles, clock)
    return [list(op.step(state, item, ctx)) for item in items]


def batch(rows=2, columns=3, fill=0.0, **fields):
    """A batch of one value, with columns of the version 0."""
    full = {name: np.full((rows, columns), fill, np.float32) for name in ("reward", "value")}
    flags = {name: np.zeros((rows, columns), bool) for name in ("terminated", "truncated")}
    data = {
        "obs": np.full((rows, columns, 4), fill, np.float32),
        **full,
        **flags,
        "valid": np.ones((rows, columns), bool),
        **fields,
    }
    return fl.extend.Batch(
        data,
        {
            "bootstrap_obs": np.full((columns, 4), fill, np.float32),
            "version": np.zeros(columns, np.int32),
        },
    )


def trained(steps, **metrics):
    """What an update of so many steps yields."""
    from flowrl.core.items import Metrics

    return fl.extend.Trained(steps, Metrics.pack({"loss": 0.0, **metrics}), (0.0, 0.0))


class Calls:
    """A handle that notes the calls of its verbs and gives the results that it is asked for."""

    def __init__(self, **results):
        self.calls, self.results = [], results

    def __getattr__(self, verb):
        def call(*args, **kwargs):
            self.calls.append((verb, *args, *sorted(kwargs.items())))
            return self.results.get(verb)

        return call
