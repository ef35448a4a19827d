"""What every test stands on: no network, two threads, the repository's folder."""

import importlib.util
import os
import tempfile
from pathlib import Path
from types import ModuleType

CACHE = tempfile.TemporaryDirectory(prefix="datasets-")  # rows that tests pack are nobody else's
os.environ["HF_DATASETS_CACHE"] = CACHE.name
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))

TINY = {  # what all tiny random models have in common
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": None,
    "bos_token_id": None,
}


@pytest.fixture(scope="session")
def repo() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def load_program(repo):
    """name -> the program of that name in tests/robustness, as a module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, repo / "tests" / "robustness" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def embedded():
    """The repository's own target, float32, with its tokenizer. Read only."""
    from infer import load_target

    return load_target("embedded", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def make_tiny():
    """A factory of random targets of 97 tokens and drafters for them: (dtype, block size, seed, layers, family) ->
    (target, drafter)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from infer.config import DrafterConfig
    from infer.drafters.base import new_drafter
    from infer.targets.target import Target

    def make(dtype: torch.dtype = torch.float32, block_size: int = 4, seed: int = 0, layers: int = 2, **options):
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=97,
            num_hidden_layers=6,
            max_position_embeddings=512,
            initializer_range=0.2,
            **TINY,
        )
        target = Target(Qwen3ForCausalLM(config).to(dtype))
        layers = 1 if options.get("family") == "dart" else layers
        options = DrafterConfig(layers=layers, block_size=block_size, mask_token_id=96, **options)
        drafter = new_drafter(options, target)
        drafter.config.initializer_range = 0.2
        drafter.init_weights(torch.Generator().manual_seed(seed))
        return target, drafter.to(dtype)

    return make


@pytest.fixture(scope="session")
def random_target():
    """(transformers config) -> a target with random weights; its norms, biases and sinks are random too."""
    from transformers import AutoModelForCausalLM

    from infer.targets.loading import without_memory
    from infer.targets.target import Target

    def make(config) -> Target:
        attention = without_memory(config).config._attn_implementation
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.data += 0.5
        return Target(model)

    return make


@pytest.fixture(scope="session")
def ngrams(tmp_path_factory) -> Path:
    """An n-gram file of order 3 over 97 tokens that follow each other with a preference, for `make_tiny`'s targets."""
    from infer.ngrams.count import count_ngrams

    generator = torch.Generator().manual_seed(5)
    favourites = torch.randint(97, (97, 3), generator=generator)
    documents = []
    for _ in range(40):
        ids = [int(torch.randint(97, (), generator=generator))]
        for dice in torch.randint(6, (120,), generator=generator).tolist():
            ids.append(int(favourites[ids[-1], dice % 3]) if dice < 5 else (ids[-1] + 31) % 97)
        documents.append(ids)
    path = tmp_path_factory.mktemp("ngrams") / "tiny.ngrams"
    count_ngrams(documents, 97, 3, path, "0" * 64, workers=1)
    return path


@pytest.fixture(scope="session")
def make_masked():
    """A factory of random bidirectional models of 64 tokens, sharp enough that positions differ in confidence."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from infer.masked.model import MaskedModel

    def make(shifted: bool = False, seed: int = 2) -> MaskedModel:
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=64,
            num_hidden_layers=2,
            max_position_embeddings=128,
            initializer_range=0.4,
            **TINY,
        )
        body = Qwen3ForCausalLM(config).eval().requires_grad_(False)
        for layer in body.model.layers:
            layer.self_attn.o_proj.weight *= 0.25  # what stands elsewhere matters, but not so much that no draft holds
        return MaskedModel(body, None, 60, shifted, "tiny")

    return make
