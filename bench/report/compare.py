# SPDX-License-Identifier: BSL-1.0
"""Did something become slower? Two results.json, an old one and a new one.

What is compared. The machine has states: messages between cores take 50 ns at one time and 250 ns at another, and others use it. So a
benchmark that was measured in turns with something that the library does not touch (the bandwidth limit, copies that do not
synchronise, a memcpy) is compared by its time over that one's. Others are compared by their times, if both runs found the processor
and the handoff alike.

The test. Samples of one round share the state of the machine and are no independent draws, so a round is one value: the logarithm of
its median (or ratio). A t-test compares the old rounds with the new ones, in both directions. Two or three rounds say little of a
benchmark's own variance, and a test by that alone would miss a time that has tripled; but there are hundreds of benchmarks, and together
they say what variances are like here: Smyth's moderated t-test weighs the two as the benchmarks differ among themselves. As there are so
many, some are always unlucky: Benjamini and Hochberg's procedure keeps the expected share of false ones among the alarms below ALPHA. And what differs
by less than the least effect is no regression, however certain it is: two runs differ by more than their rounds do.
"""
import math
import statistics
from dataclasses import dataclass

from . import names
from .results import BadInput
from .text import Table, seconds, significant

ALPHA = 0.05
LEAST_ROUNDS = 2
LEAST_EFFECT = {"bench_train_step": 0.05, "": 0.10}  # by program, of ratios: a step is mostly compute, which cannot become slower here
LEAST_EFFECT_OF_TIMES = 0.25
LEAST_DEVIATION = 1e-3  # of rounds, relative: equal ones are equal by chance
ENOUGH_FOR_PRIOR = 20  # benchmarks: fewer say little of how variances differ
MOST_WEIGHT = 20  # of what they say of one another
SAME_HANDOFF = 1.25
# Counters WHO_ratio: that one's time over this one's, measured in turns.
REFERENCES = {"limit_ratio": "the limit", "independent_ratio": "no synchronisation", "unwatched_ratio": "the same unwatched",
              "all_reduce_ratio": "a bare all-reduce", "compute_ratio": "the compute", "memcpy_ratio": "memcpy", "nccl_library_ratio": "NCCL"}


@dataclass
class Difference:
    name: str
    against: str  # what the time is divided by; empty: compared as it is
    old: float
    new: float
    least_effect: float
    p: float = 1.0
    significant: bool = False

    @property
    def ratio(self):
        return self.new / self.old

    @property
    def slower(self):
        return self.significant and self.ratio > 1 + self.least_effect

    @property
    def faster(self):
        return self.significant and self.ratio < 1 / (1 + self.least_effect)


def guarded(name):
    """Is it the library's time? Peers, and what everything is compared with, are not."""
    parts = name.split("/")
    if parts[0] == "overlap": return parts[1] != "compute"
    if parts[0] == "train_step": return not parts[2].startswith("torch_") and parts[2] not in names.INDEPENDENT
    return parts[0] not in names.PEERS


def p_values(pairs):
    """Of pairs (old, new) of values by round: moderated t-tests on logarithms. Smyth, Statistical Applications in Genetics and Molecular
    Biology 3 (2004), sections 6.2 and 4."""
    from scipy.special import digamma, polygamma
    from scipy.stats import t
    logs = [[[math.log(v) for v in side] for side in pair] for pair in pairs]
    freedoms = [len(old) + len(new) - 2 for old, new in logs]
    squares = lambda side: sum((v - statistics.mean(side)) ** 2 for v in side)
    variances = [max((squares(old) + squares(new)) / d, LEAST_DEVIATION ** 2) for (old, new), d in zip(logs, freedoms)]
    prior, weight = 0.0, 0.0  # the variance to expect, and how many degrees of freedom it counts for
    if len(pairs) >= ENOUGH_FOR_PRIOR:
        centred = [math.log(s) - float(digamma(d / 2)) + math.log(d / 2) for s, d in zip(variances, freedoms)]
        excess = statistics.variance(centred) - statistics.mean(float(polygamma(1, d / 2)) for d in freedoms)
        weight = 2 * inverse_trigamma(excess) if excess > 0 else math.inf  # that is: all have the same variance
        prior = math.exp(statistics.mean(centred) + (float(digamma(weight / 2)) - math.log(weight / 2) if excess > 0 else 0))
        weight = min(weight, MOST_WEIGHT)
    found = []
    for (old, new), s, d in zip(logs, variances, freedoms):
        deviation = math.sqrt((weight * prior + d * s) / (weight + d) * (1 / len(old) + 1 / len(new)))
        found.append(float(2 * t.sf(abs(statistics.mean(new) - statistics.mean(old)) / deviation, weight + d)))
    return found


def inverse_trigamma(value):
    """It falls from infinity to 0."""
    from scipy.optimize import brentq
    from scipy.special import polygamma
    return brentq(lambda x: float(polygamma(1, x)) - value, 1e-6, 1e6) if 1e-6 < value < 1e12 else 1e6 if value <= 1e-6 else 1e-6


