package build

import (
	"fmt"
	"maps"
	"path/filepath"
	"strings"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
)

// neutral takes out of a failure what is the job's own: the names of the private copy and of the
// folder that it lies in.
func (j *Job) neutral(f *failure.Failure) {
	var pairs []string
	out := filepath.Join(j.Folder, outFolder)
	for i := range j.Request.Models() {
		name := failure.ItsModel
		if j.Request.Models() > 1 {
			name = fmt.Sprintf("model %d of the group", i+1)
		}
		if i < len(j.Copies) {
			pairs = append(pairs, j.Copies[i].Path, name, compilers.Spelling(out, j.Copies[i].Path), name)
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

// plain has a failure of the job speak of the model as who began the job calls it.
func (j *Job) plain(e *apierr.Error) {
	f := failure.In(e)
	head, _ := strings.CutSuffix(e.Text, f.Text)
	j.neutral(f)
	f.ModelName = j.Request.Name
	told := f.As(f.ModelName)
	e.Text = head + told.Text
	maps.Copy(e.Facts, told.Facts)
}
