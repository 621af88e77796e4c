# Two commands: `make lab` opens the course, `make test` checks everything. Both set up what they need, once.

ifeq ($(OS),Windows_NT)
    PYTHON ?= python
    BIN := .venv/Scripts
else
    PYTHON ?= python3
    BIN := .venv/bin
endif

# Jupyter does not read a configuration file from the folder it starts in: it is told where ours lies.
export JUPYTER_CONFIG_PATH := $(CURDIR)/jupyter

.PHONY: help lab test lint bench notebooks exercises screenshots clean

help:
	@echo "make lab          open the course in JupyterLab"
	@echo "make test         run every check"
	@echo "make bench        compare speeds with peers, in one run each"
	@echo "make notebooks    execute the notebooks and store their outputs"
	@echo "make exercises    make exercises/ from solutions/, except where you have worked"
	@echo "make screenshots  take the README's pictures"

lab: .venv/lab-installed
	@$(BIN)/python -m lessonlib.lab
	$(BIN)/python -m jupyterlab notebooks/00_start_here.ipynb $(LAB_OPTIONS)

test: .venv/test-installed lint
	@$(BIN)/python -m lessonlib.lab
	$(BIN)/python -m tools.build_exercises --check
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest --nbval --nbval-current-env notebooks solutions
	$(BIN)/python -m pytest --nbval-lax --nbval-current-env exercises

lint: .venv/test-installed
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

bench: .venv/test-installed
	@$(BIN)/python -m lessonlib.lab
	$(BIN)/python -m benchmarks.decode_speed
	$(BIN)/python -m benchmarks.redraw_speed
	$(BIN)/python -m benchmarks.batching_speed

notebooks: .venv/test-installed
	$(BIN)/python -m tools.run_notebooks

exercises: .venv/lab-installed
	$(BIN)/python -m tools.build_exercises

screenshots: .venv/test-installed
	$(BIN)/python -m tools.screenshots

# A stamp a set of extras: made again only when a file that names or pins a dependency changes.
.venv/%-installed: pyproject.toml requirements.txt
	$(PYTHON) tools/check_python.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade -c requirements.txt pip
	$(BIN)/python -m pip install --quiet -c requirements.txt -e ".[$*]"
	@$(BIN)/python -c "open('$@', 'w').close()"

clean:
	$(PYTHON) -c "import shutil; shutil.rmtree('.venv', ignore_errors=True)"
