"""The DeepSpeed engine around drafter and optimiser, and the training state of both.

A training state is a dictionary of unsharded tensors: weights, buffers, and the optimiser's state
of each parameter. The format does not depend on the ZeRO stage and the number of processes. A run
can therefore be resumed with another stage or another number of processes.
"""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from infer.drafters.base import Drafter
from infer.targets.loading import resolve_dtype
from train.config import TrainConfig
from train.optim import has_amx_bfloat16, make_optimizer

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def get_drafter_matmul_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the drafter's matmuls in training. The drafter's weights, their gradients
    and the optimiser's moments are always float32."""
    name = config.optim.precision
    if name == "auto":
        has_bfloat16 = device.type == "cuda" or has_amx_bfloat16()
        name = "bfloat16" if has_bfloat16 else "float32"
    return getattr(torch, name)


def get_training_target_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the frozen target in training steps.

    On a CPU with target.dtype=auto, this is the dtype of the drafter's matmuls
    (`get_drafter_matmul_dtype`). Evaluations on a CPU with target.dtype=auto use float32 instead,
    because in lower precision rounding could change the greedy outputs.
    """
    if config.target.dtype == "auto" and device.type == "cpu" and not config.target.shard:
        return get_drafter_matmul_dtype(config, device)
    return resolve_dtype(config.target.dtype, device)


def uses_torch_compile(config: TrainConfig, cuda: bool) -> bool:
    """Return whether the drafter's training step runs under torch.compile. cuda: whether the device
    is a GPU."""
    if config.compile is None:
        return cuda and config.deepspeed.stage < 3
    return config.compile


def compute_micro_batch_sizes(config: TrainConfig, world_size: int) -> tuple[int, int]:
    """Return the number of packed sequences in a micro-batch, and the number of micro-batches that
    each process computes per step.

    All processes together process `optim.batch_size` packed sequences per step. Raises ValueError
    if the batch cannot be divided evenly among `world_size` processes and their micro-batches.
    """
    batch = config.optim.batch_size
    micro = config.optim.micro_batch_size
    process_batch = batch // world_size
    if batch % world_size or process_batch % (micro or process_batch):
        micro_text = f" in micro-batches of optim.micro_batch_size={micro}" if micro else ""
        raise ValueError(
            f"optim.batch_size={batch} cannot be divided evenly among {world_size} "
            f"processes{micro_text}: choose an optim.batch_size that is a multiple of "
            f"{world_size * (micro or 1)}"
        )
    micro_batch_size = micro or process_batch
    return micro_batch_size, process_batch // micro_batch_size


def build_engine(drafter: Drafter, config: TrainConfig, device: torch.device) -> "DeepSpeedEngine":
    """Move the drafter to the device, create its optimiser, and return a DeepSpeed engine around
    both. The target is not part of the engine, because it is frozen and has no training state."""
    import deepspeed

    micro_batch_size, micro_steps = compute_micro_batch_sizes(config, dist.get_world_size())
    drafter.to(device)
    drafter.recompute = bool(config.gradient_checkpointing)
    model: nn.Module = drafter
    if uses_torch_compile(config, device.type == "cuda"):
        # DeepSpeed adds hooks to its module, and these hooks cannot be compiled. torch.compile
        # returns a new module around the drafter. DeepSpeed gets this new module, so that the
        # drafter itself has no hooks.
        model = cast(nn.Module, torch.compile(drafter, dynamic=False))

    dtype = get_drafter_matmul_dtype(config, device)
    if dtype != torch.float32:
        # The weights of norm layers are float32 on purpose. torch warns about their dtype.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    zero: dict = {"stage": config.deepspeed.stage}
    if config.deepspeed.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(drafter, config.optim),
        config={
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": micro_steps,
            "gradient_clipping": config.optim.max_grad_norm,
            "torch_autocast": {
                "enabled": dtype != torch.float32,
                "dtype": str(dtype).removeprefix("torch."),
            },
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        },
    )
    return engine


def step_engine(engine: "DeepSpeedEngine") -> torch.Tensor:
    """Update the weights if this step's last micro-batch has been computed. Return the gradient
    norm before clipping, or NaN if further micro-batches follow.

    Call this function after the backward pass of every micro-batch, in place of DeepSpeed's
    `engine.step()`. If the gradient norm is not finite, all processes leave weights and optimiser
    moments unchanged.
    """
    no_norm = torch.tensor(float("nan"))
    if not engine.is_gradient_accumulation_boundary():
        engine.step()
        return no_norm

    if engine.zero_optimization_stage() > 0:
        # With ZeRO stages 1 to 3, DeepSpeed itself skips the update if the norm is not finite.
        engine.step()
        norm = engine.get_global_grad_norm()
        zero_optimizer: Any = engine.optimizer
        if zero_optimizer.overflow or norm is None:
            return no_norm
        return torch.as_tensor(norm)

    gradients = []
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    norm = torch.nn.utils.get_total_norm(gradients)
    if not torch.isfinite(norm):
        engine.zero_grad()
        # With this setting, `engine.step()` counts the micro-batch without updating the weights.
        engine.set_gradient_accumulation_boundary(False)
    engine.step()
    # With None, the engine determines the end of a step from the number of micro-batches again.
    engine.set_gradient_accumulation_boundary(None)
    return norm


def _flat_parameters(engine: "DeepSpeedEngine") -> list[torch.Tensor]:
    """Return the tensors that a sharded optimiser updates: for each parameter group, this process's
    shard of the group's parameters, as one flat tensor."""
    if engine.zero_optimization_stage() == 3:
        zero_optimizer: Any = engine.optimizer
        return zero_optimizer.fp32_partitioned_groups_flat
    basic_optimizer: Any = engine.basic_optimizer
    return [p for group in basic_optimizer.param_groups for p in group["params"]]


