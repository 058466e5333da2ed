"""Token ids to text, as they come: `push` returns only text that can no longer change.

Owns the state of one sequence's decoding. Knows nothing of stop strings, engines or HTTP.

Tokens of byte-level and byte-fallback vocabularies stand for fixed bytes, so decoding is a table
look-up and an incremental UTF-8 decoder: constant work a token, and a U+FFFD that the model really
wrote (three bytes) is told apart from a character whose bytes are still missing. Bytes that can
never become a character come out as U+FFFD, once per maximal ill-formed run, as Unicode advises.
Deviation: `tokenizers` turns a whole run of byte-fallback tokens into U+FFFD when any part of it is
ill-formed, which would take back characters already streamed.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from genserve.core.text.tokenizer import Tokenizer

_MAX_WINDOW_TOKENS = 32
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental decoding of one sequence; special tokens are hidden.

    All pushes plus `flush`, joined, are the sequence's text however the ids were split. `continues`
    says that other text comes before, so a leading space is kept.
    """

    __slots__ = ("_decoder", "_done", "_ids", "_special", "_strip", "_token_bytes", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = _Utf8Decoder("replace") if tokenizer.is_bytewise else None
        self._special = tokenizer.special_ids
        self._token_bytes = tokenizer.token_bytes
        self._strip = "" if continues else tokenizer.strips_first
        # For decoders that look at neighbours: ids kept as context, of which `_done` are already text.
        self._ids: list[int] = []
        self._done = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that they made certain, perhaps empty."""
        if self._decoder is None:
            return "".join([self._push_window(i) for i in token_ids if i not in self._special])
        special, token_bytes = self._special, self._token_bytes
        if self._strip:
            return "".join([self._push_stripping(i) for i in token_ids if i not in special])
        if len(token_ids) == 1:
            token_id = token_ids[0]
            return "" if token_id in special else self._decoder.decode(token_bytes(token_id))
        return self._decoder.decode(b"".join([token_bytes(i) for i in token_ids if i not in special]))

    def flush(self) -> str:
        """The text still held at the end of the sequence. An unfinished character is dropped."""
        if self._decoder is not None:
            self._decoder.reset()
            return ""
        text = self._window_text().rstrip("\ufffd")
        self._ids.clear()
        self._done = 0
        return text

    def _push_stripping(self, token_id: int) -> str:
        data = self._token_bytes(token_id)
        if self._strip and data:
            data = data.replace(b" ", b"") if self._strip == "all" else data.removeprefix(b" ")
            self._strip = ""
        return self._decoder.decode(data)  # type: ignore[union-attr]

    def _window_text(self) -> str:
        """Text of the window's tokens that is not out yet."""
        whole = self._tokenizer.decode_window(self._ids)
        return whole[len(self._tokenizer.decode_window(self._ids[: self._done])) :]

    def _push_window(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._window_text()
        if not text or (text.endswith("\ufffd") and len(self._ids) - self._done < _MAX_WINDOW_TOKENS):
            return ""
        # The tokens just decoded stay as the left context of the next.
        self._ids = self._ids[self._done :]
        self._done = len(self._ids)
        return text
