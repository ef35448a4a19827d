"""Folders of transformers' own DFlash class (5.23): read with its log-probabilities, written so
that its `generate` decodes with them."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from infer import load_drafter
from infer.config import DrafterConfig
from infer.drafters.build import create_drafter, read_options_from_config
from infer.drafters.dflash.model import DFlash
from infer.formats.compatibility import check_engines
from infer.formats.export import export_drafter

if not hasattr(transformers, "MuseGlimmerAssistantModel"):
    pytest.skip(
        f"transformers {transformers.__version__} has no DFlash drafter", allow_module_level=True
    )

INPUT_IDS = torch.randint(90, (1, 30), generator=torch.Generator().manual_seed(5))
TARGET_LAYERS = 6  # of `make_tiny`'s targets


def save_transformers_drafter(folder, seed: int = 0, **changes):
    """transformers' class with random weights, saved; its config fits `make_tiny`'s targets."""
    options = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": 5,
        "mask_token_id": 96,
        "target_layer_ids": [1, 4],
        "layer_types": ["full_attention"] * 2,
    }
    torch.manual_seed(seed)
    model = transformers.MuseGlimmerAssistantModel(
        transformers.MuseGlimmerAssistantConfig(**options | changes)
    )
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(
            parameter, 1.0 if name.endswith("norm.weight") or parameter.ndim == 1 else 0.0, 0.2
        )
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def transformers_marginals(model, target, cut: int) -> torch.Tensor:
    """Return the marginals (L, V) after INPUT_IDS by transformers' class. The context is given in
    two pieces with a block drafted in between, as its generator does."""
    from transformers.cache_utils import DFlashCache

    config, cache = model.config, DFlashCache(config=model.config)
    cache.activate_past_recording()
    length = INPUT_IDS.shape[1] - 1
    states = target.model(INPUT_IDS[:, :-1], output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in config.target_layer_ids], -1)
    for begin, end in ((0, cut), (cut, length)):
        cache.set_previous_accepted_tokens(end - begin)
        if begin:
            cache.crop(-config.block_size)
        block = torch.full((1, config.block_size), config.mask_token_id)
        block[0, 0] = INPUT_IDS[0, end]
        out = model(
            noise_embeds=target.embedding(block),
            context_hidden_states=features[:, begin:end],
            position_ids=torch.arange(begin, end + config.block_size)[None],
            attention_mask=torch.ones(1, end + config.block_size, dtype=torch.long),
            past_key_values=cache,
        )
    return target.compute_logits(out.last_hidden_state[0, 1:]).float().log_softmax(-1)


@torch.no_grad()
def our_marginals(drafter, target, cut: int) -> torch.Tensor:
    """The same by ours."""
    length = INPUT_IDS.shape[1] - 1
    documents = torch.zeros_like(INPUT_IDS[:, :-1])
    positions = torch.arange(length)[None]
    features = target.compute_packed_features(
        INPUT_IDS[:, :-1], positions, documents, drafter.layer_ids
    ).layer_features
    state = drafter.allocate_state(1, 64)
    with state.add(1) as row:
        drafter.update_context(target, features[:, :cut], INPUT_IDS[:, :cut], [cut], row)
    drafter.update_context(target, features[:, cut:], INPUT_IDS[:, cut:-1], [length - cut], state)
    return drafter.draft_block(target, INPUT_IDS[0, -1:], state).marginals[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "target_layer_ids": [1, TARGET_LAYERS - 1]
        },  # transformers taps the last layer behind the last norm
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
        {"layer_types": None, "sliding_window": 9},
        {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
            "rms_norm_eps": 1e-3,
        },
    ],
    ids=["full", "last tap", "mixed", "sliding", "rope"],
)
def test_a_folder_of_transformers_own_has_its_log_probabilities(changes, make_tiny, tmp_path):
    target = make_tiny()[0]
    model = save_transformers_drafter(tmp_path, **changes)
    drafter = load_drafter(tmp_path, target_layers=TARGET_LAYERS)
    drafter.check_target(target)
    for cut in (3, 20):
        expected = transformers_marginals(model, target, cut)
        marginals = our_marginals(drafter, target, cut)
        assert (expected.exp() - 1 / 97).abs().max() > 0.01  # weights that say something
        assert (expected - marginals).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["full", "sliding", "last tap"])
def test_what_is_exported_decodes_in_their_generate_and_is_read_back(kind, make_tiny, tmp_path):
    target, drafter = make_tiny()
    config = drafter.config
    if kind == "sliding":
        config.layer_types = ["sliding_attention"] * 2
        config.sliding_window = 7
        config.dflash_config["causal"] = False
    elif kind == "last tap":
        config.dflash_config |= {"target_layer_ids": [1, TARGET_LAYERS - 1], "last_tap": "normed"}
    weights = drafter.state_dict()
    drafter = DFlash(config).eval().requires_grad_(False)
    drafter.load_state_dict(weights)
    export_drafter(drafter, "transformers", None, tmp_path)
    assert {verdict.engine for verdict in check_engines(tmp_path) if not verdict.problems} == {
        "transformers (speculation_type=dflash)",
        "blockdraft",
    }
    assert (
        not {"fc.weight", "hidden_norm.weight"} & load_file(tmp_path / "model.safetensors").keys()
    )
    model = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(model).__name__ == "MuseGlimmerAssistantModel"
    marginals = our_marginals(load_drafter(tmp_path), target, 11)
    assert torch.equal(marginals, our_marginals(drafter, target, 11))
    assert (transformers_marginals(model, target, 11) - marginals).abs().max() < 1e-5
    for prompt in (INPUT_IDS[:, :4], INPUT_IDS):
        options = {
            "attention_mask": torch.ones_like(prompt),
            "max_new_tokens": 20,
            "do_sample": False,
        }
        plain = target.model.generate(prompt, **options)
        drafted = target.model.generate(
            prompt, assistant_model=model, speculation_type="dflash", **options
        )
        assert torch.equal(plain, drafted)


def test_a_tap_of_the_last_layer_is_trained_and_drafted_as_it_says(make_tiny, tmp_path):
    """`raw` is what the layer puts out, `normed` what transformers' `hidden_states[N]` holds; in
    the folder, in packed rows, in prefill and in verification."""
    target = make_tiny()[0]
    positions = torch.arange(INPUT_IDS.shape[1])[None]
    features = {}
    for kind in ("raw", "normed"):
        options = DrafterConfig(
            layers=1,
            block_size=4,
            mask_token_id=96,
            target_layer_ids=[TARGET_LAYERS - 1, 1],
            last_layer_output=kind,
        )
        drafter = create_drafter(options, target)
        drafter.init_weights(torch.Generator().manual_seed(0))
        export_drafter(drafter, "dflash", None, tmp_path / kind)
        again = load_drafter(tmp_path / kind)
        assert (
            again.layer_ids == drafter.layer_ids
            and read_options_from_config(again)["last_layer_output"] == kind
        )
        cache = target.allocate_cache(1, 40)
        with cache.add_rows(1) as row:
            prefilled = target.extend_cache(INPUT_IDS.tolist(), row, again.layer_ids).layer_features
        features[kind] = target.compute_packed_features(
            INPUT_IDS, positions, torch.zeros_like(INPUT_IDS), again.layer_ids
        ).layer_features
        assert torch.allclose(
            prefilled, features[kind], atol=1e-4
        )  # states of up to 15, sums of another order
    expected = target.model(INPUT_IDS, output_hidden_states=True).hidden_states
    assert torch.allclose(
        features["normed"], torch.cat([expected[TARGET_LAYERS], expected[2]], -1), atol=1e-5
    )
    raw = features["raw"][..., :32]
    assert not torch.allclose(raw, expected[TARGET_LAYERS], atol=1e-2)
    assert torch.allclose(target.decoder.norm(raw), expected[TARGET_LAYERS], atol=1e-5)
    with pytest.raises(ValueError, match="does not contain the target's last layer, 5"):
        create_drafter(
            DrafterConfig(mask_token_id=96, target_layer_ids=[1, 4], last_layer_output="normed"),
            target,
        )
    with pytest.raises(ValueError, match="last_layer_output=both"):
        DrafterConfig(last_layer_output="both").check()


def test_check_says_what_each_engine_makes_of_a_tap_of_the_last_layer(make_tiny, tmp_path):
    target = make_tiny()[0]
    wrong = {}
    for kind in ("raw", "normed"):
        options = DrafterConfig(
            layers=1,
            block_size=4,
            mask_token_id=96,
            target_layer_ids=[1, TARGET_LAYERS - 1],
            last_layer_output=kind,
        )
        drafter = create_drafter(options, target)
        export_drafter(drafter, "dflash", None, tmp_path / kind)
        wrong[kind] = {
            v.engine.split()[0]
            for v in check_engines(tmp_path / kind)
            if "last" in " ".join(v.problems)
        }
    assert wrong == {"raw": {"SGLang", "the"}, "normed": {"vLLM", "SGLang"}}
    with pytest.raises(ValueError, match="last_tap"):
        export_drafter(drafter, "speculators", target, tmp_path / "no")


def test_a_folder_that_does_not_say_where_it_taps_the_last_layer_is_read_as_its_authors_code_does(
    make_tiny, tmp_path
):
    import json

    target = make_tiny()[0]
    options = DrafterConfig(
        layers=1, block_size=4, mask_token_id=96, target_layer_ids=[1, TARGET_LAYERS - 1]
    )
    export_drafter(create_drafter(options, target), "dflash", None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dflash_config"]["last_tap"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(
        UserWarning, match="does not say whether the drafter reads the target's last layer"
    ):
        assert load_drafter(tmp_path).layer_ids == (1, TARGET_LAYERS)
    del config["num_target_layers"]  # the layers of the target decide
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"target_layers=6"):
        load_drafter(tmp_path).check_target(target)
    with pytest.warns(UserWarning, match="reads the target's last layer"):
        load_drafter(tmp_path, target_layers=6).check_target(target)
