"""What the library is meant to reach on two cores, and whether it does: the rows of one table.

What is measured in pairs is met or missed if the 95 % interval of the pairs' median lies on one side of the goal, and within the noise if
the goal lies inside. Results that were kept before pairs were, have the widest quartiles of the rounds in its place, and say so. What is
not measured in pairs is judged by its median over the rounds."""
from . import names, tables
from .intervals import CONFIDENCE, median_interval
from .results import MarkReady, Reducing
from .text import milliseconds, ratio, seconds, size

MIB = 2 ** 20
QUARTILES = ", quartiles"
FEW = "too few pairs"
TIMELINE = 1.01


class Estimate:
    """A median, and what it lies between: of pairs."""

    def __init__(self, value, between, kind=""):
        self.value, self.between, self.kind = value, between, kind

    def text(self, form):
        return form(self.value) + (f" ({form(self.between[0])} to {form(self.between[1])}{self.kind})" if self.between else "")

    def verdict(self, met):
        if self.kind == FEW: return FEW
        verdicts = {met(value) for value in self.between or [self.value]}
        return "within the noise" if len(verdicts) > 1 else "met" if verdicts.pop() else "missed"


def estimate(benchmark, counter, of_pair, series="pairs", confidence=CONFIDENCE):
    """Of the pairs of all rounds; of results without pairs, `counter` and its quartiles. None where there is neither."""
    values = sorted(map(of_pair, benchmark.series(series)))
    if values:
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        between = median_interval(values, confidence)
        return Estimate(middle, between, "" if between else FEW)
    if not counter or benchmark.counter(counter) is None: return None
    return Estimate(benchmark.counter(counter), benchmark.quartiles(counter), QUARTILES)


def efficiency_of(benchmark):
    return estimate(benchmark, "independent_ratio", lambda pair: pair[1] / pair[0])


def exposed_of(benchmark, confidence=CONFIDENCE):
    return estimate(benchmark, tables.EXPOSED, lambda pair: pair[0] - pair[1], confidence=confidence)


def quotient(above, below):
    """Of two that are independent, `below` above zero: what the quotient lies between if each lies where it is said to. Quartiles are no
    bounds: those of `below` are left out."""
    if FEW in (above.kind, below.kind): return Estimate(above.value / below.value, None, FEW)
    below_it = [below.value] if QUARTILES in (above.kind, below.kind) else below.between or [below.value]
    ends = [a / b for a in above.between or [above.value] for b in below_it]
    return Estimate(above.value / below.value, (min(ends), max(ends)) if above.between or below.between else None, above.kind or below.kind)


def rows(results):
    return [*all_reduces(results), *reducers(results), *steps(results), *alone(results)]


def row(what, goal, found, met, form=ratio):
    return [what, goal, found.text(form), found.verdict(met)]


def of_cases(what, goal, cases, met, worse, form=ratio):
    """One row for `cases`, {label: value}: the one that is furthest from the goal, and all others that miss it. `worse`: max or min."""
    if not cases: return []
    worst = worse(cases, key=cases.get)
    others = [f"{label}: {form(value)}" for label, value in cases.items() if label != worst and not met(value)]
    where = f" ({worst}{'; missed also at ' + ', '.join(others) if others else ''})" if len(cases) > 1 else ""
    return [[what, goal, form(cases[worst]) + where, "met" if met(cases[worst]) else "missed"]]


def all_reduces(results):
    every = tables.all_reduce_cases(results)
    at = lambda ranks, who, count: every.get(ranks, {}).get(who, {}).get(count)
    sizes = lambda ranks, who: sorted(every.get(ranks, {}).get(who, {}))
    found = []

    def ratios(ranks, who, counter, other, counts):
        """{size: the other's time over this one's}, measured in turns with it; of older results, of different turns."""
        cases = {}
        for count in counts:
            own, beside = at(ranks, who, count), at(ranks, other, count)
            if not own: continue
            value = own.counter(counter)
            if value is None and beside: value = beside.time / own.time
            if value is not None: cases[size(count)] = value
        return cases

    from_mib = lambda ranks, who: [count for count in sizes(ranks, who) if count >= MIB]
    for count in (25 * MIB, 100 * MIB):
        threads, gloo = at(2, "threads", count), at(2, "gloo", count)
        if threads and threads.counter("limit_ratio") is not None:
            found.append(row(f"all-reduce, 2 ranks, {size(count)}: threads' bandwidth over the limit's", "0.9", Estimate(threads.counter("limit_ratio"), None), lambda v: v >= 0.9))
        if threads and gloo:
            found.append(row(f"all-reduce, 2 ranks, {size(count)}: Gloo's time over threads'", "10", Estimate(gloo.time / threads.time, None), lambda v: v >= 10))
    if small := at(2, "threads", 4096):
        found.append(row("all-reduce, 2 ranks, 4 KiB: threads' time", "under 1 us", Estimate(small.time, None), lambda v: v < 1e-6, seconds))
    cores = results.machine.get("cores") or 0
    if cores < 4:
        found += of_cases(f"all-reduce, 4 ranks on {cores} cores, from 1 MiB: threads' bandwidth over a four-buffer loop's", "0.8",
                          ratios(4, "threads", "limit_ratio", "limit", from_mib(4, "threads")), lambda v: v >= 0.8, min)
    for ranks in (2, 4):
        found += of_cases(f"all-reduce, {ranks} ranks, from 1 MiB: bandwidth of MPI in shared memory over threads'", "0.8",
                          ratios(ranks, "mpi", "threads_ratio", "threads", from_mib(ranks, "mpi")), lambda v: v >= 0.8, min)
    for count in (25 * MIB, 100 * MIB):
        for value in ratios(2, "mpi", "mpi_library_ratio", "mpi_library", [count]).values():
            found.append(row(f"all-reduce, 2 ranks, {size(count)}: MPI_Allreduce's time over that of MPI in shared memory", "5", Estimate(value, None), lambda v: v >= 5))
    messages = {}
    for ranks in every:
        for count in sizes(ranks, "mpi_messages"):
            own, others = at(ranks, "mpi_messages", count), [at(ranks, who, count) for who in ("mpi_library", "mpi_library_nonblocking")]
            best = own.counter("mpi_library_best_ratio")
            if best is None and all(others): best = min(other.time for other in others) / own.time
            if best is not None: messages[f"{ranks} ranks, {size(count)}"] = 1 / best
    return found + of_cases("all-reduce: time of MPI by messages over the better of MPI_Allreduce's and MPI_Iallreduce's, at most", "1.05", messages,
                            lambda v: v <= 1.05, max)


