"""Llama 2, 3 and 3.x, and what is built like them: SmolLM2, TinyLlama."""

from ..config import ConfigReader
from .decoder import Decoder, read_config


def build(config: ConfigReader) -> Decoder:
    """The model, without weights, that a config.json of this family describes."""
    attention_bias = config.boolean("attention_bias")
    return Decoder(
        read_config(
            config,
            max_positions=2048,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            mlp_bias=config.boolean("mlp_bias"),
        )
    )
