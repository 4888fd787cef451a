"""`python -m dilocox` is the console script."""

from dilocox.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
