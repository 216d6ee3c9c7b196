import pytest
from tests.mixers.cases import CASES
from tests.support import STACKS, small_config

from trellis.models import PRESETS, count_parameters, match_parameters, preset


@pytest.mark.parametrize("name", PRESETS)
def test_presets_match_transformer_plus_plus(name):
    trellis, transformer = preset(name), preset(name, "transformer")
    assert (trellis.num_hidden_layers, trellis.hidden_size) == (
        transformer.num_hidden_layers,
        transformer.hidden_size,
    )
    ours, theirs = count_parameters(trellis), count_parameters(transformer)
    assert abs(ours - theirs) / theirs < 0.01
    assert trellis.mixer_config == {"trellis": {"slots": 64}}


@pytest.mark.parametrize("stack", STACKS)
def test_small_models_are_matched_too(stack):
    layers = small_config(stack).num_hidden_layers
    reference = small_config("transformer", num_hidden_layers=layers)
    matched = match_parameters(small_config(stack), reference)
    wanted = count_parameters(reference)
    assert abs(count_parameters(matched) - wanted) / wanted < 0.01
    assert small_config(stack).intermediate_size == reference.intermediate_size


@pytest.mark.parametrize("width", [64, 128, 768])
@pytest.mark.parametrize("case", CASES)
def test_all_variants_of_mixers_are_matched(case, width):
    mixer, fields = CASES[case]
    sizes = {"hidden_size": width, "num_attention_heads": max(2, width // 64)}
    config = small_config(mixer=mixer, mixer_config=fields, num_hidden_layers=1, **sizes)
    reference = small_config("transformer", num_hidden_layers=1, **sizes)
    wanted = count_parameters(reference)
    assert abs(count_parameters(match_parameters(config, reference)) - wanted) / wanted < 0.01


def test_what_cannot_be_matched_is_an_error():
    tiny = small_config("transformer", intermediate_size=1)
    with pytest.raises(ValueError, match="no MLP width gives this model"):
        match_parameters(small_config("trellis"), tiny)


def test_preset_names_and_overrides():
    with pytest.raises(ValueError, match=r"preset must be one of 125m.*; got '2b'"):
        preset("2b")
    config = preset("125m", vocab_size=1000, mixer_config={"slots": 32})
    assert (config.vocab_size, config.mixer_config) == (1000, {"trellis": {"slots": 32}})
    other = preset("780m", mixer_config={"f": "silu"})
    assert other.mixer_config == {"trellis": {"f": "silu", "slots": 64}}
    assert preset("125m", intermediate_size=100).intermediate_size == 100
