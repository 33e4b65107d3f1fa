package build

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
)

// neutral removes the job's own names from a failure: of the private copy and of its directory.
func (j *Job) neutral(f *failure.Failure) {
	var pairs []string
	out := filepath.Join(j.Folder, outFolder)
	for i := range j.Request.Models() {
		name := failure.ItsModel
		if j.Request.Models() > 1 {
			name = fmt.Sprintf("model %d of the group", i+1)
		}
		if i < len(j.Copies) {
			path := j.Copies[i].Path
			pairs = append(pairs, path, name, compilers.Spelling(out, path), name)
		}
		made := "what " + name + " became"
		pairs = append(pairs, j.ModelPath(i), name, filepath.Join(out, j.MemberOutput(i)), made,
			filepath.Base(j.ModelPath(i)), name, j.MemberOutput(i), made)
	}
	models := j.ModelFolder()
	for _, folder := range []string{out, models, compilers.Spelling(out, models), j.Folder} {
		pairs = append(pairs, folder+"/", "")
	}
	plain := strings.NewReplacer(pairs...) // where several fit, the first of them does
	f.Text = plain.Replace(f.Text)
	for _, fact := range failure.Words {
		if words, ok := f.Facts[fact]; ok {
			f.Facts[fact] = plain.Replace(words)
		}
	}
}

// plain has a failure of the job call the model as the request that began the job does.
func (j *Job) plain(e *apierr.Error) {
	f := failure.In(e)
	head, _ := strings.CutSuffix(e.Text, f.Text)
	j.neutral(f)
	f.ModelName = j.Request.Name
	told := f.As(f.ModelName)
	e.Text = head + told.Text
	maps.Copy(e.Facts, told.Facts)
}

// advised adds to a failure what the request could change.
func (j *Job) advised(err error) error {
	var e *apierr.Error
	if !errors.As(err, &e) || failure.In(e) == nil {
		return err
	}
	f := failure.In(e)
	j.aboutDimensions(f)
	aboutFallback(f, &j.Plan.Canonical)
	for key, value := range f.Facts {
		e.WithFact(key, value)
	}
	e.Hint = f.Advice()
	return e
}

// saidOfFallback is what ONNX Runtime says of a session that may leave no node to the CPU, and
// would have to.
const saidOfFallback = "fallback to CPU EP has been explicitly disabled"

// aboutFallback adds to a failure that it was the request's own wish which the model cannot be
// compiled with.
func aboutFallback(f *failure.Failure, c *identity.Record) {
	if c.SessionOptions["session.disable_cpu_ep_fallback"] == "1" &&
		strings.Contains(f.Text, saidOfFallback) {
		f.AddHint("without --complete (session.disable_cpu_ep_fallback) " +
			"the rest is left to the CPU, and the answer says which nodes those are")
	}
}

// aboutDimensions adds the hint to a failure that open dimensions may be the cause of: the
// execution provider refused the model, or took nothing of it.
func (j *Job) aboutDimensions(f *failure.Failure) {
	if f.Reason != failure.NoNode && f.Reason != failure.Refused {
		return
	}
	if vain := j.FixedInVain(); len(vain) > 0 {
		f.AddHint("no input of the model has a free dimension " + request.SpelledNames(vain))
	}
	if len(j.Open) == 0 {
		return
	}
	var names []string
	for _, d := range j.Open {
		if d.Name != "" {
			names = append(names, request.SpelledName(d.Name))
		}
	}
	f.AddHint(request.DimensionsHint(j.Open))
	f.Facts["free_dimensions"] = strings.Join(names, ",")
}
