"""A film of a run that `island_chaos.py --film` has written: who trained what when, and what happened to them.

python benchmarks/island_film.py film.json docs/pictures/islands.gif
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

WIDTH, LEFT, RIGHT, TOP, ROW, BELOW = 960, 90, 24, 64, 64, 60
COLOURS = ("#4477aa", "#228833", "#aa7733", "#aa3377", "#557788", "#887722")
WORDS = {
    "HEAD": "its head is killed, and comes back",
    "GONE": "is killed, for good",
    "CUT": "is cut off from everybody",
    "DRAIN": "is drained",
    "LAUNCHER": "the launcher is killed, and started again",
    "TWO": "a second launcher is started",
}
FRAMES, SECONDS_EACH, LAST_SECONDS = 60, 0.2, 6.0


@dataclass
class Bar:
    """An attempt at an artifact on an island, from its claim to its last step, in seconds."""

    island: str
    artifact: str
    began: float
    ended: float
    done: bool = False


def bars_of(sights: list[dict[str, Any]], until: float) -> list[Bar]:
    """The attempts as they were seen until then."""
    bars: dict[tuple[str, int], Bar] = {}
    steps: dict[tuple[str, int], int] = {}
    for sight in sights:
        key = sight["artifact"], sight["attempt"]
        if sight["at"] > until or not sight["attempt"] or not sight["island"]:
            continue
        bar = bars.setdefault(key, Bar(sight["island"], sight["artifact"], sight["at"], sight["at"]))
        if sight["step"] != steps.get(key) or sight["done"]:
            steps[key], bar.ended, bar.done = sight["step"], sight["at"], sight["done"]
    return list(bars.values())


def frame(film: dict[str, Any], islands: list[str], colours: dict[str, str], end: float, now: float) -> Image.Image:
    """What has happened until now."""
    image = Image.new("RGB", (WIDTH, TOP + ROW * len(islands) + BELOW), "white")
    draw, small, large = ImageDraw.Draw(image), ImageFont.load_default(13), ImageFont.load_default(16)

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at / end

    happened = [hit for hit in film["hits"] if hit["at"] <= now]
    last = happened[-1] if happened and now - happened[-1]["at"] < end / 6 else None
    text = f"{last['island']} {WORDS[last['cause']]}".strip() if last else "three islands, which share storage alone"
    draw.text((LEFT, 12), text, "#bb2222" if last else "#222222", large)
    for minute in range(int(end / 60) + 1):
        draw.line([(x(60 * minute), TOP - 8), (x(60 * minute), TOP + ROW * len(islands))], "#dddddd")
        draw.text((x(60 * minute) + 3, TOP - 20), f"{minute} min", "#888888", small)
    for row, island in enumerate(islands):
        y = TOP + ROW * row
        draw.text((12, y + ROW / 2 - 10), island, "#222222", large)
        draw.line([(LEFT, y), (WIDTH - RIGHT, y)], "#dddddd")
    for bar in bars_of(film["sights"], now):
        y = TOP + ROW * islands.index(bar.island) + 12
        box = (x(bar.began), y, max(x(bar.ended), x(bar.began) + 2), y + ROW - 24)
        draw.rectangle(box, colours[bar.artifact])
        name = bar.artifact.replace("experts/00", "expert ")
        for label in (f"{name} done", name) if bar.done else (name,):
            if box[2] - box[0] > draw.textlength(label, small) + 6:
                draw.text((box[0] + 4, y + 12), label, "white", small)
                break
    for hit in happened:
        rows = [islands.index(hit["island"])] if hit["island"] else range(len(islands))
        for row in rows:
            y = TOP + ROW * row
            draw.line([(x(hit["at"]), y + 2), (x(hit["at"]), y + ROW - 2)], "#bb2222", 3)
    draw.line([(x(now), TOP - 8), (x(now), TOP + ROW * len(islands))], "#222222")
    done = {sight["artifact"] for sight in film["sights"] if sight["done"] and sight["at"] <= now}
    words = f"{now:.0f} s: {len(done)} of {len(colours)} models are done"
    draw.text((LEFT, TOP + ROW * len(islands) + 16), words, "#222222", large)
    return image


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    film = json.loads(source.read_text())
    islands = sorted({sight["island"] for sight in film["sights"] if sight["island"]})
    artifacts = sorted({sight["artifact"] for sight in film["sights"]})
    colours = dict(zip(artifacts, COLOURS, strict=False))
    end = max(sight["at"] for sight in film["sights"])
    moments = sorted(
        {end * number / FRAMES for number in range(FRAMES + 1)} | {hit["at"] + 0.1 for hit in film["hits"]}
    )
    frames = [frame(film, islands, colours, end, now) for now in moments]
    frames = [each.quantize(32) for each in frames]
    seconds = [SECONDS_EACH] * (len(frames) - 1) + [LAST_SECONDS]
    frames[0].save(
        target, save_all=True, append_images=frames[1:], duration=[int(1000 * each) for each in seconds], loop=0
    )


if __name__ == "__main__":
    main()
