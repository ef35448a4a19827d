"""DeepSpeed around drafter and optimiser, and their state as plain tensors: whole, by name, the
same for every ZeRO stage and number of processes."""

import warnings

import torch
import torch.distributed as dist
from torch import nn

from infer.drafters.base import Drafter
from infer.targets.loading import resolve_dtype
from train.config import TrainConfig
from train.optim import has_bfloat16, make_optimizer


def compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of training's products: the drafter's, whose weights, gradients and moments
    are always float32, and on a CPU the target's too (`target_dtype`)."""
    name = config.optim.precision
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" or has_bfloat16() else "float32"
    return getattr(torch, name)


def target_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the frozen target in training's passes. Decoding's is `target.dtype`,
    float32 on a CPU where that is auto: what an evaluation writes is exact."""
    if config.target.dtype == "auto" and device.type == "cpu" and not config.target.shard:
        return compute_dtype(config, device)
    return resolve_dtype(config.target.dtype, device)


def compiles(config: TrainConfig, cuda: bool) -> bool:
    """Return whether the drafter's training pass is compiled."""
    return bool(config.compile) or (config.compile is None and cuda and config.deepspeed.stage < 3)


def micro_batch(config: TrainConfig, world: int) -> tuple[int, int]:
    """Return (rows of a process's pass, passes of a step), such that `world` processes together
    take `optim.batch_size` rows a step.

    Raises ValueError where the rows cannot be shared evenly.
    """
    batch = config.optim.batch_size
    micro = config.optim.micro_batch_size
    each = batch // world
    if batch % world or each % (micro or each):
        raise ValueError(
            f"optim.batch_size={batch} rows a step cannot be shared evenly by {world} processes"
            + (f" in passes of optim.micro_batch_size={micro} rows" if micro else "")
            + f": choose a multiple of {world * (micro or 1)}"
        )
    return micro or each, each // (micro or each)


def build_engine(drafter: Drafter, config: TrainConfig, device: torch.device):
    """Put DeepSpeed around drafter and optimiser. The target stays outside, because it has no
    training state."""
    import deepspeed

    rows, passes = micro_batch(config, dist.get_world_size())
    drafter.to(device)
    drafter.recompute = bool(config.gradient_checkpointing)
    model = drafter
    if compiles(config, device.type == "cuda"):
        # a module around the drafter: DeepSpeed adds its hooks to that one, and they cannot be
        # compiled
        model = torch.compile(drafter, dynamic=False)
    kind = compute_dtype(config, device)
    if kind != torch.float32:  # the norms' weights are float32 on purpose
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    zero: dict = {"stage": config.deepspeed.stage}
    if config.deepspeed.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(drafter, config.optim),
        config={
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": passes,
            "gradient_clipping": config.optim.max_grad_norm,
            "torch_autocast": {
                "enabled": kind != torch.float32,
                "dtype": str(kind).removeprefix("torch."),
            },
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        },
    )
    return engine


def take_step(engine) -> torch.Tensor:
    """Take the optimiser's step after a backward pass, if that was the step's last. Return the
    gradient's norm before clipping, () (NaN where there was no step). Where the norm is not finite,
    weights and moments stay as they were, in all processes."""
    no_step = torch.tensor(float("nan"))
    if not engine.is_gradient_accumulation_boundary():
        engine.step()
        return no_step

    if engine.zero_optimization_stage() > 0:
        engine.step()  # with sharded states DeepSpeed itself skips a step
        norm = engine.get_global_grad_norm()
        return no_step if engine.optimizer.overflow or norm is None else torch.as_tensor(norm)

    gradients = [
        parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None
    ]
    norm = torch.nn.utils.get_total_norm(gradients)
    if not torch.isfinite(norm):
        engine.zero_grad()
        engine.set_gradient_accumulation_boundary(
            False
        )  # the engine counts the pass, and that is all
    engine.step()
    engine.set_gradient_accumulation_boundary(None)  # by the number of passes, as before
    return norm


