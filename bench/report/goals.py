# SPDX-License-Identifier: BSL-1.0
"""What the library is meant to reach on two cores, and whether it does: the rows of one table, always the same ones.

A goal that is measured in pairs is met or missed if the 95 % interval lies on one side of the goal, and within the noise if the goal lies inside;
every other goal if all rounds do. A goal that could not be measured has a row that says so."""
import pandas

from . import names
from .estimates import CONFIDENCE, ONE, by_rounds, efficiency_of, exposed_of, less, of_processes, of_rounds
from .plan import GIB, MIB, SIZES
from .text import efficiency, milliseconds, ranks_of, ratio, seconds, size

NOT_MEASURED, MET = "not measured", "met"
PART = "part of the row above, which decides"
BAD = "missed", NOT_MEASURED, "within the noise", f"missed in {ONE}"  # the worst first
EVERY_SIZE = [count for group in SIZES.values() for count in group]
EACH_OF_TWO = 1 - (1 - CONFIDENCE) / 2  # two intervals that both hold with CONFIDENCE


def goals(results):
    """A DataFrame of strings."""
    rows = [row for add in (all_reduces, reducers, steps, timelines, alone) for row in add(results)]
    return pandas.DataFrame(rows, columns=["what", "goal", "measured", ""])


def row(what, goal, found, least=None, most=None, form=ratio):
    """`found`: an Estimate, which must be at least `least` or at most `most`, or None, or {label: Estimate or None}: then the row names the one
    that is furthest from the goal, and all others that do not meet it."""
    met = (lambda value: value >= least) if most is None else (lambda value: value <= most)
    cases = found if isinstance(found, dict) else {"": found}
    measured = {label: case for label, case in cases.items() if case}
    if not measured: return [what, goal, "", NOT_MEASURED]
    verdicts = {label: case.verdict(met) if case else NOT_MEASURED for label, case in cases.items()}
    worst = (min if most is None else max)(measured, key=lambda label: measured[label].value)
    said = [measured[worst].text(form) + (f": {worst}" if worst else "")]
    for verdict in BAD:
        labels = [label for label in cases if label != worst and verdicts[label] == verdict]
        shown = [f"{label}, {measured[label].text(form)}" if label in measured else label for label in labels]
        if labels: said.append(f"{verdict}{'' if verdict == NOT_MEASURED else ' also'}: " + "; ".join(shown))
    return [what, goal, ". ".join(said), next(v for v in (*BAD, MET, *verdicts.values()) if v in verdicts.values())]


def all_reduces(results):
    def rounds(who, ranks, count, counter):
        found = results.get(f"{who}/all_reduce/f32/ranks:{ranks}/bytes:{count}")
        return found.rounds(counter) if found else []

    def from_mib(who, ranks, counter):
        counts = [count for count in (*EVERY_SIZE, GIB) if count >= MIB and (count < GIB or rounds(who, ranks, count, "time"))]
        return {size(count): of_rounds(rounds(who, ranks, count, counter)) for count in counts}

    yield row("all-reduce, 2 ranks, from 1 MiB: threads' bandwidth over the limit's", "0.9", from_mib("threads", 2, "limit_ratio"), 0.9)
    for count in (25 * MIB, 100 * MIB):
        yield row(f"all-reduce, 2 ranks, {size(count)}: Gloo's time over threads'", "10",
                  by_rounds(rounds("threads", 2, count, "limit_ratio"), rounds("gloo", 2, count, "limit_ratio")), 10)
    yield row("all-reduce, 2 ranks, 4 KiB: threads' time", "under 1 us", of_rounds(rounds("threads", 2, 4096, "time")), most=1e-6, form=seconds)
    cores = results.machine.get("cores", 0)
    if cores < 4:
        yield row(f"all-reduce, 4 ranks on {cores} cores, from 1 MiB: threads' bandwidth over a four-buffer loop's", "0.8",
                  from_mib("threads", 4, "limit_ratio"), 0.8)
    for ranks in (2, 4):
        yield row(f"all-reduce, {ranks} ranks, from 1 MiB: bandwidth of MPI in shared memory over threads'", "0.8",
                  from_mib("mpi", ranks, "threads_ratio"), 0.8)
    for count in (25 * MIB, 100 * MIB):
        yield row(f"all-reduce, 2 ranks, {size(count)}: MPI_Allreduce's time over that of MPI in shared memory", "5",
                  of_rounds(rounds("mpi", 2, count, "mpi_library_ratio")), 5)
    cases = [(ranks, count) for ranks in (2, 4, 6) for count in (*EVERY_SIZE, GIB)
             if rounds("mpi_messages", ranks, count, "time") or (count < GIB if ranks < 6 else count <= MIB)]
    yield row("all-reduce: MPI by messages over the faster of MPI_Allreduce and MPI_Iallreduce, at most", "1.05",
              {f"{ranks_of(ranks)}, {size(count)}": of_rounds([1 / v for v in rounds("mpi_messages", ranks, count, "mpi_library_best_ratio")])
               for ranks, count in cases}, most=1.05)
    yield row("all-reduce: Gloo's time over that of TCP by messages", "1",
              {f"{ranks_of(ranks)}, {size(count)}": of_rounds(rounds("tcp_messages", ranks, count, "gloo_ratio"))
               for ranks in (2, 4) for count in EVERY_SIZE}, 1)


