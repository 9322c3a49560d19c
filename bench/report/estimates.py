# SPDX-License-Identifier: BSL-1.0
"""A figure, and what it lies between.

Of what is measured in pairs every process has a median; the figure is their mean, wherever it is shown. Results that were kept before pairs
were, have the median of the rounds and the widest quartiles in their place, and say so. What is not measured in pairs has the median of its
rounds, and the least and the greatest of them."""
import statistics

from .intervals import CONFIDENCE, mean_interval

EXPOSED = "exposed_against_independent"
QUARTILES = ", quartiles"
ROUNDS = ", rounds"
FEW, ONE = "of one process alone", "one round"


class Estimate:
    """`between`: what the true value lies between, or the rounds do: `kind`. `spread`: the least and the greatest that it is the mean or the
    median of."""

    def __init__(self, value, between, kind="", spread=None):
        self.value, self.between, self.kind, self.spread = value, between, kind, spread or between

    def text(self, form):
        if self.kind == ONE: return f"{form(self.value)} ({ONE})"
        return form(self.value) + (f" ({form(self.between[0])} to {form(self.between[1])}{self.kind})" if self.between else "")

    def spread_text(self, form):
        return form(self.value) + (f" ({form(self.spread[0])} to {form(self.spread[1])})" if self.spread else "")

    def verdict(self, met):
        if self.kind == FEW: return FEW
        if self.kind == ONE: return f"{'met' if met(self.value) else 'missed'} in {ONE}"
        verdicts = {met(value) for value in self.between or [self.value]}
        return "within the noise" if len(verdicts) > 1 else "met" if verdicts.pop() else "missed"


def of_processes(benchmark, counter, of_pair, series="pairs", confidence=CONFIDENCE):
    """Of results without pairs, `counter` and its quartiles. None where there is neither."""
    medians = [statistics.median(map(of_pair, pairs)) for pairs in benchmark.rounds(series) if pairs]
    if medians:
        between = mean_interval(medians, confidence)
        return Estimate(statistics.fmean(medians), between, "" if between else FEW, (min(medians), max(medians)))
    if not counter or benchmark.counter(counter) is None: return None
    return Estimate(benchmark.counter(counter), benchmark.quartiles(counter), QUARTILES)


def efficiency_of(benchmark):
    return of_processes(benchmark, "independent_ratio", lambda pair: pair[1] / pair[0])


def exposed_of(benchmark, confidence=CONFIDENCE):
    """Seconds of a step that copies without synchronisation do not take directly before and after."""
    return of_processes(benchmark, EXPOSED, lambda pair: pair[0] - pair[1], confidence=confidence)


def of_rounds(values):
    """None of no rounds."""
    if not values: return None
    return Estimate(statistics.median(values), *(((min(values), max(values)), ROUNDS) if len(values) > 1 else (None, ONE)))


def by_rounds(above, below):
    """`above` over `below`, round by round. Where one of them has fewer rounds, nobody knows which of the other's belong to them: all might."""
    if not above or not below: return None
    if len(above) == len(below): return of_rounds([a / b for a, b in zip(above, below)])
    return Estimate(statistics.median(above) / statistics.median(below), (min(above) / max(below), max(above) / min(below)), ROUNDS)


def less(own, goal, others):
    """`own` less `goal` times `others`, two that are independent: what it lies between if each lies where it is said to."""
    value = own.value - goal * others.value
    if FEW in (own.kind, others.kind): return Estimate(value, None, FEW)
    ends = [e.between or (e.value, e.value) for e in (own, others)]
    return Estimate(value, (ends[0][0] - goal * ends[1][1], ends[0][1] - goal * ends[1][0]), own.kind or others.kind)
