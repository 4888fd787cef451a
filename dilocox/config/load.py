"""From a YAML file and overrides to one checked `Config`. No torch here.

Every fault of the input ends as one `ConfigError` line that names field, value and rule.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dilocox.config.check import check
from dilocox.config.defaults import resolve
from dilocox.config.paths import expand_paths
from dilocox.config.schema import Config
from dilocox.errors import ConfigError

LOCAL_LEAVES: Mapping[str, frozenset[str] | None] = {
    "run": frozenset({"device", "output_dir", "exit_interval", "exit_duration_in_mins", "threads_per_rank"}),
    "parallel": frozenset({"nodes_per_island"}),
    "data": frozenset({"data_path", "island_data", "tokenizer_model", "data_cache_path"}),
    "wan": frozenset({"lighthouse", "interface", "advertise_address", "port_range"}),
    "checkpoint": None,
    "logging": None,
}
"""Leaves in which islands may differ (None: the whole section); all others are in the fingerprint."""

_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$")


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads `1e-3` as a number, as people mean it, and refuses a repeated key."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (pyyaml's own way to extend a loader)
        first: ([("tag:yaml.org,2002:float", _FLOAT)] if first in "-+.0123456789" else []) + list(resolvers)
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            # An unfilled {{TEMPLATE}} is a mapping as a key, which Python cannot hash.
            if not isinstance(key, Hashable):
                problem = f"{key!r} is no key; put text with braces in quotes"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_config(path: str | Path, overrides: Sequence[str] = (), *, expand: bool = True) -> Config:
    """Reads, completes and checks the configuration of a run.

    Args:
        path: a YAML file, one mapping per section.
        overrides: `section.leaf=value`, in order; they win over the file.
        expand: False leaves `~` and variables in paths as they are written, for another host.

    Raises:
        ConfigError: the file is missing or malformed, or a setting breaks a rule.
    """
    config = load(path, overrides)
    config = resolve(expand_paths(config) if expand else config)
    check(config)
    return config


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a file and overrides into the tree: types and ranges are checked, combinations are not.

    Raises:
        ConfigError: see `load_config`.
    """
    tree = _read(Path(path))
    for override in overrides:
        _override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _one_line(error.errors(include_url=False)[0]) from None


def dump(config: Config) -> str:
    """YAML text of the whole tree; `load` reads it back to an equal `Config`."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def fingerprint(config: Config) -> str:
    """Hash of every resolved setting that all islands of a run must share (16 hex digits)."""
    shared = config.model_dump()
    for section, leaves in LOCAL_LEAVES.items():
        for leaf in list(shared[section]) if leaves is None else leaves:
            del shared[section][leaf]
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "CONFIG", str(path), f"cannot be read ({error.strerror}); give the path of a YAML file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError("CONFIG", str(path), "is not UTF-8 text; give the path of a YAML file") from None
    tree = parse_yaml(text, field="CONFIG", value=str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(
            "CONFIG", str(path), "must be a mapping of sections; write for example `run: {name: demo}`"
        )
    for section, leaves in tree.items():
        if leaves is None:
            tree[section] = {}
    return tree


def parse_yaml(text: str, *, field: str, value: str) -> Any:
    """One YAML document; `field` and `value` name it in errors.

    Raises:
        ConfigError: it is not valid YAML, or a key is there twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(field, value, f"is not valid YAML{where} ({problem}); correct it") from None


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, leaf = key.strip().partition(".")
    if not (equals and dot and section and leaf):
        raise ConfigError("--set", override, "must be section.leaf=value; write for example inner.lr=1e-3")
    leaves = tree.setdefault(section, {})
    if not isinstance(leaves, dict):
        raise ConfigError(section, leaves, "must be a mapping of settings; correct the file")
    leaves[leaf] = parse_yaml(text, field=key, value=text)


def _one_line(error: ErrorDetails) -> ConfigError:
    """The rule that pydantic found broken, in our words."""
    path = [str(part) for part in error["loc"][:2]]
    field = ".".join(path)
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        return ConfigError(field, value, f"unknown key; {_did_you_mean(path)}")
    if kind in ("model_type", "model_attributes_type"):
        return ConfigError(field, value, "must be a mapping of settings; write one `leaf: value` per line")
    rule = error["msg"].replace("Input should be", "must be").replace("String should", "must")
    return ConfigError(field, value, f"{rule}; {_advice(error)}")


def _advice(error: ErrorDetails) -> str:
    kind, value = error["type"], error["input"]
    if kind == "literal_error":
        expected = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return _nearest(str(value), expected) or "choose one of these"
    if kind == "string_type":
        return "put it in quotes" if isinstance(value, int | float) else "write one text"
    if kind.endswith("_type"):
        return "correct the type of the value"
    return "choose a value that fits"


def _did_you_mean(path: Sequence[str]) -> str:
    if len(path) == 1:
        known: Iterable[str] = Config.model_fields
    else:
        section = Config.model_fields[path[0]].annotation
        known = getattr(section, "model_fields", {})
    return _nearest(path[-1], known) or f"choose one of {', '.join(known)}"


def _nearest(word: str, known: Iterable[str]) -> str | None:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else None
