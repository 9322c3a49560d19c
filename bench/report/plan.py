# SPDX-License-Identifier: BSL-1.0
"""Which programs are run, with which flags. What is compared is measured in turns within one program; the programs take turns too, round by round,
so that all of them see the machine's states."""
from dataclasses import dataclass, field

from . import machine, names
from .text import ranks_of, size

MIB, GIB = 2 ** 20, 2 ** 30
# Tasks of a size each, so that a program that hangs costs little.
SIZES = {"small": (2 ** 12, 2 ** 16, MIB), "large": (10 * MIB, 25 * MIB), "largest": (100 * MIB,)}
ALL_REDUCES = [*((2, group) for group in SIZES), *((4, group) for group in SIZES), (6, "small")]
QUICK_ALL_REDUCES = ALL_REDUCES[:5]
RARELY = ((6, "small"), (4, "largest"))  # beside the point
OURS = "threads|limit|mpi|mpi_borrowed|mpi_messages|tcp_messages|mpi_library|mpi_library_nonblocking"
GLOO, MPICH = "gloo", "mpich_library|mpich_library_nonblocking"
OTHER_COLLECTIVES = "/(reduce_scatter|all_gather|broadcast|reduce|gather|scatter|barrier)/f32/ranks:[24]/"
MODELS = {"transformer": 0.2, "mlp": 0.055}  # about how long a step takes, in seconds
# In every round, how often each strategy takes a step between two of its reference. Few, if steps are long: rounds add to them.
PAIRS = {"transformer": (4, 3), "mlp": (7, 5)}  # and with --quick
# What a goal is about is measured in more pairs, by itself; a hundredth of a step is to be seen in the median. Whole contests: seconds a round.
MORE_PAIRS = {"transformer": (10, 3), "mlp": (6, 2)}
WATCHED_PAIRS = {"transformer": (10, 4), "mlp": (8, 3)}
QUICK_STRATEGIES = ("naive", "flat", "buckets_25MB", "optimal", "zero1", "zero3")
# Those of more than 25 MB hold all of the transformer's 13 MB; and where messages are sent, what differs there.
TOO_LARGE = ("buckets_100MB", "buckets_1000MB")
OF_MESSAGES = ("flat", "buckets_1MB", "buckets_25MB", "optimal", "forward", "zero3")
OF_TORCH = [name.removeprefix("torch_") for name in names.STRATEGIES if name.startswith("torch_")]
TORCH_SLOWER = 1.6  # than ours, about
BESIDES = 2  # rounds at most of what is beside the point, if everything is measured; a comparison needs as many
MANY = 10 ** 9
GIB_NEEDS = 10 * GIB  # bytes of memory: two ranks with three buffers each, the limit's, and what MPI takes
MEMORY_MODEL = ["--model", "mlp", "--hidden", ",".join(["1024"] * 8), "--micro-batch", "1", "--steps", "2"]


@dataclass
class Task:
    part: str
    label: str
    command: list  # without where to write its answer to
    kind: str  # of the answer: google, torch or memory
    rounds: int = MANY  # in so many at most: what it measures does not vary, or takes long
    series_only: bool = False  # of its answer only pairs and the like are taken
    about: dict = field(default_factory=dict)  # put beside the answer


