"""Pictures in a terminal: which terminals get one, and that it is the very picture, in sequences as documented."""

import io
import os
import pty
import re
import subprocess
import termios
from base64 import standard_b64decode
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from ddm_ray.cli import inference, main
from ddm_ray.pictures.terminal import inline, protocol
from ddm_ray.run.run import Run
from tests.conftest import BIN
from tests.random_run import make_run

KITTY = {"TERM": "xterm-kitty", "KITTY_WINDOW_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "known"),
    [
        (KITTY, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "xterm-ghostty", "TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "iterm"),
        ({"TERM": "xterm-256color", "LC_TERMINAL": "iTerm2"}, "iterm"),  # through ssh
        ({}, ""),
        ({"TERM": "xterm-256color"}, ""),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "vscode", "KITTY_WINDOW_ID": "1"}, ""),
        ({**KITTY, "TMUX": "/tmp/tmux"}, ""),
        ({**KITTY, "TERM": "screen-256color"}, ""),
        ({**KITTY, "CI": "true"}, ""),
        ({"TERM": "dumb", "TERM_PROGRAM": "iTerm.app"}, ""),
    ],
)
def test_terminals_are_known_by_their_variables(environment: dict[str, str], known: str) -> None:
    assert protocol(environment) == known


@pytest.mark.parametrize(("width", "columns"), [(100, 13), (2000, 80)])
def test_it_is_the_picture_no_wider_than_the_terminal(width: int, columns: int) -> None:
    picture = Image.effect_noise((width, 90), 50).convert("RGB")
    match = re.fullmatch(r"\x1b]1337;File=inline=1;size=(\d+);width=(\d+):(.+)\x07\n", inline(picture, "iterm", 80))
    assert match and int(match[2]) == columns
    data = standard_b64decode(match[3])
    assert len(data) == int(match[1])
    chunks = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", inline(picture, "kitty", 80))
    assert "".join(f"\x1b_G{keys};{part}\x1b\\" for keys, part in chunks) + "\n" == inline(picture, "kitty", 80)
    assert chunks[0][0] == f"a=T,f=100,q=2,c={columns},m=1"
    assert [keys for keys, _ in chunks[1:]] == ["m=1"] * (len(chunks) - 2) + ["m=0"]
    assert all(len(part) <= 4096 and len(part) % 4 == 0 for _, part in chunks)
    assert standard_b64decode("".join(part for _, part in chunks)) == data
    assert Image.open(io.BytesIO(data)).tobytes() == picture.tobytes()


def test_a_small_picture_is_one_chunk_of_kitty() -> None:
    text = inline(Image.new("RGB", (8, 8)), "kitty", 80)
    assert text.startswith("\x1b_Ga=T,f=100,q=2,c=1,m=0;") and text.count("\x1b_G") == 1


@pytest.fixture(scope="module")
def painted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("painted") / "run"))


def on_terminal(command: list[str], **environment: str) -> str:
    """All that a command writes to a terminal of 80 columns that is both its stdout and its stderr."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    apart = {"CI", "TMUX", "TERM_PROGRAM", "LC_TERMINAL", "KITTY_WINDOW_ID", "COLUMNS"}
    kept = {name: value for name, value in os.environ.items() if name not in apart}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**kept, **environment})
    os.close(theirs)
    written = b""
    with suppress(OSError):  # so the end of the terminal's last writer shows
        while part := os.read(ours, 65536):
            written += part
    os.close(ours)
    assert process.wait() == 0, written.decode()
    return written.decode()


@pytest.mark.contract
def test_a_command_on_a_terminal_shows_a_bar_and_the_picture(painted: Run, tmp_path: Path) -> None:
    out = tmp_path / "it.png"
    words = ["sample", painted.url, "--class", "1", "--steps", "3", "--strategy", "once", "-o", str(out)]
    written = on_terminal([f"{BIN}/ddm", *words], **KITTY)
    bars = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.partition("\x1b_G")[0])
    assert re.search(r"sample +━{12} +0% +\d s  loading networks", bars)
    assert re.search(r"sample +━{12} +100% +\d+ s  done", bars)
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1, "the cursor is hidden, and shown again"
    picture = standard_b64decode("".join(re.findall(r"\x1b_G[^;]*;([^\x1b]*)\x1b", written)))
    assert Image.open(io.BytesIO(picture)).tobytes() == Image.open(out).tobytes()
    assert written.index(f"{out}: 4 images") < written.index("\x1b_G")


@pytest.mark.parametrize("words", [[], ["--no-show"]])
def test_a_pipe_gets_the_path_and_nothing_else(painted: Run, tmp_path: Path, words: list[str]) -> None:
    words = ["sample", painted.url, "--class", "1", "--steps", "1", "--strategy", "once", *words]
    done = CliRunner().invoke(main, [*words, "-o", f"{tmp_path}/it.png"], env=KITTY)
    assert done.stdout == f"{tmp_path}/it.png: 4 images, seeds 0 to 3\n"
    assert "\x1b" not in done.output
    assert next(line.split() for line in done.stderr.splitlines() if line.startswith("sample"))[:2] == ["sample", "0%"]


@pytest.mark.parametrize(("words", "environment"), [(["--no-show"], {}), ([], {"DDM_NO_SHOW": "1"})])
def test_it_can_be_turned_off(
    painted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], environment: dict[str, str]
) -> None:
    shown: list[Image.Image] = []
    monkeypatch.setattr(inference, "_show", shown.append)
    command = ["sample", painted.url, "--class", "1", "--steps", "1", "--strategy", "once", "-o", f"{tmp_path}/it.png"]
    assert CliRunner().invoke(main, command).exit_code == 0 and len(shown) == 1
    assert CliRunner().invoke(main, [*command, *words], env=environment).exit_code == 0 and len(shown) == 1
