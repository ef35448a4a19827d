"""Hidden states of documents, written by vLLM: what `./launch.sh features states=` reads. Runs in vLLM's environment.

    ./launch.sh features documents=documents.jsonl ...                  # writes the documents, and names the layers
    python train/vllm_states.py --model M --documents documents.jsonl --layers 3,9,15 --out states
    ./launch.sh features states=states out=features ...                 # reads what came out

Imports nothing of this project, since vLLM wants packages of other versions. A stopped run goes on where it was. vLLM
numbers the embedding 0, so that its layer k + 1 is our layer k; its last one comes before the final norm.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

PART = 512  # documents that are handed to the engine together


def host_connector() -> type:
    """Return vLLM's example connector for an engine on a CPU: it copies without streams and pinned memory."""
    import torch
    from safetensors.torch import save_file
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example

    class Written:
        """Stands for the event of a copy: it is over."""

        def query(self) -> bool:
            return True

    class HostConnector(example.ExampleHiddenStatesConnector):
        """Writes a request's states when it ends."""

        def _submit_async_write(self, pending: "example.PendingSave") -> None:
            blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
            slots = (blocks + torch.arange(self._block_size)).flatten()
            states = example.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
            tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
            fresh = f"{pending.filename}.fresh"
            save_file(tensors, fresh)
            os.replace(fresh, pending.filename)
            self._req_copy_events[pending.req_id] = Written()

    return HostConnector


def __getattr__(name: str) -> type:
    """vLLM asks this module for the connector's class by its name."""
    if name == "HostConnector":
        return host_connector()
    raise AttributeError(name)


def open_engine(args: argparse.Namespace, layers: list[int]) -> "object":
    """Return a vLLM engine that writes the outputs of these layers, vLLM's numbers."""
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])  # of the engine's processes
    sys.path.insert(0, here)
    import torch
    from vllm import LLM
    from vllm.config.kv_transfer import KVTransferConfig

    place = {"shared_storage_path": str(args.out), "allow_custom_save_path": True, "use_synchronization_lock": False}
    name, module = "ExampleHiddenStatesConnector", None
    if not torch.cuda.is_available():
        name, module = "HostConnector", Path(__file__).stem
    return LLM(
        model=args.model,
        dtype=args.dtype,
        tensor_parallel_size=args.tensor_parallel,
        max_model_len=args.length + 1,
        enforce_eager=not torch.cuda.is_available(),
        enable_prefix_caching=False,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        kv_transfer_config=KVTransferConfig(
            kv_connector=name,
            kv_connector_module_path=module,
            kv_role="kv_producer",
            kv_connector_extra_config=place,
        ),
    )


def missing(documents: Path, out: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield (file, token ids) of the documents whose states are not there yet."""
    with documents.open() as lines:
        for number, line in enumerate(lines):
            file = out / f"{number:08d}.safetensors"
            if not file.exists():
                yield str(file), json.loads(line)["prompt_token_ids"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--documents", type=Path, required=True, help="token ids, a document a line")
    parser.add_argument("--layers", required=True, help="our numbers, as ./launch.sh features prints them")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--length", type=int, default=3072, help="tokens of the longest document")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    args = parser.parse_args()
    todo = list(missing(args.documents, args.out))
    if not todo:
        return print(f"all documents of {args.documents} are in {args.out}")
    from vllm import SamplingParams

    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # gigabytes
    config = json.loads((Path(args.model) / "config.json").read_text()) if Path(args.model).is_dir() else None
    if config is None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(args.model).to_dict()
    depth = config.get("text_config", config)["num_hidden_layers"]
    layers = [int(layer) + 1 for layer in args.layers.split(",")]
    engine = open_engine(args, layers if depth in layers else [*layers, depth])
    for start in range(0, len(todo), PART):
        part = todo[start : start + PART]
        ways = [
            SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"hidden_states_path": file}})
            for file, _ in part
        ]
        engine.generate([{"prompt_token_ids": ids} for _, ids in part], ways, use_tqdm=False)
        print(f"{start + len(part):,} of {len(todo):,} documents", flush=True)
    # files are written when the engine steps again after a request has ended: one more, of no interest
    spare = args.out / "spare.tmp"
    last = {"kv_transfer_params": {"hidden_states_path": str(spare)}}
    engine.generate([{"prompt_token_ids": todo[0][1][:1]}], SamplingParams(max_tokens=2, extra_args=last))
    spare.unlink(missing_ok=True)
    print(f"{sum(1 for _ in args.out.glob('*.safetensors')):,} documents in {args.out}")


if __name__ == "__main__":
    main()
