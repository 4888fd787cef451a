"""A tiny run for tests of launchers: two layers on a learnable corpus of numbers."""

from __future__ import annotations

import random
from pathlib import Path

from tests.data.pairs import write_pair

REPOSITORY = Path(__file__).parents[2]
MODEL_AND_DATA = """\
run: {name: trial, device: cpu}
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, seq_length: 32}
data: {data_path: corpus, tokenizer_type: NullTokenizer, vocab_size: 97}
"""


def write_trial(folder: Path, sections: str) -> None:
    """Writes `corpus.bin/.idx` and `trial.yaml` with the sections that are the test's own."""
    choose = random.Random(0)
    documents = [[(choose.randrange(5) + 3 * i) % 96 for i in range(200)] for _ in range(400)]
    write_pair(folder / "corpus", documents)
    (folder / "trial.yaml").write_text(MODEL_AND_DATA + sections)
