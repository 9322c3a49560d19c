# SPDX-License-Identifier: BSL-1.0
"""Which programs are run, with which flags. What is compared is measured in turns within one program; the programs take turns too, round by round,
so that all of them see the machine's states."""
import itertools
from dataclasses import dataclass, field

from . import machine, names
from .text import ranks_of

MIB = 2 ** 20
SIZES = {"small": (2 ** 12, 2 ** 16, MIB), "large": (10 * MIB, 25 * MIB), "largest": (100 * MIB,)}
OURS = ("limit", "threads", "mpi", "mpi_adopted", "mpi_borrowed", "mpi_messages", "tcp_messages", "mpi_library", "mpi_library_nonblocking")
OTHERS = "/all_reduce/(bf16|f16|f64)/|/(reduce_scatter|all_gather|broadcast|reduce|gather|scatter|barrier)/f32/ranks:[24]/"
STEP_SECONDS = {"transformer": 0.2, "mlp": 0.055}  # about
TORCH_SLOWER = 1.6  # than ours, about
# In every round, how often each strategy takes a step between two of its reference; and with --quick. A hundredth of a step is to be seen in the
# median of what a goal is about, so that has more of them, in contests of its own. Rounds add to them.
PAIRS = {"transformer": (4, 3), "mlp": (7, 5)}
MORE_PAIRS = {"transformer": (10, 4), "mlp": (30, 10)}
STRATEGIES = [name for name in names.STRATEGIES if not name.startswith("torch_") and name != "independent"]
OF_GOALS = (names.DEFAULT, "zero1", "fused", "fused_shared")
OF_MESSAGES = ("flat", "buckets_1MB", names.DEFAULT, "optimal", "forward", "zero3")
OF_TORCH = [name.removeprefix("torch_") for name in names.STRATEGIES if name.startswith("torch_")]
OF_TORCH_GOALS = ("independent", "ddp", "gradsync")
BESIDES = 2  # rounds at most of what is beside the point, if everything is measured; a comparison needs as many
MANY = 10 ** 9
MEMORY_MODEL = ["--model", "mlp", "--hidden", ",".join(["1024"] * 8), "--micro-batch", "1", "--steps", "2"]


@dataclass
class Task:
    part: str
    label: str
    command: list  # without where to write its answer to
    kind: str  # of the answer: google, torch or memory
    rounds: int = MANY  # in so many at most: what it measures does not vary, or takes long
    about: dict = field(default_factory=dict)  # put beside the answer


class Plan:
    """`peers`: what bench/peers/install found, see machine.installed_peers(); None if nobody asked for peers."""

    def __init__(self, root, build, parts=(), quick=False, peers=None, chosen=False):
        self.root, self.build, self.quick, self.peers = root, build, quick, peers
        self.besides = MANY if chosen else BESIDES  # what a user has chosen (--only) is not beside the point
        self.tasks = []
        self.left_out = {}  # by part or label: why
        for part in parts: PARTS[part][1](self)

    def built(self, part, name):
        path = self.build / name
        if not path.exists(): self.left_out[part] = f"{path.name} was not built; cmake said why"
        return path.exists()

    def google(self, part, label, name, pattern, *flags, rounds=MANY):
        command = [str(self.build / "bench" / name), *flags, f"--benchmark_filter={pattern}"]
        if self.built(part, f"bench/{name}"): self.tasks.append(Task(part, label, command, "google", rounds))

    def contest(self, full):
        """The length of a contest among collectives: `full` seconds; quick: so many batches of a third of a millisecond."""
        return "--rounds=9" if self.quick else f"--seconds={full:g}"

    def seconds_for(self, pairs, model, ranks, strategies, slower=1.0):
        """The length of a contest among steps that suffices for `pairs` of each strategy. A round is a step of each and as many of the reference, and
        one more for two or fewer. Half a round more sees to it that a step that is a little slower does not cost one."""
        step = slower * STEP_SECONDS[model] * max(1, ranks / machine.cores())
        return round((pairs[model][self.quick] + 0.5) * (2 * strategies + (strategies <= 2)) * step, 1)


def all_reduce(plan):
    def add(ranks, group, label, who, *flags):
        pattern = f"^({'|'.join(who)})/all_reduce/f32/ranks:{ranks}/bytes:({'|'.join(map(str, SIZES[group]))})$"
        plan.google("all_reduce", f"{label}, {ranks_of(ranks)}, {group}", "bench_all_reduce", pattern, plan.contest(0.2), *flags,
                    rounds=plan.besides if flags else MANY)

    ours, peers = [*OURS, "gloo"] if plan.peers is not None else OURS, (plan.peers or {}).get("all_reduce", [])
    for ranks, group in itertools.product((2, 4), SIZES):
        if plan.quick and group == "largest": continue
        add(ranks, group, "all-reduce", ours)
        if ranks == 4 and (plan.quick or group == "largest"): continue
        for who, command in ((peer["name"], peer["command"]) for peer in peers if ranks <= machine.cores() or not peer["spins"]):
            add(ranks, group, f"all-reduce of {names.WHO[who].label}", [who], f"--peer={who}={command}")


