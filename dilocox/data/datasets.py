"""Batches of an island: its own training documents, and validation documents that all islands share.

Every rank reads for itself from memory-mapped files; nothing is broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from torch import Tensor

from dilocox.config.schema import Config
from dilocox.data.resolve import ResolvedData
from dilocox.data.sample_set import build_index, load
from dilocox.data.samples import train_set, validation_set
from dilocox.errors import DataError
from dilocox.run_folder import data_cache_dir_of
from dilocox.topology import Coordinate

MicroBatch = dict[str, Tensor]
"""tokens, labels, position_ids (int64) and loss_mask (fp32), each [micro_batch_size, seq_length], or those of
them that a pipeline stage needs; attention is causal, so there is no mask tensor."""

FIRST_STAGE_FIELDS = ("tokens", "position_ids")
LAST_STAGE_FIELDS = ("labels", "loss_mask")


@dataclass(frozen=True)
class BatchShape:
    """Which samples of one optimizer step each data parallel rank gets.

    Micro-batches are assigned to the ranks in turn: a step has the same samples for any data parallel size.
    """

    micro_batch_size: int
    global_batch_size: int
    dp: int
    dp_rank: int

    def sample_numbers(self, first: int) -> list[range]:
        """Samples of each micro-batch of this rank, for the step that starts at sample `first`."""
        stride = self.micro_batch_size * self.dp
        own = first + self.micro_batch_size * self.dp_rank
        starts = range(own, first + self.global_batch_size, stride)
        return [range(start, start + self.micro_batch_size) for start in starts]


class Data:
    """Batches of this rank.

    Sample order depends only on (seed, island, consumed samples), for a given `inner.train_iters`: Megatron
    shuffles all the epochs of a run together.
    """

    def __init__(
        self,
        train: GPTDataset | BlendedDataset,
        validation: GPTDataset | BlendedDataset | None,
        shape: BatchShape,
        *,
        num_samples: int,
        vocab_size: int,
        fields: Sequence[str] = FIRST_STAGE_FIELDS + LAST_STAGE_FIELDS,
    ) -> None:
        self._train = train
        self._validation = validation
        self._shape = shape
        self._num_samples = num_samples
        self._vocab_size = vocab_size
        self._fields = fields

    def batches(self, consumed_samples: int = 0) -> Iterator[list[MicroBatch]]:
        """Yields this rank's micro-batches, one list per step, until `inner.train_iters` steps are done.

        Args:
            consumed_samples: samples the island has trained on; the next step starts there.
        """
        step = self._shape.global_batch_size
        for first in range(consumed_samples, self._num_samples - step + 1, step):
            yield self._global_batch(self._train, first)

    def validation_batches(self, eval_iters: int) -> list[list[MicroBatch]]:
        """Returns the first global batches of the validation documents: the same on every call and island.

        Args:
            eval_iters: at most `logging.eval_iters`.
        """
        if self._validation is None:
            return []
        step = self._shape.global_batch_size
        return [self._global_batch(self._validation, index * step) for index in range(eval_iters)]

    def _global_batch(self, dataset: GPTDataset | BlendedDataset, first: int) -> list[MicroBatch]:
        return [self._micro_batch(dataset, numbers) for numbers in self._shape.sample_numbers(first)]

    def _micro_batch(self, dataset: GPTDataset | BlendedDataset, numbers: range) -> MicroBatch:
        if not self._fields:  # a middle stage: its input comes from the previous one
            return {}
        samples = [dataset[number] for number in numbers]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in self._fields}
        # Megatron's parallel embedding would silently turn such a token into zeros.
        largest = max(int(batch[name].max()) for name in ("tokens", "labels") if name in batch)
        if largest >= self._vocab_size:
            raise DataError(
                "data.data_path",
                f"token {largest}",
                f"is outside the vocabulary of {self._vocab_size}; use the tokenizer that wrote the corpus",
            )
        return batch


def build_data(
    config: Config,
    resolved: ResolvedData,
    *,
    island_id: int,
    coordinate: Coordinate,
    barrier: Callable[[], None],
) -> Data:
    """Opens the data sets of an island; rank 0 of its world writes missing index files first.

    Collective: all ranks of the island call it; `barrier` joins them.

    Args:
        resolved: from `prepare`.
        coordinate: of this rank; `dp` decides the samples, `pp` the fields that are read.

    Raises:
        ConfigError: the index files cannot be written.
    """
    tokenizer = resolved.tokenizer.build()
    cache = data_cache_dir_of(config)
    shape = BatchShape(
        micro_batch_size=config.inner.micro_batch_size,
        global_batch_size=config.inner.global_batch_size,
        dp=config.parallel.data_parallel_size,
        dp_rank=coordinate.dp,
    )
    train = train_set(config, resolved, island_id)
    validation = validation_set(config, resolved)
    if not dist.is_initialized() or dist.get_rank() == 0:
        build_index(train, cache, tokenizer)
        if validation is not None:
            build_index(validation, cache, tokenizer)
    barrier()
    return Data(
        load(train, cache, tokenizer),
        None if validation is None else load(validation, cache, tokenizer),
        shape,
        num_samples=train.num_samples,
        vocab_size=tokenizer.vocab_size,
        fields=fields_of(coordinate.pp, num_stages=config.parallel.pipeline_model_parallel_size),
    )


def fields_of(stage: int, *, num_stages: int) -> tuple[str, ...]:
    """Returns the fields of a micro-batch that a pipeline stage uses; a middle stage uses none."""
    first = FIRST_STAGE_FIELDS if stage == 0 else ()
    last = LAST_STAGE_FIELDS if stage == num_stages - 1 else ()
    return first + last
