"""Any range of a tensor is a few rectangles."""

from itertools import combinations
from math import prod

import pytest
import torch

from tests.distributed.forkserver import run_ranks


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (2, 1, 3)])
def test_rectangles_are_the_range_in_order(shape):
    from dilocox.checkpoint.placed import rectangles

    elements = torch.arange(prod(shape)).view(shape)
    for start, stop in combinations(range(prod(shape) + 1), 2):
        found = list(rectangles(shape, start, stop))
        parts = [
            elements[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten()
            for offsets, sizes in found
        ]
        assert torch.cat(parts).tolist() == list(range(start, stop))
        assert len(found) <= 2 * len(shape) - 1
        assert all(prod(sizes) > 0 for _, sizes in found)


def _entries(rank):
    """What a rank would read of a checkpoint that lacks a key, or has it with another shape."""
    from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

    from dilocox.checkpoint.placed import entries_to_load
    from dilocox.errors import CheckpointError
    from dilocox.param_shard import ParamShard

    def saved(*shape):
        return TensorStorageMetadata(TensorProperties(), torch.Size(shape), [])

    messages = []
    for name, contents in (
        ("a.weight", {}),
        ("a.weight", {"inner.master.a.weight": saved(6, 4)}),
        ("embedding.word_embeddings.weight", {"inner.master.embedding.word_embeddings.weight": saved(6, 5)}),
    ):
        shard = ParamShard.whole(name, torch.zeros(4, 4))
        with pytest.raises(CheckpointError) as caught:
            entries_to_load("inner", {"master": [shard]}, contents)
        messages.append(str(caught.value))
    return messages


def test_what_does_not_fit_is_named():
    missing, other, embedding = run_ranks(_entries, 1)[0]
    assert missing == "the checkpoint does not hold inner.master.a.weight"
    assert other == "inner.master.a.weight has shape (6, 4) in the checkpoint, (4, 4) in this run"
    assert "embedding.word_embeddings.weight has shape (6, 5)" in embedding
