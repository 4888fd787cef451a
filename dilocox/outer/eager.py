"""The end of `eager`: its anchors are each island's own until they are averaged once, in fp32. Level 2."""

from __future__ import annotations

from dataclasses import replace

from dilocox.outer.averaging import Averaging
from dilocox.outer.exchange import Proposal
from dilocox.outer.fragment_state import FragmentState


def anchor_proposal(template: Proposal, fragment: FragmentState) -> Proposal:
    """Brings the anchor itself to a blocking sync, without codec, residual or guard.

    Args:
        template: a proposal of this fragment; its hello is kept.
    """
    return replace(
        template,
        deltas=[anchor.clone() for anchor in fragment.anchor],
        averaging=Averaging.exact(fragment.number, fragment.pieces, island=template.hello.island),
        judge=lambda norm: None,
    )
