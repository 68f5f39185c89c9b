import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_llm.errors import TokenizerError
from tiny_llm.gguf_pretokenizers import PRE_TOKENIZERS
from tiny_llm.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
PRE = {"qwen2": "qwen2", "llama_llama3rope_bias": "llama-bpe"}
SENTENCEPIECE = ("llama_tied", "gemma")
PREFIX = "tokenizer.ggml."


def read(name, file):
    return json.loads((DATA / name / file).read_text("utf-8"))


def metadata_of(name):
    """What a converter to GGUF would write for one of the oracles' tokenizers."""
    content = read(name, "tokenizer.json")
    model = content["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    specials = {token["content"] for token in content["added_tokens"]}
    types = [3 if token in specials else 1 for token in tokens]
    config = read(name, "tokenizer_config.json")
    found = {
        "tokens": tokens,
        "token_type": types,
        "add_bos_token": config["add_bos_token"],
        "eos_token_id": tokens.index(config["eos_token"]),
    }
    if config["bos_token"]:
        found["bos_token_id"] = tokens.index(config["bos_token"])
    if name in PRE:
        found |= {"model": "gpt2", "pre": PRE[name]}
        found["merges"] = [" ".join(merge) for merge in model["merges"]]
    else:
        ranks = {"".join(merge): rank for rank, merge in enumerate(model["merges"])}
        unknown = tokens.index(model["unk_token"])
        for index, token in enumerate(tokens):
            if len(token) == 6 and token.startswith("<0x"):
                types[index] = 6
        types[unknown] = 2
        found |= {
            "model": "llama",
            "scores": [-float(ranks.get(token, 1000)) for token in tokens],
            "unknown_token_id": unknown,
            "add_space_prefix": name == "llama_tied",
        }
    return {PREFIX + key: value for key, value in found.items()}


NAMES = (*PRE, *SENTENCEPIECE)
ORACLES = {name: Tokenizer.from_folder(DATA / name) for name in NAMES}
BUILT = {name: Tokenizer.from_gguf(metadata_of(name)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_text_equal_the_oracle(name):
    tokenizer = BUILT[name]
    for case in read(name, "tokenizer_golden.json"):
        if case["kind"] == "encode":
            assert tokenizer.encode(case["text"]) == case["ids"]
            plain = tokenizer.encode(case["text"], add_special_tokens=False)
            assert plain == case["ids_no_special"]
        if case["kind"] in ("encode", "decode_random_ids"):
            decoded = tokenizer.decode(case["ids"], skip_special_tokens=False)
            assert decoded == case["decode"]
            assert tokenizer.decode(case["ids"]) == case["decode_skip_special"]
        if "prompt" in case:
            ids = tokenizer.encode(case["prompt"], add_special_tokens=False)
            assert ids == case["ids"]


WORDS = (
    "the quick  brown\n fox's 12345 don't I'LL 世界 Привет é ﬁ <s> </s> <bos> ... \t"
)


@pytest.mark.parametrize("name", NAMES)
@given(
    text=st.text(max_size=40)
    | st.lists(st.sampled_from(WORDS.split(" ")), max_size=20).map(" ".join)
)
@settings(max_examples=300, deadline=None)
def test_any_text_is_encoded_as_by_the_published_tokenizer(name, text):
    assert BUILT[name].encode(text) == ORACLES[name].encode(text)
    literal = BUILT[name].encode(text, parse_special=False)
    assert literal == ORACLES[name].encode(text, parse_special=False)


@pytest.mark.parametrize("name", NAMES)
def test_random_ids_decode_and_stream_as_by_the_published_tokenizer(name):
    generator = random.Random(7)
    for _ in range(200):
        ids = [generator.randrange(384) for _ in range(30)]
        detokenizer = BUILT[name].detokenizer()
        streamed = "".join(map(detokenizer.add, ids)) + detokenizer.finish()
        assert BUILT[name].decode(ids) == streamed == ORACLES[name].decode(ids)


# The default model


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf):
    from tiny_llm.gguf_file import GGUFFile

    return Tokenizer.from_gguf(GGUFFile(smollm2_gguf).metadata)


@pytest.fixture(scope="session")
def goldens():
    return read("smollm2", "goldens.json")["cases"]


@pytest.mark.smollm2
def test_smollm2_prompts_and_ids_equal_the_goldens(smollm2, goldens):
    for case in goldens:
        prompt = case.get("prompt_text") or smollm2.render_chat(case["messages"])
        assert prompt == case["prompt_string"]
        assert smollm2.encode(prompt) == case["ids"]
        if "messages" in case:
            assert smollm2.encode_chat(case["messages"]) == case["ids"]
        decoded = smollm2.decode(case["ids"], skip_special_tokens=False)
        assert decoded == case["decode_prompt"]


@pytest.mark.smollm2
def test_smollm2_special_tokens_can_be_plain_text(smollm2, goldens):
    (case,) = [case for case in goldens if "ids_specials_as_text" in case]
    ids = smollm2.encode(case["prompt_text"], parse_special=False)
    assert ids == case["ids_specials_as_text"]


@pytest.mark.smollm2
def test_smollm2_text_and_stream_equal_the_goldens(smollm2, goldens):
    for case in goldens:
        ids = case["greedy"]
        assert smollm2.decode(ids, skip_special_tokens=False) == case["text"]
        assert smollm2.decode(ids) == case["text_skip_special"]
        detokenizer = smollm2.detokenizer()
        pieces = [*map(detokenizer.add, ids), detokenizer.finish()]
        assert pieces == case["stream_pieces"]


@pytest.mark.smollm2
def test_smollm2_has_its_names_and_ends(smollm2, goldens):
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    for case in goldens:
        ends = [i for i, t in enumerate(case["greedy"]) if t in smollm2.eos_token_ids]
        assert (ends[0] if ends else None) == case["first_eos"]


# What the keys mean

BYTES = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]


def byte_level(pre="gpt-2", extra=(), **changes):
    """A vocabulary of all bytes (ids 0 to 255) and the tokens of `extra`."""
    tokens = [*BYTES, *(token for token, _ in extra)]
    found = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * len(BYTES) + [kind for _, kind in extra],
        "merges": [],
    }
    found |= changes  # None leaves a key out
    return {PREFIX + key: value for key, value in found.items() if value is not None}


