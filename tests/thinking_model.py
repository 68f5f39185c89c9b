"""A tiny model whose tokenizer declares reasoning tags, and answers by a script."""

from functools import cache
from itertools import chain, repeat

import tokenizers
from oracle import DATA, random_model

import tiny_llm
from tiny_llm.loader import Loaded

FOLDER = DATA / "llama_llama3rope_bias"  # 384 tokens
OPENING, CLOSING = "<think>", "</think>"

# As Qwen3's: thinks unless told otherwise, and opens the reasoning itself.
TEMPLATE = (
    "{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{%- if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>\n' }}{% endif %}{% endif %}"
)


def with_tokens(*tokens, special=False, template=None):
    """The tokenizer of FOLDER and a few more tokens, from 384 on."""
    plain = tiny_llm.load_tokenizer(FOLDER)
    plain.backend.add_tokens(
        [tokenizers.AddedToken(t, special=special, normalized=False) for t in tokens]
    )
    return tiny_llm.Tokenizer(
        plain.backend,
        special_tokens=plain.special_tokens,
        eos_token_ids=plain.eos_token_ids,
        chat_templates={"default": template} if template else {},
    )


@cache
def thinking(template=TEMPLATE, special=False):
    """A model and tokenizer with tags. Random: it thinks nonsense if not scripted."""
    model = random_model("llama_llama3rope_bias", vocab_size=386)
    return Loaded(
        model, with_tokens(OPENING, CLOSING, special=special, template=template)
    )


def scripted(tokenizer, text):
    """A sampler that gives the tokens of a text, one after another, then EOS."""
    import mlx.core as mx

    ids = tokenizer.encode(text, add_special_tokens=False)
    following = chain(ids, repeat(min(tokenizer.eos_token_ids)))
    return lambda logprobs: mx.array([next(following)])
