"""Which programs are run, with which flags. What is compared is measured in turns within one program; the programs take turns too, round
by round, so that all of them see the machine's states."""
import pathlib
from dataclasses import dataclass, field

from . import machine, names

MIB = 2 ** 20
# Tasks of a size each, so that a program that hangs costs little.
SIZES = {"small": (2 ** 12, 2 ** 16, MIB), "large": (10 * MIB, 25 * MIB), "largest": (100 * MIB,)}
OURS = "threads|limit|mpi|mpi_borrowed|mpi_messages|mpi_library|mpi_library_nonblocking"
GLOO, MPICH = "gloo", "mpich_library|mpich_library_nonblocking"
QUICK_STRATEGIES = ("independent", "naive", "flat", "overlap_per_parameter", "buckets_25MB", "optimal", "zero1", "zero3")
QUICK_TORCH = ("independent", "naive", "flat", "ddp")
MEMORY_MODEL = ["--model", "mlp", "--hidden", ",".join(["1024"] * 8), "--micro-batch", "1", "--steps", "2"]


@dataclass
class Task:
    part: str
    label: str
    command: list  # without where to write its answer to
    kind: str  # of the answer: google, torch or memory
    seconds: float  # about how long it takes: for the first estimate of the time left
    once: bool = False  # in the first round alone: what it measures does not vary
    about: dict = field(default_factory=dict)  # put beside the answer


class Plan:
    def __init__(self, root, build, python, quick=False, peers=False, seconds=None):
        self.root, self.build, self.python, self.quick, self.peers, self.seconds = root, build, python, quick, peers, seconds
        self.tasks = []
        self.left_out = {}  # by part: why

    def add_parts(self, parts):
        for part in parts: PARTS[part][1](self)
        return self

    def built(self, part, name):
        path = self.build / name
        if not path.exists(): self.left_out[part] = f"{path.name} was not built; cmake said why"
        return path.exists()

    def google(self, part, label, name, pattern, estimate, *flags):
        if self.built(part, f"bench/{name}"):
            self.tasks.append(Task(part, label, [str(self.build / "bench" / name), *flags, f"--benchmark_filter={pattern}"], "google", estimate))

    def contest(self, full):
        """The length of a contest among collectives: `full` seconds; quick: so many batches of a third of a millisecond."""
        return f"--seconds={self.seconds:g}" if self.seconds else "--rounds=9" if self.quick else f"--seconds={full:g}"

    def turns(self):
        """How often each strategy takes a step."""
        return f"--seconds={self.seconds:g}" if self.seconds else f"--rounds={3 if self.quick else 4}"


def ranks_of(count):
    return f"{count} rank{'s' * (count != 1)}"


def all_reduce(plan):
    for ranks in (2, 4) if plan.quick else (2, 4, 6):
        for size, of_size in SIZES.items():
            if (ranks, size) in ((6, "large"), (6, "largest"), *([(4, "largest")] if plan.quick else [])): continue
            who = [OURS] + [GLOO] * plan.peers + [MPICH] * (plan.peers and not plan.quick and ranks == 2)
            pattern = f"^({'|'.join(who)})/all_reduce/f32/ranks:{ranks}/bytes:({'|'.join(map(str, of_size))})$"
            estimate = {"small": 4, "large": 6, "largest": 8}[size] * (1 if plan.quick else 2) * len(who) / 2
            plan.google("all_reduce", f"all-reduce, {ranks_of(ranks)}, {size}", "bench_all_reduce", pattern, estimate, plan.contest(0.2))


def collectives(plan):
    if plan.quick: return
    plan.google("collectives", "all-reduce of other types", "bench_all_reduce", "/all_reduce/(bf16|f16|f64)/", 12, plan.contest(0.05))
    plan.google("collectives", "other collectives", "bench_all_reduce", "/(reduce_scatter|all_gather|broadcast|reduce|gather|scatter|barrier)/f32/ranks:[24]/", 20,
                plan.contest(0.05))


def reducer(plan):
    pattern = "mark_ready/|step/.*/bytes:26214400$" if plan.quick else "."
    plan.google("reducer", "reducer", "bench_reducer", pattern, 4 if plan.quick else 20, plan.contest(0.1))


def convert(plan):
    plan.google("convert", "conversion", "bench_convert", "elements:131072$", 3)


def train_step(plan):
    every = QUICK_STRATEGIES if plan.quick else [name for name in names.STRATEGIES if not name.startswith("torch_")]
    default = (names.INDEPENDENT[0], names.DEFAULT)
    over_mpi = (plan.build / "bench/bench_mpi_train_step").exists()
    for model, step in (("transformer", 0.25), ("mlp", 0.06)):
        for ranks, strategies in ((2, every), (1, default), (4, default)):
            for backend in ("threads", "mpi") if plan.quick else ("threads", "mpi", "mpi_messages"):
                if backend != "threads" and not over_mpi: continue
                if plan.quick and (ranks, backend) not in ((2, "threads"), (2, "mpi"), (1, "threads")): continue
                pattern = f"^train_step/{model}/({'|'.join(strategies)})/{backend}/ranks:{ranks}$"
                estimate = 1 + step * max(1, ranks / 2) * len(strategies) * (7 if plan.quick else 8)
                plan.google("train_step", f"step of the {model}, {ranks_of(ranks)}, {backend}", "bench_train_step", pattern, estimate, plan.turns())


def torch(plan):
    if not plan.peers: return
    script = plan.root / "bench/peers/torch_train_step.py"
    if not machine.answer(plan.python, "-c", "import torch; print(1)"):
        plan.left_out["torch"] = f"{plan.python} has no torch; install python3-torch"
        return
    for model, step in (("transformer", 0.32), ("mlp", 0.1)):
        for ranks in (2, 1) if plan.quick else (2, 1, 4):
            if plan.quick and (model, ranks) == ("mlp", 1): continue
            modes = QUICK_TORCH if ranks == 2 and plan.quick else ("independent", "ddp") if ranks != 2 else ()
            flags = ["--modes", ",".join(modes)] if modes else []
            estimate = 5 + (len(modes) or 8) * step * max(1, ranks / 2) * (7 if plan.quick else 8)
            plan.tasks.append(Task("torch", f"PyTorch's step of the {model}, {ranks_of(ranks)}",
                                   [plan.python, str(script), "--model", model, "--ranks", str(ranks), *flags, plan.turns()], "torch", estimate))


def nccl(plan):
    plan.google("nccl", "collectives between GPUs", "bench_nccl", ".", 5, plan.contest(0.2))
    plan.left_out.pop("nccl", None)  # most machines have none


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
                                   "memory", 2, once=True, about={"shard": stage, "ranks": ranks}))


# In the order in which they are missed most, should the time not do for all.
PARTS = {"all_reduce": ("all-reduce against the limit, MPI and (--peers) Gloo and MPICH", all_reduce),
         "train_step": ("a training step under every strategy", train_step),
         "memory": ("memory by stage of sharding", memory),
         "reducer": ("what the Reducer costs beside the bytes", reducer),
         "convert": ("conversion between floating types", convert),
         "torch": ("the training step with PyTorch (--peers)", torch),
         "collectives": ("other collectives and types (not --quick)", collectives),
         "nccl": ("collectives between GPUs, where there are some", nccl)}
