"""Sampling is deterministic, stays in the vocabulary and does not depend on the layout."""

import pytest

from dilocox.data.tokenizer import NullTokenizer
from tests.distributed.forkserver import run_ranks
from tests.inner.runs import LAYOUTS, VOCAB_SIZE, join_island, make_config, make_inner, train

SAMPLES = [("1 8", 0.0, 3), ("1 8", 1.0, 3), ("1 8", 1.0, 4), ("", 1.0, 3)]


def _sample(rank, config):
    from dilocox.inner.generate import generate

    inner = make_inner(config, join_island(rank, config))
    train(inner, config, range(20))
    tokenizer = NullTokenizer(VOCAB_SIZE)
    samples = [
        generate(inner, tokenizer, prompt, num_tokens=24, temperature=temperature, seed=seed)
        for prompt, temperature, seed in SAMPLES
    ]
    return samples, inner.model.training, train(inner, config, range(20, 21))


@pytest.mark.heavy
def test_text_is_the_same_on_all_ranks_and_layouts():
    (one,) = run_ranks(_sample, 1, make_config())
    parallel = run_ranks(_sample, 4, make_config(parallel=LAYOUTS["TP2xPP2"]))
    assert [result[0] for result in parallel] == [one[0]] * 4
    greedy, sampled, other_seed, without_prompt = ([int(word) for word in text.split()] for text in one[0])
    assert greedy != sampled != other_seed
    for text in (greedy, sampled, other_seed, without_prompt):
        assert len(text) <= 24, "longer than the sequence length of 16"
        assert all(0 <= token < VOCAB_SIZE - 1 for token in text), "no padding row, no end of document"
    assert len(greedy) == 24 or len(sampled) == 24 or len(other_seed) == 24


def test_sampling_leaves_training_as_it_was():
    ((_, training, _),) = run_ranks(_sample, 1, make_config())
    assert training
