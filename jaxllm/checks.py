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
