package compiled

import (
	"context"
	"fmt"
	"os"

	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
)

// TooLarge says that a request brings more than may be put, "" if it does not. Its files are not
// read then, because hashing them would delay the application, whose model is passed through.
func TooLarge(most int64, r *request.Request) (why string, err error) {
	if !r.Adopt || len(r.Group) > 0 {
		return "", nil
	}
	var total int64
	for _, f := range r.AllFiles() {
		info, err := f.Stat()
		if err != nil {
			return "", apierr.New(apierr.BadModel, err, "model %q cannot be read", r.Name)
		}
		total += info.Size()
	}
	if total > most {
		why = fmt.Sprintf("its files have %s, and a build that is put may have %s",
			bytesize.Text(total), bytesize.Text(most))
	}
	return why, nil
}

// adopt answers for a compiled model that its user wants kept: with the build that there is of it,
// or with one that is made of the user's own files. These are taken in as a put's are, so a
// stranger's bytes are never served unchecked. Without an answer the model is passed through, and
// why says what kept it from being adopted. why is empty where the request adopts nothing.
func (c *Answerer) adopt(ctx context.Context, at *request.Attempt) (
	a *request.Answer, why string, err error) {
	m, err := at.Request.ModelFiles(0).Read(ctx)
	if err != nil {
		return nil, "", err
	}
	names, err := m.ArtefactFiles()
	if err != nil {
		return nil, err.Error(), nil
	}
	own := *at.Request
	own.Embed, own.External = embedded(m), make(map[string]*os.File, len(names))
	for _, name := range names {
		own.External[name] = at.External[name] // and nothing else that its user sent
	}
	if at, err = c.Planner.Planned(ctx, at.AsAdoption(&own)); err != nil {
		return nil, "", err
	}
	switch at.OnMiss {
	case request.KeyOnly:
		return at.Answer(request.Key), "", nil
	case request.Explain:
		a, err := c.Explainer.Explain(ctx, at)
		if err == nil && a.Explanation.Decision == query.Miss {
			return nil, "", nil
		}
		return a, "", err
	}
	if at.OnMiss != request.Refresh && at.OnMiss != request.Bypass {
		found, err := c.Lookup.Find(ctx, at)
		if found.Answer != nil || err != nil {
			return c.Lookup.Finish(found.Answer, at), "", err
		}
		if found.Stale {
			return nil, found.Why, nil
		}
		c.Index.Counters.Add("misses", 1)
	}
	if at.OnMiss == request.Fail || at.OnMiss == request.Bypass {
		return nil, "", nil
	}
	done, why, err := c.Claims.Adopt(ctx, at)
	if done == nil {
		return nil, why, err
	}
	defer done()
	found, err := c.Lookup.Find(ctx, at) // as the next request will
	if err != nil {
		return nil, "", err
	}
	if found.Answer == nil {
		return nil, "it is kept, and not served here: " + found.Why, nil
	}
	a = c.Lookup.Finish(found.Answer, at)
	a.Outcome, a.Why = request.Adopted, "your compiled model is kept now"
	return a, "", nil
}

// embedded reports which form an artefact has.
func embedded(m *epmodel.Model) bool {
	for i := range m.Contexts {
		if n := &m.Contexts[i]; n.MainContext == 1 {
			return n.EmbedMode == 1
		}
	}
	return false
}
