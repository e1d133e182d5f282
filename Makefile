# Each command sets itself up in .venv/, which may be deleted at any time.
# Another interpreter: make demo PYTHON=python3.13

PYTHON = python3
VENV = .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check -qq
MANAGE = $(VENV)/bin/python example_project/manage.py
MINUTES = 1
# What a bare machine lacks, or has no time for.
FAST = not slow and not second_server and not pgbouncer and not browser

BENCHMARKS = drain enqueue latency idle
PEERS = graphile-worker,pgqueuer,django-tasks-db

.PHONY: help demo run test test-all chaos bench lint screenshots

help:
	@echo "make demo      place orders, run a worker, deliver mails, check them all"
	@echo "make run       the example shop with one worker, on http://127.0.0.1:8000/"
	@echo "make test      the tests that need nothing but Python"
	@echo "make test-all  every test; some need PgBouncer, Chromium, a second server or time"
	@echo "make chaos     a minute in which everything goes wrong; MINUTES=20 for more"
	@echo "make bench     the queue beside three others, in about ten minutes; see docs/benchmarks.md"
	@echo "make lint      ruff and mypy"
	@echo "make screenshots  the pictures in docs/images; needs Chromium"

demo: $(VENV)/.demo
	@$(MANAGE) demo

run: $(VENV)/.demo
	@$(MANAGE) runshop

test: $(VENV)/.test
	@$(VENV)/bin/python -m pytest -m "$(FAST)"

test-all: $(VENV)/.browser
	@$(VENV)/bin/python -m pytest -m ""

chaos: $(VENV)/.test
	@$(VENV)/bin/python -m tests.chaos --minutes $(MINUTES)

bench: $(VENV)/.demo
	@mkdir -p $(VENV)/benchmarks
	@for name in $(BENCHMARKS); do \
		$(VENV)/bin/python -m tests.benchmarks $$name --quick --peers $(PEERS) --json $(VENV)/benchmarks/$$name.json \
			|| exit 1; \
	done
	@$(VENV)/bin/python -m tests.benchmarks report $(BENCHMARKS:%=$(VENV)/benchmarks/%.json)

lint: $(VENV)/.lint
	@$(VENV)/bin/python -m ruff check
	@$(VENV)/bin/python -m ruff format --check
	@$(VENV)/bin/python -m mypy

screenshots: $(VENV)/.browser
	@SCREENSHOTS=docs/images $(VENV)/bin/python -m pytest -q -m browser tests/browser/test_screenshots.py

$(VENV)/.demo: pyproject.toml $(VENV)/.created
	@echo "Installing the packages that the demo needs into $(VENV)/"
	@$(PIP) install --editable ".[demo]"
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.created
	@echo "Installing the packages that the tests need into $(VENV)/"
	@$(PIP) install --editable ".[test]"
	@touch $@

$(VENV)/.browser: pyproject.toml $(VENV)/.created
	@echo "Installing the packages that the browser tests need into $(VENV)/"
	@$(PIP) install --editable ".[browser]"
	@touch $@

$(VENV)/.lint: pyproject.toml $(VENV)/.created
	@$(PIP) install --editable ".[test,lint]"
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed. Say which one: make PYTHON=python3.13 ..."; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@
