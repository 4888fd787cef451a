"""Records of `metrics.jsonl`, one per line, and their JSON form.

Field names are a contract with everything that reads the file. Step numbers count from one: the record
of `inner_step` 1 describes the first optimizer step; 0 is the state before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class InnerRecord:
    """One optimizer step of an island.

    Attributes:
        tokens: tokens trained by the island in this step.
        step_time_s: seconds of the inner step alone, without level 2.
    """

    kind: ClassVar[str] = "inner"
    inner_step: int
    lm_loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_time_s: float


@dataclass(frozen=True)
class SyncRecord:
    """One sync of one fragment, written when it is applied or discarded.

    Attributes:
        outer_step: number of this outer step of the fragment, from one.
        pseudo_gradient_norm: L2 norm of this island's fragment.
        cosine_to_mean: between this island's pseudo-gradient and the islands' mean; None without one.
        payload_bytes_sent: bytes that all ranks of this island handed to the collective.
        exchange_s: seconds from start to the decoded result.
        waiting_s: the part of them until the other islands were there.
        blocked_s: the part of them for which training stood still.
        committed: False = discarded, nothing has reached the weights.
    """

    kind: ClassVar[str] = "sync"
    inner_step: int
    outer_step: int
    fragment: int
    num_participants: int
    pseudo_gradient_norm: float
    cosine_to_mean: float | None
    payload_bytes_sent: int
    exchange_s: float
    waiting_s: float
    blocked_s: float
    codec: str
    committed: bool


@dataclass(frozen=True)
class EvalRecord:
    """A validation on the anchor; nats per token."""

    kind: ClassVar[str] = "eval"
    inner_step: int
    val_loss: float


@dataclass(frozen=True)
class EventRecord:
    """Anything else worth keeping: join, leave, heal, abstain, discard, checkpoint, resume ..."""

    kind: ClassVar[str] = "event"
    inner_step: int
    event: str
    details: Mapping[str, Scalar] = field(default_factory=dict)


Record = InnerRecord | SyncRecord | EvalRecord | EventRecord
_TYPES: dict[str, type[Record]] = {t.kind: t for t in (InnerRecord, SyncRecord, EvalRecord, EventRecord)}


def to_line(record: Record, *, time_s: float) -> str:
    """Returns one JSON object and a newline. JSON knows no NaN or infinity: they become null."""
    values = {"kind": record.kind, **asdict(record), "time_s": round(time_s, 3)}
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite) + "\n"


def from_line(line: str) -> Record:
    """Inverse of `to_line`; a null becomes NaN where a number is due. Unknown keys are ignored.

    Raises:
        ValueError: not one of our records.
    """
    values = json.loads(line)
    if not isinstance(values, dict) or values.get("kind") not in _TYPES:
        raise ValueError(f"not a metrics record: {line[:80]!r}")
    cls = _TYPES[values["kind"]]
    known: dict[str, Any] = {}
    for item in fields(cls):
        if item.name in values:
            missing = values[item.name] is None and item.type == "float"
            known[item.name] = math.nan if missing else values[item.name]
    try:
        return cls(**known)
    except TypeError as error:
        raise ValueError(f"incomplete metrics record: {line[:80]!r}") from error
