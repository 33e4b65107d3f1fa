package build

import (
	"errors"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/memo"
)

// unkept is the end of what made a build that cannot be stored. That is no reason not to serve what
// is made and checked: the application waits for it.
func (bd *Builder) unkept(b *index.Build, out string, why error) (*jobs.Result, error) {
	text := "not kept: " + textOf(why)
	hint := ""
	if e := (*apierr.Error)(nil); errors.As(why, &e) && e.Class == apierr.NoSpace && e.Hint != "" {
		hint = e.Hint
		text += "; " + hint
	}
	b.Warnings = append(b.Warnings[:len(b.Warnings):len(b.Warnings)], text)
	result, err := bd.keepAlone(b, out)
	if err != nil {
		return nil, err
	}
	result.Why = text
	if request.StoreClass(why) == apierr.NoSpace {
		bd.Store.Index().Counters.Add("unkept", 1)
		bd.Log.Warn("build not kept", "model", b.ModelName, "why", textOf(why))
	} else {
		bd.Log.Error("build not stored", "model", b.ModelName, "error", why)
		bd.Store.LookAround()
	}
	happened := event.Of(b, event.Unkept, "%s", textOf(why))
	happened.Scope = happened.By // only the user that asked for it hears of it
	if err := memo.Save(&bd.Store.Index().Memos, event.UnkeptKey(&happened), hint); err != nil {
		bd.Log.Warn("hint not kept", "model", b.ModelName, "error", err) // the doctor has a general one
	}
	bd.Store.Happened(happened)
	return result, nil
}

func textOf(err error) string {
	var e *apierr.Error
	if errors.As(err, &e) {
		return e.Text
	}
	return err.Error()
}

// keepAlone makes a view that only those who wait for it now will hold; nothing of it is kept.
func (bd *Builder) keepAlone(b *index.Build, out string) (*jobs.Result, error) {
	v, err := bd.Store.Views().Alone(b, out)
	if err != nil {
		return nil, request.StoreError(err, b.ModelName)
	}
	return &jobs.Result{Build: b, Alone: v}, nil
}
