"""From the `model_type` of a config.json to the module that builds the model."""

from collections.abc import Callable

from ..config import ConfigReader
from . import llama, mistral, qwen2, qwen3
from .decoder import Decoder

_BUILDERS: dict[str, Callable[[ConfigReader], Decoder]] = {
    "llama": llama.build,
    "mistral": mistral.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
}


def build(config: ConfigReader) -> Decoder:
    """The model that a configuration describes, without weights.

    Raises UnsupportedModelError, naming the architecture or the setting.
    """
    name = config.string("model_type")
    if name not in _BUILDERS:
        names = ", ".join(sorted(_BUILDERS))
        config.fail("model_type", name, f"implements {names}")
    return _BUILDERS[name](config)


def supported() -> list[str]:
    """The model types that can be loaded."""
    return sorted(_BUILDERS)
