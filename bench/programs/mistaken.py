"""A pipeline of two stages, data and tensor parallel, in which one rank makes a mistake.

``mistaken.py KIND RANK STEP``; lines that a diagnosis should name are marked ``# KIND``.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

KIND, WHO, WHEN = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
STAGES, TENSOR, STEPS = 2, 4, 14


def main() -> None:
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = (STAGES, world // STAGES // TENSOR, TENSOR)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("pp", "dp", "tp"))
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    first = mesh.get_coordinate()[0] == 0
    other = rank + world // STAGES if first else rank - world // STAGES
    layer = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(STEPS):
        mistake = KIND if (rank, step) == (WHO, WHEN) else ""
        x = torch.ones(8, 64, device="cuda", requires_grad=True)
        if not first and mistake != "no_receive":
            dist.recv(x.data, other)  # no_receive
        y = layer(x)
        partial = y.detach().clone()
        if mistake != "crossed":
            dist.all_reduce(partial, group=tp)  # stuck dead crossed
            partial.sum().item()
        if mistake == "extra":
            dist.all_reduce(torch.ones(1, device="cuda"), group=tp)  # extra
        if first:
            dist.send(partial, other)
        else:
            y.sum().backward()
            dist.send(x.grad, other)
        if first:
            gradient = torch.empty_like(y)
            dist.recv(gradient, other)
            y.backward(gradient)
        weight, bias = layer.weight.grad, layer.bias.grad
        if mistake == "swapped":
            dist.all_reduce(bias, group=dp)
        if mistake == "size":
            weight = weight[:32].contiguous()
        if mistake == "other_call":
            parts = torch.empty(dp.size() * weight.numel(), device="cuda")
            dist.all_gather_into_tensor(parts, weight.view(-1), group=dp)  # other_call
        elif mistake == "other_group":
            dist.all_reduce(weight, group=tp)  # other_group
        elif mistake != "skipped":
            dist.all_reduce(weight, group=dp)  # skipped swapped size
        if mistake != "swapped":
            dist.all_reduce(bias, group=dp)
        weight.sum().item()
        if mistake == "crossed":
            dist.all_reduce(partial, group=tp)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
