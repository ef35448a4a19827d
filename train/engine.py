"""DeepSpeed around drafter and optimiser, and their state as plain tensors: whole, by name, the same for every ZeRO
stage and number of processes."""

import torch
import torch.distributed as dist

from infer.drafters.base import Drafter
from train.config import TrainConfig
from train.optim import make_optimizer


def compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """What the drafter's products are computed in; its weights, gradients and moments are float32 always."""
    name = config.optim.precision
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def micro_batch(config: TrainConfig, world: int) -> tuple[int, int]:
    """(rows of a process's pass, passes of a step), such that `world` processes together take `optim.batch` rows a
    step.

    Raises ValueError where the rows cannot be shared evenly.
    """
    batch, micro = config.optim.batch, config.optim.micro
    each = batch // world
    if batch % world or each % (micro or each):
        raise ValueError(
            f"optim.batch={batch} rows a step cannot be shared evenly by {world} processes"
            + (f" in passes of optim.micro={micro} rows" if micro else "")
            + f": choose a multiple of {world * (micro or 1)}"
        )
    return micro or each, each // (micro or each)


def build_engine(drafter: Drafter, config: TrainConfig, device: torch.device):
    """DeepSpeed around drafter and optimiser. The target stays outside: it has no training state."""
    import deepspeed

    rows, passes = micro_batch(config, dist.get_world_size())
    drafter.recompute = config.recompute
    if config.compile or (config.compile is None and device.type == "cuda" and config.deepspeed.stage < 3):
        drafter.compile(dynamic=False)
    kind = compute_dtype(config, device)
    zero: dict = {"stage": config.deepspeed.stage}
    if config.deepspeed.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(
        model=drafter.to(device),
        optimizer=make_optimizer(drafter, config.optim),
        config={
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": passes,
            "gradient_clipping": config.optim.clip,
            "torch_autocast": {"enabled": kind != torch.float32, "dtype": str(kind).removeprefix("torch.")},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        },
    )
    return engine


def take_step(engine) -> torch.Tensor:
    """After a backward pass: the optimiser's step, if it is the last pass of one. Returns the gradient's norm before
    clipping, () (NaN where there was no step). Where the norm is not finite, weights and moments stay as they were, in
    all processes: with sharded states DeepSpeed sees to it."""
    sharded, last = engine.zero_optimization_stage() > 0, engine.is_gradient_accumulation_boundary()
    norm, optimizer = None, engine.basic_optimizer
    if last and not sharded:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)  # DeepSpeed tells it of sharded gradients only
        if not torch.isfinite(norm):
            optimizer.step = lambda: None  # the engine counts the step and drops the gradients as ever
    engine.step()
    vars(optimizer).pop("step", None)
    if norm is None and not (sharded and last and engine.optimizer.overflow):
        norm = engine.get_global_grad_norm()
    return torch.as_tensor(float("nan") if norm is None else norm)


def _flats(engine) -> list[torch.Tensor]:
    """The parameters that the optimiser itself sees: the drafter's, or this process's shares of them, in one piece."""
    if engine.zero_optimization_stage() == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return [parameter for group in engine.basic_optimizer.param_groups for parameter in group["params"]]


def _link(engine) -> None:
    """Tells DeepSpeed where in its flat shares the moments of each parameter lie. It does so itself after the first
    group of parameters was stepped for the first time: too early for the other groups."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    zero = engine.optimizer
    if engine.zero_optimization_stage() in (1, 2):
        for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
            lazy_init_hp_params_optimizer_state(group, flat, engine.basic_optimizer.state)


def training_state(engine) -> dict[str, torch.Tensor]:
    """Every weight (its name, float32) and what the optimiser knows of it (name/exp_avg, ..., name/step), whole and on
    the host: in the first process, nothing in the others. All processes call it together."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    sharded, first = engine.zero_optimization_stage() > 0, dist.get_rank() == 0
    _link(engine)
    states = engine.basic_optimizer.state
    common = states[_flats(engine)[0]]  # with ZeRO: every share has the same keys, and is in the same step
    state = {}
    for name, parameter in engine.module.named_parameters():
        if sharded:
            whole = {"": safe_get_full_fp32_param(parameter)}
            for key, value in common.items():
                whole[f"/{key}"] = value if value.ndim == 0 else safe_get_full_optimizer_state(parameter, key)
        else:
            whole = {"": parameter.detach(), **{f"/{key}": value for key, value in states[parameter].items()}}
        if first:
            state |= {name + key: value.to("cpu", torch.float32).clone() for key, value in whole.items()}
    return state


def restore(engine, state: dict[str, torch.Tensor]) -> None:
    """Gives a fresh engine around the same weights what `training_state` took from another one, sharded or not."""
    from deepspeed.utils import safe_set_full_optimizer_state

    named, states = dict(engine.module.named_parameters()), engine.basic_optimizer.state
    known: dict[str, dict[str, torch.Tensor]] = {name: {} for name in named}
    for name, value in state.items():
        if "/" in name:
            parameter, key = name.split("/")
            known[parameter][key] = value
    if engine.zero_optimization_stage() == 0:
        for name, parameter in named.items():
            for key, value in known[name].items():
                states[parameter][key] = value.clone() if value.ndim == 0 else value.to(parameter.device).clone()
        return
    some = known[next(iter(named))]
    for flat in _flats(engine):
        for key, value in some.items():
            states[flat][key] = value.clone() if value.ndim == 0 else torch.zeros_like(flat)
    _link(engine)
    for name, parameter in named.items():
        for key, value in known[name].items():
            if value.ndim:
                safe_set_full_optimizer_state(parameter, value.to(engine.device), key)
