"""Quantities: what people type, what we print."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lessonlib.units import UnitError, fmt, parse


@pytest.mark.parametrize(
    "text",
    ["6098000000", "6,098,000,000", "6_098_000_000", "6.098e9", "6.098*10^9", "6.098 x 10^9", "6.098×10^9", "6.098 e9"],
)
def test_a_number_may_be_written_in_many_ways(text):
    assert parse(text, "") == pytest.approx(6.098e9, rel=1e-12)


@pytest.mark.parametrize("text", [".5", "0.5", "5e-1", "50 %"])
def test_a_half(text):
    assert parse(text, "") == 0.5


@pytest.mark.parametrize(
    "text", ["14 GB", "14000 MB", "1.4e10 bytes", "14e9 B", "14GB", "112 Gbit", "0.014 TB", "14e9 BYTES"]
)
def test_the_same_size(text):
    assert parse(text, "byte") == pytest.approx(14e9, rel=1e-12)


def test_gb_and_gib_are_kept_apart():
    assert parse("1 GiB", "byte") == 2**30
    assert parse("1 GB", "byte") == 10**9
    assert parse("512 KiB", "byte") == parse("0.5 MiB", "byte") == 524_288


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("142.9 tokens/s", "token/s", 142.9),
        ("142.9 tok/s", "token/s", 142.9),
        ("142.9 tokens per second", "token/s", 142.9),
        ("7 ms", "s", 0.007),
        ("312 TFLOP/s", "FLOP/s", 312e12),
        ("312 TFLOPS", "FLOP/s", 312e12),
        ("2 TB/s", "byte/s", 2e12),
        ("156 FLOPs/B", "FLOP/byte", 156),
        ("38.2 %", "percent", 38.2),
        ("0.382", "percent", 38.2),
        ("3 USD", "USD", 3),
    ],
)
def test_units_of_the_field(text, unit, value):
    assert parse(text, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "unit", "said"),
    [
        ("14", "byte", "no unit"),
        ("14 Gb", "byte", "bits or bytes"),
        ("14 gb", "byte", "'GB' for bytes"),
        ("14 %", "byte", "byte"),
        ("14 GB", "", "plain number"),
        ("38", "percent", "no unit"),
        ("312 TFLOPs", "FLOP/s", "rate"),
        ("5 parsec", "byte", "not a unit known"),
        ("", "byte", "nothing was typed"),
        ("nan", "", "plain number"),
        ("inf", "", "plain number"),
        ("-inf", "", "plain number"),
        ("None", "", "plain number"),
        ("1+2j", "", "not a unit"),
        ("__import__('os')", "", "plain number"),
        ("9**9**9", "", "not a unit"),
        ("1e9999", "", "too large"),
        ("9" * 10_000, "", "characters long"),
        ("1,5", "", "plain number"),
        ("10 MBYTES", "byte", "not a unit known"),
        ("10 MBIT/s", "byte/s", "not a unit known"),
        ("1e308 GB", "byte", "too large"),
    ],
)
def test_what_is_refused_says_why(text, unit, said):
    with pytest.raises(UnitError, match=said):
        parse(text, unit)


@given(st.text(max_size=200), st.sampled_from(["", "byte", "token/s", "FLOP/byte", "percent"]))
def test_nothing_typed_ends_in_anything_but_a_number_or_a_message(text, unit):
    try:
        assert isinstance(parse(text, unit), float)
    except UnitError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (13.214e9, "B", "13.21 GB"),
        (7.01e-3, "s", "7.01 ms"),
        (142.857, "tokens/s", "142.9 tokens/s"),
        (312e12, "FLOP/s", "312 TFLOP/s"),
        (999_960_000, "B", "1 GB"),
        (999_940_000, "B", "999.9 MB"),
        (0, "B", "0 B"),
        (3600, "s", "3,600 s"),
        (41.397, "%", "41.4%"),
        (-3e9, "B", "-3 GB"),
        (0.3333333, "USD", "0.3333 USD"),
    ],
)
def test_printing(value, unit, text):
    assert fmt(value, unit) == text


def test_printing_binary_sizes():
    assert fmt(131_072, "B", binary=True) == "128 KiB"
    assert fmt(14e9, "B", binary=True) == "13.04 GiB"
    with pytest.raises(ValueError, match="bytes only"):
        fmt(1, "s", binary=True)


def test_nan_is_never_printed():
    with pytest.raises(ValueError, match="finite"):
        fmt(float("nan"), "B")


@given(st.floats(1e-6, 1e15), st.sampled_from(["B", "FLOP/s"]))
def test_what_is_printed_reads_back(value, unit):
    pint_unit = {"B": "byte", "FLOP/s": "FLOP/s"}[unit]
    assert parse(fmt(value, unit), pint_unit) == pytest.approx(value, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("text", ["1,000 nan", "5 $$$$", "8 inf", "3 GB nan", "7 %%"])
def test_words_that_the_unit_library_trips_over(text):
    with pytest.raises(UnitError):
        parse(text, "byte")
