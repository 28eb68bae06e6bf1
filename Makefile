# The two main commands are `make lessons` and `make test`. Each installs what it needs the first time, and again after a change of
# pyproject.toml or constraints.txt. GNU make 3.81 (macOS) or newer is enough.
#
#   make lessons PYTHON=python3.12                                          use another Python
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make lessons   install the small CPU build of torch (Linux)

VENV ?= .venv
PYTHON ?= python3 python3.13 python3.12 python3.11 python3.10 python
# three workers on two cores, since ranks often wait for each other
TESTS ?= -n 3
LAB :=
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
READY := $(VENV)/.ready
# A venv contains absolute paths, so in a copied or moved clone it would run the code of the old place. The file .ready contains the folder
# for which the venv was made. The venv is stale if that is another folder, or if its Python does not start.
STALE := $(shell [ ! -e $(READY) ] || { [ "$$(cat $(READY))" = "$(CURDIR)" ] && $(BIN)/python -c ''; } 2>/dev/null || echo stale)

.PHONY: help lessons homework test thorough quick lab doctor picture setup constraints clean stale
help:
	@echo "make lessons   run every lesson that has changed and write it to site/ as a web page that works offline"
	@echo "make test      run ruff, mypy and the tests"
	@echo "make thorough  run the tests that repeat with other values what make test shows"
	@echo "make quick     run ruff and a test or more of every part of the package, in under a minute"
	@echo "make lab       open the lessons in JupyterLab; LAB=... passes options to it (as root: make lab LAB=--allow-root)"
	@echo "make homework  open the homework in JupyterLab, with the same options"
	@echo "make doctor    check what works on this machine, and say how to fix what does not"
	@echo "make picture   run the README's example and write its picture to build/picture"
	@echo "make clean     delete $(VENV), site/ and all caches"

lessons: $(READY)
	$(BIN)/parallel101 lessons

lab: $(READY)
	$(BIN)/parallel101 lab $(LAB)

homework: $(READY)
	$(BIN)/parallel101 homework $(LAB)

doctor: $(READY)
	$(BIN)/parallel101 doctor

picture: $(READY)
	$(BIN)/python docs/ring.py

# Some images set PYTHONDONTWRITEBYTECODE. Without byte code, each of the many processes that the tests start compiles the library again.
test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(TESTS)

thorough: $(READY)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(TESTS) @tests/thorough.txt

# While working. tests/quick.txt has a folder, a file or a test on each line.
quick: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(TESTS) @tests/quick.txt

setup: $(READY)

# .ready is written last, so that the next make continues an interrupted installation. An interrupted venv has a Python but no pip; the same
# command adds pip. If creating a venv fails, it is deleted, unless its folder existed before. A venv in this clone is created again if it was
# made for another folder or if its Python is gone. A venv outside this clone is never deleted. PYTHON is one path, which may contain spaces,
# or several names to try in order.
$(READY): pyproject.toml constraints.txt $(STALE)
	@set -e; \
	if [ ! -w . ]; then \
	  echo "make: you may not write to $(CURDIR); clone parallel101 to a folder of your own, such as your home folder" >&2; exit 1; \
	fi; \
	made=$$(cat $(READY) 2>/dev/null || true); \
	case "$(abspath $(VENV))" in "$(CURDIR)"/*) ;; *) made=;; esac; \
	if [ "$${made:-$(CURDIR)}" != "$(CURDIR)" ]; then \
	  echo "Creating $(VENV) again: it was made for $$made"; rm -rf $(VENV); \
	elif [ -e $(VENV)/pyvenv.cfg ] && ! $(BIN)/python -c '' 2>/dev/null; then \
	  echo "Creating $(VENV) again: its Python is gone"; rm -rf $(VENV); \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  was=$$(ls -d $(VENV) 2>/dev/null || true); \
	  for python in "$(PYTHON)" $(PYTHON); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	      echo "Creating $(VENV) with $$("$$python" --version)"; \
	      "$$python" -m venv $(VENV) || { [ "$$was" ] || rm -rf $(VENV); \
	        echo "make: could not create a virtual environment (see above). On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }; \
	      break; \
	    fi; \
	  done; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "make: parallel101 needs Python 3.10 or newer; none was found under these names: $(PYTHON)." >&2; \
	  echo "      Install it from https://www.python.org/downloads/, or give its path: make PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@echo "$(CURDIR)" >$@

# uv resolves for all Pythons and platforms at once, which pip cannot do. CUDA packages are left out: each build of torch pins its own.
constraints:
	$(BIN)/python -m pip install --quiet uv
	{ sed -n '/^#/p' constraints.txt; \
	  echo 'torch==2.13.0' | $(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.10 --upgrade --quiet \
	    --constraint - --no-emit-package parallel101 --no-header --no-annotate | grep -vE '^(nvidia-|cuda-|triton)'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
