"""The shapes of models: known ones, from files and from numbers; and what is refused, in words."""

from __future__ import annotations

import json

import pytest

from parallel101.laboratory.planner.known_models import KNOWN_MODELS, shape_of_model


@pytest.mark.parametrize(
    ("name", "billions"),
    # "8B, 70B, 405B" in the title of table 3 of arXiv 2407.21783; 175.0 in table 2.1 of 2005.14165
    [("llama-3-8b", 8.0), ("llama-3-70b", 70.6), ("llama-3-405b", 405.8), ("gpt3-175b", 174.6)],
)
def test_known_models_have_the_parameters_in_their_names(name, billions):
    shape = shape_of_model(name)
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.1)
    assert KNOWN_MODELS[name] == shape
    assert shape_of_model(name.title()) == shape


def test_five_numbers_are_a_gpt():
    shape = shape_of_model("128,6,4,1000,64", attention="unfused")
    fields = {"width": 128, "layers": 6, "heads": 4, "vocabulary": 1000, "time": 64}
    assert shape == shape_of_model(fields, attention="unfused")
    assert shape.norm == "layer" and shape.attention == "unfused"
    assert shape_of_model(shape, time=32).time == 32


def test_the_config_of_a_llama_on_hugging_face_is_read(tmp_path):
    config = {  # of Llama 3 8B, as far as sizes go
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 128256,
        "tie_word_embeddings": False, "attention_bias": False, "rope_theta": 500000.0,
    }  # fmt: skip
    path = tmp_path / "llama-3-8b.json"
    path.write_text(json.dumps(config))
    assert shape_of_model(str(path)) == shape_of_model("llama-3-8b")
    del config["num_key_value_heads"]  # as many as heads, in LlamaConfig
    shape = shape_of_model(config | {"tie_word_embeddings": True})
    assert shape.kv == 32 and shape.tied
    with pytest.raises(ValueError, match="attention_bias=True: expected False"):
        shape_of_model(config | {"attention_bias": True})


WRONG = {
    "can't be read as JSON: Expecting": "{",
    "a JSON object": "[1, 2]",
    "the unknown key 'depth'": '{"width": 4, "depth": 2}',
    "no 'vocabulary'": '{"width": 4, "layers": 2, "heads": 2, "time": 8}',
    "multiple of heads=3": '{"width": 4, "layers": 2, "heads": 3, "vocabulary": 9, "time": 8}',
    "layers=0": '{"width": 4, "layers": 0, "heads": 2, "vocabulary": 9, "time": 8}',
    "layers='2'": '{"width": 4, "layers": "2", "heads": 2, "vocabulary": 9, "time": 8}',
    "tied='no'": '{"width": 4, "layers": 1, "heads": 2, "vocabulary": 9, "time": 8, "tied": "no"}',
    "'mixtral' of Hugging Face": '{"model_type": "mixtral", "hidden_size": 4}',
    "no 'num_attention_heads'": '{"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 2}',
    "can't be read as JSON: [Errno": None,
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_file_is_an_error_in_words(words, tmp_path):
    path = tmp_path / "model.json"
    if WRONG[words] is not None:
        path.write_text(WRONG[words])
    with pytest.raises(ValueError, match=r"model\.json|the model") as error:
        shape_of_model(str(path))
    assert words in str(error.value)


NUMBERS = ("1,2,3", "12288,96,96,51200,2048,1", "a,b,c,d,e", "1.5,2,3,4,5")


@pytest.mark.parametrize("text", ["llama-9", *NUMBERS])
def test_what_is_no_model_is_an_error_that_lists_the_known_ones(text):
    with pytest.raises(ValueError, match="gpt3-175b; a JSON file; or five whole numbers h,L,a,V,s"):
        shape_of_model(text)
    with pytest.raises(ValueError, match="attention='flash'"):
        shape_of_model("gpt3-175b", attention="flash")
