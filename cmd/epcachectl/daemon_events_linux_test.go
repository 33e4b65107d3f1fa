package main

import (
	"context"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (b *standIn) Report(context.Context, unixsock.Peer, *wire.Report) (*wire.ReportReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &wire.ReportReply{Decision: "sound"}, b.err
}

func (b *standIn) Why(context.Context, unixsock.Peer, *wire.Why) (*wire.Explanation, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &wire.Explanation{Decision: "current"}, b.err
}

func (b *standIn) Events(context.Context, unixsock.Peer, *wire.Events) (*wire.EventsReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &wire.EventsReply{}, b.err
}

func (b *standIn) Doctor(context.Context, unixsock.Peer, *wire.Doctor) (*wire.DoctorReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &wire.DoctorReply{}, b.err
}

func (b *standIn) Subscribe(ctx context.Context, _ unixsock.Peer, _ *wire.Subscribe, _ func(*wire.Event)) error {
	<-ctx.Done()
	return nil
}
