"""Which way attention goes, what is refused, and how a launch is dealt out."""

import logging
from collections import Counter, defaultdict
from importlib import import_module
from itertools import product

import metal_emulator
import mlx.core as mx
import pytest
from emulator_tools import needs_emulator
from kernel_cases import Case, dense, largest_error, on_metal, paged  # noqa: F401

from tiny_llm import kernels
from tiny_llm.errors import KernelError, ParameterError
from tiny_llm.kernels import cached, metal

MODULES = [
    import_module(f"tiny_llm.kernels.{name}")
    for name in ("paged", "dense_quantized", "quantize_kv")
]
PAGED = Case(contexts=(20, 3), rows=(1, 1))
DENSE = Case(contexts=(20, 20), rows=(1, 1), packing=(8, 32))


def pack(bits=8):
    k, v = (mx.random.normal((3, 2, 1, 64), key=mx.random.key(i)) for i in (0, 1))
    return kernels.quantize_kv(k, v, 32, bits)


def no_kernel(*_, **__):
    raise AssertionError("a kernel was built")


@pytest.fixture(autouse=True)
def _fresh():
    metal.forget()
    yield
    metal.forget()


@pytest.fixture
def like_a_gpu(monkeypatch):
    """As on a GPU, as far as the choice of kernels goes; the reference is the CPU's."""
    monkeypatch.setenv(metal.VARIABLE, "auto")
    monkeypatch.delenv("TINY_LLM_EMULATOR_MODE", raising=False)
    monkeypatch.setattr(metal, "on_gpu", lambda: True)


def test_the_setting_is_auto_unless_it_is_given(monkeypatch):
    monkeypatch.delenv(metal.VARIABLE, raising=False)
    assert metal.setting() == "auto"
    monkeypatch.setenv(metal.VARIABLE, "")
    assert metal.setting() == "auto"
    for value in ("auto", "metal", "reference"):
        monkeypatch.setenv(metal.VARIABLE, value)
        assert metal.setting() == value


@pytest.mark.parametrize("value", ["Metal", "cuda", "1", " auto"])
def test_another_setting_is_refused_with_the_choices(value, monkeypatch):
    monkeypatch.setenv(metal.VARIABLE, value)
    expected = f"TINY_LLM_KERNELS={value!r}: it may be auto, metal or reference"
    for call in (metal.setting, kernels.reads_pages, paged(PAGED).attend, pack):
        with pytest.raises(ParameterError) as error:
            call()
        assert str(error.value) == expected


@pytest.mark.parametrize(
    ("value", "gpu", "expected"),
    [
        ("auto", False, False),
        ("auto", True, True),
        ("metal", False, True),
        ("metal", True, True),
        ("reference", False, False),
        ("reference", True, True),
    ],
)
def test_pages_are_read_by_their_table_on_a_gpu_or_by_kernels(
    value, gpu, expected, monkeypatch
):
    monkeypatch.setenv(metal.VARIABLE, value)
    monkeypatch.setattr(metal, "on_gpu", lambda: gpu)
    assert kernels.reads_pages() is expected


@pytest.mark.parametrize("value", ["reference", "auto"])
def test_no_kernel_is_built_for_the_reference(value, monkeypatch):
    """Nor for auto without a GPU."""
    monkeypatch.setenv(metal.VARIABLE, value)
    monkeypatch.setattr(metal, "on_gpu", lambda: value == "reference")
    monkeypatch.setattr(mx.fast, "metal_kernel", no_kernel)
    for problem in (paged(PAGED), dense(DENSE)):
        assert largest_error(problem, problem.attend()) <= 1e-5
    assert pack().words.shape == (4, 3, 16)


@pytest.mark.parametrize("dim", [8, 40, 264, 288, 512])
def test_heads_that_no_kernel_takes_go_to_the_reference(dim, monkeypatch):
    """Even where kernels are asked for: nothing is wrong with the device."""
    monkeypatch.setenv(metal.VARIABLE, "metal")
    monkeypatch.setattr(mx.fast, "metal_kernel", no_kernel)
    problem = paged(Case(dim=dim, contexts=(20, 3), rows=(2, 1)))
    assert largest_error(problem, problem.attend()) <= 1e-5
    if dim % 32 == 0:
        packed = dense(Case(dim=dim, packing=(8, 32), contexts=(20,), rows=(2,)))
        assert largest_error(packed, packed.attend()) <= 1e-5


def zeros(*_, output_shapes, output_dtypes, **__):
    return [mx.zeros(*x) for x in zip(output_shapes, output_dtypes, strict=True)]


def refusing(*_, **__):
    raise RuntimeError("no such function: simd_shuffle_xor")


def subtly_wrong(kernel):
    def call(**options):
        out = kernel(**options)
        if out[0].dtype == mx.uint32:  # (the packed words)
            return [out[0] ^ 0x10, *out[1:]]
        return [out[0] * 1.01, *out[1:]]

    return call


