# epcached: everything a fresh clone needs stands in these targets. What they fetch goes into
# .deps/, which git ignores.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

DEPS     := $(CURDIR)/.deps
BIN      := $(CURDIR)/bin
PYTHON   ?= python3
VENV     := $(DEPS)/python/bin/python
GO       := go
# One way to build what is checked, shipped and run by tests, so that Go builds each of its parts
# once.
PLAIN     = CGO_ENABLED=0 GOFLAGS="$(shell $(GO) env GOFLAGS) -trimpath"
# Programs state the commit that they were built from.
VERSION   = $(shell sed -n 's/^var version = "\(.*\)"/\1/p' cmd/epcached/main.go)+$(COMMIT)
COMMIT    = $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
# `make check` vets. The inner loops of what compresses are not ours; those and what makes the
# tests' models run in one goroutine, and would take most of the time under the race detector.
RACE     := -race -vet=off -gcflags=github.com/klauspost/compress/...=-race=false \
	-gcflags=github.com/epcached/epcached/compilers/tinymodel=-race=false
# Where bench-space stores: some 5 GB for a while, on the file system to be measured.
SPACE_WORK ?= $(DEPS)/space-work
# Where bench-million makes its store, likewise: 12 GB.
MILLION_WORK ?= $(DEPS)/million-work

export EPCACHED_BIN      := $(BIN)
export EPCACHED_RUNTIMES := $(DEPS)/runtimes
export EPCACHED_MODELS   := $(DEPS)/models
export EPCACHED_PYTHON   := $(VENV)
export EPCACHED_PACKAGES := $(DEPS)/light-packages
export ORT_DISABLE_TELEMETRY := 1
# numpy starts threads in each of hundreds of processes, and they spin for 70 ms of processor time.
export OPENBLAS_NUM_THREADS := 1
# At its end each program that the race detector looks at waits a second for reports that others are
# about to write: there are dozens of them, and a report takes less.
export GORACE ?= atexit_sleep_ms=100

# timed runs a command and prints how long it took.
timed = @began=$$SECONDS; echo '$(1)'; $(1); \
	echo "make $@: $(firstword $(filter ./% clients/%,$(1))) took $$((SECONDS - began)) s"

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## build epcached, epcachectl, epcached-ort and epcached-remote into bin/
	@mkdir -p $(BIN)
	$(PLAIN) $(GO) build -ldflags="-X main.version=$(VERSION)" -o $(BIN)/ ./cmd/...

.PHONY: deps
deps: ## fetch ONNX Runtime, execution providers, models and test tools into .deps/
	@testdata/fetch-python $(DEPS)/python
	@testdata/fetch-runtimes $(DEPS)/runtimes
	@testdata/fetch-models $(DEPS)/models
	@testdata/fetch-packages $(DEPS)/light-packages light
	@testdata/fetch-image-tools
	@testdata/fetch-remote $(DEPS)/remote olareg || true

.PHONY: deps-remote
deps-remote: ## fetch S3 servers, registries, and tools for registries into .deps/remote/; minutes
	@timeout 30m testdata/fetch-remote $(DEPS)/remote

SHARED = TestMachinesWithTheirOwnHelpers|TestTheHolderOfALease|TrustDocument|TwoBuilders|$\
	RevokedKey|AnotherRootKey|FetchedFiles|EveryFailure

.PHONY: remotes
remotes: build deps deps-remote ## share builds by S3 servers and registries; five minutes
	$(PLAIN) $(GO) test ./cmd/epcached-remote -run 'RealServers|RealRegistries' -v -timeout 10m
	$(PLAIN) $(GO) test ./cmd/epcached -run 'OtherTools' -v -timeout 10m
	EPCACHED_FLEET=50 $(PLAIN) $(GO) test ./cache -run '$(SHARED)' -v -timeout 20m
	EPCACHED_LARGE=1 $(PLAIN) $(GO) test ./cache -run OfAGigabyte -v -timeout 10m

.PHONY: wheel
wheel: ## build the Python package with the programs, for x86-64 and arm64, into dist/
	@testdata/fetch-python $(DEPS)/python
	$(VENV) clients/python/build_wheel.py $(CURDIR)/dist

.PHONY: wheel-proof
wheel-proof: wheel ## install the wheel as a new user, and run it; build it again, and compare
	@testdata/fetch-models $(DEPS)/models
	testdata/wheel-proof $(CURDIR)/dist $(DEPS)/wheels $(DEPS)/models/tiny-mlp

