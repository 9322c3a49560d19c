# SPDX-License-Identifier: BSL-1.0
"""What the library is meant to reach on two cores, and whether it does: the rows of one table, always the same ones.

What is measured in pairs is met or missed if the 95 % interval lies on one side of the goal, and within the noise if the goal lies inside; all
else if all rounds do. What could not be measured has a row that says so."""
from . import names
from .estimates import ONE, QUARTILES, Estimate, by_rounds, efficiency_of, exposed_of, less, of_processes, of_rounds
from .intervals import CONFIDENCE
from .plan import MIB, SIZES
from .results import MarkReady, Reducing, TrainStep
from .tables import all_reduce_cases, efficiency, step_cases
from .text import milliseconds, ratio, seconds, size

TIMELINE = 1.01
NOT_MEASURED, MET = "not measured", "met"
PART = "part of the row above, which decides"
BAD = "missed", NOT_MEASURED, "within the noise", f"missed in {ONE}"  # the worst first
EVERY_SIZE = [count for group in SIZES.values() for count in group]
FROM_MIB = [count for count in EVERY_SIZE if count >= MIB]
STORAGES = ("in_buckets", "borrowed")


def ranks_of(count):
    return f"{count} rank{'s' * (count != 1)}"


class Rows:
    def __init__(self, results):
        self.results, self.rows = results, []

    def why(self, needs):
        """The first error of those who were needed: benchmarks, tasks (their labels begin so), parts."""
        for name, text in sorted(self.results.errors.items()):
            if any(name == need or name.startswith(need + ",") for need in needs): return f"{name}: {text}"
        of_peers = any(need.startswith(("gloo/", "PyTorch")) for need in needs)
        return "needs --peers" if of_peers and not self.results.run.get("peers") else ""

    def add(self, what, goal, found, met, form=ratio, needs=()):
        self.rows.append([what, goal, found.text(form), found.verdict(met)] if found else [what, goal, self.why(needs), NOT_MEASURED])

    def add_worst(self, what, goal, cases, met, worse, form=ratio, needs=()):
        """One row for `cases`, {label: Estimate or None}: the one that is furthest from the goal, and all others that do not meet it. `worse`: max
        or min."""
        found = {label: case for label, case in cases.items() if case}
        if not found: return self.add(what, goal, None, met, needs=needs)
        verdicts = {label: case.verdict(met) if label in found else NOT_MEASURED for label, case in cases.items()}
        worst = worse(found, key=lambda label: found[label].value)
        said = [f"{found[worst].text(form)}: {worst}"]
        for verdict in BAD:
            labels = [label for label in cases if label != worst and verdicts[label] == verdict]
            shown = [label + (f", {found[label].text(form)}" if label in found else "") for label in labels]
            if labels: said.append(f"{verdict}{'' if verdict == NOT_MEASURED else ' also'}: " + "; ".join(shown))
        if NOT_MEASURED in verdicts.values() and (reason := self.why(needs)): said.append(reason)
        self.rows.append([what, goal, ". ".join(said), next(v for v in (*BAD, MET, f"met in {ONE}") if v in verdicts.values())])


def rows(results):
    made = Rows(results)
    for add in (all_reduces, reducers, steps, watching, alone): add(made)
    return made.rows