DEVICES = {
    "zeros": (lambda *_, **__: zeros, "zeros only"),
    "refuses the call": (lambda *_, **__: refusing, "simd_shuffle_xor"),
    "refuses the source": (refusing, "simd_shuffle_xor"),
    "subtly wrong": (
        lambda *a, **b: subtly_wrong(metal_emulator.metal_kernel(*a, **b)),
        "its numbers are wrong by",
    ),
}
each_device = pytest.mark.parametrize(
    ("build", "reason"),
    [
        pytest.param(
            *device, marks=[needs_emulator] * (name == "subtly wrong"), id=name
        )
        for name, device in DEVICES.items()
    ],
)


@each_device
@pytest.mark.usefixtures("like_a_gpu")
def test_a_wrong_device_is_replaced_by_the_reference_with_one_warning(
    build, reason, monkeypatch, caplog
):
    monkeypatch.setattr(mx.fast, "metal_kernel", build)
    caplog.set_level(logging.INFO, "tiny_llm")
    for _ in range(2):
        for problem in (paged(PAGED), dense(DENSE), paged(Case(dim=96, splits=2))):
            assert largest_error(problem, problem.attend()) <= 1e-5
        packed = pack(4)
    monkeypatch.setenv(metal.VARIABLE, "reference")
    assert all(mx.array_equal(*x) for x in zip(packed, pack(4), strict=True))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()
    assert "TINY_LLM_KERNELS" in record.getMessage()


@each_device
def test_a_wrong_device_is_an_error_where_kernels_are_asked_for(
    build, reason, monkeypatch, caplog
):
    monkeypatch.setattr(mx.fast, "metal_kernel", build)
    monkeypatch.setenv(metal.VARIABLE, "metal")
    monkeypatch.delenv("TINY_LLM_EMULATOR_MODE", raising=False)
    for call in (paged(PAGED).attend, dense(DENSE).attend):
        for _ in range(2):  # (the verdict stays)
            with pytest.raises(KernelError, match=reason) as error:
                call()
            assert "TINY_LLM_KERNELS=metal" in str(error.value)
    with pytest.raises(KernelError, match="TINY_LLM_KERNELS=metal"):
        pack()
    assert not caplog.records


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal is here")
def test_without_metal_its_absence_is_the_reason(monkeypatch):
    monkeypatch.setenv(metal.VARIABLE, "metal")
    for call in (paged(PAGED).attend, dense(DENSE).attend, pack):
        with pytest.raises(KernelError, match="Metal back-end"):
            call()


@needs_emulator
@pytest.mark.usefixtures("like_a_gpu")
def test_a_device_that_is_right_is_used(monkeypatch, caplog):
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_emulator.metal_kernel)
    with metal_emulator.recording() as runs:
        problem = paged(PAGED)
        assert largest_error(problem, problem.attend()) <= 1e-5
        assert len(runs) == 2  # the canary and the call
        problem.attend()
        assert len(runs) == 3
    assert not caplog.records


class Counted:
    """A device whose numbers are taken as they are, all of them 0. What is counted:

    built: kernels, by name; sources: of each name; canaries: by module; small: of each
    variant, which of its inputs had fewer than 8 elements.
    """

    def __init__(self, monkeypatch):
        self.built, self.canaries = Counter(), Counter()
        self.sources, self.small = defaultdict(set), defaultdict(set)
        monkeypatch.setattr(mx.fast, "metal_kernel", self.build)
        for module in MODULES:
            name, canary = module.__name__.rpartition(".")[2], module._canary

            def counted(*arguments, name=name, canary=canary):
                self.canaries[name] += 1
                canary(*arguments)

            monkeypatch.setattr(module, "_canary", counted)

    def build(self, name, input_names, output_names, source, header, **_):
        self.built[name] += 1
        self.sources[name].add((header, source))

        def call(*, inputs, template, **rest):
            variant = (name, *map(str, template))
            self.small[variant].add(tuple(x.size < 8 for x in inputs))
            return zeros(**rest)

        return call


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setenv(metal.VARIABLE, "metal")
    return Counted(monkeypatch)


def test_each_variant_is_built_and_checked_once(counted):
    for _ in range(3):
        for changed in ({}, {"window": 5}, {"scale": 0.2}, {"softcap": 3.0}):
            paged(PAGED).attend(**changed)
            dense(DENSE).attend(**changed)
        pack()
    assert counted.canaries == {"paged": 1, "dense_quantized": 1, "quantize_kv": 1}
    assert len(counted.built) == 3
    paged(PAGED).attend(splits=2)
    paged(PAGED).attend(splits=16)
    assert counted.canaries["paged"] == 2
    assert set(counted.built.values()) == {1}