.PHONY: wheel-proof-arm64
wheel-proof-arm64: wheel ## start the programs of the arm64 wheel under qemu
	@testdata/fetch-models $(DEPS)/models
	testdata/wheel-proof-arm64 $(CURDIR)/dist $(DEPS)/models/tiny-mlp

# What testdata/demo.py serves: nothing else is fetched for it.
DEMO_MODELS = silero-vad magika smart-turn rapidocr-det nudenet ddddocr-det minilm-int8 \
	minilm-fp32 mlp-128mib

.PHONY: demo
demo: build ## compile real models once, serve them to a second application, and show the gain
	@testdata/fetch-python $(DEPS)/python
	@testdata/fetch-runtimes $(DEPS)/runtimes openvino-1.8.1 qnn-2.7.0
	@testdata/fetch-models $(DEPS)/models $(DEMO_MODELS)
	@$(VENV) testdata/demo.py

.PHONY: demo-picture
demo-picture: ## draw doc/demo.svg from report/demo.md, which make demo leaves
	@$(VENV) testdata/demo_picture.py

# ./... does not match them.
TOOLS = ./testdata/ep/conformance ./testdata/typecheck

.PHONY: test
test: test-python test-go race ## run all tests, on the real execution providers too

PYTEST = $(VENV) -m pytest -q --import-mode=importlib
# Three at a time on two processors, because many tests wait for a child process or for a clock.
.PHONY: test-python
test-python: build deps ## run the tests of the Python client, and of programs under epcachectl run
	$(call timed,$(PYTEST) -n 3 --dist loadfile clients/python/tests)

# The packages whose tests take longest start first. compilers is tested by itself, because beside
# the others two tests of the workers' unit sometimes wait for a worker in vain, which is not
# explained.
SLOWEST = ./cmd/epcached ./cache ./store
OTHERS = $$($(GO) list ./... | grep -v "/epcached/compilers$$" | \
	grep -vxF "$$($(GO) list $(RACED))")

.PHONY: test-go
test-go: build deps ## run the Go tests that race does not run, on the real execution providers too
	$(call timed,$(PLAIN) $(GO) test -p 3 -vet=off -timeout 25m $(SLOWEST) $(OTHERS) $(TOOLS))
	$(call timed,$(PLAIN) $(GO) test -vet=off -timeout 25m ./compilers)

# The packages with the most concurrency are tested under the race detector alone; of the large
# ones, what CONCURRENT matches is tested again.
RACED      = ./unixsock ./internal/... ./store/views ./cache/jobs ./cache/failure \
	./cmd/epcachectl/... ./cmd/epcached/internal/...
CONCURRENT = Claim|Flight|Job|Publish|Put|Runtime|View|Wait|Together|Concurrent|SameTime|$\
	Race|Reload|Watch|Close|Stop|Subscri|Probe

# Two test processes at a time, because a package's tests run one after the other for the most part;
# before them is built what they have in common.
.PHONY: race race-large race-raced
race: build deps ## run the tests of what is concurrent under the race detector
	$(GO) build $(subst -vet=off,,$(RACE)) ./cache ./cmd/epcachectl/...
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target race-large race-raced

race-large:
	$(call timed,$(GO) test $(RACE) -timeout 25m -run "$(CONCURRENT)" ./cache ./index ./compilers)

race-raced:
	$(call timed,$(GO) test $(RACE) -timeout 25m $(RACED))

.PHONY: test-long
test-long: test remotes matrix providers stress flood kills faults explore ## long forms; hours
	$(GO) test $(RACE) -timeout 60m ./...
	$(GO) test ./portable -run Flipped -timeout 2h -args -flip-stride=1
	$(MAKE) fuzz FUZZTIME=1000000x
	$(MAKE) bench-million wheel-proof-arm64

.PHONY: explore
explore: ## a million states that crashes could leave a store in; hours
	$(PLAIN) $(GO) test ./store -run NoCrashLoses -timeout 12h \
		-args -explore.states=1000000 -explore.ops=20

.PHONY: faults
faults: build deps ## fail each call of the store; half a minute
	$(PLAIN) $(GO) test ./store -run RecoversWithoutARestart -args -faults.all

.PHONY: test-short
test-short: build ## run what needs no download
	$(GO) test -short ./...

