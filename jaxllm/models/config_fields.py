"""Single fields of `config.json`, checked: each ValueError names the field, its value and what is needed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_LARGEST_FLOAT = 1e18  # products of two numbers of the config, and their reciprocals, stay within float32
_LARGEST_INT = 2**31 - 1  # sizes and positions are int32 on the device


def positive_int(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """An integer that the device can hold; a field that is absent or null is `default`, and needed if that is None."""
    value = config.get(field)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"config.json has no {field}: it is needed, as a positive integer")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST_INT:
        raise ValueError(f"{field}={value!r} in config.json: a positive integer is needed, at most {_LARGEST_INT}")
    return value


def positive_float(config: Mapping[str, Any], field: str, default: float | None = None, prefix: str = "") -> float:
    """A number that float32 can work with; `default` as in `positive_int`, `prefix` stands before the field's name."""
    value = config.get(field)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{prefix}{field} is missing in config.json: a positive number is needed")
    if not _is_number(value) or not 1 / _LARGEST_FLOAT <= value <= _LARGEST_FLOAT:
        raise ValueError(
            f"{prefix}{field}={value!r} in config.json: a positive number is needed, from {1 / _LARGEST_FLOAT:g} to "
            f"{_LARGEST_FLOAT:g}"
        )
    return float(value)


def flag(config: Mapping[str, Any], field: str) -> bool:
    """True or false; a field that is absent or null is false."""
    value = config.get(field)
    if value not in (None, True, False):
        raise ValueError(f"{field}={value!r} in config.json: true or false is needed")
    return bool(value)


def optional_float(parameters: Mapping[str, Any], field: str, prefix: str) -> float | None:
    """A finite number of at least 0, or None where the field is absent or null."""
    value = parameters.get(field)
    if value is None:
        return None
    if not _is_number(value) or value < 0:
        raise ValueError(f"{prefix}{field}={value!r} in config.json: a number of at least 0 is needed")
    return float(value)


def token_ids(field: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """One id or a list of them, all in the vocabulary."""
    ids = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(f"{field}={value!r}: token ids from 0 to {vocab_size - 1} (vocab_size - 1) are needed")
    return ids


def _is_number(value: Any) -> bool:
    """Whether `value` is a finite number: JSON as Python reads it has Infinity, NaN, and integers of any length."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
