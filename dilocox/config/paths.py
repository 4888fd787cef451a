"""Paths in a configuration: `~` and environment variables, expanded in one place. No torch here.

Every leaf that holds a path is named here, so that no reader of a path has to think of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dilocox.config.schema import Config
from dilocox.errors import ConfigError

_PATHS = {
    "run": ("output_dir",),
    "data": ("tokenizer_model", "data_cache_path"),
    "checkpoint": ("save", "load"),
}
_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\})")

DataPath = list[str | float] | str


def expand_paths(config: Config) -> Config:
    """Expands `~`, `~user`, `$NAME` and `${NAME}` in every path.

    Raises:
        ConfigError: a variable is not set, or there is no such user.
    """
    sections = {}
    for section, leaves in _PATHS.items():
        values = {leaf: getattr(getattr(config, section), leaf) for leaf in leaves}
        update = {k: expand(v, field=f"{section}.{k}") for k, v in values.items() if v is not None}
        sections[section] = getattr(config, section).model_copy(update=update)
    data = config.data
    paths: dict[str, object] = {"data_path": _data_path(data.data_path, "data.data_path")}
    if data.island_data is not None:
        entries = enumerate(data.island_data)
        paths["island_data"] = [_data_path(entry, f"data.island_data[{i}]") for i, entry in entries]
    sections["data"] = sections["data"].model_copy(update=paths)
    return config.model_copy(update=sections)


def expand(path: str, *, field: str) -> str:
    """One path with `~` and variables expanded.

    Args:
        field: the setting that holds it, for errors.

    Raises:
        ConfigError: see `expand_paths`.
    """
    try:
        expanded = (
            str(Path(os.path.expandvars(path)).expanduser()) if "~" in path else os.path.expandvars(path)
        )
    except RuntimeError:
        raise ConfigError(field, path, "names a user without home folder; write the path out") from None
    missing = _VARIABLE.search(expanded)
    if missing is not None:
        raise ConfigError(field, path, f"{missing[0]} is not set in the environment; set it or write it out")
    return expanded


def needs_expansion(path: str) -> bool:
    """Whether a path means another folder on another host."""
    return path.startswith("~") or _VARIABLE.search(path) is not None


def _data_path(value: DataPath, field: str) -> DataPath:
    if isinstance(value, str):
        return expand(value, field=field)
    return [expand(part, field=field) if isinstance(part, str) else part for part in value]
