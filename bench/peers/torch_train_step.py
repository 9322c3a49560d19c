#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""The steps of bench_train_step in PyTorch: the same models, batch, optimizer and numbers of ranks, one thread per rank,
processes over Gloo; and gradsync inside PyTorch beside them.

    torch_train_step.py [--model transformer|mlp|all] [--ranks N] [--modes MODE,...] [--seconds S] [--rounds N]
                        [--gradsync FOLDER] [--out FILE]

Modes, each with a copy of the model:

    independent          copies that are not synchronised: the limit
    naive                one all_reduce a parameter, after the backward
    naive_async          the same, all started before the first is waited for
    flat                 one all_reduce of all gradients, copied together, after the backward
    ddp                  DistributedDataParallel, buckets of 25 MB
    ddp_1MB              ... of 1 MB
    ddp_gradient_views   25 MB, gradients live in the buckets (gradient_as_bucket_view)
    zero1                the same and ZeroRedundancyOptimizer, parameters as views too (parameters_as_bucket_view)
    fsdp2                fully_shard: each block is a unit (PyTorch 2.6 and later)

With --gradsync, the folder of gradsync_torch.so (examples/adopt/torch_python), over TcpBackend:

    gradsync             TorchReducer
    gradsync_zero1       TorchShardedOptimizer, which shards gradients too
    gradsync_fsdp        TorchFullyShard, with the units of fsdp2

As in bench_train_step, modes take turns, a step each, all ranks starting together, and the slowest rank counts; a step of
`independent` stands directly before and after each of the others (two of them between two steps of the same mode), and
differences and ratios are of such pairs. Ranks are not bound to a core, because Gloo's threads would be bound to it too.
--out writes what that program writes with --benchmark_out: names train_step/MODEL/torch_MODE/gloo/ranks:N (tcp instead of
gloo for gradsync), those of its counters that PyTorch has, and "pairs", lists of a step's time and the reference's.

The modes of PyTorch share a process per rank. Each mode of gradsync has processes of its own, because the allocator of a
TorchReducer serves every backward of its process. Processes sleep while others step. malloc keeps freed memory, so no mode
pays for new pages.

Exit code 1: the first losses of two modes differ by more than rounding, or, on 1 or 2 ranks, losses or weights of ddp and
gradsync are not equal to the bit. Exit code 77: there is no PyTorch.
"""
import argparse
import json
import math
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # read when PyTorch is imported
# Freed memory stays in the process. Otherwise it depends on the order of tensors in the heap which mode gets new pages in every step:
# up to 20,000 of them, which take longer than the synchronisation.
os.environ.update(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(1 << 40))
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # the same bits wherever a tensor begins
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel
except ImportError as error:
    print(f"torch_train_step.py: no PyTorch for {sys.executable} ({error}); on Debian: apt-get install python3-torch,"
          " and run it with /usr/bin/python3", file=sys.stderr)
    sys.exit(77)

try:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
except ImportError:
    fully_shard = None  # before PyTorch 2.6

MODES = ["independent", "naive", "naive_async", "flat", "ddp", "ddp_1MB", "ddp_gradient_views", "zero1"]
MODES += ["fsdp2"] if fully_shard else []
SHARDED = ["gradsync_zero1", "gradsync_fsdp"]
OF_GRADSYNC = ["gradsync", *SHARDED]
FIRST_STEPS = 3  # DDP makes its buckets anew after the first
LEAST_ROUNDS = 3


def attend_by_hand(q, k, v, future):
    weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf).softmax(-1)
    return weights @ v


def attend(q, k, v, future):
    if not hasattr(F, "scaled_dot_product_attention"):  # before PyTorch 2.0
        return attend_by_hand(q, k, v, future)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# A model of examples/transformer.hpp or examples/mlp.hpp reads rows of bytes and predicts the bytes after them. `context` is the length of
# a row, `sequences` the rows of a batch, and `targets` the number of bytes that it predicts of each row: those after every prefix, or only
# the last one.


class Block(nn.Module):
    """Pre-norm, causal attention, exact GELU."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, future):
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.projection(attend(q, k, v, future).transpose(1, 2).reshape(n, t, width))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class Transformer(nn.Module):
    context, sequences, targets = 128, 8, 128

    def __init__(self, width=256, blocks=4, heads=4):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(self.context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        # No buffer, which DDP would broadcast before each step: Gloo has no bool.
        self.future = torch.triu(torch.ones(self.context, self.context, dtype=torch.bool), 1)

    def forward(self, x):
        h = self.embedding(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h, self.future)
        return self.output(self.norm(h))


class Mlp(nn.Module):
    """The embeddings of 16 bytes side by side, then hidden layers with exact GELU."""

    context, sequences, targets = 16, 64, 1

    def __init__(self, embedding=49, hidden=(2048, 2048, 1024)):
        super().__init__()
        widths = [self.context * embedding, *hidden, 256]
        self.embedding = nn.Embedding(256, embedding)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x):
        h = self.embedding(x).flatten(1)
        for layer in self.layers[:-1]:
            h = F.gelu(layer(h))
        return self.layers[-1](h)


