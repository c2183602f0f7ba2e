"""What a request's output has to follow."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one constraint on the output, in vLLM's names.

    Attributes:
        json: a JSON schema, as text or as a dict; kept as text.
        regex: a regular expression (Rust's syntax: no look-around, no back references) for the whole output.
        choice: texts, one of which is the output.
        grammar: a grammar in Lark's syntax or in GBNF ("root ::= ...").
        json_object: True for any JSON object.
        disable_any_whitespace: JSON without whitespace between its parts.
        disable_additional_properties: objects of the schema have no properties but those it names, unless it says so.
        whitespace_pattern: regular expression of the whitespace allowed between the parts of JSON.

    Raises:
        TypeError: for a value of the wrong type.
        ValueError: if not exactly one constraint is given, or one is empty or no JSON.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}; got {', '.join(given) or 'none'}"
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"structured_outputs.{name} must be a text, not {value!r:.80}")
            if value == "":
                raise ValueError(f"structured_outputs.{name} must be a text of at least one character; got ''")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"structured_outputs.{name} must be True or False, not {getattr(self, name)!r:.80}")
        if self.json_object not in (None, True):
            raise ValueError(f"structured_outputs.json_object must be True, or left out; got {self.json_object!r:.80}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choice(self.choice))
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


def _choice(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise TypeError(f"structured_outputs.choice must be a list of texts, not {value!r:.80}")
    texts = tuple(value)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"structured_outputs.choice must be a list of texts, not {value!r:.80}")
    if not texts or not all(texts):
        raise ValueError(
            f"structured_outputs.choice must be texts of at least one character, at least one; got {value!r}"
        )
    return texts


def _schema(value: Any) -> str:
    """A schema as text with its keys in their order, which is the order of the properties in the output."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"structured_outputs.json must be a JSON schema; it is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TypeError(f"structured_outputs.json must be a JSON schema, an object; not {value!r:.80}")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"structured_outputs.json must be a JSON schema; it cannot be written as JSON: {error}"
        ) from error
