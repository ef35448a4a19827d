"""`serve`: a target and its drafter behind OpenAI's HTTP API."""

import sys
from dataclasses import dataclass, field
from functools import partial

from infer.cli.models import OfTarget, check_together, load
from infer.config import MASKED_METHODS, EngineConfig, TextOptions
from infer.serving.config import ServerConfig
from infer.utils.checks import check_parts
from infer.utils.progress import HEARTBEAT
from infer.utils.together import is_first

WARMED = (TextOptions(), TextOptions(temperature=1.0))  # kinds of texts that `server.warm` prepares for


@dataclass
class ServeCommand(OfTarget):
    """Serve a target and its drafter over HTTP.

    checkpoint: a drafter folder, a training checkpoint, an n-gram file, or "embedded": the embedded target's own
    target: see TargetConfig in infer/config.py
    decoding: see EngineConfig in infer/config.py
    server: see ServerConfig in infer/serving/config.py
    """

    checkpoint: str = "embedded"
    decoding: EngineConfig = field(default_factory=lambda: EngineConfig(budget="auto", prefix_memory=512))
    server: ServerConfig = field(default_factory=ServerConfig)

    def check(self) -> None:
        """Raise ValueError for what cannot be served."""
        check_parts(self)
        check_together(self.target, self.decoding)
        if self.target.tp_plan and self.server.verify:
            raise ValueError(f"server.verify={self.server.verify}: not with target.tp_plan=auto")
        if self.server.verify and self.decoding.method in MASKED_METHODS:
            raise ValueError(f"server.verify={self.server.verify}: for causal targets, not for {self.decoding.method}")


def run(config: ServeCommand) -> None:
    from infer import open_engine
    from infer.api import positions_of
    from infer.serving.server import serve
    from infer.serving.together import LeadingEngine, follow

    decoding, server = config.decoding, config.server
    if server.memory is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (server.memory << 20, resource.getrlimit(resource.RLIMIT_AS)[1]))
    checkpoint = config.checkpoint if decoding.drafts else None
    target, drafter = load(config.target, checkpoint, decoding.method)
    spare = decoding.room(1) - 1  # an answer's last block is a whole one
    capacity = min(server.max_length, positions_of(target) - spare)
    engine = open_engine(target, drafter, decoding, capacity)
    if server.warm:
        say = partial(print, file=sys.stderr, flush=True)
        engine.warm(lambda done, all: say(f"prepared {done} of {all} kinds of rounds"), WARMED)
    if config.target.tp_plan:
        if not is_first():
            return follow(engine)
        engine = LeadingEngine(engine)
    place = f"[{server.host}]" if ":" in server.host else server.host
    said = (
        f"{server.model_name or target.name} at http://{place}:{server.port}/v1: {decoding.name_with(drafter)}, "
        f"{decoding.rows} texts at a time, {capacity} tokens each; talk to it with ./launch.sh chat"
    )
    try:
        HEARTBEAT.at(None)
        serve(engine, server, lambda: print(said, file=sys.stderr, flush=True))
    finally:
        if config.target.tp_plan:
            engine.dismiss()
