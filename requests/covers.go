package requests

import (
	"maps"
	"slices"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// OfModel tells whether the build is of the model that is asked for.
func (r *Record) OfModel(b *index.Build) bool {
	return b.ModelDigest == r.Model || r.Member && b.MemberOf(r.Model) >= 0
}

// Covers tells whether the build was made for the request: equal in everything but devices, which have to be such as it names.
func (r *Record) Covers(b *index.Build) bool {
	made, err := Decode(b.Record)
	if err != nil || len(made.EPs) != len(r.EPs) {
		return false
	}
	if r.Member {
		i := b.MemberOf(r.Model)
		if i < 0 || !loadsAlone(b, i) {
			return false
		}
		made = made.OfMember(i)
	}
	for i := range r.EPs {
		if !slices.EqualFunc(r.EPs[i].Devices, made.EPs[i].Devices, deviceCovers) {
			return false
		}
	}
	mine := r.OnDevicesOf(b)
	return string(mine.Encode()) == string(made.Encode())
}

// loadsAlone tells whether a member of a group is known to load without the others: it did when the
// group was compiled.
func loadsAlone(b *index.Build, member int) bool {
	return b.Members[member].AloneKey != (index.RequestKey{}) && b.LoadCheck == compilers.Passed
}

// OnDevicesOf is the request with the devices that a build, which has the same execution providers, was made for.
func (r *Record) OnDevicesOf(b *index.Build) Record {
	out := *r
	out.EPs = slices.Clone(r.EPs)
	if made, err := Decode(b.Record); err == nil {
		for i := range out.EPs {
			out.EPs[i].Devices = made.EPs[i].Devices
		}
	}
	return out
}

func deviceCovers(asked, made RecordDevice) bool {
	return (asked.Type == "" || asked.Type == made.Type) && (asked.VendorID == 0 || asked.VendorID == made.VendorID) &&
		(asked.DeviceID == 0 || asked.DeviceID == made.DeviceID) && maps.Equal(asked.Metadata, made.Metadata)
}
