package main

import (
	"errors"
	"strings"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// objects are the elements of what get --json prints.
func objects(results []got, dryRun bool) []any {
	list := make([]any, len(results))
	for i := range results {
		list[i] = results[i].json(dryRun)
	}
	return list
}

// json is one element of what get --json prints. That of a model that failed stands in the list, so
// that the others keep their places.
func (r *got) json(dryRun bool) jsonout.Object {
	out := jsonout.Object{"outcome": "missing"} // with -n: it would be compiled
	a, e := r.reply, (*unixsock.Error)(nil)
	switch {
	case r.missing:
	case r.err != nil:
		out = jsonout.Object{"outcome": "failed", "error": r.err.Error(),
			"hint": strings.Join(exit.Hints(r.err), "; ")}
		if errors.As(r.err, &e) {
			out["class"], out["facts"] = wire.ErrorClass_name[int32(e.Class)], e.Facts
		}
	default:
		out = jsonout.Of(a, "request_key", "build", "model_digest", "ep", "sdk_version",
			"hardware_architecture", "compatibility", "view", "files", "provider_options",
			"session_options", "compile_seconds", "why", "unkept", "job", "member", "members",
			"warnings")
		out["outcome"], out["graph"], out["elapsed_seconds"] = outcomeOf(a), r.graph,
			r.elapsed.Seconds()
		if level := a.GetGraphOptimizationLevel(); level != "" {
			out["session_options"].(jsonout.Object)["graph_optimization_level"] = level
		}
		at := int(a.GetMember())
		if len(r.group) > 0 {
			at = r.member
		}
		if members := a.GetMembers(); at < len(members) {
			out["member"], out["model_digest"] = at, members[at].GetModelDigest()
		}
		switch {
		case r.queued():
			out["outcome"] = "queued"
		case r.job != nil: // it was queued, and has ended since
			out["outcome"], out["build"] = "compiled", r.job.GetBuild()
			out["ep"] = r.job.GetEp()
			out["elapsed_seconds"] = milliseconds(r.job.GetElapsedMs()).Seconds()
		}
	}
	out["model"], out["dry_run"] = r.path, dryRun // the path as it was given or found
	return out
}
