"""Token ids to text, one token at a time.

The pieces together are exactly what decoding all ids at once yields (special tokens
skipped). To be exact at a constant cost per token, the tokenizer's decoder is run
as a chain of small stages, each of which holds back only what is still undecided:
the bytes of an unfinished character, or a run of byte tokens (an invalid run becomes
one U+FFFD per byte, so nothing of it is known before it ends). The stages behave as
the decoders of the same names in Hugging Face's `tokenizers` library do.
"""

import codecs
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .errors import TokenizerError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns a stream of token ids into text; special tokens are skipped.

    `token_text` maps an id to its vocabulary entry, or to None when the id has no
    text to show, and raises on ids out of range. `decoder` is the decoder's JSON
    description, None meaning that tokens are joined by spaces. One detokenizer
    serves one stream. Raises TokenizerError for a decoder that cannot be streamed.
    """

    def __init__(
        self,
        token_text: Callable[[int], str | None],
        decoder: Mapping[str, Any] | None,
    ) -> None:
        self._token_text = token_text
        self._stages = _build_stages(decoder)
        self._pieces: list[str] = []
        self._finished = False

    def add(self, token_id: int) -> str:
        """Take the next token and return the text that is now certain, often "".

        Raises TokenizerError for an id out of range or after `finish()`.
        """
        if self._finished:
            raise TokenizerError("this detokenizer is finished; use a new one")
        token = self._token_text(token_id)
        if token is None:
            return ""
        parts = [token]
        for stage in self._stages:
            parts = stage.feed(parts)
        return self._keep("".join(parts))

    def finish(self) -> str:
        """Return the text held back so far; nothing can be added afterwards."""
        if self._finished:
            return ""
        self._finished = True
        parts: list[str] = []
        for stage in self._stages:
            parts = [*stage.feed(parts), *stage.finish()]
        return self._keep("".join(parts))

    @property
    def text(self) -> str:
        """All text returned so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


class _Stage(Protocol):
    def feed(self, tokens: list[str]) -> list[str]:
        """Take tokens, return those that are decided."""

    def finish(self) -> list[str]:
        """Return what was held back."""


class _Map:
    """A change made to each token by itself; also marks the fusing of tokens."""

    def __init__(self, change: Callable[[str], str] | None = None) -> None:
        self._change = change

    def feed(self, tokens: list[str]) -> list[str]:
        return tokens if self._change is None else [self._change(t) for t in tokens]

    def finish(self) -> list[str]:
        return []


class _First:
    """A change made to the first token, and another one to all that follow it."""

    def __init__(
        self, first: Callable[[str], str], rest: Callable[[str], str], *, fused: bool
    ) -> None:
        self._change, self._rest, self._fused = first, rest, fused

    def feed(self, tokens: list[str]) -> list[str]:
        changed = []
        for token in tokens:
            changed.append(self._change(token))
            if not self._fused:
                self._change = self._rest
        return changed

    def finish(self) -> list[str]:
        return []


class _FusedStrip:
    """Removes up to `count` leading characters of the whole text."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._left = content, count

    def feed(self, tokens: list[str]) -> list[str]:
        return [self._strip(token) for token in tokens] if self._left else tokens

    def _strip(self, token: str) -> str:
        kept = _strip_leading(token, self._content, self._left)
        self._left = 0 if kept else self._left - len(token)
        return kept

    def finish(self) -> list[str]:
        return []


class _ByteLevel:
    """Tokens spelt in GPT-2's alphabet of 256 visible characters, one per byte."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, tokens: list[str]) -> list[str]:
        return [self._utf8.decode(b"".join(byte_level_bytes(t) for t in tokens))]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


class _ByteFallback:
    """Runs of `<0xNN>` tokens become characters, or U+FFFD for each of their bytes."""

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, tokens: list[str]) -> list[str]:
        decided: list[str] = []
        for token in tokens:
            if byte := BYTE_TOKEN.fullmatch(token):
                self._run.append(int(byte[1], 16))
            else:
                decided += [*self.finish(), token]
        return decided

    def finish(self) -> list[str]:
        run = bytes(self._run)
        self._run.clear()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return [REPLACEMENT] * len(run)


def _build_stages(decoder: Mapping[str, Any] | None) -> list[_Stage]:
    if decoder is None:
        return [_First(str, lambda token: " " + token, fused=False)]
    stages: list[_Stage] = []
    fused = False  # whether all tokens have been joined into one by now
    for part in decoder_parts(decoder):
        kind = part.get("type")
        stage = _build_stage(part, fused=fused)
        if stage is None:
            raise TokenizerError(
                f"text cannot be streamed with this tokenizer's decoder: {kind} "
                f"({json.dumps(part, ensure_ascii=False)}) is not implemented; "
                "decode() still decodes all ids at once"
            )
        stages.append(stage)
        fused = fused or kind in ("Fuse", "ByteLevel")
    return stages


def decoder_parts(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The decoder's steps in order; sequences of them are laid out flat."""
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [part for inner in decoder["decoders"] for part in decoder_parts(inner)]


def _build_stage(part: Mapping[str, Any], *, fused: bool) -> _Stage | None:
    """One stage; None where the decoder, or its place behind a fuse, is unknown."""
    match part:
        case {"type": "Fuse"}:
            return _Map()
        case {"type": "ByteLevel"} if not fused:
            return _ByteLevel()
        case {"type": "ByteFallback"} if not fused:
            return _ByteFallback()
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            # A longer pattern could lie across two fragments of the fused text.
            if len(old) == 1 or (old and not fused):
                return _Map(lambda token: token.replace(old, new))
        case {"type": "Strip", "content": str(content), "start": int(n), "stop": 0}:
            if fused:
                return _FusedStrip(content, n)
            return _Map(lambda token: _strip_leading(token, content, n))
        case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": scheme}:
            removed = " " if scheme == "never" else ""
            return _First(
                lambda token: token.replace(mark, removed),
                lambda token: token.replace(mark, " "),
                fused=fused,
            )
    return None


def _strip_leading(token: str, content: str, count: int) -> str:
    leading = len(token) - len(token.lstrip(content))
    return token[min(leading, count) :]


BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's visible character for each byte, as in its published encoder.

    Printable Latin-1 characters stand for themselves, the other bytes for the
    characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in sorted(visible)} | {
        chr(0x100 + index): byte for index, byte in enumerate(hidden)
    }


_ALPHABET = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token spelt in GPT-2's alphabet."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token, spelt as plain text
        return token.encode()
