#!/usr/bin/env bash
# Prints the first Python >= 3.11 it finds; says what to do if there is none.
set -euo pipefail

for name in python3 python3.13 python3.12 python3.11; do
    if command -v "$name" >/dev/null \
        && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        command -v "$name"
        exit 0
    fi
done
echo "No Python 3.11 or newer found (looked for python3, python3.13, python3.12, python3.11)." >&2
echo "Install one, or name it: make setup PYTHON=/path/to/python3.11" >&2
exit 1
