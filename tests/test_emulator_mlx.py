"""The emulator runs MLX's own attention kernels, from the headers in its wheel.

Their text is read and adapted when the tests run; none of it is in this repository.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from emulator_tools import needs_emulator
from metal_emulator import DEFAULT_ORDERS, Kernel, Result

pytestmark = needs_emulator

HEADER = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels/sdpa_vector.h"
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.5e-2}
BLOCKS = 32  # of the two passes' kernels; they want a multiple of 32
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# Which function constant switches a buffer on.
SWITCHED = {
    "bmask": "bool_mask",
    "fmask": "float_mask",
    "mask_kv_seq_stride": "has_mask",
    "mask_q_seq_stride": "has_mask",
    "mask_head_stride": "has_mask",
    "sinks": "has_sinks",
    "num_q_heads": "has_sinks",
}


class Parameter(NamedTuple):
    type: str
    name: str
    attribute: str


class Function(NamedTuple):
    """A kernel of the header; the body is what is between its braces."""

    template: list[str]
    parameters: list[Parameter]
    body: str


def _function(name: str) -> Function:
    text = HEADER.read_text()
    start = re.search(rf"template <([^>]*)>\s*\[\[kernel\]\] void {name}\(", text)
    opening = text.index(") {", start.end())
    closing = text.index("\n}\n", opening)
    signature = re.sub(r"\s+", " ", text[start.end() : opening])
    parameters = re.findall(r"(\w[\w ]*[*&]?) (\w+) \[\[(\w+)", signature)
    return Function(
        re.findall(r"(?:typename|int) (\w+)", start[1]),
        [Parameter(*parameter) for parameter in parameters],
        text[opening + len(") {") : closing],
    )


def _header(switches: set[str]) -> str:
    """MLX's function constants, as constants."""
    lines = []
    for kind, name in re.findall(
        r"constant (bool|int) (\w+) \[\[function_constant", HEADER.read_text()
    ):
        value = str(name in switches).lower() if kind == "bool" else BLOCKS
        lines.append(f"constant constexpr {kind} {name} = {value};\n")
    return "".join(lines)


def _declarations(function: Function, given: set[str]) -> str:
    """Names of MLX's for the thread's ids, and for buffers that are switched off."""
    lines = []
    for p in function.parameters:
        if p.attribute != "buffer":
            lines.append(f"{p.type} {p.name} = {p.attribute};\n")
        elif p.name not in given and p.type.endswith("*"):
            lines.append(f"{p.type} {p.name} = nullptr;\n")
        elif p.name not in given:
            kind = re.search(r"(\w+)&", p.type)[1]
            lines.append(f"const {kind} {p.name} = 0;\n")
    return "".join(lines)


