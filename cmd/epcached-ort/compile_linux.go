//go:build linux && (amd64 || arm64)

package main

import (
	"path"
	"time"

	"github.com/epcached/epcached/compilers/dialogue"
	"github.com/epcached/epcached/compilers/ort"
)

func (j *job) compile() error {
	if len(j.req.Share) > 0 {
		return j.compileGroup()
	}
	if err := j.phase(dialogue.PhaseCompiling); err != nil {
		return err
	}
	start := time.Now()
	o, err := j.options()
	if err != nil {
		return err
	}
	if j.req.Route == "session_options" {
		_, err = j.compileInSession(o, j.req.Model, j.req.Output, j.req.Embed) // the session stays until the process ends
	} else {
		_, err = o.Compile(j.compilation(j.req.Model, j.req.Output))
	}
	j.result.Seconds = time.Since(start).Seconds()
	return step(err, "compile")
}

// compilation is from file to file: both are in private folders, and a model in memory gives the same. That nothing was compiled is no error here,
// for what ORT writes then tells which nodes were left.
func (j *job) compilation(model, output string) ort.Compilation {
	c := ort.Compilation{ModelPath: model, OutputPath: output, Embed: j.req.Embed, Level: j.req.Options.GraphOptimizationLevel,
		Flags: ort.ErrorIfOutputFileExists}
	if keep := j.req.Keep; keep.InSource {
		c.Location = func(i ort.Initializer) (*ort.Place, error) {
			if i.Place != nil {
				i.Place.File = path.Clean(i.Place.File) // an artefact names each of its files in one way
			}
			return i.Place, nil
		}
	} else if keep.File != "" {
		c.InitializersFile, c.InitializersThreshold = keep.File, keep.Threshold
	}
	return c
}

// compileInSession is the older route: a session that writes the compiled model while it is being created.
func (j *job) compileInSession(o *ort.SessionOptions, model, output string, embed bool) (*ort.Session, error) {
	mode := "0"
	if embed {
		mode = "1"
	}
	entries := [][2]string{{"ep.context_enable", "1"}, {"ep.context_file_path", output}, {"ep.context_embed_mode", mode}}
	if j.req.Keep.File != "" {
		entries = append(entries, [2]string{"ep.context_model_external_initializers_file_name", j.req.Keep.File})
	}
	for _, entry := range entries {
		if err := o.Set(entry[0], entry[1]); err != nil {
			return nil, err
		}
	}
	return o.Open(model)
}
