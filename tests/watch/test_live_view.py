"""The live view: names and shares survive a narrow terminal, notes survive what looks like markup."""

import io
import re
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.judge import Sightings
from ddm_ray.jobs.observer import observe
from ddm_ray.jobs.status import survey
from ddm_ray.watch.live_view import LiveView
from tests.jobs.attempts import beat, fail
from tests.random_run import make_data


def drawn(view: LiveView, width: int) -> list[str]:
    """The table's lines in a terminal so many columns wide."""
    console = Console(file=io.StringIO(), width=width, color_system="truecolor", force_terminal=True)
    with console.capture() as capture:
        console.print(view._renderable())
    return capture.get().splitlines()


def plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def test_a_long_note_takes_no_room_from_the_rest() -> None:
    view = LiveView("title", ["experts/000", "router"], clock=False)
    view.show("experts/000", 0.13, "silent for 210 s, " + "step 40/300, " * 20)
    for width in (60, 80, 150):
        (row,) = [line for line in drawn(view, width) if "experts/000" in line]
        assert " 13%  " in row and "silent" in row and "…" in row


def test_notes_of_others_tell_the_terminal_nothing() -> None:
    view, controls = LiveView("title", ["router"], clock=False), "".join(map(chr, [*range(32), *range(0x7F, 0xA0)]))
    view.show("router", 0.5, f"failed: {controls}\u202e")
    (row,) = [line for line in drawn(view, 400) if "router" in line]
    shown = plain(row)
    assert shown.isprintable() and "\\x1b" in shown and "\\u202e" in shown


def test_what_is_wrong_is_red(tmp_path: Path) -> None:
    run = make_data(f"{tmp_path}/run", num_rows=60)
    pulses, router = Sightings(), claim(run.store, "router")
    beat(claim(run.store, "experts/000"), 1, 75)
    beat(router, 1, 75)
    observe(survey(run), pulses, 0)
    fail(claim(run.store, "experts/001"), "no space")
    beat(router, 2, 90)
    run.store.write("monolith/_MANIFEST.json", b"{")
    view = LiveView("title", [], clock=False)
    view.show_statuses(observe(survey(run), pulses, 30))
    rows = {
        name: line for line in drawn(view, 200) for name in ("rows", *run.experts, "router", "monolith") if name in line
    }
    red = {name for name, line in rows.items() if line.startswith("\x1b[31m")}
    assert red == {"experts/000", "experts/001", "monolith"}
    beat(claim(run.store, "experts/001"), 1, 76)
    view.show_statuses(survey(run))
    assert not [line for line in drawn(view, 200) if line.startswith("\x1b[31mexperts/001")]


def test_the_time_left_has_a_column_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("ddm_ray.watch.live_view.time.monotonic", lambda: now)
    view = LiveView("title", ["rows", "partition"])
    view.show("rows", 0.0, "starting")
    assert "left" not in drawn(view, 80)[1]
    now = 30.0
    view.show("rows", 0.25, "100 rows")
    heading, rows, partition = map(plain, drawn(view, 80)[1:])
    assert heading.split() == ["stage", "time", "left", "what"] and "30 s  90 s  100 rows" in rows
    assert " s " not in partition and all(len(line) <= 80 for line in (heading, rows))
    view.show("rows", 1.0, "done")
    assert "left" not in drawn(view, 80)[1], "nothing is left of what is done"


def test_the_column_has_a_job_s_own_estimate(tmp_path: Path) -> None:
    run = make_data(f"{tmp_path}/run", num_rows=60)
    beat(claim(run.store, "experts/000"), 1, 75)  # 18 s, as its heartbeat has it
    view = LiveView("title", [], clock=False)
    view._console = Console(file=io.StringIO(), force_terminal=True)
    view.show_statuses(survey(run))
    (row,) = [plain(line) for line in drawn(view, 200) if "experts/000" in line]
    assert "18 s  step 75/300" in row and "left" not in row


def test_what_a_command_prints_into_a_file_is_not_for_the_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        "ddm_ray.watch.live_view.Console", lambda stderr: Console(file=screen, force_terminal=True, width=80)
    )
    with (tmp_path / "out").open("w") as out, monkeypatch.context() as piped:
        piped.setattr("sys.stdout", out)
        with LiveView("title", ["rows"]) as view:
            view.show("rows", 0.5, "half")
            print("an answer")
    assert (tmp_path / "out").read_text() == "an answer\n" and "an answer" not in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"


def test_an_interrupt_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        "ddm_ray.watch.live_view.Console", lambda stderr: Console(file=screen, force_terminal=True, width=80)
    )
    with suppress(KeyboardInterrupt), LiveView("title", ["rows"]) as view:
        view.show("rows", 0.5, "half")
        raise KeyboardInterrupt
    assert "\x1b[?25l" in screen.getvalue() and screen.getvalue().endswith("\x1b[?25h")


def test_a_log_has_the_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr("ddm_ray.watch.live_view.time.monotonic", lambda: now)
    with LiveView("title", ["rows"]) as view:
        for now, share, note in ((0.0, 0.0, "starting"), (30.0, 0.25, "100 rows"), (120.0, 1.0, "done")):  # noqa: B007
            view.show("rows", share, note)
    assert capsys.readouterr().err.splitlines() == [
        "rows           0%  starting",
        "rows          25%  100 rows, 90 s left",
        "rows         100%  done (120 s)",
    ]


def test_the_newest_picture_is_named_once_in_a_log_and_below_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_data(f"{tmp_path}/run", num_rows=60)
    attempt = claim(run.store, "experts/000")
    beat(attempt, 1, 75)
    view = LiveView("title", [], clock=False)
    for step in (30, 30, 60):
        run.store.write(attempt.picture_key(step), b"png")
        view.show_statuses(survey(run))
    named = [line for line in capsys.readouterr().err.splitlines() if line.startswith("newest picture")]
    paths = [f"{run.url}/{attempt.picture_key(step)}" for step in (30, 60)]
    words = [f"newest picture, of experts/000 after {step} steps:" for step in (30, 60)]
    assert named == [f"{what} {where}" for what, where in zip(words, paths, strict=True)]
    console = Console(file=io.StringIO(), width=40, force_terminal=True)
    with console.capture() as capture:
        console.print(view._renderable())
    shown = [plain(line) for line in capture.get().splitlines()]
    assert paths[1] in "".join(shown) and max(map(len, shown)) <= 40


def test_a_log_shows_notes_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView("title", ["router"]) as view:
        view.show("router", 0.25, "stopped: [Errno 28] no space in [/tmp]")
    assert capsys.readouterr().err == "router        25%  stopped: [Errno 28] no space in [/tmp]\n"
