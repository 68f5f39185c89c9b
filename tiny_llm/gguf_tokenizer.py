"""A tokenizer from the metadata of a GGUF file.

Keys are those of the GGUF specification; what holds where a key is absent is as
llama.cpp has it (src/llama-vocab.cpp). Two models of tokenizer are built: "gpt2",
byte-level BPE, and "llama", SentencePiece BPE. Anything else is refused by name.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .errors import TokenizerError
from .gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    import tokenizers

_PREFIX = "tokenizer.ggml."
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's visible space

# tokenizer.ggml.token_type; normal tokens are 1, unused ones 5
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

# Control tokens that end an answer, whatever the file's ids say: files made before
# the eot and eom keys existed, or from a base model, name only one of them.
_END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
    }
)


class GGUFTokenizer(NamedTuple):
    """What a file's metadata says about its tokenizer.

    `special_tokens` has entries such as "bos_token"; `eos_token_ids` are all ids
    that end an answer; `chat_templates` are by name as ChatTemplate wants them.
    """

    backend: "tokenizers.Tokenizer"
    special_tokens: dict[str, str]
    eos_token_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    chat_templates: dict[str, str]


class _Vocabulary(NamedTuple):
    tokens: list[str]
    ids: dict[str, int]
    types: list[int]


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Build the tokenizer that `metadata` (keys to plain Python values) describes.

    Raises TokenizerError naming the key that is missing or cannot be used.
    """
    model = _get(metadata, "model", str)
    if model == "gpt2":
        vocabulary = _read_vocabulary(metadata)
        pre = _pre_tokenizer(metadata)
        backend = _byte_level_backend(vocabulary, _read_merges(metadata), pre)
        add_bos = pre.add_bos
        defaults: dict[str, int] = {}
    elif model == "llama":
        vocabulary = _read_vocabulary(metadata)
        defaults = {"bos": 1, "eos": 2, "unknown": 0}
        unknown = _token_id(metadata, "unknown", vocabulary, defaults)
        backend = _sentencepiece_backend(metadata, vocabulary, unknown)
        add_bos = True
    else:
        raise TokenizerError(
            f'{_PREFIX}model: the tokenizer model {model!r} is not supported; "gpt2" '
            '(byte-level BPE) and "llama" (SentencePiece BPE) are'
        )
    _add_marked_tokens(backend, vocabulary)

    ids = {
        kind: _token_id(metadata, kind, vocabulary, defaults)
        for kind in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    names = {"unknown": "unk_token", "padding": "pad_token"}
    flags = {
        kind: _get(metadata, f"add_{kind}_token", bool, default)
        for kind, default in (("bos", add_bos), ("eos", False))
    }
    for kind, wanted in flags.items():
        if wanted and ids[kind] is None:
            raise TokenizerError(
                f"{_PREFIX}{kind}_token_id is missing, but {_PREFIX}add_{kind}_token "
                f"or the default asks for the token; set add_{kind}_token to false"
            )
    return GGUFTokenizer(
        backend,
        special_tokens={
            names.get(kind, f"{kind}_token"): vocabulary.tokens[token_id]
            for kind, token_id in ids.items()
            if token_id is not None and kind not in ("eot", "eom")
        },
        eos_token_ids=_end_ids(vocabulary, ids),
        add_bos=flags["bos"],
        add_eos=flags["eos"],
        chat_templates=_chat_templates(metadata),
    )


def _byte_level_backend(
    vocabulary: _Vocabulary, merges: list[tuple[str, str]], pre: PreTokenizer
) -> "tokenizers.Tokenizer":
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    for left, right in merges:
        for token in (left, right, left + right):
            if token not in vocabulary.ids:
                raise TokenizerError(
                    f"{_PREFIX}merges: {left!r} + {right!r} needs the token "
                    f"{token!r}, which {_PREFIX}tokens lacks"
                )
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, merges, ignore_merges=pre.ignore_merges)
    )
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
        for split in pre.splits
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary, unknown: int | None
) -> "tokenizers.Tokenizer":
    import tokenizers
    from tokenizers import decoders, models, normalizers

    space_prefix = _get(metadata, "add_space_prefix", bool, True)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids,
            derive_merges(vocabulary, _read_scores(metadata, vocabulary)),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", _SPACE)
    restore = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if space_prefix:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), replace]
        )
        backend.decoder = decoders.Sequence([*restore, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = replace
        backend.decoder = decoders.Sequence(restore)
    return backend


def derive_merges(
    vocabulary: _Vocabulary, scores: list[float]
) -> list[tuple[str, str]]:
    """The merges that make BPE pick what SentencePiece picks by score.

    SentencePiece joins the neighbours whose union has the best score; so every way
    of cutting a token into two tokens is a merge, ranked by the token's score. Ways
    of the same token are ranked by the ids of their parts.
    """
    ids = vocabulary.ids
    joinable = [kind not in (_UNKNOWN, _CONTROL, _BYTE) for kind in vocabulary.types]
    ranked = []
    for token, token_id in ids.items():
        if not joinable[token_id]:
            continue
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is None or right is None:
                continue
            if joinable[left] and joinable[right]:
                ranked.append((-scores[token_id], token_id, left, right))
    tokens = vocabulary.tokens
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(ranked)]


def _add_marked_tokens(
    backend: "tokenizers.Tokenizer", vocabulary: _Vocabulary
) -> None:
    """Control tokens are special; user-defined ones are matched before all else."""
    from tokenizers import AddedToken

    special, plain = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if not token:
            continue
        if kind in (_UNKNOWN, _CONTROL):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _end_ids(vocabulary: _Vocabulary, ids: Mapping[str, int | None]) -> frozenset[int]:
    names = _END_OF_TURN
    if "<|return|>" in vocabulary.ids:  # gpt-oss: <|end|> closes one of many messages
        names = names - {"<|end|>"}
    listed = {ids["eos"], ids["eot"], ids["eom"]} - {None}
    named = {
        vocabulary.ids[name]
        for name in names & vocabulary.ids.keys()
        if vocabulary.types[vocabulary.ids[name]] == _CONTROL
    }
    return frozenset(token_id for token_id in listed | named if token_id is not None)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    found = {}
    for name, value in metadata.items():
        if name == key or name.startswith(key + "."):
            if not isinstance(value, str):
                raise TokenizerError(f"{name} must be a string, not {value!r:.60}")
            found[name[len(key) + 1 :] or "default"] = value
    return found


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = _get(metadata, "pre", str)
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{_PREFIX}pre: the pre-tokenizer {name!r} is not supported; supported "
            "are " + ", ".join(sorted(PRE_TOKENIZERS))
        )
    return PRE_TOKENIZERS[name]


