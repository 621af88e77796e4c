"""Measurements: what must hold on any machine."""

import json
import math

import pytest

from lessonlib.lab import fit_overhead, measure_decode, measure_generation, measure_machine, measure_prefill
from lessonlib.lab.machine import _load, _path


def test_this_machine_becomes_an_accelerator():
    machine = measure_machine()
    for rate in (machine.read_bandwidth, *machine.matmul_flops_per_s.values()):
        assert 0 < rate.low <= rate.median <= rate.high < math.inf
    accelerator = machine.accelerator
    assert accelerator.key == "this-machine"
    assert 1e9 < accelerator.memory_bandwidth < 1e13
    assert 1e9 < accelerator.peak("fp32") < 1e15
    assert accelerator.memory_bytes > 2**30
    assert machine.provenance["torch"] in accelerator.source


def test_a_measurement_is_kept_until_it_is_damaged_or_of_another_machine():
    kept = measure_machine()
    assert measure_machine() == kept
    text = _path().read_text(encoding="utf-8")
    for damaged in (text[:100], "{}", text.replace('"threads": ', '"threads": 7')):
        _path().write_text(damaged, encoding="utf-8")
        assert _load(kept.provenance) is None
    measured = measure_machine()
    assert measured.read_bandwidth != kept.read_bandwidth
    assert json.loads(_path().read_text(encoding="utf-8"))["provenance"] == measured.provenance


def test_decode_is_measured(pretrained):
    model, _ = pretrained
    times = measure_decode(model, batch_sizes=(1, 16), context_len=8, steps=5)
    assert [t.batch_size for t in times] == [1, 16]
    assert all(0 < t.low_s <= t.step_s <= t.high_s for t in times)
    assert times[1].tokens_per_s > times[0].tokens_per_s  # one read of the weights serves all


def test_prefill_is_measured(pretrained):
    model, _ = pretrained
    short, long = measure_prefill(model, prompt_lens=(1, 128), repeats=3)
    assert 0 < short.low_s <= short.seconds <= short.high_s < long.seconds
    assert long.tokens_per_s > short.tokens_per_s


def test_generation_is_measured(pretrained):
    model, _ = pretrained
    with_cache, without = (measure_generation(model, (16, 256), used, new_tokens=2) for used in (True, False))
    assert [t.context_len for t in without] == [17, 257]
    assert all(0 < t.low_s <= t.seconds <= t.high_s for t in with_cache + without)
    assert without[1].seconds > 2 * without[0].seconds  # everything is read again
    assert with_cache[1].seconds < without[1].seconds / 2
    with pytest.raises(ValueError, match="context_len"):
        measure_generation(model, (0,))
    with pytest.raises(ValueError, match="must fit the model's 8192 tokens, got 8190 and 3"):
        measure_generation(model, (8, 8190), new_tokens=3)
    with pytest.raises(ValueError, match="new_tokens"):
        measure_generation(model, (8,), new_tokens=0)


def test_overhead_is_the_mean_difference():
    overhead = fit_overhead([3.0, 5.0, 8.5], [1.0, 3.0, 6.0])
    assert overhead.seconds == pytest.approx(6.5 / 3)
    assert overhead.scatter_s == pytest.approx((2 * (6.5 / 3 - 2) ** 2 / 3 + (2.5 - 6.5 / 3) ** 2 / 3) ** 0.5)


@pytest.mark.parametrize(("measured", "predicted"), [([], []), ([1], [1, 2]), ([math.nan], [1]), ([1], [-1])])
def test_overhead_of_nonsense(measured, predicted):
    with pytest.raises(ValueError, match=r"measured_s|predicted_s"):
        fit_overhead(measured, predicted)


@pytest.mark.parametrize("options", [{"batch_sizes": (0,)}, {"context_len": 0}, {"steps": 0}])
def test_bad_measurements(options, pretrained):
    with pytest.raises(ValueError, match="at least 1"):
        measure_decode(pretrained[0], **options)
