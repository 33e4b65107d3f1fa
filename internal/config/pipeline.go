package config

import (
	"errors"
	"slices"

	"github.com/epcached/epcached/internal/tomlfile"
)

// Pipeline is a file that lists models with the terms of their compiles, for epcachectl warm.
type Pipeline struct {
	Requests []PipelineRequest
}

// PipelineRequest is a model, or the models of a weight-sharing group, with its terms. Omitted
// values come from the top of the file.
type PipelineRequest struct {
	Models         []string // absolute paths; two or more: a group, in this order
	EPs            []string // as --ep spells them; none: the file names none
	Options        map[string]string
	SessionOptions map[string]string
	Dims           map[string]int64
	Denotations    map[string]int64
	Embed          bool
	Level          string // graph optimization level; "": the file says none

	from []tomlfile.Value // the tables that it was read from, the top of the file first
}

type sharedTerms struct {
	EPs            []string          `toml:"ep" is:"some"`
	Options        map[string]string `toml:"options" loose:"true"`
	SessionOptions map[string]string `toml:"session_options" loose:"true"`
	Dims           map[string]int64  `toml:"dims" range:"1 4611686018427387904"`
	Denotations    map[string]int64  `toml:"dims_by_denotation" range:"1 4611686018427387904"`
	Embed          bool              `toml:"embed"`
	Level          string            `toml:"optimization_level" in:"disable_all,basic,extended,layout,all"`
}

// LoadPipeline reads a pipeline file. The error is an Errors where its content is wrong.
func LoadPipeline(file string) (*Pipeline, error) {
	d, err := tomlfile.Read(file)
	if err != nil {
		return nil, err
	}
	d.Checks = checks
	var top struct {
		sharedTerms
		Models []tomlfile.Value `toml:"model"`
		Groups []tomlfile.Value `toml:"group"`
	}
	d.Root().Into(&top)
	p := &Pipeline{}
	add := func(v tomlfile.Value, t sharedTerms, models ...string) {
		r := PipelineRequest{models, t.EPs, t.Options, t.SessionOptions, t.Dims, t.Denotations,
			t.Embed, t.Level, []tomlfile.Value{d.Root(), v}}
		if len(models) > 1 && t.Embed {
			why := errors.New("it cannot be used for groups, whose models share a file")
			d.Add(r.ErrorAt(why, "embed"))
		}
		p.Requests = append(p.Requests, r)
	}
	for _, v := range top.Models {
		var m struct {
			sharedTerms
			Path string `toml:"path" is:"path" required:"no path: it names the model's file"`
		}
		m.sharedTerms = top.over(v)
		v.Into(&m)
		add(v, m.sharedTerms, m.Path)
	}
	for _, v := range top.Groups {
		var g struct {
			sharedTerms
			Models []string `toml:"models" is:"path" required:"no models: it names the files of two models or more"`
		}
		g.sharedTerms = top.over(v)
		v.Into(&g)
		models := v.In("models")
		if _, ok := models.Raw.([]any); ok && len(g.Models) < 2 {
			models.Errorf("a group has two models or more")
		}
		add(v, g.sharedTerms, g.Models...)
	}
	if err := d.Err(); err != nil {
		return nil, err
	}
	if len(p.Requests) == 0 {
		const text = "no [[model]] or [[group]] is listed"
		return nil, Errors{{File: file, Position: Position{Line: 1, Column: 1}, Text: text}}
	}
	return p, nil
}

// over returns the terms from the top of the file for a request, without options of replaced EPs.
func (t sharedTerms) over(v tomlfile.Value) sharedTerms {
	if v.Has("ep") {
		t.Options = nil
	}
	return t
}

// ErrorAt returns err with the position of the request's field, or of an element of it, or without
// that the position of the request.
func (r *PipelineRequest) ErrorAt(err error, name ...string) *Error {
	for _, v := range slices.Backward(r.from) {
		if field := v.In(name...); field.Position() != (Position{}) {
			return field.AddError(err.Error())
		}
	}
	return r.from[len(r.from)-1].AddError(err.Error())
}