def reducers(results):
    def times(name):
        found = results.get(f"reducer/{name}")
        return of_rounds(found.rounds("time")) if found else None

    yield row("`mark_ready`, at most", "under 25 ns",
              {f"{label}, {storage.replace('_', ' ')}, {ranks_of(ranks)}": times(f"mark_ready/{overlap}/{storage}/ranks:{ranks}/parameters:1000")
               for overlap, label in names.OVERLAPS.items() for storage in ("in_buckets", "borrowed") for ranks in (1, 2)},
              most=25e-9, form=lambda value: f"{value * 1e9:.1f} ns")
    yield row("construction of a Reducer over 100,000 parameters, at most", "under 100 ms",
              {ranks_of(ranks): times(f"construct/ranks:{ranks}/parameters:100000") for ranks in (1, 2)}, most=0.1, form=seconds)


def step(results, model, strategy, backend, ranks=2):
    return results.get(f"train_step/{model}/{strategy}/{backend}/ranks:{ranks}")


def steps(results):
    for model in names.MODELS:
        theirs = exposed_of(step(results, model, names.PEER_DEFAULT, "gloo"), EACH_OF_TWO)
        for backend, goal in (("threads", 0.1), ("mpi", 0.2)):
            what, default = f"{model}, 2 ranks, {backend}", step(results, model, names.DEFAULT, backend)
            ours = exposed_of(default, EACH_OF_TWO)
            said, verdict = "", NOT_MEASURED
            if ours and theirs:
                said = f"{ours.text(milliseconds)} of {theirs.text(milliseconds)} ms"
                if theirs.between and theirs.between[0] > 0: said += f": {ratio(ours.value / theirs.value)}"
                verdict = less(ours, goal, theirs).verdict(lambda value: value <= 0)
            yield [f"{what}: exposed time of a step, ours and PyTorch DDP's", f"at most {goal} of DDP's", said, verdict]
            yield row(f"{what}: scaling efficiency", "0.98", efficiency_of(default), 0.98, form=efficiency)
            yield row(f"{what}: scaling efficiency with a sharded optimizer (ZeRO 1)", "0.98",
                      efficiency_of(step(results, model, names.SHARDED, backend)), 0.98, form=efficiency)


def timelines(results):
    """How much longer steps with a Timeline take: this decides. And how long the Timeline itself took in them, which is a part of that: a goal
    that it misses by itself is missed; if it does not, nothing is said of what it delays or drives out of the caches."""
    for model in names.MODELS:
        watched, what = step(results, model, names.WATCHED, "threads"), f"{model}, 2 ranks, threads: a step with a Timeline"
        yield row(f"{what} over one without", "at most 1.01", of_processes(watched, lambda pair: pair[0] / pair[1]), most=1.01, form=efficiency)
        metered = of_processes(watched, lambda of_step: of_step[1] / (of_step[1] - of_step[0]), "watched")
        made = row(f"{what}, counting only the Timeline itself", "at most 1.01", metered, most=1.01, form=lambda value: f"{value:.5f}")
        yield [*made[:3], PART if made[3] == MET else made[3]]


def alone(results):
    """At one rank: compute alone, so that a slow one does not flatter the ratios."""
    def times(*which):
        found = step(results, *which, ranks=1)
        return found.rounds("time") if found else []

    yield row("transformer, 1 rank: a step", "at most 240 ms", of_rounds(times("transformer", names.DEFAULT, "threads")), most=0.24, form=seconds)
    for model in names.MODELS:
        yield row(f"{model}, 1 rank: PyTorch's eager step over ours", "1",
                  by_rounds(times(model, "torch_independent", "gloo"), times(model, "independent", "threads")), 1)
