"""The fields of a request through the whole engine."""

import importlib.util
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from reference import reference_logits, reference_model
from transformers import MinNewTokensLengthLogitsProcessor

from jaxllm import LLM, SamplingParams
from jaxllm.engine.spec import shape_options
from jaxllm.outputs import CompletionOutput
from jaxllm.structured.params import StructuredOutputsParams
from jaxllm.text.detokenizer import _Vocabulary

PROMPT = "The quick"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


def run(llm: LLM, prompt: Any = PROMPT, **fields: Any) -> CompletionOutput:
    return llm.generate([prompt], SamplingParams(**GREEDY | fields), use_tqdm=False)[0].outputs[0]


# --- text


def test_the_stop_text_can_stay(small_llm: LLM) -> None:
    plain = run(small_llm)
    stop = plain.text[7:10]
    end = plain.text.index(stop) + len(stop)
    kept = run(small_llm, stop=stop, include_stop_str_in_output=True)
    assert (kept.text, kept.finish_reason, kept.stop_reason) == (plain.text[:end], "stop", stop)
    token = plain.token_ids[-1]
    first = plain.token_ids.index(token) + 1
    texts = [run(small_llm, stop_token_ids=[token], include_stop_str_in_output=keep).text for keep in (True, False)]
    expected = [small_llm.tokenizer.decode(plain.token_ids[:n]) for n in (first, first - 1)]
    assert texts == expected and texts[0] != texts[1]


def test_ids_without_text(small_llm: LLM) -> None:
    plain, ids = run(small_llm), run(small_llm, detokenize=False)
    assert (ids.text, ids.token_ids) == ("", plain.token_ids)


# --- numbers

EXTREMES = (5e-324, 1e-46, 1.4e-45, 1e-40, 1.2e-38, 1e-30, 1e-18, 1 - 1e-9, 1.0, 2.0, 100.0, 1e18, 1e30, 1e38, 3.5e38,
            1.7e308, float("inf"), float("nan"))  # fmt: skip
"""Those that float32 cannot hold, or not in full, among others."""


@pytest.mark.parametrize(
    ("field", "beside"),
    [
        ("temperature", {}), ("temperature", {"top_k": 5, "top_p": 0.9, "min_p": 0.1}),
        ("top_p", {}), ("top_p", {"top_k": 100}), ("min_p", {}), ("min_p", {"top_p": 0.5}),
        ("presence_penalty", {}), ("frequency_penalty", {}), ("logit_bias", {}), ("logit_bias", {"logprobs": 3}),
        ("repetition_penalty", {"logit_bias": {5: 100, 6: 100}}),
        ("repetition_penalty", {"logit_bias": {5: -100, 6: -100}, "allowed_token_ids": [5, 6]}),
    ],
)  # fmt: skip
def test_a_number_is_refused_or_served(small_llm: LLM, field: str, beside: dict[str, Any]) -> None:
    accepted, base = [], {"temperature": 1.0, "seed": 1, "max_tokens": 5, "ignore_eos": True}
    for number in (*EXTREMES, *(-number for number in EXTREMES), 0.0):
        value = {5: number, 6: number} if field == "logit_bias" else number
        try:
            accepted.append(SamplingParams(**base | beside | {field: value}))
        except ValueError as error:
            assert re.match(rf"{field} must be .*; got .*{re.escape(repr(number))}", str(error))
    outputs = small_llm.generate([PROMPT] * len(accepted), accepted, use_tqdm=False)
    served = [output.outputs[0].finish_reason == "length" for output in outputs]
    assert accepted and not [params for params, well in zip(accepted, served, strict=True) if not well]


# --- several outputs


