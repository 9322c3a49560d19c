# SPDX-License-Identifier: BSL-1.0
"""What the library is meant to reach on two cores, and whether it does: the rows of one table, always the same ones. Each compares like with like:
sockets with sockets, shared memory with shared memory.

A goal that is measured in pairs is met or missed if the 95 % interval lies on one side of the goal, and within the noise if the goal lies inside;
every other goal if all rounds do, and all runs if there are several. A goal that could not be measured has a row that says so."""
import itertools

import pandas

from . import names
from .estimates import ONE, by_rounds, by_run, efficiency_of, exposed_of, of_processes, of_rounds, waits
from .plan import MIB, SIZES
from .text import efficiency, milliseconds, ranks_of, ratio, seconds, size

NOT_MEASURED, MET = "not measured", "met"
BAD = "missed", NOT_MEASURED, "within the noise", f"missed in {ONE}"  # the worst first
STATES = 4  # values, gradients, and AdamW's two states
EVERY_SIZE = [count for group in SIZES.values() for count in group]


def goals(results):
    rows = [row for add in (all_reduces, messages, reducers, steps, efficiencies) for row in add(results)]
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


@by_run
def of(results, name, counter="time"):
    return of_rounds(rounds(results, name, counter))


def reduced(who, ranks, count):
    return f"{who}/all_reduce/f32/ranks:{ranks}/bytes:{count}"


@by_run
def over(results, other, who, ranks, count):
    """The other's time over `who`'s: measured in turns, or by the limit beside each."""
    counted = lambda one, counter: rounds(results, reduced(one, ranks, count), counter)
    return of_rounds(counted(who, f"{other}_ratio")) or by_rounds(counted(who, "limit_ratio"), counted(other, "limit_ratio"))


def all_reduces(results):
    for ranks, counts, who, other, least, what in (
            (2, EVERY_SIZE[:1], "threads", "limit", 0.85, "the limit's time over threads'"),
            (2, EVERY_SIZE[1:], "threads", "limit", 0.95, "the limit's time over threads'"),
            (4, EVERY_SIZE[2:], "threads", "limit", 0.9, "the limit's time over threads'"),
            (2, EVERY_SIZE[1:], "mpi", "threads", 0.95, "threads' time over that of MPI in shared memory"),
            (4, EVERY_SIZE[2:], "mpi", "threads", 0.95, "threads' time over that of MPI in shared memory"),
            (2, EVERY_SIZE[1:], "mpi_adopted", "mpi", 0.8, "time in allocated memory over that in adopted memory, MPI"),
            (2, EVERY_SIZE, "mpi_borrowed", "deepspeed_shm", 1, "DeepSpeed's time over MPI's in borrowed memory")):
        yield row(f"all-reduce, {ranks_of(ranks)}, {size(counts[0])}{' and more' * (len(counts) > 1)}: {what}",
                  {size(count): over(results, other, who, ranks, count) for count in counts}, least)


def messages(results):
    """The best of the peers that use the same way."""
    for (who, peers), ranks in itertools.product(names.SEND_MESSAGES.items(), (2, 4)):
        found = {}
        for count in EVERY_SIZE:
            times = {names.WHO[peer].label: over(results, who, peer, ranks, count) for peer in peers}
            best = max((peer for peer in times if times[peer]), key=lambda peer: times[peer].value, default="")
            found[f"{size(count)}" + f" ({best})" * bool(best)] = times.get(best)
        yield row(f"all-reduce, {ranks_of(ranks)}: time of {names.WHO[who].label.removeprefix('gradsync, ')}, over the best peer's", found, most=1.05)


