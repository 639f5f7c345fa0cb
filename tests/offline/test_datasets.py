"""Datasets: what is written is read back, whole, shuffled, within bounds; what is bad is named."""

import gc
import json
import re
import sys
import tomllib
import weakref
from importlib import metadata
from pathlib import Path

import gymnasium as gym
import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from minari.dataset._storages import hdf5_storage
from packaging.requirements import Requirement

import flowrl as fl
from flowrl.core.encoding import decoded, encoded
from flowrl.errors import SaveError, SettingError
from flowrl.offline import reader as reading
from flowrl.offline.dataset import Dataset
from flowrl.offline.episodes import read_episodes
from flowrl.offline.files import Files
from flowrl.offline.reader import Reader, cut, returns
from flowrl.offline.writer import Writer
from flowrl.offline.writing import DatasetWriter
from flowrl.rl.spaces import Spaces

SPACES = Spaces(gym.spaces.Box(-9, 9, (2,), np.float32), gym.spaces.Discrete(3))
LENGTHS = (3, 2, 5, 1, 4)


def rollouts(spaces, lengths, steps=4, seed=0, ends="td"):
    """Rollouts ``[steps, 1]`` of one environment whose episodes have these lengths, in turn
    terminated and truncated, and the rows of these episodes."""
    random = np.random.default_rng(seed)
    spaces.obs.seed(seed), spaces.action.seed(seed + 1)
    rows, episodes = [], []
    for number, length in enumerate(lengths):
        obs = [spaces.arrays(spaces.obs.sample()) for _ in range(length + 1)]
        parts = [part.path for part in spaces.head.parts]
        actions = [_parts(spaces.action.sample(), parts) for _ in range(length)]
        stacked = {path: np.stack([a[path] for a in actions]) for path in parts}
        taken, rewards = spaces.head.from_env(stacked), random.normal(size=length)
        episodes.append((obs, taken, rewards.astype(np.float32), number % 2 == 0))
        for t in range(length):
            last = t == length - 1
            row = {**obs[t], "action": taken[t], "reward": np.float32(rewards[t])}
            flags = {"terminated": last and number % 2 == 0, "truncated": last and number % 2 == 1}
            rows.append({**row, **flags, "valid": True})
        empty = {"action": taken[0] * 0, "reward": np.float32(0)}
        off = {"terminated": False, "truncated": False, "valid": False}
        rows.append({**obs[-1], **empty, **off})
    while len(rows) % steps:
        rows.append(rows[-1])
    for begin in range(0, len(rows), steps):
        piece = rows[begin : begin + steps]
        data = {k: np.stack([np.asarray(r[k]) for r in piece])[:, None] for k in piece[0]}
        after = rows[min(begin + steps, len(rows) - 1)]
        columns = {f"bootstrap_{p.name}": np.asarray(after[p.name])[None] for p in spaces.parts}
        numbers = {"env": np.zeros(1, np.int32), "first": np.full(1, begin, np.int32)}
        yield fl.extend.Batch(data, {**columns, **numbers, "version": np.zeros(1, np.int32)})
    rollouts.episodes = episodes


def _parts(action, paths):
    found = {}
    for path in paths:
        x = action
        for key in path:
            x = x[key]
        found[path] = np.asarray(x)
    return found


def written(path, spaces=SPACES, lengths=LENGTHS, env="", **how):
    writer = Writer(DatasetWriter(str(path)), spaces, env)
    for batch in rollouts(spaces, lengths, **how):
        writer.add(batch)
    writer.close()
    return rollouts.episodes


@pytest.fixture
def data(tmp_path):
    written(tmp_path / "data")
    return tmp_path / "data"


def reader(path, seed=0, spaces=SPACES, env="", **settings):
    return Reader(Dataset(str(path), **settings), spaces, env, (seed,))


