package claims

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock/wire"
)

// Import is a build of another machine. The files stay the caller's to close.
type Import struct {
	Card []byte
	// in the order of the card; none: the caller only asks what the outcome would be
	Files []PutFile
	Keys  []string // PEM texts of keys that the caller trusts
	Store string   // "", "shared" or "user"
	Check bool     // check and load the files, but store nothing
	// Documents are trust documents that came with the build.
	Documents [][]byte

	// Set for a build that the daemon itself fetches for all users: the remote, and the files with
	// the keys that are trusted for it, instead of those of the configuration.
	Remote  string
	Trust   []string
	Name    string           // the model's name in the request
	Request index.RequestKey // the only one that may be answered; zero: all of the statement
	// Dir is a staging directory with Files that no process can write any more. They are not
	// copied, and Reservation covers their space. If Dir is "", Import copies the files and
	// reserves their space.
	Dir         string
	Reservation *store.Reservation
}

// The outcomes of an import.
const (
	HitHere        = "hit here"
	OtherHardware  = "other hardware"
	UnknownLibrary = "unknown library"
	Refused        = "refused"
)

// Imported is the outcome of an import, or the one that it would have.
type Imported struct {
	Outcome, Text string
	Wanted        bool         // the files are needed
	Stored        bool         // now
	Damaged       bool         // of Refused: the files are not those that were signed
	Hint          string       // of Refused: the remedy
	Build         *index.Build // of Stored

	Card       *portable.Card // nil if it cannot be read
	Key        string         // id of the trusted key that signed it
	RequestKey index.RequestKey
	Scope      string
}

// Reply fills the message that clients receive.
func (out *Imported) Reply() *wire.ImportReply {
	r := &wire.ImportReply{Outcome: out.Outcome, Text: wire.Valid(out.Text), Wanted: out.Wanted,
		Stored: out.Stored, Damaged: out.Damaged, Scope: out.Scope, Key: out.Key, Hint: out.Hint}
	if out.Card != nil {
		r.Build, r.Manifest = out.Card.Config.BuildKey.String(), out.Card.Digest.Hex()
	}
	if out.RequestKey != (index.RequestKey{}) {
		r.RequestKey = out.RequestKey.String()
	}
	return r
}

// intake is an import under way. It has a claim, as an adoption does, so that the files are copied,
// checked and loaded by the same code as any artefact that is put.
type intake struct {
	*claim
	card  *portable.Card
	says  *portable.Predicate
	facts []index.EPFacts
	key   index.BuildKey  // of the build here
	keys  []*portable.Key // of the configuration
	out   *Imported
	name  string // of the model, if the card has none
}

// Import checks a build of another machine and stores it, unless the caller only asks. For a build
// that does not suit this machine it returns no error but an outcome with the reason. Either all of
// the build is stored or nothing.
func (cs *Claims) Import(ctx context.Context, p request.Peer, im *Import,
	progress func(request.Progress)) (*Imported, error) {
	t := jobs.NewProgressReporter(progress, cs.Now())
	defer t.End()
	t.Phase("queued")
	scope, files := rights.Shared, im.Trust
	if im.Remote == "" {
		leave, err := cs.Puts.Lock(ctx, cs.Owner(p.UID))
		if err != nil {
			return nil, request.ContextError(ctx, "import")
		}
		defer leave()
		files = cs.limits().Trust
		if scope, err = cs.importScope(p, im.Store); err != nil {
			return nil, err
		}
	}
	out := &Imported{Outcome: Refused, Scope: scope}
	keys, err := portable.ReadKeys(files)
	if err != nil {
		return nil, apierr.New(apierr.Unavailable, err, "import")
	}
	says, err := cs.verify(ctx, im, keys, out)
	if err != nil {
		return out.refuse(err)
	}
	in := &intake{keys: keys, card: out.Card, says: says, out: out, name: im.Name}
	err = apierr.New(apierr.BadRequest, nil,
		"it answers another request, or its key is not trusted for this one")
	// Backwards, because the first request is the one that made the build, and those that were
	// added later are for machines such as this one.
	for _, r := range slices.Backward(im.wanted(says.Requests)) {
		if err = in.plan(ctx, cs, p, scope, r); err == nil {
			break
		}
	}
	switch {
	case err != nil:
		return out.refuse(err)
	case in.present():
		out.Outcome, out.Text = HitHere, "it is stored already"
		return out, nil
	case len(im.Files) == 0:
		out.Outcome, out.Wanted = HitHere, true
		out.Text = "it will be loaded, to see whether it suits"
		return out, nil
	}
	if err := in.storeFiles(ctx, im, t.Phase); err != nil {
		return out.refuse(err)
	}
	return out, nil
}

