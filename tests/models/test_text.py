"""The text is there without a network, tokens come back as text, and a step's batch is the same
wherever it is asked for.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import parallel101 as p101
from parallel101.models.text import ByteTokenizer, CharTokenizer, TextBatches, read_text


def test_there_is_enough_english_to_learn_from():
    text = read_text()
    assert len(text) > 300_000
    assert text.count(" the ") > 3000
    tokenizer = CharTokenizer(text)
    assert 80 < tokenizer.vocabulary < 200
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(st.text())
def test_tokens_come_back_as_the_text(text):
    for tokenizer in (CharTokenizer(text), ByteTokenizer()):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokens.dtype == torch.int64
        assert not len(tokens) or 0 <= tokens.min() <= tokens.max() < tokenizer.vocabulary


def test_a_character_that_the_text_did_not_have():
    with pytest.raises(ValueError, match="'q' is not among the 3 characters"):
        CharTokenizer("abc").encode("aqc")


def test_a_batch_is_known_by_its_step():
    batches = TextBatches(torch.arange(1000), batch=6, context=9)
    for step in (0, 1, 77):
        inputs, targets = batches(step)
        assert inputs.shape == targets.shape == (6, 9)
        assert torch.equal(targets, inputs + 1), "the token after each"
        assert all(torch.equal(a, b) for a, b in zip(batches(step), (inputs, targets)))
    assert not torch.equal(batches(0)[0], batches(1)[0])
    assert not torch.equal(batches(0)[0], TextBatches(torch.arange(1000), 6, 9, seed=1)(0)[0])
    elsewhere = p101.launch(lambda: batches(77), world_size=2).results
    assert all(torch.equal(inputs, batches(77)[0]) for inputs, _ in elsewhere)


def test_every_place_in_the_text_may_be_a_sample():
    batches = TextBatches(torch.arange(6), batch=200, context=3)
    assert batches(0)[0][:, 0].unique().tolist() == [0, 1, 2]
    assert batches(0)[1].max() == 5
    for n, batch, context in ((9, 0, 3), (9, 1, 0), (3, 1, 3)):
        said = rf"batch={batch}, context={context}\) of {n} tokens: expected"
        with pytest.raises(ValueError, match=said):
            TextBatches(torch.arange(n), batch, context)