MODELS = {"transformer": Transformer, "mlp": Mlp}


def loss_of(net, model, text):
    """The loss of `net`, which is the model or wraps it, on rows of context + 1 bytes."""
    return F.cross_entropy(net(text[:, :-1]).reshape(-1, 256), text[:, text.shape[1] - model.targets :].reshape(-1))


def check_attention():
    """Both ways of attention give the same results and gradients."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 4, 16, 8, generator=generator, requires_grad=True) for _ in range(3)]
    future = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)
    results = []
    for way in (attend, attend_by_hand):
        result = way(*inputs, future)
        results.append([result, *torch.autograd.grad(result.square().sum(), inputs)])
    for one, other in zip(*results):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5), (one - other).abs().max()


def units_of(model):
    """The names of the model's blocks or hidden layers, which are sharded one by one."""
    return [f"{name}.{k}" for name, child in model.named_children() if isinstance(child, nn.ModuleList) for k in range(len(child))]


def party_of(mode):
    return mode if mode in OF_GRADSYNC else "torch"


@dataclass
class Place:
    """A process is one rank of one party."""

    party: str
    rank: int
    ranks: int
    group: object  # the party's processes
    gradsync: object = None  # the module
    comm: object = None


class Trainee:
    """One rank's training in one mode. Its first steps are done when it is made."""

    def __init__(self, model_type, mode, place):
        torch.manual_seed(0)
        self.model, self.mode, self.place = model_type(), mode, place
        generator = torch.Generator().manual_seed(place.rank)
        shape = (16, model_type.sequences, model_type.context + 1)
        self.text = torch.randint(0, 256, shape, generator=generator)
        matrices = [p.dim() > 1 for p in self.model.parameters()]
        self.net, self.face = self.model, None
        ddp = {"ddp": {"bucket_cap_mb": 25}, "ddp_1MB": {"bucket_cap_mb": 1},
               "ddp_gradient_views": {"gradient_as_bucket_view": True}, "zero1": {"gradient_as_bucket_view": True}}
        if mode in ddp:
            self.net = DistributedDataParallel(self.model, process_group=place.group, **ddp[mode])
        elif mode == "fsdp2":
            mesh = DeviceMesh.from_group(place.group, "cpu")
            for unit in units_of(self.model):
                fully_shard(self.model.get_submodule(unit), mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif mode == "gradsync":
            self.face = place.gradsync.Reducer(place.comm, self.model)
            self.face.broadcast_parameters()
        elif mode == "gradsync_zero1":
            self.face = place.gradsync.ShardedOptimizer(place.comm, self.model)
        elif mode == "gradsync_fsdp":
            self.face = place.gradsync.FullyShard(place.comm, self.model, units_of(self.model))
        self.trained = self.face.shards() if mode in SHARDED else list(self.model.parameters())
        # Weight decay is for matrices.
        groups = [{"params": [p for p, matrix in zip(self.trained, matrices) if matrix == decays], "weight_decay": 0.1 if decays else 0.0}
                  for decays in (True, False)]
        rates = {"lr": 1e-4, "betas": (0.9, 0.99), "eps": 1e-8}
        if mode == "zero1":
            self.optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, process_group=place.group, parameters_as_bucket_view=True,
                                                     **rates)
        else:
            self.optimizer = torch.optim.AdamW(groups, **rates)
        if mode == "flat":
            self.flat = torch.zeros(sum(p.numel() for p in self.trained))
        self.losses = []
        for _ in range(FIRST_STEPS):
            self.step()

    def step(self):
        text = self.text[len(self.losses) % len(self.text)]
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.net, self.model, text)
        loss.backward()
        self.synchronise()
        self.optimizer.step()
        if self.mode in SHARDED:
            self.face.stepped()
        self.losses.append(loss.detach())

    def synchronise(self):
        group, ranks = self.place.group, self.place.ranks
        if self.face:
            self.face.finish()
        elif self.mode == "naive":
            for p in self.trained:
                dist.all_reduce(p.grad, group=group)
                p.grad /= ranks
        elif self.mode == "naive_async":
            for work in [dist.all_reduce(p.grad, group=group, async_op=True) for p in self.trained]:
                work.wait()
            for p in self.trained:
                p.grad /= ranks
        elif self.mode == "flat":
            slices = self.flat.split([p.numel() for p in self.trained])
            for part, p in zip(slices, self.trained):
                part.copy_(p.grad.view(-1))
            dist.all_reduce(self.flat, group=group)
            self.flat /= ranks
            for part, p in zip(slices, self.trained):
                p.grad.view(-1).copy_(part)

    def state_bytes(self):
        """Bytes of weights, gradients and optimizer state between steps. Python does not see DDP's buckets and TorchReducer's spare memory;
        they count as a copy of the gradients."""
        def total(tensors):
            local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]  # fsdp2's tensors are DTensors
            return sum(t.numel() * t.element_size() for t in local)

        optimizer = self.optimizer.optim if self.mode == "zero1" else self.optimizer
        state = total(t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim() > 0)
        if self.mode in SHARDED:
            return sum(self.face.memory().values()) + state
        copies = self.mode in ("flat", "ddp", "ddp_1MB", "gradsync")
        return total(self.trained) * (3 if copies else 2) + state

    def outcome(self):
        compared = self.mode in ("ddp", "gradsync")
        return {"losses": torch.stack(self.losses).tolist(), "weights": torch.cat([p.detach().view(-1) for p in self.trained]) if compared else None}


