"""Gradient buffers and the distributed optimizer: Megatron's, with an AdamW that needs neither apex nor Transformer Engine.

Import this only where the platform has prepared the process for Megatron (`Platform.before_megatron`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from rlcli.config.schema import OptimConfig
from rlcli.engines import grads


class FusedAdam(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) by torch's fused kernel, with the state that apex's FusedAdam keeps.

    That is: the step count stands in the parameter group, not with each parameter. Megatron's DistributedOptimizer saves and
    loads its state right only so.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **unused: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._step_group(group, params)

    def _step_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param].update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        states = [self.state[param] for param in params]
        steps = torch.full((len(params),), float(group["step"]), dtype=torch.float32, device=params[0].device)
        torch._fused_adamw_(
            params,
            [param.grad for param in params],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            list(steps),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


class Trainer:
    """A model with float32 gradients summed over data parallel ranks, and its AdamW, sharded over them.

    Weight decay acts on every matrix, the embedding included, and on no norm or bias: Megatron's own rule. With bfloat16
    weights the optimizer works on float32 master copies.
    """

    def __init__(self, model: torch.nn.Module, optim: OptimConfig, dtype: torch.dtype) -> None:
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        self.model = DistributedDataParallel(model.config, ddp, model)
        self.params = list(self.model.parameters())
        for param in self.params:
            param.register_post_accumulate_grad_hook(grads.take)
        self.weight_decay, self.clip = optim.weight_decay, optim.clip_grad
        config = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=optim.min_lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_eps=optim.eps,
            clip_grad=optim.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(config, [self.model])
        self.reset_decay()
        if self.model.dp_cp_group.size() == 1:
            leave_out_collectives(self.model)

    def reset_decay(self) -> None:
        """Set each group's decay from the settings: after a start, and after a load, which brings what the checkpoint had."""
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.weight_decay * group["wd_mult"]

    def zero_grad(self) -> None:
        """Begin an update."""
        for param in self.params:
            grads.start(param)
        self.optimizer.zero_grad()

    def reduce_grads(self, whole: bool = False) -> None:
        """Sum gradients over data parallel ranks, tied embeddings and what tensor ranks share. whole: every rank gets all of them, not its shard."""
        for param in self.params:
            grads.finish(param)
        finalize_model_grads([self.model], None, force_all_reduce=whole)

    def grad_norm(self) -> float:
        """Norm of the whole gradient over all ranks, the same on each; not finite if any part is not."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def step(self, lr: float, norm: float) -> None:
        """Clip to the largest norm allowed and update with learning rate `lr`; every rank ends with the same weights."""
        if not math.isfinite(norm):
            raise ValueError(f"gradient norm {norm}: nothing can be learnt from it")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        coefficient = self.clip / (norm + 1e-6) if self.clip > 0 else 1.0
        if coefficient < 1:
            torch._foreach_mul_([param.grad for param in self.optimizer.chained_optimizers[0].get_parameters()], coefficient)
        self.optimizer.step_with_ready_grads()


def leave_out_collectives(model: DistributedDataParallel) -> None:
    """Without a second data parallel rank nothing is to be exchanged, but gloo would still copy all gradients and weights several times."""
    for bucket_group in model.bucket_groups:
        bucket_group.start_grad_sync = bucket_group.start_param_sync = nothing


def nothing(*args: Any, **kwargs: Any) -> None: ...
