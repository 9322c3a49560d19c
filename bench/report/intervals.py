"""Where a median lies, from a sample of it.

The quartiles of pairs say how much pairs differ, however many there are; what the pairs say of their median becomes sharper with their
number. Between which of the values, in order, the true median lies is a matter of counting heads: each value is above it with probability
1/2, whatever the distribution. So nothing is assumed but that one pair knows nothing of another."""
import math

CONFIDENCE = 0.95


def median_interval(values, confidence=CONFIDENCE):
    """(least, greatest) that hold the median with at least that probability; None of too few values: below 6 at 95 %."""
    ordered, n = sorted(values), len(values)
    allowed = (1 - confidence) / 2 * 2 ** n  # of the 2^n ways in which heads fall, on either side
    ways, k = 0, 0
    while k < n and (ways := ways + math.comb(n, k)) <= allowed: k += 1
    return (ordered[k - 1], ordered[n - k]) if k else None
