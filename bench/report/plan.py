# SPDX-License-Identifier: BSL-1.0
"""Which programs are run, with which flags. What is compared is measured in turns within one program; the programs take turns too, round
by round, so that all of them see the machine's states."""
import pathlib
from dataclasses import dataclass, field

from . import machine, names
from .text import size

MIB = 2 ** 20
# Tasks of a size each, so that a program that hangs costs little.
SIZES = {"small": (2 ** 12, 2 ** 16, MIB), "large": (10 * MIB, 25 * MIB), "largest": (100 * MIB,)}
OURS = "threads|limit|mpi|mpi_borrowed|mpi_messages|tcp_messages|mpi_library|mpi_library_nonblocking"
GLOO, MPICH = "gloo", "mpich_library|mpich_library_nonblocking"
MODELS = {"transformer": 0.2, "mlp": 0.055}  # about how long a step takes, in seconds
# In every round, how often each strategy takes a step between two of its reference. Few, if steps are long: rounds add to them.
PAIRS = {"transformer": 4, "mlp": 7}
QUICK_PAIRS = {"transformer": 3, "mlp": 5}
# What a goal is about is measured in more pairs, by itself; a hundredth of a step is to be seen in the median. Whole contests: seconds a round.
MORE_PAIRS, QUICK_MORE_PAIRS = {"transformer": 10, "mlp": 6}, {"transformer": 3, "mlp": 2}
WATCHED_PAIRS, QUICK_WATCHED_PAIRS = {"transformer": 10, "mlp": 8}, {"transformer": 4, "mlp": 3}
QUICK_STRATEGIES = ("naive", "flat", "buckets_25MB", "optimal", "zero1", "zero3")
# Those of more than 25 MB hold all of the transformer's 13 MB; and where messages are sent, what differs there.
STRATEGIES = {"transformer": [s for s in names.STRATEGIES if s not in ("buckets_100MB", "buckets_1000MB")], "mlp": list(names.STRATEGIES)}
OF_MESSAGES = ("flat", "buckets_1MB", "buckets_25MB", "optimal", "forward", "zero3")
QUICK_TORCH = ("independent", "flat", "ddp")
BESIDES = 2  # rounds at most of what is beside the point, if everything is measured; a comparison needs as many
MANY = 10 ** 9
GIB_NEEDS = 10 * 2 ** 30  # bytes of memory: two ranks with three buffers each, the limit's, and what MPI takes
MEMORY_MODEL = ["--model", "mlp", "--hidden", ",".join(["1024"] * 8), "--micro-batch", "1", "--steps", "2"]


@dataclass
class Task:
    part: str
    label: str
    command: list  # without where to write its answer to
    kind: str  # of the answer: google, torch or memory
    seconds: float  # about how long it takes: for the first estimate of the time left
    rounds: int = MANY  # in so many at most: what it measures does not vary, or takes long
    about: dict = field(default_factory=dict)  # put beside the answer
    series_only: bool = False  # of its answer only pairs and the like are taken


class Plan:
    def __init__(self, root, build, python, quick=False, peers=False, seconds=None, chosen=False):
        self.root, self.build, self.python, self.quick, self.peers, self.seconds = root, build, python, quick, peers, seconds
        self.besides = MANY if chosen else BESIDES  # what a user has chosen (--only) is not beside the point
        self.tasks = []
        self.left_out = {}  # by part: why
        self.beyond = {}  # the same, of what this machine cannot do, which is no failure

    def add_parts(self, parts):
        for part in parts: PARTS[part][1](self)
        return self

    def built(self, part, name):
        path = self.build / name
        if not path.exists(): self.left_out[part] = f"{path.name} was not built; cmake said why"
        return path.exists()

    def google(self, part, label, name, pattern, estimate, *flags, rounds=MANY, series_only=False):
        if self.built(part, f"bench/{name}"):
            self.tasks.append(Task(part, label, [str(self.build / "bench" / name), *flags, f"--benchmark_filter={pattern}"], "google", estimate, rounds,
                                   series_only=series_only))

    def contest(self, full):
        """The length of a contest among collectives: `full` seconds; quick: so many batches of a third of a millisecond."""
        return f"--seconds={self.seconds:g}" if self.seconds else "--rounds=9" if self.quick else f"--seconds={full:g}"

    def pairs(self, model, ranks, strategies, step=1.0):
        """The length of a contest among steps, which must suffice for PAIRS; `step`: how much slower than ours they are."""
        pairs = (QUICK_PAIRS if self.quick else PAIRS)[model]
        least = 2 if self.quick else 4  # where there are few strategies there is time for more pairs
        # A round: a step of each strategy, and after it one of the reference; one more where two steps of a strategy follow upon one another, as
        # they do every time where there are no more than two strategies. Rounds are whole ones: half a round sees to it that a step which
        # is a little slower does not cost one.
        once = (2 * strategies + (strategies <= 2)) * step * MODELS[model] * max(1, ranks / machine.cores())
        return self.seconds or round(max(least, (pairs + 0.5) * once), 1)


