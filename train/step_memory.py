"""The memory of a training step. It is estimated by formulas from the target's config.json and the
configuration of the run."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from infer.attention.masks import QUERIES_PER_MASK_CHUNK
from infer.drafters.build import create_drafter
from infer.drafters.heads.base import get_draft_vocab_size
from infer.targets.support import choose_drafter_mlp_size, get_head_size, get_num_key_heads
from train.config import TrainConfig
from train.engine import uses_torch_compile

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# DeepSpeed's default for the number of gradients that ZeRO collects before it reduces them over
# processes
GRADIENTS_PER_ZERO_BUCKET = 500_000_000
# A step fits if its estimated memory is below this fraction of the device's memory.
MAX_MEMORY_SHARE = 0.9
FLOAT32_BYTES = 4


class StepSizes:
    """The sizes of the target, of the drafter and of a micro-batch, which determine the memory of a
    training step.

    hf_config: the target's Hugging Face configuration. batch_size: number of packed sequences in a
    micro-batch. None means `optim.batch_size`: a step has a single micro-batch.
    """

    def __init__(
        self, config: TrainConfig, hf_config: "PretrainedConfig", batch_size: int | None = None
    ) -> None:
        from transformers import AutoModelForCausalLM

        text_config = hf_config.get_text_config()
        batch_size = batch_size or config.optim.batch_size
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
            drafter = create_drafter(config.drafter, None, text_config)

        num_blocks = batch_size * config.anchors_per_sequence
        self.length = config.data.length  # number of tokens in a packed sequence
        self.block_size = config.drafter.block_size
        window = min(config.drafter.sliding_window or self.length, self.length)
        # number of context positions that a query of the drafter sees on average
        self.mean_visible_context = window - window**2 / (2 * self.length)
        self.context_tokens = batch_size * self.length  # number of tokens in a micro-batch
        # number of the drafter's attention queries in all blocks of a micro-batch
        self.num_queries = num_blocks * drafter.num_queries
        # number of drafted positions in all blocks of a micro-batch
        self.drafted_positions = num_blocks * (self.block_size - 1)
        self.chunk_rows = min(config.objective.chunk_rows, self.drafted_positions)

        self.num_drafter_layers = config.drafter.layers
        self.drafter_parameters = sum(parameter.numel() for parameter in drafter.parameters())
        # number of tokens of the drafter's vocabulary
        self.draft_vocabulary = get_draft_vocab_size(drafter.config)
        # number of target layers whose hidden states the drafter reads
        self.num_feature_layers = len(drafter.layer_ids)
        # input features of the drafter's query, key and value projections
        self.projection_inputs = next(
            weight.shape[1]
            for name, weight in drafter.named_parameters()
            if name.endswith("q_proj.weight")
        )

        self.hidden_size = text_config.hidden_size
        self.vocabulary = text_config.vocab_size
        self.intermediate_size = choose_drafter_mlp_size(text_config)
        # number of attention heads * head size
        self.query_size = text_config.num_attention_heads * get_head_size(text_config)
        # number of key-value heads * head size
        self.key_value_size = get_num_key_heads(text_config) * get_head_size(text_config)
        self.num_target_layers = text_config.num_hidden_layers
        self.target_parameters = sum(parameter.numel() for parameter in model.parameters())
        # Count the parameters of the target's embedding and head, which can be the same tensor.
        table_parameters = {}
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            for parameter in table.parameters():
                table_parameters[id(parameter)] = parameter.numel()
        self.target_table_parameters = sum(table_parameters.values())


def estimate_step_memory(
    sizes: StepSizes,
    config: TrainConfig,
    world_size: int,
    target_itemsize: int,
    drafter_itemsize: int,
    cuda: bool,
) -> dict[str, float]:
    """Return the memory that a training step needs at its peak on one device.

    Keys of the result are the parts of the memory, for example "gradients". Values are bytes.

    world_size: number of processes. target_itemsize: bytes of one weight of the target.
    drafter_itemsize: bytes of one number in the drafter's matmuls, 2 with bfloat16. cuda: whether
    the device is a GPU.
    """
    stage = config.deepspeed.stage
    parameters = sizes.drafter_parameters
    # The optimiser has two float32 moments. With ZeRO stages 1 and 2, it also has a float32 copy of
    # the weights.
    moments = 8 * parameters + (4 * parameters if stage in (1, 2) else 0)
    optimiser = moments / (world_size if stage >= 1 else 1)
    drafter = FLOAT32_BYTES * parameters / (world_size if stage == 3 else 1)
    if drafter_itemsize == 2:
        drafter += 2 * parameters  # the bfloat16 copy of the weights that autocast creates

    hidden_states = sizes.context_tokens * sizes.hidden_size
    features = target_itemsize * hidden_states * (sizes.num_feature_layers + 1)
    # The drafter reads the target's hidden states in float32; other dtypes are copied to float32.
    if target_itemsize != FLOAT32_BYTES:
        features += FLOAT32_BYTES * hidden_states * sizes.num_feature_layers

    activations = _estimate_activations(sizes, config, drafter_itemsize, cuda)
    gradients = FLOAT32_BYTES * parameters / (world_size if stage >= 2 else 1)
    is_single_pass = config.optim.batch_size * sizes.length <= sizes.context_tokens * world_size
    # With a single micro-batch, the backward pass allocates gradients while it frees activations.
    # Only the part of the gradients that exceeds the activations needs additional memory.
    if is_single_pass:
        gradients = max(0, gradients - activations["saved"])
    if stage:
        gradients += FLOAT32_BYTES * min(parameters, GRADIENTS_PER_ZERO_BUCKET)

    # The target's forward pass ends before the drafter's activations exist. Both can therefore use
    # the same memory.
    target_pass = target_itemsize * sizes.context_tokens
    target_pass *= 3 * sizes.intermediate_size + 4 * sizes.hidden_size + sizes.query_size
    # Estimated number of different hidden states of the target per drafted position. It is below 1
    # if several drafted positions are compared with the same hidden state (see chunk_plan.py).
    distinct_share = min(1, sizes.context_tokens / sizes.drafted_positions)
    chunk_tensors = 4 if cuda else 1 + distinct_share
    chunk = FLOAT32_BYTES * chunk_tensors * sizes.chunk_rows * sizes.draft_vocabulary
    return {
        "target": _estimate_target(sizes, config, world_size, target_itemsize),
        "drafter": drafter,
        "gradients": gradients,
        "optimiser": 0 if config.deepspeed.offload else optimiser,
        "features": features,
        "activations": activations["saved"],
        "at once": max(target_pass - activations["saved"], chunk, activations["backward"]),
    }


def _estimate_target(
    sizes: StepSizes, config: TrainConfig, world_size: int, itemsize: int
) -> float:
    """Return the bytes of the target's weights on one device. itemsize: bytes of one weight."""
    layer_parameters = sizes.target_parameters - sizes.target_table_parameters
    if config.features:
        return itemsize * sizes.target_table_parameters
    if config.target.shard:
        shard = layer_parameters / world_size
        gathered_layers = 2 * layer_parameters / sizes.num_target_layers
        return itemsize * (sizes.target_table_parameters + shard + gathered_layers)
    return itemsize * sizes.target_parameters


