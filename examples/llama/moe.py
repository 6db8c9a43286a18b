"""A mixture of experts in place of a block's feed-forward, with experts spread over ranks.

Each token goes to its `top_k` experts. With expert parallelism a rank has every ep-th part of the
experts: tokens are dispatched to them and their outputs are combined by all_to_all. Without a
capacity no token is dropped, and how many a rank gets is known only when the router has chosen.
With one, every expert takes the same number of rows from each rank; what is beyond it is dropped.

Dimensions, as suffixes: T tokens of this rank, D hidden, E experts, K choices of a token, R rows
(one for each choice) in the order of their experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from config import ModelConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        out_BLD: Tensor = self.down(F.silu(self.gate(x_BLD)) * self.up(x_BLD))
        return out_BLD


class Experts(nn.ModuleDict):
    """The experts of one rank, by their number in the whole model."""

    def forward(self, rows_RD: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows that are sorted by expert, `counts` of them for each."""
        parts = rows_RD.split(list(counts))
        outputs = [expert(part) for expert, part in zip(self.values(), parts, strict=True)]
        return torch.cat(outputs)


class MixtureOfExperts(nn.Module):
    """A router and this rank's experts."""

    group: ProcessGroup | None = None
    """Ranks that the experts are spread over; None: all of them are here."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = Experts({str(e): FeedForward(config) for e in range(config.experts)})

    def spread_over(self, group: ProcessGroup) -> None:
        """Keep this rank's part of the experts, which lie in the order of ranks."""
        self.group = group
        share = self.config.experts // group.size()
        first = group.rank() * share
        for expert in range(self.config.experts):
            if not first <= expert < first + share:
                del self.experts[str(expert)]

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_TD = x_BLD.flatten(0, -2)
        weights_TK, experts_TK = self._route(x_TD)
        experts_R, order_R = experts_TK.flatten().sort(stable=True)
        counts_E = torch.bincount(experts_R, minlength=self.config.experts)
        tokens_R = order_R // self.config.top_k
        rows_RD = x_TD[tokens_R]
        if self.config.capacity_factor:
            outputs_RD = self._limited(rows_RD, experts_R, counts_E)
        else:
            outputs_RD = self._dropless(rows_RD, counts_E)
        weighted_RD = outputs_RD * weights_TK.flatten()[order_R, None].to(outputs_RD.dtype)
        out_TD = torch.zeros_like(x_TD).index_add(0, tokens_R, weighted_RD)
        return out_TD.view_as(x_BLD)

    def _route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, which add up to 1, and numbers of each token's experts."""
        scores_TE = self.router(x_TD).float().softmax(dim=-1)
        chosen_TK, experts_TK = torch.topk(scores_TE, self.config.top_k, dim=-1)
        if self.config.force_balance and self.group is not None:
            forced_TK = forced_choice(len(x_TD), self.config, self.group.size())
            experts_TK = forced_TK.to(x_TD.device)
            chosen_TK = scores_TE.gather(1, experts_TK)
        return chosen_TK / chosen_TK.sum(dim=-1, keepdim=True), experts_TK

    def _dropless(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Every row through its expert, wherever that is."""
        if self.group is None:
            out_RD: Tensor = self.experts(rows_RD, counts_E.tolist())
            return out_RD
        ranks = self.group.size()
        # From each rank, for each expert that is here.
        received = torch.empty_like(counts_E)
        dist.all_to_all_single(received, counts_E, group=self.group)
        sent = counts_E.view(ranks, -1).sum(1).tolist()
        arriving = received.view(ranks, -1).sum(1).tolist()
        arrived = all_to_all(rows_RD, arriving, sent, self.group)
        # They come by rank, and by expert from each.
        local = torch.arange(len(self.experts), device=received.device).repeat(ranks)
        by_expert = local.repeat_interleave(received, output_size=len(arrived)).argsort(stable=True)
        counts = received.view(ranks, -1).sum(0).tolist()
        outputs = self.experts(arrived[by_expert], counts)
        returning = torch.zeros_like(outputs).index_copy(0, by_expert, outputs)
        return all_to_all(returning, sent, arriving, self.group)

    def _limited(self, rows_RD: Tensor, experts_R: Tensor, counts_E: Tensor) -> Tensor:
        """As many rows of each expert as it takes; zeros for the others."""
        config = self.config
        capacity = math.ceil(config.capacity_factor * len(rows_RD) / config.experts)
        first_E = counts_E.cumsum(0) - counts_E
        place_R = torch.arange(len(rows_RD), device=rows_RD.device) - first_E[experts_R]
        kept_R = place_R < capacity
        # One place more takes what is dropped.
        dropped = config.experts * capacity
        place_R = torch.where(kept_R, experts_R * capacity + place_R, dropped)
        buffer = rows_RD.new_zeros(dropped + 1, rows_RD.shape[1])
        buffer = buffer.index_add(0, place_R, rows_RD)[:-1]
        if self.group is None:
            outputs = self.experts(buffer, [capacity] * config.experts)
        else:
            ranks, here = self.group.size(), len(self.experts)
            even = [here * capacity] * ranks
            arrived = all_to_all(buffer, even, even, self.group)
            by_expert = arrived.view(ranks, here, capacity, -1).transpose(0, 1).flatten(0, 2)
            outputs = self.experts(by_expert, [ranks * capacity] * here)
            returning = outputs.view(here, ranks, capacity, -1).transpose(0, 1).flatten(0, 2)
            outputs = all_to_all(returning, even, even, self.group)
        return F.pad(outputs, (0, 0, 0, 1))[place_R]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        group: ProcessGroup,
    ) -> Tensor:
        ctx.back = input_splits, output_splits, group
        received = rows.new_empty(sum(output_splits), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), output_splits, input_splits, group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(gradients[0], *ctx.back), None, None, None


def all_to_all(
    rows: Tensor, output_splits: list[int], input_splits: list[int], group: ProcessGroup
) -> Tensor:
    """`input_splits` rows go to each rank, `output_splits` come; gradients go the way back."""
    out: Tensor = _AllToAll.apply(rows, output_splits, input_splits, group)
    return out


@cache
def forced_choice(tokens: int, config: ModelConfig, ranks: int) -> Tensor:
    """Experts of each token, (tokens, top_k), whatever a router would say.

    The experts of the first of `ranks` get `force_balance` times an equal share, and the others the
    rest, alike.
    """
    rows = tokens * config.top_k
    share_E = torch.full((config.experts,), rows / config.experts, dtype=torch.float64)
    hot = config.experts // ranks
    share_E[:hot] *= config.force_balance
    share_E[hot:] *= (ranks - config.force_balance) / max(ranks - 1, 1)
    upto_E = share_E.cumsum(0).round().long()
    counts_E = torch.diff(upto_E, prepend=upto_E.new_zeros(1))
    # Dealt to one token after another: no token gets an expert twice whose rows are no more than
    # there are tokens.
    dealt = torch.arange(config.experts).repeat_interleave(counts_E, output_size=rows)
    return dealt.view(config.top_k, tokens).T