def reducers(results):
    marks = [f"{overlap}/{storage}" for overlap in ("NoOverlap", "OverlapBackward", "OverlapBackwardThread") for storage in ("in_buckets", "borrowed")]
    for ranks in (1, 2):
        yield row(f"`mark_ready`, {ranks_of(ranks)}",
                  {mark: of(results, f"reducer/mark_ready/{mark}/ranks:{ranks}/parameters:1000") for mark in marks}, most=15e-9, form=seconds)
    yield row("construction of a Reducer over 1,000,000 parameters",
              {ranks_of(ranks): of(results, f"reducer/construct/ranks:{ranks}/parameters:1000000") for ranks in (1, 2)}, most=0.6, form=seconds)
    yield row("step of 1,000,000 parameters of one element, 2 ranks",
              {"": of(results, "reducer/step/SizeCappedBuckets/borrowed/ranks:2/parameters:1000000/bytes:4000000")}, most=80e-3, form=seconds)


def step(results, model, strategy, backend, ranks=2):
    return results.get(f"train_step/{model}/{strategy}/{backend}/ranks:{ranks}")


@by_run
def beyond(results, model, strategy, backend, allowed):
    """What a strategy exposes beyond `allowed(run)` seconds, a value a process."""
    ours, least = waits(step(results, model, strategy, backend)), allowed(results)
    if not ours or not least: return None
    return of_processes([own - other for own, other in zip(ours, least if isinstance(least, list) else [least] * len(ours))])


def moved(results, model, ranks=2):
    """Seconds that the bandwidth limit takes for the model's gradients: what no overlap hides where all cores compute."""
    limit, state = of(results, reduced("limit", ranks, 25 * MIB)), of(results, f"train_step/{model}/{names.DEFAULT}/threads/ranks:{ranks}", "state_bytes")
    return limit and state and limit.value * state.value / STATES / (25 * MIB)


def steps(results):
    for model, backend in itertools.product(names.MODELS, ("threads", "mpi")):
        yield row(f"{model}, {backend}: exposed time beyond a bare all-reduce of its gradients at the limit, ms",
                  {"": beyond(results, model, names.DEFAULT, backend, lambda run: moved(run, model))}, most=0, form=milliseconds)
    for model, backend in itertools.product(names.MODELS, ("threads", "mpi")):
        plain = lambda run: [own + moved(run, model) / 2 for own in waits(step(run, model, names.DEFAULT, backend))] if moved(run, model) else None
        yield row(f"{model}, {backend}: exposed time of ZeRO 3 beyond that of a plain Reducer and half a bare all-reduce, ms",
                  {"": beyond(results, model, "zero3", backend, plain)}, most=0, form=milliseconds)
    for model in names.MODELS:
        peer = lambda run: [other / 20 for other in waits(step(run, model, names.PEER_DEFAULT, "gloo"))]
        both = [exposed_of(step(results, model, *which)) for which in ((names.IN_TORCH, "tcp"), (names.PEER_DEFAULT, "gloo"))]
        said = f"{milliseconds(both[0].value)} of DDP's {milliseconds(both[1].value)} ms" if all(both) else ""
        yield row(f"{model}, gradsync in PyTorch: exposed time beyond 5 % of PyTorch DDP's, ms",
                  {said: beyond(results, model, names.IN_TORCH, "tcp", peer)}, most=0, form=milliseconds)


def efficiencies(results):
    """The time of what a step is paired with over the step's."""
    for models, strategy, backends, least, what in (
            (names.MODELS, "zero1", ("threads", "mpi"), 0.98, "scaling efficiency with a sharded optimizer (ZeRO 1)"),
            (["mlp"], "fused", ("threads", "mpi"), 1 / 1.05, "scaling efficiency with the optimizer inside"),
            (["mlp"], "fused_shared", ["threads"], 1 / 1.08, "scaling efficiency with the optimizer inside and one set of weights"),
            (names.MODELS, names.WATCHED, ["threads"], 0.99, "time of a step over that with a Timeline")):
        for model, backend in itertools.product(models, backends):
            found = efficiency_of(step(results, model, strategy, backend))
            yield row(f"{model}, {backend}: {what}", {"": found}, least, form=efficiency)
