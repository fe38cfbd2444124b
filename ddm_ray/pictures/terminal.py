"""A picture between the lines of a terminal, for terminals that draw one: iTerm2's and kitty's sequences.

https://iterm2.com/documentation-images.html and https://sw.kovidgoyal.net/kitty/graphics-protocol/
"""

import io
import math
from base64 import standard_b64encode
from collections.abc import Mapping

from PIL import Image

CELL_PIXELS = 8
"""Width of a column, roughly. A picture that fits is drawn in its own size, another as wide as the terminal."""
CHUNK_BYTES = 4096
ITERM = {"iTerm.app", "WezTerm", "mintty"}
KITTY_TERMS = {"xterm-kitty", "xterm-ghostty"}


def protocol(environment: Mapping[str, str]) -> str:
    """Name of the sequences that a terminal with these variables knows: kitty, iterm, or empty.

    None within tmux and screen, which would swallow them, and none in CI.
    """
    term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if environment.get("CI") or environment.get("TMUX") or term.startswith(("screen", "tmux")) or term == "dumb":
        return ""
    # Terminals that kitty started have its variable, too.
    if term in KITTY_TERMS or (environment.get("KITTY_WINDOW_ID") and program in ("", "kitty")):
        return "kitty"
    return "iterm" if program in ITERM or environment.get("LC_TERMINAL") == "iTerm2" else ""


def inline(picture: Image.Image, known: str, columns: int) -> str:
    """The text that draws a picture in a terminal of so many columns, by the sequences `known` (`protocol`)."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    data, wide = buffer.getvalue(), min(columns, math.ceil(picture.width / CELL_PIXELS))
    encoded = standard_b64encode(data).decode()
    if known == "iterm":
        return f"\x1b]1337;File=inline=1;size={len(data)};width={wide}:{encoded}\x07\n"
    chunks = [encoded[begin : begin + CHUNK_BYTES] for begin in range(0, len(encoded), CHUNK_BYTES)]
    # Quiet, or else the terminal would type its answer into the shell.
    first = f"a=T,f=100,q=2,c={wide},"
    parts = [
        f"\x1b_G{first if number == 0 else ''}m={int(number + 1 < len(chunks))};{chunk}\x1b\\"
        for number, chunk in enumerate(chunks)
    ]
    return "".join(parts) + "\n"