def sentencepiece(extra=(), **changes):
    pieces = [("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0)]
    pieces += [(f"<0x{byte:02X}>", 6, 0.0) for byte in range(256)]
    pieces += [("▁", 1, -9.0), ("a", 1, -9.0), ("b", 1, -9.0), *extra]
    tokens, types, scores = map(list, zip(*pieces, strict=True))
    found = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    found |= changes
    return {PREFIX + key: value for key, value in found.items() if value is not None}


def words(tokenizer, text):
    """How the pre-tokenizer cuts `text`, as the bytes' visible characters."""
    return [w for w, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "it's 12345  x!?\n\ny", "it|'s|Ġ12345|Ġ|Ġx|!?|Ċ|Ċ|y"),
        ("smollm", "a 123 b", "a|Ġ|1|2|3|Ġb"),
        ("starcoder", "a 123 b", "a|Ġ|1|2|3|Ġb"),
        ("llama-bpe", "I'LL (12345\n\nx", "I|'LL|Ġ(|123|45|ĊĊ|x"),
        ("qwen2", "I'LL (123\n\nx", "I|'LL|Ġ(|1|2|3|ĊĊ|x"),
        ("tekken", "camelCase 12/\n", "camel|Case|Ġ|1|2|/Ċ"),
        ("gpt-4o", "camelCase's 1234", "camel|Case's|Ġ|123|4"),
        ("default", "a+b 12345", "a|+|b|Ġ|123|45"),
        ("falcon", "a+b 12345", "a|+|b|Ġ|123|45"),
        ("deepseek-coder", "a b!12", "a|Ġb|!|1|2"),
        ("deepseek-v3", "a b!c 1234", "a|Ġb|!c|Ġ|123|4"),
    ],
)
def test_pre_tokenizers_cut_as_published(pre, text, expected):
    tokenizer = Tokenizer.from_gguf(byte_level(pre, add_bos_token=False))
    assert words(tokenizer, text) == expected.split("|")


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_encodes_without_loss(pre):
    tokenizer = Tokenizer.from_gguf(byte_level(pre, add_bos_token=False))
    text = "It's  12345\n\n\t世界 👩‍👧 ÀB cD -- ?!\r\n "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_word_that_is_a_token_is_taken_whole_where_the_model_does_so():
    extra = [("abc", 1), ("<s>", 3)]
    llama3 = Tokenizer.from_gguf(byte_level("llama-bpe", extra, bos_token_id=257))
    gpt2 = Tokenizer.from_gguf(byte_level("gpt-2", extra))
    assert llama3.encode("abc") == [257, 256]
    assert gpt2.encode("abc") == [BYTES.index(c) for c in "abc"]


