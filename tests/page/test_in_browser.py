"""What a real browser shows of runs, and what buttons do. Without Chromium these are skipped."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest

import flowrl as fl
from conftest import runner_pids
from environments import Corridor
from flowrl.cli.main import main
from flowrl.page.past import past_of
from flowrl.page.serving import serve_saved
from jax_teams import Corridors
from small_runs import Fan, small, two_runs

TINY = {
    "envs_per_runner": 2,
    "rollout_length": 16,
    "batch_size": 32,
    "policy": fl.Policy(fl.networks.MLP, hidden=(4,)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a run that has ended, in a folder with another one."""
    return two_runs(tmp_path_factory.mktemp("runs"))


@contextmanager
def served(run):
    """The page of a run that goes on in a thread of its own, until it is to stop."""
    page = fl.serve(run)
    thread = threading.Thread(target=lambda: list(run))
    thread.start()
    try:
        yield page, thread
    finally:
        run.controls.stop()
        thread.join()


def test_a_browser_shows_the_graph_what_is_slow_and_a_node(opened):
    with fl.run(small()) as run, served(run) as (page, _):
        tab = opened(page)
        tab.wait_for_selector("g.node.bottleneck")
        names = tab.eval_on_selector_all("g.node", "all => all.map(x => x.dataset.name)")
        assert names == [n.name for n in run.graph.nodes] + [*run.graph.resources]
        assert "Bottleneck:" in tab.inner_text("#why")
        tab.click("g.node[data-name=train]")
        shown = tab.inner_text("#chosen")
        assert "TrainOneStep" in shown and "minibatch_size" in shown
        assert "back-pressure" in shown
        tab.wait_for_selector("#curve canvas")
        tab.check("#columns [value=loss]")
        tab.focus("g.node[data-name=learner]")
        tab.keyboard.press("Enter")
        assert "Learner" in tab.inner_text("#chosen h2 >> nth=0")
    tab.wait_for_selector("#state:text-is('ended: closed')")
    assert "the run ended: closed" in tab.inner_text("#events")
    page.close()
    tab.wait_for_selector("#state:text-is('ended: closed (its server has ended)')")
    assert tab.is_disabled("[data-verb=stop]")


@pytest.mark.parametrize(
    ("graph", "runtime", "slow", "shown"),
    [
        (lambda: fl.pg(Corridor, **TINY), "xla", "this process", ["sample", "learner"]),
        (
            lambda: fl.multi_ppo(Corridors, policies="separate", **TINY, minibatch_size=16),
            "local",
            "",
            ["train_red", "select_blue", "red", "blue"],
        ),
    ],
    ids=["a program", "two policies"],
)
def test_a_browser_shows_programs_and_several_policies(graph, runtime, slow, shown, opened):
    with fl.run(graph(), runtime=runtime) as run:
        for _ in range(3):
            next(run)
        page = fl.serve(run)
        tab = opened(page)
        tab.wait_for_selector("#why:has-text('Bottleneck:')")
        assert slow in tab.inner_text("#why")
        for name in shown:
            tab.click(f"g.node[data-name={name}]")
            assert name in tab.inner_text("#chosen h2 >> nth=0")
        assert tab.inner_text("#updates") == f"{run.rows[-1]['updates']:,}"
    page.close()


def test_a_browser_shows_dqn_as_a_program(opened):
    graph = fl.dqn(
        Corridor,
        fl.DQNSettings(envs_per_runner=2, learning_starts=32, batch_size=8, buffer_size=64),
    )
    with fl.run(graph, runtime="xla") as run:
        for _ in range(3):
            next(run)
        page = fl.serve(run)
        tab = opened(page)
        tab.wait_for_selector("#why:has-text('Bottleneck:')")
        tab.click("g.node[data-name=replay]")
        shown = tab.inner_text("#chosen")
        assert "Replay" in shown and "added steps" in shown and "batches sampled" in shown
        tab.click("g.node[data-name=learner]")
        assert "updates (policy versions)" in tab.inner_text("#chosen")
    page.close()


