"""A tokenizer as grammars need it: the bytes of every token, and which tokens are text.

A grammar speaks about the text that a reader of the output sees. So a token's bytes
are those that the tokenizer's decoder makes of it, wherever it stands. Tokens whose
text depends on their place are left out where they would differ (a first token with a
leading space, which SentencePiece's decoders drop).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ..detokenizer import BYTE_TOKEN, byte_level_bytes, decoder_parts
from ..errors import GrammarError
from ..token_masks import Mask, pack
from ..tokenizer import Tokenizer


class GrammarVocabulary:
    """The tokens of one tokenizer, for logits of `size` columns.

    tokens: the bytes of each id, b"" for those that are no text of their own: special
    tokens, EOS ids, unused ids, and ids beyond the tokenizer. Masks are those of
    token_masks.

    Raises GrammarError for tokenizers whose tokens have no bytes of their own, and
    for those without an EOS id: no output could end.
    """

    tokens: list[bytes]
    eos_ids: frozenset[int]
    text: Mask  # the ids that are text
    first: Mask  # those of them that may begin an output
    eos: Mask

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.size = size
        self.eos_ids = frozenset(i for i in tokenizer.eos_token_ids if 0 <= i < size)
        if not self.eos_ids:
            raise GrammarError(
                "the tokenizer names no end-of-sequence token, so an output that "
                "follows a grammar could not end"
            )
        decoder = tokenizer.backend.decoder
        # the decoders pickle as their JSON
        parts = decoder_parts(json.loads(decoder.__getstate__())) if decoder else []
        spell, loses = _speller(parts), _loser(parts)
        added = tokenizer.backend.get_added_tokens_decoder()
        hidden = {token.content for token in added.values() if token.special}

        self.tokens = [b""] * size
        first = []
        for token_id in range(min(size, tokenizer.vocab_size)):
            token = tokenizer.backend.id_to_token(token_id)
            if token is None or token in hidden or token_id in self.eos_ids:
                continue
            self.tokens[token_id] = spell(token)
            if self.tokens[token_id] and not loses(token):
                first.append(token_id)
        self.text = pack((i for i, token in enumerate(self.tokens) if token), size)
        self.first, self.eos = pack(first, size), pack(self.eos_ids, size)


def _speller(parts: list[Mapping[str, Any]]) -> Callable[[str], bytes]:
    """Token -> bytes, as these steps of a decoder do it for a token in the middle."""
    replacements: list[tuple[str, str]] = []
    last: Callable[[str], bytes] | None = None
    fused = False
    for part in parts:
        match part:
            case {"type": "Fuse"}:
                fused = True
            case {"type": "ByteLevel"} if last is None:
                last = byte_level_bytes
                fused = True
            case {"type": "ByteFallback"} if last is None and not fused:
                last = _fallback_bytes
            case {
                "type": "Replace",
                "pattern": {"String": str(old)},
                "content": str(new),
            } if old and last is None and not fused:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)} if not fused:
                replacements.append((old, " "))
            case {"type": "Strip", "start": int(), "stop": 0} if fused:
                pass  # at the beginning of the text: see _loser
            case _:
                raise GrammarError(
                    f"the tokens of this tokenizer have no bytes of their own: its "
                    f"decoder has the step {json.dumps(part, ensure_ascii=False):.200}"
                )
    if last is None and not replacements:
        raise GrammarError(
            "the tokens of this tokenizer have no bytes of their own: it joins them "
            "by spaces"
        )

    def spell(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        return last(token) if last else token.encode()

    return spell


def _fallback_bytes(token: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.encode()


def _loser(parts: list[Mapping[str, Any]]) -> Callable[[str], bool]:
    """Token -> whether the decoder drops a part of it if it is the first."""
    marks: list[str] = []
    for part in parts:
        match part:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": " "}:
                marks.append(old)
            case {"type": "Strip", "content": " ", "start": int(n)} if n > 0:
                return lambda token: token.startswith((" ", "<0x20>", *marks))
            case {"type": "Strip", "start": int(n)} if n > 0:
                return lambda token: True
            case {"type": "Metaspace", "replacement": str(mark)}:
                drops = part.get("prepend_scheme") != "never"
                return lambda token: drops and mark in token
    return lambda token: False