def greatest(value):
    """The largest value of all processes."""
    value = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def run_process(process, options, ports, folder):
    torch.set_num_threads(1)
    ranks, parties = options.ranks, list(ports)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=process, world_size=ranks * len(parties))
    groups = [dist.new_group(range(k * ranks, (k + 1) * ranks)) for k in range(len(parties))]
    party, rank = divmod(process, ranks)
    place = Place(parties[party], rank, ranks, groups[party])
    if place.party in OF_GRADSYNC:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[place.party]))
        place.gradsync = load_gradsync(options.gradsync)
        place.comm = place.gradsync.Comm()
    benchmarks, trained = [], {}
    for model in options.models:
        measured, outcomes = measure(model, place, options)
        benchmarks += measured
        trained.update({(model, mode): outcome for mode, outcome in outcomes.items()})
    torch.save((benchmarks, trained), f"{folder}/{process}")
    dist.barrier()
    dist.destroy_process_group()


def load_gradsync(folder):
    sys.path.insert(0, folder)
    import gradsync_torch

    return gradsync_torch


def timed_step(trainee):
    """`trainee` is None in processes of other parties: they wait."""
    seconds = 0.0
    if trainee:
        dist.barrier(group=trainee.place.group)
        begin = time.perf_counter()
        trainee.step()
        seconds = time.perf_counter() - begin
    return greatest(seconds)


def measure(model, place, options):
    """The benchmarks of all modes, and the outcomes of those that this process trains."""
    trainees = {mode: Trainee(MODELS[model], mode, place) for mode in options.modes if party_of(mode) == place.party}
    reference, *others = options.modes
    once = {mode: timed_step(trainees.get(mode)) for mode in options.modes}
    # A mode that follows itself would share a reference step with its own next pair, so there is one more for each.
    round_seconds = sum(once[mode] for mode in others) + (len(others) + (len(others) <= 2)) * once[reference]
    rounds = options.rounds or min(max(int(options.seconds / round_seconds), LEAST_ROUNDS), 1001)
    seconds = {mode: [] for mode in options.modes}
    beside = {mode: [] for mode in others}  # the reference, the mean of before and after

    def measured(mode):
        seconds[mode].append(timed_step(trainees.get(mode)))
        return seconds[mode][-1]

    before = measured(reference) if others else None
    last = None
    for turn in range(rounds):
        if not others:
            measured(reference)
        first = turn % max(len(others), 1)
        for mode in others[first:] + others[:first]:
            if mode == last:
                before = measured(reference)
            measured(mode)
            last = mode
            after = measured(reference)
            beside[mode].append((before + after) / 2)
            before = after
    samples = options.ranks * MODELS[model].sequences
    results = []
    for mode in options.modes:
        median = statistics.median(seconds[mode])
        pairs = list(zip(seconds[mode], beside.get(mode, ())))
        name = f"train_step/{model}/torch_{mode}/{'tcp' if mode in OF_GRADSYNC else 'gloo'}/ranks:{options.ranks}"
        results.append({
            "name": name, "run_name": name,
            "run_type": "iteration", "repetitions": 1, "repetition_index": 0, "threads": 1, "iterations": 1,
            "real_time": median * 1e3, "cpu_time": 0.0, "time_unit": "ms",
            **with_quartiles("independent_ratio", [limit / own for own, limit in pairs]),
            **with_quartiles("exposed_against_independent", [own - limit for own, limit in pairs]),
            **({"pairs": pairs} if pairs else {}),
            "samples_per_second": samples / median,
            "tokens_per_second": samples * MODELS[model].targets / median,
            "state_bytes": greatest(trainees[mode].state_bytes() if mode in trainees else 0),
            "time_min": min(seconds[mode]), "time_max": max(seconds[mode]), "samples": float(len(seconds[mode])),
        })
    return results, {mode: trainee.outcome() for mode, trainee in trainees.items()}