def _let_deepspeed_map_moments(engine: "DeepSpeedEngine") -> None:
    """Let DeepSpeed record which part of the flat tensors of optimiser moments belongs to which
    parameter (ZeRO stages 1 and 2).

    DeepSpeed also records this by itself, but too early: at a time when only the first parameter
    group has moments.
    """
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    zero_optimizer: Any = engine.optimizer
    basic_optimizer: Any = engine.basic_optimizer
    if engine.zero_optimization_stage() in (1, 2):
        groups = zero_optimizer.bit16_groups
        flat_groups = zero_optimizer.single_partition_of_fp32_groups
        for group, flat in zip(groups, flat_groups, strict=True):
            lazy_init_hp_params_optimizer_state(group, flat, basic_optimizer.state)


def collect_unsharded_state(
    model: nn.Module, moments: Mapping[torch.Tensor, dict]
) -> dict[str, torch.Tensor]:
    """Return a copy, in host memory, of a model's weights, its buffers, and the state of its
    unsharded optimiser.

    moments: the optimiser's attribute `state`.

    The keys of weights and buffers in the returned dictionary are their names. The keys of the
    optimiser's state are <parameter name>/exp_avg, <parameter name>/step etc.
    """
    state = dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        state[name] = parameter.detach()
        # frozen parameters have no moments
        for key, value in moments.get(parameter, {}).items():
            state[f"{name}/{key}"] = value
    return copy_to_host_as_float32(state)


def copy_to_host_as_float32(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of tensors in host memory. Floating-point tensors become float32; other tensors
    keep their dtype."""
    copies = {}
    for name, value in state.items():
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        copies[name] = value.to("cpu", dtype, copy=True)
    return copies


def restore_unsharded_moments(
    model: nn.Module, moments: dict, state: dict[str, torch.Tensor]
) -> None:
    """Restore the state of an unsharded optimiser from a saved training state.

    moments: the optimiser's attribute `state`, which is overwritten. state: the saved training
    state, in the format of `collect_unsharded_state`. The model's weights are not changed.
    """
    parameters = dict(model.named_parameters())
    for state_name, value in state.items():
        if "/" not in state_name:
            continue
        name, key = state_name.split("/")
        parameter = parameters[name]
        on_device = value if value.ndim == 0 else value.to(parameter.device)
        moments[parameter][key] = on_device.clone()


def gather_training_state(drafter: Drafter, engine: "DeepSpeedEngine") -> dict[str, torch.Tensor]:
    """Return the drafter's weights and buffers and the optimiser's state as unsharded tensors in
    host memory, for any ZeRO stage.

    `collect_unsharded_state` describes the keys of the returned dictionary. All processes must call
    this function together. The first process gets the state, all other processes get {}.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    is_first = dist.get_rank() == 0
    basic_optimizer: Any = engine.basic_optimizer
    moments = basic_optimizer.state
    if engine.zero_optimization_stage() == 0:
        return collect_unsharded_state(drafter, moments) if is_first else {}

    _let_deepspeed_map_moments(engine)
    # The keys of the optimiser's state and its step count are the same in every shard.
    shard_state = moments[_flat_parameters(engine)[0]]
    state = copy_to_host_as_float32(dict(drafter.named_buffers())) if is_first else {}
    for name, parameter in drafter.named_parameters():
        full_tensors = {name: safe_get_full_fp32_param(parameter)}
        for key, value in shard_state.items():
            if value.ndim > 0:
                value = safe_get_full_optimizer_state(parameter, key)
            full_tensors[f"{name}/{key}"] = value
        if is_first:
            # copy immediately, because the next parameter reuses the memory of these tensors
            state |= copy_to_host_as_float32(full_tensors)
    return state


def restore_optimizer_state(
    drafter: Drafter, engine: "DeepSpeedEngine", state: dict[str, torch.Tensor]
) -> None:
    """Restore the optimiser's state of a new engine, with any ZeRO stage, from a saved training
    state.

    state: the saved training state, in the format of `collect_unsharded_state`. The drafter must
    already have the saved weights.
    """
    from deepspeed.utils import safe_set_full_optimizer_state

    basic_optimizer: Any = engine.basic_optimizer
    moments = basic_optimizer.state
    if engine.zero_optimization_stage() == 0:
        restore_unsharded_moments(drafter, moments, state)
        return

    # Create the optimiser's state of the flat parameters. It has the same keys for all parameters,
    # for example "exp_avg", so the keys of the first parameter are used.
    parameters = dict(drafter.named_parameters())
    optimizer_state = {name: value for name, value in state.items() if "/" in name}
    prefix = f"{next(iter(parameters))}/"
    for flat in _flat_parameters(engine):
        for name, value in optimizer_state.items():
            if name.startswith(prefix):
                key = name.removeprefix(prefix)
                moments[flat][key] = value.clone() if value.ndim == 0 else torch.zeros_like(flat)
    _let_deepspeed_map_moments(engine)

    for state_name, value in optimizer_state.items():
        name, key = state_name.split("/")
        if value.ndim:
            safe_set_full_optimizer_state(parameters[name], value.to(engine.device), key)
