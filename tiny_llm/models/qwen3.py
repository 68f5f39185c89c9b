"""Qwen 3 (dense): Qwen 2 with an RMS norm on each query and key head, no q/k/v bias."""

from ..config import ConfigReader
from .decoder import Decoder, read_config
from .qwen2 import qwen_windows


def build(config: ConfigReader) -> Decoder:
    """The model, without weights, that a config.json of this family describes."""
    attention_bias = config.boolean("attention_bias")
    return Decoder(
        read_config(
            config,
            windows=qwen_windows(config),
            kv_heads=32,
            head_dim=128,
            max_positions=32768,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            qk_norm=True,
        )
    )
