"""Every failure that a user can cause, as one small tree.

    TinyLLMError
      LoadError                 files -> model: names the file or the key
        ModelNotFoundError      no such model, or it cannot be reached
        CorruptFileError        a file is not what its name says, or is cut short
        UnsupportedModelError   an architecture, setting or format we don't implement
        WeightsError            a weight is missing, unused, or has the wrong shape
        CacheFileError          a saved cache is of another model, kind or version, or
                                cannot be written
      TokenizerError            no tokenizer, or one we cannot use
        ChatTemplateError       no chat template, or the template refused the messages
      ParameterError            an argument's value cannot be used (also a ValueError)
        PromptError             an empty prompt, or one longer than the context
        GrammarError            a grammar that is refused, or a token it does not allow
      MissingPackageError       an optional package is needed that is not installed
      OutOfPagesError           the page pool has no room for more tokens
      KernelError               a Metal kernel is asked for and cannot be had
      RequestError              one request of an engine failed, and no other
      EngineClosedError         the engine does not take requests any more

A message says which thing, what was found, and what would work.
"""

from operator import index


class TinyLLMError(Exception):
    """The base of every error that tiny_llm raises on purpose."""


class LoadError(TinyLLMError):
    """A model could not be loaded."""


class ModelNotFoundError(LoadError):
    """No model of that name here or on the Hub, or the Hub cannot be reached."""


class CorruptFileError(LoadError):
    """A file is truncated, malformed, or not of the format its name says."""


class UnsupportedModelError(LoadError):
    """The model needs something that tiny_llm does not implement."""


class WeightsError(LoadError):
    """The weights and the architecture do not fit together."""


class CacheFileError(LoadError):
    """A saved cache is not of the model, kind or version needed; or not writable."""


class TokenizerError(TinyLLMError):
    """There is no tokenizer, or it cannot be used."""


class ChatTemplateError(TokenizerError):
    """There is no chat template, or it refused the messages."""


class ParameterError(TinyLLMError, ValueError):
    """An argument has a value that cannot be used."""


class PromptError(ParameterError):
    """The prompt is empty or does not fit the context."""


class GrammarError(ParameterError):
    """A grammar cannot be used as it is, or does not allow the token given."""


class MissingPackageError(TinyLLMError, ImportError):
    """What was asked for needs an optional package that is not installed."""


class OutOfPagesError(TinyLLMError):
    """The page pool has no room for more tokens; nothing has changed."""


class KernelError(TinyLLMError):
    """TINY_LLM_KERNELS=metal, but a kernel cannot run here or gives wrong numbers."""


class RequestError(TinyLLMError):
    """One request of an engine failed; the others go on."""


class EngineClosedError(TinyLLMError):
    """The engine was closed and does not take requests any more."""


def whole_number(name: str, value: object, *, least: int) -> int:
    """The value as an int of at least `least`; numpy's integers will do.

    Raises ParameterError, naming the argument.
    """
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise ParameterError(
            f"{name} must be a whole number of at least {least}, got {value!r}"
        )
    return number
