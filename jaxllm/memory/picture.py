"""The budget as a bar: in the terminal, as SVG, as PNG.

One list of boxes and texts is laid out once and then drawn by whichever writer is asked for. SVG is written by hand;
PNG needs Pillow, an optional dependency.
"""

import html
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxllm.memory.units import format_bytes

_WIDTH, _BAR, _MARGIN = 900, 48, 24


@dataclass(frozen=True)
class Part:
    """A stretch of the bar."""

    label: str
    bytes: int
    glyph: str
    colour: str


@dataclass(frozen=True)
class Bar:
    """One device: stacked parts from the left, a mark at the limit, the card's end at the right. Sizes in bytes."""

    title: str
    parts: tuple[Part, ...]
    limit: int
    total: int

    @classmethod
    def of(
        cls, title: str, *, other: int, weights: int, activations: int, kv_cache: int, limit: int, total: int
    ) -> "Bar":
        """The four parts of a budget, what is unused below the limit left blank."""
        parts = (
            Part("other", other, "#", "#8a8f98"),
            Part("weights", weights, "W", "#3b6fb6"),
            Part("activations", activations, "a", "#e0932f"),
            Part("KV cache", kv_cache, "=", "#3f9b5f"),
        )
        return cls(title, parts, limit, total)


def terminal(bar: Bar, width: int = 72) -> str:
    """The bar in characters, `width` of them for the card, and a legend."""
    ends = [0]
    for part in bar.parts:
        ends.append(ends[-1] + part.bytes)
    # Every part that is there is seen: rounding may shift the others by one character, never hide one.
    cells: list[str] = []
    for part, end in zip(bar.parts, ends[1:], strict=True):
        upto = min(width, max(round(end * width / bar.total), len(cells) + (part.bytes > 0)))
        cells += part.glyph * (upto - len(cells))
    mark = min(width, round(bar.limit * width / bar.total))
    drawn = "".join(cells).ljust(width, ".")
    pointer = " " * mark + f"^ limit {format_bytes(bar.limit)}"
    legend = [f"  {part.glyph} {part.label:<12}{format_bytes(part.bytes):>12}" for part in bar.parts]
    unused = bar.limit - sum(part.bytes for part in bar.parts)
    legend.append(
        f"  . {'free':<12}{format_bytes(bar.total - ends[-1]):>12}  ({format_bytes(unused)} of it below the limit)"
    )
    return "\n".join([f"{bar.title}: {format_bytes(bar.total)}", f"[{drawn}]", f" {pointer}", *legend])


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True)
class _Text:
    x: float
    y: float
    text: str
    size: int


def _lay_out(bars: Sequence[Bar]) -> tuple[list[_Box], list[_Text], int]:
    """Boxes, texts (x, baseline) and the height of the picture; all bars share one scale."""
    boxes: list[_Box] = []
    texts: list[_Text] = []
    scale = (_WIDTH - 2 * _MARGIN) / max(bar.total for bar in bars)
    y = float(_MARGIN)
    for bar in bars:
        texts.append(_Text(_MARGIN, y + 14, f"{bar.title}: {format_bytes(bar.total)}", 15))
        y += 24
        boxes.append(_Box(_MARGIN, y, bar.total * scale, _BAR, "#eceef1"))
        x = float(_MARGIN)
        for part in bar.parts:
            boxes.append(_Box(x, y, part.bytes * scale, _BAR, part.colour))
            x += part.bytes * scale
        mark = _MARGIN + bar.limit * scale
        boxes.append(_Box(mark - 1, y - 4, 2, _BAR + 8, "#c22f3e"))
        limit = f"limit {format_bytes(bar.limit)}"
        texts.append(_Text(max(_MARGIN, min(mark, _WIDTH - _MARGIN) - 7 * len(limit)), y + _BAR + 18, limit, 12))
        y += _BAR + 36
        x = float(_MARGIN)
        for part in bar.parts:
            boxes.append(_Box(x, y - 10, 12, 12, part.colour))
            texts.append(_Text(x + 18, y, f"{part.label} {format_bytes(part.bytes)}", 13))
            x += 210
        y += 30
    return boxes, texts, round(y)


def svg(bars: Sequence[Bar]) -> str:
    """The picture as an SVG document."""
    boxes, texts, height = _lay_out(bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    lines += [
        f'<rect x="{b.x:.2f}" y="{b.y:.2f}" width="{b.width:.2f}" height="{b.height:.2f}" fill="{b.colour}"/>'
        for b in boxes
    ]
    lines += [f'<text x="{t.x:.1f}" y="{t.y:.1f}" font-size="{t.size}">{html.escape(t.text)}</text>' for t in texts]
    return "\n".join([*lines, "</svg>", ""])


def write_png(bars: Sequence[Bar], path: Path) -> None:
    """Draw the picture into a PNG file, at twice the SVG's size.

    Raises:
        ValueError: if Pillow is not installed; says how to get it, and that .svg needs nothing.
    """
    try:
        pil = {name: importlib.import_module(f"PIL.{name}") for name in ("Image", "ImageDraw", "ImageFont")}
    except ImportError as error:
        raise ValueError(
            f"{path}: a .png picture needs Pillow (pip install pillow), which is not installed; .svg needs nothing"
        ) from error
    boxes, texts, height = _lay_out(bars)
    zoom = 2
    image = pil["Image"].new("RGB", (_WIDTH * zoom, height * zoom), "#ffffff")
    draw = pil["ImageDraw"].Draw(image)
    for b in boxes:
        if b.width > 0:
            corners = (b.x * zoom, b.y * zoom, (b.x + b.width) * zoom - 1, (b.y + b.height) * zoom - 1)
            draw.rectangle((corners[0], corners[1], max(corners[0], corners[2]), corners[3]), fill=b.colour)
    for t in texts:
        draw.text(
            (t.x * zoom, t.y * zoom),
            t.text,
            fill="#000000",
            font=pil["ImageFont"].load_default(t.size * zoom),
            anchor="ls",
        )
    image.save(path, format="PNG")
