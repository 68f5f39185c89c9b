"""config.json, read key by key: nothing is guessed and nothing is ignored unseen.

A model asks a ConfigReader for the keys it implements. `finish` then refuses every key
that nobody asked for, unless it is off (null, false, empty) or known not to change what
the model computes.
"""

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from .errors import UnsupportedModelError

T = TypeVar("T", bound="int | float | str")

# Keys about training, bookkeeping or generation defaults.
_HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash
    _flash_attn_2_enabled _name_or_path add_cross_attention architectures
    attention_dropout attn_dropout attn_pdrop auto_map begin_suppress_tokens
    bos_token_id chunk_size_feed_forward cls_token_id cross_attention_hidden_size
    decoder_start_token_id do_sample dtype embd_pdrop eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id hidden_dropout hidden_dropout_prob id2label
    initializer_range is_decoder is_llama_config keys_to_ignore_at_inference
    label2id length_penalty max_length max_sequence_length min_length
    model_max_length neftune_noise_alpha no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_attentions output_hidden_states
    output_scores pad_token_id prefix problem_type pruned_heads quantization
    quantization_config remove_invalid_values repetition_penalty resid_pdrop
    return_dict return_dict_in_generate sep_token_id task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p
    torch_dtype torchscript transformers.js_config transformers_version typical_p
    unk_token_id unsloth_fixed unsloth_free unsloth_version use_bfloat16 use_cache
    vocab_size_padded
    """.split()
)


class ConfigReader:
    """Typed access to one JSON object of a model's configuration."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """values: the parsed object; where: its name in messages, e.g. a path."""
        self._values = values
        self.where = where
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the key is present and not null."""
        return self._values.get(key) is not None

    def has(self, key: str) -> bool:
        """Whether the key is present, null included."""
        return key in self._values

    def raw(self, key: str) -> Any:
        """The value as it stands (None if absent)."""
        self._asked.add(key)
        return self._values.get(key)

    def fail(self, key: str, found: Any, remedy: str) -> NoReturn:
        """Raise the error for a value that cannot be used."""
        raise UnsupportedModelError(
            f"{self.where}: {key} is {found!r}, but tiny_llm {remedy}"
        )

    def _typed(
        self, key: str, kind: type, default: Any, required: bool, names: str
    ) -> Any:
        value = self.raw(key)
        if value is None:
            if required:
                raise UnsupportedModelError(f"{self.where}: {key} is missing")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(min(max(value, -(1 << 1000)), 1 << 1000))
        if not isinstance(value, kind) or (
            isinstance(value, bool) and kind is not bool
        ):
            self.fail(key, value, f"needs {names} there")
        return value

    def integer(
        self,
        key: str,
        default: int | None = None,
        *,
        least: int = 1,
        most: int = 1 << 31,
    ) -> int:
        """A whole number in least .. most; required if no default is given."""
        value = self._typed(key, int, default, default is None, "a whole number")
        if not least <= value <= most:
            self.fail(key, value, f"needs a whole number in {least} .. {most} there")
        return int(value)

    def number(
        self, key: str, default: float | None = None, *, above: float = 0.0
    ) -> float:
        """A finite number greater than `above`; required if no default is given."""
        value = self._typed(key, float, default, default is None, "a number")
        if not above < value < 1e30:
            self.fail(key, value, f"needs a number above {above:g} there, below 1e30")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        """True or false."""
        return bool(self._typed(key, bool, default, False, "true or false"))

    def string(self, key: str, default: str | None = None) -> str:
        """A string; required if no default is given."""
        return str(self._typed(key, str, default, default is None, "a string"))

    def strings(self, key: str) -> list[str] | None:
        """A list of strings, or None if absent."""
        value = self._typed(key, list, None, False, "a list of strings")
        if value is not None and not all(isinstance(v, str) for v in value):
            self.fail(key, value, "needs a list of strings there")
        return value if value is None else list(value)

    def numbers(self, key: str, length: int) -> list[float]:
        """A list of `length` positive numbers; required."""
        value = self._typed(key, list, None, True, "a list of numbers")
        good = len(value) == length and all(
            isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < 1e30
            for v in value
        )
        if not good:
            self.fail(key, value, f"needs a list of {length} positive numbers there")
        return [float(v) for v in value]

    def choice(self, key: str, default: T, *, of: tuple[T, ...]) -> T:
        """One of a few values; anything else is not implemented."""
        value = self.raw(key)
        if value is None:
            return default
        for known in of:
            if value == known and isinstance(value, bool) == isinstance(known, bool):
                return known
        names = ", ".join(repr(v) for v in of)
        self.fail(key, value, f"implements {names}")

    def inner(self, key: str) -> "ConfigReader | None":
        """The JSON object under a key, or None if absent."""
        value = self._typed(key, dict, None, False, "an object")
        return None if value is None else ConfigReader(value, f"{self.where}: {key}")

    def finish(self, harmless: frozenset[str] = frozenset()) -> None:
        """Refuse the keys that nobody asked for."""
        known = self._asked | _HARMLESS | harmless
        left = {
            key: value
            for key, value in self._values.items()
            if key not in known and value not in (None, False, "", [], {})
        }
        if left:
            shown = ", ".join(f"{k}={str(v)[:60]}" for k, v in sorted(left.items()))
            raise UnsupportedModelError(
                f"{self.where}: tiny_llm does not implement {shown}. If that does not "
                f"change what this model computes, take a copy without it"
            )