def test_a_browser_shows_items_edges_and_predictions(opened):
    with fl.run(small()) as run, served(run) as (page, _):
        tab = opened(page)
        tab.wait_for_selector("g.node.bottleneck")
        tab.click("g.node[data-name=sample]")
        tab.wait_for_selector("#chosen h2:text-is('newest item')")
        fields = tab.inner_text("table.fields")
        assert "obs\n[16, 2, 4] float32" in fields and "NaN" not in fields
        assert "chosen: sample: " in tab.inner_text("#said")
        tab.click("g.node[data-name=train]")
        tab.wait_for_selector("#chosen td:text-is('entropy')")
        tab.focus("[aria-label^='edge from sample to batch']")
        tab.keyboard.press("Enter")
        assert "sample → batch" in tab.inner_text("#chosen h2 >> nth=0")
        assert "items/s" in tab.inner_text("#chosen")
        slider = "[data-slider='environments per runner']"
        assert "as it is" in tab.inner_text(slider)
        tab.focus(f"{slider} input")
        tab.keyboard.press("ArrowRight")
        assert tab.inner_text(f"{slider} output") == "4"
        assert "steps/s (" in tab.inner_text(f"{slider} small")
    page.close()


def test_nan_is_shown_at_its_node_and_a_failure_where_it_was(opened):
    broken = threading.Event()

    def odd(batch):
        return (
            batch.with_(reward=batch["reward"] * np.float32(np.nan)) if broken.is_set() else batch
        )

    graph = small().insert(after="batch", odd=fl.Map(odd)).insert(after="odd", fan=Fan())
    with fl.run(graph) as run:
        page = fl.serve(run)
        tab = opened(page)
        for _ in range(3):
            next(run)
        tab.wait_for_selector("#updates:text-is('3')")
        assert tab.query_selector("g.node.failed") is None
        next(run)
        tab.wait_for_selector("g.node.failed[data-name=fan]")
        assert "NaN in fan" in tab.get_attribute("g.node[data-name=fan]", "aria-label")
        tab.click("g.node[data-name=odd]")
        tab.wait_for_timeout(500)
        broken.set()
        with pytest.raises(fl.errors.NotFiniteError):
            next(run)
        tab.wait_for_selector("g.node.failed[data-name=learner]")
        tab.wait_for_selector("#state:text-is('ended: failed')")
        tab.click("g.node[data-name=learner]")
        assert "not finite" in tab.inner_text("#chosen ol.marks")
    page.close()


def test_a_field_with_nan_is_marked_at_the_node_that_yields_it(opened):
    def odd(batch):
        return batch.with_(odd=np.full(batch.shape, np.nan, np.float32))

    with fl.run(small().insert(after="batch", odd=fl.Map(odd))) as run, served(run) as (page, _):
        tab = opened(page)
        tab.click("g.node[data-name=odd]")
        tab.wait_for_selector("table.fields .missing:text-is('32 NaN')")
    page.close()


def test_a_page_finds_the_server_again(opened):
    with fl.run(small()) as run, served(run) as (page, _):
        tab = opened(page)
        tab.wait_for_selector("#state:text-is('running')")
        page.close()
        tab.wait_for_selector("#state:text-is('connection lost')")
        tab.evaluate("page.moment = { now: page.now, row: {}, seconds: 1, env_steps: 1 }")
        again = fl.serve(run, port=page.port)
        tab.wait_for_selector("#state:text-is('running')")
        tab.wait_for_selector("g.node.bottleneck")
        assert tab.evaluate("page.moment") is None, "it shows the new run, not a past moment"
    tab.wait_for_selector("#state:text-is('ended: closed')")
    again.close()


