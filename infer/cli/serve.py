"""`serve`: a target and its drafter behind OpenAI's HTTP API."""

import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from infer.cli.models import MaskedConfig, OfDrafter, load
from infer.config import EngineConfig
from infer.serving.config import ServerConfig
from infer.targets.kinds import is_masked
from infer.utils.progress import HEARTBEAT


@dataclass
class ServeCommand(OfDrafter):
    """Serve a target and its drafter over HTTP.

    checkpoint: a drafter folder, a training checkpoint, or the name of a target whose drafter this
        repository contains (embedded, smollm2); default: the drafter in the target's folder
    target: see TargetConfig in infer/config.py
    drafter: see LoadedConfig in infer/config.py
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


def opened(config: ServeCommand):
    """Load what is served: the engine, and in words what it does."""
    from infer import open_engine
    from infer.api import positions_of

    server = config.server
    if server.memory_limit_mib is not None:
        resource.setrlimit(
            resource.RLIMIT_AS,
            (server.memory_limit_mib << 20, resource.getrlimit(resource.RLIMIT_AS)[1]),
        )
    decoding = config.masked if is_masked(config.target.path) else config.decoding
    checkpoint = config.checkpoint if config.decoding.drafts else None
    target, drafter = load(config.target, checkpoint, config.drafter)
    spare = decoding.room(1) - 1  # a masked model's answer ends with a whole block
    capacity = min(server.max_length, positions_of(target) - spare)
    said = f"{decoding.name_with(drafter)}, {decoding.max_num_seqs} texts at a time, {capacity} tokens each"
    engine = open_engine(target, drafter, decoding, capacity)
    return engine, f"{server.model_name or target.name} at {server.url}/v1: {said}"


def run(config: ServeCommand) -> None:
    from infer.serving.server import serve

    # OpenMP's threads end with it: beside the engine's own, both would fall asleep between any two
    # loops (LOG.md)
    with ThreadPoolExecutor(1) as loader:
        engine, said = loader.submit(opened, config).result()
    HEARTBEAT.at(None)
    told = f"{said}; talk to it with ./launch.sh chat url={config.server.url}"
    serve(engine, config.server, lambda: print(told, file=sys.stderr, flush=True))
