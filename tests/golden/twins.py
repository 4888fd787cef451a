"""Reference twins of the delay modes: constant gradients, plain floats, one fragment, no schedule.

Island i moves by `-speed[i]` in each inner step. A fragment is launched at `first`, `first + interval` ...
and applied `delay` steps later. Each twin is written from the papers and yields (anchors, locals) of all
islands after each step, the last time after the drain.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Run:
    """What all twins are given."""

    speeds: tuple[float, ...]
    first: int
    interval: int
    delay: int
    steps: int
    alpha: float
    lr: float
    momentum: float

    def launched(self, done):
        return done >= self.first and (done - self.first) % self.interval == 0

    def applied(self, done):
        return self.launched(done - self.delay)

    def in_flight(self, done):
        return any(self.launched(earlier) for earlier in range(done - self.delay + 1, done + 1))


@dataclass
class Nesterov:
    """theta and its outer optimizer, as in 2311.08105."""

    run: Run
    theta: float = 0.0
    buffer: float | None = field(default=None)

    def step(self, delta):
        self.buffer = delta if self.buffer is None else self.run.momentum * self.buffer + delta
        self.theta -= self.run.lr * (delta + self.run.momentum * self.buffer)


def mean(values):
    return sum(values) / len(values)


def blocking(run):
    outer, local = Nesterov(run), [0.0] * len(run.speeds)
    for done in range(1, run.steps + 1):
        local = [value - speed for value, speed in zip(local, run.speeds, strict=True)]
        if run.launched(done):
            outer.step(mean([outer.theta - value for value in local]))
            local = [outer.theta] * len(local)
        yield [outer.theta] * len(local), local
    yield [outer.theta] * len(local), local


def streaming(run):
    """Also `delayed_reset`, which is alpha = 0 with a delay of a whole fragment interval."""
    outer, local, sent = Nesterov(run), [0.0] * len(run.speeds), 0.0

    def apply(local):
        outer.step(sent)
        return [run.alpha * value + (1 - run.alpha) * outer.theta for value in local]

    for done in range(1, run.steps + 1):
        local = [value - speed for value, speed in zip(local, run.speeds, strict=True)]
        measured = mean([outer.theta - value for value in local])
        if run.applied(done):
            local = apply(local)
        if run.launched(done):
            sent = measured
        yield [outer.theta] * len(local), local
    if run.in_flight(run.steps):
        local = apply(local)
    yield [outer.theta] * len(local), local


def delayed_keep(run):
    """Own progress is neither lost nor counted twice, so local = anchor - speed * (steps not merged yet)."""
    outer, merged, measured, sent = Nesterov(run), 0, 0, (0, 0)

    def local(done):
        return [outer.theta - speed * (done - merged) for speed in run.speeds]

    for done in range(1, run.steps + 1):
        if run.applied(done):
            outer.step(mean(run.speeds) * (sent[1] - sent[0]))
            merged = sent[1]
        if run.launched(done):
            sent, measured = (measured, done), done
        yield [outer.theta] * len(run.speeds), local(done)
    if run.in_flight(run.steps):
        outer.step(mean(run.speeds) * (sent[1] - sent[0]))
        merged = sent[1]
    yield [outer.theta] * len(run.speeds), local(run.steps)


def eager(run):
    """Each island has an anchor of its own (2502.12996); the drain ends with the mean of the anchors."""
    count = len(run.speeds)
    outers, local, sent = [Nesterov(run) for _ in run.speeds], [0.0] * count, [0.0] * count
    for done in range(1, run.steps + 1):
        local = [value - speed for value, speed in zip(local, run.speeds, strict=True)]
        if run.launched(done):
            fresh = [outer.theta - value for outer, value in zip(outers, local, strict=True)]
            for outer, own, old in zip(outers, fresh, sent, strict=True):
                outer.step(own / count + mean(sent) - old / count)
            sent, local = fresh, [outer.theta for outer in outers]
        yield [outer.theta for outer in outers], local
    if run.in_flight(run.steps):
        for outer, old in zip(outers, sent, strict=True):
            outer.step(mean(sent) - old / count)
    end = [mean([outer.theta for outer in outers])] * count
    yield end, end


TWINS = {
    "blocking": blocking,
    "streaming": streaming,
    "delayed_keep": delayed_keep,
    "eager": eager,
    "delayed_reset": streaming,
}
