# make demo [ONCE=1]   serve the bundled checkpoint on this machine and stream one chat completion
# make test [ARGS=..]  the whole test suite, what only computes in two processes (with ARGS: one pytest with them)
# make drills [ARGS=..] kill and stop workers of a real fleet under load, and count what that cost (docs/reliability.md)
# make lint            format, lint and type checks
# make format          rewrite the files as ruff wants them
#
# Each makes .venv first if it is absent or out of date. Needs Python 3.11 or 3.12, git, make and a package index.

SHELL := /bin/sh
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
# One OpenMP thread: torch's default of one per core collapses as soon as anything else runs.
export OMP_NUM_THREADS := 1

.PHONY: demo test drills lint format venv venv-dev

demo: venv
	$(VENV)/bin/moeyard demo $(if $(filter 1 true yes,$(ONCE)),--once)

# Nothing in these measures time, so they may share two cores.
COMPUTING := tests/kernels tests/models tests/scheduling tests/engine tests/experts tests/golden \
	tests/e2e/test_one_answer.py tests/e2e/test_parity_http.py

test: venv-dev
	-@deploy/tools/get_prometheus.sh
ifdef ARGS
	$(VENV)/bin/python -m pytest $(ARGS)
else
	$(VENV)/bin/python -m pytest -n 2 $(COMPUTING) && code=0 || code=$$?; \
	$(VENV)/bin/python -m pytest $(COMPUTING:%=--ignore=%) && exit $$code
endif

drills: venv-dev
	$(VENV)/bin/python bench/drills.py $(ARGS)

lint: venv-dev
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy

format: venv-dev
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

venv:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed and none was found; set PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) deploy/tools/bootstrap.py

venv-dev:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed and none was found; set PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) deploy/tools/bootstrap.py --dev
