"""Grading: every form of a right answer, what each wrong one means, and nothing that can be typed does harm."""

import dataclasses
import math
import random
import string
import sys
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lessonlib.models import get_model
from lessonlib.practice import check
from lessonlib.practice.checker import grade
from lessonlib.practice.questions import QUESTIONS, kv_mistakes

PARTS = [part.id for question in QUESTIONS.values() for part in question.parts]

# --- shared/cases/grading_cases.md, row by row ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["6098000000", "6,098,000,000", "6_098_000_000", "6.098e9", "6.098*10^9", "6.098 x 10^9"]
)
def test_a_large_number_in_many_forms(text):
    assert grade(text, 6.098e9).correct


@pytest.mark.parametrize(("text", "right"), [("1 e10", 1e10), ("1e 10", 1e10), ("3 e8", 3e8)])
def test_a_space_in_an_exponent_is_forgiven(text, right):
    assert grade(text, right).correct


@pytest.mark.parametrize("text", [".5", "0.5", "5e-1"])
def test_a_half(text):
    assert grade(text, 0.5).correct


@pytest.mark.parametrize("text", ["14 GB", "13.04 GiB", "14000 MB", "1.4e10 bytes", "14e9 B"])
def test_a_size_in_many_units(text):
    assert grade(text, 14e9, "byte").correct
    assert check("q5.b", text).correct


@pytest.mark.parametrize("text", ["13.04 GB", "14 GiB"])
def test_gb_for_gib_is_named(text):
    for feedback in (grade(text, 14e9, "byte"), check("q5.b", text)):
        assert not feedback.correct
        assert "GB" in feedback.message and "GiB" in feedback.message


def test_a_bare_number_is_right_only_where_the_question_fixes_the_unit():
    assert grade("14", 14, "token/s", unit_optional=True).correct
    asked = check("q5.b", "14")
    assert not asked.correct and "needs its unit" in asked.message
    assert check("q5.b", 14e9).correct  # a number handed over as a number is in bytes


@pytest.mark.parametrize("text", ["14 Gb", "14 gb"])
def test_a_small_b_is_asked_about(text):
    feedback = check("q5.b", text)
    assert not feedback.correct and "bits or bytes?" in feedback.message


@pytest.mark.parametrize("text", ["38 %", "38.2%", "0.382", "38.2", ".38"])
def test_a_share_in_many_forms(text):
    assert check("q7.b", text).correct


def test_a_small_share_may_be_typed_bare():
    assert grade("0.8", 0.8, "percent", unit_optional=True).correct
    assert grade("0.8", 80, "percent", unit_optional=True).correct
    assert grade("0.8 %", 0.8, "percent").correct and not grade("0.8 %", 80, "percent").correct


