package cache

import (
	"maps"
	"slices"

	"github.com/epcached/epcached/index"
)

// ofModel tells whether the build is of the model that is asked for.
func (c *canonical) ofModel(b *index.Build) bool {
	return b.ModelDigest == c.Model || c.Member && b.MemberOf(c.Model) >= 0
}

// covers tells whether the build was made for the request: equal in everything but devices, which have to be such as it names.
func (c *canonical) covers(b *index.Build) bool {
	made, err := decodeRecord(b.Record)
	if err != nil || len(made.EPs) != len(c.EPs) {
		return false
	}
	if c.Member {
		i := b.MemberOf(c.Model)
		if i < 0 || b.Members[i].AloneKey == (index.RequestKey{}) { // such a group's models do not load alone
			return false
		}
		made = made.ofMember(i)
	}
	for i := range c.EPs {
		if !slices.EqualFunc(c.EPs[i].Devices, made.EPs[i].Devices, deviceCovers) {
			return false
		}
	}
	mine := c.onDevicesOf(b)
	return string(mine.encode()) == string(made.encode())
}

// onDevicesOf is the request with the devices that a build, which has the same execution providers, was made for.
func (c *canonical) onDevicesOf(b *index.Build) canonical {
	out := *c
	out.EPs = slices.Clone(c.EPs)
	if made, err := decodeRecord(b.Record); err == nil {
		for i := range out.EPs {
			out.EPs[i].Devices = made.EPs[i].Devices
		}
	}
	return out
}

func deviceCovers(asked, made canonicalDevice) bool {
	return (asked.Type == "" || asked.Type == made.Type) && (asked.VendorID == 0 || asked.VendorID == made.VendorID) &&
		(asked.DeviceID == 0 || asked.DeviceID == made.DeviceID) && maps.Equal(asked.Metadata, made.Metadata)
}
