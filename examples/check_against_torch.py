#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Repeats in PyTorch what `check_gradients --dump` did, from the same weights, and compares losses, gradients and AdamW steps.

usage: check_against_torch.py CHECK_GRADIENTS_PROGRAM      exit code 77: PyTorch is not installed
"""
import json
import math
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    print("skipped: no PyTorch for " + sys.executable + " (Debian: apt-get install python3-torch)")
    sys.exit(77)


def mlp(p, x):
    x = F.embedding(x, p["embedding.weight"]).flatten(1)
    last = max(int(name.split(".")[1]) for name in p if name.startswith("layers"))
    for i in range(last + 1):
        x = F.linear(x, p[f"layers.{i}.weight"], p[f"layers.{i}.bias"])
        if i < last:
            x = F.gelu(x)
    return x


def transformer(p, x, heads):
    n, t = x.shape
    d = p["embedding.weight"].shape[1]

    def linear(name, x):
        return F.linear(x, p[name + ".weight"], p[name + ".bias"])

    def norm(name, x):
        return F.layer_norm(x, (d,), p[name + ".weight"], p[name + ".bias"])

    def attention(name, x):
        q, k, v = linear(name + ".qkv", x).view(n, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
        future = torch.triu(torch.ones(t, t, dtype=torch.bool), 1)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(d // heads)).masked_fill(future, -math.inf).softmax(-1)
        return linear(name + ".projection", (weights @ v).transpose(1, 2).reshape(n, t, d))

    x = F.embedding(x, p["embedding.weight"]) + p["positions.weight"][:t]
    for i in range(sum(name.endswith("norm1.weight") for name in p)):
        x = x + attention(f"blocks.{i}.attention", norm(f"blocks.{i}.norm1", x))
        x = x + linear(f"blocks.{i}.mlp.contract", F.gelu(linear(f"blocks.{i}.mlp.expand", norm(f"blocks.{i}.norm2", x))))
    return F.linear(norm("norm", x), p.get("output.weight", p["embedding.weight"])).reshape(n * t, -1)


failures = 0


def compare(what, ours, theirs, limit):
    """The largest difference, relative to the tensor's largest element."""
    global failures
    ours = torch.tensor(ours, dtype=torch.float64).flatten()
    theirs = theirs.detach().double().flatten()
    error = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()
    if not error <= limit:
        failures += 1
        print(f"FAIL {what}: relative difference {error:.2e}, allowed {limit:.0e}")
    return error


def repeat(title, run, model):
    p = {q["name"]: torch.tensor(q["initial"], dtype=torch.float64).view(q["shape"]).requires_grad_() for q in run["parameters"]}
    matrices = [q for q in p.values() if q.dim() > 1]
    vectors = [q for q in p.values() if q.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=1e-2, betas=(0.9, 0.99), eps=1e-8)
    worst = {"loss": 0.0, "gradient": 0.0, "weights": 0.0}
    for step, batch in enumerate(run["batches"]):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(p, torch.tensor(batch["inputs"]).view(run["sequences"], run["length"])),
                               torch.tensor(batch["targets"]))
        loss.backward()
        worst["loss"] = max(worst["loss"], compare(f"{title}, loss of step {step}", [batch["loss"]], loss, 1e-5))
        if step == 0:
            for (name, q), gradient in zip(p.items(), run["gradients"]):
                worst["gradient"] = max(worst["gradient"], compare(f"{title}, gradient of {name}", gradient, q.grad, 1e-4))
        norm = torch.nn.utils.clip_grad_norm_(list(p.values()), 0.5)
        compare(f"{title}, norm of step {step}", [batch["norm"]], norm, 1e-4)
        optimizer.step()
    for (name, q), final in zip(p.items(), run["final"]):
        # Early Adam steps are nearly lr * sign(g): where a gradient is all rounding error, so is the step. Hence the mean.
        ours = torch.tensor(final, dtype=torch.float64).view(q.shape)
        error = ((ours - q).abs().mean() / q.abs().mean().clamp(min=1e-3)).item()
        worst["weights"] = max(worst["weights"], error)
        if not error <= 1e-3:
            compare(f"{title}, {name} after AdamW", final, q, 0)
    print(f"{title}: largest relative differences:", ", ".join(f"{k} {v:.1e}" for k, v in worst.items()))


with tempfile.NamedTemporaryFile(suffix=".json") as file:
    subprocess.run([sys.argv[1], "--dump", file.name], check=True)
    with open(file.name) as f:
        runs = json.load(f)
repeat("mlp", runs["mlp"], mlp)
repeat("transformer", runs["transformer"], lambda p, x: transformer(p, x, runs["heads"]))
repeat("tied transformer", runs["tied"], lambda p, x: transformer(p, x, runs["heads"]))
sys.exit(failures > 0)
