"""Draws the table that `make demo` leaves in report/demo.md: the time until a session is ready,
without and with epcached.

    demo_picture.py [REPORT [PICTURE]]     report/demo.md and doc/demo.svg
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
LEFT, WIDTH, BAR, GAP = 130, 640, 9, 8  # pixels: of the names, of all, of a bar, between models
SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
STYLE = (
    "text{font:12px sans-serif;fill:#222}.t{font-size:10px}.h{font-weight:bold}"
    ".plain{fill:#9aa5b1}.hit{fill:#2f7d4f}"
)


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * SECONDS[unit]


def parts(report: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Returns for each execution provider its title, and for each model its name and both times as
    they were printed.
    """
    found = []
    for part in report.split("### ")[1:]:
        rows = [
            [cell.strip() for cell in line.strip("| ").split("|")]
            for line in part.splitlines()
            if line.startswith("|")
        ]
        column = next(i for i, name in enumerate(rows[0]) if name.startswith("session ready"))
        times = [(row[0], *row[column].split(" → ")) for row in rows[2:]]
        found.append((part.splitlines()[0].strip(), times))
    return found


def draw(report: str) -> str:
    drawn = parts(report)
    longest = max(seconds(row[1]) for _, rows in drawn for row in rows)
    scale = (WIDTH - LEFT - 70) / longest
    lines, y = [], 20
    for title, rows in drawn:
        lines.append(f'<text class="h" x="8" y="{y}">{escape(title)}</text>')
        y += 12
        for name, plain, hit in rows:
            lines.append(
                f'<text x="{LEFT - 8}" y="{y + BAR + 4}" text-anchor="end">{escape(name)}</text>'
            )
            for kind, time in (("plain", plain), ("hit", hit)):
                width = max(1, round(seconds(time) * scale))
                lines.append(
                    f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width}" height="{BAR}"/>'
                )
                lines.append(
                    f'<text x="{LEFT + width + 5}" y="{y + BAR}" class="t">{escape(time)}</text>'
                )
                y += BAR + 1
            y += GAP
        y += 22
    lines.append(
        f'<text x="8" y="{y}">Session ready without (grey) and with (green) epcached.</text>'
    )
    made = re.sub(r", Linux.*", "", report.splitlines()[0]).replace("`", "")
    lines.append(f'<text class="t" x="8" y="{y + 16}">{escape(made)}</text>')
    y += 16
    size = f'width="{WIDTH}" height="{y + 12}" viewBox="0 0 {WIDTH} {y + 12}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style><rect '
        'width="100%" height="100%" fill="#fff"/>'
    )
    return "\n".join([head, *lines, "</svg>"]) + "\n"


def main(arguments: list[str]) -> None:
    report, picture = (
        *map(Path, arguments),
        *(PROJECT / "report" / "demo.md", PROJECT / "doc" / "demo.svg")[len(arguments) :],
    )
    picture.write_text(draw(report.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
