package acquire

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// acquireGroup asks for all models as one weight-sharing group. The results stand in the models' order, and all hold the
// same view; an error, and what else is told once of a group, stands with the first.
func (g *Get) acquireGroup(ctx context.Context, c *unixsock.Client, models []string, onMiss wire.OnMiss) []got {
	show := term.NewPhases(g.Print, g.Progress, 1)
	defer show.End()
	return eachOfGroup(g.acquireModels(ctx, c, models, onMiss, show), models)
}

// eachOfGroup gives each model of a group its own result.
func eachOfGroup(all got, models []string) []got {
	results := make([]got, len(models))
	for i, path := range models {
		r := &results[i]
		*r = all
		r.path, r.group, r.member = path, models, i
		if members := all.reply.GetMembers(); i < len(members) {
			r.graph = members[i].GetGraph()
		}
		if all.err == nil && !all.missing && !all.queued() && all.job == nil && len(all.reply.GetMembers()) != len(models) {
			r.err = exit.Failing("get", path, fmt.Errorf("there are %d graphs for %d models", len(all.reply.GetMembers()), len(models)))
		}
	}
	return results
}

// addGroup adds the further models of a group to a request, with their files.
func addGroup(a *wire.Acquire, files []*os.File, models []*modelfile.Model) []*os.File {
	for _, m := range models {
		a.Group = append(a.Group, &wire.Model{Fd: uint32(len(files)), Name: strings.ToValidUTF8(filepath.Base(m.Path), "\uFFFD")})
		files = append(files, m.File)
	}
	return files
}

// told tells whether what there is to say of the result stands with another one.
func (r *got) told() bool { return r.member > 0 }

// name is what the result is about: a model, or all of a group.
func (r *got) name() string {
	if len(r.group) == 0 {
		return term.Printable(r.path)
	}
	return "group of " + strings.Join(term.Printables(r.group), ", ")
}

// groupLines say which graph is whose, and how several are loaded in one process.
func (r *got) groupLines() []string {
	members := r.reply.GetMembers()
	if len(r.group) == 0 || len(members) == 0 || r.missing {
		return nil
	}
	var lines []string
	for i, m := range members {
		path := m.GetName()
		if i < len(r.group) {
			path = r.group[i]
		}
		lines = append(lines, fmt.Sprintf("  %d. %s  %s", i+1, term.Printable(path), term.Printable(m.GetGraph())))
	}
	var options []string
	for key, value := range members[0].GetSessionOptions() {
		options = append(options, term.Printable(key+"="+value))
	}
	return append(lines, "  several in one process: in this order, with "+strings.Join(options, " ")+", and destroyed in reverse")
}

// memberNote says that one model was answered from a group.
func memberNote(a *wire.AcquireReply) string {
	return fmt.Sprintf(", model %d of a group of %d", a.GetMember()+1, len(a.GetMembers()))
}
