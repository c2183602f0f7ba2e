"""Stop strings: the same result however the text is cut into pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.text import StopStrings


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    watcher = StopStrings(stops, include)
    shown = ""
    for piece in pieces:
        text, stop = watcher.feed(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + watcher.flush(), None


def brute_force(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("abc", max_size=5), max_size=8),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_equals_brute_force_on_the_whole_text(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include) == brute_force("".join(pieces), stops, include)


def test_holds_back_only_what_could_become_a_stop_string() -> None:
    watcher = StopStrings(["</s>", "END"])
    assert watcher.feed("Hello <") == ("Hello ", None)
    assert watcher.feed("/b> EN") == ("</b> ", None)
    assert watcher.feed("D and more") == ("", "END")
    assert watcher.feed("dropped") == ("", "END")
    assert watcher.flush() == ""


def test_a_beginning_that_never_ends_comes_out_at_the_flush() -> None:
    watcher = StopStrings(["END"])
    assert watcher.feed("EN") == ("", None)
    assert watcher.flush() == "EN"


def test_without_stop_strings_text_passes_through() -> None:
    assert StopStrings([]).feed("abc") == ("abc", None)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="empty string"):
        StopStrings(["a", ""])
    with pytest.raises(TypeError, match="single string"):
        StopStrings("END")
