import pytest

from tiny_llm.devices import Device
from tiny_llm.errors import ParameterError
from tiny_llm.memory import KvShape
from tiny_llm.roofline import Bound, DecoderCost, Work, bound, decode_work, prefill_work

# 3 layers, 4 query heads and 2 KV heads of 32, numbers of 2 bytes
SHAPE = KvShape((None, None, None), 2, 32, 2)
COST = DecoderCost(1000, 100, heads=4, kv=SHAPE, read_bytes=5000)
ROW = 2 * 2 * 32 * 2  # bytes of K and V in a layer


def test_a_decode_step_counts_matrices_attention_and_bytes():
    work = decode_work(COST, batch=5, context=10)
    matrices = 2 * (1000 + 100)
    attention = 3 * 4 * 4 * 32 * 10
    assert work.flops == 5 * (matrices + attention)
    # weights once; per row and layer 10 keys and values read and one pair written
    assert work.bytes == 5000 + 5 * 3 * ROW * 11
    assert work.intensity == work.flops / work.bytes


def test_a_prompt_costs_half_the_square_and_the_head_once():
    work = prefill_work(COST, tokens=10)
    attention = 3 * 4 * 4 * 32 * (10 * 11 // 2)
    assert work.flops == 2 * 1000 * 10 + 2 * 100 + attention
    assert work.bytes == 5000 + 2 * 10 * 3 * ROW


def test_a_prompt_of_one_token_costs_what_decoding_the_first_one_does():
    assert prefill_work(COST, tokens=1) == decode_work(COST, batch=1, context=1)


def test_a_window_bounds_what_attention_sees():
    cost = DecoderCost(0, 0, 4, KvShape((None, 4), 2, 32, 2), 0)
    step = decode_work(cost, batch=1, context=10)
    assert step.flops == 4 * 4 * 32 * (10 + 4)
    assert step.bytes == ROW * (10 + 1 + 4 + 1)
    # 55 pairs, and 1 + 2 + 3 + 4 * 7 = 34 within the window
    assert prefill_work(cost, tokens=10).flops == 4 * 4 * 32 * (55 + 34)
    assert prefill_work(cost, tokens=3).flops == 4 * 4 * 32 * (6 + 6)


@pytest.mark.parametrize(("bits", "row"), [(8, 128 + 4 * 4), (4, 64 + 4 * 4)])
def test_packed_caches_move_their_packed_bytes_and_scales(bits, row):
    # 128 numbers a token and layer; in groups of 32, 4 scales and 4 biases of 2 bytes
    cost = DecoderCost(1000, 100, 4, SHAPE, 5000, bits, 32)
    packed = decode_work(cost, batch=5, context=10)
    assert packed.bytes == 5000 + 5 * 3 * 11 * row
    assert packed.flops == decode_work(COST, batch=5, context=10).flops


def test_llama_3_1_8b_by_hand():
    # attention 2 * 4096^2 + 2 * 4096 * 1024, MLP 3 * 4096 * 14336; 32 layers
    layers = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    head = 4096 * 128256
    shape = KvShape((None,) * 32, 8, 128, 2)
    cost = DecoderCost(layers, head, 32, shape, 2 * (layers + head))
    one = decode_work(cost, batch=1, context=2048)
    # 15.0 GB of weights and 0.27 GB of cache for 16.1 GFLOP: about 1 FLOP/byte
    assert one.flops == 15_009_316_864 + 32 * 4 * 4096 * 2048
    assert one.bytes == 15_009_316_864 + 131072 * 2049
    assert one.intensity == pytest.approx(1.05, abs=0.01)
    many = decode_work(cost, batch=32, context=2048)
    assert many.intensity == pytest.approx(21.8, abs=0.1)
    # 273 GB/s: 23.6 GB take 86.4 ms
    fast = Device("x", 273e9, 8e12, 0, "")
    assert bound(many, fast).seconds == pytest.approx(0.0864, abs=1e-4)
    assert bound(many, fast).limit == "bandwidth"


def test_the_slower_of_the_two_limits():
    device = Device("x", bandwidth=100.0, flops=400.0, memory=0, source="")
    assert device.ridge == 4
    assert bound(Work(flops=300, bytes=100), device) == Bound(1.0, "bandwidth")
    assert bound(Work(flops=400, bytes=100), device) == Bound(1.0, "bandwidth")
    assert bound(Work(flops=800, bytes=100), device) == Bound(2.0, "compute")


def test_an_unknown_peak_leaves_the_bandwidth():
    device = Device("x", bandwidth=100.0, flops=None, memory=0, source="")
    assert bound(Work(flops=10**9, bytes=50), device) == Bound(0.5, "bandwidth")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: decode_work(COST, batch=0, context=1), "batch"),
        (lambda: decode_work(COST, batch=1, context=0), "context"),
        (lambda: prefill_work(COST, tokens=0), "tokens"),
        (lambda: prefill_work(COST, tokens=1.5), "tokens"),
    ],
)
def test_numbers_that_cannot_be_are_refused(call, name):
    with pytest.raises(ParameterError, match=f"{name} must be a whole number"):
        call()