def _read_vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = _get_list(metadata, "tokens", str)
    if not tokens:
        raise TokenizerError(f"{_PREFIX}tokens is empty")
    types = [1] * len(tokens)
    if _PREFIX + "token_type" in metadata:
        types = _get_list(metadata, "token_type", int)
    if len(types) != len(tokens):
        raise TokenizerError(
            f"{_PREFIX}token_type has {len(types)} entries, but {_PREFIX}tokens "
            f"has {len(tokens)}"
        )
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    for token_id, token in enumerate(tokens):
        if ids[token] != token_id:
            raise TokenizerError(
                f"{_PREFIX}tokens: {token!r} occurs twice, as {token_id} and "
                f"{ids[token]}"
            )
    return _Vocabulary(tokens, ids, types)


def _read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for line in _get_list(metadata, "merges", str):
        cut = line.find(" ", 1)
        if cut < 0 or cut == len(line) - 1:
            raise TokenizerError(
                f"{_PREFIX}merges: {line!r} is not two tokens with a space between"
            )
        merges.append((line[:cut], line[cut + 1 :]))
    return merges


def _read_scores(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> list[float]:
    scores: list[float] = _get_list(metadata, "scores", (int, float))
    if len(scores) != len(vocabulary.tokens):
        raise TokenizerError(
            f"{_PREFIX}scores has {len(scores)} entries, but {_PREFIX}tokens has "
            f"{len(vocabulary.tokens)}"
        )
    return scores


def _token_id(
    metadata: Mapping[str, Any],
    kind: str,
    vocabulary: _Vocabulary,
    defaults: Mapping[str, int],
) -> int | None:
    key = f"{kind}_token_id"
    if _PREFIX + key not in metadata:
        token_id = defaults.get(kind)
        # A default is a convention, so a vocabulary too small for it has none.
        return token_id if token_id is None or token_id < len(vocabulary.ids) else None
    token_id = _get(metadata, key, int)
    if not 0 <= token_id < len(vocabulary.tokens):
        raise TokenizerError(
            f"{_PREFIX}{key} is {token_id}, outside the vocabulary of "
            f"{len(vocabulary.tokens)} tokens"
        )
    return token_id


_T = TypeVar("_T")
_REQUIRED: Any = object()


def _get(
    metadata: Mapping[str, Any], key: str, kind: type[_T], default: Any = _REQUIRED
) -> _T:
    value = metadata.get(_PREFIX + key, default)
    if value is _REQUIRED:
        raise TokenizerError(f"{_PREFIX}{key} is missing from the file's metadata")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TokenizerError(
            f"{_PREFIX}{key} must be {kind.__name__}, not {value!r:.60}"
        )
    return value


def _get_list(metadata: Mapping[str, Any], key: str, kind: Any) -> list[Any]:
    value: list[Any] = _get(metadata, key, list)
    for index, item in enumerate(value):
        if not isinstance(item, kind) or isinstance(item, bool):
            raise TokenizerError(
                f"{_PREFIX}{key}[{index}] has the wrong type: {item!r:.60}"
            )
    return value
