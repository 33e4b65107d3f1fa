package main

import (
	"encoding/json"

	"github.com/epcached/epcached/unixsock/wire"
)

// whyResult is what why --json prints. The names are a contract for scripts.
type whyResult struct {
	Decision   string            `json:"decision"`
	Reason     string            `json:"reason"`
	RequestKey string            `json:"request_key"`
	Runtime    string            `json:"runtime"`
	Record     json.RawMessage   `json:"record"`
	Candidates []candidateResult `json:"candidates"`
	Neighbours []neighbourResult `json:"neighbours"`
	History    []eventResult     `json:"history"`
}

type candidateResult struct {
	Build       buildResult        `json:"build"`
	Served      bool               `json:"served"`
	Reason      string             `json:"reason"`
	Differences []differenceResult `json:"differences"`
}

type neighbourResult struct {
	RequestKey  string             `json:"request_key"`
	ModelName   string             `json:"model_name"`
	Builds      uint32             `json:"builds"`
	Differences []differenceResult `json:"differences"`
}

type differenceResult struct {
	Field string `json:"field"`
	Asked string `json:"asked"` // empty: not there
	Found string `json:"found"` // empty: not there
}

func explanationOf(e *wire.Explanation) whyResult {
	out := whyResult{
		Decision: e.GetDecision(), Reason: e.GetReason(), RequestKey: e.GetRequestKey(), Runtime: e.GetRuntime(),
		Record: json.RawMessage("null"), History: eventsOf(e.GetHistory()),
		Candidates: make([]candidateResult, len(e.GetCandidates())), Neighbours: make([]neighbourResult, len(e.GetNeighbours())),
	}
	if e.GetRecord() != "" {
		out.Record = raw(e.GetRecord())
	}
	for i, c := range e.GetCandidates() {
		out.Candidates[i] = candidateResult{buildOf(c.GetBuild()), c.GetServed(), c.GetReason(), differencesOf(c.GetDifferences())}
	}
	for i, n := range e.GetNeighbours() {
		out.Neighbours[i] = neighbourResult{n.GetRequestKey(), n.GetModelName(), n.GetBuilds(), differencesOf(n.GetDifferences())}
	}
	return out
}

func differencesOf(list []*wire.Difference) []differenceResult {
	out := make([]differenceResult, len(list))
	for i, d := range list {
		out[i] = differenceResult{d.GetField(), d.GetAsked(), d.GetFound()}
	}
	return out
}
