"""Corpora, tokenizers, and the batches that each island reads from them."""
