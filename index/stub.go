package index

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/epcached/epcached/cas"
)

var errStub = errors.New("not built yet")

// Options of Open.
type Options struct {
	FS  cas.FS       // nil: the operating system's
	Log *slog.Logger // nil: nothing is logged
}
type Index struct{}

func Open(dir string, o Options) (*Index, error)                           { return nil, errStub }
func (x *Index) Publish(ctx context.Context, b Build) error                { return errStub }
func (x *Index) Retract(ctx context.Context, id BuildID, why string) error { return errStub }
func (x *Index) Lookup(k RequestKey, scope string) ([]Build, error)        { return nil, errStub }
func (x *Index) Get(id BuildID) (Build, error)                             { return Build{}, errStub }
func (x *Index) Each(ctx context.Context, fn func(Build) error) error      { return errStub }
func (x *Index) Needs(d cas.Digest) ([]BuildID, error)                     { return nil, errStub }
func (x *Index) SetState(id BuildID, s State) error                        { return errStub }
func (x *Index) StateOf(id BuildID) State                                  { return State{} }
func (x *Index) Memo(key []byte) ([]byte, bool)                            { return nil, false }
func (x *Index) SaveMemo(key, value []byte) error                          { return errStub }
func (x *Index) DropMemo(key []byte)                                       {}
func (x *Index) View(id BuildID) (string, bool)                            { return "", false }
func (x *Index) SaveView(id BuildID, path string) error                    { return errStub }
func (x *Index) DropView(id BuildID)                                       {}
func (x *Index) Use(id BuildID, at time.Time, hits uint64, savedSeconds float64) error {
	return errStub
}
func (x *Index) LastUse(id BuildID) (time.Time, uint64)       { return time.Time{}, 0 }
func (x *Index) Count(name string, delta uint64)              {}
func (x *Index) Counters() map[string]uint64                  { return nil }
func (x *Index) Note(ctx context.Context, e Event) error      { return errStub }
func (x *Index) History(k RequestKey) ([]Event, error)        { return nil, errStub }
func (x *Index) Space() (Space, error)                        { return Space{}, errStub }
func (x *Index) LoadStamp(d cas.Digest) (cas.Stamp, bool)     { return cas.Stamp{}, false }
func (x *Index) SaveStamp(d cas.Digest, s cas.Stamp) error    { return errStub }
func (x *Index) ForgetStamp(d cas.Digest) error               { return errStub }
func (x *Index) Rebuilt() string                              { return "" }
func (x *Index) Check(ctx context.Context) ([]Finding, error) { return nil, errStub }
func (x *Index) Close() error                                 { return errStub }