def _estimate_activations(
    sizes: StepSizes, config: TrainConfig, itemsize: int, cuda: bool
) -> dict[str, float]:
    """Return the bytes of the drafter's activations on one device.

    The value of the key "saved" is the memory that the forward pass saves for the backward pass.
    The value of "backward" is the temporary memory of the backward pass. itemsize: bytes of one
    number in the drafter's matmuls. cuda: whether the device is a GPU.
    """
    hidden = sizes.hidden_size
    # torch.compile does not save one copy of the outputs of norms and SiLU, but recomputes it in
    # the backward pass.
    recomputed = int(uses_torch_compile(config, cuda))
    per_query = (
        (5 - recomputed) * hidden
        + (4 - recomputed) * (sizes.query_size + sizes.intermediate_size)
        + 4 * sizes.key_value_size
    )
    # Keys and values of the context are saved. If the projections also read token embeddings, these
    # are saved before and after their norm.
    per_context_token = 4 * sizes.key_value_size + 8 * (sizes.projection_inputs - hidden)
    layer = itemsize * (sizes.num_queries * per_query + sizes.context_tokens * per_context_token)

    mask = 0
    # On a CPU, the float32 attention mask is saved. A chunk of queries has one mask, with a column
    # for each key that at least one of the queries sees.
    if not cuda:
        mask = (
            FLOAT32_BYTES
            * sizes.num_queries
            * (sizes.mean_visible_context + QUERIES_PER_MASK_CHUNK)
        )
    # bytes of the activations before the drafter's first layer and after its last layer
    outside_layers = FLOAT32_BYTES * (3 * sizes.context_tokens + 6 * sizes.num_queries) * hidden
    saved_per_layer = layer
    backward = 3 * itemsize * sizes.num_queries * sizes.intermediate_size
    if config.gradient_checkpointing:
        saved_per_layer = FLOAT32_BYTES * sizes.num_queries * hidden
        backward += layer
    return {
        "saved": outside_layers + mask + sizes.num_drafter_layers * saved_per_layer,
        "backward": backward - recomputed * outside_layers,
    }


