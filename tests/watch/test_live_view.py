"""The live view: names and shares survive a narrow terminal, notes survive what looks like markup."""

import io
import re
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
        console.print(view._table())
    return capture.get().splitlines()


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
    plain = re.sub(r"\x1b\[[0-9;]*m", "", row)
    assert plain.isprintable() and "\\x1b" in plain and "\\u202e" in plain


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


def test_a_log_shows_notes_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView("title", ["router"]) as view:
        view.show("router", 0.25, "stopped: [Errno 28] no space in [/tmp]")
    assert capsys.readouterr().err == "router        25%  stopped: [Errno 28] no space in [/tmp]\n"