def all_reduces(made):
    every = all_reduce_cases(made.results)
    at = lambda ranks, who, count: every.get(ranks, {}).get(who, {}).get(count)
    needs = lambda ranks, *whos: [*(f"{who}/all_reduce/f32/ranks:{ranks}/bytes:{count}" for who in whos for count in EVERY_SIZE),
                                  f"all-reduce, {ranks_of(ranks)}", "all_reduce"]

    def ratio_of(ranks, who, counter, other, count):
        """The other's time over this one's, measured in turns with it; of older results, of different turns."""
        own, beside = at(ranks, who, count), at(ranks, other, count)
        if not own: return None
        return of_rounds(own.rounds(counter)) or (by_rounds(beside.rounds("time"), own.rounds("time")) if beside else None)

    def from_mib(ranks, who, counter, other):
        more = [count for count in every.get(ranks, {}).get(who, {}) if count >= MIB]
        return {size(count): ratio_of(ranks, who, counter, other, count) for count in sorted({*FROM_MIB, *more})}

    made.add_worst("all-reduce, 2 ranks, from 1 MiB: threads' bandwidth over the limit's", "0.9", from_mib(2, "threads", "limit_ratio", "limit"),
                   lambda v: v >= 0.9, min, needs=needs(2, "threads", "limit"))
    for count in (25 * MIB, 100 * MIB):
        threads, gloo = at(2, "threads", count), at(2, "gloo", count)
        rounds = lambda counter: (by_rounds(threads.rounds(counter), gloo.rounds(counter)) if threads and gloo else None)
        times = by_rounds(gloo.rounds("time"), threads.rounds("time")) if threads and gloo else None
        made.add(f"all-reduce, 2 ranks, {size(count)}: Gloo's time over threads'", "10", rounds("limit_ratio") or times,
                 lambda v: v >= 10, needs=needs(2, "gloo", "threads"))
    small = at(2, "threads", 4096)
    made.add("all-reduce, 2 ranks, 4 KiB: threads' time", "under 1 us", small and of_rounds(small.rounds("time")), lambda v: v < 1e-6, seconds,
             needs(2, "threads"))
    cores = made.results.machine.get("cores") or 0
    if cores < 4:
        made.add_worst(f"all-reduce, 4 ranks on {cores} cores, from 1 MiB: threads' bandwidth over a four-buffer loop's", "0.8",
                       from_mib(4, "threads", "limit_ratio", "limit"), lambda v: v >= 0.8, min, needs=needs(4, "threads", "limit"))
    for ranks in (2, 4):
        made.add_worst(f"all-reduce, {ranks} ranks, from 1 MiB: bandwidth of MPI in shared memory over threads'", "0.8",
                       from_mib(ranks, "mpi", "threads_ratio", "threads"), lambda v: v >= 0.8, min, needs=needs(ranks, "mpi", "threads"))
    for count in (25 * MIB, 100 * MIB):
        made.add(f"all-reduce, 2 ranks, {size(count)}: MPI_Allreduce's time over that of MPI in shared memory", "5",
                 ratio_of(2, "mpi", "mpi_library_ratio", "mpi_library", count), lambda v: v >= 5, needs=needs(2, "mpi", "mpi_library"))
    messages = {}
    wanted = {(ranks, count) for ranks in (2, 4, 6) for count in EVERY_SIZE if ranks < 6 or count <= MIB}
    present = {(ranks, count) for ranks, whos in every.items() for count in whos.get("mpi_messages", {})}
    for ranks, count in sorted(wanted | present):
        own, others = at(ranks, "mpi_messages", count), [at(ranks, who, count) for who in ("mpi_library", "mpi_library_nonblocking")]
        found = None
        if own and own.rounds("mpi_library_best_ratio"): found = of_rounds([1 / v for v in own.rounds("mpi_library_best_ratio")])
        elif own and all(others): found = by_rounds(own.rounds("time"), min(others, key=lambda other: other.time).rounds("time"))
        messages[f"{ranks_of(ranks)}, {size(count)}"] = found
    made.add_worst("all-reduce: MPI by messages over the faster of MPI_Allreduce and MPI_Iallreduce, at most", "1.05", messages,
                   lambda v: v <= 1.05, max, needs=[need for ranks in (2, 4, 6) for need in needs(ranks, "mpi_messages", "mpi_library")])
    sockets = {f"{ranks_of(ranks)}, {size(count)}": ratio_of(ranks, "tcp_messages", "gloo_ratio", "gloo", count)
               for ranks in (2, 4) for count in EVERY_SIZE}
    made.add_worst("all-reduce: Gloo's time over that of TCP by messages", "1", sockets, lambda v: v >= 1, min,
                   needs=[need for ranks in (2, 4) for need in needs(ranks, "gloo", "tcp_messages")])


def reducers(made):
    marks = {(overlap, storage, ranks): None for overlap in names.OVERLAPS for storage in STORAGES for ranks in (1, 2)}
    for name, b in made.results.parsed(MarkReady): marks[name["overlap"], name["storage"], name["ranks"]] = of_rounds(b.rounds("time"))
    labelled = {f"{names.OVERLAPS[overlap]}, {storage.replace('_', ' ')}, {ranks_of(ranks)}": found for (overlap, storage, ranks), found in marks.items()}
    constructed = dict.fromkeys((1, 2))
    for name, b in made.results.parsed(Reducing):
        if name["parameters"] == 100000: constructed[name["ranks"]] = of_rounds(b.rounds("time"))
    needs = ("reducer", *(name for name in made.results.errors if name.startswith("reducer/")))
    made.add_worst("`mark_ready`, at most", "under 25 ns", labelled, lambda v: v < 25e-9, max, lambda value: f"{value * 1e9:.1f} ns", needs)
    made.add_worst("construction of a Reducer over 100,000 parameters, at most", "under 100 ms", {ranks_of(r): found for r, found in constructed.items()},
                   lambda v: v < 0.1, max, seconds, needs)


