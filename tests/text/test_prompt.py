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


def test_lone_surrogates() -> None:
    tokenizer = byte_level_tokenizer()
    with pytest.raises(ValueError, match=r"the prompt has the lone surrogate U\+D83D at position 4.*errors='replace'"):
        encode_prompt(tokenizer, "the \ud83d sea \udc00")
    with pytest.raises(ValueError, match=r"messages\[1\] has the lone surrogate U\+DC00 at position 0"):
        apply_chat(tokenizer, [*MESSAGES, {"role": "user", "content": "\udc00"}])
    assert encode_prompt(tokenizer, "\U0001f600")


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("hello", TypeError, r"messages='hello': a list"),
        ({"role": "user", "content": "x"}, TypeError, r"messages=\{.*a list"),
        (5, TypeError, r"messages=5: a list"),
        (["hello"], ValueError, r"messages\[0\]='hello': a mapping"),
        ([*MESSAGES, None], ValueError, r"messages\[1\]=None: a mapping"),
        ([{"role": 5, "content": "x"}], ValueError, r"messages\[0\]=.*both text"),
        ([{"role": "user"}], ValueError, r"messages\[0\] has the content None: text is needed"),
        ([*MESSAGES, {"role": "user", "content": 5}], ValueError, r"messages\[1\] has the content 5: text is needed"),
        ([{"role": "user", "content": [{"type": "image"}]}], ValueError, r"messages\[0\] .*images .* not supported"),
        # Text in parts is allowed, but this template adds content to a string: its TypeError is a refusal.
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], ValueError, r"refuses .*TypeError"),
    ],
)
def test_messages_that_are_none(messages, error, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        apply_chat(byte_level_tokenizer(), messages)


def test_parts_of_text_and_tool_calls_without_content() -> None:
    template = "{% for m in messages %}{{ m.content[0].text if m.content else m.tool_calls }}{% endfor %}"
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "the sea"}]},
        {"role": "assistant", "content": None, "tool_calls": "look"},
    ]
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode(apply_chat(tokenizer, messages, chat_template=template)) == "the sealook"


@pytest.mark.parametrize("name", ["tokenize", "return_dict", "return_tensors", "truncation", "messages", "tokenizer"])
def test_arguments_that_collide(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}=False is set by apply_chat itself: leave it out"):
        apply_chat(byte_level_tokenizer(), MESSAGES, **{name: False})


def test_a_new_and_a_continued_message_at_once() -> None:
    with pytest.raises(ValueError, match=r"add_generation_prompt=True .* continue_final_message=True .* give one"):
        apply_chat(byte_level_tokenizer(), MESSAGES, add_generation_prompt=True, continue_final_message=True)


def test_any_argument_without_effect_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_level_tokenizer()
    with caplog.at_level(logging.WARNING):
        apply_chat(tokenizer, MESSAGES, enable_thinking=True, add_generation_prompt=True, tools=None)
        apply_chat(tokenizer, MESSAGES, continue_final_message=True)
        assert not caplog.records
        apply_chat(tokenizer, MESSAGES, thinking=True, tools=[])
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "thinking has no effect",
        "tools has no effect",
    ]


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
