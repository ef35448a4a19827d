"""The target and the prompts that a benchmark is asked for."""

import argparse
from itertools import islice

from data.prompts import evaluation_prompts
from data.rows import DataConfig, in_turn
from data.suites import SuiteConfig, load_suite
from infer import Target, load_target


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the options that `target_of` reads."""
    parser.add_argument("--target", default="embedded", help="folder, hub id or name")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--quantization", help="of the target's weights, as target.quantization= has it"
    )


def target_of(args: argparse.Namespace) -> Target:
    """Load the target on the CPU as it is asked for."""
    told = {"quantization": args.quantization} if args.quantization else {}
    return load_target(args.target, device="cpu", dtype=args.dtype, **told)


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add the options that `prompts_of` reads."""
    parser.add_argument(
        "--suite", help="folder of question sets (suite.folder=) in the place of held-out prompts"
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument(
        "--prompt-tokens", type=int, default=96, help="of held-out prompts, and before a pass"
    )


def held_out(tokenizer, count: int, tokens: int, outside: int = 0) -> list[list[int]]:
    """Return held-out prompts of the embedded model's texts, and `outside` others."""
    return [
        prompt.ids for prompt in evaluation_prompts(DataConfig(), tokenizer, count, tokens, outside)
    ]


def prompts_of(args: argparse.Namespace, tokenizer, outside: int = 0) -> list[list[int]]:
    """Return prompts: first questions from all sets of --suite in turn, or held-out ones and
    `outside` others."""
    if args.suite is None:
        return held_out(tokenizer, args.prompts, args.prompt_tokens, outside)
    chats = in_turn([one.chats for one in load_suite(SuiteConfig("files", args.suite))])
    settings = {"add_generation_prompt": True, "return_dict": True}
    return [
        tokenizer.apply_chat_template(chat[0], **settings)["input_ids"]
        for chat in islice(chats, args.prompts)
    ]