@pytest.mark.parametrize(
    ("metadata", "adds"),
    [
        (byte_level("gpt-2", [("<s>", 3)], bos_token_id=256), False),
        (byte_level("gpt-2", [("<s>", 3)], bos_token_id=256, add_bos_token=True), True),
        (byte_level("llama-bpe", [("<s>", 3)], bos_token_id=256), True),
        (byte_level("tekken", [("<s>", 3)], bos_token_id=256), True),
        (
            byte_level("tekken", [("<s>", 3)], bos_token_id=256, add_bos_token=False),
            False,
        ),
        (sentencepiece(), True),
        (sentencepiece(add_bos_token=False), False),
    ],
)
def test_bos_is_added_as_the_file_or_the_default_says(metadata, adds):
    tokenizer = Tokenizer.from_gguf(metadata)
    with_bos = [
        tokenizer.bos_token_id,
        *tokenizer.encode("a", add_special_tokens=False),
    ]
    assert tokenizer.encode("a") == (with_bos if adds else with_bos[1:])
    if adds:
        assert tokenizer.encode("<s>a") == with_bos


def test_eos_is_added_when_the_file_says_so():
    tokenizer = Tokenizer.from_gguf(sentencepiece(add_eos_token=True))
    ids = tokenizer.encode("a")
    assert (ids[0], ids[-1]) == (1, 2)


def test_eos_ids_are_those_of_all_keys_and_of_known_control_tokens():
    extra = [(f"<{i}>", 3) for i in range(4)]
    extra += [("<|eot_id|>", 3), ("<|im_end|>", 1)]  # the latter is no control token
    metadata = byte_level(
        extra=extra, eos_token_id=256, eot_token_id=257, eom_token_id=258
    )
    assert Tokenizer.from_gguf(metadata).eos_token_ids == {256, 257, 258, 260}


def test_a_closed_message_is_not_the_end_where_there_are_several():
    extra = [("<|end|>", 3), ("<|return|>", 3)]
    assert Tokenizer.from_gguf(byte_level(extra=extra[:1])).eos_token_ids == {256}
    assert Tokenizer.from_gguf(byte_level(extra=extra)).eos_token_ids == {257}


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    metadata = byte_level(extra=[("<ctl>", 3), ("<usr>", 4), ("<nrm>", 1)])
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("<ctl><usr><nrm>")
    assert ids[:2] == [256, 257]
    assert 258 not in ids
    assert tokenizer.decode(ids) == "<usr><nrm>"
    literal = tokenizer.encode("<ctl><usr>", parse_special=False)
    assert 256 not in literal
    assert literal[-1] == 257


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes():
    extra = [("ab", 1, -2.0), ("ba", 1, -1.0), ("▁a", 1, -3.0)]
    tokenizer = Tokenizer.from_gguf(sentencepiece(extra))
    tokens = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("aba é")]
    assert tokens == ["<s>", "▁a", "ba", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("aba é")) == "aba é"


