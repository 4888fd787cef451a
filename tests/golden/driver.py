"""Level 2 on islands in one process: the pure functions, in the order that the schedule gives."""

import torch

from dilocox.outer import pseudo_gradient
from dilocox.outer.optimizer import Sgd
from dilocox.outer.schedule import EventKind, Schedule

SHAPES = [(2, 3), (5,)]


class Island:
    """Local weights, anchor, reference and what is on its way, by fragment."""

    def __init__(self, case, lr, momentum):
        self.case = case
        fragments = range(case.num_fragments)
        self.local, self.anchor, self.reference = (
            [[torch.zeros(shape) for shape in SHAPES] for _ in fragments] for _ in range(3)
        )
        self.optimizer = Sgd(lr=lr, momentum=momentum, nesterov=True)
        self.measured = {}  # (fragment, round) -> own pseudo-gradient, neither applied nor given back

    def inner_step(self, speed):
        for fragment in self.local:
            for tensor in fragment:
                tensor.sub_(speed)

    def measure(self, event):
        fragment = event.fragment
        keep = self.case.mode == "delayed_keep"
        start = self.reference if keep else self.anchor
        delta = pseudo_gradient.measure(start[fragment], self.local[fragment])
        if keep:
            pseudo_gradient.advance_reference(self.reference[fragment], self.local[fragment])
        self.measured[fragment, event.round] = delta

    def apply(self, event, mean):
        fragment = event.fragment
        self.optimizer.step(fragment, self.anchor[fragment], mean)
        own, anchor = self.local[fragment], self.anchor[fragment]
        if self.case.mode != "eager":
            del self.measured[fragment, event.round]
        if self.case.mode == "streaming":
            pseudo_gradient.mix(own, anchor, alpha=self.case.alpha)
        elif self.case.mode == "delayed_keep":
            pending = [delta for (owner, _), delta in self.measured.items() if owner == fragment]
            pseudo_gradient.keep_private(own, self.reference[fragment], anchor, pending=pending)
        else:
            pseudo_gradient.reset(own, anchor)


def run(case, *, speeds, steps, lr, momentum):
    """Yields the islands after each inner step, and once more after the drain."""
    schedule = Schedule.build(
        sync_interval=case.sync_interval,
        num_fragments=case.num_fragments,
        overlap_delay=case.overlap_delay,
        delay_mode=case.mode,
    )
    islands = [Island(case, lr, momentum) for _ in speeds]
    wire = {}  # (fragment, round) -> mean pseudo-gradient
    for step in range(steps):
        for island, speed in zip(islands, speeds, strict=True):
            island.inner_step(speed)
        for event in schedule.after(step):
            handle(islands, wire, event)
        yield islands
    for event in schedule.drain(steps - 1):
        handle(islands, wire, event)
    if case.mode == "eager":
        average_anchors(islands)
    yield islands


def handle(islands, wire, event):
    key = (event.fragment, event.round)
    match event.kind:
        case EventKind.MEASURE:
            for island in islands:
                island.measure(event)
        case EventKind.START:
            deltas = zip(*(island.measured[key] for island in islands), strict=True)
            wire[key] = [torch.stack(of_islands).mean(dim=0) for of_islands in deltas]
        case EventKind.APPLY:
            for island in islands:
                island.apply(event, arrived(island, wire, event, share=1 / len(islands)))


def arrived(island, wire, event, *, share):
    """What the outer optimizer of an island takes as the gradient."""
    key, previous = (event.fragment, event.round), (event.fragment, event.round - 1)
    if island.case.mode != "eager":
        return wire[key]
    return pseudo_gradient.eager_share(
        island.measured.get(key),
        wire.get(previous),
        island.measured.get(previous),
        fresh_share=share,
        previous_share=share,
    )


def average_anchors(islands):
    for fragment in range(len(islands[0].anchor)):
        for index in range(len(SHAPES)):
            mean = torch.stack([island.anchor[fragment][index] for island in islands]).mean(dim=0)
            for island in islands:
                island.anchor[fragment][index].copy_(mean)
                island.local[fragment][index].copy_(mean)
