# make demo [ONCE=1]    serve the bundled checkpoint on this machine and stream one chat completion
# make check            format, lint, types, documents, house rules and language
# make docs             build the site of docs/ into site/; a dead link or anchor is an error
# make test [ARGS=..]   the checks and the fast tier of the tests (with ARGS: one pytest with them)
# make test-all         the checks, every test and the 50 slowest of them, then `make versions`
# make versions [ARGS=..] the demo and tests with lower bounds, newest releases and each Python here (noxfile.py)
# make mutants [ARGS=..] plant faults one at a time and show which test of the fast tier sees each (ARGS: their names)
# make drills [ARGS=..] kill and stop workers of a real fleet under load, and count what that cost (docs/incidents.md)
# make format           rewrite the files as ruff wants them
#
# Each makes .venv first if it is absent or out of date. Needs Python 3.11 to 3.14, git, make and a package index.

SHELL := /bin/sh
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
# Processes that run tests at once: one more than cores, because some tests wait. Each takes up to 2 GiB of memory.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); [ $$n -lt 8 ] && echo $$((n + 1)) || echo 8)
PYTEST := $(VENV)/bin/python -m pytest
# One OpenMP thread: torch's default of one per core collapses as soon as anything else runs.
export OMP_NUM_THREADS := 1
# Every process that a test starts would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check docs static parallel test test-all versions mutants drills format prometheus venv venv-dev

demo: venv
	$(VENV)/bin/moeyard demo $(if $(filter 1 true yes,$(ONCE)),--once)

check: static
	$(PYTEST) tests/test_house.py tests/test_language.py

docs: venv-dev
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

static: venv-dev docs
	$(VENV)/bin/ruff format --check --quiet
	$(VENV)/bin/ruff check --quiet
	$(VENV)/bin/mypy --no-error-summary

# Internal: tests that may run beside others. TIER is empty or --all.
parallel: venv-dev prometheus
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not timing" $(TIER)

# The static checks take one core for 45 s, so they run beside the tests. Tests that measure time run alone, at the end.
define run_tests
	$(MAKE) --jobs=2 --no-print-directory static parallel TIER="$(1)" && code=0 || code=$$?; \
	$(PYTEST) -m timing $(1) $$(grep -rl "mark\.timing" tests --include="test_*.py") && exit $$code
endef

ifdef ARGS
test: venv-dev prometheus
	$(PYTEST) $(ARGS)
else
test: venv-dev prometheus
	$(call run_tests)
endif

test-all: venv-dev prometheus
	$(call run_tests,--all --durations=50)
	$(MAKE) --no-print-directory versions

versions: venv-dev
	$(VENV)/bin/nox $(ARGS)

mutants: venv-dev prometheus
	$(VENV)/bin/python -m tests.mutants.run $(ARGS)

drills: venv-dev
	$(VENV)/bin/python bench/drills.py $(ARGS)

format: venv-dev
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

prometheus: venv-dev
	-@deploy/tools/get_prometheus.sh

venv:
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.14 is needed and none was found; set PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) deploy/tools/bootstrap.py

venv-dev:
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.14 is needed and none was found; set PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) deploy/tools/bootstrap.py --dev
