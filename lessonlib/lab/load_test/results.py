"""What clients of a server saw: each request, a level of load, and a whole load test, which can be saved and read."""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from lessonlib.batching.report import MEASURES
from lessonlib.checks import check_choice, check_count, check_number
from lessonlib.latency import SLO
from lessonlib.units import fmt

FORMAT = "lessonlib load test 1"
# What went wrong, for people; else the words before the colon of the error itself.
REASONS = {
    "ConnectError": "no connection",
    "ReadError": "cut off",
    "WriteError": "cut off",
    "RemoteProtocolError": "cut off",
}
COLUMNS = {  # of the table: measure and percentile
    "TTFT p50": ("ttft_s", 50),
    "TTFT p99": ("ttft_s", 99),
    "ITL p50": ("itl_s", 50),
    "ITL p99": ("itl_s", 99),
    "TPOT p50": ("tpot_s", 50),
    "end to end p50": ("e2e_s", 50),
}


@dataclass(frozen=True)
class Served:
    """What became of one request. Times are in seconds since its run, or its level of load, began.

    A piece of text is mostly one token, but some servers send several at once. TTFT, end to end and (where the server
    says how many tokens there were) TPOT do not suffer from that; gaps are then between pieces, so that ITL is longer
    than between tokens, and there are fewer of them.
    """

    sent_s: float
    token_s: tuple[float, ...]
    """when each piece of text arrived: a token, or a few that came at once"""
    end_s: float
    prompt_tokens: int
    output_tokens: int
    error: str = ""
    """why the request failed; empty if it did not"""
    counted_by: Literal["usage", "pieces"] = "usage"
    """whether `output_tokens` is what the server says, or pieces were counted because it says nothing"""
    engine_prompt_s: float | None = None
    """what llama.cpp says it took from starting on the prompt to the first token; None of other servers"""
    engine_tpot_s: float | None = None
    """what llama.cpp says each further token took; None of other servers, and of a single token"""

    @property
    def ttft_s(self) -> float:
        """Time from sending the request to its first token. Of requests that did not fail only."""
        return self.token_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first. Of requests of two tokens and more that did not fail only."""
        return (self.token_s[-1] - self.token_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Time from sending the request to its last token. Of requests that did not fail only."""
        return self.token_s[-1] - self.sent_s

    @property
    def reason(self) -> str:
        """The error in a few words: HTTP 500, cut off, not JSON, ...; empty if the request did not fail."""
        kind = self.error.partition(":")[0]
        return REASONS.get(kind, kind)

    def meets(self, slo: SLO) -> bool:
        """Whether the request did not fail and kept both limits. One of a single token has only a TTFT to keep."""
        if self.error:
            return False
        gaps = self.output_tokens - 1
        return self.ttft_s <= slo.ttft_s and self.token_s[-1] - self.token_s[0] <= slo.tpot_s * gaps


