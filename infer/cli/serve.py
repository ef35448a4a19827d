"""The command `serve`: serves a target and its drafter with OpenAI's HTTP API."""

import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from infer.cli.models import CommandWithDrafter, MaskedConfig, load_target_and_drafter
from infer.config import EngineConfig
from infer.serving.config import ServerConfig
from infer.targets.masked_models import is_masked_diffusion
from infer.utils.progress import HEARTBEAT

if TYPE_CHECKING:
    from infer.engine.engine import Engine


@dataclass
class ServeCommand(CommandWithDrafter):
    """Serve a target and its drafter over HTTP.

    checkpoint: a drafter folder, a training checkpoint, or the name of a target whose drafter this
        repository contains (embedded, smollm2). The default is the drafter in the target's folder
    target: see TargetConfig in infer/config.py
    drafter: see DrafterLoadConfig in infer/config.py
    decoding: see EngineConfig in infer/config.py
    masked: only if the target is a masked diffusion model, see MaskedConfig in
        infer/masked/config.py
    server: see ServerConfig in infer/serving/config.py
    """

    checkpoint: str = "${target.path}"
    decoding: EngineConfig = field(
        default_factory=lambda: EngineConfig(budget="auto", prefix_cache_mib=512)
    )
    masked: MaskedConfig = field(default_factory=MaskedConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


def open_and_describe_engine(config: ServeCommand) -> "tuple[Engine, str]":
    """Load the target and the drafter, and create an engine that decodes with them.

    Returns (engine, description). The description is a line to print, with the model, the address,
    the tree method and the limits.
    """
    from infer import open_engine
    from infer.api import max_positions
    from infer.engine.warm_up import record_common_rounds

    server = config.server
    if server.memory_limit_mib is not None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (server.memory_limit_mib << 20, hard_limit))
    decoding: Any = config.masked if is_masked_diffusion(config.target.path) else config.decoding
    checkpoint = config.checkpoint if config.decoding.uses_drafter else None
    target, drafter = load_target_and_drafter(config.target, checkpoint, config.drafter)
    # A masked diffusion model generates whole blocks of tokens. Because the last block may be cut,
    # an output may need more KV cache positions than it has tokens.
    extra_positions = decoding.count_output_positions(1) - 1
    capacity = min(server.max_length, max_positions(target) - extra_positions)
    engine = open_engine(target, drafter, decoding, capacity)
    record_common_rounds(engine, HEARTBEAT.set_activity)
    description = (
        f"{server.model_name or target.name} at {server.url}/v1: "
        f"{decoding.get_method_name(drafter)}, {decoding.max_num_seqs} sequences at a time, "
        f"{capacity} tokens per sequence"
    )
    return engine, description


def run(config: ServeCommand) -> None:
    """Run the server until it is interrupted. Print its address when it accepts connections."""
    from infer.serving.server import serve

    # Loading starts OpenMP threads. They end only with the thread that started them, so target and
    # drafter are loaded in a separate thread. If these OpenMP threads kept running beside those of
    # the engine, both groups would sleep between parallel loops and slow decoding (see LOG.md).
    with ThreadPoolExecutor(1) as loader:
        engine, description = loader.submit(open_and_describe_engine, config).result()
    HEARTBEAT.set_activity(None)
    message = f"{description}; talk to it with ./launch.sh chat url={config.server.url}"
    serve(engine, config.server, lambda: print(message, file=sys.stderr, flush=True))