def test_several_outputs_of_one_prompt(small_llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True)
    output, other = small_llm.generate([PROMPT, "x"], params, use_tqdm=False)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert output.metrics is not None and output.metrics.time_to_first_token
    assert output.prompt == PROMPT and output.request_id.startswith("call") and output.request_id.count("-") == 1
    seeds = [run(small_llm, temperature=1, seed=5 + i, max_tokens=10) for i in range(3)]
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in seeds]
    assert len({tuple(one.token_ids) for one in (*output.outputs, *other.outputs)}) == 6

    deltas = list(small_llm.stream([PROMPT, "x"], params))
    assert [delta.index for delta in deltas if delta.output is not None] in ([0, 1], [1, 0])
    for index, whole in enumerate((output, other)):
        for place in range(3):
            own = [delta for delta in deltas if (delta.index, delta.output_index) == (index, place)]
            assert "".join(delta.text for delta in own) == whole.outputs[place].text
    drawn = small_llm.generate(PROMPT, SamplingParams(n=4, max_tokens=10), use_tqdm=False)[0]
    assert len({tuple(one.token_ids) for one in drawn.outputs}) == 4


def test_special_tokens_can_be_shown(small_llm: LLM) -> None:
    special = small_llm.tokenizer.convert_tokens_to_ids("<|im_start|>")
    fields: dict[str, Any] = {"logit_bias": {special: 100}, "max_tokens": 3}
    assert run(small_llm, **fields).text == ""
    assert run(small_llm, **fields, skip_special_tokens=False).text == "<|im_start|>" * 3


# --- changes to logits, against transformers' processors on the reference's logits


@pytest.fixture(scope="module")
def reference(small_llm: LLM, tiny: Any) -> Any:
    """transformers on the weights of `small_llm`, which every `tiny()` has."""
    return reference_model(tiny())


def expected_greedy(llm: LLM, model: Any, prompt: list[int], count: int, edit: Any) -> list[int]:
    """Greedy tokens where `edit(ids, logits)` changes the reference's logits at each position."""
    ids, known = list(prompt), len(llm.tokenizer)
    for _ in range(count):
        logits = reference_logits(model, np.array([ids]))[0, -1].astype(np.float64)
        logits[known:] = -np.inf
        ids.append(int(edit(ids, logits).argmax()))
    return ids[len(prompt) :]


def penalized(prompt_length: int, repetition: float, presence: float, frequency: float) -> Any:
    def edit(ids: list[int], logits: np.ndarray) -> np.ndarray:
        used, output = np.unique(ids), ids[prompt_length:]
        logits[used] = np.where(logits[used] > 0, logits[used] / repetition, logits[used] * repetition)
        counts = np.bincount(output, minlength=len(logits))
        return logits - frequency * counts - presence * (counts > 0)

    return edit


def kept_back(prompt_length: int, least: int, token: int, ids: list[int], logits: np.ndarray) -> np.ndarray:
    processor = MinNewTokensLengthLogitsProcessor(prompt_length, least, token, "cpu")
    return processor(torch.tensor([ids]), torch.tensor(logits[None]))[0].numpy()


EDITED: dict[str, tuple[dict[str, Any], Any]] = {
    "penalties": (
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}, penalized(40, 1.3, 0.4, 0.3),
    ),
    "bias": ({"logit_bias": {5: -100.0, 17: 2.5}}, lambda ids, x: x + np.isin(np.arange(391), 17) * 2.5
             - np.isin(np.arange(391), 5) * 100),
    "min_tokens": ({"min_tokens": 16, "stop_token_ids": [141]}, lambda ids, x: kept_back(40, 16, 141, ids, x)),
    "allowed": ({"allowed_token_ids": [3, 50, 51, 52, 53, 380]},
                lambda ids, x: np.where(np.isin(np.arange(391), [3, 50, 51, 52, 53]), x, -np.inf)),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITED)
def test_edited_logits(small_llm: LLM, reference: Any, name: str) -> None:
    """Also after a prefix hit, in chunks of 64 with others, and with rows beside it that ask for nothing."""
    fields, edit = EDITED[name]
    prompt = np.random.default_rng(3).integers(0, 300, 40).tolist()
    want = expected_greedy(small_llm, reference, prompt, 16, edit)
    assert run(small_llm, prompt, **fields).token_ids == want
    others = [np.random.default_rng(i).integers(0, 300, 90).tolist() for i in range(3)]
    plain = [run(small_llm, other).token_ids for other in others]
    prompts = [others[0], prompt, others[1], others[2], prompt]
    params = [SamplingParams(**GREEDY | (fields if one is prompt else {})) for one in prompts]
    outputs = small_llm.generate(prompts, params, use_tqdm=False)
    got = [output.outputs[0].token_ids for output in outputs]
    assert got == [plain[0], want, plain[1], plain[2], want]
    assert outputs[1].metrics is not None and outputs[1].metrics.num_cached_tokens == 32
    assert run(small_llm, prompt).token_ids != want  # the seat is free of it again


