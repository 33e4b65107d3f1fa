package main

import "github.com/epcached/epcached/unixsock/wire"

// jobsResult is what jobs, jobs cancel and jobs retry print with --json.
type jobsResult struct {
	DryRun   bool            `json:"dry_run,omitempty"` // with -n: nothing was done
	Jobs     []jobResult     `json:"jobs"`
	Failures []failureResult `json:"failures"`
}

type jobResult struct {
	ID             string       `json:"id"`
	State          string       `json:"state"`
	Phase          string       `json:"phase"`
	ModelName      string       `json:"model_name"`
	ModelDigest    string       `json:"model_digest"`
	RequestKey     string       `json:"request_key"`
	Build          string       `json:"build"`
	EP             string       `json:"ep"`
	UID            uint32       `json:"uid"`
	Background     bool         `json:"background"`
	Waiting        uint32       `json:"waiting"`
	QueuedMS       int64        `json:"queued_ms"`  // Unix time
	StartedMS      int64        `json:"started_ms"` // 0: not yet
	ElapsedSeconds float64      `json:"elapsed_seconds"`
	UsuallySeconds float64      `json:"estimate_seconds"` // 0: not known
	Why            string       `json:"why"`
	Models         uint32       `json:"models,omitempty"` // of a group
	Error          *errorResult `json:"error,omitempty"`
}

type errorResult struct {
	Class string            `json:"class"`
	Text  string            `json:"text"`
	Hint  string            `json:"hint,omitempty"`
	Facts map[string]string `json:"facts,omitempty"`
}

type failureResult struct {
	ModelName   string            `json:"model_name"`
	ModelDigest string            `json:"model_digest"`
	RequestKey  string            `json:"request_key"`
	Build       string            `json:"build"`
	EP          string            `json:"ep"`
	Reason      string            `json:"reason"`
	Text        string            `json:"text"`
	Facts       map[string]string `json:"facts"`
	Count       uint32            `json:"count"`
	FirstMS     int64             `json:"first_ms"`
	LastMS      int64             `json:"last_ms"`
	RetryMS     int64             `json:"retry_ms"` // 0: when something changes
	Scope       string            `json:"scope"`
}

func jobsOf(reply *wire.JobsReply) jobsResult {
	out := jobsResult{Jobs: []jobResult{}, Failures: []failureResult{}}
	for _, j := range reply.GetJobs() {
		out.Jobs = append(out.Jobs, jobOf(j))
	}
	for _, f := range reply.GetFailures() {
		out.Failures = append(out.Failures, failureOf(f))
	}
	return out
}

func jobOf(j *wire.Job) jobResult {
	out := jobResult{
		ID: j.GetId(), State: j.GetState(), Phase: j.GetPhase(), ModelName: j.GetModelName(), ModelDigest: j.GetModelDigest(),
		RequestKey: j.GetRequestKey(), Build: j.GetBuild(), EP: j.GetEp(), UID: j.GetUid(), Background: j.GetBackground(), Waiting: j.GetWaiting(),
		QueuedMS: j.GetQueuedMs(), StartedMS: j.GetStartedMs(), ElapsedSeconds: milliseconds(j.GetElapsedMs()).Seconds(),
		UsuallySeconds: milliseconds(j.GetEstimateMs()).Seconds(), Why: j.GetWhy(), Models: j.GetModels(),
	}
	if e := j.GetError(); e != nil {
		out.Error = &errorResult{Class: wire.ErrorClass_name[int32(e.GetClass())], Text: e.GetText(), Hint: e.GetHint(), Facts: e.GetFacts()}
	}
	return out
}

func failureOf(f *wire.Failure) failureResult {
	facts := f.GetFacts()
	if facts == nil {
		facts = map[string]string{}
	}
	return failureResult{
		ModelName: f.GetModelName(), ModelDigest: f.GetModelDigest(), RequestKey: f.GetRequestKey(), Build: f.GetBuild(), EP: f.GetEp(),
		Reason: f.GetReason(), Text: f.GetText(), Facts: facts, Count: f.GetCount(), FirstMS: f.GetFirstMs(), LastMS: f.GetLastMs(),
		RetryMS: f.GetRetryMs(), Scope: f.GetScope(),
	}
}
