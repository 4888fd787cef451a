"""The runs of which golden numbers are kept: every delay mode over (P, tau, alpha)."""

from dataclasses import dataclass

from tests.golden.twins import TWINS, Run

SPEEDS = (1.0, 0.25, 3.0)
FRAGMENT_INTERVAL = 4
STEPS = 41
LR, MOMENTUM = 0.7, 0.9


@dataclass(frozen=True)
class Case:
    """One setting of level 2."""

    mode: str
    num_fragments: int
    overlap_delay: int
    alpha: float = 0.5

    @property
    def name(self):
        return f"{self.mode}-P{self.num_fragments}-tau{self.overlap_delay}-alpha{self.alpha:g}"

    @property
    def sync_interval(self):
        return FRAGMENT_INTERVAL * self.num_fragments

    def twin(self, fragment):
        """The reference run of one fragment: (anchors, locals) after each step and after the drain."""
        run = Run(
            speeds=SPEEDS,
            first=(fragment + 1) * FRAGMENT_INTERVAL,
            interval=self.sync_interval,
            delay=self.overlap_delay,
            steps=STEPS,
            alpha=0.0 if self.mode == "delayed_reset" else self.alpha,
            lr=LR,
            momentum=MOMENTUM,
        )
        return list(TWINS[self.mode](run))


CASES = [
    *(Case("blocking", fragments, 0) for fragments in (1, 2, 3)),
    *(Case("streaming", p, tau, alpha) for p in (1, 2, 3) for tau in (1, 3) for alpha in (0.0, 0.5, 0.9)),
    *(
        Case(mode, fragments, FRAGMENT_INTERVAL)
        for mode in ("delayed_keep", "delayed_reset")
        for fragments in (1, 2, 3)
    ),
    Case("eager", 1, FRAGMENT_INTERVAL),
]
