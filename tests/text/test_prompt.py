"""Prompts and chat templates."""

import logging

import pytest
from tiny import byte_level_tokenizer, sentencepiece_tokenizer

from jaxllm.text import apply_chat, encode_prompt

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def test_plain_text_gets_the_bos_that_the_tokenizer_adds() -> None:
    tokenizer = byte_level_tokenizer(adds_bos=True)
    ids = encode_prompt(tokenizer, "the sea")
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    assert encode_prompt(byte_level_tokenizer(), "the sea") == ids[1:]


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(adds_bos=True), sentencepiece_tokenizer()])
def test_a_prompt_in_template_form_keeps_one_bos(tokenizer) -> None:  # type: ignore[no-untyped-def]
    ids = encode_prompt(tokenizer, tokenizer.bos_token + "the sea")
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1


def test_template_as_text_and_as_tokens_are_the_same() -> None:
    tokenizer = byte_level_tokenizer(adds_bos=True)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = apply_chat(tokenizer, MESSAGES)
    assert encode_prompt(tokenizer, text) == ids
    assert ids.count(tokenizer.bos_token_id) == 1


def test_empty_text() -> None:
    assert encode_prompt(byte_level_tokenizer(), "") == []


def test_enable_thinking_is_passed_through() -> None:
    tokenizer = byte_level_tokenizer()
    on, off = (
        apply_chat(tokenizer, MESSAGES, enable_thinking=True),
        apply_chat(tokenizer, MESSAGES, enable_thinking=False),
    )
    assert apply_chat(tokenizer, MESSAGES) == on
    assert tokenizer.decode(off) == tokenizer.decode(on) + "<think>\n\n</think>\n\n"
    assert tokenizer.decode(on).endswith("<|im_start|>assistant\n")


def test_generation_prompt_and_continued_message() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode(apply_chat(tokenizer, MESSAGES, add_generation_prompt=False)).endswith("<|im_end|>\n")
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    assert tokenizer.decode(apply_chat(tokenizer, begun, continue_final_message=True)).endswith("It is")


def test_an_argument_the_template_does_not_know_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with caplog.at_level(logging.WARNING):
        apply_chat(byte_level_tokenizer(), MESSAGES, chat_template=template, enable_thinking=False)
    assert "enable_thinking has no effect" in caplog.text


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        apply_chat(sentencepiece_tokenizer(), MESSAGES)
    with pytest.raises(ValueError, match="messages is empty"):
        apply_chat(byte_level_tokenizer(), [])
    with pytest.raises(ValueError, match=r"messages\[1\]={'content': 'hello'}"):
        apply_chat(byte_level_tokenizer(), [*MESSAGES, {"content": "hello"}])
    with pytest.raises(ValueError, match=r"refuses these messages: roles must alternate"):
        template = "{{ raise_exception('roles must alternate') }}"
        apply_chat(byte_level_tokenizer(), MESSAGES, chat_template=template)
