package ort

import (
	"fmt"

	"github.com/epcached/epcached/compilers/workerproto"
)

// Choose picks the devices that any of the selectors matches; each selector must match one.
func Choose(ep workerproto.EP, devices []Device) (chosen []Device, err error) {
	selectors := ep.Devices
	if len(selectors) == 0 {
		selectors = []workerproto.DeviceSelector{{}}
	}
	all := Facts(devices)
	taken := make([]bool, len(devices))
	for _, s := range selectors {
		found, example := 0, uint32(0)
		for i, d := range all {
			if s.Fits(d) {
				taken[i], example = true, d.DeviceID
				found++
			}
		}
		switch {
		case found == 0:
			return nil, fmt.Errorf("%s has no %s; it lists %s", ep.Name, s, s.Listed(all))
		case found > 1 && s.Virtual(): // EPs list every kind of virtual device, and compile for one
			return nil, fmt.Errorf("%d devices of %s fit %s: choose one by its device id, such "+
				"as device=%#x; it lists %s",
				found, ep.Name, s, example, s.Listed(all))
		}
	}
	for i, d := range devices {
		if taken[i] {
			chosen = append(chosen, d)
		}
	}
	return chosen, nil
}

// Facts returns what devices state.
func Facts(devices []Device) []workerproto.DeviceFacts {
	var list []workerproto.DeviceFacts
	for _, d := range devices {
		list = append(list, d.DeviceFacts)
	}
	return list
}
