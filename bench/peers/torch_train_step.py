#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""The steps of bench_train_step in PyTorch: the same models, batch, optimizer and numbers of ranks, one thread a rank,
processes over Gloo.

    torch_train_step.py [--model transformer|mlp|all] [--ranks N] [--modes MODE,...] [--seconds S] [--rounds N]
                        [--out FILE]

Modes, each with a copy of the model:

    independent          copies that are not synchronised: the limit
    naive                one all_reduce a parameter, after the backward
    naive_async          the same, all started before the first is waited for
    flat                 one all_reduce of all gradients, copied together, after the backward
    ddp                  DistributedDataParallel, buckets of 25 MB
    ddp_1MB              ... of 1 MB
    ddp_gradient_views   25 MB, gradients live in the buckets (gradient_as_bucket_view)
    zero1                DistributedDataParallel and ZeroRedundancyOptimizer

As in bench_train_step, modes take turns, a step each, all ranks starting together, and the slowest rank counts; a step of
`independent` stands directly before and after each of the others (two of them between two steps of the same mode), and
differences and ratios are of such pairs. Ranks are not bound to a core, because Gloo's threads would be bound to it too.
--out writes what that program writes with --benchmark_out: names train_step/MODEL/torch_MODE/gloo/ranks:N, those of its
counters that PyTorch has, and "pairs", lists of a step's time and the reference's. Exit code 77: there is no PyTorch.
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

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # read when PyTorch is imported
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel
except ImportError as error:
    print(f"torch_train_step.py: no PyTorch for {sys.executable} ({error}); on Debian: apt-get install python3-torch,"
          " and run it with /usr/bin/python3", file=sys.stderr)
    sys.exit(77)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from torch_models import MODELS, check_attention, loss_of

MODES = ["independent", "naive", "naive_async", "flat", "ddp", "ddp_1MB", "ddp_gradient_views", "zero1"]
LEAST_ROUNDS = 3


class Trainee:
    """One rank's training in one mode. Its first steps are done when it is made."""

    def __init__(self, model_type, mode, rank, ranks):
        torch.manual_seed(0)
        self.model, self.mode, self.ranks = model_type(), mode, ranks
        self.parameters = list(self.model.parameters())
        generator = torch.Generator().manual_seed(rank)
        shape = (16, model_type.sequences, model_type.context + 1)
        self.text = torch.randint(0, 256, shape, generator=generator)
        self.steps = 0
        self.net = self.model
        ddp = {"ddp": {"bucket_cap_mb": 25}, "ddp_1MB": {"bucket_cap_mb": 1},
               "ddp_gradient_views": {"gradient_as_bucket_view": True}, "zero1": {}}
        if mode in ddp:
            self.net = DistributedDataParallel(self.model, **ddp[mode])
        # Weight decay is for matrices.
        groups = [{"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": 0.1},
                  {"params": [p for p in self.parameters if p.dim() == 1], "weight_decay": 0.0}]
        rates = {"lr": 1e-4, "betas": (0.9, 0.99), "eps": 1e-8}
        if mode == "zero1":
            self.optimizer = ZeroRedundancyOptimizer(groups[0]["params"], torch.optim.AdamW, weight_decay=0.1, **rates)
            self.optimizer.add_param_group(groups[1])
        else:
            self.optimizer = torch.optim.AdamW(groups, **rates)
        if mode == "flat":
            self.flat = torch.zeros(sum(p.numel() for p in self.parameters))
        self.losses = []
        for _ in range(3):  # DDP makes its buckets anew after the first
            self.losses.append(self.step())

    def step(self):
        text = self.text[self.steps % len(self.text)]
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.net, self.model, text)
        loss.backward()
        self.synchronise()
        self.optimizer.step()
        return loss.detach()

    def synchronise(self):
        if self.mode == "naive":
            for p in self.parameters:
                dist.all_reduce(p.grad)
                p.grad /= self.ranks
        elif self.mode == "naive_async":
            for work in [dist.all_reduce(p.grad, async_op=True) for p in self.parameters]:
                work.wait()
            for p in self.parameters:
                p.grad /= self.ranks
        elif self.mode == "flat":
            slices = self.flat.split([p.numel() for p in self.parameters])
            for part, p in zip(slices, self.parameters):
                part.copy_(p.grad.view(-1))
            dist.all_reduce(self.flat)
            self.flat /= self.ranks
            for part, p in zip(slices, self.parameters):
                p.grad.view(-1).copy_(part)

    def state_bytes(self):
        """Bytes of weights, gradients and optimizer state. DDP's buckets, which Python does not see, count as a copy of the gradients."""
        optimizer = self.optimizer.optim if self.mode == "zero1" else self.optimizer
        state = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values()
                    if torch.is_tensor(t) and t.dim() > 0)
        own = sum(p.numel() * p.element_size() for p in self.parameters)
        copies = self.mode in ("flat", "ddp", "ddp_1MB", "zero1")
        return own * (3 if copies else 2) + state


