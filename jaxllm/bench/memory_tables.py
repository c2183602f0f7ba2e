"""The tables of `jaxllm.bench memory`, and what of the claims about the KV cache's size they show to hold."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.bench import memory_cases as cases
from jaxllm.memory.units import MIB
from jaxllm.memory.warmup import TOLERANCE

Result = Mapping[str, Any]
LIVES = (*cases.BUDGETS, *cases.SOAKS)
_MB, _GB = 1e6, 1e9


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds; None where it was not measured.

    Attributes:
        claim: what is claimed.
        holds: whether it does.
        why: the figures.
    """

    claim: str
    holds: bool | None
    why: str

    def __str__(self) -> str:
        word = {True: "holds", False: "FAILS", None: "not measured"}[self.holds]
        return f"- {self.claim}: **{word}** ({self.why})"


def tables(results: Result) -> list[str]:
    """Markdown: the claims, then the figures, then what failed."""
    machine = results["machine"]
    lines = [
        f"{machine['total']:,} bytes for programs ({machine['source']}), jaxllm {machine['jaxllm']}, jax "
        f"{machine['jax']}, {machine['cores']} cores, {machine['date']}; {machine.get('seconds', '?')} s",
        "",
        *map(str, verdicts(results)),
    ]
    for table in (_transients, _lives, _starts, _others):
        lines += ["", *table(results)]
    errors = [
        f"- {name}: {_brief(result)}" for name, result in _parts(results) if "error" in result and name != "crowded"
    ]
    return [*lines, *(["", "Ended early, or with an error:", *errors] if errors else [])]


def complete(results: Result) -> bool:
    """Whether every claim was measured and holds."""
    return all(verdict.holds for verdict in verdicts(results))


def verdicts(results: Result) -> list[Verdict]:
    """The claims of docs/memory.md."""
    return [
        _agreement(results),
        _truth(results),
        *_inside(results),
        _soak(results),
        *(_again(results, names) for names in (cases.SOAKS, cases.STARTS)),
        *_beside(results),
        _cost(results),
    ]


def _parts(results: Result) -> list[tuple[str, Any]]:
    return [(name, result) for name, result in results.items() if name != "machine"]


def _of(results: Result, name: str) -> dict[str, Any]:
    """A result, empty where it is missing; one that failed has what was known of it."""
    return dict(results.get(name, {}))


def _brief(result: Result) -> str:
    """How it failed: what ended it, and the last that it said."""
    lines = str(result.get("error", "missing")).splitlines()
    return lines[0][:200] if len(lines) == 1 else f"{lines[0][:200]} ... {lines[-1][:200]}"


