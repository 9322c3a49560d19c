# SPDX-License-Identifier: BSL-1.0
"""Did something become slower? Two results.json, an old one and a new one.

The machine has states, and others use it. So a benchmark that was measured in turns with something that the library does not touch (the bandwidth
limit, copies that do not synchronise, a memcpy) is compared by its time over that one's; others by their times, if both runs found the processor and
the handoff alike. A round is one value: its samples share the state of the machine. What is certain, but below the least effect, is none."""
import re
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
NOT_OURS = re.compile(r"overlap/compute|train_step/\w+/(independent|torch_(?!gradsync))")
# Counters WHO_ratio: that one's time over this one's, measured in turns.
REFERENCES = {"limit_ratio": "the limit", "independent_ratio": "no synchronisation", "unwatched_ratio": "the same unwatched",
              "all_reduce_ratio": "a bare all-reduce", "compute_ratio": "the compute", "memcpy_ratio": "memcpy", "nccl_library_ratio": "NCCL"}


def guarded(name):
    """Is it the library's time? Peers, and what everything is compared with, are not."""
    who = name.partition("/")[0]
    return not NOT_OURS.match(name) and (who not in names.WHO or names.WHO[who].ours)


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
    """A DataFrame of the benchmarks that both have; `times`: also of those with nothing to be divided by."""
    found, rounds = [], []
    for now in filter(lambda now: guarded(now.name) and old.get(now.name), new.benchmarks()):
        both = old.get(now.name), now
        counter = next((c for c in [*REFERENCES, *["time"] * times] if min(len(b.rounds(c)) for b in both) >= LEAST_ROUNDS), None)
        if not counter: continue
        rounds.append([[value if counter == "time" else 1 / value for value in b.rounds(counter)] for b in both])
        before, after = map(statistics.median, rounds[-1])
        effect = OF_TIMES if counter == "time" else OF_STEPS if now.program == "bench_train_step" else LEAST_EFFECT
        found.append([now.name, REFERENCES.get(counter, "itself"), before, after, after / before, 1 + effect])
    table = pandas.DataFrame(found, columns=["benchmark", "over", "old", "new", "new / old", "least"])
    return table.assign(p=p_values(rounds) if rounds else [])


def compare(old, new, out):
    """Prints what changed; returns whether nothing became slower."""
    both = {"old": old, "new": new}
    if len(new.runs) + len(old.runs) > 2: raise BadInput("--compare compares one run with another; give one to --pool")
    few = [name for name, results in both.items() if results.run.get("rounds", 0) < LEAST_ROUNDS]
    if few: raise BadInput(f"the {few[0]} run has too few rounds; measure {LEAST_ROUNDS} or more")
    for name, results in both.items():
        print(f"{name}: {results.machine.get('commit', '')[:12]}, {results.machine.get('date')}. {results.others()[1]}", file=out)
    state = another_state(old, new)
    if state: print(f"Times are not compared, only ratios: {state}.", file=out)
    found = differences(old, new, not state)
    broken = sorted(name for name in new.errors if old.get(name) and guarded(name))
    certain = found[significant_ones(found.p)].sort_values("new / old", ascending=False)
    slower, faster = certain[certain["new / old"] > certain.least], (certain["new / old"] < 1 / certain.least).sum()
    if len(slower): print(f"\n{markdown(slower.applymap(lambda value: value if isinstance(value, str) else significant(value)))}", file=out)
    for name in broken: print(f"\nFailed, and did not before: {name}: {new.errors[name]}", file=out)
    print(f"\n{len(found)} compared: {len(slower)} slower, {faster} faster; {len(broken)} failed.", file=out)
    return slower.empty and not broken
