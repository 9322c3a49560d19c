# SPDX-License-Identifier: BSL-1.0
"""Results that were computed, not measured: for tests of what is made of results. One core moves 10 GB/s; a call costs a microsecond;
gradients are 13 MB; two processes need four times as long as threads; PyTorch ten times."""
import random

from report.results import Results

SLOWNESS = {"limit": 1.0, "threads": 1.05, "mpi": 1.2, "mpi_adopted": 1.3, "mpi_borrowed": 4.0, "mpi_messages": 6.0, "tcp_messages": 9.0,
            "mpi_library": 5.0, "mpi_library_nonblocking": 7.0, "gloo": 12.0}
PEERS = {"deepspeed_shm": 4.5, "torch_gloo": 20.0, "open_mpi": 4.8, "open_mpi_tcp": 30.0, "mpich": 5.5, "oneccl": 5.2}
BESIDE = {"mpi": {"threads": "threads", "mpi_library": "mpi_library"}, "tcp_messages": {"gloo": "gloo"}}
SIZES = [2 ** 12, 2 ** 16, 2 ** 20, 10 * 2 ** 20, 25 * 2 ** 20, 100 * 2 ** 20]
STRATEGIES = {"independent": 0.0, "naive": 1.0, "flat": 0.9, "overlap_per_parameter": 0.5, "buckets_1MB": 0.4, "buckets_10MB": 0.35, "buckets_25MB": 0.3,
              "optimal": 0.25, "forward": 0.2, "zero1": 0.5,
              "fused": 0.1, "zero2": 0.5, "zero3": 0.7}
TORCH = {"torch_independent": 0.0, "torch_ddp": 1.6, "torch_ddp_gradient_views": 1.5, "torch_zero1": 3.0, "torch_fsdp2": 4.0}
IN_TORCH = {"torch_gradsync": 0.05, "torch_gradsync_zero1": 0.1, "torch_gradsync_fsdp": 0.3}


def results(rounds=5, noise=0.02, seed=1, slower=None):
    """`slower`: {name: factor}, what was made slower on purpose; a ratio to what is measured beside it feels it too."""
    chance = random.Random(seed)
    made = Results({"cpu": "a made-up processor", "cores": 2, "memory_bytes": 2 ** 34, "system": "none", "kernel": "0", "compiler": "none", "build": "none",
                    "commit": "0" * 40, "clean": True, "date": "2026-01-01",
                    "peers": ["Open MPI 4.1.4", "Gloo 0", "PyTorch 2.15.0", "DeepSpeed 0.19.8", "Open MPI 5.0.11", "MPICH 5.0.2"]},
                   {"mode": "synthetic", "rounds": rounds, "minutes": 0.0, "commands": {"all_reduce": ["bench_all_reduce"]},
                    "others": {"conversion": [0.1]}, "peers": {"open_mpi": "Open MPI 6.0.1", "mpich": "MPICH 5.0.2"}})
    jitter = lambda: chance.lognormvariate(0, noise)

    def add(program, name, time, **counters):
        columns = made.columns.setdefault(name, {"program": program})
        for _ in range(rounds):
            median = time * (slower or {}).get(name, 1) * jitter()
            row = {"time": median, "time_min": median * 0.95, "time_max": median * 1.3, "samples": 15, "handoff_ns": 120 * jitter()}
            for counter, value in counters.items(): row[counter] = value(median) if callable(value) else value
            for counter, value in row.items(): columns.setdefault(counter, []).append(value)

    for ranks in (2, 4):
        for size in SIZES:
            limit = 0.7e-6 * ranks / 2 + size * ranks / 40e9
            for who, slowness in {**SLOWNESS, **(PEERS if (ranks, size) != (4, SIZES[-1]) else {})}.items():
                beside = {f"{name}_ratio": lambda t, other=other: limit * SLOWNESS[other] * jitter() / t for name, other in BESIDE.get(who, {}).items()}
                add("bench_all_reduce", f"{who}/all_reduce/f32/ranks:{ranks}/bytes:{size}", limit * slowness, bytes=size, algbw=lambda t: size / t,
                    busbw=lambda t: size / t * 2 * (ranks - 1) / ranks, **beside,
                    **({} if who == "limit" else {"limit_ratio": lambda t: limit * jitter() / t}))
    for model, compute, samples in (("transformer", 0.22, 8), ("mlp", 0.055, 64)):
        for ranks in (1, 2, 4):
            own = compute * max(1, ranks / 2)
            for backend, strategies, base in (("threads", STRATEGIES, 0.002), ("mpi", STRATEGIES, 0.004), ("mpi_messages", STRATEGIES, 0.02), ("gloo", TORCH, 0.012),
                                              ("tcp", IN_TORCH, 0.012)):
                alone = own * (1.3 if backend in ("gloo", "tcp") else 1.0)
                for strategy, part in strategies.items():
                    wait = base * part * (ranks - 1)
                    counters = {} if strategy.endswith("independent") else {
                        "independent_ratio": lambda t: alone * jitter() / t,
                        "pairs": lambda t: [[t * jitter(), alone * jitter()] for _ in range(4)]}
                    add("bench_train_step", f"train_step/{model}/{strategy}/{backend}/ranks:{ranks}", alone + wait,
                        samples_per_second=lambda t: samples * ranks / t, state_bytes=5e7, **counters)
        add("bench_train_step", f"train_step/{model}/timeline/threads/ranks:2", compute * 1.004, samples_per_second=lambda t: samples * 2 / t,
            unwatched_ratio=lambda t: compute * jitter() / t, pairs=lambda t: [[t * jitter(), compute * jitter()] for _ in range(4)])
    add("bench_train_step", "train_step/mlp/fused_shared/threads/ranks:2", 0.056, samples_per_second=lambda t: 128 / t,
        pairs=lambda t: [[t * jitter(), 0.055 * jitter()] for _ in range(4)])
    add("bench_convert", "convert/f32/bf16/elements:131072", 30e-6, memcpy_ratio=lambda t: 20e-6 / t)
    for ranks in (2, 1):
        for parameters in (100000, 1000000):
            add("bench_reducer", f"reducer/construct/ranks:{ranks}/parameters:{parameters}", 70e-9 * parameters * ranks, bytes_per_parameter=180)
        for overlap in ("NoOverlap", "OverlapBackward", "OverlapBackwardThread"):
            for storage, slower_by in (("in_buckets", 0), ("borrowed", 3e-9)):
                add("bench_reducer", f"reducer/mark_ready/{overlap}/{storage}/ranks:{ranks}/parameters:1000", 12e-9 * ranks + slower_by)
    add("bench_reducer", "reducer/step/SizeCappedBuckets/borrowed/ranks:2/parameters:1000000/bytes:4000000", 70e-3)
    for ranks in (1, 2, 4):
        for stage, parts in (("none", (1, 1, 1)), ("optimizer", (1, 1, ranks)), ("gradients", (1, ranks, ranks)), ("parameters", (ranks, ranks, ranks))):
            held = [32.6e6 / parts[0], 32.6e6 / parts[1], 65.1e6 / parts[2], 1e6]
            made.memory.append({"shard": stage, "ranks": ranks, **dict(zip(("bytes_parameters", "bytes_gradients", "bytes_optimizer", "bytes_activations"), held)),
                                "peak_rss_bytes": sum(held) + 40e6, "transport": "synthetic"})
    return made
