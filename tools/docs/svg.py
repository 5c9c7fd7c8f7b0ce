"""Pictures in SVG for light and dark pages: boxes, ribbons, text, and eight colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

LIGHT = ("#a9cbf7", "#fbcf95", "#aedfb4", "#d6bdf5", "#f6b8b8", "#a2dfdd", "#efe08f", "#d6c6b2")
DARK = ("#265a9e", "#8d5b16", "#2c6e3b", "#63409a", "#933a3a", "#1d6f6d", "#756716", "#685742")
FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def _style() -> str:
    def theme(page: str, ink: str, soft: str, line: str, colours: Sequence[str]) -> str:
        fills = "".join(f".c{i}{{fill:{colour}}}" for i, colour in enumerate(colours))
        return (
            f".page{{fill:{page};stroke:{line}}}.ink{{fill:{ink}}}.soft{{fill:{soft}}}.none{{fill:{page}}}"
            f".rule{{stroke:{line}}}.box{{stroke:{page}}}.empty{{fill:none;stroke:{line}}}{fills}"
        )

    light = theme("#ffffff", "#1f2328", "#59636e", "#d1d9e0", LIGHT)
    dark = theme("#0d1117", "#f0f6fc", "#9198a1", "#3d444d", DARK)
    words = f"text{{font-family:{FONT};font-size:12px}}.small{{font-size:10px}}.large{{font-size:14px;font-weight:600}}"
    return f"{light}{words}@media (prefers-color-scheme: dark){{{dark}}}"


class Picture:
    """SVG picture. Sizes are in pixels, from the upper left corner; screen readers read the title."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
            f'role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title><style>{_style()}</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{_n(width - 1)}" height="{_n(height - 1)}" rx="8"/>',
        ]

    def box(self, x: float, y: float, w: float, h: float, kind: str | int, opacity: float = 1.0) -> None:
        """Draws a box; `kind` is the number of a colour or the name of a style."""
        name = f"box c{kind}" if isinstance(kind, int) else kind
        faded = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
        self._parts.append(
            f'<rect class="{name}" x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" rx="2"{faded}/>'
        )

    def ribbon(self, left: tuple[float, float, float], right: tuple[float, float, float], kind: int) -> None:
        """Draws a ribbon from (x, top, bottom) to (x, top, bottom)."""
        (x, a, b), (u, c, d) = left, right
        m = (x + u) / 2
        self._parts.append(
            f'<path class="c{kind}" fill-opacity="0.35" d="M{_n(x)} {_n(a)}C{_n(m)} {_n(a)} {_n(m)} {_n(c)} {_n(u)} '
            f'{_n(c)}V{_n(d)}C{_n(m)} {_n(d)} {_n(m)} {_n(b)} {_n(x)} {_n(b)}Z"/>'
        )

    def rule(self, x: float, y: float, u: float, v: float, dashes: str = "none") -> None:
        """Draws a thin line from (x, y) to (u, v)."""
        self._parts.append(f'<path class="rule" stroke-dasharray="{dashes}" d="M{_n(x)} {_n(y)}L{_n(u)} {_n(v)}"/>')

    def words(self, x: float, y: float, text: str, style: str = "ink", anchor: str = "start") -> None:
        """Draws text; `anchor` (start, middle or end) is the part of it at x, and y is the height of its middle."""
        self._parts.append(
            f'<text class="{style}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" dominant-baseline="central">'
            f"{escape(text)}</text>"
        )

    def __str__(self) -> str:
        """Returns the content of the file."""
        return "\n".join([*self._parts, "</svg>", ""])

    def save(self, path: Path) -> None:
        """Writes the picture to a file."""
        path.write_text(str(self), encoding="utf-8")


def _n(value: float) -> str:
    """Formats a number with a tenth of a pixel."""
    return f"{round(value, 1):g}"
