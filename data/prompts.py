"""Held-out prompts for evaluation, as token ids."""

from itertools import islice

from data.rows import DataConfig, held_out_rows


def held_out_prompts(config: DataConfig, tokenizer, count: int, tokens: int) -> list[list[int]]:
    """Return `count` prompts that training never saw.

    A chat gives all before its last answer, a row with a prompt of its own that prompt (the last `tokens` tokens);
    plain text gives windows of `tokens` tokens, taken round-robin: one from the start of every text, then one from
    further on in every text that is long enough, so that few texts still give many different prompts. Raises
    ValueError if there are too few.
    """
    prompts, windows = [], []
    for row in islice(held_out_rows(config), 20 * count):
        if row["messages"]:
            asked = row["messages"][:-1]  # the last one is an answer
            ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
            prompts.append(ids[-tokens:])
            continue
        if row["prompt"]:
            prompts.append(tokenizer(row["prompt"])["input_ids"][-tokens:])
            continue
        ids = tokenizer(row["text"])["input_ids"]
        starts = range(0, len(ids) - 2 * tokens, 4 * tokens)
        windows += [(turn, ids[start : start + tokens]) for turn, start in enumerate(starts)]
    prompts += [ids for _, ids in sorted(windows, key=lambda window: window[0])]
    if len(prompts) < count:
        raise ValueError(f"evaluation.prompts={count}: the held-out text gives only {len(prompts)} prompts")
    return prompts[:count]