def mark_significant(differences):
    """Benjamini and Hochberg, Journal of the Royal Statistical Society B 57 (1995)."""
    ordered = sorted(differences, key=lambda d: d.p)
    passing = [i for i, d in enumerate(ordered, 1) if d.p <= ALPHA * i / len(ordered)]
    for d in ordered[:max(passing, default=0)]: d.significant = True


def another_state(old, new):
    """Why times cannot be compared; empty: they can."""
    if any(old.machine.get(what) != new.machine.get(what) for what in ("cpu", "cores")):
        return f"another machine: {old.machine.get('cpu')}, {old.machine.get('cores')} cores, and {new.machine.get('cpu')}, {new.machine.get('cores')} cores"
    before, after = old.handoff(), new.handoff()
    if before and after and max(before, after) > SAME_HANDOFF * min(before, after):
        return f"another state of the machine: {before:.0f} and {after:.0f} ns from core to core"
    return ""


def differences(old, new, times):
    """Of every benchmark that both have; `times`: also of those with nothing to be divided by. And how many were left out: as nothing can be said,
    and as only one of the runs has quartiles of the ratio, thus its median over pairs; before, it was the ratio of two medians."""
    found, rounds, left_out, estimated_otherwise = [], [], 0, 0
    before = {b.name: b for b in old.benchmarks()}
    for now in new.benchmarks():
        then = before.get(now.name)
        if not then or not guarded(now.name): continue
        for counter, against in [*REFERENCES.items(), ("time", "")]:
            values = [[v for v in b.rounds(counter) if v > 0] for b in (then, now)]
            if min(map(len, values)) < LEAST_ROUNDS: continue
            if not against and not times:
                left_out += 1
                break
            if (then.quartiles(counter) is None) != (now.quartiles(counter) is None):
                estimated_otherwise += 1
                break
            if against: values = [[1 / v for v in side] for side in values]
            effect = LEAST_EFFECT.get(now.program, LEAST_EFFECT[""]) if against else LEAST_EFFECT_OF_TIMES
            found.append(Difference(now.name, against, *map(statistics.median, values), effect))
            rounds.append(values)
            break
        else: left_out += 1
    for difference, p in zip(found, p_values(rounds)): difference.p = p
    mark_significant(found)
    return found, left_out, estimated_otherwise


def require_rounds(results, name):
    rounds = results.run.get("rounds", 0)
    if rounds < LEAST_ROUNDS: raise BadInput(f"{name} has {rounds} round{'s' * (rounds != 1)}; a test needs {LEAST_ROUNDS} or more of each run")


def table(title, differences):
    show = lambda d, value: f"{significant(value)} x" if d.against else seconds(value)
    return Table(title, ["benchmark", "over", "old", "new", "new / old", "p"],
                 [[d.name, d.against or "itself", show(d, d.old), show(d, d.new), f"{d.ratio:.2f}", f"{d.p:.1g}"] for d in differences])


def compare(old, new, out):
    """Prints what changed; returns whether nothing became slower."""
    state = another_state(old, new)
    found, left_out, estimated_otherwise = differences(old, new, not state)
    broken = sorted(name for name in new.errors if name in old.columns and guarded(name))
    slower = sorted((d for d in found if d.slower), key=lambda d: -d.ratio)
    faster = sorted((d for d in found if d.faster), key=lambda d: d.ratio)
    print(f"old: {old.machine.get('commit', '')[:12]}, {old.machine.get('date')}, {old.run.get('rounds')} rounds; "
          f"new: {new.machine.get('commit', '')[:12]}, {new.machine.get('date')}, {new.run.get('rounds')} rounds", file=out)
    for name, results in (("old", old), ("new", new)):
        others, much = results.used_by_others()
        if much: print(f"Others used the machine in the {name} run ({others}): its figures say little.", file=out)
    if state: print(f"Times are not compared, only ratios: {state}.", file=out)
    if estimated_otherwise:
        print(f"Left out: {estimated_otherwise} whose ratio is a median over pairs in one of the runs and a ratio of medians in the other; measure "
              "the older one again.", file=out)
    for title, of_kind in (("Slower", slower), ("Faster", faster)):
        if of_kind: print(f"\n{title}\n\n{table(title, of_kind).markdown()}", file=out)
    for name in broken: print(f"\nFailed, and did not before: {name}: {new.errors[name]}", file=out)
    missing = sum(1 for b in old.benchmarks() if guarded(b.name) and b.name not in new.columns and b.name not in broken)
    print(f"\n{len(found)} compared: {len(slower)} slower, {len(faster)} faster; {len(broken)} failed; {left_out + estimated_otherwise} could not be compared; "
          f"{missing} not measured anew.", file=out)
    return not slower and not broken