def needs_of_step(model, ranks, backend, *strategies):
    label = f"PyTorch's step of the {model}, {ranks_of(ranks)}" if backend == "gloo" else f"step of the {model}, {ranks_of(ranks)}, {backend}"
    return [*(f"train_step/{model}/{strategy}/{backend}/ranks:{ranks}" for strategy in strategies), label, "torch" if backend == "gloo" else "train_step"]


def steps(made):
    each = 1 - (1 - CONFIDENCE) / 2  # of two intervals: both hold with CONFIDENCE
    every = step_cases(made.results)
    for model in names.MODELS:
        backends = every.get(model, {}).get(2, {})
        peer = backends.get("gloo", {}).get(names.PEER_DEFAULT)
        theirs = peer and exposed_of(peer, each)
        for backend, goal in (("threads", 0.1), ("mpi", 0.2)):
            ours = backends.get(backend, {}).get(names.DEFAULT)
            own = ours and exposed_of(ours, each)
            needs = needs_of_step(model, 2, backend, names.DEFAULT, "independent")
            what = [f"{model}, 2 ranks, {backend}: exposed time of a step, ours and PyTorch DDP's", f"at most {goal} of DDP's"]
            if own and theirs:
                verdict = less(own, goal, theirs).verdict(lambda v: v <= 0)
                over = f": {ratio(own.value / theirs.value)}" if theirs.between and theirs.between[0] > 0 else ""
                made.rows.append([*what, f"{own.text(milliseconds)} of {theirs.text(milliseconds)} ms{over}", verdict])
            else: made.add(*what, None, None, needs=[*needs, *needs_of_step(model, 2, "gloo", "torch_ddp", "torch_independent")])
            made.add(f"{model}, 2 ranks, {backend}: scaling efficiency", "0.98", ours and efficiency_of(ours),
                     lambda v: v >= 0.98, efficiency, needs)
            sharded = backends.get(backend, {}).get(names.SHARDED)
            made.add(f"{model}, 2 ranks, {backend}: scaling efficiency with a sharded optimizer (ZeRO 1)", "0.98", sharded and efficiency_of(sharded),
                     lambda v: v >= 0.98, efficiency, needs_of_step(model, 2, backend, names.SHARDED, "independent"))


def watching(made):
    """What steps with a Timeline take more: it decides. And what the Timeline itself took in them, which is a part of that: where it is too much by
    itself, the goal is missed; where it is not, nothing is said of what it delays or drives out of the caches."""
    met, goal = lambda v: v <= TIMELINE, f"at most {TIMELINE}"
    watched = {name["model"]: b for name, b in made.results.parsed(TrainStep)
               if (name["strategy"], name["backend"], name["ranks"]) == (names.WATCHED, "threads", 2)}
    for model in names.MODELS:
        b = watched.get(model)
        pairs = b and of_processes(b, "", lambda pair: pair[0] / pair[1])
        if b and not pairs and b.counter("unwatched_ratio"):  # the other way round, and so are its quartiles
            between = b.quartiles("unwatched_ratio")
            pairs = Estimate(1 / b.counter("unwatched_ratio"), between and (1 / between[1], 1 / between[0]), QUARTILES)
        needs = needs_of_step(model, 2, "threads", names.WATCHED)
        made.add(f"{model}, 2 ranks, threads: a step with a Timeline over one without", goal, pairs, met, efficiency, needs)
        metered = b and of_processes(b, "", lambda step: step[1] / (step[1] - step[0]), "watched")
        made.add(f"{model}, 2 ranks, threads: a step with a Timeline, counting only the Timeline itself", goal, metered, met, lambda v: f"{v:.5f}", needs)
        if metered and made.rows[-1][3] == MET: made.rows[-1][3] = PART


def alone(made):
    """At one rank: compute alone, so that a slow one does not flatter the ratios."""
    every = step_cases(made.results)
    at = lambda model, backend, strategy: every.get(model, {}).get(1, {}).get(backend, {}).get(strategy)
    step = at("transformer", "threads", names.DEFAULT)
    made.add("transformer, 1 rank: a step", "at most 240 ms", step and of_rounds(step.rounds("time")), lambda v: v <= 0.24, seconds,
             needs_of_step("transformer", 1, "threads", names.DEFAULT))
    for model in names.MODELS:
        ours, peer = at(model, "threads", "independent"), at(model, "gloo", "torch_independent")
        made.add(f"{model}, 1 rank: PyTorch's eager step over ours", "1",
                 by_rounds(peer.rounds("time"), ours.rounds("time")) if ours and peer else None, lambda v: v >= 1,
                 needs=[*needs_of_step(model, 1, "threads", "independent"), *needs_of_step(model, 1, "gloo", "torch_independent")])