.PHONY: check
check: build ## gofmt, vet, staticcheck, mypy, ruff, tidy, and types on arm64
	@out=$$(gofmt -l $$(git ls-files '*.go')); \
		[ -z "$$out" ] || { echo "not gofmt'ed:"; echo "$$out"; exit 1; }
	$(PLAIN) $(GO) vet ./... $(TOOLS)
	$(PLAIN) $(GO) tool staticcheck ./... $(TOOLS)
	@testdata/fetch-python $(DEPS)/python
	cd clients/python && $(VENV) -m mypy
	$(VENV) -m ruff format --quiet --diff $$(git ls-files '*.py')
	$(GO) mod tidy -diff
	$(PLAIN) $(GO) build -o $(BIN)/ ./testdata/typecheck
	$(PLAIN) GOOS=linux GOARCH=arm64 $(BIN)/typecheck ./... $(TOOLS)
	cd testdata/space && $(PLAIN) $(BIN)/typecheck ./... && $(GO) mod tidy -diff

.PHONY: messages
messages: ## collect the words that users see into testdata/messages/
	$(PLAIN) $(GO) test . -run TestMessagesAreUpToDate -args -messages.update

.PHONY: testep
testep: ## build the plugin execution provider of the tests into bin/testep/
	testdata/ep/testep/build $(BIN)/testep

.PHONY: packages
packages: build deps ## run real packages, unchanged, under epcachectl run; report/packages.md
	@testdata/fetch-packages $(DEPS)/packages
	$(DEPS)/packages/bin/python testdata/packages.py $(DEPS)/packages

.PHONY: bench
bench: build deps ## measure hits, digests and first inference next to their peers; report/bench.txt
	@mkdir -p report
	$(GO) test -run '^$$' -bench . -benchtime 1s -timeout 30m \
		./cas ./unixsock ./cache ./cmd/epcached | tee report/bench.txt
	$(VENV) testdata/bench_first_inference.py | tee -a report/bench.txt
	$(VENV) testdata/bench_miss.py | tee -a report/bench.txt
	$(VENV) testdata/bench_overhead.py | tee -a report/bench.txt
	$(VENV) testdata/bench_run.py | tee -a report/bench.txt

.PHONY: bench-space
bench-space: deps ## measure the space of real context binaries next to peers; report/space.txt
	@testdata/fetch-peers $(DEPS)/peers
	@$(VENV) testdata/space_corpus.py $(DEPS)/space
	@mkdir -p report $(BIN) $(SPACE_WORK)
	cd testdata/space && $(GO) vet ./... && $(GO) build -o $(BIN)/space .
	$(BIN)/space --corpus $(DEPS)/space --peers $(DEPS)/peers --work $(SPACE_WORK) --week | \
		tee report/space.txt
	EPCACHED_LARGE=1 $(GO) test -v -timeout 30m -run TenGigabytes ./dedupe/match | \
		tee -a report/space.txt

.PHONY: bench-remote
bench-remote: build deps deps-remote ## print the ratios of remotes to peers; report/remote.txt
	@mkdir -p report
	[ -x $(DEPS)/remote/mc ] || GOBIN=$(DEPS)/remote \
		$(GO) install github.com/minio/mc@v0.0.0-20250313080218-cf909e1063a9 || true
	[ -x $(DEPS)/remote/aws/bin/aws ] || { $(PYTHON) -m venv $(DEPS)/remote/aws && \
		$(DEPS)/remote/aws/bin/python -m pip install --quiet --disable-pip-version-check \
		awscli==1.46.3; } || true
	$(PLAIN) $(GO) test ./cmd/epcached-remote -run TheProgramIsSmall -v | tee report/remote.txt
	$(PLAIN) $(GO) test ./cache -run '^$$' -bench 'Pull|HitBesideRemote|MissBlackHole' \
		-benchtime 1x | tee -a report/remote.txt
	$(PLAIN) $(GO) test ./cmd/epcached -run UpdateCostsFewBytes -v | tee -a report/remote.txt
	EPCACHED_LARGE=1 $(PLAIN) $(GO) test ./cache -run OfAGigabyte -v | tee -a report/remote.txt
	@testdata/remote_table report/remote.txt | tee -a report/remote.txt

.PHONY: bench-million
bench-million: ## measure a store of a million entries: 12 GB in MILLION_WORK, ten minutes
	@mkdir -p report $(MILLION_WORK)
	EPCACHED_ENTRIES_AT=$(MILLION_WORK) EPCACHED_ENTRIES=$${ENTRIES:-1000000} \
		$(GO) test -v -timeout 60m -run '^TestManyEntries$$' ./cache | tee report/million.txt
	rm -rf $(MILLION_WORK)

