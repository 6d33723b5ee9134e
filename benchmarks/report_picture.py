"""README's picture: how many times as fast as the fastest baseline, as bars, for light and dark.

It is SVG written here, number by number: report.py --check compares it with the results like any
table, which a picture that another library draws in its own way each version would not allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from report_headlines import Bars, times_of

WIDTH, LEFT, RIGHT = 840, 336, 50  # the bars' axis lies between LEFT and WIDTH - RIGHT
TOP, PART, ROW, BAR, FOOT = 84, 34, 44, 13, 34
LOWEST, TICKS = 0.7, (1, 2, 5, 10, 20)
NOTE = "Logarithmic axis; a bar left of the line is slower. fla: flash-linear-attention."
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


class Colours(NamedTuple):
    """One theme: GitHub's own text and lines, and two hues that differ in lightness too."""

    text: str
    muted: str
    line: str
    forward: str
    backward: str


THEMES = {
    "light": Colours("#1f2328", "#59636e", "#d1d9e0", "#0550ae", "#e08a1e"),
    "dark": Colours("#f0f6fc", "#9198a1", "#3d444d", "#58a6ff", "#f0b35a"),
}


class Scale(NamedTuple):
    """The logarithmic axis."""

    highest: float

    def x(self, times: float) -> float:
        share = math.log(times / LOWEST) / math.log(self.highest / LOWEST)
        return round(LEFT + share * (WIDTH - RIGHT - LEFT), 1)


def text(x: float, y: float, words: str, fill: str, size: int = 14, extra: str = "") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}"{extra}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    numbers = f'x="{x}" y="{y}" width="{round(width, 1)}" height="{height}"'
    return f'<rect {numbers} rx="1.5" fill="{fill}"/>'


def axis(scale: Scale, bottom: float, colours: Colours) -> list[str]:
    """Grid lines and what they mean; the baseline itself is the strong one."""
    lines = []
    for tick in TICKS:
        if tick > scale.highest:
            continue
        x, colour = scale.x(tick), colours.muted if tick == 1 else colours.line
        width = 2 if tick == 1 else 1
        lines.append(
            f'<line x1="{x}" y1="{TOP - 8}" x2="{x}" y2="{bottom}" stroke="{colour}" '
            f'stroke-width="{width}"/>'
        )
        words = "baseline" if tick == 1 else f"{tick}x"
        lines.append(text(x, TOP - 14, words, colours.muted, 13, ' text-anchor="middle"'))
    return lines


def bars_lines(bars: Bars, y: float, scale: Scale, colours: Colours) -> list[str]:
    """One piece of work: its name and shape at the left, a bar a pass."""
    lines = [
        text(16, y + 13, bars.title, colours.text, 14, ' font-weight="600"'),
        text(16, y + 29, bars.note, colours.muted, 12),
    ]
    height = BAR * len(bars.bars)
    top = y + (ROW - 8 - height) / 2
    for i, bar in enumerate(bars.bars):
        fill = colours.forward if bar.direction == "forward" else colours.backward
        left, right = sorted((scale.x(1), scale.x(bar.times)))
        lines.append(box(left, top + BAR * i + 1, max(right - left, 1.5), BAR - 2, fill))
        at = scale.x(max(bar.times, 1)) + 6
        lines.append(text(at, top + BAR * i + 11, times_of(bar.times), colours.text, 12))
    return lines


def legend(colours: Colours) -> list[str]:
    lines, x = [], LEFT
    for name, fill in (("forward", colours.forward), ("backward", colours.backward)):
        lines += [box(x, 37, 14, 11, fill), text(x + 20, 47, name, colours.text, 13)]
        x += 100
    return lines


def picture(rows: Sequence[Bars], where: str, theme: str) -> str:
    """The SVG. where: the machine, for the title."""
    colours = THEMES[theme]
    scale = Scale(max(2.0, 1.15 * max(bar.times for row in rows for bar in row.bars)))
    body: list[str] = []
    y, part = TOP, None
    for row in rows:
        if row.part != part:
            part = row.part
            body.append(text(0, y + 18, part, colours.muted, 13, ' font-weight="600"'))
            y += PART
        body += bars_lines(row, y, scale, colours)
        y += ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + FOOT}" '
    head += f'width="{WIDTH}" height="{y + FOOT}" font-family="{FONT}" role="img">'
    title = f"Times as fast as the fastest baseline, {where}"
    return "\n".join(
        [
            head,
            f"<title>{escape(title)}</title>",
            text(0, 20, title, colours.text, 17, ' font-weight="600"'),
            *legend(colours),
            *axis(scale, y, colours),
            *body,
            text(0, y + 22, NOTE, colours.muted, 12),
            "</svg>",
            "",
        ]
    )
