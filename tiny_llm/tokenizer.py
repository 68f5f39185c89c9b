"""Text to token ids and back, special tokens, and chat prompts.

A thin layer over Hugging Face's `tokenizers` library: it reads what lies around a
model (a folder's JSON files, or a GGUF's metadata), and it has the rules that the
library leaves to its callers: exactly one BOS, which ids end an answer, and special
tokens as plain text where that is asked for.
"""

import json
import operator
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from . import folder_tokenizer as files
from .chat_template import ChatTemplate, Messages, Tools
from .detokenizer import Detokenizer
from .errors import TokenizerError


class Tokenizer:
    """One model's tokenizer; safe to use from several threads.

    `backend` belongs to this object from now on. `special_tokens` maps names such as
    "bos_token" to tokens. `eos_token_ids` are added to the EOS token's own id.
    `add_bos` and `add_eos` decide what `encode` adds; None leaves it to the backend.
    `chat_templates` are Jinja sources by name ("default", "tool_use").

    Raises TokenizerError when a BOS or EOS token is not in the vocabulary.
    """

    vocab_size: int
    bos_token: str | None
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    special_tokens: dict[str, str]

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        # Settings saved with a training run; they would cut or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.bos_token = self.special_tokens.get("bos_token")
        self.bos_token_id = self._special_id("bos_token")
        eos_token_id = self._special_id("eos_token")
        own = () if eos_token_id is None else (eos_token_id,)
        self.eos_token_ids = frozenset(own).union(eos_token_ids)
        self._set_added_tokens(add_bos, add_eos)

        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(
            backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added), 0
        )
        self._hidden = frozenset(t.content for t in added.values() if t.special)
        # What the backend puts before every text; without tokenizer_config.json that is
        # the only word on BOS.
        first = next(iter(backend.encode("").ids), None)
        expected = self.bos_token_id
        if expected is None and first not in self.eos_token_ids:
            expected = first
        self._added_bos = first if first == expected else None
        self._chat_template = ChatTemplate(chat_templates or {})
        self._literal: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a model folder in Hugging Face's layout.

        Reads tokenizer.json and, where they exist, tokenizer_config.json,
        special_tokens_map.json, the chat template files, and the EOS ids in
        config.json and generation_config.json. Raises TokenizerError naming the file
        that is missing, damaged, or has a value of the wrong type.
        """
        backend = files.read_backend(folder)
        config = files.read_optional_json(folder / "tokenizer_config.json")
        return cls(
            backend,
            special_tokens=files.read_special_tokens(folder, config),
            eos_token_ids=files.read_eos_ids(folder),
            add_bos=files.read_flag(folder, config, "add_bos_token"),
            add_eos=files.read_flag(folder, config, "add_eos_token"),
            chat_templates=files.read_chat_templates(folder, config),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer in a GGUF file's metadata (keys to plain Python values).

        Raises TokenizerError naming the key that is missing or cannot be used.
        """
        from .gguf_tokenizer import build_gguf_tokenizer

        built = build_gguf_tokenizer(metadata)
        return cls(
            built.backend,
            special_tokens=built.special_tokens,
            eos_token_ids=built.eos_token_ids,
            add_bos=built.add_bos,
            add_eos=built.add_eos,
            chat_templates=built.chat_templates,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a chat template."""
        return bool(self._chat_template.sources)

    @property
    def template_variables(self) -> frozenset[str]:
        """What the chat templates can be told, such as "enable_thinking".

        Raises ChatTemplateError for a template that is no Jinja.
        """
        return self._chat_template.variables()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The token ids of `text`.

        `add_special_tokens` adds what the model expects around a text, mostly one
        BOS; a BOS that the text begins with already is not doubled. With
        `parse_special` false, special tokens written in the text are plain text.
        Raises TokenizerError for what is not text.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"text must be a string, not {type(text).__name__}")
        backend = self.backend if parse_special else self._literal_backend()
        with files.library_errors(f"cannot encode {text!r:.60}"):
            ids: list[int] = backend.encode(
                text, add_special_tokens=add_special_tokens
            ).ids
        if add_special_tokens and self._added_bos is not None:
            extra = 0
            while ids[extra + 1 : extra + 2] == [self._added_bos]:
                extra += 1
            ids = ids[extra:]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Raises TokenizerError for an id outside the vocabulary.
        """
        checked = [self._check_id(token_id) for token_id in ids]
        with files.library_errors("cannot decode"):
            return self.backend.decode(checked, skip_special_tokens=skip_special_tokens)

    def detokenizer(self) -> Detokenizer:
        """A new detokenizer, for one stream of ids.

        Raises TokenizerError when this tokenizer's decoder cannot be streamed.
        """
        decoder = self.backend.decoder
        # The decoders pickle as their JSON; there is no other cheap way to see it.
        description = None if decoder is None else json.loads(decoder.__getstate__())
        return Detokenizer(self._visible_token, description)

    def render_chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt for chat `messages`, by the model's chat template.

        `template_kwargs` are further variables for the template and win over its
        defaults. Raises ChatTemplateError: see `ChatTemplate.render`.
        """
        return self._chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables={**self.special_tokens, **template_kwargs},
        )

    def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """The ids of `render_chat`; the template has all special tokens itself."""
        prompt = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
        return self.encode(prompt, add_special_tokens=False)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        if token is None:
            return None
        token_id = self.backend.token_to_id(token)
        if token_id is None:
            raise TokenizerError(
                f"the {name} {token!r} is not in the tokenizer's vocabulary; "
                "tokenizer_config.json and tokenizer.json do not belong together"
            )
        return token_id

    def _set_added_tokens(self, add_bos: bool | None, add_eos: bool | None) -> None:
        if add_bos is None and add_eos is None:
            return
        pieces, tokens = ["$A"], []
        for name, wanted in (("bos_token", add_bos), ("eos_token", add_eos)):
            token = self.special_tokens.get(name)
            if not wanted or token is None:
                continue
            pieces = [token, *pieces] if name == "bos_token" else [*pieces, token]
            tokens.append((token, self.backend.token_to_id(token)))
        self.backend.post_processor = processors.TemplateProcessing(
            single=pieces, special_tokens=tokens
        )

    def _check_id(self, token_id: int) -> int:
        try:
            token_id = operator.index(token_id)
        except TypeError:
            raise TokenizerError(
                f"a token id must be an integer, not {token_id!r:.60}"
            ) from None
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(
                f"token id {token_id} is outside the vocabulary of "
                f"{self.vocab_size} tokens"
            )
        return token_id

    def _visible_token(self, token_id: int) -> str | None:
        token = self.backend.id_to_token(self._check_id(token_id))
        return None if token in self._hidden else token

    def _literal_backend(self) -> tokenizers.Tokenizer:
        """A second backend: the switch is a property, shared by all threads."""
        with self._lock:
            if self._literal is None:
                copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
                copy.encode_special_tokens = True
                self._literal = copy
            return self._literal
