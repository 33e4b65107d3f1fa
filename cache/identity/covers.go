package identity

import (
	"maps"
	"slices"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// OnDevicesOf returns the request with the devices that a build was made for, where its execution
// providers are the build's and its devices may be those, and whether it finds the build then: by the
// build's key, or for a member of a group that loads alone by the member's.
func (r *Record) OnDevicesOf(b *index.Build) (on Record, found bool) {
	made, err := Decode(b.Record)
	if err != nil || len(made.EPs) != len(r.EPs) {
		return *r, false
	}
	on = *r
	on.EPs = slices.Clone(r.EPs)
	for i := range on.EPs {
		if !slices.EqualFunc(r.EPs[i].Devices, made.EPs[i].Devices, deviceCovers) {
			return *r, false
		}
		on.EPs[i].Devices = made.EPs[i].Devices
	}
	key, _ := on.Key()
	i := b.MemberOf(r.Model)
	if !r.Member || i < 0 {
		return on, key == b.RequestKey
	}
	return on, key == b.Members[i].AloneKey && b.LoadCheck == compilers.Passed
}

func deviceCovers(asked, made RecordDevice) bool {
	return (asked.Type == "" || asked.Type == made.Type) && (asked.VendorID == 0 || asked.VendorID == made.VendorID) &&
		(asked.DeviceID == 0 || asked.DeviceID == made.DeviceID) && maps.Equal(asked.Metadata, made.Metadata)
}
