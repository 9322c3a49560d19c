# SPDX-License-Identifier: BSL-1.0
"""The models of examples/transformer.hpp and examples/mlp.hpp in PyTorch, for torch_ddp.py and peers/torch_train_step.py.

A model reads rows of bytes and predicts the bytes after them. `context` is the length of a row, `sequences` the rows of a batch, and
`targets` the number of bytes that it predicts of each row: those after every prefix, or only the last one.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


def attend_by_hand(q, k, v, future):
    weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf).softmax(-1)
    return weights @ v


def attend(q, k, v, future):
    if not hasattr(F, "scaled_dot_product_attention"):  # before PyTorch 2.0
        return attend_by_hand(q, k, v, future)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


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
        return self.output(self.norm(h)).reshape(-1, 256)


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
    return F.cross_entropy(net(text[:, :-1]), text[:, text.shape[1] - model.targets :].reshape(-1))


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
