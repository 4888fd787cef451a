"""The three ways in which a rule refuses a setting."""

from __future__ import annotations

from dilocox.config.schema import Section
from dilocox.errors import ConfigError


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Refuses a setting unless the rule holds."""
    if not holds:
        raise ConfigError(field, value, rule)


def require_default(section: Section, prefix: str, leaves: tuple[str, ...], reason: str) -> None:
    """Refuses leaves that were changed although they have no effect."""
    for leaf in leaves:
        value = getattr(section, leaf)
        default = type(section).model_fields[leaf].default
        require(value == default, f"{prefix}.{leaf}", value, f"has no effect {reason}; remove it")


def _nearest_multiples(value: int, factor: int) -> str:
    """The multiples of `factor` next to `value`, as advice."""
    below, above = value // factor * factor, -(-value // factor) * factor
    return f"use {below} or {above}" if below else f"use {above}"


def require_multiple(field: str, value: int, factor: int, of: str) -> None:
    """Refuses a count that is not a multiple; `of` says what the factor is."""
    require(
        value % factor == 0,
        field,
        value,
        f"must be a multiple of {of} ({factor}); {_nearest_multiples(value, factor)}",
    )
