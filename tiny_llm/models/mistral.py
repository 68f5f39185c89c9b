"""Mistral: Llama with a sliding window, in all layers or in those of `layer_types`."""

from ..config import ConfigReader
from .decoder import Decoder, read_config, read_windows


def build(config: ConfigReader) -> Decoder:
    """The model, without weights, that a config.json of this family describes."""
    # absent: 4096, as transformers has it; null: no window
    window = None
    if not config.has("sliding_window") or "sliding_window" in config:
        window = config.integer("sliding_window", 4096)
    else:
        config.raw("sliding_window")
    layers = config.integer("num_hidden_layers", most=4096)
    kind = "full_attention" if window is None else "sliding_attention"
    return Decoder(
        read_config(
            config,
            windows=read_windows(config, [kind] * layers, window),
            kv_heads=8,
            max_positions=4096 * 32,
        )
    )
