"""Tensor, sequence and data parallelism of one model part, and what they need around a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from config import Layout, TrainConfig
from model import Llama
from moe import MixtureOfExperts
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from weights import materialize

Axes = Mapping[str, DeviceMesh]
"""Each axis of the job's mesh, by name."""
LossFn = Callable[[Tensor, Tensor], Tensor]


def build_mesh(layout: Layout, device_type: str) -> Axes:
    """The job's ranks on named axes; tp varies fastest, so that it stays inside a node.

    With expert parallelism dp is two axes as well: ep, over which experts are spread, and edp,
    along which ranks have the same ones.
    """
    shape = (layout.pp, layout.dp, layout.tp)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("pp", "dp", "tp"))
    axes = {name: mesh[name] for name in ("pp", "dp", "tp")}
    if layout.dp > 1 and layout.tp > 1:
        # Lets DTensor reduce a gradient norm over both axes at once.
        mesh["dp", "tp"]._flatten()
    if layout.ep > 1:
        of_experts = mesh._unflatten("dp", (layout.dp // layout.ep, layout.ep), ("edp", "ep"))
        axes |= {name: of_experts[name] for name in ("edp", "ep")}
    return axes


def build_model(config: TrainConfig, mesh: Axes, device: torch.device, layers: range) -> nn.Module:
    """The model part with `layers`, of which this rank allocates only its own shards."""
    layout = config.layout
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    use_fsdp = layout.dp > 1 and layout.dp_mode == "fsdp2"
    # FSDP2 casts parameters when it gathers them; other layouts cast them at each use.
    autocast = dtype != torch.float32 and not use_fsdp
    with torch.device("meta"):
        model = Llama(
            config.model, layers=layers, seq_len=config.seq_len, dtype=dtype, autocast=autocast
        )
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh["tp"], sequence_parallel=layout.sequence_parallel)
    if layout.ep > 1:
        for block in model.layers.values():
            block.ffn.spread_over(mesh["ep"].get_group())
    if use_fsdp:
        # A pipeline would gather again for every microbatch, so it keeps parameters gathered.
        apply_fsdp(model, mesh, dtype, reshard_after_forward=layout.pp == 1)
    materialize(model, device, config.seed)
    if layout.dp > 1 and layout.dp_mode == "ddp":
        return DistributedDataParallel(model, device_mesh=mesh["dp"])
    return model


class ReplicatedNorm(ParallelStyle):
    """Replicate a norm over the tp axis.

    Tensor-parallel optimizers and gradient clipping want every parameter on one mesh, so the
    norm's weight becomes a DTensor too even though its computation is the same on all ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def to_dtensor(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
            return DTensor.from_local(inputs[0], device_mesh, (Replicate(),), run_check=False)

        module.register_forward_pre_hook(to_dtensor)
        return distribute_module(module, device_mesh)


def apply_tensor_parallel(model: Llama, tp: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shard heads, feed-forward and vocabulary; residuals too with `sequence_parallel`."""
    residual = Shard(1) if sequence_parallel else Replicate()
    norm: ParallelStyle = SequenceParallel() if sequence_parallel else ReplicatedNorm()
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=residual)
    block_plan = {
        "attention_norm": norm,
        # One redistribution at the entry serves wq, wk and wv (gate and up) together.
        "attention": PrepareModuleInput(
            input_layouts=(residual, None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.wq": column,
        "attention.wk": column,
        "attention.wv": column,
        "attention.wo": row,
        "ffn_norm": norm,
        "ffn": PrepareModuleInput(input_layouts=residual, desired_input_layouts=Replicate()),
        "ffn.gate": column,
        "ffn.up": column,
        "ffn.down": row,
    }
    for block in model.layers.values():
        parallelize_module(block, tp, block_plan)
    if model.embed is not None:
        embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=residual)
        parallelize_module(model, tp, {"embed": embed})
    if model.head is not None:
        # Logits stay sharded by vocabulary; the loss works on them so.
        head = ColwiseParallel(input_layouts=residual)
        parallelize_module(model, tp, {"norm": norm, "head": head})


def apply_fsdp(
    model: Llama, mesh: Axes, dtype: torch.dtype, *, reshard_after_forward: bool
) -> None:
    """Shard each block, the embedding, and norm with head, over the dp axis; experts that are
    spread over ep ranks over the edp axis, on which they are alike."""
    dp = mesh["dp"]
    # With tp, modules return the local view of a DTensor; nothing here writes to it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Inputs are in `dtype` already, but for the RoPE table, which must stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shard = partial(fully_shard, mesh=dp, mp_policy=policy)
    if model.embed is not None:
        shard(model.embed, reshard_after_forward=reshard_after_forward)
    for block in model.layers.values():
        if "edp" in mesh:
            experts = block.ffn.experts
            fully_shard(
                experts,
                mesh=mesh["edp"],
                mp_policy=policy,
                reshard_after_forward=reshard_after_forward,
            )
            # Of the samples of the whole dp axis, too: they come by all_to_all.
            experts.set_gradient_divide_factor(dp.size())
            # gloo cannot sum with a factor. torch 2.13 divides twice where nobody sums.
            experts.set_force_sum_reduction_for_comms(mesh["edp"].size() > 1)
        shard(block, reshard_after_forward=reshard_after_forward)
    if model.norm is not None and model.head is not None:
        # Backward begins with these: to reshard them would only gather them again at once.
        shard([model.norm, model.head], reshard_after_forward=False)
    shard(model)


def build_loss(mesh: Axes) -> LossFn:
    """Mean cross-entropy of logits (B, L, V) against labels (B, L), V sharded over tp."""
    tp = mesh["tp"]

    def loss_fn(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
        logits, labels = logits_BLV.flatten(0, 1).float(), labels_BL.flatten()
        if tp.size() == 1:
            return F.cross_entropy(logits, labels)
        sharded = DTensor.from_local(logits, tp, (Shard(1),), run_check=False)
        loss = F.cross_entropy(sharded, labels)
        assert isinstance(loss, DTensor)
        return loss.to_local()

    return loss_fn


def loss_context(layout: Layout) -> AbstractContextManager[None]:
    """What forward *and* backward of a vocabulary-parallel loss must run in."""
    return loss_parallel() if layout.tp > 1 else nullcontext()


@contextmanager
def gradient_sync(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Reduce gradients over dp in this microbatch's backward only if `enabled`."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
    with (
        model.no_sync()
        if isinstance(model, DistributedDataParallel) and not enabled
        else nullcontext()
    ):
        yield


class GradientAccumulation:
    """Runs a step's microbatches one after the other through the whole model."""

    def __init__(
        self, config: TrainConfig, mesh: Axes, device: torch.device, loss_fn: LossFn
    ) -> None:
        self.model = build_model(config, mesh, device, range(config.model.layers))
        self.parts = [self.model]
        self._microbatches = config.microbatches
        self._loss_fn = loss_fn

    def forward_backward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Accumulate the gradients of one step's samples; returns their mean loss."""
        losses = []
        microbatches = zip(
            tokens.chunk(self._microbatches), labels.chunk(self._microbatches), strict=True
        )
        for index, (tokens_BL, labels_BL) in enumerate(microbatches, start=1):
            with gradient_sync(self.model, enabled=index == self._microbatches):
                loss = self._loss_fn(self.model(tokens_BL), labels_BL) / self._microbatches
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()


def split_experts(parts: Iterable[nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters that are alike, or sharded, over dp, and those of experts that are spread over
    ep: nothing can be computed on tensors of both meshes at once."""
    modules = [module for part in parts for module in part.modules()]
    spread = [m.experts for m in modules if isinstance(m, MixtureOfExperts) and m.group]
    experts = [p for module in spread for p in module.parameters()]
    ids = {id(p) for p in experts}
    return [p for part in parts for p in part.parameters() if id(p) not in ids], experts


def clip_grad_norm(
    parameter_groups: Sequence[Sequence[Tensor]], max_norm: float, mesh: Axes
) -> Tensor:
    """Clip to the norm of the whole model's gradient, over tp, dp, ep and pp; returns that norm.

    `parameter_groups`: those alike over dp, then those of experts that are spread over ep."""
    norms = [_total_norm(parameters) for parameters in parameter_groups]
    norm = norms[0]
    if parameter_groups[1]:
        squared = norms[1].square()
        dist.all_reduce(squared, group=mesh["ep"].get_group())
        norm = (norm.square() + squared).sqrt()
    if mesh["pp"].size() > 1:
        squared = norm.square()
        dist.all_reduce(squared, group=mesh["pp"].get_group())
        norm = squared.sqrt()
    for parameters in parameter_groups:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _total_norm(parameters: Iterable[Tensor]) -> Tensor:
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
