"""What several tests share."""

import ctypes
import gc
import os
import signal
from importlib.metadata import version
from pathlib import Path

# In the first process; those that it starts inherit all of it, and JAX reads it on import.
if not os.environ.get("FLOWRL_TESTS"):
    folder = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["FLOWRL_TESTS"] = str(folder)
    # Tests compile much and compute little: what one process compiled serves the others, and the
    # next `make test`, which then takes a quarter less. XLA takes no pains over it, nor does it
    # split a program for several threads to compile, which is more work for cores that are busy
    # anyway.
    quick = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_parallel_codegen_split_count=1"
    )
    # XLA ends a process over a flag that it does not know, as later ones do not know this.
    if version("jaxlib").startswith("0.10."):
        quick += " --xla_cpu_use_fusion_emitters=false"
    # Improving loops takes a sixth of the time to compile a program of many.
    loops = "while-loop-invariant-code-motion,simplify-while-loops,while-loop-constant-sinking"
    quick += f" --xla_disable_hlo_passes={loops}"
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Where in the source each operation comes from takes a tenth of the time of tracing.
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {quick}",
        # Ray gives its workers a niceness of 15, so beside other busy processes they would get a
        # thirtieth of a core.
        "RAY_worker_niceness": "0",
    }
    # Some two hundred processes are started, and each would compile flowrl's source again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in what a shell's script starts by `&`: what tests start would never see it either
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import numpy as np
import psutil
import pytest

import flowrl as fl
from browsers import browser, opened  # noqa: F401 - fixtures
from flowrl.core import compile_cache, compiled

# Tracing makes very many objects that live on. To search them for cycles as often as Python does by
# itself takes a tenth of the time.
gc.set_threshold(200_000, 50, 100)
gc.freeze()

compile_cache.prune(Path(os.environ["FLOWRL_TESTS"]), most=400_000_000, kept=200_000_000)

RAY = fl.RayRuntime(processes=1)
"""Runners on Ray for what does not care how many processes there are: each takes two seconds of a
core to start."""


@pytest.fixture(scope="session")
def ray_up():
    """One Ray for all tests that do not care who started it."""
    from flowrl.runtime.ray import start

    stop = start(None, {"include_dashboard": False})
    yield
    stop()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """The pages of tests have a key of their own, not that of the user's pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("FLOWRL_UI_TOKEN", raising=False)
        yield


def forget_compiled():
    """Let go of every function and program that is kept for the runs to come."""
    compiled.kept.cache_clear()
    compiled.with_numbers.cache_clear()
    compiled.programs._kept.clear()
    compiled.signatures._kept.clear()


@pytest.fixture
def compilations():
    """The names of the functions that XLA compiled, or read from its cache on disk, so far."""
    names = []

    def note(event, seconds, **facts):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(facts.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture(scope="module", autouse=True)
def let_go():
    """After a file: what it compiled is of no use to another, and there are some 20 MB of it for
    each graph."""
    yield
    REMEMBERED.clear()
    let_go_above(1.8e9)


@pytest.fixture(autouse=True)
def let_go_early():
    """After a test: a file of many graphs alone could need more than a gigabyte."""
    yield
    let_go_above(2.1e9)


def let_go_above(size):
    """Forget what was compiled if this process has more bytes than these."""
    if psutil.Process().memory_info().rss > size:
        forget_compiled()
        jax.clear_caches()
        gc.collect()
        # The C library keeps what was freed, and the process would seem as large as before.
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)


@pytest.fixture
def runtime(request):
    """The runtime that a test is parametrised with, by name."""
    if request.param == "ray":
        request.getfixturevalue("ray_up")
    return {"ray": RAY, "xla": fl.XlaRuntime(chunk=1)}.get(request.param, request.param)


def ended(graph, count, runtime="local", seed=0):
    """A run that was closed after so many rows."""
    with fl.run(graph, runtime=runtime, seed=seed) as run:
        for _ in range(count):
            next(run)
    return run


def rows_and_weights(graph, count, runtime="local", seed=0):
    """The first rows of a run and the weights after them."""
    run = ended(graph, count, runtime, seed)
    # A program may have run a whole chunk of rows more.
    return run.rows[:count], run.policy.weights


REMEMBERED = {}


def remembered_run(graph, count, runtime="local"):
    """A run that was closed after so many rows, which tests of this process share."""
    key = graph, count, repr(runtime)
    if key not in REMEMBERED:
        REMEMBERED[key] = ended(graph, count, runtime)
    return REMEMBERED[key]


def remembered(graph, count, runtime="local"):
    """The rows of such a run, and the weights after them."""
    run = remembered_run(graph, count, runtime)
    return run.rows[:count], run.policy.weights


def timeless(rows):
    """Rows without what differs from run to run."""
    return [
        {k: v for k, v in row.items() if k not in ("seconds", "steps_per_second") and v == v}
        for row in rows
    ]


def close(rows, others, rtol=1e-4, atol=1e-5):
    """That rows, or trees of arrays, are equal but for rounding."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), rows, others)


@pytest.fixture
def with_gpu(monkeypatch):
    """A machine on which JAX has one GPU beside the CPU, as far as flowrl asks."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.delenv("NPROC", raising=False)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", before)


def same(a, b):
    """Whether two trees of arrays are equal bit for bit."""
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))


def runner_pids():
    """The processes of actors at work, the oldest first."""
    found = [
        p for p in psutil.Process().children(recursive=True) if "ray::Host" in " ".join(p.cmdline())
    ]
    return [p.pid for p in sorted(found, key=lambda p: p.create_time())]


LONGEST = (
    "test_xla",
    "test_replay_graphs",
    "test_spaces_matrix",
    "test_jax_team_graphs",
    "test_resuming",
    "test_compiled",
    "test_examples",
)
"""The files that take longest."""


def pytest_collection_modifyitems(items):
    """What takes the shared Ray starts it. Files run two at a time, for the tests of one share what
    they trace and compile; those with Ray first, then the longest: short ones come last, so that
    both processes end at the same time.

    A browser, and a cluster under anything but the runtime itself, make a test one of a whole
    system."""
    for item in items:
        if "ray_up" in item.fixturenames:
            item.add_marker("ray")
        on_ray = item.get_closest_marker("ray") and item.path.parent.name != "runtime"
        if on_ray or "browser" in item.fixturenames:
            item.add_marker("system")

    def turn(item):
        name = item.path.stem
        return (
            item.get_closest_marker("ray") is None,
            LONGEST.index(name) if name in LONGEST else len(LONGEST),
        )

    items.sort(key=turn)


def with_system(names, slow):
    """Return names of cases as parameters, of which the slow ones are tests of whole systems."""
    system = pytest.mark.system
    return [pytest.param(name, marks=system) if name in slow else name for name in names]
