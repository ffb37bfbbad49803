"""Adam over a model's parameters, and its state by parameter name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from switchhead.train.config import TrainingConfig
from switchhead.train.distributed import sharded_like, whole_on_first


def make_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """Fused AdamW; the paper's Adam where `weight_decay` is 0."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas, eps=training.eps, fused=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """State as `PARAMETER.KEY`, shards put together on rank 0; every rank has to ask."""
    return {
        f"{name}.{key}": whole_on_first(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave, whatever shards it was made of."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        name, key = full_name.rsplit(".", 1)
        by_name.setdefault(name, {})[key] = value
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        i: {key: sharded_like(value, p) if value.ndim else value for key, value in by_name[names[p]].items()}
        for i, p in enumerate(parameters)
        if names[p] in by_name
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
