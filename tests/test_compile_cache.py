"""What is compiled is kept in the user's cache folder, and a second process reads it from there."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowrl.core import compile_cache

RUN = """
import collections, sys
import jax
import flowrl as fl
jax.numpy.ones(3) + 1  # what was compiled before must not keep the folder from being used
seen = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: seen.update([name]))
def main():
    graph = fl.pg("CartPole-v1", policy=fl.Policy(fl.networks.MLP, hidden=(4,)))
    with fl.run(graph, runtime=sys.argv[1]) as run:
        next(run)
    print(seen["/jax/compilation_cache/cache_hits"], seen["/jax/compilation_cache/cache_misses"])
main()
"""


def run(home, runtime="local", **variables):
    """The hits and misses of a process with a home of its own, whose user set these variables."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", RUN, runtime],
        env={**env, "HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hits, misses = map(int, done.stdout.split()[-2:])
    return hits, misses


def entries(folder):
    return sorted(path for path in Path(folder).rglob("*-cache") if path.is_file())


@pytest.mark.system
def test_a_second_process_compiles_nothing(tmp_path):
    first_hits, first_misses = run(tmp_path)
    found = entries(tmp_path / ".cache" / "flowrl")
    assert first_misses == len(found) > 3
    # A file that was cut off, as by a full disk, costs its compilation and nothing else.
    found[0].write_bytes(found[0].read_bytes()[:50])
    hits, misses = run(tmp_path)
    assert hits >= first_hits + first_misses - 1 and misses <= 1 and entries(tmp_path) == found
    # Runners in other processes, which compile for one thread, use the folder too.
    run(tmp_path, "ray")
    assert len(entries(tmp_path)) > len(found)


@pytest.mark.system
@pytest.mark.parametrize(
    "variables",
    [{"JAX_ENABLE_COMPILATION_CACHE": "false"}, {"XDG_CACHE_HOME": "/proc/nothing"}],
    ids=["switched off", "can't be written"],
)
def test_it_goes_without(tmp_path, variables):
    run(tmp_path, **variables)
    assert not entries(tmp_path)


@pytest.mark.system
def test_a_folder_of_the_users_own_is_used_and_left_alone(tmp_path):
    mine = tmp_path / "mine"
    run(
        tmp_path,
        JAX_COMPILATION_CACHE_DIR=str(mine),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    assert entries(mine) and not (tmp_path / ".cache").exists()


def test_what_was_used_least_recently_is_removed_once_there_is_too_much(tmp_path):
    now = time.time()
    for i in range(10):
        path = tmp_path / f"version-{i % 2}" / f"{i}-cache"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (now - 100 * i, now - 100 * i))
    # Files that are none of JAX's are left alone, and do not count.
    mine = tmp_path / "version-0" / "thesis.tex"
    mine.write_bytes(bytes(10_000))
    os.utime(mine, (now - 9_000, now - 9_000))
    compile_cache.prune(tmp_path, most=1000, kept=500)
    assert len(entries(tmp_path)) == 10  # not too much yet
    compile_cache.prune(tmp_path, most=900, kept=500)
    assert len(entries(tmp_path)) == 10  # it was looked at a moment ago
    os.utime(tmp_path / compile_cache.STAMP, (now - 4000, now - 4000))
    compile_cache.prune(tmp_path, most=900, kept=500)
    assert sorted(path.name for path in entries(tmp_path)) == [f"{i}-cache" for i in range(5)]
    assert mine.exists()


def test_machines_that_can_not_run_each_others_programs_have_folders_of_their_own(monkeypatch):
    mine = compile_cache.cache_folder()
    monkeypatch.setattr(compile_cache, "_processor", lambda: "another")
    assert compile_cache.cache_folder() != mine
