"""Megatron's `tools/preprocess_data.py`: the same flags, the same files. See `dilocox preprocess --help`."""

from __future__ import annotations

import argparse
import sys

from dilocox.data.preprocess import command as preprocess
from dilocox.errors import DilocoxError


def main() -> int:
    parser = argparse.ArgumentParser(description=preprocess.__doc__)
    preprocess.add_arguments(parser)
    args = parser.parse_args()
    try:
        return preprocess.main(args)
    except DilocoxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
