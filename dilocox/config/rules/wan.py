"""Rules on membership and addresses."""

from __future__ import annotations

import re

from dilocox.config.rules.require import require
from dilocox.config.schema import Config

_LOWEST_PORT = 1024  # below, only root may listen
_HIGHEST_PORT = 65535


def islands(config: Config) -> None:
    """No more islands are asked for than there are."""
    wan, islands = config.wan, config.parallel.num_islands
    require(
        wan.min_islands <= islands,
        "wan.min_islands",
        wan.min_islands,
        f"must be at most parallel.num_islands ({islands}); lower it",
    )
    require(
        wan.grace_s <= wan.join_timeout_s,
        "wan.grace_s",
        wan.grace_s,
        f"must be at most wan.join_timeout_s ({wan.join_timeout_s}); lower it",
    )


def addresses(config: Config) -> None:
    """Ports and URLs are well formed."""
    wan = config.wan
    if wan.port_range is not None:
        low, high = (int(port) for port in wan.port_range.split("-"))
        require(
            _LOWEST_PORT <= low <= high <= _HIGHEST_PORT,
            "wan.port_range",
            wan.port_range,
            f"must be LOW-HIGH with {_LOWEST_PORT} <= LOW <= HIGH <= {_HIGHEST_PORT}; "
            "write for example 29500-29600",
        )
    if wan.lighthouse is not None:
        url = re.fullmatch(r"http://([^\s/:]+|\[[0-9a-fA-F:]+\]):(\d{1,5})/?", wan.lighthouse)
        require(
            url is not None and 0 < int(url[2]) <= _HIGHEST_PORT,
            "wan.lighthouse",
            wan.lighthouse,
            "must be http://HOST:PORT; write for example http://10.0.0.1:29510",
        )
