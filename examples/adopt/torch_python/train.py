#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""A torch.nn.Module, trained on 2 processes with each face of gradsync_torch, and compared with one process.

train.py FOLDER    the folder of gradsync_torch.so
"""

import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time

import torch
from torch import nn

RANKS, STEPS, WIDTH = 2, 6, 64
FACES = ["reducer", "optimizer", "fully"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


UNITS = ["blocks.0", "blocks.1", "blocks.2", "head"]


def loss_of(model, step, rank):
    tokens = (torch.arange(4 * 17).view(4, 17) * 7 + 13 * rank + step) % 50
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def train_alone():
    """The losses of rank 0 and the weights: the mean of the ranks' gradients, in one process."""
    torch.manual_seed(0)
    model, losses = Net(), []
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            loss = loss_of(model, step, rank)
            loss.backward()
            losses += [loss.item()] if rank == 0 else []
        for p in model.parameters():
            p.grad /= RANKS
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def wait_for_thread(rank, face):
    """Rank 1 starts when a thread of rank 0 says so. Rank 0 waits for rank 1 meanwhile, and must let the thread run."""
    path = os.path.join(os.environ["MEETING"], face)
    if rank == 0:
        threading.Timer(0.1, lambda: open(path, "w").close()).start()
    while rank != 0 and not os.path.exists(path):
        time.sleep(0.01)


def train_rank(face):
    """This rank's losses, and the weights."""
    import gradsync_torch as gs

    comm = gs.Comm()
    torch.manual_seed(comm.rank)  # rank 0's weights count
    model, losses = Net(), []
    wait_for_thread(comm.rank, face)
    if face == "reducer":
        sync = gs.Reducer(comm, model)
        sync.broadcast_parameters()
        optimizer = optimizer_of(model.parameters())
    else:
        sync = gs.ShardedOptimizer(comm, model) if face == "optimizer" else gs.FullyShard(comm, model, UNITS)
        optimizer = optimizer_of(sync.shards())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, comm.rank)
        loss.backward()
        sync.finish()
        sync.clip_grad_norm_(1.0)
        optimizer.step()
        if face != "reducer":
            sync.stepped()
        losses.append(loss.item())
    if face == "reducer":
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}
    whole = 4 * sum(p.numel() for p in model.parameters())
    memory = sync.memory()
    print(f"rank {comm.rank}: {face}: bytes {memory}, of {whole} for whole weights")
    assert memory["master_weights"] < whole / RANKS + 4096
    weights = sync.state_dict()
    with torch.no_grad():  # back to the start and here again: what is loaded is what is computed with
        sync.load_state_dict({name: torch.zeros_like(w) for name, w in weights.items()})
        assert abs(loss_of(model, 0, 0).item() - math.log(50)) < 1e-5  # all outputs are zero
        sync.load_state_dict(weights)
    return losses, weights


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    sys.path.insert(0, sys.argv[1])
    expected_losses, expected = train_alone()
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            job = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        with tempfile.TemporaryDirectory() as job["MEETING"]:
            ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**job, "RANK": str(r)}) for r in range(RANKS)]
            sys.exit(max(rank.wait() for rank in ranks))
    for face in FACES:
        losses, weights = train_rank(face)
        if os.environ["RANK"] == "0":
            assert torch.allclose(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-5), (face, losses, expected_losses)
        for name, w in expected.items():
            assert torch.allclose(weights[name], w, rtol=1e-4, atol=1e-5), (face, name, (weights[name] - w).abs().max())
        print(f"rank {os.environ['RANK']}: {face}: loss {losses[0]:.6f} to {losses[-1]:.6f}, as in one process")


if __name__ == "__main__":
    main()
