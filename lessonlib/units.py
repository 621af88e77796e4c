"""Quantities as people write them: read "13.04 GiB" or "1.2e3 tokens/s", print 14.0 GB.

pint knows the units; this module adds the field's own (FLOP, token, request, USD), keeps GB (10^9 bytes) apart
from GiB (2^30 bytes), and never evaluates what was typed: a number is matched, a unit is looked up.
"""

import math
import re
from functools import cache

import pint

_EXAMPLES = "GB, GiB, ms, TFLOP/s or tokens/s"
_MAX_LENGTH = 100  # a longer answer is not a quantity

_NUMBER = re.compile(
    r"""(?P<mantissa> [+-]? (?: \d+ (?:[,_]\d{3})+ (?:\.\d*)? | \d+ (?:\.\d*)? | \.\d+ ))
        (?P<power> \s* e \s* [+-]?\d{1,4} | \s* (?:\*|x|×|·) \s* 10 \s* (?:\^|\*\*) \s* [+-]?\d{1,4} )?
        (?P<unit> (?![\d.,_]) .*)""",
    re.VERBOSE | re.IGNORECASE | re.ASCII | re.DOTALL,
)
_UNIT = re.compile(r"[A-Za-zµ%$]+(?: ?(?:/|per) ?[A-Za-zµ]+)?")

# How people spell what the registry spells otherwise.
_ALIASES = {"%": "percent", "$": "USD", "x": "", "times": "", "KB": "kB", "tps": "token/s"}
# A small b may be a bit or a slip for byte: ask, never guess.
_AMBIGUOUS = re.compile(r"(?P<prefix>(?i:[kmgtp]i?)?)b")

_DEFINITIONS = """
nano- = 1e-9 = n-
micro- = 1e-6 = µ- = u-
milli- = 1e-3 = m-
kilo- = 1e3 = k-
mega- = 1e6 = M-
giga- = 1e9 = G-
tera- = 1e12 = T-
peta- = 1e15 = P-
exa- = 1e18 = E-
kibi- = 2**10 = Ki-
mebi- = 2**20 = Mi-
gibi- = 2**30 = Gi-
tebi- = 2**40 = Ti-
second = [time] = s = sec
minute = 60 * second = min
hour = 3600 * second = h
bit = [information]
byte = 8 * bit = B
FLOP = [operation] = FLOP = flop = FLOPs = flops
FLOPS = FLOP / second = FLOPS
token = [token] = token = tok
request = [request] = request
parameter = [parameter] = parameter = param
step = [step] = step
USD = [money] = USD = usd = dollar
percent = 0.01 = percent
"""


class UnitError(ValueError):
    """Something typed is not a quantity of the kind asked for; the message says what to type instead."""


@cache
def registry() -> pint.UnitRegistry:
    """The one pint registry. It holds this field's units and no others: a parsec is a slip here."""
    ureg: pint.UnitRegistry = pint.UnitRegistry(None)
    for line in _DEFINITIONS.strip().splitlines():
        ureg.define(line)
    return ureg


def parse_number(text: str) -> tuple[float, str]:
    """Split "6.098 x 10^9 bytes" into (6.098e9, "bytes"). Raises UnitError for anything that is not a finite number."""
    if not isinstance(text, str):
        raise UnitError(f"expected text such as '14 GB', got {type(text).__name__}")
    text = text.strip()
    if not text:
        raise UnitError("nothing was typed: write a number, with its unit, such as '14 GB'")
    if len(text) > _MAX_LENGTH:
        raise UnitError(f"that is {len(text):,} characters long: write one number and its unit, such as '14 GB'")
    match = _NUMBER.fullmatch(text)
    if not match:
        raise UnitError(f"{text!r} does not start with a plain number: write something like '14 GB' or '1.2e9'")
    mantissa, power = match["mantissa"].replace(",", "").replace("_", ""), match["power"] or ""
    exponent = re.search(r"[+-]?\d+$", power.replace(" ", ""))
    value = float(f"{mantissa}e{exponent[0]}" if exponent else mantissa)
    if not math.isfinite(value):
        raise UnitError(f"{text!r} is too large to be an answer here")
    return value, match["unit"].strip()