@dataclass(frozen=True)
class Problem:
    """Queries [B, H, L, D] for a cache [B, Hkv, capacity, D], NaN from `context` on."""

    head_dim: int = 64
    dtype: mx.Dtype = mx.float32
    batch: int = 2
    heads: int = 8
    kv_heads: int = 2
    length: int = 3
    context: int = 70
    capacity: int = 75
    switches: frozenset[str] = frozenset()

    def _random(self, seed: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(self.dtype)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def query_shape(self) -> tuple[int, ...]:
        return (self.batch, self.heads, self.length, self.head_dim)

    def arrays(self) -> dict[str, mx.array]:
        rows = (self.batch, self.kv_heads, self.capacity, self.head_dim)
        live = mx.arange(self.capacity)[:, None] < self.context
        mask = (self.batch, self.heads, self.length, self.context)
        return {
            "queries": self._random(0, *self.query_shape),
            "keys": mx.where(live, self._random(1, *rows), mx.nan).astype(self.dtype),
            "values": mx.where(live, self._random(2, *rows), mx.nan).astype(self.dtype),
            "bmask": (self._random(3, *mask) > 0) | (mx.arange(self.context) == 5),
            "fmask": self._random(4, *mask),
            "sinks": self._random(5, self.heads),
        }

    def numbers(self) -> dict[str, mx.array]:
        stride = mx.array(self.head_dim, mx.uint64)
        head = mx.array(self.capacity * self.head_dim, mx.uint64)
        return {
            "gqa_factor": mx.array(self.heads // self.kv_heads),
            "N": mx.array(self.context),
            "k_head_stride": head,
            "k_seq_stride": stride,
            "v_head_stride": head,
            "v_seq_stride": stride,
            "scale": mx.array(self.scale),
            "mask_kv_seq_stride": mx.array(1),
            "mask_q_seq_stride": mx.array(self.context),
            "mask_head_stride": mx.array(self.context * self.length),
            "num_q_heads": mx.array(self.heads),
        }

    def visible(self) -> np.ndarray:
        """Which keys count: [B, H, L, context]."""
        seen = np.ones((self.batch, self.heads, self.length, self.context), bool)
        if "do_causal" in self.switches:
            rows = np.arange(self.length)[:, None] + self.context - self.length
            seen &= np.arange(self.context) <= rows
        if "bool_mask" in self.switches:
            seen &= np.array(self.arrays()["bmask"])
        return seen

    def reference(self) -> np.ndarray:
        """In float64."""
        arrays = {
            name: np.array(x.astype(mx.float32)).astype(np.float64)
            for name, x in self.arrays().items()
        }
        group = self.heads // self.kv_heads
        keys, values = (
            np.repeat(arrays[name][:, :, : self.context], group, axis=1)
            for name in ("keys", "values")
        )
        scores = arrays["queries"] @ keys.swapaxes(2, 3) * self.scale
        if "float_mask" in self.switches:
            scores += arrays["fmask"]
        weights = np.where(self.visible(), np.exp(scores), 0)
        total = weights.sum(-1, keepdims=True)
        if "has_sinks" in self.switches:
            total += np.exp(arrays["sinks"])[:, None, None]
        return weights @ values / total

    def run(
        self,
        name: str,
        inputs: dict[str, mx.array],
        outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        replaced: tuple[str, str] = ("", ""),
        mode: str = "check",
    ) -> Result:
        """Runs one of MLX's kernels as a custom one with these of its parameters."""
        function = _function(name)
        names = {p.name for p in function.parameters}
        inputs = {name: x for name, x in inputs.items() if name in names}
        text = function.body.replace(*replaced, 1)
        kernel = Kernel(
            name,
            list(inputs),
            list(outputs),
            _declarations(function, {*inputs, *outputs}) + text,
            _header({*self.switches}),
        )
        values = {"T": self.dtype, "D": self.head_dim, "V": self.head_dim, "TK": 4}
        return kernel.run(
            list(inputs.values()),
            output_shapes=[shape for shape, _ in outputs.values()],
            output_dtypes=[dtype for _, dtype in outputs.values()],
            grid=grid,
            threadgroup=threadgroup,
            template=[(name, values[name]) for name in function.template],
            mode=mode,
            orders=DEFAULT_ORDERS if mode == "check" else DEFAULT_ORDERS[:1],
        )

    def inputs(self) -> dict[str, mx.array]:
        """What MLX passes: masks and sinks only if they are switched on."""
        on = {None, *self.switches}
        given = self.arrays() | self.numbers()
        return {name: x for name, x in given.items() if SWITCHED.get(name) in on}

    def one_pass(
        self, replaced: tuple[str, str] = ("", ""), mode: str = "check"
    ) -> Result:
        """A threadgroup of 32 SIMD groups, which take keys in turn, per query."""
        outputs = {"out": (self.query_shape, self.dtype)}
        grid = (1024 * self.batch * self.heads, self.length, 1)
        return self.run(
            "sdpa_vector", self.inputs(), outputs, grid, (1024, 1, 1), replaced, mode
        )

    def two_passes(self) -> tuple[Result, Result]:
        """A threadgroup per block of keys and KV head, and one that joins them."""
        group = self.heads // self.kv_heads
        rows = (self.batch, self.heads, self.length, BLOCKS)
        first = self.run(
            "sdpa_vector_2pass_1",
            self.inputs(),
            {
                "out": ((*rows, self.head_dim), self.dtype),
                "sums": (rows, mx.float32),
                "maxs": (rows, mx.float32),
            },
            (32 * self.kv_heads, group * self.batch, self.length * BLOCKS),
            (32, group, self.length),
        )
        partials, sums, maxs = map(mx.array, first.outputs)
        second = self.run(
            "sdpa_vector_2pass_2",
            {
                "partials": partials.astype(self.dtype),
                "sums": sums,
                "maxs": maxs,
                "blocks": mx.array(BLOCKS),
            },
            {"out": (self.query_shape, self.dtype)},
            (1024 * self.batch * self.heads, self.length, 1),
            (1024, 1, 1),
        )
        return first, second


CAUSAL = frozenset({"do_causal"})
PROBLEMS = {
    "D 64": Problem(),
    "D 64, causal": Problem(switches=CAUSAL),
    "D 128": Problem(128, context=33, length=1),
    "D 128, causal": Problem(128, switches=CAUSAL),
    "one key": Problem(context=1, length=1),
    "no groups": Problem(heads=4, kv_heads=4),
    "groups of 8, causal": Problem(heads=8, kv_heads=1, switches=CAUSAL),
    "float16, causal": Problem(dtype=mx.float16, switches=CAUSAL),
    "bfloat16, causal": Problem(dtype=mx.bfloat16, switches=CAUSAL),
    "bool mask": Problem(switches=frozenset({"has_mask", "bool_mask"})),
    "float mask": Problem(switches=frozenset({"has_mask", "float_mask"})),
    "sinks, causal": Problem(switches=CAUSAL | {"has_sinks"}),
}


def _check(problem: Problem, result: Result) -> None:
    assert not result.reports
    error = np.abs(result.outputs[0] - problem.reference()).max()
    assert error <= TOLERANCE[problem.dtype]


@pytest.mark.parametrize("name", PROBLEMS)
def test_one_pass_is_attention(name: str) -> None:
    problem = PROBLEMS[name]
    _check(problem, problem.one_pass())


def test_one_pass_is_attention_in_mode_fast() -> None:
    problem = Problem(128, mx.float16, context=500, capacity=512, switches=CAUSAL)
    _check(problem, problem.one_pass(mode="fast"))


@pytest.mark.parametrize("name", PROBLEMS)
def test_two_passes_are_attention(name: str) -> None:
    problem = PROBLEMS[name]
    first, second = problem.two_passes()
    assert not first.reports
    _check(problem, second)


@pytest.mark.parametrize("name", ["D 64", "float16, causal", "bool mask"])
def test_every_query_loads_the_keys_that_it_sees(name: str) -> None:
    problem = PROBLEMS[name]
    traffic = problem.one_pass().traffic
    seen = problem.visible()
    by_kv_head = seen.reshape(problem.batch, problem.kv_heads, -1, problem.context)
    row = problem.head_dim * problem.dtype.size
    for buffer in ("keys", "values"):
        assert traffic[buffer].loaded == seen.sum() * row
        assert traffic[buffer].merged == traffic[buffer].loaded
        assert traffic[buffer].distinct == by_kv_head.any(axis=2).sum() * row


@pytest.mark.parametrize("number", range(3))
def test_each_barrier_is_missed(number: int) -> None:
    """The one after the SIMD groups' sums, and those around the exchange of outputs."""
    problem = Problem(length=1)
    body = _function("sdpa_vector").body
    parts = body.split(BARRIER)
    assert len(parts) == 4
    text = parts[0]
    for i, part in enumerate(parts[1:]):
        text += (";" if i == number else BARRIER) + part
    result = problem.one_pass((body, text))
    assert "race" in result.kinds
