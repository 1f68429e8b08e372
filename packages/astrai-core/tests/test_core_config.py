"""Row CF1 and decision 10: configs are frozen pydantic dataclasses that refuse what they do not know."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_core import ModelConfig, SamplingParams
from astrai_core.config.families import COMMON_KEYS, FAMILIES, INERT_KEYS
from astrai_core.errors import CheckpointError, ConfigError

TINY = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden_size": 3}, r"unknown field 'hiden_size' for model_type 'llama' \(did you mean 'hidden_size'\?\)"),
        ({"sliding_window": 3}, "unknown field 'sliding_window' for model_type 'llama'"),
        ({"model_type": "lama"}, r"'lama' is not supported \(did you mean 'llama'\?\)"),
        ({"model_type": None}, "field 'model_type': None is not supported"),
        ({"vocab_size": "many"}, "field 'vocab_size': .*got 'many'"),
        ({"num_hidden_layers": 0}, r"field 'num_hidden_layers': .*greater than 0 \(got 0\)"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 5}, r"head_dim \(5\).* must be even"),
        ({"hidden_act": "gelu"}, "field 'hidden_act'"),
        ({"rms_norm_eps": -1.0}, "field 'rms_norm_eps': .*greater than 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: field 'rope_type'.*'llama3'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type 'linear' needs the key 'factor'"),
        (
            {"rope_parameters": {"rope_type": "default", "fctor": 2}},
            r"unknown field 'fctor' \(did you mean 'factor'\?\)",
        ),
        ({"rope_scaling": "yarn"}, "field 'rope_scaling': must be an object"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised checkpoints are not supported"),
    ],
)
def test_a_bad_key_is_named_with_its_remedy(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_dict(TINY | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_required_keys(missing):
    with pytest.raises(ConfigError, match=f"field '{missing}' is required"):
        ModelConfig.from_dict({k: v for k, v in TINY.items() if k != missing})


def test_strict_false_passes_unknown_keys_but_never_quantisation():
    assert ModelConfig.from_dict(TINY | {"novel_key": 1}, strict=False) == ModelConfig.from_dict(TINY)
    with pytest.raises(ConfigError, match="quantised"):
        ModelConfig.from_dict(TINY | {"quantization_config": {"bits": 4}}, strict=False)


def test_inert_keys_change_nothing():
    assert ModelConfig.from_dict(TINY | dict.fromkeys(INERT_KEYS)) == ModelConfig.from_dict(TINY)
    for family in FAMILIES.values():
        assert not INERT_KEYS & (COMMON_KEYS | family.reads), "a key is either read or inert"


def test_frozen():
    config = ModelConfig.from_dict(TINY)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1


def test_derived_fields():
    config = ModelConfig.from_dict(TINY | {"eos_token_id": [3, 5], "torch_dtype": "bfloat16"})
    assert (config.head_dim, config.num_key_value_heads, config.eos_token_ids, config.dtype) == (
        4,
        4,
        (3, 5),
        "bfloat16",
    )


family_configs = st.fixed_dictionaries(
    {
        "model_type": st.sampled_from(sorted(FAMILIES)),
        "vocab_size": st.integers(1, 10**6),
        "hidden_size": st.integers(1, 64).map(lambda n: 8 * n),
        "intermediate_size": st.integers(1, 4096),
        "num_hidden_layers": st.integers(1, 6),
        "num_attention_heads": st.sampled_from([2, 4]),
        "num_key_value_heads": st.sampled_from([1, 2]),
        "head_dim": st.sampled_from([8, 64, 80]),
        "tie_word_embeddings": st.booleans(),
        "eos_token_id": st.one_of(st.none(), st.integers(0, 9), st.lists(st.integers(0, 9), min_size=1)),
        "rope_parameters": st.sampled_from(
            [
                {"rope_type": "default", "rope_theta": 1e6},
                {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
                {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False},
            ]
        ),
    }
)


@given(family_configs)
def test_round_trip_through_config_json(data):
    config = ModelConfig.from_dict(data)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_architecture_that_its_family_cannot_express_is_refused():
    config = dataclasses.replace(ModelConfig.from_dict(TINY), qk_norm=True)
    with pytest.raises(ConfigError, match="not expressible as model_type 'llama'"):
        config.to_dict()


def test_config_file_errors_name_the_file(tmp_path):
    with pytest.raises(CheckpointError, match="config.json: no such file"):
        ModelConfig.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    for text, message in [
        ("{", "not valid JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"model_type": 1}', "model_type"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            ModelConfig.from_pretrained(tmp_path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2.0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("n", 0),
        ("seed", 2**63),
        ("logprobs", -1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("inf")),
        ("repetition_penalty", 0.0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("logit_bias", {3: 1000.0}),
        ("rep_window", -1),
    ],
)
def test_sampling_params_name_the_field(field, value):
    with pytest.raises(ConfigError, match=field) as caught:
        SamplingParams.from_dict({field: value})
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_sampling_params_off_values_and_scalars():
    for off in (0, -1, None):
        assert SamplingParams(top_k=off).top_k in (0, -1)
    assert SamplingParams(stop="x", stop_token_ids=7).stop == ("x",)
    assert SamplingParams.from_dict(SamplingParams(stop=["a", "b"], logit_bias={1: 2.0}).to_dict()).stop == ("a", "b")