def with_quartiles(name, values):
    """The median and quartiles, named as counters of bench_train_step; empty without values."""
    if not values:
        return {}
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {name: middle, f"{name}_q1": first, f"{name}_q3": third}


def check(model, modes, trained):
    """Modes that synchronise train the same model, up to the rounding of sums. `trained[mode]` is the outcome of each rank.

    A sum of two is the same in any order, so gradsync and ddp agree to the bit on two ranks.
    """
    first = modes[1] if len(modes) > 1 else None
    losses = {mode: [max(step) for step in zip(*(outcome["losses"] for outcome in trained[mode]))][:FIRST_STEPS] for mode in modes[1:]}
    for mode, own in losses.items():
        for loss, expected in zip(own, losses[first]):
            if not math.isclose(loss, expected, rel_tol=1e-4):
                raise SystemExit(f"torch_train_step.py: {model}, {mode}: the loss is {loss}, that of {first} {expected}")
    if "ddp" not in modes or "gradsync" not in modes:
        return
    for rank, (theirs, ours) in enumerate(zip(trained["ddp"], trained["gradsync"])):
        if len(trained["ddp"]) <= 2 and (ours["losses"] != theirs["losses"] or not torch.equal(ours["weights"], theirs["weights"])):
            raise SystemExit(f"torch_train_step.py: {model}, rank {rank}: losses or weights of gradsync and ddp differ; they must be equal to the"
                             " bit on two ranks")


def parse_arguments():
    parser = argparse.ArgumentParser(description="The steps of bench_train_step in PyTorch over Gloo, and with gradsync.")
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--modes", help="some of " + ", ".join(MODES + OF_GRADSYNC) + " [all; those of gradsync with --gradsync]")
    parser.add_argument("--gradsync", metavar="FOLDER", help="the folder of gradsync_torch.so, built from examples/adopt/torch_python")
    parser.add_argument("--seconds", type=float, default=5, help="approximate time for all modes of one model [5]")
    parser.add_argument("--rounds", type=int, default=0, help=f"number of rounds [as many as fit in --seconds, at least {LEAST_ROUNDS}]")
    parser.add_argument("--out", help="a JSON file, as Google Benchmark writes it")
    options = parser.parse_args()
    options.models = list(MODELS) if options.model == "all" else [options.model]
    modes = MODES + (OF_GRADSYNC if options.gradsync else [])
    asked = options.modes.split(",") if options.modes else modes
    for mode in asked:
        if mode in OF_GRADSYNC and not options.gradsync:
            parser.error(f"--modes: {mode} needs --gradsync FOLDER, the folder of gradsync_torch.so")
        if mode not in modes:
            parser.error(f"--modes: there is no '{mode}'; choose from {', '.join(modes)}")
    options.modes = [mode for mode in modes if mode in asked or mode == "independent"]
    if options.ranks < 1 or options.rounds < 0 or options.seconds < 0:
        parser.error("--ranks is 1 or more, --rounds and --seconds are not negative")
    if options.gradsync:
        try:
            load_gradsync(options.gradsync)
        except ImportError as error:
            parser.error(f"--gradsync: no gradsync_torch.so for this Python and PyTorch in {options.gradsync} ({error});"
                         " build examples/adopt/torch_python")
    return options


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main():
    options = parse_arguments()
    check_attention()
    context = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "host_name": socket.gethostname(),
               "executable": os.path.abspath(__file__), "num_cpus": os.cpu_count(), "load_avg": list(os.getloadavg()),
               "pytorch": torch.__version__, "python": sys.version.split()[0]}
    ports = {party_of(mode): free_port() for mode in options.modes}  # by party, that of PyTorch first
    processes = range(options.ranks * len(ports))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_process, (options, ports, folder), nprocs=len(processes))
        outcomes = [torch.load(os.path.join(folder, str(process))) for process in processes]
    benchmarks = outcomes[0][0]
    for model in options.models:
        check(model, options.modes, {mode: [trained[model, mode] for _, trained in outcomes if (model, mode) in trained] for mode in options.modes})
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"context": context, "benchmarks": benchmarks}, file, indent=2)
            file.write("\n")
    print(f"{'':60}{'ms':>8}{'against independent, ms':>25}{'ratio':>7}")
    for b in benchmarks:
        pairs = f"{b['exposed_against_independent'] * 1e3:25.1f}{b['independent_ratio']:7.2f}" if "independent_ratio" in b else ""
        print(f"{b['name']:60}{b['real_time']:8.1f}{pairs}")


if __name__ == "__main__":
    main()