// wanted returns the requests that the import may be for.
func (im *Import) wanted(all []portable.Request) []portable.Request {
	return slices.DeleteFunc(slices.Clone(all), func(r portable.Request) bool {
		return im.Request != (index.RequestKey{}) && im.Request != index.RequestKey(r.Key)
	})
}

// importScope returns the scope of the imported build. Only administrators and publishers may
// import shared ones.
func (cs *Claims) importScope(p request.Peer, wish string) (string, error) {
	switch {
	case wish == "user" || wish == "" && !cs.Rights.IsPublisher(p):
		return rights.OwnScope(p), nil
	case wish != "" && wish != rights.Shared:
		return "", apierr.New(apierr.BadRequest, nil,
			"import: store %.40q is neither shared nor user", wish)
	case !cs.Rights.IsPublisher(p):
		return "", apierr.New(apierr.NotAllowed, nil,
			"import: builds for all users are for administrators and publishers to import").
			WithHint("import them for yourself, without --store shared")
	}
	return rights.Shared, nil
}

// notHere is the error of a build that does not suit this machine, with the outcome of its import.
type notHere struct {
	outcome string
	err     error
}

func (e *notHere) Error() string { return e.err.Error() }
func (e *notHere) Unwrap() error { return e.err }

// refuse turns a *notHere, or a refusal of the files, into an outcome. It returns other errors
// unchanged.
func (out *Imported) refuse(err error) (*Imported, error) {
	var no *notHere
	var apiErr *apierr.Error
	var distrust *portable.TrustError
	switch {
	case errors.As(err, &no):
		out.Outcome = no.outcome
	case errors.As(err, new(*portable.FormatError)):
		out.Damaged = true
	case errors.As(err, &distrust):
		out.Hint = distrust.Hint
	case errors.As(err, &apiErr) &&
		(apiErr.Class == apierr.BadRequest || apiErr.Class == apierr.CompileFailed ||
			apiErr.Class == apierr.BadModel):
	default:
		return nil, err
	}
	out.Text = err.Error()
	return out, nil
}

// verify reads the card, and accepts it if a key signed it that the configuration or the caller
// trusts. Keys of the caller are accepted because the caller could submit the same build under a
// claim. They do not replace a trust document in effect, which may revoke what they signed.
func (cs *Claims) verify(ctx context.Context, im *Import, configured []*portable.Key,
	out *Imported) (says *portable.Predicate, err error) {
	if out.Card, err = portable.ParseCard("card", im.Card); err != nil {
		return nil, err
	}
	for _, raw := range im.Documents {
		err := cs.trust.Take(ctx, raw, configured)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		// older than a document that was seen before, or its root key is not trusted
		if err != nil {
			cs.Log.Debug("a trust document of a bundle is not used", "error", err)
		}
	}
	trusted := cs.trust.Of(configured)
	says, key, err := trusted.Verify(out.Card, cs.Now())
	if err != nil && len(im.Keys) > 0 {
		trusted.Keys = nil
		for _, text := range im.Keys {
			keys, err := portable.ParseKeys("key", []byte(text))
			if err != nil {
				return nil, apierr.New(apierr.BadRequest, err, "import")
			}
			trusted.Keys = append(trusted.Keys, keys...)
		}
		says, key, err = trusted.Verify(out.Card, cs.Now())
	}
	if err == nil {
		err = cs.trust.Fresh(configured)
	}
	if err != nil {
		return nil, err
	}
	out.Key = key
	return says, nil
}

