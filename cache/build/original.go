package build

import (
	"context"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
)

// original returns the job's model in its owner's file. It returns nil where a private copy has to
// be made, because no stamp vouches for the file or the compiler needs a copy. Models of several
// files are copied, because execution providers refuse files that do not lie in one folder.
func (j *Job) original(ctx context.Context, spec compilers.Job) *workspace.Original {
	opener, ok := j.bd.Compiler.(compilers.Opener)
	if !ok || j.copied || j.Request.Models() > 1 || j.VerifyOutput != 0 {
		return nil
	}
	stamp, ok := j.bd.Models.Stamp(j.Peer.UID, j.Request.ModelFiles(0), j.Plan.Canonical.Model)
	if !ok {
		return nil
	}
	file, err := workspace.OpenAgain(j.Graph)
	if err != nil {
		return nil // others may not read it; its user sent it open
	}
	o := &workspace.Original{File: file, Stamp: stamp}
	spec.ModelFile = o.File
	m, err := identity.Files{Name: j.Request.Name, Graph: file}.Read(ctx)
	if err != nil || len(m.Locations()) > 0 || !opener.TakesOpen(spec) {
		o.Close()
		return nil // what is wrong with the model its copy tells
	}
	j.UseOriginal(spec.Model, o, m)
	return o
}
