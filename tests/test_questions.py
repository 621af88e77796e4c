"""The eight questions: their numbers, solved a second time by plain loops, and two hundred variants of each."""

import collections
import math
import re

import pytest

from lessonlib.models import get_model
from lessonlib.practice.checker import grade_part
from lessonlib.practice.questions import QUESTIONS, Mistake, Part, get_part, get_question, kv_mistakes
from lessonlib.practice.questions import all as questions

VARIANTS = range(200)
EACH = pytest.mark.parametrize("question_id", QUESTIONS)

# The course's own numbers, to the digits that the lessons print.
COURSE = {
    "q1.a": 1, "q1.b": 156, "q1.c": "memory", "q1.d": 142.9,
    "q2.a": 156, "q2.b": 78, "q2.c": 39, "q2.d": 61, "q2.e": "memory",
    "q3.a": 524_288, "q3.b": 131_072, "q3.c": 2 * 2**30, "q3.d": 0.5 * 2**30,
    "q4.a": 2.851e8, "q4.b": 4.317e10, "q4.c": 151.4,
    "q5.a": 28e9, "q5.b": 14e9, "q5.c": 7e9, "q5.d": 3.5e9, "q5.e": 3.61e9, "q5.f": "yes", "q5.g": "yes",
    "q6.a": (1, 0, 1, -1, 0, 0, -1, 1), "q6.b": (73, -22, 127, -58, 5, 39, -102, 86), "q6.c": 55.85, "q6.d": 1.247,
    "q7.a": 470, "q7.b": 38.2, "q7.c": 200, "q7.d": 89.9,
    "q8.a": 0.4340, "q8.b": 0.3395, "q8.c": 0.2226, "q8.d": 0.2425, "q8.e": "A",
}  # fmt: skip


def rounded_like(value: float, shown: float) -> float:
    """`value` to as many digits as `shown` has."""
    digits = len(f"{shown:.15g}".split("e")[0].replace(".", "").strip("0"))
    return float(f"{value:.{digits}g}")


def test_the_course_s_numbers_give_the_course_s_answers():
    assert list(QUESTIONS) == [f"q{n}" for n in range(1, 9)]
    parts = {part.id: part for question in QUESTIONS.values() for part in question.parts}
    assert list(parts) == list(COURSE)
    for part_id, answer in COURSE.items():
        found = parts[part_id].answer
        assert (rounded_like(found, answer) if isinstance(answer, (int, float)) else found) == answer, part_id


# --- the same answers, by plain loops -------------------------------------------------------------------------------


def kv_per_token(model, kv_bits):
    if model.kv_lora_rank:
        return model.num_layers * (model.kv_lora_rank + model.qk_rope_head_dim) * kv_bits / 8
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * kv_bits / 8


def solve_1(p):
    flops, num_bytes = 2 * p["parameters"] * p["batch_size"], p["parameters"] * p["bytes_per_weight"]
    compute_s, read_s = flops / p["peak_flops_per_s"], num_bytes / p["bandwidth_bytes_per_s"]
    bound = "memory" if read_s > compute_s else "compute"
    ridge = p["peak_flops_per_s"] / p["bandwidth_bytes_per_s"]
    return flops / num_bytes, ridge, bound, p["batch_size"] / max(compute_s, read_s)


def solve_2(p):
    def compute_bound(batch, bits):  # does the arithmetic on a weight take at least as long as its reading?
        return 2 * batch / p["peak_flops_per_s"] >= bits / 8 / p["bandwidth_bytes_per_s"] * (1 - 1e-12)

    critical = [next(b for b in range(1, 10_000) if compute_bound(b, bits)) for bits in (16, 8, 4)]
    model, fit = get_model(p["model"]), 0
    while 2 * model.num_parameters + (fit + 1) * p["context_tokens"] * kv_per_token(model, 16) <= p["memory_bytes"]:
        fit += 1
    return *critical, fit, "memory" if fit < critical[0] else "compute"


def solve_3(p):
    sizes = [kv_per_token(get_model(p[which]), p["kv_bits"]) for which in ("first", "second")]
    return *sizes, *(p["tokens"] * size for size in sizes)


def solve_4(p):
    d, first = p["hidden_size"], p["prompt_tokens"]
    cached = uncached = 0
    for t in range(first, first + p["output_tokens"]):
        cached += 6 * d * d + 4 * t * d
        uncached += 6 * d * d + 4 * t * d + 4 * t * d * d
    return cached, uncached, uncached / cached


