package runtimes

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/internal/watch"
)

func (s *Set) noteChanged(rt *Runtime) {
	rt.pending.Store(true)
	select {
	case s.wake <- struct{}{}:
	default: // a wake-up is pending already
	}
}

func (s *Set) assessChanges(ctx context.Context) {
	for {
		for _, rt := range s.All() {
			if ctx.Err() == nil && rt.pending.Swap(false) {
				s.assess(ctx, rt)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		}
	}
}

// MachineEvery is the interval of checks of the machine, for changes that no event reports.
const MachineEvery = time.Minute

// WatchMachine reads the drivers again, and assesses the runtimes if they changed. It is called
// every MachineEvery.
func (s *Set) WatchMachine(ctx context.Context) {
	lines := s.machine.Refresh(ctx)
	for _, line := range lines {
		s.log.Info("machine changed", "what", line)
		s.options.Event(index.Event{Kind: event.Changed, Text: line})
	}
	if len(lines) == 0 {
		return
	}
	for _, rt := range s.All() {
		if rt.LastContent() != nil {
			s.refreshContent(ctx, rt)
		}
	}
}

const watchedDrivers = "drivers"

// watch has the runtime's files watched, so that changes are noticed soon. Each answer compares the
// files as well.
func (s *Set) watch(rt *Runtime, rc *Content) {
	if !s.IsCurrent(rt) {
		return // removed from the set in the meantime
	}
	var paths []string
	if rc == nil {
		paths = append(paths, rt.Name)
	} else {
		for _, f := range rc.files {
			paths = append(paths, f.path)
		}
		for _, f := range rc.dirs.list {
			paths = append(paths, f.path) // the directory, because an added library counts
		}
	}
	s.watcher.Set(rt.subject, paths)
}

func (s *Set) watchChanges(ctx context.Context) {
	for e := range s.watcher.Events() {
		if e.Subject == watchedDrivers {
			// asynchronously, because it may wait for runtimes while others change
			s.work.Go(func() { s.WatchMachine(ctx) })
			continue
		}
		for _, rt := range s.All() {
			if rt.subject == e.Subject {
				s.handleChange(ctx, rt, e.Kind)
			}
		}
	}
}

func (s *Set) handleChange(ctx context.Context, rt *Runtime, kind watch.Kind) {
	rc := rt.LastContent()
	if rc != nil && rc.isCurrent(0) {
		rt.state.CompareAndSwap(&stateChanging, &stateReady) // touched, but unchanged
		return
	}
	if kind == watch.Changing {
		if rc != nil {
			s.changing(rt)
		}
		return
	}
	s.work.Go(func() {
		// The error is ignored because Content has logged it and added an event.
		_, _ = s.Content(ctx, rt, func(string) {})
	})
}

// probeRecord has the state of a runtime at its last assessment. It survives restarts, so that a
// change while the daemon was not running is noticed.
type probeRecord struct {
	At         time.Time
	ORTVersion string
	EPs        map[string]probeRecordEP
	Changes    []string  // since the previous assessment
	Previous   time.Time // time of the previous assessment; zero: none
}

type probeRecordEP struct {
	Version, LibraryDigest, SDKVersion, Hardware, Compatibility, Driver, Error string
	Devices                                                                    []string
}

func (s *Set) lastProbe(rt *Runtime) (last probeRecord, ok bool) {
	return memo.Recall[probeRecord](s.options.Book, "probed:"+rt.subject)
}

// assess probes a runtime that is new or changed, reports the differences, and has the stored
// builds judged for it. If its files change in the meantime it reports nothing, and the runtime
// stays due until its files have not changed for a while.
func (s *Set) assess(ctx context.Context, rt *Runtime) {
	rt.due.Store(true)
	facts := s.Probe(ctx, rt)
	if ctx.Err() != nil || facts.Unsettled {
		return
	}
	if facts.Err != nil {
		if rt.state.Load() == &stateReady { // otherwise Content has logged why it cannot be used
			s.log.Warn("runtime cannot be probed", "runtime", rt.Name, "error", facts.Err)
			s.options.Event(index.Event{Kind: event.Unusable, Runtime: rt.Name,
				Text: facts.Err.Error()})
		}
		return
	}
	now := s.summary(&facts)
	before, known := s.lastProbe(rt)
	if known {
		now.Previous, now.Changes = before.At, before.differences(&now)
	}
	if known && len(now.Changes) == 0 {
		// keep the latest change, so that users still see it
		now.Previous, now.Changes = before.Previous, before.Changes
	} else {
		s.recordProbe(rt, &now, known)
	}
	rc := rt.LastContent()
	if rc == nil || !s.options.Assessed(ctx, rt, rc, before.libraries(), !known ||
		!now.Previous.Equal(before.Previous)) {
		return // so the next assessment compares with the same record
	}
	rt.due.Store(false)
	// Best effort: without the record, a change is not noticed at the next start.
	_ = memo.Save(s.options.Book, "probed:"+rt.subject, now)
}

func (s *Set) recordProbe(rt *Runtime, now *probeRecord, known bool) {
	e := index.Event{Kind: event.Probed, Runtime: rt.Name, Text: "ONNX Runtime " + now.ORTVersion}
	for _, name := range slices.Sorted(maps.Keys(now.EPs)) {
		ep := now.EPs[name]
		e.Text += strings.TrimRight(", "+name+" "+ep.Version, " ")
		if ep.SDKVersion != "" {
			e.Text += " (SDK " + ep.SDKVersion + ")"
		}
		if ep.Error != "" {
			e.Text += ": " + ep.Error
		}
	}
	if known {
		e.Kind, e.Text = event.Changed, strings.Join(now.Changes, "; ")
	}
	s.options.Event(e)
}

func (s *Set) summary(facts *Facts) probeRecord {
	out := probeRecord{At: s.options.Now(), ORTVersion: facts.Spec.ORTVersion,
		EPs: make(map[string]probeRecordEP)}
	for _, ep := range facts.Facts.EPs {
		mark := facts.Marks[ep.Name]
		one := probeRecordEP{Version: mark.EPVersion, LibraryDigest: facts.Digests[ep.Name],
			SDKVersion: mark.SDKVersion,
			Hardware:   mark.Hardware(), Compatibility: mark.CompatibilityString,
			Error: cmp.Or(ep.Error, ErrorText(facts.MarkErrors[ep.Name]))}
		one.Driver, _ = s.machine.Driver(ep.Name, mark)
		for _, d := range ep.Devices {
			one.Devices = append(one.Devices,
				fmt.Sprintf("%s %04x:%04x", d.Type, d.VendorID, d.DeviceID))
		}
		out.EPs[ep.Name] = one
	}
	return out
}

func (p *probeRecord) libraries() map[string]string {
	out := make(map[string]string, len(p.EPs))
	for name, ep := range p.EPs {
		out[name] = ep.LibraryDigest
	}
	return out
}

func (p *probeRecord) differences(now *probeRecord) (lines []string) {
	add := func(what, from, to string) {
		if from != to {
			lines = append(lines, fmt.Sprintf("%s: %s, was %s", what, cmp.Or(to, "none"),
				cmp.Or(from, "none")))
		}
	}
	add("ONNX Runtime", p.ORTVersion, now.ORTVersion)
	names := slices.Compact(
		slices.Sorted(slices.Values(slices.AppendSeq(slices.Collect(maps.Keys(p.EPs)),
			maps.Keys(now.EPs)))))
	for _, name := range names {
		a, hadIt := p.EPs[name]
		b, hasIt := now.EPs[name]
		switch {
		case !hadIt:
			lines = append(lines, name+": new here, version "+cmp.Or(b.Version, "none"))
			continue
		case !hasIt:
			lines = append(lines, name+": not here any more, was version "+cmp.Or(a.Version,
				"none"))
			continue
		}
		add(name+" version", a.Version, b.Version)
		add(name+" SDK", a.SDKVersion, b.SDKVersion)
		add(name+" hardware", a.Hardware, b.Hardware)
		add(name+" driver", a.Driver, b.Driver)
		add(name+" devices", strings.Join(a.Devices, ", "), strings.Join(b.Devices, ", "))
		add(name+" error", a.Error, b.Error)
		if a.LibraryDigest != b.LibraryDigest {
			add(name+" library", fmt.Sprintf("%.12s", a.LibraryDigest),
				fmt.Sprintf("%.12s", b.LibraryDigest))
		} else {
			add(name+" compatibility", a.Compatibility, b.Compatibility)
		}
	}
	return lines
}