def _programs(results: Result) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that were measured; serving programs that were only checked are left out."""
    for name, result in _parts(results):
        if name in (*cases.TRANSIENTS, *LIVES):
            yield from ((name, program) for program in result.get("programs", []) if program["measured"] is not None)


def _agreement(results: Result) -> Verdict:
    apart = [
        (abs(p["static"] - p["measured"]) / max(p["static"], p["measured"]), name) for name, p in _programs(results)
    ]
    settings = len({name for _, name in apart} - {"soak .95 again"})
    claim = f"measured and compiler within {TOLERANCE:.0%} in at least eight settings"
    if not apart:
        return Verdict(claim, None, "no program")
    most, where = max(apart)
    holds = most <= TOLERANCE and settings >= 8
    return Verdict(claim, holds, f"{len(apart)} programs of {settings} settings, at most {most:.4%} apart ({where})")


def _truth(results: Result) -> Verdict:
    claim, found = "at least 98 % of the largest cache that survives, and not above it", _of(results, "truth")
    if "engine" not in found or (found["fatal"] is None and "error" in found):
        return Verdict(claim, None, _brief(found))
    mine, largest, fatal = found["engine"], found["largest"], found["fatal"]
    bound = largest if fatal is None else max(1, fatal - 1)
    holds = mine <= largest and fatal is not None and mine >= 0.98 * bound
    return Verdict(claim, holds, f"engine {mine}, {largest} survive, {fatal} do not: at least {mine / bound:.2%}")


def _inside(results: Result) -> Iterator[Verdict]:
    for name in (*cases.BUDGETS, cases.SOAKS[0]):
        life = _of(results, name)
        claim = f"inside the budget at {life.get('utilization', name)}, idle, ready and under load"
        if "used_after" not in life:
            # An engine that runs out of memory breaks the claim; one that was stopped says nothing.
            yield Verdict(claim, False if "RESOURCE_EXHAUSTED" in life.get("error", "") else None, _brief(life))
            continue
        most = max(life[key] for key in ("used_idle", "card_ready", "used_most", "card_after"))
        served = life["finished"] == life["asked"]
        yield Verdict(
            claim,
            most <= life["limit"] and served and life["kv_bytes_match"],
            f"{most:,} of {life['limit']:,} bytes, {life['finished']} of {life['asked']} requests",
        )


def _soak(results: Result) -> Verdict:
    first = _of(results, cases.SOAKS[0])
    claim = "soak at .95: pool full, preempted, bytes in use flat, reported peak not exceeded"
    if "finished" not in first:
        return Verdict(claim, None, _brief(first))
    full = first["preemptions"] > 0 and first["least_free_blocks"] <= first["blocks"] // 100
    # Results with log probabilities, under way for two steps at a time, come and go; nothing stays.
    flat = first["in_use_growth"] is not None and first["in_use_growth"] <= MIB
    flat = flat and first["in_use_spread"] <= 32 * MIB
    done = first["asked"] >= 1000 and first["finished"] == first["asked"]
    return Verdict(
        claim,
        full and flat and done and first["peak_below_report"] >= 0,
        f"{first['finished']} of {first['asked']} requests in {first['steps']} steps, {first['preemptions']} "
        f"preemptions, {first['least_free_blocks']} of {first['blocks']} blocks free at the least, spread "
        f"{first['in_use_spread']} bytes, growth {first['in_use_growth']}, peak {first['peak_below_report']} below "
        "the report",
    )


def _again(results: Result, names: tuple[str, str]) -> Verdict:
    first, second = (_of(results, name) for name in names)
    claim = f"{names[0]}: the same number of blocks in a second process, which compiles nothing"
    if "made" not in second or "blocks" not in first:
        return Verdict(claim, None, _brief(second if "blocks" in first else first))
    made = second["made"]
    told = [
        f"{life['blocks']} blocks of {life.get('fitting', '?')} that fit (bound by {life['bound_by']}), ready in "
        f"{life['startup']:.1f} s"
        for life in (first, second)
    ]
    return Verdict(
        claim,
        first["blocks"] == second["blocks"] and not made["compiled"],
        f"{' and '.join(told)}; the second lowered {made['lowered']} programs, compiled {made['compiled']} and found "
        f"{made['kept']}",
    )


def _beside(results: Result) -> Iterator[Verdict]:
    """Of blocks that fit: what is taken can be the same although they differ (`jaxllm.memory.earlier`)."""
    pair = _of(results, "together")
    counts = [[life.get("fitting") for life in pair.get(when, [])] for when in ("together", "in turn")]
    measured = all(len(count) == 2 and None not in count for count in counts)
    yield Verdict(
        "engines at .35 and .20: the same together and in turn",
        counts[0] == counts[1] if measured else None,
        f"{counts[0]} and {counts[1]}",
    )
    alone = _of(results, "alone").get("fitting")
    for name, claim in (("leaves", "a neighbour that leaves"), ("comes", "a neighbour that comes")):
        blocks = _of(results, name).get("fitting")
        known = alone is not None and blocks is not None
        yield Verdict(
            f"{claim} during warm-up changes nothing", blocks == alone if known else None, f"{blocks}, without {alone}"
        )
    crowd = _of(results, "crowded")
    text = crowd.get("error", "")
    named = f"process {crowd.get('neighbour')}" in text and "gpu_memory_utilization to at most" in text
    yield Verdict(
        "a neighbour that leaves too little is named",
        named if "neighbour" in crowd else None,
        text.splitlines()[0] if text else str(crowd.get("blocks")),
    )
    blocks = [_of(results, "files").get(name, {}).get("fitting") for name in ("one file", "shards")]
    yield Verdict(
        "one safetensors file and shards: the same", blocks[0] == blocks[1] if None not in blocks else None, f"{blocks}"
    )
    late = _of(results, "late")
    said = [note for note in late.get("notes", []) if "XLA_CLIENT_MEM_FRACTION" in note]
    yield Verdict(
        "JAX's pool taken before the engine: sized from it, with the variable to set",
        bool(said) if "blocks" in late else None,
        (said or [f"{late.get('blocks')} blocks, no note"])[0][:300],
    )
    trials = _of(results, "why").get("trials", [])
    survive = [trial["survives"] for trial in trials]
    yield Verdict(
        "mistakes 2 to 4 run out of memory, the right reserve does not",
        # Mistake 1 can go either way: it contains what loading took, and lacks what the allocator cannot hand out.
        survive[:1] == [True] and survive[2:] == [False] * 3 if trials else None,
        f"{survive}",
    )


def _cost(results: Result) -> Verdict:
    """The measurement alone counts; told beside it is its cost with its programs' share of the wait for them."""
    claim = "measuring takes less than a quarter of the start-up"
    alone, whole = {}, {}
    for name in LIVES:
        life = _of(results, name)
        if "startup" in life:
            alone[name] = life["measure_seconds"] / life["startup"]
            whole[name] = life["measuring_cost"] / life["startup"]
    if not alone:
        return Verdict(claim, None, "no start")
    told = ", ".join(f"{name} {alone[name]:.0%} and {whole[name]:.0%}" for name in alone)
    holds = max(alone.values()) < 0.25
    return Verdict(claim, holds, f"alone, and with its programs' share of the wait for them: {told}")


