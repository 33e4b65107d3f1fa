package failure

import (
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// ItsModel stands in a failure's text where a compiler named the model that it was given. Others may call the same model
// otherwise, and who is told reads the own name there.
const ItsModel = "\uFFFC"

// Words are the facts that are a compiler's own words, and may name the model.
var Words = []string{"stderr", "logged"}

// As is the failure for somebody who calls the model so.
func (f *Failure) As(name string) *Failure {
	out := *f
	out.ModelName = name
	out.Text = strings.ReplaceAll(f.Text, ItsModel, name)
	out.Facts = maps.Clone(f.Facts)
	for _, fact := range Words {
		if words := f.Facts[fact]; words != "" {
			out.Facts[fact] = strings.ReplaceAll(words, ItsModel, name)
		}
	}
	return &out
}

// Retold is what a user is told of a job that failed, which may have been begun by another with another name for the model.
func Retold(e *apierr.Error, name string) *apierr.Error {
	f, ok := e.Err.(*failed)
	if !ok || name == f.ModelName {
		return e
	}
	head, ok := strings.CutSuffix(e.Text, f.As(f.ModelName).Text)
	if !ok {
		return e
	}
	own, renamed := *e, f.As(name)
	own.Err = &failed{renamed, f.cause}
	own.Text = strings.Replace(head, strconv.Quote(f.ModelName), strconv.Quote(name), 1) + renamed.Text
	own.Facts = maps.Clone(e.Facts)
	maps.Copy(own.Facts, renamed.Facts)
	return &own
}

// Missing is the error of a request that wants no compile, and would not get one either.
func (f *Failure) Missing(model string) *apierr.Error {
	e := f.FromMemory(model)
	e.Class, e.Text = apierr.NotFound, fmt.Sprintf("no build for model %q, which does not compile (%s): %s", model, f.story(), f.Text)
	return e
}

// FromMemory is the error of a request that is answered from memory.
func (f *Failure) FromMemory(model string) *apierr.Error {
	e := f.Refusal(nil, "model %q does not compile (%s)", model, f.story())
	e.WithFact("request_key", f.RequestKey.String()).WithFact("failed", fmt.Sprint(f.Count)).
		WithFact("last_at", f.Last.UTC().Format(time.RFC3339)).WithFact("retry_at", f.Retry.UTC().Format(time.RFC3339))
	retry := "to have it tried before: epcachectl jobs retry " + f.RequestKey.String()[:16]
	if e.Hint != "" {
		retry = e.Hint + "; " + retry
	}
	return e.WithHint("%s", retry)
}

func (f *Failure) story() string {
	times := "failed once"
	if f.Count > 1 {
		times = fmt.Sprintf("failed %d times", f.Count)
	}
	return fmt.Sprintf("%s, last at %s, not tried again before %s", times, f.Last.UTC().Format(time.RFC3339), f.Retry.UTC().Format(time.RFC3339))
}

// Means tells whether a name means the failure, as one means a build.
func (f *Failure) Means(name string) bool {
	if name == f.ModelName {
		return true
	}
	if len(name) < index.MinPrefix {
		return false
	}
	for _, id := range []string{f.RequestKey.String(), f.BuildKey.String(), f.ModelDigest.String()} {
		if strings.HasPrefix(id, name) {
			return true
		}
	}
	return false
}

// Said is the failure in one line.
func (f *Failure) Said() string {
	return fmt.Sprintf("it does not compile (%s): %s", f.story(), f.Text)
}
