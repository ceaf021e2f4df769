# Two commands: `make demo` writes a continuation, `make test` runs every test.
# Each makes .venv (Python 3.12 or newer) on its first run and reuses it after.

PYTHON ?= $(shell command -v python3.12 || command -v python3)
BIN := .venv/bin
PROMPT ?= def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n

.PHONY: demo test check bench clean

demo: .venv/.run
	@printf '$(PROMPT)' | $(BIN)/k3jax generate --model nano --echo --max-new-tokens 48 \
		--temperature 0.5 --top-p 0.9 --seed 1

test: .venv/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

.venv/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 12), "Python 3.12 or newer is needed"'
	$(PYTHON) -m venv .venv

.venv/.run: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/.test: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@ .venv/.run

clean:
	rm -rf .venv build dist
