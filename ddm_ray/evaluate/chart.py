"""A small line chart as inline SVG."""

import html

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 260, 46, 130, 12, 28
COLOURS = ("#7a828f", "#3b7dd8", "#d9822b", "#8a56c2", "#2f9e62", "#c94f6d")


def line_chart(series: dict[str, list[float]]) -> str:
    """One line per name over equal parts of [0, 1], each point in the middle of its part."""
    values = [value for line in series.values() for value in line]
    low, high = min(values), max(values)
    pad = 0.05 * (high - low) or 0.05
    low, high = low - pad, high + pad

    def x(share: float) -> float:
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for step in range(5):
        value = low + (high - low) * step / 4
        parts.append(
            f'<line x1="{LEFT}" x2="{x(1):.0f}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#8884" />'
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>'
            f'<text x="{x(step / 4):.0f}" y="{HEIGHT - 8}" text-anchor="middle">{step / 4:g}</text>'
        )
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        middles = ((index + 0.5) / len(line) for index in range(len(line)))
        points = " ".join(f"{x(t):.1f},{y(value):.1f}" for t, value in zip(middles, line, strict=True))
        key = TOP + 14 + 20 * number
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" />'
            f'<line x1="{x(1) + 14:.0f}" x2="{x(1) + 32:.0f}" y1="{key}" y2="{key}"'
            f' stroke="{colour}" stroke-width="2" />'
            f'<text x="{x(1) + 38:.0f}" y="{key + 4}">{html.escape(name)}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'