def test_a_variant_of_the_source_has_a_name_of_its_own(counted):
    """MLX keeps one source for a name, and takes an input of few elements otherwise."""
    for splits in (1, 2):
        for sinks in (False, True):
            for packing in ((0, 0), (8, 32), (4, 32)):
                options = {"packing": packing, "splits": splits, "sinks": sinks}
                paged(Case(contexts=(20, 3), rows=(1, 1), **options)).attend()
                for context in (1, 2, 8, 20) if packing[0] else ():
                    one = Case(contexts=(context,), rows=(1,), kv_heads=1, **options)
                    dense(one).attend()
    for bits in (8, 4):
        pack(bits)
    assert all(len(sources) == 1 for sources in counted.sources.values())
    # paged and dense x 2 or 3 packings x split x sinks, merging with sinks or not
    assert len(counted.sources) == (3 + 2) * 2 * 2 + 2 + 1
    assert all(len(small) == 1 for small in counted.small.values()), counted.small


def test_forgetting_builds_and_warns_anew(monkeypatch, caplog):
    monkeypatch.setenv(metal.VARIABLE, "auto")
    monkeypatch.setattr(metal, "on_gpu", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", refusing)
    for _ in range(2):
        paged(PAGED).attend()
        paged(PAGED).attend()
        metal.forget()
    assert len(caplog.records) == 2


LAYOUTS = {
    # (D, bits): lanes, piece, numbers of a lane
    (16, 0): (4, 4, 4),
    (32, 0): (8, 4, 4),
    (64, 0): (16, 4, 4),
    (80, 0): (16, 5, 5),
    (96, 0): (16, 6, 6),
    (128, 0): (32, 4, 4),
    (192, 0): (32, 6, 6),
    (256, 0): (32, 8, 8),
    (64, 8): (16, 4, 4),
    (96, 8): (8, 4, 12),
    (128, 8): (32, 4, 4),
    (256, 8): (32, 4, 8),
    (32, 4): (4, 8, 8),
    (64, 4): (8, 8, 8),
    (96, 4): (8, 4, 12),
    (128, 4): (16, 8, 8),
    (256, 4): (32, 8, 8),
}


def test_rows_are_dealt_so():
    assert {key: tuple(cached.deal(*key)) for key in LAYOUTS} == LAYOUTS


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_every_number_of_a_row_is_dealt_to_one_lane(bits):
    """As attend.h has it, for all rows that are taken."""
    for dim in range(16, 257, 16):
        lanes, piece, each = cached.deal(dim, bits)
        places = [
            (i // piece * lanes + lane) * piece + i % piece
            for lane in range(lanes)
            for i in range(each)
        ]
        assert sorted(places) == list(range(dim))
        assert 32 % lanes == 0
        assert each % piece == 0
        if bits:  # a piece is a word or half of one, in one group
            assert piece * bits in (16, 32)
            assert 32 % piece == 0
        else:
            assert each >= 4


@pytest.mark.parametrize("dim", [-16, 0, 8, 17, 40, 100, 250, 264, 272, 512])
def test_other_rows_are_not_dealt(dim):
    assert cached.deal(dim, 0) is None
    assert not cached.supports(mx.float32, dim)


def test_what_is_supported_otherwise():
    assert cached.supports(mx.bfloat16, 128, 4)
    assert not cached.supports(mx.float64, 128)
    assert not cached.supports(mx.int32, 128)
    for bits in (1, 2, 3, 5, 6, 16):
        assert not cached.supports(mx.float32, 128, bits)


@pytest.mark.parametrize(
    ("threadgroups", "longest", "expected"),
    [
        (1, 1, 1),
        (1, 511, 1),  # below 256 keys each
        (1, 512, 2),
        (1, 2047, 4),  # a power of two
        (1, 2048, 8),
        (1, 4096, 16),
        (1, 1 << 20, 16),  # the most
        (3, 1 << 20, 16),
        (8, 1 << 20, 16),
        (9, 1 << 20, 8),  # until there are 128 threadgroups
        (24, 4096, 4),
        (64, 4096, 2),
        (127, 4096, 2),
        (128, 4096, 1),
        (1000, 1 << 20, 1),
    ],
)
def test_keys_are_split_by_the_rule(threadgroups, longest, expected):
    assert cached.splits_for(threadgroups, longest) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8)],
)
def test_rows_are_rounded_up_to_a_power_of_two(rows, expected):
    assert cached.rounded(rows) == expected


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_chunks_hold_all_queries_within_the_registers(bits):
    for dim in range(16, 257, 16):
        for group, rows in product(range(1, 33), (1, 2, 4, 8)):
            shape = cached.Shape(
                mx.float32, dim, bits, 32 if bits else 0, 16, group, rows, False, False
            )
            each = cached.deal(dim, bits).each
            most = -(-shape.queries // shape.chunks)
            # one row's queries stay together longer than those of several rows
            assert most * each <= (48 if most > group else 96)
            allowed = max(48 // each, min(group, 96 // each))
            assert shape.chunks == 1 or (shape.chunks - 1) * allowed < shape.queries
