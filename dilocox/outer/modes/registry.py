"""Delay modes by name. A new mode is one file and one line here. Level 2, no torch."""

from __future__ import annotations

from dilocox.outer.modes.base import DelayMode
from dilocox.outer.modes.blocking import Blocking
from dilocox.outer.modes.delayed_keep import DelayedKeep
from dilocox.outer.modes.delayed_reset import DelayedReset
from dilocox.outer.modes.eager import Eager
from dilocox.outer.modes.streaming import Streaming

MODES: dict[str, type[DelayMode]] = {
    mode.name: mode for mode in (Blocking, Streaming, DelayedKeep, DelayedReset, Eager)
}