@dataclass(frozen=True, repr=False)
class LoadResult:
    """All requests of one run, or of one level of a load test, and how long it took."""

    clients: int | None
    """requests under way at a time, at most; None if they arrived at a rate"""
    wall_s: float
    served: tuple[Served, ...]
    rate_per_s: float | None = None
    """requests per second that arrived, on average; None if clients waited for their answers"""

    @property
    def completed(self) -> list[Served]:
        """The requests that did not fail."""
        return [one for one in self.served if not one.error]

    @property
    def failures(self) -> int:
        """How many requests failed."""
        return len(self.served) - len(self.completed)

    @property
    def errors(self) -> Counter[str]:
        """Why requests failed in full words, and how many for each."""
        return Counter(one.error for one in self.served if one.error)

    @property
    def reasons(self) -> Counter[str]:
        """Why requests failed in a few words, and how many for each."""
        return Counter(one.reason for one in self.served if one.error)

    @property
    def output_tokens(self) -> int:
        """Tokens of the requests that did not fail."""
        return sum(one.output_tokens for one in self.completed)

    @property
    def tokens_per_s(self) -> float:
        """`output_tokens` per second of the run."""
        return self.output_tokens / self.wall_s

    @property
    def requests_per_s(self) -> float:
        """Requests that did not fail per second of the run."""
        return len(self.completed) / self.wall_s

    @property
    def counted_by(self) -> Literal["usage", "pieces"]:
        """ "pieces" if the server did not say, for every request, how many tokens it made."""
        return "pieces" if any(one.counted_by == "pieces" for one in self.completed) else "usage"

    @property
    def ttft_s(self) -> np.ndarray:
        """Time to first token of each request that did not fail."""
        return np.array([one.ttft_s for one in self.completed])

    @property
    def tpot_s(self) -> np.ndarray:
        """Time per output token of each request of two tokens or more, not all in one piece, that did not fail."""
        return np.array([one.tpot_s for one in self.completed if one.output_tokens > 1 and len(one.token_s) > 1])

    @property
    def itl_s(self) -> np.ndarray:
        """Inter-token latencies: every gap between two pieces of text of a request that did not fail."""
        return np.concatenate([np.empty(0), *(np.diff(one.token_s) for one in self.completed)])

    @property
    def e2e_s(self) -> np.ndarray:
        """Time from sending to last token of each request that did not fail."""
        return np.array([one.e2e_s for one in self.completed])

    def percentiles(self, measure: str, percents: Iterable[float] = (50, 90, 95, 99)) -> dict[str, float]:
        """Percentiles of "ttft_s", "tpot_s", "itl_s" or "e2e_s", as {"p50": seconds, ...}.

        Between two values the percentile is interpolated, as numpy does it. Empty if nothing was measured.
        Raises ValueError for another measure, or a percent outside 0 to 100.
        """
        values = getattr(self, check_choice("measure", measure, MEASURES))
        asked = [check_number("percents", percent) for percent in percents]
        if any(percent > 100 for percent in asked):
            raise ValueError(f"percents must be from 0 to 100, got {asked}")
        return {f"p{percent:g}": float(np.percentile(values, percent)) for percent in asked if values.size}

    def slo_share(self, slo: SLO) -> float:
        """Share of all requests that keep both limits, 0 to 1. Those that failed do not."""
        return sum(one.meets(slo) for one in self.served) / len(self.served)

    def goodput_per_s(self, slo: SLO) -> float:
        """Goodput: requests that keep both limits of `slo`, per second of the run."""
        return self.slo_share(slo) * len(self.served) / self.wall_s

    @property
    def level(self) -> str:
        """The load in words: 8 clients, or 0.5 requests/s."""
        return level_text(self.clients, self.rate_per_s)

    def __repr__(self) -> str:
        said = [f"{self.level}: {fmt(self.tokens_per_s, 'tokens/s', 3)}"]
        if self.completed:
            said.append(f"median TTFT {fmt(float(np.median(self.ttft_s)), 's', 3)}")
        if self.tpot_s.size:
            said.append(f"median TPOT {fmt(float(np.median(self.tpot_s)), 's', 3)}")
        if self.failures:
            said.append(f"{self.failures} of {len(self.served)} requests failed ({'; '.join(self.errors)})")
        return ", ".join(said)

    def _row(self) -> list[str]:
        """A line of the table."""
        cells = [self.level, fmt(self.tokens_per_s, digits=3)]
        for measure, percent in COLUMNS.values():
            found = self.percentiles(measure, (percent,))
            cells.append(fmt(found[f"p{percent}"], "s", 3) if found else "-")
        why = ", ".join(f"{reason} ({count})" for reason, count in self.reasons.most_common())
        return [*cells, f"{self.failures} of {len(self.served)}{': ' if why else ''}{why}"]


