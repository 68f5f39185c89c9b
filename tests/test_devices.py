import re

import pytest

from tiny_llm.devices import DEVICES, Device, find_device, peak_flops
from tiny_llm.errors import ParameterError


def test_a_gpu_core_does_256_operations_a_cycle():
    assert peak_flops(10, 1000) == 2.56e12
    # Apple's own figure for the M1: 2.6 TFLOP/s, from 8 cores at 1278 MHz
    assert peak_flops(8, 1278) == pytest.approx(2.6e12, rel=0.01)


@pytest.mark.parametrize(
    ("name", "bandwidth", "memory"),
    [
        ("M1", 68.3, 16),
        ("M1 Ultra", 800, 128),
        ("M2 Pro", 200, 32),
        ("M3 Max 40-core", 400, 128),
        ("M3 Ultra", 819, 512),
        ("M4", 120, 32),
        ("M4 Pro", 273, 64),
        ("M5", 153, 32),
    ],
)
def test_the_published_figures(name, bandwidth, memory):
    device = find_device(name)
    assert device.bandwidth == bandwidth * 1e9
    assert device.memory == memory * 2**30


def test_every_row_tells_its_source_and_names_differ():
    assert len({device.name.lower() for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        assert "bandwidth" in device.source
        assert "FLOP/s" in device.source
        assert "measured" not in device.source
        known = device.flops is not None
        assert known != ("FLOP/s unknown" in device.source)
        if "bandwidth computed" not in device.source:
            assert re.search(r"bandwidth: Apple .*20\d\d-\d\d-\d\d", device.source)


def test_computed_peaks_are_what_their_source_says():
    pattern = r"computed: (\d+) cores \* 128 \* 2 \* (\d+) MHz"
    found = 0
    for device in DEVICES:
        if said := re.search(pattern, device.source):
            found += 1
            cores, clock = map(int, said.groups())
            assert device.flops == cores * 256 * clock * 1e6
    assert found >= 15


def test_the_ridge_is_peak_over_bandwidth():
    assert Device("x", 2e9, 8e9, 1, "").ridge == 4
    assert Device("x", 2e9, None, 1, "").ridge is None


@pytest.mark.parametrize("name", ["M4 Pro", "m4 pro", "Apple M4  Pro", " M4 Pro "])
def test_a_device_is_found_as_people_write_it(name):
    assert find_device(name).name == "M4 Pro"


def test_an_unknown_device_is_an_error_with_the_names():
    with pytest.raises(ParameterError, match=r"unknown device 'M99'.*M1, M1 Pro"):
        find_device("M99")