def test_a_page_that_is_open_for_long_keeps_rows_evenly(saved, opened):
    page = serve_saved([saved])
    tab = opened(page)
    tab.wait_for_selector("#state:text-is('ended: steps')")
    first, more = [{"env_steps": 86 * i} for i in range(1_000)], 20_000
    steps = tab.evaluate(
        """([rows, more]) => {
          keepRows({ again: true, rows, count: 86 * rows.length });
          for (let i = 0; i < more; i += 1) keepRows({ rows: [{ env_steps: 85915 + i }] });
          return page.rows.map((row) => row.env_steps);
        }""",
        [first, more],
    )
    assert steps[0] == 0 and steps[-1] == 85_914 + more and len(steps) <= 4_001
    assert {after - before for before, after in pairwise(steps[:-1])} == {86}
    page.close()


def test_a_large_graph_and_a_phone_stay_readable(opened):
    graph = small()
    for i in range(53):
        graph = graph.insert(after="batch", **{f"more_{i}": fl.Map(lambda batch: batch)})
    with fl.run(graph) as run:
        next(run)
        page = fl.serve(run)
        tab = opened(page)
        tab.wait_for_selector("#why button")
        assert len(tab.query_selector_all("g.node")) == 62
        for width in (1_000, 360):
            tab.set_viewport_size({"width": width, "height": 800})
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            tab.click("#why button")
            name = tab.inner_text("#why button")
            assert name in tab.inner_text("#chosen h2 >> nth=0")
            box = tab.locator(f"g.node[data-name={name}]").bounding_box()
            assert 0 <= box["x"] < width, "it is in view"
            # Names are at least nine pixels high, and the graph scrolls.
            assert (
                tab.evaluate("document.querySelector('g.node text').getBoundingClientRect().height")
                >= 9
            )
            tab.click("#fit")
            assert tab.locator("#picture svg").bounding_box()["width"] < width
            tab.click("#fit")
    page.close()


def slowed_by(slow):
    """A graph whose node `odd` is slow from the moment on that an event is set."""

    def maybe(batch):
        if slow.is_set():
            time.sleep(0.05)
        return batch

    return small().insert(after="batch", odd=fl.Map(maybe))


def test_a_node_that_gets_slow_turns_red_and_what_it_reports_is_shown(opened):
    slow = threading.Event()
    with fl.run(slowed_by(slow)) as run, served(run) as (page, _):
        tab = opened(page)
        tab.wait_for_selector("g.node.bottleneck[data-name=sample]")
        slow.set()
        tab.wait_for_selector("g.node.bottleneck[data-name=odd]")
        run.warn("the fan is loud")
        tab.wait_for_selector("#events li.warned:has-text('the fan is loud')")
    page.close()


def slide(tab, key):
    """Move the slider by a key."""
    tab.press("#slider", key)


def painted(tab):
    """The picture of the learning curve."""
    return tab.eval_on_selector("#curve canvas", "canvas => canvas.toDataURL()")


def test_a_browser_shows_the_past_and_goes_back_to_now(opened):
    slow = threading.Event()
    with fl.run(slowed_by(slow)) as run, served(run) as (page, _):
        tab = opened(page)
        assert tab.is_disabled("#slider") or tab.input_value("#slider") != "0"
        tab.wait_for_selector("g.node.bottleneck[data-name=sample]")
        tab.wait_for_function("() => page.past.length >= 3")
        slow.set()
        tab.wait_for_selector("g.node.bottleneck[data-name=odd]")
        then = tab.evaluate("page.past.length")
        tab.wait_for_function(f"() => page.past.length >= {then + 2}")
        assert tab.inner_text("#when") == "now" and tab.is_disabled("#live")
        slide(tab, "Home")
        tab.wait_for_selector("#state:has-text('shows the past: 0:00:')")
        other = "g.node.bottleneck:not([data-name=odd])"
        tab.wait_for_selector(other)
        why = tab.inner_text("#why")
        first = past_of(page.runs["run"].entries())[0]
        assert tab.inner_text("#steps") == f"{first['env_steps']:,}"
        assert f", {first['env_steps']:,} steps" in tab.inner_text("#when")
        assert tab.get_attribute("#slider", "aria-valuetext") == tab.inner_text("#when")
        # News arrives, and does not repaint the graph.
        run.warn("the fan is loud")
        tab.wait_for_selector("#events li.warned:has-text('the fan is loud')")
        rows = tab.evaluate("page.rows.length")
        tab.wait_for_function(f"() => page.rows.length > {rows}")
        assert tab.query_selector(other) and tab.inner_text("#why") == why
        assert tab.inner_text("#steps") == f"{first['env_steps']:,}"
        slide(tab, "ArrowRight")
        second = past_of(page.runs["run"].entries())[1]
        tab.wait_for_selector(f"#steps:text-is('{second['env_steps']:,}')")
        tab.click("#live")
        tab.wait_for_selector("g.node.bottleneck[data-name=odd]")
        assert tab.inner_text("#state") == "running" and tab.is_disabled("#live")
        assert tab.evaluate("document.activeElement.id") == "slider"
        slide(tab, "Home")
        tab.wait_for_selector(other)
        slide(tab, "End")
        tab.wait_for_selector("g.node.bottleneck[data-name=odd]")
        assert tab.inner_text("#when") == "now"
    page.close()


