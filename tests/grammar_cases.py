"""What the tests of grammars share: tokenizers, compilers, and a "model" that draws."""

import json
from functools import cache
from pathlib import Path

import numpy as np

from tiny_llm.grammar.compiler import GrammarCompiler
from tiny_llm.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
SCHEMAS = json.loads((DATA / "schemas.json").read_text())
# byte-level; SentencePiece that drops a first space; SentencePiece that keeps it
TOKENIZERS = ["qwen2", "llama_tied", "gemma"]
# Logits are wider than the tokenizers, which have 384 ids.
WIDTH = 407


@cache
def tokenizer(name):
    return Tokenizer.from_folder(DATA / name)


@cache
def compiler(name="qwen2"):
    return GrammarCompiler(tokenizer(name), WIDTH)


def ids(mask):
    """The ids of a packed mask, one by one."""
    return [
        32 * w + bit
        for w, word in enumerate(mask.tolist())
        for bit in range(32)
        if word >> bit & 1
    ]


def draw(matcher, vocabulary, seed, limit=200):
    """Random allowed tokens, closing ones more often; the text's ids, without EOS."""
    rng = np.random.default_rng(seed)
    tokens = []
    while len(tokens) < limit:
        allowed = ids(matcher.mask())
        ends = [token for token in allowed if token in vocabulary.eos_ids]
        if ends and (len(ends) == len(allowed) or rng.random() < 0.5):
            matcher.advance(ends[-1])
            break
        texts = [token for token in allowed if token not in vocabulary.eos_ids]
        closing = [
            token for token in texts if not vocabulary.tokens[token].strip(b'"}],:')
        ]
        if closing and rng.random() < 0.5:
            texts = closing
        tokens.append(int(rng.choice(texts)))
        matcher.advance(tokens[-1])
    return tokens


def outputs(name, grammar, seeds, limit=200):
    """Texts of finished outputs; each checked against the bytes of its tokens."""
    own = compiler(name)
    texts = []
    for seed in seeds:
        matcher = own.compile(grammar)
        tokens = draw(matcher, own.vocabulary, seed, limit)
        if not matcher.accepting:
            assert len(tokens) == limit, "only what is cut off may be incomplete"
            continue
        text = tokenizer(name).decode(tokens)
        assert b"".join(own.vocabulary.tokens[t] for t in tokens).decode() == text
        texts.append(text)
    return texts
