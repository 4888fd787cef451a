"""A hash of fp32 tensors, to compare anchors among islands."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from torch import Tensor


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """Hash over the bits of all tensors in order: 16 hex digits. Reads them through host memory."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def combine(hashes: Sequence[str]) -> str:
    """One hash of the ranks' hashes, in rank order."""
    return hashlib.blake2b(" ".join(hashes).encode(), digest_size=8).hexdigest()
