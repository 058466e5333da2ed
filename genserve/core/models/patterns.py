"""Which regexes the grammar library can take without dying of them. Plain Python.

The library recurses on groups without a bound of its own. Knows nothing of schemas and tokens.
"""

from __future__ import annotations

import re

MAX_REGEX_CHARS = 8192
MAX_REGEX_DEPTH = 64
# Bounds compiling: each optional or repeated part multiplies the places a match can be in.
MAX_REGEX_REPEATS = 32

# An escape, a whole class (an unclosed one ends with the text), or a character that counts.
# Whatever is read wrongly here is read as more parentheses than there are, never as fewer.
_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{[\d,\s]*\}|[()?*+]", re.DOTALL)


def check_regex(text: str) -> None:
    """`ValueError` naming the limit if the regex is too long, too deep or repeats too often."""
    if len(text) > MAX_REGEX_CHARS:
        raise ValueError(f"a regex may have {MAX_REGEX_CHARS} characters at most")
    depth = 0
    for part in _PART.findall(text):
        depth = depth + 1 if part == "(" else max(0, depth - (part == ")"))
        if depth > MAX_REGEX_DEPTH:
            raise ValueError(f"a regex may nest {MAX_REGEX_DEPTH} groups at most")
    if num_regex_repeats(text) > MAX_REGEX_REPEATS:
        raise ValueError(f"a regex may have {MAX_REGEX_REPEATS} repetitions (?, *, +, {{}}) at most")


def num_regex_repeats(text: str) -> int:
    """How many parts of the regex are optional or repeated."""
    return sum(part in ("?", "*", "+") or part[0] == "{" for part in _PART.findall(text))