.PHONY: stress
stress: build deps ## have a hundred applications share a small budget, for MINUTES=3
	EPCACHED_STRESS_SECONDS=$$(( $${MINUTES:-3} * 60 )) $(GO) test -count 1 -v -timeout 120m \
		-run TestAHundredApplicationsUnderATightBudget ./cmd/epcached

.PHONY: flood
flood: build deps ## flood the daemon as one user beside another: five times REQUESTS=60000
	EPCACHED_FLOOD_REQUESTS=$${REQUESTS:-60000} EPCACHED_FLOOD_ATTACKS=$${ATTACKS:-all} \
		$(GO) test -run '^$$' -bench '^BenchmarkFlood$$' -benchtime $${RUNS:-5}x -timeout 120m \
		./cmd/epcached

.PHONY: matrix
matrix: build deps ## serve OpenVINO 1.4.0 to 1.8.1 with ONNX Runtime 1.24.4 to 1.32.0
	@testdata/fetch-runtimes $(DEPS)/runtimes \
		openvino-{1.4.0,1.4.1,1.5.2,1.6.1,1.7.0,1.8.0,1.8.1} \
		openvino-1.8.1-ort-{1.24.4,1.28.0,1.32.0} qnn-{2.3.0-ort-1.24.4,2.4.0,2.6.0}
	EPCACHED_MATRIX=1 $(VENV) -m pytest -q -s clients/python/tests/real/test_matrix.py
	$(GO) test -count 1 ./compilers -run TestRealEPsMakeKnownCallsOnly -args -compilers.all
	$(GO) test -count 1 ./compilers ./cache/identity -run 'OptionsInTheInstalled|EveryEntryOf'

.PHONY: providers
providers: build deps ## other execution providers from PyPI, and the newest packages; 1 GB
	@testdata/fetch-runtimes $(DEPS)/runtimes nxrt-0.1.0.dev6 ggml-0.2.0 webgpu-0.4.0 \
		tensorrt_rtx-0.5.0 gpu-1.31.1 openvino_inside-1.24.1 openvino-newest qnn-newest
	EPCACHED_PROVIDERS=1 $(VENV) -m pytest -q -s clients/python/tests/real/test_providers.py
	$(GO) test -count 1 ./compilers -run OptionsInTheInstalled

.PHONY: kills
kills: build deps ## kill the daemon at each system call that changes the disk; half an hour
	EPCACHED_KILL_MOMENTS=0 EPCACHED_KILL_SECONDS=60 $(GO) test -count 1 -v -timeout 120m \
		-run '^TestKilled' ./cmd/epcached

.PHONY: api-doc
api-doc: ## write doc/python-api.md from the docstrings of clients/python/epcache
	$(PYTHON) clients/python/api_doc.py doc/python-api.md

.PHONY: session-keys
session-keys: ## write the Python client's table of session config entries
	$(GO) test -count 1 -run TestPythonHasTheSameTable ./cache/identity -update

.PHONY: fuzz
fuzz: ## fuzz every reader of foreign bytes (FUZZTIME=30s; 1000000x: a million executions)
	@for pkg in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$pkg | grep ^Fuzz || true); do \
	    echo "$$pkg $$f"; $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzzminimizetime 10x \
	    -fuzztime $${FUZZTIME:-30s} $$pkg; done; done

.PHONY: proto
proto: ## generate the Go code of the protocol and of the manifests
	@testdata/fetch-python $(DEPS)/python
	@mkdir -p $(DEPS)/bin
	@$(GO) build -o $(DEPS)/bin/ google.golang.org/protobuf/cmd/protoc-gen-go
	cd unixsock/wire && PATH=$(DEPS)/bin:$$PATH $(VENV) -m grpc_tools.protoc -I. --go_out=. \
		--go_opt=paths=source_relative epcached.proto
	cd index && PATH=$(DEPS)/bin:$$PATH $(VENV) -m grpc_tools.protoc -I. --go_out=manifestpb \
		--go_opt=paths=source_relative manifest.proto

.PHONY: proto-check
proto-check: proto ## fail if the generated code is not that of the .proto files
	git diff --exit-code -- '*.pb.go'

.PHONY: clean
clean: ## remove what was built, not what was fetched
	rm -rf $(BIN) report

.PHONY: distclean
distclean: clean ## remove what was fetched as well
	rm -rf $(DEPS)
