#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""torch_train.cpp in Python, with PyTorch's DistributedDataParallel over gloo.

    torch_ddp.py RANKS [STEPS [TEXT [WEIGHTS]]]
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed
import torch.multiprocessing
from torch import nn

CONTEXT, WIDTH, HIDDEN, BATCH = 8, 32, 256, 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.first = nn.Linear(CONTEXT * WIDTH, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, 256)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(self.embedding(x).flatten(1))))))


def train(rank, ranks, meeting, steps, text, weights):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=ranks)
    with open(text, "rb") as file:
        text = torch.tensor(list(file.read()))
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    milliseconds = []
    for step in range(steps):
        places = [(step * BATCH + i) * 7919 % (len(text) - CONTEXT) for i in range(rank, BATCH, ranks)]
        data = torch.stack([text[p : p + CONTEXT + 1] for p in places])
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[:, :CONTEXT]), data[:, CONTEXT])
        loss.backward()
        optimizer.step()
        milliseconds.append((time.perf_counter() - begin) * 1e3)

        mean = loss.detach().double()
        torch.distributed.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item() / ranks:.9f}")
    if rank == 0:
        print(f"step time: {sorted(milliseconds)[steps // 2]:.3f} ms")
        if weights:
            with open(weights, "wb") as file:
                for p in model.parameters():
                    file.write(bytes(p.detach().double().contiguous().flatten().numpy()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main():
    if not 2 <= len(sys.argv) <= 5 or not sys.argv[1].isdigit():
        sys.exit(__doc__)
    arguments = dict(enumerate(sys.argv))
    ranks = int(arguments[1])
    with tempfile.TemporaryDirectory() as folder:
        job = (ranks, os.path.join(folder, "meeting"), int(arguments.get(2, 20)), arguments.get(3, "README.md"), arguments.get(4))
        torch.multiprocessing.spawn(train, job, ranks)


if __name__ == "__main__":
    main()