def ranks_of(count):
    return f"{count} rank{'s' * (count != 1)}"


def all_reduce(plan):
    for ranks in (2, 4) if plan.quick else (2, 4, 6):
        for group, of_group in SIZES.items():
            if (ranks, group) in ((6, "large"), (6, "largest"), *([(4, "largest")] if plan.quick else [])): continue
            rounds = plan.besides if (ranks, group) in ((6, "small"), (4, "largest")) else MANY
            who = [OURS] + [GLOO] * plan.peers + [MPICH] * (plan.peers and not plan.quick and ranks == 2)
            pattern = f"^({'|'.join(who)})/all_reduce/f32/ranks:{ranks}/bytes:({'|'.join(map(str, of_group))})$"
            estimate = {"small": 4, "large": 6, "largest": 8}[group] * (1 if plan.quick else 2) * len(who) / 2
            plan.google("all_reduce", f"all-reduce, {ranks_of(ranks)}, {group}", "bench_all_reduce", pattern, estimate, plan.contest(0.2), rounds=rounds)
    if not plan.quick: gib(plan)


def gib(plan):
    label, free = "all-reduce, 2 ranks, 1 GiB", machine.available_memory()
    if free < GIB_NEEDS: plan.beyond[label] = f"it needs {size(GIB_NEEDS)} of memory, {size(free)} are free"
    else:
        pattern = f"^({'|'.join([OURS] + [GLOO] * plan.peers)})/all_reduce/f32/ranks:2/bytes:{2 ** 30}$"
        plan.google("all_reduce", label, "bench_all_reduce", pattern, 50, "--gib", "--rounds=3", rounds=1)


def collectives(plan):
    if plan.quick: return
    plan.google("collectives", "all-reduce of other types", "bench_all_reduce", "/all_reduce/(bf16|f16|f64)/", 12, plan.contest(0.05),
                rounds=plan.besides)
    plan.google("collectives", "other collectives", "bench_all_reduce", "/(reduce_scatter|all_gather|broadcast|reduce|gather|scatter|barrier)/f32/ranks:[24]/", 20,
                plan.contest(0.05), rounds=plan.besides)


def reducer(plan):
    pattern = "mark_ready/|step/.*/bytes:26214400$" if plan.quick else "."
    plan.google("reducer", "reducer", "bench_reducer", pattern, 4 if plan.quick else 20, plan.contest(0.1), rounds=plan.besides)


def convert(plan):
    plan.google("convert", "conversion", "bench_convert", "elements:131072$", 3)


def train_step(plan):
    over_mpi = (plan.build / "bench/bench_mpi_train_step").exists()
    ours = {model: [s for s in STRATEGIES[model] if not s.startswith("torch_") and s != "independent"] for model in MODELS}

    def add(model, ranks, backend, strategies, seconds=None, what="", reference="independent", series_only=False):
        seconds = plan.seconds or seconds or plan.pairs(model, ranks, len(strategies))
        called = [*strategies, *([reference] if reference == "independent" else [])]
        estimate = 2 + seconds + 4.5 * MODELS[model] * (len(strategies) + 1) * max(1, ranks / machine.cores())  # each begins with some steps
        plan.google("train_step", f"step of the {model}, {ranks_of(ranks)}, {backend}{what}", "bench_train_step",
                    f"^train_step/{model}/({'|'.join(called)})/{backend}/ranks:{ranks}$", estimate, f"--seconds={seconds:g}",
                    rounds=MANY if ranks == 2 else plan.besides, series_only=series_only)

    more, watched = (QUICK_MORE_PAIRS, QUICK_WATCHED_PAIRS) if plan.quick else (MORE_PAIRS, WATCHED_PAIRS)
    for model in MODELS:
        for backend in ("threads", "mpi", "mpi_messages")[:(2 if plan.quick else 3) if over_mpi else 1]:
            of_two = QUICK_STRATEGIES if plan.quick else OF_MESSAGES if backend == "mpi_messages" else ours[model]
            add(model, 2, backend, of_two)
            if backend != "mpi_messages": add(model, 2, backend, [names.DEFAULT, names.SHARDED], 1.5 * more[model], ", more pairs", series_only=True)
            for ranks in {"threads": (1,) if plan.quick else (1, 4), "mpi": () if plan.quick else (1, 4), "mpi_messages": (4,)}[backend]:
                add(model, ranks, backend, [names.DEFAULT])
        add(model, 2, "threads", [names.WATCHED], watched[model], ", watched", reference=names.DEFAULT)