def available_device_memory(device: torch.device, local_world_size: int) -> float:
    """Return the bytes of memory that one process may use on a device.

    On a GPU, this is the free memory plus the memory that this process has already reserved. On a
    CPU, it is the machine's memory, divided by `local_world_size`. local_world_size: number of
    processes on this machine.
    """
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return free_bytes + torch.cuda.memory_reserved(device)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / local_world_size


def choose_gradient_checkpointing(
    config: TrainConfig,
    sizes: StepSizes,
    world_size: int,
    target_itemsize: int,
    drafter_itemsize: int,
    cuda: bool,
    device_bytes: float | None,
) -> tuple[TrainConfig, str]:
    """Decide whether to use gradient checkpointing. Return the configuration with the decision, and
    a line about the memory of a step to print for the user.

    If `config.gradient_checkpointing` is True or False, it stays unchanged. If it is None, it
    becomes True for a step that does not fit in the device's memory without gradient checkpointing,
    else False.

    device_bytes: memory that one process may use, None if the device is not on this machine. The
    other arguments are those of `estimate_step_memory`.
    """
    configs = {}
    step_bytes = {}
    for gradient_checkpointing in (False, True):
        configs[gradient_checkpointing] = replace(
            config, gradient_checkpointing=gradient_checkpointing
        )
        memory = estimate_step_memory(
            sizes,
            configs[gradient_checkpointing],
            world_size,
            target_itemsize,
            drafter_itemsize,
            cuda,
        )
        step_bytes[gradient_checkpointing] = sum(memory.values())

    gradient_checkpointing = config.gradient_checkpointing
    if gradient_checkpointing is None:
        gradient_checkpointing = False
        if device_bytes is not None:
            gradient_checkpointing = step_bytes[False] > MAX_MEMORY_SHARE * device_bytes
    line = (
        f"memory     {format_bytes(step_bytes[gradient_checkpointing])} on each device at the "
        "peak of a step"
    )
    if device_bytes is not None:
        line += f", of {format_bytes(device_bytes)}"
    alternative = not gradient_checkpointing
    alternative_peak = format_bytes(step_bytes[alternative])
    line += f"; {alternative_peak} with gradient_checkpointing={str(alternative).lower()}"
    if (
        device_bytes is not None
        and step_bytes[gradient_checkpointing] > MAX_MEMORY_SHARE * device_bytes
    ):
        line += (
            ". A step may not fit. Options that reduce the memory are optim.micro_batch_size=1, "
            "deepspeed=zero2, target.shard=true, and features= (stored features)"
        )
    return configs[gradient_checkpointing], line


def format_bytes(size: float) -> str:
    """Format a number of bytes as text, for example '1.5 GB' or '300.0 MB'."""
    if size >= 1e9:
        return f"{size / 1e9:,.1f} GB"
    return f"{size / 1e6:,.1f} MB"