// plan finds the runtime for the build, and makes the keys of the request that it answers on this
// machine.
func (in *intake) plan(ctx context.Context, cs *Claims, p request.Peer, scope string,
	r portable.Request) error {
	c := in.card.Config
	name := cmp.Or(c.ModelName, in.name, "imported "+c.ModelDigest.String()[:12])
	at, err := workspace.Attempt(p.UID, name, cas.Digest(c.ModelDigest), r.Record)
	if err != nil {
		return apierr.New(apierr.BadRequest, err, "request record")
	}
	for range at.Identity.Group {
		at.Group = append(at.Group, identity.Files{Name: name})
	}
	in.facts = identity.FactsOf(c)
	rt, rc, err := in.runtime(ctx, cs)
	if err != nil {
		return err
	}
	devices, err := cs.LoadChecker.Runtimes.Devices(ctx, runtimes.Asker{}, rc, false)
	if err != nil {
		return err
	}
	for _, ep := range at.EPs {
		if _, err := runtimes.ResolveDevices(devices, ep); err != nil {
			return &notHere{OtherHardware, err}
		}
	}
	if at, err = cs.LoadChecker.Planner.WithPlan(ctx, at.WithRuntime(rt.Name, rc)); err != nil {
		return err
	}
	if at.Plan.Canonical.Model != cas.Digest(c.ModelDigest) ||
		at.Plan.RequestKey != index.RequestKey(r.Key) {
		return apierr.New(apierr.BadRequest, nil,
			"no request here has the key %.16s: this version, or "+
				"the configuration, spells it in another way", r.Key)
	}
	in.key = identity.BuildKey(at.Plan.RequestKey, in.facts, at.Plan.Canonical.Route)
	if bytes.Equal(r.Record, c.Record) && in.key != index.BuildKey(c.BuildKey) {
		return apierr.New(apierr.BadRequest, nil,
			"its build key does not match the request and libraries in its record")
	}
	in.claim = &claim{adopts: true, state: claimPutting, claims: cs, scope: scope, Attempt: at,
		owner: cs.Owner(p.UID), duration: context.Background()}
	in.out.RequestKey = at.Plan.RequestKey
	return in.refuseEarly(ctx)
}

// runtime returns the runtime with the libraries that made the build, otherwise the first one that
// has its execution providers.
func (in *intake) runtime(ctx context.Context, cs *Claims) (rt *runtimes.Runtime,
	rc *runtimes.Content, err error) {
	made := &index.Build{EPs: in.facts}
	for _, one := range cs.LoadChecker.Runtimes.All() {
		content, err := cs.LoadChecker.Runtimes.Content(ctx, one, func(string) {})
		if err != nil || !content.HasEvery(made) {
			continue
		}
		if content.MadeBuild(made) {
			return one, content, nil
		}
		if rc == nil {
			rt, rc = one, content
		}
	}
	if ctx.Err() != nil {
		return nil, nil, ctx.Err()
	}
	if rc == nil {
		return nil, nil, &notHere{UnknownLibrary,
			fmt.Errorf("no runtime here has %s", request.Makers(made))}
	}
	return rt, rc, nil
}

// refuseEarly refuses a build that cannot suit this machine, before its files are read.
func (in *intake) refuseEarly(ctx context.Context) error {
	b := &index.Build{EPs: in.facts, ORTVersion: in.card.Config.ORTVersion, BuildKey: in.key}
	if len(b.EPs) != len(in.Plan.EPs) {
		return apierr.New(apierr.BadRequest, nil,
			"%d execution providers made it, and the request is for %d",
			len(b.EPs), len(in.Plan.EPs))
	}
	for i := range b.EPs {
		if b.EPs[i].Name != in.Plan.EPs[i].Name {
			return apierr.New(apierr.BadRequest, nil, "%s made it, and the request is for %s",
				b.EPs[i].Name, in.Plan.EPs[i].Name)
		}
	}
	j, err := in.claims.LoadChecker.Judges.Glance(ctx,
		in.Plan.JudgeTarget(in.RuntimeName, in.Content).Target(), b)
	if err != nil || j.Verdict != compilers.Unsupported {
		return err
	}
	outcome := UnknownLibrary
	if in.Content.MadeBuild(b) {
		outcome = OtherHardware
	}
	return &notHere{outcome, errors.New(j.Reason)}
}

