#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""A peer's all-reduce of floats, in place, for bench_all_reduce --peer:

    torch_all_reduce.py torch_gloo|deepspeed_shm RANKS BYTES SECONDS LEAST ROUNDS pin|no-pin

deepspeed_shm is DeepSpeed's for processes of one host, compiled into deepspeed_shm.so in this Python's environment: see install. Ranks are
processes with one thread each, and take part as those of bench/contest.hpp do.
"""
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BATCH_SECONDS, MOST_ROUNDS = 300e-6, 1001


def deepspeed(rank, ranks):
    sys.path.insert(0, sys.prefix)
    import deepspeed_shm

    os.environ["LOCAL_SIZE"] = str(ranks)
    deepspeed_shm.initialize(ranks, rank)
    return torch.ops.deepspeed.inference_all_reduce_


def run(rank, name, ranks, port, count, seconds, least, rounds, pin):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    all_reduce = deepspeed(rank, ranks) if name == "deepspeed_shm" else dist.all_reduce
    if pin and name != "torch_gloo":  # Gloo's own threads would be bound with the rank's
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    tensor = torch.full((count,), float(rank + 1))
    all_reduce(tensor)
    assert torch.equal(tensor, torch.full((count,), ranks * (ranks + 1) / 2)), f"{name}: the sum is wrong"
    tensor.zero_()

    def batch(times):
        dist.barrier()
        all_reduce(tensor)  # ranks leave Gloo's barrier far apart
        begin = time.perf_counter()
        for _ in range(times): all_reduce(tensor)
        slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item() / times

    times, once = 1, batch(1)
    for _ in range(4 if once < 10 * BATCH_SECONDS else 1):
        times = min(max(int(BATCH_SECONDS / once), 1), 10000)
        once = min(once, batch(times))
    for _ in range(rounds or min(max(int(seconds / (once * times)), least), MOST_ROUNDS)):
        sample = batch(times)
        if rank == 0: print(name, sample, flush=True)
    dist.barrier()


if __name__ == "__main__":
    if len(sys.argv) != 8: sys.exit(__doc__)
    name, ranks, size, seconds, least, rounds, pin = sys.argv[1:]
    with socket.create_server(("127.0.0.1", 0)) as free: port = free.getsockname()[1]
    arguments = name, int(ranks), port, int(size) // 4, float(seconds), int(least), int(rounds), pin == "pin"
    mp.start_processes(run, arguments, nprocs=int(ranks), start_method="fork")  # PyTorch is loaded once