class Plan:
    def __init__(self, root, build, python, quick=False, peers=False, chosen=False):
        self.root, self.build, self.python, self.quick, self.peers = root, build, python, quick, peers
        self.besides = MANY if chosen else BESIDES  # what a user has chosen (--only) is not beside the point
        self.tasks = []
        self.left_out = {}  # by part or label: why

    def add_parts(self, parts):
        for part in parts: PARTS[part][1](self)
        return self

    def built(self, part, name):
        path = self.build / name
        if not path.exists(): self.left_out[part] = f"{path.name} was not built; cmake said why"
        return path.exists()

    def google(self, part, label, name, pattern, *flags, rounds=MANY, series_only=False):
        command = [str(self.build / "bench" / name), *flags, f"--benchmark_filter={pattern}"]
        if self.built(part, f"bench/{name}"): self.tasks.append(Task(part, label, command, "google", rounds, series_only))

    def contest(self, full):
        """The length of a contest among collectives: `full` seconds; quick: so many batches of a third of a millisecond."""
        return "--rounds=9" if self.quick else f"--seconds={full:g}"

    def pairs(self, model, ranks, strategies, slower=1.0):
        """The length of a contest among steps, which must suffice for PAIRS; `slower`: how much slower than ours they are.

        A round: a step of each strategy, and after it one of the reference; one more where two steps of a strategy follow upon one another, as they
        do every time where there are no more than two strategies. Rounds are whole ones: half a round sees to it that a step which is a little
        slower does not cost one."""
        pairs, least = PAIRS[model][self.quick], 2 if self.quick else 4
        step = slower * MODELS[model] * max(1, ranks / machine.cores())
        return round(max(least, (pairs + 0.5) * (2 * strategies + (strategies <= 2)) * step), 1)


def all_reduce(plan):
    def add(ranks, label, counts, who, *flags, rounds=MANY):
        pattern = f"^({'|'.join(who)})/all_reduce/f32/ranks:{ranks}/bytes:({'|'.join(map(str, counts))})$"
        plan.google("all_reduce", f"all-reduce, {ranks_of(ranks)}, {label}", "bench_all_reduce", pattern, *flags, rounds=rounds)

    who = [OURS] + [GLOO] * plan.peers
    for ranks, group in QUICK_ALL_REDUCES if plan.quick else ALL_REDUCES:
        of_mpich = [MPICH] * (plan.peers and not plan.quick and ranks == 2)
        add(ranks, group, SIZES[group], who + of_mpich, plan.contest(0.2), rounds=plan.besides if (ranks, group) in RARELY else MANY)
    if not plan.quick:
        if (free := machine.free_memory()) >= GIB_NEEDS: add(2, "1 GiB", [GIB], who, "--gib", "--rounds=3", rounds=1)
        else: plan.left_out["all-reduce, 2 ranks, 1 GiB"] = f"it needs {size(GIB_NEEDS)} of memory, {size(free)} are free"


def collectives(plan):
    if plan.quick: return
    for label, pattern in (("all-reduce of other types", "/all_reduce/(bf16|f16|f64)/"), ("other collectives", OTHER_COLLECTIVES)):
        plan.google("collectives", label, "bench_all_reduce", pattern, plan.contest(0.05), rounds=plan.besides)


def reducer(plan):
    pattern = "mark_ready/|step/.*/bytes:26214400$" if plan.quick else "."
    plan.google("reducer", "reducer", "bench_reducer", pattern, plan.contest(0.1), rounds=plan.besides)


def convert(plan):
    plan.google("convert", "conversion", "bench_convert", "elements:131072$")


def train_step(plan):
    def add(model, ranks, backend, strategies, seconds=None, what="", beside=("independent",), series_only=False):
        seconds = seconds or plan.pairs(model, ranks, len(strategies))
        pattern = f"^train_step/{model}/({'|'.join([*strategies, *beside])})/{backend}/ranks:{ranks}$"
        plan.google("train_step", f"step of the {model}, {ranks_of(ranks)}, {backend}{what}", "bench_train_step", pattern, f"--seconds={seconds:g}",
                    rounds=MANY if ranks == 2 else plan.besides, series_only=series_only)

    over_mpi = (plan.build / "bench/bench_mpi_train_step").exists()
    every = [name for name in names.STRATEGIES if not name.startswith("torch_") and name != "independent"]
    for model in MODELS:
        ours = QUICK_STRATEGIES if plan.quick else [name for name in every if model != "transformer" or name not in TOO_LARGE]
        for backend, alone in (("threads", [1] if plan.quick else [1, 4]), ("mpi", [] if plan.quick else [1, 4]), ("mpi_messages", [4])):
            if (backend != "threads" and not over_mpi) or (backend == "mpi_messages" and plan.quick): continue
            add(model, 2, backend, OF_MESSAGES if backend == "mpi_messages" else ours)
            if backend != "mpi_messages":
                add(model, 2, backend, [names.DEFAULT, names.SHARDED], 1.5 * MORE_PAIRS[model][plan.quick], ", more pairs", series_only=True)
            for ranks in alone: add(model, ranks, backend, [names.DEFAULT])
        add(model, 2, "threads", [names.WATCHED], WATCHED_PAIRS[model][plan.quick], ", watched", beside=())


