//go:build linux && (amd64 || arm64)

package main

import (
	"path"
	"time"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/workerproto"
)

func (j *job) models() []workerproto.Member {
	return append([]workerproto.Member{{Model: j.req.Model, Output: j.req.Output}}, j.req.Share...)
}

// compile compiles the models; several share one context binary, which EPs keep in memory until the
// last session writes it. All sessions are kept until the process ends, because OpenVINO drops the
// shared data when the first one ends.
func (j *job) compile() error {
	start := time.Now()
	members := j.models()
	for i, m := range members {
		if err := j.modelPhase(workerproto.PhaseCompiling, i); err != nil {
			return err
		}
		var entries [][2]string
		if len(members) > 1 {
			entries = append(entries, [2]string{"ep.share_ep_contexts", "1"})
			if i == len(members)-1 {
				entries = append(entries, [2]string{"ep.stop_share_ep_contexts", "1"})
			}
		}
		if err := j.compileModel(m, entries); err != nil {
			return step(err, "compile")
		}
	}
	j.result.Seconds = time.Since(start).Seconds()
	return nil
}

// compileModel compiles one model with further session config entries. By the older route a session
// writes the compiled model while it is being created.
func (j *job) compileModel(m workerproto.Member, entries [][2]string) error {
	o, err := j.options()
	if err != nil {
		return err
	}
	inSession := j.req.Route == "session_options"
	if inSession {
		mode := map[bool]string{false: "0", true: "1"}[j.req.Embed]
		entries = append(entries, [2]string{"ep.context_enable", "1"},
			[2]string{"ep.context_file_path", m.Output}, [2]string{"ep.context_embed_mode", mode})
		if file := j.req.Keep.File; file != "" {
			entries = append(entries,
				[2]string{"ep.context_model_external_initializers_file_name", file})
		}
	}
	for _, entry := range entries {
		if err := o.Set(entry[0], entry[1]); err != nil {
			return err
		}
	}
	if inSession {
		_, err = o.Open(m.Model)
	} else {
		_, err = o.Compile(j.compilation(m))
	}
	return err
}

// compilation returns a compilation from file to file, both in private directories. A model without
// compiled nodes is no error here, because ONNX Runtime's output then shows which nodes were not
// compiled.
func (j *job) compilation(m workerproto.Member) ort.Compilation {
	c := ort.Compilation{ModelPath: m.Model, OutputPath: m.Output, Embed: j.req.Embed,
		Level: j.req.Options.GraphOptimizationLevel, Flags: ort.ErrorIfOutputFileExists}
	if keep := j.req.Keep; keep.InSource {
		c.Location = func(i ort.Initializer) (*ort.Place, error) {
			if i.Place != nil {
				// one spelling for each file of an artefact
				i.Place.File = path.Clean(i.Place.File)
			}
			return i.Place, nil
		}
	} else if keep.File != "" {
		c.InitializersFile, c.InitializersThreshold = keep.File, keep.Threshold
	}
	return c
}
