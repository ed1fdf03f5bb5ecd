from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_skills.state import strict_json

BAD = [
    (b'[{"id": "m_1"},]', 1, 15, "", "a trailing comma"),
    (b'{"a": 1,\n}', 1, 8, "", "a trailing comma"),
    (b"\xef\xbb\xbf[]", 1, 1, "", "a byte order mark"),
    (b'{"a": NaN}', 1, 7, "/a", '"NaN"'),
    (b'{"a": [1, Infinity]}', 1, 11, "/a/1", '"Infinity"'),
    (b'{"a": -Infinity}', 1, 7, "/a", '"-Infinity"'),
    (b'{"a": 1,\n "a": 2}', 2, 2, "/a", 'the key "a" again'),
    (b'[{"x": {"b/c": 1, "b/c": 2}}]', 1, 19, "/0/x/b~1c", 'the key "b/c" again'),
    (b'{"a": "\\ud800"}', 1, 7, "/a", "a lone surrogate \\ud800"),
    (b'{"\\udfff": 1}', 1, 2, "", "a lone surrogate \\udfff"),
    (b'{"a": 1e999}', 1, 7, "/a", "a number too large"),
    (b'{"a": ' + b"9" * 5000 + b"}", 1, 7, "/a", "a number too large"),
    (b'{"a": "x\n"}', 1, 7, "/a", "a broken string"),
    (b'{"a": "\xff"}', 1, 8, "", "byte 0xff"),
    (b"{a: 1}", 1, 2, "", '"a"'),
    (b'{"a" 1}', 1, 6, "/a", '"1"'),
    (b"[01]", 1, 3, "", '"1"'),
    (b"[1] [2]", 1, 5, "", '"["'),
    (b"[1", 1, 3, "", "the end of the file"),
    (b"", 1, 1, "", "the end of the file"),
    (b"{'a': 1}", 1, 2, "", "\"'a'\""),
]


@pytest.mark.parametrize("data, line, column, pointer, found", BAD)
def test_what_is_not_strict_json_is_named_with_its_place(data, line, column, pointer, found):
    with pytest.raises(strict_json.Fault) as caught:
        strict_json.loads(data)
    fault = caught.value
    assert (fault.line, fault.column, fault.pointer, fault.found) == (line, column, pointer, found)
    assert fault.allowed


def test_nesting_of_200_levels_is_refused_and_100_is_not():
    assert strict_json.loads(b"[" * 100 + b"]" * 100)
    with pytest.raises(strict_json.Fault, match="level 101 of nesting"):
        strict_json.loads(b"[" * 200 + b"]" * 200)


def test_nesting_that_breaks_the_usual_parser_is_refused_too():
    with pytest.raises(strict_json.Fault, match="nesting"):
        strict_json.loads(b'{"a":' * 200_000 + b"1" + b"}" * 200_000)


def test_both_halves_of_a_surrogate_pair_are_a_character():
    assert strict_json.loads(b'"\\ud83d\\ude00"') == "\N{GRINNING FACE}"


def test_windows_line_ends_and_spaces_are_read():
    assert strict_json.loads(b'{\r\n "a": [1,\r\n 2]\r\n}\r\n') == {"a": [1, 2]}


def test_the_scanner_knows_the_line_of_every_value():
    scanner = strict_json.Scanner('[\n  {"id": 1,\n   "tags": ["x",\n "y"]}\n]')
    scanner.run()
    assert scanner.line_of("/0/tags/1") == 4
    assert scanner.line_of("/0/tags/7/deep") == 3
    assert scanner.line_of("") == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(json_values, st.sampled_from([None, 2]))
def test_the_scanner_accepts_what_json_writes(value, indent):
    text = json.dumps(value, indent=indent)
    strict_json.Scanner(text).run()
    assert strict_json.loads(text.encode()) == value


@given(st.text(alphabet='{}[]",:0123456789.eE+-\\u truefalsnd\n', max_size=40))
def test_the_scanner_and_the_usual_parser_agree_on_any_text(text):
    try:
        json.loads(text, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))
        usual = True
    except ValueError:
        usual = False
    stricter = ("the key", "a lone", "a number too")
    try:
        strict_json.Scanner(text).run()
        assert usual
    except strict_json.Fault as fault:
        assert not usual or fault.found.startswith(stricter)
