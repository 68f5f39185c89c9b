import json
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from tiny_llm.errors import TokenizerError
from tiny_llm.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
FOLDERS = ("llama_tied", "llama_llama3rope_bias", "qwen2", "gemma")
ORACLES = {name: Tokenizer.from_folder(DATA / name) for name in FOLDERS}
FIELD_CASE_13 = "👋🏽 wörld 👩‍👩‍👧‍👦 日本語 ďábelské"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def pieces(tokenizer, ids):
    detokenizer = tokenizer.detokenizer()
    found = [*map(detokenizer.add, ids), detokenizer.finish()]
    assert detokenizer.text == "".join(found)
    return found


@pytest.mark.parametrize("name", FOLDERS)
@given(ids=st.lists(st.integers(0, 383), max_size=40))
@settings(max_examples=300, deadline=None)
def test_random_ids_stream_to_what_they_decode_to(name, ids):
    assert "".join(pieces(ORACLES[name], ids)) == ORACLES[name].decode(ids)


# Ids 0 to 200 of the tiny vocabularies are specials and mostly single bytes.
@pytest.mark.parametrize("name", FOLDERS)
@given(ids=st.lists(st.integers(0, 10) | st.integers(120, 260), max_size=30))
@settings(max_examples=300, deadline=None)
def test_random_bytes_stream_to_what_they_decode_to(name, ids):
    assert "".join(pieces(ORACLES[name], ids)) == ORACLES[name].decode(ids)


@pytest.mark.parametrize("name", FOLDERS)
@given(text=st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_text_streams_to_itself_without_half_characters(name, text):
    tokenizer = ORACLES[name]
    ids = tokenizer.encode(text)
    found = pieces(tokenizer, ids)
    assert "".join(found) == tokenizer.decode(ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in found)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_prefix_of_a_hard_text_streams_exactly(name):
    tokenizer = ORACLES[name]
    ids = tokenizer.encode(FIELD_CASE_13)
    for end in range(len(ids) + 1):
        *early, last = pieces(tokenizer, ids[:end])
        assert "".join(early) + last == tokenizer.decode(ids[:end])
        assert REPLACEMENT not in "".join(early)
        assert FIELD_CASE_13.startswith("".join(early))


@pytest.mark.smollm2
def test_the_default_model_streams_exactly(smollm2_gguf):
    from tiny_llm.gguf_file import GGUFFile

    tokenizer = Tokenizer.from_gguf(GGUFFile(smollm2_gguf).metadata)
    ids = tokenizer.encode(FIELD_CASE_13)
    for end in range(len(ids) + 1):
        *early, last = pieces(tokenizer, ids[:end])
        assert "".join(early) + last == tokenizer.decode(ids[:end])
        assert FIELD_CASE_13.startswith("".join(early))

    @given(ids=st.lists(st.integers(0, 300) | st.integers(0, 49151), max_size=40))
    @settings(max_examples=500, deadline=None)
    def streams_like_decode(ids):
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)

    streams_like_decode()


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("text", [" leading", "  x", "   ", "\n x", " ", "a  b"])
def test_leading_spaces_survive(name, text):
    ids = ORACLES[name].encode(text)
    assert "".join(pieces(ORACLES[name], ids)) == text


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("text", ["a\ufffdb", "\ufffd", "é\ufffd\ufffd世"])
def test_a_genuine_replacement_character_survives(name, text):
    ids = ORACLES[name].encode(text)
    assert "".join(pieces(ORACLES[name], ids)) == text


def test_special_tokens_in_the_middle_are_skipped_even_inside_a_character():
    tokenizer = ORACLES["qwen2"]
    ids = tokenizer.encode("世é")
    mixed = [part for token_id in ids for part in (2, token_id, 0)]
    assert "".join(pieces(tokenizer, mixed)) == "世é"


