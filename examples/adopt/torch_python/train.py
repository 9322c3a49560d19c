#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""A torch.nn.Module, trained on 2 processes with each face of gradsync_torch and with course.py, and compared with one process.

train.py [FOLDER]    the folder of gradsync_torch.so, if it is not installed
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
import torch.distributed as dist
from torch import nn

RANKS, STEPS, WIDTH = 2, 6, 64
FACES = ["reducer", "parts", "optimizer", "parameters", "fully"]
COURSE = ["ddp", "sharded_optimizer", "fsdp"]


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


def train_alone(max_norm):
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
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
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
    model, losses, second = Net(), [], None
    names = [name for name, _ in model.named_parameters()]
    wait_for_thread(comm.rank, face)
    replicated = face in ("reducer", "parts")
    if replicated:
        if face == "reducer":
            sync = gs.Reducer(comm, model)
        else:  # of the parameters that a generator yields, and of named ones
            sync = gs.Reducer(comm, model.blocks.parameters())
            second = gs.Reducer(comm.duplicate(), [*model.embedding.named_parameters("in"), *model.head.named_parameters("out")])
            second.broadcast_parameters()
        sync.broadcast_parameters()
        optimizer = optimizer_of(model.parameters())
    else:
        trained = model.parameters() if face == "parameters" else model
        sync = gs.FullyShard(comm, model, UNITS) if face == "fully" else gs.ShardedOptimizer(comm, trained)
        optimizer = optimizer_of(sync.shards())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, comm.rank)
        loss.backward()
        sync.finish()
        if second:
            second.finish()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            sync.clip_grad_norm_(1.0)
        optimizer.step()
        if not replicated:
            sync.stepped()
        losses.append(loss.item())
    if replicated:
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
    return losses, {name: weights[str(i) if face == "parameters" else name] for i, name in enumerate(names)}


def train_course(face):
    """The same with the course's functions, without clipping."""
    import course

    torch.manual_seed(dist.get_rank())
    module, losses, synchronised = Net(), [], None
    model = module
    if face == "sharded_optimizer":
        optimizer = course.get_sharded_optimizer(nn.ModuleList([module.embedding, module.blocks]).parameters(), torch.optim.Adam, lr=1.0)
        optimizer.add_param_group({"params": module.head.parameters(), "lr": 0.01})
        optimizer.param_groups[0]["lr"] = 0.01  # as a schedule does it
    else:
        model = synchronised = course.get_ddp(module) if face == "ddp" else course.get_fsdp(module)
        optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        if synchronised:
            synchronised.finish_gradient_synchronization()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.gather_full_params() if face == "fsdp" else {name: p.detach().clone() for name, p in module.named_parameters()}


def check_errors():
    """Wrong input is told apart before anything is sent."""
    import gradsync_torch as gs

    comm, model = gs.Comm(), nn.Linear(2, 2)
    a, b = model.parameters()
    read = model.parameters()
    list(read)
    for face in (gs.Reducer, gs.ShardedOptimizer):
        for wrong, kind, sentence in (
            ([], ValueError, "there are no parameters"),
            (read, ValueError, "a generator that was read before"),
            (a, TypeError, "pass a module, or a list of parameters or of pairs (name, parameter), not a Parameter"),
            (None, TypeError, "not a NoneType"),
            ([a, "weight"], TypeError, "item 1 of the list holds a str"),
            (dict(model.named_parameters()), TypeError, "item 0 of the list holds a str"),
            ([("weight", None)], TypeError, "item 0 of the list holds a NoneType"),
            ([{"params": [a]}], TypeError, "group['params']"),
            ([a, b, a], ValueError, "parameter '2' is the same tensor as '0'; list it once"),
            ([("w", a), ("w", b)], ValueError, "two parameters are called 'w'"),
            ([2 * a], ValueError, "pass a leaf"),
        ):
            expect(kind, sentence, lambda: face(comm, wrong))
    expect(TypeError, "pass a module", lambda: gs.FullyShard(comm, [a, b], []))
    expect(ValueError, "is it the name of a submodule?", lambda: gs.FullyShard(comm, model, ["block"]))


def check_environment():
    """Without RANK, it is an error to name a place to meet; the ranks of torch.distributed are found."""
    import gradsync_torch as gs

    rank, _ = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    expect(ValueError, "RANK and WORLD_SIZE are not", gs.Comm)
    dist.init_process_group("gloo", rank=int(rank), world_size=RANKS)  # it listens at MASTER_PORT
    comm = gs.Comm()
    assert (comm.rank, comm.size) == (int(rank), RANKS)


def expect(kind, sentence, call):
    try:
        call()
    except kind as error:
        assert sentence in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} with '{sentence}'")


def free_port():
    """A port that is free, as is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", 0))
                second.bind(("127.0.0.1", first.getsockname()[1] + 1))
                return first.getsockname()[1]
            except (OSError, OverflowError):
                pass


def compare(rank, face, found, expected):
    losses, weights = found
    if rank == 0:
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-5), (face, losses, expected[0])
    for name, w in expected[1].items():
        assert torch.allclose(weights[name], w, rtol=1e-4, atol=1e-5), (face, name, (weights[name] - w).abs().max())
    print(f"rank {rank}: {face}: loss {losses[0]:.6f} to {losses[-1]:.6f}, as in one process")


def main():
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    sys.path[:0] = sys.argv[1:]
    if "RANK" not in os.environ:
        job = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with tempfile.TemporaryDirectory() as job["MEETING"]:
            ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**job, "RANK": str(r)}) for r in range(RANKS)]
            sys.exit(max(rank.wait() for rank in ranks))
    rank, expected = int(os.environ["RANK"]), train_alone(1.0)
    for face in FACES:
        compare(rank, face, train_rank(face), expected)
    check_errors()
    check_environment()
    expected = train_alone(math.inf)
    for face in COURSE:
        compare(rank, f"course.get_{face}", train_course(face), expected)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
