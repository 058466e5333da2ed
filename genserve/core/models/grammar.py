"""Constrained output: JSON schema, any JSON object, or a regex, as masks over the next token.

Owns compiling (once per tokenizer and grammar, kept in a least-recently-used cache) and the matcher
that a sampler state carries. Compiling may run on another thread than sampling. The matcher's state is a function of the output token ids, so it is
rebuilt from them after a preemption. Uses xgrammar; imported on first use.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from torch import Tensor

from genserve.core.errors import ConfigError, ExecutionFailed, InvalidRequest
from genserve.core.models.json_schema import check_schema
from genserve.core.models.patterns import check_regex
from genserve.core.types import Grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Between two elements of JSON: enough to indent by, too little to pad for ever.
_MAX_WHITESPACE_CHARS = 16
_CACHED_GRAMMARS = 64
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_LIBRARY_PREFIX = re.compile(r"^\[[\d:]+\]\s*\S+\.cc:\d+:\s*")


def validate_grammar(grammar: Grammar, field: str = "grammar") -> None:
    """`InvalidRequest(field, ...)` unless the grammar can be enforced. Needs no tokenizer; milliseconds."""
    problem = _problem(grammar)
    if problem is not None:
        raise InvalidRequest(field, problem)


@lru_cache(maxsize=256)
def _problem(grammar: Grammar) -> str | None:
    try:
        if grammar.kind == "json_schema":
            check_schema(grammar.text)
        elif grammar.kind == "regex":
            check_regex(grammar.text)
        _parse(grammar)
    except ValueError as error:
        return str(error)
    except RuntimeError as error:  # how xgrammar says that it cannot take a grammar
        return _LIBRARY_PREFIX.sub("", str(error)).strip()
    return None


def _parse(grammar: Grammar) -> Any:
    import xgrammar

    if grammar.kind == "regex":
        return xgrammar.Grammar.from_regex(grammar.text)
    if grammar.kind == "json_object":
        return xgrammar.Grammar.from_json_schema(
            '{"type": "object"}', max_whitespace_cnt=_MAX_WHITESPACE_CHARS
        )
    return xgrammar.Grammar.from_json_schema(grammar.text, max_whitespace_cnt=_MAX_WHITESPACE_CHARS)


class GrammarCompiler:
    """Compiles grammars for one tokenizer. `vocab_size` is the width of the model's logits.

    Special tokens never match, even where their text would. `ConfigError` if the model has no
    end-of-sequence id: nothing could then end a constrained output.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        import xgrammar

        if not eos_token_ids:
            raise ConfigError("constrained output needs a model with an end-of-sequence token")
        plain = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids)
        )
        # xgrammar takes an empty token for a special one, which matches nothing.
        special = set(tokenizer.all_special_ids)
        special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        text_vocabulary = [b"" if i in special else token for i, token in enumerate(plain.decoded_vocab)]
        # Strings of bounded length would let control characters through unescaped, which JSON forbids.
        json_vocabulary = [b"" if _CONTROL.search(token) else token for token in text_vocabulary]
        self._text_compiler, self._json_compiler = (
            xgrammar.GrammarCompiler(
                xgrammar.TokenizerInfo(
                    vocabulary,
                    xgrammar.VocabType.RAW,
                    vocab_size=vocab_size,
                    stop_token_ids=list(eos_token_ids),
                    add_prefix_space=plain.add_prefix_space,
                ),
                max_threads=1,
                cache_enabled=False,
            )
            for vocabulary in (text_vocabulary, json_vocabulary)
        )
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._cache: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = Lock()  # of the cache alone: nobody waits for another's grammar

    def compile(self, grammar: Grammar) -> Any:
        """The compiled grammar, from the cache if it is there. Any thread; `InvalidRequest` as `matcher`."""
        with self._lock:
            compiled = self._cache.get(grammar)
        if compiled is None:
            validate_grammar(grammar)
            compiler = self._text_compiler if grammar.kind == "regex" else self._json_compiler
            compiled = compiler.compile_grammar(_parse(grammar))
        with self._lock:
            compiled = self._cache.setdefault(grammar, compiled)
            self._cache.move_to_end(grammar)
            if len(self._cache) > _CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return compiled

    def matcher(self, grammar: Grammar, output_token_ids: Sequence[int] = ()) -> GrammarMatcher:
        """A matcher that has accepted `output_token_ids`; `InvalidRequest` for a grammar that cannot be enforced."""
        compiled = self.compile(grammar)
        matcher = GrammarMatcher(compiled, self._vocab_size, self._eos_token_ids)
        for token_id in output_token_ids:
            matcher.accept(token_id)
        return matcher


class GrammarMatcher:
    """Where one sequence is in its grammar. Once the grammar is complete only end-of-sequence is left."""

    def __init__(self, compiled: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._eos_token_ids = eos_token_ids

    def accept(self, token_id: int) -> None:
        """Advance by one output token; `ExecutionFailed` if it does not fit. More ends after the end are fine."""
        if self._matcher.is_terminated() and token_id in self._eos_token_ids:
            return
        if not self._matcher.accept_token(token_id):
            raise ExecutionFailed(f"token {token_id} does not fit the grammar here")

    def mask(self, logits_V: Tensor) -> None:
        """Set the logits of tokens that may not come next to -inf, in place. Does not advance."""
        import xgrammar

        if self._matcher.is_terminated():
            ends = list(self._eos_token_ids)
            kept = logits_V[ends].clone()
            logits_V.fill_(float("-inf"))
            logits_V[ends] = kept
        elif self._matcher.fill_next_token_bitmask(self._bitmask):
            bitmask = self._bitmask.to(logits_V.device)
            xgrammar.apply_token_bitmask_inplace(logits_V.unsqueeze(0), bitmask)