// present reports whether a build with the key is already stored, in the scope or as a shared one.
func (in *intake) present() bool {
	x := in.claims.Store.Index()
	for _, scope := range []string{in.scope, rights.Shared} {
		builds, err := x.Lookup(in.Plan.RequestKey, scope)
		if err == nil && slices.ContainsFunc(builds, func(b index.Build) bool {
			state := x.Journal.StateOf(b.ID).Name
			return b.BuildKey == in.key && state != index.Withheld && state != index.Damaged
		}) {
			return true
		}
	}
	return false
}

// storeFiles copies, checks, loads and stores the files. Those of im.Dir are not copied.
func (in *intake) storeFiles(ctx context.Context, im *Import, phase func(string)) error {
	cs, c := in.claims, in.card.Config
	names, sizes, err := checkPutFiles(in.claim, im.Files)
	if err != nil {
		return err
	}
	for i, f := range c.Files {
		if len(names) != len(c.Files) || names[i] != f.Name || sizes[i] != f.Size {
			return apierr.New(apierr.BadRequest, nil, "import: the files are not those of the card")
		}
	}
	dir, reservation := im.Dir, im.Reservation
	if dir == "" {
		if reservation, err = cs.reservePut(ctx, in.claim, sizes); err != nil {
			return err
		}
		defer reservation.Release()
		var remove func()
		if dir, remove, err = cs.Store.Stage("import-"); err != nil {
			return request.StoreError(err, in.Name)
		}
		defer remove()
	}
	phase("reading")
	hashed, blobs := make(map[string]cas.Hashed, len(names)), cs.Store.Blobs()
	for i, f := range im.Files {
		to := filepath.Join(dir, filepath.FromSlash(f.Name))
		if im.Dir == "" {
			hashed[f.Name], err = copyPut(ctx, blobs, f, sizes[i], to)
		}
		// not copied, or copied with holes, which is not hashed
		if err == nil && hashed[f.Name] == (cas.Hashed{}) {
			hashed[f.Name], err = blobs.HashAhead(ctx, to)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		} else if err != nil {
			return putError(err, in.Name, f.Name)
		}
		if hashed[f.Name].Digest() != cas.Digest(c.Files[i].Hash) {
			return &portable.FormatError{File: f.Name, Offset: -1,
				Text: "its BLAKE3 is not the signed one"}
		}
	}
	phase("checking")
	b, graphs, err := in.examine(ctx, dir, names)
	if err != nil {
		return err
	}
	if err := in.load(ctx, b, dir, graphs); err != nil {
		return err
	}
	in.out.Outcome, in.out.Text = HitHere, in.describeFit(b)
	if im.Check {
		return nil
	}
	phase("storing")
	hold := blobs.Hold()
	defer cs.Store.Packing().Release(hold)
	what := store.Publication{Build: b, Dir: dir, Hashed: hashed, UID: in.Peer.UID,
		Reservation: reservation, Kind: event.Imported, Counter: "imports"}
	if b.Imported.Remote = im.Remote; im.Remote != "" {
		what.Kind, what.Counter = event.Fetched, "fetches"
	}
	what.Text = request.PutBy(b)
	if err := cs.Store.Publish(ctx, what, hold); err != nil {
		return request.StoreError(err, in.Name)
	}
	in.out.Stored, in.out.Build = true, b
	if why := cs.trust.WhyNot(in.keys, b); why != "" { // revoked since the check
		// best effort: it is withheld in memory, and the failure is logged
		_ = cs.Store.Withhold(b.ID, index.Withheld, why)
		return &portable.TrustError{Text: why}
	}
	return nil
}

// describeFit says in words how the build suits the runtime.
func (in *intake) describeFit(b *index.Build) string {
	switch {
	case in.Plan.MadeExactly(b) && b.LoadCheck == compilers.Passed:
		return "made by equal libraries for this hardware, and it loads"
	case in.Plan.MadeExactly(b):
		return "made by equal libraries for this hardware; whether it loads cannot be checked here"
	case b.LoadCheck != compilers.Passed:
		return "made elsewhere: it is judged again with its model, before it is served"
	}
	return "made elsewhere, and it loads: it is judged again with its model, before it is served"
}