def test_bad_words(small_llm: LLM) -> None:
    plain = run(small_llm)
    word = small_llm.tokenizer.decode(plain.token_ids[4:6])
    assert word in plain.text
    sequence = small_llm.tokenizer.encode(word.strip(), add_special_tokens=False)
    text = run(small_llm, bad_words=[word])
    ids = text.token_ids
    assert all(ids[i : i + len(sequence)] != sequence for i in range(len(ids)))


def test_logits_processors_by_name(tiny: Any) -> None:
    """Rows that ask for one get it, on the history of their own tokens; the others do not."""
    import jax.numpy as jnp

    def never_again(logits: Any, inputs: Any) -> Any:
        place = jnp.arange(inputs.history.tokens.shape[1])
        used = jnp.where(place < inputs.position[:, None], inputs.history.tokens, logits.shape[1])
        return logits.at[jnp.arange(logits.shape[0])[:, None], used].set(-jnp.inf, mode="drop")

    def only_seven(logits: Any, inputs: Any) -> Any:
        return jnp.where(jnp.arange(logits.shape[1]) == 7, logits, -jnp.inf)

    def broken(logits: Any, inputs: Any) -> Any:
        return jnp.where((inputs.position > 45)[:, None], jnp.nan, logits)

    def sevens(logits: Any, inputs: Any) -> Any:
        return logits.at[:, 7].set(jnp.where(inputs.position % 4 == 0, 100.0, logits[:, 7]))

    processors = {"seven": only_seven, "fresh": never_again, "broken": broken, "sevens": sevens}
    llm = LLM(
        str(tiny()), logits_processors=processors, dtype="float32", max_num_seqs=4,
        max_num_batched_tokens=32, max_model_len=128, num_kvcache_blocks=16, kvcache_block_size=16, enforce_eager=True,
    )  # fmt: skip
    prompt = list(range(20, 60))
    params = [SamplingParams(**GREEDY, logits_processors=names) for names in ((), "seven", "fresh", ())]
    plain, sevens, fresh, again = (o.outputs[0].token_ids for o in llm.generate([prompt] * 4, params, use_tqdm=False))
    assert plain == again and sevens == [7] * 16
    assert len(set(fresh)) == 16 and not set(fresh) & set(prompt) and len(set(plain)) < 16
    params = [SamplingParams(**GREEDY | one) for one in ({}, {"logits_processors": "broken", "logprobs": 0}, {})]
    outputs = llm.generate([prompt] * 3, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [plain, plain[:6], plain]
    assert outputs[1].outputs[0].finish_reason == "error" and len(outputs[1].outputs[0].logprobs) == 6
    assert outputs[1].error is not None and "logits are not finite numbers" in outputs[1].error
    # One that brings back what ends the request and was kept back.
    early: dict[str, Any] = {"stop_token_ids": [7], "min_tokens": 15}
    params = [SamplingParams(**GREEDY, logits_processors="sevens", **fields) for fields in ({}, early)]
    want, got = (output.outputs[0].token_ids for output in llm.generate([prompt] * 2, params, use_tqdm=False))
    assert want[::4] == [7] * 4 and len(set(want)) > 1 and got == want
    with pytest.raises(ValueError, match=r"logits_processors has 'eight'.*'seven', 'fresh', 'broken'"):
        llm.generate([prompt], SamplingParams(logits_processors="eight"), use_tqdm=False)
    for wrong, kind in (([only_seven], TypeError), ({str(i): only_seven for i in range(33)}, ValueError)):
        with pytest.raises(kind, match="logits_processors must be"):
            LLM(str(tiny()), logits_processors=wrong)  # type: ignore[arg-type]


# --- log probabilities, against the reference's log-softmax


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def assert_reported(reported: list[Any], ids: list[int], want: np.ndarray, count: int) -> None:
    """`reported` are those of `ids`, whose log probabilities are `want` `[len(ids), vocab]`."""
    assert len(reported) == len(ids)
    for one, token, row in zip(reported, ids, want, strict=True):
        assert next(iter(one)) == token and count <= len(one) <= count + 1
        order = np.sort(row)[::-1]
        for index, entry in one.items():
            assert abs(entry.logprob - row[index]) < 1e-4
            assert abs(order[entry.rank - 1] - row[index]) < 1e-4
        top = sorted((entry.logprob for entry in one.values()), reverse=True)[:count]
        np.testing.assert_allclose(top, order[:count], atol=1e-4)


def check_logprobs(output: Any, model: Any, logprobs: int | None, prompt_logprobs: int | None) -> None:
    completion, prompt = output.outputs[0], output.prompt_token_ids
    ids = prompt + completion.token_ids
    want = log_softmax(reference_logits(model, np.array([ids]))[0])
    if logprobs is None:
        assert completion.logprobs is None and completion.cumulative_logprob is None
    else:
        assert_reported(completion.logprobs, completion.token_ids, want[len(prompt) - 1 : -1], logprobs)
        chosen = want[np.arange(len(prompt) - 1, len(ids) - 1), completion.token_ids]
        assert abs(completion.cumulative_logprob - chosen.sum()) < 1e-3
    if prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        assert output.prompt_logprobs[0] is None
        assert_reported(output.prompt_logprobs[1:], prompt[1:], want[: len(prompt) - 1], prompt_logprobs)


def test_log_probabilities(small_llm: LLM, reference: Any) -> None:
    """Chunks of 64 tokens, the same prompt twice, drawn tokens and edited logits: those of the model come out."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, n).tolist() for n in (1, 2, 40, 150, 64, 65)]
    prompts += [prompts[3], prompts[2]]
    wanted = [(3, None), (0, 4), (None, 2), (2, 20), (20, 0), (1, 1), (None, 3), (5, None)]
    params = [
        SamplingParams(
            temperature=i % 2, seed=i, max_tokens=8, ignore_eos=True, logprobs=a, prompt_logprobs=b, frequency_penalty=1
        )
        for i, (a, b) in enumerate(wanted)
    ]
    for _ in range(2):  # the second time the prefix cache has all of them
        for output, (a, b) in zip(small_llm.generate(prompts, params, use_tqdm=False), wanted, strict=True):
            check_logprobs(output, reference, a, b)
    text = small_llm.generate(PROMPT, SamplingParams(**GREEDY, logprobs=1), use_tqdm=False)[0].outputs[0]
    chosen = zip(text.logprobs, text.token_ids, strict=True)
    assert "".join(one[token].decoded_token for one, token in chosen) == text.text
    deltas = list(small_llm.stream(PROMPT, SamplingParams(**GREEDY, logprobs=1)))
    assert [one for delta in deltas for one in delta.logprobs or []] == text.logprobs
    stop = text.text[6:8]
    cut = small_llm.generate(PROMPT, SamplingParams(**GREEDY, logprobs=1, stop=stop), use_tqdm=False)[0].outputs[0]
    assert len(cut.logprobs) == len(cut.token_ids) < 16


# --- whatever the schedule


@pytest.mark.parametrize("loops", [False, True], ids=["", "loops, as on a GPU"])
def test_every_field_under_preemption(
    small_llm: LLM, tiny: Any, reference: Any, monkeypatch: pytest.MonkeyPatch, loops: bool
) -> None:
    """A pool far too small for all: the same tokens and log probabilities as with room for everybody, alone."""
    if loops:
        monkeypatch.setattr("jaxllm.engine.spec.shape_options", lambda platform, of=shape_options: of("gpu"))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 300, n).tolist() for n in rng.integers(3, 60, 12)]
    prompts[7] = prompts[3]
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5}, {"logprobs": 2, "prompt_logprobs": 3}, {},
        {"bad_words": ["the", "a"], "temperature": 0.8}, {"allowed_token_ids": list(range(20, 200))},
        {"logit_bias": {9: 3.0}, "presence_penalty": 1.0, "top_p": 0.9, "temperature": 1.2}, {"min_tokens": 5},
    ]  # fmt: skip
    params = [SamplingParams(**GREEDY | {"max_tokens": 40, "seed": i} | kinds[i % 7]) for i in range(12)]
    if importlib.util.find_spec("llguidance") is not None:
        prompts += [prompts[i] for i in range(4)]
        params += structured_params(8)[1::2]
    options = {
        "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 128,
        "kvcache_block_size": 16, "enforce_eager": True,
    }  # fmt: skip
    llm = LLM(str(tiny()), num_kvcache_blocks=14, **options)
    alone = [small_llm.generate([p], s, use_tqdm=False)[0] for p, s in zip(prompts, params, strict=True)]
    together = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats.scheduler.preemptions > 3
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    for outputs in (alone, together):
        for output, one in zip(outputs, params, strict=True):
            check_logprobs(output, reference, one.logprobs, one.prompt_logprobs)


def test_a_seed_gives_the_same_tokens_in_any_company(tiny: Any) -> None:
    """Alone, among 64, in another order, preempted, and after prefix hits."""
    rng = np.random.default_rng(2)
    shared = rng.integers(0, 300, 32).tolist()
    prompts = [(shared if i % 3 == 0 else []) + rng.integers(0, 300, rng.integers(1, 40)).tolist() for i in range(64)]
    params = [
        SamplingParams(
            temperature=0.7 + i / 64, top_k=(0, 40, 90)[i % 3], top_p=(1.0, 0.9)[i % 2], seed=i, max_tokens=20,
            ignore_eos=True,
        )
        for i in range(64)
    ]  # fmt: skip
    options = {"dtype": "float32", "max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 96}
    llm = LLM(str(tiny()), **options, kvcache_block_size=16, num_kvcache_blocks=40, enforce_eager=True)

    def run_all(order: list[int]) -> dict[int, list[int]]:
        outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False)
        return {i: output.outputs[0].token_ids for i, output in zip(order, outputs, strict=True)}

    together = run_all(list(range(64)))
    assert llm.stats.scheduler.preemptions > 0
    hits = llm.stats.scheduler.prefix_hit_tokens
    assert run_all(rng.permutation(64).tolist()) == together
    assert llm.stats.scheduler.prefix_hit_tokens > hits
    assert {i: run_all([i])[i] for i in range(0, 64, 3)} == {i: together[i] for i in range(0, 64, 3)}


# --- refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {391: 1.0}}, "logit_bias has token id 391; the model's ids are 0 to 390"),
        ({"allowed_token_ids": [2, 391]}, "allowed_token_ids has token id 391"),
        ({"allowed_token_ids": [389, 390]}, "no id that the tokenizer knows"),
        ({"allowed_token_ids": [5, 389], "stop_token_ids": [5], "min_tokens": 1}, "all end the request"),
        ({"bad_words": ["abc " * 9]}, "bad_words must have at most 8 tokens"),
        ({"logits_processors": ["mine"]}, "logits_processors has 'mine'.*it has none"),
    ],
)
def test_what_cannot_be_met_is_refused_alone(small_llm: LLM, fields: dict[str, Any], message: str) -> None:
    params = [SamplingParams(**GREEDY), SamplingParams(**GREEDY | {"ignore_eos": True} | fields)]
    with pytest.raises(ValueError, match=f"prompt 1: .*{message}"):
        small_llm.generate(["a", "b"], params, use_tqdm=False)
    outputs = small_llm.generate(["a", "b"], params, use_tqdm=False, on_error="return")
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]


def test_fields_that_exclude_every_token_end_their_request_alone(small_llm: LLM) -> None:
    want = run(small_llm, "y").token_ids
    (token,) = small_llm.tokenizer.encode("a")
    excluded = SamplingParams(
        **GREEDY | {"temperature": 0.7}, allowed_token_ids=[token], bad_words="a", stop="x", top_p=0.9
    )
    outputs = small_llm.generate(["x", "y"], [excluded, SamplingParams(**GREEDY)], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert outputs[0].error is not None and "no token can be chosen" in outputs[0].error
    assert (outputs[0].outputs[0].token_ids, outputs[1].outputs[0].token_ids) == ([], want)


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"stop": "never said"}], ids=str)
def test_a_tokenizer_that_fails_ends_its_request_alone(
    small_llm: LLM, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    fields |= {"frequency_penalty": 2}  # other tokens at every place
    ids, other = run(small_llm, **fields).token_ids, run(small_llm, "y")
    place = next(i for i in range(2, 16) if ids[i] not in other.token_ids + ids[:i])

    def token_bytes(self: Any, index: int, known: Any = _Vocabulary.token_bytes) -> bytes:
        if index == ids[place]:
            raise KeyError("what is that?")
        return known(self, index)

    monkeypatch.setattr(_Vocabulary, "token_bytes", token_bytes)
    params = [SamplingParams(**GREEDY | fields), SamplingParams(**GREEDY)]
    outputs = small_llm.generate([PROMPT, "y"], params, use_tqdm=False)
    assert outputs[1].outputs[0] == other
    failed = outputs[0].outputs[0]
    assert (failed.finish_reason, failed.token_ids) == ("error", ids[:place])
    assert outputs[0].error is not None and "what is that?" in outputs[0].error
    assert failed.logprobs is None or len(failed.logprobs) == place


# --- structured output


CHOICES = ["The sea", "The stars", "Paris"]
STRUCTURES: list[dict[str, Any]] = [
    {"choice": CHOICES},
    {"regex": r"[a-c]{4,9}-\d"},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
     "disable_any_whitespace": True, "disable_additional_properties": True},
]  # fmt: skip


def meets(structure: dict[str, Any], text: str) -> bool:
    if "choice" in structure:
        return text in structure["choice"]
    if "regex" in structure:
        return re.fullmatch(structure["regex"], text) is not None
    return set(json.loads(text)) == {"n"}


def structured_params(count: int) -> list[SamplingParams]:
    """Every other request has a structure, drawn or greedy; the model is biased to end texts where they may end."""
    return [
        SamplingParams(
            temperature=i % 3 / 2, seed=i, max_tokens=60, logit_bias={3: 20.0} if i % 2 else {}, ignore_eos=i % 2 == 0,
            structured_outputs=StructuredOutputsParams(**STRUCTURES[i % 3]) if i % 2 else None,
        )
        for i in range(count)
    ]  # fmt: skip


def test_structured_output_beside_others(small_llm: LLM) -> None:
    pytest.importorskip("llguidance")
    assert small_llm.model_config.eos_token_ids == (3,)
    prompts, params = [f"Prompt {i}" for i in range(12)], structured_params(12)
    alone = [small_llm.generate(p, s, use_tqdm=False)[0].outputs[0] for p, s in zip(prompts, params, strict=True)]
    together = [output.outputs[0] for output in small_llm.generate(prompts, params, use_tqdm=False)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    for i, output in enumerate(together):
        if i % 2:
            assert output.finish_reason == "stop" and meets(STRUCTURES[i % 3], output.text)
        else:
            assert len(output.token_ids) == 60
    assert len({output.text for output in together[1::2]}) > 3


def test_what_no_token_can_follow_ends_alone(small_llm: LLM) -> None:
    """A structure that other fields forbid ends its own request in an error; one that is no structure is refused."""
    pytest.importorskip("llguidance")
    impossible = SamplingParams(
        structured_outputs=StructuredOutputsParams(choice=["a"]), bad_words="a", logprobs=1, max_tokens=9
    )
    outputs = small_llm.generate(["x", "y"], [impossible, SamplingParams(**GREEDY)], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert outputs[0].error is not None and "structured_outputs" in outputs[0].error
    assert outputs[1].outputs[0].token_ids == run(small_llm, "y").token_ids
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(["))
    outputs = small_llm.generate(["x", "y"], [wrong, SamplingParams(**GREEDY)], use_tqdm=False, on_error="return")
    assert outputs[0].error is not None and "structured_outputs.regex cannot be compiled" in outputs[0].error
    assert outputs[1].outputs[0].finish_reason == "length"


def test_nothing_was_compiled_late(small_llm: LLM) -> None:
    assert small_llm.stats.compilations_after_ready == 0
