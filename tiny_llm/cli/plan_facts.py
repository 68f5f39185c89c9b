"""What `tiny-llm plan` computes: from a model's configuration alone, no weights."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..config import ConfigReader
from ..devices import DEVICES, Device, find_device
from ..errors import ParameterError, UnsupportedModelError
from ..fuse import check_quantization
from ..gguf_file import GGUFFile
from ..hub import find_model
from ..json_files import read_json
from ..memory import (
    KvShape,
    checked_packing,
    fits,
    kv_cache_bytes,
    largest_batch,
    largest_context,
)
from ..models import Decoder, build
from ..roofline import DecoderCost, bound, decode_work, prefill_work
from .model_size import (
    WeightSizes,
    count_matrices,
    count_parameters,
    stored_packing,
    uniform_packing,
    weight_sizes,
)

Facts = dict[str, Any]
_DEFAULT_CONTEXT = 2048
_KV_BYTES = 2  # of a number that is not packed: float16 or bfloat16
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class Described(NamedTuple):
    """A model's configuration, where it is from, and bytes per unpacked weight."""

    config: Mapping[str, Any]
    where: str
    element_bytes: int


class _Weights(NamedTuple):
    stored_as: str
    sizes: WeightSizes


class _Case(NamedTuple):
    """One way to pack the caches of the planned conversations."""

    kv_bits: int
    packing: Facts  # options of kv_cache_bytes
    cost: DecoderCost


def plan_facts(args: Namespace) -> Facts:
    """The facts, in the order to show them; all sizes in bytes, times in seconds.

    Raises LoadError and ParameterError, naming the file, setting or option.
    """
    described = describe(args.model, args.revision)
    model = build(ConfigReader(described.config, described.where))
    most = model.config.context_length
    context = min(_DEFAULT_CONTEXT, most) if args.context is None else args.context
    if context > most:
        raise ParameterError(
            f"--context is {context}, but the model's context is {most} tokens"
        )
    weights = _weights(model, described, args.weight_bits)
    shape = KvShape(
        model.config.windows, model.config.kv_heads, model.config.head_dim, _KV_BYTES
    )
    cases, not_packed = _cases(model, shape, weights.sizes.read, args.kv_bits)
    devices = DEVICES if args.device is None else (find_device(args.device),)
    return {
        "model": args.model,
        "architecture": model.config.model_type,
        "parameters": count_parameters(model),
        "model_context": most,
        "weights": {"stored_as": weights.stored_as, "bytes": weights.sizes.all},
        "batch": args.batch,
        "context": context,
        "memory": args.memory,
        "kv": [_kv_facts(case, args.batch, context, weights.sizes) for case in cases],
        "not_packed": not_packed,
        "devices": [
            _device_facts(device, cases, args, context, most, weights.sizes.all)
            for device in devices
        ],
    }


def describe(name: str, revision: str | None) -> Described:
    """The configuration of a model; of one on the Hub, config.json alone is fetched."""
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        if revision is not None:
            raise ParameterError(f"--revision has no meaning for the file {name}")
    elif ":" in name and name.endswith(".gguf") and not path.exists():
        raise ParameterError(
            f"{name} would be fetched whole, weights included: name a repository with "
            f"a config.json (and --weight-bits), or the path of a file that is here"
        )
    else:
        path = find_model(name, revision=revision, files=("config.json",))
        if path.is_dir():
            path = path / "config.json"
    if path.suffix != ".json":
        file = GGUFFile(path)
        is_float32 = file.metadata.get("general.file_type") == 0
        return Described(file.config(), str(path), 4 if is_float32 else 2)
    config = read_json(path)
    dtype = config.get("dtype") or config.get("torch_dtype")
    return Described(config, str(path), _DTYPE_BYTES.get(str(dtype), 2))


def _weights(model: Decoder, described: Described, bits: int | None) -> _Weights:
    if bits is not None:
        return _Weights(f"{bits} bits", weight_sizes(model, 2, uniform_packing(bits)))
    config, where, element_bytes = described
    quantization = config.get("quantization")
    check_quantization(quantization, where)
    foreign = config.get("quantization_config")
    if foreign and not quantization:
        method = foreign.get("quant_method") if isinstance(foreign, dict) else None
        raise UnsupportedModelError(
            f"{where}: the weights are quantised by {method!r}, which tiny_llm does "
            f"not read; plan another copy of the model with --weight-bits"
        )
    if quantization:
        size = quantization["group_size"]
        name = f"{quantization['bits']} bits in groups of {size}, as stored"
    else:
        name = f"{8 * element_bytes} bits, as stored"
    sizes = weight_sizes(model, element_bytes, stored_packing(quantization))
    return _Weights(name, sizes)


