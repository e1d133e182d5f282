"""Plain SVG, small enough to be written by hand, that can be read on a light and on a dark page."""

from collections.abc import Sequence
from html import escape

WIDTH, ROW, LABELS = 720, 24, 230
INK, OURS, OTHERS = "#7a7f87", "#2f7d4f", "#8aa0b8"
COLORS = ("#2f7d4f", "#b4542d", "#3f68a8", "#8d6bb0", "#a08a2c", "#4c9aa0", "#a04c76", "#667788")


def bars(title: str, rows: Sequence[tuple[str, float, bool]]) -> str:
    """One bar for each (label, value, whether it is ours), the greatest first."""
    greatest = max(value for _, value, _ in rows)
    space = WIDTH - LABELS - 90
    parts = []
    for place, (label, value, is_ours) in enumerate(sorted(rows, key=lambda row: -row[1])):
        top = 34 + place * ROW
        width = max(value / greatest * space, 1)
        color = OURS if is_ours else OTHERS
        parts += [
            _text(LABELS - 8, top + 15, label, "end"),
            f'<rect x="{LABELS}" y="{top + 3}" width="{width:.1f}" height="{ROW - 8}" fill="{color}"/>',
            _text(LABELS + width + 6, top + 15, f"{value:,.0f}" if value >= 100 else f"{value:.3g}"),
        ]
    return _drawing(title, 44 + len(rows) * ROW, parts)


def lines(title: str, series: Sequence[tuple[str, Sequence[float]]]) -> str:
    """One line for each (label, values), each in percent of its first value."""
    height, left, right = 240, 50, WIDTH - 170
    greatest = max(110.0, *(value / values[0] * 100 for _, values in series for value in values))
    parts = []
    for percent in range(0, int(greatest) + 1, 25):
        y = 34 + height * (1 - percent / greatest)
        parts += [
            f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{INK}" stroke-opacity="0.3"/>',
            _text(left - 6, y + 4, str(percent), "end"),
        ]
    for place, (label, values) in enumerate(series):
        color = COLORS[place % len(COLORS)]
        step = (right - left) / max(len(values) - 1, 1)
        points = " ".join(
            f"{left + number * step:.1f},{34 + height * (1 - value / values[0] * 100 / greatest):.1f}"
            for number, value in enumerate(values)
        )
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>',
            f'<rect x="{right + 14}" y="{40 + place * 20}" width="12" height="4" fill="{color}"/>',
            _text(right + 32, 46 + place * 20, label),
        ]
    return _drawing(title, height + 50, parts)


def _drawing(title: str, height: int, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'font-family="sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            _text(8, 18, title),
            *parts,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'
