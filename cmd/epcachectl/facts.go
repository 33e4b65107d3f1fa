package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newFacts(a *cli.Call) *cobra.Command {
	return &cobra.Command{
		Use:   "facts",
		Short: "print this machine's devices for export",
		Long: `facts prints, as JSON, those properties of this machine's runtimes and devices that
decide which builds its applications request. Pass the file to export --for on the machine that
compiles.` +
			exit.Help(exit.AskingCodes...),
		Example: "  epcachectl facts > device.json",
		Args:    cli.UsageArgs(0, 0),
		RunE: a.RunWithEntries(func(ctx context.Context, c *unixsock.Client, _ []string) error {
			reply, err := cli.AskWithProgress[wire.ProbeReply](ctx, a, c, &wire.Probe{})
			if err != nil {
				return exit.WithVerb("facts", err)
			}
			runtimes := []any{}
			for _, rt := range reply.GetRuntimes() {
				eps := []any{}
				for _, ep := range rt.GetEps() {
					eps = append(eps, jsonout.Object{"name": ep.GetName(),
						"version":        ep.GetVersion(),
						"library_digest": ep.GetLibraryDigest(),
						"devices":        jsonout.List(ep.GetDevices())})
				}
				runtimes = append(runtimes,
					jsonout.Object{"ort_version": rt.GetOrtVersion(), "eps": eps})
			}
			return a.Print.JSON(jsonout.Object{"version": 1, "runtimes": runtimes})
		}),
	}
}

// target is an execution provider of the target machine, with its devices.
type target struct {
	Name    string `json:"name"`
	Devices []struct {
		Type     string `json:"type"`
		VendorID uint32 `json:"vendor_id"`
		DeviceID uint32 `json:"device_id"`
	} `json:"devices"`
}

// maxFacts bounds a file of facts.
const maxFacts = 1 << 20

func readFacts(file string) ([]target, error) {
	raw, err := portable.ReadFile(file, maxFacts)
	if err != nil {
		return nil, exit.WithOperation("read", file, err)
	}
	var facts struct {
		Version  int `json:"version"`
		Runtimes []struct {
			EPs []target `json:"eps"`
		} `json:"runtimes"`
	}
	err = json.Unmarshal(raw, &facts)
	if err == nil && facts.Version != 1 {
		err = errors.New("not the output of epcachectl facts, or of another version")
	}
	if err != nil {
		return nil, exit.Usage(exit.WithOperation("read", file, err))
	}
	var out []target
	for _, rt := range facts.Runtimes {
		out = append(out, rt.EPs...)
	}
	return out, nil
}

// aheadOnly are options that select the device on a machine without it. On the target machine they
// are not needed.
var aheadOnly = []string{"soc_model", "htp_arch"}

// maxFurther bounds the additional requests that a build answers.
const maxFurther = 8

// requestsFor returns the requests of target machines that correspond to the record: for each
// device, with and without the options in aheadOnly.
func requestsFor(record []byte, targets []target) (out []portable.Request, err error) {
	if len(targets) == 0 {
		return nil, nil
	}
	made, err := identity.Decode(record)
	if err != nil || len(made.EPs) != 1 {
		return nil, err // ambiguous with several execution providers
	}
	seen := map[portable.Hash]bool{portable.RequestOf(record).Key: true}
	for _, t := range targets {
		if t.Name != made.EPs[0].Name {
			continue
		}
		for _, d := range t.Devices {
			for _, short := range []bool{false, true} {
				ep := made.EPs[0]
				ep.Devices = []identity.RecordDevice{{Type: d.Type, VendorID: d.VendorID,
					DeviceID: d.DeviceID}}
				if short {
					ep.Options = maps.Clone(ep.Options)
					for _, name := range aheadOnly {
						delete(ep.Options, name)
					}
				}
				other := made
				other.EPs = []identity.RecordEP{ep}
				_, raw := other.Key()
				r := portable.RequestOf(bytes.Clone(raw))
				if !seen[r.Key] && len(out) < maxFurther {
					seen[r.Key], out = true, append(out, r)
				}
			}
		}
	}
	return out, nil
}
