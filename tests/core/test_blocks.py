"""Blocks: what is on disk under its sum is whole, or is refused, and nothing else is touched."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from flowrl.core import blocks as module
from flowrl.core.blocks import (
    BLOCK,
    MOST_BLOCKS,
    SMALL,
    Blocks,
    Packer,
    Unpacker,
    open_regular,
    write_whole,
)
from flowrl.errors import SaveError

LARGE = np.random.default_rng(0).integers(0, 256, 3 * BLOCK + 5, np.uint8)
FEW = np.arange(9.0)


def packed(folder, *arrays):
    """Where arrays are, and what reads them again as another process does."""
    packer = Packer(Blocks(folder))
    places = [packer.put(x) for x in arrays]
    return places, (packer.end(), packer.sizes)


def unpacker(folder, small, sizes):
    return Unpacker(Blocks(folder), small, sizes)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def read(folder, name, size):
    data = bytearray(size)
    Blocks(folder).get(name, memoryview(data))
    return bytes(data)


def test_small_arrays_share_a_block_and_large_ones_have_their_own(tmp_path):
    empty, limit = np.zeros((0, 3)), np.zeros(SMALL, np.uint8)
    arrays = (FEW, LARGE, empty, FEW + 1, limit)
    places, made = packed(tmp_path, *arrays)
    assert [type(place) for place in places] == [int, list, int, int, list]
    assert (len(places[1]), len(files(tmp_path))) == (4, 6)
    found = unpacker(tmp_path, *made)
    for place, x in zip(places, arrays, strict=True):
        assert found.get(place, x.nbytes) == x.tobytes()


def test_only_the_blocks_that_changed_are_new(tmp_path):
    before = packed(tmp_path, LARGE)[0][0]
    changed = LARGE.copy()
    changed[BLOCK + 1] += 1
    after = packed(tmp_path, changed)[0][0]
    assert [one == other for one, other in zip(before, after, strict=True)] == [1, 0, 1, 1]


def test_an_array_has_no_more_blocks_than_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 1)
    monkeypatch.setattr(module, "SMALL", 1)
    x = np.arange(MOST_BLOCKS + 1, dtype=np.uint16)
    (place,), made = packed(tmp_path, x)
    assert len(place) <= MOST_BLOCKS
    assert unpacker(tmp_path, *made).get(place, x.nbytes) == x.tobytes()
    with pytest.raises(ValueError, match="bytes of an array where"):
        unpacker(tmp_path, *made).get([place[0]] * 257, 257 * made[1][place[0]])


def test_a_block_of_an_earlier_process_is_never_believed(tmp_path):
    name = Blocks(tmp_path).put(b"abcdef")
    (tmp_path / name).write_bytes(b"abcdeX")
    assert Blocks(tmp_path).put(b"abcdef") == name
    assert read(tmp_path, name, 6) == b"abcdef"


@pytest.mark.parametrize("harm", ["unlink", "truncate"])
def test_a_block_that_someone_took_away_is_written_again(tmp_path, harm):
    held = Blocks(tmp_path)
    path = tmp_path / held.put(b"abcdef")
    written = path.stat().st_mtime_ns, path.stat().st_ino
    held.put(b"abcdef")
    assert written == (path.stat().st_mtime_ns, path.stat().st_ino)  # it was not written twice
    path.unlink() if harm == "unlink" else os.truncate(path, 3)
    held.put(b"abcdef")
    assert path.read_bytes() == b"abcdef"


@pytest.mark.parametrize("data", [b"abcdeX", b"abcde", b"abcdefg", b"", b"\0" * 6, None])
def test_a_damaged_block_is_refused(tmp_path, data):
    name = Blocks(tmp_path).put(b"abcdef")
    assert read(tmp_path, name, 6) == b"abcdef"
    (tmp_path / name).unlink() if data is None else (tmp_path / name).write_bytes(data)
    with pytest.raises(SaveError, match=f"{name} (is not what was written|can't be read)"):
        read(tmp_path, name, 6)


def test_what_never_ends_is_no_block(tmp_path):
    name = hashlib.sha256(b"").hexdigest()
    os.mkfifo(tmp_path / name)
    with pytest.raises(SaveError, match=f"{name} is no regular file"):
        read(tmp_path, name, 0)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(SaveError, match="no regular file"):
        read(tmp_path, name, 0)
    with pytest.raises(SaveError, match="no regular file"):
        open_regular(tmp_path)


@pytest.mark.parametrize(
    "name", ["", "a", "../" + "a" * 61, "/etc/passwd", "A" * 64, "a" * 63 + "\n", "a" * 65]
)
def test_a_name_leads_nowhere_else(tmp_path, name):
    with pytest.raises(ValueError, match="a block named"):
        read(tmp_path, name, 1)


@pytest.mark.parametrize("at", [-8, 1, 64, 1 << 64, True, 0.0, "0", None, [], ["a" * 64], {}])
def test_a_place_that_is_none_is_refused(tmp_path, at):
    _, made = packed(tmp_path, FEW)
    found = unpacker(tmp_path, *made)
    assert found.get(0, 72) == FEW.tobytes()
    with pytest.raises((ValueError, KeyError, TypeError)):
        found.get(at, 128)


@pytest.mark.parametrize("size", [-1, 1 << 64, 72.0, True, "72", None])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    _, (small, _) = packed(tmp_path, FEW)
    with pytest.raises(ValueError, match="where a whole number is wanted"):
        unpacker(tmp_path, small, {small: size})
    with pytest.raises(SaveError, match="it has 128 bytes, and 99 were"):
        unpacker(tmp_path, small, {small: 99})


def test_no_memory_is_taken_for_bytes_that_are_not_there(tmp_path, monkeypatch):
    """A size that would not fit into any memory is compared with the file first."""
    _, (small, sizes) = packed(tmp_path, FEW)
    found = unpacker(tmp_path, small, sizes | {"a" * 64: 1 << 60})
    with pytest.raises(SaveError, match="can't be read: No such file"):
        found.get(["a" * 64], 1 << 60)
    (tmp_path / ("a" * 64)).write_bytes(b"a")
    with pytest.raises(SaveError, match="it has 1 bytes, and 1152921504606846976 were written"):
        found.get(["a" * 64], 1 << 60)


def test_only_blocks_and_their_drafts_are_removed(tmp_path):
    held = Blocks(tmp_path)
    wanted, other = held.put(b"a"), held.put(b"b")
    for name in (f"{'c' * 64}.draft", "notes.txt", "mine.draft", "d" * 63):
        (tmp_path / name).write_text("x")
    held.keep_only({wanted})
    assert files(tmp_path) == sorted([wanted, "notes.txt", "mine.draft", "d" * 63])
    held.put(b"b")
    assert (tmp_path / other).read_bytes() == b"b"
    Blocks(tmp_path / "none").keep_only(set())


def test_a_draft_that_is_a_link_is_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / "file.draft").symlink_to(outside)
    write_whole(tmp_path / "file", b"new")
    assert (outside.read_text(), (tmp_path / "file").read_bytes()) == ("mine", b"new")
    assert not (tmp_path / "file").is_symlink()


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(os, "fsync", lambda _: done.append("on the disk"))
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda *a: (done.append("named"), replace(*a)))
    write_whole(tmp_path / "file", b"new")
    assert done == ["on the disk", "named"]


def test_where_it_fails_the_old_file_stays_and_no_draft(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space")))
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "file", b"new")
    assert (files(tmp_path), (tmp_path / "file").read_bytes()) == (["file"], b"old")