def train_step(plan):
    def add(model, ranks, backend, strategies, pairs=PAIRS, what="", beside=("independent",)):
        pattern = f"^train_step/{model}/({'|'.join([*strategies, *beside])})/{backend}/ranks:{ranks}$"
        plan.google("train_step", f"step of the {model}, {ranks_of(ranks)}, {backend}{what}", "bench_train_step", pattern,
                    f"--seconds={plan.seconds_for(pairs, model, ranks, len(strategies)):g}", rounds=MANY if ranks == 2 else plan.besides)

    over_mpi = (plan.build / "bench/bench_mpi_train_step").exists()
    for model in names.MODELS:
        for backend in ("threads", "mpi") if over_mpi else ("threads",):
            add(model, 2, backend, ("flat", "zero3", *OF_GOALS) if plan.quick else STRATEGIES)
            add(model, 2, backend, OF_GOALS, MORE_PAIRS, ", more pairs")
            for ranks in (1,) if plan.quick else (1, 4): add(model, ranks, backend, [names.DEFAULT])
        if over_mpi and not plan.quick:
            add(model, 2, "mpi_messages", OF_MESSAGES)
            add(model, 4, "mpi_messages", [names.DEFAULT])
        add(model, 2, "threads", [names.WATCHED], MORE_PAIRS, ", watched", beside=())


def torch(plan):
    if plan.peers is None: return
    if "torch_python" not in plan.peers:
        plan.left_out["torch"] = "PyTorch is not to be had for this machine; bench/peers/install said why"
        return
    gradsync = ["--gradsync", plan.peers["gradsync_torch"]] if "gradsync_torch" in plan.peers else []
    if not gradsync: plan.left_out["gradsync in PyTorch"] = "gradsync_torch was not built; bench/peers/install said why"

    def add(model, ranks, modes, pairs=PAIRS, what=""):
        modes = [mode for mode in modes if gradsync or not mode.startswith("gradsync")]
        command = [plan.peers["torch_python"], str(plan.root / "bench/peers/torch_train_step.py"), *gradsync, "--model", model, "--ranks", str(ranks),
                   "--modes", ",".join(modes), f"--seconds={plan.seconds_for(pairs, model, ranks, len(modes) - 1, TORCH_SLOWER):g}"]
        plan.tasks.append(Task("torch", f"PyTorch's step of the {model}, {ranks_of(ranks)}{what}", command, "torch",
                               MANY if ranks == 2 else plan.besides))

    for model in names.MODELS:
        add(model, 2, OF_TORCH_GOALS if plan.quick else OF_TORCH)
        add(model, 2, OF_TORCH_GOALS, MORE_PAIRS, ", more pairs")
        for ranks in (1,) if plan.quick else (1, 4): add(model, ranks, ("independent", "ddp"))


def memory(plan):
    if not plan.built("memory", "examples/gradsync_train"): return
    # Processes that share memory count one another's pages; as threads, only the library's own account says what a rank has.
    mpiexec = machine.cmake_cache(plan.build).get("MPIEXEC_EXECUTABLE") if (plan.build / "bench/bench_mpi_train_step").exists() else None
    for ranks, stage in itertools.product((2,) if plan.quick else (1, 2, 4), ("none", "optimizer", "gradients", "parameters")):
        buckets = [] if stage == "parameters" else ["--bucket-mib", "4"]
        program = [str(plan.build / "examples/gradsync_train"), *MEMORY_MODEL, "--shard", stage, *buckets]
        command = [mpiexec, "-n", str(ranks), *program, "--backend", "mpi", "--no-shared-memory"] if mpiexec else [*program, "--ranks", str(ranks)]
        plan.tasks.append(Task("memory", f"memory, sharded: {stage}, {ranks_of(ranks)}", command, "memory", 1, {"shard": stage, "ranks": ranks}))


def simple(part, label, pattern, seconds, besides=True, quick=None, optional=False):
    """All that a program measures whose name matches `pattern`; with --quick: `quick`, and nothing if that is empty."""
    def add(plan):
        chosen = pattern if quick is None or not plan.quick else quick
        program = "all_reduce" if part == "collectives" else part
        if chosen: plan.google(part, label, f"bench_{program}", chosen, plan.contest(seconds), rounds=plan.besides if besides else MANY)
        if optional: plan.left_out.pop(part, None)  # most machines have none
    return add


# In the order in which they are missed most, should the time not do for all.
PARTS = {
    "all_reduce": ("all-reduce against the limit, MPI and (--peers) others", all_reduce),
    "train_step": ("a training step under every strategy", train_step),
    "memory": ("memory by stage of sharding", memory),
    "reducer": ("what the Reducer costs beside the bytes",
                simple("reducer", "reducer", ".", 0.1, quick="mark_ready/|construct/|parameters:1000000/|step/.*/bytes:26214400$")),
    "convert": ("conversion between floating types", simple("convert", "conversion", "elements:131072$", 0.3, besides=False)),
    "torch": ("the training step with PyTorch (--peers)", torch),
    "collectives": ("other collectives and types (not --quick)", simple("collectives", "other collectives and types", OTHERS, 0.05, quick="")),
    "nccl": ("collectives between GPUs, where there are some", simple("nccl", "collectives between GPUs", ".", 0.2, besides=False, optional=True)),
    "overlap": ("what a backward on a GPU hides, where there is one", simple("overlap", "a backward on a GPU", ".", 2, besides=False, optional=True))}
