"""The report: lines, JSON, bar, pictures."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxllm.memory import picture
from jaxllm.memory.budget import DeviceBudget
from jaxllm.memory.report import MemoryReport, ProgramReport, check_picture
from jaxllm.memory.units import GIB


def report(**changes: object) -> MemoryReport:
    budget = DeviceBudget.of(
        name="card <0>",
        total=80 * GIB,
        utilization=0.9,
        non_framework=GIB,
        weights=14 * GIB,
        activations=4 * GIB,
        block_bytes=14_680_064,
    )
    values = {
        "platform": "gpu",
        "source": "NVML",
        "budgets": (budget,),
        "programs": (ProgramReport(name="mixed[16384]", static=1000, measured=1012, naive=5000),),
        "num_kvcache_blocks": 3876,
        "block_size": 256,
        "block_bytes": 14_680_064,
        "kv_cache_dtype": "bfloat16",
        "bound_by": "gpu_memory_utilization",
        "device": 0,
        "max_model_len": 4096,
    }
    return MemoryReport(**(values | changes))


def test_two_lines() -> None:
    tokens, concurrency = report().lines()
    assert "992,256 tokens" in tokens and "3,876 blocks of 256" in tokens and "GiB of bfloat16 per device" in tokens
    assert "4,096 tokens" in concurrency and "242.25x" in concurrency


def test_program_takes_the_larger_and_knows_the_disagreement() -> None:
    program = ProgramReport(name="p", static=1000, measured=1012)
    assert program.transient == 1012
    assert program.disagreement == pytest.approx(12 / 1012)
    assert ProgramReport(name="p", static=1000).disagreement == 0.0


def test_measuring_costs_its_own_time_and_its_programs_share_of_the_wait() -> None:
    measured = tuple(ProgramReport(name=name, static=1, measured=1) for name in ("a", "b"))
    programs = (*measured, *(ProgramReport(name=name, static=1) for name in "cdefg"))  # of which these serve
    times = {"programs": programs, "measure_seconds": 0.5, "measured_programs_seconds": 12.0}
    assert report(**times).measuring_cost == 12.5
    assert report(**times, other_programs=6).measuring_cost == 3.5  # two of eight
    assert report(**times | {"programs": ()}, other_programs=6).measuring_cost == 0.5


def test_json_is_complete(tmp_path: Path) -> None:
    report().save(tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text())
    assert read["num_kvcache_blocks"] == 3876
    assert read["kv_array_bytes"] == 3876 * 14_680_064
    assert read["programs"][0] == {
        "name": "mixed[16384]",
        "static": 1000,
        "measured": 1012,
        "naive": 5000,
        "serving": None,
        "transient": 1012,
    }
    budget = read["budgets"][0]
    parts = budget["non_framework"] + budget["weights"] + budget["activations"] + budget["headroom"]
    assert parts == budget["limit"] == 72 * GIB


def test_bar_has_all_parts_in_proportion() -> None:
    shown = picture.terminal(report().bars()[0], width=80)
    bar = shown.splitlines()[1]
    assert len(bar) == 82
    assert [bar.count(glyph) for glyph in "#Wa=."] == [1, 14, 4, 53, 8]
    assert shown.splitlines()[2].index("^") == 1 + 72


def test_bar_shows_the_smallest_part() -> None:
    bar = picture.Bar.of("c", other=1, weights=1, activations=1, kv_cache=10**9, limit=9 * 10**8, total=10**9)
    assert set("#Wa=") <= set(picture.terminal(bar).splitlines()[1])


def test_svg(tmp_path: Path) -> None:
    report().save(tmp_path / "report.svg")
    root = ElementTree.parse(tmp_path / "report.svg").getroot()
    boxes = [element for element in root if element.tag.endswith("rect")]
    widths = [float(box.attrib["width"]) for box in boxes[2:6]]
    assert widths == pytest.approx([852 / 80 * size for size in (1, 14, 4, 3876 * 14_680_064 / GIB)], abs=0.01)
    texts = [element.text for element in root if element.tag.endswith("text")]
    assert any(text and text.startswith("card <0>") for text in texts)


def test_png(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is an optional dependency")
    report().save(tmp_path / "report.png")
    with image.open(tmp_path / "report.png") as opened:
        assert opened.size[0] == 1800
        assert opened.convert("RGB").getpixel((2 * (24 + 100), 2 * (24 + 24 + 20))) == (0x3B, 0x6F, 0xB6)  # the weights


def test_png_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ValueError, match=r"Pillow.*\.svg needs nothing"):
        report().save(tmp_path / "report.png")


def test_unknown_picture() -> None:
    with pytest.raises(ValueError, match=r"\.svg, \.png, \.json"):
        check_picture(Path("report.pdf"))
