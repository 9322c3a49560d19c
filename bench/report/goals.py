# SPDX-License-Identifier: BSL-1.0
"""What the library is meant to reach on two cores, and whether it does: the rows of one table, always the same ones.

A goal that is measured in pairs is met or missed if the 95 % interval lies on one side of the goal, and within the noise if the goal lies inside;
every other goal if all rounds do. A goal that could not be measured has a row that says so."""
import itertools
import statistics

import pandas

from . import names
from .estimates import ONE, by_rounds, efficiency_of, of_processes, of_rounds, waits
from .plan import SIZES
from .text import efficiency, milliseconds, ranks_of, ratio, seconds, size

NOT_MEASURED, MET = "not measured", "met"
BAD = "missed", NOT_MEASURED, "within the noise", f"missed in {ONE}"  # the worst first
EVERY_SIZE = [count for group in SIZES.values() for count in group]


def goals(results):
    rows = [row for add in (all_reduces, messages, reducers, steps, efficiencies, eager) for row in add(results)]
    return pandas.DataFrame(rows, columns=["what", "goal", "measured", ""])


def row(what, found, least=None, most=None, form=ratio):
    """`found`: {label: Estimate or None}; each must be at least `least` or at most `most`. The row shows the one that is furthest from the goal, and
    names two others of the same verdict."""
    met = (lambda value: value >= least) if most is None else (lambda value: value <= most)
    goal = f"at least {form(least)}" if most is None else f"at most {form(most)}"
    measured = {label: case for label, case in found.items() if case}
    if not measured: return [what, goal, "", NOT_MEASURED]
    verdicts = {label: case.verdict(met) if case else NOT_MEASURED for label, case in found.items()}
    worst = (min if most is None else max)(measured, key=lambda label: measured[label].value)
    verdict = next(v for v in (*BAD, *verdicts.values()) if v in verdicts.values())
    same = [label for label in found if label != worst and verdicts[label] == verdict]
    others = [f"{label} {form(measured[label].value)}" if label in measured else label for label in same]
    if len(others) > 2: others[2:] = [f"{len(others) - 2} more"]
    said = measured[worst].text(form) + (f": {worst}" if worst else "")
    if others and verdict != MET: said += f". {verdict.capitalize() if verdict == NOT_MEASURED else f'Also {verdict}'}: {'; '.join(others)}"
    return [what, goal, said, verdict]


def rounds(results, name, counter="time"):
    found = results.get(name)
    return found.rounds(counter) if found else []


def over(results, other, who, ranks, count):
    """The other's time over `who`'s: measured in turns, or by the limit beside each."""
    of = lambda one, counter: rounds(results, f"{one}/all_reduce/f32/ranks:{ranks}/bytes:{count}", counter)
    return of_rounds(of(who, f"{other}_ratio")) or by_rounds(of(who, "limit_ratio"), of(other, "limit_ratio"))


def all_reduces(results):
    for ranks, counts, who, other, least, what in (
            (2, EVERY_SIZE[1:], "threads", "limit", 0.95, "threads' bandwidth over the limit's"),
            (4, EVERY_SIZE[2:], "threads", "limit", 0.9, "threads' bandwidth over the limit's"),
            (2, EVERY_SIZE[:1], "threads", "limit", 0.8, "the limit's time over threads'"),
            (2, EVERY_SIZE[1:], "mpi", "threads", 0.95, "MPI's bandwidth in shared memory over threads'"),
            (4, EVERY_SIZE[2:], "mpi", "threads", 0.95, "MPI's bandwidth in shared memory over threads'"),
            (2, EVERY_SIZE[1:], "mpi_adopted", "mpi", 0.8, "bandwidth in adopted over allocated memory"),
            (2, EVERY_SIZE, "mpi_borrowed", "deepspeed_shm", 1, "DeepSpeed's time over MPI's in borrowed memory"),
            (2, EVERY_SIZE, "tcp_messages", "torch_gloo", 1, "time of PyTorch's Gloo over that of TCP")):
        yield row(f"all-reduce, {ranks_of(ranks)}, {size(counts[0])}{' and more' * (len(counts) > 1)}: {what}",
                  {size(count): over(results, other, who, ranks, count) for count in counts}, least)


