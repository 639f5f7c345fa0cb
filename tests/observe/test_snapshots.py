"""Snapshots on disk: whatever is damaged, killed or full, an older good one is taken, with a word.

``python tests/observe/test_snapshots.py 50`` kills a process that writes snapshots 50 times.
"""

import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import flowrl as fl
from conftest import timeless
from flowrl.core import blocks
from flowrl.core.encoding import EncodingError
from flowrl.core.events import Tap, Warned
from flowrl.errors import SaveError, SettingError
from flowrl.observe import snapshots
from flowrl.observe.saving import RunDir
from flowrl.observe.snapshots import (
    NEWEST,
    Snapshots,
    SnapshotWriter,
    newest_snapshot,
    read_snapshot,
    snapshot_files,
)

KILLS = 10
ROOT = Path(__file__).parents[2]
# Its larger layer lies in blocks of its own.
PPO = fl.ppo(
    "CartPole-v1",
    fl.PPOSettings(
        envs_per_runner=2,
        rollout_length=16,
        batch_size=32,
        epochs=1,
        minibatch_size=None,
        policy=fl.Policy(fl.networks.MLP, hidden=(130, 130)),
    ),
)
ROWS = 6


class Warnings:
    """Takes the warnings of a run."""

    kinds = (Warned,)

    def __init__(self):
        self.texts = []

    def __call__(self, event):
        self.texts.append(event.text)

    def close(self):
        pass


def write(path, row, state, writer=None, **settings):
    """Write a snapshot as a process of its own does, or one that goes on."""
    settings = Snapshots(every=0, **settings)
    if writer is None:
        writer = SnapshotWriter(settings, path, "graph", "plan", row - 1)
    writer.write(row, 10 * row, lambda: nullcontext(state))
    return writer


def newest(path):
    """The row of the newest good snapshot, and the warnings."""
    warnings = []
    found = newest_snapshot(path, (), warnings.append)
    return (None if found is None else found.row), warnings


def rows_of(path):
    return [int(file.stem[4:]) for file in snapshot_files(path / "snapshots")]


def blocks_of(file):
    return set(json.loads(file.read_bytes().partition(b"\n")[2])["blocks"])


def digest(folder):
    """What is in a folder, by name."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


# -- damage


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


HARMS = {
    "one bit flipped": flip,
    "cut short": lambda file: os.truncate(file, file.stat().st_size // 2),
    "cut by a byte": lambda file: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file: file.write_bytes(b""),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "deleted": lambda file: file.unlink(),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The directory of a run of 6 rows, with the newest 3 snapshots."""
    path = tmp_path_factory.mktemp("kept") / "run"
    every_row = Snapshots(every=0, keep=3)
    with fl.run(PPO, steps=32 * (ROWS - 1), out=path, snapshots=every_row) as run:
        assert len([*run]) == ROWS
    assert rows_of(path) == [6, 5, 4]
    return path


