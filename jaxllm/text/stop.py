"""Stop strings in streamed text."""

from collections.abc import Sequence


class StopStrings:
    """Watches a stream of text for stop strings and holds back what could become one.

    The stop string that is complete first wins; of several complete at the same character the one that begins first
    (the longest). Where the text is cut into pieces makes no difference. `include` keeps the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if isinstance(stops, str):
            raise TypeError(f"stops={stops!r} is a single string: give a list of strings")
        if any(not stop for stop in stops):
            raise ValueError(
                f"stops={list(stops)!r} holds an empty string, which would stop before the first character"
            )
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take the next piece; return (text that is safe to show, the stop string that ended the stream or None).

        After a match nothing more comes out: the rest of the text is dropped, and the match is returned again.
        """
        if self._matched is not None:
            return "", self._matched
        held = len(self._held)
        text = self._held + text
        # A match ends in the new text; what was passed by may hold complete ones.
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, held - len(stop) + 1))) >= 0
        ]
        if matches:
            end, start, self._matched = min(matches)
            self._held = ""
            return text[: end if self._include else start], self._matched
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def pass_by(self, text: str) -> str:
        """Take text in which stop strings do not count; return what is safe to show.

        One that only begins in it still counts: its beginning is held back.
        """
        text = self._held + text
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once the stream is over without a match."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