def torch(plan):
    def add(model, ranks, modes, seconds, what="", series_only=False):
        command = [plan.python, str(plan.root / "bench/peers/torch_train_step.py"), "--model", model, "--ranks", str(ranks),
                   "--modes", ",".join(modes), f"--seconds={seconds:g}"]
        plan.tasks.append(Task("torch", f"PyTorch's step of the {model}, {ranks_of(ranks)}{what}", command, "torch",
                               MANY if ranks == 2 else plan.besides, series_only))

    if not plan.peers: return
    if not machine.answer(plan.python, "-c", "import torch; print(1)"):
        plan.left_out["torch"] = f"{plan.python} has no torch; install python3-torch"
        return
    for model in MODELS:
        for ranks in (2, 1) if plan.quick else (2, 1, 4):
            modes = ("independent", "ddp") if ranks != 2 else ("independent", "flat", "ddp") if plan.quick else OF_TORCH
            add(model, ranks, modes, plan.pairs(model, ranks, len(modes) - 1, TORCH_SLOWER))
        add(model, 2, ("independent", "ddp"), TORCH_SLOWER * MORE_PAIRS[model][plan.quick], ", more pairs", series_only=True)


def device(part, label, seconds):
    def add(plan):
        plan.google(part, label, f"bench_{part}", ".", plan.contest(seconds))
        plan.left_out.pop(part, None)  # most machines have none
    return add


def memory(plan):
    if not plan.built("memory", "examples/gradsync_train"): return
    program = str(plan.build / "examples/gradsync_train")
    mpiexec = machine.cmake_cache(plan.build).get("MPIEXEC_EXECUTABLE") if (plan.build / "bench/bench_mpi_train_step").exists() else None
    for ranks in (2,) if plan.quick else (1, 2, 4):
        # Processes that share memory count one another's pages; as threads, only the library's own account says what a rank has.
        launch = [mpiexec, "-n", str(ranks), program, "--backend", "mpi", "--no-shared-memory"] if mpiexec else [program, "--ranks", str(ranks)]
        for stage, label in names.STAGES.items():
            command = [*launch, *MEMORY_MODEL, "--shard", stage, *([] if stage == "parameters" else ["--bucket-mib", "4"])]
            plan.tasks.append(Task("memory", f"memory, {label}, {ranks_of(ranks)}", command, "memory", 1, about={"shard": stage, "ranks": ranks}))


# In the order in which they are missed most, should the time not do for all.
PARTS = {"all_reduce": ("all-reduce against the limit, MPI and (--peers) Gloo and MPICH", all_reduce),
         "train_step": ("a training step under every strategy", train_step),
         "memory": ("memory by stage of sharding", memory),
         "reducer": ("what the Reducer costs beside the bytes", reducer),
         "convert": ("conversion between floating types", convert),
         "torch": ("the training step with PyTorch (--peers)", torch),
         "collectives": ("other collectives and types (not --quick)", collectives),
         "nccl": ("collectives between GPUs, where there are some", device("nccl", "collectives between GPUs", 0.2)),
         "overlap": ("what a backward on a GPU hides, where there is one", device("overlap", "a backward on a GPU", 2))}
