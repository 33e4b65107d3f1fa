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
	default: // it is woken already
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

// MachineEvery is how often the machine is looked at where no event reports a change.
const MachineEvery = time.Minute

// WatchMachine, every MachineEvery, reads drivers again, and looks at runtimes if they changed.
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

// watch has the runtime's files watched. That is the fast path: each answer compares them anyway.
func (s *Set) watch(rt *Runtime, rc *Content) {
	if !s.IsCurrent(rt) {
		return // taken out while it was looked at
	}
	var paths []string
	if rc == nil {
		paths = append(paths, rt.Name)
	} else {
		for _, f := range rc.files {
			paths = append(paths, f.path)
		}
		for _, f := range rc.dirs.list {
			paths = append(paths, f.path) // a library that is added counts
		}
	}
	s.watcher.Set(rt.subject, paths)
}

func (s *Set) watchChanges(ctx context.Context) {
	for e := range s.watcher.Events() {
		if e.Subject == watchedDrivers {
			// it may wait for runtimes, and others change too
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
	if rc != nil && s.isCurrent(rc, 0) {
		rt.state.CompareAndSwap(&stateChanging, &stateReady) // it was touched, and is as it was
		return
	}
	if kind == watch.Changing {
		if rc != nil {
			s.changing(rt)
		}
		return
	}
	s.work.Go(func() {
		// Content has logged an error, and added an event.
		_, _ = s.Content(ctx, rt, func(string) {})
	})
}

// probeRecord is what a runtime was when it was last assessed. It is remembered over restarts, so
// that a change while the daemon was away is noticed.
type probeRecord struct {
	At         time.Time
	ORTVersion string
	EPs        map[string]probeRecordEP
	Changes    []string  // against the assessment before
	Previous   time.Time // when that was; zero: never
}

type probeRecordEP struct {
	Version, LibraryDigest, SDKVersion, Hardware, Compatibility, Driver, Error string
	Devices                                                                    []string
}

func (s *Set) lastProbe(rt *Runtime) (last probeRecord, ok bool) {
	return memo.Recall[probeRecord](s.options.Book, "probed:"+rt.subject)
}

// assess probes a runtime that is new or changed, says what is different, and judges what is stored
// for it. Where its files moved meanwhile nothing is said; it stays due, until it is found at rest.
func (s *Set) assess(ctx context.Context, rt *Runtime) {
	rt.due.Store(true)
	facts := s.Probe(ctx, rt)
	if ctx.Err() != nil || facts.Unsettled {
		return
	}
	if facts.Err != nil {
		if rt.state.Load() == &stateReady { // else Content has logged why it cannot be used
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
		// what changed last stays to be seen
		now.Previous, now.Changes = before.Previous, before.Changes
	} else {
		s.recordProbe(rt, &now, known)
	}
	rc := rt.LastContent()
	if rc == nil || !s.options.Assessed(ctx, rt, rc, before.libraries(), !known ||
		!now.Previous.Equal(before.Previous)) {
		return // the next assessment compares with the same one as this
	}
	rt.due.Store(false)
	// Not saved costs the comparison at the next start, nothing else.
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
