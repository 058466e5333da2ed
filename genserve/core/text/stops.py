"""Stop strings over streamed text: what may be shown, and whether one has been reached.

Owns the text held back for one sequence. Knows nothing of tokens, engines or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_STOP_CHARS = 1024


class StopMatcher:
    """Finds the earliest stop string in a stream, holding back only what may still become one.

    The match that is complete first wins; of those that end together, the longest. The text shown ends
    where the match starts, however the stream was split.
    """

    __slots__ = ("_automata", "_first_chars", "_held", "matched")

    def __init__(self, tables: StopTables) -> None:
        self._automata = [_Prefixes(stop, fallback) for stop, fallback in tables.stops]
        self._first_chars = tables.first_chars
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next text; returns what may be shown. Once `matched` is set nothing more is."""
        if self.matched is not None:
            return ""
        if not self._held:
            for char in self._first_chars:
                if char in text:
                    break
            else:
                return text
        held_before = len(self._held)
        buffer = self._held + text
        for position, char in enumerate(text, held_before + 1):
            ended = [a for a in self._automata if a.advance(char)]
            if ended:
                longest = max(ended, key=lambda a: len(a.stop))
                self.matched = longest.stop
                self._held = ""
                return buffer[: position - len(longest.stop)]
        keep = max(a.state for a in self._automata)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The text still held, at the end of a stream that no stop string ended."""
        held, self._held = self._held, ""
        return held


class StopTables:
    """What matching a request's stop strings needs; made once and shared by all of its sequences."""

    __slots__ = ("first_chars", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple((stop, _fallback(stop)) for stop in stops)
        self.first_chars = tuple({stop[0] for stop in stops})


def _fallback(stop: str) -> tuple[int, ...]:
    """Knuth-Morris-Pratt: of each prefix of `stop`, the length of its longest border."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        length += stop[index] == stop[length]
        table[index] = length
    return tuple(table)


class _Prefixes:
    """`state` is the longest suffix of the stream that is a proper prefix of `stop`."""

    __slots__ = ("_fallback", "state", "stop")

    def __init__(self, stop: str, fallback: tuple[int, ...]) -> None:
        self.stop = stop
        self.state = 0
        self._fallback = fallback

    def advance(self, char: str) -> bool:
        """Take one character; True when it completes the stop string."""
        state = self.state
        while state and char != self.stop[state]:
            state = self._fallback[state - 1]
        state += char == self.stop[state]
        self.state = state
        return state == len(self.stop)
