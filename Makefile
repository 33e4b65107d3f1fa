# epcached: everything a fresh clone needs stands in these targets. What they fetch goes into .deps/, which git ignores.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

DEPS     := $(CURDIR)/.deps
BIN      := $(CURDIR)/bin
PYTHON   ?= python3
VENV     := $(DEPS)/python/bin/python
GO       := go


export EPCACHED_BIN      := $(BIN)
export EPCACHED_RUNTIMES := $(DEPS)/runtimes
export EPCACHED_MODELS   := $(DEPS)/models
export EPCACHED_PYTHON   := $(VENV)

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## build epcached, epcachectl and the worker epcached-ort into bin/
	@mkdir -p $(BIN)
	CGO_ENABLED=0 $(GO) build -trimpath -o $(BIN)/ ./cmd/...

.PHONY: deps
deps: ## fetch ONNX Runtime, execution providers, models and test tools into .deps/
	@testdata/fetch-python $(DEPS)/python
	@testdata/fetch-runtimes $(DEPS)/runtimes
	@testdata/fetch-models $(DEPS)/models

.PHONY: wheel
wheel: ## build the Python package with the programs in it, for x86-64 and arm64, into dist/: the same bytes each time
	@testdata/fetch-python $(DEPS)/python
	$(VENV) clients/python/build_wheel.py $(CURDIR)/dist

.PHONY: wheel-proof
wheel-proof: wheel ## install the wheel as a new user with nothing, and run five lines twice; build it elsewhere, and compare
	@testdata/fetch-models $(DEPS)/models
	testdata/wheel-proof $(CURDIR)/dist $(DEPS)/wheels $(DEPS)/models/tiny-mlp

.PHONY: demo
demo: build deps ## compile real models once, serve them to a second application, and show the gain
	@$(VENV) testdata/demo.py

.PHONY: test
test: build deps ## run all tests, with the race detector, on the real execution providers too
	$(VENV) -m pytest -q clients/python/tests --ignore=clients/python/tests/real
	$(VENV) -m pytest -q clients/python/tests/real
	$(GO) test -race -timeout 15m ./...

.PHONY: test-short
test-short: build ## run what needs no download
	$(GO) test -short ./...

.PHONY: check
check: ## gofmt, vet, staticcheck, mypy, tidy, and builds for the other systems
	@out=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$out" ] || { echo "not gofmt'ed:"; echo "$$out"; exit 1; }
	$(GO) vet ./...
	$(GO) tool staticcheck ./...
	@testdata/fetch-python $(DEPS)/python
	cd clients/python && $(VENV) -m mypy
	$(GO) mod tidy -diff
	for target in linux/arm64 darwin/arm64 windows/amd64; do \
	  echo "build $$target"; CGO_ENABLED=0 GOOS=$${target%/*} GOARCH=$${target#*/} $(GO) build -o /dev/null ./...; done

.PHONY: testep
testep: ## build the plugin execution provider of the tests, testdata/ep/testep, into bin/testep/ (the tests build their own)
	testdata/ep/testep/build $(BIN)/testep

.PHONY: packages
packages: build deps ## run real packages, unchanged, under epcachectl run; report/packages.md
	@testdata/fetch-packages $(DEPS)/packages
	$(DEPS)/packages/bin/python testdata/packages.py $(DEPS)/packages

.PHONY: bench
bench: build deps ## measure hits, digests and first inference next to their peers; report/bench.txt
	@mkdir -p report
	$(GO) test -run '^$$' -bench . -benchtime 1s -timeout 30m ./cas ./unixsock ./cache ./cmd/epcached | tee report/bench.txt
	$(VENV) testdata/bench_first_inference.py | tee -a report/bench.txt
	$(VENV) testdata/bench_miss.py | tee -a report/bench.txt

.PHONY: fuzz
fuzz: ## fuzz every reader of foreign bytes for a while each (FUZZTIME=30s)
	@for pkg in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$pkg | grep ^Fuzz || true); do \
	    echo "$$pkg $$f"; $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime $${FUZZTIME:-30s} $$pkg; done; done

.PHONY: proto
proto: ## generate the Go code of the protocol and of the manifests
	@testdata/fetch-python $(DEPS)/python
	@mkdir -p $(DEPS)/bin && $(GO) build -o $(DEPS)/bin/ google.golang.org/protobuf/cmd/protoc-gen-go
	cd unixsock/wire && PATH=$(DEPS)/bin:$$PATH $(VENV) -m grpc_tools.protoc -I. --go_out=. --go_opt=paths=source_relative epcached.proto
	cd index && PATH=$(DEPS)/bin:$$PATH $(VENV) -m grpc_tools.protoc -I. --go_out=manifestpb --go_opt=paths=source_relative manifest.proto

.PHONY: proto-check
proto-check: proto ## fail if the generated code is not that of the .proto files
	git diff --exit-code -- '*.pb.go'

.PHONY: clean
clean: ## remove what was built, not what was fetched
	rm -rf $(BIN) report

.PHONY: distclean
distclean: clean ## remove what was fetched as well
	rm -rf $(DEPS)
