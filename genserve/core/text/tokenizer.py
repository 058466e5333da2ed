"""Text to token ids and back, over an already loaded `transformers` tokenizer.

Owns the mapping between ids and the exact bytes each id stands for, which incremental decoding and
log-probability records need. Knows nothing of engines, requests or HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from genserve.core.errors import ConfigError, InvalidRequest

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A thin wrapper over a Hugging Face fast tokenizer (or a bare `tokenizers.Tokenizer`).

    `hf_tokenizer` stays the caller's; truncation and padding that it came with are turned off.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self._backend = getattr(hf_tokenizer, "backend_tokenizer", hf_tokenizer)
        if not hasattr(self._backend, "to_str"):
            raise ConfigError(f"{type(hf_tokenizer).__name__} is no fast tokenizer (no tokenizer.json form)")
        # Files may carry a length limit or padding from training; a prompt is never cut in silence.
        if self._backend.truncation is not None:
            self._backend.no_truncation()
        if self._backend.padding is not None:
            self._backend.no_padding()
        description = json.loads(self._backend.to_str())
        added = description.get("added_tokens") or []
        special = {int(token["id"]) for token in added if token["special"]}
        special.update(int(i) for i in getattr(hf_tokenizer, "all_special_ids", ()))
        self.special_ids: frozenset[int] = frozenset(special)
        self._vocab_size = int(self._backend.get_vocab_size(with_added_tokens=True))
        self._pieces = _piece_decoder(description.get("decoder"))
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Number of known ids, added tokens included. A model's own vocabulary may be padded beyond it."""
        return self._vocab_size

    @property
    def eos_token_id(self) -> int | None:
        return getattr(self._hf, "eos_token_id", None)

    @property
    def bos_token_id(self) -> int | None:
        return getattr(self._hf, "bos_token_id", None)

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._hf, "chat_template", None))

    @property
    def hf(self) -> Any:
        """The wrapped object, for grammar libraries that want it."""
        return self._hf

    def encode(self, text: str, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """Token ids of `text`. Text that is no valid Unicode is an `InvalidRequest` of `field`."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                field, f"is not valid Unicode (lone surrogate at character {error.start})"
            ) from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of the conversation, ending where the assistant's answer begins."""
        if not self.has_chat_template:
            raise InvalidRequest("messages", "the model's tokenizer has no chat template; use completions")
        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise whatever their authors chose
            raise InvalidRequest("messages", f"the model's chat template refused them: {error}") from error
        return self.encode(text, add_special_tokens=False, field="messages")

    def decode(self, token_ids: Sequence[int], *, continues: bool = False) -> str:
        """The text of `token_ids`, special tokens hidden: what the incremental detokenizer streams.

        `continues` says that other text comes before, so that a leading space is kept.
        """
        from genserve.core.text.detokenizer import Detokenizer

        detokenizer = Detokenizer(self, continues=continues)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def decode_window(self, token_ids: Sequence[int]) -> str:
        """The tokenizer's own decoding of a few tokens, for decoders that need their neighbours."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    @property
    def is_bytewise(self) -> bool:
        """Whether every token stands for fixed bytes, whatever its neighbours."""
        return self._pieces is not None

    @property
    def strips_first(self) -> str:
        """What the decoder drops where a text begins: "" nothing, "one" leading space, or "all" of them."""
        return self._pieces.strips_first if self._pieces else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token as plain text (special tokens too); empty for unknown ids."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            if token is None:
                found = b""
            elif self._pieces is not None:
                found = self._pieces.to_bytes(token)
            else:
                found = self._backend.decode([token_id], skip_special_tokens=False).encode()
            self._bytes[token_id] = found
        return found


class _Pieces:
    """Context-free decoding: a token's bytes depend on the token alone (and on being the very first)."""

    def __init__(
        self,
        byte_fallback: bool,
        replacements: list[tuple[str, str]],
        strips_first: str,
        *,
        byte_level: bool = False,
    ) -> None:
        self.strips_first = strips_first
        self._byte_fallback = byte_fallback
        self._byte_level = _byte_level_alphabet() if byte_level else None
        self._replacements = replacements

    def to_bytes(self, token: str) -> bytes:
        if self._byte_level is not None:
            try:
                return bytes([self._byte_level[char] for char in token])
            except KeyError:  # an added token, kept as plain text
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if match:
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _piece_decoder(decoder: Mapping[str, Any] | None) -> _Pieces | None:
    """The context-free form of a `tokenizers` decoder description, or None if it has none."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Pieces(False, [], "", byte_level=True)
    if kinds in (["Metaspace"], ["ByteFallback", "Metaspace"]):
        scheme = steps[-1].get("prepend_scheme", "always")
        replacements = [(steps[-1]["replacement"], " ")]
        return _Pieces(len(kinds) == 2, replacements, "" if scheme == "never" else "all")
    replacements = []
    others: list[Mapping[str, Any]] = []
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        else:
            others.append(step)
    kinds = [step["type"] for step in others]
    byte_fallback = "ByteFallback" in kinds
    rest = [kind for kind in kinds if kind != "ByteFallback"]
    if rest in ([], ["Fuse"]):
        return _Pieces(byte_fallback, replacements, "")
    if rest == ["Fuse", "Strip"]:
        strip = others[-1]
        if (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0):
            return _Pieces(byte_fallback, replacements, "one")
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet
