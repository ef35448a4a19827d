"""The `plan` command: estimate the memory and the length of a training run without loading the
target.

`./launch.sh plan` takes the same options as the run.
"""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from data.chat import NO_ANSWER_EXCLUSION_REASON
from data.counts import ExampleCounts
from data.packing import CountedDataset, prepare_packed_dataset
from data.rows import expand_mixture
from infer.drafters.build import choose_mask_token
from infer.drafters.families import DRAFTER_FAMILIES
from infer.targets.end_tokens import find_eos_token_ids
from infer.targets.loading import (
    load_config,
    load_generation_config,
    load_tokenizer,
    resolve_hub_id_or_folder,
)
from infer.targets.support import refuse_unsupported
from infer.targets.target import tokenizer_digest
from infer.utils.progress import Progress
from train.config import TrainConfig
from train.engine import (
    compute_micro_batch_sizes,
    get_drafter_matmul_dtype,
    get_training_target_dtype,
)
from train.features import count_stored_bytes
from train.run.folder import collect_token_ids
from train.run.initial import format_mask_token, resolve_drafter_options
from train.step_memory import (
    FLOAT32_BYTES,
    StepSizes,
    available_device_memory,
    choose_gradient_checkpointing,
    estimate_step_memory,
    format_bytes,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig

PROCESS_MEMORY_FILE = Path("/proc/self/statm")  # exists only on Linux


def count_total_steps(config: TrainConfig, num_sequences: float) -> int:
    """Return the number of optimiser steps of a run. num_sequences: number of packed sequences in
    the training data."""
    if config.optim.steps is not None:
        return config.optim.steps
    return max(1, round(config.optim.epochs * num_sequences / config.optim.batch_size))


def describe_run_length(config: TrainConfig, num_sequences: int) -> str:
    """Return the length of a run as text for the user, in steps or minutes. num_sequences: number
    of packed sequences in the training data."""
    if config.optim.max_minutes is not None:
        return f"{config.optim.max_minutes:g} minutes of steps"
    return f"{count_total_steps(config, num_sequences):,} steps"


def load_target_config(config: TrainConfig) -> "PretrainedConfig":
    """Return the target's Hugging Face configuration.

    The configuration is read from the target's folder. Without this folder, it is built from the
    model sizes in conf/target/ if they are known, or else downloaded from the hub.
    """
    from transformers import AutoConfig

    options = config.target
    if options.model_config and not Path(resolve_hub_id_or_folder(options.path)).exists():
        return AutoConfig.for_model(**options.model_config)
    return load_config(options.path, options.trust_remote_code)


@dataclass(frozen=True)
class RunMemoryEstimate:
    """The estimated memory of a training run, and the sizes that it was computed from."""

    # the run's configuration, in which `gradient_checkpointing` is True or False, not None
    config: TrainConfig
    sizes: StepSizes  # the sizes of target, drafter and a micro-batch
    world_size: int  # number of processes
    device: torch.device
    # bytes of memory that one process may use; None if the device is not on this machine
    device_bytes: float | None
    # Result of `estimate_step_memory`. Keys are parts of the memory, for example "gradients";
    # values are their bytes.
    memory: dict[str, float]
    memory_line: (
        str  # a line about the memory to print for the user, from `choose_gradient_checkpointing`
    )


def estimate_run_memory(config: TrainConfig, hf_config: "PretrainedConfig") -> RunMemoryEstimate:
    """Estimate the memory that each training process needs on its device, which the option
    target.device selects. 'auto' selects a GPU if this machine has one, else the CPU.

    hf_config: the target's Hugging Face configuration. Raises ValueError if the batch cannot be
    divided evenly among the processes.
    """
    world_size = int(os.environ.get("NPROC") or 1)
    has_gpu = torch.cuda.is_available()
    device_type = config.target.device.partition(":")[0]
    cuda = has_gpu if device_type == "auto" else device_type == "cuda"
    device = torch.device("cuda" if cuda else "cpu")
    device_bytes = None
    if has_gpu or not cuda:
        device_bytes = available_device_memory(device, world_size)

    micro_batch_size, _ = compute_micro_batch_sizes(config, world_size)
    shape = StepSizes(config, hf_config, micro_batch_size)
    target_itemsize = get_training_target_dtype(config, device).itemsize
    drafter_itemsize = get_drafter_matmul_dtype(config, device).itemsize
    config, memory_line = choose_gradient_checkpointing(
        config, shape, world_size, target_itemsize, drafter_itemsize, cuda, device_bytes
    )
    memory = estimate_step_memory(
        shape, config, world_size, target_itemsize, drafter_itemsize, cuda
    )
    return RunMemoryEstimate(config, shape, world_size, device, device_bytes, memory, memory_line)


def estimate_cpu_process_memory(estimate: RunMemoryEstimate) -> float:
    """Return the estimated peak memory, in bytes, of a training process on a CPU.

    The estimate includes the loaded libraries. Their size is the memory that this process uses now.
    The peak occurs in a training step or in an evaluation. An evaluation needs a float32 copy of
    the target's weights, and a second one if training steps do not use float32.
    """
    memory = estimate.memory
    float32_copy = FLOAT32_BYTES * estimate.sizes.target_parameters
    resident_pages = int(PROCESS_MEMORY_FILE.read_text().split()[1])
    libraries = resident_pages * os.sysconf("SC_PAGE_SIZE")
    persistent = memory["target"] + memory["drafter"] + memory["optimiser"]
    evaluation = persistent + float32_copy
    if memory["target"] != float32_copy:
        evaluation += float32_copy
    return libraries + max(sum(memory.values()), evaluation)


def prepare_local_data(config: TrainConfig, tokenizer) -> CountedDataset:
    """Return the packed training sequences if the data are on this machine, and how many examples
    are used and excluded.

    The sequences are also written to the cache, from which a training run reads them. The result
    has no sequences if the data are not on this machine, or if no example is usable (for example,
    because the target has not generated answers to the questions yet).
    """
    is_remote = any(data.source == "hub" for data, _ in expand_mixture(config.data))
    if config.data.source == "self" or is_remote:
        return CountedDataset(None, ExampleCounts())
    progress = Progress("tokenising", "texts")
    return prepare_packed_dataset(config.data, tokenizer, tokenizer_digest(tokenizer), progress)


def describe_duration(config: TrainConfig, prepared: CountedDataset | None) -> str:
    """Return the length of a run as text for the user, in steps or minutes, or the reason why the
    length is unknown.

    prepared: the training data, from `prepare_local_data`. None if the target's tokenizer, which
    this preparation needs, is not on this machine.
    """
    if config.data.source == "self":
        return (
            "unknown: data=self has no examples yet; ./launch.sh regenerate lets the target "
            "generate questions and answers"
        )
    num_sequences = None
    if prepared is not None and prepared.counts.total > 0:
        if prepared.dataset is None and NO_ANSWER_EXCLUSION_REASON in prepared.counts.excluded:
            return (
                "unknown: the questions of the data have no answers yet; ./launch.sh regenerate "
                "lets the target generate the answers"
            )
        if prepared.dataset is None:
            return "unknown: there is no example to learn from"
        num_sequences = len(prepared.dataset)
    if config.optim.max_minutes is not None:
        return f"{config.optim.max_minutes:g} minutes of steps, without evaluations"
    if config.optim.steps is None and num_sequences is None:
        return "unknown: the number of steps depends on the data, which are not on this machine yet"
    return f"{count_total_steps(config, num_sequences or 0):,} steps, without evaluations"


def describe_mask_token(
    config: TrainConfig, hf_config: "PretrainedConfig", tokenizer, dataset: "Dataset | None"
) -> str:
    """Return a text for the user with the mask token of the drafter that will be trained, or '' if
    this kind of drafter has no mask token.

    hf_config: the target's Hugging Face configuration. dataset: the packed training sequences, None
    if they are not known. Raises ValueError if no token of the vocabulary is free to be the mask
    token.
    """
    mask_token_id = config.drafter.mask_token_id
    if DRAFTER_FAMILIES[config.drafter.family].uses_mask_token and mask_token_id is None:
        text_config = hf_config.get_text_config()
        configs = (load_generation_config(config.target.path), hf_config, text_config)
        end_ids = find_eos_token_ids(configs, tokenizer, text_config.vocab_size)
        used_ids = None
        if dataset:
            used_ids = partial(collect_token_ids, dataset)
        mask_token_id = choose_mask_token(tokenizer, text_config.vocab_size, end_ids, used_ids)
    return format_mask_token(mask_token_id, tokenizer)


def print_plan(config: TrainConfig) -> None:
    """Run `./launch.sh plan`: print the sizes, the memory and the length of a training run."""
    drafter_options = resolve_drafter_options(config.drafter, config.target)
    config = replace(config, drafter=drafter_options)
    hf_config = load_target_config(config)
    refuse_unsupported(hf_config)
    estimate = estimate_run_memory(config, hf_config)

    prepared = None
    mask_token = ""
    try:
        tokenizer = load_tokenizer(
            config.target.path, config.target.trust_remote_code, config.target.chat_template_kwargs
        )
    # Continue without the tokenizer, because the memory can be estimated from the sizes in
    # conf/target/.
    except FileNotFoundError:
        pass
    else:
        prepared = prepare_local_data(config, tokenizer)
        mask_token = describe_mask_token(config, hf_config, tokenizer, prepared.dataset)

    print_model_and_step_sizes(config, estimate, mask_token)
    print_memory(estimate)
    feature_bytes = count_stored_bytes(
        1, estimate.sizes.num_feature_layers, estimate.sizes.hidden_size, "bfloat16"
    )
    data_text = f"{format_bytes(1e6 * feature_bytes)} of stored features per million tokens"
    if prepared is not None and prepared.dataset is not None:
        data_text = f"{len(prepared.dataset):,} packed sequences, {data_text}"
    if prepared is not None and prepared.counts.total:
        print(*prepared.counts.format_lines(), sep="\n")
    print(f"data       {data_text}\ntime       {describe_duration(config, prepared)}")


def print_model_and_step_sizes(
    config: TrainConfig, estimate: RunMemoryEstimate, mask_token: str
) -> None:
    """Print the sizes of the target, of the drafter, and of a training step. mask_token: the text
    that `describe_mask_token` returned."""
    shape = estimate.sizes
    processes = "process" if estimate.world_size == 1 else "processes"
    print(
        f"target     {config.target.path}: {shape.target_parameters / 1e6:,.1f} million "
        f"parameters, {shape.num_target_layers} layers, hidden size {shape.hidden_size}, "
        f"vocabulary size {shape.vocabulary:,}\n"
        f"drafter    {config.drafter.family}, {shape.num_drafter_layers} layers, block size "
        f"{shape.block_size}: {shape.drafter_parameters / 1e6:,.1f} million parameters"
        f"{mask_token}\n"
        f"step       {config.optim.batch_size} packed sequences of {shape.length:,} tokens, "
        f"{config.anchors_per_sequence} blocks in each, computed by {estimate.world_size} "
        f"{get_device_kind(estimate.device)} {processes}"
    )


def print_memory(estimate: RunMemoryEstimate) -> None:
    """Print the peak memory of a training step: the total, and then each part. For training on a
    CPU under Linux, also print the peak memory of a whole training process."""
    print(estimate.memory_line)
    for name, size in estimate.memory.items():
        print(f"           {format_bytes(size):>10}  {name}")
    if estimate.device.type == "cpu" and PROCESS_MEMORY_FILE.exists():
        total = format_bytes(estimate_cpu_process_memory(estimate))
        print(
            f"           {total:>10}  peak memory of a process, including the loaded libraries "
            "and the target's copies for an evaluation"
        )


def get_device_kind(device: torch.device) -> str:
    """Return 'GPU' for a CUDA device and 'CPU' for any other device."""
    return "GPU" if device.type == "cuda" else "CPU"
