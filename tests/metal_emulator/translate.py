"""From MLX's generated Metal source to C++ for OpenCL, which clang compiles.

The kernel author's text is kept as it is, but for two notations that no macro can
supply: ``vec<T, N>(...)`` and the literal suffixes ``h`` and ``bf``.
"""

import re
from dataclasses import dataclass

_VECTOR_IDS = {
    "thread_position_in_grid": "position_in_grid",
    "thread_position_in_threadgroup": "position_in_group",
    "threadgroup_position_in_grid": "group_in_grid",
    "threads_per_threadgroup": "group_size",
    "dispatch_threads_per_threadgroup": "dispatched_group_size",
    "threads_per_grid": "grid_size",
    "grid_size": "grid_size",
    "threadgroups_per_grid": "groups",
}
_SCALAR_IDS = {
    "thread_index_in_threadgroup": "ids->index",
    "thread_index_in_simdgroup": "ids->lane",
    "simdgroup_index_in_threadgroup": "ids->simd",
    "simdgroups_per_threadgroup": "ids->simds",
    "dispatch_simdgroups_per_threadgroup": "(dispatched_threads(ids) + 31) / 32",
    "threads_per_simdgroup": "32",
    "thread_execution_width": "32",
    "thread_index_in_quadgroup": "ids->index % 4",
    "quadgroup_index_in_threadgroup": "ids->index / 4",
    "quadgroups_per_threadgroup": "ids->simds * 8",
    "dispatch_quadgroups_per_threadgroup": "(dispatched_threads(ids) + 3) / 4",
}

# Declared before and after the author's text, to find that text in clang's output.
AUTHOR_BEGINS = "metal_emulator_author_begins"
AUTHOR_ENDS = "metal_emulator_author_ends"

_TEMPLATE = """\
#include "prelude.h"
struct {begins};
#line 1 "header"
{header}
{constants}__kernel void {name}({signature}) {{
#line 1 "body"
{body}
}}
#line 1 "call"
struct {ends};
#include "ids.h"
inline uint dispatched_threads(const thread EmulatorIds* ids) {{
  const thread unsigned* size = ids->dispatched_group_size;
  return size[0] * size[1] * size[2];
}}
extern "C" void metal_emulator_call(
    const thread ulong* buffers, const thread EmulatorIds* ids) {{
  {name}({arguments});
}}
"""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the kernel: ``type name [[attribute]]``."""

    type: str
    name: str
    attribute: str


@dataclass(frozen=True)
class Translation:
    """A kernel as C++ for OpenCL, and the names of its buffers in order."""

    name: str
    text: str
    buffers: tuple[str, ...]


def translate(metal: str, body: str) -> Translation:
    """Translates MLX's generated source, which holds the author's ``body``."""
    before, after = metal.split("[[kernel]] void ", 1)
    signature, after = after.split(") {\n", 1)
    name, parameter_lines = signature.split("(\n", 1)
    if not after.startswith(body):
        raise ValueError("MLX's generated source does not hold the kernel's body")
    header, constants = _template_arguments(before, after[len(body) :])
    parameters = [_parameter(line) for line in parameter_lines.split(",\n")]
    text = _TEMPLATE.format(
        begins=AUTHOR_BEGINS,
        ends=AUTHOR_ENDS,
        header=_rewrite(header),
        constants=constants,
        name=name,
        signature=", ".join(f"{p.type} {p.name}" for p in parameters),
        body=_rewrite(body),
        arguments=",\n      ".join(_arguments(parameters)),
    )
    buffers = tuple(p.name for p in parameters if p.attribute == "buffer")
    return Translation(name, text, buffers)


def _parameter(line: str) -> Parameter:
    m = re.fullmatch(r"\s*(.*?)\s*(\w+) \[\[(\w+)(?:\(\d+\))?\]\]\s*", line)
    if not m:
        raise ValueError(f"cannot read the kernel parameter {line!r}")
    return Parameter(*m.groups())


def _arguments(parameters: list[Parameter]) -> list[str]:
    """What ``metal_emulator_call`` passes for each parameter."""
    arguments = []
    buffer = 0
    for p in parameters:
        if p.attribute != "buffer":
            arguments.append(_id(p.attribute))
            continue
        if p.type.endswith("&"):
            arguments.append(f"*({p.type[:-1]}*)buffers[{buffer}]")
        else:
            arguments.append(f"({p.type})buffers[{buffer}]")
        buffer += 1
    return arguments


def _id(attribute: str) -> str:
    if attribute == "grid_origin":
        return "uint3{0, 0, 0}"
    if attribute in _SCALAR_IDS:
        return _SCALAR_IDS[attribute]
    field = _VECTOR_IDS[attribute]
    elements = ", ".join(f"ids->{field}[{i}]" for i in range(3))
    return f"uint3{{{elements}}}"


def _template_arguments(before: str, after: str) -> tuple[str, str]:
    """Splits off ``template <...>``; its arguments become constants and aliases.

    MLX instantiates the kernel behind its body with ``decltype(name<values>)``.
    """
    m = re.search(r"template <([^>]*)>\n$", before)
    if not m:
        return before, ""
    instance = re.search(r"decltype\(\w+<(.*?)>\)", after)
    assert instance
    declarations = ""
    for parameter, value in zip(m[1].split(", "), instance[1].split(", "), strict=True):
        kind, name = parameter.split(" ")
        if kind == "typename":
            declarations += f"using {name} = {value};\n"
        else:
            declarations += f"static constexpr __constant {kind} {name} = {value};\n"
    return before[: m.start()], declarations


def _rewrite(source: str) -> str:
    number = r"\b(\d+\.\d*(?:e[-+]?\d+)?)"
    source = re.sub(number + r"bf\b", r"((bfloat)\1f)", source)
    source = re.sub(number + r"h\b", r"((half)\1f)", source)
    make = r"metal_emulator::construct<metal::vec<\1, \2>>::make("
    return re.sub(r"\bvec<(\w+),\s*(\w+)>\(", make, source)