HOSTILE = [
    "nan", "inf", "-inf", "", "None", "1+2j", "__import__('os')", "9" * 10_000, "a" * 10_000, "9**9**9", " \t\n",
    "(" * 100, "{0.__class__}", "%n%n%n", "14 " + "G" * 50, "1e9999", "-1e-9999 GB", "1,000 nan", "5 $$$$", "7 %%",
    "\x00", "\ud800", "１４ GB", "٣", "²", "💥", "--5", "1/0", "0x10", "lambda: 0", "5 GB; exit()", "5 if 1 else 2",
    "1 " * 99, "1" + ",000" * 24, "e", "e5", ".", "-", "+", "1.2.3", "$", "$$5", "per token", "/", "5 /", "5 / / s",
    "not memory", "memory or compute", "yes and no",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_no_answer_is_wrong_with_a_hint_at_once(text):
    started = time.perf_counter()
    for part_id in PARTS:
        feedback = check(part_id, text)
        assert not feedback.correct and feedback.message and feedback.hint
        assert len(str(feedback)) < 1000
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("text", ["524288", "512 KiB", "0.5 MiB", "524,288 bytes", "524288 bytes per token"])
def test_kv_bytes_of_llama_2(text):
    assert check("q3.a", text).correct


@pytest.mark.parametrize(
    ("feedback", "said"),
    [
        (check("q3.b", "524,288"), "4 times: query heads for KV heads"),
        (check("q3.b", "65536"), "Half: K or V was forgotten"),
        (
            grade("124,928", 70_272, "byte", 0, True, kv_mistakes(get_model("deepseek-v3"))),
            "A factor 2 and no rope part",
        ),
        (grade("590", 295.3, "FLOP/byte", unit_optional=True), "sparse peak"),
        (check("q1.b", "312"), "peak with sparsity"),
        (check("q1.b", "78"), "Half: MACs for FLOPs, or 4-byte weights"),
        (grade("78", 156, "FLOP/byte", unit_optional=True), "half: MACs for FLOPs"),
    ],
)
def test_known_slips_are_named(feedback, said):
    assert not feedback.correct
    assert said in feedback.message


def test_the_ridge_of_an_h100():
    assert grade("295", 989.4 / 3.35, "FLOP/byte", unit_optional=True).correct


# --- the questions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part_id", "answer"),
    [
        ("q3", "0.5 GiB"), ("q3", "536.9 MB"), ("Q3.C", "2 GiB"), ("q1.c", "memory"), ("q1.c", "Memory-bound!"),
        ("q1.c", "bandwidth"), ("q1.d", "142.9"), ("q1.d", "143 tokens/s"), ("q1.d", 142.857), ("q1.a", np.float64(1)),
        ("q2.a", "156 requests"), ("q2.d", np.int64(61)), ("q4.a", "2.851e8"), ("q4.a", "285.1 MFLOP"), ("q4", "151"),
        ("q4", "151x"), ("q5.f", "yes"), ("q5.g", "y"), ("q6.a", "[1, 0, 1, -1, 0, 0, -1, 1]"),
        ("q6.a", "1 0 1 −1 0 0 −1 1"), ("q6.b", (73, -22, 127, -58, 5, 39, -102, 86)),
        ("q6.b", np.array([73, -22, 127, -58, 5, 39, -102, 86], np.int8)), ("q6.d", "1.25 %"), ("q7.a", "470 steps"),
        ("q7.b", 0.3824), ("q8.a", "$0.43"), ("q8.a", "0.434 USD per million tokens"),
        ("q8.c", "0.2226 $ / 1,000 correct answers"), ("q8", "a"), ("q8", "Deployment A."),
    ],
)  # fmt: skip
def test_right_answers(part_id, answer):
    feedback = check(part_id, answer)
    assert feedback.correct and feedback.message.startswith("Right: ") and not feedback.hint


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_each_known_wrong_answer_gets_its_own_message(question):
    for part in question.parts:
        said = []
        for mistake in part.mistakes:
            answer = mistake.value if isinstance(mistake.value, (str, tuple)) else f"{mistake.value:.12g}"
            feedback = check(part.id, f"{answer} byte" if part.unit == "byte" else answer)
            assert not feedback.correct and feedback.hint == question.hints[0]
            assert feedback.message == mistake.meaning
            said.append(feedback.message)
        assert said and len(set(said)) == len(said)


def test_a_variant_is_graded_by_its_own_numbers():
    variant = QUESTIONS["q1"].variant(3)
    ridge = variant.parts[1].shown.split()[0]
    assert check("q1.b", ridge, variant=3).correct
    assert not check("q1.b", ridge).correct


def test_a_right_answer_is_printed_rounded():
    assert check("q1.d", "142.857142857").message == "Right: 142.9 tokens/s."
    assert check("q7.b", "38.244680851 %").message == "Right: 38.24%."


