"""Learning curves and several runs in a real browser. Without Chromium these are skipped."""

import json
import math
import shutil
from contextlib import contextmanager

import pytest

import flowrl as fl
from flowrl.cli.main import main
from flowrl.page.serving import serve_saved
from small_runs import small, two_runs

ROWS = [
    {
        "env_steps": 100.0 * (i + 1),
        "updates": float(i // 2),
        "seconds": 0.5 * (i + 1),
        # No episode has ended at first, and one row has none.
        "return_mean": None if i < 3 or i == 10 else float((7 * i) % 11),
        "loss": 5_000.0 + i,
        "entropy": math.cos(i),
        "kl": 0.002 * i,
        **{f"metric_{n}": float(n + i) for n in range(9)},
    }
    for i in range(40)
]


def write_rows(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a run, whose rows are these, and one with other settings."""
    folder = tmp_path_factory.mktemp("made")
    write_rows(two_runs(folder), ROWS)
    other = small().set("learner.loss.clip_ratio", 0.1).insert(after="norm", twice=fl.Standardize())
    shutil.rmtree(folder / "second")
    with fl.run(other.rename("other"), steps=400, out=folder / "second") as run:
        list(run)
    write_rows(folder / "second", [{**row, "env_steps": row["env_steps"] + 50} for row in ROWS])
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy of them that a test may change."""
    return shutil.copytree(made, tmp_path / "runs")


@contextmanager
def served(paths):
    page = serve_saved(paths)
    try:
        yield page
    finally:
        page.close()


def drawn(tab):
    """The data of the curves, the axis of each line, and the texts of the legend."""
    data = tab.evaluate("page.plot.made.data.map((x) => [...x].map((v) => v ?? null))")
    scales = tab.evaluate("page.plot.made.series.slice(1).map((s) => s.scale)")
    labels = tab.eval_on_selector_all(
        "#lines li", "all => all.map((x) => x.firstChild.nextSibling.data)"
    )
    return data, scales, [label.strip() for label in labels]


def kinds(tab):
    """The colour and the dashes of each line in the legend."""
    found = tab.eval_on_selector_all(
        "#lines path",
        "all => all.map((x) => [getComputedStyle(x).stroke, x.getAttribute('stroke-dasharray')])",
    )
    return [tuple(pair) for pair in found]


def smooth(values, weight):
    """Exponential smoothing by the definition: a mean with weights that fall with the distance."""
    found = []
    for i, value in enumerate(values):
        before = [v for v in values[: i + 1] if v is not None][::-1]
        weights = [weight**n for n in range(len(before))]
        mean = sum(map(math.prod, zip(weights, before, strict=True)))
        found.append(None if value is None else mean / sum(weights))
    return found


def until(tab, condition):
    """Wait until JavaScript is true. The page's policy refuses what Playwright does for it."""
    for _ in range(200):
        if tab.evaluate(condition):
            return
        tab.wait_for_timeout(100)
    pytest.fail(f"it was never true: {condition}")


def slide(tab, value):
    tab.eval_on_selector(
        "#smooth", f"x => {{ x.value = {value}; x.dispatchEvent(new Event('input')); }}"
    )


def test_columns_of_any_size_are_shown_at_once_and_look_different(folder, opened):
    with served([folder / "first"]) as page:
        tab = opened(page)
        tab.wait_for_selector("#curve canvas")
        assert tab.is_hidden("#all-runs")
        place = tab.locator("#workers").bounding_box()
        data, scales, labels = drawn(tab)
        assert data[0] == [row["env_steps"] for row in ROWS]
        assert data[1:] == [[row["return_mean"] for row in ROWS]] and labels == ["return_mean"]
        for name in ("entropy", "loss", "kl"):
            tab.check(f"#columns [value={name}]")
        data, scales, labels = drawn(tab)
        # The returns go up to 10, so that 1.0 is not far from them, but 5,000 and 0.08 are.
        assert scales == ["left", "left", "right", "right"]
        assert labels == ["return_mean", "entropy", "loss (right axis)", "kl (right axis)"]
        before = dict(zip(labels, kinds(tab), strict=True))
        tab.uncheck("#columns [value=entropy]")
        after = dict(zip(drawn(tab)[2], kinds(tab), strict=True))
        # A line keeps its colour and its dashes when another one goes.
        assert all(before[label] == kind for label, kind in after.items())
        for name in ("entropy", "metric_0", "metric_1", "metric_2", "metric_3"):
            tab.check(f"#columns [value={name}]")
        assert len(drawn(tab)[2]) == 8
        assert len({colour for colour, _ in kinds(tab)}) == 8
        assert len({dashes for _, dashes in kinds(tab)}) == 8
        assert tab.is_disabled("#columns [value=metric_4]") and tab.is_enabled(
            "#columns [value=kl]"
        )
        tab.fill("#find-column", "metric_")
        assert tab.locator("#columns label:visible").count() == 9
        for name in tab.eval_on_selector_all("#columns :checked", "all => all.map(x => x.value)"):
            tab.fill("#find-column", "")
            tab.uncheck(f"#columns [value={name}]")
        assert tab.inner_text("#curve-note") == "Choose a column."
        assert tab.query_selector("#curve canvas") is None
        # Whatever is chosen, nothing that is below moves.
        assert tab.locator("#workers").bounding_box() == place


def test_smoothing_is_that_of_tensorboard_and_keeps_the_raw_line(folder, opened):
    with served([folder / "first"]) as page:
        tab = opened(page)
        tab.wait_for_selector("#curve canvas")
        slide(tab, 0.9)
        assert tab.inner_text("#smooth-value") == "0.9"
        (_, raw, smoothed), scales, labels = drawn(tab)
        values = [row["return_mean"] for row in ROWS]
        assert raw == values and labels == ["return_mean"] and scales == ["left", "left"]
        wanted = smooth(values, 0.9)
        assert [x is None for x in smoothed] == [x is None for x in wanted]
        known = [x for x in wanted if x is not None]
        assert [x for x in smoothed if x is not None] == pytest.approx(known)
        faint = tab.evaluate("page.plot.made.series.slice(1).map((s) => s.alpha)")
        assert faint[0] < 0.5 and faint[1] == 1
        slide(tab, 0)
        assert len(drawn(tab)[0]) == 2


def test_a_log_scale_has_gaps_where_nothing_is_above_zero(folder, opened):
    with served([folder / "first"]) as page:
        tab = opened(page)
        tab.wait_for_selector("#curve canvas")
        tab.check("#columns [value=entropy]")
        tab.check("#columns [value=loss]")
        tab.check("#log")
        (_, returns, entropy, _), scales, _ = drawn(tab)
        assert scales == ["left"] * 3
        assert tab.evaluate("page.plot.made.scales.left.distr") == 3
        assert entropy == [x if (x := row["entropy"]) > 0 else None for row in ROWS]
        assert returns == [row["return_mean"] or None for row in ROWS]
        write_rows(folder / "first", [{**row, "return_mean": -1.0} for row in ROWS])
        for name in ("entropy", "loss"):
            tab.uncheck(f"#columns [value={name}]")
        tab.wait_for_selector("#curve-note:has-text('No value is above 0')")


def test_curves_go_over_steps_updates_or_seconds_and_choices_outlive_the_page(folder, opened):
    with served([folder / "first"]) as page:
        tab = opened(page)
        tab.wait_for_selector("#curve canvas")
        tab.check("#columns [value=loss]")
        slide(tab, 0.5)
        tab.check("#log")
        for over in ("updates", "seconds"):
            tab.select_option("#over", over)
            assert drawn(tab)[0][0] == [row[over] for row in ROWS]
        tab.reload()
        tab.wait_for_selector("#curve canvas")
        data, _, labels = drawn(tab)
        assert data[0] == [row["seconds"] for row in ROWS] and len(data) == 5
        assert labels == ["return_mean", "loss"] and tab.is_checked("#log")
        assert tab.input_value("#smooth") == "0.5" and tab.input_value("#over") == "seconds"


def test_what_is_zoomed_stays_where_it_is_when_rows_come(folder, opened):
    with served([folder / "first"]) as page:
        tab = opened(page)
        tab.wait_for_selector("#curve canvas")
        write_rows(folder / "first", [*ROWS, {**ROWS[-1], "env_steps": 4_100.0}])
        until(tab, "page.plot.made.data[0].length === 41")
        assert tab.evaluate("page.plot.made.scales.x.max") == 4_100
        tab.evaluate("page.plot.made.setScale('x', { min: 1000, max: 2000 })")
        write_rows(folder / "first", [*ROWS, *({**ROWS[-1], "env_steps": 4e3 + i} for i in (1, 2))])
        until(tab, "page.plot.made.data[0].length === 42")
        scale = tab.evaluate("page.plot.made.scales.x")
        assert (scale["min"], scale["max"]) == (1_000, 2_000)


def test_runs_are_listed_sorted_filtered_and_compared(folder, opened):
    first = folder / "first"
    write_rows(first, [{**row, "return_mean": 20.0} for row in ROWS])
    with served([folder]) as page:
        tab = opened(page)
        tab.wait_for_selector("#curve canvas")

        def names():
            return tab.eval_on_selector_all(
                "#runs tbody tr",
                "all => all.filter(x => x.checkVisibility()).map(x => x.dataset.run)",
            )

        # The newest run comes first.
        assert names() == ["2", "1"]
        assert tab.get_attribute("#runs [data-sort=started]", "aria-sort") == "descending"
        tab.click("#runs [data-sort=return_mean] button")
        assert names() == ["1", "2"]
        tab.click("#runs [data-sort=return_mean] button")
        assert names() == ["2", "1"]
        assert tab.get_attribute("#runs [data-sort=return_mean]", "aria-sort") == "ascending"
        tab.fill("#find-run", "OTHER")
        assert names() == ["2"]
        tab.fill("#find-run", "")
        cells = tab.eval_on_selector_all("[data-run='2'] td", "all => all.map(x => x.textContent)")
        assert cells[3:8] == ["other", "ended: steps", "400 steps", "4,050", "9"]
        assert tab.is_disabled("#runs [type=checkbox][value='1']")
        tab.check("#runs [type=checkbox][value='2']")
        # The line is there before its rows have come.
        until(tab, f"page.plot.made.data[0].length === {2 * len(ROWS)}")
        data, _, labels = drawn(tab)
        # Each has its own steps; the other one has no value there.
        assert labels == ["this run", "second"] and len(data) == 3
        assert data[1][::2] == [20.0] * len(ROWS) and set(data[1][1::2]) == {None}
        assert data[2][1::2] == [row["return_mean"] for row in ROWS]
        assert len(set(kinds(tab))) == 2
        tab.check("#columns [value=kl]")
        assert drawn(tab)[2][-1] == "second · kl (right axis)"
        assert len({dashes for _, dashes in kinds(tab)}) == 4
        for n in range(3):
            tab.check(f"#columns [value=metric_{n}]")
        assert tab.inner_text("#curve-note") == "At most 8 lines are drawn: 2 are not."
        # A run that is shown instead is compared with the same ones, but for itself.
        tab.check("#runs [type=radio][value='2']")
        tab.wait_for_selector("#name[title$=second]")
        assert tab.evaluate("location.hash") == "#2"
        tab.check("#runs [type=checkbox][value='1']")
        assert tab.evaluate("location.hash") == "#2,1"
        tab.reload()
        tab.wait_for_selector("#lines li:has-text('first')")
        tab.uncheck("#runs [type=checkbox][value='1']")
        assert "first" not in tab.inner_text("#lines")


def test_runs_that_are_added_are_listed_and_those_that_go_on_are_drawn_again(folder, opened):
    shutil.move(folder / "second", folder.parent / "later")
    with served([folder]) as page:
        tab = opened(page)
        tab.wait_for_selector("#curve canvas")
        assert tab.is_hidden("#all-runs")
        shutil.move(folder.parent / "later", folder / "second")
        tab.wait_for_selector("#runs [type=checkbox][value='2']", timeout=20_000)
        tab.check("#runs [type=checkbox][value='2']")
        tab.wait_for_selector("#lines li:has-text('second')")
        page.runs["2"].state = lambda: "running"
        tab.wait_for_selector("[data-run='2'] td:text-is('running')", timeout=20_000)
        tab.focus("#runs [type=checkbox][value='2']")
        write_rows(folder / "second", [{**row, "return_mean": 3.5} for row in ROWS])
        until(tab, "page.plot.made.data[2].some((x) => x === 3.5)")
        # Whoever moves through the table by keys is where they were.
        assert tab.evaluate("document.activeElement.value") == "2"
        shutil.rmtree(folder / "second")
        tab.wait_for_selector("#all-runs", state="hidden", timeout=20_000)
        tab.wait_for_selector("#lines:not(:has-text('second'))")


def test_what_differs_between_two_graphs_is_listed_and_marked_in_the_picture(folder, opened):
    with served([folder]) as page:
        tab = opened(page)
        tab.wait_for_selector("#curve canvas")
        assert tab.is_disabled("#ask-differences")
        tab.check("#runs [type=checkbox][value='2']")
        tab.click("#ask-differences")
        tab.wait_for_selector("#differences li")
        text = tab.inner_text("#differences")
        assert "From the graph of this run to that of second:" in text
        assert "learner.loss.clip_ratio: 0.2 -> 0.1" in text
        assert "added: twice: Standardize()" in text
        assert "added: the edge from norm to twice" in text
        marked = tab.eval_on_selector_all(
            "g.node:has(text.differs)",
            "all => all.map((x) => [x.dataset.name, x.getAttribute('aria-description')])",
        )
        assert ["learner", "differs. learner.loss.clip_ratio: 0.2 -> 0.1"] in marked
        assert "sample" not in dict(marked)
        # The picture is coloured again with every look.
        tab.wait_for_timeout(1_200)
        assert tab.locator("text.differs").count() == len(marked)
        (folder / "second/graph.txt").write_text("odd")
        tab.click("#ask-differences")
        tab.wait_for_selector('#differences:has-text("can\'t be compared")')
        assert tab.locator("text.differs").count() == 0
        tab.uncheck("#runs [type=checkbox][value='2']")
        assert tab.inner_text("#differences") == ""


def test_a_page_from_disk_may_keep_nothing_and_has_no_list_of_runs(folder, browser, tmp_path):
    file = tmp_path / "run.html"
    assert main(["export-page", str(folder / "first"), "-o", str(file)]) == 0
    tab, errors = browser.new_page(), []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new Error('none'); } });"
    )
    tab.goto(file.as_uri())
    tab.wait_for_selector("#curve canvas")
    tab.check("#columns [value=loss]")
    slide(tab, 0.3)
    assert drawn(tab)[2] == ["return_mean", "loss (right axis)"]
    assert tab.is_hidden("#all-runs") and errors == []
    tab.close()


def test_a_phone_shows_curves_and_runs_without_scrolling_sideways(folder, opened):
    with served([folder]) as page:
        tab = opened(page, viewport={"width": 360, "height": 740})
        tab.wait_for_selector("#curve canvas")
        tab.check("#runs [type=checkbox][value='2']")
        for name in ("loss", "kl", "metric_0"):
            tab.check(f"#columns [value={name}]")
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        assert tab.evaluate("$('curve').scrollWidth <= $('curve').clientWidth")
