# Two commands to remember: `make lessons` and `make test`. Each does all of its own set-up, the first time and
# whenever pyproject.toml or constraints.txt has changed. Works with GNU make 3.81 (macOS) and newer.
#
#   make lessons PYTHON=python3.12                                          another Python
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make lessons   the small CPU build of torch (Linux)

VENV ?= .venv
PYTHON ?= python3 python3.13 python3.12 python3.11 python3.10 python
TESTS ?= -n 2
LAB :=
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
READY := $(VENV)/.ready
# The stamp says where it was made: a venv holds absolute paths, and in a copied or moved clone it would run another's code.
STALE := $(shell [ ! -e $(READY) ] || { [ "$$(cat $(READY))" = "$(CURDIR)" ] && $(BIN)/python -c ''; } 2>/dev/null || echo stale)

.PHONY: help lessons test lab doctor picture setup constraints clean stale
help:
	@echo "make lessons   run every lesson on real ranks and write it to site/ as HTML that plays offline"
	@echo "make test      ruff, mypy and the tests"
	@echo "make lab       open the lessons in JupyterLab, with its options in LAB (as root: make lab LAB=--allow-root)"
	@echo "make doctor    say what works on this machine, and what to do about what does not"
	@echo "make picture   draw the README's picture anew, from a run"
	@echo "make clean     remove $(VENV), site/ and caches"

lessons: $(READY)
	$(BIN)/parallel101 lessons

lab: $(READY)
	$(BIN)/parallel101 lab $(LAB)

doctor: $(READY)
	$(BIN)/parallel101 doctor

picture: $(READY)
	$(BIN)/python docs/ring.py

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(TESTS)

setup: $(READY)

# The stamp is written last: an interrupted installation is taken up again by the next make. So is an interrupted venv, which
# has a Python and no pip: the same command adds it. A venv that fails is removed, but never a folder that was there before.
# One that came here with its clone, or whose Python is gone, is made anew; one that lies elsewhere is only installed into.
# PYTHON is one path, which may have spaces in it, or several to try in turn.
$(READY): pyproject.toml constraints.txt $(STALE)
	@set -e; \
	if [ ! -w . ]; then \
	  echo "make: $(CURDIR) can't be written to by you; clone it to where it can be, such as your home folder" >&2; exit 1; \
	fi; \
	made=$$(cat $(READY) 2>/dev/null || true); \
	case "$(abspath $(VENV))" in "$(CURDIR)"/*) ;; *) made=;; esac; \
	if [ "$${made:-$(CURDIR)}" != "$(CURDIR)" ]; then \
	  echo "Making $(VENV) anew: it was made in $$made"; rm -rf $(VENV); \
	elif [ -e $(VENV)/pyvenv.cfg ] && ! $(BIN)/python -c '' 2>/dev/null; then \
	  echo "Making $(VENV) anew: its Python is gone"; rm -rf $(VENV); \
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
	  echo "make: parallel101 needs Python 3.10 or newer, and none of these is: $(PYTHON)." >&2; \
	  echo "      Install one from https://www.python.org/downloads/, or name yours: make PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@echo "$(CURDIR)" >$@

# uv resolves for every Python and platform at once, which pip cannot. torch pins its own CUDA packages, another set for
# each of its builds, so that they are left out here.
constraints:
	$(BIN)/python -m pip install --quiet uv
	{ sed -n '/^#/p' constraints.txt; \
	  echo 'torch==2.13.0' | $(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.10 --upgrade --quiet \
	    --constraint - --no-emit-package parallel101 --no-header --no-annotate | grep -vE '^(nvidia-|cuda-|triton)'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
