"""A name or a path -> a model and its tokenizer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from . import blas
from .config import ConfigReader
from .errors import ParameterError, UnsupportedModelError
from .fuse import Checkpoint, check_quantization, fill
from .gguf_file import GGUFFile
from .hub import find_model
from .json_files import read_json
from .kernels import can_fuse, exp_below, on_gpu, rms_norm, swiglu
from .models import Decoder, build
from .progress import progress_bar
from .quantize import bits_of
from .quantize import quantize as quantize_model
from .tokenizer import Tokenizer
from .weight_files import read_weights

_log = logging.getLogger("tiny_llm")

_DTYPES = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}


class Loaded(NamedTuple):
    """What `load` returns."""

    model: Decoder
    tokenizer: Tokenizer


def load(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str = "auto",
    quantize: str | None = None,
) -> Loaded:
    """Load a model and its tokenizer: `model, tokenizer = load("smollm2")`.

    name_or_path: "smollm2" (the default model), a Hugging Face repo ("owner/name"), a
    folder, or a .gguf file. revision: a branch, tag or commit of the repo.
    dtype: "float32", "float16", "bfloat16", or "auto": as stored on Metal; float32 on
    the CPU, since MLX's other CPU products are 10 to 100 times slower. There, float32
    also means that quantised weights are dequantised. quantize: "4bit" or "8bit"
    quantises on load (on the CPU in float32, the rounded weights are kept dense).

    Raises LoadError or TokenizerError, which name the file or the setting, and
    ParameterError for a bad argument.
    """
    files = _Files(name_or_path, revision, dtype, quantize)
    model = files.build()
    tokenizer = _read_tokenizer(files.path)  # before the weights: it takes less time
    files.fill(model)
    return Loaded(model, tokenizer)


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str = "auto",
    quantize: str | None = None,
) -> Decoder:
    """As `load`, the model alone: the folder needs no tokenizer files."""
    files = _Files(name_or_path, revision, dtype, quantize)
    model = files.build()
    files.fill(model)
    return model


def load_tokenizer(
    name_or_path: str | os.PathLike[str], *, revision: str | None = None
) -> Tokenizer:
    """As `load`, the tokenizer alone. A repo's weights are not fetched."""
    return _read_tokenizer(
        find_model(name_or_path, revision=revision, files=_TOKENIZER_FILES)
    )


_TOKENIZER_FILES: Sequence[str] = ("*.json", "*.jinja", "tokenizer*")


def _read_tokenizer(path: Path) -> Tokenizer:
    if path.is_dir():
        return Tokenizer.from_folder(path)
    return Tokenizer.from_gguf(GGUFFile(path).metadata)


class _Files:
    """A model's configuration and weights, as a folder or a GGUF file holds them."""

    def __init__(
        self,
        name_or_path: str | os.PathLike[str],
        revision: str | None,
        dtype: str,
        quantize: str | None,
    ) -> None:
        if dtype not in ("auto", *_DTYPES):
            names = ", ".join(["auto", *_DTYPES])
            raise ParameterError(f"dtype is {dtype!r}; one of {names} is needed")
        self.bits = None if quantize is None else bits_of(quantize)
        # On the CPU only the half-precision types keep packed weights.
        self.dense = dtype in ("auto", "float32") and not on_gpu()
        self.dtype = mx.float32 if self.dense else _DTYPES.get(dtype)
        self.path = path = find_model(name_or_path, revision=revision)
        self.gguf = None if path.is_dir() else GGUFFile(path)
        if self.gguf is None:
            self.where = path / "config.json"
            self.config: Mapping[str, Any] = read_json(self.where)
        else:
            self.where = path
            self.config = self.gguf.config()

    def build(self) -> Decoder:
        """The model without weights."""
        packing = self.config.get("quantization")
        foreign = self.config.get("quantization_config")
        check_quantization(packing, str(self.where))
        if foreign and not packing:  # MLX writes both
            method = foreign.get("quant_method") if isinstance(foreign, dict) else None
            raise UnsupportedModelError(
                f"{self.where}: the weights are quantised by {method!r}; tiny_llm "
                f"reads those of MLX and GGUF. Take another copy of the model"
            )
        if packing and self.bits is not None:
            raise UnsupportedModelError(
                f"{self.where}: the weights are quantised already; load the model "
                f"without quantize="
            )
        return build(ConfigReader(self.config, str(self.where)))

    def fill(self, model: Decoder) -> None:
        """Read the weights into the model, with a progress bar if that takes long."""
        if not on_gpu():
            blas.require()
            blas.keep_freed_memory()
            advice = blas.advice()
            if advice is not None:
                _log.warning(advice)
            if self.dtype != mx.float32:
                _log.warning(
                    "half-precision products are 10 to 100 times slower than float32 "
                    "on MLX's CPU backend"
                )
        if self.gguf is None:
            weights = read_weights(self.path)
        else:
            weights = self.gguf.weights(keep_quantized=not self.dense)
        checkpoint = Checkpoint(
            weights, self.config.get("quantization"), str(self.path)
        )
        del weights
        with progress_bar(f"Loading {self.path.name}") as progress:
            fill(
                model,
                checkpoint,
                dtype=self.dtype,
                dequantise=self.dense,
                progress=progress,
            )
        if self.bits is not None:
            quantize_model(model, self.bits, keep_dense=self.dense)
        if not on_gpu() and can_fuse():
            _compile_loops(model.norm.weight.dtype)


def _compile_loops(dtype: mx.Dtype) -> None:
    """Have MLX compile the fused loops now and not in an answer.

    The first time on a machine that takes some seconds (`g++`, half a second a loop);
    later the loops are found in the temporary folder.
    """
    many = mx.zeros((64, 256), dtype=dtype)
    halves = mx.split(many, 2, axis=-1)
    steps: tuple[Callable[[], mx.array], ...] = (
        lambda: exp_below(many, many),
        lambda: swiglu(*halves),
        lambda: swiglu(halves[0][:1], halves[1][:1]),
        lambda: rms_norm(many[:1], many[0], 1e-6),
    )
    with progress_bar("Compiling loops (once on this machine)") as progress:
        for done, step in enumerate(steps):
            mx.eval(step())
            progress(done + 1, len(steps))
