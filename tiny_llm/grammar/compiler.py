"""From a Grammar to a Matcher, by llguidance; what it refuses is a GrammarError."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import GrammarError, MissingPackageError, ParameterError, whole_number
from ..tokenizer import Tokenizer
from .grammar import Grammar
from .matcher import Matcher, reason
from .vocabulary import GrammarVocabulary

T = TypeVar("T")

# Of a compiled grammar. The library's own limit of 500,000 can take it a minute.
_MAX_SYMBOLS = 20_000
# The library compiles recursively, and an overflow would end the process. Threads
# started elsewhere have as little as 128 KiB; this is address space, taken as needed.
_STACK = 64 * 1024 * 1024
_STACK_LOCK = threading.Lock()


class GrammarCompiler:
    """Compiles grammars for one tokenizer; safe to use from several threads.

    vocab_size: the columns of the model's logits, which may be more or fewer than the
    tokenizer has ids. cache_size: how many compiled grammars are kept, those used last.

    Raises MissingPackageError without llguidance, and GrammarError for a tokenizer
    that cannot be used with grammars.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, *, cache_size: int = 64
    ) -> None:
        vocab_size = whole_number("vocab_size", vocab_size, least=1)
        self._cache_size = whole_number("cache_size", cache_size, least=0)
        self._library = _library()
        self.vocabulary = GrammarVocabulary(tokenizer, vocab_size)
        self._tokens = self._library.LLTokenizer(_Wrapper(self.vocabulary))
        self._templates: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of an output; compiled once, copied afterwards.

        Raises GrammarError with the library's reason for a grammar that it refuses, and
        for one that no output of this tokenizer can follow.
        """
        if not isinstance(grammar, Grammar):
            raise ParameterError(f"{grammar!r:.60} is no Grammar")
        with self._lock:
            template = self._templates.get(grammar)
        if template is None:
            template = _with_deep_stack(lambda: self._compile(grammar))
        with self._lock:
            self._templates[grammar] = template
            self._templates.move_to_end(grammar)
            while len(self._templates) > self._cache_size:
                self._templates.popitem(last=False)
            return template.copy()

    def _compile(self, grammar: Grammar) -> Matcher:
        text = _lark(self._library, grammar)
        # Forcing would allow one way only to spell what is certain, by a tokenizer of
        # the library's own. At the end, so that errors count the user's own lines.
        text += '\n%llguidance {"no_forcing": true}\n'
        limits = self._library.LLParserLimits(max_grammar_size=_MAX_SYMBOLS)
        library = self._library.LLMatcher(
            self._tokens, text, log_level=0, limits=limits
        )
        if library.is_error():
            raise GrammarError(
                f"the {_NAMES[grammar.kind]} is refused: {reason(library.get_error())}"
            )
        matcher = Matcher(library, self.vocabulary)
        matcher.mask()  # a grammar without any output shows here
        return matcher


_NAMES = {
    "json_schema": "JSON schema",
    "regex": "regex",
    "choice": "list of choices",
    "lark": "Lark grammar",
    "gbnf": "GBNF grammar",
}


def _lark(library: Any, grammar: Grammar) -> str:
    """The grammar in the library's dialect of Lark."""
    match grammar.kind:
        case "json_schema":
            schema = json.loads(grammar.source)
            if schema is False:
                raise GrammarError("the JSON schema is refused: nothing validates")
            options = {"x-guidance": _spacing(grammar.max_whitespace)}
            schema = {} if schema is True else schema
            return "start: %json " + json.dumps({**options, **schema})
        case "regex":
            return f"start: /{library.regex_to_lark(grammar.source, '')}/"
        case "choice":
            choices = json.loads(grammar.source)
            # JSON's spelling of strings is Lark's. One terminal, or rows grow long.
            texts = (json.dumps(choice, ensure_ascii=False) for choice in choices)
            return "start: CHOICE\nCHOICE: " + " | ".join(texts)
        case "lark":
            return grammar.source
        case "gbnf":
            from llguidance.gbnf_to_lark import gbnf_to_lark

            try:
                lark: str = gbnf_to_lark(grammar.source)
            except Exception as error:  # it raises bare ones
                raise GrammarError(f"the GBNF grammar is refused: {error}") from error
            return lark.replace("%llguidance {}", "", 1)
    raise GrammarError(f"{grammar.kind!r:.60} is no kind of grammar")


def _spacing(most: int | None) -> dict[str, Any]:
    if most is None:
        return {"whitespace_flexible": True}
    if most == 0:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": rf"[ \t\r\n]{{1,{most}}}"}


class _Wrapper:
    """The vocabulary in the form that LLTokenizer asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = min(vocabulary.eos_ids)

    def __call__(self, text: object) -> list[int]:
        raise AssertionError("nothing is tokenized without forcing")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingPackageError(
            "grammars and JSON schemas need the package llguidance: "
            "pip install 'tiny_llm[grammar]'"
        ) from error
    return llguidance


def _with_deep_stack(work: Callable[[], T]) -> T:
    """Run work on a thread that has room for deep recursion; its errors are raised."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="grammar compiler")
    with _STACK_LOCK:
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
