"""The catalog of accelerators, and what it refuses."""

import copy
import dataclasses
import pickle

import pytest

from lessonlib.accelerators import Accelerator, get_accelerator, list_accelerators


@pytest.mark.parametrize("key", list_accelerators())
def test_every_row_is_dense_and_has_a_source(key):
    accelerator = get_accelerator(key)
    assert accelerator.source
    peaks = accelerator.peak_flops
    if "bf16" in peaks and "fp8" in peaks:  # a ratio of 4 would be a sparse figure
        assert 0.99 <= peaks["fp8"] / peaks["bf16"] <= 2.1
    if "bf16" in peaks:
        assert 1 < peaks["bf16"] / accelerator.memory_bandwidth < 600 or "cpu" in key or "apple" in key


def test_a_row():
    h100 = get_accelerator("h100-sxm")
    assert h100.peak("bf16") == 989.4e12
    assert h100.memory_bandwidth == 3350e9
    assert h100.memory_bytes == 80e9
    assert hash(h100) == hash(get_accelerator("H100 SXM"))


def test_accelerators_can_be_copied_and_the_catalog_stays_as_it_is():
    l4 = get_accelerator("l4")
    assert pickle.loads(pickle.dumps(l4)) == copy.deepcopy(l4) == Accelerator(**dataclasses.asdict(l4)) == l4
    l4.peak_flops.clear()
    assert get_accelerator("l4").peak("bf16") == 121e12


def test_unknown_keys_name_near_ones():
    with pytest.raises(ValueError, match=r"no accelerator named 'h100-sxn'.*h100-sxm"):
        get_accelerator("h100-sxn")
    with pytest.raises(ValueError, match=r"no accelerator named 'a100'.*a100-40gb-sxm"):
        get_accelerator("a100")
    with pytest.raises(ValueError, match=r"no accelerator named ''.*tpu-v4"):
        get_accelerator("")


def test_a_missing_peak_names_those_there_are():
    with pytest.raises(ValueError, match=r"A100.*'fp8'.*fp32, bf16, int8"):
        get_accelerator("a100-80gb-sxm").peak("fp8")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory_bandwidth": 0}, "memory_bandwidth"),
        ({"memory_bandwidth": float("nan")}, "memory_bandwidth"),
        ({"peak_flops": {"bf16": -1}}, "peak_flops"),
        ({"peak_flops": {"bf17": 1e12}}, "dtype must be one of fp32, bf16"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"peak_flops": None}, "peak_flops must be a table"),
    ],
)
def test_an_accelerator_of_ones_own_is_checked(change, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(get_accelerator("l4"), **change)
    assert Accelerator(key="mine", name="Mine", memory_bandwidth=1e9, peak_flops={}).memory_bytes is None
