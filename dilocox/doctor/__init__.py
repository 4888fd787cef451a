"""`dilocox doctor`: what goes wrong first, found before it does, each finding with what to do. No torch."""

from dilocox.doctor.command import add_arguments, main, quick_checks, warn
from dilocox.doctor.finding import Finding, Severity

__all__ = ["Finding", "Severity", "add_arguments", "main", "quick_checks", "warn"]