def torch(plan):
    if not plan.peers: return
    script = plan.root / "bench/peers/torch_train_step.py"
    if not machine.answer(plan.python, "-c", "import torch; print(1)"):
        plan.left_out["torch"] = f"{plan.python} has no torch; install python3-torch"
        return
    for model, step in MODELS.items():
        for ranks in (2, 1) if plan.quick else (2, 1, 4):
            if plan.quick and (model, ranks) == ("mlp", 1): continue
            every = [name.removeprefix("torch_") for name in names.STRATEGIES if name.startswith("torch_")]
            modes = ("independent", "ddp") if ranks != 2 else QUICK_TORCH if plan.quick else every
            slower = 1.6  # than ours, about

            def add(modes, seconds, what="", series_only=False):
                estimate = 5 + seconds + 4.5 * slower * step * len(modes) * max(1, ranks / machine.cores())
                plan.tasks.append(Task("torch", f"PyTorch's step of the {model}, {ranks_of(ranks)}{what}",
                                       [plan.python, str(script), "--model", model, "--ranks", str(ranks), "--modes", ",".join(modes), f"--seconds={seconds:g}"],
                                       "torch", estimate, rounds=MANY if ranks == 2 else plan.besides, series_only=series_only))

            add(modes, plan.pairs(model, ranks, len(modes) - 1, slower))
            more = plan.seconds or slower * (QUICK_MORE_PAIRS if plan.quick else MORE_PAIRS)[model]
            if ranks == 2: add(("independent", "ddp"), more, ", more pairs", series_only=True)


def nccl(plan):
    plan.google("nccl", "collectives between GPUs", "bench_nccl", ".", 1, plan.contest(0.2))
    plan.left_out.pop("nccl", None)  # most machines have none


def overlap(plan):
    plan.google("overlap", "a backward on a GPU", "bench_overlap", ".", 1, plan.contest(2))
    plan.left_out.pop("overlap", None)


def memory(plan):
    if not plan.built("memory", "examples/gradsync_train"): return
    program = str(plan.build / "examples/gradsync_train")
    mpiexec = machine.cmake_cache(plan.build).get("MPIEXEC_EXECUTABLE", "") if (plan.build / "bench/bench_mpi_train_step").exists() else ""
    for ranks in (2,) if plan.quick else (1, 2, 4):
        # Processes that share memory count one another's pages; as threads, only the library's own account says what a rank has.
        launch = [mpiexec, "-n", str(ranks), program, "--backend", "mpi", "--no-shared-memory"] if mpiexec else [program, "--ranks", str(ranks)]
        for stage in names.STAGES:
            buckets = [] if stage == "parameters" else ["--bucket-mib", "4"]
            plan.tasks.append(Task("memory", f"memory, {names.STAGES[stage]}, {ranks_of(ranks)}", [*launch, *MEMORY_MODEL, "--shard", stage, *buckets],
                                   "memory", 2, rounds=1, about={"shard": stage, "ranks": ranks}))


# In the order in which they are missed most, should the time not do for all.
PARTS = {"all_reduce": ("all-reduce against the limit, MPI and (--peers) Gloo and MPICH", all_reduce),
         "train_step": ("a training step under every strategy", train_step),
         "memory": ("memory by stage of sharding", memory),
         "reducer": ("what the Reducer costs beside the bytes", reducer),
         "convert": ("conversion between floating types", convert),
         "torch": ("the training step with PyTorch (--peers)", torch),
         "collectives": ("other collectives and types (not --quick)", collectives),
         "nccl": ("collectives between GPUs, where there are some", nccl),
         "overlap": ("what a backward on a GPU hides, where there is one", overlap)}
