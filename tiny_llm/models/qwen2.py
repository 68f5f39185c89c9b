"""Qwen 2 and 2.5: biases on q, k and v; an optional window in the upper layers."""

from ..config import ConfigReader
from .decoder import Decoder, read_config, read_windows


def build(config: ConfigReader) -> Decoder:
    """The model, without weights, that a config.json of this family describes."""
    return Decoder(
        read_config(
            config,
            windows=qwen_windows(config),
            kv_heads=32,
            max_positions=32768,
            qkv_bias=True,
        )
    )


def qwen_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """The windows: from layer `max_window_layers` on, if `use_sliding_window`."""
    layers = config.integer("num_hidden_layers", most=4096)
    first = config.integer("max_window_layers", 28, least=0)
    stored = config.integer("sliding_window", 4096)
    # absent: 4096, as transformers has it; null: no window
    off = config.has("sliding_window") and "sliding_window" not in config
    use = config.boolean("use_sliding_window") and not off
    window = stored if use else None
    default = [
        "sliding_attention" if window and index >= first else "full_attention"
        for index in range(layers)
    ]
    return read_windows(config, default, window)
