#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""What a step pays for synchronisation: gradsync's TorchReducer beside PyTorch's DistributedDataParallel over gloo.

    torch_ddp.py FOLDER [MODEL [ROUNDS]]    FOLDER holds gradsync_torch.so (examples/adopt/torch_python); MODEL: mlp or transformer

Three pairs of processes take turns, a step each: without synchronisation, with gradsync, with DDP. A step takes as long as its slower process.
Prints the medians, and those of the differences to the step without synchronisation in the same round; then whether losses and weights
of gradsync and DDP are equal to the bit. Exit code: 1 if they are not, 77 if there is no PyTorch.
"""

import multiprocessing
import os
import socket
import statistics
import sys
import time

try:
    import torch
    import torch.distributed
except ImportError:
    sys.exit(77)

from torch_models import MODELS, check_attention, loss_of

SIZE, WAYS = 2, ("alone", "gradsync", "ddp")


def run(way, folder, kind, rank, port, pipe):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = MODELS[kind]()
    data = torch.Generator().manual_seed(100 + rank)
    texts = list(torch.randint(0, 256, (8, model.sequences, model.context + 1), generator=data))
    net, sync = model, None
    if way == "ddp":
        torch.distributed.init_process_group("gloo", rank=rank, world_size=SIZE)
        net = torch.nn.parallel.DistributedDataParallel(model)
    elif way == "gradsync":
        sys.path.insert(0, folder)
        import gradsync_torch

        sync = gradsync_torch.Reducer(gradsync_torch.Comm(), model)
        sync.broadcast_parameters()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for k in iter(pipe.recv, None):
        begin, cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        loss = loss_of(net, model, texts[k])
        loss.backward()
        if sync:
            sync.finish()
        optimizer.step()
        pipe.send((time.perf_counter() - begin, time.process_time() - cpu, loss.item()))
    pipe.send([p.detach().numpy().tobytes() for p in model.parameters()])


def main(folder, kind="mlp", rounds="40"):
    os.environ.update(OMP_NUM_THREADS="1", MKL_CBWR="AVX2")
    check_attention()
    spawn = multiprocessing.get_context("spawn")
    pipes, theirs, processes = {}, [], []
    for way in WAYS:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        pairs = [spawn.Pipe() for _ in range(SIZE)]
        pipes[way] = [ours for ours, _ in pairs]
        theirs += [end for _, end in pairs]
        processes += [spawn.Process(target=run, args=(way, folder, kind, rank, port, pairs[rank][1]), daemon=True) for rank in range(SIZE)]
    for process in processes:
        process.start()
    for pipe in theirs:
        pipe.close()  # so that reading from a process that died is an error
    steps = {way: [] for way in WAYS}
    for k in range(int(rounds)):
        for way in WAYS:
            for pipe in pipes[way]:
                pipe.send(k % 8)
            steps[way].append([pipe.recv() for pipe in pipes[way]])
    weights = {}
    for way in WAYS:
        for pipe in pipes[way]:
            pipe.send(None)
        weights[way] = [pipe.recv() for pipe in pipes[way]]

    def median(way, part):
        slower = [[max(rank[part] for rank in step) * 1e3 for step in steps[w]][3:] for w in (way, "alone")]
        return statistics.median(slower[0]), statistics.median(a - b for a, b in zip(*slower))

    print(f"{kind}, PyTorch {torch.__version__}, medians of {rounds} rounds, in ms")
    print(f"{'':10}{'step':>10}{'exposed':>10}{'CPU':>10}{'more CPU':>10}")
    for way in WAYS:
        print(f"{way:10}" + "".join(f"{x:10.2f}" for part in (0, 1) for x in median(way, part)))
    losses = {way: [[rank[2] for rank in step] for step in steps[way]] for way in WAYS}
    equal = losses["gradsync"] == losses["ddp"] and weights["gradsync"] == weights["ddp"]
    print(f"losses and weights of gradsync and DDP are {'equal' if equal else 'NOT EQUAL'} to the bit")
    return 0 if equal else 1


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4 or sys.argv[2:3] not in [[], *([kind] for kind in MODELS)]:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
