"""Bytes with units, read and written."""

import re
from fractions import Fraction

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE]\+?\d+)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """`"80GiB"`, `"79.6 GB"` or `"1024"` in bytes, rounded down. Binary and decimal units, in either case.

    Raises:
        ValueError: for anything else, `"80G"` included: it means 80 * 2**30 to some and 80 * 10**9 to others.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"{text!r} is no size in bytes: write a number and one of B, kB, MB, GB, TB (powers of 1000), "
            "KiB, MiB, GiB, TiB (powers of 1024), as in 80GiB"
        )
    return int(Fraction(match[1]) * factor)


def format_bytes(count: int) -> str:
    """Bytes in the binary unit that reads best: `"53.00 GiB"`, `"311.2 MiB"`, `"17 B"`."""
    size = abs(count)
    if size >= GIB:
        return f"{count / GIB:.2f} GiB"
    if size >= MIB:
        return f"{count / MIB:.1f} MiB"
    return f"{count / KIB:.1f} KiB" if size >= KIB else f"{count} B"
