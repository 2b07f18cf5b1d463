# Each target sets up what it needs: beforehand there must be only make and Python 3.11 or newer.

# Versions of the dependencies: pinned (constraints.txt), lowest (the bounds in pyproject.toml) or newest.
VERSIONS := pinned
comma := ,
VENV := .venv$(if $(filter-out pinned,$(VERSIONS)),-$(VERSIONS))
CONSTRAINTS := $(if $(filter pinned,$(VERSIONS)),constraints.txt,$(VENV)/constraints.txt)
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
PYTHONS := $(if $(PYTHON),$(PYTHON),python3.11 python3 python3.12 python3.13)
WORKERS ?= 2
PYTEST := $(PY) -m pytest -q -n $(WORKERS) --dist worksteal
FILES :=
# The commit since when a change is looked at; the last one if empty.
SINCE ?=
VERSIONED := cli core data engines methods models  # use other packages most
# Those that partita needs to run; the tools of the tests and the site may be newer.
EXTRAS := report data text lora flower privacy track tune
# It holds back datasets, so it is tested with the lowest versions only.
EXTRAS_lowest := flwr-datasets
INSTALLED := dev$(addprefix $(comma),$(EXTRAS_$(VERSIONS)))

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all test-gpu test-versions check style types wheel dist tutorials docs docs-test docs-all mutate bench format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

demo: $(READY)  ## compare three methods on small images, in about a minute, and write a report to runs/demo
	$(VENV)/bin/partita compare --config examples/digits.toml --methods fedavg,fedprox,fedfrozen --seeds 3 \
	    --rounds 15 --out runs/demo --report

test: $(READY)  ## the fast tests; FILES="tests/core/test_rng.py" only those in these files
	$(PYTEST) $(FILES)

test-slow: $(READY)  ## the slow tests
	$(PYTEST) -m slow $(FILES)

test-all: $(READY)  ## the fast and the slow tests
	$(PYTEST) -m "slow or not slow" $(FILES)

test-gpu: $(READY)  ## every model type, method, example and option on this machine's GPU, from the command; ten minutes
	$(PY) scripts/test_gpu.py

test-versions: $(READY)  ## some tests with other dependencies: make test-versions VERSIONS=lowest, or VERSIONS=newest
	$(PY) -m pip freeze --all
	$(PYTEST) -W default $(addprefix tests/,$(VERSIONED))

check:  ## all that CI runs, with the seconds of each part
	.ci/run

style: $(READY)  ## format and lint, changing nothing
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

types: $(READY)  ## mypy
	$(VENV)/bin/mypy

wheel: $(READY)  ## build sdist and wheel, install them elsewhere, and use them from there
	$(PY) scripts/check_wheel.py

dist: $(READY)  ## the same, and keep both in dist/; with TAG=v0.2.0 they must be that release
	$(PY) scripts/check_wheel.py --out dist $(if $(TAG),--tag "$(TAG)")

tutorials: $(READY)  ## run the tutorials whose outputs are missing or old, as notebooks
	$(PY) scripts/tutorials.py --jobs $(WORKERS)

docs: $(READY)  ## build the site into site/ and check its links; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict
	$(PY) scripts/check_links.py site

docs-test: $(READY)  ## run the tutorials and pages of commands that changed, and the first pages of a newcomer
	$(PY) scripts/tutorials.py --jobs $(WORKERS) --since "$(SINCE)"
	$(PY) scripts/run_docs.py --jobs $(WORKERS) --since "$(SINCE)"

docs-all: tutorials  ## run all of them, and build the site with the outputs of all tutorials; takes long
	$(PY) scripts/run_docs.py --jobs $(WORKERS)
	TUTORIALS=all $(MAKE) docs

mutate: $(READY)  ## break the code in every way known, and see that tests fail; takes hours
	$(PY) scripts/mutate.py --jobs $(WORKERS)

bench: $(READY)  ## the speed benchmarks
	$(PY) benchmarks/run.py

format: $(READY)  ## format, and mend what the linter can
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:  ## remove caches and build leftovers; keeps .venv and runs
	rm -rf build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# Nothing is compiled during the installation: of tens of thousands of files few are ever imported. The plan compiles those
# that are, also where PYTHONDONTWRITEBYTECODE would make every command compile them.
$(READY): pyproject.toml constraints.txt
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	    for python in $(PYTHONS); do \
	        if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	            echo "1/4 Creating $(VENV) with $$("$$python" --version)"; \
	            "$$python" -m venv $(VENV); exit $$?; \
	        fi; \
	    done; \
	    echo "partita needs Python 3.11 or newer; tried: $(PYTHONS) (python3 is $$(python3 --version 2>&1))." >&2; \
	    echo "Install it, or say where it is: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	}
	@$(MAKE) -s $(CONSTRAINTS)
	@echo "2/4 Installing partita and its tools into $(VENV); the first time this takes a minute"
	@$(PY) scripts/install.py -e '.[$(INSTALLED)]' -c $(CONSTRAINTS)
	@echo "3/4 Compiling the modules that partita imports"
	@env -u PYTHONDONTWRITEBYTECODE $(VENV)/bin/partita plan --config examples/digits.toml >/dev/null
	@touch $@
	@echo "4/4 Ready"

RESOLUTION_lowest := lowest-direct
RESOLUTION_newest := highest

.venv-%/constraints.txt: pyproject.toml
	@$(PY) scripts/install.py compile --resolution $(RESOLUTION_$*) $(addprefix --extra ,$(EXTRAS) $(EXTRAS_$*)) \
	    --no-annotate --no-header -o $@ pyproject.toml