def solve_5(p):
    sizes = [p["parameters"] * size for size in (4, 2, 1, 0.5)]
    grouped = sizes[-1] + p["parameters"] / p["group_size"] * 2
    totals = [grouped + p["context_tokens"] * kv_per_token(get_model(p[kind]), 16) for kind in ("gqa", "mha")]
    return *sizes, grouped, *("yes" if total <= p["memory_bytes"] else "no" for total in totals)


def solve_6(p):
    row, largest = p["row"], max(abs(w) for w in p["row"])
    codes, errors = [], []
    for scale in (p["factor"] * largest / 127, largest / 127):
        codes.append(tuple(round(w / scale) for w in row))
        errors.append(100 * sum(abs(w - c * scale) / abs(w) for w, c in zip(row, codes[-1], strict=True)) / len(row))
    return *codes, *errors


def steps_taken(lengths, lanes, refill):
    """Token by token: every running request makes one token a step."""
    waiting, running, steps = list(lengths), [], 0
    while waiting or running:
        if refill or not running:
            while waiting and len(running) < lanes:
                running.append(waiting.pop(0))
        running = [left - 1 for left in running if left > 1]
        steps += 1
    return steps


def solve_7(p):
    lengths, lanes = p["output_tokens"], p["lanes"]
    steps = [steps_taken(lengths, lanes, refill) for refill in (False, True)]
    shares = [100 * sum(lengths) / (lanes * s) for s in steps]
    return steps[0], shares[0], steps[1], shares[1]


def solve_8(p):
    per_token = [p[f"{n}_usd_per_hour"] / 3600 / p[f"{n}_tokens_per_s"] for n in "ab"]
    per_correct = [
        1000 * cost * p["tokens_per_answer"] / p[f"{n}_accuracy"] for n, cost in zip("ab", per_token, strict=True)
    ]
    return *(1e6 * cost for cost in per_token), *per_correct, "AB"[per_correct.index(min(per_correct))]


SOLVERS = dict(zip(QUESTIONS, [solve_1, solve_2, solve_3, solve_4, solve_5, solve_6, solve_7, solve_8], strict=True))


def spellings(part):
    """The right answer as people might type it."""
    value = part.answer
    if isinstance(value, str):
        return [value, value.upper(), f" {value}. "]
    if isinstance(value, tuple):
        return [" ".join(map(str, value)), str(list(value)), ",".join(map(str, value))]
    if part.unit == "byte":
        exact = [f"{value:.0f} bytes", f"{value:,.0f} B", f"{value / 2**30:.12g} GiB", f"{value / 1e9:.12g} GB"]
        return exact if part.tolerance == 0 else [*exact, f"{value / 1e6:.4g} MB", f"{value / 2**20:.4g} MiB"]
    if part.unit == "percent":
        return [f"{value:.4g} %", f"{value:.4g}%", f"{value / 100:.4g}"]
    if part.unit == "USD":
        return [f"{value:.4g}", f"${value:.4g}", f"{value:.4g} USD", f"{value:.4g} USD per {part.per}"]
    written = f"{value:.0f}" if part.tolerance == 0 else f"{value:.5g}"
    return [written, f"{written} {part.unit}", value]


@EACH
def test_two_hundred_variants_are_solved_accepted_and_their_wrong_answers_named(question_id):
    for seed in [None, *VARIANTS]:
        question = get_question(question_id, seed)
        for part, solved in zip(question.parts, SOLVERS[question_id](question.parameters), strict=True):
            where = f"{part.id}, variant {seed}"
            if isinstance(solved, (int, float)):
                assert part.answer == pytest.approx(solved, rel=1e-4), where  # scales are fp32
                assert part.tolerance or part.answer == round(solved), where
            else:
                assert part.answer == solved, where
            for typed in spellings(part):
                feedback = grade_part(part, typed)
                assert feedback.correct, f"{where}: {typed!r}: {feedback.message}"
            for mistake in part.mistakes:
                value = mistake.value
                typed = f"{value!r} byte" if part.unit == "byte" else value
                feedback = grade_part(part, typed, "try again")
                assert not feedback.correct, f"{where}: {typed!r}"
                assert (feedback.message, feedback.hint) == (mistake.meaning, "try again"), f"{where}: {typed!r}"


@EACH
def test_wrong_answers_lie_outside_the_tolerance_and_mean_different_things(question_id):
    for seed in [None, *VARIANTS]:
        for part in get_question(question_id, seed).parts:
            meanings = [mistake.meaning for mistake in part.mistakes]
            assert part.mistakes and len(set(meanings)) == len(meanings), part.id
            assert 0 <= part.tolerance <= 0.02
            for mistake in part.mistakes:
                if isinstance(part.answer, float):
                    assert abs(mistake.value / part.answer - 1) > part.tolerance, part.id
                else:
                    assert mistake.value != part.answer, part.id


