"""Structured output: which texts are allowed, and so which tokens may come next.

grammar     what a user asks for: a JSON schema, a regex, choices, a grammar
schema      what of a JSON schema would not be enforced, and is refused
vocabulary  the bytes of each token
compiler    a Grammar -> a Matcher, by llguidance
matcher     where one output stands: the mask of the next token
processor   a Matcher as a logits processor, for stream_generate
"""

from .compiler import GrammarCompiler
from .grammar import Grammar
from .matcher import Matcher
from .processor import GrammarProcessor

__all__ = ["Grammar", "GrammarCompiler", "GrammarProcessor", "Matcher"]
