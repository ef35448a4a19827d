"""Plain decoding by transformers' own `generate`, which every evaluation measures beside ours: speedups
are over the faster of the two."""

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from infer.config import TextOptions
from infer.engine.loops import loop_period
from infer.engine.sequence import Sequence as Text, text_end
from infer.targets.target import Target


def decode_by_generate(target: Target, prompt: list[int], options: TextOptions) -> Text:
    """Continue a prompt with transformers' `generate`, as long as the engine would. A sampled text is
    another than the engine's: it is drawn with other noise."""
    sampled = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    ends = [] if options.ignore_eos else sorted(target.end_ids)
    config = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=options.temperature > 0,
        # none: a token that cannot come, as None would be filled in from the model's own configuration
        eos_token_id=ends or [target.vocabulary],
        pad_token_id=0,
        repetition_penalty=1.0,
        **(sampled if options.temperature else {}),
    )

    def looped(ids: torch.Tensor, scores: object, **unused: object) -> torch.Tensor:
        new = ids[0, len(prompt) :].tolist()
        return torch.tensor([bool(new and loop_period(new, len(new), options.loop_period))], device=ids.device)

    ids = torch.tensor([prompt], device=target.device)
    stops = StoppingCriteriaList([looped] if options.loop_period else [])
    with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(options.seed)
        out = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, stopping_criteria=stops
        )
    text, new = Text(prompt, options), out[0, len(prompt) :].tolist()
    length, text.finish = text_end(new, 0, options, target) or (len(new), "length")
    text.ids, text.commits = new[:length], [1] * length
    text.stats.tokens = length
    text.stats.rounds = length - 1  # the first pass is the prompt's
    text.stats.histogram = [length - 1]
    return text
