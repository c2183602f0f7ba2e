import pytest

from jaxllm.memory.units import GIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * GIB),
        ("80 gib", 80 * GIB),
        ("79.6GB", 79_600_000_000),
        ("3.5GiB", 3_758_096_384),
        ("1024", 1024),
        ("1e9", 10**9),
        (".5KiB", 512),
        ("0.1GB", 10**8),  # not one byte less, as a float product would give for some
        ("17B", 17),
        ("2TiB", 2 << 40),
    ],
)
def test_parse(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["80G", "80K", "", "GiB", "-1GiB", "1,5GiB", "80GiBs", "nan", "1e-3GB"])
def test_refuse(text: str) -> None:
    with pytest.raises(ValueError, match="KiB, MiB, GiB"):
        parse_bytes(text)


def test_format() -> None:
    assert [format_bytes(n) for n in (53 * GIB, 311_164_928, 2048, 17, -GIB)] == [
        "53.00 GiB",
        "296.8 MiB",
        "2.0 KiB",
        "17 B",
        "-1.00 GiB",
    ]
