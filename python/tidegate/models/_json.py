"""JSON text that people and other programs wrote, read strictly, and values in error messages.

The C++ library's twin is src/models/json.cpp: both accept the same texts and show values alike.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ..nn._common import MAX_JSON_DEPTH

# Messages quote what was given, which can be as long as a file.
_LONGEST_NUMBER = 40
_LONGEST_STRING = 80
_INT64 = range(-(2**63), 2**63)
# Strings, which may hold brackets, or a bracket. A string without an end reaches to the text's, so
# that none is looked at twice.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


class JsonError(ValueError):
    """What is wrong with a JSON text, in one line that begins "not valid JSON: "."""

    def __init__(self, what: str) -> None:
        super().__init__(f"not valid JSON: {what}")


def parse_json(text: str) -> Any:
    """The value of `text`.

    Stricter than Python's json: NaN and Infinity, which JSON does not have, a key that an object
    has twice, a number beyond 64 bits, half a surrogate pair, and more than MAX_JSON_DEPTH lists
    and objects in one another are JsonErrors too.
    """
    _check_depth(text)
    try:
        value = json.loads(
            text,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
            object_pairs_hook=_object,
        )
    except json.JSONDecodeError as error:
        raise JsonError(str(error)) from error
    if "\\u" in text:
        _check_strings(value)
    return value


def shown(value: object) -> str:
    """A value as error messages show it: in ASCII, and cut where it is long."""
    if isinstance(value, str):
        rest = "..." if len(value) > _LONGEST_STRING else ""
        return ascii(value[:_LONGEST_STRING]) + rest
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "a dictionary"
    if isinstance(value, int) and value not in _INT64:
        return _shown_integer(value)
    text = ascii(value)
    return text if len(text) <= _LONGEST_STRING else text[:_LONGEST_STRING] + "..."


def fits_64_bits(value: int) -> bool:
    """Whether C++ has an integer for it."""
    return value in _INT64


def _shown_integer(value: int) -> str:
    # Python refuses to print integers of thousands of digits.
    if value.bit_length() > 4096:
        return "an integer of more than 4096 bits"
    return _cut(str(value))


def _cut(number: str) -> str:
    return number if len(number) <= _LONGEST_NUMBER else number[:_LONGEST_NUMBER] + "..."


def _check_depth(text: str) -> None:
    """Raises JsonError where json.loads() would follow the text by a deep recursion."""
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for token in _TOKEN.finditer(text):
        first = token[0][0]
        if first in "[{":
            depth += 1
        elif first in "]}":
            depth -= 1
        if depth > MAX_JSON_DEPTH:
            raise JsonError(f"nested more than {MAX_JSON_DEPTH} levels deep")


def _parse_int(text: str) -> int:
    if len(text) > len(str(_INT64.start)) or int(text) not in _INT64:
        _refuse_number(text)
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        _refuse_number(text)
    return value


def _refuse_number(text: str) -> None:
    raise JsonError(f"expected numbers of at most 64 bits; got {_cut(text)}")


def _refuse_constant(text: str) -> None:
    raise JsonError(f"{text} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise JsonError(f"key {shown(key)} is twice")
        values[key] = value
    return values


def _check_strings(value: Any) -> None:
    """Raises JsonError for a string that no text can hold: with half a surrogate pair."""
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise JsonError("half a surrogate pair in a string")
    elif isinstance(value, (list, dict)):
        for item in value:
            _check_strings(item)
        if isinstance(value, dict):
            for item in value.values():
                _check_strings(item)