def _transients(results: Result) -> Iterator[str]:
    yield "| setting | program | compiler MB | measured MB | serving MB | peak - in use MB | predicted MB |"
    yield "|---|---|---|---|---|---|---|"
    for name, program in _programs(results):
        sizes = [program[key] for key in ("static", "measured", "serving", "naive")]
        cells = ["-" if size is None else f"{size / _MB:,.3f}" for size in sizes]
        yield f"| {name} | {_short(program['name'])} | {' | '.join(cells)} | {results[name]['predicted'] / _MB:,.0f} |"


def _short(program: str) -> str:
    """A program's name without all that its sampler has."""
    size, _, sampler = program.partition(" ")
    return f"{size}, log probabilities" if "logprobs" in sampler else size


def _lives(results: Result) -> Iterator[str]:
    head = ("life", "programs", "limit", "idle", "ready", "most under load", "outside, ready and after", "fit")
    yield f"| {' | '.join(head)} | blocks | bound by |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name in LIVES:
        life = _of(results, name)
        if "used_ready" in life:
            sizes = [f"{life[key]:,}" for key in ("limit", "used_idle", "used_ready", "used_most")]
            outside = [f"{life[key] / _MB:.0f} MB" for key in ("outside_ready", "outside_after") if key in life]
            cells = [name, life["num_programs"], *sizes, " and ".join(outside)]
            cells += [life.get("fitting", "-"), life["blocks"], life["bound_by"]]
            yield f"| {' | '.join(map(str, cells))} |"


def _starts(results: Result) -> Iterator[str]:
    yield "| life | start-up s | waiting for measured programs s | others made | measuring s | load s | steps | notes |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in LIVES:
        life = _of(results, name)
        if "startup" in life:
            startup, waited, measured = (
                f"{life[key]:.1f}" for key in ("startup", "measured_programs_seconds", "measure_seconds")
            )
            rest = [str(life.get(key, "-")) for key in ("serve_seconds", "steps")]
            cells = [startup, waited, str(life["other_programs"]), measured, *rest]
            yield f"| {name} | {' | '.join(cells)} | {'; '.join(life['notes'])} |"


def _others(results: Result) -> Iterator[str]:
    found = _of(results, "truth")
    if "tried" in found:
        tried = ", ".join(f"{blocks} {'runs' if ran else 'does not'}" for blocks, ran in sorted(found["tried"]))
        yield f"Truth at {found.get('utilization', '?')}: engine {found['engine']} blocks; {tried}."
    for trial in _of(results, "why").get("trials", []):
        outcome = "runs" if trial["survives"] else "out of memory"
        yield f"- {trial['name']}: reserve {trial['reserve'] / _MB:,.1f} MB, {trial['blocks']:,} blocks: {outcome}"