def parse(text: str, unit: str, unit_optional: bool = False) -> float:
    """The value of what was typed, in `unit` (for example "byte", "s", "FLOP/byte", "token/s", "" for a plain number).

    A missing unit is an error unless `unit_optional`. Raises UnitError, with what to type instead.
    """
    value, typed = parse_number(text)
    if not typed:
        if unit == "percent" and abs(value) <= 1:
            return value * 100  # 0.382 is a common way to write 38.2 %
        if unit and not unit_optional:
            raise UnitError(
                f"{text.strip()!r} has no unit: this answer is in {unit}, write for example '{value:g} {unit}'"
            )
        return value
    quantity = value * registry().parse_units(_look_up(typed))
    try:
        converted = float(quantity.to(unit or "dimensionless").magnitude)
    except pint.DimensionalityError:
        hint = " (a count of FLOPs is not a rate: write FLOP/s)" if "FLOP/s" in unit else ""
        raise UnitError(f"{typed!r} is not a unit of {unit or 'a plain number'}, which was asked for{hint}") from None
    if not math.isfinite(converted):
        raise UnitError(f"{text.strip()!r} is too large to be an answer here")
    return converted


def _look_up(typed: str) -> str:
    """The pint name of a typed unit; "GB/s" and "tokens per second" have two parts."""
    if not _UNIT.fullmatch(typed):
        raise UnitError(f"{typed!r} is not a unit: write for example {_EXAMPLES}")
    return " / ".join(_look_up_word(word) for word in re.split(r" ?(?:/| per ) ?", typed))


def _look_up_word(word: str) -> str:
    if match := _AMBIGUOUS.fullmatch(word):
        prefix = match["prefix"].capitalize()
        prefix = "k" if prefix == "K" else prefix
        raise UnitError(f"{word!r}: bits or bytes? Write {prefix + 'B'!r} for bytes or {prefix + 'bit'!r} for bits")
    name = _ALIASES.get(word, word)
    if not name or registry().parse_unit_name(name):
        return name
    # "BYTES" is byte, but "MBYTES" is not mbyte: the case of a prefix means something, that of a name does not
    if any(prefix == "" for prefix, _, _ in registry().parse_unit_name(name.lower())):
        return name.lower()
    raise UnitError(f"{word!r} is not a unit known here: write for example {_EXAMPLES}")


_SI = [
    (1e15, "P"),
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "µ"),
    (1e-9, "n"),
]
_PREFIXED = {
    "B": 1.0,
    "B/s": 1.0,
    "FLOP": 1.0,
    "FLOP/s": 1.0,
    "s": 1e-9,
    "B/token": 1.0,
}  # unit: smallest scale used


def fmt(value: float, unit: str = "", digits: int = 4, binary: bool = False) -> str:
    """A value with its unit, as every page, plot and message of the course prints it.

    B, B/s, FLOP, FLOP/s and s take a metric prefix (13.21 GB, 7.01 ms); `binary` prints bytes in KiB, MiB, GiB.
    Other units (token/s, FLOP/B, USD) are printed as they are. `digits` is the number of significant digits.
    Raises ValueError for NaN and infinity: neither belongs on a page.
    """
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"value must be finite to be printed, got {value}")
    if binary:
        if not unit.startswith("B"):
            raise ValueError(f"binary prefixes are for bytes only, not {unit!r}")
        power = next((p for p in (4, 3, 2, 1) if abs(value) >= 1024**p * (1 - 1e-9)), 0)
        return f"{_number(value / 1024**power, digits)} {['', 'Ki', 'Mi', 'Gi', 'Ti'][power]}{unit}"
    if unit in _PREFIXED and value:
        scales = [(s, p) for s, p in _SI if s >= _PREFIXED[unit] and (unit != "s" or s <= 1)]
        scale, prefix = next(((s, p) for s, p in scales if abs(value) >= s * (1 - 0.5 * 10**-digits)), scales[-1])
        return f"{_number(value / scale, digits)} {prefix}{unit}"
    text = _number(value, digits)
    return f"{text}{'' if unit == '%' else ' '}{unit}" if unit else text


def _number(value: float, digits: int) -> str:
    """`digits` significant digits, never in exponent form, thousands set apart, no trailing zeros."""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)) + 1e-12))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text
