# make demo        two islands train a GPT on this machine's CPU; writes runs/demo/
# make test        the quick tests
# make test-heavy  the rest: SLURM, network namespaces, whole runs in several processes
# make test-all    both
# make check       format, lint, types, floors, shell scripts, all tests
# make setup       the .venv with everything that the above need
#
# Each makes its own .venv and installs again only when pyproject.toml or constraints.txt have changed.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUNTIME := $(VENV)/.installed-runtime
DEVELOPMENT := $(VENV)/.installed-development
CONFIG ?= configs/demo.yaml

TESTS := $(BIN)/python -m pytest --durations=40

.PHONY: setup demo test test-heavy test-all check clean

setup: $(DEVELOPMENT)

demo: $(RUNTIME)
	$(BIN)/dilocox launch $(CONFIG) --overwrite

test: $(DEVELOPMENT)
	$(TESTS) -m "not heavy"

test-heavy: $(DEVELOPMENT)
	$(TESTS) -m heavy

# One after the other, whatever -j says: both use all cores.
test-all: $(DEVELOPMENT)
	$(TESTS) -m "not heavy"
	$(TESTS) -m heavy

check: $(DEVELOPMENT)
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/check.sh

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@set -e; python="$(PYTHON)"; [ -n "$$python" ] || python="$$(tools/find_python.sh)"; \
	echo "making $(VENV) with $$python"; \
	"$$python" -m venv $(VENV) || { rm -rf $(VENV); \
	echo "venv failed; on Debian and Ubuntu it is a package of its own: apt install python3-venv" >&2; exit 1; }

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e .
	@touch $@

$(DEVELOPMENT): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $(RUNTIME) $@
