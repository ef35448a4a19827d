"""Command line options for the target and the prompts of a benchmark."""

import argparse
from itertools import islice

from data.prompts import select_evaluation_prompts
from data.rows import DataConfig, round_robin
from data.suites import SuiteConfig, load_suite
from infer import Target, load_target


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `load_cli_target`."""
    parser.add_argument("--target", default="embedded", help="folder, hub id or name")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--quantization", help="of the target's weights; values as of target.quantization="
    )


def load_cli_target(args: argparse.Namespace) -> Target:
    """Load the target that the options name, on the CPU."""
    if args.quantization:
        return load_target(
            args.target, device="cpu", dtype=args.dtype, quantization=args.quantization
        )
    return load_target(args.target, device="cpu", dtype=args.dtype)


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `load_cli_prompts`."""
    parser.add_argument(
        "--suite", help="folder of question sets (suite.folder=); default: held-out prompts"
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=96,
        help="tokens of a held-out prompt, and context tokens of a timed forward pass",
    )


def load_held_out_prompts(tokenizer, count: int, tokens: int, outside: int = 0) -> list[list[int]]:
    """Return the token ids of `count` held-out prompts and `outside` prompts from outside the data.

    tokens: length of a held-out prompt
    """
    prompts = select_evaluation_prompts(DataConfig(), tokenizer, count, tokens, outside)
    return [prompt.ids for prompt in prompts]


def load_cli_prompts(args: argparse.Namespace, tokenizer, outside: int = 0) -> list[list[int]]:
    """Return the token ids of --prompts prompts.

    With --suite these are the first questions of chats, round-robin from all of its sets; otherwise
    they are held-out prompts and `outside` prompts from outside the data.
    """
    if args.suite is None:
        return load_held_out_prompts(tokenizer, args.prompts, args.prompt_tokens, outside)
    suite = load_suite(SuiteConfig("files", args.suite))
    chats = round_robin([question_set.chats for question_set in suite])
    prompts = []
    for chat in islice(chats, args.prompts):
        encoded = tokenizer.apply_chat_template(
            chat[0], add_generation_prompt=True, return_dict=True
        )
        prompts.append(encoded["input_ids"])
    return prompts