def reducers(results):
    marks = {f"`{name['overlap']}`, {name['storage'].replace('_', ' ')}, {name['ranks']} rank{'s' * (name['ranks'] != 1)}": b.time
             for name, b in results.parsed(MarkReady)}
    made = {f"{name['ranks']} rank{'s' * (name['ranks'] != 1)}": b.time for name, b in results.parsed(Reducing) if name["parameters"] == 100000}
    nanoseconds = lambda value: f"{value * 1e9:.1f} ns"
    return [*of_cases("`mark_ready`, at most", "under 25 ns", marks, lambda v: v < 25e-9, max, nanoseconds),
            *of_cases("construction of a Reducer over 100,000 parameters, at most", "under 100 ms", made, lambda v: v < 0.1, max, seconds)]


def steps(results):
    found = []
    each = 1 - (1 - CONFIDENCE) / 2  # of two intervals: both hold with CONFIDENCE
    for model, of_ranks in tables.step_cases(results).items():
        backends = of_ranks.get(2, {})
        peer = backends.get("gloo", {}).get(names.PEER_DEFAULT)
        theirs = peer and exposed_of(peer, each)
        for backend, goal in (("threads", 0.1), ("mpi", 0.2)):
            ours = backends.get(backend, {}).get(names.DEFAULT)
            if not ours: continue
            own = exposed_of(ours, each)
            if own and theirs:
                what = f"{model}, 2 ranks, {backend}: exposed {own.text(milliseconds)} ms over PyTorch DDP's {theirs.text(milliseconds)}"
                if (theirs.between or (theirs.value, 0))[0] <= 0: found.append([what, f"at most {goal}", "", "DDP's is within the noise"])
                else: found.append(row(what, f"at most {goal}", quotient(own, theirs), lambda v: v <= goal))
            if ratio_of := efficiency_of(ours):
                found.append(row(f"{model}, 2 ranks, {backend}: scaling efficiency against two copies that do not synchronise", "0.98", ratio_of,
                                 lambda v: v >= 0.98, tables.efficiency))
    for name, b in results.parsed(tables.TrainStep):
        if name["strategy"] == names.WATCHED: found += watching(f"{name['model']}, {name['ranks']} ranks, {name['backend']}", b)
    return found


def watching(of, benchmark):
    """What steps with a Timeline take more, and what the Timeline itself took in them."""
    met = lambda v: v <= TIMELINE
    goal = f"at most {TIMELINE}"
    pairs = estimate(benchmark, "", lambda pair: pair[0] / pair[1])
    if not pairs and benchmark.counter("unwatched_ratio"):  # the other way round, and so are its quartiles
        between = benchmark.quartiles("unwatched_ratio")
        pairs = Estimate(1 / benchmark.counter("unwatched_ratio"), between and (1 / between[1], 1 / between[0]), QUARTILES)
    found = [row(f"{of}: a step with a Timeline over one without", goal, pairs, met, tables.efficiency)] if pairs else []
    metered = estimate(benchmark, "", lambda step: step[1] / (step[1] - step[0]), "watched")
    if metered: found.append(row(f"{of}: a step over the same less what the Timeline took in it", goal, metered, met, lambda v: f"{v:.5f}"))
    return found


def alone(results):
    """At one rank: compute alone, so that a slow one does not flatter the ratios."""
    found = []
    for model, of_ranks in tables.step_cases(results).items():
        one = of_ranks.get(1, {})
        step = one.get("threads", {}).get(names.DEFAULT)
        if model == "transformer" and step:
            found.append(row(f"{model}, 1 rank: a step", "at most 240 ms", Estimate(step.time, None), lambda v: v <= 0.24, seconds))
        ours, peer = one.get("threads", {}).get("independent"), one.get("gloo", {}).get("torch_independent")
        if ours and peer:
            found.append(row(f"{model}, 1 rank: PyTorch's eager step over ours, so that ours does not flatter the ratios", "1",
                             Estimate(peer.time / ours.time, None), lambda v: v >= 1))
    return found
