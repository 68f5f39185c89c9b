"""GGUF metadata as a Hugging Face config, and GGUF tensor names as theirs.

The keys are llama.cpp's (gguf-py/gguf/constants.py). A key that changes the result
and that we don't know is refused, never passed over.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .errors import CorruptFileError, UnsupportedModelError, WeightsError
from .gguf_header import GGUFHeader

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"
# Our attention ignores llama.cpp's precomputed frequencies, as llama.cpp does.
_IGNORED_SUFFIXES = (".attn_rot_embd", ".attn_rot_embd.weight")
_KNOWN_KEYS = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.causal",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "use_parallel_residual",
        "tensor_data_layout",
    }
)


@dataclass(frozen=True)
class Place:
    """Where a GGUF tensor goes: its Hugging Face name and the shape it must have."""

    name: str
    shape: tuple[int, ...]
    required: bool = True
    heads: int = 0  # > 0: llama.cpp interleaved the rows of this many heads


class GGUFConfig:
    """Reads one header's metadata; `values` is the config.json-like dictionary."""

    def __init__(self, path: Path, header: GGUFHeader) -> None:
        self._path, self._metadata, self._tensors = (
            path,
            header.metadata,
            header.tensors,
        )
        arch = header.metadata.get("general.architecture")
        if arch not in ARCHITECTURES:
            self._refuse(
                f"the architecture {arch!r} is not supported from GGUF; "
                f"these are: {', '.join(ARCHITECTURES)}"
            )
        self._arch: str = arch
        self._refuse_unknown_keys()
        self.values = self._values()

    def places(self) -> dict[str, Place]:
        """Each tensor of the file -> its place.

        Raises WeightsError naming the tensor that is missing, has no place in this
        architecture, or has another shape than the metadata ask for.
        """
        expected = self._expected()
        for name, place in expected.items():
            info = self._tensors.get(name)
            if info is None and place.required:
                raise WeightsError(f"{self._path} lacks the tensor {name!r}")
            if info is not None and info.shape != place.shape:
                raise WeightsError(
                    f"{self._path}: the tensor {name!r} has the shape "
                    f"{list(info.shape)}; its metadata ask for {list(place.shape)}"
                )
        for name in self._tensors:
            if name not in expected and not self._is_ignored(name):
                raise WeightsError(
                    f"{self._path}: the tensor {name!r} has no place in a "
                    f"{self.values['model_type']} model of "
                    f"{self.values['num_hidden_layers']} layers"
                )
        return {name: p for name, p in expected.items() if name in self._tensors}

    def _is_ignored(self, name: str) -> bool:
        return name == ROPE_FACTORS or name.endswith(_IGNORED_SUFFIXES)

    def _expected(self) -> dict[str, Place]:
        v = self.values
        E, F, V = v["hidden_size"], v["intermediate_size"], v["vocab_size"]
        H, Hkv, D = v["num_attention_heads"], v["num_key_value_heads"], v["head_dim"]
        interleaved = self._arch == "llama"
        q_heads, k_heads = (H, Hkv) if interleaved else (0, 0)
        norms = self._arch == "qwen3"
        bias = self._arch == "qwen2"
        block = {
            "attn_norm.weight": Place("input_layernorm.weight", (E,)),
            "ffn_norm.weight": Place("post_attention_layernorm.weight", (E,)),
        }
        if norms:
            block["attn_q_norm.weight"] = Place("self_attn.q_norm.weight", (D,))
            block["attn_k_norm.weight"] = Place("self_attn.k_norm.weight", (D,))
        for ours, theirs, rows, columns, heads, needs_bias in (
            ("attn_q", "self_attn.q_proj", H * D, E, q_heads, bias),
            ("attn_k", "self_attn.k_proj", Hkv * D, E, k_heads, bias),
            ("attn_v", "self_attn.v_proj", Hkv * D, E, 0, bias),
            ("attn_output", "self_attn.o_proj", E, H * D, 0, False),
            ("ffn_gate", "mlp.gate_proj", F, E, 0, False),
            ("ffn_up", "mlp.up_proj", F, E, 0, False),
            ("ffn_down", "mlp.down_proj", E, F, 0, False),
        ):
            block[f"{ours}.weight"] = Place(
                f"{theirs}.weight", (rows, columns), heads=heads
            )
            block[f"{ours}.bias"] = Place(f"{theirs}.bias", (rows,), needs_bias, heads)
        expected = {
            "token_embd.weight": Place("model.embed_tokens.weight", (V, E)),
            "output_norm.weight": Place("model.norm.weight", (E,)),
            "output.weight": Place("lm_head.weight", (V, E), required=False),
        }
        for layer in range(v["num_hidden_layers"]):
            for ours, p in block.items():
                expected[f"blk.{layer}.{ours}"] = Place(
                    f"model.layers.{layer}.{p.name}", p.shape, p.required, p.heads
                )
        return expected

    def _values(self) -> dict[str, Any]:
        E = self._count("embedding_length")
        H = self._count("attention.head_count")
        Hkv = self._count("attention.head_count_kv", default=H)
        if E % H and self._get("attention.key_length") is None:
            self._fail(f"{H} heads do not divide the embedding length {E}")
        D = self._count("attention.key_length", default=max(E // H, 1))
        if H % Hkv:
            self._fail(f"{Hkv} key-value heads do not divide {H} heads")
        for key in ("attention.value_length", "rope.dimension_count"):
            found = self._count(key, default=D)
            if found != D:
                self._refuse(f"{key} {found} differs from the head dimension {D}")
        if D % 2:
            self._fail(f"the head dimension {D} is odd")
        layers = self._count("block_count")
        if layers > len(self._tensors):
            self._fail(f"{layers} layers cannot come from {len(self._tensors)} tensors")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise WeightsError(f"{self._path} lacks the tensor 'token_embd.weight'")
        window = self._get("attention.sliding_window")
        values: dict[str, Any] = {
            "model_type": self._arch,
            "hidden_act": "silu",
            "hidden_size": E,
            "num_hidden_layers": layers,
            "num_attention_heads": H,
            "num_key_value_heads": Hkv,
            "head_dim": D,
            "intermediate_size": self._count("feed_forward_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "vocab_size": embedding.shape[0],
            "max_position_embeddings": self._count("context_length"),
            "rope_theta": self._number("rope.freq_base", default=10000.0),
            "rope_scaling": self._rope_scaling(D),
            "tie_word_embeddings": "output.weight" not in self._tensors,
        }
        if window:
            if self._arch != "llama":
                self._refuse(f"a sliding window in a {self._arch} GGUF is unknown")
            # Hugging Face's Llama with a window is its Mistral.
            values["model_type"] = "mistral"
            values["sliding_window"] = self._count("attention.sliding_window")
        elif self._arch == "llama":
            values["mlp_bias"] = "blk.0.ffn_gate.bias" in self._tensors
        if self._arch != "qwen2" and not window:
            values["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        values |= self._special_ids()
        return values

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        kind = self._get("rope.scaling.type")
        if kind is None:  # llama.cpp takes a bare factor as linear scaling
            kind = "linear"
        factor = self._number(
            "rope.scaling.factor", default=self._number("rope.scale_linear", 1.0)
        )
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
            if self._number(f"rope.scaling.{key}", default=1.0) != 1.0:
                self._refuse(f"rope.scaling.{key} is not supported")
        if kind not in ("none", "linear", "yarn"):
            self._refuse(f"the rope scaling type {kind!r} is not supported")
        scaled = kind != "none" and factor != 1.0
        if ROPE_FACTORS in self._tensors:
            if scaled:
                self._refuse(f"{ROPE_FACTORS} together with {kind} rope scaling")
            info = self._tensors[ROPE_FACTORS]
            if info.shape != (head_dim // 2,) or info.type_name != "F32":
                raise WeightsError(
                    f"{self._path}: {ROPE_FACTORS} is {info.type_name} "
                    f"{list(info.shape)}, not F32 {[head_dim // 2]}"
                )
            return {"rope_type": "factors", "factors": []}  # filled from the tensor
        if not scaled:
            return None
        scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._count(
                "rope.scaling.original_context_length",
                default=self._count("context_length"),
            )
            for key in ("beta_fast", "beta_slow"):
                if self._get(f"rope.scaling.yarn_{key}") is not None:
                    scaling[key] = self._number(f"rope.scaling.yarn_{key}")
        return scaling

    def _special_ids(self) -> dict[str, Any]:
        def token(key: str) -> int | None:
            value = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
            if value is None or value in (-1, 2**32 - 1):  # -1 means none
                return None
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                self._fail(f"tokenizer.ggml.{key}_token_id is {value!r}, not an id")
            return value

        ends = [token(key) for key in ("eos", "eot", "eom")]
        eos = list(dict.fromkeys(i for i in ends if i is not None))
        ids: dict[str, Any] = {"bos_token_id": token("bos")}
        ids["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
        return ids

    def _refuse_unknown_keys(self) -> None:
        prefix = self._arch + "."
        for key, value in self._metadata.items():
            # A zero, false or empty value asks for nothing.
            if key.startswith(prefix) and key[len(prefix) :] not in _KNOWN_KEYS:
                if value in (0, False, "", []):
                    continue
                self._refuse(f"the setting {key} = {value!r:.60} is not supported")
        if self._get("attention.causal") is False:
            self._refuse("it is an encoder (attention.causal is false)")
        if self._get("use_parallel_residual"):
            self._refuse("use_parallel_residual is not supported")

    def _get(self, key: str) -> Any:
        return self._metadata.get(f"{self._arch}.{key}")

    def _count(self, key: str, default: int | None = None) -> int:
        """A positive integer; a list with one value per layer must be uniform."""
        value = self._get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                self._refuse(f"{self._arch}.{key} differs from layer to layer")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            self._fail(f"{self._arch}.{key} is {value!r:.60}, not an integer")
        if not 0 < value < 2**31:
            self._fail(f"{self._arch}.{key} is {value}, which is out of range")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(f"{self._arch}.{key} is {value!r:.60}, not a number")
        if not math.isfinite(value) or value <= 0:
            self._fail(f"{self._arch}.{key} is {value}, which is out of range")
        return float(value)

    def _fail(self, problem: str) -> NoReturn:
        raise CorruptFileError(f"{self._path} cannot be right: {problem}")

    def _refuse(self, problem: str) -> NoReturn:
        raise UnsupportedModelError(f"{self._path}: {problem}")
