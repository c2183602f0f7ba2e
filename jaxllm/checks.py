"""Checks of user input that several records share."""

import operator
from typing import Any


def integer(name: str, value: Any) -> int:
    """`value` as an int; TypeError that names the argument for anything else, booleans and 1.0 included."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


def real(name: str, value: Any) -> float:
    """`value` as a float; TypeError that names the argument for what is no number, ValueError for one too large."""
    if isinstance(value, bool | str | bytes):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except TypeError:
        raise TypeError(f"{name} must be a number, not {value!r}") from None
    except OverflowError:
        raise ValueError(f"{name} must be finite; got a number that no float can hold") from None
