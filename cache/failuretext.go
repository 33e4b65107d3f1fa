package cache

import (
	"fmt"
	"maps"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/epcached/epcached/refusal"
)

// itsModel stands in a failure's text where a compiler named the model that it was given. Others may call the same model
// otherwise, and who is told reads the own name there.
const itsModel = "\uFFFC"

// neutral takes out of a failure what is the job's own: the names of the private copy and of the folder that it lies in.
func (j *job) neutral(f *Failure) {
	var pairs []string
	for i := range j.request.models() {
		name := itsModel
		if j.request.models() > 1 {
			name = fmt.Sprintf("model %d of the group", i+1)
		}
		if i < len(j.copies) {
			pairs = append(pairs, j.copies[i].path, name)
		}
		pairs = append(pairs, j.modelPath(i), name, filepath.Join(j.folder, outFolder, j.memberOutput(i)), "what "+name+" became",
			filepath.Base(j.modelPath(i)), name, j.memberOutput(i), "what "+name+" became")
	}
	for _, folder := range []string{filepath.Join(j.folder, outFolder), j.modelFolder(), j.folder} {
		pairs = append(pairs, folder+"/", "")
	}
	plain := strings.NewReplacer(pairs...) // where several fit, the first of them does
	f.Text = plain.Replace(f.Text)
	if words, ok := f.Facts["stderr"]; ok {
		f.Facts["stderr"] = plain.Replace(words)
	}
}

// as is the failure for somebody who calls the model so.
func (f *Failure) as(name string) *Failure {
	out := *f
	out.ModelName = name
	out.Text = strings.ReplaceAll(f.Text, itsModel, name)
	if words := f.Facts["stderr"]; strings.Contains(words, itsModel) {
		out.Facts = maps.Clone(f.Facts)
		out.Facts["stderr"] = strings.ReplaceAll(words, itsModel, name)
	}
	return &out
}

// retold is what a user is told of a job that failed, which may have been begun by another with another name for the model.
func retold(e *refusal.Error, name string) *refusal.Error {
	f, ok := e.Err.(*failed)
	if !ok || name == f.ModelName {
		return e
	}
	head, ok := strings.CutSuffix(e.Text, f.as(f.ModelName).Text)
	if !ok {
		return e
	}
	own, renamed := *e, f.as(name)
	own.Err = &failed{renamed, f.cause}
	own.Text = strings.Replace(head, strconv.Quote(f.ModelName), strconv.Quote(name), 1) + renamed.Text
	own.Facts = maps.Clone(e.Facts)
	maps.Copy(own.Facts, renamed.Facts)
	return &own
}

// plain has a failure of the job speak of the model as who began the job calls it.
func (j *job) plain(e *refusal.Error) {
	f := failureIn(e)
	head, _ := strings.CutSuffix(e.Text, f.Text)
	j.neutral(f)
	f.ModelName = j.request.Name
	told := f.as(f.ModelName)
	e.Text = head + told.Text
	maps.Copy(e.Facts, told.Facts)
}
