package plan

import (
	"context"
	"fmt"
	"strings"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// Own thinks a request through for libraries that are not run here.
func (pl *Planner) Own(ctx context.Context, at *request.Attempt) (*request.Plan, error) {
	if len(at.Runtime.ORTVersion) > request.MaxVersion {
		return nil, apierr.New(apierr.BadRequest, nil, "ONNX Runtime's version %.40q...: not a version",
			at.Runtime.ORTVersion)
	}
	p := &request.Plan{Outside: true, Libraries: make(map[string]cas.Stamp)}
	allowed, _ := pl.Allowed()
	var err error
	if p.Canonical, err = at.Terms().Record(ctx, allowed, identity.StatedDevices); err != nil {
		return nil, err
	}
	p.RequestKey, p.Record = p.Canonical.Key()
	p.RecordJSON = p.Canonical.JSON()
	for i, ep := range at.EPs {
		ref := at.Runtime.Library(ep.Name)
		at.Phase("reading")
		digest, stamp, err := pl.Runtimes.OwnDigest(ctx, at.Peer.UID, ref)
		if err != nil {
			return nil, err
		}
		p.Libraries[ep.Name] = stamp
		info, _ := compilers.EPByName(ep.Name)
		one := compilers.EP{Name: ep.Name, Library: ref.Path,
			Options: info.Resolve(ref.Path, identity.BaseNames(info, ep.Options))}
		facts := index.EPFacts{Name: ep.Name, Library: strings.ToValidUTF8(ref.Path, "?"),
			LibraryDigest: digest}
		for _, d := range p.Canonical.EPs[i].Devices {
			one.Devices = append(one.Devices, compilers.Device(d))
			facts.Devices = append(facts.Devices,
				fmt.Sprintf("%s %04x:%04x", d.Type, d.VendorID, d.DeviceID))
		}
		p.EPs, p.Facts = append(p.EPs, one), append(p.Facts, facts)
	}
	p.BuildKey = identity.OwnBuildKey(p.RequestKey, p.Facts, p.Canonical.Route, at.Runtime.ORTVersion,
		pl.Runtimes.Machine().Now())
	return p, nil
}
