"""Processes that find programs of an earlier start, and a little more or less memory than that: they fit again."""

import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parallel.launch import launched

EARLIER = "programs of an earlier start"


def start(model: Path, *processes: tuple[Path, int]) -> list[dict[str, Any]]:
    """What came of one start, by process; each is given its folder for caches, and the blocks that fit beside it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    arguments: Sequence[Sequence[object]] = [
        (model, fitting, port, len(processes), index) for index, (_, fitting) in enumerate(processes)
    ]
    with launched("start_once.py", arguments, [{"XDG_CACHE_HOME": str(folder)} for folder, _ in processes]) as running:
        results = []
        for process in running:
            output, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            results.append(json.loads(output.splitlines()[-1]))
    for result, (_, fitting) in zip(results, processes, strict=True):
        assert result["fitting"] == fitting >= result["blocks"]
    return results


def test_a_second_process_has_the_same_blocks_and_compiles_nothing(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """With room for more blocks, and for fewer."""
    model = tiny()
    (first,), (more,), (fewer,) = (start(model, (tmp_path, fitting)) for fitting in (300, 303, 298))
    assert first["blocks"] == 295 and first["bound_by"] == "the share of the free host memory" and first["compiled"]
    for later in (more, fewer):
        assert (later["blocks"], later["bound_by"], later["notes"]) == (295, EARLIER, [])
        assert later["compiled"] == 0 and later["from the cache"] == first["compiled"] + first["from the cache"]
        assert later["tokens"] == first["tokens"]


def test_several_processes_agree_although_one_knows_no_earlier_start(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny()
    first = start(model, (tmp_path / "a", 300), (tmp_path / "b", 310))
    assert [result["blocks"] for result in first] == [295, 295]
    assert [result["bound_by"] for result in first] == ["the share of the free host memory", "another process"]
    assert first[1]["notes"] == ["this process would take 305 blocks of the KV cache, another one takes 295"]
    second = start(model, (tmp_path / "a", 303), (tmp_path / "new", 310))
    assert [result["blocks"] for result in second] == [295, 295]
    assert [result["bound_by"] for result in second] == [EARLIER, "another process"]
    # JAX counts what it compiles where it writes its cache: in process 0.
    assert first[0]["compiled"] > 0 == second[0]["compiled"]
    assert first[0]["tokens"] == second[0]["tokens"] == second[1]["tokens"]
