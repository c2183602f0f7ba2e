"""What `jaxllm.bench.tensor_parallel` makes of its measurements: comparisons between sizes, and a table."""

from collections.abc import Iterator, Sequence
from typing import Any

Result = dict[str, Any]

_FIXED = ("num_kvcache_blocks", "kv_cache_memory_bytes")
"""What may set the size of the KV cache in place of the memory there is."""


def compared(sizes: dict[str, Result]) -> Result:
    """Tokens and KV blocks of the larger sizes beside those of the first, where both are known."""
    first, *others = sizes
    compared: Result = {"agreement": {"tokens": {}, "exact_tokens": {}}, "blocks": {}}
    for size in others:
        for name, found in compared["agreement"].items():
            ours, theirs = (_at(sizes[which], (name, "tokens")) for which in (first, size))
            if ours and theirs:
                found[size] = agreement(ours, theirs, sizes[first][name]["margins"])
        before, after = (_at(sizes[which], ("ready", "memory")) for which in (first, size))
        if before and after:
            compared["blocks"][size] = growth(before, after, int(size) / int(first))
    return compared


def errors(result: Result) -> list[str]:
    """What failed, and why."""
    answers = {
        f"size {size}, {name}": answer
        for size, measured in result["sizes"].items()
        for name, answer in measured.items()
    }
    both = (result["data_parallel"] or {"engines": []})["engines"]
    answers |= {f"engine {index} of those side by side": answer for index, answer in enumerate(both)}
    return [f"{name} failed: {answer['error']}" for name, answer in answers.items() if "error" in answer]


def agreement(reference: list[list[int]], other: list[list[int]], margins: list[list[float]]) -> Result:
    """How far greedy tokens are the same.

    Args:
        reference: tokens of each prompt.
        other: likewise.
        margins: of the reference, by how much each token's log probability was above the next best.

    Returns:
        `equal`: prompts with the same tokens throughout, of `prompts`. `share`: tokens before the first difference, of
        all; behind it two sequences have different contexts, and cannot be compared. `parts_at`: for each prompt where
        the first difference is, None where there is none. `margins`: the reference's at these differences.
    """
    parts = []
    for ours, theirs in zip(reference, other, strict=True):
        pairs = zip(ours, theirs, strict=True)
        parts.append(next((index for index, (a, b) in enumerate(pairs) if a != b), None))
    same = sum(len(ours) if at is None else at for ours, at in zip(reference, parts, strict=True))
    return {
        "prompts": len(parts),
        "equal": parts.count(None),
        "share": same / sum(map(len, reference)),
        "parts_at": parts,
        "margins": [margin[at] for margin, at in zip(margins, parts, strict=True) if at is not None],
    }


def growth(before: Result, after: Result, times: float) -> Result:
    """By how much the KV blocks grow when there are `times` as many devices, and what the smaller size predicts.

    Weights and the bytes of a block are divided among the devices, and the limit of each stays: `(limit - weights / n -
    activations) / (block_bytes / n)` blocks, if activations stay what they were. None where an option sets the size.

    Args:
        before: memory of the smaller size.
        after: of the larger.
        times: how often the devices of the smaller size go into those of the larger.
    """
    bounds = before["bound_by"], after["bound_by"]
    room = before["limit"] - before["weights"] / times - before["activations"]
    return {
        "factor": after["num_kvcache_blocks"] / before["num_kvcache_blocks"],
        "beyond_devices": after["num_kvcache_blocks"] / before["num_kvcache_blocks"] / times,
        "block_bytes_factor": after["block_bytes"] / before["block_bytes"],
        "predicted_blocks": None if set(bounds) & set(_FIXED) else int(room * times / before["block_bytes"]),
        "bound_by": bounds,
    }


def table(result: Result) -> list[str]:
    """The figures for people, as Markdown."""
    machine, sizes = result["machine"], result["sizes"]
    lines = [f"model {result['model']}", machine["devices"] or "no GPU", machine["links"] or "", ""]
    lines += errors(result)
    lines += ["| what | " + " | ".join(f"{size} device(s)" for size in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in _rows(list(sizes.values()))]
    for name, found in result["agreement"].items():
        for size, each in found.items():
            where = [at for at in each["parts_at"] if at is not None]
            lines.append(
                f"{name}, {size} devices: {each['equal']} of {each['prompts']} prompts equal, {each['share']:.2%} of "
                f"tokens before a difference{f'; they part at {where}, where the best two are ' if where else ''}"
                f"{', '.join(f'{margin:.3f}' for margin in each['margins'])}{' nats apart' if where else ''}"
            )
    for size, each in result["blocks"].items():
        known = each["predicted_blocks"]
        predicted = "set by an option" if known is None else f"predicted {known:,} blocks"
        lines.append(
            f"KV blocks, {size} devices: {each['factor']:.3f} x, which is {each['beyond_devices']:.3f} x the number of "
            f"devices ({predicted}); block bytes {each['block_bytes_factor']:.3f} x"
        )
    if result["data_parallel"]:
        both = result["data_parallel"]
        lines.append(f"{len(both['engines'])} engines of one device: {both['tokens_per_s']:.0f} tokens/s together")
    return lines


def _rows(sizes: list[Result]) -> Iterator[tuple[str, list[str]]]:
    """Name and cells of the table's rows; a cell says "-" where a measurement is missing."""

    def row(name: str, *path: str, form: str = "{:,.0f}", limit: tuple[str, ...] = ()) -> tuple[str, list[str]]:
        cells = []
        for measured in sizes:
            value, least = _at(measured, path), _at(measured, ("ceilings", "limits", *limit)) if limit else None
            cell = "-" if value is None else form.format(value)
            cells.append(cell if least is None else f"{cell} (limit {form.format(least)})")
        return name, cells

    yield row("start-up, s", "ready", "startup_seconds", form="{:.1f}")
    yield row("weights, bytes", "ready", "memory", "weights")
    yield row("activations, bytes", "ready", "memory", "activations")
    yield row("block_bytes", "ready", "memory", "block_bytes")
    yield row("KV blocks", "ready", "memory", "num_kvcache_blocks")
    for batch in _keys(sizes, "decode", "step_ms"):
        yield row(f"decode, batch {batch}, ms", "decode", "step_ms", batch, form="{:.2f}", limit=("step_ms", batch))
    yield row("workload, tokens/s", "throughput", "tokens_per_s", limit=("tokens_per_s",))
    yield row("compilations after ready", "throughput", "compilations_after_ready")
    yield row("prefill, tokens/s", "prefill", "tokens_per_s", limit=("prefill_tokens_per_s",))
    for rows in _keys(sizes, "messages", "us"):
        yield row(f"one all-reduce, {rows} rows, us", "messages", "us", rows, form="{:.1f}")
    for batch in _keys(sizes, "profile", "all_reduce"):
        where = ("profile", "all_reduce", batch)
        found: list[list[Result]] = [_at(measured, where) or [] for measured in sizes]
        cells = [" ".join(f"{each['share_of_busy']:.1%}" for each in devices) or "-" for devices in found]
        yield f"all-reduce, share of busy time by device, batch {batch}", cells


def _keys(sizes: list[Result], *path: str) -> list[str]:
    return list(dict.fromkeys(key for measured in sizes for key in _at(measured, path) or {}))


def _at(measured: Result, path: Sequence[str]) -> Any:
    """What lies at a path of keys; None where any of them is missing."""
    found: Any = measured
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found
