"""Every exception this package raises on purpose.

DilocoxError
├── ConfigError          bad setting or input; found before anything starts; exit code 2
│   └── DataError        bad input text, with file and line; exit code 2
├── ModelError           the model that was built is not the one that the configuration describes
├── CheckpointError      a checkpoint is missing, incomplete or belongs to another run
└── WanError             one sync between islands failed; training inside the island continues
    ├── QuorumError      membership did not answer in time (lighthouse down, no other island there)
    ├── IdentityError    a member of the quorum belongs to another run, config or layout
    └── MessageError     a received message has a wrong header field or checksum
"""

from __future__ import annotations


class DilocoxError(Exception):
    """Root of the tree; the command line prints it as one line."""


class ConfigError(DilocoxError):
    """A setting breaks a rule.

    The text has one form, so that people and tests can read it:
    ``section.leaf = value: rule; what to do``.
    """

    def __init__(self, field: str, value: object, rule: str) -> None:
        self.field = field
        self.value = value
        self.rule = rule
        super().__init__(f"{field} = {value!r}: {rule}")


class DataError(ConfigError):
    """Input text is unusable; ``field`` is ``file:line``."""


class ModelError(DilocoxError):
    """The built model lacks or adds something; nothing has been trained."""


class CheckpointError(DilocoxError):
    """A checkpoint cannot be used for this run; nothing has been loaded."""


class WanError(DilocoxError):
    """A sync between islands failed and is discarded; nothing has reached the weights."""


class QuorumError(WanError):
    """No quorum within the timeout."""


class IdentityError(WanError):
    """An island of another run, config or layout is in the quorum."""


class MessageError(WanError):
    """A message from another island has a wrong header field or checksum."""