NAMES = st.sampled_from(["a", "b", "c d", "'e'"])
FLOATS = st.sampled_from([np.float32, np.float64, np.float16])
OBS = st.one_of(
    st.builds(lambda n, t: gym.spaces.Box(-2, 3, (n,), t), st.integers(1, 3), FLOATS),
    st.builds(lambda n: gym.spaces.Box(0, 255, (n, 2, 3), np.uint8), st.integers(1, 3)),
    st.builds(lambda n: gym.spaces.Box(-5, 5, (n,), np.int64), st.integers(1, 3)),
    st.builds(lambda n, s: gym.spaces.Discrete(n, start=s), st.integers(1, 5), st.integers(-3, 3)),
    st.builds(gym.spaces.MultiBinary, st.integers(1, 4)),
    st.builds(gym.spaces.MultiDiscrete, st.lists(st.integers(1, 4), min_size=1)),
)
ACTIONS = st.one_of(
    st.builds(lambda n, s: gym.spaces.Discrete(n, start=s), st.integers(1, 5), st.integers(-3, 3)),
    st.builds(gym.spaces.MultiBinary, st.integers(1, 4)),
    st.builds(lambda n: gym.spaces.MultiDiscrete(n, start=[2] * len(n)),
              st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    st.builds(lambda n: gym.spaces.Box(-1, 2, (n,), np.int8), st.integers(1, 3)),
    st.builds(lambda low, n: gym.spaces.Box(low, 3.0, (n,)), st.floats(-9, 2), st.integers(1, 3)),
    st.builds(lambda n: gym.spaces.Box(-np.inf, np.inf, (n,)), st.integers(1, 3)),
    st.builds(lambda n: gym.spaces.Box(1.5, np.inf, (n, 2)), st.integers(1, 2)),
)  # fmt: skip


def trees(leaves):
    return st.recursive(
        leaves,
        lambda one: st.one_of(
            st.dictionaries(NAMES, one, min_size=1, max_size=3).map(gym.spaces.Dict),
            st.lists(one, min_size=1, max_size=3).map(gym.spaces.Tuple),
        ),
        max_leaves=4,
    )


@settings(max_examples=25, deadline=None)
@given(trees(OBS), trees(ACTIONS), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_what_is_written_is_read_back_over_all_spaces(tmp_path_factory, obs, action, lengths):
    spaces, path = Spaces(obs, action), tmp_path_factory.mktemp("any") / "data"
    episodes = written(path, spaces, lengths)
    files = Files(str(path))
    assert files.spaces == spaces and files.lengths == list(lengths)
    read = list(read_episodes(files, spaces, range(len(lengths))))
    for (obs_then, taken, rewards, terminated), found in zip(episodes, read, strict=True):
        for part in spaces.parts:
            np.testing.assert_array_equal(
                found.obs[part.name], np.stack([o[part.name] for o in obs_then])
            )
            assert found.obs[part.name].dtype == part.dtype
        np.testing.assert_allclose(found.action, taken, atol=2e-6)
        np.testing.assert_array_equal(found.reward, rewards)
        assert found.terminated == terminated


def test_a_path_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written("data")
    assert len(ids(reader("data").sample(15))) == 15


def test_minari_itself_reads_it(data):
    import minari

    dataset = minari.MinariDataset(data / "data")
    assert (dataset.total_episodes, dataset.total_steps) == (5, sum(LENGTHS))
    episode = dataset[1]
    assert episode.observations.shape == (3, 2) and episode.truncations.tolist() == [False, True]


# Minari warns of what it is not given of a dataset.
@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_a_dataset_of_minari_is_found_by_its_id_and_read(tmp_path, monkeypatch):
    import minari
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    buffer = EpisodeBuffer(
        observations=x, actions=np.array([0, 2, 1]), rewards=[1.0, 2.0, 3.0],
        terminations=[False, False, True], truncations=[False, False, False],
    )  # fmt: skip
    minari.create_dataset_from_buffers(
        "mine/small-v0", [buffer], observation_space=SPACES.obs, action_space=SPACES.action,
        eval_env=None, algorithm_name="x", code_permalink="x", author="x", author_email="x",
        description="x",
    )  # fmt: skip
    batch = reader("mine/small-v0").sample(3)
    order = np.argsort(batch.data["reward"][0])
    assert batch.data["action"][0][order].tolist() == [0, 2, 1]
    np.testing.assert_array_equal(batch.data["next_obs"][0][order], x[1:])


def slow_returns(reward, terminated, gamma, n_step):
    length, found = len(reward), []
    for t in range(length):
        total, k = 0.0, 0
        while t + k < length and (n_step is None or k < n_step):
            total += gamma**k * reward[t + k]
            k += 1
        over = t + k == length and terminated
        found.append((total, 0.0 if over else gamma**k, t + k))
    return [np.array(x) for x in zip(*found, strict=True)]


@pytest.mark.parametrize("n_step", [1, 2, 3, 9, None])
@pytest.mark.parametrize("terminated", [True, False])
def test_returns_are_those_of_a_slow_loop(n_step, terminated):
    reward = np.random.default_rng(1).normal(size=6).astype(np.float32)
    for fast, slow in zip(
        returns(reward, terminated, 0.9, n_step), slow_returns(reward, terminated, 0.9, n_step),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(fast, slow, rtol=1e-6)


def ids(batch):
    """By its observation and action: which transitions a batch has."""
    obs, after = batch.data["obs"][0], batch.data["next_obs"][0]
    return [(*a, *b) for a, b in zip(obs.tolist(), after.tolist(), strict=True)]


@pytest.mark.parametrize("buffer_size", [100, 6, 1])
def test_an_epoch_has_every_transition_once_in_an_order_of_the_seed(data, buffer_size):
    total = sum(LENGTHS)
    first, again = (reader(data, buffer_size=buffer_size) for _ in range(2))
    epochs = [[*ids(first.sample(4)), *ids(first.sample(total - 4))] for _ in range(3)]
    assert {len(set(epoch)) for epoch in epochs} == {total}
    assert len(set(map(frozenset, epochs))) == 1 and len(set(map(tuple, epochs))) == 3
    assert [ids(again.sample(total)) for _ in range(3)] == epochs
    assert ids(reader(data, 1, buffer_size=buffer_size).sample(total)) != epochs[0]


def test_what_is_in_memory_is_bounded(data, monkeypatch):
    read, alive = reader(data, buffer_size=6), []
    make = reading.chunk_of
    # To search all that there is already would take most of the test's time.
    gc.freeze()

    def made(*how):
        gc.collect()
        assert not any(each() for each in alive), "the chunk before is still in memory"
        chunk = make(*how)
        alive.append(weakref.ref(chunk))
        return chunk

    monkeypatch.setattr(reading, "chunk_of", made)
    try:
        for _ in range(30):
            read.sample(4)
            assert len(read._chunk) <= 6
    finally:
        gc.unfreeze()
    assert [len(c) for c in cut(np.arange(5), np.array(LENGTHS), 6)] == [2, 2, 1]


@pytest.mark.parametrize("n_step", [1, 3, None])
@pytest.mark.parametrize("buffer_size", [100, 6])
def test_transitions_of_all_episodes_are_those_of_a_slow_list(tmp_path, buffer_size, n_step):
    """Each with its own observations, and 0 after a termination alone."""
    wanted = {}
    for obs, action, rewards, terminated in written(tmp_path / "data"):
        found = slow_returns(rewards, terminated, 0.9, n_step)
        for t, (total, discount, after) in enumerate(zip(*found, strict=True)):
            start, end = (tuple(obs[i]["obs"].tolist()) for i in (t, after))
            wanted[start] = (int(action[t]), total, discount, *end)
    read = reader(tmp_path / "data", buffer_size=buffer_size, n_step=n_step, gamma=0.9)
    data = {name: x[0] for name, x in read.sample(sum(LENGTHS)).data.items()}
    found = {}
    for i, start in enumerate(map(tuple, data["obs"].tolist())):
        numbers = (float(data[name][i]) for name in ("reward", "discount"))
        found[start] = (int(data["action"][i]), *numbers, *data["next_obs"][i].tolist())
    assert found.keys() == wanted.keys()
    for start, row in wanted.items():
        assert found[start] == pytest.approx(row, rel=1e-5)


@pytest.mark.parametrize("buffer_size", [100, 6])
def test_a_reader_goes_on_where_it_was_kept(data, buffer_size):
    read = reader(data, buffer_size=buffer_size)
    read.sample(22)
    arrays = []

    def put(x):
        arrays.append(x)
        return len(arrays) - 1

    kept = encoded(read.keep(), put)
    after = [ids(read.sample(7)) for _ in range(6)]
    other = reader(data, buffer_size=buffer_size)
    other.take(decoded(kept, lambda at, size: bytearray(arrays[at].tobytes())))
    assert [ids(other.sample(7)) for _ in range(6)] == after


def test_a_run_goes_on_with_its_own_dataset_alone(data, tmp_path):
    kept = reader(data).keep()
    written(tmp_path / "other", lengths=(3, 2))
    with pytest.raises(SaveError, match=r"had 5 episodes with 15 steps .* has 2 with 5 now"):
        reader(tmp_path / "other").take(kept)


def test_a_manifest_seals_it_with_what_is_in_it(data):
    manifest = json.loads((data / "manifest.json").read_text())
    assert (manifest["episodes"], manifest["steps"], manifest["cut_episodes"]) == (5, 15, [])
    assert set(manifest["files"]) == {"data/metadata.json", "data/main_data.hdf5"}


def test_an_episode_that_goes_on_is_written_as_cut_short(tmp_path):
    writer = Writer(DatasetWriter(str(tmp_path / "data")), SPACES, "")
    batches = list(rollouts(SPACES, (3, 6)))
    for batch in batches[:2]:
        report = writer.add(batch)
    assert report == {"added": 7, "written": 3, "held": 4}
    writer.close()
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert (manifest["steps"], manifest["cut_episodes"]) == (7, [1])
    files = Files(str(tmp_path / "data"))
    last = next(read_episodes(files, SPACES, [1]))
    assert len(last) == 4 and not last.terminated
    np.testing.assert_array_equal(last.obs["obs"][-1], batches[1].columns["bootstrap_obs"][0])


def test_a_rollout_that_is_missing_cuts_the_episode(tmp_path):
    writer = Writer(DatasetWriter(str(tmp_path / "data")), SPACES, "")
    batches = list(rollouts(SPACES, (11,)))
    writer.add(batches[0])
    writer.add(batches[2])
    writer.close()
    assert Files(str(tmp_path / "data")).lengths == [4, 3]


def test_a_writer_goes_on_and_what_it_wrote_since_is_removed(tmp_path):
    batches = list(rollouts(SPACES, LENGTHS))
    writer = Writer(DatasetWriter(str(tmp_path / "data")), SPACES, "")
    for batch in batches[:2]:
        writer.add(batch)
    arrays = []
    kept = encoded(writer.keep(), lambda x: arrays.append(x.copy()) or len(arrays) - 1)
    for batch in batches[2:]:
        writer.add(batch)
    writer.close()
    again = Writer(DatasetWriter(str(tmp_path / "data")), SPACES, "")
    again.take(decoded(kept, lambda at, size: bytearray(arrays[at].tobytes())))
    for batch in batches[2:]:
        again.add(batch)
    again.close()
    files = Files(str(tmp_path / "data"))
    assert files.lengths == list(LENGTHS)
    for episode, length in zip(read_episodes(files, SPACES, range(5)), LENGTHS, strict=True):
        assert len(episode) == length


# -- what is bad


def changed(data, change):
    """Change the file of a dataset whose run was killed before it sealed it."""
    (data / "manifest.json").unlink()
    with h5py.File(data / "data" / "main_data.hdf5", "a") as file:
        change(file)


def without(field):
    def change(file):
        del file["episode_2"][field]

    return change


def replaced(field, values):
    def change(file):
        del file["episode_2"][field]
        file["episode_2"][field] = values

    return change


def at(field, index, value):
    def change(file):
        x = file["episode_2"][field][()]
        x[index] = value
        del file["episode_2"][field]
        file["episode_2"][field] = x

    return change


BAD = {
    "a missing field": (without("rewards"), r"episode 2,.*rewards"),
    "no final observation": (
        replaced("observations", np.zeros((5, 2), np.float32)),
        r"episode 2, observations: it has shape \[5, 2\], and not \[6, 2\]",
    ),
    "NaN": (at("rewards", 3, np.nan), "episode 2, rewards: it is not finite in float32 at step 3"),
    "NaN seen": (
        at("observations", (1, 0), np.nan),
        "observations: it is not finite in float32 at step 1",
    ),
    "a number that float32 can't hold": (
        replaced("rewards", np.full(5, 1e39)),
        "episode 2, rewards: it is not finite in float32 at step 0",
    ),
    "half an action": (
        replaced("actions", np.array([0, 1, 1.5, 0, 0])),
        "actions: it holds 1.5, which int64 can't at step 2",
    ),
    "no end": (
        at("terminations", 4, False),
        "episode 2, terminations and truncations: it has no end",
    ),
    "an end within": (at("truncations", 1, True), "it ends at step 1, and 3 more steps follow"),
    "another action": (at("actions", 2, 7), r"actions: at step 2 it is not in Discrete\(3\)"),
    "actions of another shape": (
        replaced("actions", np.zeros((5, 2))),
        r"actions: it has shape \[5, 2\], and not \[5\]",
    ),
}


UNFIT = {
    "a share of a byte": (gym.spaces.Box(0, 255, (2,), np.uint8), 0.5, "holds 0.5, which uint8"),
    "more than a byte": (gym.spaces.Box(0, 255, (2,), np.uint8), 300, "holds 300, which uint8"),
    "none of n": (gym.spaces.MultiDiscrete([3, 3]), 3, r"holds 3, which is not in MultiDiscrete"),
    "no bit": (gym.spaces.MultiBinary(2), 2, r"holds 2, which is not in MultiBinary"),
    "more than 32 bits": (
        gym.spaces.Box(-9, 9, (2,), np.int64),
        2**40,
        "holds 1099511627776, which int32",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_observations_that_their_space_can_not_hold_are_refused(name, tmp_path):
    space, value, text = UNFIT[name]
    spaces = Spaces(space, gym.spaces.Discrete(3))
    written(tmp_path / "data", spaces)
    changed(tmp_path / "data", replaced("observations", np.full((6, 2), value)))
    with pytest.raises(SaveError, match=rf"episode 2, observations: it {text}"):
        reader(tmp_path / "data", spaces=spaces).sample(15)


def test_an_action_that_its_mask_rules_out_is_refused(tmp_path):
    mask = gym.spaces.MultiBinary(3)
    obs = gym.spaces.Dict({"seen": gym.spaces.Box(-1, 1, (2,)), "action_mask": mask})
    spaces = Spaces(obs, gym.spaces.Discrete(3))
    written(tmp_path / "data", spaces, lengths=(2, 1, 5))

    def masked(file):
        for episode in file.values():
            episode["observations"]["action_mask"][...] = 1
        file["episode_2"]["actions"][...] = [0, 1, 2, 1, 0]
        file["episode_2"]["observations"]["action_mask"][3] = [1, 0, 1]

    changed(tmp_path / "data", masked)
    with pytest.raises(SaveError, match=r"actions: the mask rules out choice 1 at step 3"):
        reader(tmp_path / "data", spaces=spaces).sample(8)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_run_goes_on_with_no_dataset_of_the_same_size(sealed, tmp_path):
    for name, seed in (("one", 0), ("other", 1)):
        written(tmp_path / name, seed=seed)
        if not sealed:
            (tmp_path / name / "manifest.json").unlink()
    kept = reader(tmp_path / "one").keep()
    reader(tmp_path / "one").take(kept)
    with pytest.raises(SaveError, match=r"15 steps with other contents .* as many now"):
        reader(tmp_path / "other").take(kept)


@pytest.mark.parametrize("name", BAD)
def test_what_is_bad_is_named_by_file_episode_and_field(name, data):
    change, text = BAD[name]
    changed(data, change)
    with pytest.raises(SaveError, match=rf"main_data\.hdf5, .*{text}"):
        reader(data).sample(15)


def test_a_file_that_is_not_what_was_sealed_is_refused(data):
    main = data / "data" / "main_data.hdf5"
    whole = main.read_bytes()
    main.write_bytes(whole[:-1] + b"?")
    with pytest.raises(SaveError, match=r"main_data\.hdf5 is not what was written: .*SHA-256"):
        reader(data)
    main.unlink()
    with pytest.raises(SaveError, match=r"main_data\.hdf5 is missing.*; restore it from a copy"):
        reader(data)
    (data / "manifest.json").unlink()
    main.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SaveError, match=r"main_data\.hdf5.* can't be read .*write the dataset"):
        reader(data)


def test_a_dataset_in_another_format_is_refused(data):
    (data / "manifest.json").unlink()
    metadata = data / "data" / "metadata.json"
    facts = json.loads(metadata.read_text())
    metadata.write_text(json.dumps({**facts, "data_format": "arrow"}))
    with pytest.raises(SaveError, match=r"format 'arrow', and only hdf5.*data_format=\"hdf5\""):
        reader(data)


def test_a_dataset_of_a_killed_run_is_read_up_to_its_last_whole_episode(data):
    def half_written(file):
        file.create_group("episode_5").create_dataset("rewards", data=[1.0])

    changed(data, half_written)
    assert len(ids(reader(data).sample(15))) == 15


def test_what_is_no_dataset_or_empty_is_refused(tmp_path, data, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "store"))
    with pytest.raises(SaveError, match="nowhere is not there, so it is no dataset.*minari downl"):
        reader("nowhere")
    with pytest.raises(SaveError, match=r"has no metadata\.json"):
        reader(tmp_path)
    for file in (data / "manifest.json", data / "data" / "main_data.hdf5"):
        with pytest.raises(SaveError, match=f"is a file; name the directory .*such as {data}$"):
            reader(file)
    for wrong in (3, None, ""):
        with pytest.raises(SettingError, match="path must be a text that names a dataset"):
            fl.Dataset(wrong)
    (data / "manifest.json").unlink()
    metadata = data / "data" / "metadata.json"
    facts = json.loads(metadata.read_text())
    metadata.write_text(json.dumps({**facts, "total_episodes": 0}))
    with pytest.raises(SaveError, match=r"metadata\.json: the dataset is empty"):
        reader(data)
    metadata.write_text("{")
    with pytest.raises(SaveError, match=r"metadata\.json can't be read"):
        reader(data)


def test_a_dataset_of_another_environment_is_refused(tmp_path, data):
    other = Spaces(SPACES.obs, gym.spaces.Discrete(4))
    with pytest.raises(SaveError, match=r"has the action space Discrete\(3\).* has Discrete\(4\)"):
        reader(data, spaces=other)
    written(tmp_path / "cart", env="CartPole-v1")
    with pytest.raises(SaveError, match="the dataset is of CartPole-v1, and the environment is A-"):
        reader(tmp_path / "cart", env="A-v0")
    assert reader(tmp_path / "cart", env="A-v0", check_env=False).sample(3).shape == (1, 3)


def test_a_dataset_is_not_written_over_another_one(data):
    with pytest.raises(SaveError, match="exists already; give the dataset a new path"):
        written(data)


def test_settings_out_of_range_are_refused():
    for wrong in ({"path": ""}, {"n_step": 0}, {"gamma": 1.5}, {"buffer_size": 0}):
        with pytest.raises(SettingError):
            Dataset(**{"path": "x", **wrong})
    with pytest.raises(SettingError):
        DatasetWriter("")
    with pytest.raises(SettingError):
        fl.ReadDataset(0)


@pytest.mark.parametrize("package", ["h5py", "PIL"])
def test_without_its_packages_the_error_names_the_extra(data, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    # What Minari imported for an earlier test would hide that a package is not there.
    monkeypatch.delitem(sys.modules, "minari.dataset._storages.hdf5_storage", raising=False)
    with pytest.raises(SettingError, match=r"flowrl\[offline\]"):
        reader(data)


def test_the_extra_installs_all_that_reading_and_writing_import():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    named = project["project"]["optional-dependencies"]["offline"]
    asked = [Requirement(line) for line in (*named, *metadata.requires("minari"))]
    on = {"extra": "hdf5"}
    names = {one.name for one in asked if one.marker is None or one.marker.evaluate(on)}
    source = Path(hdf5_storage.__file__).read_text()
    imports = re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)
    imported = set(imports) - sys.stdlib_module_names
    packages = metadata.packages_distributions()
    assert {packages[name][0].lower() for name in imported} <= names | {"minari"}