def messages(results):
    for who in ("mpi_messages", "tcp_messages"):
        found = {}
        for ranks, count in itertools.product((2, 4), EVERY_SIZE):
            peers = {names.WHO[peer].label: over(results, who, peer, ranks, count) for peer in names.SEND_MESSAGES}
            best = max((peer for peer in peers if peers[peer]), key=lambda peer: peers[peer].value, default="")
            found[f"{ranks_of(ranks)}, {size(count)}" + f" ({best})" * bool(best)] = peers.get(best)
        yield row(f"all-reduce: time of {names.WHO[who].label.removeprefix('gradsync, ')}, over the best peer's", found, most=1.05)


def reducers(results):
    of = lambda name, counter="time": of_rounds(rounds(results, f"reducer/{name}", counter))
    marks = [f"{overlap}/{storage}/ranks:{ranks}" for overlap in ("NoOverlap", "OverlapBackward", "OverlapBackwardThread")
             for storage in ("in_buckets", "borrowed") for ranks in (1, 2)]
    yield row("`mark_ready`", {mark: of(f"mark_ready/{mark}/parameters:1000") for mark in marks}, most=15e-9, form=seconds)
    for what, parameters, counter, most, form in (
            ("construction of a Reducer over 100,000 parameters", 100000, "time", 15e-3, seconds),
            ("construction of a Reducer over 1,000,000 parameters", 1000000, "time", 0.6, seconds),
            ("bytes per parameter and rank of a Reducer over 1,000,000 parameters", 1000000, "bytes_per_parameter", 200, "{:.0f}".format)):
        yield row(what, {ranks_of(ranks): of(f"construct/ranks:{ranks}/parameters:{parameters}", counter) for ranks in (1, 2)}, most=most, form=form)
    yield row("step of 1,000,000 parameters of one element, 2 ranks",
              {"": of("step/SizeCappedBuckets/borrowed/ranks:2/parameters:1000000/bytes:4000000")}, most=80e-3, form=seconds)


def step(results, model, strategy, backend, ranks=2):
    return results.get(f"train_step/{model}/{strategy}/{backend}/ranks:{ranks}")


def steps(results):
    for model, (backend, strategy) in itertools.product(names.MODELS, (("threads", names.DEFAULT), ("mpi", names.DEFAULT), ("tcp", names.IN_TORCH))):
        ours, theirs = waits(step(results, model, strategy, backend)), waits(step(results, model, names.PEER_DEFAULT, "gloo"))
        mean = lambda waited: milliseconds(statistics.fmean(waited))
        measured = ours and theirs and f"{mean(ours)} of DDP's {mean(theirs)} ms"
        yield row(f"{model}, {'gradsync in PyTorch' if backend == 'tcp' else backend}: exposed time beyond 5 % of PyTorch DDP's, ms",
                  {measured or "": of_processes([own - other / 20 for own, other in zip(ours, theirs)])}, most=0, form=milliseconds)


def efficiencies(results):
    """The time of what a step is paired with over the step's."""
    for models, strategy, backends, least, what in (
            (names.MODELS, names.DEFAULT, ("threads", "mpi"), 0.98, "scaling efficiency"),
            (names.MODELS, "zero1", ("threads", "mpi"), 0.98, "scaling efficiency with a sharded optimizer (ZeRO 1)"),
            (["mlp"], "fused", ("threads", "mpi"), 1 / 1.05, "scaling efficiency with the optimizer inside"),
            (["mlp"], "fused_shared", ["threads"], 1 / 1.08, "scaling efficiency with the optimizer inside and one set of weights"),
            (names.MODELS, names.WATCHED, ["threads"], 0.99, "time of a step over that with a Timeline")):
        for model, backend in itertools.product(models, backends):
            found = efficiency_of(step(results, model, strategy, backend))
            yield row(f"{model}, {backend}: {what}", {"": found}, least, form=efficiency)


def eager(results):
    for model in names.MODELS:
        theirs, ours = (rounds(results, f"train_step/{model}/{which}/ranks:1") for which in ("torch_independent/gloo", "independent/threads"))
        yield row(f"{model}, 1 rank: PyTorch's eager step over ours", {"": by_rounds(theirs, ours)}, 1.2)
