# SPDX-License-Identifier: BSL-1.0
"""The adapter for the tests of Stanford's course CS336, assignment 2: its adapters.py can import these three."""
import functools

import gradsync_torch as gs
import torch

comm = functools.cache(gs.Comm)  # the ranks of torch.distributed


class get_ddp(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.forward = module, module.__call__
        self.sync = gs.Reducer(comm().duplicate(), module)
        self.sync.broadcast_parameters()
        self.finish_gradient_synchronization = self.sync.finish


class get_sharded_optimizer(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **kwargs):
        self.parts, self.make = [], functools.partial(optimizer_cls, **kwargs)
        super().__init__(params, kwargs)

    def add_param_group(self, group):
        super().add_param_group(group)
        sync = gs.ShardedOptimizer(comm().duplicate(), self.param_groups[-1]["params"])
        self.parts.append((sync, self.make(sync.shards())))

    def step(self, closure=None):
        loss = closure() if closure else None
        for group, (sync, own) in zip(self.param_groups, self.parts):
            sync.finish()
            own.param_groups[0].update({key: value for key, value in group.items() if key != "params"})
            own.step()
            sync.stepped()
        return loss


class get_fsdp(torch.nn.Module):
    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, self.forward, self.averaged = module, module.__call__, False
        masters = {name: p.detach().clone() for name, p in module.named_parameters()}
        leaves = {name: leaf for name, leaf in module.named_modules() if not list(leaf.children()) and list(leaf.parameters())}
        torch.nn.ModuleList(leaf for leaf in leaves.values() if leaf.weight.ndim > 1).to(dtype=compute_dtype)
        self.sync = gs.FullyShard(comm().duplicate(), module, list(leaves))
        self.sync.load_state_dict(masters)
        self.shards = {name: s if p.requires_grad else p for (name, p), s in zip(module.named_parameters(), self.sync.shards())}
        self.named_parameters = module.named_parameters = lambda *_, **__: iter(self.shards.items())
        module.register_forward_pre_hook(lambda *_: self.publish())

    def finish_gradient_synchronization(self):
        self.sync.finish()
        self.averaged = True

    def publish(self):
        if self.averaged: self.sync.stepped()
        self.averaged = False

    def gather_full_params(self):
        self.publish()
        return {**self.shards, **self.sync.state_dict()}