def greatest(seconds):
    """The largest value of all ranks."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def run_rank(rank, ranks, rendezvous, options, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=ranks)
    results = []
    for model in options.models:
        results += measure(model, rank, ranks, options)
    if rank == 0:
        with open(out, "w") as file:
            json.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()


def timed_step(trainee):
    dist.barrier()
    begin = time.perf_counter()
    trainee.step()
    return greatest(time.perf_counter() - begin)


def measure(model, rank, ranks, options):
    trainees = {mode: Trainee(MODELS[model], mode, rank, ranks) for mode in options.modes}
    check_losses(model, trainees)
    reference, *others = options.modes
    once = {mode: timed_step(trainee) for mode, trainee in trainees.items()}
    # A mode that follows itself would share a reference step with its own next pair, so there is one more for each.
    round_seconds = sum(once[mode] for mode in others) + (len(others) + (len(others) <= 2)) * once[reference]
    rounds = options.rounds or min(max(int(options.seconds / round_seconds), LEAST_ROUNDS), 1001)
    seconds = {mode: [] for mode in trainees}
    beside = {mode: [] for mode in others}  # the reference, the mean of before and after

    def measured(mode):
        seconds[mode].append(timed_step(trainees[mode]))
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
    samples = ranks * MODELS[model].sequences
    results = []
    for mode, trainee in trainees.items():
        median = statistics.median(seconds[mode])
        pairs = list(zip(seconds[mode], beside.get(mode, ())))
        results.append({
            "name": f"train_step/{model}/torch_{mode}/gloo/ranks:{ranks}",
            "run_name": f"train_step/{model}/torch_{mode}/gloo/ranks:{ranks}",
            "run_type": "iteration", "repetitions": 1, "repetition_index": 0, "threads": 1, "iterations": 1,
            "real_time": median * 1e3, "cpu_time": 0.0, "time_unit": "ms",
            **with_quartiles("independent_ratio", [limit / own for own, limit in pairs]),
            **with_quartiles("exposed_against_independent", [own - limit for own, limit in pairs]),
            **({"pairs": pairs} if pairs else {}),
            "samples_per_second": samples / median,
            "tokens_per_second": samples * MODELS[model].targets / median,
            "state_bytes": greatest(trainee.state_bytes()),
            "time_min": min(seconds[mode]), "time_max": max(seconds[mode]), "samples": float(len(seconds[mode])),
        })
    return results


def with_quartiles(name, values):
    """The median and quartiles, named as counters of bench_train_step; empty without values."""
    if not values:
        return {}
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {name: middle, f"{name}_q1": first, f"{name}_q3": third}


def check_losses(model, trainees):
    """Modes that synchronise train the same model, up to the rounding of sums."""
    losses = {mode: [greatest(loss.item()) for loss in trainee.losses]
              for mode, trainee in trainees.items() if mode != "independent"}
    for mode, own in losses.items():
        for loss, first in zip(own, next(iter(losses.values()))):
            if not math.isclose(loss, first, rel_tol=1e-4):
                raise SystemExit(f"torch_train_step.py: {model}, {mode}: the loss is {loss}, that of others {first}")


def parse_arguments():
    parser = argparse.ArgumentParser(description="The steps of bench_train_step in PyTorch over Gloo.")
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--modes", default=",".join(MODES), help="some of " + ", ".join(MODES))
    parser.add_argument("--seconds", type=float, default=5, help="approximate time for all modes of one model [5]")
    parser.add_argument("--rounds", type=int, default=0, help=f"number of rounds [as many as fit in --seconds, at least {LEAST_ROUNDS}]")
    parser.add_argument("--out", help="a JSON file, as Google Benchmark writes it")
    options = parser.parse_args()
    options.models = list(MODELS) if options.model == "all" else [options.model]
    asked = options.modes.split(",")
    for mode in asked:
        if mode not in MODES:
            parser.error(f"--modes: there is no '{mode}'; choose from {', '.join(MODES)}")
    options.modes = [mode for mode in MODES if mode in asked or mode == "independent"]
    if options.ranks < 1 or options.rounds < 0 or options.seconds < 0:
        parser.error("--ranks is 1 or more, --rounds and --seconds are not negative")
    return options


def main():
    options = parse_arguments()
    check_attention()
    context = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "host_name": socket.gethostname(),
               "executable": os.path.abspath(__file__), "num_cpus": os.cpu_count(), "load_avg": list(os.getloadavg()),
               "pytorch": torch.__version__, "python": sys.version.split()[0]}
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "results.json")
        arguments = (options.ranks, os.path.join(folder, "rendezvous"), options, results)
        mp.spawn(run_rank, arguments, nprocs=options.ranks)
        with open(results) as file:
            benchmarks = json.load(file)
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"context": context, "benchmarks": benchmarks}, file, indent=2)
            file.write("\n")
    print(f"{'':56}{'ms':>8}{'against independent, ms':>25}{'ratio':>7}")
    for b in benchmarks:
        pairs = f"{b['exposed_against_independent'] * 1e3:25.1f}{b['independent_ratio']:7.2f}" if "independent_ratio" in b else ""
        print(f"{b['name']:56}{b['real_time']:8.1f}{pairs}")


if __name__ == "__main__":
    main()
