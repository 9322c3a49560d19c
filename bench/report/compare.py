# SPDX-License-Identifier: BSL-1.0
"""Did something become slower? Two results.json, an old one and a new one.

The machine has states, and others use it. So a benchmark that was measured in turns with something that the library does not touch (the bandwidth
limit, copies that do not synchronise, a memcpy) is compared by its time over that one's; others by their times, if both runs found the processor and
the handoff alike. Samples of one round share the state of the machine, so a round is one value. A difference below the least effect is no regression,
however certain it is."""
import statistics

import numpy
import pandas
from scipy.stats import t

from . import BadInput, names
from .text import markdown, significant

ALPHA, LEAST_ROUNDS = 0.05, 2
LEAST_EFFECT, OF_STEPS, OF_TIMES = 0.10, 0.05, 0.25  # of ratios; a step is mostly compute, which cannot become slower here
LEAST_DEVIATION = 1e-3  # of rounds, relative: equal ones are equal by chance
WEIGHT_OF_ALL = 4  # degrees of freedom
SAME_HANDOFF = 1.25
# Counters WHO_ratio: that one's time over this one's, measured in turns.
REFERENCES = {"limit_ratio": "the limit", "independent_ratio": "no synchronisation", "unwatched_ratio": "the same unwatched",
              "all_reduce_ratio": "a bare all-reduce", "compute_ratio": "the compute", "memcpy_ratio": "memcpy", "nccl_library_ratio": "NCCL"}


def guarded(name):
    """Is it the library's time? Peers, and what everything is compared with, are not."""
    parts = name.split("/")
    if parts[0] == "overlap": return parts[1] != "compute"
    if parts[0] == "train_step": return parts[2] != "independent" and (not parts[2].startswith("torch_") or parts[2].startswith(names.IN_TORCH))
    return parts[0] not in names.WHO or names.WHO[parts[0]].ours


def p_values(rounds):
    """Of pairs (old, new) of values by round: Student's t-tests on logarithms. Two or three rounds say little of a variance, so the mean variance of
    all benchmarks counts beside a benchmark's own, as if it had been found in WEIGHT_OF_ALL more rounds."""
    logs = [[numpy.log(side) for side in pair] for pair in rounds]
    freedom = numpy.array([len(old) + len(new) - 2 for old, new in logs])
    squares = numpy.array([sum(len(side) * side.var() for side in pair) for pair in logs])
    of_all = max((squares / freedom).mean(), LEAST_DEVIATION ** 2)
    variance = (squares + WEIGHT_OF_ALL * of_all) / (freedom + WEIGHT_OF_ALL)
    difference = numpy.array([new.mean() - old.mean() for old, new in logs])
    return 2 * t.sf(abs(difference) / numpy.sqrt(variance * [1 / len(old) + 1 / len(new) for old, new in logs]), freedom + WEIGHT_OF_ALL)


def significant_ones(p):
    """Benjamini and Hochberg's: at most ALPHA of them are false alarms, on average. `p`: a Series."""
    place = p.rank(method="first")
    return place <= place[p <= ALPHA * place / len(p)].max()


def another_state(old, new):
    """Why times cannot be compared; empty: they can."""
    for what in ("cpu", "cores"):
        if old.machine.get(what) != new.machine.get(what): return f"another machine: {old.machine.get(what)} and {new.machine.get(what)}"
    least, most = sorted([old.handoff() or 0, new.handoff() or 0])
    return f"another state of the machine: {least:.0f} and {most:.0f} ns from core to core" if least and most > SAME_HANDOFF * least else ""


def differences(old, new, times):
    """A DataFrame of the benchmarks that both have; `times`: also of those with nothing to be divided by. And how many could not be compared."""
    found, rounds, left_out = [], [], 0
    for now in new.benchmarks():
        then = old.get(now.name)
        if not then or not guarded(now.name): continue
        counters = [counter for counter in [*REFERENCES, *["time"] * times] if min(len(b.rounds(counter)) for b in (then, now)) >= LEAST_ROUNDS]
        if not counters:
            left_out += 1
            continue
        is_time = counters[0] == "time"
        rounds.append([[value if is_time else 1 / value for value in b.rounds(counters[0])] for b in (then, now)])
        before, after = map(statistics.median, rounds[-1])
        effect = OF_TIMES if is_time else OF_STEPS if now.program == "bench_train_step" else LEAST_EFFECT
        found.append([now.name, REFERENCES.get(counters[0], "itself"), before, after, after / before, 1 + effect])
    table = pandas.DataFrame(found, columns=["benchmark", "over", "old", "new", "new / old", "least"])
    return table.assign(p=p_values(rounds) if rounds else []), left_out


def compare(old, new, out):
    """Prints what changed; returns whether nothing became slower."""
    for name, results in (("old", old), ("new", new)):
        if results.run.get("rounds", 0) < LEAST_ROUNDS: raise BadInput(f"the {name} run has too few rounds; measure {LEAST_ROUNDS} or more")
    state = another_state(old, new)
    found, left_out = differences(old, new, not state)
    broken = sorted(name for name in new.errors if name in old.columns and guarded(name))
    certain = found[significant_ones(found.p)].sort_values("new / old")
    slower, faster = certain[certain["new / old"] > certain.least][::-1], (certain["new / old"] < 1 / certain.least).sum()
    for name, results in (("old", old), ("new", new)):
        print(f"{name}: {results.machine.get('commit', '')[:12]}, {results.machine.get('date')}, {results.run.get('rounds')} rounds", file=out)
        if warning := results.others()[1]: print(f"{name}: {warning}", file=out)
    if state: print(f"Times are not compared, only ratios: {state}.", file=out)
    if len(slower): print(f"\nSlower:\n\n{markdown(slower.applymap(lambda value: value if isinstance(value, str) else significant(value)))}", file=out)
    for name in broken: print(f"\nFailed, and did not before: {name}: {new.errors[name]}", file=out)
    print(f"\n{len(found)} compared: {len(slower)} slower, {faster} faster; {len(broken)} failed; {left_out} could not be compared.", file=out)
    return slower.empty and not broken