def test_the_server_is_asked_once_the_slider_rests_and_again_if_the_past_was_thinned(opened):
    with fl.run(small()) as run, served(run) as (page, _):
        tab = opened(page)
        tab.wait_for_function("() => page.past.length >= 4")
        asked = []
        tab.on("request", lambda request: asked.append(request.url.rpartition("/past/")[2]))
        # From now on the page asks for no other list by itself.
        tab.evaluate("followPast = () => {}")
        known = tab.evaluate("page.past")
        history = page.runs["run"].history
        # Every second moment is gone, so the page knows others than there are.
        with history._lock:
            history._entries[:] = history._entries[1::2]
        waits = tab.evaluate("""() => {
            const waits = [], original = window.setTimeout;
            window.setTimeout = (work, wait) => { waits.push(wait); return original(work, wait); };
            for (const number of [0, 1, 2, 1]) {
                $("slider").value = number;
                $("slider").dispatchEvent(new Event("input"));
            }
            window.setTimeout = original;
            return waits;
        }""")
        assert waits == [100] * 4
        tab.wait_for_selector("#state:has-text('shows the past')")
        shown = tab.evaluate("page.moment.seconds")
        assert shown == past_of(page.runs["run"].entries())[0]["seconds"] == known[1]["seconds"]
        assert int(tab.input_value("#slider")) == 0
        numbers = [number for number in asked if number.isdecimal()]
        assert numbers == ["1", "0"]
    page.close()


def test_a_browser_pauses_a_run_lets_it_go_on_and_stops_it(opened):
    with fl.run(small()) as run, served(run) as (page, thread):
        tab = opened(page)
        tab.click("[data-verb=pause]")
        tab.wait_for_selector("#state:text-is('paused')")
        # The row that was under way when it was asked may still close.
        threading.Event().wait(0.5)
        rows = len(run.rows)
        threading.Event().wait(0.5)
        assert len(run.rows) == rows and tab.is_disabled("[data-verb=pause]")
        tab.click("[data-verb=go_on]")
        tab.wait_for_selector("#state:text-is('running')")
        tab.on("dialog", lambda dialog: dialog.accept())
        tab.click("[data-verb=stop]")
        thread.join(30)
        assert run.reason == "closed" and len(run.rows) > rows
        tab.wait_for_selector("[data-verb=pause]:disabled")
    page.close()


def test_a_browser_opens_saved_runs_and_the_other_of_them(saved, opened):
    page = serve_saved([saved.parent])
    tab = opened(page)
    tab.wait_for_selector("#state:text-is('ended: steps')")
    assert [*map(str.strip, tab.inner_text("#runs [data-run='2']").split("\t"))][3:5] == [
        "ppo",
        "ended: steps",
    ]
    assert tab.query_selector("#controls button") is None
    tab.check("#runs [type=radio][value='2']")
    tab.wait_for_selector("#name[title$=second]")
    tab.wait_for_selector("#curve canvas")
    page.close()