def test_text_is_released_as_soon_as_it_is_certain():
    tokenizer = ORACLES["llama_tied"]
    byte_ids = [tokenizer.backend.token_to_id(f"<0x{b:02X}>") for b in "é".encode()]
    letter = tokenizer.backend.token_to_id("e")
    found = pieces(tokenizer, [letter, *byte_ids, letter, letter])
    assert found == ["e", "", "", "ée", "e", ""]
    # One bad byte turns the whole run into U+FFFD, so nothing of it came early.
    found = pieces(tokenizer, [letter, *byte_ids, byte_ids[0], letter])
    assert found == ["e", "", "", "", REPLACEMENT * 3 + "e", ""]


def test_finishing_twice_adds_nothing_and_adding_afterwards_is_refused():
    detokenizer = ORACLES["qwen2"].detokenizer()
    assert detokenizer.add(ORACLES["qwen2"].encode("你")[0]) == ""
    assert detokenizer.finish() == REPLACEMENT
    assert detokenizer.finish() == ""
    assert detokenizer.text == REPLACEMENT
    with pytest.raises(TokenizerError, match="finished"):
        detokenizer.add(5)


def test_streams_of_one_tokenizer_are_independent():
    tokenizer = ORACLES["qwen2"]
    ids = tokenizer.encode(FIELD_CASE_13)
    first, second = tokenizer.detokenizer(), tokenizer.detokenizer()
    for token_id in ids:
        first.add(token_id)
        second.add(ids[0])
    assert first.text + first.finish() == FIELD_CASE_13


@pytest.mark.parametrize("name", ["llama_tied", "qwen2"])
def test_a_long_stream_costs_the_same_per_token(name):
    def seconds(count):
        detokenizer = ORACLES[name].detokenizer()
        start = time.perf_counter()
        for index in range(count):
            detokenizer.add(100 + index % 280)
        return time.perf_counter() - start

    seconds(1000)
    short, long = min(seconds(2000) for _ in range(3)), seconds(40_000)
    assert long < 20 * short * 5  # decoding all again each time would be 400 times


# Decoders other than those of the oracles

WORDS = ["▁", "▁a", "b▁▁", "<0xE4>", "<0xB8>", "<0x96>", "<0x41>", "é", " ", "  c"]
WORDS += ["<0xe4>", "<0x1>", "Ġx", "aab", "<s>", "<tool> x"]


def build(decoder):
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="é"))
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["<tool> x"])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend)


STREAMABLE = [
    None,
    decoders.ByteFallback(),
    decoders.ByteLevel(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
    decoders.Replace("aa", "b"),
    decoders.Metaspace(),
    decoders.Metaspace(prepend_scheme="never"),
    decoders.Metaspace(prepend_scheme="first"),
    decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]),
    decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    ),
    decoders.Sequence(
        [
            decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()]),
            decoders.Fuse(),
            decoders.Replace(" ", "_"),
            decoders.Strip("_", 1, 0),
        ]
    ),
]


@pytest.mark.parametrize("index", range(len(STREAMABLE)))
@given(ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=20))
@settings(max_examples=200, deadline=None)
def test_each_decoder_streams_to_what_it_decodes_to(index, ids):
    tokenizer = build(STREAMABLE[index])
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Strip(" ", 0, 1), "Strip"),
        (decoders.Replace(tokenizers.Regex("a+"), ""), "Replace"),
        (decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]), "ByteFallback"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("aa", "b")]), "Replace"),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused_by_name(decoder, named):
    with pytest.raises(TokenizerError, match=named):
        build(decoder).detokenizer()


def test_no_text_comes_later_than_from_the_oracle():
    for case in json.loads((DATA / "qwen2/tokenizer_golden.json").read_text("utf-8")):
        if case["kind"] != "encode":
            continue
        ours, theirs = "", ""
        for piece, expected in zip(
            pieces(ORACLES["qwen2"], case["ids"]), case["stream_pieces"], strict=True
        ):
            ours, theirs = ours + piece, theirs + expected
            assert ours.startswith(theirs)
        assert ours == theirs
