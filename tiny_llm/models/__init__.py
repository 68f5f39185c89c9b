"""Architectures: one file each over shared blocks; none knows of cache layouts."""

from .decoder import Decoder, DecoderConfig
from .registry import build, supported

__all__ = ["Decoder", "DecoderConfig", "build", "supported"]
