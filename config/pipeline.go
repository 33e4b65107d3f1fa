package config

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/epcached/epcached/tomlfile"
)

// Pipeline is a file that lists models with what each is compiled with, for epcachectl warm.
type Pipeline struct {
	Requests []PipelineRequest
}

// PipelineRequest is a model, or the models of a weight-sharing group, with what the file says of
// it. What it does not say itself, the top of the file says for all.
type PipelineRequest struct {
	Models         []string // absolute paths; two or more: a group, in this order
	EPs            []string // as --ep spells them; none: the file names none
	Options        map[string]string
	SessionOptions map[string]string
	Dims           map[string]uint64
	Denotations    map[string]uint64
	Embed          bool
	Level          string // graph optimization level; "": the file says none

	tables []*table // those that it was read from, the top of the file first
}

// LoadPipeline reads a pipeline file. The error is an Errors where the file's content is what is
// wrong.
func LoadPipeline(file string) (*Pipeline, error) {
	d, err := tomlfile.Read(file)
	if err != nil {
		return nil, err
	}
	top := (&Settings{}).root(d)
	var common PipelineRequest
	common.read(top)
	p := &Pipeline{}
	add := func(t *table, models func(*PipelineRequest)) {
		r := common
		models(&r)
		r.read(t)
		t.done()
		if len(r.Models) > 1 && r.Embed {
			why := errors.New("it is not for groups: what the models share is a file of its own")
			d.Add(r.Wrong(why, "embed"))
		}
		p.Requests = append(p.Requests, r)
	}
	for _, t := range top.tables("model") {
		add(t, func(r *PipelineRequest) {
			r.Models = []string{""}
			t.required("path", "the model's file")
			t.file("path", &r.Models[0])
		})
	}
	for _, t := range top.tables("group") {
		add(t, func(r *PipelineRequest) {
			t.required("models", "the files of two models or more")
			t.files("models", &r.Models)
			if _, there := t.values["models"].([]any); there && len(r.Models) < 2 {
				t.wrong("a group has two models or more", "models")
			}
		})
	}
	top.done()
	if len(p.Requests) == 0 && d.Err() == nil {
		const text = "no [[model]] and no [[group]] is listed"
		return nil, Errors{{File: file, Position: Position{Line: 1, Column: 1}, Text: text}}
	}
	if err := d.Err(); err != nil {
		return nil, err
	}
	return p, nil
}

// read takes what a table says over what is there.
func (r *PipelineRequest) read(t *table) {
	r.tables = append(slices.Clone(r.tables), t)
	if _, there := t.values["ep"]; there {
		r.Options = nil // of the execution providers that these replace
	}
	t.texts("ep", &r.EPs, notEmpty)
	t.pairs("options", &r.Options)
	t.pairs("session_options", &r.SessionOptions)
	t.sizes("dims", &r.Dims)
	t.sizes("dims_by_denotation", &r.Denotations)
	t.truth("embed", &r.Embed)
	t.choice("optimization_level", &r.Level, "disable_all", "basic", "extended", "layout", "all")
}

// Wrong is err with the place of the field, or of the element of one, that the request has from
// the file. Where the file does not have it, it is the request's own place.
func (r *PipelineRequest) Wrong(err error, name ...string) *Error {
	wrong := func(t *table, name ...string) *Error {
		return &Error{File: t.document.File, Position: t.at(name...), Field: t.spell(name...), Text: err.Error()}
	}
	for _, t := range slices.Backward(r.tables) {
		if t.at(name...) != (Position{}) {
			return wrong(t, name...)
		}
	}
	return wrong(r.tables[len(r.tables)-1])
}

// required notes a field that is not there and has to be.
func (t *table) required(name, what string) {
	if _, there := t.values[name]; !there {
		t.wrong(fmt.Sprintf("no %s: it names %s", name, what))
	}
}

// pairs takes a table of texts over what is there. A number or a truth stands for its text, as
// options have it.
func (t *table) pairs(name string, to *map[string]string) {
	values := t.table(name).values
	if len(values) == 0 {
		return
	}
	*to = maps.Clone(*to)
	if *to == nil {
		*to = make(map[string]string)
	}
	for key, v := range values {
		switch v := v.(type) {
		case string:
			(*to)[key] = v
		case int64:
			(*to)[key] = strconv.FormatInt(v, 10)
		case bool:
			(*to)[key] = strconv.FormatBool(v)
		default:
			t.wrong("it is "+tomlfile.Kind(v)+", not a text in quotes, a whole number, true or false", name, key)
		}
	}
}

// sizes takes a table of sizes over what is there.
func (t *table) sizes(name string, to *map[string]uint64) {
	values := t.table(name).values
	if len(values) == 0 {
		return
	}
	*to = maps.Clone(*to)
	if *to == nil {
		*to = make(map[string]uint64)
	}
	for key, v := range values {
		var n uint64
		t.whole(v, &n, 1, 1<<62, name, key)
		(*to)[key] = n
	}
}