def _cases(
    model: Decoder, shape: KvShape, read_bytes: int, asked: str
) -> tuple[list[_Case], str | None]:
    """The cases for --kv-bits, and why there are none that pack (None: there are)."""
    matrices = count_matrices(model)
    heads, not_packed = model.config.heads, None
    cases = []
    for bits in (16, 8, 4) if asked == "all" else (int(asked),):
        packing: Facts = {}
        if bits != 16:
            try:
                packed = checked_packing(bits, None, shape.head_dim)
            except ParameterError as error:
                if asked != "all":
                    raise
                not_packed = str(error)
                continue
            packing = packed._asdict() if packed else {}
        cost = DecoderCost(
            *matrices,
            heads,
            shape,
            read_bytes,
            packing.get("bits"),
            packing.get("group_size"),
        )
        cases.append(_Case(bits, packing, cost))
    return cases, not_packed


def _kv_facts(case: _Case, batch: int, context: int, weights: WeightSizes) -> Facts:
    shape, layouts = case.cost.kv, ["dense", "paged"]
    if any(window is not None for window in shape.windows):
        layouts.append("rotating")
    sizes = {}
    for layout in layouts:
        kind = "quantized" if case.packing and layout == "dense" else layout
        sizes[layout] = kv_cache_bytes(
            shape, kind, tokens=context, batch=batch, **case.packing
        )
    row = shape.row_bytes(case.packing.get("bits"), case.cost.group_size)
    decode = decode_work(case.cost, batch=batch, context=context)
    prefill = prefill_work(case.cost, tokens=context)
    return {
        "bits": case.kv_bits,
        "bytes_per_token": row * len(shape.windows),
        "bytes": sizes,
        "bytes_with_weights": sizes["paged"] + weights.all,
        "decode_flops": decode.flops,
        "decode_bytes": decode.bytes,
        "decode_intensity": decode.intensity,
        "prefill_flops": prefill.flops,
        "prefill_bytes": prefill.bytes,
        "prefill_intensity": prefill.intensity,
    }


def _device_facts(
    device: Device,
    cases: Sequence[_Case],
    args: Namespace,
    context: int,
    most: int,
    weight_bytes: int,
) -> Facts:
    usable = device.memory * 3 // 4  # an assumption: the rest is for macOS and others
    if args.memory is not None and args.device and args.memory > device.memory:
        raise ParameterError(
            f"--memory is {args.memory} bytes, but the {device.name} is sold with "
            f"{device.memory} at most"
        )
    limit = usable if args.memory is None else min(args.memory, device.memory)
    plans = []
    for case in cases:
        shape = case.cost.kv
        options: Facts = {"weight_bytes": weight_bytes, **case.packing}
        fitting = fits(
            limit, shape, "paged", tokens=context, batch=args.batch, **options
        )
        step = bound(decode_work(case.cost, batch=args.batch, context=context), device)
        prompt = bound(prefill_work(case.cost, tokens=context), device)
        plans.append(
            {
                "kv_bits": case.kv_bits,
                "fits": fitting,
                "largest_batch": largest_batch(
                    limit, shape, "paged", tokens=context, **options
                ),
                "largest_context": largest_context(
                    limit, shape, "paged", batch=args.batch, most=most, **options
                ),
                "decode_seconds": step.seconds,
                "decode_tokens_per_second": args.batch / step.seconds,
                "decode_limit": step.limit,
                # by bandwidth alone it would promise far too much
                "prefill_seconds": None if device.flops is None else prompt.seconds,
                "prefill_limit": None if device.flops is None else prompt.limit,
            }
        )
    return {
        "name": device.name,
        "memory": device.memory,
        "memory_for_plan": limit,
        "bandwidth": device.bandwidth,
        "flops": device.flops,
        "ridge": device.ridge,
        "source": device.source,
        "plans": plans,
    }
