VENV ?= .venv
PYTHON ?= python3
RESOLUTION ?= highest
PY := "$(VENV)/bin/python"
PYTEST := $(PY) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-portable test-oldest lint bench mutants docs browser clean

demo: $(VENV)/installed
	$(PY) -m avgk_hf.cli demo

test: $(VENV)/installed
	$(PYTEST) -m "not long"

# every test that trains or compares numbers, computed as other processors compute, and what else takes long, once
test-portable: $(VENV)/installed
	$(PY) -m benchmarks.processors $(PYTEST) -m numbers
	$(PYTEST) -m "long and not numbers"

# the lowest versions that pyproject.toml declares, in an environment of its own
test-oldest:
	$(MAKE) VENV=.venv-oldest RESOLUTION=lowest-direct test

lint: $(VENV)/installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

bench: $(VENV)/installed
	$(PY) -m benchmarks

mutants: $(VENV)/installed
	$(PY) tests/mutation.py

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --site-dir runs/site

# of tests/test_app.py, which is skipped without it
browser:
	command -v chromium && command -v chromedriver || { apt-get update --quiet=2 -o Acquire::Retries=1 && \
	DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends chromium chromium-driver; }

clean:
	rm -rf "$(VENV)" .venv-oldest runs .pytest_cache .ruff_cache .hypothesis build dist

# compiled once here, because some machines forbid Python to write .pyc files later and imports then take minutes;
# of others only wheels are taken (--no-build), so that no setup.py runs
$(VENV)/installed: pyproject.toml Makefile
	$(PYTHON) -m venv "$(VENV)"
	$(PY) -m pip install --quiet --only-binary :all: "uv>=0.9,<1"
	$(PY) -m uv pip install --quiet --python "$(VENV)" --compile-bytecode --no-build --resolution $(RESOLUTION) --requirements pyproject.toml --extra dev
	$(PY) -m uv pip install --quiet --python "$(VENV)" --no-deps --editable .
	# without the packages of its losses, which do not build everywhere; the tests compare its sets with ours
	$(PY) -m uv pip install --quiet --python "$(VENV)" --no-build --no-deps "torchcp>=1.2,<2"
	touch "$(VENV)/installed"