def _flats(engine) -> list[torch.Tensor]:
    """Return the parameters that a sharded optimiser itself sees: this process's shares of the
    drafter's, in one piece."""
    if engine.zero_optimization_stage() == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return [
        parameter for group in engine.basic_optimizer.param_groups for parameter in group["params"]
    ]


def _link(engine) -> None:
    """Tell DeepSpeed where in its flat shares the moments of each parameter lie. It does so itself
    after the first group of parameters was stepped for the first time: too early for the other
    groups."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    zero = engine.optimizer
    if engine.zero_optimization_stage() in (1, 2):
        for group, flat in zip(
            zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True
        ):
            lazy_init_hp_params_optimizer_state(group, flat, engine.basic_optimizer.state)


def plain_state(model: nn.Module, moments: dict) -> dict[str, torch.Tensor]:
    """Return every weight (its name) and what an unsharded optimiser keeps of it (name/exp_avg,
    ..., name/step), all float32 on the host, and buffers; `moments` is the optimiser's state."""
    state = dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        state[name] = parameter.detach()
        state |= {
            f"{name}/{key}": value for key, value in moments.get(parameter, {}).items()
        }  # none if frozen
    return copied(state)


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of tensors on the host, float32; of whole numbers as they are."""
    kinds = {
        name: torch.float32 if value.is_floating_point() else value.dtype
        for name, value in state.items()
    }
    return {name: value.to("cpu", kinds[name], copy=True) for name, value in state.items()}


def restore_moments(model: nn.Module, moments: dict, state: dict[str, torch.Tensor]) -> None:
    """Give an unsharded optimiser what `plain_state` took from another one; weights are left
    alone."""
    named = dict(model.named_parameters())
    for name, value in state.items():
        if "/" in name:
            owner, key = name.split("/")
            moments[named[owner]][key] = (
                value if value.ndim == 0 else value.to(named[owner].device)
            ).clone()


def training_state(drafter: Drafter, engine) -> dict[str, torch.Tensor]:
    """Return the state of `plain_state`, whole whatever the ZeRO stage: in the first process,
    nothing in the others. All processes call it together; engine: the one around the drafter."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    first = dist.get_rank() == 0
    moments = engine.basic_optimizer.state
    if engine.zero_optimization_stage() == 0:
        return plain_state(drafter, moments) if first else {}
    _link(engine)
    common = moments[
        _flats(engine)[0]
    ]  # every process's share has the same keys, and is in the same step
    state = copied(dict(drafter.named_buffers())) if first else {}
    for name, parameter in drafter.named_parameters():
        whole = {name: safe_get_full_fp32_param(parameter)}
        for key, value in common.items():
            whole[f"{name}/{key}"] = (
                value if value.ndim == 0 else safe_get_full_optimizer_state(parameter, key)
            )
        if first:
            state |= copied(whole)  # at once: the next parameter's take its place
    return state


def restore(drafter: Drafter, engine, state: dict[str, torch.Tensor]) -> None:
    """Give a fresh engine around a drafter of the same weights what `training_state` took from
    another one, sharded or not."""
    from deepspeed.utils import safe_set_full_optimizer_state

    moments = engine.basic_optimizer.state
    if engine.zero_optimization_stage() == 0:
        restore_moments(drafter, moments, state)
        return
    named = dict(drafter.named_parameters())
    known = {name: value for name, value in state.items() if "/" in name}
    of_first = f"{next(iter(named))}/"
    some = {
        name.removeprefix(of_first): value
        for name, value in known.items()
        if name.startswith(of_first)
    }
    for flat in _flats(engine):
        for key, value in some.items():
            moments[flat][key] = value.clone() if value.ndim == 0 else torch.zeros_like(flat)
    _link(engine)
    for name, value in known.items():
        owner, key = name.split("/")
        if value.ndim:
            safe_set_full_optimizer_state(named[owner], value.to(engine.device), key)
