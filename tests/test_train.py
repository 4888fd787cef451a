"""Equivalences of the whole trainer: layouts, methods, seeds, resume."""

import json
import signal
import threading

import pytest
import torch

from dilocox.config.load import load_config
from dilocox.config.warnings import find_warnings
from dilocox.metrics.jsonl import read_records
from dilocox.metrics.records import EventRecord
from tests.distributed.forkserver import run_islands
from tests.training import train, write_run

TWO_OUTER_STEPS = {"method": "diloco", "sync_interval": 10}
LAYOUTS = {
    "TP2xPP2": [
        "parallel.tensor_model_parallel_size=2",
        "parallel.pipeline_model_parallel_size=2",
        "parallel.ranks_per_island=4",
    ],
}


def losses_of(answers, island=0):
    return answers[island][0][0]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_rank")
    path = write_run(folder, outer=TWO_OUTER_STEPS)
    losses = losses_of(train(path))
    summary = json.loads((folder / "runs" / "test" / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["outer_steps"] == 2
    assert losses[-1] < losses[0] - 0.5
    return losses, summary


def test_seeds(one_rank, tmp_path):
    losses, _ = one_rank
    path = write_run(tmp_path, outer=TWO_OUTER_STEPS)
    assert losses_of(train(path)) == losses
    assert losses_of(train(path, "run.seed=2", "run.name=other"))[0] != losses[0]


def test_what_may_surprise_is_said_in_the_record_of_the_run(tmp_path):
    path = write_run(tmp_path, inner={"train_iters": 4}, outer={"sync_interval": 3})
    train(path)
    records = read_records(tmp_path / "runs" / "test" / "island_0" / "metrics.jsonl")
    notes = [record.details["text"] for record in records if getattr(record, "event", None) == "note"]
    assert notes == find_warnings(load_config(path)) != []


def test_outer_sgd_with_lr_1_changes_nothing(one_rank, tmp_path):
    path = write_run(tmp_path)
    plain = losses_of(train(path, "outer.method=none"))
    outer = ["outer_optimizer=sgd", "outer_lr=1.0", "outer_momentum=0.0", "sync_interval=5"]
    synced = losses_of(train(path, "run.name=synced", *(f"outer.{setting}" for setting in outer)))
    assert synced == pytest.approx(plain, rel=1e-6)
    assert one_rank[0] != pytest.approx(plain, rel=1e-3)  # Nesterov does


class SharedBatches:
    """Data of both islands from one stream: an island alone reads what two islands read together."""

    def __init__(self, run_config, island_id):
        self.config, self.island = run_config, island_id

    def batches(self, consumed_samples=0):
        for step in range(self.config.inner.train_iters):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(60, (8, self.config.model.seq_length + 1), generator=generator)
            alone = self.config.parallel.num_islands == 1
            own = tokens if alone else tokens.chunk(2)[self.island]
            yield [self._batch(part) for part in own.split(self.config.inner.micro_batch_size)]

    def validation_batches(self, eval_iters):
        return [next(self.batches())]

    def _batch(self, tokens):
        length = tokens.shape[1] - 1
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(len(tokens), length),
            "position_ids": torch.arange(length).expand(len(tokens), length).contiguous(),
        }


def weights(trainer):
    return [shard.tensor.clone() for shard in trainer.masters.shards]


def train_on_shared_batches(island, rank, path, overrides, resume):
    import dilocox.trainer
    from tests.training import train_rank

    dilocox.trainer.build_data = lambda config, resolved, *, island_id, **_: SharedBatches(config, island_id)
    return train_rank(island, rank, path, overrides, weights, resume)


def test_data_parallel_islands_equal_one_island_with_twice_the_batch(tmp_path):
    from tests.training import lighthouse

    path = write_run(tmp_path, inner={"train_iters": 10})
    ((alone, weights_alone),) = run_islands(
        train_on_shared_batches, 1, 1, path, ["outer.method=none", "run.name=alone"], False
    )[0]
    with lighthouse() as address:
        settings = ["parallel.num_islands=2", "inner.global_batch_size=4", "outer.method=data_parallel"]
        answers = run_islands(
            train_on_shared_batches, 2, 1, path, [*settings, f"wan.lighthouse={address}"], False
        )
    mean = [(a + b) / 2 for a, b in zip(losses_of(answers, 0), losses_of(answers, 1), strict=True)]
    assert mean == pytest.approx(alone, rel=1e-5)
    for got, wanted in zip(answers[0][0][1], weights_alone, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def replicas(trainer):
    """Anchors by name, and this rank's copies of what Megatron keeps more than once."""
    from dilocox.inner.names import named_global_parameters

    anchors = {
        p.name: a.clone() for p, a in zip(trainer.masters.shards, trainer.outer.anchors(), strict=True)
    }
    copies = {n: p.detach().clone() for n, p in named_global_parameters(trainer.inner.model).items()}
    return trainer.island.coordinate, anchors, copies


@pytest.mark.heavy
def test_all_replicas_have_equal_bits_after_lossy_syncs(tmp_path):
    """TP=2, PP=2, tied embeddings, int4, error feedback, two islands, 20 outer steps."""
    path = write_run(tmp_path, inner={"train_iters": 40})
    outer = ["sync_interval=2", "overlap_delay=1", "mixing_alpha=0.5", "codec=int4", "error_feedback=true"]
    settings = [*LAYOUTS["TP2xPP2"], "parallel.num_islands=2", *(f"outer.{setting}" for setting in outer)]
    answers = train(path, *settings, job=replicas)
    ranks = [[answer for _, answer in island] for island in answers]
    for (_, first, _), (_, second, _) in zip(*ranks, strict=True):
        for name, anchor in first.items():
            assert torch.equal(anchor, second[name]), f"{name} differs between the islands"
    for island in ranks:
        by_place = {(c.pp, c.tp): copies for c, _, copies in island}
        for pp in (0, 1):
            for name, values in by_place[pp, 0].items():
                if "norm" in name:
                    assert torch.equal(values, by_place[pp, 1][name]), f"{name} differs between TP ranks"
        for tp in (0, 1):
            embedding = by_place[0, tp]["embedding.word_embeddings.weight"]
            assert torch.equal(embedding, by_place[1, tp]["output_layer.weight"]), "tied copies differ"
    summary = json.loads((tmp_path / "runs" / "test" / "summary.json").read_text())
    assert summary["anchors_identical"] and summary["outer_steps"] == 20
    assert summary["wan"]["payload_bytes_sent"] == summary["wan"]["predicted_bytes"] > 0


@pytest.mark.heavy
@pytest.mark.parametrize("stop", [10, 11])
def test_resumed_equals_uninterrupted(stop, tmp_path):
    """Stopped in the delay window of a fragment, and right after an outer step."""
    path = write_run(tmp_path, inner={"train_iters": 16})
    outer = ["sync_interval=8", "num_fragments=2", "overlap_delay=2", "mixing_alpha=0.5"]
    outer += ["codec=int4", "error_feedback=true"]
    settings = ["parallel.num_islands=2", *(f"outer.{setting}" for setting in outer)]
    whole = train(path, *settings, "run.name=whole")
    train(path, *settings, f"run.exit_interval={stop}")
    resumed = train(path, *settings, resume=True)
    for island in range(2):
        assert losses_of(resumed, island) == losses_of(whole, island)
    runs = [json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("whole", "test")]
    assert runs[0]["anchor_hash"] == runs[1]["anchor_hash"]


def events_of(path):
    return [record for record in read_records(path) if isinstance(record, EventRecord)]


def test_a_run_says_which_folder_it_resumes_from(tmp_path):
    path = write_run(tmp_path, inner={"train_iters": 4}, outer={"method": "none"})
    train(path, "run.exit_interval=2", "run.name=first")
    saved = tmp_path / "runs" / "first" / "checkpoints"
    (first,), (second,) = (
        train(path, f"run.name={name}", f"checkpoint.load={saved}", job=schedule_of)[0]
        for name in ("second", "third")
    )
    events = events_of(tmp_path / "runs" / "second" / "island_0" / "metrics.jsonl")
    (resume,) = (event for event in events if event.event == "resume")
    assert resume.details["folder"] == str(saved / "island_0" / "iter_0000002")
    assert first == second


def schedule_of(trainer):
    return trainer.inner_step, trainer.inner.scheduler.num_steps


def _a_constructor_that_fails(island, rank, path, failing):
    import torch.distributed as dist

    import dilocox.trainer
    from dilocox.data.resolve import prepare
    from dilocox.trainer import RankContext, Trainer

    def fail(*args, **kwargs):
        raise OSError("planted")

    setattr(dilocox.trainer, failing, fail)
    config = load_config(path, [])
    context = RankContext(island, rank, rank, path.parent / "cache")
    before, current_device = signal.getsignal(signal.SIGTERM), torch.cuda.current_device
    with pytest.raises(OSError, match="planted"):
        Trainer(config, context, prepare(config, context.cache_dir, island_id=island), resume=False)
    return (
        dist.is_initialized(),
        signal.getsignal(signal.SIGTERM) == before,
        torch.cuda.current_device == current_device,
        [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")],
    )


@pytest.mark.parametrize("failing", ["build_model", "Recorder", "InterfaceBytes"])
def test_a_trainer_that_cannot_be_made_leaves_nothing_behind(failing, tmp_path):
    path = write_run(tmp_path, outer={"method": "none"})
    answer = run_islands(_a_constructor_that_fails, 1, 1, path, failing)
    assert answer == [[(False, True, True, [])]]
