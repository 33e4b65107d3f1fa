package main

import (
	"encoding/json"

	"github.com/epcached/epcached/unixsock/wire"
)

// buildResult is a build as list, show, invalidate and rm print it with --json.
type buildResult struct {
	Build                string          `json:"build"`
	RequestKey           string          `json:"request_key"`
	ModelDigest          string          `json:"model_digest"`
	ModelName            string          `json:"model_name"`
	EP                   string          `json:"ep"`
	EPVersion            string          `json:"ep_version"`
	EPLibraryDigest      string          `json:"ep_library_digest"`
	SDKVersion           string          `json:"sdk_version"`
	HardwareArchitecture string          `json:"hardware_architecture"`
	CompatibilityString  string          `json:"compatibility_string"`
	ORTVersion           string          `json:"ort_version"`
	Scope                string          `json:"scope"`
	Graph                string          `json:"graph"`
	Files                []fileResult    `json:"files"`
	CreatedMs            int64           `json:"created_ms"`   // Unix time
	LastUsedMs           int64           `json:"last_used_ms"` // 0: never
	Hits                 uint64          `json:"hits"`
	CompileSeconds       float64         `json:"compile_seconds"`
	State                string          `json:"state"`
	Reason               string          `json:"reason,omitempty"`
	LoadCheck            string          `json:"load_check"`
	Leased               bool            `json:"leased"`
	Pinned               bool            `json:"pinned"`
	KeptAs               string          `json:"kept_as,omitempty"`    // "whole" or "packed", with ", with a copy" where one is served
	KeptText             string          `json:"kept_text,omitempty"`  // of builds that are shown or explained: that in more words, with what will become of it
	OwnBytes             int64           `json:"own_bytes"`            // on disk: what its removal would free now; 0 of what was removed
	Compatibility        string          `json:"compatibility"`        // for the runtime named below; "": not judged
	CompatibilitySource  string          `json:"compatibility_source"` // who says so
	CompatibilityReason  string          `json:"compatibility_reason"`
	CompatibilityRuntime string          `json:"compatibility_runtime"`
	JudgedMs             int64           `json:"judged_ms"`           // Unix time; 0: never
	LoadSeconds          float64         `json:"load_seconds"`        // of the processor; 0: not measured
	SourceLoadSeconds    float64         `json:"source_load_seconds"` // of the source model; likewise
	DriverVersion        string          `json:"driver_version"`
	ConvertedFrom        string          `json:"converted_from,omitempty"`  // build key of the other form, which it was made of
	VerifiedOutput       float64         `json:"verified_output,omitempty"` // the tolerance at which it was compared with its model; 0: it was not
	MadeBy               string          `json:"made_by,omitempty"`         // who compiled it and put it; not there: the daemon did
	Members              []memberResult  `json:"members,omitempty"`         // of a weight-sharing group, in order; their graphs are named as in files
	Record               json.RawMessage `json:"record,omitempty"`          // show only: the request record
}

func buildOf(b *wire.Build) buildResult {
	return buildResult{
		Build: b.GetBuild(), RequestKey: b.GetRequestKey(), ModelDigest: b.GetModelDigest(), ModelName: b.GetModelName(),
		EP: b.GetEp(), EPVersion: b.GetEpVersion(), EPLibraryDigest: b.GetEpLibraryDigest(), SDKVersion: b.GetSdkVersion(),
		HardwareArchitecture: b.GetHardwareArchitecture(), CompatibilityString: b.GetCompatibilityString(), ORTVersion: b.GetOrtVersion(),
		Scope: b.GetScope(), Graph: b.GetGraph(), Files: filesOf(b.GetFiles()), CreatedMs: b.GetCreatedMs(), LastUsedMs: b.GetLastUsedMs(),
		Hits: b.GetHits(), CompileSeconds: b.GetCompileSeconds(), State: b.GetState(), Reason: b.GetReason(),
		LoadCheck: b.GetLoadCheck(), Leased: b.GetLeases() > 0, Pinned: b.GetPinned(), OwnBytes: b.GetOwnBytes(), KeptAs: b.GetKeptAs(), KeptText: b.GetKeptText(),
		Compatibility: b.GetCompatibility(), CompatibilitySource: b.GetCompatibilitySource(), CompatibilityReason: b.GetCompatibilityReason(),
		CompatibilityRuntime: b.GetCompatibilityRuntime(), JudgedMs: b.GetJudgedMs(), LoadSeconds: b.GetLoadSeconds(),
		SourceLoadSeconds: b.GetSourceLoadSeconds(), DriverVersion: b.GetDriverVersion(), ConvertedFrom: b.GetConvertedFrom(), VerifiedOutput: b.GetVerifiedOutput(),
		MadeBy: b.GetMadeBy(), Members: membersOf(b.GetMembers()),
	}
}

func buildsOf(builds []*wire.Build) []buildResult {
	out := make([]buildResult, len(builds))
	for i, b := range builds {
		out[i] = buildOf(b)
	}
	return out
}

// raw passes a record on as it is, where it is JSON.
func raw(record string) json.RawMessage {
	if json.Valid([]byte(record)) {
		return json.RawMessage(record)
	}
	quoted, err := json.Marshal(record)
	if err != nil {
		return nil // a string always has a form
	}
	return quoted
}

func sizeOf(b *wire.Build) int64 {
	var size int64
	for _, f := range b.GetFiles() {
		size += f.GetSize()
	}
	return size
}