@pytest.mark.parametrize(
    ("text", "right", "unit", "said"),
    [
        ("112 GB", 14e9, "byte", "eight times too much: bits and bytes"),
        ("1.75 GB", 14e9, "byte", "an eighth: bits and bytes"),
        ("7 GB", 14e9, "byte", "half: K or V was forgotten"),
        ("28 GB", 14e9, "byte", "twice as much"),
        ("14 TB", 14e9, "byte", "a factor of 1,000 too large"),
        ("14 MB", 14e9, "byte", "a factor of 1,000 too small"),
        ("14 B", 14e9, "byte", "a factor of 1,000 × 1,000 × 1,000 too small"),
        ("2 TiB", 2 * 2**30, "byte", "a factor of 1,024 too large"),
        ("2 TiB", 2 * 2**20, "byte", "a factor of 1,024 × 1,024 too large"),
        ("524.288 KiB", 524_288, "byte", "kB and KiB were mixed up"),
        ("2 MB", 2 * 2**20, "byte", "MB for MiB"),
        ("2.1e10", 4.2e10, "FLOP", "half: MACs for FLOPs"),
        ("1.56 FLOP/byte", 156, "FLOP/byte", "a factor of 100 too small"),
        ("0.00641", 156, "FLOP/byte", "Upside down"),
        ("1248", 156, "FLOP/byte", "bits and bytes"),
        ("61.8 %", 38.2, "percent", "That is the rest"),
        ("0.382 %", 38.2, "percent", "a share of 0.5 is 50 %"),
        ("1562 USD", 0.434, "USD", "hours and seconds"),
        ("500", 50, "", "a factor of 10 too large: count the zeros"),
        ("-50", 50, "", "The sign is wrong"),
        ("-7", 50, "", "That cannot be"),
        ("7", 0, "", "That cannot be"),
        ("52", 50, "", "Close, but more than 2% off"),
        ("156.1", 50, "", "About 3.1 times too large."),
        ("16", 50, "", "About 3.1 times too small."),
        ("0", 50, "", "Far too small."),
        ("1e30", 50, "", "Far too large."),
    ],
)
def test_a_ratio_gives_the_slip_away(text, right, unit, said):
    feedback = grade(text, right, unit, unit_optional=True, hint="look")
    assert not feedback.correct and feedback.hint == "look"
    assert said in feedback.message


def test_a_whole_number_is_exact():
    assert grade("470", 470, "step", 0, True).correct
    near = grade("471 steps", 470, "step", 0)
    assert not near.correct and "must be exact" in near.message
    assert grade("479", 470).correct and not grade("480", 470).correct  # 2 %, elsewhere
    assert not check("q3.a", "524 kB").correct


def test_codes_are_counted_and_the_wrong_places_named():
    assert "8 codes are asked for, and there are 3" in check("q6.a", "1 0 1").message
    assert check("q6.a", "1 0 1 -1 0 0 -1 2").message == "Not all: place 8 is different."
    assert check("q6.a", "0 0 1 -1 0 0 -1 2").message == "Not all: places 1, 8 are different."
    assert "whole numbers" in check("q6.a", "1 0 1 -1 0 0 -1 1.5").message


# --- whatever is typed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [None, True, np.True_, b"14 GB", object(), [], [1.5], ["1"], {}, math.nan, math.inf, 10**5000, 1 + 2j, np.zeros(3),
     Fraction(10**400), "x" * 10**6, ["a"] * 10**5, [10**5000] * 8, lambda: "14 GB"],
    ids=lambda answer: type(answer).__name__,
)  # fmt: skip
def test_what_is_not_even_text_gets_an_answer(answer):
    for part_id in ("q1.b", "q1.c", "q5.b", "q6.a"):
        feedback = check(part_id, answer)
        assert (feedback.correct, len(str(feedback)) < 1000) == (False, True)


_evaluated: list[str] = []
_watching = False
_FORBIDDEN = ("exec", "compile", "import", "open", "os.", "subprocess.", "socket.", "ctypes.", "shutil.", "pty.")


