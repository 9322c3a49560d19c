# SPDX-License-Identifier: BSL-1.0
"""A figure, and what it lies between.

Pairs of one process share its memory layout and the state of the machine: they are no independent draws, however many there are. So a process counts
as one value, the median of its pairs. The figure is the mean of these, and the interval is Student's. It is not too narrow if some have fewer
pairs and scatter more: Ibragimov and Mueller, Journal of Business & Economic Statistics 28 (2010). Everything else has the median of its rounds, and
the least and the greatest of them.

Of several runs: the median of what each gives, and the least and the greatest. Days and machines are too few for an interval."""
import functools
import statistics
from dataclasses import dataclass

from scipy.stats import sem, t

ROUNDS, RUNS, ONE = ", rounds", ", runs", "one round"


@dataclass
class Estimate:
    value: float
    between: tuple = None  # what the true value lies between, or what the rounds do: `kind`
    kind: str = ""

    def text(self, form, briefly=False):
        """`briefly`: without its kind."""
        if self.kind == ONE: return form(self.value) + f" ({ONE})" * (not briefly)
        return form(self.value) + (f" ({form(self.between[0])} to {form(self.between[1])}{self.kind * (not briefly)})" if self.between else "")

    def verdict(self, met):
        if self.kind == ONE: return f"{'met' if met(self.value) else 'missed'} in {ONE}"
        verdicts = {met(value) for value in self.between}
        return "within the noise" if len(verdicts) > 1 else "met" if verdicts.pop() else "missed"


def by_run(of_one):
    """What gives an Estimate or None of one run's results, or of one of its benchmarks, then does so of several."""
    @functools.wraps(of_one)
    def of_all(measured, *more):
        found = [estimate for run in (measured.runs if measured else []) if (estimate := of_one(run, *more))]
        if len(found) < 2: return found[0] if found else None
        values = [estimate.value for estimate in found]
        return Estimate(statistics.median(values), (min(values), max(values)), RUNS)
    return of_all


def of_processes(medians):
    """The mean of `medians`, a value a process, and what 95 % of such intervals hold; None of none."""
    if len(medians) < 2: return Estimate(medians[0], kind=ONE) if medians else None
    middle, half = statistics.fmean(medians), sem(medians) * t.ppf(0.975, len(medians) - 1)
    return Estimate(middle, (middle - half, middle + half))


def medians(benchmark, of_pair):
    """By process; empty if there is no benchmark."""
    return [statistics.median(map(of_pair, pairs)) for pairs in benchmark.rounds("pairs")] if benchmark else []


@by_run
def efficiency_of(benchmark):
    return of_processes(medians(benchmark, lambda pair: pair[1] / pair[0]))


def waits(benchmark):
    """Seconds of a step that copies without synchronisation do not take directly before and after; by process."""
    return medians(benchmark, lambda pair: pair[0] - pair[1])


@by_run
def exposed_of(benchmark):
    return of_processes(waits(benchmark))


def of_rounds(values):
    """None of no rounds."""
    if len(values) < 2: return Estimate(values[0], kind=ONE) if values else None
    return Estimate(statistics.median(values), (min(values), max(values)), ROUNDS)


def by_rounds(above, below):
    """`above` over `below`, round by round. If one has fewer rounds, nobody knows which of the other's belong to them: all might."""
    if not above or not below: return None
    if len(above) == len(below): return of_rounds([a / b for a, b in zip(above, below)])
    return Estimate(statistics.median(above) / statistics.median(below), (min(above) / max(below), max(above) / min(below)), ROUNDS)
