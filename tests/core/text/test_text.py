"""Decoding and stop strings, token by token, against the tokenizer's own decoding of the whole."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genserve.core.errors import ConfigError, InvalidRequest
from genserve.core.testing import byte_fallback_tokenizer, byte_level_tokenizer
from genserve.core.text.detokenizer import Detokenizer
from genserve.core.text.stops import StopMatcher, StopTables
from genserve.core.text.tokenizer import Tokenizer


def metaspace_backend(scheme="always"):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    pieces = ["<unk>", "▁Hello", "▁world", "▁", "▁▁a", "b", "é"]
    backend = Backend(models.Unigram([(p, -1.0) for p in pieces], unk_id=0, byte_fallback=False))
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return backend


def word_piece_backend():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    vocab = {w: i for i, w in enumerate(["[UNK]", "hello", "##ing", "world", ".", "é", "do"])}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


def converted_backend():
    """Byte fallback with the decoder order that conversions from GGUF write."""
    from tokenizers import decoders

    backend = byte_fallback_tokenizer().backend_tokenizer
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]
    )
    return backend


BYTE_LEVEL = Tokenizer(byte_level_tokenizer())
BYTE_FALLBACK = Tokenizer(byte_fallback_tokenizer())
METASPACE = Tokenizer(metaspace_backend())
METASPACE_NEVER = Tokenizer(metaspace_backend("never"))
CONVERTED = Tokenizer(converted_backend())
WORD_PIECE = Tokenizer(word_piece_backend())
ALL = {
    "byte_level": BYTE_LEVEL,
    "byte_fallback": BYTE_FALLBACK,
    "converted": CONVERTED,
    "metaspace": METASPACE,
    "metaspace_never": METASPACE_NEVER,
    "word_piece": WORD_PIECE,
}
unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def pushed(tokenizer: Tokenizer, ids, split: int, continues: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, continues=continues)
    parts = [detokenizer.push(ids[i : i + split]) for i in range(0, len(ids), split)]
    return [*parts, detokenizer.flush()]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "converted"])
@settings(max_examples=150, deadline=None)
@given(text=unicode_text, split=st.integers(1, 4), cut=st.integers(0, 5))
def test_streamed_text_is_the_full_decode_without_replacement_characters(name, text, split, cut):
    tokenizer = ALL[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = ids[: len(ids) - cut] if cut else ids
    parts = pushed(tokenizer, ids, split)
    whole = b"".join(tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special_ids)
    whole = whole.decode(errors="ignore")
    assert "".join(parts) == (whole.removeprefix(" ") if name != "byte_level" else whole)
    if not cut:
        assert "".join(parts) == getattr(tokenizer.hf, "backend_tokenizer", tokenizer.hf).decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "metaspace_never", "word_piece"])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), split=st.integers(1, 5))
def test_any_ids_decode_as_the_tokenizer_decodes_them(name, data, split):
    tokenizer = ALL[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12))
    backend = getattr(tokenizer.hf, "backend_tokenizer", tokenizer.hf)
    expected = backend.decode(ids, skip_special_tokens=True)
    text = "".join(pushed(tokenizer, ids, split))
    # What is unfinished at the end is dropped, where the tokenizer writes U+FFFD for it.
    assert expected in (text, text + "\ufffd")
    assert text == tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, BYTE_FALLBACK.vocab_size + 3), max_size=12), split=st.integers(1, 5))
def test_any_ids_give_one_text_however_they_are_split(ids, split):
    assert "".join(pushed(BYTE_FALLBACK, ids, split)) == BYTE_FALLBACK.decode(ids)


def test_every_single_added_and_plain_token_has_the_tokenizers_own_text():
    backend = BYTE_LEVEL.hf.backend_tokenizer
    for token_id in range(BYTE_LEVEL.vocab_size):
        whole = backend.decode([token_id], skip_special_tokens=False)
        assert BYTE_LEVEL.token_bytes(token_id).decode(errors="replace") == whole


def test_a_character_appears_only_when_its_last_byte_has_come():
    ids = BYTE_FALLBACK.encode("👋", add_special_tokens=False)[1:]
    assert len(ids) == 4
    assert pushed(BYTE_FALLBACK, ids, 1) == ["", "", "", "👋", ""]
    assert pushed(BYTE_FALLBACK, ids[:3], 1) == ["", "", "", ""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_a_replacement_character_the_model_wrote_survives(tokenizer):
    ids = tokenizer.encode("a\ufffd", add_special_tokens=False)
    assert "".join(pushed(tokenizer, ids, 1, continues=True)).endswith("a\ufffd")


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace"])
def test_a_leading_space_is_kept_when_text_comes_before(name):
    tokenizer = ALL[name]
    ids = [tokenizer._backend.token_to_id("▁Hello"), tokenizer._backend.token_to_id("▁world")]
    assert "".join(pushed(tokenizer, ids, 1)) == "Hello world"
    assert "".join(pushed(tokenizer, ids, 1, continues=True)) == " Hello world"


def test_prompts_are_never_cut_or_padded():
    hf = byte_level_tokenizer()
    hf.backend_tokenizer.enable_truncation(4)
    hf.backend_tokenizer.enable_padding(length=8)
    text = "Hello world, hello"
    assert Tokenizer(hf).encode(text) == BYTE_LEVEL.encode(text)
    assert Tokenizer(hf).encode("a") == BYTE_LEVEL.encode("a")


def test_known_decoders_are_table_look_ups_and_others_use_their_neighbours():
    assert [name for name in ALL if not ALL[name].is_bytewise] == ["word_piece"]


def test_special_tokens_are_hidden_and_unknown_ids_are_empty():
    assert BYTE_LEVEL.decode([1, *BYTE_LEVEL.encode("hi"), 2, 99_999]) == "hi"
    assert BYTE_LEVEL.token_bytes(2) == b"<|im_end|>"


def test_chat_template_gives_ids_and_refuses_by_name():
    ids = BYTE_LEVEL.apply_chat_template([{"role": "user", "content": "hi"}])
    assert ids[0] == 1 and 2 in ids
    assert BYTE_LEVEL.hf.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(InvalidRequest, match="no such role: tool") as refused:
        BYTE_LEVEL.apply_chat_template([{"role": "tool", "content": "hi"}])
    assert refused.value.field == "messages"
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(byte_level_tokenizer(chat_template=None)).apply_chat_template([])
    with pytest.raises(InvalidRequest, match="valid Unicode"):
        BYTE_LEVEL.encode("a\ud800")
    with pytest.raises(ConfigError):
        Tokenizer(object())


def naive_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ended = [s for s in stops if text[:end].endswith(s)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab ", max_size=24),
    stops=st.lists(st.text("ab ", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=6),
)
def test_stops_are_found_however_the_text_is_split_and_little_is_held(text, stops, cuts):
    shown, matcher = "", StopMatcher(StopTables(stops))
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    for start, end in itertools.pairwise(edges):
        shown += matcher.push(text[start:end])
        seen = text[:end]
        if matcher.matched is None:
            held = seen[len(shown) :]
            longest = max(
                (k for s in stops for k in range(len(s)) if seen.endswith(s[:k])), default=0
            )  # the longest proper prefix of a stop that ends the text so far
            assert shown + held == seen and len(held) == longest
    expected, matched = naive_stop(text, stops)
    assert shown + matcher.flush() == expected
    assert matcher.matched == matched
    assert matcher.matched is None or matcher.push("more") == ""