def test_the_space_in_front_is_left_out_when_the_file_says_so():
    tokenizer = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False))
    assert tokenizer.encode("a", add_special_tokens=False) == [260]
    assert tokenizer.decode([259, 260]) == " a"


def test_named_chat_templates_are_found():
    metadata = sentencepiece()
    metadata["tokenizer.chat_template"] = "{{ bos_token }}"
    metadata["tokenizer.chat_template.tool_use"] = "{{ eos_token }}{{ unk_token }}"
    tokenizer = Tokenizer.from_gguf(metadata)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(messages) == "<s>"
    assert tokenizer.render_chat(messages, tools=[{}]) == "</s><unk>"


# What cannot be used


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "no_vocab", ""])
def test_other_tokenizer_models_are_refused_by_name(model):
    with pytest.raises(TokenizerError, match=rf"ggml\.model: .*'{model}'"):
        Tokenizer.from_gguf({**byte_level(), PREFIX + "model": model})


def test_an_unknown_pre_tokenizer_is_refused_by_name():
    with pytest.raises(TokenizerError, match=r"ggml\.pre: .*'nonesuch'.*smollm"):
        Tokenizer.from_gguf(byte_level("nonesuch"))


@pytest.mark.parametrize(
    ("build", "key"),
    [(byte_level, key) for key in ("model", "pre", "tokens", "merges")]
    + [(sentencepiece, key) for key in ("model", "tokens", "scores")],
)
def test_a_missing_key_is_named(build, key):
    with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.{key} is missing"):
        Tokenizer.from_gguf(build(**{key: None}))


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        (byte_level(model=3), "model must be str"),
        (byte_level(pre=["qwen2"]), "pre must be str"),
        (byte_level(tokens="abc"), "tokens must be list"),
        (byte_level(tokens=[]), "tokens is empty"),
        (byte_level(tokens=["a", 3]), r"tokens\[1\] has the wrong type"),
        (byte_level(tokens=["a", "a"], token_type=[1, 1]), "tokens: 'a' occurs"),
        (byte_level(token_type=[1]), "token_type has 1 entries, .* has 256"),
        (byte_level(token_type=["x"] * 256), r"token_type\[0\] has the wrong type"),
        (byte_level(merges=["ab"]), "merges: 'ab' is not two tokens"),
        (byte_level(merges=["a "]), "merges: 'a ' is not two tokens"),
        (byte_level(merges=[1]), r"merges\[0\] has the wrong type"),
        (byte_level(merges=["a b"]), "merges: .* needs the token 'ab'"),
        (byte_level(bos_token_id=256), "bos_token_id is 256, outside .* 256"),
        (byte_level(eos_token_id=-1), "eos_token_id is -1, outside"),
        (byte_level(eot_token_id="2"), "eot_token_id must be int"),
        (byte_level(eom_token_id=True), "eom_token_id must be int"),
        (byte_level(add_bos_token=1), "add_bos_token must be bool"),
        (byte_level(add_bos_token=True), "bos_token_id is missing"),
        (byte_level("llama-bpe"), "bos_token_id is missing"),
        (sentencepiece(scores=[0.0]), "scores has 1 entries"),
        (sentencepiece(scores=["x"] * 262), r"scores\[0\] has the wrong type"),
        (sentencepiece(unknown_token_id=10**6), "unknown_token_id is 1000000, outside"),
        (sentencepiece(add_space_prefix="no"), "add_space_prefix must be bool"),
        ({**byte_level(), "tokenizer.chat_template": 3}, "chat_template must be"),
        ({}, "model is missing"),
    ],
)
def test_a_value_that_cannot_be_used_names_its_key(metadata, named):
    with pytest.raises(TokenizerError, match=rf"tokenizer\.(ggml\.)?{named}"):
        Tokenizer.from_gguf(metadata)
