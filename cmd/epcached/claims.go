package main

import (
	"context"
	"os"
	"time"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Put takes what the holder of a claim compiled. The socket has checked that every file has a descriptor.
func (b *backend) Put(ctx context.Context, p unixsock.Peer, w *wire.Put, fds []*os.File, progress func(*wire.Progress)) (unixsock.Answer, error) {
	start := time.Now()
	put := &cache.Put{Claim: w.Claim, Graphs: int(w.Graphs), CompileSeconds: w.CompileSeconds, ORTVersion: w.OrtVersion}
	for _, f := range w.Files {
		if int64(f.Fd) >= int64(len(fds)) {
			return unixsock.Answer{}, &unixsock.Error{Class: wire.ErrorClass_BAD_REQUEST, Text: "put: a file has no descriptor"}
		}
		put.Files = append(put.Files, cache.PutFile{Name: f.Name, File: fds[f.Fd]})
	}
	for _, m := range w.MadeBy {
		put.MadeBy = append(put.MadeBy, cache.MadeBy{EP: m.Ep, Version: m.Version})
	}
	a, err := b.cache.Put(ctx, peer(p), put, func(pr cache.Progress) { progress(pr.Reply(time.Since(start))) })
	if err != nil {
		return unixsock.Answer{}, err
	}
	reply := a.Reply()
	reply.ElapsedSeconds = time.Since(start).Seconds()
	return unixsock.Answer{Reply: reply, View: a.View}, nil
}

// GiveUp ends a claim without a result.
func (b *backend) GiveUp(ctx context.Context, p unixsock.Peer, w *wire.GiveUp) (*wire.GiveUpReply, error) {
	if err := b.cache.GiveUp(ctx, peer(p), w.Claim, w.Text, w.Code); err != nil {
		return nil, err
	}
	return &wire.GiveUpReply{}, nil
}
