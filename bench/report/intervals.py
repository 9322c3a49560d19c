# SPDX-License-Identifier: BSL-1.0
"""Where something lies that several processes measured.

Pairs of one process share where its memory came to lie and the state of the machine meanwhile: they are no independent draws, however many
there are. So a process counts as one value, the median of its pairs, and the interval is Student's, of the mean of these. That some processes
have fewer pairs than others, and scatter more, makes such an interval wider than it need be, not too narrow, at 95 % and above: Ibragimov and
Mueller, Journal of Business & Economic Statistics 28 (2010). What it assumes is that processes know nothing of one another, and that their
medians scatter about as a normal distribution does."""
import functools
import math
import statistics

CONFIDENCE = 0.95


def mean_interval(values, confidence=CONFIDENCE):
    """(least, greatest) that hold the mean of what `values` are drawn from; None of fewer than two values."""
    if len(values) < 2: return None
    middle = statistics.fmean(values)
    half = student(confidence, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return (middle - half, middle + half)


@functools.cache
def student(probability, freedom):
    """The t within which, on either side of zero, Student's distribution lies with that probability."""
    least, greatest = 0.0, 1e9
    for _ in range(200):
        middle = (least + greatest) / 2
        if within(middle, freedom) < probability: least = middle
        else: greatest = middle
    return greatest


def within(t, freedom):
    """The probability of -t to t. Abramowitz and Stegun, 26.7.3 and 26.7.4: `freedom` is a whole number."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = math.cos(angle) ** odd, 0.0
    for power in range(odd, freedom - 1, 2):  # of the cosine
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