// examine checks the copies in the directory, and writes the build's record.
func (in *intake) examine(ctx context.Context, dir string, names []string) (
	*index.Build, []string, error) {
	c := in.card.Config
	graphs := []string{c.Graph}
	for i, m := range c.Members {
		if i > 0 {
			graphs = append(graphs, m.Graph)
		}
		if len(c.Members) != in.Models() ||
			cas.Digest(m.ModelDigest) != in.Plan.Canonical.ModelOf(i) {
			return nil, nil, refuseImport(errors.New("its members are not those of the request"))
		}
	}
	if len(graphs) != in.Models() {
		return nil, nil, refuseImport(fmt.Errorf("%d graphs for %d models", len(graphs),
			in.Models()))
	}
	result := compilers.Result{Graph: c.Graph, Graphs: graphs, Files: names,
		ORTVersion: c.ORTVersion}
	models, used, err := build.ReadOutput(ctx, dir, result)
	if ctx.Err() != nil {
		return nil, nil, ctx.Err()
	}
	if err != nil {
		return nil, nil, refuseImport(err)
	}
	for _, name := range names {
		if slices.Contains(graphs, name) == used[name] {
			return nil, nil,
				refuseImport(fmt.Errorf("file %q: no graph refers to it, or it is a graph "+
					"and another one refers to it", name))
		}
	}
	for _, m := range models {
		if err := in.checkOptions(m); err != nil {
			return nil, nil, refuseImport(err)
		}
	}
	for i := range in.facts {
		if err := in.statesTheSame(i, models); err != nil {
			return nil, nil, refuseImport(err)
		}
	}
	b := build.NewBuild(in.Attempt, in.scope, models, result, nil, in.claims.Now())
	b.EPs, b.Put, b.BuildKey = in.facts, true, in.key
	b.Imported = index.Imported{Key: in.out.Key, Manifest: in.card.Digest,
		Builder: shownText(in.says.Builder)}
	b.GraphOptimizationLevel, b.LoadCheck = c.Level, compilers.NotCheckable
	if s := in.says.CompileSeconds; s > 0 && s <= maxImportSeconds {
		b.CompileSeconds = s
	}
	for i := range b.Members {
		if !c.Members[i].Alone || !in.says.Answers(portable.Hash(b.Members[i].AloneKey)) {
			b.Members[i].AloneKey = index.RequestKey{}
		}
	}
	return b, graphs, nil
}

// maxImportSeconds bounds the compile time that a card may state, because the collector ranks
// builds by it.
const maxImportSeconds = 24 * 3600

func refuseImport(err error) error {
	return apierr.New(apierr.BadRequest, err,
		"the files are not a build for the request in its record")
}

// statesTheSame compares what an execution provider states in the graphs with the config, because
// look-ups find the build by the config.
func (in *intake) statesTheSame(i int, models []*epmodel.Model) error {
	f := in.facts[i]
	stated, took, err := compilers.ReadStated(f.Name, f.CompatibilityString != "", models...)
	if err != nil {
		return err
	}
	hardware := stated.HardwareArchitecture
	if hardware == "" && compilers.IsMachineClass(f.HardwareArchitecture) {
		hardware = f.HardwareArchitecture
	}
	if took == f.TookNone || took &&
		(stated.SDKVersion != f.SDKVersion || hardware != f.HardwareArchitecture ||
			stated.CompatibilityString != f.CompatibilityString) {
		return fmt.Errorf(
			"%s states SDK %q, hardware %q, compatibility %.80q in the graph, and the config %q, "+
				"%q, %.80q",
			f.Name, stated.SDKVersion, stated.HardwareArchitecture, stated.CompatibilityString,
			f.SDKVersion, f.HardwareArchitecture, f.CompatibilityString)
	}
	return nil
}

// load loads the build as applications will, and also runs it if it may come from another machine.
func (in *intake) load(ctx context.Context, b *index.Build, dir string, graphs []string) error {
	a := in.Plan.JudgeTarget("", in.Content)
	job := a.CheckJobOf(b, &request.Answer{Path: dir, Graph: graphs[0]})
	err := in.claims.loadStaged(ctx, in.claim, b, job)
	if e, is := errors.AsType[*apierr.Error](err); is && e.Class == apierr.CompileFailed &&
		!in.Plan.MadeExactly(b) {
		return &notHere{OtherHardware, err}
	}
	return err
}