@dataclass(frozen=True, repr=False)
class LoadTest:
    """Each level of load in the order in which they were run, and where the figures come from."""

    levels: tuple[LoadResult, ...]
    provenance: Mapping[str, Any]
    """server, model, settings, seed, versions, the processor the clients ran on, date, and the command for it"""
    interrupted: bool = False
    """whether somebody ended it early: levels may then be missing, and the last one may lack requests"""

    @property
    def failures(self) -> int:
        """How many requests failed, of all levels."""
        return sum(level.failures for level in self.levels)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything as JSON, every request's times included. Raises OSError if `path` cannot be written."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "LoadTest":
        """What `save` wrote. Raises FileNotFoundError for no file, ValueError for another or a damaged one."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no saved load test at {str(path)[:200]!r}: LoadTest.save(path) makes one"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
            if content.pop("format") != FORMAT:
                raise ValueError(f"its format must be {FORMAT!r}")
            return _load_test(**content)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{path.name} must be a load test as LoadTest.save writes it, but it is something else or damaged "
                f"({str(error)[:200]}): measure again, or take another file"
            ) from None

    def __repr__(self) -> str:
        where = self.provenance
        rows = [["", "tokens/s", *COLUMNS, "failed"], *(level._row() for level in self.levels)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lengths = [lengths_text(where[name]) for name in ("prompt_len", "output_len")]
        lines = [f"{where['model']}, {where['api']}: {lengths[0]} tokens of prompt, {lengths[1]} of output"]
        for first, *middle, last in rows:
            cells = [first.ljust(widths[0]), *map(str.rjust, middle, widths[1:]), last]
            lines.append("  ".join(cells).rstrip())
        if any(level.counted_by == "pieces" for level in self.levels):
            lines.append("Tokens are pieces of text here: the server does not say how many tokens it made.")
        if self.interrupted:
            lines.append("It was interrupted: what is missing was not measured.")
        return "\n".join(lines)


def level_text(clients: int | None, rate_per_s: float | None) -> str:
    """A level of load in words: 8 clients, or 0.5 requests/s."""
    if clients is None:
        return fmt(rate_per_s or 0, "requests/s", 3)
    return f"{clients} client{'s' if clients > 1 else ''}"


def lengths_text(lengths: int | Iterable[int]) -> str:
    """A length, or the lowest and the highest."""
    return str(lengths) if isinstance(lengths, int) else " to ".join(map(str, lengths))


# --- reading it back ------------------------------------------------------------------------------------------------


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _load_test(levels: list[dict[str, Any]], provenance: dict[str, Any], interrupted: bool) -> LoadTest:
    if not isinstance(provenance, dict) or not {"model", "api", "prompt_len", "output_len"} <= set(provenance):
        raise ValueError("provenance must say the model, the api and the lengths")
    check_choice("interrupted", int(interrupted), (0, 1))
    return LoadTest(tuple(_level(**level) for level in levels), provenance, interrupted)


def _level(clients: int | None, wall_s: float, served: list[dict[str, Any]], rate_per_s: float | None) -> LoadResult:
    if (clients is None) == (rate_per_s is None):
        raise ValueError("a level must have either clients or rate_per_s")
    return LoadResult(
        None if clients is None else check_count("clients", clients),
        check_number("wall_s", wall_s, exclusive=True),
        tuple(_served(**one) for one in served),
        None if rate_per_s is None else check_number("rate_per_s", rate_per_s, exclusive=True),
    )


def _served(**fields: Any) -> Served:
    if set(fields) != {field.name for field in dataclasses.fields(Served)}:
        raise ValueError("a request must have the fields of lessonlib.lab.Served")
    one = Served(**{**fields, "token_s": tuple(fields["token_s"])})
    times = [check_number("times", time) for time in (one.sent_s, *one.token_s, one.end_s)]
    if times != sorted(times):
        raise ValueError("times must not fall")
    if not isinstance(one.error, str) or not (one.error or one.token_s):
        raise ValueError("a request must have tokens, or else an error")
    check_count("prompt_tokens", one.prompt_tokens, 0)
    check_count("output_tokens", one.output_tokens, 0 if one.error else 1)
    check_choice("counted_by", one.counted_by, ("usage", "pieces"))
    for name in ("engine_prompt_s", "engine_tpot_s"):
        if getattr(one, name) is not None:
            check_number(name, getattr(one, name))
    return one
