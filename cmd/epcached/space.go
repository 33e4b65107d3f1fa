package main

import (
	"context"
	"fmt"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/requests"
	"github.com/epcached/epcached/space"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Pin keeps builds.
func (b *backend) Pin(ctx context.Context, p unixsock.Peer, w *wire.Pin) (*wire.ChangeReply, error) {
	builds, err := b.cache.Pin(ctx, peer(p), w.Entries, w.DryRun)
	if err != nil {
		return nil, err
	}
	return changeReply(&builds, 0, maxReply), nil
}

// Unpin lets them go.
func (b *backend) Unpin(ctx context.Context, p unixsock.Peer, w *wire.Unpin) (*wire.ChangeReply, error) {
	builds, err := b.cache.Unpin(ctx, peer(p), w.Entries, w.DryRun)
	if err != nil {
		return nil, err
	}
	return changeReply(&builds, 0, maxReply), nil
}

// Collect makes room, or plans to.
func (b *backend) Collect(ctx context.Context, p unixsock.Peer, w *wire.Collect, progress func(*wire.Progress)) (*wire.CollectReply, error) {
	if w.ToBytes != nil && w.GetToBytes() < 0 {
		return nil, &unixsock.Error{Class: wire.ErrorClass_BAD_REQUEST, Text: fmt.Sprintf("collect: to_bytes %d is less than nothing", w.GetToBytes())}
	}
	plan, err := b.cache.PlanCollection(ctx, peer(p), cache.Goal{Bytes: w.ToBytes, Progress: howFar(progress)})
	if err == nil && !w.DryRun {
		err = b.cache.Collect(ctx, plan, func(done, total int64) {
			progress(&wire.Progress{Phase: "collecting", DoneBytes: done, TotalBytes: total})
		})
	}
	if err != nil {
		return nil, err
	}
	reply := collectReply(plan)
	for i := range plan.Kept {
		for _, key := range b.cache.BuildKeys(plan.Kept[i].First) {
			reply.Kept[i].Keys = append(reply.Kept[i].Keys, key.String())
		}
	}
	return reply, nil
}

func collectReply(plan *cache.Collection) *wire.CollectReply {
	reply := &wire.CollectReply{FreedBytes: plan.Freed, UsedBytes: plan.Used, BudgetBytes: max(plan.Goal, 0), ShortBytes: plan.Short,
		PlanSeconds: plan.Took.Seconds(), Considered: plan.Considered, Removed: plan.Done(space.Evict), Packed: plan.Done(space.PackBuild),
		Copies: plan.Done(space.DropCopy)}
	for i := range plan.Steps {
		r := &plan.Steps[i]
		if i >= cache.MaxTold {
			reply.More++
			continue
		}
		b := plan.Record(i)
		one := &wire.CollectStep{Build: b.BuildKey.String(), ModelName: clip(b.ModelName), Scope: b.Scope, FreesBytes: r.Frees,
			Reason: clip(r.Reason()), Outcome: clip(r.Outcome), CompileSeconds: b.CompileSeconds, LastUsedMs: milliseconds(r.Last),
			Models: uint32(max(1, len(b.Members))), Action: r.Action.String()}
		if len(b.EPs) > 0 {
			one.Ep = clip(b.EPs[0].Name)
		}
		reply.Steps = append(reply.Steps, one)
	}
	for _, k := range plan.Kept {
		reply.Kept = append(reply.Kept, &wire.Kept{Reason: k.Reason, Builds: k.Builds, Bytes: k.Bytes})
	}
	return reply
}

// clip keeps a name or reason short enough for many of them to fit into a frame.
func clip(text string) string { return valid(text[:min(len(text), 400)]) }

// Usage tells where the space goes.
func (b *backend) Usage(ctx context.Context, p unixsock.Peer, w *wire.Usage, progress func(*wire.Progress)) (*wire.UsageReply, error) {
	u, next, err := b.cache.Usage(ctx, peer(p), w.Entries, w.After, howFar(progress))
	if err != nil {
		return nil, err
	}
	reply := &wire.UsageReply{Next: next, SharedBytes: u.SharedBytes, PackableBytes: u.Packable}
	if w.After == "" { // the first page says it for all: it takes longer than a page
		report, err := b.cache.Space()
		if err != nil {
			return nil, err
		}
		reply.Space = spaceReply(&report)
	}
	for i := range u.Builds {
		one := &u.Builds[i]
		l := &one.Listing
		out := &wire.Build{Build: l.Build.BuildKey.String(), RequestKey: l.Build.RequestKey.String(), ModelDigest: l.Build.ModelDigest.String(),
			ModelName: clip(l.Build.ModelName), Scope: clip(l.Build.Scope), State: l.State.Name, Pinned: l.Pinned, OwnBytes: one.Own, KeptAs: l.KeptAs, Hits: l.Hits,
			LastUsedMs: milliseconds(l.LastUsed), CreatedMs: milliseconds(l.Build.Created), CompileSeconds: l.Build.CompileSeconds}
		if len(l.Build.EPs) > 0 {
			out.Ep = clip(l.Build.EPs[0].Name)
		}
		for range min(len(l.Build.Members), maxUsageMembers) {
			out.Members = append(out.Members, &wire.Member{})
		}
		reply.Builds = append(reply.Builds, &wire.BuildUsage{Build: out, LogicalBytes: one.Logical, OwnBytes: one.Own, SharedBytes: one.Shared, OnceBytes: one.Once, Shapes: clip(requests.Shapes(&one.Build))})
	}
	reply.Users, reply.Eps = usageSums(u.Users), usageSums(u.EPs)
	for _, s := range u.Shared {
		reply.Shared = append(reply.Shared, &wire.SharedBlob{Digest: s.Digest.String(), Size: s.Size, FirstName: clip(s.First), SecondName: clip(s.Second), Bytes: s.Bytes})
	}
	return reply, nil
}

// maxUsageMembers bounds what is said of a group: how many it has.
const maxUsageMembers = 64

// maxSums bounds the users and providers that are told: the largest come first.
const maxSums = 256

func usageSums(list []cache.UsageSum) (out []*wire.UsageSum) {
	for _, s := range list[:min(len(list), maxSums)] {
		out = append(out, &wire.UsageSum{Name: clip(s.Name), Builds: s.Builds, LogicalBytes: s.Logical, OwnBytes: s.Own, QuotaBytes: s.Quota, DiskBytes: s.Disk})
	}
	return out
}

func spaceReply(s *cache.SpaceReport) *wire.Space {
	return &wire.Space{LogicalBytes: s.LogicalBytes, UniqueBytes: s.UniqueBytes, SavedBySharingBytes: s.LogicalBytes - s.UniqueBytes,
		DeadBytes: s.Dead, UnpackedBytes: s.Packed.Copies, BudgetBytes: s.Budget, Entries: s.Entries, Builds: s.Builds, DiskBytes: s.DiskBytes + s.Packed.Recipes + s.Packed.Containers, HeldBytes: s.Held,
		ReservedBytes: s.Reserved, ManifestBytes: s.ManifestBytes, FreeBytes: s.Free, FloorBytes: s.Floor, PinnedBytes: s.Pinned,
		MaxEntries: s.MaxEntries, Evicted: s.Evicted, Unkept: s.Unkept,
		ToLookAt: s.ToLookAt}
}

// checkSpace compares what is accounted with what the file system says.
func (b *backend) checkSpace(ctx context.Context, p unixsock.Peer, progress func(*wire.Progress)) (*wire.CheckReply, error) {
	lines, findings, err := b.cache.CheckSpace(ctx, peer(p), howFar(progress))
	if err != nil {
		return nil, err
	}
	reply := &wire.CheckReply{}
	for _, l := range lines {
		one := &wire.SpaceLine{Name: l.Name, Files: l.Files, DiskBytes: l.Disk}
		if l.Accounted >= 0 {
			one.AccountedBytes = &l.Accounted
		}
		reply.Space = append(reply.Space, one)
	}
	for _, f := range findings[:min(len(findings), maxSpaceFindings)] {
		reply.Findings = append(reply.Findings, &wire.Finding{Kind: f.Kind, Object: f.Object, Detail: clip(f.Detail)})
	}
	return reply, nil
}

// maxSpaceFindings bounds what is named; the lines have the sums.
const maxSpaceFindings = 1000
