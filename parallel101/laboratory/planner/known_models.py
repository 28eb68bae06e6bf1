"""The shape of a model to plan for: by name, from a JSON file, or from five numbers.

    "llama-3-70b"              one of KNOWN_MODELS
    "12288,96,96,51200,2048"   width, layers, heads, vocabulary, time of a GPT
    "model.json"               the fields of ModelShape, such as {"width": 4096, "layers": 32, …}
    "config.json"              of a LLaMA on Hugging Face: it has "model_type": "llama"

Hugging Face's keys are those of LlamaConfig in transformers,
src/transformers/models/llama/configuration_llama.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from parallel101.cost.model_shape import ModelShape


class KnownModel(NamedTuple):
    """A published model: its shape, the samples of a step, and where both come from.

    `batch` is None if the source has no number for it.
    """

    shape: ModelShape
    batch: int | None
    source: str


HERD = '"The Llama 3 Herd of Models" (arXiv 2407.21783), table 3; vocabulary: their tokenizer\'s'
HERD += " 128,000 tokens and 256 special ones; time: section 3.4.1, before the context is extended"


# what LLaMAs have in common
LLAMA: dict[str, Any] = {
    "gated": True,
    "norm": "rms",
    "biases": False,
    "positions": "rotary",
    "tied": False,
}
LLAMA_3 = ModelShape(4096, 32, 32, 128256, 8192, 8, 14336, **LLAMA, name="llama-3-8b")
LLAMA_3_70B = replace(
    LLAMA_3, width=8192, layers=80, heads=64, feed_forward=28672, name="llama-3-70b"
)
LLAMA_3_405B = replace(
    LLAMA_3, width=16384, layers=126, heads=128, feed_forward=53248, name="llama-3-405b"
)
GPT_3 = ModelShape(12288, 96, 96, 50257, 2048, name="gpt3-175b")
GPT_3_PAPER = '"Language Models are Few-Shot Learners" (arXiv 2005.14165), table 2.1; vocabulary: '
GPT_3_PAPER += "GPT-2's; batch: 1,536 samples, as in Narayanan et al. (arXiv 2104.04473), table 1"


KNOWN_MODELS = {
    **{shape.name: KnownModel(shape, None, HERD) for shape in (LLAMA_3, LLAMA_3_70B, LLAMA_3_405B)},
    GPT_3.name: KnownModel(GPT_3, 1536, GPT_3_PAPER),
}

# Hugging Face's key → ModelShape's
HUGGING_FACE = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "feed_forward",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "time",
    "tie_word_embeddings": "tied",
}


def shape_of_model(
    model: str | Path | Mapping[str, Any] | ModelShape,
    *,
    time: int | None = None,
    attention: str = "fused",
) -> ModelShape:
    """Return the shape of `model`.

    Args:
        model: a name in KNOWN_MODELS, the path of a JSON file, "h,L,a,V,s", the fields of a
            ModelShape, or a ModelShape.
        time: tokens of a sample, in place of the model's own.
        attention: "fused" or "unfused", in place of the model's own, unless `model` is a
            ModelShape.

    Raises ValueError, in words, for anything else.
    """
    if attention not in ("fused", "unfused"):
        raise ValueError(f'attention={attention!r}: expected "fused" or "unfused"')
    if isinstance(model, ModelShape):
        shape = model
    elif isinstance(model, Mapping):
        shape = replace(from_keys(model, "the model"), attention=attention)
    else:
        shape = replace(from_text(str(model)), attention=attention)
    return shape if time is None else replace(shape, time=time)


def batch_of_model(model: Any) -> int | None:
    """Return the samples of a step with which a known model was trained; None if unknown."""
    known = KNOWN_MODELS.get(model.casefold()) if isinstance(model, str) else None
    return known.batch if known else None


def from_text(text: str) -> ModelShape:
    """Return the shape that a text gives: a name, five numbers, or the path of a file."""
    if (known := KNOWN_MODELS.get(text.casefold())) is not None:
        return known.shape
    if text.count(",") >= 2:
        return from_numbers(text)
    path = Path(text)
    if path.suffix == ".json" or path.is_file():
        return from_file(path)
    raise ValueError(
        f"the model {text!r} is unknown: expected one of {', '.join(KNOWN_MODELS)}; a JSON file; "
        "or five numbers h,L,a,V,s (width, layers, heads, vocabulary, time)"
    )


def from_numbers(text: str) -> ModelShape:
    names = ("width", "layers", "heads", "vocabulary", "time")
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != len(names):
        raise ValueError(
            f"the model {text!r}: expected five whole numbers h,L,a,V,s (width, layers, heads, "
            "vocabulary, time), such as 12288,96,96,51200,2048"
        )
    return made(f"the model {text!r}", **dict(zip(names, numbers)))


def from_file(path: Path) -> ModelShape:
    """Return the shape in a file.

    Raises ValueError for a file that can't be read, or isn't JSON with a model's keys.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:  # of the encoding, or of JSON
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object with a model's keys")
    shape = from_keys(found, str(path))
    return shape if shape.name else replace(shape, name=path.stem)


def from_keys(found: Mapping[str, Any], where: str) -> ModelShape:
    """Return the shape that these keys give: ModelShape's, or those of a LlamaConfig."""
    if "model_type" in found or "hidden_size" in found:
        return from_hugging_face(found, where)
    allowed = {field.name: field for field in fields(ModelShape)}
    unknown = sorted(set(found) - set(allowed))
    needed = [name for name, field in allowed.items() if field.default is MISSING]
    missing = [name for name in needed if name not in found]
    if unknown or missing:
        what = f"the unknown key {unknown[0]!r}" if unknown else f"no {missing[0]!r}"
        raise ValueError(
            f"{where} has {what}: expected {', '.join(needed)}, and, if they differ from a GPT's, "
            f"{', '.join(name for name in allowed if name not in needed)}"
        )
    return made(where, **found)


def from_hugging_face(found: Mapping[str, Any], where: str) -> ModelShape:
    """Return the shape of a LLaMA from its config.json.

    Raises ValueError for other kinds of models, whose layers aren't those of models/llama.py.
    """
    if found.get("model_type", "llama") != "llama":
        raise ValueError(
            f'{where} is a {found["model_type"]!r} of Hugging Face: expected "llama", or the '
            "fields of ModelShape (width, layers, heads, vocabulary, time, …)"
        )
    # what LlamaConfig has if a key is missing, apart from sizes, which every file has
    values: dict[str, Any] = {"num_key_value_heads": None, "tie_word_embeddings": False, **found}
    missing = [key for key in HUGGING_FACE if key not in values]
    if missing:
        raise ValueError(
            f"{where} has no {missing[0]!r}: expected {', '.join(HUGGING_FACE)}, as in the "
            "config.json of a LLaMA"
        )
    sizes = {ours: values[key] for key, ours in HUGGING_FACE.items()}
    name = str(found.get("_name_or_path", "")).rpartition("/")[2]
    shape = made(where, **{**LLAMA, **sizes, "name": name})
    usual = {"head_dim": shape.head_width, "attention_bias": False, "mlp_bias": False}
    for key, expected in usual.items():
        if (value := found.get(key) or expected) != expected:
            raise ValueError(
                f"{where} has {key}={value!r}: expected {expected!r}; other LLaMAs aren't modelled"
            )
    return shape


def made(where: str, **values: Any) -> ModelShape:
    """Return a ModelShape. Its ValueError names the place where the values were found."""
    try:
        return ModelShape(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None