def test_the_rows_are_on_disk_before_the_snapshot_that_names_them(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(number):
        synced.append(Path(os.readlink(f"/proc/self/fd/{number}")))
        fsync(number)

    monkeypatch.setattr(os, "fsync", noted)
    with fl.run(PPO, steps=64, out=tmp_path / "run", snapshots=Snapshots(every=0)) as run:
        next(run)
        synced.clear()
        next(run)
        names = [path.name for path in synced]
    newest = next(i for i, path in enumerate(synced) if path.parent.name == "snapshots")
    assert "rows.jsonl" in names[:newest]


@pytest.fixture(scope="module")
def whole():
    """The rows of a run that was not resumed."""
    with fl.run(PPO, steps=32 * (ROWS + 1)) as run:
        return timeless([*run])


def own_files(path):
    """The files of a run that only its newest snapshot needs."""
    folder = path / "snapshots"
    used = [blocks_of(file) for file in snapshot_files(folder)]
    own = [folder / "blocks" / name for name in used[0].difference(*used[1:])]
    return [snapshot_files(folder)[0], folder / NEWEST, *own]


@pytest.mark.system
def test_whatever_is_damaged_of_the_newest_snapshot_the_one_before_it_is_taken(kept, tmp_path):
    names = [file.relative_to(kept) for file in own_files(kept)]
    assert len(names) >= 5  # the two files, the small arrays, and the large ones
    assert newest(kept) == (6, [])
    for name in names:
        for harm, do in HARMS.items():
            path = tmp_path / f"{name.name[:14]} {harm}"
            shutil.copytree(kept / "snapshots", path / "snapshots")
            do(path / name)
            row, warnings = newest(path)
            # All that the newest one consists of is there without the file that names it.
            assert row == (6 if name.name == NEWEST else 5), (name, harm)
            assert len(warnings) == 1, (name, harm)
            assert name.name in warnings[0]


@pytest.mark.parametrize(
    ("which", "harm"),
    [(0, "one bit flipped"), (1, "zeroed"), (2, "deleted"), (3, "cut short")],
)
def test_a_run_whose_newest_snapshot_is_damaged_goes_on_from_the_one_before(
    kept, whole, tmp_path, which, harm
):
    path, warnings = tmp_path / "run", Warnings()
    shutil.copytree(kept, path)
    HARMS[harm](own_files(path)[which])
    with fl.resume(path, steps=32 * (ROWS + 1), observers=[warnings]) as run:
        assert len(run.rows) == (6 if which == 1 else 5)
        assert timeless([*run.rows, *run]) == whole
    assert len(warnings.texts) == 1
    # It is whole again, and holds no more than it needs.
    assert newest(path) == (len(whole), [])
    used = set().union(*(blocks_of(file) for file in snapshot_files(path / "snapshots")))
    assert {file.name for file in (path / "snapshots/blocks").iterdir()} == used


def test_where_all_snapshots_are_damaged_nothing_is_changed(kept, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(kept, path)
    files = snapshot_files(path / "snapshots")
    flip(files[0])
    (path / "snapshots/blocks" / min(blocks_of(files[1]))).unlink()
    os.truncate(files[2], 100)
    before = digest(path)
    with pytest.raises(SaveError, match="has no good snapshot") as error:
        fl.resume(path, steps=32 * (ROWS + 1))
    assert all(file.name in str(error.value) for file in files)
    assert digest(path) == before


def test_a_run_of_a_newer_format_is_refused_and_not_changed(kept, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(kept, path)
    put(snapshot_files(path / "snapshots")[0], '{"unknown": 1}', 2)
    before = digest(path)
    with pytest.raises(SaveError, match=r"row-0000000006\.json has format 2, and this flowrl reads "
                       r"format 1: install a newer one"):  # fmt: skip
        fl.resume(path, steps=32 * (ROWS + 1))
    assert digest(path) == before


def test_damage_to_what_snapshots_share_makes_all_of_them_bad(tmp_path):
    same, writer = np.arange(30_000.0), None
    for row in range(1, 5):
        writer = write(tmp_path, row, {"same": same, "row": np.full(9, row)}, writer, keep=3)
    used = [blocks_of(file) for file in snapshot_files(tmp_path / "snapshots")]
    (shared,) = set.intersection(*used)
    assert len(used) == 3
    flip(tmp_path / "snapshots/blocks" / shared)
    row, warnings = newest(tmp_path)
    assert row is None
    assert [text.partition(":")[0] for text in warnings] == [
        f"row-000000000{row}.json" for row in (4, 3, 2)
    ]
    # The next process writes it again, and does not believe the file that is there.
    write(tmp_path, 5, {"same": same})
    assert newest(tmp_path) == (5, [])


def test_every_bit_of_a_snapshot_counts(tmp_path):
    write(tmp_path, 1, {"x": 1, "y": [0.5, "é"]})
    (file,) = snapshot_files(tmp_path / "snapshots")
    data = file.read_bytes()
    for i in range(8 * len(data)):
        changed = bytearray(data)
        changed[i // 8] ^= 1 << i % 8
        file.write_bytes(changed)
        # Not a format of the future, either.
        with pytest.raises(SaveError, match="is not what was written"):
            read_snapshot(file)
    file.write_bytes(data)
    assert read_snapshot(file).state == {"x": 1, "y": [0.5, "é"]}


def made(path, **changed):
    """A snapshot whose JSON someone changed, with the sums that it must have."""
    write(path, 1, {"x": np.arange(5)})
    (file,) = snapshot_files(path / "snapshots")
    facts = json.loads(file.read_bytes().partition(b"\n")[2]) | changed
    put(file, json.dumps(facts))
    return file


def put(file, text, number=1):
    text = text.encode()
    header = {"format": number, "bytes": len(text), "sha256": snapshots._sum(number, text)}
    file.write_bytes(json.dumps(header).encode() + b"\n" + text)


@pytest.mark.parametrize(
    "changed",
    [
        {"row": 2},
        {"row": True},
        {"row": "1"},
        {"rows_bytes": -1},
        {"rows_bytes": 1 << 64},
        {"rows_bytes": 1.0},
        {"small": "../../../etc/passwd"},
        {"small": 5},
        {"blocks": {}},
        {"blocks": {"a" * 64: -1}},
        {"blocks": [1]},
        {"state": {"array": "int64", "shape": [5], "at": -64}},
        {"state": {"array": "int64", "shape": [1 << 30], "at": 0}},
        {"state": {"item": "os:system", "of": {}}},
        {"state": {}},
        {"state": None, "graph": 5},
    ],
    ids=str,
)
def test_what_someone_made_up_is_refused(tmp_path, changed):
    file = made(tmp_path, **changed)
    with pytest.raises(SaveError, match=r"row-0000000001\.json"):
        read_snapshot(file)
    assert newest(tmp_path)[0] is None


def test_json_that_python_would_read_otherwise_is_refused(tmp_path):
    file = made(tmp_path)
    assert read_snapshot(file).row == 1
    text = file.read_bytes().partition(b"\n")[2].decode()
    for changed in (
        text.replace('"row":', '"row": 1, "row":'),
        "[" * 100_000,
        "[]",
        "null",
        text.replace('"state":', f'"more": {"9" * 5000}, "state":'),
    ):
        put(file, changed)
        with pytest.raises(SaveError, match="is not what was written"):
            read_snapshot(file)


def test_what_never_ends_is_no_snapshot(tmp_path):
    file = made(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert newest(tmp_path)[0] is None
    (tmp_path / "snapshots" / NEWEST).unlink()
    os.mkfifo(tmp_path / "snapshots" / NEWEST)
    assert "no regular file" in newest(tmp_path)[1][0]


# -- writing


def test_settings_that_are_none_are_refused():
    assert (Snapshots(every=Fraction(1, 2)).every, Snapshots(every=np.float32(2)).every) == (0.5, 2)
    for every in (-1, math.nan, True, "60", None, math.inf):
        with pytest.raises(SettingError, match="every must be a number of seconds, at least 0"):
            Snapshots(every=every)
    for keep in (0, True, 2.0, None):
        with pytest.raises(SettingError, match="keep must be a whole number, at least 1"):
            Snapshots(keep=keep)


def test_only_so_many_stay_with_their_blocks_and_others_files_are_left_alone(tmp_path):
    folder, writer = tmp_path / "snapshots", None
    folder.mkdir()
    for name in ("row-mine.json", "row-0000000001 (copy).json", "notes.draft"):
        (folder / name).write_text("mine")
    (folder / "row-0000000009.json.draft").write_text("half")
    for row in range(1, 9):
        writer = write(tmp_path, row, {"x": np.full(20_000, row)}, writer, keep=2)
    assert rows_of(tmp_path) == [8, 7]
    assert len(list((folder / "blocks").iterdir())) == 3  # there are no small arrays, in one block
    assert {*writer.used} == {*snapshot_files(folder)}  # it does not grow with the run
    assert {file.name for file in folder.iterdir()} == {
        "blocks", NEWEST, "row-0000000007.json", "row-0000000008.json", "row-mine.json",
        "row-0000000001 (copy).json", "notes.draft",
    }  # fmt: skip


def test_one_row_is_written_once(tmp_path):
    writer = write(tmp_path, 1, {"x": 1})
    before = digest(tmp_path)
    write(tmp_path, 1, {"x": 2}, writer)
    assert digest(tmp_path) == before


def test_a_future_that_was_given_up_is_removed_before_anything_could_repair_it(
    tmp_path, monkeypatch
):
    """Its rows are no longer there, so nobody could go on from it."""
    state = {row: {"x": np.full(20_000, row)} for row in range(1, 5)}
    writer = None
    for row in range(1, 4):
        writer = write(tmp_path, row, state[row], writer)
    folder = tmp_path / "snapshots"
    third, second, first = map(blocks_of, snapshot_files(folder))
    for name in (second | third) - first:
        (folder / "blocks" / name).unlink()
    assert newest(tmp_path)[0] == 1
    writer = SnapshotWriter(Snapshots(), tmp_path, "graph", "plan", 1)
    # The process ends after it has written the blocks of row 3 again.
    monkeypatch.setattr(writer, "_remove_old", lambda: None)
    monkeypatch.setattr(snapshots, "sync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        writer.write(4, 0, lambda: nullcontext([state[2], state[3]]))
    assert newest(tmp_path)[0] == 1


def test_blocks_stay_while_a_snapshot_that_may_need_them_cant_be_read(tmp_path):
    writer = write(tmp_path, 1, {"x": np.full(20_000, 1)})
    (first,) = snapshot_files(writer.folder)
    text, used = first.read_bytes(), blocks_of(first)
    first.write_bytes(b"")
    write(tmp_path, 2, {"x": np.full(20_000, 2)})
    first.write_bytes(text)
    assert all((writer.folder / "blocks" / name).is_file() for name in used)
    assert read_snapshot(first).row == 1


def test_names_are_on_the_disk_before_what_leads_to_them(tmp_path, monkeypatch):
    """After a power cut there is no file that names another one that is missing."""
    done = []
    write_whole = blocks.write_whole

    def noted(path, data):
        done.append(path.name.partition("-")[0] if path.parent.name != "blocks" else "block")
        write_whole(path, data)

    for module in (blocks, snapshots):
        monkeypatch.setattr(module, "write_whole", noted)
    monkeypatch.setattr(snapshots, "sync", lambda folder: done.append(f"sync {folder.name}"))
    write(tmp_path, 1, {"x": np.arange(20_000)})
    assert done == [
        "block", "block", "sync blocks", "row", "sync snapshots", NEWEST, "sync snapshots",
    ]  # fmt: skip


def test_what_cant_be_kept_leaves_what_is_there(tmp_path):
    writer = write(tmp_path, 1, {"x": np.full(20_000, 1)})
    before = digest(tmp_path)
    with pytest.raises(EncodingError, match=r"y is a set, which can't be kept"):
        writer.write(2, 20, lambda: nullcontext({"x": np.full(20_000, 2), "y": {1}}))
    assert digest(tmp_path) == before
    assert newest(tmp_path) == (1, [])


def test_more_text_than_can_be_read_back_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "MOST_TEXT", 1000)
    with pytest.raises(EncodingError, match="bytes beside its arrays, and 1,000 are the most"):
        write(tmp_path, 1, {"x": "x" * 1000})


# -- kill -9

WRITING = """
import os, sys
from contextlib import nullcontext
from pathlib import Path
import numpy as np
from flowrl.observe.snapshots import Snapshots, SnapshotWriter, newest_snapshot

def state(row):
    x = np.zeros(400_000)
    x[row % 4 * 100_000:][:50_000] = row
    return {"x": x, "few": np.full(9, row), "row": row}

def work(path):
    found = newest_snapshot(path, (), lambda text: print("damaged", text, flush=True))
    row = found.row if found else 0
    writer = SnapshotWriter(Snapshots(every=0, keep=2), path, "graph", "plan", row)
    while True:
        row += 1
        writer.write(row, 10 * row, lambda: nullcontext(state(row)))
        os.write(1, b"row %d\\n" % row)

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        work(Path(line.strip()))
    os.write(1, b"pid %d\\n" % pid)
    os.waitpid(pid, 0)
    os.write(1, b"ended\\n")
"""


def killed(path, times, seed):
    """Kill a process that writes snapshots so many times, and look at what is there each time.

    Returns the rows at which it was killed, and how many kills left a file half written.
    """
    chance, rows, drafts = random.Random(seed), [0], 0
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", WRITING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
        bufsize=1,
    ) as nursery:
        for _ in range(times):
            print(path, file=nursery.stdin, flush=True)
            heard = [nursery.stdout.readline().split()]
            while sum(word[0] == "row" for word in heard) < 2 or "pid" not in [w[0] for w in heard]:
                heard.append(nursery.stdout.readline().split())
            # A moment within one of the next snapshots: each takes some 10 ms.
            time.sleep(chance.uniform(0, 0.05))
            pid = next(int(word[1]) for word in heard if word[0] == "pid")
            os.kill(pid, signal.SIGKILL)
            while heard[-1] != ["ended"]:
                heard.append(nursery.stdout.readline().split())
            assert not [word for word in heard if word[0] == "damaged"]
            acknowledged = max(int(word[1]) for word in heard if word[0] == "row")
            drafts += bool(list((path / "snapshots").rglob("*.draft")))
            row, warnings = newest(path)
            assert not warnings
            assert row in (acknowledged, acknowledged + 1)
            assert acknowledged > rows[-1]
            found = newest_snapshot(path, (), print).state
            assert (found["row"], *found["few"][[0, -1]]) == (row, row, row)
            assert found["x"][row % 4 * 100_000 :][:50_000].tolist() == [row] * 50_000
            rows.append(row)
    return rows[1:], drafts


def test_a_process_that_is_killed_while_it_writes_leaves_a_good_snapshot(tmp_path):
    rows, _ = killed(tmp_path, KILLS, seed=0)
    assert len(rows) == KILLS
    # The next one to write removes what is left of it.
    (tmp_path / "snapshots/row-0000000007.json.draft").write_text("half")
    (tmp_path / "snapshots/blocks" / f"{'a' * 64}.draft").write_text("half")
    write(tmp_path, rows[-1] + 1, {"x": 1}, keep=1)
    assert not list((tmp_path / "snapshots").rglob("*.draft"))
    assert len(list((tmp_path / "snapshots/blocks").iterdir())) == 1


# -- a full disk

FULL = """
import resource, signal, sys
from pathlib import Path
import flowrl as fl
from flowrl.observe.snapshots import Snapshots, newest_snapshot, snapshot_files
sys.path.insert(0, sys.argv[2])
from test_snapshots import PPO, Warnings, digest

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
out, warnings = Path(sys.argv[1]), Warnings()
folder = out / "snapshots"
with fl.run(PPO, steps=32 * 6, out=out, snapshots=Snapshots(0, 2), observers=[warnings]) as run:
    for row in run:
        if row["row"] == 3:
            before = digest(folder)
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, most))
        if row["row"] == 6:
            assert digest(folder) == before
            assert newest_snapshot(out, (), print).row == 3
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
assert newest_snapshot(out, (), print).row == 7
print(len(run.rows), *warnings.texts, sep="\\n")
"""


@pytest.mark.system
def test_a_run_goes_on_where_no_more_can_be_written(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "run", ROOT / "tests/observe"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    rows, *warnings = done.stdout.splitlines()
    assert rows == "7"
    # After rows 4 to 6.
    assert len(warnings) == 3
    assert all("no snapshot could be written (File too large)" in text for text in warnings)


def test_a_best_policy_or_a_profile_that_can_not_be_written_costs_no_snapshot(
    tmp_path, monkeypatch
):
    put, warned = RunDir.put, []

    def full(*_):
        raise OSError(28, "No space left on device")

    def full_for_profiles(self, name, text):
        (full if name == "profile.json" else put)(self, name, text)

    monkeypatch.setattr("flowrl.observe.saver.save_policy", full)
    monkeypatch.setattr("flowrl.observe.saver.PROFILE_SECONDS", 0)
    monkeypatch.setattr(RunDir, "put", full_for_profiles)
    out, tap = tmp_path / "run", Tap(lambda event: warned.append(event.text), Warned)
    graph = fl.ppo("CartPole-v1", rollout_length=16, batch_size=64)
    goal = {"until": lambda row: row["row"] == 8}
    run = fl.run(graph, out=out, snapshots=fl.Snapshots(every=0), observers=[tap], **goal)
    for number in range(1, 8):
        assert next(run)["row"] == number == newest_snapshot(out, (), print).row
    assert {text.split(": ", 1)[1] for text in warned} == {
        "the best policy could not be written (No space left on device)"
    }
    monkeypatch.undo()
    list(run)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        kills = int(sys.argv[1])
        ended, half = killed(Path(folder), kills, seed=None)
        text = f"{kills} kills, {half} of which left a draft; the last row was {ended[-1]}"
        print(text)  # noqa: T201 - this file is run as a script here