def _audit(event: str, _: object) -> None:
    if _watching and event.startswith(_FORBIDDEN):
        _evaluated.append(event)


def random_texts(count: int):
    """Numbers with units real and invented, bits of code, wild unicode, long and hostile strings."""
    rng = random.Random(7)
    alphabet = string.digits * 3 + ".,_eE+-*^x×/ GBiMkKTPbtokenssFLOPper%$()[]{}'\"\\\n\t" + "٣½²\u00a0\u202eµΩé😀\x00"
    pieces = [*HOSTILE[:11], "14", "0.5", "GB", "GiB", "FLOP/byte", "tokens/s", "per token", "%", "USD", "yes", "A",
              "os.system('true')", "eval('1')", "9" * 30, "* 10^", "e308", "memory", "1 0 1", "nan GB"]  # fmt: skip
    for index in range(count):
        match index % 5:
            case 0:
                yield "".join(rng.choices(alphabet, k=rng.randint(0, 30)))
            case 1:
                yield " ".join(rng.choices(pieces, k=rng.randint(1, 5)))[: rng.randint(1, 300)]
            case 2:
                unit = "".join(rng.choices(string.ascii_letters + "/ %µ$", k=rng.randint(0, 8)))
                yield f"{rng.uniform(-9, 9) * 10.0 ** rng.randint(-30, 30):.{rng.randint(0, 12)}g} {unit}"
            case 3:
                yield "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randint(0, 25)))
            case _:
                yield rng.choice(pieces) * rng.randint(1, 2000)


def test_a_hundred_thousand_strings_never_raise_hang_or_evaluate():
    global _watching  # noqa: PLW0603
    check("q5.b", "14 GB")  # the registry of units is built once, outside the watch
    sys.addaudithook(_audit)
    _evaluated.clear()
    slowest = right = 0.0
    for index, text in enumerate(random_texts(100_000)):
        part_id = PARTS[index % len(PARTS)]
        started = time.perf_counter()
        _watching = True
        try:
            feedback = check(part_id, text)
        finally:
            _watching = False
        slowest = max(slowest, time.perf_counter() - started)
        assert isinstance(feedback.correct, bool) and feedback.message
        assert feedback.correct or feedback.hint
        right += feedback.correct
    assert _evaluated == []
    assert slowest < 2
    assert 0 < right < 10_000  # some of them are answers, so grading was reached


def test_the_watch_would_notice():
    global _watching  # noqa: PLW0603
    sys.addaudithook(_audit)
    _evaluated.clear()
    _watching = True
    eval("1 + 1")
    _watching = False
    assert {"compile", "exec"} <= set(_evaluated)


@given(st.text(max_size=120), st.sampled_from(PARTS))
def test_any_text_gets_a_verdict_and_a_message(text, part_id):
    feedback = check(part_id, text)
    assert feedback.message
    assert feedback.correct or feedback.hint


# --- the contract ---------------------------------------------------------------------------------------------------


def test_feedback_cannot_be_changed():
    feedback = check("q1", "1 token/s")
    assert str(feedback) == f"{feedback.message} {feedback.hint}"
    with pytest.raises(dataclasses.FrozenInstanceError):
        feedback.correct = True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"expected": math.nan}, "expected must be a finite number"),
        ({"expected": 5, "tolerance": 0.03}, "tolerance must be from 0 to 0.02, got 0.03"),
        ({"expected": 5, "tolerance": -1}, "tolerance must be a finite number of at least 0"),
    ],
)
def test_a_mistake_of_ours_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        grade("5", **arguments)


def test_an_unknown_question_or_variant_is_refused():
    with pytest.raises(ValueError, match=r"part_id must be one of q1, .*, or a part such as q3.b, got 'q0'"):
        check("q0", "5")
    with pytest.raises(ValueError, match="seed must be a whole number of at least 0, got -2"):
        check("q1", "5", variant=-2)
