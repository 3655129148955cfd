"""How long answers are: a distribution with a cap, given by a few numbers, or the lengths of real answers.

mean=9400,p95=24000,max=27648      a log-normal distribution, cut at `max`
p50=2000,p95=9000,max=16384        the same, by two quantiles
fixed=512                          all alike
lengths.txt                        one length a line, drawn with replacement
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from schemas import UserError

IntArray = npt.NDArray[np.int64]
NORMAL = NormalDist()
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
SPREAD_MAX = 3.0  # of the logarithm: beyond it a mean says nothing about the typical answer
PROMPT_TOKENS = 256
FORMS = "Write for instance mean=9400,p95=24000,max=27648, or fixed=512, or name a file with one length a line."
LENGTH_MAX = 10_000_000


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens, at least 1. Log-normal with parameters `mu` and `sigma` of the logarithm, cut at
    `longest`; or, with `observed`, int64[n] real lengths drawn with replacement. `prompt` tokens precede each answer.
    """

    longest: int
    mu: float = 0.0
    sigma: float = 0.0
    observed: IntArray | None = None
    prompt: int = PROMPT_TOKENS

    def draw(self, generator: np.random.Generator, count: int) -> IntArray:
        """int64[count] lengths."""
        if self.observed is not None:
            drawn: IntArray = self.observed[generator.integers(len(self.observed), size=count)]
            return drawn
        drawn = np.exp(self.mu + self.sigma * generator.standard_normal(count))
        return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)

    @functools.cached_property
    def _typical(self) -> npt.NDArray[np.float64]:
        """Lengths at evenly spaced quantiles: enough to take moments of."""
        if self.observed is not None:
            return self.observed.astype(np.float64)
        levels = (np.arange(20_000) + 0.5) / 20_000
        normal = np.array([NORMAL.inv_cdf(level) for level in levels.tolist()])
        return np.clip(np.exp(self.mu + self.sigma * normal), 1, self.longest)

    @property
    def mean(self) -> float:
        """Mean length of an answer, cut as it is."""
        return float(self._typical.mean())

    def scaled(self, factor: float) -> Lengths:
        """All answers longer by a factor, and cut where they were cut before."""
        if self.observed is not None:
            return observed(np.clip(np.rint(self.observed * factor), 1, self.longest), self.prompt)
        return dataclasses.replace(self, mu=self.mu + math.log(factor))

    @property
    def running_context(self) -> float:
        """Mean tokens, prompt included, that a sequence in a full engine has at a random moment: E[L²] / 2E[L]."""
        return self.prompt + float((self._typical**2).mean() / (2 * self.mean))

    def quantile(self, level: float) -> float:
        """The length below which this share of the answers is."""
        return float(np.quantile(self._typical, level))

    def describe(self) -> str:
        """In words, for tables."""
        ends = f"p50 {self.quantile(0.5):,.0f}, p95 {self.quantile(0.95):,.0f}, longest {self.longest:,}"
        return f"answers of {self.mean:,.0f} tokens in the mean ({ends}) after prompts of {self.prompt:,}"


def observed(lengths: npt.ArrayLike, prompt: int = PROMPT_TOKENS) -> Lengths:
    """The distribution of real answers. Raises `UserError` if there is none, or one without a token."""
    array = np.asarray(lengths, np.int64)
    if array.size == 0 or array.min() < 1:
        raise UserError("There are no lengths, or one of them is below 1.", FORMS)
    return Lengths(int(array.max()), observed=array, prompt=prompt)


def parse_lengths(text: str, prompt: int = PROMPT_TOKENS) -> Lengths:
    """The distribution that a person wrote; see the top of this file for the forms. Raises `UserError`."""
    if "=" not in text:
        return observed(_read(Path(text)), prompt)
    given = _numbers(text)
    prompt = int(given.pop("prompt", prompt))
    if "fixed" in given:
        length = int(given.pop("fixed"))
        if given:
            raise UserError(f"--lengths {text}: fixed stands alone.", FORMS)
        return Lengths(length, math.log(length), 0.0, prompt=prompt)
    longest = given.pop("max", None)
    if longest is None or len(given) != 2:
        raise UserError(f"--lengths {text}: give max and two of mean, {', '.join(QUANTILES)}.", FORMS)
    return lognormal(given, int(longest), prompt)


def lognormal(given: Mapping[str, float], longest: int, prompt: int = PROMPT_TOKENS) -> Lengths:
    """The log-normal distribution, cut at `longest`, with the two given of `mean`, `p50`, `p90`, `p95`, `p99`.

    Raises `UserError` if there is none.
    """
    named = ", ".join(f"{name} {value:g}" for name, value in given.items())
    impossible = UserError(f"No distribution has {named} and max {longest}.", FORMS)
    if any(not 1 <= value < longest for value in given.values()):
        raise UserError(f"{named}: each must be at least 1 and below max, which is {longest}.", FORMS)
    if "mean" not in given:
        (low, low_value), (high, high_value) = sorted((QUANTILES[name], value) for name, value in given.items())
        if high_value < low_value:
            raise impossible
        sigma = math.log(high_value / low_value) / (NORMAL.inv_cdf(high) - NORMAL.inv_cdf(low))
        return Lengths(longest, math.log(low_value) - NORMAL.inv_cdf(low) * sigma, sigma, prompt=prompt)
    ((name, value),) = ((name, value) for name, value in given.items() if name != "mean")
    level = NORMAL.inv_cdf(QUANTILES[name])

    def mean_at(sigma: float) -> float:
        return _mean(math.log(value) - level * sigma, sigma, longest)

    spread = _solve(mean_at, given["mean"])
    if spread is None:
        raise impossible
    return Lengths(longest, math.log(value) - level * spread, spread, prompt=prompt)


def _mean(mu: float, sigma: float, longest: int) -> float:
    """E[min(X, longest)] of a log-normal X."""
    if sigma == 0:
        return min(math.exp(mu), longest)
    cut = (math.log(longest) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * NORMAL.cdf(cut - sigma) + longest * (1 - NORMAL.cdf(cut))


def _solve(function: Callable[[float], float], wanted: float) -> float | None:
    """The smallest `sigma` at which the function crosses `wanted`; None if it nowhere does."""
    grid = np.linspace(0.0, SPREAD_MAX, 301).tolist()
    for low, high in itertools.pairwise(grid):
        start = function(low) - wanted
        if start == 0:
            return float(low)
        if start * (function(high) - wanted) < 0:
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (low, middle) if start * (function(middle) - wanted) < 0 else (middle, high)
            return float(low)
    return None


def _numbers(text: str) -> dict[str, float]:
    out: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.strip()
        try:
            number = float(value)
        except ValueError:
            raise UserError(f"--lengths {text}: {part!r} is not name=number.", FORMS) from None
        if name not in {"mean", "max", "fixed", "prompt", *QUANTILES}:
            raise UserError(f"--lengths {text}: there is no {name!r}.", FORMS)
        if not 1 <= number <= LENGTH_MAX:
            raise UserError(f"--lengths {text}: {name} must be between 1 and {LENGTH_MAX:,}.", FORMS)
        out[name] = number
    return out


def _read(path: Path) -> list[int]:
    try:
        words = path.read_text(encoding="utf-8").split()
    except FileNotFoundError:
        raise UserError(f"There is no file {path} of lengths.", FORMS) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The lengths in {path} cannot be read: {error}.", FORMS) from None
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise UserError(f"{path} does not hold one length a line: {error}.", FORMS) from None
