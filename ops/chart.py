"""A line chart in Braille characters: each character is two dots wide and four high."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bit of the dot in (column, row from the top)
BLANK = 0x2800


class Canvas:
    """Dots on a grid of `width` × `height` characters. A character has one style: that of the last dot set in it."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._bits = [[0] * width for _ in range(height)]
        self._style = [[""] * width for _ in range(height)]

    def dot(self, x: int, y: int, style: str) -> None:
        """Set the dot `x` from the left, `y` from the bottom; dots outside the grid are left out."""
        column, row = x // 2, self.height - 1 - y // 4
        if 0 <= column < self.width and 0 <= row < self.height:
            self._bits[row][column] |= DOTS[x % 2][3 - y % 4]
            self._style[row][column] = style

    def rows(self) -> list[Text]:
        """The lines, top first."""
        out = []
        for bits, styles in zip(self._bits, self._style, strict=True):
            line = Text(no_wrap=True)
            for bit, style in zip(bits, styles, strict=True):
                line.append(chr(BLANK + bit) if bit else " ", style)
            out.append(line)
        return out


def scale(values: Sequence[float]) -> tuple[float, float]:
    """The range of the axis. Rewards mostly lie in 0…1, and then a fixed axis shows how far there is to go."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0.0 and high <= 1.0:
        return 0.0, 1.0
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def line_chart(
    points: Sequence[tuple[int, float]],
    smooth: Sequence[float],
    columns: int,
    width: int,
    height: int,
    marks: Sequence[tuple[int, float]] = (),
) -> list[Text]:
    """A chart with its axes, `height + 2` lines of `width` characters.

    `points` are (step, value) as dim dots, `smooth` a value for each of them as a line, `marks` (step, value) stars on
    top. The x axis covers the steps `0 … columns - 1`.
    """
    low, high = scale([value for _, value in points] + [value for _, value in marks])
    labels = [f"{high:.2f}", f"{(low + high) / 2:.2f}", f"{low:.2f}"]
    gutter = max(len(label) for label in labels) + 2
    inner = max(4, width - gutter)
    canvas = Canvas(inner, height)

    def place(step: float, value: float) -> tuple[int, int]:
        x = round(step / max(1, columns - 1) * (2 * inner - 1))
        return x, round((value - low) / (high - low) * (4 * height - 1))

    for step, value in points:
        canvas.dot(*place(step, value), "dim")
    line = [place(step, value) for (step, _), value in zip(points, smooth, strict=True)]
    for start, end in zip(line, line[1:] or line, strict=False):
        _segment(canvas, start, end, "bold green")
    rows = canvas.rows()
    for step, value in marks:
        x, y = place(step, value)
        column, row = min(inner - 1, x // 2), height - 1 - y // 4
        rows[row] = rows[row][:column] + Text("◆", "bold yellow") + rows[row][column + 1 :]

    out = []
    for index, line_of_dots in enumerate(rows):
        label = {0: labels[0], (height - 1) // 2: labels[1], height - 1: labels[2]}.get(index, "")
        out.append(Text(f"{label:>{gutter - 2}} {'┤' if label else '│'}", "dim") + line_of_dots)
    out.append(Text(" " * (gutter - 1) + "└" + "─" * inner, "dim"))
    first, last = "0", str(columns - 1)
    out.append(Text(" " * gutter + first + last.rjust(inner - len(first)), "dim"))
    return out


def bar(share: float, width: int) -> str:
    """A horizontal bar of `width` characters filled to `share` in eighths of a character, padded with blanks."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


def _segment(canvas: Canvas, start: tuple[int, int], end: tuple[int, int], style: str) -> None:
    (x0, y0), (x1, y1) = start, end
    length = max(abs(x1 - x0), abs(y1 - y0), 1)
    for i in range(length + 1):
        canvas.dot(round(x0 + (x1 - x0) * i / length), round(y0 + (y1 - y0) * i / length), style)
