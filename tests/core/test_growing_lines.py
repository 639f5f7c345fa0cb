"""Lines that are found without being parsed are those that a reader of the whole file gets."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl.core import growing_lines
from flowrl.core.growing_lines import GrowingLines, last_object
from flowrl.core.saved_rows import json_lines

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 5)),
        st.tuples(st.just("tear"), st.integers(1, 40)),
        st.tuples(st.just("cut"), st.integers(0, 8)),
        st.tuples(st.just("blank"), st.integers(1, 2)),
    ),
    max_size=12,
)
"""What happens to a file between two looks: lines are added, the last one is half written, it is
cut after so many lines (as of a run that is resumed), or blank lines are added."""


def change(path, what, count, written):
    """Change a file; `written` is how many lines were ever written, so that no two are equal."""
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if what == "cut":
        path.write_text("".join(whole.splitlines(keepends=True)[:count]))
    elif what == "blank":
        path.write_text(whole + "\n" * count)
    else:
        lines = [
            json.dumps({"seconds": written + i, "loss": "x" * (written % 7)}) for i in range(count)
        ]
        added = f"{lines[0]}\n"[:count] if what == "tear" else "\n".join(lines) + "\n"
        path.write_text(whole + added)
    return written + count


@settings(max_examples=80, deadline=None)
@given(STEPS, st.integers(7, 90))
# An object that only lacks the end of its line, and is cut off.
@example([("add", 4), ("tear", 17), ("tear", 27), ("tear", 1)], 7)
@example([("tear", 27), ("cut", 0)], 7)
def test_whatever_happens_to_a_file_its_lines_are_those_of_a_reader_of_all(
    tmp_path_factory, steps, block
):
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.touch()
    lines, written = GrowingLines(path), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing_lines, "BLOCK", block)
        for what, count in steps:
            before = lines.begun, len(lines)
            written = change(path, what, count, written)
            try:
                wanted = list(json_lines(path))
            except fl.errors.SaveError as error:
                with pytest.raises(fl.errors.SaveError, match=str(error)[-40:]):
                    lines.look()
                continue
            lines.look()
            assert lines.parsed(range(len(lines))) == wanted
            assert lines.parsed(range(len(lines))[::-3]) == wanted[::-3]
            assert last_object(path) == (wanted[-1] if wanted else {})
            assert lines.begun > before[0] or len(lines) >= before[1]


def test_only_what_was_added_is_read_and_nothing_of_a_file_that_did_not_change(
    tmp_path, monkeypatch
):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"row": {i}}}\n' for i in range(1_000)))
    lines, read = GrowingLines(path), []
    monkeypatch.setattr(lines, "_after_lines", lambda data: read.append(data) or after(data))
    after = GrowingLines._after_lines.__get__(lines)
    lines.look()
    lines.look()
    with path.open("a") as file:
        file.write('{"row": 1000}\n{"row"')
    lines.look()
    assert [len(data) for data in read] == [path.stat().st_size - 20, 20] and len(lines) == 1_001
    assert lines.parsed([1_000, 0]) == [{"row": 1_000}, {"row": 0}]


def test_a_file_that_is_not_there_has_no_lines_and_one_that_comes_back_begins_again(tmp_path):
    lines = GrowingLines(tmp_path / "rows.jsonl")
    lines.look()
    assert len(lines) == lines.begun == 0 and last_object(lines.path) == {}
    lines.path.write_text('{"row": 0}\n')
    lines.look()
    assert len(lines) == 1
    lines.path.unlink()
    lines.look()
    assert len(lines) == 0 and lines.begun == 1


@pytest.mark.parametrize(
    ("text", "number"), [('{"a": 1}\n\n{"a": 2}\n', 2), ('{"a": 1}\n7\n', 2), ('{"a" 1}\n', 1)]
)
def test_a_damaged_line_is_an_error_that_names_it(tmp_path, text, number):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    lines = GrowingLines(path)
    with pytest.raises(fl.errors.SaveError, match=f"rows.jsonl, line {number} is damaged"):
        lines.look()
        lines.parsed(range(len(lines)))


def test_the_last_line_is_found_at_the_end_of_a_long_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"row": {i}, "x": "{"y" * 600}"}}\n' for i in range(500)) + '{"r')
    assert last_object(path)["row"] == 499