def test_a_notebook_shows_the_page_inline(browser):
    with fl.run(small()) as run:
        for _ in range(3):
            next(run)
        page = fl.serve(run)
        text = page._repr_html_()
        page.close()
    tab = browser.new_page()
    errors = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text))
    # The page runs before the browser lays its frame out, as in a cell that is folded.
    tab.set_content(f"<div id=cell style='display: none'>{text}</div>")
    frame = tab.frame_locator("iframe")
    frame.locator("#state:text-is('running')").wait_for(state="attached")
    tab.eval_on_selector("#cell", "(cell) => { cell.style.display = '' }")
    frame.locator("g.node[data-name=train]").click()
    assert "TrainOneStep" in frame.locator("#chosen").inner_text()
    frame.locator("#curve canvas").wait_for()
    # The curve takes another width where no window was resized, too.
    frame.locator("#curve").evaluate("(curve) => { curve.style.width = '321px' }")
    frame.locator("#curve canvas[width='321']").wait_for()
    assert errors == []
    tab.close()


def test_an_exported_page_opens_from_disk_and_asks_for_nothing(saved, browser, tmp_path, capsys):
    file = tmp_path / "a new folder" / "run.html"
    assert main(["export-page", str(saved), "-o", str(file)]) == 0
    assert main(["export-page", str(saved), "-o", str(file)]) == 2
    assert "exists already" in capsys.readouterr().err
    tab = browser.new_page()
    asked, errors = [], []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text))
    tab.goto(file.as_uri())
    tab.wait_for_selector("#state:text-is('ended: steps')")
    tab.click("g.node[data-name=train]")
    assert "TrainOneStep" in tab.inner_text("#chosen")
    tab.wait_for_selector("#curve canvas")
    now = painted(tab)
    slide(tab, "ArrowLeft")
    tab.wait_for_selector("#state:has-text('shows the past: ')")
    # The curve has a line at that step.
    assert painted(tab) != now
    tab.set_viewport_size({"width": 360, "height": 700})
    tab.wait_for_function("() => document.documentElement.scrollWidth <= 360")
    tab.set_viewport_size({"width": 1280, "height": 720})
    tab.wait_for_function("() => page.plot.made.width > 360")
    tab.click("#live")
    # Where nothing passed an edge yet, no flow of another time stands there.
    assert any(tab.eval_on_selector_all("text.flow", "all => all.map((x) => x.textContent)"))
    tab.evaluate("colourGraph({ ...page.now, edges: [] })")
    assert not any(tab.eval_on_selector_all("text.flow", "all => all.map((x) => x.textContent)"))
    assert painted(tab) == now and tab.inner_text("#state") == "ended: steps"
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]
    assert errors == []
    tab.close()


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_a_browser_shows_impala_on_ray_and_a_runner_that_is_killed(opened):
    settings = fl.IMPALASettings(
        num_runners=2,
        envs_per_runner=2,
        rollout_length=20,
        batch_size=80,
        report_every=5,
        policy=fl.Policy(fl.networks.MLP, hidden=(8,)),
    )
    graph = fl.impala("CartPole-v1", settings)
    with (
        fl.run(graph, runtime=fl.RayRuntime(processes=2)) as run,
        served(run) as (page, _),
    ):
        tab = opened(page)
        tab.wait_for_selector("#workers meter >> nth=1")
        tab.wait_for_selector("g.node[data-name=queue] text.kind:has-text(' of ')")
        tab.focus("[aria-label^='edge from batch to queue']")
        tab.keyboard.press("Enter")
        assert "policy lag, mean" in tab.inner_text("#chosen")
        tab.wait_for_selector("#sliders [data-slider=runners]")
        os.kill(runner_pids()[0], signal.SIGKILL)
        tab.wait_for_selector("#workers li.again")
        assert "1 restart" in tab.get_attribute("g.node[data-name=runners]", "aria-label")
        tab.click("g.node[data-name=runners]")
        assert "was restarted" in tab.inner_text("#chosen ol.marks")
    page.close()
