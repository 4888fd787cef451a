"""The whole of level 2 (threads as islands) against the reference twins, for every delay mode."""

import pytest
import torch

from tests.golden.cases import CASES, LR, MOMENTUM, SPEEDS, STEPS
from tests.outer.islands import make_islands, on_islands, outer_config


def config_of(case, codec="none"):
    return outer_config(
        sync_interval=case.sync_interval,
        num_fragments=case.num_fragments,
        overlap_delay=case.overlap_delay,
        delay_mode=case.mode,
        mixing_alpha=case.alpha,
        outer_lr=LR,
        outer_momentum=MOMENTUM,
        codec=codec,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sync_follows_the_twin(case):
    islands = make_islands(len(SPEEDS), config_of(case))

    def train(island):
        seen = []

        def look(step):
            anchors = [fragment.anchor for fragment in island.fragments.all]
            seen.append(
                [[t.clone() for tensors in kind for t in tensors] for kind in (anchors, island.weights)]
            )

        def move(island, step):
            for tensor in island.tensors:
                tensor.sub_(SPEEDS[island.number])

        island.train(STEPS, move, look)
        island.loop.drain()
        look(STEPS)
        return seen

    seen = on_islands(islands, train)
    twins = [case.twin(fragment) for fragment in range(case.num_fragments)]
    per_fragment = len(seen[0][0][0]) // case.num_fragments
    for number, steps in enumerate(seen):
        for step, (anchors, local) in enumerate(steps):
            for index in range(len(anchors)):
                wanted_anchor, wanted_local = (kind[number] for kind in twins[index // per_fragment][step])
                for tensor, wanted in ((anchors[index], wanted_anchor), (local[index], wanted_local)):
                    torch.testing.assert_close(
                        tensor, torch.full_like(tensor, wanted), rtol=1e-4, atol=1e-3, msg=f"step {step}"
                    )