@EACH
def test_a_question_has_hints_and_a_working_that_reaches_every_answer(question_id):
    for seed in [None, *VARIANTS]:
        question = get_question(question_id, seed)
        assert 2 <= len(question.hints) <= 3
        working = " ".join(question.working)
        for part in question.parts:
            number = part.shown.split(" (")[0].removesuffix(" requests").removesuffix(" bytes").removesuffix(" steps")
            assert re.search(rf"(?<![\w.,]){re.escape(number)}(?![\d])", working), f"{part.id}: {number} / {working}"
        text = " ".join([question.prompt, working, *question.hints, *(part.ask for part in question.parts)])
        assert not re.search(r"np\.|nan|inf\b|e[+-]\d\d|\{|\d\.\d{8,}", text), text


@EACH
def test_variants_differ_are_repeatable_and_keep_their_shape(question_id):
    own = QUESTIONS[question_id]
    variants = [own.variant(seed) for seed in VARIANTS]
    assert len({str(v.parameters) for v in variants}) > 80
    assert own.variant(None) == own
    assert all([part.id for part in v.parts] == [part.id for part in own.parts] for v in variants)
    assert len({v.prompt + "".join(part.ask for part in v.parts) for v in variants}) > 80
    get_question.cache_clear()
    assert own.variant(7) == variants[7]
    for part, *others in zip(own.parts, *(v.parts for v in variants), strict=True):
        if isinstance(part.answer, str) and part.id != "q1.c":
            counts = collections.Counter(other.answer for other in others)
            assert min(counts[choice] for choice in set(part.choices.values())) > 40, part.id
    assert len({v.parts[-1].shown for v in variants}) > 1


def test_numbers_that_cannot_be_told_apart_are_drawn_again():
    def clear(answer, wrong, unit="", **options):
        return Part("", "", answer, unit, mistakes=(Mistake(wrong, "?"),), **options).is_clear

    assert clear(100.0, 103.0) and not clear(100.0, 101.0)
    assert clear(100.0, 101.0, tolerance=0) and not clear(100.0, 100.0, tolerance=0)
    assert clear(50.0, 0.6, "percent") and not clear(50.0, 0.5, "percent")  # a bare 0.5 may mean 50 %
    assert not clear("A", "B", close_call=True) and not clear((1, 2), (1, 2))
    byte_weights = {**QUESTIONS["q1"].parameters, "bytes_per_weight": 1}  # who forgets the bytes is right all the same
    assert not all(part.is_clear for part in questions._make("q1", byte_weights, None).parts)


def test_whole_numbers_must_be_exact():
    exact = {part.id for question in QUESTIONS.values() for part in question.parts if part.tolerance == 0}
    assert exact == {"q2.a", "q2.b", "q2.c", "q2.d", "q3.a", "q3.b", "q7.a", "q7.c"}


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("llama-2-7b", 524_288, {262_144: "Half: K or V"}),
        ("llama-3.1-8b", 131_072, {524_288: "4 times: query heads", 65_536: "K or V", 4096: "one layer"}),
        ("llama-3.1-70b", 327_680, {8 * 327_680: "8 times: query heads for KV heads; only the KV heads are kept. Or:"}),
        ("deepseek-v3", 70_272, {124_928: "A factor 2 and no rope", 140_544: "Twice", 62_464: "rope part is missing"}),
        ("qwen3-32b", 262_144, {163_840: "head size was derived"}),
    ],
)
def test_the_usual_slips_with_a_kv_cache(key, right, wrong):
    model = get_model(key)
    assert kv_per_token(model, 16) == right
    found = {mistake.value: mistake.meaning for mistake in kv_mistakes(model)}
    for value, meaning in wrong.items():
        assert meaning in found[value]
    assert right not in found


@pytest.mark.parametrize("bad", ["q9", "", None, 3, "q3.z", "q3.aa", "x" * 1000])
def test_an_unknown_question_is_refused(bad):
    with pytest.raises(ValueError, match="must be one of q"):
        get_part(bad)


@pytest.mark.parametrize("seed", [-1, 1.5, True, "1", math.nan])
def test_a_seed_is_a_whole_number(seed):
    get_question.cache_clear()
    with pytest.raises(ValueError, match="seed must be a whole number of at least 0"):
        QUESTIONS["q1"].variant(seed)


def test_a_question_s_name_means_its_last_part():
    assert get_part("q3") == QUESTIONS["q3"].parts[-1]
    assert get_part(" Q3.B ").id == "q3.b"
    assert repr(QUESTIONS["q3"]) == "Question q3: The KV cache of two models (4 answers, the course's numbers)"
    assert "variant 5" in repr(QUESTIONS["q3"].variant(5))
