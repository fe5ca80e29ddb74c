# Daily life of the project. Each target sets itself up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread per test process: two of them share the cores.
WORKERS ?= 2

# Tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-design test test-quick test-long test-slow test-gpu test-nccl axe snakemake lint docs dist images sbom licences mutants bench clean

# The stamps are older than what they were made from when that has changed.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

demo: $(VENV)/installed
	$(BIN)/fastfold infer examples/proteins.fasta --out demo_output --relax best
	$(BIN)/fastfold report --table $(CURDIR)/demo_output

# A fold of 60 residues and a sequence for it, in under three minutes on two quiet cores.
demo-design: $(VENV)/installed
	$(BIN)/fastfold design hallucinate --length 60 --steps 60,20,5 --loss plddt=1 con=0.5 rg=0.1 --out demo_output/design

test: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Tests of a second or less, about one for each thing that can break: under a minute on two cores.
test-quick: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m quick

# Tests of seconds each, which no change may break either.
test-long: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'long and not slow'

test-slow: $(VENV)/installed-test
	$(BIN)/python -m pytest -m slow

# What the CPU tests of several ranks check, over NCCL, on as many of 2 to 8 GPUs as this machine has.
test-nccl: $(VENV)/installed-test
	$(BIN)/python -m pytest -m nccl tests/parallel tests/training

# Every check that needs a GPU, in one report; without a GPU what a CPU can run.
test-gpu: $(VENV)/installed-test
	$(BIN)/python benchmarks/gpu/run.py

# Rules of accessibility for tests of pages in a browser, which are skipped without them.
axe:
	npm install --no-save --no-audit --no-fund --prefix build/axe axe-core@4.11.0 || \
		echo "axe-core was not fetched by npm: tests of accessibility are skipped"

# Snakemake for the test of its example, in an environment of its own.
snakemake:
	$(PYTHON) -m venv build/snakemake
	build/snakemake/bin/python -m pip install --quiet snakemake || \
		echo "Snakemake was not installed: the test of its example is skipped"

# Wrong operators that fast tests do not notice. The first run records which tests call which functions.
mutants: $(VENV)/installed-test
	$(BIN)/python benchmarks/mutants.py fastfold/inference fastfold/products fastfold/parallel --out build/mutants.json

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Pages of modules that are gone must not stay.
docs: $(VENV)/installed-docs
	rm -rf docs/api
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -d build/doctrees docs build/docs
	@echo "Written to $(CURDIR)/build/docs/index.html"

# What a package index takes, checked, and tried in an environment outside of this folder; uploads nothing.
dist: $(VENV)/installed
	$(BIN)/python -m pip install --quiet build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	outside=$$(mktemp -d) && $(PYTHON) -m venv $$outside/venv && \
	$$outside/venv/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl && \
	cd $$outside && venv/bin/fastfold infer MKTAYIAKQRQISFVKSHFSRQ --out results --num-recycles 0 && \
	venv/bin/fastfold verify && rm -r $$outside

# What is installed, as a bill of materials (CycloneDX), by a tool in an environment of its own.
sbom: $(VENV)/installed
	$(PYTHON) -m venv build/sbom
	build/sbom/bin/python -m pip install --quiet cyclonedx-bom
	build/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
		--output-file build/sbom.json $(BIN)/python
	@echo "Written to $(CURDIR)/build/sbom.json"

# The page of licences, by the package index.
licences: $(VENV)/installed
	$(BIN)/python docs/make_licences.py

# Images on a base that is named by the digest that the registry has now.
images:
	docker pull python:3.12-slim
	base=$$(docker image inspect --format '{{index .RepoDigests 0}}' python:3.12-slim) && \
	for kind in cpu cuda; do \
		docker build --build-arg "BASE=$$base" -f docker/$$kind.Dockerfile -t fastfold:$$kind . || exit; \
	done

bench: $(VENV)/installed-test
	$(BIN)/python benchmarks/evoformer_block.py
	$(BIN)/python benchmarks/train_step.py

clean:
	rm -rf $(VENV) demo_output predict_output gpu_results build dist docs/api *.egg-info
