package dialogue

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// DeviceSelector matches hardware devices of an EP. Empty fields match every device.
type DeviceSelector struct {
	Type     string            // "CPU", "GPU" or "NPU", in any case
	VendorID uint32            // PCI vendor, e.g. 0x8086
	DeviceID uint32            // PCI device
	Metadata map[string]string // each pair must stand in the EP's or the hardware device's metadata
}

// IsVirtual is the metadata key of a device that is not in this machine, with the value "1": an EP
// that knows such devices compiles for them, and their builds do not load here. Only a selector
// that asks for it matches one.
const IsVirtual = "is_virtual"

// Virtual tells whether the device is one that is not in this machine.
func (s DeviceSelector) Virtual() bool { return s.Metadata[IsVirtual] == "1" }

// Fits tells whether the selector matches a device.
func (s DeviceSelector) Fits(d DeviceFacts) bool {
	if s.Type != "" && !strings.EqualFold(s.Type, d.Type) ||
		s.VendorID != 0 && s.VendorID != d.VendorID || s.DeviceID != 0 && s.DeviceID != d.DeviceID {
		return false
	}
	for k, v := range s.Metadata {
		if d.EPMetadata[k] != v && d.DeviceMetadata[k] != v {
			return false
		}
	}
	return true
}

// String describes the selector: "NPU (vendor 0x8086, is_virtual=1)".
func (s DeviceSelector) String() string {
	var more []string
	if s.VendorID != 0 {
		more = append(more, fmt.Sprintf("vendor %#x", s.VendorID))
	}
	if s.DeviceID != 0 {
		more = append(more, fmt.Sprintf("device %#x", s.DeviceID))
	}
	for _, k := range slices.Sorted(maps.Keys(s.Metadata)) {
		more = append(more, k+"="+s.Metadata[k])
	}
	return described(cmp.Or(strings.ToUpper(s.Type), "device"), more)
}

// Listed describes devices by all that the selector may tell them apart by.
func (s DeviceSelector) Listed(devices []DeviceFacts) string {
	if len(devices) == 0 {
		return "none"
	}
	var list []string
	for _, d := range devices {
		more := []string{fmt.Sprintf("vendor %#x", d.VendorID), fmt.Sprintf("device %#x", d.DeviceID)}
		if d.Vendor != "" {
			more[0] += " " + d.Vendor
		}
		for _, k := range slices.Sorted(maps.Keys(s.Metadata)) {
			if v := cmp.Or(d.EPMetadata[k], d.DeviceMetadata[k]); v != "" {
				more = append(more, k+"="+v)
			} else {
				more = append(more, "no "+k)
			}
		}
		list = append(list, described(d.Type, more))
	}
	return strings.Join(list, "; ")
}

func described(kind string, more []string) string {
	if len(more) == 0 {
		return kind
	}
	return kind + " (" + strings.Join(more, ", ") + ")"
}
