# SPDX-License-Identifier: BSL-1.0
"""A figure, and what it lies between.

Pairs of one process share its memory layout and the state of the machine: they are no independent draws, however many there are. So a process
counts as one value, the median of its pairs. The figure is the mean of these, and the interval is Student's. If some processes have fewer pairs
and scatter more, the interval is wider than it need be, not too narrow, at 95 % and above: Ibragimov and Mueller, Journal of Business & Economic
Statistics 28 (2010). Everything else has the median of its rounds, and the least and the greatest of them."""
import statistics
from dataclasses import dataclass

from scipy.stats import sem, t

CONFIDENCE = 0.95
ROUNDS, ONE = ", rounds", "one round"


@dataclass
class Estimate:
    value: float
    between: tuple = None  # what the true value lies between, or what the rounds do: `kind`
    kind: str = ""

    def text(self, form):
        if self.kind == ONE: return f"{form(self.value)} ({ONE})"
        return form(self.value) + (f" ({form(self.between[0])} to {form(self.between[1])}{self.kind})" if self.between else "")

    def verdict(self, met):
        if self.kind == ONE: return f"{'met' if met(self.value) else 'missed'} in {ONE}"
        verdicts = {met(value) for value in self.between}
        return "within the noise" if len(verdicts) > 1 else "met" if verdicts.pop() else "missed"


def mean_interval(values, confidence=CONFIDENCE):
    """(least, greatest) that hold the mean of what `values` are drawn from; None of fewer than two values."""
    if len(values) < 2: return None
    middle, half = statistics.fmean(values), sem(values) * t.ppf((1 + confidence) / 2, len(values) - 1)
    return (middle - half, middle + half)


def of_processes(benchmark, of_pair, confidence=CONFIDENCE):
    """None if there is no benchmark, or it has no pairs."""
    medians = [statistics.median(map(of_pair, pairs)) for pairs in benchmark.rounds("pairs") if pairs] if benchmark else []
    if not medians: return None
    between = mean_interval(medians, confidence)
    return Estimate(statistics.fmean(medians), between, "" if between else ONE)


def efficiency_of(benchmark):
    return of_processes(benchmark, lambda pair: pair[1] / pair[0])


def exposed_of(benchmark, confidence=CONFIDENCE):
    """Seconds of a step that copies without synchronisation do not take directly before and after."""
    return of_processes(benchmark, lambda pair: pair[0] - pair[1], confidence)


def of_rounds(values):
    """None of no rounds."""
    if len(values) < 2: return Estimate(values[0], kind=ONE) if values else None
    return Estimate(statistics.median(values), (min(values), max(values)), ROUNDS)


def by_rounds(above, below):
    """`above` over `below`, round by round. If one has fewer rounds, nobody knows which of the other's belong to them: all might."""
    if not above or not below: return None
    if len(above) == len(below): return of_rounds([a / b for a, b in zip(above, below)])
    return Estimate(statistics.median(above) / statistics.median(below), (min(above) / max(below), max(above) / min(below)), ROUNDS)


def less(own, goal, others):
    """`own` less `goal` times `others`, two that are independent: what it lies between if each lies where it is said to."""
    value = own.value - goal * others.value
    if ONE in (own.kind, others.kind): return Estimate(value, kind=ONE)
    return Estimate(value, (own.between[0] - goal * others.between[1], own.between[1] - goal * others.between[0]))
