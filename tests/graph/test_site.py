"""The site in this process: what is compiled once serves every run; random keys of a resource."""

import jax
import numpy as np
import pytest
from small import AnyAgeLoss, learner, recipe

import flowrl as fl
from flowrl.core.compiled import kept
from flowrl.core.workers import HereWorkers
from flowrl.graph.site import HereSite, Place


def twice(x, *, by=2):
    return x * by


def test_a_function_is_compiled_once_for_equal_settings():
    site = Place("g", {}, 0, HereSite).site
    before = kept.cache_info().misses
    assert [int(site.run(twice, np.int32(3), by=n)) for n in (2, 2, 5, 2, 5)] == [6, 6, 15, 6, 15]
    assert kept.cache_info().misses - before == 2


def test_a_second_run_of_an_equal_graph_compiles_nothing():
    def once():
        graph = (
            recipe(learner=learner(AnyAgeLoss()))
            .set("train.minibatch_size", None)
            .set("train.epochs", 1)
        )
        with fl.run(graph) as run:
            next(run)

    once()
    before = kept.cache_info().misses
    once()
    assert kept.cache_info().misses == before


def test_keys_differ_by_seed_resource_and_folds_and_nothing_else():
    def key(seed, name, *folds):
        return tuple(
            jax.random.key_data(
                Place("g", {}, seed, HereSite).site.named(name).key(*folds)
            ).tolist()
        )

    assert key(0, "runners", 1) == key(0, "runners", 1)
    assert (
        len(
            {
                key(0, "a"),
                key(1, "a"),
                key(0, "b"),
                key(0, "a", 0),
                key(0, "a", 1),
                key(0, "a", "x"),
            }
        )
        == 6
    )


def test_workers_here_run_at_once_and_close():
    class Worker:
        closed = 0

        def add(self, a, b):
            return a + b

        def close(self):
            Worker.closed += 1

    workers = HereWorkers(2, lambda index, restart_count: Worker())
    assert (
        len(workers) == 2
        and workers.put("x") == "x"
        and workers.submit(1, "add", 2, 3).result() == 5
    )
    workers.close()
    assert Worker.closed == 2


def test_resources_open_on_demand_and_close_last_first_even_if_one_fails():
    log = []

    class Handle:
        def __init__(self, site, needs=None):
            self.site = site
            self.other = site.resource(needs) if needs else None
            log.append(f"open {site.name}")

        def close(self):
            log.append(f"close {self.site.name}")
            if self.site.name == "b":
                raise OSError("stuck")

    class Spec:
        def __init__(self, needs=None):
            self.needs = needs

        def open(self, site):
            return Handle(site, self.needs)

    place = Place("g", {"a": Spec("b"), "b": Spec("c"), "c": Spec()}, 0, HereSite)
    handles = place.open()
    assert handles["a"].other is handles["b"] and log == ["open c", "open b", "open a"]
    with pytest.raises(OSError, match="stuck"):
        place.close()
    assert log[3:] == ["close a", "close b", "close c"] and place.handles == {}


def test_an_unknown_resource_is_reported():
    with pytest.raises(fl.errors.GraphError, match="g: unknown resource 'lerner'. Known: none"):
        Place("g", {}, 0, HereSite).handle("lerner")
