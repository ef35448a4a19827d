"""Answers to a file of batch requests, written by vLLM engines on a Ray cluster: what `regenerate results=` reads.

    ./launch.sh regenerate ... batch=requests.jsonl                        # writes what is to be asked next
    python infer/serving/ray_batches.py --model M --requests requests.jsonl --out results1.jsonl --engines 8
    ./launch.sh regenerate ... batch=requests.jsonl results=[results1.jsonl]

Runs in an environment with `ray[data]` and vLLM, and imports nothing of this project, since these want packages of
other versions. Requests and results are those of OpenAI's batch API, as `vllm run-batch` has them, with token ids. A
stopped run goes on where it was.
"""

import argparse
import json
from functools import partial
from pathlib import Path

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "ignore_eos", "stop")


def ends_of(model: str, tokenizer: "object") -> frozenset[int]:
    """Return the tokens that end a text of the model."""
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # it has none
        ids = tokenizer.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])


def prompt_ids(tokenizer: "object", body: dict) -> list[int]:
    """Return the token ids of what a request asks: a text, or messages through the chat template, which reads a tool
    call's arguments as objects."""
    if "messages" not in body:
        return tokenizer(body["prompt"])["input_ids"]
    messages = json.loads(json.dumps(body["messages"]))
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    told = dict(body.get("chat_template_kwargs") or {})
    told |= {"tools": body["tools"]} if body.get("tools") else {}
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **told)["input_ids"]


def asked(tokenizer: "object", row: dict) -> dict:
    """Return a line of the requests, {"item": line}, as a row for Ray's engines."""
    body = json.loads(row["item"])["body"]
    sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    return {"line": row["item"], "tokenized_prompt": prompt_ids(tokenizer, body), "sampling_params": sampling}


def choice_of(row: dict, body: dict, ends: frozenset[int]) -> dict:
    """Return what an engine wrote as the choice of a result."""
    ids = [int(id) for id in row["generated_tokens"]]
    choice: dict[str, object] = {"index": 0, "token_ids": ids, "finish_reason": "stop"}
    if not ids or ids[-1] not in ends:
        cut = len(ids) >= body["max_tokens"]
        choice |= {"finish_reason": "length"} if cut else {"stop_reason": (body.get("stop") or [None])[0]}
    text = row["generated_text"]
    return choice | ({"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text})


def result_line(row: dict, ends: frozenset[int]) -> str:
    """Return an engine's row as a line of the results."""
    request = json.loads(row["line"])
    result: dict[str, object] = {"custom_id": request["custom_id"], "response": None, "error": None}
    if row.get("__inference_error__"):
        result["error"] = {"message": str(row["__inference_error__"])}
    else:
        body = {"model": request["body"]["model"], "choices": [choice_of(row, request["body"], ends)]}
        result["response"] = {"status_code": 200, "body": body}
    return json.dumps(result, ensure_ascii=False)


def missing(requests: Path, out: Path) -> list[str]:
    """Return the requests that have no result yet; a last line that was not finished is cut off."""
    known: set[str] = set()
    if out.exists():
        text = out.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            with out.open("rb+") as file:
                file.truncate(len(whole.encode("utf-8")))
        known = {json.loads(line)["custom_id"] for line in whole.splitlines()}
    lines = requests.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if json.loads(line)["custom_id"] not in known]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", type=int, default=1, help="engines side by side")
    parser.add_argument("--side-by-side", type=int, default=64, help="requests that are handed to an engine together")
    parser.add_argument("--engine", type=json.loads, default={}, help='vLLM\'s options, {"tensor_parallel_size": 2}')
    parser.add_argument("--resources", type=json.loads, help='what an engine takes, {"CPU": 1}; by default its GPUs')
    args = parser.parse_args()
    todo = missing(args.requests, args.out)
    if not todo:
        return print(f"all requests of {args.requests} are answered in {args.out}")
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ends = ends_of(args.model, tokenizer)
    config = vLLMEngineProcessorConfig(
        model_source=args.model,
        engine_kwargs=args.engine,
        concurrency=args.engines,
        batch_size=args.side_by_side,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        should_continue_on_error=True,
        log_engine_metrics=False,
        placement_group_config={"bundles": [args.resources]} if args.resources else None,
    )
    engines = build_processor(config, preprocess=partial(asked, tokenizer))
    with args.out.open("a", encoding="utf-8") as file:
        for count, row in enumerate(engines(ray.data.from_items(todo)).iter_rows(), 1):
            file.write(result_line(row, ends) + "\n")
            file.flush()
            if count % 1000 == 0 or count == len(todo):
                print(f"{count:,} of {len(todo):,} requests", flush=True)


if __name__ == "__main__":
    main()
